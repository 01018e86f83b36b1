"""train_speedrun.py beside PyTorch: loss, gradients, updates; planted faults; and from a text to a
model to a text."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import export_weights
import test_gpt2
import train_speedrun as t
import train_speedrun_cuda as cuda
from check_gpu import dlogits_of
from conftest import make_model
from llmc.checkpoint import padded, read_model, without_padding, write_model
from llmc.errors import UserError
from llmc.gpu.device import to_float32
from llmc.gpu.fp8 import DLOGITS_SCALE, Fp8
from llmc.gpu.matmul import Linear
from llmc.gpu.trainer import open_trainer
from llmc.settings import parse_settings
from llmc.tensors import Tensors, allocate, flat, table_bytes, views
from test_fp8 import FP8, e4m3, operands_on_gpu
from test_gpt2 import ADAMW_CHECK
from test_parity import need
from test_kernels import (BF16, PRECISIONS, SUMS, assert_close, get_device, get_matmul, on_gpu, random,
                          unwritten, weights_of_all_kinds)
from test_verdict import instead, is_right
from train_gpt2 import crossentropy_forward, crossentropy_softmax_backward, softmax_forward
from train_llama3 import rope_forward

CONFIG = t.Config(maxT=32, V=50, L=2, NH=2, C=32, Vp=128)
LARGE_STEPS = {**ADAMW_CHECK, "learning_rate": 0.1, "weight_decay": 0.5}  # whose decay shows


def test_losses_gradients_and_updates_are_pytorch_s():
    assert is_right(CONFIG, LARGE_STEPS)


def source(name, old, new, owner=t):
    """Plants a function with a piece of its source exchanged."""
    return owner, name, instead(old, new)(getattr(owner, name))


def other_row(name, **changes):
    """Plants an update by other facts of one tensor."""
    real = t.Muon.update

    def update(optimizer, params, *rest):
        table = params.table | {name: params.table[name]._replace(**changes)}
        real(optimizer, Tensors(**{**vars(params), "table": table}), *rest)

    return t.Muon, "update", update


FAULTS = {
    "eps of every norm": (t, "EPS", 1e-5),
    "attention's scale": (t, "SCALE", 0.1212),
    "the cap": (t, "CAP", 15.1),
    "rotation of the other half": source("rope_table", "frequencies[:turning]",
                                         "frequencies[turning:]"),
    "frequencies as Llama's": source("rope_table", "(turning - 1)", "turning"),
    "no rotation back": (t, "rope_backward", lambda *arguments: None),
    "keys not normalized": source("qknorm_forward", "*= rstd[..., None]",
                                  "*= np.r_[rstd[0, 0, :NH], rstd[0, 0, :NH]]"
                                  ".reshape(-1, 1)"),
    "rotated back first": source("qknorm_backward", "np.vecdot(d, out)",
                                 "np.vecdot(d, np.roll(out, 1, -1))"),
    "queries not scaled back": source("qknorm_backward", "mean / scale**2", "mean"),
    "QK-norm's mean forgotten": source("qknorm_backward", "d -= out", "d -= 0 * out"),
    "the square's 2": source("relu2_backward", "np.float32(2.0)", "np.float32(1.0)"),
    "the cap without its slope": (t, "cap_backward", lambda *arguments: None),
    "the cap's slope, 1 percent": source("cap_backward", "inverse * np.sqrt(inverse)",
                                         "1.01 * inverse**1.5"),
    "the embedding's norm": source("backward_into", "None, s.dbranch", "None, s.dresidual",
                                   t.Speedrun),
    "no gradient of the classifier's bias": source("backward_into", "grads.lm_headb[:V]", "None",
                                                   t.Speedrun),
    "a coefficient of Newton and Schulz": (t, "FEW_TOKENS", (5, (3.4445, -4.7750, 2.0314))),
    "the scale of tall matrices": source("muon_update", "param.shape[0] / param.shape[1]", "0"),
    "momentum without Nesterov": source("muon_update", "* grad + np.float32(momentum) * m",
                                        "* 0 + m"),
    "momentum": (t.Muon, "MOMENTUM", 0.94),
    "decay after the step": source("muon_update", "param -= u",
                                   "param -= u * (1 - learning_rate * weight_decay)"),
    "query, key, value as one matrix": other_row("qkvw", matrices=1),
    "the embedding's rate": other_row("wte", rate=28.5),
    "the biases' rate": other_row("fcb", rate=0.62),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(monkeypatch, fault):
    monkeypatch.setattr(*FAULTS[fault])
    assert not is_right(CONFIG, LARGE_STEPS)


def test_its_model_is_exported_but_not_to_transformers(workplace, run_here, monkeypatch):
    """The head of random weights is 0, and so are most gradients: they agree with PyTorch's."""
    monkeypatch.setitem(t.SIZES, "s2", (1, 1, 32))  # smaller, for speed
    batch = *"--batch_size 2 --sequence_length 8 --num_iterations 1 --vocabulary bytes".split(),
    run_here(export_weights, "--model", "s2", *batch)
    files = "speedrun_s2.bin", "speedrun_s2_debug_state.bin"
    assert test_gpt2.climb(*files)
    config, params = read_model(files[0], t.Speedrun)
    params.lm_head[7] = 0.01  # now all rows but one are 0, as after training on a few tokens
    write_model("two.bin", config, params)
    with pytest.raises(UserError, match="rows of its classifier are equal"):
        test_gpt2.climb("two.bin", files[1])
    run_here(export_weights, "--to_hf", files[0], "hf", fails=["no class of transformers"])


