"""prepro_text.py: what is read of texts, files and folders, and how it becomes tokens."""

import asyncio
import errno
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

import prepro_text
import train_gpt2
import prepro_tinyshakespeare
from conftest import ROOT, assert_one_line_error, run_program
from llmc.dataloader import open_tokens
from llmc.tokenizer import read_tokenizer
from llmc.vocabulary import EOT, open_vocabulary
from prepro import common, pystdlib, reading

TEXT = b"Some words.\n" * 1000
RUSSIAN = "Паром уходит в полдень, и чайки летят за ним.\n"


def test_a_small_text_is_split_or_refused(tmp_path, tiny_shakespeare, vocabulary_here, run_here):
    text = tmp_path / "text"
    text.write_bytes(tiny_shakespeare.read_bytes()[:100000])
    split = functools.partial(run_here, prepro_tinyshakespeare, "--input", text, "--output",
                              tmp_path / "o")
    val, train = (int(line.split()[1]) for line in split().stdout.splitlines()[:2])
    assert val == (val + train) // 10
    assert split("--val_fraction", 0.5).stdout.startswith(f"Saved {(val + train) // 2} tokens")
    # in floating point, 28.999
    assert common.val_tokens(100, 10, SimpleNamespace(val_fraction=0.29)) == 29
    split("--val_fraction", 1, fails=["--val_fraction 1.0"])
    split("--val_fraction", 1e-9, fails=("of which 0 for validation", "--val_fraction"))
    done = run_program("prepro_tinyshakespeare.py", "--input", text, "--output", tmp_path / "p",
                       check=False,
                       TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"), HTTPS_PROXY="http://127.0.0.1:9")
    assert_one_line_error(done, "vocabulary", "TIKTOKEN_CACHE_DIR")
    assert not list(tmp_path.glob("p_*"))


@pytest.fixture
def prepare(here, run_here):
    """prepare(input, ..., flag, ...): the tokens, train and val one after the other, the Tokenizer,
    what is printed."""
    def run(*flags, program=prepro_text, warns=""):
        done = run_here(program, *flags, "--output", "out/x")
        assert warns in done.stderr and bool(warns) >= ("warning" in done.stderr)
        tokens = [open_tokens(f"out/x_{split}.bin", 1 << 20) for split in ("train", "val")]
        return np.concatenate(tokens).tolist(), read_tokenizer("out/x_tokenizer.bin"), done.stdout

    return run


def text_of(tokens, tokenizer):
    return b"".join(tokenizer.tokens[id] for id in tokens).decode()


@pytest.mark.parametrize("vocabulary, V", (("gpt2", 50257), ("bytes", 257), ("chars", None)))
def test_a_folder_of_text(tmp_path, vocabulary_here, prepare, vocabulary, V):
    """Sorted, each document after an end of text; hidden and binary files are skipped, and
    counted."""
    folder = tmp_path / "folder"
    files = {"a.md": b"# A\r\n\r\nna\xc3\xafve\r\n", "b/c.py": b"\xef\xbb\xbfprint('c')\n",
        "b/d.txt": "д 日本\n".encode(), "f/x.txt": b"f\n", "e/x.txt": b"e\n", "c/x.txt": b"c\n",
             "d/x.txt": b"d\n",
        "b/package.json": b'{\n  "name": "x"\n}\n',
             "b/lines.json": b'\n{"text": "one"}\n\n{"text": "two"}\n',
        "b/one.json": b'{"name": "y"}', "empty.txt": b"", "b/all.json": b'[{"text": "all"}]',
        "z.jsonl": b'{"text": "three\\r\\n", "id": 3}\r\n{"id": 4, "text": ""}\n{"text": "\\ud83d\\ude00'
           b' \\ud83d"}',
        "b/picture.png": b"\x89PNG\0\xff\xfe", "old.txt": RUSSIAN.encode("koi8-r"),
        "windows.txt": "old\n".encode("utf-16"), "b/numbers.bin": np.arange(9).tobytes(),
        ".hidden.txt": b"secret", ".git/config": b"secret"}
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    os.mkfifo(folder / "fifo")
    expected = ["# A\n\nnaïve\n", "three\n", "\U0001f600 ?", "all", "print('c')\n", "д 日本\n", "one",
                "two",
                '{"name": "y"}', '{\n  "name": "x"\n}\n', "c\n", "d\n", "e\n", "f\n"]
    tokens, tokenizer, printed = prepare("folder", "--vocabulary", vocabulary,
                                         warns="1 UTF-16 file left out, such as")
    assert text_of(tokens, tokenizer) == "".join(f"{EOT}{document}" for document in expected)
    assert tokens.count(tokenizer.eot) == 14 and tokenizer.eot == len(tokenizer.tokens) - 1
    characters = [letter.encode() for letter in sorted(set("".join(expected)))]
    assert len(tokenizer.tokens) == V or tokenizer.tokens[:-1] == characters
    assert printed.startswith("14 documents in 13 files; skipped 2 hidden names, 3 binary files,"
                              " such as ")
    again = prepare("folder/*.md", "folder", "folder/a.md", "--vocabulary", vocabulary, "--format",
                    "uint16", warns="1 KOI8-R file left out")
    assert again[0] == tokens, "a file is read once"


@pytest.mark.parametrize("vocabulary", ("gpt2", "chars"))
def test_pieces_and_processes(tmp_path, tiny_shakespeare, vocabulary_here, prepare, monkeypatch,
                              vocabulary):
    """A long text is tokenized in pieces, by any number of processes, to what tiktoken makes of the
    whole."""
    text = tiny_shakespeare.read_text()[:200000] + "x" * 3000 + "\n \n\n" * 500 + "é"
    (tmp_path / "text").write_text(text)
    encoding = open_vocabulary(vocabulary, text)
    found = []
    for piece, processes in ((1 << 20, 1), (1000, 1), (1000, 2)):
        monkeypatch.setattr(reading, "PIECE", piece)
        tokens, tokenizer, _ = prepare("text", "--vocabulary", vocabulary, "--processes", processes)
        assert tokens[0] == encoding.eot and text_of(tokens[1:], tokenizer) == text
        found.append(tokens)
    whole, pieces, again = found
    assert whole[1:] == encoding.encode(text) and pieces == again
    assert (len(pieces) - len(whole) <= 8
            and pieces[:40000] == whole[:40000]), "but for what has no end of a token"


def test_validation_is_of_whole_documents_from_all_over(tmp_path, prepare):
    """The others stay in their order."""
    texts = [f"{i:04} {'x' * (i % 40)}" for i in range(2000)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokens, tokenizer, _ = prepare("x.jsonl", "--vocabulary", "bytes")
    found = text_of(tokens, tokenizer).split(EOT)[1:]
    begin = next(i for i in range(1, 2000) if found[i] < found[i - 1])  # of validation
    train = found[:begin]
    val = found[begin:]
    assert sorted(found) == texts and train == sorted(train) and val == sorted(val)
    assert (len(text_of(open_tokens("out/x_val.bin", 257).tolist(), tokenizer))
            == sum(len(EOT) + len(x) for x in val))
    where = np.array([int(text[:4]) for text in val])
    assert 190 < len(where) <= 210 and np.diff(where, prepend=0, append=2000).max() < 40


def test_a_vocabulary_of_the_text_or_of_a_run(tmp_path, prepare):
    """bpe:N is what the package tokenizers makes, and says of any text the same; a run's may lack
    characters."""
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "x.txt").write_text("the cat sat on the mat\n" * 400)
    tokens, tokenizer, _ = prepare("x.txt", "--vocabulary", "bpe:600")
    theirs = tokenizers.Tokenizer.from_file("out/x_tokenizer.json")
    assert tokens[1:] == theirs.encode("the cat sat on the mat\n" * 400).ids
    assert (tokens[0] == tokenizer.eot and len(tokens) < 3000
            and text_of(tokens[1:8], tokenizer).startswith("the cat s"))
    _, chars, _ = prepare("x.txt", "--vocabulary", "chars")
    os.mkdir("run")
    shutil.copy("out/x_tokenizer.bin", "run/tokenizer.bin")
    (tmp_path / "y.txt").write_text("the café at the sea\n" * 50)
    tokens, tokenizer, _ = prepare("y.txt", "--vocabulary", "run",
                                   warns="lacks 2 characters of the text, such as"
                                   " 'f': of 1000 characters, 100 are lost")
    assert tokenizer == chars and text_of(tokens[1:], chars) == "the ca at the sea\n" * 50
    pytest.raises(AssertionError, prepare, "y.txt", "--vocabulary",
                  "bpe:x").match("expected bpe:512 to bpe:9999999")


def test_shards_are_the_same_tokens(here, run_here):
    """--shard_tokens splits the training tokens into shards of one size; one of an earlier run is
    no part of them."""
    (here / "text").write_text("".join(f"{i} lines, and\n" for i in range(7000))[:100000])
    command = prepro_text, "text", "--vocabulary", "bytes", "--format", "uint16", "--output"

    def tokens(output, *flags):
        run_here(*command, output, *flags)
        return [[open_tokens(str(path), 257).tolist()
                 for path in sorted(here.glob(f"{output}_{split}*.bin"))]
                for split in ("train", "val")]

    (train,), val = tokens("one")
    shards, val_again = tokens("x", "--shard_tokens", 30000)
    assert sum(shards, []) == train and val_again == val
    assert [len(shard) for shard in shards] == [22501, 22500, 22500, 22500]
    assert sorted(path.name for path in here.glob("x_*")) == [
        "x_tokenizer.bin", *(f"x_train_{number:06d}.bin" for number in range(4)),
        "x_val_000000.bin"]
    run_here(*command, "x", "--shard_tokens", 50000,
             fails=("x_train_000002.bin", "2 shards", "remove it"))
    assert tokens("x", "--shard_tokens", 30000) == [shards, val]
    run_here(*command, "x", fails=("x_train_000000.bin", "remove it"))
    run_here(*command, "one", "--shard_tokens", 30000, fails=("one_val.bin", "remove it"))
    hint = "x_train.bin: no such file; pass its shards, \"x_train_*.bin\""
    run_here(train_gpt2, *"-e d2 -i x -x 1 -o run".split(), fails=(hint,))


@pytest.mark.parametrize("name, data, words, flags", (
    ("empty.txt", b"", "empty.txt.*no text in 1 file", ""),
    ("w", b"\xff\xfeH\0", "iconv -f utf-16", ""),
    ("latin.txt", b"x" * 2500 + b"caf\xe9 ", "latin.txt.*not UTF-8.*byte 2503", ""),
    ("x.gz", b"\x1f\x8b", "gunzip", ""),
    ("short.txt", b"a", "2 tokens of text.*--val_fraction", ""),
    ("c.json", b'[{"text": "c"},', "not JSON.*--field ''", ""),
    ("c", b'{"story": "c"}\n{"story": "d"}\n', "c:1.*text in story.*--field NAME.*--field ''", ""),
    ("c.txt", b'{"text": "c"}\n{"text": "d"}\n{"text": 1}\n', "c.txt:3.*text in none of text", ""),
    ("a.jsonl", b'{"text": "a"}\n{"story": "b"}\n',
     "a.jsonl:2.*'text'.*found text in story.*--field NAME", ""),
    ("c.jsonl", b'{"text": "a"}\nnot JSON\n', "c.jsonl:2.*found 'not JSON': mend or", ""),
    ("d.jsonl", b'{"text": "a"}\n', "d.jsonl:1.*'story'", "--field story"),
    ("a.txt", TEXT, "none.txt.*no such file", "none.txt"),
    ("a.txt", TEXT, "*.none.*no file", "*.none"),
    ("f.txt", TEXT, "char/tokenizer.json: no such file.*gpt2, bytes, chars, bpe:N, a run or",
     "--vocabulary char"),
    ("j_train.bin", TEXT, "j_train.bin.*another --output", "--output j")),
    ids=lambda value: value if isinstance(value, str) else "")
def test_text_that_is_refused(here, vocabulary_here, run_here, monkeypatch, name, data, words,
                              flags):
    monkeypatch.setattr(reading, "PIECE", 1000)
    (here / name).write_bytes(data)
    flags = flags.split()
    run_here(prepro_text, "--output", "out/x", *([] if "." in flags else [name]), *flags,
             fails=words.split(".*"))
    assert not list(here.glob("out/*")) and (here / name).read_bytes() == data


@pytest.mark.parametrize("lines", (0, 300000))
@pytest.mark.parametrize("end", ("\n", " "))
def test_the_encoding_of_a_long_text(here, run_here, lines, end):
    """Of more than what is looked at, which may end within a letter."""
    text = f"渡轮中午离开，海鸥跟着它。我们数船，有四十艘。{end}".encode("gbk")
    Path("x.txt").write_bytes(b"text\n" * lines + text * 40000)
    run_here(prepro_text, "x.txt", "--vocabulary", "chars",
             fails=(f"byte {5 * lines}", "it looks like GBK: iconv"))


@pytest.mark.parametrize("text, words", (
    ("café\n", "save it as UTF-8: an editor"),
    ("Português: São Paulo, coração, não há informação.\n", "it may be Windows-1252 or")))
def test_an_encoding_that_cannot_be_told(here, run_here, text, words):
    """No hint is better than a wrong one; where several make plausible letters, it has them."""
    Path("x.txt").write_bytes(text.encode("cp1252"))
    run_here(prepro_text, "x.txt", "--vocabulary", "chars", fails=("x.txt: not UTF-8 text", words))


@pytest.mark.parametrize("encoding, kind, text", (
    ("gbk", "GBK", "渡轮中午离开，海鸥跟着它。我们数船，有四十艘。\n"),
    ("big5", "Big5", "渡輪中午離開，海鷗跟著牠。\n"),
    ("shift_jis", "Shift-JIS", "渡し船は正午に出て、かもめがついて行く。\n"),
    ("euc_jp", "EUC-JP", "私たちは港で船を数えた。カモメは四十羽いた。\n"),
    ("euc_kr", "EUC-KR", "배는 정오에 떠나고 갈매기가 따라간다.\n"),
    ("koi8-r", "KOI8-R", RUSSIAN), ("cp1251", "Windows-1251", RUSSIAN), ("cp866", "CP866", RUSSIAN),
    ("cp1252", "Windows-1252", "Die Fähre fährt mittags ab, Möwen folgen ihr über den See.\n"),
    ("cp1253", "Windows-1253", "Το πλοίο φεύγει το μεσημέρι και οι γλάροι το ακολουθούν.\n"),
    *((encoding, encoding[:6].upper(), text) for text in (RUSSIAN, "Hello world, this is text.\n")
      for encoding in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "utf-16", "utf-32"))))
