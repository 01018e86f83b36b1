"""
GPT-2 training on the CPU, in NumPy: forward, backward and AdamW written out by hand.

GPT-2's layout, layers, model and training loop, without autograd or PyTorch. Files, settings, data,
sampling and logs, which other pages share, are in llmc/. test_gpt2.py compares this file with
PyTorch.

    python prepro_tinyshakespeare.py          # data/tiny_shakespeare_{train,val,tokenizer}.bin
    python export_weights.py                  # gpt2_124M.bin
    python train_gpt2.py                      # prints, on two cores:
        model     gpt2_124M.bin: L=12 NH=12 C=768 maxT=1024 V=50257, 124,439,808 parameters
        step  1/41 | train loss 5.3562 | 0.64 s | 402 tok/s | 26 s left

Names, here and everywhere: B batch size, T sequence length, C channels, NH heads, HS = C / NH head
size, L layers, V vocabulary size, Vp the same padded to a multiple of 128, maxT longest sequence,
OC output channels; l is a layer's index, N a number of rows or of elements. `dx` is the gradient of
the loss with respect to x.

Layers are functions: outputs first, sizes last; of a forward pass, saved statistics, inputs,
weights in between. Each says which outputs it writes (=) and which it adds to (+=). CUDA kernels
are checked against these functions.
"""

import llmc  # noqa: F401  (before NumPy: it sets what OpenBLAS reads when NumPy loads it)

import dataclasses
import functools
import math
import os
import sys
import time
import warnings

import numpy as np

from llmc.checkpoint import padded
from llmc.dataloader import NO_TARGETS, total_weight
from llmc.errors import run_main
from llmc.files import MODEL_MAGIC, STATE_MAGIC, locked, make_header
from llmc.loop import Loop, Saver, Update, check_update
from llmc.outliers import RECENT, judge
from llmc.sampler import draw
from llmc.schedulers import learning_rate_at
from llmc.settings import Settings, parse_settings
from llmc.single_process import refuse_launchers
from llmc.tensors import Row, allocate, flat, layer, table_bytes, unpadded, views
from llmc.threads import BLOCK, Others, fit_threads, parallel_blocks

