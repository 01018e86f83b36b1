"""The prepro scripts: hashes, downloads from a local server, faults of the network and of the text."""

import argparse
import contextlib
import hashlib
import http.server
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import prepro
import prepro_pystdlib
import prepro_text
import prepro_tinyshakespeare
import prepro_tinystories
from conftest import ROOT, assert_one_line_error, hub, run_program, serve
from llmc.checkpoint import read_config
from llmc.dataloader import open_tokens, write_tokens
from llmc.errors import UserError
from llmc.resume import checkpoint_paths
from llmc.threads import THREADS
from llmc.tokenizer import read_tokenizer

HASHES = {
    ("int32", "val"): "5dcd79e2f05f2f6cbc3a440565105367c12f148c4e01a3283a4307921f5f9945",
    ("int32", "train"): "fe4dddf0265c5cf586e0684534932890dab01a74c358b8378f1a3d41cbdba429",
    ("uint16", "val"): "fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62",
    ("uint16", "train"): "8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8",
}


# ----------------------------------------------------------------------------------------------------------------------
# tiny_shakespeare


@pytest.mark.parametrize("format", ("int32", "uint16"))
def test_tiny_shakespeare_has_llm_c_s_hashes(tmp_path, tiny_shakespeare, vocabulary_here, run_here, format):
    output = tmp_path / "ts"
    done = run_here(prepro_tinyshakespeare, "--input", tiny_shakespeare, "--output", output, "--format", format)
    assert done.stdout == (f"Saved 32768 tokens to {output}_val.bin\nSaved 305260 tokens to {output}_train.bin\n"
                           f"Saved the vocabulary of 50257 tokens to {output}_tokenizer.bin\n")
    found = hashlib.sha256((tmp_path / "ts_tokenizer.bin").read_bytes()).hexdigest()
    assert found == "6f3abc21e444e4e8300e225f4e03da48ea121cf17e30f67009b8dad7a66c2f13"
    assert read_tokenizer(tmp_path / "ts_tokenizer.bin").printable(188) == b"", "the NUL byte"
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
    files = [tmp_path / f"mine_{name}.bin" for name in ("val", "train", "tokenizer")]
    for path in (mine, tmp_path / "tiny_shakespeare.txt", *files):
        path.write_text(text)
    with serve({}) as (url, seen):
        done = run_here(prepro_tinyshakespeare, "--url", url, "--output", tmp_path / "mine", check=False)
    assert_one_line_error(done, tmp_path / "tiny_shakespeare.txt", "move it away", "--input")
    for path in files:
        done = run_here(prepro_tinyshakespeare, "--input", path, "--output", tmp_path / "mine", check=False)
        assert_one_line_error(done, path, "another --output")
    assert not seen and all(path.read_text() == text for path in tmp_path.iterdir())


def test_all_files_or_none(tmp_path, monkeypatch):
    def fail(path, *arguments):
        if "train" in path:
            raise UserError(f"{path}: cannot be written (No space left on device)")
        write_tokens(path, *arguments)

    (tmp_path / "x_val.bin").write_bytes(b"before")
    monkeypatch.setattr(prepro, "write_tokens", fail)
    with pytest.raises(UserError, match="No space"):
        prepro.save_split(range(10), 4, prepro.load_encoding("bytes"), SimpleNamespace(output=str(tmp_path / "x"),
                                                                                       format="int32"))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


@pytest.mark.parametrize("pages, words", (
    ({"/x": (200, {}, b"another text")}, ("MD5", "expected 6fb458f1232090904fb40fe944165e91")),
    ({}, ("404",)),
    ({"/x": (200, {"Content-Length": 500}, b"cut short")}, ("failed",)),
    ({"/x": (302, {"Location": "http://127.0.0.1:9/"}, b"")}, ("refused",)),
))  # fmt: skip
def test_a_failed_download_leaves_nothing(tmp_path, run_here, pages, words):
    with serve(pages) as (url, _):
        done = run_here(prepro_tinyshakespeare, "--url", f"{url}/x", "--output", tmp_path / "data" / "ts", check=False)
    done.stderr = done.stderr.splitlines()[-1]  # after the progress bar
    assert_one_line_error(done, f"{url}/x", "--input", *words)
    assert [path.name for path in tmp_path.rglob("*")] == (["data"] if 200 in pages.get("/x", ()) else [])


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


