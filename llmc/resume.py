"""A run's checkpoints: saving one, deleting old ones, resuming from the newest."""

import contextlib
import glob
import json
import os
import re
import shlex
import sys
import zlib

import numpy as np

from llmc.checkpoint import (padded, rank_path, read_model, read_optimizer_state, without_padding,
                             write_model, write_optimizer_state)
from llmc.errors import DIVERGED, UserError
from llmc.files import complete_checkpoints, open_input, replacing
from llmc.outliers import WINDOW
from llmc.single_process import SINGLE_PROCESS
from llmc.tensors import check_finite
from llmc.tokenizer import find_tokenizer, read_tokenizer


def checkpoint_paths(directory, step):
    """The paths (model, rank 0's optimizer state, DONE marker) of a checkpoint, complete once the
    marker exists."""
    return [os.path.join(directory, name) for name in
            (f"model_{step:08d}.bin", f"state_{step:08d}_00000.bin", f"DONE_{step:08d}")]


def newest_checkpoint(directory):
    """The step of the newest complete checkpoint in a directory, or None."""
    return max(complete_checkpoints(directory), default=None)


def model_file(path, checkpoint=""):
    """The model in a run's directory; `path` itself if it is a file. checkpoint: "best", "last" or
    a step; "": the best where --patience has kept it, which a note says, else the last."""
    steps = complete_checkpoints(path)
    if not steps or not os.path.isdir(path):
        return file_without_checkpoints(path, checkpoint)

    last = steps[-1]
    notes = read_notes(path, last)
    loss, best = notes.get("lowest", (0.0, None))
    if best not in steps:
        best = None
    if not checkpoint and best not in (None, last):
        of_best = f"reward {-loss:.3f}" if "rewarded" in notes else f"validation loss {loss:.4f}"
        print(f"note: {path}: this is the best checkpoint, of step {best}, {of_best}; the last is"
              f" {checkpoint_paths(path, last)[0]}", file=sys.stderr)

    chosen = {"": last if best is None else best, "best": best, "last": last}
    chosen |= {str(step): step for step in steps}
    if chosen.get(checkpoint) is None:
        raise UserError(f"{path}: no checkpoint {checkpoint}: expected last, one of the steps"
                        f" {', '.join(map(str, steps))} or, of a run with --patience, best")
    return checkpoint_paths(path, chosen[checkpoint])[0]


def file_without_checkpoints(path, checkpoint):
    """`path`, which is not the directory of a run; raises UserError if it is no file."""
    is_directory = os.path.isdir(path)
    if os.path.lexists(path) and not is_directory:
        if checkpoint:
            raise UserError(f"{path}: is a file, not the directory of a run, which has checkpoints")
        return path
    found = "holds no checkpoint" if is_directory else "no such file"
    raise UserError(f"{path or repr(path)}: {found}: expected the directory of a run (train with -o"
                    " DIR), a .bin file (make one with: python export_weights.py) or a Hugging Face"
                    " folder, with its config.json")


def save_checkpoint(settings, config, params, owned, progress, notes, version=3,
                    ranks=SINGLE_PROCESS):
    """Write a checkpoint, and delete those that -nk does not keep. Every rank writes its state;
    rank 0 also the model (only it needs `params`) and, when all have written, the marker, with
    `notes`. Raises UserError on all ranks, and leaves no file of this step, when weights or moments
    are not finite or a disk is full. version: 3 or 5."""
    model, state, marker = checkpoint_paths(settings.output_dir, progress.step)
    state = rank_path(state, ranks.rank)

    def check():
        if ranks.is_first:
            check_finite(f"after {progress.step} steps", params, DIVERGED)
        owned.check(f"after {progress.step} steps", DIVERGED)

    def write_marker():
        with replacing(marker) as f:
            f.write(json.dumps(notes, indent=1).encode() + b"\n")

    ranks.attempt(check)
    try:
        crc = ranks.attempt(lambda: write_model(model, config, params, version)
                            if ranks.is_first else None)[0]
        ranks.attempt(lambda: write_optimizer_state(state, owned, progress._replace(model_crc=crc)))
        ranks.attempt(lambda: write_marker() if ranks.is_first else None)
    except BaseException:
        # only it knows; else a rank has died since
        if ranks.is_first and not os.path.exists(marker):
            remove(settings.output_dir, progress.step)
        raise
    if ranks.is_first:
        delete_old_checkpoints(settings, progress.step, notes.get("lowest", [0, 0])[1])


