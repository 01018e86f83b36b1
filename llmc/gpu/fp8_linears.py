"""Linear layers in 8 bits, and what a run of --dtype fp8 does at other moments of a step. Their
operands, scales and kernels are in fp8.py."""

from typing import NamedTuple

import numpy as np

from llmc.gpu.fp8 import DLOGITS_SCALE, LINEARS, Fp8, recomputed_inputs
from llmc.gpu.matmul import Linears, Quantized, rows


class Fp8Linear(NamedTuple):
    """Linear of matmul.py in 8 bits: of LINEARS, or the classifier, "logits". dout is quantized at
    its first use, and remembered for the second. backward_weight reads a copy of the input,
    fcproj's as it is, the others' transposed: kept from forward on, or made again."""

    fp8: Fp8
    name: str
    l: int
    bias: object = None
    dweight: object = None

    fuses = False
    fuses_gelu = property(lambda self: self.fp8.fuses_gelu)
    fuses_qknorm = True

    def place_inp(self, again=False):
        """Where a normalization writes inp (N,C): a Quantized. again: for the backward pass, which
        recomputes it."""
        plain = None if again else self.fp8.operands.inp
        transposed = self.of_this_layer("_inp_t")
        if not again and self.name in self.fp8.recomputed:
            transposed = None
        return Quantized(plain, transposed, self.fp8.scaling(self.name, self.l, "inp", again))

    def forward(self, out, inp):
        """out (N,OC) = inp @ weight^T + bias. inp: a Quantized; fcproj's: (N,C), not read if fc's
        forward_gelu has made it."""
        plain = self.fcproj_inp(inp, made=self.fuses_gelu) if self.name == "fcproj" else inp.plain
        self.fp8.multiply(rows(out), plain, self.scale("inp"), self.of_this_layer("w"),
                          self.scale("weight"), self.bias)

    def forward_qknorm(self, out, rstd, inp, *last):
        """The same of qkv, with QK-norm: see multiply_qknorm."""
        self.fp8.multiply_qknorm(rows(out), rstd, inp.plain, self.scale("inp"),
                                 self.of_this_layer("w"), self.scale("weight"), self.bias, *last)

    def fcproj_inp(self, inp, made=False, again=False):
        """fcproj's input (N,C) in 8 bits, `made` already or not. again: see quantize."""
        plain = self.of_this_layer("_inp")
        if not made:
            self.fp8.quantize(self.name, self.l, "inp", rows(inp), plain, again=again)
        return plain

    def forward_gelu(self, out, gelu, inp):
        """`forward`, and fcproj's input = GELU(out); gelu (N,OC): not written."""
        fcproj = self._replace(name="fcproj")
        self.fp8.multiply_gelu(rows(out), fcproj.of_this_layer("_inp"), inp.plain,
                               self.scale("inp"), self.of_this_layer("w"), self.scale("weight"),
                               self.bias, self.fp8.scaling("fcproj", self.l, "inp"))

    def place_dout(self, dout):
        """Where attention_backward writes dout (B,T,OC): a Quantized, or dout, if its kernels do
        not write 8 bits."""
        if not self.fp8.device.geometry.ATTENTION_FP8:
            return dout
        return Quantized(self.tensor("_dout"), None, self.fp8.scaling(self.name, self.l, "dout"))

    def operand(self, dout):
        """dout (N,OC), or what `place_dout` returned, as a Quantized. dout of fc: not read if
        fcproj's backward_inp_gelu has made it; of the classifier: its kernel has made it, in place
        of the logits."""
        if isinstance(dout, Quantized):
            return dout
        if self.name == "logits":
            N, OC = rows(dout).shape
            return Quantized(dout.view(np.uint8).reshape(N, 2 * OC)[:, :OC], None)
        if made := self.fp8.douts.pop(self.name, None):  # the second use
            return made

        transposed = self.tensor("_dout_t") if self.name == "fcproj" else None
        made = Quantized(self.tensor("_dout"), transposed)
        if not (self.name == "fc" and self.fp8.fuses_gelu):
            self.fp8.quantize(self.name, self.l, "dout", rows(dout), made.plain, made.transposed)
        self.fp8.douts[self.name] = made
        return made

    def backward_inp(self, dinp, dout, scale=1.0):
        """dinp (N,C) = scale * dout @ weight (OC,C)."""
        dout = self.operand(dout).plain
        operands = dout, self.scale("dout"), self.of_this_layer("w_t"), self.scale("weight")
        if self.name == "logits":
            self.fp8.multiply_long("classifier_inp", rows(dinp), *operands, scale)
        else:
            self.fp8.multiply(rows(dinp), *operands, scale=scale, kernel="matmul_fp8_inp")

    def backward_inp_gelu(self, dinp, partials, dout, inp):
        """fc's gradient = dout @ weight * GELU'(inp (N,C)), partials = its column sums; dinp (N,C):
        not written."""
        self.fp8.multiply_gelu_backward(self.fp8.operands.fc_dout, partials,
                                        self.operand(dout).plain, self.scale("dout"),
                                        self.of_this_layer("w_t"), self.scale("weight"), rows(inp),
                                        self.of_this_layer("_inp"), self.scale("inp"),
                                        self.fp8.scaling("fc", self.l, "dout"))

    def backward_weight(self, dout, inp, scale=1.0):
        """dweight (OC,C) = scale * dout^T @ inp. inp (N,C): read only if it is fcproj's and was
        recomputed."""
        dout = self.operand(dout)
        dout_scale = self.scale("dout")
        inp_scale = self.scale("inp")
        if self.name == "fcproj":
            inp = self.fcproj_inp(inp, made=self.name not in self.fp8.recomputed, again=True)
            self.fp8.multiply_long("weight_across", self.dweight, inp, inp_scale, dout.transposed,
                                   dout_scale, scale)
        else:
            self.fp8.multiply_long("weight", self.dweight, dout.plain, dout_scale,
                                   self.of_this_layer("_inp_t"), inp_scale, scale)

    def tensor(self, suffix):
        return getattr(self.fp8.operands, self.name + suffix)

    def of_this_layer(self, suffix):
        """This layer's part of a tensor, or the only one."""
        layers = self.tensor(suffix)
        return layers[self.l % len(layers)]

    def scale(self, role):
        return self.fp8.scale(self.name, self.l, role)


