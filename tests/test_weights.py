"""A weight for each target's loss: gradients and updates beside PyTorch's, over micro-batches of
unequal weight; files of weights, from a shard to a resumed run; what is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import evaluate
import train_gpt2
import train_speedrun
from conftest import SMALL, SMALL_LLAMA, make_model, page_of, random_params, remove_after
from llmc.api import load
from llmc.dataloader import DataLoader, total_weight, weights_beside, write_tokens
from llmc.errors import UserError
from llmc.tensors import flat
from reference import adamw, collect_gradients, to_reference
from test_verdict import instead

SPEEDRUN = train_speedrun.Config(maxT=64, V=257, L=2, NH=2, C=32, Vp=384)
CONFIGS = pytest.mark.parametrize("config", (SMALL, SMALL_LLAMA, SPEEDRUN),
                                  ids=("GPT-2", "Llama", "speed run"))
B, T = 2, 8


def batches(config, weights, seed=0):
    """A batch for each (B, T) of `weights`."""
    rng = np.random.default_rng(seed)
    return [(*rng.integers(0, config.V, (2, B, T), dtype=np.int32), w.astype(np.float32))
            for w in weights]


def few_and_many(seed=5):
    """Weights of three micro-batches: of one target, of all, with different ones, of none."""
    one = np.zeros((B, T))
    one[1, 5] = 1
    return one, np.random.default_rng(seed).integers(0, 4, (B, T)), np.zeros((B, T))


def loss_in_pytorch(model, drawn):
    """The weighted mean over all batches, which autograd can differentiate."""
    total = sum(weights.sum() for *_, weights in drawn)
    loss = 0.0
    for inputs, targets, weights in drawn:
        logits, _ = model(*(torch.from_numpy(ids).long() for ids in (inputs, targets)))
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(targets).long().flatten(), reduction="none")
        loss = loss + (losses * torch.from_numpy(weights).flatten()).sum() / float(total)
    return loss


def run_micro_batches(model, drawn):
    """The loss of an update; its gradients are in model.grads."""
    total = total_weight(drawn)
    loss = 0.0
    for i, batch in enumerate(drawn):
        loss += model.forward(*batch, total=total)
        model.backward(i, len(drawn))
    return loss


def close(got, expected):
    scale = np.abs(expected).max()
    return np.abs(got - expected).max() < 2e-5 * scale


def is_pytorch_s(config, weights):
    """Whether loss and gradients of weighted micro-batches are autograd's, in float64."""
    drawn = batches(config, weights)
    params = random_params(config)
    reference = to_reference(config, params, dtype=torch.float64)
    expected = loss_in_pytorch(reference, drawn)
    expected.backward()
    model = make_model(B, T, len(drawn), config, params)
    loss = run_micro_batches(model, drawn)
    gradients = flat(collect_gradients(config, reference))
    return abs(loss - expected.item()) < 1e-5 and close(flat(model.grads), gradients)


@CONFIGS
def test_gradients_are_pytorch_s(config):
    """Of one target beside many, which a mean of micro-batches' means would weigh alike."""
    assert is_pytorch_s(config, few_and_many())
    assert is_pytorch_s(config, [np.float32(few_and_many()[1]) - 1.25])  # negative ones, too


def test_gradients_of_ignore_index_are_those_of_zeros_and_ones():
    (inputs, targets, weights), = batches(SMALL, [few_and_many()[1] > 1])
    params = random_params(SMALL)
    reference = to_reference(SMALL, params, dtype=torch.float64)
    logits, _ = reference(torch.from_numpy(inputs).long(), torch.from_numpy(targets).long())
    chosen = torch.from_numpy(np.where(weights, targets, -100)).long()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), chosen.flatten(),
                                                 ignore_index=-100)
    expected.backward()
    model = make_model(B, T, 1, SMALL, params)
    assert abs(model.forward(inputs, targets, weights) - expected.item()) < 1e-5
    model.backward()
    assert close(flat(model.grads), flat(collect_gradients(SMALL, reference)))


