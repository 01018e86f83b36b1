"""train_speedrun.py beside PyTorch: loss, gradients, updates; planted faults; and from a text to a model to a text."""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import export_weights
import train_speedrun as t
import train_speedrun_cuda as cuda
from conftest import make_model
from llmc.checkpoint import padded, without_padding, write_model
from llmc.gpu.trainer import open_trainer
from llmc.tensors import allocate, flat, views
from reference import MuonAndAdamW, muon
from test_gpt2 import ADAMW_CHECK, need
from test_verdict import instead, is_right

CONFIG = t.Config(maxT=32, V=50, L=2, NH=2, C=32, Vp=128)
LARGE_STEPS = {**ADAMW_CHECK, "learning_rate": 0.1, "weight_decay": 0.5}  # whose decay shows


def test_losses_gradients_and_updates_are_pytorch_s():
    assert is_right(CONFIG, LARGE_STEPS)


@pytest.mark.parametrize("tokens", (2**17 - 1, 2**17))
@pytest.mark.parametrize("shape", ((16, 48), (48, 16)))
def test_a_step_of_muon_is_pytorch_s(tokens, shape):
    """Of few tokens and of many."""
    ours = np.random.default_rng(0).standard_normal((3, *shape), dtype=np.float32)  # weights, gradient, momentum
    param, grad, m = torch.tensor(ours, dtype=torch.float64)
    muon(param, grad, m, 0.1, 0.5, *MuonAndAdamW.steps_for(tokens))
    steps = t.newton_schulz_of(t.SpeedrunSettings(B=1, T=tokens))
    t.muon_update(ours[0], ours[2], ours[1], 0.1, t.Muon.MOMENTUM, 0.5, 1.0, steps)
    assert np.abs(ours[0] - param.numpy()).max() < 1e-5 and np.abs(ours[2] - m.numpy()).max() < 1e-6


def source(name, old, new, owner=t):
    """Plants a function with a piece of its source exchanged."""
    return owner, name, instead(old, new)(getattr(owner, name))


FAULTS = {
    "eps of every norm": (t, "EPS", 1e-5),
    "attention's scale": (t, "SCALE", 0.1212),
    "the cap": (t, "CAP", 15.1),
    "frequencies as Llama's": source("rope_table", "(half - 1)", "half"),
    "no rotation back": (t, "rope_backward", lambda *arguments: None),
    "rotated back first": source("qknorm_backward", "np.vecdot(d, out)", "np.vecdot(d, np.roll(out, 1, -1))"),
    "queries not scaled back": source("qknorm_backward", "mean / scale", "mean"),
    "QK-norm's mean forgotten": source("qknorm_backward", "d -= out", "d -= 0 * out"),
    "the square's 2": source("relu2_backward", "np.float32(2.0)", "np.float32(1.0)"),
    "the cap's slope, 1 percent": source("cap_backward", "inverse * np.sqrt(inverse)", "1.01 * inverse**1.5"),
    "the embedding's norm": source("backward_into", "None, s.dbranch", "None, s.dresidual", t.Speedrun),
    "no gradient of the classifier's bias": source("backward_into", "grads.lm_headb[:V]", "None", t.Speedrun),
    "a coefficient of Newton and Schulz": (t, "FAST", (5, (3.4445, -4.7750, 2.0314))),
    "the scale of tall matrices": source("muon_update", "param.shape[0] / param.shape[1]", "0"),
    "momentum": (t.Muon, "MOMENTUM", 0.94),
    "decay after the step": source("muon_update", "param -= u", "param -= u * (1 - learning_rate * weight_decay)"),
    "query, key, value as one matrix": (t.Muon, "MATRICES", {**t.Muon.MATRICES, "qkvw": 1}),
    "the embedding's rate": (t.Muon, "RATES", {**t.Muon.RATES, "wte": 28.5}),
    "the biases' rate": (t.Muon, "RATES", {**t.Muon.RATES, "fcb": 0.62}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(monkeypatch, fault):
    monkeypatch.setattr(*FAULTS[fault])
    assert not is_right(CONFIG, LARGE_STEPS)


def test_its_model_is_exported_but_not_to_transformers(workplace, run_here):
    write_model("s2.bin", *t.random_model("s2", 257))
    run_here(export_weights, "--model", "s2.bin", "--sequence_length", 8, "--num_iterations", 1)
    assert os.path.exists("speedrun_s2_debug_state.bin")
    run_here(export_weights, "--to_hf", "s2.bin", "hf", fails=["no class of transformers"])


@pytest.mark.parametrize("dtype, V, tolerance", (("float32", 97, 1e-4), ("bfloat16", 97, 0.2),
                                                  ("bfloat16", 50257, 0.3), ("fp8", 97, 0.8), ("fp8", 50257, 0.8)))
def test_on_a_gpu(gpu, dtype, V, tolerance):
    """Loss, gradients and an update beside NumPy's, over the update's or the gradient's length, buffers NaN before. In
    bfloat16, five Newton-Schulz steps make 0.1 of rounding."""
    need({"bfloat16": "bf16", "fp8": "cuda-fp8"}.get(dtype, dtype))
    config, rng, (B, T) = t.Config(64, V, 2, 2, 128, padded(V)), np.random.default_rng(0), (3, 33)
    params = allocate(t.parameter_table(config))
    for name, row in params.table.items():
        getattr(params, name)[...] = rng.normal(row.ones, 1.0 if name == "wte" else 0.1, row.shape)
    flat(params).view(np.uint32)[...] &= 0xFFFF0000  # bfloat16 numbers
    without_padding(config, params, V)
    inputs, targets = rng.integers(0, V, (2, B, T)).astype(np.int32)
    params.lm_headb[3], targets[:, ::2] = 14.0, 3  # probable, and often right
    ours = make_model(B, T, 1, config, views(params.table, params.buffer.copy()))
    loss = ours.forward(inputs, targets)
    ours.backward()
    settings = cuda.Speedrun.Settings(B=B, T=T, dtype=dtype, tf32=0, float32_grads=1, eps=1e-3, graph=0, recompute=0)
    trainer = open_trainer(cuda.Speedrun, gpu, config, params, settings)
    for buffer in trainer.model.buffers.values():
        buffer.fill(0xFF)
    assert abs(trainer.forward(inputs, targets) - loss) < tolerance / 50 * loss
    trainer.compute_gradients(inputs, targets)
    trainer.update_now(0.02)
    ours.optimizer.update(ours.params, ours.grads, t.SpeedrunSettings(B=B, T=T, eps=1e-3), 0.02, 1)
    updated = trainer.to_host(trainer.params if dtype == "float32" else trainer.optimizer.master)
    grads = trainer.to_host(trainer.grads)
    for name, row in params.table.items():
        rows = slice(V if row.vocabulary else None)
        before, after, expected, grad, expected_grad = (getattr(x, name)[rows] for x in (
            params, updated, ours.params, grads, ours.grads))
        assert np.linalg.norm(grad - expected_grad) <= tolerance / 4 * np.linalg.norm(expected_grad), name
        assert np.linalg.norm(after - expected) <= tolerance * np.linalg.norm(expected - before), name
