"""
make bench on a GPU: one training step at T=1024 on random tokens, this trainer beside PyTorch.

    python dev/bench_gpu.py                        # about ten minutes
    python dev/bench_gpu.py --only bfloat16        # one of its three tables: bfloat16, models, float32
    python dev/bench_gpu.py --readme               # also puts tables and picture into README.md

The same model and batch, each contender in a process of its own, one after the other. A step is forward, backward and AdamW;
its time is the median over CUDA events. PyTorch is export_weights.py's model with F.scaled_dot_product_attention and fused
AdamW, its vocabulary padded like ours, in bfloat16 under autocast, in float32 with the same products as ours: as written
(eager), compiled, and compiled with mode="reduce-overhead" (CUDA graphs). "first step" is from the start of the process to the
end of its first step, less the making of the weights, "warm" where kernels and algorithms were kept from an earlier start.
"memory" is what the trainer or PyTorch has allocated at its peak; "in use" is all that the GPU counts, context included. "MFU"
counts 6 N + 6 L C T operations a token and the GPU's dense bfloat16 rate, or that of one large product where PEAKS does not
have the GPU. "roofline" is the time of all the step's matrix and attention products at the rate of one large product, and of
AdamW's bytes at the rate of a copy, the best of those measured in that precision, as a share of the step. In bfloat16, a
summary stands before the table, on an H200 with earlier figures and our goals, and the last rows are ours with --recompute.
Nothing else should use the GPU meanwhile.
"""

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

START = time.perf_counter()
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import train_gpt2  # first: it tells OpenBLAS how to run, before NumPy is imported

import numpy as np
from tqdm import tqdm

from bench_cpu import GPT2_124M, last_line, random_parameters
from readme import put_between_markers, split_at_markers
from train_gpt2 import Config, UserError, count_parameters, replacing, run_main, table_elements

RESULTS = os.path.join(ROOT, "dev", "bench_gpu.json")  # for plot_bench.py
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

# What the makers say of dense bfloat16 products with float32 sums, TFLOP/s; the first name that the GPU's name contains.
PEAKS = {"B200": 2250.0, "H200 NVL": 835.5, "H200": 989.4, "H100 NVL": 835.5, "H100 PCIe": 756.5, "H100": 989.4,
         "A100": 311.9, "L40S": 362.1, "L40": 181.0, "L4": 121.0, "RTX 4090": 165.2}


# ms a step in bfloat16 at B=4, 32 and 64, T=1024: measured on an H200 on another day, and what we set out to reach.
BATCHES = (4, 32, 64)
EARLIER = {
    "llm.c with cuDNN's attention and fused GELU, another day": (10.3, 58.5, 113),
    "PyTorch at its best, that day": (11.2, 65.2, 125),
}
GOALS = {"goal": (9.0, 51, 103), "stretch goal": (8.0, 48, 96)}


class Job(NamedTuple):
    name: str  # of NAMES
    precision: str  # bfloat16, tf32, float32
    B: int  # 0: the largest that fits
    model: str = "124M"
    recompute: int = -1  # ours, of CudaSettings


TABLES = {
    "bfloat16": [*(Job(name, "bfloat16", B) for B in BATCHES for name in NAMES if B == 4 or name != "eager"),
                 *(Job("ours", "bfloat16", 64, recompute=recompute) for recompute in (1, 2))],
    "models": [Job("ours", "bfloat16", B, model)
               for model, sizes in (("355M", (4, 0)), ("774M", (4, 0)), ("1558M", (4, 16, 0))) for B in sizes],
    "float32": [Job(name, precision, B) for precision, B in (("tf32", 4), ("tf32", 16), ("float32", 4)) for name in NAMES],
}

# ----------------------------------------------------------------------------------------------------------------------
# workers: one contender in a process; prints a line of JSON


def random_batch(B):
    return np.random.default_rng(0).integers(0, GPT2_124M.V, (2, B, T), dtype=np.int32)


