"""Text generation on the GPU (kernels/decode/), of each architecture: kernels and texts against the
CPU's Decoder and Choice; and, with no GPU, that all compile and every launch passes what its kernel
takes."""

import os

import numpy as np
import pytest

import generate
import llmc.gpu.decode_geometry
import train_speedrun
from conftest import on_stream, page_of, random_params
from llmc.api import on_gpu
from llmc.checkpoint import write_model
from llmc.gpu.decode_geometry import DECODE, decode_files, decode_geometry
from llmc.gpu.decoder import (TEXT_CONTROL, decode_layers, decode_logits, decode_sample,
                              open_decoder)
from llmc.gpu.device import to_float32
from llmc.gpu.geometry import launch_geometry
from llmc.sampler import Choice, Random
from llmc.tensors import bf16_bits, bf16_to_float32, flat, layer, views
from test_kernels import PRECISIONS
from test_compile import check_launches, compile_file, signatures
from test_verdict import plant_in_a_kernel
from train_gpt2 import Config
from train_llama3 import Config as LlamaConfig

MODELS = [  # maxT, V, L, NH, C, Vp
    Config(1024, 50257, 1, 12, 768, 50304),  # GPT-2 124M
    Config(40, 257, 2, 1, 16, 384),  # heads of 16
    Config(300, 1003, 2, 3, 240, 1024),  # of 80; attention in several splits
    Config(70, 1003, 1, 25, 1600, 1024),  # GPT-2 1558M: more chunks than registers have room for
    Config(300, 1003, 1, 2, 256, 1024),  # heads of 128
]
LLAMAS = [  # maxT, V, L, NH, NKV, C, Vp, F, HS
    LlamaConfig(300, 1003, 1, 9, 3, 576, 1024, 1536, 64),  # SmolLM2's layers
    # l12's: fcproj's last part is shorter
    LlamaConfig(300, 1003, 1, 12, 4, 768, 1024, 2048, 64, tied=0),
    LlamaConfig(70, 1003, 1, 32, 8, 2048, 1024, 8192, 64, factor=32),  # those of 1B
    # one key and value head; F no multiple of 16
    LlamaConfig(40, 257, 2, 3, 1, 128, 384, 200, 16, tied=0, eps=1e-3),
    LlamaConfig(40, 257, 2, 4, 4, 48, 384, 80, 32, theta=1e4),  # Q beyond C
    LlamaConfig(300, 1003, 1, 6, 2, 256, 1024, 704, 128),  # heads of 128
    LlamaConfig(40, 128256, 1, 2, 1, 64, 128256, 96, 32, tied=0),  # Llama 3's vocabulary
]
SPEEDRUNS = [  # maxT, V, L, NH, C, Vp
    train_speedrun.Config(1024, 50257, 1, 6, 768, 50304),  # s12
    train_speedrun.Config(300, 1003, 2, 3, 240, 1024),  # heads of 80; attention in several splits
    train_speedrun.Config(40, 257, 2, 1, 16, 384),
]
DEEP = [LlamaConfig(2048, 128256, 16, 32, 8, 2048, 128256, 8192, 64, factor=32),  # 1B, 8B
        LlamaConfig(2048, 128256, 32, 32, 8, 4096, 128256, 14336, 128, tied=0, factor=8)]
SHARED = {"sm_75": 64 << 10, "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90a": 227 << 10}


def architecture_of(config):
    return on_gpu(page_of(config))


def label(x):
    return f"{architecture_of(x).__name__}-C{x.C}" if hasattr(x, "C") else x


def random_model(config, seed=0):
    """Weights; some tokens are likelier than others."""
    params = random_params(config, seed)
    for name, row in params.table.items():
        if row.vocabulary:
            getattr(params, name)[...] *= 3.0
    return params


# --------------------------------------------------------------------------------------------------
# with no GPU


MOST = *MODELS[:2], *LLAMAS[:2], *LLAMAS[3:5], *SPEEDRUNS


