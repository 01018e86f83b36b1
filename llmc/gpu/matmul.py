"""Matmuls on the GPU. Linears makes the linear layers of a run; Matmul chooses between our kernels
and cuBLASLt, by a rule."""

import math
from typing import NamedTuple

from llmc.gpu.cublaslt import WORKSPACE, CublasLt
from llmc.gpu.device import cp
from llmc.gpu.geometry import blocks, hopper_matmul
from llmc.tensors import Row, table_bytes, views

ALIGN = 256  # bytes, of tensors; cuBLASLt's fastest algorithms ask for it


class Quantized(NamedTuple):
    """A tensor in 8 bits (llmc/gpu/fp8.py), as matmuls read it, or where a kernel writes it."""

    plain: object  # (N,C), or None
    transposed: object  # (C,pitch), or None
    scaling: tuple = ()  # to write it: what Fp8.scaling returns


class Linear(NamedTuple):
    """A linear layer, out (N,OC) = inp (N,C) @ weight (OC,C)^T + bias (OC,). Rows may have any
    shape: (B,T,C)."""

    matmul: object
    weight: object  # (OC, C)
    bias: object = None  # (OC,), or None
    dweight: object = None  # (OC, C), or None: there is no backward pass

    # whether there are kernels with SwiGLU and RoPE, in hopper/matmul_swiglu.cu; with GELU; in 8
    # bits, with QK-norm
    fuses = fuses_gelu = property(lambda self: bool(self.matmul.kernels))
    fuses_qknorm = False

    def forward(self, out, inp, columns=None):
        """out (N,OC) = inp (N,C) @ weight^T + bias. columns: by our kernels, with tiles so wide."""
        matmul = self.matmul
        out = rows(out)
        inp = rows(inp)
        if tile := columns or matmul.tile(out.shape[1], narrow=True):
            matmul.kernels.forward(out, inp, self.weight, self.bias, columns=tile)
        else:
            matmul.cublaslt.multiply(out, inp, self.weight.T, self.bias)

    def forward_gelu(self, out, gelu, inp):
        """The same, and gelu (N,OC) = GELU(out), by our kernels."""
        kernels = self.matmul.kernels
        g = self.matmul.device.geometry
        out = rows(out)
        inp = rows(inp)
        kernels.launch("matmul_forward_gelu", *out.shape, inp.shape[1], kernels.result(out),
                       kernels.result(rows(gelu)), kernels.operand(inp, g.MATMUL_BM),
                       kernels.operand(self.weight, g.MATMUL_BN), self.bias,
                       threads=g.MATMUL_GELU_THREADS)

    def backward_inp(self, dinp, dout, scale=1.0):
        """dinp (N,C) = scale * dout (N,OC) @ weight (OC,C)."""
        matmul = self.matmul
        dinp = rows(dinp)
        dout = rows(dout)
        if matmul.tile(dinp.shape[1]):
            kernels = matmul.kernels
            g = matmul.device.geometry
            kernels.launch("matmul_backward_inp", *dinp.shape, dout.shape[1], kernels.result(dinp),
                           kernels.operand(dout, g.MATMUL_BM),
                           kernels.operand(self.weight, g.MATMUL_BK), float(scale))
        else:
            matmul.cublaslt.multiply_in_chains(dinp, dout, self.weight, scale)

    def backward_inp_gelu(self, dinp, partials, dout, inp):
        """dinp (N,C) = dout (N,OC) @ weight (OC,C) * GELU'(inp (N,C)); partials (tiles, C) = dinp's
        sums over the rows of tiles. By our kernels."""
        kernels = self.matmul.kernels
        g = self.matmul.device.geometry
        dinp = rows(dinp)
        dout = rows(dout)
        kernels.launch("matmul_backward_inp_gelu", *dinp.shape, dout.shape[1], kernels.result(dinp),
                       partials, kernels.operand(dout, g.MATMUL_BM),
                       kernels.operand(self.weight, g.MATMUL_BK), kernels.result(rows(inp)))

    def forward_swiglu(self, out, swiglu, inp):
        """out (N,2F) = inp (N,C) @ weight (2F,C)^T: up, then gate; swiglu (N,F) = up * gate *
        sigmoid(gate). By our kernels, where `fuses`."""
        kernels = self.matmul.kernels
        g = self.matmul.device.geometry
        swiglu = rows(swiglu)
        inp = rows(inp)
        N, F = swiglu.shape
        C = inp.shape[1]
        columns = g.MATMUL_BN // 2  # of up, and as many of gate
        kernels.launch("matmul_forward_swiglu", N, F, C, kernels.halves(rows(out)),
                       kernels.result(swiglu, narrow=True), kernels.operand(inp, g.MATMUL_BM),
                       kernels.operand(self.weight.reshape(2, F, C), columns), columns=columns)

    def backward_inp_swiglu(self, dinp, dout, inp):
        """dinp (N,2F) = SwiGLU's gradient at inp (N,2F) for dout (N,OC) @ weight (OC,F). By our
        kernels, where `fuses`."""
        kernels = self.matmul.kernels
        g = self.matmul.device.geometry
        dout = rows(dout)
        C, F = self.weight.shape
        kernels.launch("matmul_backward_inp_swiglu", dout.shape[0], F, C,
                       kernels.halves(rows(dinp)), kernels.operand(dout, g.MATMUL_BM),
                       kernels.operand(self.weight, g.MATMUL_BK), kernels.halves(rows(inp)))

    def forward_rope(self, out, inp, rope, T):
        """out (N,QKV) = inp (N,C) @ weight^T, queries and keys rotated: row n is at position n % T
        of rope (T,HS/2,2). By our kernels, where `fuses` and has a tile for QKV columns."""
        matmul = self.matmul
        out = rows(out)
        tile = matmul.tile(out.shape[1], narrow=True)
        matmul.kernels.forward(out, rows(inp), self.weight, rope, T, columns=tile,
                               name="matmul_forward_rope")

    def backward_weight(self, dout, inp, scale=1.0, splits=None):
        """dweight (OC,C) = scale * dout (N,OC)^T @ inp (N,C). splits: by our kernel, which cuts N
        into so many parts (split-K)."""
        matmul = self.matmul
        kernels = self.matmul.kernels
        dout = rows(dout)
        inp = rows(inp)
        if splits or not matmul.cublaslt:
            sizes = *self.dweight.shape, len(inp)
            BK = matmul.device.geometry.MATMUL_BK
            kernels.launch("matmul_backward_weight", *sizes,
                           kernels.result(self.dweight, narrow=True), matmul.stream_workspace(),
                           kernels.done[int(matmul.device.stream is matmul.device.side)],
                           kernels.operand(dout, BK), kernels.operand(inp, BK), float(scale),
                           splits=splits or kernels.splits(*sizes))
        elif matmul.precision.bf16:
            matmul.cublaslt.multiply(self.dweight, dout.T, inp, scale=scale)
        else:
            matmul.cublaslt_transposed(self.dweight, dout, inp, scale)

    def operand(self, dout):
        """dout (N,OC) as backward_weight reads it: as it is."""
        return dout