def bench_ours(job):
    import train_gpt2_cuda as cuda

    making = time.perf_counter()
    config = MODELS[job.model]
    params = random_parameters(config)
    making = time.perf_counter() - making
    gpu = cuda.open_gpu()
    dtype = "bfloat16" if job.precision == "bfloat16" else "float32"
    settings = cuda.CudaSettings(B=job.B or 1024, T=T, dtype=dtype, tf32=int(job.precision != "float32"), recompute=job.recompute)
    cuda.settle(settings, gpu.arch)
    device = cuda.Device(gpu, config, settings.precision, cuda.Cache(), settings.matmul)
    if job.B == 0:
        settings.B = cuda.largest_batch(config, settings, device.sm_count, cuda.free_memory()) // 4 * 4
        if settings.B == 0:
            raise UserError(f"GPT-2 {job.model} does not fit at B=4")
    model = cuda.GPT2(device, config, params, settings)
    model.prepare()
    batch = random_batch(settings.B)

    def step():
        return model.end_step(model.begin_step([batch], settings.learning_rate))[2]

    step()
    first = time.perf_counter() - START - making
    ms = [step() for _ in range(WARMUP + STEPS if job.model == "124M" else 13)]
    ms = statistics.median(ms[WARMUP if job.model == "124M" else 3 :])
    pool, (free, total) = cuda.cp.get_default_memory_pool(), cuda.cp.cuda.runtime.memGetInfo()
    result = {"B": settings.B, "ms": ms, "first": first, "memory": pool.total_bytes(), "used": total - free, "gpu": gpu.name,
              "machine": describe(gpu, device)}
    if peak(gpu.name) is None:
        result["product"] = cuda.measure_product(device)
    if job.model == "124M":
        result["bandwidth"], result["product"] = cuda.measure_copy(device), cuda.measure_product(device)
        result["flops"], result["moved"] = work(settings)
        result["profile"] = {name: row.ms for name, row in cuda.time_kernels(model, 5).items()}
    return result


