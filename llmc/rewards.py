"""What train_rl.py is given: prompts, in which order they come, and a rule that rewards answers."""

import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader

import numpy as np

from llmc.errors import UserError
from llmc.files import open_input


def read_prompts(path, sampler, tokens, T):
    """(the lines of a file, the tokens of the longest); raises UserError for one that with an
    answer of so many tokens is longer than T."""
    with open_input(path, "expected prompts, a line each") as f:
        try:
            lines = f.read().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: byte {error.start} is not UTF-8: save it as UTF-8") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"{path}: has no line, expected prompts, a line each")
    lengths = [len(sampler.ids_of(prompt)) for prompt in prompts]
    if max(lengths) + tokens > T:
        longest = prompts[lengths.index(max(lengths))]
        raise UserError(f"{path}: {longest[:40]!r} has {max(lengths)} tokens, which with --tokens"
                        f" {tokens} are more than the model's {T}")
    return prompts, max(lengths)


def prompts_of(prompts, step, count, seed):
    """The prompts of an update: all in a random order, again and again in another one."""
    numbers = range(step * count, (step + 1) * count)
    orders = {number // len(prompts): None for number in numbers}
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(len(prompts))
              for epoch in orders}
    return [prompts[orders[number // len(prompts)][number % len(prompts)]] for number in numbers]


def read_reward(path):
    """The function `reward` of a Python file."""
    if not os.path.isfile(path):
        raise UserError(f"--reward {path}: no such file, expected Python with reward(prompt,"
                        " answer)")
    name = "a_rule_for_train_rl"
    loader = SourceFileLoader(name, os.fspath(path))  # whatever the file's name ends in
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = module
    sys.path.append(os.path.dirname(os.path.abspath(path)))  # for what it imports
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file raises
        raise UserError(f"--reward {path}: {type(error).__name__}: {error}") from None
    found = getattr(module, "reward", None)
    if not callable(found):
        raise UserError(f"--reward {path}: has no function reward(prompt, answer)")
    return found


class RewardError(UserError):
    """What reward() raised, or a number that is no reward."""


def rewards_of(reward, prompt, answers):
    """reward() of each answer (G,); of one that was cut 0. Raises RewardError if it fails."""
    found = np.zeros(len(answers))
    for g, answer in enumerate(answers):
        if not answer.is_cut:
            try:
                found[g] = reward(prompt, answer.text)
            except Exception as error:  # whatever a user's function raises
                raise RewardError(f"--reward: reward({prompt!r}, {answer.text!r}) fails:"
                                  f" {type(error).__name__}: {error}") from None
    if not np.isfinite(found).all() or found.min() < 0.0:
        raise RewardError(f"--reward: reward({prompt!r}, ...) gives {found}, expected finite"
                          " numbers, 0 or more: an answer that is cut counts 0")
    return found
