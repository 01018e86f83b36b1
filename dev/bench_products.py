"""
The matrix products of a training step of GPT-2 124M, each by itself: our kernels beside cuBLASLt; needs a GPU.

    python dev/bench_products.py                             # bfloat16, B=4, 32 and 64, T=1024: under a minute
    python dev/bench_products.py --dtype float32             # operands rounded to TF32
    python dev/bench_products.py --markdown dev/products.md  # puts the tables there, too, between the markers for `products`

Biases, GELU after fc, and before fc its derivative and the bias's gradient are part of the products, as in the step: ours do them in
the epilogue, cuBLASLt the biases, and the kernels of gelu.cu beside it the rest. Both sides choose anew, on these very operands:
cuBLASLt the fastest of the algorithms that it proposes, ours in how many parts a weight gradient's inner dimension is done, and in which
tiles. Operands are as large as in training, and random, because zeros would be too fast.

First the first and last rows of both results are compared; a wrong one is a non-zero exit. Then both are timed in turns, so that the heat
of the GPU falls on both: microseconds as medians over CUDA events, without the launching. The ratio is cuBLASLt's time over ours: above 1,
ours are faster. The last rows of a table are sums over all calls of a step, 12 for a layer's product and one for the logits': of what a
step does, and of the products alone, where fc and fcproj dinp stand for those with GELU or its derivative.
"""

import argparse
import functools
import os
import sys
from types import SimpleNamespace
from typing import NamedTuple

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path[:0] = [ROOT, os.path.join(ROOT, "dev", "kernels")]

import train_gpt2  # noqa: F401  (first: it tells OpenBLAS how to run, before NumPy is imported)

import numpy as np

import train_gpt2_cuda as cuda
from bench_gpu import MODELS, describe
from lab import agrees
from readme import put_between_markers, split_at_markers
from train_gpt2 import Row, run_main

BATCHES, T = (4, 32, 64), 1024
ROUNDS = 21
COMPARED = 128  # rows at either end of a result
# Of its largest value, by how much two results may differ: each rounds what it stores, in bfloat16, or its operands, to TF32.
TOLERANCES = {"bfloat16": 1e-2, "float32": 4e-3}


class Product(NamedTuple):
    name: str
    operation: str  # the method of Products
    C: int  # its arguments
    OC: int
    calls: int  # in a step
    alone: bool = False  # what a step does together with something else: for the last row

    def sizes(self, N):
        """Rows and columns of the result, and the inner dimension."""
        return {"forward": (N, self.OC, self.C), "backward_inp": (N, self.C, self.OC), "backward_weight": (self.OC, self.C, N)}[
            self.operation.removesuffix("_gelu")]


def products_of(config):
    """All products of a step, the forward pass first, and alone those that it does with GELU."""
    L, C = config.L, config.C
    weights = (("qkv", C, 3 * C, L), ("attproj", C, C, L), ("fc", C, 4 * C, L), ("fcproj", 4 * C, C, L), ("logits", C, config.Vp, 1))
    products = [Product(name, "forward", *sizes) for name, *sizes in weights]
    products += [Product(f"{name} dinp", "backward_inp", *sizes) for name, *sizes in weights]
    products += [Product(f"{name} dweight", "backward_weight", *sizes) for name, *sizes in weights]
    with_gelu, found = {"fc": "fc and GELU", "fcproj dinp": "fcproj dinp, GELU', column sums"}, []
    for product in products:
        if product.name in with_gelu:
            found.append(product._replace(name=with_gelu[product.name], operation=f"{product.operation}_gelu"))
        found.append(product._replace(alone=product.name in with_gelu))
    return found


class Operands:
    """What a product works on: `arguments` of the method of Products, and `results`, those that it writes."""

    def __init__(self, device, product, N):
        self.device, self.made = device, 0
        C, OC, random = product.C, product.OC, self.random
        if product.operation.startswith("forward"):
            bias = None if product.name == "logits" else random(OC)
            self.results = {"out": random(N, OC)} | ({"gelu": random(N, OC)} if product.operation == "forward_gelu" else {})
            self.arguments = *self.results.values(), random(N, C), random(OC, C), bias, N, C, OC
        elif product.operation == "backward_inp":
            self.results = {"dinp": random(N, C)}
            self.arguments = *self.results.values(), random(N, OC), random(OC, C), N, C, OC
        elif product.operation == "backward_inp_gelu":
            sums = cuda.cp.empty((cuda.blocks(N, cuda.MatmulKernels.BM), C), np.float32)
            self.results = {"dinp": random(N, C), "sums": sums}
            self.arguments = *self.results.values(), None, random(N, OC), random(OC, C), random(N, C), N, C, OC
        else:
            self.results = {"dweight": random(OC, C)}
            transposed = None if device.precision.bf16 else random(min(C, OC), N)
            self.arguments = *self.results.values(), random(N, OC), random(N, C), transposed, N, C, OC, 0

    def random(self, *shape):
        """An array of the run's dtype. fill_random knows one sequence of numbers: each array begins at another place of it, so that no row
        of one is a row of another."""
        skipped, count = 37 * 1024 * self.made, int(np.prod(shape, dtype=np.int64))
        array = cuda.cp.empty(skipped + count, Row((), self.device.precision.dtype).stored_as)
        self.device.launch("fill_random", (cuda.blocks(array.size, 256),), (256,), array, np.int64(array.size))
        self.made += 1
        return array[skipped:].reshape(shape)

    def results_of(self, call):
        """{result: some of it on the host}: its first and last rows; of the column sums, what all their rows add up to."""
        for array in self.results.values():
            array.fill(0xFFFF if array.dtype == np.uint16 else np.nan)
        call()
        found = {name: np.concatenate([cuda.to_float32(rows) for rows in (array[:COMPARED], array[-COMPARED:])])
                 for name, array in self.results.items() if name != "sums"}
        if "sums" in self.results:
            found["sums"] = cuda.to_float32(self.results["sums"]).sum(axis=0)
        return found


