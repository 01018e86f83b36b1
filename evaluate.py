"""
Evaluate a model: validation loss, perplexity, bits per byte, HellaSwag.

    python evaluate.py runs/mine                          # on its own data; prints its settings, then:
        | validation loss       | 2.280989, of windows 64 tokens apart               |
        | perplexity            | 9.7095 = exp(2.2731), of windows 32 tokens apart   |
        | bits per byte         | 3.2787, of windows 32 tokens apart                 |
    python evaluate.py gpt2_124M.bin --hellaswag data/hellaswag_val.bin --examples 100
    python evaluate.py my_gpt2/ --data "data/fineweb10B/fineweb_val_*.bin" --tokens 1000000 --json

MODEL is a run's directory, a .bin file or a Hugging Face folder. It runs on the GPU if there is
one, in float32 with TF32 matmuls, else on the CPU in NumPy. Set --context to the sequence length
that the model was trained with; it is limited to the model's longest sequence, which is that length
for models trained here from random weights.

Validation loss: the mean over consecutive rows of --context tokens, as the trainers compute it with
a large -m. Perplexity: over windows of --context tokens, --stride apart. Only a window's new tokens
count, so all but the first window's are predicted from at least context - stride others:
transformers' "Perplexity of fixed-length models". Bits per byte: the losses of the same windows,
divided by the bytes of the text, which prepro_text.py notes in a token file. Unlike perplexity, it
can be compared between vocabularies. End-of-text tokens are not text and are left out. HellaSwag,
MMLU: acc_norm is llm.c's, the ending with the smallest mean loss of a token; acc, with the smallest
sum.
"""

import llmc  # noqa: F401  (before NumPy: it sets what OpenBLAS reads when NumPy loads it)

import argparse
import json
import math
import os
import sys
import warnings
from typing import NamedTuple

import numpy as np

from llmc.dataloader import (TokenFile, find_files, names_shards, open_tokens, tokenizer_beside,
                             validation_name)
from llmc.errors import Parser, UserError, run_main
from llmc.files import HELLASWAG
from llmc.hellaswag import count_correct, load_examples
from llmc.gpu.device import gpu_errors_as_lines, try_gpu
from llmc.progress import print_table
from llmc.resume import model_file, newest_checkpoint, read_notes
from llmc.tensors import table_bytes
from llmc.tokenizer import read_tokenizer
from llmc.api import load_model, load_with_vocabulary, on_gpu
from prepro.common import progress_bar

# --------------------------------------------------------------------------------------------------
# the model: after allocate_activations(B, T), losses(inputs, targets), both up to (B, T), returns
# losses of their shape


def open_model(architecture, config, params, device, T):
    """Return (model, name of its device, a batch size that suits it for windows of T tokens)."""
    def open_on(gpu):
        from llmc.gpu.trainer import Evaluator

        return Evaluator(on_gpu(architecture), gpu, config, params), gpu.name, 4

    fits = (B for B in (16, 8, 4, 2)
            if table_bytes(architecture.activation_table(config, B, T)) <= 1 << 28)
    return try_gpu(device, open_on) or (architecture(config, params), "CPU", next(fits, 1))


# --------------------------------------------------------------------------------------------------
# losses of a token file: a window (begin, first, stop) reads tokens from `begin` on and scores
# tokens `first` to `stop` - 1


def rows(count, T):
    """Return the windows of the validation loss: rows of T tokens, each predicting the next one.

    A shorter last row is left out, unless it is the only one.
    """
    if count <= T:
        return [(0, 1, count)]
    return [(begin, begin + 1, begin + T + 1) for begin in range(0, count - T, T)]


def strided(count, T, stride):
    """Return the windows of the perplexity: each token is scored once, in the first window that
    contains it.

    The first token of the file is not scored; with stride = T, neither is that of any other window.
    """
    windows = []
    scored = 1
    for begin in range(0, count, stride):
        stop = min(begin + T, count)
        # a window's first token has nothing before it
        windows.append((begin, max(scored, begin + 1), stop))
        scored = stop
        if stop == count:
            break
    return windows


