"""Text of Llama 3 on the GPU: a pass and whole texts against train_llama3.py's Decoder, on fresh random data and
awkward shapes; and, with no GPU, that all kernels compile and every launch passes what its kernel takes."""

import contextlib
import os
from types import SimpleNamespace

import numpy as np
import pytest

import generate
import train_llama3
from llmc.gpu.compiler import compile_kernels
from llmc.gpu.decoder import DECODE, decode_files, decode_geometry, decode_logits, open_decoder
from llmc.gpu.device import to_float32
from llmc.gpu.geometry import launch_geometry
from llmc.sampler import Choice, Random
from llmc.tensors import allocate, bf16_bits, flat, layer, views
from test_decode import SHARED, TOLERANCE, fill, rounded
from test_kernels import PRECISIONS, check_launches, signatures
from train_llama3 import Config

MODELS = [  # maxT, V, L, NH, NKV, C, Vp, F, HS
    Config(300, 1003, 1, 9, 3, 576, 1024, 1536, 64),  # SmolLM2's layers
    Config(300, 1003, 1, 12, 4, 768, 1024, 2048, 64, tied=0),  # l12's: fcproj's last part is shorter
    Config(70, 1003, 1, 32, 8, 2048, 1024, 8192, 64, factor=32),  # those of 1B
    Config(40, 257, 2, 3, 1, 128, 384, 200, 16, tied=0, eps=1e-3),  # one key and value head; F no multiple of 16
    Config(40, 257, 2, 4, 4, 48, 384, 80, 32, theta=1e4),  # Q beyond C
    Config(300, 1003, 1, 6, 2, 256, 1024, 704, 128),  # heads of 128
    Config(40, 128256, 1, 2, 1, 64, 128256, 96, 32, tied=0),  # Llama 3's vocabulary
]
DEEP = {"1B": Config(2048, 128256, 16, 32, 8, 2048, 128256, 8192, 64, factor=32),
        "8B": Config(2048, 128256, 32, 32, 8, 4096, 128256, 14336, 128, tied=0, factor=8)}
LLAMA = SimpleNamespace(KERNELS=("rmsnorm", "rope", "swiglu"))  # what decode_geometry asks of an architecture

# ----------------------------------------------------------------------------------------------------------------------
# with no GPU


@pytest.mark.parametrize("arch, precision", [
    ("sm_90a", "bf16"), *(pytest.param(*case, marks=pytest.mark.large) for case in (
        ("sm_75", "float32"), ("sm_80", "float32"), ("sm_80", "bf16"), ("sm_90a", "float32")))])
def test_kernels_compile_with_no_gpu(arch, precision):
    pytest.importorskip("cuda.core")
    precision = PRECISIONS[precision]
    for config in (MODELS[0], MODELS[1], MODELS[3], MODELS[4], *(DEEP.values() if arch != "sm_75" else ())):
        geometry = launch_geometry(config, precision, arch)
        vars(geometry).update(decode_geometry(LLAMA, config, precision, SHARED[arch]))
        for file in decode_files(config, precision, geometry):
            cubin = compile_kernels(file.name, arch, file.constants)
            assert cubin[:4] == b"\x7fELF" and all(b".text." + kernel.encode() in cubin for kernel in file.kernels)


