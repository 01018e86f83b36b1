"""
Benchmarks against PyTorch and others on this machine. Nothing else should run at the same time.

    python dev/bench.py cpu         # a training step of GPT-2 124M on the CPU
    python dev/bench.py gpu         # the same on a GPU, and of larger models: about ten minutes
    python dev/bench.py attention   # attention by itself, beside FlashAttention-2 and cuDNN
    python dev/bench.py matmul      # the matmuls of a step, each by itself, by our kernels and by cuBLASLt; --dtype fp8
    python dev/bench.py generate    # text, beside transformers
    python dev/bench.py scale       # training on 1, 2, 4, ... GPUs of this machine
    python dev/bench.py memory      # which batches fit into a card's memory, computed

`make bench` runs one of the first two. Tables are Markdown; COMMAND --help lists flags.
"""

import argparse
import contextlib
import dataclasses
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
from typing import NamedTuple

START = time.perf_counter()
from root import ROOT
import numpy as np
from tqdm import tqdm

import profile_gpu
import train_gpt2_cuda as cuda
from bench_kernels import bench_attention, bench_matmul
from bench_runs import (RUNS, bench_generate, bench_memory, bench_scale, line_to_send, positive,
                        times_of)
from llmc.checkpoint import padded
from llmc.errors import run_main
from llmc.gpu.device import count_gpus, cp, gpu_errors_as_lines, open_gpu
from llmc.gpu.precision import flops_per_token, peak_flops
from llmc.settings import Settings
from llmc.tensors import layer, table_elements
from llmc.threads import THREADS
from train_gpt2 import GPT2, SIZES, Config, parameter_table, random_model

V, T = 50257, 1024
# name in the tables -> in train_gpt2.SIZES
MODELS = {"124M": "d12", "355M": "d24", "774M": "d36", "1558M": "d48"}

NAMES = {  # of the programs that are measured
    "ours": "train_gpt2_cuda.py", "reduce-overhead": "PyTorch, torch.compile, reduce-overhead",
    "compile": "PyTorch, torch.compile", "eager": "PyTorch, eager", "numpy": "train_gpt2.py",
    "best": "PyTorch, torch.compile, flash, fused AdamW"}


def config_of(size):
    """The Config of a model of train_gpt2.SIZES."""
    return Config(1024, V, *SIZES[size], padded(V))


class Job(NamedTuple):
    """One program at one size, measured in a process of its own."""

    command: str  # cpu or gpu
    name: str  # a key of NAMES
    precision: str  # bfloat16, float32, fp8
    B: int
    T: int
    model: str = "124M"
    recompute: int = -1  # ours on a GPU: see CudaSettings


def random_batch(job):
    return np.random.default_rng(0).integers(0, V, (2, job.B, job.T), np.int32)


def measure(job, cache):
    """Run a worker; {figure: value}, or {"failed": the last line that it printed}. cache: the
    directory of its own."""
    own = os.path.join(cache, "-".join(map(str, job)))
    environment = {**os.environ, "TRAIN_GPT2_CACHE": own, "TORCHINDUCTOR_CACHE_DIR": own}
    done = subprocess.run([sys.executable, __file__, job.command, "--worker", *map(str, job)],
                          capture_output=True, text=True, env=environment)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"failed": (done.stderr.strip().splitlines() or ["killed: out of memory?"])[-1]}


# --------------------------------------------------------------------------------------------------
# cpu

CPU_JOBS = [Job("cpu", name, "float32", B, T) for B, T in ((4, 64), (1, 64), (16, 64), (4, 256))
            for name in ("numpy", "eager", "compile", "best") if (B, T) == (4, 64)
            or name != "compile"]
TURNS, CPU_WARMUP, CPU_STEPS = 3, 2, 3  # processes of each job, and steps of each


