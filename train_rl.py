"""
Learning from rewards: a model's answers are drawn, a function of yours says how good each is, and
what was better than its like becomes more likely. On a CPU.

    python doc/sums.py                       # 320 sums to teach, 8,680 to try, 1,000 to test
    python prepro_text.py data/sums.jsonl --chat --vocabulary chars --sequence_length 11 \\
        --output data/sums
    python train_gpt2.py -e d2 -i data/sums -t 11 -b 128 -x 600 -s 0 -o runs/sums
    python train_rl.py runs/sums --prompts data/sums.txt --test data/sums_test.txt \\
        --reward doc/sums.py --tokens 4 -x 1000 -o runs/rewarded

The prompts of a file, a line each, are what a user says; the model answers in the format of its
chat template, if it has one. `--reward FILE` names a Python file with a function reward(prompt,
answer), two texts, that returns a number.

For a prompt q, G answers a_1 .. a_G are drawn from the model p, and get rewards r_1 .. r_G. We want
to raise the expected reward, whose gradient is E[r * grad log p(a | q)]: what was rewarded should
become likelier. As E[grad log p] = 0, the same can be taken from all rewards of a prompt without a
change of that; it takes away noise. The mean of the group makes a reward an advantage, A_g = r_g -
mean(r). So we go down the gradient of

    loss = sum over all answers of an update of A_g * sum over their tokens of -log p(token) / N

p(token) being its probability after all before it, N the number of these tokens. That is the
cross entropy of training, with A_g as the weight of each token of an answer and 0 for those of the
prompt. An answer that was worse than the others has a negative weight: its gradient is turned
round, and the step lowers the logits of its tokens and raises all others, the likely ones most. If
all answers of a group are equally good, it teaches nothing. The reward of an answer that does not
end within --tokens is 0.

Others add to that: GRPO (https://arxiv.org/abs/2402.03300) divides A by the group's deviation,
averages over each answer first, keeps the step near the old p by clipping their ratio, and near a
reference by a penalty (KL). Dr. GRPO (https://arxiv.org/abs/2503.20783) shows that both divisions
favor the wrong: long bad answers, and prompts that are nearly always or never solved. Here each
update has answers of its own, so there is no ratio to clip.
"""

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import argparse
import importlib.util
import os
import sys
import time
import warnings
from importlib.machinery import SourceFileLoader
from typing import NamedTuple

import numpy as np

from llmc.api import load
from llmc.chat import Template, find_template
from llmc.checkpoint import Progress, owned_by_one
from llmc.errors import Interruption, Parser, UserError, run_main
from llmc.files import locked, make_directory, open_input, replacing
from llmc.loop import check_update
from llmc.resume import (checkpoint_paths, find_checkpoint, go_back, read_notes, read_state,
                         save_checkpoint, stopped)
from llmc.sampler import Choice, Random
from llmc.settings import Settings
from llmc.shuffle import Position
from llmc.single_process import SINGLE_PROCESS
from llmc.tokenizer import keep_tokenizer

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: multiples are far from each other
COLUMNS = "step", "reward", "equal_groups", "length", "entropy", "seconds", "test"


# --------------------------------------------------------------------------------------------------
# answers


class Answer(NamedTuple):
    """One of a group."""

    prompt: list  # ids
    ids: list  # with the token that ends it, unless it was cut
    text: str
    is_cut: bool
    logprob: float  # of the ids, by the sampler


class Sampler:
    """Draws answers from a model of llmc.api, by its weights as they are."""

    def __init__(self, model, group, most):
        """group: answers to a prompt; most: tokens of an answer."""
        self.vocabulary = model.tokenizer
        self.decoder = model.model.Decoder(model.config, model.model.params, group, model.T)
        self.most = most
        self.template = None  # it continues plain text
        if find_template(self.vocabulary)[0] is not None:
            self.template = Template(self.vocabulary, "the model", "MODEL")

    def ids_of(self, prompt):
        if not self.template:
            return self.vocabulary.encode(prompt)
        text = self.template.render([{"role": "user", "content": prompt}], answers=True)
        return self.template.encode(text)[0]

    def answer(self, prompt, randoms, temperature=1.0):
        """An Answer to a prompt, a text, for each Random."""
        ids = self.ids_of(prompt)
        stops = self.vocabulary.stops
        drawn = [[] for _ in randoms]
        logprobs = np.zeros(len(randoms))
        going = np.ones(len(randoms), bool)
        steps = self.decoder.draw(np.array([ids], np.int32), self.most, randoms,
                                  Choice(temperature), want_logprobs=True)
        for tokens, of_tokens in steps:
            for g in np.flatnonzero(going):
                drawn[g].append(int(tokens[g]))
                logprobs[g] += of_tokens[g]
                going[g] = tokens[g] not in stops
            if not going.any():
                break
        return [Answer(ids, own, self.vocabulary.decode([id for id in own if id not in stops]),
                       is_cut, logprob)
                for own, is_cut, logprob in zip(drawn, going.tolist(), logprobs.tolist())]


