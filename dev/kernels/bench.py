"""
The kernel library: every layer of GPT-2, from the naive kernel to the live one, checked and timed; needs a GPU.

    python dev/kernels/bench.py                               # lists the layers and their rungs
    python dev/kernels/bench.py layernorm_forward             # checks them, times them, prints a table
    python dev/kernels/bench.py gelu_forward --rung live --check_only
    python dev/kernels/bench.py --all                         # all layers, bfloat16 and float32: dev/kernels/RESULTS.md

Each rung is compared with the NumPy function in float64 at every block size, at the model's sizes and at awkward ones,
its outputs NaN before the call. If one element is wrong, its tensor is printed, nothing is timed, and the exit status
is 1. Otherwise each rung is timed at -b and -t, where it must agree with the first rung: the median over CUDA events,
with the L2 cache flushed before each call. GB/s counts what a perfect kernel would move, even if a rung moves more. Its
peak is the bandwidth of a large copy, that of TFLOP/s the rate of a large matmul, both measured. Row 0 of a layer is
the library's: PyTorch's, and for matmuls cuBLASLt's.
"""

import argparse
import os
import sys

import lab  # first: it finds the project's modules
import layers  # noqa: F401  (its classes are the layers)
import attention_layers  # noqa: F401
import matmul_layers  # noqa: F401

import torch

import llmc.gpu.device
from lab import AWKWARD, LAYERS, SHAPES, SWEEP, Lab, check_layer, time_layer
from llmc.errors import UserError, run_main
from llmc.files import replacing
from llmc.gpu.compiler import compiler_version
from llmc.gpu.device import gpu_errors_as_lines, open_gpu
from llmc.gpu.precision import Precision
from profile_gpu import describe, measure_copy, measure_matmul
from train_gpt2 import Config, SIZES

RESULTS = os.path.join(lab.HERE, "RESULTS.md")


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("layers", nargs="*", metavar="LAYER", help="what to check and time (none: list them)")
    parser.add_argument("--rung", nargs="+", metavar="NAME", help="only these rungs")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"),
                        help="of activations (default: bfloat16 where the GPU has it)")
    parser.add_argument("-b", type=int, default=32, metavar="B", help="batch size of the timing")
    parser.add_argument("-t", type=int, default=1024, metavar="T", help="sequence length of the timing")
    parser.add_argument("--model", choices=tuple(SIZES), default="d12", help="whose C, NH (default: d12)")
    parser.add_argument("--check_only", action="store_true", help="check, and time nothing")
    parser.add_argument("--all", action="store_true", help="all layers in each dtype, into dev/kernels/RESULTS.md")
    return parser.parse_args(argv)


# ----------------------------------------------------------------------------------------------------------------------
# check and time


class Labs:
    """A Lab for each model and precision on one GPU, and whether PyTorch sees the GPU, too."""

    def __init__(self):
        self.gpu, self.made, self.torch = open_gpu(), {}, torch.cuda.is_available()

    def open(self, layer, config, dtype):
        """The Lab for a layer, with its kernels loaded."""
        key = config, Precision(dtype, float32_grads=int(layer.float32_grads and dtype == "bfloat16"))
        if key not in self.made:
            self.made[key] = Lab(self.gpu, *key)
        for file in (layer.file, *layer.uses):
            self.made[key].load(file)
        return self.made[key]


def check_all(labs, chosen, names, config, dtype):
    """Check each layer at all sizes and print what is wrong; returns whether nothing is."""
    wrong = 0
    for layer in chosen:
        count = 0
        for sizes in (config, *AWKWARD):
            bench = labs.open(layer, sizes, dtype)
            with bench.stream:
                for B, T in layer.shapes if sizes is config else SHAPES:
                    at_size = layer(sizes, bench.precision, bench.gpu, B, T)
                    count += len(list(at_size.runs(names)))
                    wrong += check_layer(at_size, bench, names, labs.torch and not names)
        print(f"{layer.name}, {dtype}: {count} calls checked")
    return wrong == 0


def time_all(labs, chosen, names, config, dtype, B, T):
    """Return (GPU and versions, (bytes, operations) a second at best, [Timing])."""
    timings = []
    for layer in chosen:
        bench = labs.open(layer, config, dtype)
        with bench.stream:
            timings.append(time_layer(layer(config, bench.precision, bench.gpu, B, T), bench, names, labs.torch))
        llmc.gpu.device.cp.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
    with bench.stream:
        return machine_text(bench), (measure_copy(bench.device), measure_matmul(bench.matmul)), timings


