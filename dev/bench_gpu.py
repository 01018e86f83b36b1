"""
make bench on a GPU: one training step of GPT-2 124M, T=1024, random tokens, this trainer beside PyTorch.

    python dev/bench_gpu.py
    python dev/bench_gpu.py --readme        # also puts the table into README.md

The same model and batch, each contender in a process of its own, one after the other. A step is forward, backward and AdamW;
its time is the median over CUDA events. PyTorch is export_weights.py's model with F.scaled_dot_product_attention and fused
AdamW: as written (eager), compiled, and compiled with mode="reduce-overhead" (CUDA graphs). "first step" is from the
start of the process to the end of its first step, less the making of the weights, "warm" where kernels and algorithms were kept from an earlier start.
"memory" is what the trainer or PyTorch has allocated at its peak; "in use" is all that the GPU counts, context included.
"roofline" is the time of all the step's matrix and attention products at the rate of one large product, and of AdamW's bytes
at the rate of a copy, as a share of the step. Nothing else should use the GPU meanwhile.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

START = time.perf_counter()
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import train_gpt2  # first: it tells OpenBLAS how to run, before NumPy is imported

import numpy as np
from tqdm import tqdm

from bench_cpu import GPT2_124M, last_line, random_parameters
from readme import put_between_markers, split_at_markers
from train_gpt2 import UserError, run_main, table_elements

NAMES = {
    "ours": "train_gpt2_cuda.py",
    "eager": "PyTorch, eager",
    "compile": "PyTorch, torch.compile",
    "reduce-overhead": "PyTorch, torch.compile, reduce-overhead",
}
T = 1024
JOBS = [(name, B, tf32) for B, tf32 in ((4, 1), (16, 1), (4, 0)) for name in NAMES]
WARMUP, STEPS = 10, 30

# ----------------------------------------------------------------------------------------------------------------------
# workers: one contender in a process; prints a line of JSON


def random_batch(B):
    rng = np.random.default_rng(0)
    return rng.integers(0, GPT2_124M.V, (2, B, T), dtype=np.int32)


def bench_ours(B, tf32):
    import train_gpt2_cuda as cuda

    making = time.perf_counter()
    params = random_parameters()
    making = time.perf_counter() - making
    gpu = cuda.open_gpu()
    settings = cuda.settle(cuda.CudaSettings(B=B, T=T, dtype="float32", tf32=tf32), gpu.arch)
    device = cuda.Device(gpu, GPT2_124M, settings.precision, cuda.Cache())
    model = cuda.GPT2(device, GPT2_124M, params, settings)
    model.prepare()
    batch = random_batch(B)

    def step():
        return model.end_step(model.begin_step([batch], settings.learning_rate))[2]

    step()
    first = time.perf_counter() - START - making
    ms = [step() for _ in range(WARMUP + STEPS)][WARMUP:]
    pool, (free, total) = cuda.cp.get_default_memory_pool(), cuda.cp.cuda.runtime.memGetInfo()
    peak, used = pool.total_bytes(), total - free
    bandwidth, product = cuda.measure_copy(device), cuda.measure_product(device)
    return {"ms": statistics.median(ms), "first": first, "memory": peak, "used": used, "bandwidth": bandwidth, "product": product,
            "compiled": device.compiled, "floor": floor(B, bandwidth, product), "machine": describe(gpu, device)}


def bench_pytorch(name, B, tf32):
    import torch

    from export_weights import ADAMW, adamw, to_reference

    torch.backends.cuda.matmul.allow_tf32 = bool(tf32)
    making = time.perf_counter()
    params = random_parameters()
    making = time.perf_counter() - making
    model = to_reference(GPT2_124M, params, flash=True).cuda()
    optimizer = adamw(model, ADAMW, fused=True)
    compiled = {"eager": lambda: model, "compile": lambda: torch.compile(model),
                "reduce-overhead": lambda: torch.compile(model, mode="reduce-overhead")}
    step_model = compiled[name]()
    x, y = (torch.from_numpy(ids).long().cuda() for ids in random_batch(B))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def step():
        start.record()
        loss = step_model(x, y)[1]
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
    return {"ms": statistics.median(ms), "first": first, "memory": torch.cuda.max_memory_allocated(), "used": total - free,
            "torch": torch.__version__}


def floor(B, bandwidth, product):
    """Milliseconds of all products at the rate of a large one, and of AdamW's 28 bytes a parameter at that of a copy."""
    import train_gpt2_cuda as cuda

    C, L = GPT2_124M.C, GPT2_124M.L
    weights = GPT2_124M.Vp * C + L * 12 * C * C
    flops = 6 * weights * B * T + L * cuda.attention_flops(B, T, C, 7)
    return 1000 * (flops / product + 28 * table_elements(train_gpt2.parameter_table(GPT2_124M)) / bandwidth)