def randoms_of(seed, step, index, group):
    """The Randoms of the group of prompt `index` in a step: a resumed run draws the same."""
    first = ((seed << 40) + (step << 20) + index) * group + 1
    return [Random(((first + g) * GOLDEN & 0xFFFFFFFFFFFFFFFF) or 1) for g in range(group)]


def rewards_of(reward, prompt, answers):
    """reward() of each answer (G,); of one that was cut 0. Raises UserError if it fails."""
    found = np.zeros(len(answers))
    for g, answer in enumerate(answers):
        if not answer.is_cut:
            try:
                found[g] = reward(prompt, answer.text)
            except Exception as error:  # whatever a user's function raises
                raise UserError(f"--reward: reward({prompt!r}, {answer.text!r}) fails:"
                                f" {type(error).__name__}: {error}") from None
    if not np.isfinite(found).all():
        raise UserError(f"--reward: reward({prompt!r}, ...) gives {found}, expected finite numbers")
    return found


# --------------------------------------------------------------------------------------------------
# an update


def batch_of(answers, T):
    """(inputs, targets, is_answer), each (n,T), of n answers: the target of a position is the next
    token; is_answer: whether that is the answer's."""
    inputs, targets = np.zeros((2, len(answers), T), np.int32)
    is_answer = np.zeros((len(answers), T), bool)
    for i, answer in enumerate(answers):
        ids = answer.prompt + answer.ids
        inputs[i, : len(ids) - 1] = ids[:-1]
        targets[i, : len(ids) - 1] = ids[1:]
        is_answer[i, len(answer.prompt) - 1 : len(ids) - 1] = True
    return inputs, targets, is_answer


def compute_gradients(model, answers, advantages, rows):
    """model.grads = the gradients of the loss above, `rows` answers at a time; returns that loss,
    and the mean entropy of the model's choices, in nats. advantages (n,)."""
    T = max(len(answer.prompt) + len(answer.ids) for answer in answers) - 1
    tokens = sum(len(answer.ids) for answer in answers)
    begins = range(0, len(answers), rows)
    entropy = loss = 0.0
    for i, begin in enumerate(begins):
        some = slice(begin, begin + rows)
        inputs, targets, is_answer = batch_of(answers[some], T)
        weights = np.float32(is_answer * advantages[some, None])
        loss += model.forward(inputs, targets, weights, total=tokens)
        p = model.acts.probs[is_answer].astype(np.float64)
        entropy -= np.sum(p * np.log(np.maximum(p, 1e-30))) / tokens
        model.backward(i, len(begins))
    return loss, entropy


# --------------------------------------------------------------------------------------------------
# the run


def parse_arguments():
    parser = Parser(description=(__doc__ or "").strip().split("\n")[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("model", help="a run's directory or a .bin file, of a model that answers already")
    add("--prompts", required=True, metavar="FILE", help="prompts to learn on, a line each")
    add("--test", metavar="FILE", help="other prompts, which are answered greedily now and then")
    add("--reward", required=True, metavar="FILE",
        help="Python with reward(prompt, answer) -> a number")
    add("-o", "--output", default="", metavar="DIR", help="where the model is saved")
    add("-y", "--resume", type=int, choices=(0, 1), default=0, help="1: go on from -o's checkpoint")
    add("-x", "--steps", type=int, default=1000, metavar="N", help="updates")
    add("-b", "--batch_size", type=int, default=32, metavar="N", help="prompts of an update")
    add("-g", "--group", type=int, default=16, metavar="N", help="answers to a prompt")
    add("--rows", type=int, default=0, metavar="N",
        help="answers in a forward pass (0: of 8,192 tokens together)")
    add("--tokens", type=int, default=64, metavar="N", help="of an answer, at most")
    add("-l", "--learning_rate", type=float, default=3e-4, metavar="X", help="constant")
    add("--grad_clip", type=float, default=1.0, metavar="X", help="largest gradient norm (0: any)")
    add("-v", "--test_every", type=int, default=100, metavar="N",
        help="test, and save, every N updates")
    add("--seed", type=int, default=1337, metavar="N", help="of prompts' order, and of answers")
    args = parser.parse_args()
    for name, least in dict(steps=1, batch_size=1, group=2, rows=0, tokens=1, test_every=1,
                            seed=0).items():
        if getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)}: expected at least {least}")
    return args


