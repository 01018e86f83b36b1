"""FP8: matmuls of 8-bit operands, and their scales. Micikevicius et al. 2022,
https://arxiv.org/abs/2209.05433.

In a run of --dtype fp8, three of a layer's four matmuls and the classifier's, forward and backward,
read operands of 8 bits: x is stored as E4M3(x * scale), a gradient in E5M2, whose range is 2^14
times as wide. Each layer's input, weight and gradient of its output has a scale of its own, a power
of 2 that stays the same for an update, with all its micro-batches: it follows from the largest
numbers of the last 16 updates. They are found where a tensor is rounded, as an integer maximum,
which has the same bits in any order and on any number of GPUs. Weights are rounded once an update.
Gradients of logits are rounded stochastically, times a constant. All else is a bfloat16 run:
residual stream, attention and its projection, AdamW, and, between updates, validation: it is of the
model that will be saved.

Tensor cores want the inner dimension of 8-bit operands to be contiguous. For dinp = dout @ weight,
there is a transposed copy of the weight. Of dout and inp in dweight = dout^T @ inp, the wider one
is read as it is, (N,C), and transposed on the way to the tensor cores; the other one has a
transposed copy."""

import numpy as np

from llmc.gpu.device import copy_to_gpu, cp, pinned_array, pointer
from llmc.gpu.geometry import FP8_HISTORY, blocks
from llmc.gpu.matmul import WORKSPACE
from llmc.tensors import Row, allocate

# layers with FP8 operands; attproj is a twelfth of the work of GPT-2's
LINEARS = ("qkv", "fc", "fcproj")
ROLES = ("inp", "weight", "dout")  # their operands, with a scale each
CALIBRATIONS = 4  # passes that find the first scales
# times gradients of logits, which are from -1 to 1; E5M2 has numbers from 2^-16 to 57344
DLOGITS_SCALE = 2.0**15


def recomputed_inputs(architecture, settings):
    """The names of LINEARS whose input the backward pass recomputes."""
    recomputed = architecture.RECOMPUTED[settings.recompute]
    return [name for name in LINEARS if architecture.INPUTS[name] in recomputed]


def operand_table(parameters, N, recomputed):
    """name -> Row of the operands in 8 bits, for N rows, B*T. parameters: the model's table.
    Transposed copies, _t, are padded with zeros to whole 16 bytes. recomputed: names of LINEARS
    whose input is kept for one layer at a time."""
    pitch = blocks(N, 16) * 16
    shapes = {name: parameters[f"{name}w"].shape for name in LINEARS}
    shapes["logits"] = 1, *parameters.get("lm_head", parameters["wte"]).shape
    table = {}
    for name, (L, OC, C) in shapes.items():
        kept = 1 if name in recomputed else L
        table[f"{name}w"] = Row((L, OC, C), "uint8", stacked=True)
        table[f"{name}w_t"] = Row((L, C, OC), "uint8")
        if name == "fcproj":
            table["fcproj_inp"] = Row((kept, N, C), "uint8")
            table["fcproj_dout_t"] = Row((OC, pitch), "uint8")
        else:
            table[f"{name}_inp_t"] = Row((kept, C, pitch), "uint8")
        if name != "logits":  # whose gradient takes the place of the logits
            table[f"{name}_dout"] = Row((N, OC), "uint8")

    table["inp"] = Row((N, shapes["qkv"][2]), "uint8")  # of the matmul at hand, but for fcproj's
    return table


def scale_table(L):
    """name -> Row of the scales and what they follow from; column (i * L + l) * 3 + r is for
    LINEARS[i] of layer l and ROLES[r]; the last three are the classifier's, "logits"."""
    count = (len(LINEARS) * L + 1) * len(ROLES)
    return {
        "counts": Row((2,), "int64"),
        "scales": Row((count,)),
        "history": Row((FP8_HISTORY, count)),
        "largest": Row((count,), "int32"),
        "updates": Row((1,), "int32"),
    }