def rows(array):
    return array.reshape(-1, array.shape[-1])


class Linears:
    """The linear layers of a run in bfloat16 or float32, and what 8 bits need at other moments of a
    step: here, nothing. Fp8Linears of fp8_linears.py has them in 8 bits."""

    operands = None  # Tensors in 8 bits

    def __init__(self, matmul):
        self.matmul = matmul

    def start(self, params, operands):
        """params, operands: Tensors on the GPU, once they are allocated."""

    def linear(self, name, l, weight, bias, dweight):
        """Layer l's linear layer `name`, or the classifier, "logits"."""
        return Linear(self.matmul, weight, bias, dweight)

    def dlogits_scale(self, scale):
        """A power of 2 near `scale`, which dlogits carry instead. A target's dlogit is about
        -scale: if that is no power of 2, bfloat16 rounds it alike in every row: a bias, 0.2 percent
        for 1/51."""
        return 2.0 ** round(math.log2(scale))

    # -- moments of a run

    def place(self, acts):
        """The activations of an update, with places for what is written in 8 bits: as they are."""
        return acts

    def calibrate(self, trainer):
        """Find the first scales. Here, there are none."""

    def forget(self):
        """Discard what a pass has found that is no part of an update. Here, nothing."""

    def step_begins(self):
        """An update is launched from here on. Here, nothing."""

    def weights_changed(self):
        """Since the last pass, outside of a step. Here, nothing is made of them."""

    def pass_begins(self, acts):
        """A forward pass begins. Here, nothing."""

    def layer_arrived(self, l, is_first):
        """Layer l's weights have come from other GPUs; is_first: on rank 0. Here, nothing is made
        of them."""

    def update_ends(self, messages):
        """The update is launched. Here, nothing."""

    # -- reports and checkpoints

    def counts(self, number):
        """Of update `number`: how many numbers were too large or too small for 8 bits. Here,
        None."""

    def notes(self):
        """For a checkpoint."""
        return {}

    def restore(self, notes):
        """Continue with a checkpoint's notes; returns whether they have what this run needs."""
        return True


def workspace_table(elements):
    """name -> Row: scratch of matmuls on the main stream, and on the side stream; and
    cublaslt_transposed's."""
    table = {"workspace": Row((2, WORKSPACE), "uint8")}
    return table | {"transposed": Row((elements,))} if elements else table


