"""The prepro scripts: hashes, downloads from a local server, faults of the network and of the text."""

import functools
import hashlib
import http.server
import io
import json
import os
import random
import resource
import tarfile
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import prepro
import prepro_pystdlib
import prepro_tinyshakespeare
import prepro_tinystories
import train_gpt2
from conftest import ROOT, assert_one_line_error, hub, run_program, serve
from llmc.dataloader import DataLoader, data_paths, open_tokens, write_tokens
from llmc.errors import UserError
from llmc.settings import Settings
from train_gpt2 import validate

HASHES = {
    ("int32", "val"): "5dcd79e2f05f2f6cbc3a440565105367c12f148c4e01a3283a4307921f5f9945",
    ("int32", "train"): "fe4dddf0265c5cf586e0684534932890dab01a74c358b8378f1a3d41cbdba429",
    ("uint16", "val"): "fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62",
    ("uint16", "train"): "8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8",
}


@pytest.fixture
def vocabulary_here(monkeypatch, gpt2_vocabulary):
    """GPT-2's vocabulary for what runs in this process."""
    monkeypatch.setenv(*next(iter(gpt2_vocabulary.items())))


# ----------------------------------------------------------------------------------------------------------------------
# tiny_shakespeare


@pytest.mark.parametrize("format", ("int32", "uint16"))
def test_tiny_shakespeare_has_llm_c_s_hashes(tmp_path, tiny_shakespeare, vocabulary_here, run_here, format):
    output = tmp_path / "ts"
    done = run_here(prepro_tinyshakespeare, "--input", tiny_shakespeare, "--output", output, "--format", format)
    assert done.stdout == f"Saved 32768 tokens to {output}_val.bin\nSaved 305260 tokens to {output}_train.bin\n"
    for split in ("val", "train"):
        assert hashlib.sha256((tmp_path / f"ts_{split}.bin").read_bytes()).hexdigest() == HASHES[format, split]


def test_tiny_shakespeare_is_downloaded_once(tmp_path, tiny_shakespeare, vocabulary_here, run_here):
    with serve({"/input.txt": (200, {}, tiny_shakespeare.read_bytes())}) as (url, seen):
        command = (prepro_tinyshakespeare, "--url", f"{url}/input.txt", "--output", tmp_path / "data" / "ts")
        assert "100%" in run_here(*command).stderr, "a progress bar"
        run_here(*command)
        assert seen == ["GET /input.txt"]
    assert hashlib.sha256((tmp_path / "data" / "ts_train.bin").read_bytes()).hexdigest() == HASHES["int32", "train"]


def test_a_text_is_not_written_over(tmp_path, run_here):
    """Neither by the download, whose file has its own name, nor by the tokens."""
    text, mine = "my text\n\n" * 20000, tmp_path / "mine.txt"
    for path in (mine, tmp_path / "tiny_shakespeare.txt", tmp_path / "mine_val.bin"):
        path.write_text(text)
    with serve({}) as (url, seen):
        done = run_here(prepro_tinyshakespeare, "--url", url, "--output", tmp_path / "mine", check=False)
    assert_one_line_error(done, tmp_path / "tiny_shakespeare.txt", "move it away", "--input")
    done = run_here(prepro_tinyshakespeare, "--input", tmp_path / "mine_val.bin", "--output", tmp_path / "mine",
                    check=False)
    assert_one_line_error(done, "mine_val.bin", "another --output")
    assert not seen and all(path.read_text() == text for path in tmp_path.iterdir())


def test_both_token_files_or_none(tmp_path, monkeypatch):
    def fail(path, *arguments):
        if "train" in path:
            raise UserError(f"{path}: cannot be written (No space left on device)")
        write_tokens(path, *arguments)

    (tmp_path / "x_val.bin").write_bytes(b"before")
    monkeypatch.setattr(prepro, "write_tokens", fail)
    with pytest.raises(UserError, match="No space"):
        prepro.save_split(range(10), 4, SimpleNamespace(output=str(tmp_path / "x"), format="int32"))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


@pytest.mark.parametrize("pages, words", (
    ({"/x": (200, {}, b"another text")}, ("MD5", "expected 6fb458f1232090904fb40fe944165e91")),
    ({}, ("404",)),
    ({"/x": (200, {"Content-Length": 500}, b"cut short")}, ("failed",)),
    ({"/x": (302, {"Location": "http://127.0.0.1:9/"}, b"")}, ("refused",)),
))  # fmt: skip
def test_a_failed_download_leaves_nothing(tmp_path, run_here, pages, words):
    with serve(pages) as (url, _):
        done = run_here(prepro_tinyshakespeare, "--url", f"{url}/x", "--output", tmp_path / "ts", check=False)
    done.stderr = done.stderr.splitlines()[-1]  # after the progress bar
    assert_one_line_error(done, f"{url}/x", "--input", *words)
    assert not list(tmp_path.iterdir())


