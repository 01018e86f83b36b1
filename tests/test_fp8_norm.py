"""The norms that write 8 bits: their blocks fit, and on a GPU they are NumPy's."""


import numpy as np
import pytest

import train_gpt2
from conftest import on_stream
from fp8_reference import decode_e4m3, round_e4m3
from llmc.gpu.geometry import blocks
from llmc.gpu.matmul import Quantized
from test_parity import need
from test_kernels import (on_gpu, random, unwritten)
from test_compile import compile_file
from test_matmul_swiglu import files_of, frame_sizes, open_matmul
from test_fp8 import FP8, in_natural_order
from test_fp8 import NORMS, NUMBERS, bytes_on_gpu


@pytest.mark.parametrize("C",
                         (768, 3072, *(pytest.param(C, marks=pytest.mark.large)
                                       for C in (48, 1600, 8192))))
def test_norms_compile_and_their_blocks_fit(C):
    """One into a multiprocessor's 227 KB of shared memory, up to C=3072 two or more."""
    file, = files_of(("norm_fp8",), norm_config(C), FP8, "sm_90a")
    assert not any(frame_sizes(compile_file(file, "sm_90a")))
    assert (set(file.shared) == set(file.kernels)
            and max(file.shared.values()) <= (227 << 10) // (1 + (C <= 3072)))


def norm_config(C):
    return train_gpt2.Config(64, 257, 2, C // 16, C, 384)


@pytest.mark.parametrize("both", (True, False))
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("N, C",
                         ((1, 16), (3, 48), (64, 64), (97, 208), (291, 768), (1000, 1024),
                          (130, 1600),
                          (33, 4096), (50, 8192)))
def test_norm(gpu, N, C, norm, both):
    """Against float64, rounded once: every byte, but where a sum's last bit leads to the next
    number of E4M3; what is noted, the transposed copy, and both copies made again, alone, to the
    byte."""
    need("cuda-fp8")
    device = open_matmul(("norm_fp8",), norm_config(C), FP8).device
    on_stream(device)
    reference, forward = NORMS[norm]
    scale = 32.0
    pitch = blocks(N, 16) * 16
    inp1 = random(1, N, C, seed=1, mean=1, dtype="float16")
    inp2 = random(1, N, C, seed=2, mean=1, dtype="bfloat16")
    weight = random(C, seed=3, dtype="bfloat16")
    bias = random(C, seed=4, dtype="bfloat16")
    if N > 60:
        inp1[0, 5, 3] = np.nan  # the whole row is
    stream = (inp1 + inp2 if both else inp1).astype(np.float16)
    statistics = 1 + (norm == "layernorm")
    last = bias if norm == "layernorm" else 1e-5
    expected = np.empty((1, N, C)), *np.empty((statistics, 1, N))
    reference(*expected, stream.astype(np.float64), weight.astype(np.float64), last, 1, N, C)

    weight = on_gpu(weight, dtype="bfloat16")
    scale_gpu = on_gpu(np.float32([scale]))
    last = on_gpu(bias, dtype="bfloat16") if norm == "layernorm" else last
    largest, counts = on_gpu(np.zeros(1, np.int32), np.zeros(2, np.int64))

    def run(residual, inp1, inp2, plain=True, transposed=True, notes=True):
        """[plain, transposed, statistics], the first two or None."""
        to = Quantized(bytes_on_gpu((N, C)) if plain else None, bytes_on_gpu((C, pitch))
                       if transposed else None, (scale_gpu, largest if notes else None, counts))
        found = unwritten(statistics, 1, N)
        forward(device, residual, to, *found, inp1, inp2, weight, last, 1, N, C)
        return [*in_natural_order(to), found.get()]

    inp1 = on_gpu(inp1, dtype="float16")
    inp2 = on_gpu(inp2, dtype="bfloat16")
    residual = unwritten(1, N, C, dtype="float16") if both else inp1
    plain, transposed, found = run(*((residual, inp1, inp2) if both else (None, inp1, None)))
    assert np.array_equal(residual.get(), stream, equal_nan=True)
    assert np.allclose(found, expected[1:], rtol=1e-5, atol=1e-6, equal_nan=True)
    wanted = round_e4m3(expected[0][0] * scale)
    got = decode_e4m3(plain)
    finite = np.unique(NUMBERS[np.isfinite(NUMBERS)])
    assert np.array_equal(np.isnan(got), np.isnan(wanted))
    apart = np.abs(np.searchsorted(finite, got) - np.searchsorted(finite, wanted))
    assert apart.max() <= 1 and np.count_nonzero(apart) <= 1 + 1e-3 * apart.size
    most = np.fmax.reduce(np.abs(expected[0]), axis=None)
    assert abs(largest.get().view(np.float32)[0] / most - 1) < 1e-5
    saturated, vanished = (np.count_nonzero(of)
                           for of in ((plain & 127) >= 126, (plain & 127) == 0))
    noted = [largest.get().tolist(), [saturated, vanished]]
    assert counts.get().tolist() == noted[1]
    assert np.array_equal(transposed[:, :N], plain.T) and not transposed[:, N:].any()
    for less in ({"plain": False}, {"transposed": False}):
        again = run(None, residual, None, notes=False, **less)
        assert all(array is None
                   or np.array_equal(array, first, equal_nan=array.dtype == np.float32)
                   for array, first in zip(again, (plain, transposed, found)))
    assert [largest.get().tolist(), counts.get().tolist()] == noted
