"""A server on this machine, and a hub of it as huggingface_hub sees one."""

import hashlib
import http.server
import json
import os
import re
import signal
import threading
import unittest.mock
import urllib.parse

# PyTorch's threads would spin, on the cores that NumPy's need
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "2")  # else as many as there are free cores: other bits
# under nohup it is ignored, and so it would be by programs under test
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import pytest



class Server(http.server.ThreadingHTTPServer):
    """Within its `with` block. pages: path -> (status, headers, body); `seen` has the (method,
    path, first byte) of each request; of the next files of a hub, `cuts` break after `after`
    bytes."""

    def __init__(self, pages):
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.pages = pages
        self.seen = []
        self.cuts = 0
        self.after = 0

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Answer(http.server.BaseHTTPRequestHandler):
    log_message = staticmethod(unittest.mock.Mock())

    def answer(self):
        path = urllib.parse.unquote(self.path.split("?")[0])
        server = self.server
        most = None
        if self.command == "POST":
            self.rfile.read(int(self.headers["Content-Length"]))
        status, headers, body = server.pages.get(path, (404, {}, b"nothing here"))
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if first := int(begin[1]) if begin else 0:
            status = 206
            headers = {**headers, "Content-Range": f"bytes {first}-{len(body) - 1}/{len(body)}"}
        server.seen.append((self.command, path, first))
        self.send_response(status)
        for name, value in {"Content-Length": len(body) - first, **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            if server.cuts and "/resolve/" in path:
                server.cuts = server.cuts - 1
                most = server.after
            self.wfile.write(body[first:][:most])

    do_GET = do_HEAD = do_POST = answer


def hub_pages(repository, files, hashes=None):
    """What a hub answers about a repository with these files, {name: bytes}. hashes: {name:
    SHA-256} that are wrong."""
    commit = "0123456789abcdef" * 2 + "01234567"
    pages = {}
    hashes = ({name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
              | (hashes or {}))
    api = (f"/api/{repository}" if repository.startswith("datasets/")
           else f"/api/models/{repository}")
    readme = {"type": "file", "path": "README.md", "size": 3, "oid": "0"}

    def add(path, value):
        pages[path] = 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

    for revision in ("main", commit):
        add(f"{api}/revision/{revision}", {"id": repository, "sha": commit})
        for folder in set(map(os.path.dirname, files)):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0",
                     "lfs": {"oid": hashes[name], "size": len(data), "pointerSize": 134}}
                    for name, data in files.items() if os.path.dirname(name) == folder]
            add(f"{api}/tree/{revision}/{folder}".rstrip("/"), [*tree, readme])
        for name, data in files.items():
            headers = {"ETag": f'"{hashes[name]}"', "X-Repo-Commit": commit,
                       "Accept-Ranges": "bytes"}
            pages[f"/{repository}/resolve/{revision}/{name}"] = 200, headers, data
    return pages


@pytest.fixture
def use_hub(monkeypatch):
    """use_hub(url, home): huggingface_hub asks this server, and keeps its files in `home`; url
    None: it is offline."""
    def use(url, home):
        import huggingface_hub.constants

        values = dict(ENDPOINT=url,
                      HUGGINGFACE_CO_URL_TEMPLATE=f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
                      HF_HUB_CACHE=str(home), HF_HUB_OFFLINE=url is None, HF_HUB_DISABLE_XET=True,
                      HF_HUB_DISABLE_TELEMETRY=True)
        for name, value in values.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)

    return use
