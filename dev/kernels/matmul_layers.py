"""
Matmuls in the kernel library: the three that training needs, at the shape of fc (C -> 4C), and the two with GELU in the
epilogue: fc, and fcproj's dinp with GELU's derivative and the sums for fc's bias gradient. lab.py says what a layer is.

The kernels are in matmul.cu, and the forward kernels for Hopper alone in matmul_hopper.cu. The last rungs are live:
`live` on Hopper in bfloat16, mma_sync otherwise. cublaslt is the library, and row 0 of the tables: cuBLASLt's first
proposal, followed by the kernel of gelu.cu where there is GELU. PyTorch's row after it is cuBLAS's own choice. In
float32, all rungs with tensor cores round operands to TF32.
"""

import math

import torch.nn.functional as F

from lab import BF16, SHAPES, SUMS, SWEEP, TF32, Layer, Rung, blocks, cuda, np, rung, torch, train_gpt2
from llmc.gpu.geometry import hopper_matmul

BAND = 8  # rows of tiles that persistent blocks finish before the next rows
TILES = {64: 8, 256: 16, 1024: 32}  # threads of a block -> rows and columns of its tile


def on_hopper(layer, block):
    return hopper_matmul(layer.precision, layer.gpu.arch)


def on_hopper_by(call, threads=384, fits=on_hopper):
    """A rung of the live kernels for Hopper: call(kernels, *operands), kernels: a MatmulKernels."""
    return Rung(lambda layer, lab, a, block: call(lab.matmul.kernels, *layer.given(a)), (threads,), fits)


def anywhere_by(call):
    """The same of the live kernels for every GPU."""
    return Rung(lambda layer, lab, a, block: call(lab.portable.kernels, *layer.given(a)), (256,))


def library_by(call):
    """A rung of cuBLASLt: call(multiply, Device, *operands)."""
    return Rung(lambda layer, lab, a, block: call(lab.matmul.cublaslt.multiply, lab.device, *layer.given(a)), (384,))


class Matmul(Layer):
    """What the matmuls share. `signature` has the operands, the result first."""

    file, library_rung = "matmul", "cublaslt"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.OC = 4 * self.C
        self.inner = {"matmul_backward_inp": self.OC, "matmul_backward_weight": self.N}.get(self.name, self.C)
        # the product of two bfloat16 numbers is exact
        self.checked = {self.signature[0]: SUMS if self.precision.bf16 else TF32}

    def flops(self):
        return 2 * self.N * self.C * self.OC

    def tiles(self, a, side):
        """Tiles of side x side along the result's rows, and along its columns."""
        return [blocks(size, side) for size in getattr(a, self.signature[0]).shape]

    def arguments(self, a):
        return *self.given(a), *getattr(a, self.signature[0]).shape, self.inner

    # Rungs for subclasses, which list them in the order of their ladders.

    @rung(*TILES)
    def thread_an_element(self, lab, a, block):
        """Neighbouring threads take neighbouring rows."""
        tile = TILES[block]
        lab.launch(f"{self.name}_thread_an_element", (*self.tiles(a, tile),), (tile, tile), *self.arguments(a))

    @rung(*TILES)
    def shared_tiles(self, lab, a, block):
        tile = TILES[block]
        lab.launch(f"{self.name}_shared_tiles", (*self.tiles(a, tile)[::-1],), (tile, tile), *self.arguments(a),
                   shared=2 * tile * (tile + 1) * 4)

    @rung(256)
    def register_tiles(self, lab, a, block):
        lab.launch(f"{self.name}_register_tiles", (*self.tiles(a, 128)[::-1],), (block,), *self.arguments(a))