def delete_old_checkpoints(settings, done, best):
    """Delete, of the checkpoints up to step `done`, just saved, those that nothing keeps: neither
    `done` nor `best` of --patience's own; of the others all but the newest -nk, every -nm'th step
    and `best`."""
    directory = settings.output_dir
    steps = [step for step in complete_checkpoints(directory) if step <= done]
    if settings.patience:
        for step in steps[:-1]:
            if step != best and is_of_patience(directory, step):
                remove(directory, step)
        steps = [step for step in complete_checkpoints(directory) if step <= done]
    for step in steps[: -settings.checkpoints_keep] if settings.checkpoints_keep else ():
        if step != best and step % (settings.major_checkpoint_every or 1 << 62):
            remove(directory, step)


def is_of_patience(directory, step):
    """Whether a checkpoint was made for --patience alone, not by -n, at the end or on Ctrl-C."""
    with contextlib.suppress(UserError):  # damaged notes
        return bool(read_notes(directory, step).get("of_patience"))
    return False


def remove(directory, step):
    """Delete a checkpoint's files, of all ranks, the marker first."""
    model, state, marker = checkpoint_paths(directory, step)
    for path in (marker, *glob.glob(rank_path(glob.escape(state), "?????")), model):
        with contextlib.suppress(OSError):
            os.unlink(path)


def find_checkpoint(settings):
    """The step to resume from, None for a new run; raises UserError rather than mix two runs in one
    directory."""
    directory = settings.output_dir
    step = newest_checkpoint(directory) if directory else None
    if step is not None and not settings.resume:
        raise UserError(f"{directory}: holds a checkpoint of step {step}: resume with -y 1, or"
                        " choose another -o")
    if settings.resume and step is None and os.listdir(directory):
        print(f"no complete checkpoint in {directory}: starting at step 0")
    return step


def read_start(settings, first_step, tokenizer, architecture):
    """(config, params, their file or -e's name) of the model that a run begins with: of its
    checkpoint at first_step or, if that is None, of -e. Random weights have the vocabulary size of
    the tokenizer, or GPT-2's, and the run's T as maxT: positions beyond it would never be trained.
    Raises UserError if T does not fit the model, or the tokenizer is not the one beside it."""
    V = len(tokenizer.tokens) if tokenizer else 50257
    start = settings.model
    made = None
    if first_step is not None:
        start, _, marker = checkpoint_paths(settings.output_dir, first_step)
        config, params = read_model(start, architecture, hint=go_back(marker))
    elif made := architecture.random_model(start, V, settings.seed, settings.T):
        config, params = made
    elif re.fullmatch(r"[a-z]\d+", start) and not os.path.exists(start):
        raise UserError(f"{start}: no model with random weights has this name: expected one of"
                        f" {', '.join(architecture.SIZES)}, or a file")
    else:
        if os.path.exists(os.path.join(start, "config.json")):
            raise UserError(f"-e {start}: a Hugging Face folder; run: python export_weights.py"
                            f" --model {start}")
        start = model_file(start) if os.path.isdir(start) else start
        config, params = read_model(start, architecture)
    if settings.T > config.maxT:
        raise UserError(f"-t/--sequence_length {settings.T}: the model's longest sequence is"
                        f" {config.maxT}")

    beside = find_tokenizer(start, config.V) if tokenizer and not made else None
    if beside and tokenizer != read_tokenizer(beside):
        raise UserError(f"{tokenizer.path}: is another vocabulary than {beside} ({V} tokens, the"
                        f" model has V={config.V}): choose a model and data of one vocabulary, or pass"
                        " --tokenizer FILE")
    # rows without a token are padding
    if V < config.V and (beside or tokenizer and config.V == padded(V)):
        config = without_padding(config, params, V)
    elif tokenizer and V != config.V and os.environ.get("RANK", "0") == "0":
        print(f"note: {tokenizer.path}: {V} tokens, for a model of {config.V} rows",
              file=sys.stderr)
    return config, params, start


def is_hex(text):
    return isinstance(text, str) and re.fullmatch("(?:[0-9a-f]{8})*", text)  # of float32 numbers


NOTES = {  # what a checkpoint's notes may hold: a test of its value
    **dict.fromkeys(("data", "val_data", "model", "precision"), lambda text: isinstance(text, str)),
    "update_tokens": lambda number: type(number) is int and number > 0,
    "optimizer": lambda settings: {*map(type, settings.values())} <= {int, float, str},
    "lowest": lambda pair: [type(number) for number in pair] in ([float, int], [int, int]),
    "recent": lambda rows: len(rows) == 2 and all(
        type(row["count"]) is int and 0 <= row["count"] < 2**31 and len(row["values"]) == WINDOW
        and {*map(type, row["values"])} <= {int, float} for row in rows),
    "fp8": lambda state: (type(state["updates"]) is int and is_hex(state["history"])
                          and is_hex(state["scales"]))}


