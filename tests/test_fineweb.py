"""prepro_fineweb.py: shards from a hub on this machine that fails half-way, and from parquet that the tests make."""

import functools
import hashlib
import http.server
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.parse
from types import SimpleNamespace

import numpy as np
import pytest

import prepro
import prepro_fineweb
import train_gpt2
from conftest import ROOT, assert_one_line_error, hub, run_program
from llmc.dataloader import open_tokens, write_tokens
from llmc.files import locked
from llmc.tokenizer import read_tokenizer
from prepro_fineweb import READY_MADE

NAMES = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 60))]
DAMAGED = "the download is damaged"


# ----------------------------------------------------------------------------------------------------------------------
# a hub


class Hub(http.server.ThreadingHTTPServer):
    """What huggingface_hub asks for: a dataset's files, their sizes and SHA-256, and parts of them. `cuts` connections
    break after `after` bytes of a file; `hashes` are those that it says, `seen` the (path, first byte) it was asked."""

    def __init__(self, repository, files):
        self.files, self.cuts, self.after, self.seen = files, 0, 0, []
        self.hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        tree, file = f"/api/datasets/{repository}/tree/main", f"/datasets/{repository}/resolve/main/"
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                path = urllib.parse.unquote(self.path.split("?")[0])
                name = path.removeprefix(file)
                if path == tree or path.startswith(f"{tree}/"):
                    folder = path.removeprefix(tree).lstrip("/")
                    self.answer(200, {"Content-Type": "application/json"}, json.dumps(hub.tree(folder)).encode())
                elif name in hub.files:
                    self.send_file(name)
                else:
                    self.answer(404, {}, b"nothing here")

            do_HEAD = do_GET

            def send_file(self, name):
                data, first = hub.files[name], 0
                headers = {"ETag": f'"{hub.hashes[name]}"', "X-Repo-Commit": "0123456789abcdef" * 2 + "01234567",
                           "Accept-Ranges": "bytes"}
                if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
                    first = int(found[1])
                    headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
                if self.command == "GET":
                    hub.seen.append((name, first))
                    if hub.cuts:
                        hub.cuts -= 1
                        return self.answer(200 + 6 * (first > 0), headers, data[first:], hub.after)
                self.answer(200 + 6 * (first > 0), headers, data[first:])

            def answer(self, status, headers, body, most=None):
                self.send_response(status)
                for key, value in {"Content-Length": len(body), **headers}.items():
                    self.send_header(key, str(value))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body[:most])
                    self.close_connection = most is not None

            def log_message(self, *args):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def tree(self, folder):
        """As the hub lists a folder, with what is no file, and no LFS file, too."""
        files = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40,
                  "lfs": {"oid": self.hashes[name], "size": len(data), "pointerSize": 134}}
                 for name, data in self.files.items() if os.path.dirname(name) == folder]
        others = [{"type": "file", "path": "README.md", "size": 3, "oid": "0" * 40},
                  {"type": "directory", "path": "sample", "oid": "0" * 40}]
        return files + others

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args):
        self.shutdown()
        self.server_close()


def make_shards(prefix, counts, directory):
    """{name: bytes} of token shards of random tokens."""
    files = {}
    for i, count in enumerate(counts):
        tokens = np.random.default_rng(i).integers(0, 50257, count)
        write_tokens(directory / "shard", [tokens], count, "uint16")
        files[f"{prefix}_{'train' if i else 'val'}_{i:06d}.bin"] = (directory / "shard").read_bytes()
    os.unlink(directory / "shard")
    return files


@pytest.fixture
def fetch(tmp_path, gpt2_vocabulary, monkeypatch):
    """fetch(hub, flag, ...): the program, in a process of its own, as huggingface_hub reads its settings when it is
    imported; it retries without waiting."""
    code = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
import huggingface_hub.file_download as download
import prepro_fineweb
download.time.sleep = lambda seconds: None
download.constants.DOWNLOAD_CHUNK_SIZE = 1 << 16
prepro_fineweb.shutil.disk_usage = lambda path: prepro_fineweb.shutil._ntuple_diskusage(0, 0, FREE)
if __name__ == "__main__":
    prepro_fineweb.run_main(prepro_fineweb.main)