def bench_cpu(args):
    """One training step (forward, backward, AdamW) of GPT-2 124M on the CPU: train_gpt2.py beside
    PyTorch.

    Each runs in processes of its own, which take turns, so that a drift in the machine's speed
    affects all alike; the figure is the median step. "matmuls alone" is the floor: those of the
    step, in NumPy, on the model's own buffers. PyTorch runs twice as its users write it
    (export_weights.py's model, AdamW's defaults) and once at its best.
    """
    machine = describe_cpu()
    results = {job: [] for job in CPU_JOBS}
    with tempfile.TemporaryDirectory() as cache:
        for job in tqdm(TURNS * CPU_JOBS, leave=False, disable=None):
            results[job].append(measure(job, cache))
    table = ["| GPT-2 124M, float32 | B | T | seconds a step | tokens/s | peak memory | matmuls"
             " alone | step / matmuls |", "|---" * 8 + "|"]
    for job, turns in results.items():
        failed = [turn["failed"] for turn in turns if "failed" in turn]
        if failed:
            table.append(f"| {NAMES[job.name]} | {job.B} | {job.T} | failed: {failed[0]} | | | | |")
            continue
        step, matmuls = (statistics.median(seconds for turn in turns
                                           for seconds in turn.get(call, [0.0]))
                         for call in ("step", "matmuls"))
        figures = f"{step:.3f} | {job.B * job.T / step:.0f} | {turns[0]['peak'] / 2**30:.2f} GiB"
        floor = f"{matmuls:.3f} s | {step / matmuls:.2f}" if matmuls else "|"
        table.append(f"| {NAMES[job.name]} | {job.B} | {job.T} | {figures} | {floor} |")
    print("\n".join([*machine, *table]))


def time_calls(calls):
    """{name: function} -> {name: [seconds of each call], "peak": the process's peak memory, in
    bytes}."""
    seconds = {name: times_of(call, CPU_WARMUP, CPU_STEPS) for name, call in calls.items()}
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            * (1 if sys.platform == "darwin" else 1024))
    return {**seconds, "peak": peak}