def read_notes(directory, step):
    """Read a checkpoint's notes, a dict; raises UserError if they are damaged."""
    *_, marker = checkpoint_paths(directory, step)
    with open_input(marker, go_back(marker)) as f:
        try:
            notes = json.loads(f.read() or "{}")  # llm.c's file is empty
        except (ValueError, RecursionError):
            raise UserError(f"{marker}: cannot be read; {go_back(marker)}") from None
    if not isinstance(notes, dict):
        raise UserError(f"{marker}: is {notes!r:.60}, expected a JSON object; {go_back(marker)}")
    for name in NOTES.keys() & notes.keys():
        try:
            is_right = NOTES[name](notes[name])
        except (TypeError, KeyError, AttributeError):  # of another structure
            is_right = False
        if not is_right:
            raise UserError(f"{marker}: {name!r} is {notes[name]!r:.60}, which no run writes;"
                            f" {go_back(marker)}")
    return notes


def read_state(directory, step, owned, hint):
    """As read_optimizer_state, of a checkpoint. Raises UserError, too, if the state is of another
    step than its name says, or of another model than the file beside it."""
    model, state, _ = checkpoint_paths(directory, step)
    progress, has_exact = read_optimizer_state(state, owned, hint)
    if progress.step != step:
        raise UserError(f"{state}: of step {progress.step}, expected step {step}; {hint}")
    if progress.model_crc not in (None, zlib.crc32(np.memmap(model, np.uint8, "r"))):
        raise UserError(f"{state}: {model} is not the model that it was saved with (another"
                        f" CRC-32); {hint}")
    return progress, has_exact


def restore(settings, owned, step, loader, random):
    """Read a rank's share of a checkpoint's optimizer state into `owned`, and restore loader and
    sampler. Returns whether the state has float32 weights, and the notes; raises UserError for
    damaged files, or another run's flags."""
    _, state, marker = checkpoint_paths(settings.output_dir, step)
    progress, has_exact = read_state(settings.output_dir, step, owned, go_back(marker))
    if progress.position is None:
        progress = progress._replace(position=loader.position)
        if owned.rank == 0:
            print("note: each rank of llm.c shuffled the data on its own: their order begins anew",
                  file=sys.stderr)
    shuffled = int(progress.position.shuffle is not None)
    shuffle = shuffled if settings.shuffle == -1 else settings.shuffle
    given = settings.B, settings.T, settings.spread, shuffle
    found = *((*given[:2], 0) if progress.batch == (0, 0, 0) else progress.batch), shuffled
    if found != given:
        flags = "-b {} -t {} --spread {} --shuffle {}"
        raise UserError(f"{state}: of a run with {flags.format(*found)}, expected"
                        f" {flags.format(*given)}: resume with the flags of the first run")
    notes = read_notes(settings.output_dir, step)
    wanted, settings.model = settings.model, notes.get("model", settings.model)
    if wanted != settings.model and owned.rank == 0:
        print(f"note: the checkpoint's model goes on, which began as -e {settings.model}",
              file=sys.stderr)
    tokens = notes.get("update_tokens", settings.update_tokens)
    if tokens != settings.update_tokens and owned.rank == 0:
        print(f"note: an update of the checkpoint's run has {tokens} tokens, of this one"
              f" {settings.update_tokens}: pass -d {tokens} to continue as before", file=sys.stderr)
    loader.seek(progress.position, state)
    random.state = progress.rng_state
    print(f"resuming at step {step} from {settings.output_dir}")
    return has_exact, notes


def go_back(marker):
    return f"remove {marker} to resume from the checkpoint before it"


def stopped(settings, number, has_launcher=False):
    """Print how to resume a run. number: of the last line, or None; has_launcher: the command line
    is not known."""
    if not settings.output_dir:
        how = "nothing was saved: there is no -o DIR"
    elif has_launcher:
        how = "resume with the same command and -y 1"
    else:
        flags = [] if settings.resume else ["-y", "1"]
        how = f"resume with: {shlex.join(['python', *sys.argv, *flags])}"
    when = "before the first step" if number is None else f"after step {number}"
    print(f"stopped {when}; {how}", file=sys.stderr)