"""
    monkeypatch.chdir(tmp_path)

    def run(server, *flags, check=True, free=10**12):
        (tmp_path / "program.py").write_text(code.replace("FREE", str(free)))
        done = run_program(tmp_path / "program.py", *flags, check=check, **gpt2_vocabulary,
                           **hub(server if isinstance(server, str) else server.url, tmp_path / "home"))
        last = (done.stderr.splitlines() or [""])[-1]  # after the progress bars
        done.last = SimpleNamespace(returncode=done.returncode, stdout="", stderr=last)
        return done

    return run


def test_ready_made_shards(tmp_path, fetch):
    """The validation shard and the first N others; more of them later; what is there and whole is kept."""
    files = make_shards("fineweb", [3000, 5000, 4000, 70], tmp_path)
    with Hub("kjj0/fineweb10B-gpt2", files) as server:
        done = fetch(server, "--shards", 1)
        assert done.stdout == (
            "kjj0/fineweb10B-gpt2: 2 shards, 2 to download, about 0.0 GB to come; data/fineweb10B has room for 1000.0"
            " GB\n"
            "Saved 3000 tokens to data/fineweb10B/fineweb_val_000000.bin\n"
            "Saved 5000 tokens to data/fineweb10B/fineweb_train_000001.bin\n")
        assert [name for name, _ in server.seen] == NAMES[:2]
        folder = tmp_path / "data" / "fineweb10B"
        (folder / NAMES[1]).write_bytes(b"cut short")
        done = fetch(server)
        assert "4 shards, 3 to download" in done.stdout and [name for name, _ in server.seen[2:]] == NAMES[1:4]
        assert sorted(os.listdir(folder)) == sorted([*NAMES[:4], "fineweb_tokenizer.bin"])
        assert {name: (folder / name).read_bytes() for name in files} == files
        assert len(read_tokenizer(folder / "fineweb_tokenizer.bin").tokens) == 50257
        assert "4 shards, 0 to download" in fetch(server).stdout and len(server.seen) == 5


@pytest.mark.parametrize("flags, prefix, directory, name", (
    (("--edu",), "finewebedu", "data/edu_fineweb10B", "edu_fineweb"),
    (("--edu", "--size", "100B"), "edu_fineweb", "data/edu_fineweb100B", "edu_fineweb"),
    (("--size", "100B", "--output", "here"), "fineweb", "here", "fineweb"),
))  # fmt: skip
def test_the_other_sets(tmp_path, fetch, flags, prefix, directory, name):
    """Whatever shards are called there, they have llm.c's names here."""
    files = make_shards(prefix, [100, 200], tmp_path)
    with Hub(READY_MADE["--edu" in flags, "100B" if "--size" in flags else "10B"], files) as server:
        fetch(server, *flags)
    expected = dict(zip((f"{name}_val_000000.bin", f"{name}_train_000001.bin"), files.values()))
    assert {path.name: path.read_bytes() for path in (tmp_path / directory).glob("*_0*")} == expected


def test_a_connection_that_breaks_goes_on_where_it_was(tmp_path, fetch):
    files = make_shards("fineweb", [100, 400000], tmp_path)
    with Hub("kjj0/fineweb10B-gpt2", files) as server:
        fetch(server, "--shards", 1)
        shutil.rmtree("data")
        server.seen, server.cuts, server.after = [], 3, 300000
        fetch(server)
        firsts = [first for name, first in server.seen if name == NAMES[1]]
        assert firsts == [0, 4 << 16, 8 << 16], "not from the start again"
    assert (tmp_path / "data" / "fineweb10B" / NAMES[1]).read_bytes() == files[NAMES[1]]