# --------------------------------------------------------------------------------------------------
# layout: GPT-2's tensors as tables, from which sizes, offsets, views, files and tests derive


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a GPT-2, in the order of a checkpoint's header."""

    maxT: int
    V: int
    L: int
    NH: int
    C: int
    Vp: int  # V padded with zero rows (V itself in a file without padding)

    # files have Vp rows; debug states: magic, versions
    HEADER_BYTES = 1024
    PADDED = True
    STATES = (STATE_MAGIC, 1, 2)

    # Llama 3's names: head size; next: key and value heads,
    HS = property(lambda self: self.C // self.NH)
    NKV = property(lambda self: self.NH)
    F = property(lambda self: 4 * self.C)  # feed-forward channels

    @classmethod
    def from_header(cls, header):
        """header (256,) int32: [1] version [2] maxT [3] V [4] L [5] NH [6] C [7] Vp, from version 3
        on."""
        config = cls(*map(int, header[2:8]))
        return dataclasses.replace(config, Vp=config.V) if header[1] == 1 else config

    def to_header(self, version):
        *sizes, Vp = dataclasses.astuple(self)
        return make_header(MODEL_MAGIC, version, *sizes, 0 if version == 1 else Vp)

    def fault(self):
        """Why no GPT-2 has these sizes, or None."""
        if self.C % self.NH:
            return f"C={self.C} is not divisible by NH={self.NH}"
        return (f"padded vocabulary Vp={self.Vp} is smaller than V={self.V}" if self.Vp < self.V
                else None)

    def file_tensors(self):
        """(name, size) of a checkpoint's tensors, in order."""
        return [(name, row.size) for name, row in parameter_table(self).items()]

    def describe(self):
        return " ".join(f"{name}={value}" for name, value in vars(self).items())


def parameter_table(config, dtype="float32"):
    """name -> Row for the 16 parameter tensors, in the order of every checkpoint. Linear weights
    are (out, in)."""
    maxT, L, C, Vp = config.maxT, config.L, config.C, config.Vp
    return {
        # token embedding, and the classifier's weight
        "wte": Row((Vp, C), dtype, vocabulary=True, decays=True),
        "wpe": Row((maxT, C), dtype, decays=True),  # position embedding
        "ln1w": Row((L, C), dtype, stacked=True, ones=True),
        "ln1b": Row((L, C), dtype, stacked=True),
        "qkvw": Row((L, 3 * C, C), dtype, stacked=True, decays=True),
        "qkvb": Row((L, 3 * C), dtype, stacked=True),
        "attprojw": Row((L, C, C), dtype, stacked=True, decays=True),
        "attprojb": Row((L, C), dtype, stacked=True),
        "ln2w": Row((L, C), dtype, stacked=True, ones=True),
        "ln2b": Row((L, C), dtype, stacked=True),
        "fcw": Row((L, 4 * C, C), dtype, stacked=True, decays=True),
        "fcb": Row((L, 4 * C), dtype, stacked=True),
        "fcprojw": Row((L, C, 4 * C), dtype, stacked=True, decays=True),
        "fcprojb": Row((L, C), dtype, stacked=True),
        "lnfw": Row((C,), dtype, ones=True),
        "lnfb": Row((C,), dtype),
    }


WORDS = {  # what each tensor is, for look.py; of an activation's statistics, by the end of the name
    "wte": "token embedding: a row for each token",
    "wpe": "position embedding: a row for each position",
    "encoded": "residual stream: as it begins, the tokens' embeddings",
    "ln1": "what attention reads: the residual stream, normalized",
    "_mean": "row means: of what is normalized",
    "_rstd": "1 / row sizes: of what is normalized",
    "qkv": "queries, keys, values: of all heads, side by side",
    "preatt": "scores: how well a query (row) fits each earlier key (column)",
    "att": "attention: each row's scores, made probabilities",
    "atty": "what heads gather: values, weighted by attention",
    "attproj": "what attention adds: to the residual stream",
    "residual2": "residual stream: after attention",
    "ln2": "what the MLP reads: the residual stream, normalized",
    "fch": "hidden layer: of the MLP",
    "fch_gelu": "hidden layer, bent: after GELU",
    "fcproj": "what the MLP adds: to the residual stream",
    "residual3": "residual stream: after this layer",
    "lnf": "what the classifier reads: the residual stream after the last layer, normalized",
    "logits": "a number a token: the higher, the likelier it is next",
    "probs": "probabilities: of the next token",
    "losses": "losses: -log of the probability of the token that came next",
    "dlosses": "weight in the mean loss: 1 / T",
    "ln1w": "gain of a norm: it scales a channel", "ln1b": "bias of a norm",
    "ln2w": "gain of a norm: it scales a channel", "ln2b": "bias of a norm",
    "lnfw": "gain of a norm: it scales a channel", "lnfb": "bias of a norm",
    "qkvw": "weight: makes queries, keys and values", "qkvb": "bias: of queries, keys and values",
    "attprojw": "weight: mixes what the heads gathered", "attprojb": "bias: of attention's output",
    "fcw": "weight: each row looks for a pattern", "fcb": "bias: of the hidden layer",
    "fcprojw": "weight: each column is what a hidden number adds",
    "fcprojb": "bias: of the MLP's output",
}

SIZES = {  # model name -> layers L, heads NH, channels C; d12 and larger are GPT-2's sizes
    "d2": (2, 2, 128), "d4": (4, 4, 256), "d6": (6, 6, 384), "d12": (12, 12, 768),
    "d24": (24, 16, 1024), "d36": (36, 20, 1280), "d48": (48, 25, 1600),
    "c1536": (24, 16, 1536), "c2048": (24, 16, 2048), "c2560": (32, 32, 2560),  # GPT-3's
    "c4096": (32, 32, 4096),
}


def random_model(name, V, seed=42, maxT=1024):
    """Return (config, params) of an untrained SIZES[name], or None if `name` is not in SIZES."""
    if name not in SIZES:
        return None
    config = Config(maxT, V, *SIZES[name], padded(V))
    return config, random_params(parameter_table(config), V, config.L, seed)


def random_params(table, V, L, seed):
    """Standard deviations: 0.02, of projections into the residual stream 0.02 / sqrt(2 L), a factor
    of Radford et al. 2019, Language Models are Unsupervised Multitask Learners; biases 0, layernorm
    weights 1. Each block of a tensor has its own random generator, so that the weights do not
    depend on the number of threads, nor wpe[t] on maxT."""
    params = allocate(table)

    def fill(tensor, number, std, start, stop):
        np.random.default_rng((seed, number, start)).standard_normal(out=tensor[start:stop],
                                                                     dtype=np.float32)
        tensor[start:stop] *= std

    for number, (name, tensor) in enumerate(zip(table, unpadded(params, V))):
        if table[name].decays:  # the matrices
            std = np.float32(0.02 / math.sqrt(2 * L) if name in ("attprojw", "fcprojw") else 0.02)
            parallel_blocks(functools.partial(fill, tensor, number, std), tensor.size)
        else:
            tensor.fill(1.0 if table[name].ones else 0.0)
    return params


def activation_table(config, B, T):
    """name -> Row for what a forward pass over (B, T) tokens computes; the backward pass reads most
    of it."""
    L, NH, C, V = config.L, config.NH, config.C, config.V
    return {
        "encoded": Row((B, T, C)),
        "ln1": Row((L, B, T, C), stacked=True),
        "ln1_mean": Row((L, B, T), stacked=True),
        "ln1_rstd": Row((L, B, T), stacked=True),
        "qkv": Row((L, B, T, 3 * C), stacked=True),
        "atty": Row((L, B, T, C), stacked=True),
        "preatt": Row((L, B, NH, T, T), stacked=True),
        "att": Row((L, B, NH, T, T), stacked=True),
        "attproj": Row((L, B, T, C), stacked=True),
        "residual2": Row((L, B, T, C), stacked=True),
        "ln2": Row((L, B, T, C), stacked=True),
        "ln2_mean": Row((L, B, T), stacked=True),
        "ln2_rstd": Row((L, B, T), stacked=True),
        "fch": Row((L, B, T, 4 * C), stacked=True),
        "fch_gelu": Row((L, B, T, 4 * C), stacked=True),
        "fcproj": Row((L, B, T, C), stacked=True),
        "residual3": Row((L, B, T, C), stacked=True),
        "lnf": Row((B, T, C)),
        "lnf_mean": Row((B, T)),
        "lnf_rstd": Row((B, T)),
        "logits": Row((B, T, V)),  # the backward pass overwrites them with their gradient
        "probs": Row((B, T, V)),
        "losses": Row((B, T)),
    }


def scratch_table(config, B, T):
    """name -> Row for the gradients of activations. All but dlosses serve each layer, from the last
    to the first."""
    NH, C = config.NH, config.C
    return {
        # of the residual stream; lives through the whole backward pass
        "dresidual": Row((B, T, C)),
        "dbranch": Row((B, T, C)),  # of a layernorm's output or of atty; read by the next call
        "dqkv": Row((B, T, 3 * C)),  # from attention_backward to the next matmul_backward
        "dfch": Row((B, T, 4 * C)),  # of fch_gelu; then fch's, in place
        "dpreatt": Row((B, NH, T, T)),  # within attention_backward
        "datt": Row((B, NH, T, T)),  # within attention_backward
        "dlosses": Row((B, T)),  # 1 / (B*T * micro steps)
    }


def cache_table(config, B, T, dtype="float32"):
    """name -> Row for the KV cache: keys and values of B sequences of up to T positions."""
    shape = config.L, B, config.NKV, T, config.HS
    return {"keys": Row(shape, dtype, stacked=True), "values": Row(shape, dtype, stacked=True)}


# --------------------------------------------------------------------------------------------------
# layers, in network order, and AdamW; a backward pass cites the forward lines that it
# differentiates, last to first


def encoder_forward(out, inp, wte, wpe, B, T, C):
    """out (B,T,C) = wte[inp] + wpe (None: no positions). inp (B,T): ids, all below V (checked when
    they were read)."""
    np.take(wte, inp, axis=0, out=out, mode="clip")  # the mode that needs no buffered copy of `out`
    if wpe is not None:
        out += wpe[:T]


def encoder_backward(dwte, dwpe, dout, inp, B, T, C):
    """dwte += the sum of dout over the positions of each token; dwpe = the sum over the batch (0
    beyond T; or None)."""
    if dwpe is not None:
        np.add.reduce(dout, axis=0, out=dwpe[:T])  # out += wpe
        dwpe[T:] = 0.0
    # out = wte[inp]: equal tokens side by side, in a fixed order
    order = np.argsort(inp, axis=None, kind="stable")
    tokens = inp.reshape(-1)[order]
    firsts = np.flatnonzero(np.diff(tokens, prepend=-1))
    dwte[tokens[firsts]] += np.add.reduceat(dout.reshape(B * T, C)[order], firsts, axis=0)


EPS = 1e-5  # in every norm


def layernorm_forward(out, mean, rstd, inp, weight, bias, B, T, C):
    """out (B,T,C) = (inp - mean) * rstd * weight + bias; mean, rstd (B,T) = those of each row.
    Variance is biased.

    Layer Normalization, Ba et al. 2016, https://arxiv.org/abs/1607.06450
    """
    np.add.reduce(inp, axis=-1, out=mean)
    np.multiply(mean, np.float32(1.0 / C), out=mean)
    np.subtract(inp, mean[..., None], out=out)
    np.vecdot(out, out, out=rstd)
    rstd *= np.float32(1.0 / C)
    rstd += np.float32(EPS)
    np.sqrt(rstd, out=rstd)
    np.reciprocal(rstd, out=rstd)
    out *= rstd[..., None]
    out *= weight
    out += bias


def layernorm_backward(dinp, dweight, dbias, dout, inp, weight, mean, rstd, B, T, C):
    """dinp (B,T,C) +=; dweight, dbias (C,) =."""
    N = B * T
    rows = 128  # blocks of rows, which stay in the cache and keep sums accurate
    dinp = dinp.reshape(N, C)
    dout = dout.reshape(N, C)
    inp = inp.reshape(N, C)
    mean = mean.reshape(N, 1)
    rstd = rstd.reshape(N, 1)
    normed, dnormed = np.empty((2, rows, C), dout.dtype)
    dweight.fill(0.0)
    dbias.fill(0.0)
    for i in range(0, N, rows):
        r = slice(i, i + rows)
        d = dout[i : i + rows]
        n = normed[: len(d)]
        dn = dnormed[: len(d)]
        np.subtract(inp[r], mean[r], out=n)  # recompute n = (inp - mean) * rstd
        n *= rstd[r]
        dbias += np.add.reduce(d, axis=0)  # out = n * weight + bias
        np.multiply(d, n, out=dn)
        dweight += np.add.reduce(dn, axis=0)
        np.multiply(d, weight, out=dn)
        # n = (inp - mean) * rstd, where mean and rstd depend on inp too:
        #   dinp = rstd * (dn - mean of dn - n * mean of (dn * n))
        mean_dn_n = np.vecdot(dn, n)[:, None] * np.float32(1.0 / C)
        dn -= np.add.reduce(dn, axis=1, keepdims=True) * np.float32(1.0 / C)
        n *= mean_dn_n
        dn -= n
        dn *= rstd[r]
        dinp[r] += dn


def matmul_forward(out, inp, weight, bias, B, T, C, OC):
    """out (B,T,OC) = inp (B,T,C) @ weight (OC,C)^T + bias (OC,) (None: no bias)."""
    out = out.reshape(B * T, OC)
    inp = inp.reshape(B * T, C)
    np.matmul(inp, weight.T, out=out)
    if bias is not None:
        out += bias


def matmul_backward(dinp, dweight, dbias, dout, inp, weight, B, T, C, OC):
    """dinp (B,T,C) =, dweight (OC,C) =, dbias (OC,) = (None: no bias); dout (B,T,OC)."""
    dout = dout.reshape(B * T, OC)
    np.matmul(dout, weight, out=dinp.reshape(B * T, C))  # out = inp @ weight^T
    np.matmul(dout.T, inp.reshape(B * T, C), out=dweight)
    # out += bias: sums of columns, several times faster than by np.add.reduce
    if dbias is not None:
        np.matmul(np.ones(B * T, dout.dtype), dout, out=dbias)


@functools.lru_cache(maxsize=1)
def causal_mask(T):
    """(T, T) float32, 0 where position t may look at t2 <= t, -inf elsewhere."""
    return np.triu(np.full((T, T), -np.inf, np.float32), 1)


def attention_forward(out, preatt, att, inp, B, T, C, NH):
    """Causal multi-head attention: out (B,T,C) =; preatt (scaled scores), att (their softmax)
    (B,NH,T,T) =.

    inp (B,T,3C) holds query, key, value side by side, each NH heads of HS. Above the diagonal,
    preatt is -inf, att 0.
    Attention Is All You Need, Vaswani et al. 2017, https://arxiv.org/abs/1706.03762
    """
    HS = C // NH
    scale = np.float32(1.0 / math.sqrt(HS))
    mask = causal_mask(T)
    # each (B, NH, T, HS), a view
    query, key, value = np.moveaxis(inp.reshape(B, T, 3, NH, HS), (2, 3), (0, 2))
    heads = np.swapaxes(out.reshape(B, T, NH, HS), 1, 2)

    def batch(start, stop):
        for b in range(start, stop):
            p = preatt[b]
            a = att[b]
            np.matmul(query[b], np.swapaxes(key[b], 1, 2), out=p)
            p *= scale
            p += mask
            np.subtract(p, np.maximum.reduce(p, axis=-1, keepdims=True), out=a)
            np.exp(a, out=a)
            a *= np.float32(1.0) / np.add.reduce(a, axis=-1, keepdims=True)
            np.matmul(a, value[b], out=heads[b])

    parallel_blocks(batch, B, attention_block(B, T, HS))


def attention_block(B, T, HS):
    """Sequences that a thread takes at a time; all B where OpenBLAS shares a matmul among its
    threads: above 64^3."""
    return 1 if T * T * HS <= 64**3 else B


def attention_decode(out, att, keys, values, inp, position, B, T, C, NH):
    """Causal attention of T new positions, from `position` on: out (B,T,C) =; att
    (B,NH,T,position+T) =, as above. keys, values (B,NH,>=position+T,HS) are the cache; inp's
    (B,T,3C) are appended to it first."""
    HS = C // NH
    context = position + T
    query, key, value = np.moveaxis(inp.reshape(B, T, 3, NH, HS), (2, 3), (0, 2))
    keys[:, :, position:context] = key
    values[:, :, position:context] = value
    np.matmul(query, np.swapaxes(keys[:, :, :context], 2, 3), out=att)
    att *= np.float32(1.0 / math.sqrt(HS))
    att += np.triu(np.full((T, context), -np.inf, np.float32), 1 + position)
    att -= np.maximum.reduce(att, axis=-1, keepdims=True)
    np.exp(att, out=att)
    att *= np.float32(1.0) / np.add.reduce(att, axis=-1, keepdims=True)
    np.matmul(att, values[:, :, :context], out=np.swapaxes(out.reshape(B, T, NH, HS), 1, 2))


def attention_backward(dinp, dpreatt, datt, dout, inp, att, B, T, C, NH):
    """dinp (B,T,3C) =; dpreatt, datt (B,NH,T,T) = (scratch); dout (B,T,C)."""
    HS = C // NH
    scale = np.float32(1.0 / math.sqrt(HS))
    query, key, value = np.moveaxis(inp.reshape(B, T, 3, NH, HS), (2, 3), (0, 2))
    dquery, dkey, dvalue = np.moveaxis(dinp.reshape(B, T, 3, NH, HS), (2, 3), (0, 2))
    dheads = np.swapaxes(dout.reshape(B, T, NH, HS), 1, 2)

    def batch(start, stop):
        for b in range(start, stop):
            a = att[b]
            da = datt[b]
            dp = dpreatt[b]
            np.matmul(np.swapaxes(a, 1, 2), dheads[b], out=dvalue[b])  # heads = att @ value
            np.matmul(dheads[b], np.swapaxes(value[b], 1, 2), out=da)
            np.subtract(da, np.vecdot(a, da)[..., None], out=dp)  # att = softmax(preatt)
            dp *= a  # 0 above the diagonal, where att is
            dp *= scale  # preatt = query @ key^T * scale
            np.matmul(dp, key[b], out=dquery[b])
            np.matmul(np.swapaxes(dp, 1, 2), query[b], out=dkey[b])

    parallel_blocks(batch, B, attention_block(B, T, HS))


GELU_SCALE = np.float32(math.sqrt(2.0 / math.pi))
GELU_CUBE = np.float32(0.044715)


def gelu_forward(out, inp, N):
    """out (N,) = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).

    Gaussian Error Linear Units, Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415
    """
    out = out.reshape(N)
    inp = inp.reshape(N)

    def block(start, stop):
        x = inp[start:stop]
        y = out[start:stop]
        np.multiply(x, x, out=y)
        y *= GELU_SCALE * GELU_CUBE
        y += GELU_SCALE
        y *= x
        np.tanh(y, out=y)
        y += np.float32(1.0)
        y *= x
        y *= np.float32(0.5)

    parallel_blocks(block, N)


def gelu_backward(dinp, inp, dout, N):
    """dinp (N,) = dout * gelu'(inp); dinp may be dout itself."""
    dinp = dinp.reshape(N)
    inp = inp.reshape(N)
    dout = dout.reshape(N)

    def block(start, stop):
        # With u = s (x + c x^3) and t = tanh(u):
        #   gelu' = (1 + t)/2 + x/2 (1 - t^2) u' = (1 - (1 - t)/2) * (1 + (1 - t) x u')
        x = inp[start:stop]
        t, xu = np.empty((2, stop - start), x.dtype)
        np.multiply(x, x, out=t)
        np.multiply(t, np.float32(3.0) * GELU_SCALE * GELU_CUBE, out=xu)
        xu += GELU_SCALE
        xu *= x  # x u'
        t *= GELU_SCALE * GELU_CUBE
        t += GELU_SCALE
        t *= x
        np.tanh(t, out=t)
        np.subtract(np.float32(1.0), t, out=t)  # 1 - t
        xu *= t
        xu += np.float32(1.0)
        t *= np.float32(-0.5)
        t += np.float32(1.0)
        t *= xu
        np.multiply(t, dout[start:stop], out=dinp[start:stop])

    parallel_blocks(block, N)


def residual_forward(out, inp1, inp2, N):
    """out (N,) = inp1 + inp2. Its backward pass hands dout on to both unchanged: they share one
    buffer, dresidual."""
    np.add(inp1.reshape(N), inp2.reshape(N), out=out.reshape(N))


def softmax_forward(probs, logits, B, T, V):
    """probs (B,T,V) = softmax of each row of logits (B,T,V), the row's maximum subtracted first."""
    N = B * T
    probs = probs.reshape(N, V)
    logits = logits.reshape(N, V)

    def rows(start, stop):
        x = logits[start:stop]
        p = probs[start:stop]
        np.subtract(x, np.maximum.reduce(x, axis=1, keepdims=True), out=p)
        np.exp(p, out=p)
        p *= np.float32(1.0) / np.add.reduce(p, axis=1, keepdims=True)

    parallel_blocks(rows, N, max(1, BLOCK // V))


def crossentropy_forward(losses, logits, probs, targets, B, T, V):
    """losses (B,T) = -log of each target's probability; below float32's smallest normal number,
    from logits (B,T,V)."""
    p = np.take_along_axis(probs, targets[..., None], axis=-1)[..., 0]
    tiny = np.finfo(np.float32).tiny
    np.negative(np.log(np.maximum(p, tiny)), out=losses)
    x = logits[p < tiny]
    t = targets[p < tiny, None]  # log(sum(exp(x))) is the largest x - log(its probability)
    losses[p < tiny] = (x.max(-1) - np.take_along_axis(x, t, axis=-1)[:, 0]
                        - np.log(probs[p < tiny].max(-1)))


def crossentropy_softmax_backward(dlogits, dlosses, probs, targets, B, T, V):
    """dlogits (B,T,V) = (probs - one-hot(targets)) * dlosses (B,T) of each row: the gradient
    through both layers."""
    N = B * T
    dlogits = dlogits.reshape(N, V)
    dlosses = dlosses.reshape(N, 1)
    probs = probs.reshape(N, V)
    targets = targets.reshape(N)

    def rows(start, stop):
        d = dlogits[start:stop]
        np.multiply(probs[start:stop], dlosses[start:stop], out=d)
        d[np.arange(stop - start), targets[start:stop]] -= dlosses[start:stop, 0]

    parallel_blocks(rows, N, max(1, BLOCK // V))


def global_norm(grads, N):
    """The Euclidean norm of the flat gradient (N,), as a Python float; sums of short blocks are
    added in float64."""

    def square(start, stop):
        return np.vdot(grads[start:stop], grads[start:stop])

    squares = parallel_blocks(square, N, BLOCK // 8)
    return math.sqrt(math.fsum(squares))


def adamw_update(params, m, v, grads, learning_rate, beta1, beta2, eps, weight_decay, grad_scale,
                 step, N):
    """One AdamW step on flat arrays (N,), params, m and v in place; `step` counts from 1 for the
    bias correction.

    grad_scale multiplies the gradients first (clipping).
    Decoupled Weight Decay Regularization, Loshchilov and Hutter 2017,
    https://arxiv.org/abs/1711.05101"""
    # m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps), with the bias corrections moved out
    # of the loop:
    correction2 = math.sqrt(1.0 - beta2**step)
    rate = np.float32(learning_rate * correction2 / (1.0 - beta1**step))
    eps = np.float32(eps * correction2)
    keep = np.float32(1.0 - learning_rate * weight_decay)
    scale = np.float32(grad_scale)
    one_minus_beta1 = np.float32(1.0 - beta1)
    one_minus_beta2 = np.float32(1.0 - beta2)
    beta2 = np.float32(beta2)

    def block(start, stop):
        p = params[start:stop]
        mean = m[start:stop]
        square = v[start:stop]
        g = grads[start:stop]
        t = np.empty_like(p)
        if scale != 1.0:
            g = g * scale
        np.subtract(g, mean, out=t)  # m += (1 - beta1) * (g - m)
        t *= one_minus_beta1
        mean += t
        np.multiply(g, g, out=t)  # v = beta2 * v + (1 - beta2) * g^2
        t *= one_minus_beta2
        square *= beta2
        square += t
        np.sqrt(square, out=t)  # p -= rate * m / (sqrt(v) + eps)
        t += eps
        np.divide(mean, t, out=t)
        t *= rate
        if weight_decay:
            p *= keep
        p -= t

    parallel_blocks(block, N)


class AdamW:
    """The optimizer: what it keeps from one update to the next, and an update. Another optimizer is
    a class like it."""

    STATE = "m", "v"  # float32 Tensors like the parameters', in the order of a state file

    def __init__(self, params):
        self.m = allocate(params.table)
        self.v = allocate(params.table)

    def update(self, params, grads, settings, learning_rate, step, grad_scale=1.0):
        """One step; `step` counts from 1."""
        for name, row in params.table.items():
            decays = settings.decay == "all" or row.decays
            decay = row.decay * settings.weight_decay if decays else 0.0
            tensors = [getattr(source, name).reshape(-1)
                       for source in (params, self.m, self.v, grads)]
            adamw_update(*tensors, learning_rate * row.rate, settings.beta1, settings.beta2,
                         settings.eps, decay, grad_scale, step, row.size)


# --------------------------------------------------------------------------------------------------
# model


def forward_layers(acts, params, config, inputs, position, attend, matmul):
    """Token ids (B, T) at the positions from `position` on -> acts.lnf (B, T, C): all but the
    classifier. Training and text generation each pass their matmul and their attend(l, a), which
    fills layer l's a.atty from a.qkv."""
    B, T = inputs.shape
    C = config.C
    N = inputs.size
    encoder_forward(acts.encoded, inputs, params.wte, params.wpe[position:], B, T, C)
    residual = acts.encoded
    for l in range(config.L):
        p = layer(params, l)
        a = layer(acts, l)
        layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, B, T, C)
        matmul(a.qkv, a.ln1, p.qkvw, p.qkvb, B, T, C, 3 * C)
        attend(l, a)
        matmul(a.attproj, a.atty, p.attprojw, p.attprojb, B, T, C, C)
        residual_forward(a.residual2, residual, a.attproj, N * C)
        layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, B, T, C)
        matmul(a.fch, a.ln2, p.fcw, p.fcb, B, T, C, 4 * C)
        gelu_forward(a.fch_gelu, a.fch, 4 * N * C)
        matmul(a.fcproj, a.fch_gelu, p.fcprojw, p.fcprojb, B, T, 4 * C, C)
        residual_forward(a.residual3, a.residual2, a.fcproj, N * C)
        residual = a.residual3
    layernorm_forward(acts.lnf, acts.lnf_mean, acts.lnf_rstd, residual, params.lnfw, params.lnfb, B,
                      T, C)


class GPT2:
    """A model, its gradients and its optimizer. Every large buffer is allocated once, at the start:
    by allocate_activations and, to train, allocate_training. Smaller batches use the start of the
    same buffers. Llama3 inherits from it, with tables, forward_layers, attend, head and
    backward_into of its own."""

    TITLE = "GPT-2"
    MAGIC = MODEL_MAGIC
    Config = Config
    Settings = Settings
    SIZES = SIZES
    parameter_table = staticmethod(parameter_table)
    random_model = staticmethod(random_model)
    activation_table = staticmethod(activation_table)
    scratch_table = staticmethod(scratch_table)
    forward_layers = staticmethod(forward_layers)
    Optimizer = AdamW
    WORDS = WORDS

    def __init__(self, config, params):
        self.config = config
        self.params = params
        self.grads = self.optimizer = None

    def allocate_activations(self, B, T):
        """Allocate the activations of forward passes over (B, T) tokens, or fewer."""
        self.activations_buffer = allocate(self.activation_table(self.config, B, T)).buffer

    def allocate_training(self, B, T, micro_steps=1):
        """Allocate what a backward pass over (B, T) needs, two gradient buffers when gradients
        accumulate; and, the first time, the optimizer."""
        table = self.params.table
        self.grads, self.optimizer = allocate(table), self.optimizer or self.Optimizer(self.params)
        self.micro_grads = allocate(table) if micro_steps > 1 else None
        self.scratch = allocate(self.scratch_table(self.config, B, T))
        self.recent = np.zeros(2, RECENT)  # losses and norms, if outliers are skipped

    def trunk(self, inputs):
        """Token ids (B, T) -> acts, up to lnf (B, T, C): all but the classifier."""
        acts = views(self.activation_table(self.config, *inputs.shape), self.activations_buffer)
        self.inputs = inputs
        self.acts = acts
        self.forward_layers(acts, self.params, self.config, inputs, 0, self.attend, matmul_forward)
        return acts

    def attend(self, l, a):
        attention_forward(a.atty, a.preatt, a.att, a.qkv, *self.inputs.shape, self.config.C,
                          self.config.NH)

    def head(self, tensors):
        """The classifier's weight (V, C) in params or grads: tied to the embedding."""
        return tensors.wte[: self.config.V]

    def forward(self, inputs, targets, weights=None, total=None):
        """inputs, targets (B, T) integer ids, weights (B, T) float32 -> the loss, a float: see
        loss_of; activations stay in self.acts."""
        B, T = inputs.shape
        C, V = self.config.C, self.config.V
        acts = self.trunk(inputs)
        matmul_forward(acts.logits, acts.lnf, self.head(self.params), None, B, T, C, V)
        softmax_forward(acts.probs, acts.logits, B, T, V)
        crossentropy_forward(acts.losses, acts.logits, acts.probs, targets, B, T, V)
        return self.loss_of(targets, weights, total)

    def loss_of(self, targets, weights, total):
        """The mean of acts.losses or, with weights, the sum of weights * losses over `total`: by
        default the sum of the weights, else that of an update's micro-batches."""
        self.targets, self.weights = targets, weights
        if weights is None:
            return float(np.mean(self.acts.losses, dtype=np.float64))
        self.total = np.sum(weights, dtype=np.float64) if total is None else total
        return float(np.sum(weights * self.acts.losses, dtype=np.float64) / self.total)

    def loss_gradients(self, dlosses, micro_steps):
        """dlosses (B,T) = the gradient of the loss with respect to each target's."""
        if self.weights is None:
            dlosses.fill(1.0 / (dlosses.size * micro_steps))
        else:
            np.divide(self.weights, np.float32(self.total), out=dlosses)

    def losses(self, inputs, targets):
        """inputs, targets (B, T) integer ids -> their losses (B, T), until the next pass."""
        self.forward(inputs, targets)
        return self.acts.losses

    def backward(self, micro_step=0, micro_steps=1):
        """Gradients of the last loss, if it is a mean / micro_steps: self.grads =, later +=."""
        self.backward_into(self.micro_grads if micro_step else self.grads, micro_steps)
        if micro_step > 0:
            total = flat(self.grads)
            micro = flat(self.micro_grads)
            parallel_blocks(lambda start, stop: np.add(total[start:stop], micro[start:stop],
                                                       out=total[start:stop]),
                            total.size)

    def backward_into(self, grads, micro_steps):
        """Write all of `grads` but wte from token V on, which stays 0."""
        B, T = self.inputs.shape
        NH, C, V = self.config.NH, self.config.C, self.config.V
        params, acts = self.params, self.acts
        scratch = views(self.scratch_table(self.config, B, T), self.scratch.buffer)
        dresidual, dbranch = scratch.dresidual, scratch.dbranch

        self.loss_gradients(scratch.dlosses, micro_steps)
        dlogits = acts.logits
        crossentropy_softmax_backward(dlogits, scratch.dlosses, acts.probs, self.targets, B, T, V)
        matmul_backward(dbranch, self.head(grads), None, dlogits, acts.lnf, self.head(params), B, T,
                        C, V)
        dresidual.fill(0.0)
        layernorm_backward(dresidual, grads.lnfw, grads.lnfb, dbranch, acts.residual3[-1],
                           params.lnfw, acts.lnf_mean, acts.lnf_rstd, B, T, C)
        for l in reversed(range(self.config.L)):
            p = layer(params, l)
            a = layer(acts, l)
            g = layer(grads, l)
            residual = acts.encoded if l == 0 else acts.residual3[l - 1]
            matmul_backward(scratch.dfch, g.fcprojw, g.fcprojb, dresidual, a.fch_gelu, p.fcprojw, B,
                            T, 4 * C, C)
            gelu_backward(scratch.dfch, a.fch, scratch.dfch, 4 * B * T * C)
            matmul_backward(dbranch, g.fcw, g.fcb, scratch.dfch, a.ln2, p.fcw, B, T, C, 4 * C)
            layernorm_backward(dresidual, g.ln2w, g.ln2b, dbranch, a.residual2, p.ln2w, a.ln2_mean,
                               a.ln2_rstd, B, T, C)
            matmul_backward(dbranch, g.attprojw, g.attprojb, dresidual, a.atty, p.attprojw, B, T, C,
                            C)
            attention_backward(scratch.dqkv, scratch.dpreatt, scratch.datt, dbranch, a.qkv, a.att,
                               B, T, C, NH)
            matmul_backward(dbranch, g.qkvw, g.qkvb, scratch.dqkv, a.ln1, p.qkvw, B, T, C, 3 * C)
            layernorm_backward(dresidual, g.ln1w, g.ln1b, dbranch, residual, p.ln1w, a.ln1_mean,
                               a.ln1_rstd, B, T, C)
        # adds to the classifier's part of wte
        encoder_backward(grads.wte, grads.wpe, dresidual, self.inputs, B, T, C)

    def norm_and_scale(self, settings):
        """The norm of the gradients, None if no setting needs it, and the factor that clips
        them."""
        norm = global_norm(flat(self.grads), flat(self.grads).size) if settings.needs_norm else None
        return norm, (settings.grad_clip / norm if settings.grad_clip and norm > settings.grad_clip
                      else 1.0)


def matmul_few_rows(out, inp, weight, bias, B, T, C, OC):
    """As matmul_forward, which OpenBLAS does slowly for few rows."""
    out = out.reshape(B * T, OC)
    inp = inp.reshape(B * T, C)
    if B * T > 16:
        np.matmul(inp, weight.T, out=out)
    elif B * T > 8 or OC <= C:
        out[...] = np.matmul(weight, inp.T).T
    else:  # for fewer still, a dot product for each row of a tall weight is faster
        parallel_blocks(lambda start, stop: np.vecdot(weight[start:stop, None], inp,
                                                      out=out.T[start:stop]), OC,
                        max(1, 4 * BLOCK // C))
    if bias is not None:
        out += bias


def positions_at_once(B, T):
    """How many positions of each of B sequences a Decoder's pass takes; longer prompts take several
    passes."""
    return max(1, min(256, T) // B)


class Decoder:
    """GPT-2 for text generation: forward passes over the next positions of B sequences, with a KV
    cache."""

    def __init__(self, config, params, B, T):
        """Allocate for B sequences of at most T positions."""
        self.config = config
        self.params = params
        self.T = T
        cache, acts = self.tables(config, B, T)
        self.cache = allocate(cache)
        self.buffer = np.zeros(table_bytes(acts), np.uint8)

    activation_table = staticmethod(activation_table)
    forward_layers = staticmethod(forward_layers)
    head = GPT2.head
    draw = draw  # of sampler.py

    @classmethod
    def tables(cls, config, B, T):
        """What is allocated: the KV cache; the larger of two passes' activations, over 1 and over B
        sequences."""
        passes = (cls.decode_table(config, n, positions_at_once(n, T), T) for n in (1, B))
        return cache_table(config, B, T), max(passes, key=table_bytes)

    @classmethod
    def decode_table(cls, config, B, T, context):
        """name -> Row for a pass over T new positions, `context` in all; all layers share the
        buffers."""
        saved = cls.activation_table(config, B, T).items()
        rows = {name: row._replace(shape=row.shape[row.stacked :], stacked=False)
                for name, row in saved if name not in ("preatt", "probs", "losses")}
        return rows | {"att": Row((B, config.NH, T, context)), "logits": Row((B, config.V))}

    def logits(self, tokens, position):
        """tokens (B, T), the first at `position` -> logits (B, V) of the next token, which the next
        pass overwrites."""
        step = positions_at_once(len(tokens), self.T)
        for begin in range(0, tokens.shape[1], step):
            logits = self.forward(tokens[:, begin : begin + step], position + begin)
        return logits

    def forward(self, tokens, position):
        """One forward pass over tokens (B, T)."""
        B, T = tokens.shape
        config = self.config
        params = self.params
        acts = views(self.decode_table(config, B, T, position + T), self.buffer)
        attend = functools.partial(self.attend, position, B, T)
        self.forward_layers(acts, params, config, tokens, position, attend, matmul_few_rows)
        matmul_few_rows(acts.logits, acts.lnf[:, -1].copy(), self.head(params), None, B, 1,
                        config.C, config.V)
        return acts.logits

    def attend(self, position, B, T, l, a):
        """Store the new keys and values in layer l's cache, and attend to all."""
        keys = self.cache.keys[l, :B]
        values = self.cache.values[l, :B]
        attention_decode(a.atty, a.att, keys, values, a.qkv, position, B, T, self.config.C,
                         self.config.NH)

    def share_first(self, B, T):
        """Copy the first sequence's cache to sequences 1 to B - 1, which continue the same prompt
        of T tokens."""
        for tensor in (self.cache.keys, self.cache.values):
            tensor[:, 1:B, :, :T] = tensor[:, :1, :, :T]


GPT2.Decoder = Decoder

# --------------------------------------------------------------------------------------------------
# main


def memory_plan(architecture, config, settings):
    """What training allocates: [(bytes, what for)]."""
    B = settings.B
    T = settings.T
    parameters = table_bytes(architecture.parameter_table(config))
    return [
        (parameters, "parameters"),
        (parameters * (2 if settings.micro_steps > 1 else 1), "gradients"),
        *((parameters, f"{architecture.Optimizer.__name__}'s {name}")
          for name in architecture.Optimizer.STATE),
        (table_bytes(architecture.activation_table(config, B, T)), "activations"),
        (table_bytes(architecture.scratch_table(config, B, T)), "gradients of activations"),
        *([(sum(map(table_bytes, architecture.Decoder.tables(config, 1, T))), "text")]
          if settings.sample_every else [])
    ]


def main(architecture=GPT2):
    settings = parse_settings(architecture.Settings,
                              f"Train {architecture.TITLE} on the CPU, in NumPy.")
    refuse_launchers(os.environ, os.path.basename(sys.argv[0]))
    # on overflow: check_update stops at what is not finite
    warnings.simplefilter("ignore", RuntimeWarning)
    with locked(settings.output_dir), Loop(settings, architecture) as loop:
        threads = fit_threads(loop.notes.get("threads"))
        device = f"CPU, {threads} thread{'s' * (threads > 1)}, NumPy {np.__version__}, float32"
        loop.console.header(device, peak=None)
        loop.console.memory(memory_plan(architecture, loop.config, settings))
        model = architecture(loop.config, loop.params)
        model.allocate_activations(settings.B, settings.T)
        model.allocate_training(settings.B, settings.T, settings.micro_steps)
        model.decoder = (model.Decoder(loop.config, loop.params, 1, settings.T)
                         if settings.sample_every else None)
        loop.start(model, Saver(model, settings))
        other_programs = Others()
        for step in loop:  # between updates, it validates, samples, saves and stops
            loop.report(step, train_step(model, loop.train_loader, settings, step))
            if note := other_programs.slow_down():
                loop.console.note(note)
    return loop.status


def train_step(model, loader, settings, step):
    """Run update `step`, from 0 -> Update. Raises UserError, before weights change, if loss or norm
    is not finite."""
    start = time.perf_counter()
    batches = [loader.next_batch() for _ in range(settings.micro_steps)]
    total = total_weight(batches)
    if total == 0.0:
        return Update(0.0, 0.0, time.perf_counter() - start, NO_TARGETS)
    loss = 0.0
    for micro_step, batch in enumerate(batches):
        loss += model.forward(*batch, total=total) / (1 if total else settings.micro_steps)
        check_update(step, loss)
        model.backward(micro_step, settings.micro_steps)
    norm, grad_scale = model.norm_and_scale(settings)
    z_scores, skipped = (judge(settings, model.recent, loss, norm) if settings.skips_outliers
                         else (None, None))
    if not skipped:
        check_update(step, loss, norm)
        rate = learning_rate_at(settings, step)
        model.optimizer.update(model.params, model.grads, settings, rate, step + 1, grad_scale)
    return Update(loss, norm, time.perf_counter() - start, skipped, z_scores)


if __name__ == "__main__":
    run_main(main)
