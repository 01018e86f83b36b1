"""
Matmuls in the kernel library: the three that training needs, at the shape of fc (C -> 4C). lab.py
says what a layer is.

The kernels are in matmul.cu, and the forward kernels for Hopper alone in matmul_hopper.cu. What
trains the model is `live` on Hopper in bfloat16, cublaslt otherwise: cuBLASLt's first proposal;
PyTorch's row is cuBLAS's own choice. dev/matmul.md has the live kernels with GELU in the epilogue.
In float32, all rungs with tensor cores round operands to TF32.
"""

import math

import torch.nn.functional as F

from lab import SUMS, TF32, Kernel, Layer, Rung, blocks, np, rung, train_gpt2
from llmc.gpu.geometry import hopper_matmul
from llmc.gpu.matmul import Linear


def on_hopper(layer, block):
    return hopper_matmul(layer.precision, layer.gpu.arch)


def hopper_rung(kernel, tall, wide, threads, stages,
                launch=lambda lab, columns, rows: ((columns, rows),)):
    """A kernel of matmul_hopper.cu: tiles of tall x wide, `stages` steps of both operands in shared
    memory. launch(lab, columns, rows): the grid for so many tiles; then the band, rows of tiles
    that are finished before the next ones."""
    def run(layer, lab, a, block):
        grid, *band = launch(lab, blocks(layer.OC, wide), blocks(layer.N, tall))
        maps = lab.device.tensor_map(a.inp, 128, 64), lab.device.tensor_map(a.weight, wide, 64)
        lab.launch(f"matmul_forward_{kernel}", grid, (block,), a.out, *maps, a.bias, layer.N,
                   layer.OC, layer.C, *band, shared=stages * (tall + wide) * 64 * 2)

    return Rung(run, (threads,), on_hopper)


class Matmul(Layer):
    """What the matmuls share: `signature` has the operands, the result first; ours(a, matmul) calls
    a Linear's method; by_cublaslt(multiply, *operands) calls cuBLASLt."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.OC = 4 * self.C
        # the product of two bfloat16 numbers is exact
        self.checked = {self.signature[0]: SUMS if self.precision.bf16 else TF32}

    def flops(self):
        return 2 * self.N * self.C * self.OC

    def arguments(self, a):
        M, N = getattr(a, self.signature[0]).shape
        return *self.given(a), M, N, self.flops() // (2 * M * N)

    # Rungs for subclasses, which list them in the order of their ladders.

    @rung("")
    def cublaslt(self, lab, a, block):
        self.by_cublaslt(lab.matmul.cublaslt.multiply, *self.given(a))

    @rung(64, 256, 1024)
    def thread_an_element(self, lab, a, block):
        """Neighboring threads take neighboring rows."""
        tile = math.isqrt(block)
        M, N, _ = self.arguments(a)[-3:]
        grid = blocks(M, tile), blocks(N, tile)
        lab.launch(f"{self.name}_thread_an_element", grid, (tile, tile), *self.arguments(a))

    @rung(384, fits=on_hopper)
    def live(self, lab, a, block):
        self.ours(a, lab.matmul)


class MatmulForward(Matmul):
    """out = inp @ weight^T + bias"""

    name = "matmul_forward"
    signature = ("out", "inp", "weight", "bias")
    ours = staticmethod(lambda a, matmul: Linear(matmul, a.weight, a.bias).forward(a.out, a.inp))

    def tensors(self):
        return {"out": self.unwritten(self.N, self.OC), "inp": self.random(self.N, self.C),
                "weight": self.random(self.OC, self.C), "bias": self.random(self.OC)}

    def sizes(self):
        return self.B, self.T, self.C, self.OC

    def library(self, t):
        return lambda: {"out": F.linear(t.inp, t.weight, t.bias)}

    def by_cublaslt(self, multiply, out, inp, weight, bias):
        multiply(out, inp, weight.T, bias)

    cublaslt, thread_an_element = Matmul.cublaslt, Matmul.thread_an_element

    coalesced = Kernel(grid=lambda self, lab, block: (blocks(self.N * self.OC, block // 32),))

    @rung(64, 256, 1024)
    def shared_tiles(self, lab, a, block):
        tile = math.isqrt(block)
        lab.launch("matmul_forward_shared_tiles", self.tiles(tile), (tile, tile),
                   *self.arguments(a), shared=2 * tile * (tile + 1) * 4)

    def tiles(self, side):
        return blocks(self.OC, side), blocks(self.N, side)

    register_tiles = Kernel(grid=lambda self, lab, block: self.tiles(128), sweep=(256,))
    tensor_cores = Kernel(grid=lambda self, lab, block: self.tiles(64), sweep=(128,))
    mma_sync = Kernel(grid=lambda self, lab, block: self.tiles(128), sweep=(256,),
                      shared=lambda self, block: 3 * 2 * 128 * (64 + 16))
    wgmma_tma = hopper_rung("wgmma_tma", 128, 128, 128, 3)
    producer_consumer = hopper_rung("producer_consumer", 256, 192, 384, 4,
                                    lambda lab, columns, rows: ((columns * rows,), 1))
    persistent = hopper_rung("producer_consumer", 256, 192, 384, 4,
                             lambda lab, columns, rows: ((min(columns * rows, lab.sm_count),), 8))
    live = Matmul.live


class MatmulBackwardInp(Matmul):
    """dinp = dout @ weight"""

    name = "matmul_backward_inp"
    signature = ("dinp", "dout", "weight")
    ours = staticmethod(lambda a, matmul: Linear(matmul, a.weight).backward_inp(a.dinp, a.dout))

    def tensors(self):
        return {"dinp": self.unwritten(self.N, self.C), "dout": self.random(self.N, self.OC),
                "weight": self.random(self.OC, self.C)}

    def oracle(self, t):
        inp = np.zeros_like(t.dinp)
        dweight = np.empty_like(t.weight)
        train_gpt2.matmul_backward(t.dinp, dweight, None, t.dout, inp, t.weight, self.B, self.T,
                                   self.C, self.OC)

    def library(self, t):
        return lambda: {"dinp": t.dout @ t.weight}

    def by_cublaslt(self, multiply, *operands):
        multiply(*operands)

    cublaslt = Matmul.cublaslt
    thread_an_element = Matmul.thread_an_element
    live = Matmul.live


class MatmulBackwardWeight(Matmul):
    """dweight = dout^T @ inp"""

    name = "matmul_backward_weight"
    signature = ("dweight", "dout", "inp")
    ours = staticmethod(lambda a, matmul: Linear(matmul, None, None,
                                                 a.dweight).backward_weight(a.dout, a.inp, 1.0, 1))

    def tensors(self):
        return {"dweight": self.unwritten(self.OC, self.C, dtype=self.precision.grads),
                "dout": self.random(self.N, self.OC), "inp": self.random(self.N, self.C)}

    def oracle(self, t):
        dinp = np.empty_like(t.inp)
        weight = np.zeros_like(t.dweight)
        train_gpt2.matmul_backward(dinp, t.dweight, None, t.dout, t.inp, weight, self.B, self.T,
                                   self.C, self.OC)

    def library(self, t):
        return lambda: {"dweight": t.dout.T @ t.inp}

    def by_cublaslt(self, multiply, dweight, dout, inp):
        multiply(dweight, dout.T, inp)

    cublaslt = Matmul.cublaslt
    thread_an_element = Matmul.thread_an_element
    live = Matmul.live
