"""A run's checkpoints: which there are, saving one, deleting old ones, resuming from one."""

import contextlib
import glob
import itertools
import json
import os
import re
import shlex
import sys

from llmc.alone import ALONE
from llmc.checkpoint import rank_path, read_model, read_optimizer_state, write_model, write_optimizer_state
from llmc.errors import DIVERGED, UserError
from llmc.files import OPTIMIZER_MAGIC, file_crc, open_input, read_header, replacing
from llmc.tensors import check_finite
from llmc.tokenizer import is_vocabulary


def checkpoint_paths(directory, step):
    """The paths (model, rank 0's optimizer state, DONE marker) of one step's checkpoint, complete once the marker is
    there."""
    return [os.path.join(directory, name) for name in
            (f"model_{step:08d}.bin", f"state_{step:08d}_00000.bin", f"DONE_{step:08d}")]


def complete_checkpoints(directory):
    """The steps of the complete checkpoints in a directory, ascending."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"DONE_([0-9]{8})", name)))


def newest_checkpoint(directory):
    """The step of the newest complete checkpoint in a directory, or None."""
    return max(complete_checkpoints(directory), default=None)


def newest_whole_checkpoint(directory):
    """The step of the newest checkpoint with the model and all ranks' states, with a warning for each newer one; raises
    UserError if there is none."""
    incomplete = []
    for step in reversed(complete_checkpoints(directory)):
        model, state, marker = checkpoint_paths(directory, step)
        ranks = 1
        if os.path.exists(state):
            with open_input(state, go_back(marker)) as f:
                ranks = int(read_header(f, OPTIMIZER_MAGIC, go_back(marker))[2])
        paths = itertools.chain([model], (rank_path(state, rank) for rank in range(ranks)))
        missing = next((path for path in paths if not os.path.exists(path)), None)
        if missing is None:
            for message in incomplete:
                print(f"warning: {message}: resuming from step {step}", file=sys.stderr)
            return step
        why = f", which {ranks} processes saved, says {state}" if ranks > 1 else ""
        incomplete.append(f"{missing}: no such file, a part of the checkpoint of step {step}{why}")
    raise UserError(f"{incomplete[0]}; there is no checkpoint before it: start again with another -o")


def model_file(path):
    """The newest model in a run's directory, with a warning if a newer checkpoint has lost its own; or `path` itself if
    it is a file."""
    expected = ("expected the directory of a run (train with -o DIR), a .bin file (make one with: python"
                " export_weights.py) or a Hugging Face folder, with its config.json")
    if not os.path.lexists(path):
        raise UserError(f"{path or repr(path)}: no such file: {expected}")
    if not os.path.isdir(path):
        return path
    models = [checkpoint_paths(path, step)[0] for step in reversed(complete_checkpoints(path))]
    found = next(filter(os.path.exists, models), None)
    if found is None:
        raise UserError(f"{path}: holds no checkpoint: {expected}")
    if found != models[0]:
        print(f"warning: {models[0]}: no such file: taking {found}", file=sys.stderr)
    return found


def save_checkpoint(directory, config, params, owned, progress, notes=None, version=3, ranks=ALONE):
    """Write model, optimizer state and marker, each renamed into place; an interruption leaves older checkpoints whole.
    Every rank writes its state; rank 0 also the model (only it needs `params`) and, last of all, the marker.

    notes: what else the run needs to continue as before, a dict for JSON. version: 3 for float32 weights, 5 for
    bfloat16. Raises UserError on all ranks, and leaves no file of this step, when weights or moments are not finite or
    a rank's disk is full.
    """
    model, state, done = checkpoint_paths(directory, progress.step)
    state = rank_path(state, ranks.rank)
    paths = (model, state, done) if ranks.is_first else (state,)

    def check():
        kept = f"the last checkpoint, if any, is kept: {DIVERGED}"
        if ranks.is_first:
            check_finite(f"after {progress.step} steps", params, kept)
        owned.check(f"after {progress.step} steps", kept)

    def write_marker():
        with replacing(done) as f:
            if notes:
                f.write(json.dumps(notes, indent=1).encode() + b"\n")

    def remove_marker():  # that of an earlier save of this step, of which a part was lost
        if ranks.is_first:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(done)

    ranks.attempt(check)
    ranks.attempt(remove_marker)
    try:
        crc = ranks.attempt(lambda: write_model(model, config, params, version) if ranks.is_first else None)[0]
        ranks.attempt(lambda: write_optimizer_state(state, owned, progress._replace(model_crc=crc)))
        ranks.attempt(lambda: write_marker() if ranks.is_first else None)
    except BaseException as error:
        for path in reversed(paths):
            with contextlib.suppress(OSError):
                os.unlink(path)
        if isinstance(error, UserError):  # raised on all ranks: wait, as the first to go on would end the others
            ranks.gather(None)
        raise


def delete_old_checkpoints(settings, done):
    """Delete checkpoints up to step `done`, just saved, except the newest -nk and those of every -nm'th step. (Later
    ones are from an earlier run, and could not be resumed from.) Markers go last: the next call deletes what this one,
    if killed, has left."""
    steps = [step for step in complete_checkpoints(settings.output_dir) if step <= done]
    for step in steps[: -settings.checkpoints_keep] if settings.checkpoints_keep else []:
        if not (settings.major_checkpoint_every and step % settings.major_checkpoint_every == 0):
            model, state, marker = checkpoint_paths(settings.output_dir, step)
            for path in (model, *states_of_ranks(state), marker):
                with contextlib.suppress(OSError):
                    os.unlink(path)


def states_of_ranks(path):
    """The existing state files of all ranks, given the path of rank 0's."""
    return sorted(glob.glob(rank_path(glob.escape(path), "[0-9]" * 5)))


