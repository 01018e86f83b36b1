"""
make bench: one training step (forward, backward, AdamW) of GPT-2 124M on the CPU, this trainer beside PyTorch.

    python dev/bench_cpu.py
    python dev/bench_cpu.py --readme README.md     # also puts the table between the markers there

Every row is a process of its own: the same model, batch and number of threads, random tokens, two steps of warm-up, then the
median step. "products" is the floor: the step's matrix products alone, in NumPy, on the same buffers, in the same process.
Nothing else should run meanwhile.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import numpy as np
from tqdm import tqdm

import train_gpt2
from train_gpt2 import Config, GPT2, Settings, UserError, allocate, flat, layer, parameter_table, replacing, run_main

GPT2_124M = Config(maxT=1024, V=50257, L=12, NH=12, C=768, Vp=50304)
MAIN = (4, 64)
OTHERS = ((1, 64), (16, 64), (4, 256))
NAMES = {"numpy": "train_gpt2.py", "eager": "PyTorch, eager", "compile": "PyTorch, torch.compile"}

# ----------------------------------------------------------------------------------------------------------------------
# workers: each prints one line of JSON


def time_calls(call, repeats):
    """Median seconds of call() after two calls of warm-up."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def random_batch(B, T):
    rng = np.random.default_rng(0)
    return (rng.integers(0, GPT2_124M.V, (B, T), dtype=np.int32) for _ in range(2))


def random_parameters():
    params = allocate(parameter_table(GPT2_124M))
    rng = np.random.default_rng(0)
    flat(params)[:] = rng.standard_normal(flat(params).size, dtype=np.float32) * np.float32(0.02)
    params.wte[GPT2_124M.V :] = 0.0
    return params


def matrix_products(model, B, T):
    """All matrix products of one step, forward and backward, and nothing else."""
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
        for _ in range(2):  # query @ key^T and its like, then att @ value and its like: one forward, two backward
            np.matmul(q, np.swapaxes(k, 2, 3), out=a.preatt)
        for _ in range(4):
            np.matmul(a.att, v, out=heads)
    linear(acts.lnf, acts.logits, params.wte[:V], grads.wte[:V], scratch.dbranch)


def worker_numpy(B, T, repeats):
    model, settings = GPT2(GPT2_124M, random_parameters()), Settings(B=B, T=T)
    model.allocate_activations(B, T)
    model.allocate_training(B, T)
    x, y = random_batch(B, T)
    counter = iter(range(1, 1000))

    def step():
        model.forward(x, y)
        model.backward()
        model.update(settings, settings.learning_rate, next(counter))

    seconds, peak = time_calls(step, repeats), peak_memory()
    model.scratch = train_gpt2.views(train_gpt2.scratch_table(GPT2_124M, B, T), model.scratch.buffer)
    return dict(seconds=seconds, peak=peak, products=time_calls(lambda: matrix_products(model, B, T), repeats))


def worker_pytorch(B, T, repeats, compiled):
    import torch

    from export_weights import ADAMW, adamw, to_reference

    torch.set_num_threads(train_gpt2.THREADS)
    model = to_reference(GPT2_124M, random_parameters(), flash=True)
    optimizer = adamw(model, ADAMW, fused=True)
    step_model = torch.compile(model) if compiled else model
    x, y = (torch.from_numpy(ids).long() for ids in random_batch(B, T))

    def step():
        loss = step_model(x, y)[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return dict(seconds=time_calls(step, repeats), peak=peak_memory())


def peak_memory():
    """Largest resident size of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run_worker(name, B, T, repeats):
    if name == "numpy":
        return worker_numpy(B, T, repeats)
    return worker_pytorch(B, T, repeats, compiled=name == "compile")


# ----------------------------------------------------------------------------------------------------------------------
# the table


def describe_machine():
    """CPU, threads, versions, and the OpenBLAS kernels that run, as lines of text."""
    import torch

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, TypeError), open("/proc/cpuinfo") as f:
        cpu = re.search(r"model name\s*: (.*)", f.read())[1]
    child = subprocess.run([sys.executable, "-c", "import train_gpt2"], cwd=ROOT, env={**os.environ, "OPENBLAS_VERBOSE": "2"},
                           capture_output=True, text=True)
    core = re.search(r"Core: (\S+)", child.stdout + child.stderr)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return [
        f"{cpu}, {train_gpt2.THREADS} threads; {datetime.date.today()}, commit {commit or 'unknown'}",
        f"Python {platform.python_version()}, NumPy {np.__version__}, PyTorch {torch.__version__},"
        f" OpenBLAS core {core[1] if core else 'unknown'}"
        f" (OPENBLAS_CORETYPE={os.environ.get('OPENBLAS_CORETYPE', 'not set')})",
    ]


def measure(repeats):
    """{(backend, B, T): result of its worker}."""
    jobs = [("numpy", *MAIN), ("eager", *MAIN), ("compile", *MAIN)]
    jobs += [(name, *shape) for shape in OTHERS for name in ("numpy", "eager")]
    results = {}
    with tqdm(jobs, unit="row", leave=False) as bar:
        for name, B, T in bar:
            bar.set_description(f"{NAMES[name]}, B={B} T={T}")
            command = [sys.executable, __file__, "--worker", name, "--shape", str(B), str(T), "--repeats", str(repeats)]
            child = subprocess.run(command, capture_output=True, text=True)
            if child.returncode:
                raise UserError(f"{NAMES[name]} at B={B} T={T} failed: {(child.stderr.strip() or 'no message').splitlines()[-1]}")
            results[name, B, T] = json.loads(child.stdout.splitlines()[-1])
    return results


def make_table(results):
    lines = ["| GPT-2 124M, float32 | B | T | seconds a step | tokens/s | peak memory | matrix products alone | step / products |",
             "|---|---|---|---|---|---|---|---|"]
    for (name, B, T), r in results.items():
        products = f"{r['products']:.3f} s | {r['seconds'] / r['products']:.2f}" if "products" in r else "|"
        lines.append(f"| {NAMES[name]} | {B} | {T} | {r['seconds']:.3f} | {B * T / r['seconds']:.0f} | {r['peak'] / 2**30:.2f} GiB"
                     f" | {products} |")
    return lines


def update_readme(path, text):
    """Put the table between the markers of a README."""
    begin, end = "<!-- bench_cpu begin -->", "<!-- bench_cpu end -->"
    with open(path, encoding="utf-8") as f:
        before, rest = f.read().split(begin)
    with replacing(path) as f:
        f.write(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}".encode())


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of each row")
    parser.add_argument("--readme", help="file to put the table into, between its markers")
    parser.add_argument("--worker", choices=tuple(NAMES), help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats}: expected at least 1")
    if args.worker:
        print(json.dumps(run_worker(args.worker, *args.shape, args.repeats)))
        return
    machine = describe_machine()
    print("\n".join(machine))
    table = make_table(measure(args.repeats))
    print("\n".join(table))
    if args.readme:
        update_readme(args.readme, "\n".join([*machine, "", *table]))


if __name__ == "__main__":
    run_main(main)
