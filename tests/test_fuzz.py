"""Damaged files: seeded mutants of each kind.

    FUZZ="5000 7" python -m pytest tests/test_fuzz.py      # that many mutants, from seed 7

A mutant may be refused, with one line that names the file, or be harmless: the run ends with finite losses.
Nothing else: no traceback, no hang, no gigabytes. Everything runs in this process.
"""

import functools
import itertools
import os
import random
import re
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import train_gpt2
from conftest import BYTES, SMALL, make_state, random_params
from llmc.checkpoint import write_model
from llmc.dataloader import write_tokens
from llmc.files import KINDS
from llmc.threads import count_threads
from llmc.tokenizer import read_tokenizer, write_tokenizer
from llmc.debugstate import read_debug_state, write_debug_state

TRAIN = ("-e", "model3.bin", "-i", "int32", "--tokenizer", "tokenizer2.bin", "-b", 2, "-t", 8, "-x", 1, "-v", 0,
         "-s", 0)  # fmt: skip
MEMORY, SECONDS = 1 << 30, 60  # what a mutant may take
COUNT, SEED = map(int, os.environ.get("FUZZ", "200 1").split())


def write_files():
    """A small specimen of each kind of file, into the current directory."""
    params, rng = random_params(SMALL), np.random.default_rng(3)
    for version in (1, 3, 5):
        write_model(f"model{version}.bin", SMALL, params, version)
    for version in (1, 2):
        write_debug_state(f"debug{version}.bin", SMALL, make_state(params), version)
    write_tokenizer("tokenizer2.bin", BYTES, 256)
    write_tokenizer("tokenizer1.bin", [b"%d" % i for i in range(50257)], 50256, 1)
    for format, split in itertools.product(("int32", "uint16"), ("train", "val")):
        write_tokens(f"{format}_{split}.bin", [rng.integers(0, SMALL.V, 200)], 200, format)


def train(*flags):
    sys.argv = ["train_gpt2.py", *map(str, (*TRAIN, *flags))]
    return train_gpt2.main()


FILES = {  # file -> who reads it
    **{f"model{version}.bin": functools.partial(train, "-e", f"model{version}.bin") for version in (1, 3, 5)},
    **{name: lambda name=name: read_debug_state(name, SMALL, random_params(SMALL)) and None
       for name in ("debug1.bin", "debug2.bin")},
    "tokenizer1.bin": lambda: read_tokenizer("tokenizer1.bin") and None,
    "tokenizer2.bin": functools.partial(train, "-s", 1, "-g", 4, "-x", 2),
    **{f"{format}_{split}.bin": functools.partial(train, "-i", format, "-v", 1, "-m", 99, "-x", 3)
       for format in ("int32", "uint16") for split in ("train", "val")},
    **{f"run/{name}": functools.partial(train, "-o", "run", "-y", 1, "-x", 2, "-v", 1, "-m", 1)
       for name in ("model_00000001.bin", "state_00000001_00000.bin", "main.log", "main.csv", "DONE_00000001")},
}  # fmt: skip


EXTREMES = (0, 1, -1, 2, 3, 127, 128, 255, 256, 257, 65535, 2**16, 2**24, 2**30, 2**31 - 1, -(2**31), *KINDS)
PIECES = (b"[" * 100000, b"9" * 5000, b"nan", b"\xff\xfe", b"\0", b"s:1 trl:nan\n", b"s:" + b"1" * 4300 + b" trl:1\n",
          b",\n", b"{", b"null", b"-1", b"1e999", b"\n")  # fmt: skip