def remove_half_written(directory):
    """Remove the temporary files of a run that was killed while it saved."""
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        if re.fullmatch(r"((model_[0-9]{8}|state_[0-9]{8}_[0-9]{5})\.bin|DONE_[0-9]{8})\.tmp", name):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, name))


def find_checkpoint(settings):
    """The step to resume from, None for a new run; raises UserError rather than mix two runs in one directory."""
    directory = settings.output_dir
    step = newest_checkpoint(directory) if directory else None
    if settings.resume and directory:
        remove_half_written(directory)
    if settings.resume and step is not None:
        step = newest_whole_checkpoint(directory)
    if settings.resume and step is None:
        print(f"no complete checkpoint in {directory}: starting at step 0")
    if step is not None and not settings.resume:
        raise UserError(f"{directory}: holds a checkpoint of step {step}: resume with -y 1, or choose another -o")
    check_steps(settings, step)
    return step


def check_steps(settings, first_step):
    """Raise UserError if the checkpoint's step (None: no checkpoint) is beyond the last step, once that is known."""
    if first_step is not None and 0 < settings.steps < first_step:
        raise UserError(f"{settings.output}: its checkpoint is of step {first_step}, beyond -x {settings.steps}: pass a"
                        " larger -x")


def read_start(settings, first_step, tokenizer, architecture):
    """Return (config, params, their file or -e's name) of the model that a run begins with: that of -e or, if
    first_step is not None, of its checkpoint.

    A model with random weights, like d12, has the vocabulary size of the tokenizer or, without one, of GPT-2, and the
    run's T as its maxT: positions beyond it would never be trained. Raises UserError if T or the tokenizer does not fit
    the model.
    """
    V, start = len(tokenizer.tokens) if tokenizer else 50257, settings.model
    if first_step is not None:
        start, _, marker = checkpoint_paths(settings.output_dir, first_step)
        config, params = read_model(start, architecture, hint=go_back(marker))
    elif made := architecture.random_model(start, V, settings.seed, settings.T):
        config, params = made
    else:
        if os.path.exists(os.path.join(start, "config.json")):
            raise UserError(f"-e {start}: a Hugging Face folder; convert it with: python export_weights.py --model"
                            f" {start}")
        start = model_file(start) if os.path.isdir(start) else start
        config, params = read_model(start, architecture)
        beside = os.path.join(os.path.dirname(start), "tokenizer.bin")
        if tokenizer and not is_vocabulary(beside, tokenizer):
            raise UserError(f"{tokenizer.path}: is another vocabulary than {beside}, which {start} was trained with:"
                            " choose a model and data of one vocabulary")
    if settings.T > config.maxT:
        raise UserError(f"-t/--sequence_length {settings.T}: the model's longest sequence is {config.maxT}")
    if tokenizer and V != config.V:
        raise UserError(f"{tokenizer.path}: {V} tokens, but the model has V={config.V}: choose a model and data of one"
                        " vocabulary, or pass --tokenizer FILE")
    return config, params, start


