"""FP8: matmuls of E4M3 operands, their scales, and the rounding in NumPy. Micikevicius et al. 2022,
https://arxiv.org/abs/2209.05433.

In a run of --dtype fp8, three of a layer's four matmuls, forward and backward, and the classifier's forward pass read
operands of 8 bits: x is stored as E4M3(x * scale). Each layer's input, weight and gradient of its output has a scale of
its own, a power of 2 that stays the same for an update, with all its micro-batches: it follows from the largest numbers
of the last 16 updates. They are found where a tensor is rounded, as an integer maximum, which has the same bits in any
order and on any number of GPUs. All else is a bfloat16 run: residual stream, attention and its projection, gradients of
the logits, AdamW.
"""

from typing import NamedTuple

import numpy as np

from llmc.gpu.device import copy_to_gpu, cp, pinned_array, pointer
from llmc.gpu.geometry import blocks
from llmc.gpu.matmul import ALIGN, WORKSPACE, rows
from llmc.tensors import Row, allocate, table_bytes, views

LINEARS = ("qkv", "fc", "fcproj")  # layers with FP8 operands; attproj is a twelfth of the work
ROLES = ("inp", "weight", "dout")  # their operands, with a scale each
HISTORY = 16  # updates whose largest numbers a scale follows from
LARGEST, SMALLEST = 448.0, 2.0**-9  # numbers of E4M3

# ----------------------------------------------------------------------------------------------------------------------
# the specification of kernels/fp8.cu


def round_e4m3(x):
    """x as float32, rounded to the numbers of E4M3: to nearest, ties to even, saturating; NaN stays NaN."""
    x = np.clip(np.asarray(x, np.float32), -LARGEST, LARGEST)
    _, exponent = np.frexp(x)
    step = np.ldexp(np.float32(1.0), np.maximum(exponent, -5) - 4)  # of numbers with 3 bits after the leading one
    return np.rint(x / step) * step


def decode_e4m3(bits):
    """(...) uint8 -> (...) float32: 1 bit of sign, 4 of exponent, 3 of mantissa."""
    exponent, mantissa = (bits >> 3 & 15).astype(np.int32), (bits & 7).astype(np.float32)
    size = np.where(exponent == 0, mantissa * SMALLEST, np.ldexp(8.0 + mantissa, exponent - 10))
    return np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -size, size)).astype(np.float32)


# Where the numbers of each 16 along the inner dimension of a matmul are stored; kernels/fp8.cuh tells why.
COLUMN_ORDER = np.array([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])  # (N,C), and weights in both copies
ROW_ORDER = np.arange(16).reshape(2, 8).T.ravel()  # transposed copies of all else: 0, 8, 1, 9 ...


def natural(stored, order):
    """(...,n), n a multiple of 16, as stored in COLUMN_ORDER or ROW_ORDER -> the same in natural order."""
    return stored.reshape(*stored.shape[:-1], -1, 16)[..., np.argsort(order)].reshape(stored.shape)


def next_scales(history, scales):
    """history (HISTORY,n): the largest numbers of updates -> the scales (n,) of the next one. Half of E4M3's range is
    left for what grows; without a history, a scale stays as it is."""
    most = history.max(axis=0)
    with np.errstate(divide="ignore", over="ignore"):
        highest = np.minimum(np.float32(LARGEST / 2) / most, np.float32(2.0**100))
    powers = (highest.view(np.int32) & 0x7F800000).view(np.float32)  # without the mantissa
    return np.where(most > 0, powers, scales)


# ----------------------------------------------------------------------------------------------------------------------
# on a GPU


