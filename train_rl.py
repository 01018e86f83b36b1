"""
Learning from rewards: a model's answers are drawn, a function of yours says how good each is, and
what was better than its like becomes more likely.

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
become likelier. As E[grad log p] = 0, a number that does not depend on the answer can be subtracted
from r: what is expected stays, and the noise is less. We take the mean of the group: an answer's
advantage is A_g = r_g - mean(r). (The mean contains r_g, which only makes the gradient shorter, by
1 - 1/G.) So we go down the gradient of

    loss = sum over all answers of an update of A_g * sum over their tokens of -log p(token) / N

p(token) being its probability after all before it, N the number of tokens of all answers of the
update. That is the cross entropy of training, with A_g as the weight of each token of an answer and
0 for those of the prompt. An answer that was worse than the others has a negative weight: its
gradient is turned round, and at each position the step lowers the logit of the token that was drawn
and raises all others, the likely ones most. If all answers of a group are equally good, it teaches
nothing. An answer that does not end within --tokens is cut and gets 0, so rewards should not be
negative.

Others add to that: GRPO (https://arxiv.org/abs/2402.03300) divides A by the group's deviation,
averages over each answer first, keeps the step near the old p by clipping their ratio, and near a
reference by a penalty (KL). Dr. GRPO (https://arxiv.org/abs/2503.20783) shows that both divisions
favor the wrong: long bad answers, and prompts that are nearly always or never solved. Here each
update has answers of its own, so there is no ratio to clip.
"""

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import os
import sys
import time
import warnings
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from llmc.api import load_with_vocabulary, on_gpu
from llmc.chat import Template, find_template
from llmc.checkpoint import Progress
from llmc.errors import Interrupted, Interruption, Parser, UserError, run_main
from llmc.files import locked, make_directory, replacing
from llmc.gpu.device import gpu_errors_as_lines, try_gpu
from llmc.loop import Saver, check_update
from llmc.resume import checkpoint_paths, find_checkpoint, read_notes, stopped
from llmc.rewards import RewardError, prompts_of, read_prompts, read_reward, rewards_of
from llmc.sampler import Choice, Random, draw
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
    """Draws answers."""

    def __init__(self, vocabulary, most):
        """most: tokens of an answer."""
        self.vocabulary = vocabulary
        self.most = most
        self.template = None  # it continues plain text
        if find_template(vocabulary)[0] is not None:
            self.template = Template(vocabulary, "the model", "MODEL")

    def ids_of(self, prompt):
        if not self.template:
            return self.vocabulary.encode(prompt)
        text = self.template.render([{"role": "user", "content": prompt}], answers=True)
        return self.template.encode(text)[0]

    def answer(self, model, prompt, randoms, temperature=1.0):
        """An Answer to a prompt, a text, for each Random. model: an OnCpu, an OnGpu, or else with
        their `draw`."""
        ids = self.ids_of(prompt)
        stops = self.vocabulary.stops
        drawn = [[] for _ in randoms]
        logprobs = np.zeros(len(randoms))
        going = np.ones(len(randoms), bool)
        steps = model.draw(np.array([ids], np.int32), self.most, randoms, Choice(temperature))
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


# --------------------------------------------------------------------------------------------------
# an update


def batches_of(answers, advantages, rows, T):
    """[(inputs, targets, weights)], each (rows,T): `rows` answers at a time, the last ones with
    empty rows. The target of a position is the next token, its weight the answer's advantage (n,),
    or 0 where it is the prompt's."""
    batches = []
    for begin in range(0, len(answers), rows):
        inputs, targets = np.zeros((2, rows, T), np.int32)
        weights = np.zeros((rows, T), np.float32)
        for i, answer in enumerate(answers[begin : begin + rows]):
            ids = answer.prompt + answer.ids
            inputs[i, : len(ids) - 1] = ids[:-1]
            targets[i, : len(ids) - 1] = ids[1:]
            weights[i, len(answer.prompt) - 1 : len(ids) - 1] = advantages[begin + i]
        batches.append((inputs, targets, weights))
    return batches


