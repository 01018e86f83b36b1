"""
Parity with PyTorch, tensor by tensor: is the hand-written backward pass right to the last digits?

    python test_gpt2.py                       # gpt2_124M.bin and its debug state; --model llama3_l4.bin: of Llama 3
    python test_gpt2.py --backend cuda-bf16   # of the page for GPUs; BACKENDS has more
    pytest test_gpt2.py                       # random small models, made on the spot
    pytest test_gpt2.py -m large              # random GPT-2 124M

The ladder: logits, losses, the 16 gradients in the order of the backward pass, the losses of the next steps, the same
run twice, AdamW. The first row that fails says where to look.

The tolerances, and why:
    logits, loss, gradients   FACTOR times the error that rounding alone causes with this model and batch, measured by
                              dev/rounding.py with random errors in float64. The bound on single elements catches one
                              large error; that on the 2-norm, small errors everywhere: in a large tensor of at least
                              100 tokens it hardly varies, and NORM_FACTOR is enough. dev/verdict.py checks on randomly
                              drawn models that a correct trainer never fails.
                              Losses are compared position by position: a few noisy runs say little about the error of
                              their mean, a single number.
    losses                    the same, after one update and after two. Rounding errors grow from step to step; from
                              the step where they reach 1 percent of the loss, losses are not compared.
    state's losses            of up to ten updates with AdamW's usual eps, beside the trainer's: STATE_LOSSES, tens of
                              times what rounding causes in random models.
    adamw                     a few roundings: the update is recomputed in float64 from the trainer's own gradients and
                              moments, with weight decay and clipping.
"""

import argparse
import contextlib
import ctypes
import functools
import gc
import io
import math
import sys
import zlib

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np

try:
    import pytest
    import torch
    from torch.nn.functional import cross_entropy
except ImportError as error:
    sys.exit(f"test_gpt2.py: error: {error.name} cannot be imported: pip install -r requirements-test.txt")

import train_gpt2
import train_gpt2_cuda as cuda
from dev.rounding import FLOAT32, ROUNDOFFS, NoisyGPT2, NoisyLlama, check_tensor
from export_weights import (ADAMW, VOCABULARIES, collect_gradients, make_debug_state, overfit, to_reference,
                            torch_errors_as_lines)
from llmc.checkpoint import read_model, write_model
from llmc.debugstate import read_debug_state, write_debug_state
from llmc.gpu.device import copy_to_gpu, cp, gpu_errors_as_lines, open_gpu, to_float32
from llmc.errors import UserError, run_main
from llmc.files import chunks, export_hint, open_input
from llmc.gpu.precision import Precision
from llmc.settings import Settings
from llmc.tensors import bf16_bits, bf16_to_float32, flat, views
from llmc.gpu.trainer import Trainer, open_device, open_trainer
from model import architecture_of, load_model, on_gpu
from train_gpt2 import GPT2, random_model, random_params
from train_llama3 import Llama3

FACTOR, NORM_FACTOR = 6.0, 2.8
STEPS = 3
STATE_LOSSES = {"numpy": 1e-4, "float32": 1e-4, "tf32": 1e-3, "bf16": 1e-2, "fp8": 2e-2}  # relative; see above
LARGE = 10**8  # parameters; with more, two noisy runs already average over enough elements
CHAOS = 1e-2  # fraction of the losses: see above
# With the usual eps of 1e-8, the first updates are +-learning_rate, even where a gradient is nearly 0 and rounding
# decides its sign: the losses after them would tell little.
SMOOTH = {**ADAMW, "eps": 1e-3}
# Settings for the row adamw: they take every branch, and the decay is large enough to show.
ADAMW_CHECK = dict(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip=0.01)

# ----------------------------------------------------------------------------------------------------------------------
# the trainers under test, and PyTorch


def model_of(config):
    """The class of the page that a Config is from."""
    return GPT2 if isinstance(config, GPT2.Config) else Llama3


class NumpyRun:
    """train_gpt2.py, or train_llama3.py, on one batch, from a copy of the weights."""

    def __init__(self, config, params, x, y, settings):
        self.x, self.y, self.settings, self.steps = x, y, Settings(B=x.shape[0], T=x.shape[1], **settings), 0
        self.model = model_of(config)(config, views(params.table, params.buffer.copy()))
        self.model.allocate_activations(*x.shape)
        self.model.allocate_training(*x.shape)

    def next_batch(self):
        return self.x, self.y

    def logits(self):
        self.model.forward(self.x, self.y)
        return self.model.acts.logits.copy()

    def step(self):
        """Make one update; returns the mean loss before it and the losses (B, T)."""
        self.steps += 1
        loss = train_gpt2.train_step(self.model, self, self.settings, self.steps - 1).loss
        return loss, self.model.acts.losses.copy()

    def copy(self, name):
        """Return a copy of params, m, v or the last step's grads, by name: float32 Tensors."""
        tensors = getattr(self.model, name)
        return views(tensors.table, tensors.buffer.copy())


