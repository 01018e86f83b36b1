"""train_rl.py: gradients beside autograd's; the sampler beside the trainer; a run that learns, and
its resume; what is refused."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import prepro_text
import train_gpt2
import train_llama3
import train_rl
import train_speedrun
from conftest import (ROOT, SMALL, SMALL_HEADS, assert_one_line_error, page_of, random_params,
                      remove_after, trainer_of)
from llmc.api import load, load_model
from llmc.resume import newest_checkpoint
from llmc.rewards import prompts_of, read_reward, rewards_of
from llmc.sampler import Random
from llmc.tensors import flat, views
from reference import collect_gradients, to_reference
from test_verdict import instead

PAGES = ("Llama", "l2"), ("speed run", "s2")
PAGES_OF = {"Llama": train_llama3.Llama3, "speed run": train_speedrun.Speedrun}


def model_of(api):
    """(architecture, config, params) of a Model."""
    return type(api.model), api.config, api.model.params


def on_cpu(architecture, config, params, group, rows=4, T=8, count=1):
    settings = dict(B=rows, T=T, total_batch_size=rows * T * count)
    return train_rl.OnCpu(architecture, config, params, settings, group)


RULE = "def reward(prompt, answer):\n    return float(answer[:1] == prompt[0])\n"


@pytest.fixture
def taught(here, run_here):
    """A run whose model answers with a letter or two, mostly any; prompts and a rule."""
    letters = "abcdefgh"
    talks = [[{"role": "user", "content": letters[i % 8]},
              {"role": "assistant", "content": letters[i * 5 % 7] + "." * (i % 2)}]
             for i in range(64)]
    Path("talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    Path("prompts.txt").write_text("\n".join(letters))
    Path("rule.py").write_text(RULE)
    run_here(prepro_text, "talks.jsonl", "--chat", "--vocabulary", "chars", "--sequence_length", 8,
             "--output", "talks", "--val_fraction", 0)
    run_here(train_gpt2, *"-e d2 -i talks -t 8 -b 8 -x 20 -v 0 -s 0 -o run".split())
    cut = run_here(train_gpt2, *"-e d2 -i talks -t 12 -b 1 -x 1 -v 0 -s 0".split()).stderr
    assert cut == "note: talks_train.bin: has rows of 8 tokens, which -t 12 cuts: pass -t 8\n"
    return here


FLAGS = ("run --prompts prompts.txt --test prompts.txt --reward rule.py --tokens 3 -b 8 -g 8"
         " -l 1e-3 --rows 32 --device cpu").split()


def test_it_learns_what_is_rewarded(taught, run_here):
    """The greedy answer to each letter becomes that letter; the best model is kept."""
    run_here(train_rl, *FLAGS, "-x", 60, "-v", 20, "-o", "out")
    with open("out/rewards.csv") as f:
        rows = list(csv.DictReader(f))
    steps = [int(row["step"]) for row in rows if row["test"]]
    assert len(rows) == 61 and steps == [0, 20, 40, 60]
    tests = [float(row["test"]) for row in rows if row["test"]]
    assert tests[0] < 0.5 and max(tests) > 0.8
    rewards = [float(row["reward"]) for row in rows[1:]]
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.3
    best = load("out", checkpoint="best")
    of_best = train_rl.Run(SimpleNamespace(batch_size=8, group=8, tokens=3, seed=0),
                           on_cpu(*model_of(best), 1), train_rl.Sampler(best.tokenizer, 3),
                           read_reward("rule.py"), None, list("abcdefgh"))
    assert of_best.test(0) == max(tests)


def test_a_resumed_run_has_the_same_bits(taught, run_here):
    run_here(train_rl, *FLAGS, "-x", 4, "-v", 2, "-o", "out")
    model = Path("out/model_00000004.bin").read_bytes()

    def log():
        with open("out/rewards.csv") as f:
            return [[value for name, value in row.items() if name != "seconds"]
                    for row in csv.DictReader(f)]

    rows = log()
    if not Path("out/DONE_00000002").exists():  # a later one was better
        run_here(train_rl, *FLAGS, "-x", 2, "-v", 2, "-o", "half")
        Path("out").rename("whole")
        Path("half").rename("out")
    remove_after("out", 2)
    done = run_here(train_rl, *FLAGS, "-x", 4, "-v", 2, "-o", "out", "-y", 1)
    assert done.stdout.startswith("resuming at step 2 from out\n")
    assert Path("out/model_00000004.bin").read_bytes() == model and log() == rows


# --------------------------------------------------------------------------------------------------
# an update


def drawn():
    """Answers of two groups, of prompts and lengths that differ; their advantages, their tokens."""
    rng = np.random.default_rng(0)
    answers = [train_rl.Answer(rng.integers(0, SMALL.V, 2 + i // 3).tolist(),
                               rng.integers(0, SMALL.V, 1 + i).tolist(), "", False, 0.0)
               for i in range(6)]
    rewards = np.array([[1.0, 0.0, 0.5], [0.0, 0.0, 1.0]])
    advantages = (rewards - rewards.mean(1, keepdims=True)).ravel()
    return answers, advantages, sum(len(answer.ids) for answer in answers)


def is_autograd_s(rows=4):
    """Whether loss and gradients are those of the formula at the head, in float64."""
    answers, advantages, tokens = drawn()
    params = random_params(SMALL)
    reference = to_reference(SMALL, params, dtype=torch.float64)
    expected = 0.0
    for answer, advantage in zip(answers, advantages):
        ids = torch.tensor([answer.prompt + answer.ids])
        logits, _ = reference(ids[:, :-1], ids[:, 1:])
        logprobs = torch.log_softmax(logits[0], -1)
        for t, id in enumerate(answer.ids, len(answer.prompt) - 1):
            expected = expected - advantage * logprobs[t, id]
    expected = expected / tokens
    expected.backward()

    batches = train_rl.batches_of(answers, advantages, rows, 9)
    model = on_cpu(page_of(SMALL), SMALL, params, 1, rows, 9, len(batches))
    loss = model.gradients(batches, tokens)
    gradients = flat(collect_gradients(SMALL, reference))
    return (abs(loss - expected.item()) < 1e-5
            and np.abs(flat(model.model.grads) - gradients).max() < 2e-5 * np.abs(gradients).max())


@pytest.mark.parametrize("rows", (1, 4, 6))
def test_gradients_are_autograd_s(rows):
    assert is_autograd_s(rows)


WRONG = {  # what is wrong: the function, its right text, the fault
    "weights for the prompt's tokens": ("batches_of", "len(answer.prompt) - 1 :", "0 :"),
    "weights shifted by one": ("batches_of", "len(answer.prompt) - 1 : len(ids) - 1",
                               "len(answer.prompt) : len(ids) - 1"),
    "the end token left out": ("batches_of", ": len(ids) - 1] = adv", ": len(ids) - 2] = adv"),
    "other answers' advantages": ("batches_of", "advantages[begin + i]", "advantages[i]"),
    "no sign": ("batches_of", "advantages[begin + i]", "abs(advantages[begin + i])"),
    "the mean of each part": ("gradients", "total=total", "total=np.count_nonzero(batch[2])"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_planted_fault_is_found(monkeypatch, fault):
    name, old, new = WRONG[fault]
    owner = train_rl if hasattr(train_rl, name) else train_rl.OnCpu
    monkeypatch.setattr(owner, name, instead(old, new)(getattr(owner, name)))
    assert not is_autograd_s()


def test_advantages_are_over_the_group_s_mean(taught, run_here, monkeypatch):
    """If all answers are equally good, no weight moves."""
    Path("rule.py").write_text("def reward(prompt, answer):\n    return 1.0\n")
    run_here(train_rl, *FLAGS, "-x", 1, "--tokens", 9, fails=("more than the model's 8",))
    seen = []
    real = train_rl.batches_of

    def spy(answers, advantages, rows, T):
        seen.append((answers, advantages))
        return real(answers, advantages, rows, T)

    monkeypatch.setattr(train_rl, "batches_of", spy)
    monkeypatch.setattr(train_rl, "rewards_of", lambda *_: np.ones(8))
    run_here(train_rl, *FLAGS, "-x", 1, "-o", "out")
    (answers, advantages), = seen
    assert len(answers) == len(advantages) == 64 and not advantages.any()
    before, after = (flat(load(path).model.params) for path in ("run", "out"))
    assert np.array_equal(before, after)


def test_the_sampler_is_the_trainer(taught):
    """Its log-probabilities are those of the trainer's forward pass; cut answers are known."""
    model = load("run")
    drawing = on_cpu(*model_of(model), 8)
    sampler = train_rl.Sampler(model.tokenizer, 3)
    answers = [answer for index, prompt in enumerate("ab")
               for answer in sampler.answer(drawing, prompt, train_rl.randoms_of(1, 0, index, 8))]
    stops = model.tokenizer.stops
    for answer in answers:
        assert answer.is_cut == (answer.ids[-1] not in stops)
        assert not stops & {*answer.ids[:-1]}
        ids = np.array([answer.prompt + answer.ids])
        losses = model.losses(ids[:, :-1], ids[:, 1:])[0, len(answer.prompt) - 1 :]
        assert abs(losses.sum() + answer.logprob) < 1e-4
    assert len({tuple(answer.ids) for answer in answers}) > 4
    again = sampler.answer(drawing, "a", train_rl.randoms_of(1, 0, 0, 8))
    assert again == answers[:8], "a resumed run draws the same"


