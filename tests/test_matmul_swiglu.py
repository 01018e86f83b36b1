"""Matmuls with SwiGLU and RoPE in their epilogues, on Hopper, against float64; and, with no GPU,
that they and attention compile into registers alone. (test_kernels.py has their launches in a
step.)"""

import functools
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import on_stream
from llmc.gpu.device import Device, open_gpu, to_float32
from llmc.gpu.geometry import Has, blocks, hopper_matmul, kernel_files, launch_geometry, pack
from llmc.gpu.matmul import Linear, Matmul
from llmc.gpu.precision import Precision
from test_kernels import SUMS, assert_close, on_gpu, random, unwritten, wide
from test_compile import compile_file
from train_llama3 import Config
from train_speedrun_cuda import Speedrun

BFLOAT16 = Precision("bfloat16")
SIZES = [(129, 64, 96), (256, 768, 2048), (300, 576, 1536), (128, 128, 200), (1000, 2048, 8192),
         (130, 72, 104)]  # N, C, F


def model(C=64, F=96, NH=4, NKV=2, HS=16):
    return Config(1024, 257, 1, NH, NKV, C, 264, F, HS)


def files_of(layers, config, precision, arch, normed=False):
    """The KernelFile of each layer. normed: queries and keys are, as in a speed run."""
    has = Has(qknorm="qknorm" in layers)
    page = SimpleNamespace(HAS=has, LAYERS=layers, CONSTANTS=Speedrun.CONSTANTS if normed else {})
    files = kernel_files(page, config, precision, arch)
    return [file for name, file in files.items() if name in (*layers, "attention_backward")]


@functools.cache
def open_matmul(layers, config, precision, arch="native", normed=False):
    """A Matmul by the rule, whose Device has these layers' kernels; once for all tests. arch: as
    open_gpu's."""
    gpu = open_gpu(arch)
    files = files_of(layers, config, precision, gpu.arch, normed)
    return Matmul(Device(gpu, files, launch_geometry(config, precision, gpu.arch)), precision)


def get(gpu, monkeypatch, config, sm_count=None):
    """The same, on Hopper. sm_count: blocks at most, so that each computes many tiles."""
    if not hopper_matmul(BFLOAT16, gpu.arch):
        pytest.skip(f"{gpu.arch} is not Hopper")
    matmul = open_matmul(("matmul", "matmul_swiglu", "swiglu"), config, BFLOAT16)
    on_stream(matmul.device)
    if sm_count:
        monkeypatch.setattr(matmul.device, "sm_count", sm_count)
    return matmul


class Amid:
    """bfloat16 numbers on the GPU, or room for them, amid NaN: one tile's rows of it before and
    after."""

    def __init__(self, *shape, numbers=None):
        self.margin = 128 * shape[-1]
        self.memory = unwritten(2 * self.margin + int(np.prod(shape)), dtype="bfloat16")
        self.array = self.memory[self.margin : -self.margin].reshape(shape)
        if numbers is not None:
            self.array[...] = on_gpu(numbers, dtype="bfloat16")

    def alone(self):
        """Whether nothing was written around it."""
        memory = self.memory.get()
        return bool(np.all(memory[: self.margin] == 0xFFFF)
                    and np.all(memory[-self.margin :] == 0xFFFF))


def given(numbers):
    return Amid(*numbers.shape, numbers=numbers).array


def twice(call, *shapes):
    """What call(*arrays) writes to arrays of these shapes, the same bits twice, and nothing around
    them."""
    runs = []
    for _ in range(2):
        results = [Amid(*shape) for shape in shapes]
        call(*(result.array for result in results))
        assert all(result.alone() for result in results)
        runs.append([result.array for result in results])
    assert all(np.array_equal(first.get(), second.get()) for first, second in zip(*runs))
    return runs[0]


@pytest.mark.parametrize("sm_count", (None, 2, 1))
@pytest.mark.parametrize("N, C, F", SIZES)
def test_forward_swiglu(gpu, monkeypatch, N, C, F, sm_count):
    """SwiGLU's bits are those of the layer alone, and what NumPy makes of the rounded up and
    gate."""
    matmul = get(gpu, monkeypatch, model(C, F), sm_count)
    inp = random(N, C, seed=1, dtype="bfloat16")
    weight = random(2 * F, C, seed=2, spread=3 * C**-0.5, dtype="bfloat16")
    weight[F:] *= 8  # exactly; some gates are beyond where exp(-gate) is infinite
    linear = Linear(matmul, given(weight))
    inp_gpu = given(inp)
    out, swiglu = twice(lambda *results: linear.forward_swiglu(*results,
                                                               inp_gpu), (N, 2 * F), (N, F))
    exact = np.matmul(*wide(inp, weight.T))
    assert_close(SUMS, up=(out[:, :F], exact[:, :F]), gate=(out[:, F:], exact[:, F:]))

    alone = unwritten(N, F, dtype="bfloat16")
    matmul.device.launch("swiglu_forward", (blocks(N * F, 256 * pack(alone)),), (256,), alone, out,
                         N)
    assert np.array_equal(swiglu.get(), alone.get())
    up, gate = np.split(to_float32(out), 2, axis=1)
    with np.errstate(over="ignore"):
        expected = up * (gate / (np.float32(1.0) + np.exp(-gate)))
    # a sigmoid below 1e-38 may be 0
    ulp = np.ldexp(np.float32(1.0), np.frexp(expected)[1] - 8) + np.float32(1e-34)
    assert np.all(np.abs(to_float32(swiglu) - expected) <= ulp)


