"""Benchmarks of whole runs: text, beside transformers, and training on several GPUs; which batches
fit into a card's memory. Commands of dev/bench.py."""

import bisect
import contextlib
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from root import ROOT, output_of
import numpy as np

import profile_gpu
import train_gpt2_cuda as cuda
from generate import streams
from llmc.checkpoint import padded
from llmc.dataloader import write_tokens
from llmc.errors import UserError
from llmc.gpu.decoder import open_decoder
from llmc.gpu.device import count_gpus, cp, open_gpu
from llmc.gpu.geometry import launch_geometry
from llmc.gpu.plan import RESERVE, memory_plan
from llmc.sampler import Choice
from llmc.tensors import flat
from train_gpt2 import SIZES, Config, Decoder, random_model

V, T = 50257, 1024


def positive(text):
    """A flag's integer, 1 or more."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def times_of(call, warmup, count):
    """The seconds of each of `count` calls, after a few to warm up."""
    found = []
    for _ in range(warmup + count):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return found[warmup:]


# --------------------------------------------------------------------------------------------------
# text

TOKENS = 256


def bench_generate(args):
    """Text from random weights, 256 tokens after end-of-text, beside transformers: bfloat16 on a
    GPU, else float32 on the CPU. A row is the best of 3 whole runs (transformers: one) after a
    warm-up. "of the floor": the time to read all weights once, at the GPU's copy bandwidth, as a
    part of a step. transformers is generate(), eager."""
    config, params = random_model(args.model, V)
    params.lnfw *= 7  # probabilities as far apart as a trained model's: top_p 0.9 leaves hundreds
    gpu = floor = None
    with contextlib.suppress(UserError):
        gpu = open_gpu()
    print(f"{args.model} on {gpu.name if gpu else 'CPU'}, {'bfloat16' if gpu else 'float32'},"
          f" {TOKENS} tokens")

    def row(what, B, seconds):
        share = f"  {floor / (seconds / TOKENS):4.0%} of the floor" if floor and B == 1 else ""
        print(f"B={B:<3} {what:<20} {B * TOKENS / seconds:9.0f} tok/s "
              f" {seconds / TOKENS * 1e6:8.1f} us a step{share}",
              flush=True)

    def draw(decoder, B, choice, prompt=np.array([[V - 1]], np.int32)):
        return min(times_of(lambda: sum(1
                                        for _ in decoder.draw(prompt, TOKENS, streams(1, B),
                                                              choice)), 1, 3))

    for B in args.b:
        if gpu:
            decoder = open_decoder(cuda.GPT2, gpu, config, params, B, config.maxT)
            floor = floor or 2 * flat(params).size / profile_gpu.measure_copy(decoder.device)
        else:
            decoder = Decoder(config, params, B, config.maxT)
        row("ours", B, draw(decoder, B, Choice()))
        row("ours, top_k 50", B, draw(decoder, B, Choice(1.0, 50)))
        row("ours, top_p 0.9", B, draw(decoder, B, Choice(1.0, 0, 0.9)))
        del decoder
        if gpu:
            cp.get_default_memory_pool().free_all_blocks()
    for B, seconds in time_transformers(config, args.b, "cuda" if gpu else "cpu").items():
        row("transformers", B, seconds)


def time_transformers(config, batches, device):
    """{batch size: seconds}"""
    import torch
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=config.L, n_head=config.NH,
                                                                 n_embd=config.C))
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()

    def run(B):
        prompt = torch.full((B, 1), V - 1, device=device)
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS,
                       min_new_tokens=TOKENS, do_sample=True, top_k=0, pad_token_id=V - 1).cpu()

    return {B: min(times_of(lambda B=B: run(B), 1, 1)) for B in batches}


# --------------------------------------------------------------------------------------------------
# a card's line, to send in


def driver_version():
    """The version of NVIDIA's driver, as nvidia-smi says it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def line_to_send(machine, results):
    """A card's figures in one line: ms a step of GPT-2 124M, and of PyTorch at its best. results:
    [(bench.Job, result)]."""
    figures = []
    for B in sorted({job.B for job, _ in results}):
        ours, theirs = ([r["ms"] for job, r in results if job.B == B and job.recompute < 0
                         and (job.name == "ours") == is_ours and "ms" in r]
                        for is_ours in (True, False))
        if ours:
            figures.append(f"B={B} {ours[0]:.2f}" + (f" ({min(theirs):.2f})" if theirs else ""))
    precision = results[0][0].precision
    return (f"{machine}; driver {driver_version()}; {precision}, ms (PyTorch's):"
            f" {', '.join(figures)}")


# --------------------------------------------------------------------------------------------------
# memory

