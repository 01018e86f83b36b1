"""prepro/fineweb.py: shards from a hub on this machine that fails half-way, and from parquet that the tests make."""

import functools
from types import SimpleNamespace

import huggingface_hub.file_download as download
import numpy as np
import pytest

from conftest import Server, hub_pages
from llmc.dataloader import open_tokens, write_tokens
from llmc.files import locked
from llmc.tokenizer import read_tokenizer
from llmc.vocabulary import open_vocabulary
from prepro import fineweb
from prepro.fineweb import READY_MADE

NAMES = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 60))]
TEXTS = [f"Document {i}. " + "To be, or not to be: that is the question. " * (i * 7919 % 50) for i in range(900)]
TEXTS[5], TEXTS[300] = "", "<|endoftext|> é 日本 \U0001f600"


def files_seen(server):
    """[(name, first byte)] of the hub's files that were downloaded."""
    return [(path.partition("/resolve/main/")[2], first) for method, path, first in server.seen
            if method == "GET" and "/resolve/" in path]


def Hub(files, hashes=None, repository="kjj0/fineweb10B-gpt2"):
    return Server(hub_pages(f"datasets/{repository}", files, hashes))


def make_shards(prefix, counts, directory):
    files = {}
    for i, count in enumerate(counts):
        tokens = np.random.default_rng(i).integers(0, 50257, count)
        write_tokens(directory / "shard", [tokens], count, "uint16")
        files[f"{prefix}_{'train' if i else 'val'}_{i:06d}.bin"] = (directory / "shard").read_bytes()
    return files


@pytest.fixture
def fetch(tmp_path, vocabulary_here, monkeypatch, run_here, use_hub):
    """fetch(hub, flag, ..., fails=words of its error): the program; huggingface_hub tries again without waiting."""
    def run(server, *flags, fails=()):
        use_hub(server if isinstance(server, str) else server.url, tmp_path / "home")
        return run_here(fineweb, *flags, fails=fails)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(download.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    monkeypatch.setattr(fineweb.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**12))
    return run


@pytest.mark.parametrize("flags, repository, theirs, directory, ours", (
    ([], "kjj0/fineweb10B-gpt2", "fineweb", "data/fineweb10B", "fineweb"),
    (["--size", "100B", "--edu"], READY_MADE[True, "100B"], "finewebedu", "data/edu_fineweb100B", "edu_fineweb"),
    (["--size", "100B", "--output", "here"], READY_MADE[False, "100B"], "fineweb", "here", "fineweb")))
def test_ready_made_shards(tmp_path, fetch, flags, repository, theirs, directory, ours):
    """With llm.c's names: one to validate and the first N others; more later; what is there and whole is kept."""
    files, folder = make_shards(theirs, [3000, 5000, 4000, 70], tmp_path), tmp_path / directory
    expected = {f"{ours}_{name.partition('_')[2]}": data for name, data in files.items()}
    there, here = list(files), list(expected)
    with Hub(files, repository=repository) as server:
        assert fetch(server, *flags, "--shards", 1).stdout == (
            f"{repository}: 2 shards, 2 to download, about 0.0 GB to write; {directory} has 1000.0 GB free\n"
            f"Saved 3000 tokens to {directory}/{here[0]}\nSaved 5000 tokens to {directory}/{here[1]}\n")
        (folder / here[1]).write_bytes(b"cut short")
        assert "4 shards, 3 to download" in fetch(server, *flags).stdout
        assert {path.name: path.read_bytes() for path in folder.glob("*_0*")} == expected
        assert len(read_tokenizer(folder / f"{ours}_tokenizer.bin").tokens) == 50257
        assert "4 shards, 0 to download" in fetch(server, *flags).stdout and len(list(folder.iterdir())) == 5
        assert [name for name, _ in files_seen(server)] == there[:2] + there[1:]