@pytest.mark.parametrize("sm_count", (None, 2, 1))
@pytest.mark.parametrize("N, C, F", SIZES)
def test_backward_inp_swiglu(gpu, monkeypatch, N, C, F, sm_count):
    matmul = get(gpu, monkeypatch, model(C, F), sm_count)
    shapes = (N, C), (C, F), (N, 2 * F)
    dout, weight, inp = (random(*shape, seed=i, dtype="bfloat16") for i, shape in enumerate(shapes))
    inp *= 4  # exactly
    inp[:, F::14] = -100
    inp[:, F + 7 :: 14] = 100
    linear = Linear(matmul, given(weight))
    inp_gpu = given(inp)
    dout_gpu = given(dout)
    dinp, = twice(lambda dinp: linear.backward_inp_swiglu(dinp, dout_gpu, inp_gpu), (N, 2 * F))
    up, gate, dact = *np.split(inp.astype(np.float64), 2, axis=1), np.matmul(*wide(dout, weight))
    s = 1 / (1 + np.exp(-gate))
    assert_close(SUMS, dup=(dinp[:, :F], dact * gate * s),
                 dgate=(dinp[:, F:], dact * up * s * (1 + gate * (1 - s))))


@pytest.mark.parametrize("B, T", ((3, 97), (1, 300), (5, 128)))
@pytest.mark.parametrize("NH, NKV, HS", ((12, 4, 64), (9, 3, 64), (3, 1, 128), (4, 2, 16)))
def test_forward_rope(gpu, monkeypatch, NH, NKV, HS, B, T):
    """With tiles of both widths, whether they divide the result's or not. Values have the bits of
    the plain matmul."""
    N = B * T
    C = NH * HS
    rotated = (NH + NKV) * HS
    QKV = (NH + 2 * NKV) * HS
    matmul = get(gpu, monkeypatch, model(C, 96, NH, NKV, HS), sm_count=2)
    inp = random(N, C, seed=1, dtype="bfloat16")
    weight = random(QKV, C, seed=2, dtype="bfloat16")
    angle = np.random.default_rng(3).uniform(-np.pi, np.pi, (T, HS // 2))
    rope = np.stack((np.cos(angle), np.sin(angle)), axis=-1).astype(np.float32)
    exact = np.matmul(*wide(inp, weight.T))
    heads = exact[:, :rotated].reshape(B, T, -1, HS // 2, 2)  # neighbours
    a, b = np.moveaxis(heads, -1, 0)
    cos, sin = np.moveaxis(rope[:, None].astype(np.float64), -1, 0)
    heads[...] = np.stack((a * cos - b * sin, a * sin + b * cos), axis=-1)  # in `exact`

    weight_gpu = given(weight)
    inp_gpu = given(inp)
    rope_gpu = on_gpu(rope)
    plain = unwritten(N, QKV, dtype="bfloat16")
    kernels = matmul.kernels
    linear = Linear(matmul, weight_gpu)
    rotate = functools.partial(kernels.forward, name="matmul_forward_rope")
    calls = [lambda out, n=n: rotate(out, inp_gpu, weight_gpu, rope_gpu, T, columns=n)
             for n in (192, 160)]
    if matmul.tile(QKV, narrow=True):
        calls.append(lambda out: linear.forward_rope(out, inp_gpu, rope_gpu, T))
    linear.forward(plain, inp_gpu, 192)
    for call in calls:
        out, = twice(call, (N, QKV))
        assert_close(SUMS, out=(out, exact))
        assert np.array_equal(out[:, rotated:].get(), plain[:, rotated:].get())


def frame_sizes(cubin):
    """Bytes of each kernel's stack: EIATTR_FRAME_SIZE (0x11) among the attributes of sections of
    the type SHT_CUDA_INFO, (form, attribute, value or, if the form is 4, length), then as many
    bytes: symbol, size."""
    sections, = struct.unpack_from("<Q", cubin, 0x28)
    count, = struct.unpack_from("<H", cubin, 0x3C)
    sizes = []
    for header in range(sections, sections + 64 * count, 64):
        at, size = struct.unpack_from("<QQ", cubin, header + 24)
        end = at + size if struct.unpack_from("<I", cubin, header + 4) == (0x70000000,) else at
        while at < end:
            form, attribute, length = struct.unpack_from("<BBH", cubin, at)
            if (form, attribute) == (4, 0x11):
                sizes.append(struct.unpack_from("<I", cubin, at + 8)[0])
            at += 4 + (length if form == 4 else 0)
    return sizes


SPILLS = [("matmul_swiglu", False, model(768, 2048, 12, 12, 64), False),
          ("attention", True, model(NH=6, NKV=6, HS=128), True)]  # layer, fp8, config, normed
LARGE_SPILLS = [
    *(("matmul_swiglu", False, model(*sizes), False) for sizes in (
        (2048, 8192, 32, 8, 64), (64, 96, 2, 1, 128), (64, 96, 4, 2, 16))),
    *(("attention", fp8, model(NH=NH, NKV=NKV, HS=HS), False) for fp8 in (False, True)
      for NH, NKV, HS in ((12, 12, 64), (12, 4, 64), (24, 8, 128), (4, 4, 128))),
    ("attention", False, model(NH=6, NKV=6, HS=128), True)]


@pytest.mark.parametrize("layer, fp8, config, normed", [
    *SPILLS, *(pytest.param(*case, marks=pytest.mark.large) for case in LARGE_SPILLS)])
def test_nothing_spills(layer, fp8, config, normed):
    """No kernel has a stack: the accumulators take most of the registers."""
    file, = files_of((layer,), config, BFLOAT16._replace(fp8=fp8), "sm_90a", normed)
    frames = frame_sizes(compile_file(file, "sm_90a"))
    assert (file.name == f"hopper/{layer}"
            and len(file.kernels) == (5 if fp8 else 4 if "swiglu" in layer else 3))
    assert len(frames) >= len(file.kernels) and not any(frames)