@pytest.mark.parametrize("flags, steps", (("", 5), ("-d 131072", 12), ("--newton_schulz 12", 12),
                                          ("-d 131072 --newton_schulz 5", 5)))
def test_newton_schulz_steps(flags, steps):
    """12, modded-nanogpt's, are more precise; in a small update they would take long."""
    settings = parse_settings(t.SpeedrunSettings, "", flags.split())
    count, coefficients = t.newton_schulz_of(settings)
    assert count == steps
    matrix = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    singular = np.linalg.svd(t.orthogonalize(matrix, count, coefficients))[1]
    assert np.abs(singular - 1.0).max() < 0.06 or count == 5


@pytest.mark.parametrize("dtype, V, NH, tolerance", (
    ("float32", 97, 2, 1e-4), ("bfloat16", 97, 2, 0.2), ("bfloat16", 97, 1, 0.2),
    ("bfloat16", 50257, 2, 0.3),
    ("fp8", 97, 2, 0.8), ("fp8", 97, 1, 0.8), ("fp8", 50257, 2, 0.8)))
def test_on_a_gpu(gpu, dtype, V, NH, tolerance):
    """Loss, gradients and an update beside NumPy's, over the update's or the gradient's length,
    buffers NaN before. In bfloat16, five Newton-Schulz steps make 0.1 of rounding."""
    need({"bfloat16": "bf16", "fp8": "cuda-fp8"}.get(dtype, dtype))
    config = t.Config(64, V, 2, NH, 128, padded(V))
    rng = np.random.default_rng(0)
    B, T = (3, 33)
    params = allocate(t.parameter_table(config))
    for name, row in params.table.items():
        getattr(params, name)[...] = rng.normal(row.ones, 1.0 if name == "wte" else 0.1, row.shape)
    flat(params).view(np.uint32)[...] &= 0xFFFF0000  # bfloat16 numbers
    without_padding(config, params, V)
    inputs, targets = rng.integers(0, V, (2, B, T)).astype(np.int32)
    params.lm_headb[3] = 14.0
    targets[:, ::2] = 3  # probable, and often right
    ours = make_model(B, T, 1, config, views(params.table, params.buffer.copy()))
    loss = ours.forward(inputs, targets)
    ours.backward()
    settings = cuda.Speedrun.Settings(B=B, T=T, dtype=dtype, tf32=0, float32_grads=1, eps=1e-3,
                                      graph=0, recompute=0)
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
        assert (np.linalg.norm(grad - expected_grad) <= tolerance / 4
                * np.linalg.norm(expected_grad)), name
        assert (np.linalg.norm(after - expected) <= tolerance
                * np.linalg.norm(expected - before)), name


@pytest.mark.parametrize("kind", ("tf32", "bf16", "bf16, portable", "fp8"))
@pytest.mark.parametrize("V, N, sm_count",
                         ((97, 3, None), (257, 50, 1), (8193, 97, 2), (50257, 291, None),
                           (50257, 61, 4), (131072, 97, 12)))