DIVERGED = "the last checkpoint, if any, is kept: try a lower -l, or smaller rewards"


class OnCpu:
    """A model that draws and learns."""

    def __init__(self, architecture, config, params, settings, group):
        """settings: B and T of a batch, and of the optimizer; group: answers at a time."""
        self.settings = architecture.Settings(**settings)
        self.model = architecture(config, params)
        self.model.allocate_activations(self.settings.B, self.settings.T)
        self.model.allocate_training(self.settings.B, self.settings.T, self.settings.micro_steps)
        self.decoder = architecture.Decoder(config, params, group, self.settings.T)
        self.saver = Saver(self.model, self.settings)

    def draw(self, *arguments):
        return draw(self.decoder, *arguments, want_logprobs=True)

    def gradients(self, batches, total):
        """model.grads = the gradients of the loss at the head, total: N; returns that loss."""
        loss = 0.0
        for i, batch in enumerate(batches):
            loss += self.model.forward(*batch, total=total)
            self.model.backward(i, len(batches))
        return loss

    def update(self, batches, total, step):
        """Changes nothing if no target has a weight."""
        if not any(weights.any() for *_, weights in batches):
            return
        loss = self.gradients(batches, total)
        norm, scale = self.model.norm_and_scale(self.settings)
        check_update(step, loss, norm, DIVERGED)
        self.model.optimizer.update(self.model.params, self.model.grads, self.settings,
                                    self.settings.learning_rate, step + 1, scale)


class OnGpu:
    """The same on a GPU, in bfloat16 where it has that."""

    def __init__(self, gpu, architecture, config, params, settings, group):
        from llmc.gpu.saver import TrainerSaver
        from llmc.gpu.trainer import Trainer, open_device
        architecture = on_gpu(architecture)
        self.settings = architecture.resolve_auto(architecture.Settings(**settings), gpu.arch)
        _, matmul = open_device(architecture, gpu, config, self.settings.precision, text=True)
        try:
            self.trainer = Trainer(architecture, config, self.settings, matmul, params, text=group)
        except UserError as error:  # too large: in this program's flags
            raise UserError(str(error).replace("-b ", "--rows ")) from None
        self.trainer.prepare()
        self.saver = TrainerSaver(self.trainer)

    def draw(self, prompt, count, randoms, choice):
        """The decoder always draws a whole group."""
        decoder = self.trainer.decoder
        idle = [Random() for _ in range(decoder.B - len(randoms))]
        for tokens, logprobs in decoder.draw(prompt, count, [*randoms, *idle], choice):
            yield tokens[: len(randoms)], logprobs[: len(randoms)]

    def update(self, batches, total, step):
        number = self.trainer.begin_step(batches, self.settings.learning_rate, total)
        update = self.trainer.end_step(number)
        check_update(step, update.loss, update.norm, DIVERGED)


# --------------------------------------------------------------------------------------------------
# the run


def parse_arguments():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("model", help="a run's directory or a .bin file, of a model that answers already")
    add("--prompts", required=True, metavar="FILE", help="prompts to learn on, a line each")
    add("--test", metavar="FILE", help="other prompts, which are answered greedily now and then")
    add("--reward", required=True, metavar="FILE",
        help="Python with reward(prompt, answer) -> a number, 0 or more")
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
    add("--device", choices=("auto", "cpu", "gpu"), default="auto",
        help="where it runs (auto: on a GPU if there is one that can run the model)")
    add("--seed", type=int, default=1337, metavar="N", help="of prompts' order, and of answers")
    args = parser.parse_args()
    for name, least in dict(steps=1, batch_size=1, group=2, rows=0, tokens=1, test_every=1,
                            seed=0).items():
        if getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)}: expected at least {least}")
    if args.output.endswith(".log"):
        raise UserError(f"-o {args.output}: a log file, expected the name of a directory")
    return args