class Fp8Linears(Linears):
    """The linear layers of a run of --dtype fp8: during an update, those of LINEARS and the
    classifier are in 8 bits."""

    def __init__(self, matmul, architecture, settings):
        super().__init__(matmul)
        self.inputs = architecture.INPUTS
        self.recomputed = recomputed_inputs(architecture, settings)
        self.fuses_gelu = architecture.HAS.activation != "swiglu"
        self.by_layer = settings.gpus > 1  # weights come from other GPUs layer by layer

    def start(self, params, operands):
        """Allocates the scales on the current stream."""
        self.operands = operands
        self.fp8 = Fp8(self.matmul, params, operands, self.recomputed, self.fuses_gelu)

    def linear(self, name, l, weight, bias, dweight):
        if self.fp8.trains and name in (*LINEARS, "logits"):
            return Fp8Linear(self.fp8, name, l, bias, dweight)
        return super().linear(name, l, weight, bias, dweight)

    def dlogits_scale(self, scale):
        """What the range of E5M2 asks for."""
        return DLOGITS_SCALE

    def place(self, acts):
        """Normalizations, and attention's backward pass, find where to write 8 bits."""
        acts.lnf = Fp8Linear(self.fp8, "logits", 0).place_inp()
        for l, (forward, backward) in enumerate(zip(acts.layers, acts.backward_layers)):
            qkv, fc = (Fp8Linear(self.fp8, name, l) for name in ("qkv", "fc"))
            for linear in (qkv, fc):
                row = self.inputs[linear.name]
                setattr(forward, row, linear.place_inp())
                setattr(backward, row, linear.place_inp(again=True))
            backward.dqkv = qkv.place_dout(backward.dqkv)
        return acts

    def calibrate(self, trainer):
        self.fp8.calibrate(trainer)

    def forget(self):
        self.fp8.forget()

    def step_begins(self):
        self.fp8.weights_behind = not self.by_layer

    def weights_changed(self):
        self.fp8.weights_behind = True

    def pass_begins(self, acts):
        """Only an update's pass is in 8 bits, which its activations show."""
        fp8 = self.fp8
        fp8.trains = isinstance(acts.lnf, Quantized)
        if fp8.trains and fp8.weights_behind:
            fp8.quantize_weights()
            fp8.weights_behind = False

    def layer_arrived(self, l, is_first):
        self.fp8.quantize_weights(slice(l, l + 1), again=not is_first)

    def update_ends(self, messages):
        self.fp8.prepare_scales(messages)

    def counts(self, number):
        return self.fp8.counts(number)

    def notes(self):
        return self.fp8.notes()

    def restore(self, notes):
        return self.fp8.restore(notes)