def test_prompts_come_in_another_order_each_time_round():
    prompts = list(range(10))
    steps = [prompts_of(prompts, step, 4, 1) for step in range(5)]
    flat_steps = sum(steps, [])
    assert sorted(flat_steps[:10]) == sorted(flat_steps[10:]) == prompts
    assert flat_steps[:10] != flat_steps[10:]
    assert prompts_of(prompts, 2, 4, 1) == steps[2]


# --------------------------------------------------------------------------------------------------
# on a GPU


def test_an_update_on_a_gpu_is_the_cpu_s(gpu):
    answers, advantages, tokens = drawn()
    batches = train_rl.batches_of(answers, advantages, 4, 9)
    settings = dict(B=4, T=9, total_batch_size=4 * 9 * len(batches), eps=1e-3, learning_rate=0.01)
    params = random_params(SMALL_HEADS)
    flat(params).view(np.uint32)[...] &= 0xFFFF0000  # bfloat16 numbers
    before = flat(params).copy()
    found = page_of(SMALL_HEADS), SMALL_HEADS
    there = train_rl.OnGpu(gpu, *found, params, settings, 3)
    here = train_rl.OnCpu(*found, params, settings, 3)
    for model in (there, here):
        model.update(batches, tokens, 0)
    trainer = there.trainer
    exact = trainer.optimizer.master if trainer.settings.master else trainer.params
    after = flat(trainer.to_host(exact))
    assert (np.linalg.norm(after - flat(params)) < 0.08 * np.linalg.norm(flat(params) - before))