def agree(where, ours, theirs, tolerance):
    """Whether the results are the same but for rounding; prints a row for each that is not."""
    allowed = {name: tolerance * max(float(np.abs(expected).max()), 1e-30) for name, expected in theirs.items()}
    return all([agrees(where, name, ours[name], expected, allowed[name]) for name, expected in theirs.items()])


def time_product(device, sides, product, N):
    """((seconds by our kernels, by cuBLASLt), whether their results agree); sides: the Products of both, searching."""
    operands = Operands(device, product, N)
    calls = [functools.partial(getattr(products, product.operation), product.name, *operands.arguments) for products in sides]
    for call in calls:
        call()  # searches
    ours, theirs = map(operands.results_of, calls)
    okay = agree(f"{product.name}, N={N}", ours, theirs, TOLERANCES[device.precision.dtype])
    times = [[cuda.measure(device, call, 1) for call in calls] for _ in range(ROUNDS)]
    return tuple(np.median(times, axis=0).tolist()), okay


def table(B, dtype, times):
    """The lines of a table; times: [(Product, seconds by our kernels, by cuBLASLt)]."""
    lines = [f"B={B}, T={T}, {dtype}:", "",
             "| product | rows x columns x inner dimension | calls | ours, us | cuBLASLt, us | ratio |", "|---|---|---|---|---|---|"]
    for product, ours, theirs in times:
        sizes = " x ".join(map(str, product.sizes(B * T)))
        lines.append(f"| {product.name} | {sizes} | {product.calls} | {ours * 1e6:.1f} | {theirs * 1e6:.1f} | {theirs / ours:.3f} |")
    lines.append(total("all of a step", [row for row in times if not row[0].alone]))
    lines.append(total("the products alone", [row for row in times if not row[0].operation.endswith("_gelu")]))
    return lines


def total(name, times):
    ours, theirs = (sum(row[0].calls * row[side] for row in times) for side in (1, 2))
    calls = sum(product.calls for product, _, _ in times)
    return f"| {name} | | {calls} | {ours * 1e3:.2f} ms | {theirs * 1e3:.2f} ms | {theirs / ours:.3f} |"


def both_sides(device, cache):
    """(our kernels, cuBLASLt) as Products of one Device, which search and know of no search before."""
    ours, theirs = device.products, cuda.Products(device, cache, "cublaslt")
    ours.workspace = theirs.workspace = cuda.cp.empty((2, cuda.WORKSPACE), np.uint8)
    for products in (ours, theirs):
        products.known, products.searching = {}, True
    return ours, theirs


@cuda.gpu_errors_as_lines()
def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--dtype", choices=tuple(TOLERANCES), default="bfloat16", help="of the operands (default: bfloat16)")
    parser.add_argument("--markdown", metavar="FILE", help="a file with markers for `products`, into which the tables go, too")
    args = parser.parse_args()
    if args.markdown:
        split_at_markers("products", args.markdown)  # fail now, not after all the work
    gpu, config, cache = cuda.open_gpu(), MODELS["124M"], cuda.Cache()
    precision = cuda.settle(cuda.CudaSettings(dtype=args.dtype), gpu.arch).precision
    device, okay = cuda.Device(gpu, config, precision, cache, "kernels"), True
    with device.stream:
        sides = both_sides(device, cache)
        text = [f"{describe(gpu, SimpleNamespace(products=sides[1]))}; {cuda.compiler_version()}"]
        print(text[0])
        for B in BATCHES:
            times = []
            for product in products_of(config):
                seconds, agreed = time_product(device, sides, product, B * T)
                times.append((product, *seconds))
                okay &= agreed
                cuda.cp.get_default_memory_pool().free_all_blocks()
            text.append("\n".join(table(B, precision.dtype, times)))
            print(f"\n{text[-1]}")
    if not okay:
        return 1
    if args.markdown:
        put_between_markers("products", "\n\n".join(text), args.markdown)
        print(f"\nwrote {args.markdown}")
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    run_main(main)