@pytest.mark.parametrize("config", (SMALL, SMALL_LLAMA), ids=("GPT-2", "Llama"))
def test_ten_updates_are_pytorch_s(config):
    params = random_params(config, spread=0.02, ones=1.0)
    reference = to_reference(config, params, dtype=torch.float64)
    settings = dict(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    optimizer = adamw(reference.parameters(), settings)
    model = make_model(B, T, 3, config, params)
    for step in range(10):
        drawn = batches(config, few_and_many(step), step)
        optimizer.zero_grad()
        expected = loss_in_pytorch(reference, drawn)
        expected.backward()
        optimizer.step()
        assert abs(run_micro_batches(model, drawn) - expected.item()) < 2e-4
        model.optimizer.update(model.params, model.grads, page_of(config).Settings(**settings),
                               1e-3, step + 1)


@CONFIGS
def test_ones_are_as_no_weights(config):
    """Bit for bit, where their number is a power of two."""
    inputs, targets, _ = batches(config, few_and_many())[0]
    model = make_model(B, T, 1, config)
    found = []
    for weights in ((), (np.ones((B, T), np.float32),)):
        loss = model.forward(inputs, targets, *weights)
        model.backward()
        found.append((loss, flat(model.grads).tobytes()))
    assert found[0] == found[1]


WRONG = {  # what is wrong: the right text of train_gpt2.py, the fault
    "a mean of micro-batches' means": (
        train_gpt2.GPT2, "loss_of", "if total is None else total", "if True else total"),
    "weights of other rows": (train_gpt2.GPT2, "loss_gradients", "np.divide(self.weights",
                              "np.divide(self.weights[::-1]"),
    "weights shifted by one": (train_gpt2.GPT2, "loss_gradients", "np.divide(self.weights",
                               "np.divide(np.roll(self.weights, 1, 1)"),
    "a loss that does not weigh": (train_gpt2.GPT2, "loss_of",
                                   "np.sum(weights * self.acts.losses", "np.sum(self.acts.losses"),
    "gradients that do not weigh": (train_gpt2.GPT2, "loss_gradients", "np.divide(self.weights",
                                    "np.divide(np.ones_like(self.weights)"),
    "an update's total of its first batch": (train_gpt2, "total_weight", "in batches",
                                             "in batches[:1]"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_planted_fault_is_found(monkeypatch, fault):
    owner, name, old, new = WRONG[fault]
    wrong = instead(old, new)(getattr(owner, name))
    monkeypatch.setattr(owner, name, wrong)
    if name == "total_weight":
        monkeypatch.setitem(globals(), name, wrong)
    assert not is_pytorch_s(SMALL, few_and_many())


# --------------------------------------------------------------------------------------------------
# files of weights


def write_weights(path, weights):
    Path(weights_beside(path)).write_bytes(np.asarray(weights, np.uint8).tobytes())


@pytest.mark.parametrize("spread", (False, True))
@pytest.mark.parametrize("shuffle", (False, True))
def test_the_loader_s_weights_are_those_of_the_targets(tmp_path, spread, shuffle):
    """Of several shards, in any order, from a position on, of the whole set; token i has weight i
    mod 7."""
    paths = [str(tmp_path / f"x_train_{i}.bin") for i in range(2)]
    for number, path in enumerate(paths):
        ids = np.arange(number * 200, number * 200 + 100)
        write_tokens(path, [ids], 100)
        write_weights(path, ids % 7)
    loader = DataLoader(paths, 500, B, T, shuffle, spread)
    assert loader.has_weights
    for _ in range(9):
        _, targets, weights = loader.next_batch()
        assert np.array_equal(weights, targets % 7) and weights.dtype == np.float32
    other = DataLoader(paths, 500, B, T, shuffle, spread)
    other.seek(loader.position)
    assert all(map(np.array_equal, loader.next_batch(), other.next_batch()))
    assert all(np.array_equal(weights, targets % 7) for _, targets, weights in loader.whole_set())


def with_weights(workplace, choose):
    """The workplace, with a weight for each token; choose(number of a token)."""
    for split, count in (("train", 4000), ("val", 600)):
        write_weights(f"data/tiny_shakespeare_{split}.bin", [choose(i) for i in range(count)])


FLAGS = "-x 4 -b 2 -t 8 -d 32 -v 2 -m 3 -s 0 -l 1e-3 -o run".split()


def test_a_run_and_its_resume(workplace, run_here):
    """The same bits; the screen says over how many targets it validates, and evaluate.py agrees."""
    with_weights(workplace, lambda i: i % 5 // 3)
    done = run_here(train_gpt2, *FLAGS, "-n", 2)
    assert done.stdout.count(" of 19 targets") == 3  # of 48, in steps 0, 2 and 4
    last = Path("run/model_00000004.bin").read_bytes()
    remove_after("run", 2)
    rest = run_here(train_gpt2, *FLAGS, "-n", 2, "-y", 1)
    assert Path("run/model_00000004.bin").read_bytes() == last
    val = float(rest.stdout.rpartition("val loss ")[2].split()[0])
    found = json.loads(run_here(evaluate, "run", "--tokens", 49, "--context", 8, "--json").stdout)
    assert abs(found["validation_loss"] - val) < 1e-4 and found["bits_per_byte"] is None
    assert "targets scored" in run_here(evaluate, "run", "--context", 8).stdout


def test_weights_change_what_is_learned(workplace, run_here):
    """Of ones as of none; of others something else; of multiples the same."""
    flags = FLAGS[:-2]
    losses = []
    for choose in (None, lambda i: 1, lambda i: i % 3, lambda i: 2 * (i % 3)):
        if choose:
            with_weights(workplace, choose)
        done = run_here(train_gpt2, *flags)
        losses.append([line.split("|")[1] for line in done.stdout.splitlines() if "train loss" in line])
    assert losses[0] == losses[1] != losses[2] == losses[3]


def test_an_update_without_a_target_changes_nothing(workplace, run_here):
    """And says so; the run goes on."""
    with_weights(workplace, lambda i: int(i > 40))
    params = random_params(SMALL)
    done = run_here(train_gpt2, "-x", 1, *FLAGS[2:6], "-v", 0, "-s", 0, "-o", "run")
    assert "update skipped: none of its targets has a weight" in done.stdout
    model = load("run").model
    assert np.array_equal(flat(model.params), flat(params))
    assert "train loss" in run_here(train_gpt2, "-x", 4, *FLAGS[2:6], "-v", 0, "-s", 0).stdout


@pytest.mark.parametrize("damage, words", (
    (lambda path: path.write_bytes(path.read_bytes()[:-1]),
     ("tiny_shakespeare_train_weights.bin", "a byte for each token")),
    (lambda path: path.write_bytes(b""), ("train_weights.bin", "a byte for each token")),
    (lambda path: (path.unlink(), path.mkdir()), ("train_weights.bin", "cannot be read"))))
def test_a_file_that_does_not_fit(workplace, run_here, damage, words):
    with_weights(workplace, lambda i: 1)
    damage(Path("data/tiny_shakespeare_train_weights.bin"))
    run_here(train_gpt2, *FLAGS, fails=words)


def test_what_else_is_refused(workplace, run_here):
    with_weights(workplace, lambda i: 0)
    run_here(train_gpt2, *FLAGS, fails=("tiny_shakespeare_val_weights.bin",
                                        "no target to validate on has a weight"))
    run_here(evaluate, "gpt2_124M.bin", "--data", "data/tiny_shakespeare", "--context", 8,
             fails=("data/tiny_shakespeare_val.bin", "none of its tokens has a weight"))
    for i in range(2):
        write_tokens(f"data/x_train_{i}.bin", [np.arange(100)], 100)
    write_weights("data/x_train_0.bin", [1] * 100)
    run_here(train_gpt2, *FLAGS, "-v", 0, "-i", "data/x_train_*.bin",
             fails=("data/x_train_1.bin", "no file of weights beside it"))


# --------------------------------------------------------------------------------------------------
# from Python


def test_from_python(workplace):
    model = load("gpt2_124M.bin")
    (inputs, targets, weights), = batches(SMALL, few_and_many()[1:2])
    losses = model.losses(inputs, targets).astype(np.float64)
    loss = model.forward(inputs, targets, weights)
    assert loss == pytest.approx((losses * weights).sum() / weights.sum(), abs=1e-6)
    signed = weights - weights.mean()
    loss = model.forward(inputs, targets, signed, total=5)
    assert loss == pytest.approx((losses * signed).sum() / 5, abs=1e-5)
    before = model.losses(inputs, targets).copy()
    model.forward(inputs, targets, signed, total=5)
    model.backward()
    model.update(1e-3)
    assert ((model.losses(inputs, targets) - before) * signed).sum() < 0


@pytest.mark.parametrize("weights, total, words", (
    (np.ones((B, T + 1)), None, "weights of shape (2, 9): expected finite numbers (2, 8)"),
    (np.full((B, T), math.nan), None, "expected finite numbers"),
    (None, 5, "weights of shape (): expected finite numbers"),
    (np.zeros((B, T)), None, "their sum is 0"),
    (np.ones((B, T)), 0, "total 0: expected a positive number"),
    (np.ones((B, T)), math.inf, "total inf")))
def test_wrong_weights(workplace, weights, total, words):
    model = load("gpt2_124M.bin")
    inputs, targets, _ = batches(SMALL, few_and_many())[0]
    with pytest.raises(UserError) as error:
        model.forward(inputs, targets, weights, total)
    assert words in str(error.value)