def test_a_server_that_stays_away_leaves_whole_shards(tmp_path, fetch):
    files = make_shards("fineweb", [100, 200, 300], tmp_path)
    with Hub("kjj0/fineweb10B-gpt2", files) as server:
        fetch(server, "--shards", 1)
        server.cuts = 10**6
        done = fetch(server, check=False)
        assert_one_line_error(done.last, NAMES[2], "the download failed", "the same command goes on")
        folder = tmp_path / "data" / "fineweb10B"
        assert {path.name: path.read_bytes() for path in folder.glob("*_0*")} == dict(list(files.items())[:2])
        server.cuts = 0
        assert "3 shards, 1 to download" in fetch(server).stdout and (folder / NAMES[2]).exists()
        assert not (folder / ".download").exists()
        url = server.url
    done = fetch(url, check=False)
    assert_one_line_error(done.last, "kjj0/fineweb10B-gpt2: cannot be listed", "refused")


def test_what_is_not_what_the_hub_says_is_refused(tmp_path, fetch):
    files = make_shards("fineweb", [100, 200], tmp_path)
    folder = tmp_path / "data" / "fineweb10B"
    with Hub("kjj0/fineweb10B-gpt2", files) as server:
        server.hashes[NAMES[0]] = "0" * 64
        assert_one_line_error(fetch(server, check=False).last, NAMES[0], "SHA-256", "expected 0000", DAMAGED)
        assert not list(folder.glob("*_0*")) and not list(folder.glob(".download/*.bin"))
    for data, what in ((files[NAMES[0]][:-2], "cut short"), (np.array([50257], "<i4").tobytes(), "token id 50257")):
        with Hub("kjj0/fineweb10B-gpt2", {**files, NAMES[0]: data}) as server:
            assert_one_line_error(fetch(server, check=False).last, NAMES[0], what)
        assert not list(folder.glob("*_0*"))
    with Hub("kjj0/fineweb10B-gpt2", {"fineweb_000000.npy": b"another kind"}) as server:
        assert_one_line_error(fetch(server, check=False).last, "holds no shards", "--parquet")
    with Hub("somebody/else", files) as server:
        assert_one_line_error(fetch(server, check=False).last, "kjj0/fineweb10B-gpt2: cannot be listed", "404")


def test_a_disk_without_room(tmp_path, fetch):
    files = make_shards("fineweb", [100, 200], tmp_path)
    with Hub("kjj0/fineweb10B-gpt2", files) as server:
        done = fetch(server, check=False, free=1000)
        assert_one_line_error(done.last, "data/fineweb10B", "0.0 GB free", "--shards N", "--output")
        assert not server.seen


# ----------------------------------------------------------------------------------------------------------------------
# parquet

TEXTS = [f"Document {i}. " + "To be, or not to be: that is the question. " * (i * 7919 % 50) for i in range(900)]
TEXTS[5], TEXTS[300] = "", "<|endoftext|> é 日本 \U0001f600"


@pytest.fixture(scope="module")
def arrow():
    pytest.importorskip("pyarrow")
    from pyarrow import parquet, table

    def write(path, texts, rows=128, **columns):
        parquet.write_table(table({"id": range(len(texts)), "text": texts, **columns}), path, row_group_size=rows)

    return write


@pytest.fixture
def folder(tmp_path, arrow, vocabulary_here, monkeypatch):
    """A directory with TEXTS in three files, which is the current one."""
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        arrow(f"{i}.parquet", TEXTS[300 * i : 300 * (i + 1)])
    return tmp_path


def expected_tokens():
    encoding = prepro.load_encoding("gpt2")
    return [id for text in TEXTS for id in (50256, *encoding.encode_ordinary(text))]


def shards_of(directory, name="fineweb"):
    paths = sorted(directory.glob(f"{name}_*_0*.bin"), key=lambda path: path.name[-10:])
    assert [path.name for path in paths] == [entry.replace("fineweb", name) for entry in NAMES[: len(paths)]]
    return [open_tokens(path, 50257).tolist() for path in paths]


def joined(shards):
    return [id for shard in shards for id in shard]


@pytest.fixture
def tokenize(folder, run_here):
    """tokenize(flag, ...): of all three files, in this process and one worker at most."""
    return functools.partial(run_here, prepro_fineweb, "--input", "*.parquet", "--output", "out", "--processes", 1,
                             "--shard_tokens", 50000)


