"""
make bench: one training step (forward, backward, AdamW) of GPT-2 124M on the CPU, this trainer beside PyTorch.

    python dev/bench_cpu.py
    python dev/bench_cpu.py --readme      # also puts the table into doc/speed.md, its first rows into README.md

All contenders get the same model, random tokens, batch size and number of threads, each in its own process. They take
turns, a few steps each, so that a drift in the machine's speed affects all alike; the figure is the median step.
"matmuls" is the floor: the step's matmuls alone, in NumPy, on the model's own buffers, in the same process. PyTorch
runs twice as its users write it (export_weights.py's model, AdamW with its defaults; eager and torch.compile) and once
at its best (torch.compile, flash attention, fused AdamW). Nothing else should run at the same time.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)
USERS_CORE = os.environ.get("OPENBLAS_CORETYPE")

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np
from tqdm import tqdm

from llmc.errors import UserError, run_main
from llmc.settings import Settings
from llmc.tensors import allocate, flat, layer
from llmc.threads import THREADS
from readme import SPEED, put_between_markers, split_at_markers
from train_gpt2 import Config, GPT2, parameter_table

GPT2_124M = Config(maxT=1024, V=50257, L=12, NH=12, C=768, Vp=50304)
NAMES = {
    "numpy": "train_gpt2.py",
    "eager": "PyTorch, eager",
    "compile": "PyTorch, torch.compile",
    "best": "PyTorch, torch.compile, flash, fused AdamW",
}
JOBS = {(4, 64): tuple(NAMES), (1, 64): ("numpy", "eager", "best"), (16, 64): ("numpy", "eager", "best"),
        (4, 256): ("numpy", "eager", "best")}
WARMUP, TURN = 2, 3  # steps

# ----------------------------------------------------------------------------------------------------------------------
# workers: a process that takes a turn for each line on its stdin, and answers with a line of JSON


def serve_turns(calls):
    """Take a turn for each line on stdin: time the calls, {name: function}.

    Prints {name: [seconds of each call], "peak": the process's peak memory so far, in bytes}.
    """
    for turn in itertools.count():
        if not sys.stdin.readline():
            return
        seconds = {}
        for name, call in calls.items():
            for _ in range(0 if turn else WARMUP):
                call()
            seconds[name] = []
            for _ in range(TURN):
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
        print(json.dumps({**seconds, "peak": peak_memory()}), flush=True)


def random_batch(B, T):
    rng = np.random.default_rng(0)
    return (rng.integers(0, GPT2_124M.V, (B, T), dtype=np.int32) for _ in range(2))


def random_parameters(config=GPT2_124M):
    """Weights N(0, 0.02): the same 16 million numbers, repeated."""
    params = allocate(parameter_table(config))
    numbers = np.random.default_rng(0).standard_normal(2**24 - 1, dtype=np.float32) * np.float32(0.02)
    flat(params)[:] = np.resize(numbers, flat(params).size)
    params.wte[config.V :] = 0.0
    return params


def matmuls(model, B, T):
    """All matmuls of one step, forward and backward, and nothing else."""
    config, params, grads, acts, scratch = model.config, model.params, model.grads, model.acts, model.scratch
    L, NH, C, V = config.L, config.NH, config.C, config.V

    def linear(inp, out, weight, dweight, dinp):
        out, inp, dinp = (x.reshape(B * T, -1) for x in (out, inp, dinp))
        np.matmul(inp, weight.T, out=out)
        np.matmul(out, weight, out=dinp)
        np.matmul(out.T, inp, out=dweight)

    for l in range(L):
        p, g, a = layer(params, l), layer(grads, l), layer(acts, l)
        linear(a.ln1, a.qkv, p.qkvw, g.qkvw, scratch.dbranch)
        linear(a.atty, a.attproj, p.attprojw, g.attprojw, scratch.dbranch)
        linear(a.ln2, a.fch, p.fcw, g.fcw, scratch.dbranch)
        linear(a.fch_gelu, a.fcproj, p.fcprojw, g.fcprojw, scratch.dfch)
        q, k, v = np.moveaxis(a.qkv.reshape(B, T, 3, NH, C // NH), (2, 3), (0, 2))
        heads = np.swapaxes(a.atty.reshape(B, T, NH, C // NH), 1, 2)
        for _ in range(2):  # into (T, T): query @ key^T forward, dheads @ value^T backward
            np.matmul(q, np.swapaxes(k, 2, 3), out=a.preatt)
        for _ in range(4):  # into (T, HS): att @ value forward, the gradients of query, key and value backward
            np.matmul(a.att, v, out=heads)
    linear(acts.lnf, acts.logits, params.wte[:V], grads.wte[:V], scratch.dbranch)


def numpy_calls(B, T):
    model, settings = GPT2(GPT2_124M, random_parameters()), Settings(B=B, T=T)
    model.allocate_activations(B, T)
    model.allocate_training(B, T)
    x, y = random_batch(B, T)
    counter = itertools.count(1)

    def step():
        model.forward(x, y)
        model.backward()
        model.update(settings, settings.learning_rate, next(counter))

    return {"step": step, "matmuls": lambda: matmuls(model, B, T)}


def pytorch_calls(B, T, compiled, best):
    import torch

    from export_weights import ADAMW, adamw, to_reference

    torch.set_num_threads(THREADS)
    model = to_reference(GPT2_124M, random_parameters(), flash=best)
    optimizer = adamw(model, ADAMW, **({"fused": True} if best else {}))
    step_model = torch.compile(model) if compiled else model
    x, y = (torch.from_numpy(ids).long() for ids in random_batch(B, T))

    def step():
        loss = step_model(x, y)[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return {"step": step}


def peak_memory():
    """Largest resident size of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run_worker(name, B, T):
    serve_turns(numpy_calls(B, T) if name == "numpy" else pytorch_calls(B, T, compiled=name != "eager",
                                                                        best=name == "best"))


# ----------------------------------------------------------------------------------------------------------------------
# the table


def describe_machine():
    """CPU, threads, versions, and the OpenBLAS kernels that run, as lines of text."""
    import torch

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, TypeError), open("/proc/cpuinfo") as f:
        cpu = re.search(r"model name\s*: (.*)", f.read())[1]
    child = subprocess.run([sys.executable, "-c", "import train_gpt2"], cwd=ROOT,
                           env={**os.environ, "OPENBLAS_VERBOSE": "2"}, capture_output=True, text=True)
    chosen = os.environ.get("OPENBLAS_CORETYPE")
    core = re.search(r"Core: (\S+)", child.stdout + child.stderr)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True,
                            text=True).stdout.strip()
    return [
        f"{cpu}, {THREADS} threads; {datetime.date.today()}, commit {commit or 'unknown'}",
        f"Python {platform.python_version()}, NumPy {np.__version__}, PyTorch {torch.__version__},"
        f" OpenBLAS core {core[1] if core else 'unknown'}"
        f" (OPENBLAS_CORETYPE {'set by the user' if USERS_CORE else 'set by train_gpt2.py' if chosen else 'not set'})",
    ]


