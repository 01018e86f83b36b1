"""Text generation on the GPU (kernels/decode*.cu): each kernel's results against train_gpt2.py's Decoder and Choice, on
fresh random data and awkward shapes; whole texts against the CPU's; and, with no GPU, that all compile and every launch
passes what its kernel takes."""

import contextlib
import gc
import itertools
import os

import numpy as np
import pytest

import generate
import train_gpt2
import train_gpt2_cuda as cuda
from conftest import random_params
from llmc.checkpoint import Config, write_model
from llmc.gpu.compiler import Cache, compile_kernels
from llmc.gpu.device import cp, to_float32
from llmc.gpu.geometry import DECODE, decode_files, decode_shared, launch_geometry
from llmc.sampler import Choice, Random
from llmc.tensors import bf16_bits, bf16_to_float32, flat, layer, views
from test_kernels import PRECISIONS, accepts, signatures

MODELS = [  # maxT, V, L, NH, C, Vp
    Config(1024, 50257, 1, 12, 768, 50304),  # GPT-2 124M
    Config(40, 257, 2, 1, 16, 384),  # heads of 16
    Config(300, 1003, 2, 3, 240, 1024),  # of 80; attention in several splits
    Config(70, 1003, 1, 25, 1600, 1024),  # GPT-2 1558M: more chunks than registers have room for
    Config(300, 1003, 1, 2, 256, 1024),  # heads of 128
]
SHARED = {"sm_75": 64 << 10, "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90a": 227 << 10}

# ----------------------------------------------------------------------------------------------------------------------
# with no GPU


@pytest.mark.parametrize("arch, precision", [
    ("sm_80", "bf16"), ("sm_90a", "bf16"), *(pytest.param(*case, marks=pytest.mark.large) for case in (
        ("sm_75", "float32"), ("sm_80", "tf32"), ("sm_90a", "float32"), ("sm_100", "bf16")))])
def test_kernels_compile_with_no_gpu(arch, precision):
    pytest.importorskip("cuda.core")
    for config in MODELS[:1] if arch == "sm_80" else MODELS[:2]:
        geometry = launch_geometry(config, PRECISIONS[precision], arch, SHARED.get(arch, SHARED["sm_90a"]))
        for file in decode_files(config, PRECISIONS[precision], geometry):
            cubin = compile_kernels(file.name, arch, file.constants)
            assert cubin[:4] == b"\x7fELF" and all(b".text." + kernel.encode() in cubin for kernel in file.kernels)


