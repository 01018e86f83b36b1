"""
Llama 3 training on the CPU, in NumPy: what it has instead of GPT-2's layers, forward and backward
by hand.

RMSNorm for layernorm, rotated queries and keys (RoPE) for position embeddings, several query heads
to a key and value head, SwiGLU for GELU, no biases. The rest, and the words and names, are
train_gpt2.py's: read that page first.

    python train_llama3.py -e l4 -i data/mine -o runs/mine          # random weights
    python export_weights.py --model SmolLM2-135M-Instruct/         # of a Hugging Face folder
    python train_llama3.py -e llama3_SmolLM2-135M-Instruct.bin -i data/mine

More names: NKV key and value heads, HS head size, Q = NH*HS and K = NKV*HS channels of queries and
of keys, F channels of the feed-forward layer.

The Llama 3 Herd of Models, Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783
"""

import llmc  # noqa: F401  (before NumPy: it sets what OpenBLAS reads when NumPy loads it)

import dataclasses
import functools
import math

import numpy as np

import train_gpt2
from llmc.checkpoint import padded
from llmc.errors import run_main
from llmc.files import LLAMA_MAGIC, make_header
from llmc.settings import Settings, with_default
from llmc.tensors import Row, layer, views
from llmc.threads import BLOCK, parallel_blocks
from train_gpt2 import (GPT2, Decoder, attention_block, causal_mask, crossentropy_softmax_backward,
                        encoder_backward,
                        encoder_forward, main, matmul_backward, random_params, residual_forward)