def matmuls_alone(model, B, T):
    """All matmuls of one step, forward and backward, and nothing else."""
    params = model.params
    grads = model.grads
    acts = model.acts
    scratch = model.scratch
    L, NH, C = model.config.L, model.config.NH, model.config.C

    def linear(inp, out, weight, dweight, dinp):
        out, inp, dinp = (x.reshape(B * T, -1) for x in (out, inp, dinp))
        np.matmul(inp, weight.T, out=out)
        np.matmul(out, weight, out=dinp)
        np.matmul(out.T, inp, out=dweight)

    for l in range(L):
        p = layer(params, l)
        g = layer(grads, l)
        a = layer(acts, l)
        linear(a.ln1, a.qkv, p.qkvw, g.qkvw, scratch.dbranch)
        linear(a.atty, a.attproj, p.attprojw, g.attprojw, scratch.dbranch)
        linear(a.ln2, a.fch, p.fcw, g.fcw, scratch.dbranch)
        linear(a.fch_gelu, a.fcproj, p.fcprojw, g.fcprojw, scratch.dfch)
        q, k, v = np.moveaxis(a.qkv.reshape(B, T, 3, NH, C // NH), (2, 3), (0, 2))
        heads = np.swapaxes(a.atty.reshape(B, T, NH, C // NH), 1, 2)
        for _ in range(2):  # into (T, T): query @ key^T forward, dheads @ value^T backward
            np.matmul(q, np.swapaxes(k, 2, 3), out=a.preatt)
        # into (T, HS): att @ value forward, the gradients of query, key and value backward
        for _ in range(4):
            np.matmul(a.att, v, out=heads)
    linear(acts.lnf, acts.logits, params.wte[:V], grads.wte[:V], scratch.dbranch)


def step_of_numpy(job):
    settings = Settings(B=job.B, T=job.T)
    counter = itertools.count(1)
    model = GPT2(*random_model(MODELS[job.model], V))
    x, y = random_batch(job)
    model.allocate_activations(job.B, job.T)
    model.allocate_training(job.B, job.T)

    def step():
        model.forward(x, y)
        model.backward()
        model.optimizer.update(model.params, model.grads, settings, settings.learning_rate,
                               next(counter))

    return time_calls({"step": step, "matmuls": lambda: matmuls_alone(model, job.B, job.T)})


def describe_cpu():
    """CPU, threads, versions, and the OpenBLAS kernels that run, as lines of text."""
    import torch

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, TypeError), open("/proc/cpuinfo") as f:
        cpu = re.search(r"model name\s*: (.*)", f.read())[1]
    child = subprocess.run([sys.executable, "-c", "import train_gpt2"], cwd=ROOT,
                           capture_output=True, text=True,
                           env={**os.environ, "OPENBLAS_VERBOSE": "2"})
    core = re.search(r"Core: (\S+)|$", child.stdout + child.stderr)[1]
    return [f"{cpu}, {THREADS} threads; {datetime.date.today()}",
            f"Python {platform.python_version()}, NumPy"
            f" {np.__version__}, PyTorch {torch.__version__}, OpenBLAS core {core or 'unknown'}"]


# --------------------------------------------------------------------------------------------------
# gpu

GPU_WARMUP = 10
GPU_STEPS = 30
BATCHES = (4, 32, 64)
TABLES = {
    "bfloat16": [*(Job("gpu", name, "bfloat16", B, T) for B in BATCHES
                   for name in ("ours", "eager", "compile", "reduce-overhead") if B == 4
                   or name != "eager"),
                 *(Job("gpu", "ours", "bfloat16", 64, T, recompute=recompute)
                   for recompute in (1, 2))],
    "models": [Job("gpu", "ours", "bfloat16", B, T, model)
               for model, B in itertools.product(("355M", "774M", "1558M"), (4, 16))],
    "fp8": [Job("gpu", "ours", "fp8", B, T) for B in BATCHES],  # on Hopper
    # on GPUs without bfloat16
    "float32": [Job("gpu", name, "float32", B, T) for B in (1, 4, 8)
                for name in ("ours", "compile", "reduce-overhead")],
}


def bench_gpu(args):
    """One training step at T=1024 on random tokens on a GPU: train_gpt2_cuda.py beside PyTorch.

    Each runs in a process of its own. A step is forward, backward and AdamW; its time is the median
    over CUDA events. PyTorch is export_weights.py's model, in bfloat16 by autocast, with fused
    AdamW, flash attention and a vocabulary padded like ours. first step: from the start of the
    process, without the time to make the weights; "warm" with cached kernels. in use: all that the
    GPU counts. MFU: 6 N + 6 LCT operations a token, over the GPU's dense bfloat16 rate or, if
    unknown, that of a large matmul. roofline, in bfloat16: the time of the step's matmuls at the
    measured rate, plus that of AdamW's bytes at the bandwidth of a copy, over the step's.
    """
    count_gpus()
    major = cp.cuda.runtime.getDeviceProperties(0)["major"]  # and no context, see "in use"
    tables = ["bfloat16", "models", *["fp8"] * (major == 9)] if major >= 8 else ["float32"]
    to_send = None
    for table in [args.only] if args.only else tables:
        results = measure_all(TABLES[table])
        ours = next((r for job, r in results if "machine" in r), None)
        if ours is None:
            print(f"{table}: train_gpt2_cuda.py failed: {results[0][1]['failed']}")
            continue
        rival = next((f", PyTorch {r['torch']}" for _, r in results if "torch" in r), "")
        machine = f"{ours['machine']}{rival}; {datetime.date.today()}"
        rates = (f"copy {ours['bandwidth'] / 1e9:.0f} GB/s,"
                 f" large matmul {ours['matmul'] / 1e12:.0f} TFLOP/s")
        print(machine, rates, *gpu_table(table, results), sep="\n")
        if table == tables[0]:
            to_send = line_to_send(machine, results)
    if to_send:
        print(f"\nfor doc/speed.md, if your card is not there: {to_send}")


def time_steps(step, making):
    """{"first": seconds from the process's start, without `making`, "ms": the median}. step()
    returns its own ms."""
    step()
    first = time.perf_counter() - START - making
    return {"first": first,
            "ms": statistics.median([step() for _ in range(GPU_WARMUP + GPU_STEPS)][GPU_WARMUP:])}


def step_of_ours(job):
    making = time.perf_counter()
    config, params = random_model(MODELS[job.model], V)
    making = time.perf_counter() - making
    gpu = open_gpu()
    batch = random_batch(job)
    settings = cuda.CudaSettings(B=job.B, T=T, dtype=job.precision, recompute=job.recompute)
    trainer = profile_gpu.open_trainer(cuda.GPT2, gpu, config, params,
                                       cuda.resolve_auto(settings, gpu.arch))
    trainer.prepare()
    times = time_steps(lambda: 1000
                       * trainer.end_step(trainer.begin_step([batch],
                                                             settings.learning_rate)).seconds,
                       making)
    free, total = cp.cuda.runtime.memGetInfo()
    C = config.C
    L = config.L
    # before what follows
    memory = {"memory": cp.get_default_memory_pool().total_bytes(), "used": total - free}
    attention = L * profile_gpu.attention_flops(job.B, T, C, 7)
    return {"B": job.B, **times, **memory, "gpu": gpu.name,
            "machine": profile_gpu.describe(trainer.matmul),
            "matmul": profile_gpu.measure_matmul(trainer.matmul),
            "bandwidth": profile_gpu.measure_copy(trainer.device),
            "flops": 6 * (config.Vp * C + L * 12 * C * C) * job.B * T + attention,
            "moved": 28 * table_elements(parameter_table(config)),  # by AdamW
            "profile": {name: row.ms
                        for name, row in profile_gpu.time_launches(trainer, 5).items()}}


def step_of_pytorch(job):
    """On the CPU or a GPU. There, logits are padded like ours: multiples of 128 are fast."""
    import torch

    from reference import ADAMW, to_reference
    from reference_optimizers import adamw

    torch.set_num_threads(THREADS)
    making = time.perf_counter()
    on_gpu = job.command == "gpu"
    torch.set_float32_matmul_precision("high" if on_gpu else "highest")  # TF32, as ours
    config, params = random_model(MODELS[job.model], V)
    making = time.perf_counter() - making
    device = "cuda" if on_gpu else "cpu"
    fast = on_gpu or job.name == "best"
    model = to_reference(dataclasses.replace(config, V=config.Vp) if on_gpu else config, params,
                         flash=fast).to(device)
    optimizer = adamw(model.parameters(), ADAMW, **({"fused": True} if fast else {}))

    # the loss alone: if logits were an output, they would be kept and get a gradient of zeros
    def loss_of(x, y):
        return model(x, y)[1]

    mode = {"mode": "reduce-overhead"} if job.name == "reduce-overhead" else {}
    forward = loss_of if job.name == "eager" else torch.compile(loss_of, **mode)
    x, y = (torch.from_numpy(ids).long().to(device) for ids in random_batch(job))

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=job.precision == "bfloat16"):
            loss = forward(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    if not on_gpu:
        return time_calls({"step": step})
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)

    def milliseconds():
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    times = time_steps(milliseconds, making)
    free, total = torch.cuda.mem_get_info()
    return {"B": job.B, **times, "memory": torch.cuda.max_memory_allocated(), "used": total - free,
            "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}


def measure_all(jobs):
    """[(job, result of its worker)]. Ours runs twice for 124M, with an empty kernel cache and then
    a warm one. A failure, as where memory does not suffice, becomes a row."""
    results = []
    with tempfile.TemporaryDirectory() as cache:
        for job in tqdm(jobs, unit="run", leave=False, disable=None):
            result = measure(job, cache)
            if job.name == "ours" and job.model == "124M" and "failed" not in result:
                result = {**measure(job, cache), "cold": result["first"]}
            results.append((job, result))
    return results


def gpu_table(table, results):
    lines = [f"| GPT-2, T={T} | B | precision | ms a step | tokens/s | MFU | first step | memory |"
             " in use | roofline |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    measured = next((r["matmul"] for _, r in results if "matmul" in r), None)
    for job, r in results:
        start = (f"| {NAMES[job.name]}"
                 + (f", --recompute {job.recompute}" if job.recompute >= 0 else ""))
        start += f", {job.model} |" if table == "models" else " |"
        if "failed" in r:
            lines.append(f"{start} {job.B} | {job.precision} | failed: {r['failed']} | | | | | | |")
            continue
        rate = r["B"] * T / r["ms"] * 1000
        fastest = peak_flops(r["gpu"], "bf16") or measured
        mfu = ""
        if fastest:
            config = config_of(MODELS[job.model])
            parameters = sum(row.size // config.Vp * config.V if row.vocabulary else row.size
                             for row in parameter_table(config).values())
            mfu = f"{rate * flops_per_token(parameters, config, T) / fastest:.1%}"
        first = (f"{r['cold']:.1f} s, warm {r['first']:.1f} s" if "cold" in r
                 else f"{r['first']:.1f} s")
        share = ""
        # at the best of the peaks that were measured
        if "flops" in r and job.precision == "bfloat16":
            matmul, bandwidth = (max(other.get(rate, 0) for _, other in results)
                                 for rate in ("matmul", "bandwidth"))
            share = f"{1000 * (r['flops'] / matmul + r['moved'] / bandwidth) / r['ms']:.0%}"
        memory = f"{r['memory'] / 2**30:.2f} GiB | {r['used'] / 2**30:.2f} GiB"
        lines.append(f"{start} {r['B']} | {job.precision} | {r['ms']:.2f} | {rate:.0f} | {mfu} |"
                     f" {first} | {memory} | {share} |")
    return lines


# --------------------------------------------------------------------------------------------------
# the command line


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run):
        made = commands.add_parser(run.__name__.removeprefix("bench_"), description=run.__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
        made.set_defaults(run=run)
        return made.add_argument

    for run in (bench_cpu, bench_gpu):
        add = command(run)
        add("--worker", nargs=7, help=argparse.SUPPRESS)
    add("--only", choices=tuple(TABLES), help="one table")
    add = command(bench_attention)
    add("--heads", type=positive, default=12, help="NH (default: 12)")
    add("-C", type=positive, default=768, help="channels (default: 768)")
    add("-b", type=positive, nargs="+", default=(1, 4, 16, 64), help="batch sizes")
    add("-t", type=positive, nargs="+", default=(256, 1024, 4096), help="lengths")
    for run in (bench_matmul, bench_generate):
        add = command(run)
        add("--model", choices=tuple(SIZES), default="d12", help="(default: d12)")
        add("-b", type=positive, nargs="+", default=BATCHES if run == bench_matmul else (1, 8, 64),
            help="batch sizes")
        if run == bench_matmul:
            add("--dtype", choices=("auto", "bfloat16", "fp8", "float32"), default="auto",
                help="(default: auto)")
    command(bench_memory)
    add = command(bench_scale)
    add("--gpus", type=positive, nargs="+", help="numbers of GPUs (default: 1, 2, 4, ... of all)")
    add("--only", nargs="*", choices=tuple(RUNS), default=tuple(RUNS),
        help="which runs (default: all)")
    return parser.parse_args(argv)


@gpu_errors_as_lines()
def main():
    args = parse_arguments()
    if not getattr(args, "worker", None):
        return args.run(args)
    job = Job(*(kind(word) for kind, word in zip((str, str, str, int, int, str, int), args.worker)))
    step_of = {"numpy": step_of_numpy, "ours": step_of_ours}.get(job.name, step_of_pytorch)
    print(json.dumps(step_of(job)))


if __name__ == "__main__":
    run_main(main)