def describe(gpu, device):
    import train_gpt2_cuda as cuda

    driver = cuda.cp.cuda.runtime.driverGetVersion()
    return f"{gpu.name}, CUDA {driver // 1000}.{driver % 1000 // 10}, CuPy {cuda.cp.__version__}, cuBLASLt {device.products.version}"


# ----------------------------------------------------------------------------------------------------------------------
# the table


def measure():
    """[(name, B, tf32, result of its worker)]; ours runs twice, with no kernels kept and then with them."""
    results = []
    with tempfile.TemporaryDirectory() as cache, tqdm(total=len(JOBS) + 3, unit="run", leave=False) as bar:
        for name, B, tf32 in JOBS:
            bar.set_description(f"{NAMES[name]}, B={B}{'' if tf32 else ', float32'}")
            result = run_worker(name, B, tf32, cache)
            bar.update()
            if name == "ours" and "failed" not in result:
                result, cold = run_worker(name, B, tf32, cache), result["first"]
                result["cold"] = cold
                bar.update()
            results.append((name, B, tf32, result))
    return results


def run_worker(name, B, tf32, cache):
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, __file__, "--worker", name, str(B), str(tf32)]
        caches = {"TRAIN_GPT2_CACHE": cache, "TORCHINDUCTOR_CACHE_DIR": os.path.join(cache, f"{name}{B}{tf32}")}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **caches})
        try:
            return json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            return {"failed": last_line(errors)}


def make_table(results):
    lines = ["| GPT-2 124M, T=1024, float32 | B | products | ms a step | tokens/s | first step | memory | in use | roofline |",
             "|---|---|---|---|---|---|---|---|---|"]
    for name, B, tf32, r in results:
        start = f"| {NAMES[name]} | {B} | {'TF32' if tf32 else 'float32'} |"
        if "failed" in r:
            lines.append(f"{start} failed: {r['failed']} | | | | | |")
            continue
        first = f"{r['first']:.1f} s" if name != "ours" else f"{r['cold']:.1f} s, warm {r['first']:.1f} s"
        share = f"{r['floor'] / r['ms']:.0%}" if "floor" in r else ""
        lines.append(f"{start} {r['ms']:.2f} | {B * T / r['ms'] * 1000:.0f} | {first} | {r['memory'] / 2**30:.2f} GiB"
                     f" | {r['used'] / 2**30:.2f} GiB | {share} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--readme", action="store_true", help="put the table into README.md, between its markers")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, B, tf32 = args.worker[0], int(args.worker[1]), int(args.worker[2])
        print(json.dumps(bench_ours(B, tf32) if name == "ours" else bench_pytorch(name, B, tf32)))
        return
    if args.readme:
        split_at_markers("bench_gpu")  # fail now, not after all the work
    results = measure()
    ours = next((r for name, _, _, r in results if name == "ours"), {})
    if "failed" in ours:
        raise UserError(f"train_gpt2_cuda.py failed: {ours['failed']}")
    torch_version = next((r["torch"] for _, _, _, r in results if "torch" in r), "none")
    machine = [f"{ours['machine']}, PyTorch {torch_version}; {datetime.date.today()}",
               f"copy bandwidth {ours['bandwidth'] / 1e9:.0f} GB/s, large TF32 product {ours['product'] / 1e12:.0f} TFLOP/s"]
    table = make_table(results)
    print("\n".join([*machine, *table]))
    if args.readme:
        put_between_markers("bench_gpu", "\n".join([*machine, "", *table]))


if __name__ == "__main__":
    run_main(main)
