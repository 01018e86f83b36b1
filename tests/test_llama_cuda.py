"""Llama 3's GPU kernels against their NumPy functions, and faults planted in them. Attention, SwiGLU in
matmuls, text and the trainer have tests of their own."""

import functools

import numpy as np
import pytest

import test_verdict
import train_gpt2_cuda as gpt2_cuda
import train_llama3
import train_llama3_cuda as cuda
from conftest import ROOT, random_params
from llmc.gpu.device import to_float32
from test_gpt2 import BACKENDS, SMOOTH, Yardstick, precision_of, replay, starting_weights
from test_kernels import (EXACT, LLAMAS as MODELS, PRECISIONS, SUMS, assert_close, get_device, on_gpu, random,
                          unwritten, wide)
from test_verdict import first_wrong, plant_in_a_kernel
from train_llama3 import Config


SHAPES = [(1, 1), (3, 97), (3, 1024)]
CASES = [(config, name) for config in MODELS for name in ("tf32", "bf16")] + [(MODELS[2], "bf16-float32-grads")]


@pytest.fixture(params=CASES, ids=lambda case: f"C{case[0].C}xNKV{case[0].NKV}xF{case[0].F}-{case[1]}")
def device(request, gpu):
    config, precision = request.param
    return get_device(gpu, config, PRECISIONS[precision], architecture=cuda.Llama3)


@pytest.mark.parametrize("B, T", SHAPES)
@pytest.mark.parametrize("both", (True, False))
def test_residual_rmsnorm(device, B, T, both):
    config, e, residual_dtype = device.config, device.precision.dtype, device.precision.residual
    C, eps = config.C, config.eps
    inp1, inp2 = random(B, T, C, seed=1, mean=1, dtype=residual_dtype), random(B, T, C, seed=2, mean=1, dtype=e)
    weight, out, rstd = random(C, seed=3, dtype=e), unwritten(B, T, C, dtype=e), unwritten(B, T)
    residual = unwritten(B, T, C, dtype=residual_dtype)
    cuda.residual_rmsnorm_forward(device, residual if both else None, out, rstd, on_gpu(inp1, dtype=residual_dtype),
                                  on_gpu(inp2, dtype=e) if both else None, on_gpu(weight, dtype=e), eps, B, T, C)
    total = inp1.astype(np.float64) + (inp2 if both else 0)
    if both:
        assert_close(EXACT, residual=(residual, total))
        total = to_float32(residual).astype(np.float64)  # the RMSNorm is that of what is stored
    expected = np.empty((B, T, C)), np.empty((B, T))
    train_llama3.rmsnorm_forward(*expected, total, *wide(weight), eps, B, T, C)
    assert_close(SUMS, out=(out, expected[0]), rstd=(rstd, expected[1]))


@pytest.mark.parametrize("B, T", SHAPES)
def test_rmsnorm_backward(device, B, T):
    C, e, g = device.config.C, device.precision.dtype, device.precision.grads
    dinp, dout = (random(B, T, C, seed=seed, dtype=e) for seed in (1, 2))
    inp, weight = random(B, T, C, seed=3, dtype=device.precision.residual), random(C, seed=4, dtype=e)
    rstd = (1 / np.sqrt(np.square(inp, dtype=np.float64).mean(axis=-1) + 1e-5)).astype(np.float32)
    expected, dweight = dinp.astype(np.float64), np.empty(C)
    train_llama3.rmsnorm_backward(expected, dweight, *wide(dout, inp, weight, rstd), B, T, C)
    for add_residual, rows in ((1, 264), (0, 3), (1, 3)):
        rows = min(rows, B * T)
        got = on_gpu(dinp, dtype=e) if add_residual else unwritten(B, T, C, dtype=e)
        partials, sums = unwritten(rows, C), unwritten(C, dtype=g)
        cuda.rmsnorm_backward(device, got, partials, on_gpu(dout, dtype=e),
                              on_gpu(inp, dtype=device.precision.residual), on_gpu(weight, dtype=e), on_gpu(rstd),
                              add_residual, B, T, C)
        gpt2_cuda.column_sums(device, [(partials, (sums,))])
        assert_close(SUMS, dinp=(got, expected - (0 if add_residual else dinp)), dweight=(sums, dweight))


@pytest.mark.parametrize("B, T", SHAPES)
def test_rope(device, B, T):
    config, e = device.config, device.precision.dtype
    heads, width = config.NH + config.NKV, config.Q + 2 * config.K
    cos, sin = train_llama3.rope_table(config, T)
    qkv = random(B, T, width, seed=1, dtype=e)
    got, expected = on_gpu(qkv, dtype=e), qkv.astype(np.float64)
    cuda.rope_forward(device, got, on_gpu(np.stack((cos, sin), axis=-1)), B, T, heads * config.HS)
    train_llama3.rope_forward(expected, *wide(cos, sin), B, T, heads, config.HS)
    assert_close(EXACT, qkv=(got, expected))
    assert np.array_equal(to_float32(got)[..., heads * config.HS :], qkv[..., heads * config.HS :])


