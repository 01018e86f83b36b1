"""Parity with PyTorch, by test_gpt2.py, of small models with random weights, made on the spot; with
-m large of GPT-2 124M; and that its verdict fails where it should."""

import functools
import gc
import sys
import zlib

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np
import pytest
import torch

import test_gpt2
import train_gpt2
import train_gpt2_cuda as cuda
from export_weights import VOCABULARIES
from llmc.api import architecture_of
from llmc.checkpoint import read_model, write_model
from llmc.debugstate import check_tensor, read_debug_state, write_debug_state
from llmc.errors import UserError
from llmc.gpu.device import copy_to_gpu, cp, open_gpu
from llmc.gpu.precision import Precision
from llmc.gpu.trainer import Trainer, open_device
from reference import make_debug_state
from test_gpt2 import SMOOTH, Yardstick, climb, require
from backends import BACKENDS, NumpyRun, STEPS, replay
from train_gpt2 import GPT2, random_model, random_params
from train_llama3 import Llama3
from train_speedrun import Speedrun


def untied_llama():
    """(config, params): its classifier has a weight of its own, its heads more channels than the
    residual stream."""
    config = Llama3.Config(64, 250, 2, 6, 2, 96, 256, 200, 32, tied=0, factor=8, original=16)
    return config, random_params(Llama3.parameter_table(config), config.V, config.L, seed=42)


def write_pair(directory, name, vocabulary, B, T):
    """Write a random model and its debug state on random tokens; returns their paths."""
    if name == "untied":
        config, params = untied_llama()
    elif name in Speedrun.SIZES:  # its own random weights are 0 where gradients would be 0, too
        config = Speedrun.random_model(name, VOCABULARIES[vocabulary])[0]
        params = random_params(Speedrun.parameter_table(config), config.V, config.L, seed=42)
    else:
        config, params = architecture_of(name).random_model(name, VOCABULARIES[vocabulary])
    tokens = np.random.default_rng(1).integers(0, config.V, B * T + 1, dtype=np.int32)
    x = tokens[:-1].reshape(B, T)
    y = tokens[1:].reshape(B, T)
    paths = str(directory / "model.bin"), str(directory / "debug_state.bin")
    write_model(paths[0], config, params)
    write_debug_state(paths[1], config, make_debug_state(config, params, x, y, STEPS)[0],
                      config.STATES[-1])
    return paths


def need(backend):
    """Skip the test if this backend cannot run here."""
    try:
        require(backend)
    except UserError as error:
        pytest.skip(str(error))


all_backends = pytest.mark.parametrize("backend", [
    pytest.param(backend, marks=pytest.mark.gpu if "cuda" in backend else ())
    for backend in BACKENDS])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """pair(name, vocabulary, B, T) -> paths of a random model and its debug state, written once;
    its Yardstick is computed once, too."""
    compute = Yardstick
    known = {}

    def compute_once(config, params, x, y, precision):
        key = zlib.crc32(params.buffer), x.tobytes(), precision
        if key not in known:
            known[key] = compute(config, params, x, y, precision)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_gpt2, "Yardstick", compute_once)
        yield functools.cache(lambda *sizes: write_pair(tmp_path_factory.mktemp("pair"), *sizes))


def test_a_small_speed_run_agrees_with_pytorch(pair, tmp_path):
    """Not one whose classifier has equal rows; but zeros alone, as in a new one, are right: that is
    a test of export_weights.py's files."""
    model, state = pair("s2", "bytes", 2, 33)
    assert climb(model, state)
    config, params = read_model(model, Speedrun)
    params.lm_head[: config.V] = params.lm_head[0]
    write_model(tmp_path / "equal.bin", config, params)
    with pytest.raises(UserError, match="classifier are equal"):
        climb(tmp_path / "equal.bin", state)


@all_backends
@pytest.mark.parametrize("vocabulary, B, T", (
    ("bytes", 2, 33), pytest.param("gpt2", 2, 9, marks=pytest.mark.large)))
def test_small_models_agree_with_pytorch(pair, vocabulary, B, T, backend):
    need(backend)
    assert climb(*pair("d2", vocabulary, B, T), backend)


def test_a_model_whose_logits_are_far_from_0():
    """As a trained one's are: their sums drift."""
    config = GPT2.Config(64, 257, 1, 2, 192, 384)
    params = random_params(GPT2.parameter_table(config), config.V, config.L, seed=42)
    params.lnfb.fill(1.0)
    params.wte[: config.V] -= 0.03
    x, y = np.random.default_rng(1).integers(0, config.V, (2, 4, 33), dtype=np.int32)
    assert Yardstick(config, params, x, y,
                     "numpy").judge(replay(NumpyRun(config, params, x, y, SMOOTH)))


@pytest.mark.gpu
@pytest.mark.parametrize("name, backend", [
    (name, backend) for name in ("l2", "untied") for backend in BACKENDS
    # F=200: FP8 expects a multiple of 16
    if "cuda" in backend and (name, backend) != ("untied", "cuda-fp8")])
def test_small_llamas_agree_with_pytorch(pair, name, backend):
    """In NumPy, they do in tests/test_llama.py."""
    need(backend)
    assert climb(*pair(name, "bytes", 2, 33), backend)


