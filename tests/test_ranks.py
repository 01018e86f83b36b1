"""The ranks of a run, with no GPU: processes under each launcher's variables, under torchrun and --gpus; and each way to
fail."""

import contextlib
import os
import re
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from conftest import ROOT, SMALL_HEADS, random_params
from fake_gpus import cuda, end_ranks, fork_ranks
from llmc.errors import Interrupted, Interruption, UserError, run_main
from llmc.gpu.ranks import LAUNCHERS, LOST, Ranks, check_alike, on_ranks, translate_launcher
from llmc.settings import Settings, option

NUMBERS = [0.1, 1e-320, -0.0, 1 / 3, float("inf")]


def joined(work):
    """Call work(ranks) on this rank."""
    assert translate_launcher(os.environ)
    with Ranks(os.environ) as ranks:
        return work(ranks)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def wait_for(path, text):
    deadline = time.monotonic() + 20
    while not os.path.exists(path) or text not in open(path).read():
        time.sleep(0.01)
        assert time.monotonic() < deadline, f"{path}: no {text!r}"


# ----------------------------------------------------------------------------------------------------------------------
# values


def exchange():
    def work(ranks):
        checks = []
        values = ranks.gather((ranks.rank, ranks.local_rank, NUMBERS)), ranks.attempt(lambda: -ranks.rank), [
            ranks.largest(number) for number in (None, ranks.rank, None if ranks.rank else 0)]
        results = ranks.starmap(lambda i: 10 * i, [(i,) for i in range(7)], lambda: checks.append(1))
        print(repr((values, results, len(checks))).replace("inf", "1e999"))
        print("a warning that all have", file=sys.stderr)

    joined(work)


@pytest.mark.parametrize("names", LAUNCHERS[:4], ids=("torchrun", "Open MPI", "MPICH", "Slurm"))
def test_values(here, free_port, names):
    """They come back on all ranks, in order, floats to the bit; only rank 0 prints."""
    slurm = dict(SLURM_STEP_ID="0", SLURM_STEP_NODELIST="localhost") if "SLURM" in names[0] else {}
    where = dict(MASTER_ADDR="127.0.0.1") if names == LAUNCHERS[0] else {}
    statuses, out, err = end_ranks(fork_ranks(exchange, 3, free_port, names=names, **slurm, **where))
    assert statuses == [0, 0, 0] and err == "a warning that all have\n"
    (gathered, attempted, largest), results, checks = eval(out)
    assert [place[:2] for place in gathered] == [(0, 0), (1, 1), (2, 2)] and attempted == [0, -1, -2]
    assert all(struct.pack("5d", *numbers) == struct.pack("5d", *NUMBERS) for *_, numbers in gathered)
    assert largest == [None, 2, 0] and results == list(range(0, 70, 10)) and checks == 3


BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "17"}
STEP = {**BATCH_SCRIPT, "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("environ, expected", (
    ({}, None), (BATCH_SCRIPT, None), ({**STEP, "SLURM_STEP_ID": "4294967290"}, None), ({"RANK": "1"}, None),
    ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
    ({**STEP, "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, ("3", "4", "1", "127.0.0.1", "29517")),
    ({**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node[07-08,11],x"},
     ("0", "2", "0", "node07", "29517")),
    ({**STEP, "SLURM_STEP_NODELIST": "x,n[1-2]", "MASTER_PORT": "7"}, ("0", "4", "0", "x", "7")),
    ({**STEP, "PMI_RANK": "0", "PMI_SIZE": "9"}, ("0", "4", "0", "127.0.0.1", "29517")),  # srun --mpi=pmi2
    ({**BATCH_SCRIPT, "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MASTER_ADDR": "box"},
     ("1", "2", "1", "box", "29517"))))
def test_launchers(environ, expected):
    environ = dict(environ)
    assert translate_launcher(environ) == (expected is not None)
    names = *LAUNCHERS[0], "MASTER_ADDR", "MASTER_PORT"
    assert expected is None or tuple(environ[name] for name in names) == expected


@pytest.mark.parametrize("bus, changes, may_share, words", (
    (1, {}, "0", "ranks 0 and 1 have the same GPU"), (1, {}, "1", None), (2, dict(data="another"), "0", None),
    (2, dict(B=2), "0", "-b/--batch_size: rank 1 has 2, rank 0 4"), (2, dict(seed=9), "0", "model: rank 1 has"),
    (2, dict(kind="sm_80"), "0", "GPU: rank 1 has")))
def test_ranks_are_alike(fake_gpu, monkeypatch, bus, changes, may_share, words):
    """Each rank compares itself with rank 0."""
    def check(rank, bus, seed=0, kind="sm_90a", **changes):
        monkeypatch.setattr(fake_gpu.cp.cuda, "Device", lambda: SimpleNamespace(pci_bus_id=bus), raising=False)
        ranks = SimpleNamespace(size=2, rank=rank, gather=lambda mine: found.append(mine) or found)
        check_alike(ranks, fake_gpu.gpu._replace(arch=kind), cuda.CudaSettings(**changes), SMALL_HEADS,
                    random_params(SMALL_HEADS, seed))

    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", may_share)
    found = []
    check(0, 1)
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        check(1, bus, **changes)


# ----------------------------------------------------------------------------------------------------------------------
# failures and signals


def fails():
    """argv: what fails, and on which ranks."""
    def work(ranks):
        what, who = sys.argv[1], eval(sys.argv[2])
        if what == "attempt":
            ranks.attempt(lambda: disk_full() if ranks.rank in who else None)
        if ranks.rank in who:
            disk_full() if what == "error" else 1 / 0
        while what == "error" and ranks.is_first:  # for a GPU, say
            ranks.check()
            time.sleep(0.01)
        ranks.gather(0)

    joined(work)


def disk_full():
    raise UserError("disk full")


@pytest.mark.parametrize("what, who, expected", (
    ("attempt", [2], "fails: error: rank 2: disk full\n"), ("attempt", [0, 1, 2], "fails: error: disk full\n"),
    ("error", [2], "rank 2: fails: error: disk full\n"), ("error", [0, 1, 2], "fails: error: disk full\n"),
    ("fault", [1], r"rank 1: fails: Traceback.*\n(rank 1: .*\n)+rank 1: ZeroDivisionError: division by zero\n")))
def test_an_error_ends_all_with_one_line(here, free_port, what, who, expected):
    ranks = fork_ranks(fails, 3, free_port, lambda rank: (what, who), MASTER_ADDR="127.0.0.1")
    statuses, _, err = end_ranks(ranks)
    assert statuses == [1, 1, 1] and re.fullmatch(expected, err)


def steps(ranks):
    interruption = Interruption(ranks.largest, speaks=ranks.is_first)
    print("ready", *ranks.gather(os.getpid()), flush=True)
    try:
        for step in interruption.watching(range(100000)):
            time.sleep(0.002 * ranks.rank)
    except Interrupted:
        last = ranks.gather(step)
        print("stopped at", *last)
        return 128 + interruption.signal


def steps_of_a_rank():
    return joined(steps)


@pytest.mark.parametrize("number, to", ((signal.SIGINT, (0, 1, 2)), (signal.SIGTERM, (2,))))
def test_a_signal_stops_all_at_one_step(here, free_port, number, to):
    ranks = fork_ranks(steps_of_a_rank, 3, free_port, MASTER_ADDR="127.0.0.1")
    wait_for("out0", "ready")
    time.sleep(0.2)
    for rank in to:
        os.kill(ranks[rank].pid, number)
    statuses, out, err = end_ranks(ranks)
    assert statuses == 3 * [128 + number] and err.count("finishing this step") == 1 and err.count("\n") == 2
    assert re.search(r"stopped at (\d+) \1 \1\n", out)


def test_a_killed_rank_ends_all(here, free_port):
    """Rank 1 is dead; rank 0, which keeps the store, tells it."""
    ranks = fork_ranks(steps_of_a_rank, 3, free_port, MASTER_ADDR="127.0.0.1")
    wait_for("out0", "ready")
    ranks[1].kill()
    began = time.monotonic()
    statuses, _, err = end_ranks(ranks)
    assert statuses == [1, -9, 1] and time.monotonic() < began + 10 and err == f"steps_of_a_rank: error: {LOST}\n"


def test_argparse_s_message_comes_once(here, free_port):
    ranks = fork_ranks(main, 2, free_port, lambda rank: ["-z"], MASTER_ADDR="127.0.0.1")
    statuses, _, err = end_ranks(ranks)
    assert statuses == [2, 2] and err.count("main: error: unrecognized arguments: -z\n") == 1


# ----------------------------------------------------------------------------------------------------------------------
# this file as a program whose ranks take steps, under torchrun and --gpus


@dataclass
class SomeSettings(Settings):
    gpus: int = option(1, group="gpu", help="")


def main():
    return on_ranks(SomeSettings, "", lambda settings, ranks: steps(ranks))


def start(*command):
    """(process, pids of its ranks)"""
    process = subprocess.Popen([sys.executable, *command], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    name, *pids = process.stdout.readline().split()
    assert name == "ready", process.communicate()
    return process, list(map(int, pids))


def test_gpus_and_ctrl_c():
    process, _ = start(__file__, "--gpus", "2")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and re.fullmatch(r"stopped at (\d+) \1\n", out)
    assert err == "\nfinishing this step; Ctrl-C once more to stop at once\n"


def test_gpus_and_a_killed_rank():
    process, pids = start(__file__, "--gpus", "2")
    os.kill(pids[0], signal.SIGKILL)
    began = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and time.monotonic() < began + 10 and "Traceback" not in err
    assert f"error: {LOST}" in err or "error: rank 0 died of SIGKILL" in err
    assert not os.path.exists(f"/proc/{pids[1]}")


def test_torchrun_and_a_terminated_rank():
    process, pids = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__)
    os.kill(pids[1], signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1 and out.startswith("stopped at") and err.count("finishing this step") == 1


def test_one_gpu_needs_no_torch():
    path = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {os.path.dirname(__file__)!r}]; sys.argv[1:] = []; "
    run = "on_ranks(SomeSettings, '', lambda settings, ranks: ranks.gather(0)); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"{path}from test_ranks import *; {run}"], check=True)


if __name__ == "__main__":
    run_main(main)