# --------------------------------------------------------------------------------------------------
# layout


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes and constants of a Llama 3."""

    maxT: int
    V: int
    L: int
    NH: int
    NKV: int
    C: int
    Vp: int  # V padded with zero rows, in memory
    F: int
    HS: int
    tied: int = 1  # the classifier's weight is the embedding
    eps: float = 1e-5
    theta: float = 500_000.0  # RoPE's base
    # RoPE scaled for longer sequences, as from Llama 3.1 on: see rope_table; 0: not scaled
    factor: int = 0
    low: int = 1
    high: int = 4
    original: int = 8192

    HEADER_BYTES, PADDED, STATES = 2048, False, (LLAMA_MAGIC, 3)  # 256 int32, 256 float32; V rows

    Q = property(lambda self: self.NH * self.HS)
    K = property(lambda self: self.NKV * self.HS)

    @classmethod
    def from_header(cls, header):
        """header (512,) int32: [1] version [2] maxT [3] V [4] L [5] NH [6] NKV [7] C [8]
        multiple_of [9] scaled RoPE [10] [11] Llama's version; float32 from [256] on: F's
        multiplier, eps, theta. Ours, if [19] is 1: [12] F [13] tied [14] HS [15] RoPE's factor [16]
        low [17] high [18] original. Without them, F is Meta's formula."""
        maxT, V, L, NH, NKV, C, multiple, scaled = map(int, header[2:10])
        # 1e-5, not 9.99999974e-6
        multiplier, eps, theta = (float(str(x)) for x in header[256:259].view("<f4"))
        ours = dict(zip(("F", "tied", "HS", "factor", "low", "high", "original"),
                        map(int, header[12:19])))
        if header[19] != 1:
            multiple = max(1, multiple)
            F = multiplier * int(8 * C / 3)
            F = multiple * -(-int(F) // multiple) if 0 < F < 2**31 else 0  # 0 is refused
            ours = dict(F=F, tied=0, HS=C // max(1, NH), factor=8 * scaled)
        return cls(maxT, V, L, NH, NKV, C, V, eps=eps, theta=theta, **ours)

    def to_header(self, version):
        header = make_header(LLAMA_MAGIC, version, self.maxT, self.V, self.L, self.NH, self.NKV,
                             self.C, self.F,
                             int(self.factor > 0), 3, 2 if self.tied else 1, self.F, self.tied,
                             self.HS, self.factor, self.low, self.high, self.original, 1)
        floats = np.zeros(256, "<f4")
        floats[:3] = min(1.0, self.F / int(8 * self.C / 3)), self.eps, self.theta
        return np.concatenate((header, floats.view("<i4")))

    def fault(self):
        """Why no Llama has these sizes, or None."""
        if self.NH % self.NKV or self.HS % 2:
            return (f"NH={self.NH} NKV={self.NKV} HS={self.HS}: expected NH a multiple of NKV, and"
                    " HS even")
        if not (0 < self.eps < 1 < self.theta < math.inf and 0 <= self.factor
                and 0 < self.low < self.high):
            return (f"eps={self.eps} theta={self.theta} factor={self.factor} low={self.low}"
                    f" high={self.high}: is it of llm.c's master, whose layout is another? Then"
                    " export the model anew")
        if self.factor and self.original < 1:
            return f"factor={self.factor} original={self.original}: expected an original length"
        return None if self.tied in (0, 1) else f"tied is {self.tied}, expected 0 or 1"

    def file_tensors(self):
        """(name, size) of a checkpoint's 16 tensors, in llm.c's order: the classifier's weight, for
        tied models too, where GPT-2 has wpe; a name of None is a bias, zeros."""
        L = self.L
        C = self.C
        sizes = {name: row.size for name, row in parameter_table(self).items()}
        biases = dict(ln1w=L * C, qkvw=L * (self.Q + 2 * self.K), attprojw=L * C, ln2w=L * C,
                      fcw=2 * L * self.F, fcprojw=L * C, lnfw=C)
        head = "wte" if self.tied else "lm_head"
        return [("wte", sizes["wte"]), (head, sizes[head]),
                *(pair for name, size in biases.items()
                  for pair in ((name, sizes[name]), (None, size)))]

    def describe(self):
        scaled = f" rope factor={self.factor}" if self.factor else ""
        return (f"L={self.L} NH={self.NH} NKV={self.NKV} HS={self.HS} C={self.C} F={self.F}"
                f" maxT={self.maxT} V={self.V}{'' if self.tied else ' untied'}{scaled}")


def parameter_table(config, dtype="float32"):
    """name -> Row for the parameters, with GPT-2's names. Linear weights are (out, in)."""
    L, C, Q, F, Vp = config.L, config.C, config.Q, config.F, config.Vp
    return {
        "wte": Row((Vp, C), dtype, vocabulary=True, decays=True),
        **({} if config.tied
           else {"lm_head": Row((Vp, C), dtype, vocabulary=True, decays=True, early=True)}),
        "ln1w": Row((L, C), dtype, stacked=True, ones=True),
        "qkvw": Row((L, Q + 2 * config.K, C), dtype, stacked=True, decays=True),
        "attprojw": Row((L, C, Q), dtype, stacked=True, decays=True),
        "ln2w": Row((L, C), dtype, stacked=True, ones=True),
        "fcw": Row((L, 2 * F, C), dtype, stacked=True, decays=True),  # up, then gate
        "fcprojw": Row((L, C, F), dtype, stacked=True, decays=True),
        "lnfw": Row((C,), dtype, ones=True),
    }


WORDS = train_gpt2.WORDS | {  # see there
    "lm_head": "classifier: a row for each token",
    "cos": "cosines: of RoPE's angles",
    "sin": "sines: of RoPE's angles",
    "fch": "hidden layer: up, then gate",
    "fch_swiglu": "hidden layer, gated: up × gate × sigmoid(gate)",
}

# model name -> layers L, heads NH, key and value heads NKV, channels C, feed-forward channels F
SIZES = {
    "l2": (2, 2, 1, 128, 384), "l4": (4, 4, 2, 256, 768), "l6": (6, 6, 2, 384, 1024),
    "l12": (12, 12, 4, 768, 2048),
}  # fmt: skip


def random_model(name, V, seed=42, maxT=1024):
    """Return (config, params) of an untrained SIZES[name], or None if `name` is not in SIZES.
    Weights as GPT-2's."""
    if name not in SIZES:
        return None
    L, NH, NKV, C, F = SIZES[name]
    config = Config(maxT, V, L, NH, NKV, C, padded(V), F, C // NH)
    return config, random_params(parameter_table(config), V, L, seed)


def activation_table(config, B, T):
    """name -> Row for what a forward pass over (B, T) tokens computes; the backward pass reads most
    of it."""
    L, NH, C, Q, F, V = config.L, config.NH, config.C, config.Q, config.F, config.V
    return {
        "encoded": Row((B, T, C)),
        "ln1": Row((L, B, T, C), stacked=True),
        "ln1_rstd": Row((L, B, T), stacked=True),
        "qkv": Row((L, B, T, Q + 2 * config.K), stacked=True),  # queries and keys rotated
        "atty": Row((L, B, T, Q), stacked=True),
        "att": Row((L, B, NH, T, T), stacked=True),
        "attproj": Row((L, B, T, C), stacked=True),
        "residual2": Row((L, B, T, C), stacked=True),
        "ln2": Row((L, B, T, C), stacked=True),
        "ln2_rstd": Row((L, B, T), stacked=True),
        "fch": Row((L, B, T, 2 * F), stacked=True),  # up, then gate
        "fch_swiglu": Row((L, B, T, F), stacked=True),
        "fcproj": Row((L, B, T, C), stacked=True),
        "residual3": Row((L, B, T, C), stacked=True),
        "lnf": Row((B, T, C)),
        "lnf_rstd": Row((B, T)),
        "logits": Row((B, T, V)),
        "probs": Row((B, T, V)),
        "losses": Row((B, T)),
    }


def scratch_table(config, B, T):
    """name -> Row for the gradients of activations, as GPT-2's."""
    NH, C, Q, F = config.NH, config.C, config.Q, config.F
    return {
        "dresidual": Row((B, T, C)),
        "dbranch": Row((B, T, C)),
        "datty": Row((B, T, Q)),
        "dqkv": Row((B, T, Q + 2 * config.K)),
        "dfch": Row((B, T, 2 * F)),
        "dfch_swiglu": Row((B, T, F)),
        "datt": Row((B, NH, T, T)),  # within attention_backward
        "dlosses": Row((B, T)),
    }


# --------------------------------------------------------------------------------------------------
# layers


def rmsnorm_forward(out, rstd, inp, weight, eps, B, T, C):
    """out (B,T,C) = inp * rstd * weight; rstd (B,T) = 1 / sqrt(mean of inp^2 + eps).

    Root Mean Square Layer Normalization, Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467
    """
    np.vecdot(inp, inp, out=rstd)
    rstd *= np.float32(1.0 / C)
    rstd += np.float32(eps)
    np.sqrt(rstd, out=rstd)
    np.reciprocal(rstd, out=rstd)
    np.multiply(inp, rstd[..., None], out=out)
    out *= weight


def rmsnorm_backward(dinp, dweight, dout, inp, weight, rstd, B, T, C):
    """dinp (B,T,C) +=; dweight (C,) =."""
    N = B * T
    rows = 128  # blocks of rows, which stay in the cache and keep sums accurate
    dinp = dinp.reshape(N, C)
    dout = dout.reshape(N, C)
    inp = inp.reshape(N, C)
    rstd = rstd.reshape(N, 1)
    normed, dnormed = np.empty((2, rows, C), dout.dtype)
    dweight.fill(0.0)
    for i in range(0, N, rows):
        r = slice(i, i + rows)
        d = dout[i : i + rows]
        n = normed[: len(d)]
        dn = dnormed[: len(d)]
        np.multiply(inp[r], rstd[r], out=n)  # recompute n = inp * rstd
        np.multiply(d, n, out=dn)  # out = n * weight
        dweight += np.add.reduce(dn, axis=0)
        np.multiply(d, weight, out=dn)
        # n = inp * rstd, where rstd depends on inp too: dinp = rstd * (dn - n * mean of (dn * n))
        n *= np.vecdot(dn, n)[:, None] * np.float32(1.0 / C)
        dn -= n
        dn *= rstd[r]
        dinp[r] += dn


@functools.lru_cache(maxsize=4)
def rope_table(config, T, position=0):
    """(cos, sin), each (T, HS/2) float32, of the angles t * theta^(-2i/HS), t from `position` on.
    With a factor, as from Llama 3.1 on, waves longer than original/low are stretched, those shorter
    than original/high are kept, others are between. Each step is rounded to float32, as in
    transformers: exact angles differ by 6e-4 at t = 8192."""
    exponents = np.arange(0, config.HS, 2, dtype=np.float32) / np.float32(config.HS)
    frequencies = (np.float32(1.0)
                   / (config.theta ** exponents.astype(np.float64)).astype(np.float32))
    if config.factor:
        waves = np.float32(2 * math.pi) / frequencies
        between = ((np.float32(config.original) / waves - np.float32(config.low))
                   / np.float32(config.high - config.low))
        kept = np.clip(between, np.float32(0.0), np.float32(1.0))
        frequencies = (1 - kept) * frequencies / np.float32(config.factor) + kept * frequencies
    angles = np.arange(position, position + T, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


def rope_forward(qkv, cos, sin, B, T, heads, HS):
    """Rotate, in place, the first `heads` heads (queries and keys) of qkv (B,T,Q+2K): each pair of
    neighbours (a, b) at position t by its angle, to (a cos - b sin, a sin + b cos). cos, sin
    (T,HS/2).

    RoFormer, Su et al. 2021, https://arxiv.org/abs/2104.09864
    """
    pairs = qkv[..., : heads * HS].reshape(B, T, heads, HS // 2, 2)
    cos = cos[:, None]
    sin = sin[:, None]

    def batch(start, stop):
        a = pairs[start:stop, ..., 0]
        b = pairs[start:stop, ..., 1]
        a[...], b[...] = a * cos - b * sin, a * sin + b * cos

    parallel_blocks(batch, B, 1)


def rope_backward(dqkv, cos, sin, B, T, heads, HS):
    """Rotate dqkv back, in place: a rotation's inverse is its transpose."""
    rope_forward(dqkv, cos, -sin, B, T, heads, HS)


def split_heads(qkv, B, T, NH, NKV, HS):
    """Views of qkv (B,T,Q+2K): query (B,NKV,NH/NKV,T,HS), key and value (B,NKV,1,T,HS)."""
    heads = np.swapaxes(qkv.reshape(B, T, NH + 2 * NKV, HS), 1, 2)
    query = heads[:, :NH].reshape(B, NKV, NH // NKV, T, HS)
    return query, heads[:, NH : NH + NKV, None], heads[:, NH + NKV :, None]


def attention_forward(out, att, inp, B, T, NH, NKV, HS, keys=None, values=None, position=0):
    """Causal attention of grouped queries: query head h reads key and value head h // (NH/NKV). out
    (B,T,Q) =; att (B,NH,T,T) = softmax of the scaled scores, 0 above the diagonal. inp (B,T,Q+2K).
    With a cache, keys and values (B,NKV,>=position+T,HS), inp is of T positions from `position` on,
    and att is (B,NH,T,position+T).

    GQA, Ainslie et al. 2023, https://arxiv.org/abs/2305.13245
    """
    scale = np.float32(1.0 / math.sqrt(HS))
    context = position + T
    query, key, value = split_heads(inp, B, T, NH, NKV, HS)
    if keys is not None:
        keys[:, :, position:context] = key[:, :, 0]
        values[:, :, position:context] = value[:, :, 0]
        key = keys[:, :, None, :context]
        value = values[:, :, None, :context]
    mask = (np.triu(np.full((T, context), -np.inf, np.float32), 1 + position) if position
            else causal_mask(T))
    att = att.reshape(B, NKV, NH // NKV, T, context)
    heads = np.swapaxes(out.reshape(B, T, NH, HS), 1, 2).reshape(B, NKV, NH // NKV, T, HS)

    def batch(start, stop):
        for b in range(start, stop):
            a = att[b]
            np.matmul(query[b], np.swapaxes(key[b], 2, 3), out=a)
            a *= scale
            a += mask
            a -= np.maximum.reduce(a, axis=-1, keepdims=True)
            np.exp(a, out=a)
            a *= np.float32(1.0) / np.add.reduce(a, axis=-1, keepdims=True)
            np.matmul(a, value[b], out=heads[b])

    parallel_blocks(batch, B, attention_block(B, T, HS))


def attention_backward(dinp, datt, dout, inp, att, B, T, NH, NKV, HS):
    """dinp (B,T,Q+2K) =; datt (B,NH,T,T) = (scratch); dout (B,T,Q). The gradients of a key or value
    head are summed over its query heads, in their order."""
    scale = np.float32(1.0 / math.sqrt(HS))
    query, key, value = split_heads(inp, B, T, NH, NKV, HS)
    dquery, dkey, dvalue = split_heads(dinp, B, T, NH, NKV, HS)
    att, datt = (x.reshape(B, NKV, NH // NKV, T, T) for x in (att, datt))
    dheads = np.swapaxes(dout.reshape(B, T, NH, HS), 1, 2).reshape(B, NKV, NH // NKV, T, HS)

    def batch(start, stop):
        for b in range(start, stop):
            a = att[b]
            d = datt[b]
            # heads = att @ value; a group's query heads, axis 1, share dvalue and, below, dkey:
            # sums over them
            np.add.reduce(np.matmul(np.swapaxes(a, 2, 3), dheads[b]), axis=1, keepdims=True,
                          out=dvalue[b])
            np.matmul(dheads[b], np.swapaxes(value[b], 2, 3), out=d)
            d -= np.vecdot(a, d)[..., None]  # att = softmax(scores)
            d *= a  # now the gradient of the scores
            d *= scale  # scores = query @ key^T * scale
            np.matmul(d, key[b], out=dquery[b])
            np.add.reduce(np.matmul(np.swapaxes(d, 2, 3), query[b]), axis=1, keepdims=True,
                          out=dkey[b])

    parallel_blocks(batch, B, attention_block(B, T, HS))


def swiglu_forward(out, inp, N, F):
    """out (N,F) = up * gate * sigmoid(gate); inp (N,2F) holds up, then gate.

    GLU Variants Improve Transformer, Shazeer 2020, https://arxiv.org/abs/2002.05202
    """
    out = out.reshape(N, F)
    inp = inp.reshape(N, 2 * F)

    def rows(start, stop):
        up = inp[start:stop, :F]
        gate = inp[start:stop, F:]
        o = out[start:stop]
        np.negative(gate, out=o)
        np.exp(o, out=o)
        o += np.float32(1.0)
        np.divide(gate, o, out=o)
        o *= up

    parallel_blocks(rows, N, max(1, BLOCK // F))


def swiglu_backward(dinp, inp, dout, N, F):
    """dinp (N,2F) =: dup = dout * gate * s, dgate = dout * up * s * (1 + gate * (1 - s)), s =
    sigmoid(gate)."""
    dinp = dinp.reshape(N, 2 * F)
    inp = inp.reshape(N, 2 * F)
    dout = dout.reshape(N, F)

    def rows(start, stop):
        up = inp[start:stop, :F]
        gate = inp[start:stop, F:]
        d = dout[start:stop]
        dup = dinp[start:stop, :F]
        dgate = dinp[start:stop, F:]
        s = np.float32(1.0) / (np.exp(-gate) + np.float32(1.0))
        np.multiply(gate, s, out=dup)  # SiLU(gate)
        np.subtract(np.float32(1.0), s, out=dgate)
        dgate *= dup
        dgate += s  # its derivative, s + gate * s * (1 - s)
        dgate *= up
        dgate *= d
        dup *= d

    parallel_blocks(rows, N, max(1, BLOCK // F))


# --------------------------------------------------------------------------------------------------
# model


def forward_layers(acts, params, config, inputs, position, attend, matmul):
    """Token ids (B, T) at the positions from `position` on -> acts.lnf (B, T, C), as GPT-2's."""
    B, T = inputs.shape
    N = inputs.size
    rope = rope_table(config, T, position)
    NH, NKV, HS = config.NH, config.NKV, config.HS
    C, Q, F = config.C, config.Q, config.F
    eps = config.eps
    encoder_forward(acts.encoded, inputs, params.wte, None, B, T, C)
    residual = acts.encoded
    for l in range(config.L):
        p = layer(params, l)
        a = layer(acts, l)
        rmsnorm_forward(a.ln1, a.ln1_rstd, residual, p.ln1w, eps, B, T, C)
        matmul(a.qkv, a.ln1, p.qkvw, None, B, T, C, Q + 2 * config.K)
        rope_forward(a.qkv, *rope, B, T, NH + NKV, HS)
        attend(l, a)
        matmul(a.attproj, a.atty, p.attprojw, None, B, T, Q, C)
        residual_forward(a.residual2, residual, a.attproj, N * C)
        rmsnorm_forward(a.ln2, a.ln2_rstd, a.residual2, p.ln2w, eps, B, T, C)
        matmul(a.fch, a.ln2, p.fcw, None, B, T, C, 2 * F)
        swiglu_forward(a.fch_swiglu, a.fch, N, F)
        matmul(a.fcproj, a.fch_swiglu, p.fcprojw, None, B, T, F, C)
        residual_forward(a.residual3, a.residual2, a.fcproj, N * C)
        residual = a.residual3
    rmsnorm_forward(acts.lnf, acts.lnf_rstd, residual, params.lnfw, eps, B, T, C)


@dataclasses.dataclass
class LlamaSettings(Settings):
    """GPT-2's, with another model to start from."""

    model: str = with_default(Settings, "model", "llama3.2_1B.bin",
                              "model to start from: a .bin file, or the directory"
                              " of a run; or l2, l4, l6, l12: random weights, for sequences of at"
                              " most T tokens")


class Llama3(GPT2):
    """A Llama 3, its gradients and its optimizer; memory, loss and updates are GPT-2's."""

    TITLE = "Llama 3"
    MAGIC = LLAMA_MAGIC
    Config = Config
    Settings = LlamaSettings
    SIZES = SIZES
    parameter_table = staticmethod(parameter_table)
    random_model = staticmethod(random_model)
    activation_table = staticmethod(activation_table)
    scratch_table = staticmethod(scratch_table)
    forward_layers = staticmethod(forward_layers)
    WORDS = WORDS

    def attend(self, l, a):
        c = self.config
        attention_forward(a.atty, a.att, a.qkv, *self.inputs.shape, c.NH, c.NKV, c.HS)

    def head(self, tensors):
        return (tensors.wte if self.config.tied else tensors.lm_head)[: self.config.V]

    def backward_into(self, grads, micro_steps):
        """Write all of `grads` but wte and lm_head from token V on, which stay 0."""
        B, T = self.inputs.shape
        config = self.config
        params = self.params
        acts = self.acts
        N = B * T
        NH, NKV, HS = config.NH, config.NKV, config.HS
        C, Q, F = config.C, config.Q, config.F
        V = config.V
        s = views(self.scratch_table(config, B, T), self.scratch.buffer)
        cos, sin = rope_table(config, T, 0)  # the forward pass's, cached

        self.loss_gradients(s.dlosses, micro_steps)
        dlogits = acts.logits
        crossentropy_softmax_backward(dlogits, s.dlosses, acts.probs, self.targets, B, T, V)
        if not config.tied:
            grads.wte.fill(0.0)
        matmul_backward(s.dbranch, self.head(grads), None, dlogits, acts.lnf, self.head(params), B,
                        T, C, V)
        s.dresidual.fill(0.0)
        rmsnorm_backward(s.dresidual, grads.lnfw, s.dbranch, acts.residual3[-1], params.lnfw,
                         acts.lnf_rstd, B, T, C)
        for l in reversed(range(config.L)):
            p = layer(params, l)
            a = layer(acts, l)
            g = layer(grads, l)
            residual = acts.encoded if l == 0 else acts.residual3[l - 1]
            matmul_backward(s.dfch_swiglu, g.fcprojw, None, s.dresidual, a.fch_swiglu, p.fcprojw, B,
                            T, F, C)
            swiglu_backward(s.dfch, a.fch, s.dfch_swiglu, N, F)
            matmul_backward(s.dbranch, g.fcw, None, s.dfch, a.ln2, p.fcw, B, T, C, 2 * F)
            rmsnorm_backward(s.dresidual, g.ln2w, s.dbranch, a.residual2, p.ln2w, a.ln2_rstd, B, T,
                             C)
            matmul_backward(s.datty, g.attprojw, None, s.dresidual, a.atty, p.attprojw, B, T, Q, C)
            attention_backward(s.dqkv, s.datt, s.datty, a.qkv, a.att, B, T, NH, NKV, HS)
            rope_backward(s.dqkv, cos, sin, B, T, NH + NKV, HS)
            matmul_backward(s.dbranch, g.qkvw, None, s.dqkv, a.ln1, p.qkvw, B, T, C,
                            Q + 2 * config.K)
            rmsnorm_backward(s.dresidual, g.ln1w, s.dbranch, residual, p.ln1w, a.ln1_rstd, B, T, C)
        # adds to the classifier's part, if tied
        encoder_backward(grads.wte, None, s.dresidual, self.inputs, B, T, C)


class LlamaDecoder(Decoder):
    """Llama 3 for text generation; the cache has NKV heads."""

    activation_table = staticmethod(activation_table)
    forward_layers = staticmethod(forward_layers)
    head = Llama3.head

    def attend(self, position, B, T, l, a):
        c = self.config
        keys = self.cache.keys[l, :B]
        values = self.cache.values[l, :B]
        attention_forward(a.atty, a.att, a.qkv, B, T, c.NH, c.NKV, c.HS, keys, values, position)


Llama3.Decoder = LlamaDecoder

if __name__ == "__main__":
    run_main(functools.partial(main, Llama3))