def test_parquet(tmp_path, tokenize, run_here):
    """Shards of that many tokens, the last one shorter; the trainer reads them."""
    done = tokenize()
    shards = shards_of(tmp_path / "out")
    assert joined(shards) == expected_tokens() and len(shards) > 3
    assert {len(shard) for shard in shards[:-1]} == {50000} and 0 < len(shards[-1]) <= 50000
    assert done.stdout.startswith("3 parquet files of 0.0 GB, 0 shards of them made, about 0.0 GB to come; out has ")
    assert f"Saved 50000 tokens to out/{NAMES[1]}" in done.stdout
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*_0*")}
    assert f"{len(shards)} shards of them made" in tokenize().stdout
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*_0*")}


def test_text_that_ends_with_a_shard(tmp_path, folder, arrow, tokenize, monkeypatch):
    """It is known to be used up, as each of its files is: nothing is opened again."""
    for name in ("x0.parquet", "x1.parquet"):
        arrow(name, [""] * 40)  # as many tokens
    flags = ("--input", "x?.parquet", "--shard_tokens", 20)
    tokenize(*flags)
    assert [len(shard) for shard in shards_of(tmp_path / "out")] == [20] * 4
    notes = json.loads((tmp_path / "out" / "parquet.json").read_text())
    assert notes["shards"] == [[20, 0, 20, 0], [20, 1, 0, 0], [20, 1, 20, 0], [20, 2, 0, 0]]
    monkeypatch.setattr(prepro_fineweb, "shards_from", None)
    assert "4 shards of them made, about 0.0 GB to come" in tokenize(*flags).stdout


def test_text_that_is_too_short_to_train_on(tmp_path, folder, arrow, tokenize):
    """Nothing is written, so that the same command with smaller shards goes on."""
    import pyarrow

    arrow("none.parquet", pyarrow.array([], pyarrow.string()))
    arrow("short.parquet", [""] * 40)
    for name, size, tokens in (("none", 40, 0), ("short", 100, 40), ("short", 40, 40)):
        done = tokenize("--input", f"{name}.parquet", "--shard_tokens", size, check=False)
        done.stderr = done.stderr.splitlines()[-1]
        assert_one_line_error(done, f"{tokens} tokens of text, expected more than the {size} ", "--shard_tokens")
        assert not os.listdir(tmp_path / "out")
    tokenize("--input", "short.parquet", "--shard_tokens", 39)
    assert [len(shard) for shard in shards_of(tmp_path / "out")] == [39, 1]


def test_shards_feed_the_trainer(tmp_path, tokenize, run_here, monkeypatch):
    monkeypatch.setitem(train_gpt2.SIZES, "d2", (1, 1, 8))
    tokenize("--edu", "--shards", 2)
    done = run_here(train_gpt2, "-e", "d2", "-i", "out/edu_fineweb_train_*.bin", "-b", 1, "-t", 8, "-x", 1, "-m", 1,
                    "-s", 0)
    assert ": 12498 batches of 1 x 8 tokens, " in done.stdout and " V=50257, " in done.stdout


@pytest.mark.parametrize("processes", (1, 2))
def test_pieces_and_processes_change_nothing(tmp_path, tokenize, monkeypatch, processes):
    monkeypatch.setattr(prepro_fineweb, "DOCUMENTS", 7)
    monkeypatch.setattr(prepro_fineweb, "in_processes", lambda function, jobs, _: prepro.in_processes(
        function, jobs, processes))
    tokenize("--shard_tokens", 33333)
    assert joined(shards_of(tmp_path / "out")) == expected_tokens()