@pytest.mark.parametrize("B, T", SHAPES)
def test_swiglu(device, B, T):
    F, N, e = device.config.F, B * T, device.precision.dtype
    inp, dout = random(N, 2 * F, seed=1, spread=3, dtype=e), random(N, F, seed=2, dtype=e)
    inp[0, F : F + 4] = -100.0, 100.0, -1e4, 0.0
    out, dinp, again = unwritten(N, F, dtype=e), unwritten(N, 2 * F, dtype=e), unwritten(N, F, dtype=e)
    cuda.swiglu_forward(device, out, on_gpu(inp, dtype=e), N, F)
    expected, dexpected = np.empty((N, F)), np.empty((N, 2 * F))
    with np.errstate(over="ignore"):
        train_llama3.swiglu_forward(expected, *wide(inp), N, F)
        train_llama3.swiglu_backward(dexpected, *wide(inp, dout), N, F)
    cuda.swiglu_backward(device, dinp, again, on_gpu(inp, dtype=e), on_gpu(dout, dtype=e), N, F)
    assert_close(SUMS, out=(out, expected), dinp=(dinp, dexpected))
    assert (out == again).all(), "recomputed with the same bits"


KERNEL_FAULTS = {  # what is wrong: (backend, file, its text, what stands there instead, the first red row)
    "RMSNorm's eps doubled": ("cuda", "norm.cuh", "/ C + eps)", "/ C + 2.0f * eps)", "logits"),
    "RMSNorm's gradient without the mean": ("cuda", "rmsnorm.cu", "- x.x[k] * scaled_mean", "", "dfcprojw"),
    "RoPE's angles not negated": (
        "cuda", "rope.cuh", "{angle.x, -angle.y}", "{angle.x, angle.y}", "dqkvw"),
    "RoPE of one pair in four lost": (
        "cuda", "rope.cu", "angles[k / 2]", "k == 2 ? float2{1.0f, 0.0f} : angles[k / 2]", "logits"),
    "SwiGLU's slope without 1 - s": ("cuda", "swiglu.cuh", "__fmaf_rn(gated, __fsub_rn(1.0f, s), s)", "s", "dfcw"),
    "one head of a group lost": (
        "cuda", "attention.cu", "const int count = GROUP * head_tiles", "const int count = head_tiles", "dqkvw"),
    "a wrong group": ("cuda", "attention.cu", "(h - h * GROUP) * HS", "(1 - h - h * GROUP) * HS", "dqkvw"),
    "Hopper: queries rotated in the epilogue, keys not": (
        "cuda-bf16-kernels", "hopper/matmul_swiglu.cu", "8 * unit >= Q + KV", "8 * unit >= Q", "logits"),
    "Hopper: gradients rotated by one angle in four": (
        "cuda-bf16", "hopper/attention.cu", "k / 2 * 4 + threadIdx.x % 4]", "k / 2 * 4]", "dqkvw"),
    "Hopper: up and gate swapped in the gradient": (
        "cuda-bf16", "hopper/matmul_swiglu.cu", "swiglu_gradient(x[i], number(up, i), gate[i]",
        "swiglu_gradient(x[i], gate[i], number(up, i)", "dfcw"),
}
FAULT_CONFIG = Config(96, 391, 2, 4, 2, 128, 512, 200, 64, tied=0, theta=1e3, factor=8, original=32)


@functools.cache
def fault_case(precision):
    params, rng = random_params(FAULT_CONFIG, spread=0.05, ones=1.0), np.random.default_rng(1)
    for name, row in params.table.items():
        if not row.vocabulary:
            getattr(params, name)[...] = rng.normal(row.ones, 0.15, row.shape)
    params = starting_weights(params, precision)
    x, y = rng.integers(0, FAULT_CONFIG.V, (2, 3, 70), dtype=np.int32)
    return params, x, y, Yardstick(FAULT_CONFIG, params, x, y, precision)


@pytest.mark.parametrize("fault", (*KERNEL_FAULTS.values(), *test_verdict.KERNEL_FAULTS.values()), ids=str)
def test_the_text_of_a_kernel_fault_is_there(fault):
    _, file, right, _, _ = fault
    assert (ROOT / "kernels" / file).read_text().count(right) == 1


@pytest.mark.parametrize("fault", (None, *KERNEL_FAULTS))
@pytest.mark.gpu
def test_a_fault_in_a_kernel_is_red(fault, gpu, tmp_path, monkeypatch, capsys):
    backend, file, right, wrong, row = KERNEL_FAULTS.get(fault, ("cuda", "rope.cu", "", "", None))
    if "bf16" in backend and gpu.arch != "sm_90a":
        pytest.skip(f"{file}: for Hopper, this GPU is {gpu.arch}")
    plant_in_a_kernel(tmp_path, monkeypatch, file, right, wrong)
    params, x, y, yardstick = fault_case(precision_of(backend))
    capsys.readouterr()
    assert yardstick.judge(replay(BACKENDS[backend](FAULT_CONFIG, params, x, y, SMOOTH))) == (fault is None)
    assert first_wrong(capsys) == row