def bench_pytorch(job):
    import torch

    from export_weights import ADAMW, adamw, to_reference

    torch.backends.cuda.matmul.allow_tf32 = job.precision == "tf32"
    making = time.perf_counter()
    params = random_parameters()
    making = time.perf_counter() - making
    padded = dataclasses.replace(GPT2_124M, V=GPT2_124M.Vp)  # as many rows of logits as ours: products like multiples of 128
    model = to_reference(padded, params, flash=True).cuda()
    optimizer = adamw(model, ADAMW, fused=True)

    def loss_of(x, y):  # the loss alone: logits that were an output, too, would be kept, and get a gradient of zeros
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
    return {"B": job.B, "ms": statistics.median(ms), "first": first, "memory": torch.cuda.max_memory_allocated(), "used": total - free,
            "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}


def work(settings):
    """(operations of a step's products, attention's too, as its kernels do them; bytes of AdamW, 28 a parameter) of GPT-2 124M."""
    import train_gpt2_cuda as cuda

    C, L = GPT2_124M.C, GPT2_124M.L
    weights = GPT2_124M.Vp * C + L * 12 * C * C
    flops = 6 * weights * settings.B * T + L * cuda.attention_flops(settings.B, T, C, 7)
    return flops, 28 * table_elements(train_gpt2.parameter_table(GPT2_124M))


def describe(gpu, device):
    import train_gpt2_cuda as cuda

    driver = cuda.cp.cuda.runtime.driverGetVersion()
    cuda_version, cublaslt = f"{driver // 1000}.{driver % 1000 // 10}", device.products.cublaslt.version
    return f"{gpu.name}, CUDA {cuda_version}, CuPy {cuda.cp.__version__}, cuBLASLt {cublaslt}"


# ----------------------------------------------------------------------------------------------------------------------
# the tables


def measure(jobs):
    """[(job, result of its worker)]; ours runs twice for 124M, with no kernels kept and then with them. Raises UserError when ours
    fails; a rival that does is a row that says so."""
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
            tqdm.write(f"{title(job)}, {job.model}, B={result.get('B', job.B)}, {job.precision}: {done}", file=sys.stderr)
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
    """Operations a token of a training step, as model FLOP utilisation counts them: 6 N + 6 L C T."""
    return 6 * count_parameters(config) + 6 * config.L * config.C * T


def peak(gpu):
    return next((1e12 * peak for name, peak in PEAKS.items() if name in gpu), None)


def roofline(result, alike):
    """What a step's work takes at the best rates of those alike, the results in its precision, as a share of what it took: the rate of a
    large product is measured right after each run, and falls while the GPU grows warm."""
    product, bandwidth = (max(other.get(rate, 0) for other in alike) for rate in ("product", "bandwidth"))
    return 1000 * (result["flops"] / product + result["moved"] / bandwidth) / result["ms"]


def title(job):
    return NAMES[job.name] + (f", --recompute {job.recompute}" if job.recompute >= 0 else "")


def make_summary(results):
    """Ours and PyTorch at its best; on an H200, between what was measured earlier and the goals."""
    ms = {"train_gpt2_cuda.py": {}, "PyTorch at its best": {}}
    for job, r in results:
        if "ms" in r and job.recompute < 0:
            row = ms["train_gpt2_cuda.py" if job.name == "ours" else "PyTorch at its best"]
            row[job.B] = min(r["ms"], row.get(job.B, r["ms"]))
    measured = {name: [f"{row[B]:.2f}" if B in row else "" for B in BATCHES] for name, row in reversed(ms.items())}
    on_h200 = any("H200" in r.get("gpu", "") for _, r in results)  # what EARLIER and GOALS are of
    rows = {**EARLIER, **measured, **GOALS} if on_h200 else measured
    return [f"| ms a step, bfloat16, T={T} | {' | '.join(f'B={B}' for B in BATCHES)} |", "|---|---|---|---|",
            *(f"| {name} | {' | '.join(map(str, row))} |" for name, row in rows.items())]


def make_table(table, results):
    lines = [f"| GPT-2, T={T} | B | precision | ms a step | tokens/s | MFU | first step | memory | in use | roofline |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    measured = next((r["product"] for _, r in results if "product" in r), None)
    for job, r in results:
        start = f"| {title(job)}, {job.model} |" if table == "models" else f"| {title(job)} |"
        if "failed" in r:
            lines.append(f"{start} {job.B} | {job.precision} | failed: {r['failed']} | | | | | | |")
            continue
        rate, fastest = r["B"] * T / r["ms"] * 1000, peak(r["gpu"]) or measured
        mfu = f"{rate * model_flops(MODELS[job.model]) / fastest:.1%}" if fastest and job.precision == "bfloat16" else ""
        first = f"{r['cold']:.1f} s, warm {r['first']:.1f} s" if "cold" in r else f"{r['first']:.1f} s"
        share = f"{roofline(r, [other for of, other in results if of.precision == job.precision]):.0%}" if "flops" in r else ""
        precision = "TF32" if job.precision == "tf32" else job.precision
        memory = f"{r['memory'] / 2**30:.2f} GiB | {r['used'] / 2**30:.2f} GiB"
        lines.append(f"{start} {r['B']} | {precision} | {r['ms']:.2f} | {rate:.0f} | {mfu} | {first} | {memory} | {share} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--only", choices=tuple(TABLES), help="one table")
    parser.add_argument("--readme", action="store_true", help="put tables and picture into README.md, between their markers")
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
            split_at_markers(f"bench_{table}")  # fail now, not after all the work
    for table in tables:
        results = measure(TABLES[table])
        ours = next((r for job, r in results if job.name == "ours"), {})
        rival = next((f", PyTorch {r['torch']}" for _, r in results if "torch" in r), "")
        machine = [f"{ours['machine']}{rival}; {datetime.date.today()}"]
        if "product" in ours:
            machine.append(f"copy bandwidth {ours['bandwidth'] / 1e9:.0f} GB/s, large product {ours['product'] / 1e12:.0f} TFLOP/s")
        lines = [*make_summary(results), ""] * (table == "bfloat16") + make_table(table, results)
        print("\n".join([*machine, *lines]))
        if args.readme:
            put_between_markers(f"bench_{table}", "\n".join([*machine, "", *lines]))
            if table == "bfloat16":
                save(machine[0], results)


def save(machine, results):
    """What plot_bench.py draws, and the picture."""
    rows = [{**job._asdict(), **r} for job, r in results if "failed" not in r and job.recompute < 0]
    with replacing(RESULTS) as f:
        f.write(json.dumps({"machine": machine, "T": T, "results": rows}, indent=1).encode() + b"\n")
    subprocess.run([sys.executable, os.path.join(ROOT, "dev", "plot_bench.py")], check=True)


if __name__ == "__main__":
    run_main(main)