class CudaRun:
    """train_gpt2_cuda.py, or train_llama3_cuda.py, on one batch."""

    def __init__(self, config, params, x, y, settings, dtype="float32", tf32=1, arch="native", matmul="auto"):
        (B, T), gpu, architecture = x.shape, open_gpu(arch), on_gpu(model_of(config))
        self.x, self.y = x, y
        settings = architecture.Settings(B=B, T=T, steps=STEPS, dtype=dtype, tf32=tf32, matmul=matmul, **settings)
        self.settings = architecture.resolve_auto(settings, gpu.arch)
        with contextlib.redirect_stdout(io.StringIO()):  # hide the report of allocations
            self.trainer = open_trainer(architecture, gpu, config, params, self.settings)
            self.trainer.prepare((x, y))

    def logits(self):
        trainer = self.trainer
        trainer.forward(self.x, self.y)
        return to_float32(trainer.model.activations(*self.x.shape).logits[..., : trainer.config.V])

    def step(self):
        """Make one update; returns the mean loss before it and the losses (B, T)."""
        trainer = self.trainer
        loss = trainer.end_step(trainer.begin_step([(self.x, self.y)], self.settings.learning_rate)).loss
        return loss, trainer.model.activations(*self.x.shape).losses.get()

    def copy(self, name):
        """Return params (float32 master weights, if any), m, v or the last step's grads, by name: float32 Tensors."""
        trainer = self.trainer
        exact = name == "params" and trainer.settings.master
        owner = trainer.optimizer if exact or name in ("m", "v") else trainer
        return trainer.to_host(getattr(owner, "master" if exact else name))


BACKENDS = {
    "numpy": NumpyRun,
    "cuda": functools.partial(CudaRun, tf32=0),
    "cuda-tf32": CudaRun,
    "cuda-bf16": functools.partial(CudaRun, dtype="bfloat16"),
    "cuda-fp8": functools.partial(CudaRun, dtype="fp8"),  # on Hopper
    "cuda-bf16-sm_80": functools.partial(CudaRun, dtype="bfloat16", arch="sm_80"),
    "cuda-kernels": functools.partial(CudaRun, tf32=0, matmul="kernels"),  # without cuBLASLt
    "cuda-tf32-kernels": functools.partial(CudaRun, matmul="kernels"),
    "cuda-bf16-kernels": functools.partial(CudaRun, dtype="bfloat16", matmul="kernels"),
    "cuda-bf16-sm_80-kernels": functools.partial(CudaRun, dtype="bfloat16", arch="sm_80", matmul="kernels"),
}


def precision_of(backend):
    """Return the backend's key in ROUNDOFFS."""
    return next((name for name in ("numpy", "bf16", "fp8", "tf32") if name in backend), "float32")


def starting_weights(params, precision):
    """What both the run and the yardstick start from: the weights as the run's dtype has them."""
    if precision not in ("bf16", "fp8"):
        return params
    return views(params.table, bf16_to_float32(bf16_bits(flat(params))).view(np.uint8))


def replay(run):
    """Run STEPS steps from the start and return {row: array}."""
    rows, means, losses = {"logits": run.logits()}, [], []
    for step in range(STEPS):
        mean, positions = run.step()
        means.append(mean)
        losses.append(positions)
        if step == 0:
            grads = run.copy("grads")
    rows |= {f"d{name}": getattr(grads, name) for name in grads.table}
    return {**rows, "losses": np.array(losses), "means": np.array(means), "params": flat(run.copy("params"))}


def run_pytorch(config, params, x, y):
    """Do the same in PyTorch in float64 and return {row: array}."""
    model, rows, losses = to_reference(config, params, dtype=torch.float64), {}, []
    x, y = (torch.from_numpy(ids).long() for ids in (x, y))

    def capture(logits, loss):
        rows["logits"], grads = logits.detach().numpy(), collect_gradients(config, model, "float64")
        rows.update({f"d{name}": getattr(grads, name) for name in grads.table})

    def record(model, inputs, outputs):
        losses.append(cross_entropy(outputs[0].detach().flatten(0, 1), y.flatten(), reduction="none").view(y.shape))

    model.register_forward_hook(record)
    overfit(model, x, y, STEPS - 1, SMOOTH, capture=capture)
    with torch.no_grad():
        model(x, y)
    return {**rows, "losses": np.array(losses)}