def test_matmuls_fit_into_the_shared_memory_of_every_gpu():
    for arch, precision, C in itertools.product(SHARED, PRECISIONS.values(), (16, 768, 1024, 1280, 1600)):
        config = Config(1024, 131, 1, C // 16, C, 256)
        geometry = launch_geometry(config, precision, arch, SHARED[arch])
        for N, normalizes in ((geometry.DECODE_FEW, True), (16, False)):
            assert decode_shared(geometry, 1, N, normalizes) <= SHARED[arch] - 2048
        for name in ("QKV", "FC", "ATTPROJ", "FCPROJ", *(("LOGITS",) if geometry.DECODE_LOGITS_STAGES else ())):
            assert getattr(geometry, f"DECODE_{name}_SHARED") <= SHARED[arch] - 2048


@pytest.mark.parametrize("arch, precision", (("sm_75", "float32"), ("sm_80", "bf16"), ("sm_90a", "bf16"),
                                             ("sm_90a", "float32")))
@pytest.mark.parametrize("B", (1, 5, 40))
def test_every_launch_passes_what_its_kernel_takes(fake_gpu, tmp_path, monkeypatch, arch, precision, B):
    monkeypatch.setattr(cuda, "Cache", lambda: Cache(str(tmp_path)))
    config, precision = MODELS[2], PRECISIONS[precision]
    gpu = fake_gpu.gpu._replace(arch=arch, shared=SHARED[arch])
    decoder = cuda.open_decoder(gpu, config, random_params(config), B, 300, precision.dtype)
    list(decoder.draw(np.ones((1, 150), np.int32), 5, [Random() for _ in range(B)], Choice()))
    parameters = {name: kinds for file in DECODE for name, kinds in signatures(file).items()}
    launched, many = {launch.name for launch in fake_gpu.launches} - {"round_weights"}, B == 40
    logits_many = many and decoder.device.geometry.DECODE_LOGITS_STAGES > 0
    unused = {"decode_logits" if logits_many else "decode_logits_many"}
    if many:  # for prompts, the others have these kernels, too
        unused |= {"decode_qkv", "decode_project", "decode_fc"}
    assert launched | unused == set(parameters) and "decode_attention_many" in launched  # for prompts, too
    for launch in fake_gpu.launches:
        if launch.name == "round_weights":
            continue
        assert 1 <= np.prod(launch.block) <= 1024 and launch.shared <= gpu.shared
        assert all(type(n) is int and n >= 1 for n in launch.grid) and max((*launch.grid[1:], 1)) < 2**16
        expected = parameters[launch.name]
        assert len(launch.arguments) == len(expected), launch.name
        for (kind, name), argument in zip(expected, launch.arguments):
            assert accepts(precision, kind, argument), f"{launch.name}: {kind} {name} is given {type(argument)}"
            assert name != "maxT" or argument == 300


@pytest.mark.parametrize("N", (17, 64, 65, 200))
def test_blocks_of_many_rows_cover_the_results(fake_gpu, N):
    """A layer's matmuls: all rows, columns and pieces, for which there is room."""
    config = MODELS[2]
    decoder = cuda.open_decoder(fake_gpu.gpu, config, random_params(config), N, 300, "bfloat16")
    fake_gpu.clear()
    decoder.trunk(N, 1)
    C, g, launches = config.C, decoder.device.geometry, {name: [] for name in itertools.chain(*DECODE.values())}
    for launch in fake_gpu.launches:
        launches[launch.name].append(launch)
    for name, OC, pieces, results in (("qkv", 3 * C, 1, N * C), ("fc", 4 * C, 1, 4 * N * C),
                                      ("attproj", C, 4, 4 * N * C), ("fcproj", C, 16, 16 * N * C)):
        rows, columns = 16 * getattr(g, f"DECODE_{name.upper()}_TILES"), getattr(g, f"DECODE_{name.upper()}_COLUMNS")
        assert len(launches[f"decode_{name}_many"]) == config.L
        for launch in launches[f"decode_{name}_many"]:
            assert launch.grid == (-(-N // rows), -(-OC // columns), pieces)
            assert launch.arguments[0].size >= results and launch.arguments[-1] == N
    # that of the first layer reads what decode_embed leaves, without pieces
    assert len(launches["decode_layernorm"]) == 1 and len(launches["decode_layernorm_many"]) == 2 * config.L


# ----------------------------------------------------------------------------------------------------------------------
# with a GPU

# of the largest value; in bfloat16, what a kernel reads is rounded, too
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
CASES = [(config, dtype) for config in MODELS for dtype in ("float32", "bfloat16")]


def rounded(array, dtype):
    return bf16_to_float32(bf16_bits(array)) if dtype == "bfloat16" else array


@pytest.fixture
def decoders(gpu):
    """(config, dtype, B) -> one on the GPU, on whose stream the rest of the test copies, and one in NumPy with the same
    weights."""
    with contextlib.ExitStack() as stack:
        def make(config, dtype, B):
            params = random_params(config, seed=os.getpid())
            params.wte[: config.V] *= 3.0  # so that some tokens are likelier
            if dtype == "bfloat16":
                flat(params)[:] = rounded(flat(params), dtype)
            ours = cuda.open_decoder(gpu, config, params, B, config.maxT, dtype)
            stack.enter_context(ours.device.stream)
            return ours, train_gpt2.Decoder(config, params, B, config.maxT)

        yield make


def fill(tensors, names, value):
    for name in names:
        getattr(tensors, name).view(np.uint8).fill(value)


@pytest.mark.parametrize("B, T, position", ((1, 1, 0), (1, 1, 0.9), (1, 3, 0.1), (3, 1, 0.3), (5, 1, 1),
                                            (2, 17, 0.5), (20, 2, 0.02), (1, 40, 0), (1, 40, 0.24), (23, 1, 0.97),
                                            (61, 1, 0.4), (70, 1, 0.7)))
@pytest.mark.parametrize("config, dtype", CASES, ids=lambda x: f"C{x.C}" if isinstance(x, Config) else x)
def test_a_pass_is_the_cpu_s(decoders, config, dtype, B, T, position):
    check_pass(*decoders(config, dtype, B), config, dtype, B, T, position)


def check_pass(ours, cpu, config, dtype, B, T, position):
    """Every tensor that it writes, NaN before. position: of those before the last one that fits."""
    position = int(position * (config.maxT - T))
    rng = np.random.default_rng((position, os.getpid()))
    tokens = rng.integers(0, config.V, (B, T), dtype=np.int32)
    for mine, theirs in ((ours.cache.keys, cpu.cache.keys), (ours.cache.values, cpu.cache.values)):
        before = rng.standard_normal(theirs[:, :, :, :position].shape, dtype=np.float32)
        theirs[:, :, :, :position] = rounded(before, dtype)
        theirs[:, :, :, position:] = np.nan
        mine.set((bf16_bits(theirs) if dtype == "bfloat16" else theirs))
    fill(ours.acts, ("residual", "branches", "normed", "query", "atty", "parts", "fch_gelu", "logits", "tiles"), 0xFF)
    ours.set(position=position, temperature=1.0)
    ours.acts.tokens[: tokens.size].set(tokens.reshape(-1))
    x = ours.trunk(B, T)
    logits = cpu.forward(tokens, position)
    N, C = B * T, config.C
    acts = views(train_gpt2.decode_table(config, B, T, position + T), cpu.buffer)

    def close(name, got, expected):
        got = (got if isinstance(got, np.ndarray) else to_float32(got)).reshape(expected.shape)
        allowed = TOLERANCE[dtype] * float(np.abs(expected).max())
        error = np.abs(got - expected).max()
        assert error <= allowed, f"{name}: {error} of {allowed}"

    close("query", ours.acts.query[:N], acts.qkv[..., :C])
    close("atty", ours.acts.atty[:N], acts.atty)
    close("fch_gelu", ours.acts.fch_gelu[:N], acts.fch_gelu)
    parts = 4 * ours.device.geometry.DECODE_PIECES if cuda.decode_is_many(ours.device, N) else 4
    branch = ours.acts.branches.reshape(-1)[: parts * N * C].reshape(parts, N, C).get().sum(0)
    close("fcproj", (branch + layer(cpu.params, config.L - 1).fcprojb), acts.branch.reshape(N, C))
    for name in ("keys", "values"):
        mine, theirs = to_float32(getattr(ours.cache, name)), getattr(cpu.cache, name)
        close(name, mine[:, :, :, : position + T], theirs[:, :, :, : position + T])
        assert np.isnan(mine[:, :, :, position + T :]).all()
    if T == 1:
        cuda.decode_logits(ours.device, ours.acts.logits, ours.acts.tiles, x, ours.params.wte, ours.acts.control, B,
                           config.Vp)
        close("logits", ours.acts.logits[:, : config.V], logits)
        check_tiles(ours.acts.tiles.get(), ours.acts.logits.get(), config.V)


@pytest.mark.parametrize("B, T, position", ((1, 1, 0.9), (3, 1, 0.3), (1, 40, 0), (70, 1, 0.7)))
@pytest.mark.parametrize("config, dtype, arch, rows, tma", (
    (MODELS[0], "bfloat16", "sm_80", 16, 0), (MODELS[2], "float32", "sm_80", 16, 0),
    (MODELS[3], "float32", "sm_86", 8, 0), (MODELS[3], "float32", "sm_90a", 8, 1)),
    ids=lambda x: f"C{x.C}" if isinstance(x, Config) else str(x))
def test_a_pass_on_other_gpus_is_the_cpu_s(decoders, monkeypatch, config, dtype, arch, rows, tma, B, T, position):
    """With the constants of GPUs that have no TMA, or less shared memory, in which C=1600 has tiles of 8 rows."""
    def geometry(config, precision, _, shared):
        return launch_geometry(config, precision, arch, min(shared, SHARED["sm_86"]))

    monkeypatch.setattr(cuda, "launch_geometry", geometry)
    ours, cpu = decoders(config, dtype, B)
    assert (ours.device.geometry.DECODE_ROWS, ours.device.geometry.DECODE_TMA) == (rows, tma)
    check_pass(ours, cpu, config, dtype, B, T, position)


@pytest.mark.parametrize("config, dtype", [case for case in CASES if case[0].C >= 240],
                         ids=lambda x: f"C{x.C}" if isinstance(x, Config) else x)
def test_logits_do_not_depend_on_the_batch(decoders, config, dtype):
    """To the bit, with what decode_sample needs of them, whichever kernel computes them."""
    B, temperature = 70, 0.7
    rng = np.random.default_rng(os.getpid())
    inputs = rng.standard_normal((B, config.C), dtype=np.float32)

    def logits(decoder, rows):
        acts, params, N = decoder.acts, decoder.params, len(rows)
        with decoder.device.stream:
            acts.residual[0][:N].set(rows)
            acts.branches.fill(0)
            fill(acts, ("normed", "logits", "tiles"), 0xFF)
            decoder.set(temperature=temperature)
            x = cuda.Normed(acts.residual[1], acts.residual[0], acts.branches, acts.zeros, acts.normed, params.lnfw,
                            params.lnfb)
            x = cuda.decode_layernorm(decoder.device, x, 4, N)
            cuda.decode_logits(decoder.device, acts.logits, acts.tiles, x, params.wte, acts.control, N, config.Vp)
            return acts.logits.get(), acts.tiles.get()

    together = logits(decoders(config, dtype, B)[0], inputs)
    for n in (1, 16):
        decoder = decoders(config, dtype, n)[0]
        for begin in (0, 17, B - n):
            for all_rows, some in zip(together, logits(decoder, inputs[begin : begin + n])):
                assert np.array_equal(all_rows[begin : begin + n], some)


@pytest.mark.parametrize("config, dtype", [case for case in CASES if case[0].C >= 240],
                         ids=lambda x: f"C{x.C}" if isinstance(x, Config) else x)
def test_layers_do_not_depend_on_the_batch(decoders, config, dtype):
    """To the bit, at the first position: the last layer's tensors and the logits, which have all that is before
    them."""
    B = 70
    tokens = np.random.default_rng(os.getpid()).integers(0, config.V, B, dtype=np.int32)

    def layers(decoder, tokens):
        acts = decoder.acts
        with decoder.device.stream:
            decoder.set(position=0)
            acts.tokens[: len(tokens)].set(tokens)
            x = decoder.trunk(len(tokens), 1)
            cuda.decode_logits(decoder.device, acts.logits, acts.tiles, x, decoder.params.wte, acts.control,
                               len(tokens), config.Vp)
            cache = layer(decoder.cache, config.L - 1)
            tensors = acts.query, acts.fch_gelu, cache.keys[:, :, 0], cache.values[:, :, 0], acts.logits
            return [tensor[: len(tokens)].get().view(np.uint8) for tensor in tensors]

    together = layers(decoders(config, dtype, B)[0], tokens)
    for n in (1, 16, 17, 64):
        decoder = decoders(config, dtype, n)[0]
        for begin in (0, B - n):
            for all_rows, some in zip(together, layers(decoder, tokens[begin : begin + n])):
                assert np.array_equal(all_rows[begin : begin + n], some)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("position", (0, 160, 255, 256, 1023))
def test_attention_does_not_depend_on_the_batch(decoders, dtype, position):
    """To the bit, whether a head has one block or several."""
    config, B = MODELS[0], 70
    rng = np.random.default_rng((position, os.getpid()))

    def attention(decoder, B, query, keys, values):
        acts, cache = decoder.acts, layer(decoder.cache, 0)
        with decoder.device.stream:
            for mine, theirs in ((acts.query[:B], query), (cache.keys, keys), (cache.values, values)):
                mine.set(bf16_bits(theirs) if dtype == "bfloat16" else theirs)
            decoder.set(position=position)
            fill(acts, ("atty", "parts"), 0xFF)
            cuda.decode_attention(decoder.device, acts.atty, acts.parts, acts.arrived, acts.query, cache.keys,
                                  cache.values, acts.control, B, 1, config.C, config.NH)
            assert not acts.arrived.get().any()
            return acts.atty[:B].get().view(np.uint8)

    many, one = (decoders(config, dtype, n)[0] for n in (B, 1))
    query = rng.standard_normal((B, config.C), dtype=np.float32)
    shape = B, config.NH, config.maxT, config.C // config.NH
    keys, values = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    keys[:, :, position + 1 :] = values[:, :, position + 1 :] = np.nan
    together = attention(many, B, query, keys, values)
    for b in (0, 23, 69):
        alone = attention(one, 1, *(x[b : b + 1] for x in (query, keys, values)))
        assert np.array_equal(together[b : b + 1], alone)


def check_tiles(tiles, logits, V):
    logits[:, V:] = -np.inf
    groups = logits.reshape(len(logits), tiles.shape[1], -1).astype(np.float64)
    largest = groups.max(-1)
    with np.errstate(invalid="ignore"):
        sums = np.where(np.isfinite(largest), np.exp(groups - largest[..., None]).sum(-1), 0.0)
    np.testing.assert_array_equal(tiles[..., 0], largest)
    np.testing.assert_allclose(tiles[..., 1:], np.stack([sums, sums], -1), rtol=1e-5)


@pytest.mark.parametrize("choice", (
    Choice(), Choice(0.0), Choice(0.3), Choice(2.0, 1), Choice(1.0, 40), Choice(1.3, 999), Choice(1.0, 1024),
    Choice(1.0, 2000), Choice(1.0, 5000),
    Choice(1.0, 0, 0.9), Choice(0.7, 0, 1e-6), Choice(0.7, 100, 0.5)))
@pytest.mark.parametrize("V, spread", ((50257, 3.0), (1003, 0.01), (1003, 8.0), (300, 0.0)))
def test_drawing(decoders, V, spread, choice):
    """The token is the one whose part of the running sum the coin falls into, among those that the choice leaves, up to
    rounding; the numbers of the next coin, the host's copies and the log-probabilities."""
    B, Vp = 61, -(-V // 128) * 128
    decoder, _ = decoders(Config(8, V, 1, 1, 16, Vp), "float32", B)
    rng = np.random.default_rng((V, os.getpid()))
    logits = np.full((B, Vp), 1e9, np.float32)  # the padding counts for nothing
    logits[:, :V] = rng.standard_normal((B, V), dtype=np.float32) * np.float32(spread)
    logits[: B // 2, :V] = np.round(logits[: B // 2, :V])  # many are equal
    acts, each, randoms = decoder.acts, decoder.device.geometry.DECODE_ROWS, generate.streams(7, B)
    padded = np.where(np.arange(Vp) < V, logits, -np.inf).reshape(B, -1, each).astype(np.float64)
    largest = padded.max(-1)
    with np.errstate(invalid="ignore"):
        shifted = np.where(np.isfinite(largest)[..., None], padded - largest[..., None], -np.inf)
    acts.logits.set(logits)
    sums = [np.exp(shifted / t).sum(-1) for t in (choice.temperature or 1.0, 1.0)]
    acts.tiles.set(np.stack([largest, *sums], -1).astype(np.float32))
    acts.randoms.set(np.array([random.state for random in randoms], np.uint64))
    decoder.set(position=3, step=6, top_k=min(choice.top_k, V), temperature=choice.temperature, top_p=choice.top_p)
    cuda.decode_sample(decoder.device, acts.tokens, acts.randoms, acts.control, decoder.drawn, decoder.logprobs,
                       acts.logits, acts.tiles, B)
    decoder.device.stream.synchronize()
    control = acts.control.get().view(cuda.CONTROL)[0]
    assert control["position"] == 4 and control["step"] == 7 and control["arrived"] == 0
    ids = acts.tokens[:B].get()
    row = 6 % len(decoder.drawn)
    assert np.array_equal(decoder.drawn[row], ids) and ids.min() >= 0 and ids.max() < V
    coins = [random.f32() for random in randoms]
    assert np.array_equal(acts.randoms.get(), [random.state for random in randoms])
    exact = logits[:, :V].astype(np.float64)
    shifted = exact - exact.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    np.testing.assert_allclose(decoder.logprobs[row], logprobs[np.arange(B), ids], rtol=0, atol=2e-5)
    for b, (id, coin) in enumerate(zip(ids, coins)):
        x = exact[b]
        if choice.temperature == 0.0:
            assert id == np.argmax(logits[b, :V])
            continue
        probs = np.exp((x - x.max()) / choice.temperature)
        order = np.lexsort((np.arange(V), -x))[: choice.top_k or None]
        before = np.cumsum(probs[order]) - probs[order]
        kept = np.sort(order[before < choice.top_p * probs[order].sum() * (1 + 1e-5)])
        surely = np.sort(order[before < choice.top_p * probs[order].sum() * (1 - 1e-5)])
        assert id in kept
        for among in (kept, surely):  # they differ where rounding decides
            sums = np.cumsum(probs[among])
            at, slack = np.searchsorted(among, id), 1e-5 * sums[-1]
            if at < among.size and sums[at] - probs[id] - slack <= coin * sums[-1] <= sums[at] + slack:
                break
        else:
            raise AssertionError(f"{b}: {id} with the coin {coin}")


CHOICES = Choice(), Choice(0.0), Choice(0.7), Choice(0.7, 10, 0.9)


@pytest.mark.parametrize("prompt, count", ((1, 30), (35, 90), (100, 5)))
def test_text_is_the_cpu_s_and_does_not_depend_on_the_batch(decoders, prompt, count):
    """Also beyond the longest sequence, 40. In float32; where rounding decides, texts may part."""
    config, same, alone = MODELS[1], 0, {}
    prompt = np.random.default_rng(1).integers(0, config.V, (1, prompt), dtype=np.int32)
    for choice in CHOICES:
        for B in (1, 3, 20, 70):
            ours, cpu = decoders(config, "float32", B)
            texts = []
            for decoder in (ours, cpu, ours):
                randoms = generate.streams(5, B)
                texts.append(np.array([ids for ids, _ in decoder.draw(prompt, count, randoms, choice)]).T)
            assert np.array_equal(texts[0], texts[2]), "the same again"
            fewer = alone.get(choice, texts[0])
            alone[choice] = texts[0]
            assert np.array_equal(texts[0][: len(fewer)], fewer)
            same += (texts[0] == texts[1]).all(-1).sum()
    assert same >= 367, f"{same} of 376 texts are the CPU's"


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_memory_does_not_grow(decoders, dtype):
    """While 100,000 tokens are drawn."""
    gc.collect()  # what is left of the tests before
    ours, _ = decoders(MODELS[1], dtype, 8)
    used = set()
    for i, _ in enumerate(ours.draw(np.array([[3]], np.int32), 12500, generate.streams(1, 8), Choice())):
        if i > 2 and i % 500 == 0:
            used.add((cp.cuda.runtime.memGetInfo()[0], cp.get_default_memory_pool().used_bytes()))
    assert len(used) == 1


def test_the_program_on_a_gpu(gpu, workplace, run_here):
    """Text, JSON, a stream of prompts; --device and --dtype."""
    config = MODELS[1]
    write_model("model.bin", config, random_params(config))
    flags = ("model.bin", "--prompt_ids", 1, 2, 3, "--tokens", 20, "--ignore_eot", "--json", "--samples", 2)
    cpu, gpu32, gpu16 = (run_here(generate, *flags, *more).stdout for more in (
        ("--device", "cpu"), ("--dtype", "float32"), ("--device", "gpu", "--dtype", "bfloat16")))
    ids = [[line.split('"text"')[0] for line in output.splitlines()] for output in (cpu, gpu32)]
    assert ids[0] == ids[1] and len(gpu16.splitlines()) == 2