CARDS = 8, 12, 16, 24, 48, 80  # GB
CONTEXT = 0.6 * 2**30  # bytes that the GPU counts and the trainer does not allocate, at most


def bench_memory(args):
    """The largest batch of T=1024 that trains on a card of so many GB, as llmc/gpu/plan.py adds up
    what a run allocates: this needs no GPU. In bfloat16, AdamW, by the kernels of all cards."""
    print("| | `--recompute` | " + " | ".join(f"{size} GB" for size in CARDS) + " |")
    print("|---" * (2 + len(CARDS)) + "|")
    for name, size in (("124M", "d12"), ("355M", "d24"), ("774M", "d36"), ("1558M", "d48")):
        for recompute in (0, 2):
            most = [most_that_fits(size, recompute, gb * 10**9) for gb in CARDS]
            words = " | ".join(f"-b {B}" if B else "" for B in most)
            print(f"| {name} | {recompute} | {words} |")


def most_that_fits(size, recompute, capacity):
    """The largest batch, 0 if none fits."""
    config = Config(1024, V, *SIZES[size], padded(V))

    def fits(B):
        settings = cuda.resolve_auto(cuda.CudaSettings(B=B, T=T, dtype="bfloat16",
                                                       recompute=recompute), "sm_80")
        device = SimpleNamespace(
            sm_count=132, geometry=launch_geometry(config, settings.precision, "sm_80"))
        plan = memory_plan(cuda.GPT2, config, settings, device)
        needed = sum(block.bytes for block in plan.values())
        return needed + RESERVE + CONTEXT <= capacity

    return bisect.bisect_left(range(1, 1025), True, key=lambda B: not fits(B))


# --------------------------------------------------------------------------------------------------
# several GPUs

RUNS = {  # name -> (model, flags); B is per GPU, -d for all together
    "small": ("124M, B=4", ("-e", "d12", "-b", 4, "-x", 60)),
    "update": ("124M, B=64, 524,288 tokens", ("-e", "d12", "-b", 64, "-d", 524288, "-x", 9)),
    "1558M": ("1558M, B=16", ("-e", "d48", "-b", 16, "-x", 9)),
}


def bench_scale(args):
    """Training on 1, 2, 4, ... GPUs of this machine, on random tokens, from random weights: the
    median step, without the first third of the steps. "of linear": tokens a second, over as many
    times those of the slowest of these GPUs, all measured alone at the same time. Memory is what
    the trainer allocates on a GPU."""
    there = count_gpus()
    counts = args.gpus or [n for n in (1, 2, 4, 8, 16) if n <= there]
    if max(counts) > there:
        raise UserError(f"--gpus {max(counts)}: this machine has {there}")
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        tokens = np.random.default_rng(0).integers(0, V, 20_000_000)
        write_tokens("tokens_train.bin", [tokens], len(tokens), "uint16")
        write_tokens("tokens_val.bin", [tokens[: 1 << 17]], 1 << 17, "uint16")
        print("| bfloat16, T=1024 | GPUs | ms a step | tokens/s | of linear | GiB a GPU"
              " |\n|---|---|---|---|---|---|")
        for (what, flags), gpus in itertools.product([RUNS[name] for name in args.only], counts):
            given = dict(zip(flags[::2], flags[1::2]))
            if given.get("-d", 0) % (given["-b"] * T * gpus):
                continue  # an update does not divide into whole batches
            with ThreadPoolExecutor(gpus) as pool:
                alone = () if gpus == 1 else pool.map(
                    lambda only, flags=flags: time_training(1, flags, only)[1], range(gpus))
            ms, rate, size = time_training(gpus, flags)
            print(f"| {what} | {gpus} | {ms:.2f} | {rate:,.0f} |"
                  f" {rate / gpus / min(alone, default=rate):.1%} | {size / 1024:.1f} |",
                  flush=True)


def time_training(gpus, flags, only=None):
    """(ms a step, tokens/s, MiB) of a run of the trainer. only: index of the one GPU that it
    sees."""
    command = [sys.executable, os.path.join(ROOT, "train_gpt2_cuda.py"), "-i", "tokens", "-t", T,
               "-s", 0, "-v", 0,
               "--gpus", gpus, "--lines", "llmc", "--final_reports", 0, *flags]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count_gpus()))))
    visible = visible if only is None else visible.split(",")[only]
    output = output_of(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": visible})
    steps = [tuple(map(float, pair))
             for pair in re.findall(r"\(([0-9.]+) ms, ([0-9]+) tok/s\)", output)]
    ms, rate = (statistics.median(values) for values in zip(*steps[len(steps) // 3 :]))
    return ms, rate, sum(map(int, re.findall(r"^allocated (\d+) MiB", output, re.MULTILINE)))
