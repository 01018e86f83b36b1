"""Matmuls on a GPU, of every kernel, tile and split, and by the rule, against float64; and, with no
GPU, the rule."""

from functools import partial

import numpy as np
import pytest

import train_gpt2
import train_gpt2_cuda as cuda
from llmc.gpu.device import to_float32
from llmc.gpu.geometry import blocks, hopper_matmul
from llmc.gpu.matmul import Linear
from llmc.gpu.precision import Precision
from llmc.gpu.trainer import open_device
from llmc.debugstate import check_tensor
from test_kernels import (BF16, MODELS, PRECISIONS, SUMS, TF32, assert_close, get_matmul, on_gpu,
                          random, unwritten,
                          wide)

# N, C, OC
SIZES = [(291, 768, 2304), (1, 64, 384), (1024, 1600, 6400), (97, 240, 720), (2100, 168, 504)]
LIBRARIES = ("auto", "cublaslt", "kernels", "kernels, two blocks")


def get(gpu, monkeypatch, precision, library, config=MODELS[0]):
    """A Matmul with these libraries. "two blocks": each computes many tiles."""
    precision = PRECISIONS[precision]
    library, *two_blocks = library.split(", ")
    if library == "kernels" and not hopper_matmul(precision, gpu.arch):
        pytest.skip("the kernels are for bfloat16 on Hopper")
    matmul = get_matmul(gpu, config, precision, matmul=library)
    if two_blocks:
        monkeypatch.setattr(matmul.device, "sm_count", 2)
    return matmul


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("N, C, OC", SIZES)
def test_matmuls(gpu, monkeypatch, N, C, OC, precision, library):
    matmul = get(gpu, monkeypatch, precision, library)
    e = PRECISIONS[precision].dtype
    g = PRECISIONS[precision].grads
    kernels = matmul.kernels
    shapes = (N, C), (OC, C), (OC,), (N, OC)
    inp, weight, bias, dout = (random(*shape, seed=i, dtype=e) for i, shape in enumerate(shapes))
    inp_gpu, weight_gpu, bias_gpu, dout_gpu = on_gpu(inp, weight, bias, dout, dtype=e)
    tolerance = TF32 if precision == "tf32" else SUMS
    out = unwritten(N, OC, dtype=e)
    dinp = unwritten(N, C, dtype=e)
    dweight = unwritten(OC, C, dtype=g)

    def check(name, array, expected, *calls):
        for call in calls:
            array.view(np.uint8)[...] = 0xFF  # NaN
            call()
            assert_close(tolerance, **{name: (array, expected)})

    exact = inp.astype(np.float64) @ weight.T.astype(np.float64)
    for b in (None, bias_gpu):
        linear = Linear(matmul, weight_gpu, b, dweight)
        check("out", out, exact + (0 if b is None else bias), *(
            partial(linear.forward, out, inp_gpu, n) for n in (None, 192, 160) if kernels or not n))

    exact = dout.astype(np.float64) @ weight.astype(np.float64)
    for scale in (1.0, 0.7):
        check("dinp", dinp, scale * exact, partial(linear.backward_inp, dinp, dout_gpu, scale))

    exact = dout.T.astype(np.float64) @ inp.astype(np.float64)
    # a trainer's may have too many elements, too
    matmul.transposed = unwritten(min(C, OC) + 8, N).reshape(-1)
    room = kernels and blocks(OC, 128) * blocks(C, 128) <= kernels.done.shape[1]
    check("dweight", dweight, 0.7 * exact,
          *(partial(linear.backward_weight, dout_gpu, inp_gpu, 0.7, splits)
        for splits in (None, 1, 2, 5, 11) if not splits or kernels
            and (splits == 1 or room and N >= 64 * splits)))


@pytest.mark.parametrize("OC", (50304, 12808, 6400))
def test_long_chains(gpu, monkeypatch, OC):
    """In TF32, sums do not shrink with the number of their additions. All numbers are positive and
    exact in TF32; in one chain of 50304, 8 at a time and half a bit lost each time, sums would be
    1.4e-4 too small."""
    matmul = get(gpu, monkeypatch, "tf32", "cublaslt")
    N = 130
    C = 72
    dout, weight = (np.random.default_rng(i).integers(512, 1024, shape).astype(np.float32) / 1024
                    for i, shape in enumerate(((N, OC), (OC, C))))
    dinp = unwritten(N, C)
    exact = dout.astype(np.float64) @ weight.astype(np.float64)
    dout, weight = on_gpu(dout, weight)
    Linear(matmul, weight).backward_inp(dinp, dout, 0.5)
    lost = 1 - 2 * dinp.get() / exact
    assert abs(lost).max() < 5e-5, lost.mean()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("precision", ("tf32", "float32", "bf16"))