@pytest.mark.parametrize("arch, precision, configs", [
    ("sm_90a", "bf16", (LLAMAS[0], SPEEDRUNS[0])), ("sm_75", "float32", (MODELS[2],)),
    *(pytest.param(*case, (*MOST, *DEEP[: 2 * (case[0] != "sm_75")]), marks=pytest.mark.large)
      for case in (("sm_75", "float32"), ("sm_80", "tf32"), ("sm_80", "bf16"), ("sm_90a", "bf16"),
                   ("sm_90a", "float32"), ("sm_100", "bf16")))],
    ids=lambda value: value if isinstance(value, str) else len(value))
def test_kernels_compile_with_no_gpu(arch, precision, configs):
    precision = PRECISIONS[precision]
    for config in configs:
        geometry = launch_geometry(config, precision, arch)
        shared = SHARED.get(arch, SHARED["sm_90a"])
        for file in decode_files(architecture_of(config), config, precision, geometry, shared):
            compile_file(file, arch)


@pytest.mark.parametrize("arch, precision",
                         (("sm_75", "float32"), ("sm_80", "bf16"), ("sm_90a", "bf16"),
                          ("sm_90a", "float32")))
@pytest.mark.parametrize("config", (MODELS[2], LLAMAS[1], SPEEDRUNS[1]), ids=label)
@pytest.mark.parametrize("B", (1, 5, 40))
def test_every_launch_passes_what_its_kernel_takes(fake_gpu, config, arch, precision, B):
    precision = PRECISIONS[precision]
    gpu = fake_gpu.gpu._replace(arch=arch, shared=SHARED[arch])
    decoder = open_decoder(architecture_of(config), gpu, config, random_model(config), B, 300,
                           precision.dtype)
    list(decoder.draw(np.ones((1, 150), np.int32), 5, [Random() for _ in range(B)], Choice()))
    parameters = {name: kinds for file in (*DECODE, "decode/token")
                  for name, kinds in signatures(file).items()}
    whole = config in LLAMAS and arch == "sm_90a" and precision.bf16 and B == 1
    assert (decoder.token is not None) == whole
    assert ({launch.name for launch in fake_gpu.launches} - {"round_weights"}
            == set(parameters) - {"decode_logits" if whole else "decode_token"})
    launches = [launch for launch in fake_gpu.launches if launch.name != "round_weights"]
    check_launches(launches, gpu, precision, parameters)
    named = [zip(parameters[launch.name], launch.arguments) for launch in launches]
    assert ({int(argument) for pairs in named for (_, name), argument in pairs if name == "maxT"}
            == {300})
    if config in LLAMAS:
        assert decoder.rope.shape == (300, 32, 2) and decoder.rope.dtype == np.float32


# --------------------------------------------------------------------------------------------------
# with a GPU

# of the largest value; in bfloat16, what a kernel reads is rounded, too
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
CASES = [(config, dtype) for config in (*MODELS, *LLAMAS, *SPEEDRUNS)
         for dtype in ("float32", "bfloat16")]


def rounded(array, dtype):
    return bf16_to_float32(bf16_bits(array)) if dtype == "bfloat16" else array


@pytest.fixture
def decoders(gpu):
    """(config, dtype, B) -> one on the GPU, with its stream current, and one in NumPy with the same
    weights."""
    def make(config, dtype, B):
        params = random_model(config, seed=os.getpid())
        flat(params)[:] = rounded(flat(params), dtype)
        ours = open_decoder(architecture_of(config), gpu, config, params, B, config.maxT, dtype)
        on_stream(ours.device)
        return ours, page_of(config).Decoder(config, params, B, config.maxT)

    return make


def run_pass(decoder, tokens):
    """Launch a pass over tokens (B, T) and, of their last positions, the logits, if T is 1."""
    B, T = tokens.shape
    decoder.acts.tokens[: tokens.size].set(tokens.reshape(-1))
    classifier = decode_layers(decoder, B, T)
    acts = decoder.acts
    if T == 1:
        decode_logits(decoder.device, acts.logits, acts.tiles, *classifier, acts.control, B,
                      decoder.config.Vp)


