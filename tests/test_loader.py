"""The loader: order, shards, and runs that resume in the middle of shuffled data, llm.c's among
them. Every file version round-trips, to the byte that FORMATS of llm.c gives; the sampler follows
its golden values."""

import functools
import itertools
import os
import re
import resource
import struct
from pathlib import Path

import numpy as np
import pytest

import train_gpt2
from conftest import SMALL, optimizer_of, remove_after
from llmc.checkpoint import (Progress, owned_by_one, read_optimizer_state, write_optimizer_state)
from llmc.dataloader import DataLoader, data_paths, open_tokens, tokenizer_beside, write_tokens
from llmc.errors import UserError
from llmc.files import HEADER_BYTES
from llmc.loop import validate
from llmc.resume import checkpoint_paths, newest_checkpoint
from llmc.settings import Settings
from llmc.shuffle import Position
from llmc.tensors import allocate, table_elements
from llmc.tokenizer import write_tokenizer
from train_gpt2 import parameter_table

END_OF_MOMENTS = HEADER_BYTES + 8 * table_elements(parameter_table(SMALL))  # in a state file


def count_up(path, count, first=0):
    """A token file of first, first + 1 ...; its path."""
    Path(path).write_bytes(np.arange(first, first + count, dtype="<i4").tobytes())
    return str(path)


def shards_of(tmp_path, sizes):
    """Token files of consecutive numbers, of so many samples of 2 x 4 each, and what llm.c leaves
    at their ends."""
    starts = np.cumsum([0, *(8 * size + 5 for size in sizes)])
    return [count_up(tmp_path / f"shard_{i:03d}.bin", 8 * size + 5, start)
            for i, (size, start) in enumerate(zip(sizes, starts))]


def firsts(loader, count):
    """The first token of each of the next batches."""
    batches = [loader.next_batch() for _ in range(count)]
    assert all(x.shape == (2, 4) and x.dtype == np.int32 and np.array_equal(y, x + 1)
               for x, y in batches)
    return [int(x[0, 0]) for x, _ in batches]


@pytest.mark.parametrize("shuffle", (False, True))
def test_spread_rows_cover_the_data_once(tmp_path, shuffle):
    loader = DataLoader([count_up(tmp_path / "a.bin", 25)], 25, 2, 4, shuffle, spread=True)
    batches = [loader.next_batch() for _ in range(3)]
    assert all(np.array_equal(targets, inputs + 1) for inputs, targets in batches)
    batches = [inputs[:, 0].tolist() for inputs, _ in batches]
    assert (sorted(batches) == [[0, 12], [4, 16], [8, 20]]
            and (batches == sorted(batches)) != shuffle)


NANO = np.random.default_rng(0).integers(0, 200, 3001) ** 2 % 257


@pytest.mark.parametrize("ids, dtype, V, found", (
    (NANO, "<u2", 257, "<u2"), (NANO[:-1], "<u2", 257, "<u2"), (NANO, "<u2", 50257, "<u2"),
    (NANO, "<i4", 257, "<i4"), (NANO, "<u2", 1 << 17, "<i4"),  # no vocabulary of uint16
    (np.insert(NANO, range(3001), 0), "<u2", 257, "<i4"), (NANO[::-1], "<u2", 257, "<u2"),
    (NANO * 150, "<i4", 257, "<i4"), (NANO * 150, "<u2", 257, "<u2"),  # another vocabulary's
    (NANO * 1000, "<i4", 50257, "<i4"), (NANO % 2, "<u2", 2, "<i4"),
    (np.frombuffer(b"some text, not ids\n" * 100, "<u2"), "<u2", 50257, "<i4")))
def test_ids_of_uint16_without_a_header(tmp_path, capsys, ids, dtype, V, found):
    """As nanoGPT's, are read with a note where they are none of int32; all else is int32."""
    path = tmp_path / "train.bin"
    right = found == dtype and ids.max() < V
    path.write_bytes(ids.astype(dtype).tobytes())
    if right:
        assert np.array_equal(open_tokens(path, V), ids)
        assert np.array_equal(DataLoader([path], V, 2, 8).next_batch()[0].ravel(), ids[:16])
    else:
        error = pytest.raises(UserError, open_tokens, path, V)
        assert error.match("another vocabulary|a whole number of int32")
    assert ("as nanoGPT writes them" in capsys.readouterr().err) == (found == "<u2")