@pytest.mark.parametrize("package", (True, False))
def test_other_encodings(here, run_here, monkeypatch, encoding, kind, text, package):
    """The command of the hint makes the text; without charset-normalizer, Unicode's alone do."""
    if not package:
        monkeypatch.setitem(sys.modules, "charset_normalizer", None)
    (here / "x.txt").write_bytes((60 * text).encode(encoding))
    told = package or kind.startswith("UTF")
    says = kind, "iconv -f" if told else "save it as UTF-8"
    done = run_here(prepro_text, "x.txt", "--vocabulary", "chars", check=False)
    assert_one_line_error(done, "x.txt: not UTF-8 text", *says[not told:])
    if told:
        assert f"looks like {kind}" in done.stderr and " or " not in done.stderr
        name = re.search("iconv -f ([^ ]+) ", done.stderr)[1]
        assert (here / "x.txt").read_bytes().decode(name) == 60 * text
    assert [*here.iterdir()] == [here / "x.txt"]


def test_json_is_found_by_what_is_in_a_file(here, prepare):
    """Not by its name; text that only begins so is text, and with --field '' all is."""
    flags = ("--vocabulary", "bytes", "--val_fraction", 0.5)
    lines, array = '{"text": "one"}\n\n{"text": "two"}\n', ' [\n{"text": "one"},\n{"text": "two"}]'
    for name, data in (
            ("a.txt", lines), ("b", lines), ("c.json", lines), ("d.jsonl", lines), ("e.txt", array),
            ("f", array), ("g.jsonl", array), ("h.log", lines + "\n"), ("i", "\ufeff" + lines)):
        Path(name).write_text(data)
        tokens, tokenizer, printed = prepare(name, *flags)
        assert printed.startswith("2 documents in 1 file")
        assert sorted(text_of(tokens, tokenizer).split(EOT)) == ["", "one", "two"]
        tokens, tokenizer, printed = prepare(name, *flags, "--field", "")
        assert printed.startswith("1 document in 1 file") and "{" in text_of(tokens, tokenizer)
    texts = ('{"text": "x"} is an object,\nas here.\n', '{\n  "text": "x"\n}\n', "{ and {\n{}\n",
             "[a link](x)\n", '{"text": "x"}\nand\nmore\n', "[1, 2]\n", "{'text': 'x'}\n",
             '["text"]\n', "{" * 9999)
    (here / "folder").mkdir()
    for i, data in enumerate((*texts, '{"name": "x"}\n{"name": "y"}\n', '[{"name": "x"}]')):
        Path(f"folder/{i}.txt").write_text(data)
        if data in texts:
            tokens, tokenizer, printed = prepare(f"folder/{i}.txt", *flags)
            assert text_of(tokens, tokenizer) == f"{EOT}{data}"
    assert prepare("folder", *flags)[2].startswith("11 documents in 11 files\n")


