"""
Benchmarks against PyTorch and others on this machine. Nothing else should run at the same time.

    python dev/bench.py cpu         # a training step of GPT-2 124M on the CPU
    python dev/bench.py gpu         # the same on a GPU, and of larger models: about ten minutes
    python dev/bench.py attention   # attention by itself, beside FlashAttention-2 and cuDNN
    python dev/bench.py matmul      # the matmuls of a step, each by itself, by our kernels and by cuBLASLt; --dtype fp8
    python dev/bench.py generate    # text, beside transformers
    python dev/bench.py scale       # training on 1, 2, 4, ... GPUs of this machine

`make bench` runs one of the first two. The flags of each: `python dev/bench.py COMMAND --help`.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
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
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

START = time.perf_counter()
from root import ROOT
import numpy as np
from tqdm import tqdm

import profile_gpu
import train_gpt2_cuda as cuda
from generate import streams
from llmc.checkpoint import padded
from llmc.dataloader import write_tokens
from llmc.errors import UserError, run_main
from llmc.files import replacing
from llmc.gpu.decoder import open_decoder
from llmc.gpu.device import count_gpus, cp, gpu_errors_as_lines, open_gpu
from llmc.gpu.fp8 import Fp8, operand_table
from llmc.gpu.memory import Block
from llmc.gpu.matmul import Linear, Matmul
from llmc.gpu.precision import Precision, flops_per_token, peak_flops
from llmc.sampler import Choice
from llmc.settings import Settings
from llmc.tensors import Row, allocate, bf16_bits, flat, layer, table_elements
from llmc.threads import THREADS
from plot_bench import BESIDE_LLMC, MEASURED, NAMES, briefly, draw_measured
from readme import SPEED, output_of, put_between_markers, split_at_markers
from train_gpt2 import GPT2, SIZES, Config, Decoder, parameter_table, random_model

V, T = 50257, 1024
MODELS = {"124M": "d12", "355M": "d24", "774M": "d36", "1558M": "d48"}  # name in the tables -> in train_gpt2.SIZES


def config_of(size):
    """The Config of a model of train_gpt2.SIZES."""
    return Config(1024, V, *SIZES[size], padded(V))


def times_of(call, warmup, count):
    """The seconds of each of `count` calls, after a few to warm up."""
    found = []
    for _ in range(warmup + count):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return found[warmup:]


class Job(NamedTuple):
    """One program at one size, measured in a process of its own."""

    command: str  # cpu or gpu
    name: str  # a key of plot_bench's NAMES
    precision: str  # bfloat16, fp8; float32 on the CPU
    B: int
    T: int
    model: str = "124M"
    recompute: int = -1  # ours on a GPU: see CudaSettings


def random_batch(job):
    return np.random.default_rng(0).integers(0, V, (2, job.B, job.T), np.int32)


def measure(job, cache):
    """Run a worker; {figure: value}, or {"failed": the last line that it printed}. cache: the directory of its own."""
    own = os.path.join(cache, "-".join(map(str, job)))
    environment = {**os.environ, "TRAIN_GPT2_CACHE": own, "TORCHINDUCTOR_CACHE_DIR": own}
    done = subprocess.run([sys.executable, __file__, job.command, "--worker", *map(str, job)], capture_output=True,
                          text=True, env=environment)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"failed": (done.stderr.strip().splitlines() or ["killed: out of memory?"])[-1]}


# ----------------------------------------------------------------------------------------------------------------------
# cpu

CPU_JOBS = [Job("cpu", name, "float32", B, T) for B, T in ((4, 64), (1, 64), (16, 64), (4, 256))
            for name in ("numpy", "eager", "compile", "best") if (B, T) == (4, 64) or name != "compile"]
TURNS, CPU_WARMUP, CPU_STEPS = 3, 2, 3  # processes of each job, and steps of each


def bench_cpu(args):
    """One training step (forward, backward, AdamW) of GPT-2 124M on the CPU: train_gpt2.py beside PyTorch.

    Each runs in processes of its own, which take turns, so that a drift in the machine's speed affects all alike; the
    figure is the median step. "matmuls alone" is the floor: those of the step, in NumPy, on the model's own buffers.
    PyTorch runs twice as its users write it (export_weights.py's model, AdamW's defaults) and once at its best.
    """
    if args.readme:  # fail now, not after all the work
        split_at_markers("bench_cpu", SPEED)
    machine, results = describe_cpu(), {job: [] for job in CPU_JOBS}
    with tempfile.TemporaryDirectory() as cache:
        for job in tqdm(TURNS * CPU_JOBS, leave=False, disable=None):
            results[job].append(measure(job, cache))
    table = ["| GPT-2 124M, float32 | B | T | seconds a step | tokens/s | peak memory | matmuls alone | step / matmuls"
             " |", "|---" * 8 + "|"]
    summary = ["| GPT-2 124M, float32, B=4, T=64 | seconds a step | tokens/s | peak memory |", "|---|---|---|---|"]
    for job, turns in results.items():
        failed = [turn["failed"] for turn in turns if "failed" in turn]
        if failed:
            table.append(f"| {NAMES[job.name]} | {job.B} | {job.T} | failed: {failed[0]} | | | | |")
            continue
        step, matmuls = (statistics.median(seconds for turn in turns for seconds in turn.get(call, [0.0]))
                         for call in ("step", "matmuls"))
        figures = f"{step:.3f} | {job.B * job.T / step:.0f} | {turns[0]['peak'] / 2**30:.2f} GiB"
        floor = f"{matmuls:.3f} s | {step / matmuls:.2f}" if matmuls else "|"
        table.append(f"| {NAMES[job.name]} | {job.B} | {job.T} | {figures} | {floor} |")
        if (job.B, job.T) == (4, 64):
            summary.append(f"| {NAMES[job.name]} | {figures} |")
    print("\n".join([*machine, *table]))
    if args.readme:
        put_between_markers("bench_cpu", "\n".join([*machine, "", *table]), SPEED)
        put_between_markers("speed_cpu", "\n".join([*machine, "", *summary]))


def time_calls(calls):
    """{name: function} -> {name: [seconds of each call], "peak": the process's peak memory, in bytes}."""
    seconds = {name: times_of(call, CPU_WARMUP, CPU_STEPS) for name, call in calls.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {**seconds, "peak": peak}


def matmuls_alone(model, B, T):
    """All matmuls of one step, forward and backward, and nothing else."""
    params, grads, acts, scratch = model.params, model.grads, model.acts, model.scratch
    L, NH, C = model.config.L, model.config.NH, model.config.C

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


def step_of_numpy(job):
    settings, counter = Settings(B=job.B, T=job.T), itertools.count(1)
    model, (x, y) = GPT2(*random_model(MODELS[job.model], V)), random_batch(job)
    model.allocate_activations(job.B, job.T)
    model.allocate_training(job.B, job.T)

    def step():
        model.forward(x, y)
        model.backward()
        model.optimizer.update(model.params, model.grads, settings, settings.learning_rate, next(counter))

    return time_calls({"step": step, "matmuls": lambda: matmuls_alone(model, job.B, job.T)})


def describe_cpu():
    """CPU, threads, versions, and the OpenBLAS kernels that run, as lines of text."""
    import torch

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, TypeError), open("/proc/cpuinfo") as f:
        cpu = re.search(r"model name\s*: (.*)", f.read())[1]
    child = subprocess.run([sys.executable, "-c", "import train_gpt2"], cwd=ROOT, capture_output=True, text=True,
                           env={**os.environ, "OPENBLAS_VERBOSE": "2"})
    core = re.search(r"Core: (\S+)|$", child.stdout + child.stderr)[1]
    return [f"{cpu}, {THREADS} threads; {datetime.date.today()}", f"Python {platform.python_version()}, NumPy"
            f" {np.__version__}, PyTorch {torch.__version__}, OpenBLAS core {core or 'unknown'}"]


# ----------------------------------------------------------------------------------------------------------------------
# gpu

GPU_WARMUP, GPU_STEPS, BATCHES = 10, 30, (4, 32, 64)
TABLES = {
    "bfloat16": [*(Job("gpu", name, "bfloat16", B, T) for B in BATCHES
                   for name in ("ours", "eager", "compile", "reduce-overhead") if B == 4 or name != "eager"),
                 *(Job("gpu", "ours", "bfloat16", 64, T, recompute=recompute) for recompute in (1, 2))],
    "models": [Job("gpu", "ours", "bfloat16", B, T, model)
               for model, B in itertools.product(("355M", "774M", "1558M"), (4, 16))],
    "fp8": [Job("gpu", "ours", "fp8", B, T) for B in BATCHES],  # on Hopper
}


def bench_gpu(args):
    """One training step at T=1024 on random tokens on a GPU: train_gpt2_cuda.py beside PyTorch.

    Each runs in a process of its own. A step is forward, backward and AdamW; its time is the median over CUDA events.
    PyTorch is export_weights.py's model under bfloat16 autocast, with fused AdamW, flash attention and a vocabulary
    padded like ours. first step: from the start of the process, without the time to make the weights; "warm" with
    cached kernels. in use: all that the GPU counts. MFU: 6 N + 6 LCT operations a token, over the GPU's dense bfloat16
    rate or, if unknown, that of a large matmul. roofline, in bfloat16: the time of the step's matmuls at the measured
    rate, plus that of AdamW's bytes at the bandwidth of a copy, over the step's.
    """
    count_gpus()
    is_hopper = cp.cuda.runtime.getDeviceProperties(0)["major"] == 9  # makes no context, which "in use" would count
    tables = [args.only] if args.only else [table for table in TABLES if table != "fp8" or is_hopper]
    for table in tables if args.readme else ():  # fail now, not after all the work
        split_at_markers(f"bench_{table}", SPEED)
    for table in tables:
        results = measure_all(TABLES[table])
        ours = next((r for job, r in results if job.name == "ours"), {})
        rival = next((f", PyTorch {r['torch']}" for _, r in results if "torch" in r), "")
        machine = [f"{ours['machine']}{rival}; {datetime.date.today()}"]
        machine.append(f"copy {ours['bandwidth'] / 1e9:.0f} GB/s, large matmul {ours['matmul'] / 1e12:.0f} TFLOP/s")
        lines = gpu_table(table, results)
        print("\n".join([*machine, *lines]))
        if args.readme:
            put_between_markers(f"bench_{table}", "\n".join([*machine, "", *lines]), SPEED)
        if args.readme and table == "bfloat16":
            put_between_markers("speed_gpu", "\n".join([machine[0], "", *gpu_summary(results)]))
            rows = [{**job._asdict(), **r} for job, r in results if "failed" not in r and job.recompute < 0]
            rows = ",\n".join(map(json.dumps, rows))
            with replacing(MEASURED) as f:
                f.write(f'{{"machine": {json.dumps(machine[0])}, "T": {T}, "results": [\n{rows}\n]}}\n'.encode())
            draw_measured()


def time_steps(step, making):
    """{"first": seconds from the process's start, without `making`, "ms": the median}. step() returns its own ms."""
    step()
    first = time.perf_counter() - START - making
    return {"first": first, "ms": statistics.median([step() for _ in range(GPU_WARMUP + GPU_STEPS)][GPU_WARMUP:])}


def step_of_ours(job):
    making, (config, params) = time.perf_counter(), random_model(MODELS[job.model], V)
    making, gpu, batch = time.perf_counter() - making, open_gpu(), random_batch(job)
    settings = cuda.CudaSettings(B=job.B, T=T, dtype=job.precision, recompute=job.recompute)
    trainer = profile_gpu.open_trainer(cuda.GPT2, gpu, config, params, cuda.resolve_auto(settings, gpu.arch))
    trainer.prepare()
    times = time_steps(lambda: 1000 * trainer.end_step(trainer.begin_step([batch], settings.learning_rate)).seconds,
                       making)
    (free, total), C, L = cp.cuda.runtime.memGetInfo(), config.C, config.L
    memory = {"memory": cp.get_default_memory_pool().total_bytes(), "used": total - free}  # before what follows
    attention = L * profile_gpu.attention_flops(job.B, T, C, 7)
    return {"B": job.B, **times, **memory, "gpu": gpu.name, "machine": profile_gpu.describe(trainer.matmul),
            "matmul": profile_gpu.measure_matmul(trainer.matmul), "bandwidth": profile_gpu.measure_copy(trainer.device),
            "flops": 6 * (config.Vp * C + L * 12 * C * C) * job.B * T + attention,
            "moved": 28 * table_elements(parameter_table(config)),  # by AdamW
            "profile": {name: row.ms for name, row in profile_gpu.time_launches(trainer, 5).items()}}


def step_of_pytorch(job):
    """On the CPU or a GPU. There, logits are padded like ours, because multiples of 128 are fast."""
    import torch

    from reference import ADAMW, adamw, to_reference

    torch.set_num_threads(THREADS)
    making, on_gpu, (config, params) = time.perf_counter(), job.command == "gpu", random_model(MODELS[job.model], V)
    making = time.perf_counter() - making
    device, fast = "cuda" if on_gpu else "cpu", on_gpu or job.name == "best"
    model = to_reference(dataclasses.replace(config, V=config.Vp) if on_gpu else config, params, flash=fast).to(device)
    optimizer = adamw(model.parameters(), ADAMW, **({"fused": True} if fast else {}))

    def loss_of(x, y):  # the loss alone: if logits were an output, they would be kept and get a gradient of zeros
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
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def milliseconds():
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    times, (free, total) = time_steps(milliseconds, making), torch.cuda.mem_get_info()
    return {"B": job.B, **times, "memory": torch.cuda.max_memory_allocated(), "used": total - free,
            "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}


def measure_all(jobs):
    """[(job, result of its worker)]. Ours runs twice for 124M, with an empty kernel cache and then a warm one. Raises
    UserError if ours fails; a rival's failure becomes its row."""
    results = []
    with tempfile.TemporaryDirectory() as cache:
        for job in tqdm(jobs, unit="run", leave=False, disable=None):
            result = measure(job, cache)
            if job.name == "ours" and "failed" in result:
                raise UserError(f"train_gpt2_cuda.py failed: {result['failed']}")
            if job.name == "ours" and job.model == "124M":
                result = {**measure(job, cache), "cold": result["first"]}
            results.append((job, result))
    return results


def gpu_table(table, results):
    lines = [f"| GPT-2, T={T} | B | precision | ms a step | tokens/s | MFU | first step | memory | in use | roofline |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    measured = next((r["matmul"] for _, r in results if "matmul" in r), None)
    for job, r in results:
        start = f"| {NAMES[job.name]}" + (f", --recompute {job.recompute}" if job.recompute >= 0 else "")
        start += f", {job.model} |" if table == "models" else " |"
        if "failed" in r:
            lines.append(f"{start} {job.B} | {job.precision} | failed: {r['failed']} | | | | | | |")
            continue
        rate, fastest, mfu = r["B"] * T / r["ms"] * 1000, peak_flops(r["gpu"], "bf16") or measured, ""
        if fastest:
            config = config_of(MODELS[job.model])
            parameters = sum(row.size // config.Vp * config.V if row.vocabulary else row.size
                             for row in parameter_table(config).values())
            mfu = f"{rate * flops_per_token(parameters, config, T) / fastest:.1%}"
        first = f"{r['cold']:.1f} s, warm {r['first']:.1f} s" if "cold" in r else f"{r['first']:.1f} s"
        share = ""
        if "flops" in r and job.precision == "bfloat16":  # at the best of the peaks that were measured
            matmul, bandwidth = (max(other.get(rate, 0) for _, other in results) for rate in ("matmul", "bandwidth"))
            share = f"{1000 * (r['flops'] / matmul + r['moved'] / bandwidth) / r['ms']:.0%}"
        memory = f"{r['memory'] / 2**30:.2f} GiB | {r['used'] / 2**30:.2f} GiB"
        lines.append(f"{start} {r['B']} | {job.precision} | {r['ms']:.2f} | {rate:.0f} | {mfu} | {first} | {memory}"
                     f" | {share} |")
    return lines


def gpu_summary(results):
    """A table of ours, PyTorch's best and, measured apart, llm.c."""
    rows = {"train_gpt2_cuda.py": {}, "PyTorch at its best": {}}
    for job, r in results:
        if "ms" in r and job.recompute < 0:
            row = rows["train_gpt2_cuda.py" if job.name == "ours" else "PyTorch at its best"]
            row[str(job.B)] = f"{min(r['ms'], float(row.get(str(job.B), 'inf'))):.2f}"
    with open(BESIDE_LLMC) as f:
        beside = json.load(f)
    rows[f"{beside['name']}; {briefly(beside['machine'])}"] = beside["ms"]
    return [f"| ms a step, GPT-2 124M, bfloat16, T={T} | {' | '.join(f'B={B}' for B in BATCHES)} |",
            "|---|---|---|---|",
            *(f"| {name} | {' | '.join(str(row.get(str(B), '')) for B in BATCHES)} |" for name, row in rows.items())]


# ----------------------------------------------------------------------------------------------------------------------
# attention


def bench_attention(args):
    """Attention by itself, causal, in bfloat16: our kernels beside PyTorch's FlashAttention-2 and cuDNN.

    It is the kernel library that checks and times (dev/kernels/README.md). TFLOP/s count the matmuls of the unmasked
    half once each, two forward and five backward, even if an implementation recomputes some. mma_sync is for every GPU,
    wgmma for Hopper. Ours reads the packed (B,T,3C) and writes the packed gradient; PyTorch gets views of it."""
    sys.path.append(os.path.join(ROOT, "dev", "kernels"))
    import lab
    import torch
    from attention_layers import AttentionBackward, AttentionForward
    from torch.nn.attention import SDPBackend

    directions, names = (AttentionForward, AttentionBackward), ("mma_sync", "wgmma")
    bench = lab.Lab(open_gpu(), Config(max(args.t), 257, 1, args.heads, args.C, 384), Precision("bfloat16"))
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()},"
          f" bfloat16, {args.heads} heads of {args.C // args.heads}")
    print(f"{'':<16} {'B':>3} {'T':>5} {'forward ms':>11} {'TFLOP/s':>8} {'backward ms':>12} {'TFLOP/s':>8}")
    with bench.streams():
        if any([lab.check_layer(direction(bench.config, bench.precision, bench.gpu, 3, 97), bench, names)
                for direction in directions]):
            return 1
        for T, B in itertools.product(args.t, args.b):
            times = {}
            for direction in directions:
                at_size = direction(bench.config, bench.precision, bench.gpu, B, T)
                at_size.tensors = functools.cache(at_size.tensors)
                for at_size.library_name, at_size.backend, rungs in (
                        ("PyTorch flash", [SDPBackend.FLASH_ATTENTION], ("none",)),
                        ("PyTorch cuDNN", [SDPBackend.CUDNN_ATTENTION], names)):
                    for program, ms in lab.time_layer(at_size, bench, rungs)[0].items():
                        best = min(ms.values())
                        times.setdefault(program, []).append((best, at_size.flops() / best / 1e9))
                    cp.get_default_memory_pool().free_all_blocks()
            for program, ((forward, rate), (backward, its_rate)) in times.items():
                print(f"{program:<16} {B:>3} {T:>5} {forward:>11.4f} {rate:>8.0f} {backward:>12.4f} {its_rate:>8.0f}")
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# matmul

def bench_matmul(args):
    """The matmuls of a training step, each by itself: our kernels beside cuBLASLt's first proposal.

    A row is a matmul, without biases and GELU. Ours are named by their tiles and, in a weight gradient, by the number
    of parts of the inner dimension; the one that training takes is in bold. Operands are random, because zeros would be
    too fast. All take turns, so that a warmer GPU slows all alike: medians over CUDA events, without launch overhead.
    With --dtype fp8, cuBLASLt is PyTorch's _scaled_mm, which wants both operands of dweight transposed."""
    gpu, config = open_gpu(), config_of(args.model)
    precision = cuda.resolve_auto(cuda.CudaSettings(dtype=args.dtype), gpu.arch).precision
    device, matmul = profile_gpu.open_device(cuda.GPT2, gpu, config, precision, "auto")
    print(f"{args.model}, T={T}, {'FP8' if precision.fp8 else precision.dtype}; {profile_gpu.describe(matmul)}\n")
    print("| matmul | rows x columns x inner dimension | ours, us | cuBLASLt, us |\n|---|---|---|---|")
    C = config.C
    weights = ("qkv", C, 3 * C), ("attproj", C, C), ("fc", C, 4 * C), ("fcproj", 4 * C, C), ("logits", C, config.Vp)
    with device.stream:
        matmul.allocate()
        fp8 = None
        if precision.fp8:
            params = allocate(parameter_table(config, precision.dtype), cp)
            block = Block({"operands": operand_table(params.table, 16, recomputed=())}, scratch=True)
            fp8 = Fp8(matmul, params, block.over(block.allocate()))
        for B, (name, *sizes), kind in itertools.product(args.b, weights, ("forward", "dinp", "dweight")):
            if fp8 and name == "attproj":
                continue
            ways, out, inner, rule = fp8_ways(fp8, name, kind, B * T, *sizes) if fp8 else matmul_ways(
                matmul, kind, B * T, *sizes)
            launched = {way: launches_of(device, call) for way, call in {**ways, "rule": rule}.items()}
            times = [[profile_gpu.measure(device, call, 1) for call in ways.values()] for _ in range(11)]
            for way, seconds in zip(ways, np.median(times, axis=0)):
                mark = "**" if launched[way] == launched["rule"] else ""
                launched[way] = f"{mark}{1e6 * seconds:.1f}{mark}"
            ours = ", ".join(f"{way} {launched[way]}" for way in ways if way != "cuBLASLt")
            shape = " x ".join(map(str, (*out.shape, inner)))
            print(f"| {name} {kind} | {shape} | {ours} | {launched['cuBLASLt']} |", flush=True)
            del ways, out, rule
            cp.get_default_memory_pool().free_all_blocks()


def matmul_ways(matmul, kind, N, C, OC):
    """Return ({way: call}, the result that all of them write, the inner dimension, the call of training)."""
    device, g, rng = matmul.device, matmul.device.geometry, np.random.default_rng(0)

    def random(*shape):
        numbers = rng.standard_normal(1 << 20, np.float32)  # repeated
        return cp.asarray(np.resize(bf16_bits(numbers) if matmul.precision.bf16 else numbers, shape))

    inp, weight, dout = random(N, C), random(OC, C), random(N, OC)
    grads = Row((), matmul.precision.grads).stored_as
    out = cp.empty({"forward": (N, OC), "dinp": (N, C), "dweight": (OC, C)}[kind],
                   grads if kind == "dweight" else inp.dtype)
    ours, options = Matmul(device, matmul.precision, "kernels"), []
    ours.workspace = matmul.workspace
    inner, library, call = {
        "forward": (C, (inp, weight.T), lambda linear, **option: linear.forward(out, inp, **option)),
        "dinp": (OC, (dout, weight), lambda linear: linear.backward_inp(out, dout)),
        "dweight": (N, (dout.T, inp), lambda linear, **option: linear.backward_weight(dout, inp, **option))}[kind]
    if matmul.kernels:
        few = -(-OC // g.MATMUL_BM) * -(-C // g.MATMUL_BN) <= 2 * device.sm_count
        options = {"forward": [{"columns": width} for width in (g.MATMUL_BN, g.MATMUL_NARROW_BN)], "dinp": [{}],
                   "dweight": [{"splits": splits} for splits in (1, 2, 3, 4, 5, 7, 9, 11)
                               if splits == 1 or few and N >= 256 * splits]}[kind]
    ways = {" ".join(f"{value} {name}" for name, value in option.items()) or "ours": functools.partial(
        call, Linear(ours, weight, None, out), **option) for option in options}
    ways["cuBLASLt"] = functools.partial(matmul.cublaslt.multiply, out, *library)
    return ways, out, inner, functools.partial(call, Linear(matmul, weight, None, out))


def fp8_ways(fp8, name, kind, N, C, OC):
    """The same in 8 bits, of random operands with scales of 1."""
    import torch

    stream, scale = torch.cuda.ExternalStream(fp8.device.stream.ptr), fp8.state.scales
    one = torch.ones((), device="cuda")

    def random(rows, columns, dtype=torch.float8_e4m3fn):
        """The same numbers for PyTorch and for us."""
        with torch.cuda.stream(stream):
            numbers = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).to(dtype)
            return numbers, cp.asarray(numbers.view(torch.uint8))

    rows, columns, inner = {"forward": (N, OC, C), "dinp": (N, C, OC), "dweight": (OC, C, N)}[kind]
    of_dlogits = torch.float8_e5m2 if name == "logits" and kind != "forward" else torch.float8_e4m3fn
    (a, ours_a), (b, ours_b) = random(rows, inner, of_dlogits), random(columns, inner)
    out = cp.empty((rows, columns), Row((), fp8.matmul.precision.grads).stored_as)
    across = kind == "dweight" and name == "fcproj"  # reads dout transposed, inp (N,C) as it is
    if across:
        ours_a, ours_b = random(N, C)[1], ours_a
    elif kind == "dweight":
        ours_a = random(N, OC, of_dlogits)[1]
    operands = ours_a, scale, ours_b, scale
    if kind == "dweight" or of_dlogits is torch.float8_e5m2:
        kernel = ("classifier_" if name == "logits" else "") + {"dinp": "inp", "dweight": "weight"}[kind]
        call = functools.partial(fp8.multiply_long, kernel, out, *operands, 1.0, across)
    else:
        call = functools.partial(fp8.multiply, out, *operands)

    def cublaslt():
        with torch.cuda.stream(stream):
            torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    return {"ours": call, "cuBLASLt": cublaslt}, out, inner, call


def launches_of(device, call):
    """[(kernel, last argument)]; for a weight gradient, that is the number of parts."""
    found = []

    def observer(name, arguments):
        found.append((name, arguments[-1] if "weight" in name else None))
        return contextlib.nullcontext()

    device.observer = observer
    call()
    device.observer = None
    return found


# ----------------------------------------------------------------------------------------------------------------------
# generate

TOKENS = 256


def bench_generate(args):
    """Text from random weights, 256 tokens after end-of-text, beside transformers: bfloat16 on a GPU, else float32 on
    the CPU. A row is the best of 3 whole runs (transformers: one) after a warm-up. "of the floor": the time to read all
    weights once, at the GPU's copy bandwidth, as a part of a step. transformers is generate(), eager."""
    config, params = random_model(args.model, V)
    gpu = floor = None
    with contextlib.suppress(UserError):
        gpu = open_gpu()
    print(f"{args.model} on {gpu.name if gpu else 'CPU'}, {'bfloat16' if gpu else 'float32'}, {TOKENS} tokens")

    def row(what, B, seconds):
        share = f"  {floor / (seconds / TOKENS):4.0%} of the floor" if floor and B == 1 else ""
        print(f"B={B:<3} {what:<20} {B * TOKENS / seconds:9.0f} tok/s  {seconds / TOKENS * 1e6:8.1f} us a step{share}",
              flush=True)

    def draw(decoder, B, choice, prompt=np.array([[V - 1]], np.int32)):
        return min(times_of(lambda: sum(1 for _ in decoder.draw(prompt, TOKENS, streams(1, B), choice)), 1, 3))

    for B in args.b:
        if gpu:
            decoder = open_decoder(cuda.GPT2, gpu, config, params, B, config.maxT)
            floor = floor or 2 * flat(params).size / profile_gpu.measure_copy(decoder.device)
        else:
            decoder = Decoder(config, params, B, config.maxT)
        row("ours", B, draw(decoder, B, Choice()))
        row("ours, top_k 50", B, draw(decoder, B, Choice(1.0, 50)))
        del decoder
        if gpu:
            cp.get_default_memory_pool().free_all_blocks()
    for B, seconds in time_transformers(config, args.b, "cuda" if gpu else "cpu").items():
        row("transformers", B, seconds)


def time_transformers(config, batches, device):
    """{batch size: seconds}"""
    import torch
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=config.L, n_head=config.NH, n_embd=config.C))
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()

    def run(B):
        prompt = torch.full((B, 1), V - 1, device=device)
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, min_new_tokens=TOKENS,
                       do_sample=True, top_k=0, pad_token_id=V - 1).cpu()

    return {B: min(times_of(lambda B=B: run(B), 1, 1)) for B in batches}


