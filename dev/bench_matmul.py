"""
The matmuls of a training step of GPT-2 124M, each by itself: our kernels beside cuBLASLt; needs a GPU.

    python dev/bench_matmul.py                             # bfloat16, B=4, 32 and 64, T=1024: under a minute
    python dev/bench_matmul.py --dtype float32             # operands rounded to TF32
    python dev/bench_matmul.py --markdown dev/matmul.md    # puts the tables there, too, between its markers

As in the step, the matmuls include biases, GELU after fc and, in fcproj's backward pass, GELU's derivative and the sums
for fc's bias gradient. Ours do all that in the epilogue; cuBLASLt does the biases, and the kernels of gelu.cu the rest
after it. Both sides search again on these operands: cuBLASLt for the fastest of the algorithms that it proposes, ours
for the tile size and, in a weight gradient, for the number of parts of its inner dimension. Operands are as large as in
training, and random, because zeros would be too fast.

The first and last rows of both results are compared first; if they disagree, the exit status is 1. Then both are timed
in turns, so that a warmer GPU slows both alike: microseconds, medians over CUDA events, without launch overhead. The
ratio is cuBLASLt's time over ours: above 1, ours is faster. The last rows of a table are sums over all calls of a step,
12 for a layer's matmul and one for the logits': of what the step does, and of plain matmuls, with fc and fcproj dinp
instead of those fused with GELU or its derivative.
"""

import argparse
import functools
import os
import sys
from typing import NamedTuple

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path[:0] = [ROOT, os.path.join(ROOT, "dev", "kernels")]

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np

import llmc.gpu.device
import train_gpt2_cuda as cuda
from bench_gpu import MODELS, describe
from lab import agrees
from llmc.gpu.compiler import Cache, compiler_version
from llmc.gpu.device import gpu_errors_as_lines, open_gpu, to_float32
from llmc.errors import run_main
from llmc.gpu.geometry import blocks
from llmc.gpu.matmul import Matmul
from llmc.tensors import Row
from readme import put_between_markers, split_at_markers

BATCHES, T = (4, 32, 64), 1024
ROUNDS = 21
COMPARED = 128  # rows at either end of a result
# The largest difference allowed between the results, as a fraction of the largest value: each side rounds what it
# stores to bfloat16, or its operands to TF32.
TOLERANCES = {"bfloat16": 1e-2, "float32": 4e-3}


class Shape(NamedTuple):
    """One matmul of a step."""

    name: str
    operation: str  # the function matmul_<operation> of train_gpt2_cuda.py
    C: int  # its arguments
    OC: int
    calls: int  # in a step
    alone: bool = False  # plain, where a step fuses it with something else: only for the last row

    def sizes(self, N):
        """Rows and columns of the result, and the inner dimension."""
        return {"forward": (N, self.OC, self.C), "backward_inp": (N, self.C, self.OC),
                "backward_weight": (self.OC, self.C, N)}[self.operation.removeprefix("gelu_")]


def matmuls_of(config):
    """Return all matmuls of a step, the forward pass first; those fused with GELU also come alone."""
    L, C = config.L, config.C
    weights = (("qkv", C, 3 * C, L), ("attproj", C, C, L), ("fc", C, 4 * C, L), ("fcproj", 4 * C, C, L),
               ("logits", C, config.Vp, 1))
    shapes = [Shape(name, "forward", *sizes) for name, *sizes in weights]
    shapes += [Shape(f"{name} dinp", "backward_inp", *sizes) for name, *sizes in weights]
    shapes += [Shape(f"{name} dweight", "backward_weight", *sizes) for name, *sizes in weights]
    with_gelu, found = {"fc": "fc and GELU", "fcproj dinp": "fcproj dinp, GELU', column sums"}, []
    for shape in shapes:
        if shape.name in with_gelu:
            found.append(shape._replace(name=with_gelu[shape.name], operation=f"gelu_{shape.operation}"))
        found.append(shape._replace(alone=shape.name in with_gelu))
    return found


class Operands:
    """What a matmul works on: the function's `arguments`, and `results`, {name: array} of those that it writes."""

    def __init__(self, device, precision, shape, N):
        self.device, self.dtype, self.made = device, Row((), precision.dtype).stored_as, 0
        C, OC, random = shape.C, shape.OC, self.random
        if shape.operation in ("forward", "gelu_forward"):
            bias = None if shape.name == "logits" else random(OC)
            self.results = {"out": random(N, OC)} | ({"gelu": random(N, OC)} if "gelu" in shape.operation else {})
            self.arguments = *self.results.values(), random(N, C), random(OC, C), bias, N, C, OC
        elif shape.operation == "backward_inp":
            self.results = {"dinp": random(N, C)}
            self.arguments = *self.results.values(), random(N, OC), random(OC, C), N, C, OC
        elif shape.operation == "gelu_backward_inp":
            sums = llmc.gpu.device.cp.empty((blocks(N, device.geometry.MATMUL_BM), C), np.float32)
            self.results = {"dinp": random(N, C), "sums": sums}
            self.arguments = *self.results.values(), None, random(N, OC), random(OC, C), random(N, C), N, C, OC
        else:
            self.results = {"dweight": random(OC, C)}
            transposed = None if precision.bf16 else random(min(C, OC), N)
            self.arguments = *self.results.values(), random(N, OC), random(N, C), transposed, N, C, OC

    def random(self, *shape):
        """Return an array of random numbers in the run's dtype.

        fill_random has only one sequence: each array begins at another position in it, so that no two share a row.
        """
        skipped, count = 37 * 1024 * self.made, int(np.prod(shape, dtype=np.int64))
        array = llmc.gpu.device.cp.empty(skipped + count, self.dtype)
        self.device.launch("fill_random", (blocks(array.size, 256),), (256,), array, np.int64(array.size))
        self.made += 1
        return array[skipped:].reshape(shape)

    def results_of(self, call):
        """Make the call; return {result: its first and last rows on the host}, and the column sums added up."""
        for array in self.results.values():
            array.fill(0xFFFF if array.dtype == np.uint16 else np.nan)
        call()
        found = {name: np.concatenate([to_float32(rows) for rows in (array[:COMPARED], array[-COMPARED:])])
                 for name, array in self.results.items() if name != "sums"}
        if "sums" in self.results:
            found["sums"] = to_float32(self.results["sums"]).sum(axis=0)
        return found


