"""dev/sweep.py on the CPU: a run for each combination, the table, and what the same command does again."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sweep
from conftest import ROOT, assert_one_line_error
from llmc.errors import UserError
from llmc.resume import newest_checkpoint

FAST = ("-o", "s", "-b", 2, "-t", 8, "-m", 2, "-v", 4)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    def none():
        raise UserError("no GPU here")

    monkeypatch.setattr(sweep, "count_gpus", none)


def test_runs_table_and_picture(workplace, run_here):
    """One learning rate is too high: those runs fail, and are tried again by the same command."""
    flags = (*FAST, "-x", 10, "--seed", "1,2")
    done = run_here(sweep, *flags, "-l", "1e-3,1e38", check=False)
    assert done.returncode == 1 and "s/l=1e+38_seed=1: failed (1): train_gpt2.py: error:" in done.stderr
    done = run_here(sweep, *flags, "-l", "1e-3,1e38", check=False)
    assert done.stdout.startswith("4 runs of train_gpt2.py, 2 to train")
    rows = list(csv.reader(open("s/sweep.csv", newline="")))
    assert rows[0] == ["learning_rate", "seed", "state", *sweep.RESULTS]
    assert [row[2] for row in rows[1:]] == ["finished"] * 2 + ["failed"] * 2
    assert Path("s/sweep.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_saves_and_the_same_command_goes_on(workplace, run_here):
    flags = (*FAST, "-x", 600, "-l", "0.001,0.002")
    process = subprocess.Popen([sys.executable, str(ROOT / "dev" / "sweep.py"), *map(str, flags)], text=True,
                               stderr=subprocess.PIPE, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    first, until = Path("s/l=0.001/main.csv"), time.monotonic() + 60
    while not (first.exists() and first.stat().st_size > 200):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped; to go on: python " in errors, errors
    assert 0 < newest_checkpoint("s/l=0.001") < 600
    run_here(sweep, *flags)
    assert [newest_checkpoint(f"s/l=0.00{n}") for n in (1, 2)] == [600, 600]


def test_what_is_refused(workplace, run_here):
    for flags, words in ((("-l", 0.1), "no flag has several values"), (("-l", "0.1,0.2,1e-1"), "two runs"),
                         (("-o", "s,t"), "one value")):
        assert_one_line_error(run_here(sweep, *FAST, *flags, check=False), words)
