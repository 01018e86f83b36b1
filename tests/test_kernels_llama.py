"""Llama 3's kernels, on a GPU, beside NumPy's functions. (Attention, SwiGLU in matmuls, text and the
trainer have tests of their own.)"""


import numpy as np
import pytest

import train_gpt2_cuda as cuda
import train_llama3
import train_llama3_cuda as llama_cuda
from llmc.gpu.device import to_float32
from test_kernels import (  # noqa: F401  (device: a fixture)
    EXACT, SUMS, assert_close, device, of_llama, on_gpu, random, unwritten, wide)


@of_llama
@pytest.mark.parametrize("both", (True, False))
def test_residual_rmsnorm(device, B, T, both):
    config = device.config
    e = device.precision.dtype
    residual_dtype = device.precision.residual
    C, eps = config.C, config.eps
    inp1 = random(B, T, C, seed=1, mean=1, dtype=residual_dtype)
    inp2 = random(B, T, C, seed=2, mean=1, dtype=e)
    weight = random(C, seed=3, dtype=e)
    out = unwritten(B, T, C, dtype=e)
    rstd = unwritten(B, T)
    residual = unwritten(B, T, C, dtype=residual_dtype)
    llama_cuda.residual_rmsnorm_forward(
        device, residual if both else None, out, rstd, on_gpu(inp1, dtype=residual_dtype),
        on_gpu(inp2, dtype=e) if both else None, on_gpu(weight, dtype=e), eps, B, T, C)
    total = inp1.astype(np.float64) + (inp2 if both else 0)
    if both:
        assert_close(EXACT, residual=(residual, total))
        total = to_float32(residual).astype(np.float64)  # the RMSNorm is that of what is stored
    expected = np.empty((B, T, C)), np.empty((B, T))
    train_llama3.rmsnorm_forward(*expected, total, *wide(weight), eps, B, T, C)
    assert_close(SUMS, out=(out, expected[0]), rstd=(rstd, expected[1]))


@of_llama
def test_rmsnorm_backward(device, B, T):
    C = device.config.C
    e = device.precision.dtype
    g = device.precision.grads
    dinp, dout = (random(B, T, C, seed=seed, dtype=e) for seed in (1, 2))
    inp = random(B, T, C, seed=3, dtype=device.precision.residual)
    weight = random(C, seed=4, dtype=e)
    rstd = (1 / np.sqrt(np.square(inp, dtype=np.float64).mean(axis=-1) + 1e-5)).astype(np.float32)
    expected = dinp.astype(np.float64)
    dweight = np.empty(C)
    train_llama3.rmsnorm_backward(expected, dweight, *wide(dout, inp, weight, rstd), B, T, C)
    for add_residual, rows in ((1, 264), (0, 3), (1, 3)):
        rows = min(rows, B * T)
        got = on_gpu(dinp, dtype=e) if add_residual else unwritten(B, T, C, dtype=e)
        partials = unwritten(rows, C)
        sums = unwritten(C, dtype=g)
        llama_cuda.rmsnorm_backward(
            device, got, partials, on_gpu(dout, dtype=e),
            on_gpu(inp, dtype=device.precision.residual),
            on_gpu(weight, dtype=e), on_gpu(rstd), add_residual, B, T, C)
        cuda.column_sums(device, [(partials, (sums,))])
        assert_close(SUMS, dinp=(got, expected - (0 if add_residual else dinp)),
                     dweight=(sums, dweight))


@of_llama
def test_rope(device, B, T):
    config = device.config
    e = device.precision.dtype
    heads = config.NH + config.NKV
    width = config.Q + 2 * config.K
    cos, sin = train_llama3.rope_table(config, T)
    qkv = random(B, T, width, seed=1, dtype=e)
    got = on_gpu(qkv, dtype=e)
    expected = qkv.astype(np.float64)
    llama_cuda.rope_forward(device, got, on_gpu(np.stack((cos, sin), axis=-1)), B, T,
                            heads * config.HS)
    train_llama3.rope_forward(expected, *wide(cos, sin), B, T, heads, config.HS)
    assert_close(EXACT, qkv=(got, expected))
    assert np.array_equal(to_float32(got)[..., heads * config.HS :], qkv[..., heads * config.HS :])


@of_llama
def test_swiglu(device, B, T):
    F = device.config.F
    N = B * T
    e = device.precision.dtype
    inp = random(N, 2 * F, seed=1, spread=3, dtype=e)
    dout = random(N, F, seed=2, dtype=e)
    inp[0, F : F + 4] = -100.0, 100.0, -1e4, 0.0
    out = unwritten(N, F, dtype=e)
    dinp = unwritten(N, 2 * F, dtype=e)
    again = unwritten(N, F, dtype=e)
    llama_cuda.swiglu_forward(device, out, on_gpu(inp, dtype=e), N, F)
    expected = np.empty((N, F))
    dexpected = np.empty((N, 2 * F))
    with np.errstate(over="ignore"):
        train_llama3.swiglu_forward(expected, *wide(inp), N, F)
        train_llama3.swiglu_backward(dexpected, *wide(inp, dout), N, F)
    llama_cuda.swiglu_backward(device, dinp, again, on_gpu(inp, dtype=e), on_gpu(dout, dtype=e), N,
                               F)
    assert_close(SUMS, out=(out, expected), dinp=(dinp, dexpected))
    assert (out == again).all(), "recomputed with the same bits"
