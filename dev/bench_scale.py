"""
Training on 1, 2, 4, ... GPUs of this machine: tokens a second, and their ratio to linear scaling, which is as many
times the slowest of these GPUs, all measured alone at the same time. (They differ by a few percent.)

    python dev/bench_scale.py                     # all GPUs: GPT-2 124M at B=4 and B=64, an update of half a million
                                                  # tokens, GPT-2 1558M
    python dev/bench_scale.py --gpus 1,2 --only small,update
    python dev/bench_scale.py --same 50           # also: 50 updates on each number of GPUs, and whether logs are equal

Each row is a run of train_gpt2_cuda.py on random tokens, from random weights: its median step, without the first third
of the steps. Memory is what the trainer allocates on a GPU.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np
from tqdm import tqdm

from llmc.dataloader import write_tokens
from llmc.gpu.device import count_gpus
from llmc.errors import UserError, run_main

RUNS = {  # name -> (model, flags); B is per GPU, -d for all together
    "small": ("124M, B=4", ("-e", "d12", "-b", 4, "-x", 60)),
    "large": ("124M, B=64", ("-e", "d12", "-b", 64, "-x", 15)),
    "update": ("124M, B=64, 524,288 tokens", ("-e", "d12", "-b", 64, "-d", 524288, "-x", 9)),
    "1558M": ("1558M, B=16", ("-e", "d48", "-b", 16, "-x", 9)),
}
T, V, PROGRAM = 1024, 50257, os.path.join(ROOT, "train_gpt2_cuda.py")
SAME = ("-e", "d12", "-b", 4, "-d", 65536, "-l", 6e-4, "-u", 10, "--grad_clip", 1, "-v", 10, "-m", 16)


def train(gpus, *flags, only=None):
    """Run the trainer; return what it prints, in llm.c's lines. only: index of the one GPU that it sees."""
    command = [sys.executable, PROGRAM, "-i", "tokens", "-t", T, "-s", 0, "--gpus", gpus, "--lines", "llmc", *flags]
    environment = dict(os.environ)
    if only is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[only] if visible else str(only)
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    if done.returncode:
        raise UserError(f"{' '.join(map(str, command[1:]))}: {(done.stderr.splitlines() or ['no message'])[-1]}")
    return done.stdout


def measure(gpus, flags, only=None):
    """Return (ms a step, tokens/s, MiB) of a run."""
    output = train(gpus, "-v", 0, "--final_reports", 0, *flags, only=only)
    steps = [tuple(map(float, pair)) for pair in re.findall(r"\(([0-9.]+) ms, ([0-9]+) tok/s\)", output)]
    ms, rate = (statistics.median(values) for values in zip(*steps[len(steps) // 3 :]))
    return ms, rate, sum(map(int, re.findall(r"^allocated (\d+) MiB", output, re.MULTILINE)))


def measure_slowest(count, flags):
    """Return the tokens/s of the slowest of `count` runs at the same time, each on its own GPU."""
    with ThreadPoolExecutor(count) as pool:
        return min(rate for _, rate, _ in pool.map(lambda only: measure(1, flags, only), range(count)))


def divides(flags, gpus):
    """Whether an update divides into whole batches for so many GPUs."""
    given = dict(zip(flags[::2], flags[1::2]))
    return given.get("-d", 0) % (given.get("-b", 1) * T * gpus) == 0


def numbers(text):
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected numbers of GPUs like 1,2,4")
    return found


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--gpus", type=numbers, metavar="N,N",
                        help="numbers of GPUs (if not given: 1, 2, 4, ... of all)")
    parser.add_argument("--only", default=",".join(RUNS), help="which runs, of these")
    parser.add_argument("--same", type=int, default=0, metavar="STEPS", help="compare the logs of so many updates, too")
    args = parser.parse_args(argv)
    unknown = [name for name in args.only.split(",") if name not in (*RUNS, "")]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: expected names of {','.join(RUNS)}")
    return args


def main():
    args = parse_arguments()
    there = count_gpus()
    counts = args.gpus or [n for n in (1, 2, 4, 8, 16) if n <= there]
    if max(counts) > there:
        raise UserError(f"--gpus {max(counts)}: this machine has {there}")
    different = []
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        tokens = np.random.default_rng(0).integers(0, V, 20_000_000)
        write_tokens("tokens_train.bin", [tokens], len(tokens), "uint16")
        write_tokens("tokens_val.bin", [tokens[: 1 << 17]], 1 << 17, "uint16")
        names = [name for name in args.only.split(",") if name]
        progress = tqdm(total=len(names) * len(counts) + len(counts) * bool(args.same), disable=None)
        if names:
            print("| bfloat16, T=1024 | GPUs | ms a step | tokens/s | of linear | GiB a GPU |")
            print("|---|---|---|---|---|---|")
        for name in names:
            what, flags = RUNS[name]
            for gpus in counts:
                progress.set_description(f"{what} on {gpus}")
                if not divides(flags, gpus):
                    tqdm.write(f"note: {what}: does not divide among {gpus} GPUs", file=sys.stderr)
                    progress.update()
                    continue
                slowest = measure_slowest(gpus, flags) if gpus > 1 else None
                ms, rate, size = measure(gpus, flags)
                tqdm.write(f"| {what} | {gpus} | {ms:.2f} | {rate:,.0f} | {rate / gpus / (slowest or rate):.1%} |"
                           f" {size / 1024:.1f} |")
                progress.update()
        logs = {}
        for gpus in counts if args.same else ():
            progress.set_description(f"{args.same} updates on {gpus}")
            train(gpus, *SAME, "-x", args.same, "-o", f"run{gpus}")
            with open(f"run{gpus}/main.log", "rb") as f:
                logs[gpus] = f.read()
            progress.update()
        progress.close()
        different = [gpus for gpus in logs if logs[gpus] != logs[counts[0]]]
    if logs:
        print(f"logs of {args.same} updates on {', '.join(map(str, logs))} GPUs:"
              f" {'equal' if not different else f'different on {different}'}")
    return bool(different)


if __name__ == "__main__":
    run_main(main)