@pytest.mark.large
@all_backends
def test_gpt2_124M_agrees_with_pytorch(tmp_path, backend):
    need(backend)
    assert climb(*write_pair(tmp_path, "d12", "gpt2", 4, 64), backend)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("dtype, matmul",
                         (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "kernels")))
@pytest.mark.parametrize("B", (64, 96))
def test_indices_beyond_32_bits(B, dtype, matmul):
    """One forward and backward pass with B*T*Vp beyond 2^31 (B=64) and 2^32 (B=96), on B equal
    rows: their losses are the same bit for bit, and the gradients are those of one row."""
    need("cuda")
    T = 1024
    config, params = random_model("d12", VOCABULARIES["gpt2"])
    gpu = open_gpu()
    tokens = np.random.default_rng(0).integers(0, config.V, T + 1, dtype=np.int32)
    precision = Precision(dtype)
    device, matmuls = open_device(cuda.GPT2, gpu, config, precision, matmul)
    results = []
    for rows in (B, 1):
        gc.collect()
        cp.get_default_memory_pool().free_all_blocks()  # from the previous model
        try:
            settings = cuda.resolve_auto(cuda.CudaSettings(B=rows, T=T, dtype=dtype, matmul=matmul),
                                         gpu.arch)
            trainer = Trainer(cuda.GPT2, config, settings, matmuls, params)
        except UserError as error:
            pytest.skip(str(error))
        trainer.stage(0, [(np.tile(tokens[:-1], (rows, 1)), np.tile(tokens[1:], (rows, 1)))], 0.0)
        with device.stream:
            for buffer in (*trainer.model.buffers.values(), trainer.grads.buffer):
                buffer.data.memset_async(0xFF, buffer.nbytes)  # NaN, in every dtype
            copy_to_gpu(trainer.batch.buffer, trainer.staged[0].buffer)
            trainer.model.micro_step(trainer, 0)
            results.append((trainer.model.activations(rows, T).losses.get(),
                            trainer.to_host(trainer.grads)))
        del trainer
    (losses, grads), (_, expected) = results
    assert np.isfinite(losses).all() and (losses == losses[0]).all()
    for name in grads.table:
        reference = getattr(expected, name)
        tolerance = (5e-2 if precision.bf16 else 5e-3) * float(np.abs(reference).max())
        assert check_tensor(f"d{name}", getattr(grads, name), reference, tolerance)


@pytest.fixture
def run_here(monkeypatch, capsys):
    """run_here(paths) -> (exit status, output lines) of test_gpt2.py."""

    def run(paths):
        monkeypatch.setattr(sys, "argv", ["test_gpt2.py", "--model", paths[0], "--state", paths[1]])
        return test_gpt2.main(), capsys.readouterr().out.splitlines()

    return run


def test_the_program_fails_when_a_gradient_is_wrong(pair, run_here, monkeypatch):
    """A factor of 1 + 1e-4 in GELU's backward pass fails the gradients after it, and only those;
    exit status 1."""
    right = train_gpt2.gelu_backward
    paths = pair("d2", "bytes", 2, 33)

    def wrong(dinp, inp, dout, N):
        right(dinp, inp, dout, N)
        dinp *= np.float32(1.0001)

    status, lines = run_here(paths)
    assert (status == 0 and lines[-1] == "overall okay: 1"
            and not any("FAIL" in line for line in lines))
    monkeypatch.setattr(train_gpt2, "gelu_backward", wrong)
    status, lines = run_here(paths)
    assert status == 1 and lines[-1] == "overall okay: 0"
    red = {line.split()[0].split("[")[0] for line in lines if line.endswith("FAIL")}
    assert {"dfcb", "dfcw"} <= red and not {"logits", "dlnfw", "dlnfb"} & red


@pytest.mark.parametrize("row, error", (("dfcb[0]", 1.0), ("logits", np.nan)))
def test_a_debug_state_full_of_errors_does_not_widen_the_tolerance(pair, run_here, tmp_path, row,
                                                                   error):
    model, state_path = pair("d2", "bytes", 2, 33)
    config, params = read_model(model, GPT2)
    state = read_debug_state(state_path, config, params)
    tensor = state.logits if row == "logits" else state.grads.fcb
    tensor[0, 0] += error
    write_debug_state(tmp_path / "state.bin", config, state)
    status, lines = run_here((model, str(tmp_path / "state.bin")))
    assert status == 1 and any(line.startswith(f"{row} ") and "debug state itself" in line
                               for line in lines)


def test_out_of_memory_is_a_line(pair, monkeypatch, run_here):
    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(test_gpt2, "Yardstick", no_memory)
    with pytest.raises(UserError,
                       match="PyTorch: CUDA out of memory. Tried to allocate 2.00 GiB.$"):
        run_here(pair("d2", "bytes", 2, 33))


def test_the_program_without_its_files(tmp_path, run_here):
    with pytest.raises(UserError, match="model.bin: no such file; .*export_weights.py"):
        run_here((str(tmp_path / "model.bin"), str(tmp_path / "state.bin")))