def operand_table(parameters, N, recomputed):
    """name -> Row of the operands in 8 bits, for N rows, B*T. parameters: the model's table. Transposed copies, _t, are
    padded with zeros to whole 16 bytes. recomputed: names of LINEARS whose input is kept for one layer at a time."""
    shapes, pitch = {name: parameters[f"{name}w"].shape for name in LINEARS}, blocks(N, 16) * 16
    table = {"inp": Row((N, max(shapes[name][2] for name in ("qkv", "fc"))), "uint8"),  # of the layer at hand
             "act": Row((N, shapes["fcproj"][2]), "uint8"),  # fcproj's
             "logitsw": parameters.get("lm_head", parameters["wte"])._replace(dtype="uint8")}
    for name, (L, OC, C) in shapes.items():
        table |= {f"{name}w": Row((L, OC, C), "uint8", stacked=True), f"{name}w_t": Row((L, C, OC), "uint8"),
                  f"{name}_inp_t": Row((1 if name in recomputed else L, C, pitch), "uint8"),
                  f"{name}_dout": Row((N, OC), "uint8"), f"{name}_dout_t": Row((OC, pitch), "uint8")}
    return table


def operand_bytes(parameters, N, recomputed):
    return table_bytes(operand_table(parameters, N, recomputed), ALIGN)


def scale_table(L):
    """name -> Row of the scales and what they follow from; column (i * L + l) * 3 + r is for LINEARS[i] of layer l and
    ROLES[r]; the last three are the classifier's."""
    count = (len(LINEARS) * L + 1) * len(ROLES)
    return {"counts": Row((2,), "int64"), "scales": Row((count,)), "history": Row((HISTORY, count)),
            "largest": Row((count,), "int32"), "updates": Row((1,), "int32")}


