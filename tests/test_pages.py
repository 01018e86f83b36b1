"""What the three pages for CPUs have in common: how weights begin, what an update does to each of them, and what lies
beyond the first block of a loop. What is right is written here by name, or computed by PyTorch: a wrong row in a page's
tables, or a wrong constant, is red."""

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
from llmc.schedulers import learning_rate_at
from llmc.settings import Settings
from llmc.tensors import flat
from llmc.threads import BLOCK
from reference import muon
from train_gpt2 import GPT2
from train_llama3 import Llama3
from train_speedrun import Speedrun

CONFIGS = {GPT2: SMALL, Llama3: SMALL_LLAMA, Speedrun: train_speedrun.Config(maxT=32, V=50, L=2, NH=2, C=32, Vp=128)}
PAGES = pytest.mark.parametrize("page", CONFIGS, ids=("GPT-2", "Llama", "speedrun"))

# ----------------------------------------------------------------------------------------------------------------------
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
    V = 1500
    (name, *_), found = page.SIZES, []
    config, params = page.random_model(name, V, seed=3, maxT=64)
    assert (config.L, config.C, config.V, config.maxT) == (2, 128, V, 64)

    for name in params.table:
        tensor = getattr(params, name)
        deviation = DEVIATIONS[page].get(name)
        if deviation is None:
            assert (tensor == (1.0 if name in GAINS else 0.0)).all(), name
            continue
        if name == "wte":
            assert not tensor[V:].any(), "padding"
            tensor = tensor[:V]
        for part in (*(tensor if tensor.ndim == 3 else [tensor]), tensor.reshape(-1)[-1000:]):
            n = part.size
            assert abs(part.std() / deviation - 1) < 5 / math.sqrt(2 * n), name
            assert abs(part.mean() / deviation) < 5 / math.sqrt(n), name
            assert np.mean(np.abs(part) > 2 * deviation) == pytest.approx(0.0455, abs=1 / math.sqrt(n)), "normal"
            found.append(part.ravel()[-1000:] / deviation)
    same = np.abs(np.corrcoef(np.unique(found, axis=0)) - np.eye(len(np.unique(found, axis=0)))).max()
    assert same < 0.2, "each tensor and each layer has its own numbers"
    assert np.array_equal(page.random_model(next(iter(page.SIZES)), V, 3, 64)[1].buffer, params.buffer)
    assert not np.array_equal(page.random_model(next(iter(page.SIZES)), V, 4, 64)[1].wte, params.wte)


# ----------------------------------------------------------------------------------------------------------------------
# an update

DECAY = {"wte", "wpe", "lm_head", "qkvw", "attprojw", "fcw", "fcprojw"}  # unless all weights do
MATRICES = {"qkvw": 3, "attprojw": 1, "fcw": 1, "fcprojw": 1}  # of a speed run, Muon's; 3: query, key, value
FEW, MANY = (5, (3.4445, -4.7750, 2.0315)), (12, (2.0, -1.5, 0.5))  # Newton-Schulz steps, coefficients


class InPyTorch:
    """A page's optimizer, in float64, with the weights and moments that it has now."""

    def __init__(self, page, params, optimizer, settings, step=0, newton_schulz=FEW):
        self.settings, self.newton_schulz = settings, newton_schulz
        self.tensors, self.m, self.v = ({name: torch.tensor(getattr(source, name), dtype=torch.float64)
                                         for name in params.table} for source in (params, optimizer.m, optimizer.v))
        self.matrices, groups = MATRICES if page is Speedrun else {}, []
        for name, tensor in self.tensors.items():
            if name in self.matrices:
                continue
            rate, decay = 1.0, settings.weight_decay
            if page is Speedrun:
                rate, decay = {"wte": 28.0, "lm_head": 0.16}.get(name, 0.6), 0.02 * decay
            decays = settings.decay == "all" or name in DECAY
            groups.append(dict(params=[tensor], times=rate, weight_decay=decay if decays else 0.0))
        self.adamw = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps)
        for name, tensor in self.tensors.items():
            state = dict(step=torch.tensor(float(step)), exp_avg=self.m[name], exp_avg_sq=self.v[name])
            self.adamw.state[tensor] = state

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

    def agrees(self, params, optimizer):
        """Whether the page's weights and moments are these."""
        for name in self.tensors:
            near = 2e-5 if name in self.matrices else 2e-6
            for kind, found, right in (("", params, self.tensors), ("m of ", optimizer.m, self.m),
                                       ("v of ", optimizer.v, self.v)):
                expected = right[name].numpy()
                if not check_tensor(kind + name, getattr(found, name), expected, near * max(1, abs(expected).max())):
                    return False
        return True


