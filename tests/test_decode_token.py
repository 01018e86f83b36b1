"""decode_token, a whole pass over one token in one kernel: against the CPU's Decoder, the same bits
again, planted faults; and, with no GPU, that it compiles and which models have it. That its launch
passes what it takes: test_decode.py."""

import os

import numpy as np
import pytest

from llmc.gpu.decode_geometry import decode_files, token_file
from llmc.gpu.decoder import open_decoder
from llmc.gpu.device import Device, to_float32
from llmc.gpu.geometry import launch_geometry
from llmc.sampler import Choice, Random
from llmc.tensors import bf16_bits
from test_compile import compile_file
from test_decode import (LLAMAS, MODELS, SPEEDRUNS, TOLERANCE, architecture_of,
                         decoders, label,  # noqa: F401  (a fixture)
                         normalized, random_model, rounded, tiles_of)
from test_kernels import PRECISIONS
from test_verdict import plant_in_a_kernel
from train_gpt2 import Config
from train_llama3 import Config as LlamaConfig

IN_ONE_KERNEL = [
    Config(1024, 1003, 2, 12, 768, 1024),
    Config(300, 1003, 1, 25, 1600, 1024),  # two heads a cluster, the last one has one
    Config(300, 1003, 3, 3, 192, 1024),  # clusters without heads
    Config(300, 1003, 1, 1, 64, 1024), Config(300, 1003, 2, 2, 128, 1024),  # warps without channels
    *LLAMAS[:2], LLAMAS[5],  # grouped queries; heads of 128
    LlamaConfig(300, 1003, 1, 15, 5, 960, 1024, 2560, 64),  # the layers of SmolLM2-360M
    SPEEDRUNS[0],
]
NOT_IN_ONE_KERNEL = [MODELS[1], MODELS[2], LLAMAS[2], LLAMAS[3]]


def token_file_of(config, gpu, dtype="bf16"):
    architecture, precision = architecture_of(config), PRECISIONS[dtype]
    geometry = launch_geometry(config, precision, gpu.arch)
    file = decode_files(architecture, config, precision, geometry, gpu.shared)[-1]
    return token_file(architecture, config, precision, gpu, file.constants)


@pytest.mark.parametrize("sm_count", (132, 114, 78))
@pytest.mark.parametrize("config", [pytest.param(config, marks=pytest.mark.large if i else ())
                                    for i, config in enumerate(IN_ONE_KERNEL)], ids=label)
def test_a_token_in_one_kernel_compiles(fake_gpu, config, sm_count):
    """On H200s, H100s by PCIe, H20s."""
    file = token_file_of(config, fake_gpu.gpu._replace(sm_count=sm_count))
    assert file or config is not IN_ONE_KERNEL[0]
    if file:
        compile_file(file, "sm_90a")
        assert 114 << 10 < file.shared["decode_token"] <= fake_gpu.gpu.shared, "one block"


def test_which_models_have_a_token_in_one_kernel(fake_gpu):
    gpu = fake_gpu.gpu
    assert all(token_file_of(config, gpu) for config in IN_ONE_KERNEL)
    assert not any(token_file_of(config, gpu) for config in NOT_IN_ONE_KERNEL)
    assert not token_file_of(MODELS[0], gpu._replace(arch="sm_80"))
    assert not token_file_of(MODELS[0], gpu, "float32")
    assert not token_file_of(MODELS[0], gpu._replace(sm_count=24))


def test_a_token_in_many_kernels_where_clusters_do_not_fit(fake_gpu, monkeypatch):
    monkeypatch.setattr(Device, "resident_clusters", lambda *_: 14)
    params = random_model(LLAMAS[1])
    decoder = open_decoder(architecture_of(LLAMAS[1]), fake_gpu.gpu, LLAMAS[1], params, 1, 300,
                           "bfloat16")
    assert decoder.token is None


# --------------------------------------------------------------------------------------------------
# with a GPU


def set_past(ours, cpu, position, rng):
    """Random keys and values of the positions before this one, NaN from it on."""
    for mine, theirs in ((ours.cache.keys, cpu.cache.keys), (ours.cache.values, cpu.cache.values)):
        past = rounded(rng.standard_normal(theirs.shape, dtype=np.float32), "bfloat16")
        past[:, :, :, position:] = np.nan
        mine.set(bf16_bits(past))
        theirs[...] = normalized(ours.config, past) if theirs is cpu.cache.keys else past