class Matmul:
    """Selects the kernel for a matmul. library "auto": in bfloat16 on Hopper, our kernels compute
    outputs and gradients of inputs whose width is a multiple of a tile's, and whatever is fused
    with GELU or SwiGLU; all else is cuBLASLt's first proposal: gradients of weights, other widths,
    other GPUs, float32. "kernels", on Hopper in bfloat16 alone: all by our kernels. "cublaslt":
    none."""

    def __init__(self, device, precision, library="auto"):
        self.device = device
        self.precision = precision
        ours = hopper_matmul(precision, device.gpu.arch) and library != "cublaslt"
        self.kernels = MatmulKernels(device) if ours else None
        self.cublaslt = None
        if library != "kernels":
            self.cublaslt = CublasLt(device, precision, self.stream_workspace)

    def start(self, workspaces):
        """workspaces: Tensors of workspace_table on the GPU."""
        self.workspace = workspaces.workspace
        self.transposed = getattr(workspaces, "transposed", None)

    def allocate(self, elements=0):
        """Allocate the workspaces, outside of a trainer's plan."""
        table = workspace_table(elements)
        self.start(views(table, cp.empty(table_bytes(table), "uint8")))

    def stream_workspace(self):
        """The workspace of the current stream."""
        return self.workspace[int(self.device.stream is self.device.side)]

    def tile(self, columns, narrow=False):
        """How wide a tile of our kernels is for a result of `columns` columns; 0: cuBLASLt
        multiplies. narrow: there is a kernel with narrow tiles, too. 1280 and 1600 are multiples of
        160, but not of 192."""
        if not self.kernels:
            return 0
        g = self.device.geometry
        widths = (g.MATMUL_BN, g.MATMUL_NARROW_BN) if narrow else (g.MATMUL_BN,)
        otherwise = 0 if self.cublaslt else g.MATMUL_BN
        return next((width for width in widths if columns % width == 0), otherwise)

    def cublaslt_transposed(self, dweight, dout, inp, scale):
        """Linear.backward_weight in float32: the smaller operand is transposed first, because
        tensor cores want both with N as their inner dimension: see transpose.cu."""
        N, OC = dout.shape
        C = inp.shape[1]
        to = self.transposed[: min(C, OC) * N].reshape(-1, N)
        source, a, b = (inp, dout.T, to.T) if C <= OC else (dout, to, inp)

        g = self.device.geometry
        grid = blocks(source.shape[1], g.TRANSPOSE_SIDE), blocks(N, g.TRANSPOSE_SIDE)
        self.device.launch("transpose", grid, (g.TRANSPOSE_THREADS,), to, source, *source.shape)
        self.cublaslt.multiply(dweight, a, b, scale=scale)


class MatmulKernels:
    """How Linear launches the kernels of hopper/matmul.cu and hopper/matmul_swiglu.cu. Operands and
    results are row-major, two-dimensional."""

    def __init__(self, device):
        self.device = device
        self.geometry = device.geometry
        # tiles whose sums the workspace holds
        tiles = WORKSPACE // (4 * self.geometry.MATMUL_BM * self.geometry.MATMUL_BN)
        with self.device.stream:
            # for each stream: parts of a tile added so far; 0 after the last
            self.done = cp.zeros((2, tiles), "int32")

    def forward(self, out, inp, weight, *last, columns=None, name="matmul_forward"):
        """last: the bias; of matmul_forward_rope, rope and T. columns: how wide a tile is; None:
        MATMUL_BN."""
        g = self.geometry
        columns = columns or g.MATMUL_BN
        narrow = columns != g.MATMUL_BN
        self.launch(name + "_narrow" * narrow, *out.shape, inp.shape[1], self.result(out, narrow),
                    self.operand(inp, g.MATMUL_BM), self.operand(weight, columns), *last,
                    columns=columns)

    def splits(self, OC, C, N, columns=None):
        """Into how many parts to cut N so that the tiles' parts fill the multiprocessors. A part
        costs as much as 1500 rows beside its own, on an H100. columns: as in `forward`."""
        g = self.geometry
        sm_count = self.device.sm_count
        tiles = blocks(OC, g.MATMUL_BM) * blocks(C, columns or g.MATMUL_BN)
        if tiles > min(2 * sm_count, self.done.shape[1]):
            return 1

        def cost(parts):
            return blocks(tiles * parts, sm_count) * (N / parts + 1500)

        most = max(1, min(11, N // 256))
        return min(range(1, most + 1), key=cost)

    def operand(self, array, rows):
        """An operand as the kernels take it: TMA copies 128 bytes of `rows` rows at once, BK
        columns of bfloat16."""
        return self.device.tensor_map(array, rows, 2 * self.geometry.MATMUL_BK // array.itemsize)

    def result(self, array, narrow=False):
        """A result, or an operand of its shape, as the kernels take it: TMA copies a strip of a
        tile at once."""
        g = self.geometry
        strip = g.MATMUL_NARROW_STRIP if narrow else g.MATMUL_STRIP
        return self.device.tensor_map(array, g.MATMUL_BM, strip)

    def halves(self, array):
        """A tensor of up, then gate, as the kernels take it: TMA copies a strip of one of them at
        once."""
        g = self.geometry
        N, columns = array.shape
        halves = array.reshape(N, 2, columns // 2)
        return self.device.tensor_map(halves, 1, g.MATMUL_NARROW_STRIP, g.MATMUL_BM)

    def launch(self, name, M, N, K, *arguments, columns=None, splits=None, threads=None):
        g = self.geometry
        across = blocks(N, columns or g.MATMUL_BN)
        band = 32 if across > 64 else 8  # rows of tiles done together, to share operands in L2
        grid = min(blocks(M, g.MATMUL_BM) * across * (splits or 1), self.device.sm_count)
        self.device.launch(name, (grid,), (threads or g.MATMUL_THREADS,), *arguments, M, N, K, band,
                           *([splits] if splits else []))