def test_a_server_that_says_nothing_times_out(monkeypatch, tmp_path):
    monkeypatch.setattr(prepro, "TIMEOUT_SECONDS", 0.2)
    release = threading.Event()

    class Silent(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            release.wait(10)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(UserError, match="timed out.*--input FILE"):
        prepro.download(f"http://127.0.0.1:{server.server_port}/", str(tmp_path / "x"), "")
    release.set()
    server.shutdown()


def test_text_faults(tmp_path, vocabulary_here, run_here):
    def run(path):
        return run_here(prepro_tinyshakespeare, "--input", path, "--output", tmp_path / "o", check=False)

    assert_one_line_error(run(tmp_path / "none.txt"), "none.txt", "No such file")
    assert_one_line_error(run(tmp_path), tmp_path, "directory")
    os.mkfifo(tmp_path / "fifo")
    assert_one_line_error(run(tmp_path / "fifo"), "fifo", "a FIFO")
    (tmp_path / "short.txt").write_text("To be")
    assert_one_line_error(run(tmp_path / "short.txt"), "3 tokens of text", "--val_fraction")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert_one_line_error(run(tmp_path / "latin.txt"), "not UTF-8", "byte 3")
    done = run_program("prepro_tinyshakespeare.py", "--input", tmp_path / "short.txt", "--output", tmp_path / "o",
                       check=False, TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"), HTTPS_PROXY="http://127.0.0.1:9")
    assert_one_line_error(done, "vocabulary", "TIKTOKEN_CACHE_DIR")
    assert not list(tmp_path.glob("o_*"))


def test_carriage_returns_and_a_byte_order_mark_are_not_text(tmp_path, tiny_shakespeare, vocabulary_here, run_here):
    windows = tiny_shakespeare.read_bytes().replace(b"\n", b"\r\n")
    (tmp_path / "crlf.txt").write_bytes(b"\xef\xbb\xbf" + windows)
    run_here(prepro_tinyshakespeare, "--input", tmp_path / "crlf.txt", "--output", tmp_path / "ts")
    for split in ("val", "train"):
        found = hashlib.sha256((tmp_path / f"ts_{split}.bin").read_bytes()).hexdigest()
        assert found == HASHES["int32", split]


@pytest.mark.parametrize("space", (" ", "\t", "\n ", "\u3000"))
def test_white_space_of_a_million_characters(vocabulary_here, space):
    """tiktoken alone: Regex error while tokenizing ... Max stack size exceeded for backtracking."""
    encoding, text = prepro.load_encoding("gpt2"), "a" + space * (1200000 // len(space)) + "b" + prepro.EOT
    tokens = prepro.encode(encoding, text, allowed_special={prepro.EOT})
    assert encoding.decode(tokens) == text and tokens[-1] == encoding.eot_token
    short = "a" + space * 1000 + "b"
    assert prepro.encode(encoding, short) == encoding.encode(short)


def test_a_small_text_is_split(tmp_path, tiny_shakespeare, vocabulary_here, run_here):
    """A tenth validates, at most VAL_TOKENS; --val_fraction says how much."""
    (tmp_path / "text").write_bytes(tiny_shakespeare.read_bytes()[:100000])

    def split(*flags, check=True):
        return run_here(prepro_tinyshakespeare, "--input", tmp_path / "text", "--output", tmp_path / "o", *flags,
                        check=check)

    val, train = (int(line.split()[1]) for line in split().stdout.splitlines())
    assert val == (val + train) // 10
    assert split("--val_fraction", 0.5).stdout.startswith(f"Saved {(val + train) // 2} tokens")
    assert_one_line_error(split("--val_fraction", 1, check=False), "--val_fraction 1.0")
    assert_one_line_error(split("--val_fraction", 1e-9, check=False), "0 would validate", "--val_fraction")


# ----------------------------------------------------------------------------------------------------------------------
# the standard library


def test_pystdlib(tmp_path, run_here):
    done = run_here(prepro_pystdlib, "--output", tmp_path / "std")
    counts = [int(line.split()[1]) for line in done.stdout.splitlines()]
    val, train = (open_tokens(tmp_path / f"std_{split}.bin", 257) for split in ("val", "train"))
    assert counts == [val.size, train.size] and val[0] == 256
    text = bytes(int(id) for id in np.concatenate([val, train]) if id != 256)
    assert b"def __init__(self" in text
    again = run_here(prepro_pystdlib, "--output", tmp_path / "again", "--format", "uint16")
    assert again.stdout.replace("again", "std") == done.stdout
    assert np.array_equal(open_tokens(tmp_path / "again_train.bin", 257), train)


def test_the_byte_vocabulary_is_reversible():
    encoding = prepro.load_encoding("bytes")
    text = "naïve\n\tπ = 3 # ok\r\n" + "\U0001f600\x00"
    tokens = encoding.encode(text)
    assert bytes(tokens) == text.encode() and encoding.decode(tokens) == text
    assert encoding.eot_token == 256 and encoding.n_vocab == 257


# ----------------------------------------------------------------------------------------------------------------------
# the loader


def count_up(path, count):
    """A token file of 0, 1, 2 ...; its path."""
    write_tokens(path, [np.arange(count)], count)
    return str(path)


def test_a_thousand_shards_take_one_descriptor(tmp_path):
    paths = [count_up(tmp_path / f"{i}.bin", 9) for i in range(40)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        loader = DataLoader(paths, 9, 2, 4)
        assert [loader.next_batch()[0].tolist() for _ in range(41)] == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 41
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = count_up(tmp_path / "a.bin", 20001)
    loader = DataLoader([path], 20001, 2, 4)
    loader.next_batch()
    (tmp_path / "a.bin").write_bytes(np.full(20001, 30000, "<i4").tobytes())
    loader.seek(0, 2000)
    with pytest.raises(UserError, match="a.bin: token id 30000, expected 0 to 20000"):
        loader.next_batch()
    os.truncate(path, 12)
    loader.seek(0, 1000)
    with pytest.raises(UserError, match="a.bin: ended early"):
        loader.next_batch()


@pytest.mark.parametrize("tokens, rows", (
    (25, [2, 2, 2]), (26, [2, 2, 2]), (29, [2, 2, 2, 1]), (5, [1]), (8, [1]), (9, [2]),
    (24, [2, 2, 2]),  # without its last target, llm.c's third batch is the first again
))  # fmt: skip
def test_the_whole_set(tmp_path, tokens, rows):
    loader = DataLoader([count_up(tmp_path / "a.bin", tokens)], 29, 2, 4, least=5)
    batches = list(loader.whole_set())
    assert [len(inputs) for inputs, _ in batches] == rows and loader.num_batches == max(1, tokens // 8)
    assert all(np.array_equal(targets, inputs + 1) for inputs, targets in batches)
    starts = [int(inputs[0, 0]) for inputs, _ in batches]
    assert starts == ([0, 8, 0] if tokens == 24 else list(range(0, 8 * len(rows), 8)))


def test_validation_is_the_mean_over_positions(tmp_path):
    """Of a smaller last batch, each position counts as much as any other."""
    loader = DataLoader([count_up(tmp_path / "a.bin", 13)], 29, 2, 4, least=5)
    model = SimpleNamespace(forward=lambda inputs, targets: float(inputs.mean()))
    assert validate(model.forward, loader, 99, 0) == pytest.approx(np.arange(12).mean())
    assert validate(model.forward, loader, 1, 0) == np.arange(8).mean()


def test_a_small_validation_set(workplace, run_here):
    """One sequence will do; if nothing validates, anything."""
    run = functools.partial(run_here, train_gpt2, "-b", 4, "-t", 8, "-x", 1, "-s", 0, check=False)
    count_up("data/tiny_shakespeare_val.bin", 9)
    assert "val loss " in run("-v", 1).stdout
    count_up("data/tiny_shakespeare_val.bin", 8)
    assert_one_line_error(run("-v", 1), "_val.bin: 8 tokens", "at least 9", "(T+1)")
    assert run("-v", 0).returncode == 0


def test_brackets_in_a_name_that_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("data[1]")
    for name in ("x_train", "x_val", "y_train_1", "y_train_2", "y_val_1"):
        count_up(f"data[1]/{name}.bin", 9)
    assert data_paths(Settings(data="data[1]/x")) == [["data[1]/x_train.bin"], ["data[1]/x_val.bin"]]
    assert data_paths(Settings(data="data[1]/x_train.bin")) == [["data[1]/x_train.bin"], ["data[1]/x_val.bin"]]
    assert data_paths(Settings(data="data[1]/y_train_*.bin")) == [
        ["data[1]/y_train_1.bin", "data[1]/y_train_2.bin"], ["data[1]/y_val_1.bin"]]


# ----------------------------------------------------------------------------------------------------------------------
# TinyStories


def write_shards(directory, stories_of):
    directory.mkdir(exist_ok=True)
    for shard, stories in enumerate(stories_of):
        records = [{"story": story, "source": "x"} for story in stories]
        (directory / f"data{shard:02d}.json").write_text(json.dumps(records))


STORIES = [[f" Shard {shard}, story {i}. The end.\n" for i in range(5)] for shard in range(3)]


def expected_tokens(shard):
    encoding, stories = prepro.load_encoding("gpt2"), [story.strip() for story in STORIES[shard]]
    random.Random(1337 + shard).shuffle(stories)
    return [token for story in stories for token in [50256, *encoding.encode_ordinary(story)]]


def test_tinystories(tmp_path, vocabulary_here, run_here):
    write_shards(tmp_path / "shards", STORIES)
    for processes in (1, 2):
        run_here(prepro_tinystories, "--input", tmp_path / "shards", "--output", tmp_path / f"ts{processes}",
                 "--processes", processes, "--format", "uint16")
        val, train = (open_tokens(tmp_path / f"ts{processes}_{split}.bin", 50257) for split in ("val", "train"))
        assert val.tolist() == expected_tokens(0) and train.tolist() == expected_tokens(1) + expected_tokens(2)


def tinystories_pages(archive, sha256):
    """What the hub answers for the archive: the file, and its SHA-256 as its ETag."""
    name = "/datasets/roneneldan/TinyStories/resolve/main/TinyStories_all_data.tar.gz"
    commit = "0123456789abcdef0123456789abcdef01234567"
    headers = {"ETag": f'"{sha256}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
    return {name: (200, headers, archive)}


def make_archive():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for shard, stories in enumerate(STORIES):
            data = json.dumps([{"story": story} for story in stories]).encode()
            member = tarfile.TarInfo(f"data{shard:02d}.json")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def test_tinystories_download(tmp_path, gpt2_vocabulary, vocabulary_here):
    """In processes of their own: huggingface_hub reads its settings when it is imported."""
    command = "prepro_tinystories.py", "--processes", 1, "--output"
    archive = make_archive()
    with serve(tinystories_pages(archive, hashlib.sha256(archive).hexdigest())) as (url, _):
        run_program(*command, tmp_path / "ts", **gpt2_vocabulary,
                    **hub(url, tmp_path / "home"))
    assert open_tokens(tmp_path / "ts_val.bin", 50257).tolist() == expected_tokens(0)
    run_program(*command, tmp_path / "again", **gpt2_vocabulary, HF_HUB_OFFLINE="1",
                HF_HOME=str(tmp_path / "home"))
    again, first = (tmp_path / f"{name}_val.bin" for name in ("again", "ts"))
    assert again.read_bytes() == first.read_bytes(), "from the cache, with no network"
    with serve(tinystories_pages(archive, "0" * 64)) as (url, _):
        done = run_program(*command, tmp_path / "other", check=False, **gpt2_vocabulary,
                           **hub(url, tmp_path / "home2"))
    assert done.returncode == 1 and "SHA-256" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "other_shards").exists()
    done = run_program(*command, tmp_path / "other", check=False, HF_HUB_OFFLINE="1",
                       HF_HOME=str(tmp_path / "home3"))
    assert_one_line_error(done, "TinyStories_all_data.tar.gz", "--input DIR")


def test_tinystories_faults(tmp_path, vocabulary_here, run_here):
    def run(*flags):
        return run_here(prepro_tinystories, "--input", tmp_path / "shards", "--output", tmp_path / "ts",
                        "--processes", 1, *flags, check=False)

    write_shards(tmp_path / "shards", STORIES[:1])
    assert_one_line_error(run(), "1 shards", "at least 2")
    write_shards(tmp_path / "shards", STORIES)
    assert_one_line_error(run("--processes", 0), "--processes 0")
    (tmp_path / "shards" / "data01.json").write_text('[{"title": "no story"}]')
    done = run()
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "data01.json" in last and "'story'" in last
    assert "Traceback" not in done.stderr and not list(tmp_path.glob("ts_*.bin"))


def test_a_killed_worker_of_tinystories_is_noticed(tmp_path, gpt2_vocabulary):
    """In a process of its own, whose worker ends as if the kernel had killed it for want of memory."""
    write_shards(tmp_path / "shards", STORIES)
    code = f"""import os, sys
sys.path.insert(0, {str(ROOT)!r})
import prepro_tinystories
def tokenize_shard(job):
    os.kill(os.getpid(), 9)
prepro_tinystories.tokenize_shard = tokenize_shard
if __name__ == "__main__":
    prepro_tinystories.run_main(prepro_tinystories.main)
"""
    (tmp_path / "program.py").write_text(code)
    done = run_program(tmp_path / "program.py", "--input", tmp_path / "shards", "--output", tmp_path / "ts",
                       "--processes", 2, check=False, timeout=60, **gpt2_vocabulary)
    done.stderr = done.stderr.splitlines()[-1]  # after the progress bar
    assert_one_line_error(done, "--processes 2", "killed")
    assert not list(tmp_path.glob("ts_*"))
