"""
The kernel library: every layer of GPT-2, from the naive kernel to the live one, checked and timed;
needs a GPU.

    python dev/kernels/bench.py                               # lists the layers and their rungs
    python dev/kernels/bench.py layernorm_forward             # checks them, times them, prints a table
    python dev/kernels/bench.py gelu_forward --rung live --check_only
    python dev/kernels/bench.py layernorm_forward --mine my.cu           # your kernel layernorm_forward_warp_a_row, too
    python dev/kernels/bench.py --all                         # all layers: dev/kernels/RESULTS.md

If one element of a rung is wrong, its tensor is printed, nothing is timed, and the exit status is
1. README.md says how rungs are checked and timed.
"""

import argparse
import functools
import os
import sys

import lab  # first: it finds the project's modules
import layers  # noqa: F401  (its classes are the layers)
import attention_layers  # noqa: F401
import matmul_layers  # noqa: F401

import torch

import llmc.gpu.device
from checks import check_at_all_sizes, time_layer
from lab import LAYERS, SWEEP, precision_of, with_mine
from llmc.errors import UserError, run_main
from llmc.files import replacing
from llmc.gpu.compiler import compiler_version
from llmc.gpu.device import gpu_errors_as_lines, open_gpu
from profile_gpu import describe, measure_copy, measure_matmul
from train_gpt2 import Config, SIZES

RESULTS = os.path.join(lab.HERE, "RESULTS.md")


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("layers", nargs="*", metavar="LAYER",
                        help="what to check and time (none: list them)")
    parser.add_argument("--rung", nargs="+", metavar="NAME", help="only these rungs")
    parser.add_argument("--mine", metavar="FILE.cu",
                        help="with your kernels: each is launched like the rung whose name"
                        " it has, LAYER_RUNG, and is a rung my_RUNG")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"),
                        help="(default: bfloat16 where the GPU has it)")
    parser.add_argument("-b", type=int, default=32, metavar="B", help="batch size of the timing")
    parser.add_argument("-t", type=int, default=1024, metavar="T",
                        help="sequence length of the timing")
    parser.add_argument("--model", choices=tuple(SIZES), default="d12",
                        help="whose C, NH (default: d12)")
    parser.add_argument("--check_only", action="store_true", help="check, and time nothing")
    parser.add_argument("--all", action="store_true",
                        help="all layers, into dev/kernels/RESULTS.md")
    return parser.parse_args(argv)


def timed_rows(layer, bench, names, B, T, peaks):
    """Time a layer; return its rows of the table. peaks: bytes of a copy and operations of a
    matmul, a second."""
    at_size = layer(bench.config, bench.precision, bench.gpu, B, T)
    rows = []
    with bench.streams():
        times, moved = time_layer(at_size, bench, names)
    for name, ms in times.items():
        best = min(ms, key=ms.get)
        flops = at_size.flops()
        rate = 1000 * (flops or moved) / ms[best]
        rows.append([layer.name, name, str(best), f"{ms[best]:.4f}",
                     f"{rate / 1e12:.1f} TFLOP/s" if flops else f"{rate / 1e9:.0f} GB/s",
                     f"{rate / peaks[flops > 0]:.1%}",
                     *(f"{ms[block]:.4f}" if block in ms else "" for block in SWEEP)])
    llmc.gpu.device.cp.get_default_memory_pool().free_all_blocks()
    torch.cuda.empty_cache()
    return rows


@gpu_errors_as_lines()
def main(argv=None):
    args = parse_arguments(argv)
    if args.mine and not args.layers:
        raise UserError("--mine: of which layer? python dev/kernels/bench.py LAYER --mine"
                        f" {args.mine}")
    if not args.layers and not args.all:
        for name, layer in LAYERS.items():
            about = (layer.__doc__ or "").partition("\n")[0]
            print(f"{name}: {about}\n    {', '.join(layer.rungs)}")
        return 0
    known = {*LAYERS,
             *(rung for name in args.layers if name in LAYERS for rung in LAYERS[name].rungs)}
    for name in (*args.layers, *(rung.removeprefix("my_") for rung in args.rung or ())):
        if name not in known:
            raise UserError(f"{name}: expected names that python dev/kernels/bench.py lists")
    chosen = [LAYERS[name] for name in args.layers or LAYERS]
    if args.mine:
        chosen = [with_mine(layer, args.mine) for layer in chosen]
    gpu = open_gpu()
    open_lab = functools.cache(functools.partial(lab.Lab, gpu, mine=args.mine))
    config = Config(max(args.t, 1024), 50257, *SIZES[args.model], 50304)
    dtype = args.dtype or ("float32" if gpu.arch == "sm_75" else "bfloat16")
    if not all([check_at_all_sizes(layer, open_lab, config, dtype, args.rung) for layer in chosen]):
        return 1
    if args.check_only:
        return 0
    benches = [open_lab(config, precision_of(layer, dtype)) for layer in chosen]
    with benches[0].streams():
        peaks = measure_copy(benches[0].device), measure_matmul(benches[0].matmul)
    header = ["layer", "rung", "best block", "ms", "rate", "of peak",
              *(f"ms at {block}" for block in SWEEP)]
    text = ["# What the kernels of this library measure", "",
            "`python dev/kernels/bench.py --all` writes this file;"
            f" README.md says how rungs are checked and timed. B={args.b}, T={args.t},"
            f" C={config.C}, NH={config.NH}, V={config.V}, Vp={config.Vp}.", "",
            f"{describe(benches[0].matmul)}, {compiler_version()}, PyTorch {torch.__version__}", "",
            f"## {dtype}", "",
            f"Peaks, measured: a copy {peaks[0] / 1e9:.0f} GB/s, a large matmul"
            f" {peaks[1] / 1e12:.0f} TFLOP/s.", "",
            f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for layer, bench in zip(chosen, benches):
        text += [f"| {' | '.join(row)} |"
                 for row in timed_rows(layer, bench, args.rung, args.b, args.t, peaks)]
    print("\n".join(text))
    if args.all:
        with replacing(RESULTS) as f:
            f.write("\n".join([*text, ""]).encode())
        print(f"wrote {os.path.relpath(RESULTS)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_main(main)
