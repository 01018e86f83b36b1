"""Each GPU kernel against its NumPy function in float64, on random data and awkward shapes; outputs
are NaN before the call; and, with no GPU, that all compile and that every launch passes what its
kernel takes."""

import itertools
import os

import numpy as np
import pytest

import train_gpt2
import train_gpt2_cuda as cuda
import train_llama3
import train_llama3_cuda as llama_cuda
import train_speedrun
import train_speedrun_cuda as speedrun_cuda
from conftest import on_stream
from llmc.gpu.batch import SortedTokens, sort_tokens
from llmc.checkpoint import padded
from llmc.gpu.device import cp, open_gpu, to_float32
from llmc.gpu.geometry import ENCODER_PIECE, blocks
from llmc.gpu.precision import Precision
from llmc.tensors import bf16_bits, bf16_to_float32
from llmc.gpu.trainer import open_device
from train_gpt2 import Config
from llmc.debugstate import check_tensor

# --------------------------------------------------------------------------------------------------
# with no GPU

MODELS = [  # maxT, V, L, NH, C, Vp
    Config(1024, 50257, 1, 12, 768, 50304),  # GPT-2 124M
    Config(1024, 257, 2, 1, 64, 384),  # V % 8 of 1; one head
    Config(1024, 1003, 1, 25, 1600, 1024),  # V % 8 of 3; 25 heads; more than one warp for a row
    Config(1024, 131, 1, 3, 240, 256),  # heads of 80, 128, 96
    Config(1024, 131, 1, 2, 256, 256), Config(1024, 131, 1, 2, 192, 256),
]

PRECISIONS = {"tf32": Precision(), "float32": Precision(tf32=0), "bf16": Precision("bfloat16"),
              "bf16-float32-grads": Precision("bfloat16", 1, 1)}

LLAMAS = [  # maxT, V, L, NH, NKV, C, Vp, F, HS
    train_llama3.Config(1024, 50257, 1, 12, 4, 768, 50304, 2048, 64),  # l12
    train_llama3.Config(1024, 257, 2, 9, 3, 576, 384, 1536, 64),  # SmolLM2
    # heads of 16, fewer channels than C
    train_llama3.Config(1024, 1003, 1, 3, 1, 240, 1024, 200, 16, tied=0),
    train_llama3.Config(1024, 131, 1, 2, 2, 2048, 256, 512, 128, eps=1e-3),
]


