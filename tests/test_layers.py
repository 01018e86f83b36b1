"""Each layer's backward pass against finite differences in float64, on awkward shapes; float32
stays float32."""

import dataclasses
import math

import numpy as np
import pytest

import llmc.tensors
import llmc.threads
import train_gpt2 as t
import train_speedrun
from answers import finite_difference
from conftest import SMALL, SMALL_LLAMA, make_model
from llmc.settings import Settings
from llmc.tensors import flat, views
from llmc.debugstate import check_tensor

SPEEDRUN = train_speedrun.Config(32, 97, 2, 2, 48, 128)
SHAPES = [(1, 1, 6, 3), (1, 5, 6, 2), (3, 7, 10, 5), (2, 33, 12, 1)]  # B, T, C, NH
SEVERAL_BLOCKS = 2, 140, 4, 1  # of layernorm and RMSNorm
# the layers' constants (1/C, GELU's) are float32, so float64 arrays agree to about that
FLOAT32 = 2.0**-24


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def assert_gradients(forward, dout, **pairs):
    """name=(gradient, what forward reads)."""
    for name, (got, x) in pairs.items():
        expected = finite_difference(forward, x, dout)
        assert check_tensor(name, got, expected,
                            1e-9 + 16 * FLOAT32 * max(1.0, np.abs(expected).max()))


def forward_of(function, *arguments):
    """forward(): a layer's forward pass; returns its first output."""
    def forward():
        function(*arguments)
        return arguments[0]

    return forward


def nan(*shape):
    """An output that nothing has written yet."""
    return np.full(shape, np.nan)


@pytest.mark.parametrize("B, T, C, NH", (*SHAPES, SEVERAL_BLOCKS))
def test_layernorm(B, T, C, NH):
    inp = normal(B, T, C)
    weight = normal(C, seed=1)
    bias = normal(C, seed=2)
    dout = normal(B, T, C, seed=3)
    out = nan(B, T, C)
    mean = nan(B, T)
    rstd = nan(B, T)
    forward = forward_of(t.layernorm_forward, out, mean, rstd, inp, weight, bias, B, T, C)
    expected = ((inp - inp.mean(-1, keepdims=True)) / np.sqrt(inp.var(-1, keepdims=True) + 1e-5)
                * weight + bias)
    assert check_tensor("out", forward(), expected, 1e-6)
    start = normal(B, T, C, seed=4)
    dinp = start.copy()
    dweight = nan(C)
    dbias = nan(C)
    t.layernorm_backward(dinp, dweight, dbias, dout, inp, weight, mean, rstd, B, T, C)
    assert_gradients(forward, dout, dinp=(dinp - start, inp), dweight=(dweight, weight),
                     dbias=(dbias, bias))


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("B, T, C, NH", SHAPES)
def test_matmul(B, T, C, NH, bias):
    OC = 2 * C + 1
    inp = normal(B, T, C)
    weight = normal(OC, C, seed=1)
    dout = normal(B, T, OC, seed=3)
    b = normal(OC, seed=2) if bias else None
    forward = forward_of(t.matmul_forward, nan(B, T, OC), inp, weight, b, B, T, C, OC)
    assert check_tensor("out", forward(), inp @ weight.T + (b if bias else 0.0), 1e-12)
    dinp = nan(B, T, C)
    dweight = nan(OC, C)
    dbias = nan(OC) if bias else None
    t.matmul_backward(dinp, dweight, dbias, dout, inp, weight, B, T, C, OC)
    of_bias = {"dbias": (dbias, b)} if bias else {}
    assert_gradients(forward, dout, dinp=(dinp, inp), dweight=(dweight, weight), **of_bias)


