"""The ranks of a run, with no GPU: processes under each launcher's variables, torchrun and --gpus; each way to fail."""

import contextlib
import os
import re
import signal
import struct
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from conftest import ROOT, SMALL_HEADS, random_params
from fake_gpus import cuda, end_ranks, fork_ranks, wait_for
from llmc.errors import Interrupted, Interruption, UserError
from llmc.gpu.launcher import LAUNCHERS, translate_launcher
from llmc.gpu.several.ranks import LOST, Ranks

NUMBERS = [0.1, 1e-320, -0.0, 1 / 3, float("inf")]
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "17"}
STEP, MPICH = {**BATCH_SCRIPT, "SLURM_STEP_ID": "0"}, {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}


def join(work):
    translate_launcher(os.environ)
    with Ranks(os.environ) as ranks:
        return work(ranks)


def exchange(ranks):
    checks = []
    values = ranks.gather((ranks.rank, ranks.local_rank, NUMBERS)), ranks.attempt(lambda: -ranks.rank)
    largest = [ranks.largest(number) for number in (None, ranks.rank, None if ranks.rank else 0)]
    results = ranks.starmap(lambda i: 10 * i, [(i,) for i in range(7)], lambda: checks.append(1))
    print(repr((*values, largest, results, len(checks))).replace("inf", "1e999"))
    print("a warning that all have", file=sys.stderr)


def fail(ranks):
    """argv: what fails, and on which ranks."""
    def disk_full():
        if ranks.rank in who:
            raise UserError("disk full")

    what, who = sys.argv[1], eval(sys.argv[2])
    if what == "attempt":
        ranks.attempt(disk_full)
    if what == "error":
        disk_full()
        while ranks.is_first:  # waits for its GPU
            ranks.check()
            time.sleep(0.01)
    ranks.gather(1 / (ranks.rank not in who))


def take_steps(ranks):
    interruption = Interruption(ranks)
    ranks.gather(None)
    print("ready", flush=True)
    try:
        for step in interruption.watching(range(100000)):  # noqa: B007  (the handler below reads it)
            time.sleep(0.002 * ranks.rank)
    except Interrupted as interrupted:
        print("stopped at", *ranks.gather(step)) if ranks.is_first else ranks.gather(step)
        return 128 + interrupted.args[0]


@pytest.fixture
def fork(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda work, size, **more: fork_ranks(join, size, work, **more)


@pytest.mark.parametrize("names", LAUNCHERS[:4], ids=("torchrun", "Open MPI", "MPICH", "Slurm"))
def test_values(fork, names):
    """They come back on all ranks, in order, floats to the bit; only rank 0 prints."""
    statuses, out, err = end_ranks(fork(exchange, 3, names=names, SLURM_STEP_ID="0"))
    assert statuses == [0, 0, 0] and err == "a warning that all have\n"
    gathered, attempted, largest, results, checks = eval(out)
    assert [place[:2] for place in gathered] == [(0, 0), (1, 1), (2, 2)] and attempted == [0, -1, -2]
    assert all(struct.pack("5d", *numbers) == struct.pack("5d", *NUMBERS) for *_, numbers in gathered)
    assert largest == [None, 2, 0] and results == list(range(0, 70, 10)) and checks == 3


@pytest.mark.parametrize("environ, expected", (
    ({}, None), ({"RANK": "1"}, None), ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
    (BATCH_SCRIPT, None), ({**STEP, "SLURM_STEP_ID": "4294967290"}, None),
    ({**STEP, "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, ["3", "4", "1", "127.0.0.1", "29517"]),
    ({**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[07-8,11],x"}, ["0", "2", "0", "n07", "29517"]),
    ({**STEP, "PMI_RANK": "0", "PMI_SIZE": "9"}, ["0", "4", "0", "127.0.0.1", "29517"]),  # srun --mpi=pmi2
    ({**BATCH_SCRIPT, **MPICH, "MASTER_ADDR": "box"}, ["1", "2", "1", "box", "29517"])))
def test_launchers(environ, expected):
    environ = dict(environ)
    assert translate_launcher(environ) == (expected is not None)
    assert not expected or [environ[name] for name in (*LAUNCHERS[0], "MASTER_ADDR", "MASTER_PORT")] == expected


@pytest.mark.parametrize("bus, changes, may_share, words", (
    (1, {}, "0", "ranks 0 and 1 have the same GPU"), (1, {}, "1", None), (2, dict(data="another"), "0", None),
    (2, dict(B=2), "0", "-b/--batch_size: rank 1 has 2, rank 0 4"), (2, dict(seed=9), "0", "rank 1 has 9, rank 0 42"),
    (2, dict(weights=9), "0", "model: rank 1 has"), (2, dict(kind="sm_80"), "0", "GPU: rank 1 has")))
def test_ranks_are_alike(fake_gpu, monkeypatch, bus, changes, may_share, words):
    def check(rank, bus, weights=0, kind="sm_90a", **changes):
        monkeypatch.setattr(fake_gpu.cp.cuda, "Device", lambda: SimpleNamespace(pci_bus_id=bus), raising=False)
        ranks = SimpleNamespace(size=2, rank=rank, gather=lambda mine: found.append(mine) or found)
        Ranks.check_alike(ranks, fake_gpu.gpu._replace(arch=kind), cuda.CudaSettings(**changes), SMALL_HEADS,
                          random_params(SMALL_HEADS, weights))

    monkeypatch.setattr("llmc.gpu.several.ranks.cp", fake_gpu.cp)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", may_share)
    found = []
    check(0, 1)
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        check(1, bus, **changes)


@pytest.mark.parametrize("what, who, expected", (
    ("attempt", [2], "fail: error: rank 2: disk full\n"), ("attempt", [0, 1, 2], "fail: error: disk full\n"),
    ("error", [2], "rank 2: fail: error: disk full\n"), ("error", [0, 1, 2], "fail: error: disk full\n"),
    ("fault", [1], r"rank 1: fail: Traceback.*\n(rank 1: .*\n)+rank 1: ZeroDivisionError: .*\n")))
def test_an_error_ends_all_with_one_line(fork, what, who, expected):
    statuses, _, err = end_ranks(fork(fail, 3, flags=(what, who)))
    assert statuses == [1, 1, 1] and re.fullmatch(expected, err)


@pytest.mark.parametrize("number, to, statuses, expected", (
    (signal.SIGINT, (0, 1, 2), 3 * [130], "\nfinishing this step; Ctrl-C once more to stop at once\n"),
    (signal.SIGTERM, (2,), 3 * [143], ""), (signal.SIGKILL, (1,), [1, -9, 1], f"take_steps: error: {LOST}\n")))
def test_a_signal_stops_all_at_one_step(fork, number, to, statuses, expected):
    ranks = fork(take_steps, 3)
    wait_for("ready", ranks)
    for rank in to:
        os.kill(ranks[rank].pid, number)
    found, out, err = end_ranks(ranks)
    assert found == statuses and err == expected
    assert number == signal.SIGKILL or re.search(r"stopped at (\d+) \1 \1\n", out)


def test_one_gpu_needs_no_torch():
    run = "on_ranks(CudaSettings, '', lambda settings, ranks: ranks.gather(0)); assert 'torch' not in sys.modules"
    code = f"import sys; from llmc.gpu.launcher import on_ranks; from train_gpt2_cuda import CudaSettings; {run}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
