"""A weight for each target's loss on GPUs: losses and updates beside NumPy's, planted faults; the
same bits on any number of GPUs and beyond a checkpoint."""

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest

import fake_gpus
import train_llama3
import train_speedrun
from conftest import SMALL_HEADS, make_model, page_of, random_params, remove_after, run_program
from fake_gpus import end_ranks, fork_ranks
from llmc.api import load, on_gpu
from llmc.checkpoint import write_model
from llmc.dataloader import NO_TARGETS
from llmc.gpu.trainer import open_trainer
from llmc.tensors import flat, views
from test_parity import need
from test_scale_cuda import COUNTS
from test_verdict import plant_in_a_kernel
from test_weights import B, T, batches, few_and_many, run_micro_batches, with_weights

LLAMA = train_llama3.Config(64, 257, 2, NH=4, NKV=2, C=64, Vp=384, F=96, HS=16, tied=0)
SPEEDRUN = train_speedrun.Config(64, 257, 2, 2, 128, 384)
CONFIGS = {"GPT-2": SMALL_HEADS, "Llama": LLAMA, "speed run": SPEEDRUN}
# of the distance from an update's weights to NumPy's, beside the update
TOLERANCES = {"float32": 5e-3, "bfloat16": 0.08, "fp8": 0.3}
RATE = 0.01
SIGNED = np.random.default_rng(5).integers(-3, 4, (1, B, T))


def half_precision(params):
    """The parameters, cut to bfloat16's numbers, in which a GPU run begins."""
    flat(params).view(np.uint32)[...] &= 0xFFFF0000
    return params


def update_in_numpy(config, params, drawn, total, settings):
    """(loss, norm, the weights after an update)."""
    model = make_model(B, T, len(drawn), config, views(params.table, params.buffer.copy()))
    if total is None:
        loss = run_micro_batches(model, drawn)
    else:
        loss = model.forward(*drawn[0], total)
        model.backward()
    norm, scale = model.norm_and_scale(settings)
    model.optimizer.update(model.params, model.grads, settings, RATE, 1, scale)
    return loss, norm, flat(model.params)


def update_on_gpu(trainer, drawn, total):
    number = trainer.begin_step(drawn, RATE, total)
    update = trainer.end_step(number)
    exact = trainer.optimizer.master if trainer.settings.master else trainer.params
    return update.loss, update.norm, flat(trainer.to_host(exact))


def agree(gpu, config, dtype, weights, total=None, graph=1):
    """Whether an update of these micro-batches' weights is NumPy's."""
    settings = dict(B=B, T=T, total_batch_size=len(weights) * B * T, grad_clip=0.5, eps=1e-3)
    page = page_of(config)
    params = half_precision(random_params(config))
    drawn = batches(config, weights)
    loss, norm, expected = update_in_numpy(config, params, drawn, total, page.Settings(**settings))
    architecture = on_gpu(page)
    resolved = architecture.resolve_auto(
        architecture.Settings(**settings, dtype=dtype, tf32=0, graph=graph), gpu.arch)
    trainer = open_trainer(architecture, gpu, config, params, resolved)
    trainer.prepare()
    got_loss, got_norm, got = update_on_gpu(trainer, drawn, total)
    tolerance = TOLERANCES[dtype]
    before = flat(params)
    return (abs(got_loss - loss) < tolerance / 5 * max(1, abs(loss))
            and abs(got_norm - norm) < tolerance / 2 * norm
            and np.linalg.norm(got - expected) < tolerance * np.linalg.norm(expected - before))


@pytest.mark.parametrize("config, dtype, graph", itertools.product(CONFIGS, TOLERANCES, (0, 1)))
def test_an_update_is_numpy_s(gpu, config, dtype, graph):
    """Of one target beside many beside none; of signed weights over a total, as of rewards; and of
    negative ones, whose sum is negative."""
    need({"bfloat16": "bf16", "fp8": "cuda-fp8"}.get(dtype, dtype))
    assert agree(gpu, CONFIGS[config], dtype, few_and_many(), graph=graph)
    assert agree(gpu, CONFIGS[config], dtype, SIGNED, total=30.0, graph=graph)
    assert agree(gpu, CONFIGS[config], dtype, -few_and_many()[1][None], graph=graph)


