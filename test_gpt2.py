"""
Parity with PyTorch, tensor by tensor: is the hand-written backward pass right, to the last digit that float32 holds?

    python test_gpt2.py                       # gpt2_124M.bin and its debug state, from export_weights.py
    pytest test_gpt2.py                       # random small models, made on the spot
    pytest test_gpt2.py -m large              # random GPT-2 124M

The ladder: logits, loss, 16 gradients, the losses of ten training steps, the same run twice. The first red row says
where to look. Each row compares with PyTorch in float64; its error may be at most twice that of PyTorch in float32
(whose results the debug state holds), and one unit in the last place where PyTorch happens to hit it.

Ten steps of Adam multiply the rounding of the first forward pass by a hundred, and whether the errors then add up or
cancel is luck. The error of PyTorch's losses in float32 is therefore the worst of four runs: the recorded one, and
three with the model's channels in another order, which changes nothing but the rounding.

bfloat16 is compared with PyTorch in bfloat16, all through and under autocast, whichever has the smaller error; all
start from the rounded weights.
"""

import argparse
import contextlib
import functools
import gc
import io
import sys
import zlib

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np
import pytest
import torch

import train_gpt2
import train_gpt2_cuda as cuda
from dev.compare_losses import reorder_channels
from export_weights import (ADAMW, VOCABULARIES, collect_gradients, make_debug_state, overfit, random_model,
                            to_reference)
from llmc.checkpoint import read_debug_state, read_model, write_debug_state, write_model
from llmc.compiler import Cache
from llmc.device import copy_to_gpu, cp, open_gpu, to_float32
from llmc.errors import UserError, run_main
from llmc.settings import Settings
from llmc.tensors import bf16_bits, bf16_to_float32, check_tensor, flat, views
from train_gpt2 import GPT2, parameter_table

# ----------------------------------------------------------------------------------------------------------------------
# three runs on the debug state's batch; each returns {row name: array}


def run_reference(config, params, x, y, steps, settings, dtype, where="cpu", autocast=False):
    """PyTorch in the given dtype, on the CPU or a GPU; autocast: in bfloat16 where PyTorch finds that safe."""
    model, rows = to_reference(config, params, dtype=dtype).to(where), {}
    wide = torch.promote_types(dtype, torch.float32)  # NumPy has no bfloat16

    def capture(logits, loss):
        rows["logits"], rows["loss"] = logits.detach().to("cpu", wide).numpy(), np.array(loss.item())
        grads = collect_gradients(config, model, str(wide).removeprefix("torch."))
        rows.update({f"d{name}": getattr(grads, name) for name in grads.table})

    x, y = (torch.from_numpy(ids).long().to(where) for ids in (x, y))
    losses = overfit(model, x, y, steps, settings, capture=capture,
                     autocast=functools.partial(torch.autocast, where, torch.bfloat16, enabled=autocast))
    return {**rows, "losses": np.array(losses)}


def run_recorded(state):
    """What the debug state says of PyTorch in float32."""
    grads = {f"d{name}": getattr(state.grads, name) for name in state.grads.table}
    return {"logits": state.logits, "loss": np.array(state.loss), **grads, "losses": state.losses}


def run_numpy(config, params, x, y, steps, settings):
    """train_gpt2.py, from a copy of the weights; the last row is the weights after the last step."""
    params = views(params.table, params.buffer.copy())
    model = GPT2(config, params)
    model.allocate_activations(*x.shape)
    model.allocate_training(*x.shape)
    settings = Settings(**settings)
    rows, losses = {}, []
    for step in range(steps):
        losses.append(model.forward(x, y))
        if step == 0:
            rows["logits"], rows["loss"] = model.acts.logits.copy(), np.array(losses[0])
        model.backward()
        if step == 0:
            grads = views(model.grads.table, model.grads.buffer.copy())
            rows.update({f"d{name}": getattr(grads, name) for name in grads.table})
        model.update(settings, settings.learning_rate, step + 1)
    return {**rows, "losses": np.array(losses), "params": flat(params)}


