"""
Text generation beside transformers: tokens a second, and the time to the first token.

    python dev/bench_generate.py                # GPT-2 124M, random weights, 256 tokens after end-of-text
    python dev/bench_generate.py --model d48 --batches 1

It runs in bfloat16 on a GPU, else in float32 on the CPU. A row is the best of 3 whole runs (transformers: one) after a
warm-up; some use --top_k 50. "of the floor": the time to read all weights once, at the GPU's copy bandwidth, as a
fraction of a step. transformers is generate() with its own cache, eager, sampling from all tokens. The time to the
first token is that of `python generate.py` from the start of the process, with kernels already cached.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np

from generate import streams
from llmc.checkpoint import write_model
from llmc.gpu.decoder import open_decoder
from llmc.gpu.device import cp, gpu_errors_as_lines, open_gpu
from llmc.errors import UserError, run_main
from llmc.sampler import Choice
from llmc.tensors import flat
from train_gpt2 import Decoder, random_model
from train_gpt2_cuda import GPT2

TOKENS, V = 256, 50257


def best_of(run, times=3):
    """Return the seconds of the fastest of several calls, after one to warm up."""
    run()
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return min(found)


def bench_ours(decoder, B, choice):
    prompt = np.array([[V - 1]], np.int32)
    return best_of(lambda: sum(1 for _ in decoder.draw(prompt, TOKENS, streams(1, B), choice)))


def bench_transformers(config, batches, device):
    """Return {batch size: seconds}."""
    import torch
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=config.L, n_head=config.NH, n_embd=config.C))
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()

    def run(B):
        prompt = torch.full((B, 1), V - 1, device=device)
        options = dict(max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=True, top_k=0, pad_token_id=V - 1)
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        if device == "cuda":
            torch.cuda.synchronize()

    return {B: best_of(lambda: run(B), 1) for B in batches}


def copy_rate(gpu):
    """Return the bandwidth of copying a gigabyte within the GPU: bytes read and written a second, added up."""
    source, target = (cp.empty(1 << 30, np.uint8) for _ in range(2))
    start, end = cp.cuda.Event(), cp.cuda.Event()
    for _ in range(3):
        start.record()
        for _ in range(10):
            target.data.copy_from_device_async(source.data, source.nbytes, cp.cuda.get_current_stream())
        end.record()
        end.synchronize()
    return 2 * 10 * source.nbytes / cp.cuda.get_elapsed_time(start, end) * 1000


def first_token(config, params):
    """Return the seconds that generate.py takes to print one token when its kernels are cached."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.bin")
        write_model(path, config, params)
        command = [sys.executable, os.path.join(ROOT, "generate.py"), path, *"--prompt_ids 1 2 3 --tokens 1".split()]
        return best_of(lambda: subprocess.run(command, check=True, capture_output=True))


@gpu_errors_as_lines()
def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="d12", help="a size, as train_gpt2.py -e has it")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="samples at a time")
    parser.add_argument("--no_transformers", action="store_true", help="ours alone")
    args = parser.parse_args()
    if min(args.batches) < 1:
        raise UserError(f"--batches {min(args.batches)}: expected at least 1 sample at a time")
    config, params = random_model(args.model, V)
    try:
        gpu = open_gpu()
    except UserError:
        gpu = None
    name = gpu.name if gpu else "CPU"
    floor = 2 * flat(params).size / copy_rate(gpu) if gpu else 0.0
    print(f"{args.model} on {name}, {'bfloat16' if gpu else 'float32'}, {TOKENS} tokens")

    def row(what, B, seconds):
        share = f"  {floor / (seconds / TOKENS):4.0%} of the floor" if gpu and B == 1 else ""
        print(f"B={B:<3} {what:<20} {B * TOKENS / seconds:9.0f} tok/s  {seconds / TOKENS * 1e6:8.1f} us a step{share}",
              flush=True)

    for B in args.batches:
        if gpu:
            decoder = open_decoder(GPT2, gpu, config, params, B, config.maxT)
        else:
            decoder = Decoder(config, params, B, config.maxT)
        row("ours", B, bench_ours(decoder, B, Choice()))
        row("ours, top_k 50", B, bench_ours(decoder, B, Choice(1.0, 50)))
        del decoder
        if gpu:
            cp.get_default_memory_pool().free_all_blocks()
    if not args.no_transformers:
        for B, seconds in bench_transformers(config, args.batches, "cuda" if gpu else "cpu").items():
            row("transformers", B, seconds)
    print(f"first token after {first_token(config, params):.2f} s")


if __name__ == "__main__":
    run_main(main)