class MatmulForward(Matmul):
    """out = inp @ weight^T + bias"""

    name, uses, signature = "matmul_forward", ("matmul_hopper",), ("out", "inp", "weight", "bias")

    def tensors(self):
        return {"out": self.unwritten(self.N, self.OC), "inp": self.random(self.N, self.C),
                "weight": self.random(self.OC, self.C), "bias": self.random(self.OC)}

    def sizes(self):
        return self.B, self.T, self.C, self.OC

    def library(self, t):
        return lambda: {"out": F.linear(t.inp, t.weight, t.bias)}

    def hopper_launch(self, lab, a, kernel, tall, wide, grid, block, stages, *band):
        """Launch a kernel of matmul_hopper.cu: tiles of tall x wide, and `stages` steps of both operands in shared
        memory."""
        maps = lab.device.tensor_map(a.inp, 128, 64), lab.device.tensor_map(a.weight, wide, 64)
        lab.launch(f"matmul_forward_{kernel}", grid, (block,), a.out, *maps, a.bias, self.N, self.OC, self.C, *band,
                   shared=stages * (tall + wide) * 64 * 2)

    def tile_a_block(kernel, tall, wide, threads, stages):
        return Rung(lambda self, lab, a, block: self.hopper_launch(
            lab, a, kernel, tall, wide, (blocks(self.OC, wide), blocks(self.N, tall)), block, stages), (threads,),
                    on_hopper)

    thread_an_element = Matmul.thread_an_element

    @rung(*SWEEP)
    def coalesced(self, lab, a, block):
        lab.launch("matmul_forward_coalesced", (blocks(self.N * self.OC, block // 32),), (block,), *self.arguments(a))

    shared_tiles, register_tiles = Matmul.shared_tiles, Matmul.register_tiles
    mma_sync = anywhere_by(lambda kernels, *operands: kernels.forward(*operands))
    wgmma_tma = tile_a_block("wgmma_tma", 128, 128, 128, 3)
    tiles_128x192 = tile_a_block("tiles_128x192", 128, 192, 128, 2)
    tiles_128x256 = tile_a_block("tiles_128x256", 128, 256, 256, 4)
    larger_tiles = tile_a_block("larger_tiles", 256, 192, 256, 4)

    @rung(384, fits=on_hopper)
    def producer_consumer(self, lab, a, block):
        tiles = blocks(self.OC, 192) * blocks(self.N, 256)
        self.hopper_launch(lab, a, "producer_consumer", 256, 192, (tiles,), block, 4, 1)

    @rung(384, fits=on_hopper)
    def persistent(self, lab, a, block):
        tiles = blocks(self.OC, 192) * blocks(self.N, 256)
        self.hopper_launch(lab, a, "producer_consumer", 256, 192, (min(tiles, lab.sm_count),), block, 4, BAND)

    @rung(384, fits=on_hopper)
    def cluster_multicast(self, lab, a, block):
        pairs = blocks(self.OC, 2 * 192) * blocks(self.N, 256)
        self.hopper_launch(lab, a, "cluster_multicast", 256, 192, (2 * min(pairs, lab.sm_count // 2),), block, 4, BAND)

    live = on_hopper_by(lambda kernels, *operands: kernels.forward(*operands))
    live_narrow = on_hopper_by(lambda kernels, *operands: kernels.forward(*operands, columns=160))
    cublaslt = library_by(lambda multiply, device, out, inp, weight, bias: multiply(out, inp, weight.T, bias))


class MatmulForwardGelu(Matmul):
    """out = inp @ weight^T + bias, gelu = GELU(out)"""

    name, signature = "matmul_forward_gelu", ("out", "gelu", "inp", "weight", "bias")

    def __init__(self, *arguments):
        super().__init__(*arguments)
        # GELU of the stored out, which is rounded already
        self.checked["gelu"] = 2 * BF16 if self.precision.bf16 else TF32

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

    mma_sync = anywhere_by(lambda kernels, *operands: kernels.gelu_forward(*operands))
    live = on_hopper_by(lambda kernels, *operands: kernels.gelu_forward(*operands), threads=512)

    @library_by
    def cublaslt(multiply, device, out, gelu, inp, weight, bias):
        multiply(out, inp, weight.T, bias)
        cuda.gelu_forward(device, gelu, out, *out.shape)


class MatmulBackwardInp(Matmul):
    """dinp = dout @ weight"""

    name, signature = "matmul_backward_inp", ("dinp", "dout", "weight")

    def tensors(self):
        return {"dinp": self.unwritten(self.N, self.C), "dout": self.random(self.N, self.OC),
                "weight": self.random(self.OC, self.C)}

    def oracle(self, t):
        inp, dweight = np.zeros_like(t.dinp), np.empty_like(t.weight)
        train_gpt2.matmul_backward(t.dinp, dweight, None, t.dout, inp, t.weight, self.B, self.T, self.C, self.OC)

    def library(self, t):
        return lambda: {"dinp": t.dout @ t.weight}

    thread_an_element, shared_tiles = Matmul.thread_an_element, Matmul.shared_tiles
    register_tiles = Matmul.register_tiles
    mma_sync = anywhere_by(lambda kernels, *operands: kernels.backward_inp(*operands, 1.0))
    live = on_hopper_by(lambda kernels, *operands: kernels.backward_inp(*operands, 1.0))
    cublaslt = library_by(lambda multiply, device, *operands: multiply(*operands))


class MatmulBackwardInpGelu(Matmul):
    """dinp = dout @ weight * GELU'(pre), sums = the column sums of dinp, a row of them for each tile"""

    name, signature = "matmul_backward_inp_gelu", ("dinp", "sums", "dout", "weight", "pre")
    partial = ("sums",)  # our kernels sum 128 rows each, those of gelu.cu an equal share of the rows

    def __init__(self, *arguments):
        super().__init__(*arguments)
        # cuBLASLt's result is stored, and so rounded, before GELU's derivative is applied. The sums add up such errors,
        # of either sign.
        self.checked = dict.fromkeys(("dinp", "sums"), 2 * BF16 if self.precision.bf16 else TF32)

    def tensors(self):
        rows = self.sum_rows().gelu
        return {"dinp": self.unwritten(self.N, self.OC), "sums": self.float32(rows, self.OC),
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

    mma_sync = anywhere_by(lambda kernels, *operands: kernels.gelu_backward_inp(*operands))
    live = on_hopper_by(lambda kernels, *operands: kernels.gelu_backward_inp(*operands))

    @library_by
    def cublaslt(multiply, device, dinp, sums, dout, weight, pre):
        multiply(dinp, dout, weight)
        cuda.gelu_backward(device, dinp, sums, None, pre, dinp, *dinp.shape)  # None: GELU(pre) is not recomputed


def has_few_tiles(layer, block):
    tiles = blocks(layer.OC, 128) * blocks(layer.C, 192)
    return on_hopper(layer, block) and tiles <= 2 * layer.gpu.sm_count


def can_split(layer, block):
    """Whether there are few tiles, and enough rows for 11 parts."""
    return has_few_tiles(layer, block) and layer.N >= 11 * 256


def parts(splits):
    """A call for on_hopper_by: the inner dimension in so many parts."""
    return lambda kernels, *operands: kernels.backward_weight(*operands, 1.0, splits)


class MatmulBackwardWeight(Matmul):
    """dweight = dout^T @ inp"""

    name, signature = "matmul_backward_weight", ("dweight", "dout", "inp")
    shapes = (*SHAPES, (3, 1024))  # the last one has enough rows for 11 parts

    def tensors(self):
        return {"dweight": self.unwritten(self.OC, self.C, dtype=self.precision.grads),
                "dout": self.random(self.N, self.OC), "inp": self.random(self.N, self.C)}

    def oracle(self, t):
        dinp, weight = np.empty_like(t.inp), np.zeros_like(t.dweight)
        train_gpt2.matmul_backward(dinp, t.dweight, None, t.dout, t.inp, weight, self.B, self.T, self.C, self.OC)

    def library(self, t):
        return lambda: {"dweight": t.dout.T @ t.inp}

    thread_an_element, shared_tiles = Matmul.thread_an_element, Matmul.shared_tiles
    register_tiles = Matmul.register_tiles
    mma_sync, live = anywhere_by(parts(1)), on_hopper_by(parts(1))
    live_in_4_parts, live_in_11_parts = (on_hopper_by(parts(splits), fits=can_split) for splits in (4, 11))
    cublaslt = library_by(lambda multiply, device, dweight, dout, inp: multiply(dweight, dout.T, inp))