@pytest.mark.parametrize("vocabulary", ("gpt2", "bytes", "chars", "bpe:600"))
def test_end_of_text_within_a_text(here, vocabulary_here, prepare, vocabulary):
    """is the token, in every vocabulary, and adds no letters to one of characters."""
    Path("x.txt").write_text(f"one{EOT}two {EOT}\n" * 40)
    tokens, tokenizer, _ = prepare("x.txt", "--vocabulary", vocabulary)
    found = text_of(tokens, tokenizer)  # in another order: documents to validate are drawn
    assert tokens.count(tokenizer.eot) == found.count(EOT) == 121 - 40
    assert sorted(found.split(EOT)) == sorted(["", "one", *["\none"] * 39, *["two "] * 40, "\n"])
    assert not [token for token in tokenizer.tokens if b"endof" in token and token != EOT.encode()]
    assert vocabulary != "chars" or len(tokenizer.tokens) == len(set("one two\n")) + 1


@pytest.mark.parametrize("call", range(3))
def test_a_full_disk_leaves_all_files_of_before(here, run_here, at_call, call):
    """Tokens for validation and for training, and the vocabulary."""
    Path("x.txt").write_text("abc\n" * 100)
    run_here(prepro_text, "x.txt", "--vocabulary", "bytes", "--output", "x")
    before = {path.name: path.read_bytes() for path in here.iterdir()}
    at_call(os, "fsync", call, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    Path("y.txt").write_text("abd\n" * 900)
    run_here(prepro_text, "y.txt", "--vocabulary", "chars", "--output", "x",
             fails=("x_", "No space left on device"))
    Path("y.txt").unlink()
    assert {path.name: path.read_bytes() for path in here.iterdir()} == before


def test_numpy_alone_is_enough_for_own_text(tmp_path):
    for path in Path(np.__file__).parent.parent.glob("numpy*"):  # numpy.libs, too
        (tmp_path / path.name).symlink_to(path)

    def run(program, *flags):
        # -S: without the packages installed here
        command = [sys.executable, "-S", ROOT / program, *map(str, flags)]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)},
                              cwd=tmp_path, text=True, capture_output=True)

    (tmp_path / "x.jsonl").write_text(1000 * (json.dumps({"text": 4 * "ääöü\n"}) + "\n"))
    (tmp_path / "x.log").write_text("s:0 trl:4.1\n")
    done = [run("prepro_text.py", "x.jsonl", "--vocabulary", "chars", "--output", "x"),
            run("train_gpt2.py", "-e", "d2", "-i", "x", "-o", "run", "-t", 16, "-x", 10, "-g", 40),
            run("generate.py", "run", "--prompt", "ä", "--tokens", 14),
            run("evaluate.py", "run", "--data", "x", "--tokens", 500),
            run("export_weights.py", "--model", "run", "--output_dir", "out", "--debug_state", 0)]
    assert [(program.returncode, program.stderr) for program in done] == 5 * [(0, "")]
    assert ("vocabulary of 5 tokens" in done[0].stdout
            and "tokenizer=x_tokenizer.bin" in done[1].stdout)
    for sample in done[1].stdout.split("---\n")[1], done[2].stdout:
        assert (len(re.findall("[äöü]", sample)) > 5
                and not set(sample) - set("äöü\n\ufffd<|endoftext|>"))
    assert "bits per byte" in done[3].stdout
    for command, missing in (("prepro_text.py x.jsonl", "tiktoken"),
                             ("prepro_tinyshakespeare.py", "requests"),
                             ("dev/plot_log.py x.log", "matplotlib"),
                             ("export_weights.py", "huggingface_hub")):
        assert_one_line_error(run(*command.split()), f"pip install {missing}")