@PAGES
@pytest.mark.parametrize("decay, T, newton_schulz, longer", (("matrices", 2**15, FEW, 1.5), ("all", 2**16, MANY, 0.9)))
def test_updates_are_pytorch_s_by_name(page, decay, T, newton_schulz, longer):
    """Of two batches each, with a warm-up; the first gradient is longer than the limit by this factor. From 2^17 tokens
    an update on, Muon takes more steps of Newton and Schulz."""
    config, rng = CONFIGS[page], np.random.default_rng(0)
    batches = rng.integers(0, config.V, (4, 2, 2, 8), dtype=np.int32)
    settings = page.Settings(B=1, T=T, total_batch_size=2 * T, learning_rate=0.02, warmup_steps=2, steps=6, beta1=0.7,
                             beta2=0.9, eps=1e-3, schedule="linear", weight_decay=0.5, decay=decay)
    model = make_model(2, 8, 2, config, random_params(config, ones=1.0))
    loader = SimpleNamespace(next_batch=map(tuple, itertools.cycle(batches)).__next__)

    def norm():
        return float(np.linalg.norm(flat(model.grads).astype(np.float64)))

    for number in range(2):
        model.forward(*batches[number])
        model.backward(number, 2)
    settings.grad_clip = norm() / longer

    expected = InPyTorch(page, model.params, model.optimizer, settings, newton_schulz=newton_schulz)
    for step, rate in enumerate((0.01, 0.02, 0.02, 0.015)):
        update = train_gpt2.train_step(model, loader, settings, step)
        assert update.norm == pytest.approx(norm(), rel=1e-5)
        expected.update(model.grads, rate, min(1.0, settings.grad_clip / norm()))
        assert expected.agrees(model.params, model.optimizer), f"after {step + 1} updates"


@pytest.mark.parametrize("longer", (0.5, 1.0, 1.01, 1.5, 1.99, 3.0))
def test_a_gradient_is_cut_to_the_limit(longer):
    """All architectures have the same function. The length is 15: of numbers in its first and in its last block."""
    model = make_model(1, 1, 1)
    flat(model.grads)[:100] = flat(model.grads)[-125:] = 1.0
    norm, scale = model.norm_and_scale(Settings(grad_clip=15.0 / longer))
    assert norm == 15.0 and scale == pytest.approx(min(1.0, 1.0 / longer), rel=1e-12)
    assert model.norm_and_scale(Settings()) == (None, 1.0)
    assert model.norm_and_scale(Settings(output="run")) == (15.0, 1.0)


