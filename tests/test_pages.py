"""What the three pages for CPUs have in common: how weights begin, what an update does to each of
them, how the learning rate changes, and what lies beyond the first block of a loop. What is right
is written here by name, or computed by PyTorch: a wrong row in a page's tables is red."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import train_gpt2
import train_llama3
import train_speedrun
from conftest import SMALL, SMALL_LLAMA, make_model, random_params
from llmc.debugstate import check_tensor
from llmc.errors import UserError
from llmc.schedulers import learning_rate_at
from llmc.settings import Settings, parse_settings
from llmc.tensors import flat, table_elements
from llmc.threads import BLOCK, parallel_blocks
from reference_optimizers import muon
from train_gpt2 import GPT2
from train_llama3 import Llama3
from train_speedrun import Speedrun

CONFIGS = {
    GPT2: SMALL, Llama3: SMALL_LLAMA,
    Speedrun: train_speedrun.Config(maxT=32, V=50, L=2, NH=2, C=32, Vp=128),
}
PAGES = pytest.mark.parametrize("page", CONFIGS, ids=("GPT-2", "Llama", "speedrun"))

# --------------------------------------------------------------------------------------------------
# random weights

SMALLER = 0.02 / math.sqrt(2 * 2)  # of two layers
DEVIATIONS = {  # of those that are random; gains are 1, all else 0
    GPT2: dict(wte=0.02, wpe=0.02, qkvw=0.02, attprojw=SMALLER, fcw=0.02, fcprojw=SMALLER),
    Llama3: dict(wte=0.02, qkvw=0.02, attprojw=SMALLER, fcw=0.02, fcprojw=SMALLER),
    Speedrun: dict(wte=1.0, qkvw=math.sqrt(0.33 / 128), fcw=math.sqrt(0.33 / 128)),
}
GAINS = "ln0w", "ln1w", "ln2w", "lnfw"


@PAGES
def test_random_weights(page):
    """Of every layer, and of the last 1000 numbers, which are in another block than the first."""
    name = next(iter(page.SIZES))
    V = 1500
    found = []
    config, params = page.random_model(name, V, seed=3, maxT=64)
    assert (config.L, config.C, config.V, config.maxT) == (2, 128, V, 64)

    for name, row in params.table.items():
        tensor = getattr(params, name)
        deviation = DEVIATIONS[page].get(name)
        if deviation is None:
            assert (tensor == (1.0 if name in GAINS else 0.0)).all(), name
            continue
        if name == "wte":
            assert not tensor[V:].any(), "padding"
            tensor = tensor[:V]
        for part in (*(tensor if row.stacked else [tensor]), tensor.reshape(-1)[-1000:]):
            normal = part.ravel() / deviation
            n = part.size
            assert abs(normal.std() - 1) < 5 / math.sqrt(2 * n), name
            assert abs(normal.mean()) < 5 / math.sqrt(n), name
            assert abs(np.mean(np.abs(normal) > 2) - 0.0455) < 1 / math.sqrt(n), f"{name} is normal"
            found.append(normal[:1000])
    likeness = np.corrcoef(np.unique(found, axis=0))
    assert len(likeness) >= len(DEVIATIONS[page]) * 2 - 2
    assert np.abs(likeness - np.eye(len(likeness))).max() < 0.2, "each has its own numbers"


@PAGES
def test_sizes(page):
    """So many layers as a name says; heads of 64 channels, a speed run's of 128; GPT-2's own. (GPT-3's
    have their channels' number for a name: tests/test_llmc.py.)"""
    for name, (L, NH, *others) in page.SIZES.items():
        if name[0] == "c":
            continue
        C = others[1] if page is Llama3 else others[0]
        assert name[1:] == str(L) and C == NH * (128 if page is Speedrun else 64)
    for name, size in dict(d24=354_823_168, d36=774_030_080, d48=1_557_611_200).items():
        table = GPT2.parameter_table(GPT2.Config(1024, 50257, *GPT2.SIZES[name], 50257))
        assert table_elements(table) == size


@PAGES
def test_a_seed_s_weights_are_its_own(page):
    name = next(iter(page.SIZES))
    first, again, other = (page.random_model(name, 50, seed)[1] for seed in (3, 3, 4))
    assert np.array_equal(first.buffer, again.buffer)
    for name in DEVIATIONS[page]:
        assert not np.array_equal(getattr(first, name), getattr(other, name))


# --------------------------------------------------------------------------------------------------
# an update

NAMES = "learning_rate", "beta1", "beta2", "eps", "weight_decay", "decay", "schedule", "grad_clip"
OF_A_FILE = 1e-4, 0.9, 0.999, 1e-8, 0.0, "matrices", "constant", 0.0  # llm.c's
OF_RANDOM_WEIGHTS = 0.0018, 0.9, 0.95, 1e-8, 0.1, "matrices", "cosine", 1.0  # with four layers
OF_MUON = 0.025, 0.8, 0.95, 1e-15, 0.05, "all", "cooldown", 0.0


@pytest.mark.parametrize("page, model, expected", (
    (GPT2, "a.bin", OF_A_FILE), (GPT2, "d4", OF_RANDOM_WEIGHTS),
    (Llama3, "a.bin", OF_A_FILE), (Llama3, "l4", OF_RANDOM_WEIGHTS),
    (Speedrun, "a.bin", OF_MUON), (Speedrun, "s4", OF_MUON)))
def test_defaults_of_the_optimizer(page, model, expected):
    settings = parse_settings(page.Settings, "", ["-e", model])
    assert tuple(getattr(settings, name) for name in NAMES) == expected


DECAY = {"wte", "wpe", "lm_head", "qkvw", "attprojw", "fcw", "fcprojw"}  # unless all weights do
MATRICES = {"qkvw": 3, "attprojw": 1, "fcw": 1, "fcprojw": 1}  # Muon's; 3: Q, K and V
FEW = 5, (3.4445, -4.7750, 2.0315)  # Newton-Schulz steps, and their coefficients
MANY = 12, (2.0, -1.5, 0.5)


class InPyTorch:
    """A page's optimizer, in float64, with the weights and moments that it has now."""

    def __init__(self, page, params, optimizer, settings, step=0, newton_schulz=FEW):
        self.settings = settings
        self.newton_schulz = newton_schulz
        self.matrices = MATRICES if page is Speedrun else {}
        self.tensors, self.m, self.v = (
            {name: torch.tensor(getattr(source, name)).double() for name in params.table}
            for source in (params, optimizer.m, optimizer.v))

        groups = []
        for name, tensor in self.tensors.items():
            times = 1.0
            decay = settings.weight_decay
            if page is Speedrun:
                times = {"wte": 28.0, "lm_head": 0.16}.get(name, 0.6)
                decay *= 0.02
            if settings.decay != "all" and name not in DECAY:
                decay = 0.0
            if name not in self.matrices:
                groups.append(dict(params=[tensor], times=times, weight_decay=decay))
        betas = settings.beta1, settings.beta2
        self.adamw = torch.optim.AdamW(groups, betas=betas, eps=settings.eps)
        for name, tensor in self.tensors.items():
            self.adamw.state[tensor] = dict(
                step=torch.tensor(float(step)), exp_avg=self.m[name], exp_avg_sq=self.v[name])

    def update(self, grads, learning_rate, scale=1.0):
        """One step by the page's gradients, times scale."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate * group["times"]
        for name, tensor in self.tensors.items():
            tensor.grad = torch.tensor(getattr(grads, name), dtype=torch.float64) * scale
        self.adamw.step()
        for name, parts in self.matrices.items():
            tensor = self.tensors[name]
            for layer in zip(tensor, tensor.grad, self.m[name]):
                for matrix in zip(*(x.chunk(parts) for x in layer)):
                    muon(*matrix, learning_rate, self.settings.weight_decay, *self.newton_schulz)

    def check(self, params, optimizer):
        """Assert that the page's weights and moments are these."""
        pairs = (params, self.tensors), (optimizer.m, self.m), (optimizer.v, self.v)
        for name in self.tensors:
            near = 2e-5 if name in self.matrices else 2e-6
            for what, (found, right) in zip(("", "m of ", "v of "), pairs):
                expected = right[name].numpy()
                tolerance = near * max(1.0, np.abs(expected).max())
                assert check_tensor(what + name, getattr(found, name), expected, tolerance)


@PAGES
@pytest.mark.parametrize("decay, T, newton_schulz, longer", (
    ("matrices", 2**15, FEW, 1.5), ("all", 2**16, MANY, 0.9)))
def test_updates_are_pytorch_s_by_name(page, decay, T, newton_schulz, longer):
    """Of two batches each, with a warm-up; the first gradient is longer than the limit by a factor.
    From 2^17 tokens an update on, Muon takes more steps of Newton and Schulz."""
    config = CONFIGS[page]
    settings = page.Settings(
        B=1, T=T, total_batch_size=2 * T, learning_rate=0.02, warmup_steps=2, steps=6,
        schedule="linear", beta1=0.7, beta2=0.9, eps=1e-3, weight_decay=0.5, decay=decay)
    model = make_model(2, 8, 2, config, random_params(config, ones=1.0))
    batches = np.random.default_rng(0).integers(0, config.V, (4, 2, 2, 8), dtype=np.int32)
    loader = SimpleNamespace(next_batch=map(tuple, itertools.cycle(batches)).__next__)

    def norm():
        return float(np.linalg.norm(flat(model.grads).astype(np.float64)))

    for number in range(2):
        model.forward(*batches[number])
        model.backward(number, 2)
    settings.grad_clip = norm() / longer

    expected = InPyTorch(page, model.params, model.optimizer, settings, 0, newton_schulz)
    for step, rate in enumerate((0.01, 0.02, 0.02, 0.015)):
        update = train_gpt2.train_step(model, loader, settings, step)
        assert update.norm == pytest.approx(norm(), rel=1e-5)
        expected.update(model.grads, rate, min(1.0, settings.grad_clip / norm()))
        expected.check(model.params, model.optimizer)


@pytest.mark.parametrize("longer", (0.5, 1.0, 1.01, 1.5, 1.99, 3.0))
def test_a_gradient_is_cut_to_the_limit(longer):
    """All pages share the function. The length is 15, of numbers in the first and last block."""
    model = make_model(1, 1, 1)
    flat(model.grads)[:100] = flat(model.grads)[-125:] = 1.0
    norm, scale = model.norm_and_scale(Settings(grad_clip=15.0 / longer))
    assert norm == 15.0 and scale == pytest.approx(min(1.0, 1.0 / longer), rel=1e-12)
    assert model.norm_and_scale(Settings()) == (None, 1.0)
    for wanted in (dict(output="run"), dict(skip_norm_zscore=5.0), dict(skip_loss_zscore=5.0)):
        assert model.norm_and_scale(Settings(**wanted)) == (15.0, 1.0)


def test_a_norm_that_is_not_finite_changes_no_weight(monkeypatch):
    model = make_model(1, 8, 1)
    before = flat(model.params).copy()
    loader = SimpleNamespace(next_batch=lambda: np.zeros((2, 1, 8), np.int32))
    monkeypatch.setattr(model, "norm_and_scale", lambda settings: (np.inf, 1.0))
    with pytest.raises(UserError, match="step 1: the gradient norm is inf"):
        train_gpt2.train_step(model, loader, Settings(B=1, T=8), 0)
    assert np.array_equal(flat(model.params), before)


SCHEDULES = {  # of 20 updates, the rates after a warm-up of 4, which end at 0
    "constant": [1.0] * 16,
    "linear": [1 - i / 16 for i in range(16)],
    "cosine": [(1 + math.cos(math.pi * i / 16)) / 2 for i in range(16)],
    # held for three tenths of 16
    "cooldown": [*[1.0] * 5, *(1 - (i - 4.8) / 11.2 for i in range(5, 16))],
    # held for four fifths of 20
    "wsd": [*[1.0] * 12, *(1 - math.sqrt(i / 4) for i in range(4))],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("final", (0.0, 0.5))
def test_schedules(schedule, final):
    settings = Settings(learning_rate=3.0, steps=20, warmup_steps=4, schedule=schedule)
    settings.final_fraction = final
    rates = [learning_rate_at(settings, step) / 3.0 for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    low = 1.0 if schedule == "constant" else final
    expected = [low + (1.0 - low) * rate for rate in SCHEDULES[schedule]]
    assert rates[4:] == pytest.approx(expected, abs=1e-12)


def test_wsd_turns_where_llm_c_does():
    """At int(0.8 * 41)."""
    settings = Settings(learning_rate=1.0, steps=41, schedule="wsd")
    rates = [learning_rate_at(settings, step) for step in (0, 32, 33)]
    assert rates == pytest.approx([1.0, 1.0, 1 - math.sqrt(1 / 9)], abs=1e-12)


# --------------------------------------------------------------------------------------------------
# loops that go by blocks


N = BLOCK + 1001  # elements: two blocks
ROWS = 5
V = BLOCK // 2 - 1  # rows of so many elements: three blocks, two of two rows
C = 512
OC = 4 * BLOCK // 512 + 600
BATCH = 3
ATT = (BATCH, 2, 4, 4)
QKV = (BATCH, 4, 24)
HEADS = (BATCH, 4, 8)  # two heads of four channels
GROUP = (BATCH, 4, 16)  # with one key and value head


def crossentropy_backward(dlogits, dlosses, probs, ids, *sizes):
    targets = (1000 * ids).astype(np.int32)
    train_gpt2.crossentropy_softmax_backward(dlogits, dlosses, probs, targets, *sizes)


def rope(qkv, *sizes):
    cos = np.float32([[0.6, 0.8]])
    sin = np.float32([[0.8, 0.6]])
    train_llama3.rope_forward(qkv, cos, sin, *sizes)


def few_rows(out, weight, n):
    inp = np.ones((1, 1, C), np.float32)
    train_gpt2.matmul_few_rows(out, inp, weight, None, 1, 1, C, n)


BY_BLOCKS = {  # what shares a loop among threads: (its call, shapes of its arrays, sizes of n rows)
    "gelu_forward": (train_gpt2.gelu_forward, [(N,)] * 2, lambda n: (n,)),
    "gelu_backward": (train_gpt2.gelu_backward, [(N,)] * 3, lambda n: (n,)),
    "adamw_update": (train_gpt2.adamw_update, [(N,)] * 4,
                     lambda n: (0.1, 0.9, 0.99, 1e-8, 0.1, 0.5, 3, n)),
    "cap_forward": (train_speedrun.cap_forward, [(N,)], lambda n: (n,)),
    "cap_backward": (train_speedrun.cap_backward, [(N,)] * 2, lambda n: (n,)),
    "softmax_forward": (train_gpt2.softmax_forward, [(ROWS, V)] * 2, lambda n: (1, n, V)),
    "crossentropy_softmax_backward": (
        crossentropy_backward, [(ROWS, V), (ROWS,), (ROWS, V), (ROWS,)], lambda n: (1, n, V)),
    "swiglu_forward": (
        train_llama3.swiglu_forward, [(ROWS, V), (ROWS, 2 * V)], lambda n: (n, V)),
    "swiglu_backward": (
        train_llama3.swiglu_backward, [(ROWS, 2 * V), (ROWS, 2 * V), (ROWS, V)],
        lambda n: (n, V)),
    "rope_forward": (rope, [GROUP], lambda n: (n, 4, 3, 4)),
    "attention_forward": (
        train_gpt2.attention_forward, [HEADS, ATT, ATT, QKV], lambda n: (n, 4, 8, 2)),
    "attention_backward": (
        train_gpt2.attention_backward, [QKV, ATT, ATT, HEADS, QKV, ATT], lambda n: (n, 4, 8, 2)),
    "attention_forward of a group": (
        train_llama3.attention_forward, [HEADS, ATT, GROUP], lambda n: (n, 4, 2, 1, 4)),
    "attention_backward of a group": (
        train_llama3.attention_backward, [GROUP, ATT, HEADS, GROUP, ATT],
        lambda n: (n, 4, 2, 1, 4)),
    "matmul_few_rows": (few_rows, [(OC,), (OC, C)], lambda n: (n,)),
}


def test_blocks_are_consecutive():
    """And so are their results, whoever was first."""
    assert parallel_blocks(lambda *ends: ends, 10, 4) == [(0, 4), (4, 8), (8, 10)]


@pytest.mark.parametrize("name", BY_BLOCKS)
def test_later_blocks_are_like_the_first(name):
    """All rows at once, and in calls of half of them or, where a block has few, of one."""
    call, shapes, sizes = BY_BLOCKS[name]
    rng = np.random.default_rng(0)
    whole = [9 * rng.random(shape, dtype=np.float32) for shape in shapes]
    parts = [x.copy() for x in whole]
    n = len(whole[0])
    call(*whole, *sizes(n))

    step = n // 2 if n > 100 else 1
    for start in range(0, n, step):
        pieces = [x[start : start + step] for x in parts]
        call(*pieces, *sizes(len(pieces[0])))
    for i, (found, expected) in enumerate(zip(whole, parts)):
        np.testing.assert_allclose(found, expected, 1e-5, 1e-6, err_msg=f"argument {i}")