class Fp8:
    """The operands and scales of a model in training."""

    def __init__(self, matmul, params, N, recomputed=(), fuses_gelu=True):
        """params: Tensors on the GPU; N, recomputed: see operand_table; fuses_gelu: fc's epilogue makes fcproj's input,
        fcproj's backward pass fc's gradient. Allocates on the current stream."""
        self.device, self.matmul, self.params, self.fuses_gelu = matmul.device, matmul, params, fuses_gelu
        self.L, self.recomputed = params.table["qkvw"].shape[0], recomputed
        table = operand_table(params.table, N, recomputed)
        self.operands = views(table, cp.empty(table_bytes(table, ALIGN), np.uint8), ALIGN)
        self.state = allocate(scale_table(self.L), cp)
        self.state.scales.fill(1.0)
        tiles = WORKSPACE // (4 * 64 * self.device.geometry.MATMUL_BN)  # halves of tiles that fit into a workspace
        self.done = cp.zeros((2, tiles), np.int32)
        self.reports = pinned_array(32).view(np.int64).reshape(2, 2)  # counts of updates with even and odd numbers
        self.updates = 0  # before this run
        self.records = False  # whether this pass is part of an update: its largest numbers and counts are noted

    def linear(self, name, l, bias, dweight):
        return Fp8Linear(self, name, l, bias, dweight)

    def slot(self, name, l, role):
        """l of the classifier, "logits": 0."""
        return ((*LINEARS, "logits").index(name) * self.L + l) * len(ROLES) + ROLES.index(role)

    def scale(self, name, l, role):
        slot = self.slot(name, l, role)
        return self.state.scales[slot : slot + 1]

    def quantise(self, name, l, role, x, plain=None, transposed=None, again=False):
        """plain (N,C), transposed (C,pitch) = E4M3(x * scale), each if not None; x (N,C), or all of several layers from
        l on, each with its scale. again: it was noted before."""
        g, (*_, N, C), (scale, largest, counts) = self.device.geometry, x.shape, self.noted(name, l, role)
        grid = blocks(C, g.FP8_SIDE), blocks(N, g.FP8_SIDE), x.size // (N * C)
        self.device.launch("quantise", grid, (g.FP8_THREADS,), plain, transposed, x, scale, None if again else largest,
                           counts, N, C, N if transposed is None else transposed.shape[-1], int(role == "weight"),
                           len(ROLES))

    def quantise_weights(self, layers=slice(0, None)):
        """The matrices of some layers, after an update has changed them."""
        for name in LINEARS:
            plain, transposed = (getattr(self.operands, f"{name}w{t}")[layers] for t in ("", "_t"))
            self.quantise(name, layers.start, "weight", getattr(self.params, f"{name}w")[layers], plain, transposed)
        if layers.start == 0:
            weight = self.params.lm_head if "lm_head" in self.params.table else self.params.wte
            self.quantise("logits", 0, "weight", weight, self.operands.logitsw)

    def prepare_scales(self):
        """At the end of an update: the scales of the next one."""
        state = self.state
        self.device.launch("prepare_scales", (1,), (256,), state.scales, state.history, state.largest, state.updates,
                           state.counts, pointer(self.reports), state.scales.size)

    def counts(self, number):
        """(how many numbers of this run's update `number` are +-448 or NaN in 8 bits, how many are 0)."""
        return tuple(self.reports[(self.updates + number) % 2].tolist())

    def forget(self):
        """Of a pass that was no update: the largest numbers and counts."""
        self.state.largest.fill(0)
        self.state.counts.fill(0)

    def notes(self):
        """For a checkpoint."""
        with self.device.stream:
            history, scales, updates = (getattr(self.state, name).get() for name in ("history", "scales", "updates"))
        return {"fp8": {"updates": int(updates[0]), "history": history.tobytes().hex(),
                        "scales": scales.tobytes().hex()}}

    def restore(self, notes):
        """Continue with a checkpoint's notes, if they are of a run in FP8 of this model; returns whether they are."""
        found, state = notes.get("fp8"), self.state
        if not found or len(found["history"]) != 2 * state.history.nbytes:
            return False
        self.updates = found["updates"]
        with self.device.stream:
            for name in ("history", "scales"):
                copy_to_gpu(getattr(state, name), np.frombuffer(bytes.fromhex(found[name]), np.float32))
            copy_to_gpu(state.updates, np.array([self.updates], np.int32))
        return True

    # -- the kernels of hopper/matmul_fp8.cu

    def multiply(self, out, a, a_scale, b, b_scale, bias=None, scale=1.0):
        """out (M,N) = scale * a (M,K) @ b (N,K)^T + bias (N,), in the operands' own units."""
        kernels, columns, narrow = self.matmul.kernels, *self.columns(out.shape[1])
        kernels.launch("matmul_fp8" + "_narrow" * narrow, *out.shape, a.shape[1], kernels.result(out, narrow),
                       *self.operands_of(a, b, columns), bias, a_scale, b_scale, float(scale), columns=columns)

    def multiply_gelu(self, out, gelu, a, a_scale, b, b_scale, bias, noted):
        """out (M,N), and gelu, a Quantised, = GELU(out) * its scale. noted: the arguments for its scale."""
        kernels, columns = self.matmul.kernels, self.device.geometry.MATMUL_FP8_GELU_BN
        kernels.launch("matmul_fp8_gelu", *out.shape, a.shape[1], kernels.result(out, True),
                       *self.results(gelu), *self.operands_of(a, b, columns), bias, a_scale, b_scale, *noted,
                       columns=columns)

    def multiply_gelu_backward(self, dinp, partials, a, a_scale, b, b_scale, inp, noted):
        """dinp, a Quantised, = a (M,K) @ b (N,K)^T * GELU'(inp (M,N)) * its scale; partials (tiles,N): column sums."""
        kernels, columns = self.matmul.kernels, self.device.geometry.MATMUL_FP8_GELU_BN
        kernels.launch("matmul_fp8_gelu_backward", *inp.shape, a.shape[1], *self.results(dinp), partials,
                       *self.operands_of(a, b, columns), kernels.result(inp, True), a_scale, b_scale, *noted,
                       columns=columns)

    def multiply_long(self, dweight, a, a_scale, b, b_scale, scale, splits=None):
        """dweight (M,N) = scale * a (M,K) @ b (N,K)^T, with sums in float32; K is cut into `splits` parts."""
        kernels, g, (M, N), K = self.matmul.kernels, self.device.geometry, dweight.shape, a.shape[1]
        side = int(self.device.stream is self.device.side)
        kernels.launch("matmul_fp8_weight", M, N, K, dweight, self.matmul.workspace[side], self.done[side],
                       *self.operands_of(a, b, g.MATMUL_BN), a_scale, b_scale, float(scale),
                       splits=splits or kernels.splits(M, N, K))

    def columns(self, N):
        """(columns of a tile, whether they are the narrow ones) for a result of N columns."""
        g = self.device.geometry
        narrow = N % g.MATMUL_BN > 0 and N % g.MATMUL_NARROW_BN == 0
        return g.MATMUL_NARROW_BN if narrow else g.MATMUL_BN, narrow

    def operands_of(self, a, b, columns):
        g = self.device.geometry
        return [self.device.tensor_map(x, n, 2 * g.MATMUL_BK) for x, n in ((a, g.MATMUL_BM), (b, columns))]

    def results(self, quantised):
        g, tensor_map = self.device.geometry, self.device.tensor_map
        return (tensor_map(quantised.plain, g.MATMUL_BM, g.MATMUL_NARROW_STRIP),
                tensor_map(quantised.transposed, g.MATMUL_NARROW_STRIP, g.MATMUL_BM))

    def noted(self, name, l, role):
        """The arguments of a kernel that makes an operand: its scale, and where it notes the largest number and counts.
        """
        slot, state = self.slot(name, l, role), self.state
        return state.scales[slot:], state.largest[slot:] if self.records else None, state.counts