def machine_text(bench):
    """GPU and versions in one line."""
    return f"{describe(bench.matmul)}, {compiler_version()}, PyTorch {torch.__version__}"


# ----------------------------------------------------------------------------------------------------------------------
# tables


def table(timings, peaks):
    """The lines of a table: a row for each rung, the library's first, with the ms of each block size."""
    lines = [f"| layer | rung | best block | ms | rate | of peak | {' | '.join(f'ms at {block}' for block in SWEEP)} |",
             "|---" * (6 + len(SWEEP)) + "|"]
    for timing in timings:
        layer, own = timing.layer, dict(timing.rungs)
        libraries = {layer.library_rung: own.pop(layer.library_rung, None),
                     layer.library_name: timing.library and {"": timing.library}}
        for name, times in ({**libraries, **own}).items():
            if times:
                block = min(times, key=times.get)
                cells = [layer.name, name, str(block if name in own else ""), f"{times[block]:.4f}",
                         *rate(timing, times[block], peaks)]
                cells += [f"{times[size]:.4f}" if name in own and size in times else "" for size in SWEEP]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def rate(timing, ms, peaks):
    """The rate and its part of the peak, as text."""
    (copy, matmul), moved, flops = peaks, 1000 * timing.bytes / ms, 1000 * timing.flops / ms
    if flops:
        return f"{flops / 1e12:.1f} TFLOP/s", f"{flops / matmul:.1%}"
    return f"{moved / 1e9:.0f} GB/s", f"{moved / copy:.1%}"


def results(config, B, T, machine, sections):
    """The text of RESULTS.md; sections: [(dtype, peaks, [Timing])]."""
    lines = ["# What the kernels of this library measure", "",
             "`python dev/kernels/bench.py --all` writes this file, after every rung has agreed with the NumPy function"
             " at every block size. Medians over CUDA events, the L2 cache flushed before each call; rates count what a"
             f" perfect kernel would move or compute. B={B}, T={T}, C={config.C}, NH={config.NH}, V={config.V},"
             f" Vp={config.Vp}. `python dev/kernels/bench.py` lists what the layers compute.", "", machine]
    for dtype, (copy, matmul), timings in sections:
        lines += ["", f"## {dtype}", "",
                  f"Peaks, measured: a copy {copy / 1e9:.0f} GB/s, a large matmul {matmul / 1e12:.0f} TFLOP/s.", "",
                  *table(timings, (copy, matmul))]
    return "\n".join(lines) + "\n"


@gpu_errors_as_lines()
def main(argv=None):
    args = parse_arguments(argv)
    if not args.layers and not args.all:
        for name, layer in LAYERS.items():
            print(f"{name}: {layer.__doc__.splitlines()[0]}\n    {', '.join(layer.rungs)}")
        return 0
    known = {*LAYERS, *(rung for name in args.layers if name in LAYERS for rung in LAYERS[name].rungs)}
    for name in (*args.layers, *(args.rung or ())):
        if name not in known:
            raise UserError(f"{name}: expected names that python dev/kernels/bench.py lists")
    chosen, labs = [LAYERS[name] for name in args.layers or LAYERS], Labs()
    config = Config(max(args.t, 1024), 50257, *SIZES[args.model], 50304)
    default = "float32" if labs.gpu.arch == "sm_75" else "bfloat16"
    dtypes = [args.dtype] if args.dtype else list(dict.fromkeys([default, "float32"])) if args.all else [default]
    if not all([check_all(labs, chosen, args.rung, config, dtype) for dtype in dtypes]):
        return 1
    if args.check_only:
        return 0
    sections = []
    for dtype in dtypes:
        machine, peaks, timings = time_all(labs, chosen, args.rung, config, dtype, args.b, args.t)
        sections.append((dtype, peaks, timings))
    text = results(config, args.b, args.t, machine, sections)
    print(text, end="")
    if args.all:
        with replacing(RESULTS) as f:
            f.write(text.encode())
        print(f"wrote {os.path.relpath(RESULTS)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_main(main)
