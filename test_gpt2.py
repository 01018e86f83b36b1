"""
Parity with PyTorch, tensor by tensor: is the hand-written backward pass right to the last digits?

    python test_gpt2.py                       # gpt2_124M.bin and its debug state; of Llama 3; or of a trained speed run
    python test_gpt2.py --backend cuda-bf16   # of the page for GPUs; BACKENDS has more
    pytest tests/test_parity.py               # random small models, made on the spot
    pytest tests/test_parity.py -m large      # random GPT-2 124M

The ladder: logits, losses, the gradients in the order of the backward pass, the losses of the next
steps, the same run twice, the optimizer's update. The first row that fails says where to look.

The tolerances, and why:
    logits, loss, gradients   FACTOR times the error that rounding alone causes with this model and batch, measured by
                              rounding.py, with random errors in float64. The bound on single
                              elements catches one
                              large error; that on the 2-norm, small errors everywhere: in a large
                              tensor of at least
                              100 tokens it hardly varies, and NORM_FACTOR is enough. dev/verdict.py
                              checks on randomly
                              drawn models that a correct trainer never fails.
                              Losses are compared position by position: a few noisy runs say little
                              about the error of
                              their mean, a single number.
    losses                    the same, after one update and after two. Rounding errors grow from step to step; from
                              the step where they reach 1 percent of the loss, losses are not
                              compared.
    state's losses            of up to ten updates with the usual eps, beside the trainer's: STATE_LOSSES, tens of
                              times what rounding causes in random models.
    update                    a few roundings: AdamW's, or Muon's, is recomputed in float64 from the trainer's own
                              gradients and moments, with weight decay and clipping.
"""

import argparse
import ctypes
import functools
import gc
import math
import os
import sys

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np

try:
    import torch
    from torch.nn import functional as F
except ImportError as error:
    sys.exit(f"test_gpt2.py: error: {error.name} cannot be imported: pip install -r"
             " requirements-test.txt")

import train_gpt2_cuda as cuda
from llmc.api import load_model
from llmc.debugstate import check_tensor, read_debug_state
from llmc.gpu.device import gpu_errors_as_lines, open_gpu
from llmc.errors import UserError, run_main
from llmc.files import chunks, export_hint, open_input
from llmc.tensors import flat
from reference import (ADAMW, collect_gradients, overfit, page_of, to_reference,
                       torch_errors_as_lines)
from rounding import FLOAT32, NOISY, ROUNDOFFS
from train_gpt2 import GPT2
from train_speedrun import Speedrun
from backends import BACKENDS, STEPS, precision_of, replay, starting_weights
from reference_optimizers import MuonAndAdamW, muon

FACTOR, NORM_FACTOR = 6.0, 2.8
EQUAL_ADDENDS = 4.0  # rounding errors of equal numbers are equal, those of the noisy runs random
# relative; see above
STATE_LOSSES = {"numpy": 1e-4, "float32": 1e-4, "tf32": 1e-3, "bf16": 1e-2, "fp8": 2e-2}
LARGE = 10**8  # parameters; with more, two noisy runs already average over enough elements
CHAOS = 1e-2  # fraction of the losses: see above
# With the usual eps of 1e-8, the first updates are +-learning_rate, even where a gradient is nearly
# 0 and rounding decides its sign: the losses after them would tell little.
SMOOTH = {**ADAMW, "eps": 1e-3}
# Settings for the row update: they use each part of it, with a decay that is large enough to show.
ADAMW_CHECK = dict(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1,
                   grad_clip=0.01)

# --------------------------------------------------------------------------------------------------
# the trainers under test, and PyTorch


def run_pytorch(config, params, x, y):
    """Do the same in PyTorch in float64 and return {row: array}."""
    model = to_reference(config, params, dtype=torch.float64)
    rows = {}
    losses = []
    x, y = (torch.from_numpy(ids).long() for ids in (x, y))

    def capture(logits, loss):
        rows["logits"] = logits.detach().numpy()
        grads = collect_gradients(config, model, "float64")
        rows.update({f"d{name}": getattr(grads, name) for name in grads.table})

    def record(model, inputs, outputs):
        losses.append(F.cross_entropy(outputs[0].detach().flatten(0, 1), y.flatten(),
                                      reduction="none").view(y.shape))

    model.register_forward_hook(record)
    overfit(model, x, y, STEPS - 1, SMOOTH, capture=capture)
    with torch.no_grad():
        model(x, y)
    return {**rows, "losses": np.array(losses)}


# --------------------------------------------------------------------------------------------------
# the yardstick, and the ladder