@pytest.mark.parametrize("size", (20000, 30001))
def test_it_goes_on_after_an_interruption(tmp_path, tokenize, monkeypatch, size):
    """At each shard in turn: shards that are there are neither made again nor lost, and no text is read again that is
    in them."""
    tokenized, real = [], prepro_fineweb.tokenize
    monkeypatch.setattr(prepro_fineweb, "DOCUMENTS", 16)
    monkeypatch.setattr(prepro_fineweb, "tokenize", lambda job: tokenized.append(len(job[2])) or real(job))
    out = tmp_path / "out"
    for shards in range(1, 30):
        before = {path.name: path.stat().st_mtime_ns for path in out.glob("*_0*")}
        done = tokenize("--shards", shards, "--shard_tokens", size)
        assert all(before[name] == (out / name).stat().st_mtime_ns for name in before)
        if "Saved" not in done.stdout:
            break
    assert joined(shards_of(out)) == expected_tokens() and 4 < shards < 29
    assert sum(tokenized) < 900 + 2 * shards * 16
    (out / NAMES[2]).write_bytes(b"cut short")
    tokenize("--shard_tokens", size)
    assert joined(shards_of(out)) == expected_tokens()


def test_killed_at_any_moment_it_goes_on(tmp_path, folder, gpt2_vocabulary):
    """With no time to clean up: once a shard is said to be saved, it is."""
    command = [sys.executable, str(ROOT / "prepro_fineweb.py"), "--input", "*.parquet", "--output", "out",
               "--shard_tokens", "9000", "--processes", "1"]
    ended = []
    for lines in (1, 2, 3, 4, None):  # of what it prints
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                              env={**os.environ, **gpt2_vocabulary}) as running:
            saved = [line.split()[-1] for line in itertools.islice(running.stdout, lines) if line.startswith("Saved")]
            if lines:
                running.kill()
        ended.append(running.returncode)
        assert all(os.path.exists(path) for path in saved)
    assert joined(shards_of(tmp_path / "out")) == expected_tokens()
    assert ended[0] == -signal.SIGKILL and ended[-1] == 0, "the others may have been done by then"


def test_killed_before_a_shard_is_noted_it_goes_on(tmp_path, tokenize, monkeypatch):
    def interrupted(*arguments):
        write_tokens(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepro_fineweb, "write_tokens", interrupted)
        assert tokenize(check=False).returncode == 130 and len(shards_of(tmp_path / "out")) == 1
    tokenize()
    assert joined(shards_of(tmp_path / "out")) == expected_tokens()