def score(model, data, windows, B, T, what):
    """Yield (ids, losses, weights or None) of each window's scored tokens; the model takes B
    windows at a time."""
    tokens = data.tokens
    with progress_bar(len(windows), what, "window") as advance:
        for i in range(0, len(windows), B):
            batch = windows[i : i + B]
            inputs, targets = np.zeros((2, len(batch), T), np.int32)
            for b, (begin, _, stop) in enumerate(batch):
                inputs[b, : stop - 1 - begin] = tokens[begin : stop - 1]
                targets[b, : stop - 1 - begin] = tokens[begin + 1 : stop]
            losses = model.losses(inputs, targets)
            for b, (begin, first, stop) in enumerate(batch):
                scored = slice(first - begin - 1, stop - begin - 1)
                weights = None if data.weights is None else data.weights[first:stop]
                yield targets[b, scored], losses[b, scored], weights
            advance(len(batch))


class Sum:
    """Sums over scored tokens: losses and number of all, and losses and bytes of those that are not
    end of text. With weights, of the losses that they weigh, and of those tokens."""

    def __init__(self, tokenizer=None):
        self.tokenizer = tokenizer
        self.loss = self.text_loss = self.total = 0.0
        self.tokens = self.bytes = 0

    def add(self, ids, losses, weights):
        if weights is not None:
            self.loss += np.sum(losses * weights, dtype=np.float64)
            self.total += weights.sum(dtype=np.float64)
            self.tokens += int(np.count_nonzero(weights))
            return
        self.loss += losses.sum(dtype=np.float64)
        self.total += len(ids)
        self.tokens += len(ids)
        if self.tokenizer:
            is_text = ids != self.tokenizer.eot
            self.text_loss += losses[is_text].sum(dtype=np.float64)
            self.bytes += int(self.tokenizer.lengths[ids[is_text]].sum())

    @property
    def mean(self):
        return float(self.loss / self.total)


def evaluate_data(model, files, tokenizer, B, T, stride):
    """Return the results on Data as a dict; raises UserError if a loss is not finite."""
    validation = Sum()
    perplexity = Sum(tokenizer)
    for data in files:
        count = len(data.tokens)
        for scored in score(model, data, rows(count, T), B, T, "validation loss"):
            validation.add(*scored)
        for scored in score(model, data, strided(count, T, stride), B, T, "perplexity"):
            perplexity.add(*scored)
    if not validation.total or not perplexity.total:
        raise UserError(f"{files[0].path}: none of its tokens has a weight: pass other --data")
    for found in (validation.mean, perplexity.mean):
        if not math.isfinite(found):
            raise UserError(f"the model's loss is {found}: it has diverged")
    is_weighed = any(data.weights is not None for data in files)
    text_bytes = bytes_of_text(files, perplexity) if tokenizer and not is_weighed else 0
    return {
        "validation_loss": validation.mean,
        "perplexity": math.exp(perplexity.mean),
        "bits_per_byte": float(perplexity.text_loss / math.log(2) / text_bytes) if text_bytes
        else None,
        "tokens": perplexity.tokens,
        "bytes": text_bytes or None,
        "weighed": is_weighed,
    }


def bytes_of_text(files, scored):
    """How many bytes of text the scored tokens stand for, as their files say or, if a text is the
    bytes of its tokens, as the vocabulary does; 0, with a note, if neither knows."""
    if (scored.tokens == sum(len(data.tokens) - 1 for data in files)
            and all(data.text_bytes for data in files)):
        return sum(data.text_bytes for data in files)
    if scored.tokenizer.is_exact:
        return scored.bytes
    unknown = next((data.path for data in files if not data.text_bytes), None)
    why = (f"{unknown}: does not say of how many bytes" if unknown
           else "not all tokens of the data are scored")
    print("note: no bits per byte: the bytes of this vocabulary's tokens are not those of the"
          f" text; {why}",
          file=sys.stderr)
    return 0


class Data(NamedTuple):
    """Tokens of a file."""

    path: str
    tokens: np.ndarray  # (n,) integers
    # that all but the first stand for; 0 if the file does not say, or for a part of it
    text_bytes: int
    weights: np.ndarray | None  # (n,) uint8, of the tokens as targets