def open_model(args, found, rows, T):
    """An OnGpu or an OnCpu. found: architecture, config, params; rows, T: of a batch."""
    micro_steps = -(-args.batch_size * args.group // rows)
    settings = dict(model=args.model, output=args.output, resume=args.resume, B=rows, T=T,
                    total_batch_size=rows * T * micro_steps, learning_rate=args.learning_rate,
                    weight_decay=0.0, beta2=0.95, grad_clip=args.grad_clip,
                    patience=1)  # of which the newest checkpoint and the best are kept
    there = try_gpu(args.device, lambda gpu: OnGpu(gpu, *found, settings, args.group))
    return there or OnCpu(*found, settings, args.group)


@gpu_errors_as_lines()
def main():
    warnings.simplefilter("ignore", RuntimeWarning)  # check_update stops at what is not finite
    args = parse_arguments()
    settings = Settings(output=args.output, resume=args.resume, grad_clip=args.grad_clip,
                        learning_rate=args.learning_rate)
    settings.check()
    reward = read_reward(args.reward)
    with locked(settings.output_dir):
        first = find_checkpoint(settings) if settings.output_dir else None
        start = checkpoint_paths(args.output, first)[0] if first else args.model
        *found, vocabulary = load_with_vocabulary(start)
        if not vocabulary:
            raise UserError(f"{args.model}: no vocabulary is beside it")
        sampler = Sampler(vocabulary, args.tokens)
        maxT = found[1].maxT
        prompts, longest = read_prompts(args.prompts, sampler, args.tokens, maxT)
        test_prompts = []
        if args.test:
            test_prompts, longest_test = read_prompts(args.test, sampler, args.tokens, maxT)
            longest = max(longest, longest_test)
        if not args.output:
            print("nothing is saved: there is no -o DIR")
        T = longest + args.tokens - 1  # the last token is a target alone
        rows = min(args.rows or max(1, 8192 // T), args.batch_size * args.group)
        model = open_model(args, found, rows, T)
        return Run(args, model, sampler, reward, prompts, test_prompts).go(first or 0)


class Run:
    """The loop, its log and its checkpoints."""

    def __init__(self, *arguments):
        (self.args, self.model, self.sampler, self.reward, self.prompts,
         self.test_prompts) = arguments
        self.settings = self.model.settings
        self.best = (1e30, 0)  # minus the test's reward, its step
        # what a resumed run must have, too
        self.same = {name: getattr(self.args, name)
                     for name in ("batch_size", "group", "tokens", "seed")}
        self.same |= {"rows": self.settings.B, "length": self.settings.T}

    def go(self, first):
        if first:
            notes = read_notes(self.args.output, first)
            if "rewarded" not in notes:
                raise UserError(f"{self.args.output}: of a run of another program: choose another"
                                " -o")
            if notes["rewarded"] != self.same:
                raise UserError(f"{self.args.output}: of a run with {notes['rewarded']}, found"
                                f" {self.same}: resume with its flags and prompts")
            if first >= self.args.steps:
                raise UserError(f"{self.args.output}: its checkpoint is of step {first}: pass a"
                                " larger -x")
            self.best = tuple(notes.get("lowest", self.best))
            nothing = SimpleNamespace(seek=lambda *_: None)  # no loader, no sampler of a run's
            self.model.saver.restore(first, nothing, nothing)
        elif self.args.output:
            make_directory(self.args.output)
            keep_tokenizer(self.args.output, self.sampler.vocabulary)
        self.open_log(first)
        self.interruption = Interruption(SINGLE_PROCESS)
        try:
            if not first:
                self.report(0, {}, self.test(0, self.interruption.check))
        except Interrupted as interrupted:
            stopped(self.settings, None)
            return 128 + interrupted.args[0]

        done = saved = first
        try:
            for step in range(first, self.args.steps):
                row = self.update(step)
                done = step + 1
                due = done % self.args.test_every == 0 or done == self.args.steps
                self.report(done, row, self.test(done) if due else None)
                if due or self.interruption.received:
                    self.save(done)
                    saved = done
                if self.interruption.received:
                    stopped(self.settings, done)
                    return 128 + self.interruption.received
        except RewardError:
            if done > saved:
                self.save(done)
            raise
        if self.args.output:
            print(f"the model is in {self.args.output}")
        return 0

    def update(self, step):
        """One update; returns its row of the log."""
        began = time.perf_counter()
        args = self.args
        answers = []
        rewards = []
        for index, prompt in enumerate(prompts_of(self.prompts, step, args.batch_size, args.seed)):
            randoms = randoms_of(args.seed, step, index, args.group)
            group = self.sampler.answer(self.model, prompt, randoms)
            answers += group
            rewards.append(rewards_of(self.reward, prompt, group))
        if all(answer.is_cut for answer in answers):
            print(f"step {step + 1}: no answer ends within --tokens {args.tokens}", file=sys.stderr)
        rewards = np.array(rewards)  # (prompts, answers)
        advantages = (rewards - rewards.mean(1, keepdims=True)).ravel()

        tokens = sum(len(answer.ids) for answer in answers)
        batches = batches_of(answers, advantages, self.settings.B, self.settings.T)
        self.model.update(batches, tokens, step)
        return {"reward": rewards.mean(),
                "equal_groups": np.mean(np.ptp(rewards, axis=1) == 0),
                "length": tokens / len(answers),
                # whose expected value is the entropy of the model's choices
                "entropy": -sum(answer.logprob for answer in answers) / tokens,
                "seconds": time.perf_counter() - began}

    def test(self, step, check=lambda: None):
        """The mean reward of greedy answers to the test's prompts; None without any. check: called
        before each, may raise Interrupted."""
        if not self.test_prompts:
            return None
        rewards = []
        for prompt in self.test_prompts:
            check()
            answers = self.sampler.answer(self.model, prompt, [Random()], 0.0)
            rewards.append(rewards_of(self.reward, prompt, answers))
        mean = float(np.mean(rewards))
        if step and -mean < self.best[0]:
            self.best = -mean, step
        return mean

    def save(self, step):
        if self.args.output:
            notes = {"lowest": self.best if self.test_prompts else (1e30, step),
                     "of_patience": True, "rewarded": self.same, "model": self.args.model,
                     "optimizer": self.settings.of_updates()}
            self.model.saver.save(Progress(step, 1, Position(0, 0, None), (0, 0, 0)), notes)
            self.model.saver.wait()

    def open_log(self, first):
        self.log = None
        if self.args.output:
            path = os.path.join(self.args.output, "rewards.csv")
            rows = open(path).readlines()[1:] if first and os.path.exists(path) else []
            numbers = [row.split(",")[0] for row in rows]
            kept = [row for row, number in zip(rows, numbers)
                    if number.isdigit() and int(number) <= first and row.endswith("\n")]
            with replacing(path) as f:
                f.write("".join([",".join(COLUMNS) + "\n", *kept]).encode())
            self.log = open(path, "a", buffering=1)

    def report(self, step, row, test_reward):
        if test_reward is not None:
            row["test"] = test_reward
        if self.log:
            self.log.write(",".join([str(step), *(f"{row[name]:.6g}" if name in row else ""
                                                  for name in COLUMNS[1:])]) + "\n")
        if test_reward is not None or step % 10 == 0 or step == 1:
            words = [f"step {step}/{self.args.steps}"]
            for name, what in dict(reward="reward {:.3f}", equal_groups="equal groups {:.0%}",
                                   length="length {:.1f}", entropy="entropy {:.3f}",
                                   seconds="{:.2f} s", test="test {:.3f}").items():
                if name in row:
                    words.append(what.format(row[name]))
            with self.interruption.output():
                print(" | ".join(words), flush=True)


if __name__ == "__main__":
    run_main(main)
