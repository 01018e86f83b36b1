"""Attention on the GPU, GPT-2's and of grouped queries, with gradients taken back through RoPE and
QK-norm, against the CPU pages' functions in float64, in every precision and on every path. Outputs
are NaN before the call, so that an element which is not written fails. (test_matmul_swiglu.py
compiles Hopper's kernels.)"""

import itertools

import numpy as np
import pytest

import train_gpt2_cuda as cuda
import train_llama3
from conftest import on_stream
from llmc.gpu.attention import attention_scratch
from llmc.gpu.device import cp
from llmc.gpu.geometry import hopper_attention
from llmc.gpu.precision import has_bfloat16
from llmc.debugstate import check_tensor
from llmc.tensors import allocate
from test_kernels import BF16_TWICE, EXACT, PRECISIONS, SUMS, TF32, assert_close, on_gpu, random, unwritten, wide
from test_matmul_swiglu import model, open_matmul
from train_speedrun import qknorm_backward, rope_table

HEADS = [(9, 3, 16), (6, 3, 48), (3, 1, 64), (9, 3, 64), (4, 4, 64), (6, 3, 80), (8, 2, 128),
         (3, 1, 128),
         (4, 4, 128)]  # NH, NKV, HS
GPT2_HEADS = [(12, 12, 64), (1, 1, 64), (25, 25, 64), (3, 3, 80), (2, 2, 128), (2, 2, 96)]
SHAPES = [(1, 1), (3, 63), (2, 130), (1, 200), (2, 256), (1, 600)]  # B, T
CASES = [*itertools.product(SHAPES, HEADS),
         *itertools.product([(1, 1), (3, 97), (1, 1000), (3, 1024)], GPT2_HEADS)]
TOLERANCES = {"tf32": TF32, "float32": SUMS, "bf16": BF16_TWICE}


def get(gpu, config, precision, arch="native", normed=False):
    """A Device with the attention of a model, whose Q may not be C."""
    if precision.bf16 and not has_bfloat16(gpu.arch):
        pytest.skip(f"{gpu.arch} has no bfloat16")
    device = open_matmul(("attention",), config, precision, arch, normed).device
    on_stream(device)
    return device


def unwritten_scratch(config, B, T, device):
    """attention_backward's, NaN."""
    scratch = allocate(attention_scratch(config, B, T, device.geometry), cp)
    scratch.buffer.fill(0xFF)
    return scratch


def attention(inp, dout, sizes):
    """The CPU's out (B,T,Q) and dinp (B,T,QKV), in float64."""
    B, T, NH, _, _ = sizes
    out, dinp, att, datt = np.empty(dout.shape), np.empty(inp.shape), *np.empty((2, B, NH, T, T))
    train_llama3.attention_forward(out, att, *wide(inp), *sizes)
    train_llama3.attention_backward(dinp, datt, *wide(dout, inp), att, *sizes)
    return out, dinp


@pytest.mark.parametrize("precision, kind",
                         (("tf32", "native"), ("tf32", "portable"), ("float32", "native"),
                          ("bf16", "native"), ("bf16", "portable"), ("bf16", "two blocks")))
