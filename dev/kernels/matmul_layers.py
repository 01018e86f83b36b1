"""
Matrix products in the kernel library: the three that training needs, at the shape of fc (C -> 4C). See lab.py for what a layer is.

The kernels are in matmul.cu, and those of the forward pass that only Hopper has in matmul_hopper.cu. The last versions are live:
mma_sync on all GPUs but Hopper's in bfloat16, `live` there. cublaslt is the fastest of the algorithms that cuBLASLt proposes, searched
before anything is timed, as train_gpt2_cuda.py does; in float32, it rounds operands to TF32, as do the live kernels. It has block sizes
of its own, and stands in the tables with that of `live`. PyTorch's row is cuBLAS's own choice, and in float32 not rounded.
"""

import contextlib
from types import SimpleNamespace

import torch.nn.functional as F

from lab import SHAPES, SUMS, SWEEP, Layer, blocks, cuda, np, train_gpt2, version

TF32 = 2e-3  # what rounding operands to TF32 costs, as in tests/test_kernels.py
BAND = 8  # rows of tiles that blocks which stay take in turns
TILES = {64: 8, 256: 16, 1024: 32}  # threads of a block -> rows and columns of its tile


class PortableProducts(cuda.MatmulKernels):
    """The live kernels of other GPUs than Hopper's, as train_gpt2_cuda.py launches them there; matmul.cu has them under other names."""

    def __init__(self, lab):
        device = SimpleNamespace(
            gpu=SimpleNamespace(arch="sm_80"), precision=lab.precision, sm_count=lab.sm_count, stream=lab.stream, side=lab.side,
            functions={name: SimpleNamespace() for name in cuda.KERNELS["matmul"]},
            launch=lambda kernel, *arguments, **work: lab.launch(f"{kernel}_mma", *arguments, **work))
        super().__init__(device, lab.products)


def portable(lab, a):
    a.portable = getattr(a, "portable", None) or PortableProducts(lab)
    return a.portable


@contextlib.contextmanager
def searched(lab):
    """cuBLASLt's products; the first call of a shape searches for its fastest algorithm."""
    lab.products.searching = True
    try:
        yield lab.products.cublaslt
    finally:
        lab.products.searching = False


class Matmul(Layer):
    """What the three products share. A layer has a `result`, `operands`, the result first, and `sizes`: M and N of the result, K of the
    inner dimension."""

    file = "matmul"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.OC = 4 * self.C
        self.checked = {self.result: SUMS if self.precision.bf16 else TF32}  # products of bfloat16 operands are exact

    def flops(self):
        return 2 * self.N * self.C * self.OC

    def on_hopper(self, block):
        return cuda.matmul_hopper(self.gpu.arch, self.precision)

    # Versions of every subclass, which lists them in the order of its ladder.

    @version(*TILES)
    def thread_an_element(self, lab, a, block):
        """Neighbouring threads take neighbouring rows."""
        M, N, _ = self.sizes
        tile = TILES[block]
        lab.launch(f"{self.name}_thread_an_element", (blocks(M, tile), blocks(N, tile)), (tile, tile), *self.operands(a), *self.sizes)

    @version(*TILES)
    def shared_tiles(self, lab, a, block):
        M, N, _ = self.sizes
        tile = TILES[block]
        lab.launch(f"{self.name}_shared_tiles", (blocks(N, tile), blocks(M, tile)), (tile, tile), *self.operands(a), *self.sizes,
                   shared=2 * tile * (tile + 1) * 4)

    @version(256)
    def register_tiles(self, lab, a, block):
        M, N, _ = self.sizes
        lab.launch(f"{self.name}_register_tiles", (blocks(N, 128), blocks(M, 128)), (block,), *self.operands(a), *self.sizes)