def test_the_sampler_on_a_gpu(gpu, taught):
    """Its log-probabilities are those of the CPU's forward pass, within bfloat16."""
    found = load_model("run")
    params = views(found[2].table, found[2].buffer.copy())
    model = train_rl.OnGpu(gpu, *found[:2], params, dict(B=4, T=8), 8)
    api = load("run")
    sampler = train_rl.Sampler(api.tokenizer, 3)
    for temperature in (1.0, 0.0):
        answers = sampler.answer(model, "a", train_rl.randoms_of(1, 0, 0, 5), temperature)
        different = len({tuple(one.ids) for one in answers})
        assert len(answers) == 5 and (different > 1 if temperature else different == 1)
        for answer in answers:
            ids = np.array([answer.prompt + answer.ids])
            losses = api.losses(ids[:, :-1], ids[:, 1:])[0, len(answer.prompt) - 1 :]
            assert abs(losses.sum() + answer.logprob) < 0.1


@pytest.mark.parametrize("page, size", PAGES)
def test_other_models_resume_on_a_gpu(gpu, taught, run_here, page, size):
    run_here(trainer_of(PAGES_OF[page]),
             *f"-e {size} -i talks -t 8 -b 8 -x 4 -v 0 -s 0 -o {size}".split())
    flags = size, *FLAGS[1:], "--device", "gpu", "-v", 2
    run_here(train_rl, *flags, "-x", 4, "-o", "whole")
    run_here(train_rl, *flags, "-x", 2, "-o", "out")
    run_here(train_rl, *flags, "-x", 4, "-o", "out", "-y", 1)
    whole, parts = (Path(name, "model_00000004.bin").read_bytes() for name in ("whole", "out"))
    assert whole == parts