@pytest.mark.parametrize("B, T, C, NH", SHAPES)
def test_attention(B, T, C, NH):
    inp = normal(B, T, 3 * C)
    dout = normal(B, T, C, seed=3)
    preatt = nan(B, NH, T, T)
    att = nan(B, NH, T, T)
    forward = forward_of(t.attention_forward, nan(B, T, C), preatt, att, inp, B, T, C, NH)
    query, key, value = (x.reshape(B, T, NH, C // NH).swapaxes(1, 2) for x in np.split(inp, 3, -1))
    scores = query @ key.swapaxes(2, 3) / math.sqrt(C // NH)
    weights = np.exp(scores) * np.tri(T)
    weights /= weights.sum(-1, keepdims=True)
    out = forward()
    assert check_tensor("preatt", np.tril(preatt), np.tril(scores), 1e-6)
    assert check_tensor("att", att, weights, 1e-6)
    assert check_tensor("out", out, (weights @ value).swapaxes(1, 2).reshape(B, T, C), 1e-6)
    dinp = nan(B, T, 3 * C)
    dpreatt = nan(B, NH, T, T)
    datt = nan(B, NH, T, T)
    t.attention_backward(dinp, dpreatt, datt, dout, inp, att, B, T, C, NH)
    assert_gradients(forward, dout, dinp=(dinp, inp))


@pytest.mark.parametrize("B, T, C, NH", SHAPES)
def test_attention_with_a_cache(B, T, C, NH):
    """In pieces of some positions and of one: as all at once."""
    HS = C // NH
    inp = normal(B, T, 3 * C)
    whole = nan(B, T, C)
    all_att = nan(B, NH, T, T)
    t.attention_forward(whole, nan(B, NH, T, T), all_att, inp, B, T, C, NH)
    keys = nan(B, NH, T + 1, HS)
    values = nan(B, NH, T + 1, HS)
    ends = [*range(1, T, 3), T]
    for begin, end in zip([0, *ends], ends):
        out = nan(B, end - begin, C)
        att = nan(B, NH, end - begin, end)
        t.attention_decode(out, att, keys, values, inp[:, begin:end], begin, B, end - begin, C, NH)
        assert check_tensor("out", out, whole[:, begin:end], 1e-6)
        assert check_tensor("att", att, all_att[:, :, begin:end, :end], 1e-6)
    key, value = inp.reshape(B, T, 3, NH, HS).transpose(2, 0, 3, 1, 4)[1:]
    assert check_tensor("keys", keys[:, :, :T], key, 0.0)
    assert check_tensor("values", values[:, :, :T], value, 0.0)


@pytest.mark.parametrize("N", (1, 7, 1000))
def test_gelu(in_blocks, N):
    inp = 3.0 * normal(N)
    dout = normal(N, seed=3)
    forward = forward_of(t.gelu_forward, nan(N), inp, N)
    expected = 0.5 * inp * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (inp + 0.044715 * inp**3)))
    assert check_tensor("out", forward(), expected, 1e-6)
    dinp = nan(N)
    t.gelu_backward(dinp, inp, dout, N)
    assert_gradients(forward, dout, dinp=(dinp, inp))
    t.gelu_backward(dout, inp, dout, N)  # in place, as the model calls it
    assert np.array_equal(dout, dinp)


def test_what_is_huge_or_impossible_stays_finite():
    inp = np.array([-1e4, -20.0, -0.0, 0.0, 20.0, 1e4], np.float32)
    out = np.empty_like(inp)
    dinp = np.empty_like(inp)
    t.gelu_forward(out, inp, inp.size)
    t.gelu_backward(dinp, inp, np.ones_like(inp), inp.size)
    assert np.array_equal(out, np.array([0, 0, 0, 0, 20, 1e4], np.float32)), out
    assert np.array_equal(dinp, np.array([0, 0, 0.5, 0.5, 1, 1], np.float32)), dinp
    logits = np.array([[[1e4, -1e4, 9999.0], [1.0, -1e4, 0.0]]], np.float32)
    probs = np.empty_like(logits)
    losses = np.empty((1, 2), np.float32)
    t.softmax_forward(probs, logits, 1, 2, 3)
    assert check_tensor("probs", probs, [[[0.7310586, 0.0, 0.2689414]] * 2], 1e-6)
    logits = np.array([[[200, 0, 0], [0, -95, 0], [1e38, -1e38, 0], [1, 2, -5], [np.nan, 0, 0]]],
                      np.float32)
    probs = np.empty_like(logits)
    losses = np.empty((1, 5), np.float32)
    targets = np.array([[1, 1, 2, 2, 0]])
    t.softmax_forward(probs, logits, 1, 5, 3)
    t.crossentropy_forward(losses, logits, probs, targets, 1, 5, 3)
    assert check_tensor("losses", losses[:, :4] / [[1, 1, 1e38, 1]],
                        [[200, 95 + math.log(2), 1, 7.3139308]], 1e-5)
    assert np.isnan(losses[0, 4]), "the loss of a logit that is NaN must be NaN"
    out = np.empty((1, 2, 1), np.float32)
    preatt, att = np.empty((2, 1, 1, 2, 2), np.float32)
    t.attention_forward(out, preatt, att, np.array([[[-1, 1e4, 1], [1, 9999, 0]]], np.float32), 1,
                        2, 1, 1)
    assert check_tensor("out", out, [[[1.0], [0.7310586]]], 1e-6)


@pytest.mark.parametrize("B, T, V", [(1, 1, 3), (2, 5, 257)])
def test_softmax_and_cross_entropy(in_blocks, B, T, V):
    logits = normal(B, T, V)
    dlosses = normal(B, T, seed=3)
    targets = np.random.default_rng(1).integers(0, V, (B, T))

    def forward():
        t.softmax_forward(probs, logits, B, T, V)
        t.crossentropy_forward(losses, logits, probs, targets, B, T, V)
        return losses

    probs = nan(B, T, V)
    losses = nan(B, T)
    dlogits = nan(B, T, V)
    forward()
    name = "probs" if np.isnan(probs).all() else "sums of probs"  # which nobody writes
    assert check_tensor(name, probs.sum(-1, keepdims=True), np.ones((B, T, 1)), 1e-6)
    t.crossentropy_softmax_backward(dlogits, dlosses, probs, targets, B, T, V)
    assert_gradients(forward, dlosses, dlogits=(dlogits, logits))


@pytest.mark.parametrize("B, T, C, NH", SHAPES)
def test_encoder(B, T, C, NH):
    maxT = T + 2
    Vp = 9
    # few ids: most stand at several positions
    inp = np.random.default_rng(1).integers(0, 5, (B, T))
    wte = normal(Vp, C)
    wpe = normal(maxT, C, seed=1)
    dout = normal(B, T, C, seed=3)
    forward = forward_of(t.encoder_forward, nan(B, T, C), inp, wte, wpe, B, T, C)
    start = normal(Vp, C, seed=4)
    dwte = start.copy()
    dwpe = nan(maxT, C)
    t.encoder_backward(dwte, dwpe, dout, inp, B, T, C)
    assert_gradients(forward, dout, dwte=(dwte - start, wte), dwpe=(dwpe, wpe))
    t.encoder_backward(without := start.copy(), None, dout, inp, B, T, C)
    assert np.array_equal(without, dwte)


def test_adamw_and_norm_follow_the_formulas(in_blocks):
    N, lr, beta1, beta2, eps, decay, scale = 1001, 1e-2, 0.9, 0.99, 1e-5, 0.1, 0.5
    p = normal(N)
    g = normal(N, seed=1)
    expected = p.copy()
    m, v, got_m, got_v = np.zeros((4, N))
    for step in (1, 2, 3):
        gs = g * scale * step
        m = beta1 * m + (1 - beta1) * gs
        v = beta2 * v + (1 - beta2) * gs**2
        expected -= lr * (m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + eps) + decay
                          * expected)
        t.adamw_update(p, got_m, got_v, g * step, lr, beta1, beta2, eps, decay, scale, step, N)
    for name, got, want in (("p", p, expected), ("m", got_m, m), ("v", got_v, v)):
        assert check_tensor(name, got, want, 1e-6)
    assert t.global_norm(g.astype(np.float32), N) == pytest.approx(np.linalg.norm(g), rel=1e-6)