class MatmulForward(Matmul):
    """out = inp @ weight^T + bias"""

    name, uses, result = "matmul_forward", ("matmul_hopper",), "out"

    @property
    def sizes(self):
        return self.N, self.OC, self.C

    def operands(self, a):
        return a.out, a.inp, a.weight, a.bias

    def tensors(self):
        return {"out": self.unwritten(self.N, self.OC), "inp": self.random(self.N, self.C), "weight": self.random(self.OC, self.C),
                "bias": self.random(self.OC)}

    def oracle(self, t):
        train_gpt2.matmul_forward(t.out, t.inp, t.weight, t.bias, self.B, self.T, self.C, self.OC)

    def library(self, t):
        return lambda: {"out": F.linear(t.inp, t.weight, t.bias)}

    def hopper_launch(self, lab, a, kernel, tall, wide, grid, block, stages, *band):
        """A kernel of matmul_hopper.cu: tiles of so many rows and columns, and so many steps of both operands in shared memory."""
        maps = lab.tensor_map(a.inp, 128, 64), lab.tensor_map(a.weight, wide, 64)
        lab.launch(f"matmul_forward_{kernel}", grid, (block,), a.out, *maps, a.bias, *self.sizes, *band,
                   shared=stages * (tall + wide) * 64 * 2)

    def tile_a_block(self, lab, a, kernel, tall, wide, block, stages):
        self.hopper_launch(lab, a, kernel, tall, wide, (blocks(self.OC, wide), blocks(self.N, tall)), block, stages)

    thread_an_element = Matmul.thread_an_element

    @version(*SWEEP)
    def coalesced(self, lab, a, block):
        lab.launch("matmul_forward_coalesced", (blocks(self.N * self.OC, block // 32),), (block,), *self.operands(a), *self.sizes)

    shared_tiles = Matmul.shared_tiles
    register_tiles = Matmul.register_tiles

    @version(256)
    def mma_sync(self, lab, a, block):
        portable(lab, a).forward(self.name, *self.operands(a), self.N, self.C, self.OC)

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
        lab.products.kernels.forward(self.name, *self.operands(a), self.N, self.C, self.OC)

    @version(384)
    def cublaslt(self, lab, a, block):
        with searched(lab) as cublaslt:
            cublaslt.forward(self.name, *self.operands(a), self.N, self.C, self.OC)


class MatmulBackwardInp(Matmul):
    """dinp = dout @ weight"""

    name, result = "matmul_backward_inp", "dinp"

    @property
    def sizes(self):
        return self.N, self.C, self.OC

    def operands(self, a):
        return a.dinp, a.dout, a.weight

    def tensors(self):
        return {"dinp": self.unwritten(self.N, self.C), "dout": self.random(self.N, self.OC), "weight": self.random(self.OC, self.C)}

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
        portable(lab, a).backward_inp(self.name, *self.operands(a), self.N, self.C, self.OC)

    @version(384, fits=Matmul.on_hopper)
    def live(self, lab, a, block):
        lab.products.kernels.backward_inp(self.name, *self.operands(a), self.N, self.C, self.OC)

    @version(384)
    def cublaslt(self, lab, a, block):
        with searched(lab) as cublaslt:
            cublaslt.backward_inp(self.name, *self.operands(a), self.N, self.C, self.OC)


class MatmulBackwardWeight(Matmul):
    """dweight = dout^T @ inp"""

    name, result = "matmul_backward_weight", "dweight"
    shapes = (*SHAPES, (3, 1024))  # the last one is long enough for 11 parts

    @property
    def sizes(self):
        return self.OC, self.C, self.N

    def operands(self, a):
        return a.dweight, a.dout, a.inp

    def tensors(self):
        return {"dweight": self.unwritten(self.OC, self.C, dtype=self.precision.grads), "dout": self.random(self.N, self.OC),
                "inp": self.random(self.N, self.C)}

    def oracle(self, t):
        dinp, weight = np.empty_like(t.inp), np.zeros_like(t.dweight)
        train_gpt2.matmul_backward(dinp, t.dweight, None, t.dout, t.inp, weight, self.B, self.T, self.C, self.OC)

    def library(self, t):
        return lambda: {"dweight": t.dout.T @ t.inp}

    def ways(self, products, a):
        """{way: call(accumulate)} of one class of products; none of them needs a transposed operand here."""
        return products.backward_weight(self.name, *self.operands(a), None, self.N, self.C, self.OC, 1.0)

    def can_split(self, block):
        """Whether the live kernel's launcher would consider 11 parts: there are few tiles, and rows enough for each part."""
        return self.on_hopper(block) and self.N >= 11 * 256 and blocks(self.OC, 128) * blocks(self.C, 192) <= 2 * self.gpu.sm_count

    thread_an_element = Matmul.thread_an_element
    shared_tiles = Matmul.shared_tiles
    register_tiles = Matmul.register_tiles

    @version(256)
    def mma_sync(self, lab, a, block):
        self.ways(portable(lab, a), a)["kernels 1"](0)

    @version(384, fits=Matmul.on_hopper)
    def live(self, lab, a, block):
        self.ways(lab.products.kernels, a)["kernels 1"](0)

    @version(384, fits=can_split)
    def live_in_4_parts(self, lab, a, block):
        self.ways(lab.products.kernels, a)["kernels 4"](0)

    @version(384, fits=can_split)
    def live_in_11_parts(self, lab, a, block):
        self.ways(lab.products.kernels, a)["kernels 11"](0)

    @version(384)
    def cublaslt(self, lab, a, block):
        with searched(lab) as cublaslt:
            self.ways(cublaslt, a)["direct"](0)