class Quantised(NamedTuple):
    """A tensor in 8 bits, as matmuls read it, or where a kernel writes it."""

    plain: object  # (N,C); to write: or None
    transposed: object  # (C,pitch), likewise
    noted: tuple = ()  # to write: what Fp8.noted returns


class Fp8Linear(NamedTuple):
    """Linear of matmul.py in 8 bits. The input's transposed copy stays from forward to backward_weight."""

    fp8: Fp8
    name: str
    l: int
    bias: object
    dweight: object

    fuses = False

    @property
    def fuses_gelu(self):
        return self.fp8.fuses_gelu

    def place_inp(self, inp, again=False):
        """Where a normalization writes inp (N,C): a Quantised, transposed if there will be a backward pass. again: for
        that pass alone, which recomputes it."""
        fp8, (scale, largest, counts) = self.fp8, self.fp8.noted(self.name, self.l, "inp")
        if again:
            return Quantised(None, self.inp_transposed, (scale, None, counts))
        kept = self.inp_transposed if fp8.records and self.name not in fp8.recomputed else None
        return Quantised(self.plain_inp(rows(inp).shape), kept, (scale, largest, counts))

    def forward(self, out, inp):
        """out (N,OC) = inp @ weight^T + bias. inp: a Quantised, or (N,C), not read if fc's forward_gelu has made it."""
        self.fp8.multiply(rows(out), self.quantised_inp(inp), self.scale("inp"), self.tensor("w")[self.l],
                          self.scale("weight"), self.bias)

    def forward_gelu(self, out, gelu, inp):
        """The same, and fcproj's input = GELU(out); gelu (N,OC): not written."""
        fcproj, out = self.fp8.linear("fcproj", self.l, None, None), rows(out)
        result = Quantised(fcproj.plain_inp(out.shape), fcproj.inp_transposed)
        self.fp8.multiply_gelu(out, result, self.quantised_inp(inp), self.scale("inp"), self.tensor("w")[self.l],
                               self.scale("weight"), self.bias, self.fp8.noted("fcproj", self.l, "inp"))

    def quantised_inp(self, inp):
        """inp, as of forward -> its plain copy in 8 bits, which is made if it is not there yet."""
        if isinstance(inp, Quantised):
            return inp.plain
        to = self.place_inp(inp)
        if not (self.name == "fcproj" and self.fp8.fuses_gelu):
            self.fp8.quantise(self.name, self.l, "inp", rows(inp), to.plain, to.transposed)
        return to.plain

    def plain_inp(self, shape):
        room = self.fp8.operands.act if self.name == "fcproj" else self.fp8.operands.inp
        return room.reshape(-1)[: shape[0] * shape[1]].reshape(shape)

    def place_dout(self, dout):
        """Where attention_backward writes dout (B,T,OC): a Quantised, or dout, if its kernels do not write 8 bits.
        TMA wants each sequence to begin at a multiple of 16 bytes of a transposed row."""
        if dout.shape[1] % 16 or not hasattr(self.fp8.device.geometry, "ATTENTION_FP8"):
            return dout
        return Quantised(self.tensor("_dout"), self.tensor("_dout_t"), self.fp8.noted(self.name, self.l, "dout"))

    def operand(self, dout):
        """dout (N,OC), or what `place_dout` returned, as backward_inp and backward_weight take it. dout of fc: not read
        if fcproj's backward_inp_gelu has made it."""
        if isinstance(dout, Quantised):
            return dout
        quantised = Quantised(self.tensor("_dout"), self.tensor("_dout_t"))
        if not (self.name == "fc" and self.fp8.fuses_gelu):
            self.fp8.quantise(self.name, self.l, "dout", rows(dout), quantised.plain, quantised.transposed)
        return quantised

    def backward_inp(self, dinp, dout, scale=1.0):
        """dinp (N,C) = scale * dout @ weight (OC,C)."""
        self.fp8.multiply(rows(dinp), dout.plain, self.scale("dout"), self.tensor("w_t")[self.l], self.scale("weight"),
                          scale=scale)

    def backward_inp_gelu(self, dinp, partials, dout, inp):
        """fc's gradient = dout @ weight * GELU'(inp (N,C)), partials = its column sums; dinp (N,C): not written."""
        fc, inp = self.fp8.linear("fc", self.l, None, None), rows(inp)
        result = Quantised(fc.tensor("_dout"), fc.tensor("_dout_t"))
        self.fp8.multiply_gelu_backward(result, partials, dout.plain, self.scale("dout"), self.tensor("w_t")[self.l],
                                        self.scale("weight"), inp, self.fp8.noted("fc", self.l, "dout"))

    def backward_weight(self, dout, inp, transposed=None, scale=1.0):
        """dweight (OC,C) = scale * dout^T @ inp. inp (N,C): read only if it is fcproj's and was recomputed."""
        if self.name == "fcproj" and self.name in self.fp8.recomputed:
            self.fp8.quantise(self.name, self.l, "inp", rows(inp), None, self.inp_transposed, again=True)
        self.fp8.multiply_long(self.dweight, dout.transposed, self.scale("dout"), self.inp_transposed,
                               self.scale("inp"), scale)

    def tensor(self, suffix):
        return getattr(self.fp8.operands, self.name + suffix)

    @property
    def inp_transposed(self):
        kept = self.tensor("_inp_t")
        return kept[self.l % len(kept)]

    def scale(self, role):
        return self.fp8.scale(self.name, self.l, role)


class Fp8Head(NamedTuple):
    """The classifier: forward in 8 bits, backward in bfloat16, as dlogits are."""

    fp8: Fp8
    bf16: object  # its Linear

    def forward(self, out, inp):
        """out (N,Vp) = inp (N,C) @ weight^T."""
        fp8, inp = self.fp8, rows(inp)
        plain = fp8.operands.inp.reshape(-1)[: inp.size].reshape(inp.shape)
        fp8.quantise("logits", 0, "inp", inp, plain)
        scales = [fp8.scale("logits", 0, role) for role in ("inp", "weight")]
        fp8.multiply(rows(out), plain, scales[0], fp8.operands.logitsw, scales[1])

    @property
    def backward_inp(self):
        return self.bf16.backward_inp

    @property
    def backward_weight(self):
        return self.bf16.backward_weight