# ----------------------------------------------------------------------------------------------------------------------
# scale

RUNS = {  # name -> (model, flags); B is per GPU, -d for all together
    "small": ("124M, B=4", ("-e", "d12", "-b", 4, "-x", 60)),
    "update": ("124M, B=64, 524,288 tokens", ("-e", "d12", "-b", 64, "-d", 524288, "-x", 9)),
    "1558M": ("1558M, B=16", ("-e", "d48", "-b", 16, "-x", 9)),
}


def bench_scale(args):
    """Training on 1, 2, 4, ... GPUs of this machine, on random tokens, from random weights: the median step, without
    the first third of the steps. "of linear": tokens a second, over as many times those of the slowest of these GPUs,
    all measured alone at the same time. Memory is what the trainer allocates on a GPU."""
    there = count_gpus()
    counts = args.gpus or [n for n in (1, 2, 4, 8, 16) if n <= there]
    if max(counts) > there:
        raise UserError(f"--gpus {max(counts)}: this machine has {there}")
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        tokens = np.random.default_rng(0).integers(0, V, 20_000_000)
        write_tokens("tokens_train.bin", [tokens], len(tokens), "uint16")
        write_tokens("tokens_val.bin", [tokens[: 1 << 17]], 1 << 17, "uint16")
        print("| bfloat16, T=1024 | GPUs | ms a step | tokens/s | of linear | GiB a GPU |\n|---|---|---|---|---|---|")
        for (what, flags), gpus in itertools.product([RUNS[name] for name in args.only], counts):
            given = dict(zip(flags[::2], flags[1::2]))
            if given.get("-d", 0) % (given["-b"] * T * gpus):
                continue  # an update does not divide into whole batches
            with ThreadPoolExecutor(gpus) as pool:
                alone = () if gpus == 1 else pool.map(
                    lambda only, flags=flags: time_training(1, flags, only)[1], range(gpus))
            ms, rate, size = time_training(gpus, flags)
            print(f"| {what} | {gpus} | {ms:.2f} | {rate:,.0f} | {rate / gpus / min(alone, default=rate):.1%} |"
                  f" {size / 1024:.1f} |", flush=True)