# --------------------------------------------------------------------------------------------------
# FineWeb


def test_parquet(here, run_here, monkeypatch):
    """A row is a document, of the column that --field names; in a folder, too."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = ["One. ", "", None, "Two\r\nlines. ", "Three. "]
    (here / "texts").mkdir()
    parquet.write_table(pyarrow.table({"id": range(5), "page": texts}), "texts/some.data",
                        row_group_size=2)
    command = prepro_text, "--vocabulary", "bytes", "--output", "x", "--val_fraction", 0.3
    done = run_here(*command, "texts", "--field", "page")
    assert done.stdout.startswith("3 documents in 1 file\n")
    tokens = np.concatenate([open_tokens(f"x_{split}.bin", 257) for split in ("train", "val")])
    documents = np.split(tokens, np.flatnonzero(tokens == 256))[1:]
    assert (sorted(bytes(ids[1:].tolist()) for ids in documents)
            == [b"One. ", b"Three. ", b"Two\nlines. "])
    run_here(*command, "texts/some.data",
             fails=("some.data: has columns id, page", "'text'", "--field NAME"))
    run_here(*command, "texts/some.data", "--field", "id", fails=("some.data: row 1: expected",))
    Path("cut.parquet").write_bytes(Path("texts/some.data").read_bytes()[:-9])
    run_here(*command, "cut.parquet", fails=("cut.parquet: not a Parquet file",))


def test_pystdlib(prepare, monkeypatch):
    """The source code up to its limit, here a smaller one, and the English of one package."""
    monkeypatch.setattr(pystdlib, "LIMIT", 1_000_000)
    tokens, _, printed = prepare("--format", "uint16", program=pystdlib)
    assert printed.startswith("Saved 65536 tokens to out/x_val.bin\nSaved 934464 tokens to"
                              " out/x_train.bin\n")
    assert len(tokens) == 1_000_000 and tokens[934464] == 256
    assert b"def __init__(self" in bytes(token for token in tokens if token != 256)
    monkeypatch.setattr(pystdlib.sysconfig, "get_path",
                        lambda name: str(Path(asyncio.__file__).parent))
    text = text_of(*prepare("--prose", program=pystdlib)[:2])
    assert len(text) > 20_000 and text.isascii() and "event loop" in text and "    def " not in text
