"""
Matmuls in the kernel library: the three that training needs, at the shape of fc (C -> 4C), and the two with GELU in the
epilogue: fc, and fcproj's dinp with GELU's derivative and the sums for fc's bias gradient. lab.py says what a layer is.

The kernels are in matmul.cu, and the forward kernels for Hopper alone in matmul_hopper.cu. The last versions are live:
`live` on Hopper in bfloat16, mma_sync otherwise. cublaslt is the library, and row 0 of the tables: the fastest of the
algorithms that cuBLASLt proposes, searched before timing, as train_gpt2_cuda.py does, and followed by the kernel of
gelu.cu where there is GELU. PyTorch's row after it is cuBLAS's own choice. In float32, all versions with tensor cores
round operands to TF32.
"""

import contextlib
import math

import torch.nn.functional as F

from lab import BF16, SHAPES, SUMS, SWEEP, Layer, blocks, cuda, np, torch, train_gpt2, version
from llmc.gpu.geometry import hopper_matmul

TF32 = 2e-3  # what rounding operands to TF32 costs, as in tests/test_kernels.py
BAND = 8  # rows of tiles that persistent blocks finish before the next rows
TILES = {64: 8, 256: 16, 1024: 32}  # threads of a block -> rows and columns of its tile


@contextlib.contextmanager
def cublaslt_of(lab):
    """Yield a Matmul with cuBLASLt only, whose first call for a shape searches for the fastest algorithm."""
    matmul, kernels = lab.matmul, lab.matmul.kernels
    matmul.kernels, matmul.searching = None, True
    try:
        yield matmul
    finally:
        matmul.kernels, matmul.searching = kernels, False


class Matmul(Layer):
    """What the matmuls share. A layer has a `result`, `operands`, the result first, and `sizes` M, N, K: the result is
    (M,N), K the inner dimension."""

    file, library_version = "matmul", "cublaslt"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.OC = 4 * self.C
        # the product of two bfloat16 numbers is exact
        self.checked = {self.result: SUMS if self.precision.bf16 else TF32}

    def flops(self):
        return 2 * self.N * self.C * self.OC

    def on_hopper(self, block):
        return hopper_matmul(self.precision, self.gpu.arch)

    # Versions for subclasses, which list them in the order of their ladders.

    @version(*TILES)
    def thread_an_element(self, lab, a, block):
        """Neighbouring threads take neighbouring rows."""
        M, N, _ = self.sizes
        tile = TILES[block]
        lab.launch(f"{self.name}_thread_an_element", (blocks(M, tile), blocks(N, tile)), (tile, tile),
                   *self.operands(a), *self.sizes)

    @version(*TILES)
    def shared_tiles(self, lab, a, block):
        M, N, _ = self.sizes
        tile = TILES[block]
        lab.launch(f"{self.name}_shared_tiles", (blocks(N, tile), blocks(M, tile)), (tile, tile), *self.operands(a),
                   *self.sizes, shared=2 * tile * (tile + 1) * 4)

    @version(256)
    def register_tiles(self, lab, a, block):
        M, N, _ = self.sizes
        lab.launch(f"{self.name}_register_tiles", (blocks(N, 128), blocks(M, 128)), (block,), *self.operands(a),
                   *self.sizes)