def test_white_space_is_cut_where_it_is_very_long_and_in_linear_time():
    N, lengths = 262144, SimpleNamespace(encode=lambda text: [len(text)])
    begun = time.process_time()
    for space in (200000, N):
        assert prepro.encode(lengths, "a" + " " * space + "b" * N) == [1 + space + N]
    assert prepro.encode(lengths, "a" + "\n" * (N + 1) + "b" + "\t" * (2 * N + 1)) == [1 + N, 1 + 1 + N, N, 1]
    assert time.process_time() - begun < 1.0


def test_a_small_text_is_split(tmp_path, tiny_shakespeare, vocabulary_here, run_here):
    """A tenth validates, at most VAL_TOKENS; --val_fraction says how much."""
    (tmp_path / "text").write_bytes(tiny_shakespeare.read_bytes()[:100000])

    def split(*flags, check=True):
        return run_here(prepro_tinyshakespeare, "--input", tmp_path / "text", "--output", tmp_path / "o", *flags,
                        check=check)

    val, train = (int(line.split()[1]) for line in split().stdout.splitlines()[:2])
    assert val == (val + train) // 10
    assert split("--val_fraction", 0.5).stdout.startswith(f"Saved {(val + train) // 2} tokens")
    assert prepro.val_tokens(100, 10, SimpleNamespace(val_fraction=0.29)) == 29  # in floating point, 28.999
    assert_one_line_error(split("--val_fraction", 1, check=False), "--val_fraction 1.0")
    assert_one_line_error(split("--val_fraction", 1e-9, check=False), "0 would validate", "--val_fraction")


# ----------------------------------------------------------------------------------------------------------------------
# your own text


@pytest.fixture
def prepare(tmp_path, run_here, monkeypatch):
    """prepare(input, ..., flag, ...): the tokens, train and val one after the other, the Tokenizer, what is printed."""
    monkeypatch.chdir(tmp_path)

    def run(*flags):
        done = run_here(prepro_text, *flags, "--output", "out/x")
        tokens = [open_tokens(f"out/x_{split}.bin", 1 << 20) for split in ("train", "val")]
        return np.concatenate(tokens).tolist(), read_tokenizer("out/x_tokenizer.bin"), done.stdout

    return run


def text_of(tokens, tokenizer):
    return b"".join(tokenizer.tokens[id] for id in tokens).decode()


def write_folder(folder):
    """A folder of texts, and of what is none; the documents, in the order that they are read."""
    files = {
        "a.md": b"# A\r\n\r\nna\xc3\xafve\r\n", "b/c.py": b"\xef\xbb\xbfprint('c')\n",
        "b/d.txt": "д 日本\n".encode(), "f/x.txt": b"f\n", "e/x.txt": b"e\n", "c/x.txt": b"c\n", "d/x.txt": b"d\n",
        "b/package.json": b'{\n  "name": "x"\n}\n', "b/lines.json": b'\n{"text": "one"}\n\n{"text": "two"}\n',
        "b/one.json": b'{"name": "y"}', "empty.txt": b"",
        "z.jsonl": b'{"text": "three\\r\\n", "id": 3}\r\n{"id": 4, "text": ""}\n{"text": "\\ud83d\\ude00 \\ud83d"}',
        "b/picture.png": b"\x89PNG\xff\xfe", "b/numbers.bin": np.arange(9).tobytes(), ".hidden.txt": b"secret",
        ".git/config": b"secret",
    }  # fmt: skip
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    os.mkfifo(folder / "fifo")
    return ["# A\n\nnaïve\n", "three\n", "\U0001f600 ?", "print('c')\n", "д 日本\n", "one", "two", '{"name": "y"}',
            '{\n  "name": "x"\n}\n', "c\n", "d\n", "e\n", "f\n"]


@pytest.mark.parametrize("vocabulary, V", (("gpt2", 50257), ("bytes", 257), ("chars", None)))
def test_a_folder_of_text(tmp_path, vocabulary_here, prepare, vocabulary, V):
    """Sorted, each document after an end of text; what is hidden or not text is left out, and counted."""
    expected = write_folder(tmp_path / "folder")
    tokens, tokenizer, printed = prepare("folder", "--vocabulary", vocabulary)
    assert text_of(tokens, tokenizer) == "".join(f"{prepro.EOT}{document}" for document in expected)
    assert tokens.count(tokenizer.eot) == 13 and tokenizer.eot == len(tokenizer.tokens) - 1
    characters = sorted(set("".join(expected)))
    assert len(tokenizer.tokens) == (V or len(characters) + 1)
    if vocabulary == "chars":
        assert [token.decode() for token in tokenizer.tokens[:-1]] == characters
    assert printed.startswith("13 documents in 12 files; left out: 2 hidden names, 3 files not of text, such as ")
    again = prepare("folder/*.md", "folder", "folder/a.md", "--vocabulary", vocabulary, "--format", "uint16")
    assert again[0] == tokens, "a file is read once"


