"""
make bench on a GPU: one training step at T=1024 on random tokens, this trainer beside PyTorch.

    python dev/bench_gpu.py                        # about ten minutes
    python dev/bench_gpu.py --only bfloat16        # one of its three tables: bfloat16, models, float32
    python dev/bench_gpu.py --readme               # also puts tables and pictures into doc/speed.md and README.md

All contenders get the same model and batch, one after the other, each in its own process. A step is forward, backward
and AdamW; its time is the median over CUDA events. PyTorch is export_weights.py's model with fused AdamW,
F.scaled_dot_product_attention and a vocabulary padded like ours, as written (eager), compiled, and compiled with
mode="reduce-overhead" (CUDA graphs). It runs bfloat16 under autocast, and float32 with matmuls in the same precision as
ours. In bfloat16, the last rows are ours with --recompute, and README.md gets a summary, which on an H200 includes what
was measured beside llm.c. Nothing else should use the GPU at the same time.

first step  from the start of the process to the end of its first step, without the time to make the weights; "warm"
            with kernels and algorithms cached by an earlier run
memory      the most that the trainer or PyTorch has allocated; in use: all that the GPU counts, context included
MFU         6 N + 6 L C T operations a token, over the GPU's dense bfloat16 rate or, if unknown, that of a large matmul
roofline    the time of the step's matmuls, attention's included, at the rate of a large matmul, plus that of AdamW's
            bytes at the bandwidth of a copy, as a fraction of the step; peaks are the best measured in its precision
"""

import argparse
import bisect
import dataclasses
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import NamedTuple

START = time.perf_counter()
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np
from tqdm import tqdm

from bench_cpu import GPT2_124M, last_line, random_parameters
from llmc.errors import UserError, run_main
from llmc.files import replacing
from llmc.gpu.geometry import launch_geometry
from llmc.progress import flops_per_token, peak_flops
from llmc.tensors import table_elements
from readme import SPEED, put_between_markers, split_at_markers
from train_gpt2 import Config, parameter_table

RESULTS = os.path.join(ROOT, "dev", "bench_gpu.json")  # for plot_bench.py
BESIDE_LLMC = os.path.join(ROOT, "dev", "bench_llmc.json")  # ours, llm.c and PyTorch, measured by hand in one sitting
NAMES = {
    "ours": "train_gpt2_cuda.py",
    "eager": "PyTorch, eager",
    "compile": "PyTorch, torch.compile",
    "reduce-overhead": "PyTorch, torch.compile, reduce-overhead",
}
MODELS = {
    "124M": GPT2_124M,
    "355M": Config(1024, 50257, 24, 16, 1024, 50304),
    "774M": Config(1024, 50257, 36, 20, 1280, 50304),
    "1558M": Config(1024, 50257, 48, 25, 1600, 50304),
}
T = 1024
WARMUP, STEPS = 10, 30

BATCHES = (4, 32, 64)


class Job(NamedTuple):
    name: str  # a key of NAMES
    precision: str  # bfloat16, tf32, float32
    B: int  # 0: the largest that fits
    model: str = "124M"
    recompute: int = -1  # ours only: see CudaSettings


TABLES = {
    "bfloat16": [*(Job(name, "bfloat16", B) for B in BATCHES for name in NAMES if B == 4 or name != "eager"),
                 *(Job("ours", "bfloat16", 64, recompute=recompute) for recompute in (1, 2))],
    "models": [Job("ours", "bfloat16", B, model)
               for model, sizes in (("355M", (4, 0)), ("774M", (4, 0)), ("1558M", (4, 16, 0))) for B in sizes],
    "float32": [Job(name, precision, B) for precision, B in (("tf32", 4), ("tf32", 16), ("float32", 4))
                for name in NAMES],
}

# ----------------------------------------------------------------------------------------------------------------------
# workers: one contender in a process; prints a line of JSON


def random_batch(B):
    return np.random.default_rng(0).integers(0, GPT2_124M.V, (2, B, T), dtype=np.int32)