@pytest.mark.parametrize("B, T, NH, NKV, HS", [(*shape, *heads) for shape, heads in CASES])
def test_grouped_attention(gpu, monkeypatch, B, T, NH, NKV, HS, precision, kind):
    config = model(NH=NH, NKV=NKV, HS=HS)
    numbers = PRECISIONS[precision]
    tolerance = TOLERANCES[precision]
    device = get(gpu, config, numbers, "sm_80" if kind == "portable" else "native")
    # which take all tiles, one after the other, where each multiprocessor keeps its block
    if kind == "two blocks":
        if not hopper_attention(config, numbers, gpu.arch):
            pytest.skip("blocks do not stay here")
        monkeypatch.setattr(device, "sm_count", 2)
    sizes = B, T, NH, NKV, HS
    Q, QKV, e = NH * HS, (NH + 2 * NKV) * HS, numbers.dtype
    inp = random(B, T, QKV, seed=1, spread=1.5, dtype=e)
    dout = random(B, T, Q, seed=2, dtype=e)
    inp_gpu, dout_gpu = on_gpu(inp, dout, dtype=e)
    expected, dinp = attention(inp, dout, sizes)

    def forward():
        out = unwritten(B, T, Q, dtype=e)
        lse = unwritten(B, NH, T)
        cuda.attention_forward(device, out, lse, inp_gpu, *sizes)
        return out, lse

    out, lse = same_bits_twice(forward)
    assert_close(tolerance, out=(out, expected))
    query, key, _ = train_llama3.split_heads(*wide(inp), *sizes)
    scores = np.where(np.tri(T, dtype=bool), query @ key.swapaxes(-1, -2) / HS**0.5, -np.inf)
    largest = scores.max(axis=-1)
    expected_lse = (largest
                    + np.log(np.exp(scores - largest[..., None]).sum(axis=-1))).reshape(B, NH, T)
    longest = np.linalg.norm(query, axis=-1).max() * np.linalg.norm(key, axis=-1).max() / HS**0.5
    assert check_tensor("lse", lse.get(), expected_lse,
                        (2.0**-10 if precision == "tf32" else EXACT) * longest)

    # the gradients of a model with biases and no RoPE, then those of one with RoPE and no biases
    tables = train_llama3.rope_table(config, T)
    rope = on_gpu(np.stack(tables, axis=-1))

    def backward(rope, rows):
        got = unwritten(B, T, QKV, dtype=e)
        scratch = unwritten_scratch(config, B, T, device)
        partials = rows and unwritten(rows, QKV)
        cuda.attention_backward(device, got, scratch, partials, dout_gpu, inp_gpu, out, lse, rope,
                                None, *sizes)
        return (got, partials) if rows else (got,)

    rows = cuda.partial_rows(B, T, device.sm_count, device.geometry).attention
    plain, partials = same_bits_twice(lambda: backward(None, rows))
    assert_close(tolerance, dinp=(plain, dinp))
    # Each of the B*T rows has an error up to the tolerance; the errors add up like a random walk.
    wanted = dinp.sum(axis=(0, 1))
    allowed = tolerance * np.abs(dinp).max() * (B * T) ** 0.5
    assert check_tensor("dbias", partials.get().sum(axis=0, dtype=np.float64), wanted, allowed)

    rotated, = same_bits_twice(lambda: backward(rope, None))
    values = Q + NKV * HS
    assert np.array_equal(rotated[..., values:].get(),
                          plain[..., values:].get()), "RoPE leaves values alone"
    train_llama3.rope_backward(dinp, *wide(*tables), B, T, NH + NKV, HS)
    assert_close(tolerance, rotated=(rotated, dinp))


@pytest.mark.parametrize("precision, arch, sm_count",
                         (("tf32", "native", None), ("float32", "native", None),
                          ("bf16", "native", None), ("bf16", "native", 2),
                          ("bf16", "sm_80", None)))
@pytest.mark.parametrize("B, T, NH, HS",
                         ((3, 63, 3, 64), (2, 130, 4, 128), (1, 600, 2, 128), (2, 97, 3, 48)))
def test_gradients_of_normalized_queries_and_keys(gpu, monkeypatch, B, T, NH, HS, precision, arch,
                                                  sm_count):
    config = model(NH=NH, NKV=NH, HS=HS)
    numbers = PRECISIONS[precision]
    sizes = (B, T, NH, NH, HS)
    device = get(gpu, config, numbers, arch, normed=True)
    Q = NH * HS
    QKV = 3 * NH * HS
    e = numbers.dtype
    monkeypatch.setattr(device, "sm_count", sm_count or device.sm_count)
    inp = random(B, T, QKV, seed=1, dtype=e)
    dout = random(B, T, Q, seed=2, dtype=e)
    tables = rope_table(config, T)
    rstd = random(B, T, 2 * NH, seed=3) ** 2  # half of a head is not rotated
    inp_gpu, dout_gpu = on_gpu(inp, dout, dtype=e)
    out = unwritten(B, T, Q, dtype=e)
    lse = unwritten(B, NH, T)
    cuda.attention_forward(device, out, lse, inp_gpu, *sizes)
    got = unwritten(B, T, QKV, dtype=e)
    scratch = unwritten_scratch(config, B, T, device)
    partials = unwritten(B * -(-T // 64), QKV)
    cuda.attention_backward(device, got, scratch, partials, dout_gpu, inp_gpu, out, lse,
                            on_gpu(np.stack(tables, axis=-1)), on_gpu(rstd), *sizes)

    _, dinp = attention(inp, dout, sizes)
    qknorm_backward(dinp, *wide(inp, rstd), B, T, NH, HS)
    train_llama3.rope_backward(dinp, *wide(*tables), B, T, 2 * NH, HS)
    assert_close(TOLERANCES[precision], dinp=(got, dinp))
    allowed = TOLERANCES[precision] * np.abs(dinp).max() * (B * T) ** 0.5
    assert check_tensor("dbias", partials.get().sum(axis=0, dtype=np.float64),
                        dinp.sum(axis=(0, 1)), allowed)


def same_bits_twice(call):
    """What call() returns, arrays; fails if it returns other bits the next time."""
    first = call()
    second = call()
    assert all(a.get().tobytes() == b.get().tobytes() for a, b in zip(first, second))
    return first