class Float32Only(np.ndarray):
    """An array that refuses any operation with a float64 in or out of it, unless a dtype was asked
    for by name."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        plain = [x.view(np.ndarray) if isinstance(x, Float32Only) else x for x in (*inputs, *out)]
        into = {"out": tuple(plain[len(inputs) :])} if out else {}
        result = getattr(ufunc, method)(*plain[: len(inputs)], **options, **into)
        wrong = [x for x in (*inputs, result) if getattr(x, "dtype", None) == np.float64]
        assert not wrong or options.get("dtype"), f"float64 in np.{ufunc.__name__}"
        return (result.view(Float32Only) if isinstance(result, np.ndarray)
                and result.dtype == np.float32 else result)


def test_float32_stays_float32(monkeypatch):
    monkeypatch.setattr(llmc.tensors, "views",
                        lambda table, buffer: views(table, buffer.view(Float32Only)))
    model = make_model(2, 8, 1)
    x, y = np.random.default_rng(0).integers(0, SMALL.V, (2, 2, 8), dtype=np.int32)
    with np.errstate(all="raise", under="ignore"):
        model.forward(x, y)
        model.backward()
        model.optimizer.update(model.params, model.grads, Settings(weight_decay=0.1), 1e-3, 1,
                               grad_scale=0.5)
        logits = t.Decoder(SMALL, model.params, 2, 8).logits(x, 0)
    assert logits.dtype == np.float32


@pytest.mark.parametrize("parts", ((1,) * 12, (12,), (5, 1, 6)))
@pytest.mark.parametrize("chunk", (256, 2))
@pytest.mark.parametrize("config", (
    SMALL, SMALL_LLAMA, dataclasses.replace(SMALL_LLAMA, tied=1), SPEEDRUN))
def test_the_decoder_agrees_with_the_forward_pass(monkeypatch, in_blocks, config, parts, chunk):
    B = 3
    T = sum(parts)
    rng = np.random.default_rng(1)
    model = make_model(B, T, config=config)
    tokens = rng.integers(0, config.V, (B, T), dtype=np.int32)
    model.forward(tokens, tokens)
    monkeypatch.setattr(t, "positions_at_once", lambda B, T: chunk)
    decoder = model.Decoder(config, model.params, B + 1, 16)
    position = 0
    for buffer in (decoder.buffer, decoder.cache.buffer):
        buffer.view(np.float32).fill(np.nan)
    for part in parts:
        logits = decoder.logits(tokens[:, position : position + part], position)
        position += part
        np.testing.assert_allclose(logits, model.acts.logits[:, position - 1], rtol=0, atol=1e-4)


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch):
    """Of random weights, and of a step so large that every layer that shares its work among threads
    does so."""
    x, y = np.random.default_rng(0).integers(0, 5000, (2, 8, 64), dtype=np.int32)
    results = []
    for threads in (1, 3):
        monkeypatch.setattr(llmc.threads, "THREADS", threads)
        model = make_model(8, 64, 1, *t.random_model("d2", 5000))
        start = flat(model.params).copy()
        model.forward(x, y)
        model.backward()
        norm = t.global_norm(flat(model.grads), flat(model.grads).size)
        model.optimizer.update(model.params, model.grads, Settings(weight_decay=0.1), 1e-3, 1,
                               grad_scale=0.5)
        results.append([start, norm, *(flat(tensors).copy() for tensors in (
            model.acts, model.grads, model.params, model.optimizer.m, model.optimizer.v))])
    assert all(map(np.array_equal, *results))
    assert len(np.unique(start[: 5000 * 128])) > 500_000, "each block of random weights has its own"


@pytest.mark.parametrize("config", (None, SMALL_LLAMA, SPEEDRUN), ids=("d2", "Llama", "speedrun"))
def test_gradients_of_accumulated_batches_are_their_mean(config):
    """GPT-2's are of several blocks."""
    start = (config, None) if config else t.random_model("d2", SMALL.V)
    V = start[0].V
    batches = np.random.default_rng(0).integers(0, V, (3, 2, 2, 8), dtype=np.int32)
    whole, parts = (make_model(B, 8, 6 // B, *start) for B in (6, 2))
    whole.forward(*batches.swapaxes(0, 1).reshape(2, 6, 8))
    whole.backward()
    for micro_step, (x, y) in enumerate(batches):
        parts.forward(x, y)
        parts.backward(micro_step, 3)
    for name in whole.grads.table:
        expected = getattr(whole.grads, name)
        assert check_tensor(name, getattr(parts.grads, name), expected,
                            1e-6 * max(1.0, np.abs(expected).max()))
    assert not parts.grads.wte[V:].any(), "padding rows have no gradient"


@pytest.mark.parametrize("text, threads",
                         ((" 3", 3), ("3,2", 3), ("²", None), ("0", None), ("9" * 5000, None)))
def test_omp_num_threads(monkeypatch, text, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = llmc.threads.count_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert llmc.threads.count_threads() == (threads or cores)