def bench_ours(job):
    import llmc.gpu.device
    import train_gpt2_cuda as cuda
    from profile_gpu import measure_copy, measure_matmul, time_launches

    making = time.perf_counter()
    config = MODELS[job.model]
    params = random_parameters(config)
    making = time.perf_counter() - making
    gpu = llmc.gpu.device.open_gpu()
    dtype = "bfloat16" if job.precision == "bfloat16" else "float32"
    settings = cuda.CudaSettings(B=job.B or 4, T=T, dtype=dtype, tf32=int(job.precision != "float32"),
                                 recompute=job.recompute)
    settings = cuda.resolve_auto(settings, gpu.arch)
    if job.B == 0:
        settings.B = largest_batch(gpu, config, settings)
    trainer = cuda.open_trainer(gpu, config, params, settings)
    trainer.prepare()
    batch = random_batch(settings.B)

    def step():
        return trainer.end_step(trainer.begin_step([batch], settings.learning_rate))[2]

    step()
    first = time.perf_counter() - START - making
    ms = [step() for _ in range(WARMUP + STEPS if job.model == "124M" else 13)]
    ms = statistics.median(ms[WARMUP if job.model == "124M" else 3 :])
    cp = llmc.gpu.device.cp
    pool, (free, total) = cp.get_default_memory_pool(), cp.cuda.runtime.memGetInfo()
    result = {"B": settings.B, "ms": ms, "first": first, "memory": pool.total_bytes(), "used": total - free,
              "gpu": gpu.name, "machine": describe(trainer.matmul)}
    if peak_flops(gpu.name, "bf16") is None:
        result["matmul"] = measure_matmul(trainer.matmul)
    if job.model == "124M":
        result["bandwidth"], result["matmul"] = measure_copy(trainer.device), measure_matmul(trainer.matmul)
        result["flops"], result["moved"] = work(settings)
        result["profile"] = {name: row.ms for name, row in time_launches(trainer, 5).items()}
    return result


def largest_batch(gpu, config, settings):
    """The largest B that fits, a multiple of 4."""
    import train_gpt2_cuda as cuda
    from llmc.gpu.memory import free_memory, memory_plan

    geometry = launch_geometry(config, settings.precision, gpu.arch)
    device, free = SimpleNamespace(sm_count=gpu.sm_count, geometry=geometry), free_memory()

    def too_large(B):
        plan = memory_plan(cuda.GPT2, config, dataclasses.replace(settings, B=B), device)
        return sum(size for size, _ in plan) > free

    B = 4 * bisect.bisect_left(range(4, 1025, 4), True, key=too_large)
    if B == 0:
        raise UserError(f"{config.describe()} does not fit at B=4")
    return B


