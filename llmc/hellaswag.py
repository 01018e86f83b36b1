"""HellaSwag: each example is a context with four endings; a model should give the right one the
highest probability.
Zellers et al. 2019, https://arxiv.org/abs/1905.07830. The file is in llm.c's format:
doc/formats.md."""

import itertools
from typing import NamedTuple

import numpy as np

from llmc.dataloader import check_ids
from llmc.errors import UserError
from llmc.files import EXAMPLES_MAGIC, open_input, read_header

HELLASWAG_HINT = "make it with: python prepro/hellaswag.py, or prepro/mmlu.py"
ENDINGS = 4
BEGIN = 65535  # the first number of a record
# version -> the type of a file's numbers; 2 is this project's
NUMBERS = {1: np.dtype("<u2"), 2: np.dtype("<u4")}


class Example(NamedTuple):
    """A question: which of the endings follows the context?"""

    context: np.ndarray  # (n,) token ids
    endings: list  # of 4 arrays of token ids
    label: int  # the right one


def load_examples(path, V, T, count=0, hint="pass -t"):
    """Read the first `count` Examples of a file (0: all). Raises UserError if it is damaged, has
    token ids of V or more or an example longer than T allows: with cut examples it would be another
    benchmark."""
    with open_input(path, HELLASWAG_HINT) as f:
        header = read_header(f, EXAMPLES_MAGIC, HELLASWAG_HINT)
        data = f.read()
    version = int(header[1])
    total = int(header[2])
    if version not in NUMBERS or total < 1 or len(data) % (2 * version):
        raise UserError(f"{path}: version {version} with {total} examples in {len(data)} bytes,"
                        " expected version 1 or 2, at least one example, and 2 or 4 bytes a"
                        f" number; {HELLASWAG_HINT}")
    numbers = np.frombuffer(data, NUMBERS[version])
    examples = []
    end = 0
    for index in range(total):
        begin = end
        parts = []
        head = numbers[begin : begin + 5].tolist()
        end = begin + 5
        for _ in range(1 + ENDINGS):
            length = int(numbers[end]) if end < len(numbers) else 0
            parts.append(numbers[end + 1 : end + 1 + length])
            end += 1 + length
        if (head != [BEGIN, 2 * version * (end - begin), index, *head[3:4], ENDINGS]
                or head[3] >= ENDINGS
                or end > len(numbers) or min(map(len, parts)) == 0):
            raise UserError(f"{path}: record {index} of {total} is damaged; {HELLASWAG_HINT}")
        check_ids(path, np.concatenate(parts), V)
        examples.append(Example(parts[0], parts[1:], head[3]))
    if end != len(numbers):
        raise UserError(f"{path}: {len(numbers) - end} numbers after the last record, expected 0;"
                        f" {HELLASWAG_HINT}")
    examples = examples[: count or None]
    longest = max(len(example.context) + max(map(len, example.endings)) for example in examples)
    if longest > T + 1:  # the last token is only a target
        raise UserError(f"{path}: its longest example has {longest} tokens, expected at most"
                        f" {T + 1}, for a sequence of {T}: {hint} {longest - 1} or more")
    return examples


def count_correct(losses_of, examples, B, T, starmap=itertools.starmap):
    """How many examples a model gets right: (acc_norm's, acc's). The ending with the smallest mean
    loss per token wins, as llm.c's acc_norm has it, or with the smallest sum; the first of equals.
    losses_of(inputs, targets): (B, T) int32, or fewer rows and positions -> the losses (B, T) of
    the targets. starmap: like itertools.starmap; that of a run's ranks shares the batches among
    GPUs."""
    rows = [(example.context, ending) for example in examples for ending in example.endings]
    # little padding
    order = np.argsort([len(context) + len(ending) for context, ending in rows], kind="stable")

    def means_of(*batch):
        """The mean losses of the endings in a batch of up to B rows."""
        longest = max(len(context) + len(ending) for context, ending in batch) - 1
        width = min(T, -(-longest // 64) * 64)  # few different shapes
        inputs, targets = np.zeros((2, len(batch), width), np.int32)
        for b, row in enumerate(batch):
            tokens = np.concatenate(row)
            inputs[b, : len(tokens) - 1] = tokens[:-1]
            targets[b, : len(tokens) - 1] = tokens[1:]
        spans = [(len(context) - 1, len(context) - 1 + len(ending)) for context, ending in batch]
        # the context's last token predicts the ending's first
        return [float(losses[first:stop].mean(dtype=np.float64))
                for losses, (first, stop) in zip(losses_of(inputs, targets), spans)]

    batches = ([rows[i] for i in order[begin : begin + B]] for begin in range(0, len(rows), B))
    means = np.empty(len(rows))
    means[order] = list(itertools.chain.from_iterable(starmap(means_of, batches)))
    if not np.isfinite(means).all():
        raise UserError("HellaSwag: the model's losses are not finite")
    sums = means * [len(ending) for _, ending in rows]
    labels = [example.label for example in examples]
    return tuple(int((losses.reshape(-1, ENDINGS).argmin(axis=1) == labels).sum())
                 for losses in (means, sums))