def tiles_of(logits, V, rows, temperature):
    """What decode_logits leaves of the tiles of logits (B,Vp): (B,Vp/rows,4)."""
    x = np.where(np.arange(logits.shape[1]) < V, logits, -np.inf).astype(np.float64)
    x = x.reshape(len(x), -1, rows)
    largest = x.max(-1, keepdims=True)
    distance = np.where(x == -np.inf, -np.inf, x - np.where(largest == -np.inf, 0, largest))
    tempered = distance / temperature if temperature else distance
    sums = [np.exp(each).sum(-1, keepdims=True) for each in (distance, tempered)]
    return np.concatenate([largest, *sums, np.zeros_like(largest)], -1).astype(np.float32)


@pytest.mark.parametrize("B, T, position",
                         ((1, 1, 0), (1, 1, 0.9), (1, 3, 0.1), (3, 1, 0.3), (5, 1, 1),
                          (2, 17, 0.5), (20, 2, 0.02), (1, 40, 0), (1, 40, 0.24), (23, 1, 0.97),
                          (70, 1, 0.7)))
@pytest.mark.parametrize("config, dtype", CASES, ids=label)
def test_a_pass_is_the_cpu_s(decoders, config, dtype, B, T, position):
    check_pass(*decoders(config, dtype, B), dtype, B, T, position)


def normalized(config, x, scale=1.0):
    """Queries or keys (..,HS), with QK-norm."""
    if not isinstance(config, train_speedrun.Config):
        return x
    return scale * x / np.sqrt(np.square(x).mean(-1, keepdims=True) + config.eps)


def check_pass(ours, cpu, dtype, B, T, position):
    """Every tensor that it writes, NaN before. position: of those before the last one that fits."""
    config = ours.config
    position = int(position * (config.maxT - T))
    rng = np.random.default_rng((position, os.getpid()))
    tokens = rng.integers(0, config.V, (B, T), dtype=np.int32)
    for mine, theirs in ((ours.cache.keys, cpu.cache.keys), (ours.cache.values, cpu.cache.values)):
        before = rng.standard_normal(theirs[:, :, :, :position].shape, dtype=np.float32)
        before = normalized(config, before) if theirs is cpu.cache.keys else before
        theirs[:, :, :, :position] = rounded(before, dtype)
        theirs[:, :, :, position:] = np.nan
        mine.set(bf16_bits(theirs) if dtype == "bfloat16" else theirs)
    for name in ("residual", "branches", "normed", "query", "atty", "parts", "fch_act", "logits",
                 "tiles"):
        getattr(ours.acts, name).view(np.uint8).fill(0xFF)
    temperature = (0.0, 0.7, 1.0)[position % 3]
    ours.set(position=position, temperature=temperature)
    run_pass(ours, tokens)
    logits = cpu.forward(tokens, position)
    N = B * T
    C = config.C
    acts = views(cpu.decode_table(config, B, T, position + T), cpu.buffer)

    def close(name, got, expected):
        got = (got if isinstance(got, np.ndarray) else to_float32(got)).reshape(expected.shape)
        allowed = TOLERANCE[dtype] * float(np.abs(expected).max())
        error = np.abs(got - expected).max()
        assert error <= allowed, f"{name}: {error} of {allowed}"

    query = to_float32(ours.acts.query[:N]).reshape(N, config.NH, config.HS)
    close("query", normalized(config, query, 0.12 * config.HS**0.5),
          acts.qkv[..., : config.NH * config.HS])
    close("atty", ours.acts.atty[:N], acts.atty)
    in_numpy = next(name for name in acts.table if name.startswith("fch_"))
    close("fch_act", ours.acts.fch_act[:N], getattr(acts, in_numpy))
    parts = ours.device.geometry.DECODE_FC_PARTS
    branch = ours.acts.branches.reshape(-1)[: parts * N * C].reshape(parts, N, C).get().sum(0)
    branch += getattr(layer(cpu.params, config.L - 1), "fcprojb", 0.0)
    close("fcproj", branch, acts.fcproj.reshape(N, C))
    for name in ("keys", "values"):
        mine = to_float32(getattr(ours.cache, name))
        theirs = getattr(cpu.cache, name)
        mine = normalized(config, mine) if name == "keys" else mine
        close(name, mine[:, :, :, : position + T], theirs[:, :, :, : position + T])
        assert np.isnan(mine[:, :, :, position + T :]).all()
    if T == 1:
        close("logits", ours.acts.logits[:, : config.V], logits)
        expected = tiles_of(ours.acts.logits.get(), config.V, ours.device.geometry.DECODE_ROWS,
                            temperature)
        np.testing.assert_allclose(ours.acts.tiles.get(), expected, rtol=1e-5)


