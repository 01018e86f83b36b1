"""Training on 2, 4, 8 GPUs, as many as there are: the same bits as on one. Where there is only one, up to 8 ranks share
it with NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL 2.30 or newer; otherwise, nothing here runs."""

import functools
import itertools
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from conftest import ROOT, SMALL_HEADS, random_params, run_program
from llmc.checkpoint import write_model
from llmc.dataloader import write_tokens
from llmc.gpu.device import count_gpus, open_gpu
from llmc.errors import UserError
from llmc.resume import newest_checkpoint
from test_train_cuda import LLAMAS, page_and_flags

try:
    GPUS = count_gpus()
except UserError:
    GPUS = 0
RANKS = 8 if GPUS == 1 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else GPUS
COUNTS = [n for n in (1, 2, 4, 8) if n <= RANKS]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(RANKS < 2, reason=f"needs two GPUs, there are {GPUS}")]
RUN = ("-b", 2, "-t", 64, "-d", 1024, "-l", 1e-3, "-v", 5, "-m", 5, "-g", 20, "--lines", "llmc")


def train(*flags, program="train_gpt2_cuda.py", check=True, **environment):
    return run_program(program, *flags, check=check, timeout=300, **environment)


def results(directory):
    """Logs and models; of states, each number of GPUs has its own."""
    names = [name for name in sorted(os.listdir(directory)) if name == "main.log" or name.startswith("model")]
    return {name: (directory / name).read_bytes() for name in names}


@pytest.fixture
def heads(workplace):
    """A model with heads of 64, as Hopper's kernels want them, and tokens that repeat."""
    config = SMALL_HEADS.__class__(maxT=64, V=257, L=3, NH=2, C=128, Vp=384)
    write_model("gpt2_124M.bin", config, random_params(config))
    tokens = np.random.default_rng(0).integers(0, 64, 100_000)
    write_tokens("data/tiny_shakespeare_train.bin", [tokens], len(tokens))
    return workplace


OF_GPT2 = (("--dtype", "bfloat16", "--grad_clip", 1), ("--dtype", "float32", "--grad_clip", 1),
    ("--dtype", "float32", "--tf32", 0),
    ("--dtype", "bfloat16", "--stochastic_rounding", 3, "-w", 0), ("--dtype", "bfloat16", "--float32_grads", 1),
    ("--recompute", 2, "-c", 0.1), ("--graph", 0), ("--matmul", "kernels"), ("-sl", 1, "-sg", 1),
    ("--dtype", "fp8", "--grad_clip", 1), ("--arch", "sm_80"))
OF_LLAMA = (("--dtype", "bfloat16", "--grad_clip", 1), ("--dtype", "float32", "--recompute", 2), ("--dtype", "fp8"))


@pytest.mark.parametrize("model, flags", (
    *(("GPT-2", flags) for flags in OF_GPT2), *itertools.product(LLAMAS, OF_LLAMA),
    *(("speed run", flags) for flags in (*OF_LLAMA, ("--stochastic_rounding", 3, "-w", 0)))), ids=str)
def test_the_same_bits(heads, model, flags):
    """Losses, norms, samples and weights of 20 updates, some of them beyond a checkpoint of another number. An untied
    classifier's weight travels apart; 257 rows are cut unequally, 384 in memory are not."""
    if {"fp8", "kernels"} & {*flags} and open_gpu().arch != "sm_90a":
        pytest.skip("not Hopper")
    page, of_model = page_and_flags(model)
    steps = 140 if "-sl" in flags else 20  # outliers are told from 128 updates on
    run = functools.partial(train, *of_model, *RUN, *flags, program=f"{page}_cuda.py")
    for count in COUNTS:
        done = run("--gpus", count, "-x", steps, "-n", steps // 2, "-s", 10, "-o", f"run{count}")
        assert "nan" not in done.stdout
        assert results(heads / f"run{count}") == results(heads / "run1")
    for first, second in {(COUNTS[-1], 1), (1, 2), (2, COUNTS[-1])} - {(2, 2)}:
        directory = f"parts{first}{second}"
        run("--gpus", first, "-x", steps // 2, "-s", 0, "-o", directory)
        run("--gpus", second, "-x", steps, "-s", 0, "-o", directory, "-y", 1)
        name = f"model_{steps:08d}.bin"
        assert (heads / directory / name).read_bytes() == (heads / "run1" / name).read_bytes()


def test_a_rank_that_is_killed(heads):
    """At random moments: the others end at once, and the run goes on from its last checkpoint to the same end."""
    flags = ("--gpus", 2, *RUN, "-s", 0, "-n", 1, "-nk", 3, "-o", "run")
    rng, deaths = random.Random(0), 0
    while deaths < 20:
        resume = ("-y", 1) if deaths else ()
        command = map(str, (sys.executable, ROOT / "train_gpt2_cuda.py", *flags, "-x", 100000, *resume))
        process = subprocess.Popen(list(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not process.stdout.readline().startswith("step"):
            assert process.poll() is None, process.stderr.read()
        time.sleep(rng.uniform(0, 0.3))
        ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True).stdout.split()
        began = time.monotonic()
        os.kill(int(rng.choice(ranks)), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        assert process.returncode and time.monotonic() - began < 10 and "Traceback" not in errors
        assert "a rank ended unexpectedly" in errors or "died of SIGKILL" in errors
        deaths += 1
    step = newest_checkpoint("run") + 3
    train("-x", step, *flags, "-y", 1)
    train("-x", step, *RUN, "-s", 0, "-o", "whole")
    name = f"model_{step:08d}.bin"
    assert (heads / "run" / name).read_bytes() == (heads / "whole" / name).read_bytes()


def test_sockets_and_torchrun(heads):
    """As on two machines, ranks that may only talk over sockets; and torchrun itself."""
    flags = ("-x", 5, "-s", 0, *RUN, "-o")
    train(*flags, "run1")
    train("--gpus", 2, *flags, "run2", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
               ROOT / "train_gpt2_cuda.py", *map(str, flags), "run3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert results(heads / "run1") == results(heads / "run2") == results(heads / "run3")