def bench_pytorch(job):
    import torch

    from export_weights import ADAMW, adamw, to_reference

    torch.backends.cuda.matmul.allow_tf32 = job.precision == "tf32"
    making = time.perf_counter()
    params = random_parameters()
    making = time.perf_counter() - making
    padded = dataclasses.replace(GPT2_124M, V=GPT2_124M.Vp)  # as many logits as ours: multiples of 128 are fast
    model = to_reference(padded, params, flash=True).cuda()
    optimizer = adamw(model, ADAMW, fused=True)

    def loss_of(x, y):  # the loss alone: if logits were an output, they would be kept and get a gradient of zeros
        return model(x, y)[1]

    compiled = {"eager": lambda: loss_of, "compile": lambda: torch.compile(loss_of),
                "reduce-overhead": lambda: torch.compile(loss_of, mode="reduce-overhead")}
    forward = compiled[job.name]()
    x, y = (torch.from_numpy(ids).long().cuda() for ids in random_batch(job.B))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def step():
        start.record()
        with torch.autocast("cuda", torch.bfloat16, enabled=job.precision == "bfloat16"):
            loss = forward(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    step()
    first = time.perf_counter() - START - making
    ms = [step() for _ in range(WARMUP + STEPS)][WARMUP:]
    free, total = torch.cuda.mem_get_info()
    return {"B": job.B, "ms": statistics.median(ms), "first": first, "memory": torch.cuda.max_memory_allocated(),
            "used": total - free, "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}


def work(settings):
    """Return (operations of the matmuls, bytes of AdamW) of a step of GPT-2 124M.

    Attention's matmuls are included, recomputation is not; AdamW moves 28 bytes a parameter.
    """
    from profile_gpu import attention_flops

    C, L = GPT2_124M.C, GPT2_124M.L
    weights = GPT2_124M.Vp * C + L * 12 * C * C
    flops = 6 * weights * settings.B * T + L * attention_flops(settings.B, T, C, 7)
    return flops, 28 * table_elements(parameter_table(GPT2_124M))


def describe(matmul):
    """Return the GPU and versions as text; `matmul` must have cuBLASLt."""
    from llmc.gpu.device import cp

    driver, gpu = cp.cuda.runtime.driverGetVersion(), matmul.device.gpu
    cuda_version = f"{driver // 1000}.{driver % 1000 // 10}"
    return f"{gpu.name}, CUDA {cuda_version}, CuPy {cp.__version__}, cuBLASLt {matmul.cublaslt.version}"


# ----------------------------------------------------------------------------------------------------------------------
# the tables


def measure(jobs):
    """Run the jobs and return [(job, result of its worker)].

    Ours runs twice for 124M, with an empty kernel cache and then a warm one. Raises UserError if ours fails; a rival's
    failure becomes its row.
    """
    results = []
    with tempfile.TemporaryDirectory() as cache, tqdm(total=len(jobs), unit="run", leave=False) as bar:
        for job in jobs:
            bar.set_description(f"{title(job)}, {job.model}, B={job.B or 'largest'}, {job.precision}")
            result = run_worker(job, cache)
            if job.name == "ours" and "failed" in result:
                raise UserError(f"train_gpt2_cuda.py failed: {result['failed']}")
            if job.name == "ours" and job.model == "124M":
                result, cold = run_worker(job, cache), result["first"]
                result["cold"] = cold
            results.append((job, result))
            done = f"{result['ms']:.2f} ms a step" if "ms" in result else result["failed"]
            tqdm.write(f"{title(job)}, {job.model}, B={result.get('B', job.B)}, {job.precision}: {done}",
                       file=sys.stderr)
            bar.update()
    return results


def run_worker(job, cache):
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, __file__, "--worker", *map(str, job)]
        own = os.path.join(cache, "-".join(map(str, job)))
        caches = {"TRAIN_GPT2_CACHE": own, "TORCHINDUCTOR_CACHE_DIR": own}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **caches})
        try:
            return json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            return {"failed": last_line(errors)}