def test_it_learns_on_a_gpu_and_resumes(gpu, taught, run_here):
    flags = *FLAGS, "--device", "gpu", "-v", 20
    run_here(train_rl, *flags, "-x", 60, "-o", "out")
    with open("out/rewards.csv") as f:
        tests = [float(row["test"]) for row in csv.DictReader(f) if row["test"]]
    assert tests[0] < 0.5 and max(tests) > 0.8
    run_here(train_rl, *flags, "-x", 20, "-o", "parts")
    run_here(train_rl, *flags, "-x", 60, "-o", "parts", "-y", 1)
    parts, whole = (Path(name, "model_00000060.bin").read_bytes() for name in ("parts", "out"))
    assert parts == whole


# --------------------------------------------------------------------------------------------------
# what is refused


@pytest.mark.parametrize("rule, words", (
    ("x = 1", "has no function reward(prompt, answer)"), ("1 / 0", "ZeroDivisionError"),
    ("def reward(:", "SyntaxError"),
    ("def reward(prompt, answer):\n    return 1 / 0", "fails: ZeroDivisionError"),
    ("def reward(prompt, answer):\n    return 'a'", "fails: ValueError"),
    ("def reward(prompt, answer):\n    return float('nan')", "expected finite numbers"),
    ("def reward(prompt, answer):\n    return -1", "0 or more")))
def test_wrong_rules(taught, run_here, rule, words):
    Path("rule.py").write_text(rule)
    done = run_here(train_rl, *FLAGS, "-x", 1, check=False)
    assert_one_line_error(done, "--reward", words)


def test_a_rule_that_fails_later_loses_no_update(taught, run_here):
    """The model of the update before is saved, and goes on to the same end."""
    late = "left = iter(range(200, -1, -1))\n" + RULE.replace("return", "return 0 / next(left) +")
    Path("late.py").write_text(late)
    flags = *FLAGS, "-x", 9
    done = run_here(train_rl, *flags, "--reward", "late.py", "-o", "out", check=False)
    assert_one_line_error(done, "--reward", "ZeroDivisionError")
    assert 0 < newest_checkpoint("out") < 9
    run_here(train_rl, *flags, "-o", "out", "-y", 1)
    run_here(train_rl, *flags, "-o", "whole")
    out, whole = (Path(name, "model_00000009.bin").read_bytes() for name in ("out", "whole"))
    assert out == whole


