"""
The speed runs' GPT and their optimizer, Muon, on the CPU, in NumPy: forward, backward and update by
hand.

In its authors' runs, this model, of modded-nanogpt's third track, reaches GPT-2's loss in a sixth
of llm.c's tokens. It has RMSNorm, also after the embedding; normalized, half-rotated queries and
keys; squared ReLU; an untied classifier, capped logits. All else, and all names, are
train_gpt2.py's and train_llama3.py's: read those pages first.

    python train_speedrun.py -e s4 -i data/mine -o runs/mine        # random weights; also s2, s6 and s12 (162M)

Jordan et al. 2024, https://github.com/KellerJordan/modded-nanogpt
"""

import llmc  # noqa: F401  (before NumPy: it sets what OpenBLAS reads when NumPy loads it)

import dataclasses
import functools
import math
from typing import ClassVar

import numpy as np

import train_gpt2
from llmc.checkpoint import padded
from llmc.errors import run_main
from llmc.files import SPEEDRUN_MAGIC, make_header
from llmc.settings import Settings, optimizer, with_default
from llmc.tensors import Row, allocate, layer, views
from llmc.threads import parallel_blocks
from train_gpt2 import (GPT2, Decoder, adamw_update, crossentropy_forward,
                        crossentropy_softmax_backward,
                        encoder_backward, encoder_forward, main, matmul_backward, matmul_forward,
                        residual_forward,
                        softmax_forward)
from train_llama3 import (Llama3, LlamaDecoder, attention_backward, rmsnorm_backward,
                          rmsnorm_forward, rope_backward,
                          rope_forward)

EPS = float(np.finfo(np.float32).eps)  # in every norm
CAP = 15.0  # logits stay within +-CAP
SCALE = 0.12  # scores are SCALE * query . key, both normalized

# --------------------------------------------------------------------------------------------------
# layout


@dataclasses.dataclass(frozen=True)
class Config(train_gpt2.Config):
    """The sizes of a speed run's GPT: GPT-2's, in the order of a checkpoint's header."""

    STATES = (SPEEDRUN_MAGIC, 2)
    eps = EPS

    def to_header(self, version):
        return make_header(SPEEDRUN_MAGIC, version, *dataclasses.astuple(self))

    def fault(self):
        """Why no model has these sizes, or None."""
        if self.HS % 4 or self.HS < 8:
            return f"C={self.C} NH={self.NH}: expected heads of 8, 12, 16.. channels"
        return super().fault()

    def file_tensors(self):
        """(name, size) of a checkpoint's tensors, in order."""
        return [(name, row.size) for name, row in parameter_table(self).items()]


def parameter_table(config, dtype="float32"):
    """name -> Row for the 15 parameter tensors. Linear weights are (out, in). rate and decay of
    AdamW are factors of Muon's, which updates the layers' matrices."""
    L, C, Vp = config.L, config.C, config.Vp
    vector = dict(rate=0.6, decay=0.02)  # gains and biases
    return {
        "wte": Row((Vp, C), dtype, vocabulary=True, decays=True, rate=28.0, decay=0.02),
        "lm_head": Row((Vp, C), dtype, vocabulary=True, decays=True, early=True, rate=0.16,
                       decay=0.02),
        "lm_headb": Row((Vp,), dtype, vocabulary=True, **vector),
        "ln0w": Row((C,), dtype, ones=True, **vector),  # after the embedding
        "ln1w": Row((L, C), dtype, stacked=True, ones=True, **vector),
        "qkvw": Row((L, 3 * C, C), dtype, stacked=True, decays=True, matrices=3),  # Q, K, V
        "qkvb": Row((L, 3 * C), dtype, stacked=True, **vector),
        "attprojw": Row((L, C, C), dtype, stacked=True, decays=True, matrices=1),
        "attprojb": Row((L, C), dtype, stacked=True, **vector),
        "ln2w": Row((L, C), dtype, stacked=True, ones=True, **vector),
        "fcw": Row((L, 4 * C, C), dtype, stacked=True, decays=True, matrices=1),
        "fcb": Row((L, 4 * C), dtype, stacked=True, **vector),
        "fcprojw": Row((L, C, 4 * C), dtype, stacked=True, decays=True, matrices=1),
        "fcprojb": Row((L, C), dtype, stacked=True, **vector),
        "lnfw": Row((C,), dtype, ones=True, **vector),
    }


