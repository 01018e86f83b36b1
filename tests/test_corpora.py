"""The corpora that programs download, with a server and a hub on this machine: hashes, shards, faults
of the network."""

import hashlib
import json
import os
import random
import tarfile
from types import SimpleNamespace

import huggingface_hub.file_download as download
import numpy as np
import pytest

import prepro_tinyshakespeare
from conftest import Server, hub_pages
from llmc.dataloader import open_tokens, write_tokens
from llmc.errors import UserError
from llmc.tokenizer import read_tokenizer
from llmc.vocabulary import open_vocabulary
from prepro import common, fineweb, tinystories
from prepro.fineweb import REPOSITORIES


@pytest.mark.parametrize("format, val, train", (
    ("int32", "5dcd79e2f05f2f6cbc3a440565105367c12f148c4e01a3283a4307921f5f9945",
     "fe4dddf0265c5cf586e0684534932890dab01a74c358b8378f1a3d41cbdba429"),
    ("uint16", "fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62",
     "8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8")))
def test_tiny_shakespeare(tmp_path, tiny_shakespeare, vocabulary_here, run_here, format, val,
                          train):
    """llm.c's hashes; downloaded once, and no text of the user's is written over, by neither
    download nor tokens."""
    output = tmp_path / "data" / "ts"
    with Server({"/input.txt": (200, {}, tiny_shakespeare.read_bytes())}) as server:
        command = (prepro_tinyshakespeare, "--url", f"{server.url}/input.txt", "--output", output,
                   "--format", format)
        for _ in range(2):
            done = run_here(*command)
            assert done.stderr == "", "no progress bar"
        assert done.stdout == (f"Saved 32768 tokens to {output}_val.bin\nSaved 305260 tokens to"
                               f" {output}_train.bin\nSaved the vocabulary of 50257 tokens to"
                               f" {output}_tokenizer.bin\n")
        tokenizer = "6f3abc21e444e4e8300e225f4e03da48ea121cf17e30f67009b8dad7a66c2f13"
        for name, expected in (("val", val), ("train", train), ("tokenizer", tokenizer)):
            assert (hashlib.sha256((tmp_path / "data" / f"ts_{name}.bin").read_bytes()).hexdigest()
                    == expected)
        mine = [tmp_path / "data" / name
                for name in ("tiny_shakespeare.txt", "ts_val.bin", "ts_tokenizer.bin")]
        for path in mine:
            path.write_text("my text\n\n" * 20000)
        run_here(*command, fails=(mine[0], "move it away", "--input"))
        for path in mine[1:]:
            run_here(*command, "--input", path, fails=(path, "another --output"))
        assert len(server.seen) == 1 and len({path.read_bytes() for path in mine}) == 1


@pytest.mark.parametrize("pages, words", (
    ({"/x": (200, {}, b"another text")}, ("MD5", "expected 6fb458f1232090904fb40fe944165e91")),
    ({}, ["404"]),
    ({"/x": (200, {"Content-Length": 500}, b"cut short")}, ("failed",)),
    ({"/x": (302, {"Location": "http://127.0.0.1:9/"}, b"")}, ("refused",))))
def test_a_failed_download_leaves_nothing(tmp_path, run_here, pages, words):
    with Server(pages) as server:
        url = f"{server.url}/x"
        run_here(prepro_tinyshakespeare, "--url", url, "--output", tmp_path / "data" / "ts",
                 fails=(url, "--input", *words))
    assert ([path.name for path in tmp_path.rglob("*")]
            == (["data"] if 200 in pages.get("/x", ()) else []))


def test_tinystories(here, vocabulary_here, run_here, use_hub):
    """Of a folder with shards; and of a hub's archive, then of its cache."""
    (here / "shards").mkdir()
    expected = []
    encoding = open_vocabulary("gpt2").encoding  # expected: tokens of each shard
    for shard in range(3):
        stories = [f" Shard {shard}, story {i}. The end.\n" for i in range(5)]
        records = [{"story": story, "source": "x"} for story in stories]
        (here / "shards" / f"data{shard:02d}.json").write_text(json.dumps(records))
        random.Random((1337, 1337, 1338)[shard]).shuffle(stories)  # llm.c's: each split begins anew
        expected.append([token for story in stories
                         for token in [50256, *encoding.encode_ordinary(story.strip())]])
    with tarfile.open("archive", "w:gz") as archive:
        archive.add("shards", "")
    command = tinystories, "--input", "shards", "--format", "uint16", "--output"
    for processes in (1, 2):
        run_here(*command, f"ts{processes}", "--processes", processes)
        val, train = (open_tokens(f"ts{processes}_{split}.bin", 50257).tolist()
                      for split in ("val", "train"))
        assert [val, train] == [expected[0], expected[1] + expected[2]]
        assert len(read_tokenizer(f"ts{processes}_tokenizer.bin").tokens) == 50257
    (here / "shards" / "data01.json").write_text('[{"title": "no story"}]')
    run_here(*command, "bad", "--processes", 1, fails=("data01.json", "'story'"))
    assert not list(here.glob("bad_*"))
    files = {"TinyStories_all_data.tar.gz": (here / "archive").read_bytes()}
    pages = hub_pages("datasets/roneneldan/TinyStories", files)
    for output, home, online, fails in (("ts", "home", True, ()), ("again", "home", False, ()),
                                        ("other", "home2", False,
                                         ("TinyStories_all_data.tar.gz", "--input DIR"))):
        with Server(pages) as server:
            use_hub(server.url if online else None, here / home)
            run_here(tinystories, "--processes", 1, "--output", output, fails=fails)
        assert fails or open_tokens(f"{output}_val.bin", 50257).tolist() == expected[0]