def open_files(pattern, V, most, tokenizer=None):
    """Return --data as a list of Data, of `most` tokens in all (0: no limit). Raises UserError if
    they are of another vocabulary than `tokenizer`."""
    beside = tokenizer_beside(pattern)
    if tokenizer and os.path.lexists(beside) and read_tokenizer(beside) != tokenizer:
        raise UserError(f"--data {pattern}: {beside} is another vocabulary than the model's,"
                        f" {tokenizer.path}")
    paths = find_files(pattern if names_shards(pattern) else f"{pattern}_val.bin")
    if not paths:
        raise UserError(f"--data {pattern}: no file matches")
    left = most or math.inf
    files = []
    for path in paths:
        if left > 1:
            tokens = open_tokens(path, V, 2, " to predict one from the other")
            taken = tokens[: int(min(left, len(tokens)))]
            left -= len(taken)
            file = TokenFile(path, V)
            text_bytes = file.text_bytes if len(taken) == len(tokens) else 0
            weights = np.memmap(file.weights, np.uint8, "r")[: len(taken)] if file.weights else None
            files.append(Data(path, taken, text_bytes, weights))
    return files


# --------------------------------------------------------------------------------------------------
# multiple choice: HellaSwag, MMLU

CHOICES = {"hellaswag": "HellaSwag", "mmlu": "MMLU"}  # flag -> name


def evaluate_choices(model, name, examples, B, T):
    """Return the results on examples as a dict."""
    with progress_bar(4 * len(examples), name, "ending") as advance:

        def losses_of(inputs, targets):
            advance(len(inputs))
            return model.losses(inputs, targets)

        normed, correct = count_correct(losses_of, examples, B, T)
    return {"acc_norm": normed / len(examples), "acc": correct / len(examples), "correct": normed,
            "examples": len(examples)}


# --------------------------------------------------------------------------------------------------
# main


def parse_arguments():
    parser = Parser(__doc__)
    parser.add_argument("model",
                        help="the directory of a run, a .bin file or a Hugging Face folder")
    parser.add_argument("--checkpoint", metavar="best|last|N", default="",
                        help="of a run; N: of step N (default: the best where --patience kept it,"
                        " else the last)")
    parser.add_argument("--data", metavar="FILES", default=argparse.SUPPRESS,
                        help="validation tokens: a path, a quoted glob, or the PREFIX of"
                        " PREFIX_val.bin (default: those of the run, unless there is --hellaswag"
                        " or --mmlu)")
    parser.add_argument("--tokens", type=int, metavar="N", default=0,
                        help="the first N tokens of the data (0: all)")
    parser.add_argument("--context", type=int, metavar="T", default=1024,
                        help="tokens of a window; at most"
                        " the model's longest sequence")
    parser.add_argument("--stride", type=int, metavar="N", default=0,
                        help="tokens from one window to the next, at most"
                        " the context (0: half of it)")
    parser.add_argument("--hellaswag", metavar="FILE", default=argparse.SUPPRESS,
                        help=f"examples written by prepro/hellaswag.py: {HELLASWAG}")
    parser.add_argument("--mmlu", metavar="FILE", default=argparse.SUPPRESS,
                        help="examples written by prepro/mmlu.py: data/mmlu_test.bin")
    parser.add_argument("--examples", type=int, metavar="N", default=0,
                        help="the first N of those (0: all)")
    parser.add_argument("--batch_size", type=int, metavar="B", default=0,
                        help="windows at a time (0: on a CPU up to 16, of 256 MiB in all; 4 on a"
                        " GPU)")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto",
                        help="auto: a GPU if there is one")
    parser.add_argument("--tokenizer", metavar="FILE", default=argparse.SUPPRESS,
                        help="tokenizer file, for bits per byte (default: the one beside the model)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    if not any(hasattr(args, flag) for flag in ("data", *CHOICES)):
        args.data = data_of_run(args.model)
    for name, least in (("tokens", 0), ("context", 2), ("stride", 0), ("examples", 0),
                        ("batch_size", 0)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)}: expected at least {least}")
    for flag, of in (("examples", CHOICES), ("tokens", ("data",))):
        if getattr(args, flag) and not any(hasattr(args, name) for name in of):
            raise UserError(f"--{flag} {getattr(args, flag)}: there is no --{' or --'.join(of)}, of"
                            " which it takes the first: add it, or leave this out")
    if args.batch_size >= 2**16:
        raise UserError(f"--batch_size {args.batch_size}: expected at most 65535")
    if args.tokens == 1:
        raise UserError("--tokens 1: expected at least 2, to predict one from the other")
    return args