WORDS = train_gpt2.WORDS | {  # see there
    "lm_head": "classifier: a row for each token",
    "lm_headb": "bias: of the classifier, how frequent a token is",
    "embedded": "token embeddings: as they are looked up",
    "ln0w": "gain of a norm: it scales a channel",
    "qk_rstd": "1 / sizes: of each head's query and key",
    "fch_relu2": "hidden layer, bent: after squared ReLU",
    "cos": "cosines: of RoPE's angles",
    "sin": "sines: of RoPE's angles",
}

# layers L, heads NH, channels C
SIZES = {"s2": (2, 1, 128), "s4": (4, 2, 256), "s6": (6, 3, 384), "s12": (12, 6, 768)}


def random_model(name, V, seed=42, maxT=1024):
    """Return (config, params) of an untrained SIZES[name], or None if `name` is not in SIZES. The
    embedding's standard deviation is 1, qkvw's and fcw's sqrt(0.33 / C); gains are 1. All else is
    0: all tokens are equally likely, and layers add nothing."""
    if name not in SIZES:
        return None
    config = Config(maxT, V, *SIZES[name], padded(V))
    params = allocate(parameter_table(config))
    std = math.sqrt(0.33 / config.C)
    for number, (tensor,
                 times) in enumerate(((params.wte, 1.0), (params.qkvw, std), (params.fcw, std))):
        np.random.default_rng((seed, number)).standard_normal(out=tensor, dtype=np.float32)
        tensor *= np.float32(times)
    for gains in (params.ln0w, params.ln1w, params.ln2w, params.lnfw):
        gains.fill(1.0)
    params.wte[V:] = 0.0
    return config, params


def activation_table(config, B, T):
    """name -> Row for what a forward pass over (B, T) tokens computes; the backward pass reads most
    of it."""
    L, NH, C, V = config.L, config.NH, config.C, config.V
    return {
        "embedded": Row((B, T, C)),
        "ln0_rstd": Row((B, T)),
        "encoded": Row((B, T, C)),
        "ln1": Row((L, B, T, C), stacked=True),
        "ln1_rstd": Row((L, B, T), stacked=True),
        # queries and keys normalized, queries scaled, both rotated
        "qkv": Row((L, B, T, 3 * C), stacked=True),
        "qk_rstd": Row((L, B, T, 2 * NH), stacked=True),
        "atty": Row((L, B, T, C), stacked=True),
        "att": Row((L, B, NH, T, T), stacked=True),
        "attproj": Row((L, B, T, C), stacked=True),
        "residual2": Row((L, B, T, C), stacked=True),
        "ln2": Row((L, B, T, C), stacked=True),
        "ln2_rstd": Row((L, B, T), stacked=True),
        "fch": Row((L, B, T, 4 * C), stacked=True),
        "fch_relu2": Row((L, B, T, 4 * C), stacked=True),
        "fcproj": Row((L, B, T, C), stacked=True),
        "residual3": Row((L, B, T, C), stacked=True),
        "lnf": Row((B, T, C)),
        "lnf_rstd": Row((B, T)),
        "logits": Row((B, T, V)),  # capped
        # the backward pass overwrites them with the gradient of the logits
        "probs": Row((B, T, V)),
        "losses": Row((B, T)),
    }


def scratch_table(config, B, T):
    """GPT-2's without dpreatt, which Llama 3's attention_backward does not need."""
    return {name: row for name, row in train_gpt2.scratch_table(config, B, T).items()
            if name != "dpreatt"}


# --------------------------------------------------------------------------------------------------
# layers