class Yardstick:
    """The exact rows for this model and batch, and the error allowed in each."""

    def __init__(self, config, params, x, y, precision):
        self.exact = run_pytorch(config, params, x, y)
        self.tokens = x.size
        self.places = places(config, params.table)
        errors = []  # for each noisy run: {place: (largest error, 2-norm)}
        for seed, steps in enumerate((STEPS, 1) if flat(params).size > LARGE
                                     else [STEPS] * max(4, 32 // x.size)):
            rows = NOISY[page_of(config)](config, params, ROUNDOFFS[precision],
                                          seed).run(x, y, SMOOTH, steps)
            errors.append({(name, l): error_of(at(rows, (name, l)), at(self.exact, (name, l)))
                           for name, l in self.places if name != "losses" or l < steps})
            if flat(params).size > LARGE:
                # a noisy run is part of a reference cycle, and holds gigabytes for GPT-2 124M
                gc.collect()
        self.allowed = {}  # place -> (largest error of an element, 2-norm)
        for place in self.places:
            # results are stored in float32 at best
            unit = FLOAT32 * np.abs(at(self.exact, place)).max()
            largest = max(run[place][0] for run in errors if place in run)
            norm = np.sqrt(np.mean([run[place][1] ** 2 for run in errors if place in run]))
            self.allowed[place] = (FACTOR * max(largest, unit),
                                   self.norm_factor(place) * max(norm, unit))
            if not self.exact["logits"].any():  # a head of zeros, whose gradients add equal numbers
                self.allowed[place] = tuple(EQUAL_ADDENDS * error for error in self.allowed[place])
        self.compared = next((step for step in range(1, STEPS) if self.is_chaotic(step)), STEPS)
        self.places = [(name, l) for name, l in self.places if name != "losses"
                       or l < self.compared]

    def norm_factor(self, place):
        return (NORM_FACTOR if self.tokens >= 100 and at(self.exact, place).size >= 10_000
                else FACTOR)

    def is_chaotic(self, step):
        place = ("losses", step)
        norm = np.linalg.norm(self.exact["losses"][step])
        return not self.allowed[place][1] < self.norm_factor(place) * CHAOS * norm

    def judge(self, rows):
        """Print a row for each tensor, and the first that is wrong; return whether all are within
        the tolerances."""
        red = [place for place in self.places if not self.check(rows, place, print_row=False)]
        for name in dict.fromkeys(name for name, _ in self.places):
            mine = [place for place in self.places if place[0] == name]
            worst = max(mine, key=lambda place: (place in red, self.excess(rows, place)))
            self.check(rows, worst)
        means = rows["losses"].mean((1, 2), dtype=np.float64)
        terms = rows["losses"][0].size
        okay = check_tensor("mean loss", rows["means"], means,
                            FACTOR * FLOAT32 * math.sqrt(terms) * means)
        if self.compared < STEPS:
            print(f"{'':<12} losses after {self.compared} updates: rounding alone changes them by"
                  " more than 1 percent")
        if red:
            print(f"first wrong: {describe(red[0])}")
        return okay and not red

    def check(self, rows, place, print_row=True):
        got = at(rows, place)
        exact = at(self.exact, place)
        return check_tensor(describe(place), got, exact, *self.allowed[place], print_row=print_row)

    def excess(self, rows, place):
        """Return a place's error as a fraction of its tolerance."""
        errors = zip(error_of(at(rows, place), at(self.exact, place)), self.allowed[place])
        return max(error / allowed if error else 0.0 for error, allowed in errors)

    def worst(self, rows):
        """Return (largest error as a fraction of its tolerance, its tensor)."""
        return max((self.excess(rows, place), describe(place)) for place in self.places)


BELOW = "wpe", "wte", "ln0w"  # the layers


def places(config, table):
    """Return all places, (row, layer or step or None), in the order in which a run computes
    them."""
    alone = [name for name, row in reversed(table.items()) if not row.stacked]
    stacked = [name for name, row in reversed(table.items()) if row.stacked]
    layers = [(f"d{name}", l) for l in reversed(range(config.L)) for name in stacked]
    below = [(f"d{name}", None) for name in alone if name in BELOW]
    above = [(f"d{name}", None) for name in sorted(alone, key=lambda name: "lm_head" not in name)
             if name not in BELOW]
    return [("logits", None), ("losses", 0), *above, *layers, *below,
            *(("losses", step) for step in range(1, STEPS))]


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


def judge_update(run):
    """Check two updates of a run with ADAMW_CHECK against the optimizer in float64, on the run's
    own gradients and moments.

    The tolerance is a few roundings, of Muon's steps what they make of one. Prints the tensors that
    exceed it, and a summary; returns whether none does.
    """
    s = run.settings
    okay = True
    state = ("params", "m", "v")
    is_speedrun = page_of(run.config) is Speedrun
    before = [run.copy(name) for name in state]
    for step in (1, 2):
        run.step()
        after = [run.copy(name) for name in state]
        grads = run.copy("grads")
        norm = np.sqrt(sum(np.vdot(piece.astype(np.float64), piece)
                           for piece in chunks(flat(grads))))
        for name, row in grads.table.items():
            tensors = [getattr(t, name) for t in (*before, *after, grads)]
            grad_scale = min(1.0, s.grad_clip / norm)
            if is_speedrun and name in MuonAndAdamW.PARTS:
                shape = -1, row.shape[1] // MuonAndAdamW.PARTS[name], row.shape[2]
                pieces = zip(*(x.reshape(shape) for x in tensors))
                expect = functools.partial(expect_muon, s, grad_scale)
            else:
                rate, decay = ((MuonAndAdamW.rate(name), MuonAndAdamW.DECAY) if is_speedrun
                               else (1.0, 1.0))
                decay *= s.decay == "all" or row.decays
                # float64 copies of the whole would be slow
                pieces = zip(*(chunks(x.reshape(-1)) for x in tensors))
                expect = functools.partial(expect_adamw, s, step, grad_scale, rate,
                                           s.weight_decay * decay)
            for number, piece in enumerate(pieces):  # of 2^20 elements, or a matrix
                if not all(check_tensor(what, *rest, print_row=False)
                           for what, *rest in expect(*piece)):
                    at = f"{name}[{number}]" if number or len(piece[0]) < row.size else name
                    okay &= all([check_tensor(f"update {what} {at}", *rest)
                                 for what, *rest in expect(*piece)])
                    break
        before = after
    print(f"{'update':<12} two, from its own gradients, in float64  {'ok' if okay else 'FAIL'}")
    return okay


def expect_muon(s, grad_scale, p0, m0, v0, p1, m1, v1, g):
    """As expect_adamw, of a matrix (rows, columns) and Muon."""
    g = g.astype(np.float64) * grad_scale
    p, m, g = (torch.from_numpy(x.astype(np.float64)) for x in (p0, m0, g))
    newton_schulz = steps, (a, *_) = MuonAndAdamW.steps_for(s.update_tokens)
    muon(p, g, m, s.learning_rate, s.weight_decay, *newton_schulz)
    yield "v", v1, v0, 0.0
    yield "m", m1, m.numpy(), 32 * FLOAT32 * (np.abs(m0)
                                              + np.abs(g.numpy())) + np.finfo(np.float32).tiny
    update = p.numpy() - p0 * (1 - s.learning_rate * s.weight_decay)
    # Steps enlarge rounding errors, where singular values are small by a each: 30 random models
    # have a sixth of this.
    yield "p", p1, p.numpy(), FLOAT32 * (4 * np.abs(p0) + 12 * a**steps * np.abs(update).max())


def expect_adamw(s, step, grad_scale, rate, weight_decay, p0, m0, v0, p1, m1, v1, g):
    """Yield (name, found, expected, tolerance) for m, v and p after an update from p0, m0, v0 to
    p1, m1, v1."""
    p0, m0, v0, g = (x.astype(np.float64) for x in (p0, m0, v0, g))
    g *= grad_scale
    m = s.beta1 * m0 + (1 - s.beta1) * g
    v = s.beta2 * v0 + (1 - s.beta2) * g * g
    rate *= s.learning_rate
    update = rate * (m1 / (1 - s.beta1**step)) / (np.sqrt(v1 / (1 - s.beta2**step)) + s.eps)
    p = p0 * (1 - rate * weight_decay) - update
    tiny = np.finfo(np.float32).tiny
    # most of these roundings are the norm's
    yield "m", m1, m, 32 * FLOAT32 * (np.abs(m0) + np.abs(g)) + tiny
    yield "v", v1, v, 80 * FLOAT32 * v + tiny
    yield "p", p1, p, FLOAT32 * (4 * np.abs(p0) + 16 * np.abs(update)) + tiny


def climb(model_path, state_path, backend="numpy"):
    """Print one row per tensor; return whether all are within the tolerances and a second run
    repeats the first."""
    open_input(model_path, export_hint(model_path)).close()
    architecture, config, params = load_model(model_path)
    require(backend, architecture)
    head = params.lm_head[: config.V] if architecture is Speedrun else np.empty(0)
    if head.any() and len({row.tobytes() for row in head}) < 0.9 * config.V:
        raise UserError(f"--model {model_path}: rows of its classifier are equal, those of tokens"
                        " that it has not seen, and so are rounding errors, which tolerances take"
                        " as random: train on a vocabulary of the text's own (prepro_text.py"
                        " --vocabulary chars)")
    state = read_debug_state(state_path, config, params)
    x, y = state.x, state.y
    print(f"{model_path}: {config.describe()}, B={x.shape[0]} T={x.shape[1]}, backend {backend}")
    precision = precision_of(backend)
    params = starting_weights(params, precision)
    yardstick = Yardstick(config, params, x, y, precision)
    okay = True
    # a bfloat16 file; the state is of the float32 weights
    rounded = not (flat(params).view(np.uint32) & 0xFFFF).any()
    if precision == "numpy":
        okay = judge_debug_state(Yardstick(config, params, x, y, "bf16") if rounded else yardstick,
                                 state)
    make = functools.partial(BACKENDS[backend], config, params, x, y)
    rows = replay(make(SMOOTH))
    okay &= yardstick.judge(rows)
    again = replay(make(SMOOTH))
    same = all(np.array_equal(rows[name], again[name]) for name in rows)
    print(f"{'run twice':<12} {'bit for bit the same' if same else 'differs'} "
          f" {'ok' if same else 'FAIL'}")
    if state.losses is not None:
        run = make({**state.optimizer, "decay": "all"})
        okay &= judge_state_losses(run, state.losses[:10],
                                   STATE_LOSSES["bf16" if rounded else precision])
    return judge_update(make(ADAMW_CHECK)) and okay and same


def judge_state_losses(run, expected, tolerance):
    """Print the debug state's losses beside those of a run, step by step; return whether they
    agree."""
    okay = True
    for step, loss in enumerate(expected.tolist(), 1):
        found = run.step()[0]
        right = abs(found - loss) <= tolerance * loss
        print(f"{f'step {step}':<12} loss {found:.6f}, the debug state has {loss:.6f} "
              f" {'ok' if right else 'FAIL'}")
        okay &= right
    return okay


def judge_debug_state(yardstick, state):
    """Return whether the debug state agrees with a float32 run; print a row for each tensor that
    does not."""
    rows = {"logits": state.logits,
            **{f"d{name}": getattr(state.grads, name) for name in state.grads.table}}
    errors = {place: error_of(at(rows, place), at(yardstick.exact, place))[0]
              for place in yardstick.places
              if place[0] != "losses"}
    errors["losses", 0] = abs(state.loss - yardstick.exact["losses"][0].mean())
    for place, error in errors.items():
        if not error <= 2 * yardstick.allowed[place][0]:
            print(f"{describe(place):<12} the debug state itself has an error of {error:.3e}: was"
                  " it computed in float32, from these very weights and not their bfloat16 copy? "
                  " FAIL")
    return all(error <= 2 * yardstick.allowed[place][0] for place, error in errors.items())


def require(backend, architecture=GPT2):
    """Raise UserError if this backend cannot run here, or not for this architecture."""
    if backend != "numpy" and architecture is Speedrun:
        raise UserError(f"--backend {backend}: of a speed run's GPT, only numpy; its kernels:"
                        " pytest tests/test_speedrun.py")
    if backend != "numpy":
        dtype = {"bf16": "bfloat16", "fp8": "fp8"}.get(precision_of(backend), "float32")
        cuda.resolve_auto(cuda.CudaSettings(dtype=dtype), open_gpu().arch)


def reuse_freed_memory():
    """Make glibc reuse freed memory. By default it maps each large array anew, and of 124M's two
    minutes, one went into clearing the pages of float64 tensors."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt:
        M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


@torch_errors_as_lines()
@gpu_errors_as_lines()
def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("--model", default="gpt2_124M.bin", help="model checkpoint")
    parser.add_argument("--state",
                        help="its debug state (default: the model's name with _debug_state)")
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="numpy",
                        help="the trainer under test")
    args = parser.parse_args()
    if os.path.isdir(args.model):
        raise UserError(f"--model {args.model}: a directory, expected a .bin file, with its debug"
                        f" state beside it: run python export_weights.py --model {args.model}"
                        " --input TOKENS_val.bin")
    require(args.backend)
    reuse_freed_memory()
    state = args.state or args.model.removesuffix(".bin").removesuffix("_bf16") + "_debug_state.bin"
    okay = climb(args.model, state, args.backend)
    print(f"overall okay: {int(okay)}")
    return 0 if okay else 1


if __name__ == "__main__":
    run_main(main)
