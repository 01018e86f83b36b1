"""
What a run does around its updates: read its model and data, validate, sample, log, save, resume,
stop on a signal. Nothing here depends on the architecture, or on where tensors lie. A page
(train_gpt2.py, train_gpt2_cuda.py) passes the class of its model, then a model with forward, losses
and decoder, and a Saver; the updates are the page's own.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
from signal import SIGTERM
from typing import NamedTuple

import numpy as np

from llmc import threads
from llmc.checkpoint import Progress, owned_by_one
from llmc.dataloader import open_data
from llmc.errors import DIVERGED, Interrupted, Interruption, UserError
from llmc.files import EXPORT, HELLASWAG
from llmc.logger import Log
from llmc.outliers import notes_on, read_recent
from llmc.progress import Console
from llmc.resume import find_checkpoint, read_notes, read_start, restore, save_checkpoint, stopped
from llmc.sampler import Choice, Random, end_of_text, print_sample
from llmc.schedulers import learning_rate_at
from llmc.settings import print_changed_settings
from llmc.single_process import SINGLE_PROCESS
from llmc.tensors import unpadded
from llmc.tokenizer import keep_tokenizer, load_tokenizer


class Update(NamedTuple):
    """The results of an update."""

    loss: float
    norm: float | None  # of the gradients; None unless settings.needs_norm
    seconds: float
    skipped: str | None  # why the weights were not updated
    # of loss and norm: see outliers.py; None unless settings.skips_outliers
    z_scores: tuple | None = None
    # in a run of --dtype fp8: how many numbers are the largest of 8 bits or NaN, and how many 0
    fp8: tuple | None = None


class Loop(contextlib.AbstractContextManager):
    """A run, as a page's main() uses it. It reads tokenizer, model (config, params) and data.
    `start` gets the page's model, and resumes. Iteration yields the step of each update; the page
    passes its Update to `report`."""

    def __init__(self, settings, architecture, ranks=SINGLE_PROCESS, resolve=None):
        """architecture: a page's class; ranks: see single_process.py; resolve: on a GPU, fills in
        the settings that depend on it. Raises UserError if files do not fit each other or the
        settings."""
        self.ranks = ranks
        self.architecture = architecture
        self.status = 0
        self.first_step = ranks.gather(find_checkpoint(settings) if ranks.is_first else None)[0]
        self.notes = {}  # of the checkpoint that it resumes from
        if self.first_step is not None:
            self.notes = read_notes(settings.output_dir, self.first_step)
        self.tokenizer = load_tokenizer(settings)
        self.config, self.params, self.model_path = read_start(settings, self.first_step,
                                                               self.tokenizer, architecture)
        self.parameters = sum(tensor.size for tensor in unpadded(self.params, self.config.V))
        self.train_loader, self.val_loader = open_data(settings, self.config.V, ranks.rank,
                                                       ranks.size)
        row = self.train_loader.shards[0].row
        if ranks.is_first and row and settings.T % row:
            print(f"note: {self.train_loader.shards[0].path}: has rows of {row} tokens, which -t"
                  f" {settings.T} cuts: pass -t {row}", file=sys.stderr)
        if ranks.is_first and settings.sample_every and not self.tokenizer:
            print(f"warning: no gpt2_tokenizer.bin: samples are printed as token ids; {EXPORT}",
                  file=sys.stderr)
        self.examples = []
        if settings.hellaswag:
            from llmc import hellaswag  # here: few runs need it
            self.count_correct = hellaswag.count_correct
            count = 0 if settings.hellaswag == 1 else settings.hellaswag
            self.examples = hellaswag.load_examples(HELLASWAG, self.config.V, settings.T, count)
        # for programs that use the run's models
        if ranks.is_first and self.tokenizer and settings.output_dir:
            keep_tokenizer(settings.output_dir, self.tokenizer)
        settings.fit_to_text(self.train_loader.batches_per_epoch // settings.micro_steps)
        if settings.lines == "short":
            print_changed_settings(settings)
        self.settings = resolve(settings) if resolve else settings
        if self.settings.steps == 0:  # one epoch
            updates = self.train_loader.batches_per_epoch // self.settings.micro_steps
            if settings.is_llmc:  # which counts the ends of shards, too
                tokens = sum(shard.size for shard in self.train_loader.shards)
                updates = tokens // self.settings.update_tokens
            self.settings.steps = max(1, updates)
        self.random = Random()
        self.running = self.saver = None
        self.begin = self.first_step or 0
        self.saved = self.first_step  # the step of the last checkpoint, if any
        self.lowest = (math.inf, 0)  # validation loss, its step
        self.above = 0  # how many were above it since
        if self.begin > self.settings.steps:
            raise UserError(f"{settings.output}: its checkpoint is of step {self.begin}, beyond -x"
                            f" {self.settings.steps}: pass a larger -x")
        if settings.lines == "llmc":
            from llmc.llmc_lines import LlmcCudaLines, LlmcLines  # here: few runs need them
            console = LlmcCudaLines if resolve else LlmcLines
        else:
            console = Console
        self.console = console(self)

    def __exit__(self, kind, *_):
        self.console.erase()
        if self.saver:
            self.saver.close(kind is not None)

    def start(self, model, saver):
        """model: with forward, losses, decoder; saver: see Saver, which this restores from the
        checkpoint, if any."""
        self.model = model
        self.saver = saver
        self.params = None
        if self.first_step is not None:
            saver.restore(self.first_step, self.train_loader, self.random)
            self.lowest = tuple(self.notes.get("lowest", self.lowest))
        settings = self.settings
        if not self.ranks.is_first:
            settings = dataclasses.replace(settings, output="")
        self.log = Log(settings, self.begin)

    def __iter__(self):
        settings, directory = self.settings, self.settings.output_dir
        self.interruption = Interruption(self.ranks)
        self.console.start()
        for step in range(self.begin, settings.steps + 1):
            self.saver.check()
            last = step == settings.steps
            validates, samples = (every and (step % every == 0 or settings.final_reports and last)
                                  for every in (settings.val_every, settings.sample_every))
            if validates or samples or last:
                self.finish()
                self.saver.complete()
            before = self.random.state
            try:
                if validates:
                    self.evaluate(step)
                if samples and step > 0:
                    self.sample()
            except Interrupted as interrupted:
                # a resumed run validates and samples again at this step
                self.random.state = before
                if directory and step not in (0, self.saved):
                    self.save(step)
                return self.stop(step, *interrupted.args)
            if validates and settings.patience:
                if self.above >= settings.patience and not last:
                    self.console.stops_early(step, *self.lowest)
                    last = True
                if directory and step != self.saved and (last or not self.above):
                    self.save(step, of_patience=True)
            if last:
                break
            yield step
            done = step + 1
            # of the next update
            own_batches = settings.micro_steps // self.ranks.size * (done < settings.steps)
            read_ahead = functools.partial(self.train_loader.read_ahead, own_batches)
            try:
                read_ahead()
            except (UserError, OSError):  # save first
                self.interruption.received = self.interruption.received or SIGTERM
            signal = self.ranks.largest(self.interruption.received)  # of any rank, or None
            every = settings.checkpoint_every
            due = done == settings.steps or every and done % every == 0
            if due or signal:
                self.finish()
                if directory:
                    self.save(done)
            if signal:
                # raises the error in the data, if that is the reason
                self.ranks.attempt(read_ahead)
                return self.stop(done, signal)
        self.saver.wait()  # until the model is on the disk: the last line names it
        self.console.end()

    def report(self, step, update):
        """Print and log update number `step`, from 0. Raises UserError when its loss or norm is not
        finite."""
        check_update(step, update.loss, None if update.skipped else update.norm)
        rate = learning_rate_at(self.settings, step)
        self.console.training(step, update, rate)
        self.log.training(step, rate, update)
        if update.skipped:
            self.console.skip(step, update.skipped)

    def report_later(self, step, end):
        """Report the previous update. This one was just launched: end() waits for it, and returns
        its Update."""
        self.finish()
        self.running = step, end

    def finish(self):
        if self.running:
            (step, end), self.running = self.running, None
            self.report(step, end())

    def evaluate(self, step):
        """Report the validation loss and, with --hellaswag, its accuracy."""
        settings = self.settings
        starmap = functools.partial(self.ranks.starmap, check=self.interruption.check)
        self.console.wait_for("validating")
        loss, targets = validate(self.model.forward, self.val_loader, settings.val_batches, starmap)
        if not math.isfinite(loss):
            raise UserError(f"step {step}: the validation loss is {loss}; {DIVERGED}")
        self.console.validation(step, loss, targets)
        self.log.validation(step, loss)
        self.above += 1
        if loss <= self.lowest[0]:
            self.lowest = (loss, step)
            self.above = 0
        if self.above == 3 and not settings.patience:
            self.console.overfits(step, *self.lowest)
        if self.examples and step > 0:  # as llm.c
            self.console.wait_for("HellaSwag")
            correct, _ = self.count_correct(self.model.losses, self.examples, settings.B,
                                            settings.T, starmap)
            self.console.hellaswag(step, correct, len(self.examples))
            self.log.evaluation(step, correct / len(self.examples))

    def sample(self):
        """Print a sample, drawn by the first rank; the others advance `random` equally."""
        self.console.erase()
        count = self.settings.sample_tokens - 1
        if self.ranks.is_first:
            begin = np.array([[end_of_text(self.tokenizer, self.config.V)]], np.int32)
            drawn = self.model.decoder.draw(begin, count, [self.random], Choice())
            with self.interruption.output():
                print_sample(self.interruption.watching(drawn), self.tokenizer)
        else:
            for _ in self.interruption.watching(range(count)):
                self.random.u32()
        self.interruption.check()  # the first rank may have lost its terminal

    def save(self, done, of_patience=False):
        """Save a checkpoint after `done` updates. of_patience: a later one may replace it."""
        self.console.wait_for("saving")
        batch = (self.settings.B, self.settings.T, self.settings.spread)
        progress = Progress(done, self.random.state, self.train_loader.position, batch)
        notes = {name: getattr(self.settings, name)
                 for name in ("update_tokens", "data", "val_data", "model")}
        notes["optimizer"] = self.settings.of_updates()
        if self.settings.patience:
            notes |= {"lowest": self.lowest, "of_patience": of_patience}
        self.saver.save(progress, notes)
        self.saved = done

    def stop(self, done, signal):
        """End the loop after `done` updates, because of a signal."""
        self.finish()
        self.saver.wait()
        self.status = 128 + signal
        self.console.erase()
        with self.interruption.output():
            number = done - 1 + self.console.counts_from if done else None
            stopped(self.settings, number, self.ranks.has_launcher)


class Saver:
    """Saves and restores a model in NumPy. (On a GPU: llmc/gpu/saver.py.)"""

    def __init__(self, model, settings):
        self.model, self.settings = model, settings

    def restore(self, step, loader, random):
        """Continue from a checkpoint: the model, the data loader and the sampler's random
        numbers."""
        owned = owned_by_one(self.model.optimizer, self.model.params)
        _, notes = restore(self.settings, owned, step, loader, random)
        self.model.recent = read_recent(notes)

    def save(self, progress, notes):
        """Write a checkpoint. progress: a Progress; notes: for JSON."""
        model, owned = self.model, owned_by_one(self.model.optimizer)
        notes = {**notes, "threads": threads.THREADS, **notes_on(model.recent)}
        save_checkpoint(self.settings, model.config, model.params, owned, progress, notes)

    # on GPUs: wait for the weights that others send; until the checkpoint is written; raise the
    # error of one that failed, without a wait; end, by an exception or not
    complete = wait = check = close = lambda *_: None


def validate(forward, loader, batches, starmap=itertools.starmap):
    """(the mean loss of the first `batches` batches of the validation data, or of all if there are
    fewer; with weights, of how many targets, else None). forward(inputs, targets, weights) -> a
    batch's loss; starmap: shares batches among GPUs. Raises UserError if no target has a weight."""
    def weighed(inputs, targets, weights=None):
        if weights is None:  # a smaller batch at the end counts less
            return forward(inputs, targets), len(inputs) / loader.B, 0
        total = float(weights.sum(dtype=np.float64))
        loss = forward(inputs, targets, weights) if total else 0.0
        return loss, total, int(np.count_nonzero(weights))

    found = list(starmap(weighed, itertools.islice(loader.whole_set(), batches)))
    total = math.fsum(weight for _, weight, _ in found)
    if not total:
        raise UserError(f"{loader.shards[0].weights}: no target to validate on has a weight: pass"
                        " -v 0, or a larger -m")
    targets = sum(count for *_, count in found) if loader.has_weights else None
    return math.fsum(loss * weight for loss, weight, _ in found) / total, targets


def check_update(step, loss, norm=None, hint=DIVERGED):
    """Raise UserError, whose message ends in `hint`, when the loss or, unless it is None, the norm
    of update number `step`, from 0, is not finite."""
    for what, value in (("loss", loss), ("gradient norm", norm or 0.0)):
        if not math.isfinite(value):
            raise UserError(f"step {step + 1}: the {what} is {value}; {hint}")