class Fp8:
    """The operands and scales of a model in training."""

    def __init__(self, matmul, params, operands, recomputed=(), fuses_gelu=True):
        """params: Tensors on the GPU; operands, recomputed: see operand_table; fuses_gelu: fc's
        epilogue makes fcproj's input, fcproj's backward pass fc's gradient. Allocates the scales on
        the current stream."""
        self.device = matmul.device
        self.matmul = matmul
        self.params = params
        self.operands = operands
        self.recomputed = recomputed
        self.fuses_gelu = fuses_gelu
        self.L = params.table["qkvw"].shape[0]

        self.state = allocate(scale_table(self.L), cp)
        self.state.scales.fill(1.0)

        # halves of tiles that fit into a workspace
        tiles = WORKSPACE // (4 * 64 * self.device.geometry.MATMUL_BN)
        self.done = cp.zeros((2, tiles), np.int32)
        # counts of updates with even and odd numbers
        self.reports = pinned_array(32).view(np.int64).reshape(2, 2)

        self.updates = 0  # before this run
        self.trains = False  # whether this pass is part of an update: the others are in bfloat16
        # whether an update has changed the weights since they were quantized
        self.weights_behind = False
        self.douts = {}  # matmul's name -> its dout in 8 bits, between its two uses

    def slot(self, name, l, role):
        """l of the classifier, "logits": 0."""
        return ((*LINEARS, "logits").index(name) * self.L + l) * len(ROLES) + ROLES.index(role)

    def scale(self, name, l, role):
        slot = self.slot(name, l, role)
        return self.state.scales[slot : slot + 1]

    def quantize(self, name, l, role, x, plain=None, transposed=None, again=False):
        """plain (N,C), transposed (C,pitch) = x * scale in 8 bits, each if not None; x (N,C), or all
        of several layers from l on, each with its scale. again: for the second time in an update,
        so that amax is not updated."""
        *_, N, C = x.shape
        g = self.device.geometry
        grid = blocks(C, g.FP8_SIDE), blocks(N, g.FP8_SIDE), x.size // (N * C)
        self.device.launch("quantize", grid, (g.FP8_THREADS,), plain, transposed, x,
                           *self.scaling(name, l, role, again), N, C,
                           N if transposed is None else transposed.shape[-1],
                           ROLES.index(role), len(ROLES))

    def quantize_weights(self, layers=slice(0, None), again=False):
        """The matrices of some layers, after an update has changed them. again: rank 0 records
        their amax."""
        weights = {name: getattr(self.params, f"{name}w")[layers] for name in LINEARS}
        if layers.start == 0:
            weights["logits"] = getattr(self.params, "lm_head", self.params.wte)[np.newaxis]
        for name, weight in weights.items():
            plain, transposed = (getattr(self.operands, f"{name}w{t}")[layers] for t in ("", "_t"))
            self.quantize(name, layers.start, "weight", weight, plain, transposed, again)

    def calibrate(self, trainer):
        """Find the first scales, unless a checkpoint had them: with the batch that is on the GPU,
        again and again, because too small a scale underflows, and so does everything downstream."""
        for _ in range(0 if self.updates else CALIBRATIONS):
            self.state.updates.fill(0)  # the last one's numbers replace the earlier ones'
            self.quantize_weights()
            trainer.model.micro_step(trainer, 0)
            if not trainer.ranks.is_first:  # the same scales on any number of GPUs
                self.forget()
            self.prepare_scales(trainer.messages)
        self.updates = self.updates or 1

    def prepare_scales(self, messages):
        """At the end of an update: the scales of the next one, from the largest numbers on all
        ranks."""
        state = self.state
        messages.add_up(state.largest, state.largest, largest=True)
        messages.add_up(state.counts, state.counts)
        self.device.launch("prepare_scales", (1,), (256,), state.scales, state.history,
                           state.largest, state.updates, state.counts, pointer(self.reports),
                           state.scales.size)

    def counts(self, number):
        """(how many numbers of this run's update `number` are the largest of 8 bits, 448 or 57344, or
        NaN, how many are 0)."""
        return tuple(self.reports[(self.updates + number) % 2].tolist())

    def forget(self):
        """Discard amax and counts after a calibration pass."""
        self.state.largest.fill(0)
        self.state.counts.fill(0)

    def notes(self):
        """For a checkpoint."""
        with self.device.stream:
            history = self.state.history.get()
            scales = self.state.scales.get()
            updates = self.state.updates.get()
        return {"fp8": {
            "updates": int(updates[0]),
            "history": history.tobytes().hex(),
            "scales": scales.tobytes().hex(),
        }}

    def restore(self, notes):
        """Continue with a checkpoint's notes, if they are of a run in FP8 of this model; returns
        whether they are."""
        found = notes.get("fp8")
        state = self.state
        if not found or len(found["history"]) != 2 * state.history.nbytes:
            return False
        self.updates = found["updates"]
        with self.device.stream:
            for name in ("history", "scales"):
                numbers = np.frombuffer(bytes.fromhex(found[name]), np.float32)
                copy_to_gpu(getattr(state, name), numbers)
            copy_to_gpu(state.updates, np.array([self.updates], np.int32))
        return True

    # -- the kernels of hopper/matmul_fp8.cu

    def multiply(self, out, a, a_scale, b, b_scale, bias=None, scale=1.0, kernel="matmul_fp8"):
        """out (M,N) = scale * a (M,K) @ b (N,K)^T + bias (N,), each operand divided by its scale.
        kernel: "matmul_fp8_inp" if a is a gradient."""
        self.matmul.kernels.forward(out, a, b, bias, a_scale, b_scale, float(scale), name=kernel,
                                    columns=self.matmul.tile(out.shape[1], narrow=True))

    def multiply_qknorm(self, out, rstd, a, a_scale, b, b_scale, bias, *last):
        """multiply's out (M,N), with QK-norm; rstd (M,2NH). last: rope, scale, eps and T, of
        qknorm_forward."""
        kernels = self.matmul.kernels
        columns = self.device.geometry.MATMUL_FP8_GELU_BN
        kernels.launch("matmul_fp8_qknorm", *out.shape, a.shape[1], kernels.result(out, True), rstd,
                       *self.operands_of(a, b, columns), bias, a_scale, b_scale, *last,
                       columns=columns, threads=self.device.geometry.MATMUL_GELU_THREADS)

    def multiply_gelu(self, out, gelu, a, a_scale, b, b_scale, bias, scaling):
        """out (M,N), and gelu (M,N) in 8 bits = GELU(out) * its scale. scaling: the arguments for
        its scale."""
        kernels = self.matmul.kernels
        columns = self.device.geometry.MATMUL_FP8_GELU_BN
        kernels.launch("matmul_fp8_gelu", *out.shape, a.shape[1], kernels.result(out, True),
                       kernels.result(gelu, True), *self.operands_of(a, b, columns), bias, a_scale,
                       b_scale, *scaling, columns=columns,
                       threads=self.device.geometry.MATMUL_GELU_THREADS)

    def multiply_gelu_backward(self, dinp, partials, a, a_scale, b, b_scale, inp, gelu, gelu_scale,
                               scaling):
        """dinp (M,N) in 8 bits = a (M,K) @ b (N,K)^T * GELU'(inp (M,N)) * its scale; partials
        (tiles,N): column sums. Of squared ReLU, gelu (M,N) is read, in 8 bits, not inp."""
        kernels = self.matmul.kernels
        columns = self.device.geometry.MATMUL_FP8_GELU_BN
        kernels.launch("matmul_fp8_gelu_backward", *inp.shape, a.shape[1],
                       kernels.result(dinp, True), partials, *self.operands_of(a, b, columns),
                       kernels.result(inp, True), kernels.result(gelu, True), a_scale, b_scale,
                       gelu_scale, *scaling, columns=columns,
                       threads=self.device.geometry.MATMUL_GELU_THREADS)

    def multiply_long(self, kernel, out, a, a_scale, b, b_scale, scale, splits=None):
        """out (M,N) = scale * a^T @ b (N,K)^T, a (K,M) a gradient, with sums in float32; K is cut
        into `splits` parts. kernel: "weight"; "weight_across", whose out is (N,M), and the gradient
        is b; "classifier_inp", whose a is (M,K)."""
        M, N = out.shape[::-1] if kernel == "weight_across" else out.shape
        K = b.shape[1]
        kernels = self.matmul.kernels
        side = int(self.device.stream is self.device.side)
        columns = self.device.geometry.MATMUL_FP8_LONG_BN
        kernels.launch(f"matmul_fp8_{kernel}", M, N, K, out, self.matmul.stream_workspace(),
                       self.done[side], *self.operands_of(a, b, columns), a_scale, b_scale,
                       float(scale), columns=columns, splits=splits or kernels.splits(M, N, K, columns))

    def operands_of(self, a, b, columns):
        kernels = self.matmul.kernels
        return kernels.operand(a, self.device.geometry.MATMUL_BM), kernels.operand(b, columns)

    def scaling(self, name, l, role, again=False):
        """The arguments of a kernel that makes an operand: its scale, amax (None if it makes the
        operand `again`), and counts of numbers too large and too small."""
        slot = self.slot(name, l, role)
        state = self.state
        return state.scales[slot:], None if again else state.largest[slot:], state.counts