@functools.lru_cache(maxsize=4)
def rope_table(config, T, position=0):
    """(cos, sin), each (T, HS/2) float32, of the angles t * 1024^(-i / (HS/4 - 1)), t from
    `position` on, for the first half of the pairs i; the others do not turn."""
    turning = config.HS // 4
    frequencies = np.zeros(2 * turning, np.float32)
    frequencies[:turning] = 1024.0 ** (-np.arange(turning) / (turning - 1))
    angles = np.arange(position, position + T, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


def qknorm_forward(qkv, rstd, B, T, NH, HS):
    """Normalize, in place, each query and key of qkv (B,T,3C): x * rstd, rstd (B,T,2NH) = 1 /
    sqrt(mean of x^2 + eps). Queries are also multiplied by SCALE * sqrt(HS), which with attention's
    1 / sqrt(HS) makes SCALE.

    Query-Key Normalization for Transformers, Henry et al. 2020, https://arxiv.org/abs/2010.04245
    """
    heads = qkv[..., : 2 * NH * HS].reshape(B, T, 2 * NH, HS)
    rstd[...] = (np.float32(1.0)
                 / np.sqrt(np.vecdot(heads, heads) * np.float32(1.0 / HS) + np.float32(EPS)))
    heads *= rstd[..., None]
    heads[:, :, :NH] *= np.float32(SCALE * math.sqrt(HS))


def qknorm_backward(dqkv, qkv, rstd, B, T, NH, HS):
    """Turn dqkv (B,T,3C), in place, from the gradient of what qknorm_forward wrote into that of
    what it read. Both may be rotated, and dqkv stays so: a rotation keeps products of the two, and
    rstd is one number for all of a head."""
    d, out = (x[..., : 2 * NH * HS].reshape(B, T, 2 * NH, HS) for x in (dqkv, qkv))
    # With out = scale * n and n = x * rstd, where rstd depends on x too: dx = rstd * (dn - n * mean
    # of (dn * n)), dn = scale * d. The scales of dn and n cancel in their product.
    scale = np.repeat(np.float32([SCALE * math.sqrt(HS), 1.0]), NH)[:, None]
    mean = np.vecdot(d, out)[..., None] * np.float32(1.0 / HS)
    d -= out * (mean / scale**2)
    d *= scale * rstd[..., None]


def relu2_forward(out, inp, N):
    """out (N,) = max(inp, 0)^2. Primer, So et al. 2021, https://arxiv.org/abs/2109.08668"""
    out = out.reshape(N)
    inp = inp.reshape(N)
    np.maximum(inp, np.float32(0.0), out=out)
    out *= out


def relu2_backward(dinp, inp, dout, N):
    """dinp (N,) = dout * 2 max(inp, 0); dinp may be dout itself."""
    slope = np.maximum(inp.reshape(N), np.float32(0.0))
    slope *= np.float32(2.0)
    np.multiply(dout.reshape(N), slope, out=dinp.reshape(N))


def cap_forward(logits, N):
    """logits (N,) = CAP * z / sqrt(z^2 + CAP^2), in place: nearly z for small z, always within
    +-CAP."""
    z = logits.reshape(N)

    def block(start, stop):
        z[start:stop] /= np.sqrt(np.float32(1.0) + np.square(z[start:stop] * np.float32(1.0 / CAP)))

    parallel_blocks(block, N)


def cap_backward(dlogits, logits, N):
    """dlogits (N,) *= the cap's slope, (1 - (logits / CAP)^2)^(3/2), from the capped logits
    (N,)."""
    dlogits = dlogits.reshape(N)
    logits = logits.reshape(N)

    def block(start, stop):
        # y = z / s, s = sqrt(1 + z^2 / CAP^2): dy/dz = 1 / s^3, and 1 / s^2 = 1 - y^2 / CAP^2, or
        # less, by rounding
        inverse = np.maximum(np.float32(1.0)
                             - np.square(logits[start:stop] * np.float32(1.0 / CAP)),
                             np.float32(0.0))
        dlogits[start:stop] *= inverse * np.sqrt(inverse)

    parallel_blocks(block, N)


# --------------------------------------------------------------------------------------------------
# optimizer

MANY_TOKENS = 12, (2.0, -1.5, 0.5)  # steps, coefficients: singular values from 0.0005 on become 1
FEW_TOKENS = 5, (3.4445, -4.7750, 2.0315)  # from 0.002 on, 0.7 to 1.2, in less time


def newton_schulz_of(settings):
    steps = settings.newton_schulz or (12 if settings.update_tokens >= 2**17 else 5)
    return MANY_TOKENS if steps == 12 else FEW_TOKENS


def orthogonalize(matrix, steps, coefficients):
    """(rows, columns) -> nearly U V^T of U S V^T: all directions become equally long. Each
    Newton-Schulz step turns a singular value s, at first at most 1, into a s + b s^3 + c s^5, and
    keeps U and V."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / np.float32(np.linalg.norm(x) + 1e-7)
    a, b, c = map(np.float32, coefficients)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.T if is_tall else x


def muon_update(param, m, grad, learning_rate, momentum, weight_decay, grad_scale, newton_schulz):
    """One Muon step on a matrix (rows, columns), param and m in place.
    https://kellerjordan.github.io/posts/muon/"""
    m += np.float32(1.0 - momentum) * (np.float32(grad_scale) * grad - m)
    # Nesterov's momentum: the gradient counts once more
    u = orthogonalize(np.float32((1.0 - momentum) * grad_scale) * grad + np.float32(momentum) * m,
                      *newton_schulz)
    u *= np.float32(learning_rate * math.sqrt(max(1.0, param.shape[0] / param.shape[1])))
    param *= np.float32(1.0 - learning_rate * weight_decay)
    param -= u


class Muon:
    """Muon for the layers' matrices, AdamW for the rest: embedding, classifier, gains and biases. A
    Muon step's length does not depend on the gradient's. -l and -c are Muon's; AdamW's follow from
    them."""

    STATE = "m", "v"  # float32 Tensors like the parameters'; Muon leaves v 0
    MOMENTUM = 0.95

    def __init__(self, params):
        self.m = allocate(params.table)
        self.v = allocate(params.table)

    def update(self, params, grads, settings, learning_rate, step, grad_scale=1.0):
        """One step; `step` counts from 1."""
        newton_schulz = newton_schulz_of(settings)
        for name, row in params.table.items():
            param, m, v, grad = (getattr(source, name)
                                 for source in (params, self.m, self.v, grads))
            if row.matrices:
                shape = -1, row.shape[1] // row.matrices, row.shape[2]
                for matrix in zip(*(x.reshape(shape) for x in (param, m, grad))):
                    muon_update(*matrix, learning_rate, self.MOMENTUM, settings.weight_decay,
                                grad_scale, newton_schulz)
            else:
                decays = settings.decay == "all" or row.decays
                decay = row.decay * settings.weight_decay if decays else 0.0
                adamw_update(*(x.reshape(-1) for x in (param, m, v, grad)),
                             learning_rate * row.rate,
                             settings.beta1, settings.beta2, settings.eps, decay, grad_scale, step,
                             row.size)


# --------------------------------------------------------------------------------------------------
# model


def forward_layers(acts, params, config, inputs, position, attend, matmul):
    """Token ids (B, T) at the positions from `position` on -> acts.lnf (B, T, C), as GPT-2's."""
    B, T = inputs.shape
    NH, HS, C = config.NH, config.HS, config.C
    N = inputs.size
    encoder_forward(acts.embedded, inputs, params.wte, None, B, T, C)
    rmsnorm_forward(acts.encoded, acts.ln0_rstd, acts.embedded, params.ln0w, EPS, B, T, C)
    residual = acts.encoded
    rope = rope_table(config, T, position)
    for l in range(config.L):
        p = layer(params, l)
        a = layer(acts, l)
        rmsnorm_forward(a.ln1, a.ln1_rstd, residual, p.ln1w, EPS, B, T, C)
        matmul(a.qkv, a.ln1, p.qkvw, p.qkvb, B, T, C, 3 * C)
        qknorm_forward(a.qkv, a.qk_rstd, B, T, NH, HS)
        rope_forward(a.qkv, *rope, B, T, 2 * NH, HS)
        attend(l, a)
        matmul(a.attproj, a.atty, p.attprojw, p.attprojb, B, T, C, C)
        residual_forward(a.residual2, residual, a.attproj, N * C)
        rmsnorm_forward(a.ln2, a.ln2_rstd, a.residual2, p.ln2w, EPS, B, T, C)
        matmul(a.fch, a.ln2, p.fcw, p.fcb, B, T, C, 4 * C)
        relu2_forward(a.fch_relu2, a.fch, 4 * N * C)
        matmul(a.fcproj, a.fch_relu2, p.fcprojw, p.fcprojb, B, T, 4 * C, C)
        residual_forward(a.residual3, a.residual2, a.fcproj, N * C)
        residual = a.residual3
    rmsnorm_forward(acts.lnf, acts.lnf_rstd, residual, params.lnfw, EPS, B, T, C)


@dataclasses.dataclass
class MuonSettings:
    """A mixin for Settings: what differs from GPT-2's on a page with Muon."""

    model: str = with_default(Settings, "model", "s4",
                              "model to start from: a .bin file, or the directory of a run; or"
                              " s2, s4, s6, s12: random weights, for sequences of at most T tokens")
    learning_rate: float = with_default(Settings, "learning_rate", 0.025,
                                        "peak learning rate of Muon; AdamW's are 28"
                                        " (embedding), 0.16 (classifier) and 0.6 (gains, biases)"
                                        " times that")
    weight_decay: float = with_default(Settings, "weight_decay", 0.05,
                                       "weight decay of Muon; AdamW's is 0.02 of that")
    decay: str = with_default(Settings, "decay", "all")
    warmup_steps: int = with_default(Settings, "warmup_steps", 0, "steps of linear warm-up")
    schedule: str = with_default(Settings, "schedule", "cooldown")
    beta1: float = with_default(Settings, "beta1", 0.8)
    beta2: float = with_default(Settings, "beta2", 0.95)
    eps: float = with_default(Settings, "eps", 1e-15)

    newton_schulz: int = optimizer(0, choices=(0, 5, 12),
                                   help="Muon's Newton-Schulz steps (0: 12 as"
                                   " in modded-nanogpt, 5 in updates of fewer than 131,072 tokens)")

    LLMC: ClassVar = {}  # llm.c has no such model
    SHORT_RUN: ClassVar = 0  # Muon needs no warm-up

    @classmethod
    def from_scratch(cls, depth):
        own = {"learning_rate": cls.learning_rate, "warmup_steps": 0}
        return {**super().from_scratch(depth), **own}


@dataclasses.dataclass
class SpeedrunSettings(MuonSettings, Settings):
    FROM_SCRATCH = {name: value for name, value in Settings.FROM_SCRATCH.items()
                    if name not in ("schedule", "beta2", "weight_decay", "grad_clip")}


class Speedrun(GPT2):
    """A speed run's GPT, its gradients and its optimizer; memory and micro steps are GPT-2's."""

    TITLE = "a speed run's GPT"
    MAGIC = SPEEDRUN_MAGIC
    Config = Config
    Settings = SpeedrunSettings
    SIZES = SIZES
    parameter_table = staticmethod(parameter_table)
    random_model = staticmethod(random_model)
    activation_table = staticmethod(activation_table)
    scratch_table = staticmethod(scratch_table)
    forward_layers = staticmethod(forward_layers)
    Optimizer = Muon
    attend = Llama3.attend
    WORDS = WORDS

    def head(self, tensors):
        return tensors.lm_head[: self.config.V]

    def forward(self, inputs, targets, weights=None, total=None):
        """inputs, targets (B, T) integer ids, weights (B, T) float32 -> the loss, a float: see
        loss_of; activations stay in self.acts."""
        B, T = inputs.shape
        C, V = self.config.C, self.config.V
        acts = self.trunk(inputs)
        matmul_forward(acts.logits, acts.lnf, self.head(self.params), self.params.lm_headb[:V], B,
                       T, C, V)
        cap_forward(acts.logits, B * T * V)
        softmax_forward(acts.probs, acts.logits, B, T, V)
        crossentropy_forward(acts.losses, acts.logits, acts.probs, targets, B, T, V)
        return self.loss_of(targets, weights, total)

    def backward_into(self, grads, micro_steps):
        """Write all of `grads` but the vocabulary's rows from token V on, which stay 0."""
        B, T = self.inputs.shape
        config = self.config
        params = self.params
        acts = self.acts
        NH, HS, C = config.NH, config.HS, config.C
        V = config.V
        N = B * T
        s = views(self.scratch_table(config, B, T), self.scratch.buffer)
        rope = rope_table(config, T, 0)
        dlogits = acts.probs  # in place; cap_backward reads the logits
        self.loss_gradients(s.dlosses, micro_steps)
        crossentropy_softmax_backward(dlogits, s.dlosses, acts.probs, self.targets, B, T, V)
        cap_backward(dlogits, acts.logits, N * V)
        head = self.head(params)
        dhead = self.head(grads)
        matmul_backward(s.dbranch, dhead, grads.lm_headb[:V], dlogits, acts.lnf, head, B, T, C, V)
        s.dresidual.fill(0.0)
        rmsnorm_backward(s.dresidual, grads.lnfw, s.dbranch, acts.residual3[-1], params.lnfw,
                         acts.lnf_rstd, B, T, C)
        for l in reversed(range(config.L)):
            p = layer(params, l)
            a = layer(acts, l)
            g = layer(grads, l)
            residual = acts.encoded if l == 0 else acts.residual3[l - 1]
            matmul_backward(s.dfch, g.fcprojw, g.fcprojb, s.dresidual, a.fch_relu2, p.fcprojw, B, T,
                            4 * C, C)
            relu2_backward(s.dfch, a.fch, s.dfch, 4 * N * C)
            matmul_backward(s.dbranch, g.fcw, g.fcb, s.dfch, a.ln2, p.fcw, B, T, C, 4 * C)
            rmsnorm_backward(s.dresidual, g.ln2w, s.dbranch, a.residual2, p.ln2w, a.ln2_rstd, B, T,
                             C)
            matmul_backward(s.dbranch, g.attprojw, g.attprojb, s.dresidual, a.atty, p.attprojw, B,
                            T, C, C)
            attention_backward(s.dqkv, s.datt, s.dbranch, a.qkv, a.att, B, T, NH, NH, HS)
            # before rope_backward: a.qkv is rotated
            qknorm_backward(s.dqkv, a.qkv, a.qk_rstd, B, T, NH, HS)
            rope_backward(s.dqkv, *rope, B, T, 2 * NH, HS)
            matmul_backward(s.dbranch, g.qkvw, g.qkvb, s.dqkv, a.ln1, p.qkvw, B, T, C, 3 * C)
            rmsnorm_backward(s.dresidual, g.ln1w, s.dbranch, residual, p.ln1w, a.ln1_rstd, B, T, C)
        s.dbranch.fill(0.0)
        rmsnorm_backward(s.dbranch, grads.ln0w, s.dresidual, acts.embedded, params.ln0w,
                         acts.ln0_rstd, B, T, C)
        grads.wte.fill(0.0)
        encoder_backward(grads.wte, None, s.dbranch, self.inputs, B, T, C)


class SpeedrunDecoder(Decoder):
    """A speed run's GPT for text generation."""

    activation_table = staticmethod(activation_table)
    forward_layers = staticmethod(forward_layers)
    head = Speedrun.head
    attend = LlamaDecoder.attend

    def forward(self, tokens, position):
        logits = super().forward(tokens, position)
        logits += self.params.lm_headb[: self.config.V]
        cap_forward(logits, logits.size)
        return logits


Speedrun.Decoder = SpeedrunDecoder

if __name__ == "__main__":
    run_main(functools.partial(main, Speedrun))