def test_a_connection_that_breaks_goes_on_where_it_was(tmp_path, fetch, monkeypatch):
    """And where the server stays away, whole shards stay, with which the same command goes on."""
    files, folder = make_shards("fineweb", [100, 200, 400000], tmp_path), tmp_path / "data" / "fineweb10B"
    with Hub(files) as server:
        fetch(server, "--shards", 1)
        server.cuts = 10**6
        fetch(server, fails=(NAMES[2], "the download failed", "the same command"))
        assert {path.name: path.read_bytes() for path in folder.glob("*_0*")} == dict(list(files.items())[:2])
        server.seen, server.cuts, server.after = [], 3, 300000
        assert "3 shards, 1 to download" in fetch(server).stdout
        assert [first for _, first in files_seen(server)] == [0, 4 << 16, 8 << 16], "not from the start again"
        assert (folder / NAMES[2]).read_bytes() == files[NAMES[2]] and not (folder / ".download").exists()
        monkeypatch.setattr(fineweb.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        fetch(server, "--output", "other", fails=("other", "0.0 GB free", "--shards N", "--output"))
    fetch("http://127.0.0.1:9", fails=("kjj0/fineweb10B-gpt2: cannot be listed", "refused"))


def test_what_is_not_what_the_hub_says_is_refused(tmp_path, fetch):
    files = make_shards("fineweb", [100, 200], tmp_path)
    for hub, words in ((Hub(files, {NAMES[0]: "0" * 64}), (NAMES[0], "SHA-256", "expected 0000")),
            (Hub({**files, NAMES[0]: files[NAMES[0]][:-2]}), (NAMES[0], "cut short")),
            (Hub({**files, NAMES[0]: np.int32(50257).tobytes()}), (NAMES[0], "token id 50257")),
            (Hub({"fineweb_000000.npy": b"another kind"}), ("holds no shards", "--parquet")),
            (Hub(files, repository="somebody/else"), ("kjj0/fineweb10B-gpt2: cannot be listed", "404"))):
        with hub as server:
            fetch(server, fails=words)
    assert not list((tmp_path / "data" / "fineweb10B").glob("*_0*"))


def write_parquet(path, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path, row_group_size=128)


@pytest.fixture
def expected(tmp_path, vocabulary_here, monkeypatch):
    """The tokens of TEXTS, which the current directory has in three files."""
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        write_parquet(f"{i}.parquet", id=range(300), text=TEXTS[300 * i : 300 * (i + 1)])
    encoding = open_vocabulary("gpt2").encoding
    return [id for text in TEXTS for id in (50256, *encoding.encode_ordinary(text))]


def shards_of(directory, name="fineweb"):
    paths = sorted(directory.glob(f"{name}_*_0*.bin"), key=lambda path: path.name[-10:])
    assert [path.name for path in paths] == [entry.replace("fineweb", name) for entry in NAMES[: len(paths)]]
    return [open_tokens(path, 50257).tolist() for path in paths]


@pytest.fixture
def tokenize(expected, run_here):
    """tokenize(flag, ...): of all three files, in this process."""
    return functools.partial(run_here, fineweb, "--input", "*.parquet", "--output", "out", "--processes", 1,
                             "--shard_tokens", 50000)


def test_it_goes_on_after_an_interruption(tmp_path, tokenize, expected, monkeypatch):
    """At each shard in turn: whole shards are neither made again nor lost, and their text is not read again."""
    tokenized, real, size = [], fineweb.tokenize, 30001
    monkeypatch.setattr(fineweb, "DOCUMENTS", 16)
    monkeypatch.setattr(fineweb, "tokenize", lambda job: tokenized.append(len(job[2])) or real(job))
    out = tmp_path / "out"
    for shards in range(1, 30):
        before = {path.name: path.stat().st_mtime_ns for path in out.glob("*_0*")}
        done = tokenize("--shards", shards, "--shard_tokens", size, "--edu")
        assert all(before[name] == (out / name).stat().st_mtime_ns for name in before)
        if "Saved" not in done.stdout:
            break
        assert done.stdout.startswith(f"3 parquet files of 0.0 GB, {len(before)} shards done, about 0.0 GB to write; ")
    *whole, last = shards_of(out, "edu_fineweb")
    assert sum(whole, []) + last == expected and {len(shard) for shard in whole} == {size} and 0 < len(last) <= size
    assert 4 < shards < 29 and sum(tokenized) < 900 + 2 * shards * 16
    (out / f"edu_{NAMES[2]}").write_bytes(b"cut short")
    tokenize("--shard_tokens", size, "--edu")
    assert shards_of(out, "edu_fineweb") == [*whole, last]


def test_parquet_from_the_hub(tmp_path, expected, fetch):
    """A file at a time, each removed once its text is in shards, by two processes; again where the server failed."""
    files = {f"sample/10BT/{i:03}.parquet": (tmp_path / f"{i}.parquet").read_bytes() for i in range(3)}
    flags, out = ("--parquet", "--shard_tokens", 50000, "--processes", 2), tmp_path / "data" / "fineweb10B"
    with Hub(files, repository="HuggingFaceFW/fineweb") as server:
        fetch(server, *flags, "--shards", 1)
        assert [name for name, _ in files_seen(server)] == ["sample/10BT/000.parquet", "sample/10BT/001.parquet"]
        server.cuts = 10**6
        fetch(server, *flags, fails=(".parquet", "the download failed", "the same command"))
        server.cuts = 0
        assert "3 parquet files of 0.0 GB, 2 shards done" in fetch(server, *flags).stdout
    assert sum(shards_of(out), []) == expected and not (out / ".download").exists()


def test_what_is_refused(tokenize, tmp_path, run_here, monkeypatch):
    tokenize("--shards", 1)
    good = (tmp_path / "1.parquet").read_bytes()
    (tmp_path / "damaged.parquet").write_bytes(good[:200] + bytes(1800) + good[2000:])
    (tmp_path / "cut.parquet").write_bytes(good[:9999])
    write_parquet("title.parquet", title=["a"], id=[1])
    write_parquet("number.parquet", text=[1])
    write_parquet("short.parquet", text=[""] * 40)
    for flags, words in ((("--shards", 0), ["--shards 0"]), (("--processes", 0), ["--processes 0"]),
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
        run_here(fineweb, "--processes", 1, *flags, fails=words)
    (tmp_path / "out" / "parquet.json").write_text('{"shards": 1}')
    tokenize("--input", "0.parquet", fails=("parquet.json", "cannot be read", "remove it"))
    (tmp_path / "out" / "parquet.json").unlink()
    tokenize("--input", "0.parquet", fails=(NAMES[0], "not made from parquet", "another --output"))
    with locked("out", True):
        tokenize("--input", "0.parquet", fails=("another run writes there", "another --output"))
    monkeypatch.setattr(fineweb, "parquet", None)
    tokenize("--input", "0.parquet", fails=("pyarrow", "pip install pyarrow"))