@pytest.mark.parametrize("B, T, position", ((1, 1, 0.9), (1, 40, 0), (70, 1, 0.7)))
def test_a_pass_in_less_shared_memory_is_the_cpu_s(decoders, monkeypatch, B, T, position):
    """In which float32 weights of GPT-2 1558M have tiles of 8 rows."""
    def geometry(architecture, config, precision, shared):
        return decode_geometry(architecture, config, precision, min(shared, SHARED["sm_86"]))

    monkeypatch.setattr(llmc.gpu.decode_geometry, "decode_geometry", geometry)
    ours, cpu = decoders(MODELS[3], "float32", B)
    assert ours.device.geometry.DECODE_ROWS == 8
    check_pass(ours, cpu, "float32", B, T, position)


@pytest.mark.parametrize("config, dtype", [case for case in CASES if 240 <= case[0].C < 2048],
                         ids=label)
def test_a_pass_does_not_depend_on_the_batch(decoders, config, dtype):
    """To the bit: the last layer's tensors and the logits. A head's attention has one block or
    several."""
    B = 70
    rng = np.random.default_rng(os.getpid())
    tokens = rng.integers(0, config.V, (B, 1), dtype=np.int32)
    past = rng.standard_normal((config.L, B, config.NKV, config.maxT, config.HS), dtype=np.float32)
    past = bf16_bits(past) if dtype == "bfloat16" else past
    each = {n: decoders(config, dtype, n)[0] for n in (1, 5, 16, 64, B)}

    def outputs(position, begin, end):
        decoder = each[end - begin]
        rows = slice(begin, end)
        decoder.set(position=position)
        with decoder.device.stream:
            decoder.cache.keys.set(past[:, rows])
            decoder.cache.values.set(past[:, rows])
            run_pass(decoder, tokens[rows])
            acts = decoder.acts
            _, cache = decoder.layers[-1]
            assert not acts.arrived.get().any()
            new = (tensor[:, :, position] for tensor in (cache.keys, cache.values))
            return [tensor[: end - begin].get().view(np.uint8)
                    for tensor in (acts.query, acts.atty, acts.fch_act, acts.logits, *new)]

    for position in (0, config.maxT // 4 - 1, config.maxT - 1):
        together = outputs(position, 0, B)
        for begin, end in ((0, 1), (69, 70), (23, 28), (0, 16), (6, 70)):
            for all_rows, some in zip(together, outputs(position, begin, end)):
                assert np.array_equal(all_rows[begin:end], some)


CHOICES = (Choice(), Choice(0.0), Choice(0.3), Choice(2.0), Choice(2.0, 1), Choice(1.0, 2),
           Choice(1.0, 40), Choice(1.3, 999), Choice(1.0, 5000), Choice(1.0, 0, 0.9),
           Choice(1.3, 0, 0.9), Choice(0.7, 0, 1e-30), Choice(0.7, 100, 0.5))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("V, spread", ((50257, 3.0), (5000, 3.0), (1024, 3.0), (1003, 0.01),
                                       (1003, 8.0), (300, 0.0)))
def test_drawing(decoders, V, spread, choice):
    """The token is the one whose part of the running sum the coin falls into, among those that the
    choice leaves, up to rounding; the numbers of the next coin, the host's copies and the
    log-probabilities."""
    B = 61
    Vp = -(-V // 128) * 128
    decoder, _ = decoders(Config(8, V, 1, 1, 16, Vp), "float32", B)
    rng = np.random.default_rng((V, os.getpid()))
    logits = np.full((B, Vp), 1e9, np.float32)  # the padding counts for nothing
    logits[:, :V] = rng.standard_normal((B, V), dtype=np.float32) * np.float32(spread)
    logits[: B // 2, :V] = np.round(logits[: B // 2, :V])  # many are equal, some are -0
    logits[-9:, :V] -= np.log(np.arange(V) + 100)  # lower ids are likelier
    logits[-3:, 7] = -1e15
    acts = decoder.acts
    randoms = generate.streams(7, B)
    acts.logits.set(logits)
    acts.tiles.set(tiles_of(logits, V, decoder.device.geometry.DECODE_ROWS, choice.temperature))
    acts.randoms.set(np.array([random.state for random in randoms], np.uint64))
    decoder.set(position=3, step=6, top_k=min(choice.top_k, V), temperature=choice.temperature,
                top_p=choice.top_p)
    decode_sample(decoder.device, acts.tokens, acts.randoms, acts.control, decoder.drawn,
                  decoder.logprobs, acts.logits, acts.tiles, B)
    decoder.device.stream.synchronize()
    control = acts.control.get().view(TEXT_CONTROL)[0]
    assert control["position"] == 4 and control["step"] == 7 and control["arrived"] == 0
    ids = acts.tokens[:B].get()
    row = 6 % len(decoder.drawn)
    assert np.array_equal(decoder.drawn[row], ids) and ids.min() >= 0 and ids.max() < V
    coins = [random.f32() for random in randoms]
    assert np.array_equal(acts.randoms.get(), [random.state for random in randoms])
    exact = logits[:, :V].astype(np.float64)
    shifted = exact - exact.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    np.testing.assert_allclose(decoder.logprobs[row], logprobs[np.arange(B), ids], rtol=0,
                               atol=2e-5)
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
            at = np.searchsorted(among, id)
            slack = 1e-5 * sums[-1]
            if (at < among.size
                    and sums[at] - probs[id] - slack <= coin * sums[-1] <= sums[at] + slack):
                break
        else:
            raise AssertionError(f"{b}: {id} with the coin {coin}")


FAULTS = {  # in choosing: the right text of sample.cu, the fault, the choice that shows it
    "the last of the likeliest lost": ("tokens, top_k,", "tokens, top_k - 1,", Choice(1.0, 2)),
    "one too many": ("tokens, top_k,", "tokens, top_k + 1,", Choice(2.0, 1)),
    "all of a digit": ("(shift > 0 && digit.count > 1)", "(false)", Choice(1.0, 40)),
    "a digit without those before": ("target -= digit.before", "target -= 0", Choice(1.0, 40)),
    "half the nucleus": ("tokens, target,", "tokens, (target + 1) / 2,", Choice(0.7, 100, 0.5)),
    "the nucleus of the few": ("if (top_k > 0 || tokens.count == 0) {", "{",
                               Choice(1.3, 0, 0.9)),
    "an empty nucleus": ("max(1u, uint32(double(whole) * top_p))", "uint32(double(whole) * top_p)",
                         Choice(0.7, 0, 1e-30)),
    "another token of a tile": ("= {begin + i,", "= {begin,", Choice(1.0, 40)),
    "tiles without the temperature": ("own[i].weight * exp", "own[i].sum * exp", Choice(2.0)),
    "a thread's last tile lost": ("for (int i = 0; i < EACH; i++) {\n        if",
                                  "for (int i = 0; i < EACH - 1; i++) {\n        if", Choice()),
}


@pytest.mark.parametrize("largest", (np.nan, -np.inf))
def test_a_diverged_model_draws_a_token(decoders, largest):
    """One that exists, though all logits are NaN: steps that are under way read its embedding.
    largest: of each tile; fmaxf drops NaN where there is another number."""
    V = 1024
    decoder, _ = decoders(Config(8, V, 1, 1, 16, V), "float32", 1)
    acts = decoder.acts
    with decoder.device.stream:
        acts.logits.fill(np.nan)
        acts.tiles.fill(np.nan)
        acts.tiles[..., 0] = largest
    for choice in CHOICES:
        decoder.set(position=3, step=6, top_k=min(choice.top_k, V), top_p=choice.top_p,
                    temperature=choice.temperature)
        decode_sample(decoder.device, acts.tokens, acts.randoms, acts.control, decoder.drawn,
                      decoder.logprobs, acts.logits, acts.tiles, 1)
        decoder.device.stream.synchronize()
        assert 0 <= acts.tokens[:1].get()[0] < V
        assert np.isnan(decoder.logprobs[6 % len(decoder.logprobs), 0])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_choosing_is_found(decoders, tmp_path, monkeypatch, fault):
    right, wrong, choice = FAULTS[fault]
    plant_in_a_kernel(tmp_path, monkeypatch, "decode/sample.cu", right, wrong)
    with pytest.raises(AssertionError):
        test_drawing(decoders, 50257, 3.0, choice)


@pytest.mark.parametrize("config, prompt, count", (
    (MODELS[1], 1, 30), (MODELS[1], 35, 90), (MODELS[1], 100, 5), (LLAMAS[3], 1, 30),
    (LLAMAS[3], 35, 90),
    (LLAMAS[4], 100, 5), (LLAMAS[0], 150, 20), (LLAMAS[6], 5, 10)), ids=label)
def test_text_is_the_cpu_s_and_does_not_depend_on_the_batch(decoders, config, prompt, count):
    """Also beyond the longest sequence, and for prompts of several passes. Where rounding decides,
    texts may part."""
    total = 0
    same = 0
    alone = {}
    choices = (Choice(0.0), Choice(0.7, 10, 0.9), Choice(0.7), Choice())
    prompt = np.random.default_rng(1).integers(0, config.V, (1, prompt), dtype=np.int32)
    # among all of many tokens, rounding decides often
    for choice in choices[: 4 if config.V < 2000 else 2]:
        for B in (1, 3, 20, 70):
            ours, cpu = decoders(config, "float32", B)
            texts = []
            for decoder in (ours, cpu, ours):
                randoms = generate.streams(5, B)
                texts.append(np.array([ids
                                       for ids, _ in decoder.draw(prompt, count, randoms,
                                                                  choice)]).T)
            assert np.array_equal(texts[0], texts[2]), "the same again"
            fewer = alone.get(choice, texts[0])
            alone[choice] = texts[0]
            assert np.array_equal(texts[0][: len(fewer)], fewer)
            total = total + B
            same = same + (texts[0] == texts[1]).all(-1).sum()
    assert same >= 0.95 * total, f"{same} of {total} texts are the CPU's"


def test_the_program_on_a_gpu(gpu, workplace, run_here):
    """Text, JSON, a stream of prompts; --device and --dtype."""
    config = MODELS[1]
    write_model("model.bin", config, random_params(config))
    flags = ("model.bin", "--prompt_ids", 1, 2, 3, "--tokens", 20, "--ignore_eot", "--json",
             "--samples", 2)
    cpu, gpu32, gpu16 = (run_here(generate, *flags, *more).stdout for more in (
        ("--device", "cpu"), ("--dtype", "float32"), ("--device", "gpu", "--dtype", "bfloat16")))
    ids = [[line.split('"text"')[0] for line in output.splitlines()] for output in (cpu, gpu32)]
    assert ids[0] == ids[1] and len(gpu16.splitlines()) == 2