def read_prompts(path, model, sampler, tokens):
    """(the lines of a file, the tokens of the longest); raises UserError for one that leaves no
    room for an answer."""
    with open_input(path, "expected prompts, a line each") as f:
        try:
            lines = f.read().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: byte {error.start} is not UTF-8: save it as UTF-8") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"{path}: has no line, expected prompts, a line each")
    lengths = [len(sampler.ids_of(prompt)) for prompt in prompts]
    if max(lengths) + tokens > model.T:
        longest = prompts[lengths.index(max(lengths))]
        raise UserError(f"{path}: {longest[:40]!r} has {max(lengths)} tokens, which with --tokens"
                        f" {tokens} are more than the model's {model.T}")
    return prompts, max(lengths)


def read_reward(path):
    """The function `reward` of a Python file."""
    if not os.path.isfile(path):
        raise UserError(f"--reward {path}: no such file, expected Python with reward(prompt,"
                        " answer)")
    loader = SourceFileLoader("rule", os.fspath(path))  # whatever the file's name ends in
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("rule", loader))
    sys.path.append(os.path.dirname(os.path.abspath(path)))  # for what it imports
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file raises
        raise UserError(f"--reward {path}: {type(error).__name__}: {error}") from None
    found = getattr(module, "reward", None)
    if not callable(found):
        raise UserError(f"--reward {path}: has no function reward(prompt, answer)")
    return found