def test_a_killed_worker_is_noticed():
    pytest.raises(UserError, list,
                  common.in_processes(os._exit, [1], 2)).match("--processes 2: .* killed")


NAMES = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 60))]


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
        files[f"{prefix}_{'train' if i else 'val'}_{i:06d}.bin"] = (directory
                                                                    / "shard").read_bytes()
    return files


@pytest.fixture
def fetch(here, vocabulary_here, monkeypatch, run_here, use_hub):
    """fetch(hub, flag, ..., fails=words of its error): the program; huggingface_hub tries again
    without waiting."""
    def run(server, *flags, fails=()):
        use_hub(server if isinstance(server, str) else server.url, here / "home")
        return run_here(fineweb, *flags, fails=fails)

    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(download.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    monkeypatch.setattr(fineweb.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**12))
    return run


@pytest.mark.parametrize("flags, repository, theirs, directory, ours", (
    ([], "kjj0/fineweb10B-gpt2", "fineweb", "data/fineweb10B", "fineweb"),
    (["--size", "100B", "--edu"], REPOSITORIES[True, "100B"], "finewebedu", "data/edu_fineweb100B",
     "edu_fineweb"),
    (["--size", "100B", "--output", "here"], REPOSITORIES[False, "100B"], "fineweb", "here",
     "fineweb")))
def test_ready_made_shards(tmp_path, fetch, flags, repository, theirs, directory, ours):
    """With llm.c's names: one to validate and the first N others; more later; what is there and
    whole is kept."""
    files = make_shards(theirs, [3000, 5000, 4000, 70], tmp_path)
    folder = tmp_path / directory
    expected = {f"{ours}_{name.partition('_')[2]}": data for name, data in files.items()}
    there = list(files)
    here = list(expected)
    with Hub(files, repository=repository) as server:
        assert fetch(server, *flags, "--shards", 1).stdout == (
            f"{repository}: 2 shards, 2 to download, about 0.0 GB to write; {directory} has 1000.0"
            f" GB free\nSaved 3000 tokens to {directory}/{here[0]}\nSaved 5000 tokens to"
            f" {directory}/{here[1]}\n")
        (folder / here[1]).write_bytes(b"cut short")
        assert "4 shards, 3 to download" in fetch(server, *flags).stdout
        assert {path.name: path.read_bytes() for path in folder.glob("*_0*")} == expected
        assert len(read_tokenizer(folder / f"{ours}_tokenizer.bin").tokens) == 50257
        assert ("4 shards, 0 to download" in fetch(server, *flags).stdout
                and len(list(folder.iterdir())) == 5)
        assert [name for name, _ in files_seen(server)] == there[:2] + there[1:]


def test_a_connection_that_breaks_goes_on_where_it_was(tmp_path, fetch, monkeypatch):
    """And where the server stays away, whole shards stay, with which the same command goes on."""
    files = make_shards("fineweb", [100, 200, 400000], tmp_path)
    folder = tmp_path / "data" / "fineweb10B"
    with Hub(files) as server:
        fetch(server, "--shards", 1)
        server.cuts = 10**6
        fetch(server, fails=(NAMES[2], "the download failed", "the same command"))
        assert ({path.name: path.read_bytes() for path in folder.glob("*_0*")}
                == dict(list(files.items())[:2]))
        server.seen = []
        server.cuts = 3
        server.after = 300000
        assert "3 shards, 1 to download" in fetch(server).stdout
        assert ([first for _, first in files_seen(server)]
                == [0, 4 << 16, 8 << 16]), "not from the start again"
        assert ((folder / NAMES[2]).read_bytes() == files[NAMES[2]]
                and not (folder / ".download").exists())
        monkeypatch.setattr(fineweb.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        fetch(server, "--output", "other", fails=("other", "0.0 GB free", "--shards N", "--output"))
    fetch("http://127.0.0.1:9", fails=("kjj0/fineweb10B-gpt2: cannot be listed", "refused"))


def test_what_is_not_what_the_hub_says_is_refused(tmp_path, fetch):
    files = make_shards("fineweb", [100, 200], tmp_path)
    for hub, words in ((Hub(files, {NAMES[0]: "0" * 64}), (NAMES[0], "SHA-256", "expected 0000")),
            (Hub({**files, NAMES[0]: files[NAMES[0]][:-2]}), (NAMES[0], "cut short")),
            (Hub({**files, NAMES[0]: np.int32(50257).tobytes()}), (NAMES[0], "token id 50257")),
            (Hub({"fineweb_000000.npy": b"another kind"}), ("holds no shards",)),
            (Hub(files, repository="somebody/else"),
             ("kjj0/fineweb10B-gpt2: cannot be listed", "404"))):
        with hub as server:
            fetch(server, fails=words)
    assert not list((tmp_path / "data" / "fineweb10B").glob("*_0*"))