class MatmulForward(Matmul):
    """out = inp @ weight^T + bias"""

    name, uses, result = "matmul_forward", ("matmul_hopper",), "out"

    @property
    def sizes(self):
        return self.N, self.OC, self.C

    def operands(self, a):
        return a.out, a.inp, a.weight, a.bias

    def tensors(self):
        return {"out": self.unwritten(self.N, self.OC), "inp": self.random(self.N, self.C),
                "weight": self.random(self.OC, self.C), "bias": self.random(self.OC)}

    def oracle(self, t):
        train_gpt2.matmul_forward(t.out, t.inp, t.weight, t.bias, self.B, self.T, self.C, self.OC)

    def library(self, t):
        return lambda: {"out": F.linear(t.inp, t.weight, t.bias)}

    def hopper_launch(self, lab, a, kernel, tall, wide, grid, block, stages, *band):
        """Launch a kernel of matmul_hopper.cu: tiles of tall x wide, and `stages` steps of both operands in shared
        memory."""
        maps = lab.device.tensor_map(a.inp, 128, 64), lab.device.tensor_map(a.weight, wide, 64)
        lab.launch(f"matmul_forward_{kernel}", grid, (block,), a.out, *maps, a.bias, *self.sizes, *band,
                   shared=stages * (tall + wide) * 64 * 2)

    def tile_a_block(self, lab, a, kernel, tall, wide, block, stages):
        self.hopper_launch(lab, a, kernel, tall, wide, (blocks(self.OC, wide), blocks(self.N, tall)), block, stages)

    thread_an_element = Matmul.thread_an_element

    @version(*SWEEP)
    def coalesced(self, lab, a, block):
        lab.launch("matmul_forward_coalesced", (blocks(self.N * self.OC, block // 32),), (block,), *self.operands(a),
                   *self.sizes)

    shared_tiles = Matmul.shared_tiles
    register_tiles = Matmul.register_tiles

    @version(256)
    def mma_sync(self, lab, a, block):
        lab.portable.kernels.forward(*self.operands(a))

    @version(128, fits=Matmul.on_hopper)
    def wgmma_tma(self, lab, a, block):
        self.tile_a_block(lab, a, "wgmma_tma", 128, 128, block, 3)

    @version(128, fits=Matmul.on_hopper)
    def tiles_128x192(self, lab, a, block):
        self.tile_a_block(lab, a, "tiles_128x192", 128, 192, block, 2)

    @version(256, fits=Matmul.on_hopper)
    def tiles_128x256(self, lab, a, block):
        self.tile_a_block(lab, a, "tiles_128x256", 128, 256, block, 4)

    @version(256, fits=Matmul.on_hopper)
    def larger_tiles(self, lab, a, block):
        self.tile_a_block(lab, a, "larger_tiles", 256, 192, block, 4)

    @version(384, fits=Matmul.on_hopper)
    def producer_consumer(self, lab, a, block):
        tiles = blocks(self.OC, 192) * blocks(self.N, 256)
        self.hopper_launch(lab, a, "producer_consumer", 256, 192, (tiles,), block, 4, 1)

    @version(384, fits=Matmul.on_hopper)
    def persistent(self, lab, a, block):
        tiles = blocks(self.OC, 192) * blocks(self.N, 256)
        self.hopper_launch(lab, a, "producer_consumer", 256, 192, (min(tiles, lab.sm_count),), block, 4, BAND)

    @version(384, fits=Matmul.on_hopper)
    def cluster_multicast(self, lab, a, block):
        pairs = blocks(self.OC, 2 * 192) * blocks(self.N, 256)
        self.hopper_launch(lab, a, "cluster_multicast", 256, 192, (2 * min(pairs, lab.sm_count // 2),), block, 4, BAND)

    @version(384, fits=Matmul.on_hopper)
    def live(self, lab, a, block):
        lab.matmul.kernels.forward(*self.operands(a))

    @version(384, fits=Matmul.on_hopper)
    def live_narrow(self, lab, a, block):
        lab.matmul.kernels.forward(*self.operands(a), narrow=True)

    @version(384)
    def cublaslt(self, lab, a, block):
        with cublaslt_of(lab) as matmul:
            cuda.matmul_forward(matmul, *self.operands(a), self.N, self.C, self.OC)


class MatmulForwardGelu(Matmul):
    """out = inp @ weight^T + bias, gelu = GELU(out)"""

    name, result = "matmul_forward_gelu", "out"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        # GELU of the stored out, which is rounded already
        self.checked["gelu"] = 2 * BF16 if self.precision.bf16 else TF32

    def operands(self, a):
        return a.out, a.gelu, a.inp, a.weight, a.bias

    def tensors(self):
        # this spread puts out where GELU is neither 0 nor its input
        return {"out": self.unwritten(self.N, self.OC), "gelu": self.unwritten(self.N, self.OC),
                "inp": self.random(self.N, self.C),
                "weight": self.random(self.OC, self.C, spread=1 / math.sqrt(self.C)), "bias": self.random(self.OC)}

    def oracle(self, t):
        train_gpt2.matmul_forward(t.out, t.inp, t.weight, t.bias, self.B, self.T, self.C, self.OC)
        train_gpt2.gelu_forward(t.gelu, t.out, t.out.size)

    def library(self, t):
        def call():
            out = F.linear(t.inp, t.weight, t.bias)
            return {"out": out, "gelu": F.gelu(out, approximate="tanh")}

        return call

    @version(256)
    def mma_sync(self, lab, a, block):
        lab.portable.kernels.gelu_forward(*self.operands(a))

    @version(512, fits=Matmul.on_hopper)
    def live(self, lab, a, block):
        lab.matmul.kernels.gelu_forward(*self.operands(a))

    @version(384)
    def cublaslt(self, lab, a, block):
        with cublaslt_of(lab) as matmul:
            cuda.matmul_gelu_forward(matmul, *self.operands(a), self.N, self.C, self.OC)


class MatmulBackwardInp(Matmul):
    """dinp = dout @ weight"""

    name, result = "matmul_backward_inp", "dinp"

    @property
    def sizes(self):
        return self.N, self.C, self.OC

    def operands(self, a):
        return a.dinp, a.dout, a.weight

    def tensors(self):
        return {"dinp": self.unwritten(self.N, self.C), "dout": self.random(self.N, self.OC),
                "weight": self.random(self.OC, self.C)}

    def oracle(self, t):
        inp, dweight = np.zeros_like(t.dinp), np.empty_like(t.weight)
        train_gpt2.matmul_backward(t.dinp, dweight, None, t.dout, inp, t.weight, self.B, self.T, self.C, self.OC)

    def library(self, t):
        return lambda: {"dinp": t.dout @ t.weight}

    thread_an_element = Matmul.thread_an_element
    shared_tiles = Matmul.shared_tiles
    register_tiles = Matmul.register_tiles

    @version(256)
    def mma_sync(self, lab, a, block):
        lab.portable.kernels.backward_inp(*self.operands(a), 1.0)

    @version(384, fits=Matmul.on_hopper)
    def live(self, lab, a, block):
        lab.matmul.kernels.backward_inp(*self.operands(a), 1.0)

    @version(384, fits=Matmul.on_hopper)
    def live_narrow(self, lab, a, block):
        lab.matmul.kernels.backward_inp(*self.operands(a), 1.0, narrow=True)

    @version(384)
    def cublaslt(self, lab, a, block):
        with cublaslt_of(lab) as matmul:
            cuda.matmul_backward_inp(matmul, *self.operands(a), self.N, self.C, self.OC)


class MatmulBackwardInpGelu(Matmul):
    """dinp = dout @ weight * GELU'(pre), sums = the column sums of dinp, a row of them for each tile"""

    name, result = "matmul_backward_inp_gelu", "dinp"
    partial = ("sums",)  # our kernels sum 128 rows each, those of gelu.cu an equal share of the rows

    def __init__(self, *arguments):
        super().__init__(*arguments)
        # cuBLASLt's result is stored, and so rounded, before GELU's derivative is applied. The sums add up such errors,
        # of either sign.
        self.checked = dict.fromkeys(("dinp", "sums"), 2 * BF16 if self.precision.bf16 else TF32)

    def operands(self, a):
        return a.dinp, a.sums, a.dout, a.weight, a.pre

    def tensors(self):
        rows = self.sum_rows().gelu
        return {"dinp": self.unwritten(self.N, self.OC), "sums": self.unwritten(rows, self.OC, dtype="float32"),
                "dout": self.random(self.N, self.C), "weight": self.random(self.C, self.OC),
                "pre": self.random(self.N, self.OC)}

    def oracle(self, t):
        dgelu, inp, dweight = np.empty_like(t.dinp), np.zeros_like(t.dinp), np.empty_like(t.weight)
        train_gpt2.matmul_backward(dgelu, dweight, None, t.dout, inp, t.weight, self.B, self.T, self.OC, self.C)
        train_gpt2.gelu_backward(t.dinp, t.pre, dgelu, t.dinp.size)
        t.sums[:] = np.add.reduceat(t.dinp, range(0, self.N, self.geometry.MATMUL_BM))

    def library(self, t):
        def call():
            dinp = torch.ops.aten.gelu_backward(t.dout @ t.weight, t.pre, approximate="tanh")
            return {"dinp": dinp, "sums": dinp.sum(dim=0, dtype=torch.float32)}

        return call

    @version(256)
    def mma_sync(self, lab, a, block):
        lab.portable.kernels.gelu_backward_inp(*self.operands(a))

    @version(384, fits=Matmul.on_hopper)
    def live(self, lab, a, block):
        lab.matmul.kernels.gelu_backward_inp(*self.operands(a))

    @version(384)
    def cublaslt(self, lab, a, block):
        dinp, sums, *operands = self.operands(a)
        with cublaslt_of(lab) as matmul:  # None: GELU(pre) is not recomputed
            cuda.matmul_gelu_backward_inp(matmul, dinp, sums, None, *operands, self.N, self.OC, self.C)


class MatmulBackwardWeight(Matmul):
    """dweight = dout^T @ inp"""

    name, result = "matmul_backward_weight", "dweight"
    shapes = (*SHAPES, (3, 1024))  # the last one has enough rows for 11 parts

    @property
    def sizes(self):
        return self.OC, self.C, self.N

    def operands(self, a):
        return a.dweight, a.dout, a.inp

    def tensors(self):
        return {"dweight": self.unwritten(self.OC, self.C, dtype=self.precision.grads),
                "dout": self.random(self.N, self.OC), "inp": self.random(self.N, self.C)}

    def oracle(self, t):
        dinp, weight = np.empty_like(t.inp), np.zeros_like(t.dweight)
        train_gpt2.matmul_backward(dinp, t.dweight, None, t.dout, t.inp, weight, self.B, self.T, self.C, self.OC)

    def library(self, t):
        return lambda: {"dweight": t.dout.T @ t.inp}

    def way(self, kernels, a, name):
        """Launch our kernels (a MatmulKernels) in the way of that name."""
        kernels.backward_weight_ways(*self.operands(a), 1.0)[name]()

    def has_few_tiles(self, block):
        return self.on_hopper(block) and blocks(self.OC, 128) * blocks(self.C, 192) <= 2 * self.gpu.sm_count

    def can_split(self, block):
        """Whether the live kernel's launcher would consider 11 parts: few tiles, and enough rows for each part."""
        return self.has_few_tiles(block) and self.N >= 11 * 256

    thread_an_element = Matmul.thread_an_element
    shared_tiles = Matmul.shared_tiles
    register_tiles = Matmul.register_tiles

    @version(256)
    def mma_sync(self, lab, a, block):
        self.way(lab.portable.kernels, a, "kernels 1")

    @version(384, fits=Matmul.on_hopper)
    def live(self, lab, a, block):
        self.way(lab.matmul.kernels, a, "kernels 1")

    @version(384, fits=has_few_tiles)
    def live_narrow(self, lab, a, block):
        self.way(lab.matmul.kernels, a, "kernels 1 narrow")

    @version(384, fits=can_split)
    def live_in_4_parts(self, lab, a, block):
        self.way(lab.matmul.kernels, a, "kernels 4")

    @version(384, fits=can_split)
    def live_in_11_parts(self, lab, a, block):
        self.way(lab.matmul.kernels, a, "kernels 11")

    @version(384)
    def cublaslt(self, lab, a, block):
        with cublaslt_of(lab) as matmul:  # None: no operand is transposed first
            cuda.matmul_backward_weight(matmul, *self.operands(a), None, self.N, self.C, self.OC)