def prompts_of(prompts, step, count, seed):
    """The prompts of an update: all in a random order, again and again in another one."""
    numbers = range(step * count, (step + 1) * count)
    orders = {number // len(prompts): None for number in numbers}
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(len(prompts))
              for epoch in orders}
    return [prompts[orders[number // len(prompts)][number % len(prompts)]] for number in numbers]


def test(sampler, reward, prompts):
    """The mean reward of the greedy answers."""
    return float(np.mean([rewards_of(reward, prompt, sampler.answer(prompt, [Random()], 0.0))[0]
                          for prompt in prompts]))


def main():
    warnings.simplefilter("ignore", RuntimeWarning)  # check_update stops at what is not finite
    args = parse_arguments()
    # patience: the newest checkpoint and the best are kept
    chosen = dict(output=args.output, resume=args.resume, patience=1, weight_decay=0.0, beta2=0.95,
                  grad_clip=args.grad_clip, learning_rate=args.learning_rate)
    settings = Settings(**chosen)
    settings.check()
    reward = read_reward(args.reward)
    with locked(settings.output_dir):
        first = find_checkpoint(settings) if settings.output_dir else None
        start = checkpoint_paths(args.output, first)[0] if first else args.model
        api = load(start)
        if not api.tokenizer:
            raise UserError(f"{args.model}: no vocabulary is beside it")
        settings = api.model.Settings(**chosen)  # its optimizer's
        sampler = Sampler(api, args.group, args.tokens)
        prompts, longest = read_prompts(args.prompts, api, sampler, args.tokens)
        tested = []
        if args.test:
            tested, _ = read_prompts(args.test, api, sampler, args.tokens)
        if not args.output:
            print("nothing is saved: there is no -o DIR")
        args.rows = args.rows or max(1, 8192 // (longest + args.tokens))
        run = Run(args, settings, api, sampler, reward, prompts, tested, longest + args.tokens)
        return run.go(first or 0)


class Run:
    """The loop, its log and its checkpoints."""

    def __init__(self, *arguments):
        (self.args, self.settings, self.api, self.sampler, self.reward, self.prompts,
         self.tested, T) = arguments
        self.model = self.api.model
        rows = min(self.args.rows, self.args.batch_size * self.args.group)
        several = 2 if rows < self.args.batch_size * self.args.group else 1
        self.model.allocate_activations(rows, T)
        self.model.allocate_training(rows, T, several)
        self.best = (1e30, 0)  # minus the test's reward, its step
        # what a resumed run must have, too
        self.same = {name: getattr(self.args, name)
                     for name in ("batch_size", "group", "tokens", "seed")}

    def go(self, first):
        if first:
            *_, marker = checkpoint_paths(self.args.output, first)
            owned = owned_by_one(self.model.optimizer, self.model.params)
            read_state(self.args.output, first, owned, go_back(marker))
            notes = read_notes(self.args.output, first)
            if notes.get("rewarded", self.same) != self.same:
                raise UserError(f"{self.args.output}: of a run with {notes['rewarded']}, found"
                                f" {self.same}: resume with its flags")
            self.best = tuple(notes.get("lowest", self.best))
            print(f"resuming at step {first} from {self.args.output}")
        elif self.args.output:
            make_directory(self.args.output)
            keep_tokenizer(self.args.output, self.api.tokenizer)
        self.open_log(first)
        interruption = Interruption(SINGLE_PROCESS)
        if not first:
            self.report(0, {}, self.test(0))
        for step in range(first, self.args.steps):
            row = self.update(step)
            done = step + 1
            due = done % self.args.test_every == 0 or done == self.args.steps
            self.report(done, row, self.test(done) if due else None)
            if due or interruption.received:
                self.save(done)
            if interruption.received:
                stopped(self.settings, done)
                return 128 + interruption.received
        return 0

    def update(self, step):
        """One update; returns its row of the log."""
        began = time.perf_counter()
        args, model, settings = self.args, self.model, self.settings
        answers = []
        rewards = []
        for index, prompt in enumerate(prompts_of(self.prompts, step, args.batch_size, args.seed)):
            group = self.sampler.answer(prompt, randoms_of(args.seed, step, index, args.group))
            answers += group
            rewards.append(rewards_of(self.reward, prompt, group))
        if all(answer.is_cut for answer in answers):
            print(f"step {step + 1}: no answer ends within --tokens {args.tokens}", file=sys.stderr)
        rewards = np.array(rewards)  # (prompts, answers)
        advantages = (rewards - rewards.mean(1, keepdims=True)).ravel()

        loss, entropy = compute_gradients(model, answers, advantages, args.rows)
        norm, scale = model.norm_and_scale(settings)
        check_update(step, loss, norm)
        model.optimizer.update(model.params, model.grads, settings, args.learning_rate, step + 1,
                               scale)
        return {"reward": rewards.mean(), "entropy": entropy,
                "equal_groups": np.mean(np.ptp(rewards, axis=1) == 0),
                "length": np.mean([len(answer.ids) for answer in answers]),
                "seconds": time.perf_counter() - began}

    def test(self, step):
        """The mean reward of greedy answers to the test's prompts; None without any."""
        if not self.tested:
            return None
        found = test(self.sampler, self.reward, self.tested)
        if step and -found < self.best[0]:
            self.best = -found, step
        return found

    def save(self, step):
        if self.args.output:
            notes = {"lowest": self.best if self.tested else (1e30, step), "of_patience": True,
                     "rewarded": self.same, "model": self.args.model,
                     "optimizer": self.settings.of_updates()}
            progress = Progress(step, 1, Position(0, 0, None), (0, 0, 0))
            save_checkpoint(self.settings, self.api.config, self.model.params,
                            owned_by_one(self.model.optimizer), progress, notes)

    def open_log(self, first):
        self.log = None
        if self.args.output:
            path = os.path.join(self.args.output, "rewards.csv")
            rows = open(path).readlines()[1:] if first and os.path.exists(path) else []
            kept = [row for row in rows if int(row.split(",")[0]) <= first]
            with replacing(path) as f:
                f.write("".join([",".join(COLUMNS) + "\n", *kept]).encode())
            self.log = open(path, "a", buffering=1)

    def report(self, step, row, tested):
        if tested is not None:
            row["test"] = tested
        if self.log:
            self.log.write(",".join([str(step), *(f"{row[name]:.6g}" if name in row else ""
                                                  for name in COLUMNS[1:])]) + "\n")
        if tested is not None or step % 10 == 0 or step == 1:
            words = [f"step {step}/{self.args.steps}"]
            for name, what in dict(reward="reward {:.3f}", equal_groups="equal groups {:.0%}",
                                   length="length {:.1f}", entropy="entropy {:.3f}",
                                   seconds="{:.2f} s", test="test {:.3f}").items():
                if name in row:
                    words.append(what.format(row[name]))
            print(" | ".join(words), flush=True)


if __name__ == "__main__":
    run_main(main)