SCHEDULES = {  # the rates of 20 updates, of which 4 are a warm-up to 1, for a final fraction of 0 and of 0.5
    "constant": [1.0] * 16,
    "linear": [1 - i / 16 for i in range(16)],
    "cosine": [(1 + math.cos(math.pi * i / 16)) / 2 for i in range(16)],
    "cooldown": [*[1.0] * 5, *(1 - (i - 4.8) / 11.2 for i in range(5, 16))],  # after three tenths of 16
    "wsd": [*[1.0] * 12, *(1 - math.sqrt(i / 4) for i in range(4))],  # after four fifths of 20
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("final", (0.0, 0.5))
def test_schedules(schedule, final):
    settings = Settings(learning_rate=3.0, steps=20, warmup_steps=4, schedule=schedule, final_fraction=final)
    rates = [learning_rate_at(settings, step) / 3.0 for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    expected = SCHEDULES[schedule] if schedule == "constant" else [final + (1 - final) * x for x in SCHEDULES[schedule]]
    assert rates[4:] == pytest.approx(expected, abs=1e-12)
    settings.steps, settings.warmup_steps = 41, 0
    if schedule == "wsd":  # at int(0.8 * 41), as llm.c's
        assert [learning_rate_at(settings, step) / 3.0 for step in (0, 32, 33)] == pytest.approx(
            [1.0, 1.0, final + (1 - final) * (1 - math.sqrt(1 / 9))], abs=1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# loops that go by blocks


N, ROWS, V, T, C = BLOCK + 1001, 5, BLOCK // 2 - 1, 4, 512  # two blocks, or three of two rows, the last one smaller
ATT, ONE = (3, 2, T, T), np.ones((1, 1, C), np.float32)
BY_BLOCKS = {  # what shares a loop among threads -> (its call, shapes of arrays, sizes of n rows of them)
    "gelu_forward": (train_gpt2.gelu_forward, [(N,)] * 2, lambda n: (n,)),
    "gelu_backward": (train_gpt2.gelu_backward, [(N,)] * 3, lambda n: (n,)),
    "adamw_update": (train_gpt2.adamw_update, [(N,)] * 4, lambda n: (0.1, 0.9, 0.99, 1e-8, 0.1, 0.5, 3, n)),
    "cap_forward": (train_speedrun.cap_forward, [(N,)], lambda n: (n,)),
    "cap_backward": (train_speedrun.cap_backward, [(N,)] * 2, lambda n: (n,)),
    "softmax_forward": (train_gpt2.softmax_forward, [(ROWS, V)] * 2, lambda n: (1, n, V)),
    "crossentropy_softmax_backward": (
        lambda dlogits, dlosses, probs, ids, *sizes: train_gpt2.crossentropy_softmax_backward(
            dlogits, dlosses, probs, (1000 * ids).astype(np.int32), *sizes),
        [(ROWS, V), (ROWS,), (ROWS, V), (ROWS,)], lambda n: (1, n, V)),
    "swiglu_forward": (train_llama3.swiglu_forward, [(ROWS, V), (ROWS, 2 * V)], lambda n: (n, V)),
    "swiglu_backward": (train_llama3.swiglu_backward, [(ROWS, 2 * V), (ROWS, 2 * V), (ROWS, V)], lambda n: (n, V)),
    "rope_forward": (
        lambda qkv, *sizes: train_llama3.rope_forward(qkv, np.float32([[0.6, 0.8]]), np.float32([[0.8, 0.6]]), *sizes),
        [(3, T, 16)], lambda n: (n, T, 3, 4)),
    "attention_forward": (
        train_gpt2.attention_forward, [(3, T, 8), ATT, ATT, (3, T, 24)], lambda n: (n, T, 8, 2)),
    "attention_backward": (
        train_gpt2.attention_backward, [(3, T, 24), ATT, ATT, (3, T, 8), (3, T, 24), ATT], lambda n: (n, T, 8, 2)),
    "attention_forward of groups": (
        train_llama3.attention_forward, [(3, T, 8), ATT, (3, T, 16)], lambda n: (n, T, 2, 1, 4)),
    "attention_backward of groups": (
        train_llama3.attention_backward, [(3, T, 16), ATT, (3, T, 8), (3, T, 16), ATT], lambda n: (n, T, 2, 1, 4)),
    "matmul_few_rows": (
        lambda out, weight, n: train_gpt2.matmul_few_rows(out, ONE, weight, None, 1, 1, C, n),
        [(4 * BLOCK // C + 600,), (4 * BLOCK // C + 600, C)], lambda n: (n,)),
}


@pytest.mark.parametrize("name", BY_BLOCKS)
def test_later_blocks_are_like_the_first(name):
    """All rows at once, and in calls of half of them or, where a block has few, of one."""
    (call, shapes, sizes), rng = BY_BLOCKS[name], np.random.default_rng(0)
    whole = [9 * rng.random(shape, dtype=np.float32) for shape in shapes]
    parts, n = [x.copy() for x in whole], len(whole[0])
    call(*whole, *sizes(n))

    step = n // 2 if n > 100 else 1
    for start in range(0, n, step):
        pieces = [x[start : start + step] for x in parts]
        call(*pieces, *sizes(len(pieces[0])))
    for number, (found, expected) in enumerate(zip(whole, parts)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=f"argument {number}")