def run_cuda(config, params, x, y, steps, settings, dtype="float32", tf32=1, arch="native", matmul="auto"):
    """train_gpt2_cuda.py; the last row is the weights after the last step."""
    (B, T), gpu = x.shape, open_gpu(arch)
    settings = cuda.CudaSettings(B=B, T=T, steps=steps, dtype=dtype, tf32=tf32, matmul=matmul, **settings)
    with contextlib.redirect_stdout(io.StringIO()):  # its report of allocations
        trainer = cuda.open_trainer(gpu, config, params, cuda.settle(settings, gpu.arch))
        trainer.prepare()
    trainer.forward(x, y)
    rows, losses = {"logits": to_float32(trainer.model.activations(B, T).logits[..., : config.V])}, []
    for step in range(steps):
        losses.append(trainer.end_step(trainer.begin_step([(x, y)], settings.learning_rate))[0])
        if step == 0:
            grads = trainer.to_host(trainer.grads)
            rows["loss"] = np.array(losses[0])
            rows.update({f"d{name}": getattr(grads, name) for name in grads.table})
    return {**rows, "losses": np.array(losses), "params": flat(trainer.to_host(trainer.params))}


BACKENDS = {
    "numpy": run_numpy,
    "cuda": functools.partial(run_cuda, tf32=0),
    "cuda-tf32": run_cuda,
    "cuda-bf16": functools.partial(run_cuda, dtype="bfloat16"),
    "cuda-bf16-sm_80": functools.partial(run_cuda, dtype="bfloat16", arch="sm_80"),
    "cuda-kernels": functools.partial(run_cuda, tf32=0, matmul="kernels"),  # without cuBLASLt
    "cuda-tf32-kernels": functools.partial(run_cuda, matmul="kernels"),
    "cuda-bf16-kernels": functools.partial(run_cuda, dtype="bfloat16", matmul="kernels"),
    "cuda-bf16-sm_80-kernels": functools.partial(run_cuda, dtype="bfloat16", arch="sm_80", matmul="kernels"),
}


# ----------------------------------------------------------------------------------------------------------------------
# the ladder


def own_error(recorded, exact, bits):
    """The largest error of a result, and at least 2^-bits of the largest value: half a unit in the last place, with 24
    bits of float32's, 9 of bfloat16's, for what is just below a power of 2. Nothing that is stored so comes reliably
    closer."""
    return max(float(np.abs(recorded - exact).max()), float(np.abs(exact).max()) * 2.0**-bits)


def climb(model_path, state_path, backend="numpy"):
    """Print one row a tensor; True when all are within tolerance and a second run repeats the first bit for bit."""
    config, params = read_model(model_path, parameter_table)
    state = read_debug_state(state_path, config, params)
    x, y, settings = state.x, state.y, state.optimizer or ADAMW
    if state.losses is None:  # written by llm.c's own script
        print("no training losses in the debug state: computing them with PyTorch in float32")
        state.losses = run_reference(config, params, x, y, 10, settings, torch.float32)["losses"]
    steps = len(state.losses)
    print(f"{model_path}: {config.describe()}, B={x.shape[0]} T={x.shape[1]}, backend {backend}")
    torch.backends.cuda.matmul.allow_tf32 = "tf32" in backend
    where = "cpu" if backend == "numpy" else "cuda"

    if "bf16" in backend:  # all start from weights that bfloat16 has
        params = views(params.table, bf16_to_float32(bf16_bits(flat(params))).view(np.uint8))

    def reference(params, dtype, autocast=False):
        return run_reference(config, params, x, y, steps, settings, dtype, where, autocast)

    exact, okay = reference(params, torch.float64), True
    models = [reorder_channels(config, params, seed) for seed in range(3)]
    rivals = [{}, {"dtype": torch.bfloat16}] if "bf16" in backend else [{}]
    own = []  # {row: error} of each rival
    for rival in rivals:
        options = {"dtype": torch.float32, "autocast": "bf16" in backend, **rival}
        run = run_recorded(state) if backend == "numpy" else reference(params, **options)
        errors = {}
        for name, tensor in exact.items():
            bits = 9 if "bf16" in backend and name not in ("loss", "losses") else 24
            errors[name] = own_error(run[name], tensor, bits)
        for model in models:
            losses = reference(model, **options)["losses"]
            errors["losses"] = max(errors["losses"], own_error(losses, exact["losses"], 24))
        own.append(errors)
    for name, tensor in exact.items():
        if backend == "numpy" and not own[0][name] <= 1e-4 * np.abs(tensor).max():
            print(f"{name:<12} the debug state itself has an error of {own[0][name]:.3e}: was it computed in float32,"
                  " from these very weights and not their bfloat16 copy?  FAIL")
            okay = False
    errors = {name: min(rival[name] for rival in own) for name in exact}
    got = BACKENDS[backend](config, params, x, y, steps, settings)
    for name, tensor in exact.items():
        okay &= check_tensor(name, got[name], tensor, 2.0 * errors[name])
    again = BACKENDS[backend](config, params, x, y, steps, settings)
    same = all(np.array_equal(got[name], again[name]) for name in got)
    print(f"{'run twice':<12} {'bit for bit the same' if same else 'differs'}  {'ok' if same else 'FAIL'}")
    return okay and same