def agree(where, ours, theirs, tolerance):
    """Return whether the results agree up to rounding; print a row for each that does not."""
    allowed = {name: tolerance * max(float(np.abs(expected).max()), 1e-30) for name, expected in theirs.items()}
    return all([agrees(where, name, ours[name], expected, allowed[name]) for name, expected in theirs.items()])


def time_matmul(sides, shape, N):
    """Return ((seconds by our kernels, by cuBLASLt), whether their results agree); sides: what both_sides returns."""
    device, precision = sides[0].device, sides[0].precision
    operands, function = Operands(device, precision, shape, N), getattr(cuda, f"matmul_{shape.operation}")
    calls = [functools.partial(function, matmul, *operands.arguments) for matmul in sides]
    for call in calls:
        call()  # searches
    ours, theirs = map(operands.results_of, calls)
    okay = agree(f"{shape.name}, N={N}", ours, theirs, TOLERANCES[precision.dtype])
    times = [[llmc.gpu.device.measure(device, call, 1) for call in calls] for _ in range(ROUNDS)]
    return tuple(np.median(times, axis=0).tolist()), okay


def table(B, dtype, times):
    """Return the lines of a table; times: [(Shape, seconds by our kernels, by cuBLASLt)]."""
    lines = [f"B={B}, T={T}, {dtype}:", "",
             "| matmul | rows x columns x inner dimension | calls | ours, us | cuBLASLt, us | ratio |",
             "|---|---|---|---|---|---|"]
    for shape, ours, theirs in times:
        sizes, us = " x ".join(map(str, shape.sizes(B * T))), f"{ours * 1e6:.1f} | {theirs * 1e6:.1f}"
        lines.append(f"| {shape.name} | {sizes} | {shape.calls} | {us} | {theirs / ours:.3f} |")
    lines.append(total("all of a step", [row for row in times if not row[0].alone]))
    lines.append(total("the matmuls alone", [row for row in times if not row[0].operation.startswith("gelu_")]))
    return lines


def total(name, times):
    ours, theirs = (sum(row[0].calls * row[side] for row in times) for side in (1, 2))
    calls = sum(shape.calls for shape, _, _ in times)
    return f"| {name} | | {calls} | {ours * 1e3:.2f} ms | {theirs * 1e3:.2f} ms | {theirs / ours:.3f} |"


def both_sides(device, cache, precision):
    """Return the Matmul of our kernels and that of cuBLASLt, on one device; both search, without earlier results."""
    sides = [Matmul(device, cache, precision, (library,)) for library in ("kernels", "cublaslt")]
    for matmul in sides:
        matmul.searching = True
    sides[0].allocate()
    sides[1].workspace = sides[0].workspace
    return sides


@gpu_errors_as_lines()
def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--dtype", choices=tuple(TOLERANCES), default="bfloat16",
                        help="of the operands (default: bfloat16)")
    parser.add_argument("--markdown", metavar="FILE", help="a file with markers for `matmul`, for the tables, too")
    args = parser.parse_args()
    if args.markdown:
        split_at_markers("matmul", args.markdown)  # fail now, not after all the work
    gpu, config, cache = open_gpu(), MODELS["124M"], Cache()
    precision = cuda.resolve_auto(cuda.CudaSettings(dtype=args.dtype), gpu.arch).precision
    device, okay = cuda.open_device(gpu, config, precision, cache, "kernels")[0], True
    with device.stream:
        sides = both_sides(device, cache, precision)
        text = [f"{describe(sides[1])}; {compiler_version()}"]
        print(text[0])
        for B in BATCHES:
            times = []
            for shape in matmuls_of(config):
                seconds, agreed = time_matmul(sides, shape, B * T)
                times.append((shape, *seconds))
                okay &= agreed
                llmc.gpu.device.cp.get_default_memory_pool().free_all_blocks()
            text.append("\n".join(table(B, precision.dtype, times)))
            print(f"\n{text[-1]}")
    if not okay:
        return 1
    if args.markdown:
        put_between_markers("matmul", "\n\n".join(text), args.markdown)
        print(f"\nwrote {args.markdown}")
    return 0


if __name__ == "__main__":
    run_main(main)