def model_flops(config):
    """Return the operations of a training step per token."""
    rows = parameter_table(config).values()
    parameters = sum(row.size // config.Vp * config.V if row.vocabulary else row.size for row in rows)
    return flops_per_token(parameters, config, T)


def roofline(result, alike):
    """Return the time of a step's work at peak rates, as a fraction of the measured time.

    The peaks are the best of `alike`, the results in the same precision: the rate of a large matmul is measured right
    after each run, and drops as the GPU warms up.
    """
    matmul, bandwidth = (max(other.get(rate, 0) for other in alike) for rate in ("matmul", "bandwidth"))
    return 1000 * (result["flops"] / matmul + result["moved"] / bandwidth) / result["ms"]


def title(job):
    return NAMES[job.name] + (f", --recompute {job.recompute}" if job.recompute >= 0 else "")


def make_summary(results):
    """Return a table of ours and PyTorch's best; on an H200, also of both beside llm.c, measured on another H200."""
    ms = {"train_gpt2_cuda.py": {}, "PyTorch at its best": {}}
    for job, r in results:
        if "ms" in r and job.recompute < 0:
            row = ms["train_gpt2_cuda.py" if job.name == "ours" else "PyTorch at its best"]
            row[job.B] = min(r["ms"], row.get(job.B, r["ms"]))
    measured = {name: [f"{row[B]:.2f}" if B in row else "" for B in BATCHES] for name, row in ms.items()}
    if any("H200" in r.get("gpu", "") for _, r in results):
        from plot_bench import damage, read_json

        mend = "it comes with this project: git checkout dev/bench_llmc.json"
        machine, rows = read_json(BESIDE_LLMC, mend, "machine", "ms")
        with damage(BESIDE_LLMC, mend):
            day = machine.rpartition("; ")[2]
            for name, row in rows.items():
                measured[f"{name}; another H200, {day}"] = [row[str(B)] for B in BATCHES]
    return [f"| ms a step, GPT-2 124M, bfloat16, T={T} | {' | '.join(f'B={B}' for B in BATCHES)} |",
            "|---|---|---|---|", *(f"| {name} | {' | '.join(map(str, row))} |" for name, row in measured.items())]


def make_table(table, results):
    lines = [f"| GPT-2, T={T} | B | precision | ms a step | tokens/s | MFU | first step | memory | in use | roofline |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    measured = next((r["matmul"] for _, r in results if "matmul" in r), None)
    for job, r in results:
        start = f"| {title(job)}, {job.model} |" if table == "models" else f"| {title(job)} |"
        if "failed" in r:
            lines.append(f"{start} {job.B} | {job.precision} | failed: {r['failed']} | | | | | | |")
            continue
        rate, fastest = r["B"] * T / r["ms"] * 1000, peak_flops(r["gpu"], "bf16") or measured
        mfu = ""
        if fastest and job.precision == "bfloat16":
            mfu = f"{rate * model_flops(MODELS[job.model]) / fastest:.1%}"
        first = f"{r['cold']:.1f} s, warm {r['first']:.1f} s" if "cold" in r else f"{r['first']:.1f} s"
        alike = [other for of, other in results if of.precision == job.precision]
        share = f"{roofline(r, alike):.0%}" if "flops" in r else ""
        precision = "TF32" if job.precision == "tf32" else job.precision
        memory = f"{r['memory'] / 2**30:.2f} GiB | {r['used'] / 2**30:.2f} GiB"
        lines.append(f"{start} {r['B']} | {precision} | {r['ms']:.2f} | {rate:.0f} | {mfu} | {first} | {memory}"
                     f" | {share} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--only", choices=tuple(TABLES), help="one table")
    parser.add_argument("--readme", action="store_true",
                        help="put tables and pictures into doc/speed.md and README.md, between their markers")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, precision, B, model, recompute = args.worker
        job = Job(name, precision, int(B), model, int(recompute))
        print(json.dumps(bench_ours(job) if name == "ours" else bench_pytorch(job)))
        return
    tables = [args.only] if args.only else list(TABLES)
    if args.readme:
        for table in tables:
            split_at_markers(f"bench_{table}", SPEED)  # fail now, not after all the work
        split_at_markers("speed_gpu")
    for table in tables:
        results = measure(TABLES[table])
        ours = next((r for job, r in results if job.name == "ours"), {})
        rival = next((f", PyTorch {r['torch']}" for _, r in results if "torch" in r), "")
        machine = [f"{ours['machine']}{rival}; {datetime.date.today()}"]
        if "matmul" in ours:
            machine.append(f"copy {ours['bandwidth'] / 1e9:.0f} GB/s, large matmul {ours['matmul'] / 1e12:.0f} TFLOP/s")
        lines = make_table(table, results)
        print("\n".join([*machine, *lines]))
        if args.readme:
            put_between_markers(f"bench_{table}", "\n".join([*machine, "", *lines]), SPEED)
            if table == "bfloat16":
                put_between_markers("speed_gpu", "\n".join([machine[0], "", *make_summary(results)]))
                save(machine[0], results)


def save(machine, results):
    """Write what plot_bench.py draws, and have it drawn."""
    rows = [{**job._asdict(), **r} for job, r in results if "failed" not in r and job.recompute < 0]
    with replacing(RESULTS) as f:
        f.write(json.dumps({"machine": machine, "T": T, "results": rows}, indent=1).encode() + b"\n")
    subprocess.run([sys.executable, os.path.join(ROOT, "dev", "plot_bench.py")], check=True)


if __name__ == "__main__":
    run_main(main)
