"""FP8: the rounding, its scales, quantized copies and matmuls against NumPy; and runs."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

import train_gpt2
import train_gpt2_cuda as cuda
import train_llama3
import train_llama3_cuda as llama_cuda
import train_speedrun
import train_speedrun_cuda as speedrun_cuda
from conftest import on_stream
from llmc.gpu.device import copy_to_gpu, to_float32
from check_gpu import COLUMN_ORDER, ROW_ORDER, decode_e5m2, dlogits_of, natural
from fp8_reference import (LARGEST, LARGEST_E5M2, decode_e4m3, next_scales, round_e4m3,
                           round_e5m2)
from llmc.gpu.fp8 import DLOGITS_SCALE, Fp8, operand_table
from llmc.gpu.geometry import FP8_HISTORY, Has, blocks, kernel_files
from llmc.gpu.matmul import Quantized
from llmc.gpu.memory import Block
from llmc.gpu.messages import Messages
from llmc.gpu.precision import Precision
from llmc.logger import Log
from llmc.loop import Update
from llmc.tensors import views
from test_parity import need
from test_kernels import (assert_close, check_classifier, check_tensor, get_device, on_gpu, padded,
                          random, unwritten)
from test_compile import compile_file
from test_matmul_swiglu import frame_sizes, model, open_matmul

FP8 = Precision("bfloat16", fp8=True)
NUMBERS = decode_e4m3(np.arange(256, dtype=np.uint8))
LAYERS = SimpleNamespace(HAS=Has(), LAYERS=("matmul", "gelu"), CONSTANTS={})
GPT2 = train_gpt2.Config(64, 257, 2, 3, 192, 384)
SPEEDRUN = train_speedrun.Config(64, 257, 2, 3, 192, 384)


# --------------------------------------------------------------------------------------------------
# with no GPU


def test_the_numbers_and_their_rounding_are_pytorch_s():
    torch = pytest.importorskip("torch")
    bits = torch.arange(256, dtype=torch.uint8)
    rng = np.random.default_rng(0)
    for dtype, numbers, rounds, largest in (
            (torch.float8_e4m3fn, NUMBERS, round_e4m3, LARGEST),
            (torch.float8_e5m2, decode_e5m2(bits.numpy()), round_e5m2, LARGEST_E5M2)):
        assert np.array_equal(numbers, bits.view(dtype).float().numpy(), equal_nan=True)
        finite = np.unique(numbers[np.isfinite(numbers)])
        ties = (finite[1:] + finite[:-1]) / 2
        x = np.concatenate([finite, ties, np.nextafter(ties, np.float32(1e9)),
                            np.nextafter(ties, np.float32(-1e9)),
                            rng.uniform(-largest, largest, 100000),
                            rng.uniform(-0.02, 0.02, 100000)]).astype(np.float32)
        expected = torch.from_numpy(x).to(dtype).float().numpy()
        assert check_tensor("the result", rounds(x), expected, 0.0)
        assert finite.max() == largest
    assert np.array_equal(round_e4m3([500, np.inf, -np.inf, np.nan, 2.0**-10, -1.01 * 2.0**-10]),
                          [448, 448, -448, np.nan, 0, -(2.0**-9)], equal_nan=True)


@pytest.mark.parametrize("page, config, grads, few", (
    # few: those with GELU
    (LAYERS, GPT2, 0, 2), pytest.param(LAYERS, GPT2, 1, 2, marks=pytest.mark.large),
    # and with QK-norm
    pytest.param(speedrun_cuda.Speedrun, SPEEDRUN, 0, 5, marks=pytest.mark.large)))
def test_kernels_compile_into_registers(page, config, grads, few):
    for file in kernel_files(page, config, FP8._replace(float32_grads=grads), "sm_90a",
                             "auto").values():
        if "fp8" in file.name:
            frames = [size for size in frame_sizes(compile_file(file, "sm_90a")) if size]
            assert len(frames) <= few * ("matmul" in file.name)  # the producer's
            assert max(frames, default=0) <= 24


def test_a_run_s_table_keeps_its_columns(tmp_path):
    for step, dtype in enumerate(("fp8", "bfloat16", "fp8")):
        log = Log(cuda.CudaSettings(output=str(tmp_path), B=1, T=16, total_batch_size=16,
                                    dtype=dtype), step)
        log.training(step, 0.1,
                     Update(4.0, 1.0, 0.5, None, None, (7, 9) if dtype == "fp8" else None))
    _, *rows = (tmp_path / "main.csv").read_text().splitlines()
    assert [row.split(",")[-2:] for row in rows] == [["7", "9"], ["", ""], ["7", "9"]]


# --------------------------------------------------------------------------------------------------
# with a GPU


@pytest.fixture
def matmul(gpu, request):
    """Of 192 channels, or of request.param, some kernels with narrow tiles; or with squared ReLU
    for GELU, "relu2"."""
    need("cuda-fp8")
    kind = getattr(request, "param", GPT2.C)
    C = GPT2.C if kind == "relu2" else kind
    config = dataclasses.replace(GPT2, C=C, NH=C // math.gcd(C, 64))
    matmul = open_matmul(("matmul", "gelu", "fp8", "matmul_fp8"), config, FP8,
                         normed=kind == "relu2")
    on_stream(matmul.device)
    matmul.allocate()
    return matmul


@pytest.fixture
def sm_count(matmul, monkeypatch, request):
    """None, or so few multiprocessors that each computes many tiles."""
    if request.param:
        monkeypatch.setattr(matmul.device, "sm_count", request.param)


@pytest.fixture
def fp8(matmul):
    return make_fp8(matmul, 16)


def operands_on_gpu(parameters, N):
    block = Block({"operands": operand_table(parameters, N, recomputed=())}, scratch=True)
    return block.over(block.allocate())


def make_fp8(matmul, N):
    table = cuda.parameter_table(GPT2, "bfloat16")
    params = views(table,
                   matmul.device.upload(np.zeros(sum(row.bytes() for row in table.values()),
                                                 np.uint8)))
    return Fp8(matmul, params, operands_on_gpu(table, N))


def bytes_on_gpu(shape, value=255):
    return on_gpu(np.full(shape, value, np.int32)).astype("uint8")


def test_prepare_scales(fp8):
    rng = np.random.default_rng(1)
    history = np.zeros(fp8.state.history.shape, np.float32)
    scales = np.ones(fp8.state.scales.size, np.float32)
    for update in range(FP8_HISTORY + 3):
        largest = ((10.0 ** rng.uniform(-12, 4, scales.size)).astype(np.float32)
                   * (rng.random(scales.size) < 0.2))
        largest[:3] = np.nan, np.inf, 224.0
        copy_to_gpu(fp8.state.largest, largest.astype(np.float32).view(np.int32))
        copy_to_gpu(fp8.state.counts, np.array([update << 40, 7]))
        fp8.prepare_scales(Messages())
        fp8.device.synchronize()
        history[update % FP8_HISTORY] = np.where(np.isfinite(largest), largest, 0)
        scales = next_scales(history, scales)
        assert (np.array_equal(fp8.state.history.get(), history)
                and np.array_equal(fp8.state.scales.get(), scales))
        assert fp8.counts(update) == (update << 40, 7)
        assert not fp8.state.largest.get().any() and not fp8.state.counts.get().any()


@pytest.mark.parametrize("N, C", ((1, 16), (3, 48), (64, 64), (97, 208), (256, 3072), (130, 1600)))
@pytest.mark.parametrize("spread, scale", ((1.0, 64.0), (300.0, 2.0), (300.0, 256.0), (1e-6, 2.0**14),
                                           (1e-8, 2.0**8)))
@pytest.mark.parametrize("role", ("dout", "weight"))
def test_quantize(fp8, N, C, spread, scale, role):
    """Every byte, what is not finite and the padding included; the largest number and the counts."""
    x = random(N, C, seed=1, spread=spread, dtype="bfloat16")
    if N > 60:
        x[5, :3] = (np.inf, -np.inf, 0.0)
        x[N - 1, C - 1] = np.nan
    pitch = blocks(N, 16) * 16
    slot = fp8.slot("fc", 1, role)
    fp8.state.scales[slot] = scale

    def quantize(plain, transposed):
        fp8.forget()
        to = Quantized(bytes_on_gpu((N, C)) if plain else None, bytes_on_gpu((C, pitch))
                       if transposed else None)
        fp8.quantize("fc", 1, role, on_gpu(x, dtype="bfloat16"), to.plain, to.transposed,
                     again=not plain)
        decode = decode_e5m2 if role == "dout" else decode_e4m3
        return [y if y is None else decode(y) for y in in_natural_order(to, role == "weight")]

    rounds = round_e5m2 if role == "dout" else round_e4m3
    expected = rounds(x * np.float32(scale))
    for plain, transposed in itertools.product((True, False), repeat=2):
        out, out_t = quantize(plain, transposed)
        if plain:
            assert np.array_equal(out, expected, equal_nan=True)
            assert_noted(fp8, slot,
                         np.fmax.reduce(np.abs(x), axis=None, where=~np.isnan(x), initial=0),
                         expected, of_gradient=role == "dout")
        if transposed:
            assert np.array_equal(out_t[:, :N], expected.T, equal_nan=True)
            assert not out_t[:, N:].any()
        assert plain or not fp8.state.largest.get().any() and not fp8.state.counts.get().any()


def in_natural_order(quantized, weight=False):
    """A Quantized on the GPU -> its bytes (N,C) and (C,pitch)."""
    plain, transposed = (x if x is None else x.get() for x in quantized[:2])
    return (None if plain is None else natural(plain, COLUMN_ORDER),
            None if transposed is None
            else natural(transposed, COLUMN_ORDER if weight else ROW_ORDER))


def assert_noted(fp8, slot, largest, expected, tolerance=0.0, of_gradient=False):
    """That a kernel noted this largest number, and the counts of these numbers of E4M3 or, of a
    gradient, E5M2, in no other place."""
    found = fp8.state.largest.get()
    assert np.isclose(found[slot : slot + 1].view(np.float32), np.float32(largest), rtol=tolerance,
                      atol=0)
    assert np.count_nonzero(found) == 1
    most = LARGEST_E5M2 if of_gradient else LARGEST
    saturated = np.isnan(expected) | (np.abs(expected) == most)
    assert fp8.state.counts.get().tolist() == [saturated.sum(), (expected == 0).sum()]


NORMS = {"layernorm": (train_gpt2.layernorm_forward, cuda.residual_layernorm_forward),
         "rmsnorm": (train_llama3.rmsnorm_forward, llama_cuda.residual_rmsnorm_forward)}


def e4m3(*shape, seed, decode=decode_e4m3, order=COLUMN_ORDER):
    """Random bytes of numbers up to 30, and what they stand for, in natural order."""
    rng = np.random.default_rng((seed, *shape))
    bits = (rng.integers(0, 96 if decode is decode_e4m3 else 80, shape) | rng.integers(0, 2, shape)
            << 7)
    bits = bits.astype(np.uint8)
    return (on_gpu(bits.astype(np.int32)).astype("uint8"),
            decode(natural(bits, order)).astype(np.float64))


# M, N, K
SIZES = ((1, 16, 16), (129, 208, 96), (97, 1600, 320), (128, 192, 128), (300, 768, 3072),
         (1000, 2304, 768))


@pytest.mark.parametrize("sm_count", (None, 2), indirect=True)
@pytest.mark.parametrize("kernel", ("matmul_fp8", "matmul_fp8_inp"))
@pytest.mark.parametrize("M, N, K", SIZES)
def test_matmul(fp8, M, N, K, kernel, sm_count):
    """Against float64: rounded to bfloat16, which is off by up to 2^-8, and before, each of the K /
    32 steps cuts off what is below some 2^-13 of the sum so far, which is at most about the largest
    one."""
    a, a64 = e4m3(M, K, seed=1, decode=decode_e5m2 if "inp" in kernel else decode_e4m3)
    b, b64 = e4m3(N, K, seed=2)
    bias = random(N, seed=3, dtype="bfloat16")
    scales = on_gpu(np.float32([16.0, 0.5]))
    for with_bias, scale in ((True, 1.0), (False, 0.25)):
        out = unwritten(M, N, dtype="bfloat16")
        fp8.multiply(out, a, scales[:1], b, scales[1:], on_gpu(bias, dtype="bfloat16") if with_bias
                     else None, scale, kernel)
        product = a64 @ b64.T * (scale / 8.0)
        expected = product + with_bias * bias.astype(np.float64)
        tolerance = 2.0**-8 * np.abs(expected) + K / 32 * 2.0**-13 * np.abs(product).max()
        assert check_tensor("out", to_float32(out), expected, tolerance)


@pytest.mark.parametrize("sm_count", (None, 2), indirect=True)
@pytest.mark.parametrize("M, N, K", SIZES[1:])
@pytest.mark.parametrize("matmul", (GPT2.C, "relu2"), indirect=True)
def test_matmul_gelu(request, fp8, M, N, K, sm_count):
    """out as without GELU, not of squared ReLU; GELU as by gelu.cu and quantize, to the byte."""
    a, _ = e4m3(M, K, seed=1)
    b, _ = e4m3(N, K, seed=2)
    bias = on_gpu(random(N, seed=3, dtype="bfloat16"), dtype="bfloat16")
    scales = on_gpu(np.float32([64, 8]))
    slot = fp8.slot("fcproj", 1, "inp")
    operands = (a, scales[:1], b, scales[1:], bias)
    fp8.state.scales[slot] = 16.0
    whole = blocks(M * N, GPT2.F)  # rows of gelu.cu, which knows F
    out, wanted_out, gelu = unwritten(M, N,
                                      dtype="bfloat16"), *unwritten(2, whole * GPT2.F,
                                                                    dtype="bfloat16")
    got = bytes_on_gpu((M, N))
    wanted = bytes_on_gpu((M, N))
    fp8.multiply_gelu(out, got, *operands, fp8.scaling("fcproj", 1, "inp"))
    noted = fp8.state.largest.get(), fp8.state.counts.get()
    fp8.forget()
    wanted_out[...] = 0
    fp8.multiply(wanted_out[: M * N].reshape(M, N), *operands)
    cuda.gelu_forward(fp8.device, gelu, wanted_out, whole, GPT2.F)
    fp8.quantize("fcproj", 1, "inp", gelu[: M * N].reshape(M, N), wanted)
    assert (np.array_equal(out.get().ravel(), wanted_out.get()[: M * N])
            == ("relu2" not in request.node.name))
    assert np.array_equal(got.get(), wanted.get())
    assert (np.array_equal(noted[0], fp8.state.largest.get())
            and np.array_equal(noted[1], fp8.state.counts.get()))


@pytest.mark.parametrize("sm_count", (None, 2), indirect=True)
@pytest.mark.parametrize("M, N, K", SIZES[1:])
@pytest.mark.parametrize("matmul", (GPT2.C, "relu2"), indirect=True)
def test_matmul_gelu_backward(request, fp8, M, N, K, sm_count):
    """Against float64, within E5M2's step; column sums in float32. Squared ReLU's reads its
    result."""
    a, a64 = e4m3(M, K, seed=1, decode=decode_e5m2)
    b, b64 = e4m3(N, K, seed=2)
    gelu, numbers = e4m3(M, N, seed=4)
    gelu &= 127
    inp = random(M, N, seed=3, spread=2, dtype="bfloat16")
    scales = on_gpu(np.float32([2.0**14, 8]))
    expected = np.empty((M, N))
    dout = a64 @ b64.T / 2.0**17
    train_gpt2.gelu_backward(expected, inp.astype(np.float64), dout, inp.size)
    if "relu2" in request.node.name:
        expected = dout * 2 * np.sqrt(np.abs(numbers) / 2)
    slot = fp8.slot("fc", 1, "dout")
    scale = 2.0 ** np.floor(np.log2(224 / np.abs(expected).max()))
    fp8.state.scales[slot] = scale
    got = bytes_on_gpu((M, N))
    partials = unwritten(blocks(M, 128), N)
    fp8.multiply_gelu_backward(got, partials, a, scales[:1], b, scales[1:],
                               on_gpu(inp, dtype="bfloat16"), gelu,
                               on_gpu(np.float32([2])), fp8.scaling("fc", 1, "dout"))
    plain = decode_e5m2(natural(got.get(), COLUMN_ORDER))
    assert (np.abs(plain - expected * scale) <= np.abs(expected * scale) * 2.0**-3 + 224
            * 2.0**-8).all()
    assert np.abs(plain - expected * scale).mean() < 2.0**-4 * np.abs(expected * scale).mean()
    assert_close(2.0**-8, partials=(partials.sum(axis=0), expected.sum(axis=0)))
    assert_noted(fp8, slot, np.abs(expected).max(), plain, 2.0**-8, of_gradient=True)


@pytest.mark.parametrize("normed, sm_count", ((False, None), (False, 2), (True, None), (True, 2)))
@pytest.mark.parametrize("NH, NKV, HS", ((3, 3, 64), (2, 2, 128), (6, 2, 64), (4, 1, 128)))
@pytest.mark.parametrize("B, T", ((3, 16), (2, 105), (1, 208), (2, 1024)))
def test_attention_backward(matmul, monkeypatch, B, T, NH, NKV, HS, normed, sm_count):
    """As the bfloat16 kernels', within half of E5M2's step and bfloat16's; column sums to the bit.
    With RoPE and QK-norm, too, and scales with which numbers saturate."""
    config = model(NH=NH, NKV=NKV, HS=HS)
    sizes = (B, T, NH, NKV, HS)
    QKV = (NH + 2 * NKV) * HS
    device = open_matmul(("attention",), config, FP8, normed=normed).device
    if sm_count:
        monkeypatch.setattr(device, "sm_count", sm_count)
    on_stream(device)
    dtype = "bfloat16"
    inp, dout = on_gpu(random(B, T, QKV, seed=1, dtype=dtype),
                       random(B, T, NH * HS, seed=2, dtype=dtype), dtype=dtype)
    out = unwritten(B, T, NH * HS, dtype=dtype)
    lse = unwritten(B, NH, T)
    cuda.attention_forward(device, out, lse, inp, *sizes)
    table = train_speedrun.rope_table if normed else train_llama3.rope_table
    angles = on_gpu(np.stack(table(config, T), axis=-1))
    rstd = on_gpu(random(B, T, NH + NKV, seed=3) ** 2) if normed else None

    def backward(dinp, rope):
        scratch = SimpleNamespace(D=unwritten(B, NH, T))
        partials = unwritten(B * blocks(T, 64), QKV)
        cuda.attention_backward(device, dinp, scratch, partials, dout, inp, out, lse, rope, rstd,
                                *sizes)
        return partials.get()

    for rope, highest in ((None, 224), (angles, 2e5)):  # of the largest number, scaled, at most
        fp8 = make_fp8(matmul, 16)
        rounded = unwritten(B, T, QKV, dtype=dtype)
        partials = backward(rounded, rope)
        exact = to_float32(rounded).reshape(B * T, QKV)
        slot = fp8.slot("qkv", 1, "dout")
        largest = np.abs(exact).max()
        fp8.state.scales[slot] = scale = 2.0 ** np.floor(np.log2(highest / largest))
        got = Quantized(bytes_on_gpu((B * T, QKV)), None, fp8.scaling("qkv", 1, "dout"))
        assert backward(got, rope).tobytes() == partials.tobytes()
        numbers = decode_e5m2(in_natural_order(got)[0])
        expected = np.clip(exact * scale, -LARGEST_E5M2, LARGEST_E5M2)
        step = np.ldexp(1.0, np.maximum(np.frexp(expected * (1 + 2.0**-8))[1], -13) - 3)
        assert (np.abs(numbers - expected) <= step / 2 + np.abs(expected) * 2.0**-8).all()
        # where bfloat16's rounding made a tie
        assert (numbers != round_e5m2(expected)).mean() < 2.0**-4
        assert_noted(fp8, slot, largest, numbers, 2.0**-8, of_gradient=True)


@pytest.mark.parametrize("sm_count, splits", ((None, None), (3, 1), (132, 5)),
                         indirect=["sm_count"])
@pytest.mark.parametrize("kernel", ("weight", "weight_across", "classifier_inp"))
@pytest.mark.parametrize("matmul", (192, 160), indirect=True)
@pytest.mark.parametrize("M, N, K",
                         ((16, 16, 1), (208, 96, 129), (1600, 320, 97), (192, 128, 128),
                          (768, 768, 8192),
                          (2304, 768, 1000), (192, 96, 40000)))
def test_matmul_long(fp8, M, N, K, kernel, sm_count, splits):
    """Against float64: as close for a long K as for a short one; the same bits twice."""
    pitch = blocks(K, 16) * 16
    across = kernel == "weight_across"
    of_a, of_b = (decode_e4m3, decode_e5m2) if across else (decode_e5m2, decode_e4m3)
    if kernel == "classifier_inp":
        M, (a, a64) = M + 1, e4m3(M + 1, pitch, seed=1, decode=of_a)
        b, b64 = e4m3(N, pitch, seed=2)
        a64 = a64.T
    else:  # rows from K on are what TMA finds beyond the tensor, and the padding of b
        a, a64 = e4m3(K, M, seed=1, decode=of_a)
        b, b64 = e4m3(N, pitch, seed=2, decode=of_b, order=ROW_ORDER)
        b64[:, K:] = 0
        b[...] = on_gpu(np.where(natural(np.arange(pitch), ROW_ORDER).argsort() < K, b.get(),
                                 0).astype(np.int32))
        a64 = np.concatenate([a64, np.zeros((pitch - K, M))])
    expected = (a64.T @ b64.T if not across else b64 @ a64) / 16.0
    scales = on_gpu(np.float32([16.0, 0.5]))
    results = []
    splits = splits and min(splits, blocks(pitch, 128))
    for _ in range(2):
        out = unwritten(*expected.shape, dtype="bfloat16")
        fp8.multiply_long(kernel, out, a, scales[:1], b, scales[1:], 0.5, splits)
        assert_close(2.0**-8, out=(out, expected))
        results.append(out.get().tobytes())
    assert results[0] == results[1] and not fp8.done.get().any()


@pytest.mark.parametrize("V", (257, 8193, 17000, 50257, 128256))
def test_classifier(gpu, V):
    """Losses as in bfloat16. dlogits, in the first half of their room, are one of two neighbours in
    E5M2; on average, what they should be, in each quarter of the way between the two. bfloat16's
    exp apart."""
    need("cuda-fp8")
    device = get_device(gpu, train_gpt2.Config(1024, V, 1, 1, 64, padded(V)), FP8)
    for sm_count in (device.sm_count, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "sm_count", sm_count)
            got, expected = check_classifier(device, 3, 97, DLOGITS_SCALE)
        dlogits = dlogits_of(got)
        step = np.ldexp(1.0, np.maximum(np.frexp(expected)[1] - 1, -14) - 2)
        errors = (dlogits[..., :V] - expected) / step
        quarter = np.floor(expected / step % 1 * 4)
        assert (np.abs(errors) <= 1 + 2.0**-6).all() and not dlogits[..., V:].any()
        assert all(abs(errors[quarter == i].mean()) < 5 / np.sqrt(errors.size) + 2.0**-7
                   for i in range(4))
    nan = on_gpu(np.full((1, 1, padded(V)), np.nan, np.float32), dtype="bfloat16")
    cuda.classifier(device, unwritten(1, 1), nan, on_gpu(np.zeros((1, 1), np.int32)),
                    on_gpu(np.ones((1, 1), np.float32)), DLOGITS_SCALE, 1, 1, 1)
    assert np.isnan(dlogits_of(nan)[..., :V]).all()