FAULTS = {
    "another row's weight": ("classifier.cu", "dloss * weights[n]", "dloss * weights[n ^ 1]"),
    "the target without its weight": ("classifier.cu", "target_logit, of_row,",
                                      "target_logit, dloss,"),
    "a negative weight's sign lost": (
        "classifier.cu", "copysignf(scaled_exp(largest_then, offset, scale), scale)",
        "scaled_exp(largest_then, offset, scale)"),
    "a loss that does not weigh": ("update.cu", "weights[i] * losses[i]", "losses[i]"),
    "gradients without the batch's scale": ("update.cu", "= scale * (grad_clip", "= (grad_clip"),
    "a norm without it": ("update.cu", "block_sum(squares)) * fabsf(scale);",
                          "block_sum(squares));"),
}
CAPPED_FAULTS = {
    "another row's weight": ("dloss * weights[n]", "dloss * weights[n ^ 1]"),
    "the target without its weight": ("cap_slope(target_logit) * of_row",
                                      "cap_slope(target_logit) * dloss"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernel_is_found(gpu, tmp_path, monkeypatch, fault):
    need("bf16")
    if "sign" in fault and gpu.arch != "sm_90a":
        pytest.skip("other kernels make each exponential anew")
    plant_in_a_kernel(tmp_path, monkeypatch, *FAULTS[fault])
    assert not all(agree(gpu, SMALL_HEADS, "bfloat16", *case)
                   for case in ((few_and_many(),), (SIGNED, 30.0)))


@pytest.mark.parametrize("fault", CAPPED_FAULTS)
def test_a_fault_in_the_capped_classifier_is_found(gpu, tmp_path, monkeypatch, fault):
    if gpu.arch != "sm_90a":
        pytest.skip("for Hopper")
    plant_in_a_kernel(tmp_path, monkeypatch, "hopper/classifier_capped.cu", *CAPPED_FAULTS[fault])
    assert not agree(gpu, SPEEDRUN, "bfloat16", few_and_many())


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_ones_are_as_no_weights_and_zeros_change_nothing(gpu, dtype):
    """Bit for bit."""
    need({"bfloat16": "bf16", "fp8": "cuda-fp8"}.get(dtype, dtype))
    architecture = on_gpu(page_of(SMALL_HEADS))
    settings = architecture.resolve_auto(architecture.Settings(B=B, T=T, dtype=dtype), gpu.arch)
    found = []
    for cut in (2, 3):
        trainer = open_trainer(architecture, gpu, SMALL_HEADS, random_params(SMALL_HEADS), settings)
        trainer.prepare()
        ones, = batches(SMALL_HEADS, [np.ones((B, T))])
        loss, _, weights = update_on_gpu(trainer, [ones[:cut]], None)
        found.append((loss, weights.tobytes(), trainer.forward(*ones[:cut])))
    assert found[0] == found[1]

    nothing = [(*ones[:2], np.zeros((B, T), np.float32))]
    before = [array.get() for array in (trainer.params.buffer, trainer.optimizer.m)]
    update = trainer.end_step(trainer.begin_step(nothing, RATE))
    assert update.skipped == NO_TARGETS and update.loss == 0
    after = [array.get() for array in (trainer.params.buffer, trainer.optimizer.m)]
    assert all(map(np.array_equal, before, after))


def test_from_python(gpu, workplace):
    """As on a CPU, within rounding: losses, and what an update changes."""
    drawn = batches(SMALL_HEADS, SIGNED)[0]
    write_model("heads.bin", SMALL_HEADS, random_params(SMALL_HEADS))
    found = []
    for options in ({}, dict(gpu=True, B=B, T=T, dtype="float32")):
        model = load("heads.bin", **options)
        loss = model.forward(*drawn, total=7)
        model.backward()
        model.update(RATE)
        found.append((loss, model.forward(*drawn, total=7)))
    assert np.allclose(*found, rtol=1e-3, atol=1e-4)
    assert found[0][1] < found[0][0] - 0.01


# --------------------------------------------------------------------------------------------------
# files of weights, on any number of GPUs

RUN = ("-b", 2, "-t", 8, "-d", 64, "-x", 5, "-v", 2, "-m", 7, "-s", 0, "--grad_clip", 1,
       "--shuffle", 0, "--spread", 0)


def results(directory):
    return [path.read_bytes() for path in sorted(Path(directory).glob("m*"))
            if path.name.startswith(("main.log", "model"))]


@pytest.fixture
def few_targets(heads):
    """Batches of many targets, of few, and, of the first updates, of none."""
    with_weights(heads, lambda i: (i > 90) * (i % 7 // 5) * (1 + i // 1000))


def test_the_same_bits_on_any_number_of_fake_gpus(few_targets):
    """Whose gradients follow from the weights that reach them."""
    for size in (1, 2, 4):
        statuses, out, err = end_ranks(fork_ranks(
            fake_gpus.main, size, flags=(*RUN, "--graph", 0, "-o", f"run{size}")))
        assert statuses == [0] * size, err
        assert err == "" and f"skipped: {NO_TARGETS}" in out
        assert " targets" in out and results(f"run{size}") == results("run1") != []


@pytest.mark.gpu
@pytest.mark.parametrize("page", ("gpt2", "llama3", "speedrun"))
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_run_and_its_resume_on_one_and_two_gpus(few_targets, page, dtype):
    need({"bfloat16": "bf16", "fp8": "cuda-fp8"}.get(dtype, dtype))
    model = () if page == "gpt2" else ("-e", "l2" if page == "llama3" else "s2")
    train = functools.partial(run_program, f"train_{page}_cuda.py", *model, *RUN, "--dtype", dtype)
    train("--graph", 0, "-o", "run")
    for count in COUNTS[:2] or [1]:
        done = train("--gpus", count, "-n", 2, "-o", f"run{count}")
        assert f"skipped: {NO_TARGETS}" in done.stdout and "nan" not in done.stdout
        assert results(f"run{count}")[0] == results("run")[0]  # the log
        assert results(f"run{count}")[-1] == results("run")[-1]  # the last model
    last = Path("run1/model_00000005.bin").read_bytes()
    remove_after("run1", 2)
    train("--gpus", (COUNTS[:2] or [1])[-1], "-o", "run1", "-y", 1)
    assert Path("run1/model_00000005.bin").read_bytes() == last