def data_of_run(model):
    """Return the validation data that a run's newest checkpoint names; raises UserError if there is
    none."""
    step = newest_checkpoint(model)
    if step is None and not os.path.exists(os.path.join(model, "config.json")):
        model_file(model)  # raises UserError if there is no model
    notes = read_notes(model, step) if step is not None else {}
    if "data" in notes:
        train = notes["data"]
        return notes.get("val_data") or (validation_name(train) if names_shards(train) else train)
    raise UserError(f"{model}: names no data to evaluate on: pass --data FILES, or --hellaswag"
                    " FILE, or both")


def evaluate(args):
    """Run the evaluations of `args`; returns the results as a dict."""
    if hasattr(args, "data"):
        architecture, config, params, tokenizer = load_with_vocabulary(
            args.model, getattr(args, "tokenizer", None), args.checkpoint)
    else:  # examples are ids
        architecture, config, params = load_model(args.model, args.checkpoint)
        tokenizer = None
    T = min(args.context, config.maxT)
    if T < 2:
        raise UserError(f"{args.model}: its longest sequence is one token, expected at least 2, to"
                        " predict one from the other")
    stride = min(args.stride or T // 2, T)
    files = []
    choices = {}
    if hasattr(args, "data"):
        files = open_files(args.data, config.V, args.tokens, tokenizer)
    hint = ("pass --context" if T < config.maxT
            else "this is the model's longest sequence: train one with -t")
    for flag in CHOICES:
        if hasattr(args, flag):
            choices[flag] = load_examples(getattr(args, flag), config.V, T, args.examples, hint)
    model, device, B = open_model(architecture, config, params, args.device, T)
    B = args.batch_size or B
    model.allocate_activations(B, T)
    results = {"model": args.model, "device": device, "context": T}
    if files:
        results |= {"data": args.data, "validation_stride": T, "stride": stride,
                    **evaluate_data(model, files, tokenizer, B, T, stride)}
    for flag, examples in choices.items():
        results[flag] = evaluate_choices(model, CHOICES[flag], examples, B, T)
    return results


def print_results(results):
    table = [[("model", results["model"]), ("device", results["device"]),
              ("context", results["context"])]]
    if "data" in results:
        what = "targets scored" if results["weighed"] else "tokens scored"
        table[0] += [("data", results["data"]), (what, results["tokens"])]
        measures = [("validation loss", "validation_loss", ".6f", "validation_stride"),
                    ("perplexity", "perplexity", ".4f", "stride"),
                    ("bits per byte", "bits_per_byte", ".4f", "stride")]
        whence = {"perplexity": f" = exp({math.log(results['perplexity']):.4f})"}
        table.append([(name,
                       f"{results[key]:{spec}}{whence.get(key, '')}, of windows {results[stride]}"
                       " tokens apart")
                      for name, key, spec, stride in measures if results[key] is not None])
    for flag, name in CHOICES.items():
        if found := results.get(flag):
            table.append([(f"{name} acc_norm",
                           f"{found['acc_norm']:.4f} ({found['correct']} of {found['examples']})"),
                          (f"{name} acc", f"{found['acc']:.4f}")])
    print_table(table)


@gpu_errors_as_lines()
def main():
    # of overflow: a loss that is not finite is an error anyway
    warnings.simplefilter("ignore", RuntimeWarning)
    args = parse_arguments()
    results = evaluate(args)
    if args.json:
        print(json.dumps(results))
    else:
        print_results(results)


if __name__ == "__main__":
    run_main(main)