def test_classifier(gpu, monkeypatch, kind, V, N, sm_count):
    """Losses, dlogits (in FP8, one of two neighbors) and dbias's partial sums; logits up to where
    the cap is flat."""
    precision, *portable = kind.split(", ")
    need({"fp8": "cuda-fp8"}.get(precision, precision))
    precision = FP8 if precision == "fp8" else PRECISIONS[precision]
    device = get_device(gpu, t.Config(1024, V, 1, 1, 64, padded(V)), precision, bool(portable))
    monkeypatch.setattr(device, "sm_count", sm_count or device.sm_count)
    Vp = padded(V)
    e = precision.dtype
    dloss = DLOGITS_SCALE if precision.fp8 else 1.0 / N
    logits = random(N, Vp, seed=1, spread=10, dtype=e)
    clusters = max(1, device.sm_count // device.geometry.CAPPED_SMS)
    targets = np.random.default_rng(V).integers(0, V, N, dtype=np.int32)
    targets[0] = V - 1
    targets[-1] = 0
    y = logits[:, :V].astype(np.float64)
    t.cap_forward(y, y.size)
    probs = np.empty((1, N, V))
    expected = np.empty((1, N))
    dlogits = np.empty((1, N, V))
    softmax_forward(probs, y[None], 1, N, V)
    crossentropy_forward(expected, y[None], probs, targets[None], 1, N, V)
    weights = weights_of_all_kinds(N)
    crossentropy_softmax_backward(dlogits, dloss * weights.astype(np.float64)[None], probs,
                                  targets[None], 1, N, V)
    t.cap_backward(dlogits, y, y.size)
    logits[:, V:] = np.nan  # whatever stands in the padding has no part in it
    for write in (0, 1):
        losses = unwritten(N)
        got = on_gpu(logits, dtype=e)
        partials = unwritten(clusters, Vp)
        cuda.classifier(device, losses, got, partials, on_gpu(targets), on_gpu(weights), dloss, 0.5,
                        write, N)
        assert_close(SUMS, losses=(losses, expected[0]))
        if not write:
            assert np.array_equal(to_float32(got), logits, equal_nan=True)
    # bfloat16 rounds before the sums
    scale = np.abs(dlogits[0]).sum(0).max() if portable else np.abs(dlogits).max()
    error = np.abs(partials.get().astype(np.float64).sum(0)[:V] - 0.5 * dlogits[0].sum(0)).max()
    assert (error <= (BF16 if precision.bf16 else 50 * SUMS) * scale
            and not partials.get()[:, V:].any())
    if not precision.fp8:
        assert_close(SUMS, dlogits=(got[:, :V], dlogits[0]))
        assert not to_float32(got)[:, V:].any(), "the padding's gradient is 0"
    else:
        rounded = dlogits_of(got)
        step = np.ldexp(1.0, np.maximum(np.frexp(dlogits[0])[1] - 1, -14) - 2)
        assert ((np.abs(rounded[:, :V] - dlogits[0]) <= step * (1 + 2.0**-6)).all()
                and not rounded[:, V:].any())
    got[:] = on_gpu(logits, dtype=e)
    again = partials.copy()
    cuda.classifier(device, losses, got, partials, on_gpu(targets), on_gpu(weights), dloss, 0.5, 1,
                    N)
    assert again.get().tobytes() == partials.get().tobytes(), "the same bits twice"


@pytest.mark.parametrize("kind", ("bf16", "fp8"))
@pytest.mark.parametrize("NH, HS", ((1, 64), (3, 128), (5, 16)))
def test_matmul_with_qknorm(gpu, kind, NH, HS):
    """In FP8 one kernel, whose tiles have the last rows of a sequence and the first ones of the
    next."""
    need({"fp8": "cuda-fp8"}.get(kind, kind))
    B, T = (3, 97)
    C = NH * HS
    config = t.Config(1024, 131, 1, NH, C, 256)
    bias = random(3 * C, seed=2, dtype="bfloat16")
    e = "bfloat16"
    matmul = get_matmul(gpu, config, FP8 if kind == "fp8" else PRECISIONS[kind])
    qkv = unwritten(B, T, 3 * C, dtype=e)
    rstd = unwritten(B, T, 2 * NH)
    rope = t.rope_table(config, T)
    on_gpu_rope = on_gpu(np.stack(rope, axis=-1))
    bias_on_gpu = on_gpu(bias, dtype=e)
    if kind == "fp8":
        inp, inp64 = e4m3(B * T, C, seed=1)
        weight, weight64 = e4m3(3 * C, C, seed=2)
        table = t.parameter_table(config, e)
        scales = on_gpu(np.float32([8, 16]))
        params = views(table, matmul.device.upload(np.zeros(table_bytes(table), np.uint8)))
        fp8 = Fp8(matmul, params, operands_on_gpu(table, 16))
        fp8.multiply_qknorm(qkv.reshape(B * T, -1), rstd, inp, scales[:1], weight, scales[1:],
                            bias_on_gpu, on_gpu_rope, t.SCALE * HS**0.5, t.EPS, T)
        product = inp64 @ weight64.T / 128.0
    else:
        inp = random(B, T, C, dtype=e)
        weight = random(3 * C, C, seed=1, dtype=e)
        linear = Linear(matmul, on_gpu(weight, dtype=e), bias_on_gpu)
        cuda.matmul_qknorm_forward(matmul.device, linear, qkv, rstd, on_gpu(inp, dtype=e),
                                   on_gpu_rope, B, T, NH, HS)
        product = inp.reshape(-1, C).astype(np.float64) @ weight.T
    expected = (product + bias).reshape(B, T, 3 * C)
    expected_rstd = np.empty((B, T, 2 * NH))
    t.qknorm_forward(expected, expected_rstd, B, T, NH, HS)
    rope_forward(expected, *rope, B, T, 2 * NH, HS)
    for what, columns in (("queries", slice(C)), ("keys", slice(C, 2 * C)),
                          ("values", slice(2 * C, None))):
        assert_close(2 * BF16, rstd=(rstd, expected_rstd),
                     **{what: (qkv[..., columns], expected[..., columns])})