def test_a_pattern_over_several_vocabularies_is_refused(workplace, train):
    """Of one vocabulary, it is found beside the first. With -v 0, nobody reads validation files."""
    for name, tokens in (("a", b"ab"), ("b", b"ab"), ("c", b"xy")):
        tokens = [bytes([token]) for token in tokens] + [b"<eot>"]
        write_tokenizer(f"data/{name}_tokenizer.bin", tokens, 2)
        for split in ("train", "val"):
            write_tokens(f"data/{name}_{split}.bin", [np.arange(100) % 3], 100)
    flags = ("-e", "d2", "-x", 1, "-v", 1)
    differ = "different vocabularies, data/a_tokenizer.bin and data/c_tokenizer.bin"
    train("-i", "data/[abc]_train.bin", *flags, fails=("data/[abc]_train.bin", differ))
    train("-i", "data/a_train.bin", "-j", "data/[abc]_val.bin", *flags,
          fails=("data/[abc]_val.bin", differ))
    os.unlink("data/c_train.bin")
    train("-i", "data/*[abc]_train.bin", *flags, fails=("data/*[abc]_val.bin", differ))
    train("-i", "data/*[abc]_train.bin", *flags, "-v", 0)
    done = train("-i", "data/[ab]_train.bin", *flags, "--lines", "short")
    assert "data/a_tokenizer.bin" in done.stdout


def test_what_is_beside_the_training_data(workplace):
    """The names of validation data and of a vocabulary follow from its name, which may have
    brackets."""
    assert data_paths(Settings(data="x.bin", val_data="y.bin")) == [["x.bin"], ["y.bin"]]
    for train, val, tokenizer in (("train/x_train.bin", "train/x_val.bin", "train/x_tokenizer.bin"),
                                  ("a/train/x.bin", "a/val/x.bin", ""),
                                  ("a_train/x.bin", "a_val/x.bin", None),
                                  ("train_set/x.bin", "val_set/x.bin", None)):
        assert (data_paths(Settings(data=train))[1] == [val]
                and tokenizer in (tokenizer_beside(train), None))
    assert [tokenizer_beside(data) for data in ("data/x", "d/x_train_*.bin")] == [
        "data/x_tokenizer.bin", "d/x_tokenizer.bin"]
    pytest.raises(UserError, data_paths, Settings(data="training/x.bin")).match("no 'train' in it")
    os.mkdir("d[1]")
    for name in ("x_train", "x_val", "y_train_1", "y_train_0", "y_train_2", "y_val_0"):
        count_up(f"d[1]/{name}.bin", 9)
    assert data_paths(Settings(data="d[1]/x")) == [["d[1]/x_train.bin"], ["d[1]/x_val.bin"]]
    os.rename("d[1]", "d")
    shards = [f"d/y_train_{i}.bin" for i in range(3)]
    assert data_paths(Settings(data="d/y_train_*.bin")) == [shards, ["d/y_val_0.bin"]]


@pytest.mark.parametrize("tokens, rows",
                         ((25, [2, 2, 2]), (29, [2, 2, 2, 1]), (5, [1]), (8, [1]), (9, [2]),
                          (24, [2, 2, 1])))