def test_a_closed_pipe_loses_no_update(taught):
    """As of `train_rl.py ... | head -1`."""
    command = [sys.executable, train_rl.__file__, *FLAGS, "-x", "100000", "-o", "out"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read().decode()
    assert process.wait(60) and "Traceback" not in error and newest_checkpoint("out")


def test_other_wrong_input(taught, run_here):
    def fails(*flags, words):
        assert_one_line_error(run_here(train_rl, *FLAGS, *flags, check=False), *words)

    fails("--reward", "none.py", words=("--reward none.py: no such file",))
    fails("--prompts", "none.txt", words=("none.txt: no such file",))
    Path("empty.txt").write_text("\n")
    fails("--test", "empty.txt", words=("empty.txt: has no line",))
    Path("other.txt").write_text("Z\n")
    fails("--test", "other.txt", words=("'Z'",))
    fails("-g", 1, words=("--group 1: expected at least 2",))
    Path("rule.txt").write_text("x = 1\n")
    fails("--reward", "rule.txt", words=("--reward rule.txt: has no function reward",))
    fails("-l", "nan", words=("learning_rate nan",))
    fails("--seed", -1, words=("--seed -1: expected at least 0",))
    Path("latin.txt").write_bytes(b"a\n\xe9\n")
    fails("--prompts", "latin.txt", words=("latin.txt: byte 2 is not UTF-8",))
    run_here(train_rl, *FLAGS, "-x", 1, "-o", "out")
    fails("-o", "out", words=("out: holds a checkpoint of step 1: resume with -y 1",))
    fails("-o", "out", "-y", 1, "-g", 4, words=("out: of a run with", "resume with its flags"))
    fails("-o", "out", "-y", 1, "-x", 1,
          words=("out: its checkpoint is of step 1: pass a larger -x",))
    fails("-o", "run", "-y", 1, words=("run: of a run of another program",))
    fails("-o", "out.log", words=("-o out.log: a log file",))
    assert run_here(train_rl, *FLAGS[1:], "gpt2_124M.bin", check=False).returncode == 1


def test_a_longer_prompt_to_test(taught, run_here):
    """Is read whole: as if the prompts to learn on were as long."""
    Path("long.txt").write_text("abcd\n")
    Path("both.txt").write_text("a\nabcd\n")
    Path("one.txt").write_text("a\n")
    found = []
    for prompts in ("one.txt", "both.txt"):
        done = run_here(train_rl, *FLAGS, "--prompts", prompts, "--test", "long.txt", "-x", 1)
        found.append(re.search("step 0/1 .*", done.stdout)[0])
    model = load("run")
    sampler = train_rl.Sampler(model.tokenizer, 3)
    answer, = sampler.answer(on_cpu(*model_of(model), 1, T=8), "abcd", [Random()], 0.0)
    expected = rewards_of(read_reward("rule.py"), "abcd", [answer])[0]
    assert found == [f"step 0/1 | test {expected:.3f}"] * 2


def test_a_step_that_teaches_nothing(taught):
    """Moves no weight, also once AdamW has momentum."""
    model = on_cpu(*model_of(load("run")), 4, count=2)
    answers, advantages, tokens = drawn()
    answers = [answer._replace(prompt=[1], ids=answer.ids[:4]) for answer in answers]
    answers = [answer._replace(ids=[id % 9 for id in answer.ids]) for answer in answers]
    model.update(train_rl.batches_of(answers, advantages, 4, 8), tokens, 0)
    before = flat(model.model.params).copy()
    model.update(train_rl.batches_of(answers, 0 * advantages, 4, 8), tokens, 1)
    assert np.array_equal(before, flat(model.model.params))
    model.update(train_rl.batches_of(answers, advantages, 4, 8), tokens, 2)
    assert not np.array_equal(before, flat(model.model.params))


def test_the_sums_of_the_documents():
    sums = read_reward(ROOT / "doc" / "sums.py")
    assert sums("07+45=", "052") == 1 and sums("07+45=", "52") == sums("99+99=", "199") == 0


@pytest.mark.parametrize("page, size", PAGES)
def test_other_models_learn_by_their_own_optimizers(taught, run_here, page, size):
    """And resume, with Muon's state."""
    run_here(trainer_of(PAGES_OF[page]),
             *f"-e {size} -i talks -t 8 -b 8 -x 4 -v 0 -s 0 -o {size}".split())
    flags = size, *FLAGS[1:], "-v", 1
    run_here(train_rl, *flags, "-x", 2, "-o", "whole")
    run_here(train_rl, *flags, "-x", 1, "-o", "out")
    done = run_here(train_rl, *flags, "-x", 2, "-o", "out", "-y", 1)
    assert done.stdout.startswith("resuming at step 1")
    whole, parts = (Path(name, "model_00000002.bin").read_bytes() for name in ("whole", "out"))
    assert whole == parts