def check_token(ours, cpu, position, step, temperature=0.7):
    """Every tensor that it writes, NaN before, against the CPU's; return the logits. The other
    step's sums are 0 afterwards."""
    config, acts = ours.config, ours.acts
    rng = np.random.default_rng((position, os.getpid()))
    set_past(ours, cpu, position, rng)
    for name in ("logits", "tiles"):
        getattr(acts, name).view(np.uint8).fill(0xFF)
    token = rng.integers(0, config.V, (1, 1), dtype=np.int32)
    acts.tokens[:1].set(token[0])
    ours.token.sums[step % 2] = 0
    ours.token.sums[1 - step % 2].reshape(-1, 16)[:, :4] = 12345  # the words that are used
    ours.set(position=position, step=step, temperature=temperature)
    ours.token.launch()
    ours.device.stream.synchronize()
    expected = cpu.forward(token, position)
    logits = acts.logits.get()

    def close(name, got, expected):
        error = np.abs(got.reshape(expected.shape) - expected).max()
        assert error <= TOLERANCE["bfloat16"] * float(np.abs(expected).max()), (name, error)

    close("logits", logits[:, : config.V], expected)
    tiles = tiles_of(logits, config.V, ours.device.geometry.DECODE_ROWS, temperature)
    np.testing.assert_allclose(acts.tiles.get(), tiles, rtol=1e-5)
    for name in ("keys", "values"):
        mine, theirs = to_float32(getattr(ours.cache, name)), getattr(cpu.cache, name)
        mine = normalized(config, mine) if name == "keys" else mine
        close(name, mine[:, :, :, : position + 1], theirs[:, :, :, : position + 1])
        assert np.isnan(mine[:, :, :, position + 1 :]).all()
    assert not ours.token.sums[1 - step % 2].get().any()
    return logits


@pytest.mark.parametrize("config", IN_ONE_KERNEL, ids=label)
def test_a_token_is_the_cpu_s(decoders, config):  # noqa: F811
    """At the first positions, the last one, and between; the same bits again."""
    ours, cpu = decoders(config, "bfloat16", 1)
    assert ours.token, "one kernel"
    for step, position in enumerate((0, 1, 7, 8, 100, config.maxT // 2 + 3, config.maxT - 1)):
        first = check_token(ours, cpu, position, step)
        assert np.array_equal(first, check_token(ours, cpu, position, step + 1))


def test_a_text_is_the_same_again_and_the_chain_s(decoders):  # noqa: F811
    """By graphs, step after step, also beyond the longest sequence. An odd number of steps leaves
    sums, which the next text must not find. Of some tokens, the chain's log-probabilities after
    the same text."""
    ours, _ = decoders(LLAMAS[0], "bfloat16", 1)
    prompt = np.ones((1, 100), np.int32)
    drawn = [[(int(ids[0]), float(logprobs[0]))
              for ids, logprobs in ours.draw(prompt, count, [Random()], Choice(0.7))]
             for count in (301, 300)]
    assert drawn[0][:300] == drawn[1]

    text = np.append(prompt, np.array([[id for id, _ in drawn[1]]], np.int32), axis=1)
    ours.token = ours.graph = None
    for t in (100, 101, 150, 299):
        next(ours.draw(text[:, :t], 1, [Random()], Choice()))
        logits = ours.acts.logits.get()[0, : ours.config.V].astype(np.float64)
        logprob = logits[text[0, t]] - np.log(np.exp(logits).sum())
        slack = 2 * TOLERANCE["bfloat16"] * np.abs(logits).max()
        assert abs(logprob - drawn[1][t - 100][1]) <= slack


FAULTS = {  # of the files of kernels/decode/: the right text, the fault
    "the last tile's rows wrong": ("token_steps.cuh", "warp, C_ROWS / 8 - 1)",
                                   "warp, C_ROWS / 8 - 2)"),
    "half of a product lost": ("token_steps.cuh", "return d[0] + d[3];", "return d[0];"),
    "the new position lost": ("token_steps.cuh", "count + has_new;", "count;"),
    "a block's part of attention lost": ("token_steps.cuh", "n < COUNT; n++) {\n        const",
                                         "n < COUNT - 1; n++) {\n        const"),
    "keys of another position": ("token.cu", "/ HS), cache.position)",
                                 "/ HS), cache.position + 1)"),
    "the norm's weight lost": ("token_steps.cuh", "* scale * weight.x", "* scale"),
    "sums not zeroed": ("token.cuh", "sums[sum_place(i)] = 0;", ";"),
    "the classifier's rows of other tokens": ("token.cu", "loader.rows(w.head, first,",
                                              "loader.rows(w.head, first + PIECE_ROWS,"),
}
LLAMA_FAULTS = {
    "gates of other rows": ("token.cu", "shared.sums[0] + FC_ROWS + min", "shared.sums[0] + min"),
    "keys not rotated": ("token.cu", "r < 2 * THIRD)", "r < THIRD)"),
    "keys of another group": ("token.cu", "l * NKV + head / GROUP", "l * NKV + head % NKV"),
}


@pytest.mark.parametrize("fault", FAULTS | LLAMA_FAULTS)
def test_a_fault_in_the_token_s_kernel_is_found(decoders, tmp_path, monkeypatch,  # noqa: F811
                                                fault):
    file, right, wrong = (FAULTS | LLAMA_FAULTS)[fault]
    plant_in_a_kernel(tmp_path, monkeypatch, f"decode/{file}", right, wrong)
    config = IN_ONE_KERNEL[0] if fault in FAULTS else LLAMAS[0]
    ours, cpu = decoders(config, "bfloat16", 1)
    with pytest.raises(AssertionError):
        check_token(ours, cpu, 1, 0)
