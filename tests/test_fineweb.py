"""prepro_fineweb.py: shards from a hub on this machine that fails half-way, and from parquet that the tests make."""

import functools
import os
from types import SimpleNamespace

import huggingface_hub.file_download as download
import numpy as np
import pytest

import prepro
import prepro_fineweb
from conftest import Server, hub_pages
from llmc.dataloader import open_tokens, write_tokens
from llmc.files import locked
from llmc.tokenizer import read_tokenizer
from prepro_fineweb import READY_MADE
from vocabulary import load_encoding

NAMES = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 60))]


def files_seen(server):
    """[(name, first byte)] of the hub's files that were downloaded."""
    return [(path.partition("/resolve/main/")[2], first) for method, path, first in server.seen
            if method == "GET" and "/resolve/" in path]


def Hub(repository, files, hashes=None):
    return Server(hub_pages(f"datasets/{repository}", files, hashes))


def make_shards(prefix, counts, directory):
    """{name: bytes} of token shards of random tokens."""
    files = {}
    for i, count in enumerate(counts):
        tokens = np.random.default_rng(i).integers(0, 50257, count)
        write_tokens(directory / "shard", [tokens], count, "uint16")
        files[f"{prefix}_{'train' if i else 'val'}_{i:06d}.bin"] = (directory / "shard").read_bytes()
    return files


@pytest.fixture
def fetch(tmp_path, vocabulary_here, monkeypatch, run_here, use_hub):
    """fetch(hub, flag, ..., fails=words of its error): the program; huggingface_hub tries again without waiting."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(download.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    monkeypatch.setattr(prepro_fineweb.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**12))

    def run(server, *flags, fails=()):
        use_hub(server if isinstance(server, str) else server.url, tmp_path / "home")
        return run_here(prepro_fineweb, *flags, fails=fails)

    return run


def test_ready_made_shards(tmp_path, fetch):
    """The validation shard and the first N others; more of them later; what is there and whole is kept."""
    files = make_shards("fineweb", [3000, 5000, 4000, 70], tmp_path)
    with Hub("kjj0/fineweb10B-gpt2", files) as server:
        done = fetch(server, "--shards", 1)
        assert done.stdout == (
            "kjj0/fineweb10B-gpt2: 2 shards, 2 to download, about 0.0 GB to write; data/fineweb10B has 1000.0 GB free\n"
            "Saved 3000 tokens to data/fineweb10B/fineweb_val_000000.bin\n"
            "Saved 5000 tokens to data/fineweb10B/fineweb_train_000001.bin\n")
        assert [name for name, _ in files_seen(server)] == NAMES[:2]
        folder = tmp_path / "data" / "fineweb10B"
        (folder / NAMES[1]).write_bytes(b"cut short")
        done = fetch(server)
        assert "4 shards, 3 to download" in done.stdout and [name for name, _ in files_seen(server)[2:]] == NAMES[1:4]
        assert sorted(os.listdir(folder)) == sorted([*NAMES[:4], "fineweb_tokenizer.bin"])
        assert {name: (folder / name).read_bytes() for name in files} == files
        assert len(read_tokenizer(folder / "fineweb_tokenizer.bin").tokens) == 50257
        assert "4 shards, 0 to download" in fetch(server).stdout and len(files_seen(server)) == 5


@pytest.mark.parametrize("flags, prefix, directory, name", (
    (["--edu"], "finewebedu", "data/edu_fineweb100B", "edu_fineweb"),
    (["--output", "here"], "fineweb", "here", "fineweb"),
))
def test_the_other_sets(tmp_path, fetch, flags, prefix, directory, name):
    """Whatever shards are called there, they have llm.c's names here."""
    files = make_shards(prefix, [100, 200], tmp_path)
    with Hub(READY_MADE["--edu" in flags, "100B"], files) as server:
        fetch(server, "--size", "100B", *flags)
    expected = dict(zip((f"{name}_val_000000.bin", f"{name}_train_000001.bin"), files.values()))
    assert {path.name: path.read_bytes() for path in (tmp_path / directory).glob("*_0*")} == expected


