"""The programs of dev/ that measure, and what those for a GPU say where there is none; sweeps on the CPU: a run for
each combination, the table, and what the same command does again."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
import unittest.mock
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
import check_gpu
import compare_losses
import llmc.gpu.device
import plot_bench
import profile_gpu
import sweep
import train_gpt2
from conftest import ROOT, assert_one_line_error
from llmc.errors import UserError
from llmc.resume import newest_checkpoint
from llmc.settings import parse_settings

RESULT = {"B": 4, "ms": 10.0, "first": 2.0, "memory": 2**30, "used": 2**31, "gpu": "NVIDIA H200"}
SWEEP = ("-o", "s", "-b", 2, "-t", 8, "-m", 2, "-v", 4)


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(sweep, "count_gpus", unittest.mock.Mock(side_effect=UserError("no GPU here")))


def test_a_worker_on_the_cpu(monkeypatch, tmp_path):
    """Of a small model, in a process of its own; and one that fails."""
    job = bench.Job("cpu", "numpy", "float32", 1, 8, "124M")
    monkeypatch.setitem(bench.MODELS, "124M", "d2")
    found = bench.step_of_numpy(job)
    assert len(found["step"]) == len(found["matmuls"]) == bench.CPU_STEPS and found["peak"] > 1e6
    assert "failed" in bench.measure(job._replace(T=2000), str(tmp_path)), "GPT-2 has no position 2000"


def test_the_tables_of_a_gpu(monkeypatch, tmp_path):
    jobs = [bench.Job("gpu", name, "bfloat16", 4, 1024) for name in ("ours", "compile")]
    ours = {**RESULT, "matmul": 8e14, "bandwidth": 4e12, "flops": 4e12, "moved": 4e9, "cold": 5.0,
            "profile": {"matmul fc": 1.0, "adamw_update": 2.0}}
    fp8 = jobs[0]._replace(precision="fp8"), {**ours, "ms": 8.0}
    lines = bench.gpu_table("fp8", [(jobs[0], ours), (jobs[1], {"failed": "out of memory"}), fp8])
    assert "| 10.00 | 409600 |" in lines[2] and "5.0 s, warm 2.0 s" in lines[2] and "60%" in lines[2]
    assert "| 4 | fp8 | 8.00 | 512000 |" in lines[4] and lines[4].endswith("|  |")
    assert "failed: out of memory" in lines[3] and len({line.count("|") for line in lines}) == 1
    summary = bench.gpu_summary([(jobs[0], ours), (jobs[1], {**RESULT, "ms": 12.0})])
    assert any("llm.c" in line for line in summary) and len({line.count("|") for line in summary}) == 1
    (tmp_path / "r.json").write_text(json.dumps({"machine": "a", "T": 8, "results": [{**jobs[0]._asdict(), **ours}]}))
    for name, value in dict(MEASURED=tmp_path / "r.json", DOC=tmp_path).items():
        monkeypatch.setattr(plot_bench, name, value)
    plot_bench.draw_measured()
    for name in ("bench_gpu-dark.png", "overview.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model", ("gpt2_124M.bin", "d2"))
def test_pytorch_by_other_kernels_computes_the_same(workplace, run_here, model):
    """Its losses, on the CPU, over four updates: those of train_gpt2.py, whether the batch comes at once or a sequence
    at a time; with accumulation, clipping, decay and a schedule."""
    flags = ("-e", model, "-b", 3, "-t", 16, "-d", 96, "-x", 4, "-s", 0, "-l", 1e-3, "-u", 2, "-k", "cosine", "-c", 0.1,
             "--grad_clip", 0.5, "-o", "run")
    run_here(train_gpt2, *flags, "-v", 0)
    settings = parse_settings(compare_losses.Comparison, "", [*map(str, flags), "--run", "run"])
    expected = compare_losses.run_ours(settings)
    for others in (False, True):
        losses = compare_losses.run_pytorch(settings, 4, "test", others=others)
        assert len(losses) == 4 and np.allclose(losses, expected, rtol=0, atol=1e-4)  # of which a log has four digits


def test_our_run_has_all_settings():
    """Also -b 4, the default elsewhere, but not of d4."""
    settings = parse_settings(compare_losses.Comparison, "", ["-e", "d4", "-b", "4", "-x", "20"])
    ours = parse_settings(compare_losses.TRAINED, "", compare_losses.flags_of(settings))
    assert ours.print_every == 1
    changed = {name for name, value in vars(ours).items() if getattr(settings, name) != value}
    assert changed == {"val_every", "sample_every", "final_reports", "print_every", "lines", "given"}


@pytest.mark.parametrize("program, flags", ((bench, ("gpu",)), (bench, ("attention",)), (bench, ("matmul",)),
                                            (bench, ("scale",)), (check_gpu, ()), (profile_gpu, ())))
def test_what_needs_a_gpu_says_so(monkeypatch, run_here, program, flags):
    monkeypatch.setattr(llmc.gpu.device.cp.cuda.runtime, "getDeviceCount", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_one_line_error(run_here(program, *flags, check=False), "GPU")


def test_a_sweep_s_runs_table_and_picture(workplace, without_gpu, run_here):
    """One learning rate is too high: those runs fail, and are tried again by the same command. What is no sweep is
    refused."""
    flags = (*SWEEP, "-x", 10, "--seed", "1,2")
    done = run_here(sweep, *flags, "-l", "1e-3,1e38", check=False)
    assert done.returncode == 1 and "s/l=1e+38_seed=1: failed (1): train_gpt2.py: error:" in done.stderr
    done = run_here(sweep, *flags, "-l", "1e-3,1e38", check=False)
    assert done.stdout.startswith("4 runs of train_gpt2.py, 2 to train")
    rows = list(csv.reader(open("s/sweep.csv", newline="")))
    assert rows[0] == ["learning_rate", "seed", "state", *sweep.RESULTS]
    assert [row[2] for row in rows[1:]] == ["finished"] * 2 + ["failed"] * 2
    assert Path("s/sweep.png").read_bytes().startswith(b"\x89PNG")
    for flags, words in ((("-l", 0.1), "no flag has several values"), (("-l", "0.1,0.2,1e-1"), "two runs"),
                         (("-o", "s,t"), "one value")):
        assert_one_line_error(run_here(sweep, *SWEEP, *flags, check=False), words)


def test_ctrl_c_saves_and_the_same_sweep_goes_on(workplace, without_gpu, run_here):
    flags = (*SWEEP, "-x", 600, "-l", "0.001,0.002")
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