@contextlib.contextmanager
def notes_of(settings, step):
    """Context manager: yields a checkpoint's notes, a dict. Raises UserError for damage, also if the block finds it."""
    *_, marker = checkpoint_paths(settings.output_dir, step)
    try:
        with open(marker) as f:
            yield json.loads(f.read() or "{}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UserError(f"{marker}: cannot be read; {go_back(marker)}") from None


def restore(settings, owned, step, loader, random):
    """Read a rank's share of a checkpoint's optimizer state into `owned`, and restore loader and sampler. Returns
    whether the state has float32 weights; raises UserError for damaged files, and for flags unlike the first run's."""
    model, state, marker = checkpoint_paths(settings.output_dir, step)
    progress, has_exact = read_optimizer_state(state, owned, hint=go_back(marker))
    if progress.model_crc not in (None, file_crc(model)):
        raise UserError(f"{state}: {model} is not the model that it was saved with (another CRC-32); {go_back(marker)}")
    if progress.position is None:
        progress = progress._replace(position=loader.position)
        if owned.rank == 0:
            print("note: llm.c's ranks shuffle the data each in an order of its own, which cannot be continued: it"
                  " begins anew", file=sys.stderr)
    shuffled = int(progress.position.shuffle is not None)
    given = settings.B, settings.T, settings.spread, shuffled if settings.shuffle == -1 else settings.shuffle
    found = *((*given[:2], 0) if progress.batch == (0, 0, 0) else progress.batch), shuffled
    if progress.step != step or found != given:
        flags = "-b {} -t {} --spread {} --shuffle {}"
        raise UserError(f"{state}: of step {progress.step} with {flags.format(*found)}, expected step {step} with"
                        f" {flags.format(*given)}: resume with the flags of the first run")
    with notes_of(settings, step) as notes:
        tokens = notes.get("update_tokens", settings.update_tokens)
    if tokens != settings.update_tokens and owned.rank == 0:
        print(f"note: an update of the checkpoint's run has {tokens} tokens, of this one {settings.update_tokens}: pass"
              f" -d {tokens} to continue as before", file=sys.stderr)
    loader.seek(progress.position, state)
    random.state = progress.rng_state
    print(f"resuming at step {step} from {settings.output_dir}")
    return has_exact


def go_back(marker):
    """The hint for a damaged checkpoint."""
    return f"remove {marker} to resume from the checkpoint before it"


def stopped(settings, number, has_launcher=False):
    """Print how to resume a run that a signal has stopped. number: of the last printed line, or None; has_launcher:
    whether torchrun, say, started it, whose command line is not known here."""
    if not settings.output_dir:
        how = "nothing was saved: there is no -o DIR"
    elif has_launcher:
        how = "resume with the same command and -y 1"
    else:
        how = f"resume with: {shlex.join(['python', *sys.argv, *([] if settings.resume else ['-y', '1'])])}"
    print(f"stopped {'before the first step' if number is None else f'after step {number}'}; {how}", file=sys.stderr)