def test_a_disk_that_is_full_half_way(tmp_path, tokenize, monkeypatch):
    """The shards before stay, nothing of the next; then it goes on."""
    def fail(path, *arguments):
        if "train_000002" in path:
            raise prepro_fineweb.UserError(f"{path}: cannot be written (No space left on device)")
        write_tokens(path, *arguments)

    monkeypatch.setattr(prepro_fineweb, "write_tokens", fail)
    done = tokenize(check=False)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("(No space left on device)")
    assert len(shards_of(tmp_path / "out")) == 2
    monkeypatch.setattr(prepro_fineweb, "write_tokens", write_tokens)
    assert "2 shards of them made" in tokenize().stdout
    assert joined(shards_of(tmp_path / "out")) == expected_tokens()
    monkeypatch.setattr(prepro_fineweb.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    assert_one_line_error(tokenize("--output", "other", check=False), "other", "0.0 GB free", "--output")


def test_parquet_from_the_hub(tmp_path, folder, fetch):
    """A file at a time, each removed once its text is in shards; restarted where the server failed."""
    files = {f"sample/10BT/{i:03}.parquet": (folder / f"{i}.parquet").read_bytes() for i in range(3)}
    flags = ("--parquet", "--shard_tokens", 20000, "--processes", 1)
    with Hub("HuggingFaceFW/fineweb", files) as server:
        fetch(server, *flags, "--shards", 1)
        assert [name for name, _ in server.seen] == ["sample/10BT/000.parquet"]
        server.cuts = 10**6
        done = fetch(server, *flags, check=False)
        assert_one_line_error(done.last, "000.parquet", "the download failed", "the same command goes on")
        server.cuts = 0
        done = fetch(server, *flags)
        assert "3 parquet files of 0.0 GB, 2 shards of them made" in done.stdout
    out = tmp_path / "data" / "fineweb10B"
    assert joined(shards_of(out)) == expected_tokens() and not (out / ".download").exists()


def test_a_file_of_the_hub_is_removed_once_it_is_in_shards(tmp_path, folder, run_here, monkeypatch):
    """So there is room for the shards and the largest file, which is asked for."""
    asked, sizes, sources = [], [os.path.getsize(f"{i}.parquet") for i in range(3)], prepro_fineweb.hub_sources
    files = [SimpleNamespace(path=f"{i}.parquet", size=size) for i, size in enumerate(sizes)]
    for name, value in dict(list_files=lambda *_: files, fetch=lambda repository, file, directory: file.path,
                            hub_sources=lambda repository, folder, directory: sources(repository, folder, "."),
                            check_room=lambda what, directory, needed: asked.append(needed)).items():
        monkeypatch.setattr(prepro_fineweb, name, value)
    run_here(prepro_fineweb, "--parquet", "--output", "out", "--processes", 1, "--shard_tokens", 50000, "--shards", 1)
    assert asked == [2 * min(0.375 * sum(sizes), 100000) + max(sizes)]
    assert sorted(path.name for path in tmp_path.glob("*.parquet")) == ["1.parquet", "2.parquet"]


def test_what_is_refused(tmp_path, tokenize, folder, arrow, run_here, fetch, monkeypatch):
    def fails(*flags, words):
        done = run_here(prepro_fineweb, "--processes", 1, *flags, check=False)
        done.stderr = done.stderr.splitlines()[-1]  # after the progress bar
        assert_one_line_error(done, *words)

    tokenize("--shards", 1)
    fails("--shards", 0, words=("--shards 0",))
    fails("--processes", 0, words=("--processes 0",))
    fails("--shard_tokens", 5, words=("--shard_tokens 5", "--parquet"))
    fails("--input", "none*.parquet", words=("none*.parquet", "no file matches"))
    fails("--input", "none.parquet", words=("none.parquet", "no such file"))
    fails("--input", "*.parquet", "--output", "out", words=("out/parquet.json", "--shard_tokens", "another --output"))
    (folder / "text.parquet").write_text("no parquet")
    fails("--input", "text.parquet", "--output", "o", words=("text.parquet", "not a parquet file"))
    arrow("other.parquet", ["x"], title=["y"])
    whole = (folder / "other.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[:-9])
    fails("--input", "cut.parquet", "--output", "o", words=("cut.parquet", "not a parquet file"))
    from pyarrow import parquet, table

    parquet.write_table(table({"title": ["a"], "id": [1]}), "title.parquet")
    fails("--input", "title.parquet", "--output", "o", words=("title.parquet", "columns title, id", "'text'"))
    parquet.write_table(table({"text": [1]}), "number.parquet")
    fails("--input", "number.parquet", "--output", "o", words=("number.parquet", "int64", "strings"))
    damaged = bytearray((folder / "1.parquet").read_bytes())
    damaged[200:2000] = bytes(1800)
    (folder / "damaged.parquet").write_bytes(damaged)
    fails("--input", "damaged.parquet", "--output", "o", words=("damaged.parquet", "row group 0 cannot be read"))
    (folder / "out" / "parquet.json").write_text('{"shards": 1}')
    fails("--input", "0.parquet", "--output", "out", words=("parquet.json", "cannot be read", "remove it"))
    (folder / "out" / "parquet.json").unlink()
    fails("--input", "0.parquet", "--output", "out", words=(NAMES[0], "not made from parquet", "another --output"))
    with locked("out", True):
        fails("--input", "0.parquet", "--output", "out", words=(f"process {os.getpid()} ", "another --output"))
    monkeypatch.setattr(prepro_fineweb, "parquet", None)
    fails("--input", "0.parquet", words=("pyarrow", "pip install pyarrow"))


def test_ready_made_shards_do_not_mix_with_others(tmp_path, tokenize, run_here):
    tokenize("--shards", 1)
    done = run_here(prepro_fineweb, "--output", "out", check=False)
    assert_one_line_error(done, "out: its shards are made from parquet", "another --output")