@pytest.mark.parametrize("vocabulary", ("gpt2", "chars"))
def test_pieces_and_processes_change_nothing(tmp_path, tiny_shakespeare, vocabulary_here, prepare, monkeypatch,
                                             vocabulary):
    """A long text is tokenized in pieces, by any number of processes, to what tiktoken makes of the whole."""
    text = tiny_shakespeare.read_text()[:200000] + "x" * 3000 + "\n \n\n" * 500 + "é"
    (tmp_path / "text").write_text(text)
    encoding = prepro.load_encoding(vocabulary, text)
    for piece, processes in ((1 << 20, 1), (1000, 1), (1000, 2)):
        monkeypatch.setattr(prepro_text, "PIECE", piece)
        tokens, tokenizer, _ = prepare("text", "--vocabulary", vocabulary, "--processes", processes)
        assert tokens[0] == encoding.eot_token and text_of(tokens[1:], tokenizer) == text
        if piece > len(text):
            whole = tokens
            assert whole[1:] == encoding.encode(text)
        else:  # but for what has no end of a token within a piece
            assert len(tokens) - len(whole) <= 8 and tokens[:40000] == whole[:40000]
            if processes == 1:
                pieces = tokens
            else:
                assert tokens == pieces


def test_shards_are_the_same_tokens(tmp_path, run_here, monkeypatch):
    """--shard_tokens splits the training tokens into shards of one size; one of an earlier run is no part of them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("".join(f"{i} lines, and\n" for i in range(7000))[:100000])

    def tokens(*flags):
        run_here(prepro_text, "text", "--vocabulary", "bytes", "--output", "x", "--format", "uint16", *flags)
        return [[open_tokens(str(path), 257).tolist() for path in sorted(tmp_path.glob(f"x_{split}*.bin"))]
                for split in ("train", "val")]

    (train,), val = tokens()
    for path in tmp_path.glob("x_*"):
        path.unlink()
    shards, val_again = tokens("--shard_tokens", 30000)
    assert sum(shards, []) == train and val_again == val
    assert [len(shard) for shard in shards] == [22501, 22500, 22500, 22500]
    assert sorted(path.name for path in tmp_path.glob("x_*")) == [
        "x_tokenizer.bin", *(f"x_train_{number:06d}.bin" for number in range(4)), "x_val_000000.bin"]
    done = run_here(prepro_text, "text", "--vocabulary", "bytes", "--output", "x", "--shard_tokens", 50000, check=False)
    done.stderr = done.stderr.splitlines()[-1]
    assert_one_line_error(done, "x_train_000002.bin", "2 shards", "remove it")
    assert tokens("--shard_tokens", 30000) == [shards, val]


def test_text_that_is_refused(tmp_path, vocabulary_here, run_here, monkeypatch):
    """One line; no file is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepro_text, "PIECE", 1000)

    def fails(name, data, *words, flags=()):
        (tmp_path / name).write_bytes(data)
        done = run_here(prepro_text, name, "--output", "out/x", *flags, check=False)
        done.stderr = done.stderr.splitlines()[-1]  # after the progress bars
        assert_one_line_error(done, *words)
        assert not list(tmp_path.glob("out/*")) and (tmp_path / name).read_bytes() == data

    text = b"Some words.\n" * 1000
    fails("empty.txt", b"", "empty.txt", "no text in 1 file")
    fails("latin.txt", b"x" * 2500 + b"caf\xe9 ", "latin.txt", "not UTF-8", "byte 2503")
    fails("short.txt", b"a", "2 tokens of text", "--val_fraction")
    fails("a.jsonl", b'{"text": "a"}\n{"story": "b"}\n', "a.jsonl:2", "'text'", "found text in story", "--field NAME")
    fails("b.json", b'{"text": 1}\n', "b.json:1", "found text in no field", "--field NAME")
    fails("c.jsonl", b'{"text": "a"}\nnot JSON\n', "c.jsonl:2", "found none")
    fails("d.jsonl", b'{"text": "a"}\n', "d.jsonl:1", "'story'", flags=("--field", "story"))
    fails("e.txt", text, "--val_fraction 2.0", flags=("--val_fraction", 2))
    fails("f.txt", text, "--processes 0", flags=("--processes", 0))
    fails("i.txt", text, "--shard_tokens 0", flags=("--shard_tokens", 0))
    fails("g.txt", "".join(map(chr, [*range(1, 0xD800), *range(0xE000, 0x14000)])).encode(), "--format uint16",
          "at most 65536", flags=("--format", "uint16", "--vocabulary", "chars"))
    fails("h.txt", text, "h.txt", "directory", flags=("--output", "h.txt/x"))
    for name, words in (("none.txt", "no such file"), ("*.none", "no file matches"), ("fifo", "a FIFO")):
        if name == "fifo":
            os.mkfifo(name)
        assert_one_line_error(run_here(prepro_text, name, check=False), name, words)
    os.rename("fifo", "x_train.bin")
    done = run_here(prepro_text, "e.txt", "--output", "x", check=False)
    done.stderr = done.stderr.splitlines()[-1]
    assert_one_line_error(done, "x_train.bin", "a FIFO", "another --output")
    (tmp_path / "folder").mkdir()
    done = run_here(prepro_text, "folder", check=False)
    assert done.returncode == 1 and done.stderr.endswith("folder: no text in 0 files\n")

    def scandir(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert_one_line_error(run_here(prepro_text, "folder", check=False), "folder: cannot be read (Permission denied)")


def test_own_text_is_not_written_over(tmp_path, run_here, monkeypatch):
    """Neither a file that is named, nor one that is found; tokens of an earlier run are no text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("my text\n" * 2000)
    for _ in range(2):
        run_here(prepro_text, ".", "--vocabulary", "bytes", "--output", "x")
    assert sorted(os.listdir()) == ["text", "x_tokenizer.bin", "x_train.bin", "x_val.bin"]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name, flags in (("text_train.bin", ()), ("text_train_000000.bin", ("--shard_tokens", 9000)),
                        ("text_val_000000.bin", ("--shard_tokens", 9000))):
        for inputs in (".", name):
            shutil.copy("text", name)
            done = run_here(prepro_text, inputs, "--vocabulary", "bytes", "--output", "./text", *flags, check=False)
            done.stderr = done.stderr.splitlines()[-1]
            assert_one_line_error(done, name, "another --output")
            os.unlink(name)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_prefix_is_no_glob(tmp_path, run_here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = (prepro_text, "text", "--vocabulary", "bytes", "--output", "x[1]", "--shard_tokens", 9000)
    (tmp_path / "text").write_text("my text\n" * 2000)
    (tmp_path / "x1_train_000005.bin").touch()
    run_here(*command)
    (tmp_path / "x[1]_train_000005.bin").touch()
    done = run_here(*command, check=False)
    done.stderr = done.stderr.splitlines()[-1]
    assert_one_line_error(done, "x[1]_train_000005.bin", "2 shards", "remove it")


def test_links_are_followed_and_files_taken_once(tmp_path, prepare):
    for name in ("src/a.txt", "src/b/b.txt", "other/.hidden", "other/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name[-5:]}\n" * 9)
    for link, target in (("src/again", "."), ("src/b/up", ".."), ("src/z", "../other"), ("src/z.txt", "a.txt")):
        (tmp_path / link).symlink_to(target)
    for inputs in (("src",), ("src", "./src"), ("src/a.txt", "src/b", "src/../src")):
        tokens, tokenizer, printed = prepare(*inputs, "--vocabulary", "bytes")
        documents = text_of(tokens, tokenizer).split(prepro.EOT)
        assert sorted(document[:5] for document in documents) == ["", "a.txt", "b.txt", "c.txt"]
        assert printed.startswith("3 documents in 3 files; left out: 1 hidden name, 0 files not of text\n")


def test_a_line_of_any_length(tmp_path, prepare, monkeypatch):
    """In linear time. JSON that is one very long line is plain text; it is not read whole to find that out."""
    pieces = ["x" * 20000] * 2000
    begun = time.process_time()
    assert list(prepro_text.read_lines([*pieces, "y\nz", "\n"])) == ["".join(pieces) + "y", "z", ""]
    assert time.process_time() - begun < 1.0
    monkeypatch.setattr(prepro_text, "PIECE", 1000)
    for length, is_text in ((10000, False), (20000, True)):
        text, data = "x" * length, json.dumps({"text": "x" * length})
        (tmp_path / "x.json").write_text(data)
        tokens, tokenizer, _ = prepare("x.json", "--vocabulary", "bytes")
        assert text_of(tokens[1:], tokenizer) == (data if is_text else text)


@pytest.mark.parametrize("vocabulary", ("bytes", "chars"))
def test_training_on_own_text_needs_numpy_alone(tmp_path, prepare, vocabulary):
    """From random weights, where nothing else can be imported; the samples are text, letters beyond ASCII included."""
    (tmp_path / "lines.jsonl").write_text(1000 * (json.dumps({"text": 4 * "ääöü\n"}) + "\n"))
    prepare("lines.jsonl", "--vocabulary", vocabulary)
    hidden = ("torch", "tiktoken", "tqdm", "requests", "safetensors", "huggingface_hub", "cupy")
    for name in hidden:
        (tmp_path / "hidden" / name).mkdir(parents=True)
        (tmp_path / "hidden" / name / "__init__.py").write_text(f"raise ImportError('{name} is hidden')")
    done = run_program("train_gpt2.py", "-e", "d2", "-i", "out/x", "-o", "run", "-b", 4, "-t", 16, "-x", 40,
                       "-l", 0.003, "-v", 0, "-s", 40, "-g", 40, "--final_reports", 1, cwd=tmp_path,
                       PYTHONPATH=str(tmp_path / "hidden"))
    assert " tokenizer=out/x_tokenizer.bin " in done.stdout and done.stderr == ""
    sample = done.stdout.split("---\n")[1]
    assert len(re.findall("[äöü]", sample)) > 8 and not set(sample) - set("äöü\n\ufffd<|endoftext|>")
    with open(checkpoint_paths(tmp_path / "run", 40)[0], "rb") as f:
        assert read_config(f, "")[1].V == len(read_tokenizer(tmp_path / "run" / "tokenizer.bin").tokens)


# ----------------------------------------------------------------------------------------------------------------------
# the standard library


def test_pystdlib(tmp_path, run_here):
    done = run_here(prepro_pystdlib, "--output", tmp_path / "std")
    counts = [int(line.split()[1]) for line in done.stdout.splitlines()[:2]]
    val, train = (open_tokens(tmp_path / f"std_{split}.bin", 257) for split in ("val", "train"))
    assert counts == [val.size, train.size] == [65536, 4128768] and val[0] == 256
    text = bytes(int(id) for id in np.concatenate([val, train]) if id != 256)
    assert b"def __init__(self" in text
    again = run_here(prepro_pystdlib, "--output", tmp_path / "again", "--format", "uint16")
    assert again.stdout.replace("again", "std") == done.stdout
    assert np.array_equal(open_tokens(tmp_path / "again_train.bin", 257), train)


def test_pystdlib_makes_integers_and_needs_some_text(tmp_path, run_here, monkeypatch):
    made = []
    with monkeypatch.context() as patch:
        patch.setattr(prepro_pystdlib, "save_split", lambda tokens, *_: made.append(np.asarray(tokens)))
        run_here(prepro_pystdlib, "--output", tmp_path / "std")
    assert made[0].dtype.kind == "i" and len(made[0]) == prepro_pystdlib.LIMIT
    monkeypatch.setattr(prepro_pystdlib, "source_files", lambda root: [])
    assert_one_line_error(run_here(prepro_pystdlib, "--output", tmp_path / "std", check=False), "0 tokens of text")


def test_the_byte_vocabulary_is_reversible():
    encoding = prepro.load_encoding("bytes")
    text = "naïve\n\tπ = 3 # ok\r\n" + "\U0001f600\x00"
    tokens = encoding.encode(text)
    assert bytes(tokens) == text.encode() and encoding.decode(tokens) == text
    assert encoding.eot_token == 256 and encoding.n_vocab == 257


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
        assert len(read_tokenizer(tmp_path / f"ts{processes}_tokenizer.bin").tokens) == 50257


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
    for shard, records, word in (("data01.json", '[{"title": "no story"}]', "'story'"),
                                 ("data00.json", "[]", "no stories")):
        (tmp_path / "shards" / shard).write_text(records)
        done = run()
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 1 and shard in last and word in last
        assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("ts_*.bin"))


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


# ----------------------------------------------------------------------------------------------------------------------
# worker processes


def test_as_many_processes_as_there_are_cores_to_use(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4096)
    parser = argparse.ArgumentParser()
    prepro.add_processes(parser, "pieces")
    assert parser.parse_args([]).processes == THREADS < 4096


def test_workers_end_with_a_program_that_is_killed(tmp_path):
    """They hold its stdout open, which ends with the last of them."""
    (tmp_path / "program.py").write_text(f"""import sys, time
sys.path.insert(0, {str(ROOT)!r})
import prepro
def work(job):
    print("working", flush=True)
    time.sleep(100)
if __name__ == "__main__":
    list(prepro.in_processes(work, range(2), 2))
""")
    with subprocess.Popen([sys.executable, tmp_path / "program.py"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          text=True, start_new_session=True) as running:
        try:
            assert running.stdout.readline() == "working\n"
            running.kill()
            running.communicate(timeout=10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