def time_training(gpus, flags, only=None):
    """(ms a step, tokens/s, MiB) of a run of the trainer. only: index of the one GPU that it sees."""
    command = [sys.executable, os.path.join(ROOT, "train_gpt2_cuda.py"), "-i", "tokens", "-t", T, "-s", 0, "-v", 0,
               "--gpus", gpus, "--lines", "llmc", "--final_reports", 0, *flags]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count_gpus()))))
    visible = visible if only is None else visible.split(",")[only]
    output = output_of(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": visible})
    steps = [tuple(map(float, pair)) for pair in re.findall(r"\(([0-9.]+) ms, ([0-9]+) tok/s\)", output)]
    ms, rate = (statistics.median(values) for values in zip(*steps[len(steps) // 3 :]))
    return ms, rate, sum(map(int, re.findall(r"^allocated (\d+) MiB", output, re.MULTILINE)))


# ----------------------------------------------------------------------------------------------------------------------
# the command line


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run):
        made = commands.add_parser(run.__name__.removeprefix("bench_"), description=run.__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
        made.set_defaults(run=run)
        return made.add_argument

    for run in (bench_cpu, bench_gpu):
        add = command(run)
        add("--readme", action="store_true", help="put the tables into doc/speed.md and README.md, at their markers")
        add("--worker", nargs=7, help=argparse.SUPPRESS)
    add("--only", choices=tuple(TABLES), help="one table")
    add = command(bench_attention)
    add("--heads", type=int, default=12, help="NH (default: 12)")
    add("-C", type=int, default=768, help="channels (default: 768)")
    add("-b", type=int, nargs="+", default=(1, 4, 16, 64), help="batch sizes")
    add("-t", type=int, nargs="+", default=(256, 1024, 4096), help="lengths")
    for run in (bench_matmul, bench_generate):
        add = command(run)
        add("--model", choices=tuple(SIZES), default="d12", help="(default: d12)")
        add("-b", type=int, nargs="+", default=BATCHES if run == bench_matmul else (1, 8, 64), help="batch sizes")
        if run == bench_matmul:
            add("--dtype", choices=("auto", "bfloat16", "fp8", "float32"), default="auto", help="(default: auto)")
    add = command(bench_scale)
    add("--gpus", type=int, nargs="+", help="numbers of GPUs (default: 1, 2, 4, ... of all)")
    add("--only", nargs="*", choices=tuple(RUNS), default=tuple(RUNS), help="which runs (default: all)")
    return parser.parse_args(argv)


@gpu_errors_as_lines()
def main():
    args = parse_arguments()
    if not getattr(args, "worker", None):
        return args.run(args)
    job = Job(*(kind(word) for kind, word in zip((str, str, str, int, int, str, int), args.worker)))
    print(json.dumps({"numpy": step_of_numpy, "ours": step_of_ours}.get(job.name, step_of_pytorch)(job)))


if __name__ == "__main__":
    run_main(main)