# ----------------------------------------------------------------------------------------------------------------------
# the yardstick, and the ladder


class Yardstick:
    """The exact rows for this model and batch, and the error that a run may have in each."""

    def __init__(self, config, params, x, y, precision):
        self.exact, self.tokens = run_pytorch(config, params, x, y), x.size
        self.places = places(config, params.table)
        errors = []  # for each noisy run: {place: (largest error, 2-norm)}
        for seed, steps in enumerate((STEPS, 1) if flat(params).size > LARGE else [STEPS] * max(4, 32 // x.size)):
            noisy = NoisyGPT2 if model_of(config) is GPT2 else NoisyLlama
            rows = noisy(config, params, ROUNDOFFS[precision], seed).run(x, y, SMOOTH, steps)
            errors.append({(name, l): error_of(at(rows, (name, l)), at(self.exact, (name, l)))
                           for name, l in self.places if name != "losses" or l < steps})
            gc.collect()  # a noisy run is part of a reference cycle, and holds gigabytes for GPT-2 124M
        self.allowed = {}  # place -> (largest error of an element, 2-norm)
        for place in self.places:
            unit = FLOAT32 * np.abs(at(self.exact, place)).max()  # results are stored in float32 at best
            largest = max(run[place][0] for run in errors if place in run)
            norm = np.sqrt(np.mean([run[place][1] ** 2 for run in errors if place in run]))
            self.allowed[place] = FACTOR * max(largest, unit), self.norm_factor(place) * max(norm, unit)
        self.compared = next((step for step in range(1, STEPS) if self.is_chaotic(step)), STEPS)
        self.places = [(name, l) for name, l in self.places if name != "losses" or l < self.compared]

    def norm_factor(self, place):
        return NORM_FACTOR if self.tokens >= 100 and at(self.exact, place).size >= 10_000 else FACTOR

    def is_chaotic(self, step):
        place, norm = ("losses", step), np.linalg.norm(self.exact["losses"][step])
        return not self.allowed[place][1] < self.norm_factor(place) * CHAOS * norm

    def judge(self, rows):
        """Print a row for each tensor, and the first that is wrong; return whether all are within the tolerances."""
        red = [place for place in self.places if not self.check(rows, place, print_row=False)]
        for name in dict.fromkeys(name for name, _ in self.places):
            mine = [place for place in self.places if place[0] == name]
            worst = max(mine, key=lambda place: (place in red, self.excess(rows, place)))
            self.check(rows, worst)
        means, terms = rows["losses"].mean((1, 2), dtype=np.float64), rows["losses"][0].size
        okay = check_tensor("mean loss", rows["means"], means, FACTOR * FLOAT32 * math.sqrt(terms) * means)
        if self.compared < STEPS:
            print(f"{'':<12} losses after {self.compared} updates: rounding alone changes them by more than 1 percent")
        if red:
            print(f"first wrong: {describe(red[0])}")
        return okay and not red

    def check(self, rows, place, print_row=True):
        got, exact = at(rows, place), at(self.exact, place)
        return check_tensor(describe(place), got, exact, *self.allowed[place], print_row=print_row)

    def excess(self, rows, place):
        """Return a place's error as a fraction of its tolerance."""
        errors = zip(error_of(at(rows, place), at(self.exact, place)), self.allowed[place])
        return max(error / allowed if error else 0.0 for error, allowed in errors)

    def worst(self, rows):
        """Return (largest error as a fraction of its tolerance, its tensor)."""
        return max((self.excess(rows, place), describe(place)) for place in self.places)


def places(config, table):
    """Return all places, (row, layer or step or None), in the order in which a run computes them."""
    alone = [name for name, row in reversed(table.items()) if not row.stacked]
    stacked = [name for name, row in reversed(table.items()) if row.stacked]
    layers = [(f"d{name}", l) for l in reversed(range(config.L)) for name in stacked]
    below = [(f"d{name}", None) for name in alone if name in ("wpe", "wte")]
    above = [(f"d{name}", None) for name in alone if name not in ("wpe", "wte")]
    return [("logits", None), ("losses", 0), *above, *layers, *below, *(("losses", step) for step in range(1, STEPS))]


def at(rows, place):
    name, l = place
    return rows[name] if l is None else rows[name][l]


def describe(place):
    name, l = place
    return name if l is None else f"{name}[{l}]"


def error_of(got, exact):
    """Return (largest, 2-norm) of the difference."""
    difference = np.abs(got - exact)
    return float(difference.max()), float(np.linalg.norm(difference))


def judge_adamw(run):
    """Check two updates of a run with ADAMW_CHECK against AdamW in float64, on the run's own gradients and moments.

    The tolerance is a few roundings. Prints what exceeds it, and a summary; returns whether all is within it.
    """
    s, okay, state = run.settings, True, ("params", "m", "v")
    before = [run.copy(name) for name in state]
    for step in (1, 2):
        run.step()
        after, grads = [run.copy(name) for name in state], run.copy("grads")
        norm = np.sqrt(sum(np.vdot(piece.astype(np.float64), piece) for piece in chunks(flat(grads))))
        for name, row in grads.table.items():
            tensors = [getattr(t, name).reshape(-1) for t in (*before, *after, grads)]
            expect = functools.partial(expect_adamw, s, step, min(1.0, s.grad_clip / norm), s.weight_decay * row.decays)
            for piece in zip(*map(chunks, tensors)):  # float64 copies of the whole would be slow
                if not all(check_tensor(what, *rest, print_row=False) for what, *rest in expect(*piece)):
                    okay &= all([check_tensor(f"adamw {what} {name}", *rest) for what, *rest in expect(*tensors)])
                    break
        before = after
    print(f"{'adamw':<12} two updates from its own gradients, in float64  {'ok' if okay else 'FAIL'}")
    return okay


def expect_adamw(s, step, grad_scale, weight_decay, p0, m0, v0, p1, m1, v1, g):
    """Yield (name, found, expected, tolerance) for m, v and p after an update from p0, m0, v0 to p1, m1, v1."""
    p0, m0, v0, g = (x.astype(np.float64) for x in (p0, m0, v0, g))
    g *= grad_scale
    m, v = s.beta1 * m0 + (1 - s.beta1) * g, s.beta2 * v0 + (1 - s.beta2) * g * g
    update = s.learning_rate * (m1 / (1 - s.beta1**step)) / (np.sqrt(v1 / (1 - s.beta2**step)) + s.eps)
    p = p0 * (1 - s.learning_rate * weight_decay) - update
    tiny = np.finfo(np.float32).tiny
    yield "m", m1, m, 32 * FLOAT32 * (np.abs(m0) + np.abs(g)) + tiny  # most of these roundings are the norm's
    yield "v", v1, v, 80 * FLOAT32 * v + tiny
    yield "p", p1, p, FLOAT32 * (4 * np.abs(p0) + 16 * np.abs(update)) + tiny


def climb(model_path, state_path, backend="numpy"):
    """Print one row per tensor; return whether all are within the tolerances and a second run repeats the first."""
    open_input(model_path, export_hint(model_path)).close()
    _, config, params = load_model(model_path)
    state = read_debug_state(state_path, config, params)
    x, y = state.x, state.y
    print(f"{model_path}: {config.describe()}, B={x.shape[0]} T={x.shape[1]}, backend {backend}")
    precision = precision_of(backend)
    params = starting_weights(params, precision)
    yardstick, okay = Yardstick(config, params, x, y, precision), True
    if precision == "numpy":
        okay = judge_debug_state(yardstick, state)
    make = functools.partial(BACKENDS[backend], config, params, x, y)
    rows = replay(make(SMOOTH))
    okay &= yardstick.judge(rows)
    again = replay(make(SMOOTH))
    same = all(np.array_equal(rows[name], again[name]) for name in rows)
    print(f"{'run twice':<12} {'bit for bit the same' if same else 'differs'}  {'ok' if same else 'FAIL'}")
    if state.losses is not None:
        run = make({**state.optimizer, "decay": "all"})
        okay &= judge_state_losses(run, state.losses[:10], STATE_LOSSES[precision])
    return judge_adamw(make(ADAMW_CHECK)) and okay and same


def judge_state_losses(run, expected, tolerance):
    """Print the debug state's losses beside those of a run, step by step; return whether they agree."""
    okay = True
    for step, loss in enumerate(expected.tolist(), 1):
        found = run.step()[0]
        right = abs(found - loss) <= tolerance * loss
        print(f"{f'step {step}':<12} loss {found:.6f}, the debug state has {loss:.6f}  {'ok' if right else 'FAIL'}")
        okay &= right
    return okay


def judge_debug_state(yardstick, state):
    """Return whether the debug state is what a float32 run gives; print a row for each tensor that is not."""
    rows = {"logits": state.logits, **{f"d{name}": getattr(state.grads, name) for name in state.grads.table}}
    errors = {place: error_of(at(rows, place), at(yardstick.exact, place))[0] for place in yardstick.places
              if place[0] != "losses"}
    errors["losses", 0] = abs(state.loss - yardstick.exact["losses"][0].mean())
    for place, error in errors.items():
        if not error <= 2 * yardstick.allowed[place][0]:
            print(f"{describe(place):<12} the debug state itself has an error of {error:.3e}: was it computed in"
                  " float32, from these very weights and not their bfloat16 copy?  FAIL")
    return all(error <= 2 * yardstick.allowed[place][0] for place, error in errors.items())


def untied_llama():
    """(config, params): its classifier has a weight of its own, its heads more channels than the residual stream."""
    config = Llama3.Config(64, 250, 2, 6, 2, 96, 256, 200, 32, tied=0, factor=8, original=16)
    return config, random_params(Llama3.parameter_table(config), config.V, config.L, seed=42)


def write_pair(directory, name, vocabulary, B, T):
    """Write a random model and its debug state on random tokens; returns their paths."""
    if name == "untied":
        config, params = untied_llama()
    else:
        config, params = architecture_of(name).random_model(name, VOCABULARIES[vocabulary])
    tokens = np.random.default_rng(1).integers(0, config.V, B * T + 1, dtype=np.int32)
    x, y = tokens[:-1].reshape(B, T), tokens[1:].reshape(B, T)
    paths = str(directory / "model.bin"), str(directory / "debug_state.bin")
    write_model(paths[0], config, params)
    write_debug_state(paths[1], config, make_debug_state(config, params, x, y, STEPS)[0], config.STATES[-1])
    return paths


def require(backend):
    """Raise UserError if this backend cannot run here."""
    if backend != "numpy":
        dtype = {"bf16": "bfloat16", "fp8": "fp8"}.get(precision_of(backend), "float32")
        cuda.resolve_auto(cuda.CudaSettings(dtype=dtype), open_gpu().arch)


def need(backend):
    """Skip the test if this backend cannot run here."""
    try:
        require(backend)
    except UserError as error:
        pytest.skip(str(error))


all_backends = pytest.mark.parametrize("backend", [
    pytest.param(backend, marks=pytest.mark.gpu if "cuda" in backend else ()) for backend in BACKENDS])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """pair(name, vocabulary, B, T) -> paths of a random model and its debug state, written once; its Yardstick is
    computed once, too."""
    compute, known = Yardstick, {}

    def compute_once(config, params, x, y, precision):
        key = zlib.crc32(params.buffer), x.tobytes(), precision
        if key not in known:
            known[key] = compute(config, params, x, y, precision)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "Yardstick", compute_once)
        yield functools.cache(lambda *sizes: write_pair(tmp_path_factory.mktemp("pair"), *sizes))


@all_backends
@pytest.mark.parametrize("vocabulary, B, T", (
    ("bytes", 2, 33), pytest.param("gpt2", 2, 9, marks=pytest.mark.large)))
def test_small_models_agree_with_pytorch(pair, vocabulary, B, T, backend):
    need(backend)
    assert climb(*pair("d2", vocabulary, B, T), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("name, backend", [
    (name, backend) for name in ("l2", "untied") for backend in BACKENDS
    if "cuda" in backend and (name, backend) != ("untied", "cuda-fp8")])  # F=200: FP8 expects a multiple of 16
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
@pytest.mark.parametrize("dtype, matmul", (("float32", "auto"), ("float32", "kernels"), ("bfloat16", "auto")))
@pytest.mark.parametrize("B", (64, 96))
def test_indices_beyond_32_bits(B, dtype, matmul):
    """One forward and backward pass with B*T*Vp beyond 2^31 (B=64) and 2^32 (B=96), on B equal rows: their losses are
    the same bit for bit, and the gradients are those of one row."""
    need("cuda")
    T, (config, params), gpu = 1024, random_model("d12", VOCABULARIES["gpt2"]), open_gpu()
    tokens = np.random.default_rng(0).integers(0, config.V, T + 1, dtype=np.int32)
    precision = Precision(dtype)
    (device, matmuls), results = open_device(cuda.GPT2, gpu, config, precision, matmul), []
    for rows in (B, 1):
        gc.collect()
        cp.get_default_memory_pool().free_all_blocks()  # from the previous model
        try:
            settings = cuda.resolve_auto(cuda.CudaSettings(B=rows, T=T, dtype=dtype, matmul=matmul), gpu.arch)
            trainer = Trainer(cuda.GPT2, config, settings, matmuls, params)
        except UserError as error:
            pytest.skip(str(error))
        trainer.stage(0, [(np.tile(tokens[:-1], (rows, 1)), np.tile(tokens[1:], (rows, 1)))], 0.0)
        with device.stream:
            for buffer in (*trainer.model.buffers.values(), trainer.grads.buffer):
                buffer.data.memset_async(0xFF, buffer.nbytes)  # NaN, in every dtype
            copy_to_gpu(trainer.batch.buffer, trainer.staged[0].buffer)
            trainer.model.micro_step(trainer, 0)
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
    """run_here(paths) -> (exit status, output lines) of this file run as a program."""

    def run(paths):
        monkeypatch.setattr(sys, "argv", ["test_gpt2.py", "--model", paths[0], "--state", paths[1]])
        return main(), capsys.readouterr().out.splitlines()

    return run


def test_the_program_fails_when_a_gradient_is_wrong(pair, run_here, monkeypatch):
    """A factor of 1 + 1e-4 in GELU's backward pass fails the gradients after it, and only those; exit status 1."""
    right, paths = train_gpt2.gelu_backward, pair("d2", "bytes", 2, 33)

    def wrong(dinp, inp, dout, N):
        right(dinp, inp, dout, N)
        dinp *= np.float32(1.0001)

    status, lines = run_here(paths)
    assert status == 0 and lines[-1] == "overall okay: 1" and not any("FAIL" in line for line in lines)
    monkeypatch.setattr(train_gpt2, "gelu_backward", wrong)
    status, lines = run_here(paths)
    assert status == 1 and lines[-1] == "overall okay: 0"
    red = {line.split()[0].split("[")[0] for line in lines if line.endswith("FAIL")}
    assert {"dfcb", "dfcw"} <= red and not {"logits", "dlnfw", "dlnfb"} & red


@pytest.mark.parametrize("row, error", (("dfcb[0]", 1.0), ("logits", np.nan)))
def test_a_debug_state_full_of_errors_does_not_widen_the_tolerance(pair, run_here, tmp_path, row, error):
    model, state_path = pair("d2", "bytes", 2, 33)
    config, params = read_model(model, GPT2)
    state = read_debug_state(state_path, config, params)
    tensor = state.logits if row == "logits" else state.grads.fcb
    tensor[0, 0] += error
    write_debug_state(tmp_path / "state.bin", config, state)
    status, lines = run_here((model, str(tmp_path / "state.bin")))
    assert status == 1 and any(line.startswith(f"{row} ") and "debug state itself" in line for line in lines)


def test_out_of_memory_is_a_line(pair, monkeypatch, run_here):
    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(sys.modules[__name__], "Yardstick", no_memory)
    with pytest.raises(UserError, match="PyTorch: CUDA out of memory. Tried to allocate 2.00 GiB.$"):
        run_here(pair("d2", "bytes", 2, 33))


def test_the_program_without_its_files(tmp_path, run_here):
    with pytest.raises(UserError, match="model.bin: no such file; .*export_weights.py"):
        run_here((str(tmp_path / "model.bin"), str(tmp_path / "state.bin")))


def reuse_freed_memory():
    """Have glibc keep what is freed. By default it maps each large array anew, and of 124M's two minutes, one went into
    clearing the pages of float64 tensors."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt:
        M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


@torch_errors_as_lines()
@gpu_errors_as_lines()
def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n")[0])
    parser.add_argument("--model", default="gpt2_124M.bin", help="model checkpoint")
    parser.add_argument("--state", help="its debug state (default: the model's name with _debug_state)")
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="numpy", help="the trainer under test")
    args = parser.parse_args()
    require(args.backend)
    reuse_freed_memory()
    state = args.state or args.model.removesuffix(".bin").removesuffix("_bf16") + "_debug_state.bin"
    okay = climb(args.model, state, args.backend)
    print(f"overall okay: {int(okay)}")
    return 0 if okay else 1


if __name__ == "__main__":
    run_main(main)