def test_a_connection_that_breaks_goes_on_where_it_was(tmp_path, fetch, monkeypatch):
    """And where the server stays away, whole shards stay, with which the same command goes on."""
    files, folder = make_shards("fineweb", [100, 200, 400000], tmp_path), tmp_path / "data" / "fineweb10B"
    with Hub("kjj0/fineweb10B-gpt2", files) as server:
        fetch(server, "--shards", 1)
        server.cuts = 10**6
        fetch(server, fails=(NAMES[2], "the download failed", "the same command"))
        assert {path.name: path.read_bytes() for path in folder.glob("*_0*")} == dict(list(files.items())[:2])
        server.seen, server.cuts, server.after = [], 3, 300000
        assert "3 shards, 1 to download" in fetch(server).stdout
        assert [first for _, first in files_seen(server)] == [0, 4 << 16, 8 << 16], "not from the start again"
        assert (folder / NAMES[2]).read_bytes() == files[NAMES[2]] and not (folder / ".download").exists()
        monkeypatch.setattr(prepro_fineweb.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        fetch(server, "--output", "other", fails=("other", "0.0 GB free", "--shards N", "--output"))
    fetch("http://127.0.0.1:9", fails=("kjj0/fineweb10B-gpt2: cannot be listed", "refused"))


def test_what_is_not_what_the_hub_says_is_refused(tmp_path, fetch):
    files = make_shards("fineweb", [100, 200], tmp_path)
    with Hub("kjj0/fineweb10B-gpt2", files, {NAMES[0]: "0" * 64}) as server:
        fetch(server, fails=(NAMES[0], "SHA-256", "expected 0000"))
    for repository, changed, words in (
            ("kjj0/fineweb10B-gpt2", {**files, NAMES[0]: files[NAMES[0]][:-2]}, (NAMES[0], "cut short")),
            ("kjj0/fineweb10B-gpt2", {**files, NAMES[0]: np.int32(50257).tobytes()}, (NAMES[0], "token id 50257")),
            ("kjj0/fineweb10B-gpt2", {"fineweb_000000.npy": b"another kind"}, ("holds no shards", "--parquet")),
            ("somebody/else", files, ("kjj0/fineweb10B-gpt2: cannot be listed", "404"))):
        with Hub(repository, changed) as server:
            fetch(server, fails=words)
    assert not list((tmp_path / "data" / "fineweb10B").glob("*_0*"))


TEXTS = [f"Document {i}. " + "To be, or not to be: that is the question. " * (i * 7919 % 50) for i in range(900)]
TEXTS[5], TEXTS[300] = "", "<|endoftext|> é 日本 \U0001f600"


def write_parquet(path, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path, row_group_size=128)


@pytest.fixture
def folder(tmp_path, vocabulary_here, monkeypatch):
    """A directory with TEXTS in three files, which is the current one."""
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        write_parquet(f"{i}.parquet", id=range(300), text=TEXTS[300 * i : 300 * (i + 1)])
    return tmp_path


def expected_tokens():
    encoding = load_encoding("gpt2")
    return [id for text in TEXTS for id in (50256, *encoding.encode_ordinary(text))]


def shards_of(directory, name="fineweb"):
    paths = sorted(directory.glob(f"{name}_*_0*.bin"), key=lambda path: path.name[-10:])
    assert [path.name for path in paths] == [entry.replace("fineweb", name) for entry in NAMES[: len(paths)]]
    return [open_tokens(path, 50257).tolist() for path in paths]


@pytest.fixture
def tokenize(folder, run_here):
    """tokenize(flag, ...): of all three files, in this process and one worker at most."""
    return functools.partial(run_here, prepro_fineweb, "--input", "*.parquet", "--output", "out", "--processes", 1,
                             "--shard_tokens", 50000)


@pytest.mark.parametrize("processes", (1, 2))
def test_parquet(tmp_path, tokenize, monkeypatch, processes):
    """Shards of that many tokens, the last one shorter, whatever the processes and their portions."""
    monkeypatch.setattr(prepro_fineweb, "DOCUMENTS", 7)
    monkeypatch.setattr(prepro_fineweb, "in_processes", lambda function, jobs, _: prepro.in_processes(
        function, jobs, processes))
    done = tokenize("--edu")
    shards = shards_of(tmp_path / "out", "edu_fineweb")
    assert sum(shards, []) == expected_tokens() and len(shards) > 3
    assert {len(shard) for shard in shards[:-1]} == {50000} and 0 < len(shards[-1]) <= 50000
    assert done.stdout.startswith("3 parquet files of 0.0 GB, 0 shards done, about 0.0 GB to write; out has ")
    assert f"Saved 50000 tokens to out/edu_{NAMES[1]}" in done.stdout


def test_it_goes_on_after_an_interruption(tmp_path, tokenize, monkeypatch):
    """At each shard in turn: whole shards are neither made again nor lost, and their text is not read again."""
    tokenized, real, size = [], prepro_fineweb.tokenize, 30001
    monkeypatch.setattr(prepro_fineweb, "DOCUMENTS", 16)
    monkeypatch.setattr(prepro_fineweb, "tokenize", lambda job: tokenized.append(len(job[2])) or real(job))
    out = tmp_path / "out"
    for shards in range(1, 30):
        before = {path.name: path.stat().st_mtime_ns for path in out.glob("*_0*")}
        done = tokenize("--shards", shards, "--shard_tokens", size)
        assert all(before[name] == (out / name).stat().st_mtime_ns for name in before)
        if "Saved" not in done.stdout:
            break
    assert sum(shards_of(out), []) == expected_tokens() and 4 < shards < 29
    assert sum(tokenized) < 900 + 2 * shards * 16
    (out / NAMES[2]).write_bytes(b"cut short")
    tokenize("--shard_tokens", size)
    assert sum(shards_of(out), []) == expected_tokens()


def test_parquet_from_the_hub(tmp_path, folder, fetch):
    """A file at a time, each removed once its text is in shards; restarted where the server failed."""
    files = {f"sample/10BT/{i:03}.parquet": (folder / f"{i}.parquet").read_bytes() for i in range(3)}
    flags, out = ("--parquet", "--shard_tokens", 50000, "--processes", 1), tmp_path / "data" / "fineweb10B"
    with Hub("HuggingFaceFW/fineweb", files) as server:
        fetch(server, *flags, "--shards", 1)
        assert [name for name, _ in files_seen(server)] == ["sample/10BT/000.parquet", "sample/10BT/001.parquet"]
        server.cuts = 10**6
        fetch(server, *flags, fails=(".parquet", "the download failed", "the same command"))
        server.cuts = 0
        assert "3 parquet files of 0.0 GB, 2 shards done" in fetch(server, *flags).stdout
    assert sum(shards_of(out), []) == expected_tokens() and not (out / ".download").exists()


def test_what_is_refused(tokenize, folder, run_here, monkeypatch):
    program = functools.partial(run_here, prepro_fineweb, "--processes", 1)
    tokenize("--shards", 1)
    for name in ("damaged", "cut"):
        (folder / f"{name}.parquet").write_bytes((folder / "1.parquet").read_bytes())
    with open("damaged.parquet", "r+b") as f:
        f.seek(200)
        f.write(bytes(1800))
    os.truncate("cut.parquet", 9999)
    write_parquet("title.parquet", title=["a"], id=[1])
    write_parquet("number.parquet", text=[1])
    write_parquet("short.parquet", text=[""] * 40)
    for flags, words in (
            (("--shards", 0), ("--shards 0",)), (("--processes", 0), ("--processes 0",)),
            (("--shard_tokens", 5), ("--shard_tokens 5", "--parquet")),
            (("--input", "none*.parquet"), ("none*.parquet", "no file matches")),
            (("--input", "none.parquet"), ("none.parquet", "no such file")),
            (("--input", "*.parquet", "--output", "out"), ("not a parquet file",)),
            (("--input", "0.parquet", "--output", "out"), ("out/parquet.json", "--shard_tokens", "another --output")),
            (("--output", "out"), ("out: its shards are made from parquet", "another --output")),
            (("--input", "cut.parquet", "--output", "o"), ("cut.parquet", "not a parquet file")),
            (("--input", "title.parquet", "--output", "o"), ("title.parquet", "columns title, id", "'text'")),
            (("--input", "number.parquet", "--output", "o"), ("number.parquet", "int64", "strings")),
            (("--input", "damaged.parquet", "--output", "o"), ("damaged.parquet", "row group 0 cannot be read")),
            (("--input", "short.parquet", "--output", "o", "--shard_tokens", 40),
             ("40 tokens of text, expected more than the 40 ", "--shard_tokens"))):
        program(*flags, fails=words)
    (folder / "out" / "parquet.json").write_text('{"shards": 1}')
    program("--input", "0.parquet", "--output", "out", fails=("parquet.json", "cannot be read", "remove it"))
    (folder / "out" / "parquet.json").unlink()
    program("--input", "0.parquet", "--output", "out", fails=(NAMES[0], "not made from parquet", "another --output"))
    with locked("out", True):
        program("--input", "0.parquet", "--output", "out", fails=("another run writes there", "another --output"))
    monkeypatch.setattr(prepro_fineweb, "parquet", None)
    program("--input", "0.parquet", fails=("pyarrow", "pip install pyarrow"))