def test_the_whole_set(tmp_path, tokens, rows):
    """Of a smaller last batch, each position counts in a mean as much as any other."""
    loader = DataLoader([count_up(tmp_path / "a.bin", tokens)], 29, 2, 4, least=5)
    batches = list(loader.whole_set())
    assert [len(inputs) for inputs, _ in batches] == rows and loader.whole_batches == len(rows)
    assert (loader.num_batches == max(1, tokens // 8)
            and loader.batches_per_epoch == (tokens - 1) // 8)
    assert all(np.array_equal(targets, inputs + 1) for inputs, targets in batches)
    assert [inputs[0, 0] for inputs, _ in batches] == list(range(0, 8 * len(rows), 8))
    mean = np.concatenate([inputs.ravel() for inputs, _ in batches]).mean()
    found = validate(lambda inputs, targets: float(inputs.mean()), loader, 99)
    assert found == (pytest.approx(mean), None)


def llm_c_s_order(counts, seed=42):
    """llm.c's loader as its state file describes it, with NumPy's mt19937, number by number. Yields
    for each sample: (shard's number, sample's number, [shards of this epoch before, samples taken
    of this one], what a state file has behind the moments)."""
    def permute(items):
        for i in range(len(items) - 1, 0, -1):
            j = int(random.randint(2**32, dtype=np.uint32)) % (i + 1)
            items[i], items[j] = items[j], items[i]

    random = np.random.RandomState(seed)
    shards = list(range(len(counts)))
    while True:
        permute(shards)
        for shard, number in enumerate(shards):
            permute(samples := list(range(counts[number])))
            _, state, used, *_ = random.get_state()
            trailer = (struct.pack(f"<Q{len(shards)}iQ{len(samples)}i", len(shards), *shards,
                                   len(samples), *samples)
                       + struct.pack("<QiI624I2I", seed, 625 - used, used, *state.tolist(), 0,
                                     0x9908B0DF))
            for taken, sample in enumerate(samples, 1):
                yield number, sample, [shard, taken], trailer


@pytest.mark.parametrize("counts, seed, golden", (
    # golden: the first in llm.c
    ((1192,), 42, [408, 791, 914, 1057]), ((74,), 42, [29, 58, 10, 4, 11, 25]),
    ((7, 3, 700, 1, 5), 42, []), ((1,), 0, []), ((2, 2), 2**31 - 1, [])))
def test_epochs_are_read_in_llm_c_s_order(tmp_path, counts, seed, golden):
    """Each epoch shuffles the order of the shards again, each shard its samples, from one stream of
    numbers."""
    starts = np.cumsum([0, *(8 * count + 5 for count in counts)])
    order = llm_c_s_order(counts, seed)
    expected = [int(starts[shard] + 8 * sample)
                for shard, sample, *_ in itertools.islice(order, 3 * sum(counts))]
    loader = DataLoader(shards_of(tmp_path, counts), 10000, 2, 4, True, seed=seed)
    assert firsts(loader, 3 * sum(counts)) == expected
    assert [first // 8 for first in expected[: len(golden)]] == golden


def test_the_position_is_that_of_the_last_batch_taken(tmp_path, seed=7):
    """Each position of two epochs, through a state file, whose bytes are llm.c's, leads to the next
    batch."""
    counts = (5, 3, 4)
    paths = shards_of(tmp_path, counts)
    order = llm_c_s_order(counts, seed)
    whole = firsts(DataLoader(paths, 200, 2, 4, True, seed=seed), 40)
    loader = DataLoader(paths, 200, 2, 4, True, seed=seed)
    state = tmp_path / "state.bin"
    owned = owned_by_one(optimizer_of(*(allocate(parameter_table(SMALL)) for _ in range(2))))
    for taken in range(26):
        progress = Progress(7, 2**64 - 3, loader.position, (2, 4, 0), model_crc=2**32 - 5)
        write_optimizer_state(state, owned, progress)
        found = read_optimizer_state(state, owned)[0]
        assert found._replace(position=None) == progress._replace(position=None)
        if taken:
            *_, place, trailer = next(order)
            header = np.fromfile(state, "<i4", 256)
            assert header[[*range(6), 10]].tolist() == [20240527, 1, 1, 0, 0, 1, 7]
            assert header[[20, 21, 30, 31, 32, 33]].tolist() == [-3, -1, place[0], 0, place[1], 0]
            assert state.read_bytes()[END_OF_MOMENTS:] == trailer, taken
        other = DataLoader(paths, 200, 2, 4, True)
        other.seek(found.position)
        assert firsts(other, 12) == whole[taken : taken + 12]
        assert firsts(loader, 1) == whole[taken : taken + 1]


@pytest.fixture
def train(run_here):
    return functools.partial(run_here, train_gpt2, "-b", 2, "-t", 8, "-v", 0, "-s", 0, "--lines",
                             "llmc")


@pytest.fixture
def shards(workplace):
    """data/s_train_*.bin of random tokens, and a validation file."""
    rng = np.random.default_rng(1)
    for i, size in enumerate((16 * 5 + 3, 16 * 3 + 9, 16 * 6 + 1)):
        write_tokens(f"data/s_train_{i}.bin", [rng.integers(0, SMALL.V, size)], size, "uint16"
                     if i % 2 else "int32")
    write_tokens("data/s_val_0.bin", [rng.integers(0, SMALL.V, 50)], 50)


def losses(done):
    return re.findall(r"step \d+: train loss \d\.\d+", done.stdout)


SHARDS = ("-i", "data/s_train_*.bin", "-l", 0.01)


def test_several_shards_are_shuffled_unless_told_otherwise(shards, train):
    """With --seed, which is that of random weights, too; a run resumes with the order that it began
    with."""
    def orders(*data):
        return [losses(train(*data, "-x", 5, *flags))
                for flags in (("--shuffle", 0), ("--shuffle", 1), (), ("--seed", 7))]

    in_order, shuffled, default, other = orders(*SHARDS)
    assert in_order != shuffled == default and other not in (in_order, shuffled)
    for flags, whole in ((("--shuffle", 0), in_order), (("--seed", 7), other)):
        train(*SHARDS, "-x", 3, *flags, "-o", f"run{flags[1]}")
        assert losses(train(*SHARDS, "-x", 5, "-o", f"run{flags[1]}", "-y", 1)) == whole[3:]
    one = ("-i", "data/s_train_0.bin", "-j", "data/s_val_0.bin")
    in_order, shuffled, default, other = orders(*one)
    assert in_order == default == other != shuffled
    *_, default, other = orders(*one, "-e", "d2")
    assert default != other
    train("--seed", -1, fails=("--seed -1", "at least 0"))


@pytest.mark.parametrize("step", (5, 14))
def test_a_run_of_llm_c_s_goes_on(shards, train, step):
    """Its state file has none of our header's fields, another number of the last update, and any
    seed."""
    flags = (*SHARDS, "-x", 16)
    whole = losses(train(*flags, "-o", "run", "-n", 1))
    remove_after("run", step)
    state = np.memmap(checkpoint_paths("run", step)[1], "<i4", "r+")
    state[22:24] = 99
    state[40:256] = 0
    state[-630:-628] = -1
    assert losses(train(*flags, "-o", "run", "-y", 1)) == whole[step:]


def test_a_shuffled_run_goes_on_with_its_own_flags(shards, train):
    resume = functools.partial(train, "-x", 4, "-o", "run", "-y", 1)
    train(*SHARDS, "-x", 3, "-o", "run")
    resume(*SHARDS, "--shuffle", 0, fails=("--shuffle 1", "expected", "--shuffle 0"))
    resume("-i", "data/s_train_0.bin", "-j", "data/s_val_0.bin", fails=("shuffled, of 3", "-i"))
    state = Path(checkpoint_paths("run", 3)[1])
    whole = state.read_bytes()
    end = END_OF_MOMENTS
    good = whole[:180] + bytes(8) + whole[188:]  # without a CRC-32
    for bad, words in ((whole[:-9] + bytes(9), "CRC-32"),
                       (whole[:80] + b"\1" + whole[81:], "CRC-32"),
                       (good[:end] + struct.pack("<Q", 2) + good[end + 8 :], "data order"),
                       (good[:-1], "bytes, expected"), (good[: end + 3], "bytes, expected")):
        state.write_bytes(bad)
        resume(*SHARDS, fails=(state.name, words))
    state.write_bytes(good)
    assert "resuming at step 3" in resume(*SHARDS).stdout


def test_many_shards_take_two_descriptors(tmp_path):
    """One that is read, and one that is checked."""
    paths = shards_of(tmp_path, [1] * 200)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 3, hard))
    try:
        assert (firsts(DataLoader(paths, 200 * 13, 2, 4), 201)
                == [*range(0, 200 * 13, 13), 0]), "in order, and again"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_tokens_than_32_bits_count(tmp_path):
    """5e9 tokens, nearly all of them in a hole of the file: sizes, positions and offsets are 64
    bits."""
    tokens = 5 * 10**9 + 1
    path = tmp_path / "large.bin"
    write_tokens(path, [[]], tokens, "uint16")
    os.truncate(path, HEADER_BYTES + 2 * tokens)
    if path.stat().st_blocks > 1000:
        pytest.skip("this file system keeps holes")
    with open(path, "r+b") as f:
        f.seek(HEADER_BYTES + 2 * (tokens - 9))
        f.write(np.arange(1, 10, dtype="<u2").tobytes())
    loader = DataLoader([path], 10, 2, 4)
    assert (loader.num_batches == loader.batches_per_epoch == tokens // 8
            and not loader.next_batch()[0].any())
    loader.seek(Position(0, loader.batches_per_epoch - 1))
    assert firsts(loader, 1) == [1]


def test_a_shard_that_becomes_bad_stops_the_run_once_it_is_saved(shards, train, at_call):
    """With the shard mended, the run goes on as if nothing had happened."""
    flags = (*SHARDS, "--shuffle", 0, "-x", 7, "-d", 32)
    whole = losses(train(*flags, "-o", "whole"))
    bad = Path("data/s_train_2.bin")
    good = bad.read_bytes()
    at_call(train_gpt2, "train_step", 0, lambda: bad.write_bytes(good[:-8]))
    done = train(*flags, "-o", "run", fails=("s_train_2.bin", "ended early"))
    bad.write_bytes(good)
    assert newest_checkpoint("run") == 6 and losses(done) == whole[:6]
    assert losses(train(*flags, "-o", "run", "-y", 1)) == whole[6:]


# --------------------------------------------------------------------------------------------------
# files