def skewed(V, shape, seed=0):
    """Tokens as in text: a fifth of the positions have one of them, some have another."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, shape, dtype=np.int32)
    choice = rng.random(shape)
    tokens[choice < 0.2] = V // 2
    tokens[choice > 0.9] = V - 1
    return tokens


@pytest.mark.parametrize("tokens", (
    *(np.random.default_rng(0).integers(0, V, (3, 97), dtype=np.int32) for V in (3, 257, 70000)),
    skewed(257, (4, 1024)), np.arange(1000, dtype=np.int32)[None] // (ENCODER_PIECE + 1),
    *(np.full((1, n), 5, np.int32) for n in (1, ENCODER_PIECE, ENCODER_PIECE + 1, 1000)),
), ids=("V3", "V257", "V70000", "skewed", "all-cut", "one", "a-piece", "a-piece-and-one",
        "all-equal"))
def test_sort_tokens(tokens):
    N = tokens.size
    order, begins, piece_tokens = (np.full(size, -99, np.int32) for size in (N, N + 1, N))
    sort_tokens(order, begins, piece_tokens, tokens)
    positions = {token: np.flatnonzero(tokens == token).tolist()
                 for token in np.unique(tokens).tolist()}
    cut = [token for token in positions if len(positions[token]) > ENCODER_PIECE]
    expected = [(~token if token in cut else token, positions[token][i : i + ENCODER_PIECE])
                for token in (*cut, *(token for token in positions if token not in cut))
                for i in range(0, len(positions[token]), ENCODER_PIECE)]
    pieces = len(expected)
    got = zip(piece_tokens[:pieces].tolist(), np.split(order, begins[1:pieces]))
    assert [(token, piece.tolist()) for token, piece in got] == expected
    assert begins[0] == 0 and np.all(begins[pieces:] == N) and np.all(piece_tokens[pieces:] == 0)
    assert (np.count_nonzero(piece_tokens < 0)
            <= blocks(2 * N, ENCODER_PIECE)), "rows of wte_partials"


# --------------------------------------------------------------------------------------------------
# with a GPU

# The largest error allowed, as a fraction of the largest value of the reference. float32 rounds to
# 6e-8, sums of n numbers in any order to some sqrt(n) of that; TF32 rounds operands to 5e-4;
# bfloat16 rounds what is stored to 2e-3, and in attention what one matmul hands to the next, too;
# half precision rounds the residual stream to 2.5e-4.
EXACT, SUMS, TF32, BF16, BF16_TWICE, HALF = 1e-6, 5e-6, 2e-3, 4e-3, 1e-2, 5e-4

SHAPES = [(1, 1), (3, 97), (1, 1000), (3, 1024)]
MATMULS = {}


CASES = ([(config, name) for config in MODELS for name in ("tf32", "bf16")]
         + [(MODELS[3], "bf16-float32-grads")])


@pytest.fixture(params=CASES,
                ids=lambda case: f"C{case[0].C}xNH{case[0].NH}xV{case[0].V}-{case[1]}")
def device(request, gpu):
    config, precision = request.param
    return get_device(gpu, config, PRECISIONS[precision])


def get_device(gpu, config, precision, portable=False):
    """A Device for one model, made once; `portable` without the instructions that only this
    generation of GPUs has."""
    return get_matmul(gpu, config, precision, portable).device


def get_matmul(gpu, config, precision, portable=False, matmul="auto"):
    key = config, precision, portable, matmul
    if precision.bf16 and int(gpu.arch[3:].rstrip("a")) < 80:
        pytest.skip(f"{gpu.arch} has no bfloat16")
    if key not in MATMULS:
        gpu = open_gpu("sm_80" if portable else "native")
        architecture = {Config: cuda.GPT2, train_speedrun.Config: speedrun_cuda.Speedrun}.get(
            type(config), llama_cuda.Llama3)
        device, made = open_device(architecture, gpu, config, precision, matmul)
        device.config = config
        device.precision = precision  # for the tests
        with device.stream:
            made.allocate()
        MATMULS[key] = made
    on_stream(MATMULS[key].device)
    return MATMULS[key]


def random(*shape, seed=0, spread=1.0, mean=0.0, dtype="float32"):
    """float32 normal numbers, others in each run of the tests; those that this dtype has."""
    rng = np.random.default_rng((seed, os.getpid()))
    numbers = rng.standard_normal(shape, dtype=np.float32) * np.float32(spread) + np.float32(mean)
    return (bf16_to_float32(bf16_bits(numbers)) if dtype == "bfloat16"
            else numbers.astype(dtype).astype(np.float32))


def on_gpu(*arrays, dtype=None):
    """Copies on the GPU, in this dtype."""
    arrays = [cp.asarray(bf16_bits(array) if dtype == "bfloat16"
                         else array.astype(dtype or array.dtype))
              for array in arrays]
    return arrays if len(arrays) > 1 else arrays[0]


def unwritten(*shape, dtype="float32"):
    """NaN everywhere."""
    return (cp.full(shape, 0xFFFF, np.uint16) if dtype == "bfloat16"
            else cp.full(shape, np.nan, dtype))


def assert_close(tolerance, **pairs):
    """name=(got on the GPU, expected). What is stored in bfloat16 or in halves is rounded."""
    for name, (got, expected) in pairs.items():
        allowed = max(tolerance, {"uint16": BF16, "float16": HALF}.get(got.dtype.name, 0.0))
        assert check_tensor(name, to_float32(got), expected,
                            allowed * max(float(np.abs(expected).max()), 1e-30)), name


def partial_rows(device, B, T):
    return cuda.partial_rows(B, T, device.sm_count, device.geometry)


def wide(*arrays):
    return [array.astype(np.float64) for array in arrays]


@pytest.mark.parametrize("B, T", [*SHAPES, (16, 1024)])
def test_encoder(device, B, T):
    """With learned positions, and without."""
    maxT = device.config.maxT
    V = device.config.V
    C = device.config.C
    Vp = device.config.Vp
    inp = skewed(V, (B, T), seed=T)
    e = device.precision.dtype
    g = device.precision.grads
    wte = random(Vp, C, seed=1, dtype=e)
    wpe = random(maxT, C, seed=2, dtype=e)
    dout = random(B, T, C, seed=3, dtype=e)
    dwte = random(Vp, C, seed=4, dtype=g)
    order_begins_tokens = [np.zeros(size, np.int32) for size in (B * T, B * T + 1, B * T)]
    sort_tokens(*order_begins_tokens, inp)
    for with_wpe in (True, False):
        out = unwritten(B, T, C, dtype=device.precision.residual)
        cuda.encoder_forward(device, out, on_gpu(inp), on_gpu(wte, dtype=e), on_gpu(wpe, dtype=e)
                             if with_wpe else None, B, T, C)
        expected = np.empty((B, T, C))
        train_gpt2.encoder_forward(expected, inp,
                                   *wide(wte, wpe if with_wpe else np.zeros_like(wpe)), B, T, C)
        assert_close(EXACT, out=(out, expected))

        got_wte = on_gpu(dwte, dtype=g)
        got_wpe = unwritten(maxT, C, dtype=g) if with_wpe else None
        partials = unwritten(partial_rows(device, B, T).wte, C)
        cuda.encoder_backward(device, got_wte, got_wpe, partials, on_gpu(dout, dtype=e),
                              SortedTokens(*on_gpu(*order_begins_tokens)), B, T, C)
        expected_wte = dwte.astype(np.float64)
        expected_wpe = np.empty((maxT, C)) if with_wpe else None
        train_gpt2.encoder_backward(expected_wte, expected_wpe, *wide(dout), inp, B, T, C)
        assert_close(SUMS, dwte=(got_wte, expected_wte),
                     **({"dwpe": (got_wpe, expected_wpe)} if with_wpe else {}))


@pytest.mark.parametrize("B, T", SHAPES)
def test_residual_layernorm(device, B, T):
    C = device.config.C
    e = device.precision.dtype
    residual_dtype = device.precision.residual
    inp1 = random(B, T, C, seed=1, mean=1, dtype=residual_dtype)
    inp2 = random(B, T, C, seed=2, mean=1, dtype=e)
    weight = random(C, seed=3, dtype=e)
    bias = random(C, seed=4, dtype=e)
    for both in (True, False):
        residual = unwritten(B, T, C, dtype=residual_dtype)
        out = unwritten(B, T, C, dtype=e)
        mean = unwritten(B, T)
        rstd = unwritten(B, T)
        added = on_gpu(inp2, dtype=e) if both else None
        cuda.residual_layernorm_forward(device, residual if both else None, out, mean, rstd,
                                        on_gpu(inp1, dtype=residual_dtype), added,
                                        *on_gpu(weight, bias, dtype=e), B, T, C)
        total = inp1.astype(np.float64) + (inp2 if both else 0)
        if both:
            assert_close(EXACT, residual=(residual, total))
            # the layernorm is that of what is stored
            total = to_float32(residual).astype(np.float64)
        expected = np.empty((B, T, C)), np.empty((B, T)), np.empty((B, T))
        train_gpt2.layernorm_forward(*expected, total, *wide(weight, bias), B, T, C)
        assert_close(SUMS, out=(out, expected[0]), mean=(mean, expected[1]),
                     rstd=(rstd, expected[2]))


def test_the_residual_stream_saturates(device):
    """Beyond the largest half there is that; inf and NaN stay, in what follows from them, too."""
    if device.precision.residual != "float16":
        pytest.skip("a float32 stream does not saturate")
    C = device.config.C
    e = device.precision.dtype
    inp1 = np.full((1, 1, C), 6e4, np.float32)
    inp2 = np.zeros((1, 1, C), np.float32)
    ones = np.ones(C, np.float32)
    inp1[..., 1] = -6e4
    inp2[..., :4] = (8192, -8192, np.inf, np.nan)
    residual = unwritten(1, 1, C, dtype="float16")
    out = unwritten(1, 1, C, dtype=e)
    mean = unwritten(1, 1)
    rstd = unwritten(1, 1)
    cuda.residual_layernorm_forward(device, residual, out, mean, rstd,
                                    on_gpu(inp1, dtype="float16"),
                                    on_gpu(inp2, dtype=e), *on_gpu(ones, ones, dtype=e), 1, 1, C)
    wanted = np.array([65504, -65504, np.inf, np.nan, 6e4], np.float16)
    assert np.array_equal(residual.get()[0, 0, :5], wanted, equal_nan=True)
    assert not np.isfinite(to_float32(out)).any()
    cuda.residual_layernorm_forward(device, residual, out, mean, rstd,
                                    on_gpu(inp1, dtype="float16"),
                                    on_gpu(0 * inp1, dtype=e), *on_gpu(ones, ones, dtype=e), 1, 1,
                                    C)
    assert np.isfinite(to_float32(out)).all()

    wte = np.full((device.config.Vp, C), 6e4, np.float32)
    wpe = np.full((device.config.maxT, C), 6e4, np.float32)
    wte[0, :2] = -6e4, np.inf
    wpe[0, 0] = -6e4
    encoded = unwritten(1, 1, C, dtype="float16")
    cuda.encoder_forward(device, encoded, on_gpu(np.zeros((1, 1), np.int32)),
                         *on_gpu(wte, wpe, dtype=e), 1, 1, C)
    assert np.array_equal(encoded.get()[0, 0, :3], np.array([-65504, np.inf, 65504], np.float16))


@pytest.mark.parametrize("B, T", SHAPES)
def test_layernorm_backward(device, B, T):
    C = device.config.C
    e = device.precision.dtype
    g = device.precision.grads
    dinp, dout = (random(B, T, C, seed=seed, dtype=e) for seed in (1, 2))
    inp = random(B, T, C, seed=3, dtype=device.precision.residual)
    weight = random(C, seed=4, dtype=e)
    mean = inp.mean(axis=-1, dtype=np.float64).astype(np.float32)
    rstd = (1 / np.sqrt(inp.var(axis=-1, dtype=np.float64) + 1e-5)).astype(np.float32)
    expected = dinp.astype(np.float64)
    dweight = np.empty(C)
    dbias = np.empty(C)
    train_gpt2.layernorm_backward(expected, dweight, dbias, *wide(dout, inp, weight, mean, rstd), B,
                                  T, C)
    most = partial_rows(device, B, T).layernorm
    few = min(most, 3)  # blocks, each of which comes to many rows
    for add_residual, rows in ((1, most), (0, few), (1, few)):
        got = on_gpu(dinp, dtype=e) if add_residual else unwritten(B, T, C, dtype=e)
        partials = unwritten(rows, 3 * C)
        sums = unwritten(3, C, dtype=g)
        cuda.layernorm_backward(device, got, partials, on_gpu(dout, dtype=e),
                                on_gpu(inp, dtype=device.precision.residual),
                                on_gpu(weight, dtype=e), *on_gpu(mean, rstd), add_residual, B, T, C)
        cuda.column_sums(device, [(partials, tuple(sums))])
        total = expected - (0 if add_residual else dinp)
        assert_close(SUMS, dinp=(got, total), dweight=(sums[0], dweight), dbias=(sums[1], dbias))
        # sums of the errors of dinp, which may cancel in the value
        assert_close(20 * SUMS, total=(sums[2], total.sum(axis=(0, 1))))


@pytest.mark.parametrize("B, T", SHAPES)
def test_gelu(device, B, T):
    C = device.config.C
    e = device.precision.dtype
    g = device.precision.grads
    inp = random(B, T, 4 * C, seed=1, spread=3, dtype=e)
    dout = random(B, T, 4 * C, seed=2, dtype=e)
    out = unwritten(B, T, 4 * C, dtype=e)
    expected = np.empty((B, T, 4 * C))
    expected_dinp = np.empty((B, T, 4 * C))
    cuda.gelu_forward(device, out, on_gpu(inp, dtype=e), B * T, 4 * C)
    train_gpt2.gelu_forward(expected, *wide(inp), inp.size)
    train_gpt2.gelu_backward(expected_dinp, *wide(inp, dout), inp.size)
    assert_close(EXACT, out=(out, expected))
    forward = out
    for again, in_place in ((True, False), (False, True)):
        out = unwritten(B, T, 4 * C, dtype=e)
        dbias = unwritten(4 * C, dtype=g)
        partials = unwritten(partial_rows(device, B, T).gelu, 4 * C)
        dout_gpu = on_gpu(dout, dtype=e)
        dinp = dout_gpu if in_place else unwritten(B, T, 4 * C, dtype=e)
        cuda.gelu_backward(device, dinp, partials, out if again else None, on_gpu(inp, dtype=e),
                           dout_gpu, B * T, 4 * C)
        cuda.column_sums(device, [(partials, (dbias,))])
        assert_close(EXACT, dinp=(dinp, expected_dinp))
        assert_close(20 * SUMS, dbias=(dbias, expected_dinp.sum(axis=(0, 1))))
        if again:
            assert np.array_equal(out.get(), forward.get()), "recomputing changes no bit"


@pytest.mark.parametrize("B, T", SHAPES[:3])
def test_classifier(device, B, T):
    check_classifier(device, B, T)


@pytest.mark.parametrize("config, portable",
                         ((Config(1024, 100001, 1, 2, 128, 100096), False), (MODELS[0], True),
                          (Config(1024, 120001, 1, 2, 128, 120064), False),  # in registers: a part
                          (Config(1024, 128256, 1, 2, 128, 128256), False)))
def test_classifier_with_one_row_on_chip_or_none(gpu, config, portable):
    """In bfloat16; in float32, there is never room for two of 50304. Without thread block clusters,
    for none."""
    device = get_device(gpu, config, PRECISIONS["bf16"], portable)
    assert device.geometry.CLASSIFIER_ROWS_ON_CHIP == (gpu.arch == "sm_90a" and not portable)
    check_classifier(device, 3, 97)


@pytest.mark.parametrize("V", (257, 8193, 16384, 17000, 24577))
def test_classifier_of_few_parts(gpu, monkeypatch, V):
    """Rows of one to seven parts, the last one short; the blocks of one multiprocessor take all
    rows."""
    for precision in ("tf32", "bf16"):
        config = Config(1024, V, 1, 1, 64, padded(V))
        device = get_device(gpu, config, PRECISIONS[precision])
        monkeypatch.setattr(device, "sm_count", 1)
        check_classifier(device, 3, 97)


@pytest.mark.parametrize("kind", ("tf32", "bf16", "bf16, portable"))
def test_classifier_of_what_is_not_finite(gpu, kind):
    """NaN and infinity are not swallowed, and stay in their row; -infinity has no weight."""
    precision, *portable = kind.split(", ")
    device = get_device(gpu, MODELS[2], PRECISIONS[precision], bool(portable))
    V = device.config.V
    Vp = device.config.Vp
    e = device.precision.dtype
    logits = random(1, 6, Vp, dtype=e)
    targets = np.full((1, 6), 3, np.int32)
    logits[0, 0, V - 1] = np.nan
    logits[0, 1] = np.nan
    logits[0, 2, 7] = np.inf
    logits[0, 3] = -np.inf
    logits[0, 4, 5] = -np.inf
    losses = unwritten(1, 6)
    got = on_gpu(logits, dtype=e)
    losses[...] = 1.0
    weights = on_gpu(np.ones((1, 6), np.float32))
    cuda.classifier(device, losses, got, on_gpu(targets), weights, 1.0, 1, 1, 6)
    gradient = to_float32(got)[0, :, :V]
    assert np.isnan(losses.get()[0, :4]).all() and np.isfinite(losses.get()[0, 4:]).all()
    assert (np.isnan(gradient[:3]).all() and np.isfinite(gradient[4:]).all()
            and gradient[4, 5] == 0.0)


def weights_of_all_kinds(*shape):
    """Of targets: 1, 0, fractions, and negative ones, as rewards have."""
    return np.random.default_rng(0).choice(np.float32([1, 1, 0, 0.3, -0.01, -1]), shape)


def check_classifier(device, B, T, dloss=None):
    """Rows of all kinds of weights. Returns dlogits, in FP8 unchecked, and what they should be."""
    V, Vp = device.config.V, device.config.Vp
    e = device.precision.dtype
    logits = random(B, T, Vp, seed=1, spread=4, dtype=e)
    targets = np.random.default_rng(T).integers(0, V, (B, T), dtype=np.int32)
    targets.flat[0] = V - 1
    targets.flat[-1] = 0
    probs = np.empty((B, T, V))
    expected = np.empty((B, T))
    dlogits = np.empty((B, T, V))
    train_gpt2.softmax_forward(probs, *wide(logits[..., :V]), B, T, V)
    train_gpt2.crossentropy_forward(expected, wide(logits[..., :V])[0], probs, targets, B, T, V)
    dloss = dloss or 1.0 / (B * T)
    weights = weights_of_all_kinds(B, T)
    train_gpt2.crossentropy_softmax_backward(dlogits, dloss * wide(weights)[0], probs, targets, B,
                                             T, V)
    logits[..., V:] = np.nan  # whatever stands in the padding has no part in it
    for write in (0, 1):
        losses = unwritten(B, T)
        got = on_gpu(logits, dtype=e)
        cuda.classifier(device, losses, got, on_gpu(targets), on_gpu(weights), dloss, write, B, T)
        assert_close(SUMS, losses=(losses, expected))
        if not write:
            assert np.array_equal(to_float32(got), logits, equal_nan=True)
    if not device.precision.fp8:
        assert_close(SUMS, dlogits=(got[..., :V], dlogits))
        assert not to_float32(got)[..., V:].any(), "the padding's gradient is 0"
    return got, dlogits


# --------------------------------------------------------------------------------------------------
# Llama 3's; attention, SwiGLU in matmuls, text and the trainer have tests of their own

of_llama = pytest.mark.parametrize("device, B, T", [
    (case, *shape)
    for case in (*itertools.product(LLAMAS, ("tf32", "bf16")), (LLAMAS[2], "bf16-float32-grads"))
    for shape in ((1, 1), (3, 97), (3, 1024))], indirect=["device"],
    ids=lambda x: x if isinstance(x, int) else f"C{x[0].C}xNKV{x[0].NKV}xF{x[0].F}-{x[1]}")