def mutate(rng, data, others):
    """(what was done, the damaged bytes)."""
    data = bytearray(data)
    kind = rng.choice(("bits", "header bits", "field", "cut", "swap", "fill", "insert"))
    if kind in ("bits", "header bits"):
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(min(len(data), 192) if kind == "header bits" else len(data))] ^= 1 << rng.randrange(8)
    elif kind == "field":
        slot, value = rng.randrange(48) if rng.random() < 0.3 else rng.randrange(12), rng.choice(EXTREMES)
        data[4 * slot : 4 * slot + 4] = np.int32(value).tobytes()
    elif kind == "cut":
        del data[rng.choice((rng.randrange(len(data)), 0, 1024, len(data) - 1)) :]
    elif kind == "swap":
        data = bytearray(rng.choice(others))
    elif kind == "fill":
        start = rng.randrange(len(data))
        stop = min(len(data), start + rng.choice((4, 64, 4096)))
        data[start:stop] = rng.choice((b"\0", b"\xff", b"\x7f")) * (stop - start)
    else:
        at = rng.choice((rng.randrange(len(data)), len(data)))
        data[at:at] = rng.choice((*PIECES, rng.randbytes(4), rng.randbytes(1024)))
    return kind, bytes(data)


@pytest.fixture
def run(run_here):
    """run(program): how it ends in this process, with less memory and time than would be noticed."""
    def late(*_):
        raise AssertionError(f"not done after {SECONDS} s")

    def run(program):
        limits = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        signal.signal(signal.SIGALRM, late)
        signal.alarm(SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
        try:
            done = run_here(SimpleNamespace(main=program, __file__="fuzz"), check=False)
            return done.returncode, done.stdout, done.stderr
        except BaseException:
            return 1, "", traceback.format_exc()
        finally:
            signal.alarm(0)
            resource.setrlimit(resource.RLIMIT_AS, limits)

    return run


def fault(ending, *names):
    """What is wrong with how a mutant ended, or None: refused in a line that has one of these names, or harmless."""
    status, output, errors = ending
    lines = [line for line in errors.strip().split("\n") if not line.startswith(("warning: ", "note: "))]
    if status == 0:
        bad = re.search(r"loss (-?nan|-?inf)", output)
        return f"harmless, but {bad[0]}" if bad else None
    if status != 1 or len(lines) != 1 or "error: " not in lines[0]:
        return f"status {status}: {errors[-1500:]}"
    named = any(name in lines[0] for name in (*names, "loss is ", "steps: "))  # the last two: weights are too large
    return None if named else f"{names[0]} is not named: {lines[0]}"


def damaged_files(rng, good):
    """Without end: (what is wrong, the program that reads it, the names of which a refusal has one)."""
    for name, program in itertools.cycle(FILES.items()):
        kind, data = mutate(rng, good[name], list(good.values()))
        Path(name).write_bytes(data)
        yield f"{name}, {kind}", program, [name, *(["but the model has V="] if "model" in name else [])]


def restore(good):
    """Each file as it was, and no other."""
    for path in Path().iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.mkdir("run")
    for name, data in good.items():
        Path(name).write_bytes(data)


def test_mutants(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    write_files()
    run(functools.partial(train, "-o", "run", "-v", 1, "--shuffle", 1, "-sl", 9))
    good = {name: Path(name).read_bytes() for name in FILES}
    for name, program in FILES.items():  # none of which is damaged yet
        assert (ending := run(program))[0] == 0, f"{name}: {ending}"
        restore(good)
    failed, refused = [], 0
    for number, (what, program, names) in zip(range(COUNT), damaged_files(random.Random(SEED), good)):
        ending = run(program)
        refused += ending[0] != 0
        if problem := fault(ending, *names):
            failed.append(f"seed {SEED}, mutant {number}, {what}: {problem}")
        restore(good)
    assert not failed, "\n".join(failed)
    assert COUNT / 4 < refused < 0.95 * COUNT, "neither everything nor nothing is refused"


@pytest.mark.parametrize("text, threads", ((" 3", 3), ("3,2", 3), ("²", None), ("0", None), ("9" * 5000, None)))
def test_omp_num_threads(monkeypatch, text, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = count_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert count_threads() == (threads or cores)