@pytest.mark.parametrize("config, N",
                         ((MODELS[0], 291), (MODELS[1], 1), (MODELS[1], 391), (MODELS[3], 1000)),
                         ids=("C768-291", "C64-1", "C64-391", "C240-1000"))
def test_matmuls_with_gelu(gpu, monkeypatch, config, N, precision, library):
    """fc and its GELU, and the gradient into fcproj through GELU; GELU's bits are those of the
    layer alone."""
    matmul = get(gpu, monkeypatch, precision, library, config)
    C = config.C
    e = PRECISIONS[precision].dtype
    device = matmul.device
    tolerance = TF32 if precision == "tf32" else SUMS
    shapes = (N, C), (4 * C, C), (4 * C,), (N, C), (C, 4 * C), (N, 4 * C)
    inp, fcw, fcb, dout, fcprojw, pre = (random(*shape, seed=i, dtype=e)
                                         for i, shape in enumerate(shapes))
    pre *= 4  # exactly, and to where exp(-2u) is infinite
    inp_gpu, fcw_gpu, fcb_gpu, dout_gpu, fcprojw_gpu, pre_gpu = on_gpu(inp, fcw, fcb, dout, fcprojw,
                                                                       pre, dtype=e)
    out, gelu, alone, dinp, again = (unwritten(N, 4 * C, dtype=e) for _ in range(5))
    cuda.matmul_gelu_forward(device, Linear(matmul, fcw_gpu, fcb_gpu), out, gelu, inp_gpu, N, 4 * C)
    assert_close(tolerance, out=(out, inp.astype(np.float64) @ fcw.T.astype(np.float64) + fcb))
    cuda.gelu_forward(device, alone, out, N, 4 * C)
    assert np.array_equal(gelu.get(), alone.get())

    expected = np.empty((N, 4 * C))
    dgelu = dout.astype(np.float64) @ fcprojw.astype(np.float64)
    train_gpt2.gelu_backward(expected, *wide(pre), dgelu, pre.size)
    sums = unwritten(blocks(N, 128), 4 * C)
    cuda.matmul_gelu_backward_inp(device, Linear(matmul, fcprojw_gpu), dinp, sums, again, dout_gpu,
                                  pre_gpu, N, 4 * C)
    # cuBLASLt's result is rounded before GELU's derivative comes in
    twice = 2 * BF16 if e == "bfloat16" else 0.0
    assert_close(max(tolerance, twice), dinp=(dinp, expected))
    scale = max(tolerance, twice) * np.abs(expected).max() * N**0.5
    assert check_tensor("sums", to_float32(sums).sum(axis=0), expected.sum(axis=0), scale)
    cuda.gelu_forward(device, alone, pre_gpu, N, 4 * C)
    assert np.array_equal(again.get(), alone.get())


@pytest.mark.parametrize("C, launched", ((768, 192), (1600, 160), (1024, 0)))
def test_the_rule(fake_gpu, C, launched):
    """On Hopper in bfloat16: whose tiles divide the width of a result."""
    config = train_gpt2.Config(64, 257, 1, C // 64, C, 384)
    matmul = open_device(cuda.GPT2, fake_gpu.gpu, config, Precision("bfloat16"))[1]
    assert matmul.tile(C, narrow=True) == launched and matmul.tile(C) == (192 if C == 768 else 0)
    matmul = open_device(cuda.GPT2, fake_gpu.gpu, config, Precision("float32"))[1]
    assert matmul.tile(C) == 0 and matmul.kernels is None


def test_parts_of_a_weight_gradient(fake_gpu):
    """As many as fill an H100's 132 multiprocessors; one where rows are few."""
    matmul = open_device(cuda.GPT2, fake_gpu.gpu, MODELS[0], Precision("bfloat16"), "kernels")[1]
    splits = matmul.kernels.splits
    assert ([splits(3072, 768, N) for N in (512, 4096, 32768)] == [1, 1, 4]
            and splits(768, 768, 65536) == 5)
    assert splits(50304, 768, 65536) == 1