def measure(turns):
    """Run JOBS; return {(contender, B, T): {"step": median s, "matmuls": ..., "peak": bytes} or {"failed": why}}."""
    results = {}
    with tqdm(total=turns * sum(map(len, JOBS.values())), unit="turn", leave=False) as bar:
        for (B, T), names in JOBS.items():
            workers = {name: start_worker(name, B, T) for name in names}
            answers = {name: [] for name in names}
            for _ in range(turns):
                for name, worker in workers.items():
                    bar.set_description(f"{NAMES[name]}, B={B} T={T}")
                    answers[name].append(take_turn(worker))
                    bar.update()
            for name, worker in workers.items():
                worker.stdin.close()
                worker.wait()
                if None in answers[name]:
                    results[name, B, T] = {"failed": last_line(worker.errors)}
                    continue
                calls = [call for call in answers[name][0] if call != "peak"]
                medians = {call: statistics.median(s for answer in answers[name] for s in answer[call])
                           for call in calls}
                results[name, B, T] = {**medians, "peak": answers[name][0]["peak"]}
    return results


def start_worker(name, B, T):
    command = [sys.executable, __file__, "--worker", name, "--shape", str(B), str(T)]
    errors = tempfile.TemporaryFile("w+")
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    worker.errors = errors
    return worker


def take_turn(worker):
    """Return the worker's answer, or None if it failed: no C++ compiler for torch.compile, or too little memory."""
    try:
        print("go", file=worker.stdin, flush=True)
        return json.loads(worker.stdout.readline())
    except (OSError, ValueError):
        return None


def last_line(errors):
    errors.seek(0)
    return next(reversed(errors.read().strip().splitlines()), "killed: out of memory?")


def make_table(results):
    columns = ("GPT-2 124M, float32", "B", "T", "seconds a step", "tokens/s", "peak memory", "matmuls alone",
               "step / matmuls")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (name, B, T), r in results.items():
        if "failed" in r:
            lines.append(f"| {NAMES[name]} | {B} | {T} | failed: {r['failed']} | | | | |")
            continue
        matmuls = f"{r['matmuls']:.3f} s | {r['step'] / r['matmuls']:.2f}" if "matmuls" in r else "|"
        lines.append(f"| {NAMES[name]} | {B} | {T} | {r['step']:.3f} | {B * T / r['step']:.0f}"
                     f" | {r['peak'] / 2**30:.2f} GiB | {matmuls} |")
    return lines


def make_summary(results):
    """The rows of the first shape, for a reader who only wants to know how long a step takes."""
    lines = ["| GPT-2 124M, float32, B=4, T=64 | seconds a step | tokens/s | peak memory |", "|---|---|---|---|"]
    for (name, B, T), r in results.items():
        if (B, T) == (4, 64) and "failed" not in r:
            lines.append(f"| {NAMES[name]} | {r['step']:.3f} | {B * T / r['step']:.0f} | {r['peak'] / 2**30:.2f} GiB |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--turns", type=int, default=3, help=f"turns of {TURN} steps for each contender")
    parser.add_argument("--readme", action="store_true",
                        help="put the table into doc/speed.md, and B=4 T=64 into README.md, between the markers")
    parser.add_argument("--worker", choices=tuple(NAMES), help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turns < 1:
        raise UserError(f"--turns {args.turns}: expected at least 1")
    if args.worker:
        return run_worker(args.worker, *args.shape)
    if args.readme:
        split_at_markers("bench_cpu", SPEED)  # fail now, not after all the work
        split_at_markers("speed_cpu")
    machine = describe_machine()
    print("\n".join(machine))
    results = measure(args.turns)
    table = make_table(results)
    print("\n".join(table))
    if args.readme:
        put_between_markers("bench_cpu", "\n".join([*machine, "", *table]), SPEED)
        put_between_markers("speed_cpu", "\n".join([*machine, "", *make_summary(results)]))


if __name__ == "__main__":
    run_main(main)