@pytest.mark.parametrize("config", (*MODELS, *DEEP.values()), ids=lambda config: f"C{config.C}")
@pytest.mark.parametrize("arch, precision", (("sm_80", "float32"), ("sm_90a", "bf16")))
def test_parts_of_a_sum(arch, precision, config):
    """They cover the inner dimension, none is empty or longer than C, and a tile has room for one."""
    precision = PRECISIONS[precision]
    g = SimpleNamespace(**decode_geometry(LLAMA, config, precision, SHARED[arch]))
    size = 2 if precision.bf16 else 4
    for IC, parts, width in ((config.Q, g.DECODE_ATT_PARTS, g.DECODE_ATT_WIDTH),
                             (config.F, g.DECODE_FC_PARTS, g.DECODE_FC_WIDTH)):
        assert (parts - 1) * width < IC <= parts * width and width <= config.C and width * size <= g.DECODE_ROW_BYTES
        assert width * size % 16 == 0 and parts == -(-IC // config.C)
    assert all(n % g.DECODE_ROWS == 0 for n in (config.C, config.Vp, config.Q + 2 * config.K, 2 * config.F))


@pytest.mark.parametrize("arch, precision", (("sm_75", "float32"), ("sm_80", "bf16"), ("sm_90a", "bf16")))
@pytest.mark.parametrize("B", (1, 5, 40))
def test_every_launch_passes_what_its_kernel_takes(fake_gpu, arch, precision, B):
    from train_llama3_cuda import Llama3
    config, precision = MODELS[1], PRECISIONS[precision]
    gpu = fake_gpu.gpu._replace(arch=arch, shared=SHARED[arch])
    decoder = open_decoder(Llama3, gpu, config, random_params(config), B, 300, precision.dtype)
    list(decoder.draw(np.ones((1, 150), np.int32), 5, [Random() for _ in range(B)], Choice()))
    parameters = {name: kinds for file in DECODE for name, kinds in signatures(file).items()}
    launches = [launch for launch in fake_gpu.launches if launch.name != "round_weights"]
    assert {launch.name for launch in launches} == set(parameters)
    check_launches(launches, gpu, precision, parameters)
    assert decoder.constants.rope.shape == (300, 32, 2) and decoder.constants.rope.dtype == np.float32


# ----------------------------------------------------------------------------------------------------------------------
# with a GPU

CASES = [(config, dtype) for config in MODELS for dtype in ("float32", "bfloat16")]


def label(x):
    return f"C{x.C}" if isinstance(x, Config) else x


def random_params(config, seed=0):
    """As conftest's, for a Llama 3; some tokens are likelier."""
    params = allocate(train_llama3.parameter_table(config))
    flat(params)[:] = np.random.default_rng(seed).standard_normal(flat(params).size, dtype=np.float32) * np.float32(0.1)
    for name, row in params.table.items():
        if row.vocabulary:
            getattr(params, name)[: config.V] *= 3.0
            getattr(params, name)[config.V :] = 0.0
    return params


@pytest.fixture
def decoders(gpu):
    """(config, dtype, B) -> one on the GPU, with its stream current, and one in NumPy with the same weights."""
    from train_llama3_cuda import Llama3
    with contextlib.ExitStack() as stack:
        def make(config, dtype, B):
            params = random_params(config, seed=os.getpid())
            flat(params)[:] = rounded(flat(params), dtype)
            ours = open_decoder(Llama3, gpu, config, params, B, config.maxT, dtype)
            stack.enter_context(ours.device.stream)
            return ours, train_llama3.LlamaDecoder(config, params, B, config.maxT)

        yield make


def run_pass(decoder, tokens):
    """Launch a pass over tokens (B, T) and, of their last positions, the logits, if T is 1."""
    B, T = tokens.shape
    decoder.acts.tokens[: tokens.size].set(tokens.reshape(-1))
    x, weight = decoder.architecture.decode_layers(decoder, B, T)
    if T == 1:
        decode_logits(decoder.device, decoder.acts.logits, x, weight, B, decoder.config.Vp)


@pytest.mark.parametrize("B, T, position", ((1, 1, 0), (1, 1, 0.9), (1, 3, 0.1), (5, 1, 1), (2, 17, 0.5), (20, 2, 0.02),
                                            (1, 40, 0.24), (70, 1, 0.7)))
@pytest.mark.parametrize("config, dtype", CASES, ids=label)
def test_a_pass_is_the_cpu_s(decoders, config, dtype, B, T, position):
    """Every tensor that it writes, NaN before. position: of those before the last one that fits."""
    ours, cpu = decoders(config, dtype, B)
    position = int(position * (config.maxT - T))
    rng = np.random.default_rng((position, os.getpid()))
    tokens = rng.integers(0, config.V, (B, T), dtype=np.int32)
    for mine, theirs in ((ours.cache.keys, cpu.cache.keys), (ours.cache.values, cpu.cache.values)):
        before = rng.standard_normal(theirs[:, :, :, :position].shape, dtype=np.float32)
        theirs[:, :, :, :position] = rounded(before, dtype)
        theirs[:, :, :, position:] = np.nan
        mine.set(bf16_bits(theirs) if dtype == "bfloat16" else theirs)
    fill(ours.acts, ("residual", "branches", "normed", "query", "atty", "parts", "fch_swiglu", "logits"), 0xFF)
    ours.set(position=position)
    run_pass(ours, tokens)
    logits = cpu.forward(tokens, position)
    N, C, parts = B * T, config.C, ours.device.geometry.DECODE_FC_PARTS
    acts = views(train_llama3.decode_table(config, B, T, position + T), cpu.buffer)

    def close(name, got, expected):
        got = (got if isinstance(got, np.ndarray) else to_float32(got)).reshape(expected.shape)
        allowed = TOLERANCE[dtype] * float(np.abs(expected).max())
        error = np.abs(got - expected).max()
        assert error <= allowed, f"{name}: {error} of {allowed}"

    close("query", ours.acts.query[:N], acts.qkv[..., : config.Q])
    close("atty", ours.acts.atty[:N], acts.atty)
    close("fch_swiglu", ours.acts.fch_swiglu[:N], acts.fch_swiglu)
    branches = ours.acts.branches.reshape(-1)[: parts * N * C].reshape(parts, N, C).get()
    close("fcproj", branches.sum(0), acts.fcproj.reshape(N, C))
    for name in ("keys", "values"):
        mine, theirs = to_float32(getattr(ours.cache, name)), getattr(cpu.cache, name)
        close(name, mine[:, :, :, : position + T], theirs[:, :, :, : position + T])
        assert np.isnan(mine[:, :, :, position + T :]).all()
    if T == 1:
        close("logits", ours.acts.logits[:, : config.V], logits)


@pytest.mark.parametrize("config, dtype", [case for case in CASES if case[0].C in (576, 768, 256)], ids=label)
def test_a_pass_does_not_depend_on_the_batch(decoders, config, dtype):
    """To the bit: the last layer's tensors and the logits. A head's attention has one block or several."""
    B, rng = 70, np.random.default_rng(os.getpid())
    tokens = rng.integers(0, config.V, (B, 1), dtype=np.int32)
    past = rng.standard_normal((config.L, B, config.NKV, config.maxT, config.HS), dtype=np.float32)
    past = bf16_bits(past) if dtype == "bfloat16" else past
    each = {n: decoders(config, dtype, n)[0] for n in (1, 5, 20, B)}

    def outputs(position, begin, end):
        decoder, rows = each[end - begin], slice(begin, end)
        decoder.set(position=position)
        with decoder.device.stream:
            decoder.cache.keys.set(past[:, rows])
            decoder.cache.values.set(past[:, rows])
            run_pass(decoder, tokens[rows])
            acts, cache = decoder.acts, layer(decoder.cache, config.L - 1)
            assert not acts.arrived.get().any()
            new = (tensor[:, :, position] for tensor in (cache.keys, cache.values))
            return [tensor[: end - begin].get().view(np.uint8)
                    for tensor in (acts.query, acts.atty, acts.fch_swiglu, acts.logits, *new)]

    for position in (0, config.maxT // 4 - 1, config.maxT - 1):
        together = outputs(position, 0, B)
        for begin, end in ((0, 1), (69, 70), (23, 28), (50, 70)):
            for all_rows, some in zip(together, outputs(position, begin, end)):
                assert np.array_equal(all_rows[begin:end], some)


@pytest.mark.parametrize("config, prompt, count", (
    (MODELS[3], 1, 30), (MODELS[3], 35, 90), (MODELS[4], 100, 5), (MODELS[0], 150, 20), (MODELS[6], 5, 10)), ids=label)
def test_text_is_the_cpu_s_and_does_not_depend_on_the_batch(decoders, config, prompt, count):
    """Also beyond the longest sequence, and for prompts of several passes. In float32; where rounding decides, texts
    may part."""
    total, same, alone = 0, 0, {}
    prompt = np.random.default_rng(1).integers(0, config.V, (1, prompt), dtype=np.int32)
    choices = Choice(0.0), Choice(0.7, 10, 0.9), Choice()
    for choice in choices[: 3 if config.V < 2000 else 2]:  # among all of many tokens, rounding decides often
        for B in (1, 5, 20):
            ours, cpu = decoders(config, "float32", B)
            texts = []
            for decoder in (ours, cpu, ours):
                randoms = generate.streams(5, B)
                texts.append(np.array([ids for ids, _ in decoder.draw(prompt, count, randoms, choice)]).T)
            assert np.array_equal(texts[0], texts[2]), "the same again"
            fewer = alone.get(choice, texts[0])
            alone[choice] = texts[0]
            assert np.array_equal(texts[0][: len(fewer)], fewer)
            total, same = total + B, same + (texts[0] == texts[1]).all(-1).sum()
    assert same >= 0.95 * total, f"{same} of {total} texts are the CPU's"