def write_pair(directory, depth, vocabulary, B, T, steps=10):
    """Write a random model and its debug state on random tokens; returns their paths."""
    config, params = random_model(depth, VOCABULARIES[vocabulary])
    tokens = np.random.default_rng(1).integers(0, config.V, B * T + 1, dtype=np.int32)
    x, y = tokens[:-1].reshape(B, T), tokens[1:].reshape(B, T)
    paths = str(directory / "model.bin"), str(directory / "debug_state.bin")
    write_model(paths[0], config, params)
    write_debug_state(paths[1], config, make_debug_state(config, params, x, y, steps)[0])
    return paths


def require(backend):
    """Raises UserError where this backend cannot run."""
    if backend != "numpy":
        cuda.settle(cuda.CudaSettings(dtype="bfloat16" if "bf16" in backend else "float32"), open_gpu().arch)
        if not torch.cuda.is_available():
            raise UserError("PyTorch has no CUDA here, with which a GPU's results are compared: pip install torch with"
                            " CUDA")


def need(backend):
    """Skip the test where this backend cannot run."""
    try:
        require(backend)
    except UserError as error:
        pytest.skip(str(error))


all_backends = pytest.mark.parametrize("backend", [
    pytest.param(backend, marks=pytest.mark.gpu if "cuda" in backend else ()) for backend in BACKENDS])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """pair(vocabulary, B, T, steps): paths of a model of two layers and its debug state, written once. PyTorch's runs
    on it are computed once, too."""
    with pytest.MonkeyPatch.context() as patch:
        compute, known = run_reference, {}

        def run_once(config, params, x, y, steps, settings, dtype, where="cpu", autocast=False):
            tf32 = torch.backends.cuda.matmul.allow_tf32
            key = zlib.crc32(params.buffer), x.tobytes(), dtype, where, autocast, tf32
            if key not in known:
                known[key] = compute(config, params, x, y, steps, settings, dtype, where, autocast)
            return known[key]

        patch.setattr(sys.modules[__name__], "run_reference", run_once)
        yield functools.cache(lambda *sizes: write_pair(tmp_path_factory.mktemp("pair"), 2, *sizes))


@all_backends
@pytest.mark.parametrize("vocabulary, B, T, steps", (("bytes", 4, 64, 10), ("gpt2", 3, 17, 3)))
def test_small_models_agree_with_pytorch(pair, vocabulary, B, T, steps, backend):
    need(backend)
    assert climb(*pair(vocabulary, B, T, steps), backend)


@pytest.mark.large
@all_backends
def test_gpt2_124M_agrees_with_pytorch(tmp_path, backend):
    need(backend)
    assert climb(*write_pair(tmp_path, 12, "gpt2", 4, 64), backend)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("dtype, matmul", (("float32", "auto"), ("float32", "kernels"), ("bfloat16", "auto")))
@pytest.mark.parametrize("B", (64, 96))
def test_indices_beyond_32_bits(B, dtype, matmul):
    """One forward and backward pass where B*T*Vp passes 2^31 (B=64) and 2^32 (B=96): of a batch of B equal rows, every
    row's loss is the same to the bit, and the gradients are those of one row."""
    need("cuda")
    T, (config, params), gpu = 1024, random_model(12, VOCABULARIES["gpt2"]), open_gpu()
    tokens = np.random.default_rng(0).integers(0, config.V, T + 1, dtype=np.int32)
    precision = cuda.Precision(dtype)
    (device, matmuls), results = cuda.open_device(gpu, config, precision, Cache(), matmul), []
    for rows in (B, 1):
        gc.collect()
        cp.get_default_memory_pool().free_all_blocks()  # of the model before
        try:
            settings = cuda.settle(cuda.CudaSettings(B=rows, T=T, dtype=dtype, matmul=matmul), gpu.arch)
            trainer = cuda.Trainer(cuda.GPT2, config, settings, matmuls, params)
        except UserError as error:
            pytest.skip(str(error))
        trainer.stage(0, [(np.tile(tokens[:-1], (rows, 1)), np.tile(tokens[1:], (rows, 1)))], 0.0)
        with device.stream:
            for buffer in (*trainer.model.buffers.values(), trainer.grads.buffer):
                buffer.data.memset_async(0xFF, buffer.nbytes)  # NaN, in every dtype
            copy_to_gpu(trainer.batch.buffer, trainer.staged[0].buffer)
            trainer.micro_step(0)
            results.append((trainer.model.activations(rows, T).losses.get(), trainer.to_host(trainer.grads)))
        del trainer
    (losses, grads), (_, expected) = results
    assert np.isfinite(losses).all() and (losses == losses[0]).all()
    for name in grads.table:
        reference = getattr(expected, name)
        tolerance = (5e-2 if precision.bf16 else 5e-3) * float(np.abs(reference).max())
        assert check_tensor(f"d{name}", getattr(grads, name), reference, tolerance)


@pytest.fixture
def run_here(monkeypatch, capsys):
    """run_here(paths): (exit status, output lines) of this file run as a program."""

    def run(paths):
        monkeypatch.setattr(sys, "argv", ["test_gpt2.py", "--model", paths[0], "--state", paths[1]])
        return main(), capsys.readouterr().out.splitlines()

    return run


def test_the_program_fails_when_a_gradient_is_wrong(pair, run_here, monkeypatch):
    """A factor of 1 + 1e-4 in GELU's backward pass turns red what lies below it, and no more; the exit status is 1."""
    right, paths = train_gpt2.gelu_backward, pair("bytes", 4, 64, 10)

    def wrong(dinp, inp, dout, N):
        right(dinp, inp, dout, N)
        dinp *= np.float32(1.0001)

    status, lines = run_here(paths)
    assert status == 0 and lines[-1] == "overall okay: 1" and not any("FAIL" in line for line in lines)
    monkeypatch.setattr(train_gpt2, "gelu_backward", wrong)
    status, lines = run_here(paths)
    assert status == 1 and lines[-1] == "overall okay: 0"
    red = {line.split()[0] for line in lines if line.endswith("FAIL")}
    assert {"dfcb", "dfcw"} <= red and not {"logits", "loss", "dlnfw", "dlnfb"} & red


def test_a_debug_state_full_of_errors_does_not_widen_the_tolerance(pair, run_here, tmp_path):
    model, state_path = pair("bytes", 4, 64, 10)
    config, params = read_model(model, parameter_table)
    state = read_debug_state(state_path, config, params)
    state.grads.fcb[0, 0] += 1.0
    write_debug_state(tmp_path / "state.bin", config, state)
    status, lines = run_here((model, str(tmp_path / "state.bin")))
    assert status == 1 and any(line.startswith("dfcb ") and "debug state itself" in line for line in lines)


def test_the_program_without_its_files(tmp_path, run_here):
    with pytest.raises(UserError, match="model.bin: no such file; .*export_weights.py"):
        run_here((str(tmp_path / "model.bin"), str(tmp_path / "state.bin")))


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--model", default="gpt2_124M.bin", help="model checkpoint")
    parser.add_argument("--state", default="gpt2_124M_debug_state.bin", help="its debug state")
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="numpy", help="the trainer under test")
    args = parser.parse_args()
    require(args.backend)
    okay = climb(args.model, args.state, args.backend)
    print(f"overall okay: {int(okay)}")
    return 0 if okay else 1


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    run_main(main)
