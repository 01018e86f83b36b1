"""Checkpoints of a Trainer: copies of weights and optimizer state between the GPU and the host,
files written while training goes on, and read to resume it on any number of GPUs."""

import contextlib
import dataclasses
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from llmc.checkpoint import (Owned, check_crc, check_state_size, is_whole, rank_path,
                             read_state_header)
from llmc.errors import UserError
from llmc.files import HEADER_BYTES, open_input, read_into
from llmc.gpu.device import copy_to_gpu
from llmc.gpu.precision import describe_precision
from llmc.gpu.shares import Shares
from llmc.loop import Saver
from llmc.outliers import RECENT, notes_on, read_recent
from llmc.resume import restore, save_checkpoint
from llmc.tensors import flat, views

# --------------------------------------------------------------------------------------------------
# between the GPU and the host


def params_now(trainer):
    """Copy the weights to the host unchanged: bfloat16 bits in a bfloat16 run."""
    with trainer.device.stream:
        return views(trainer.params.table, trainer.params.buffer.get())


def state_now(trainer):
    """Copy this rank's share of the optimizer state to the host."""
    optimizer = trainer.optimizer
    with trainer.device.stream:
        state = {name: getattr(optimizer, name).get() for name in optimizer.STATE}
        exact = None if optimizer.master is None else optimizer.master.get()
    if trainer.ranks.size == 1:
        return Owned(trainer.params.table, state, exact)
    return OwnedShare(trainer.params.table, state, exact, trainer.shares, trainer.ranks.rank)


def empty_state(trainer):
    """Host memory for this rank's share of a checkpoint, which any number of ranks may have
    written."""
    optimizer = trainer.optimizer
    state = {name: np.empty(getattr(optimizer, name).size, np.float32) for name in optimizer.STATE}
    # float32 weights, beside or in the model
    has_exact = optimizer.master is not None or not trainer.precision.bf16
    exact = np.empty(optimizer.m.size, np.float32) if has_exact else None
    return OwnedShare(trainer.params.table, state, exact, trainer.shares, trainer.ranks.rank)


def set_state(trainer, owned, has_exact, step, recent):
    """Continue from a checkpoint. owned: this rank's share; has_exact: whether it has float32
    weights; recent: (2,) RECENT. A bfloat16 model keeps its weights: they may be owned.exact
    rounded stochastically."""
    optimizer = trainer.optimizer
    with trainer.device.stream:
        for name, array in owned.state.items():
            copy_to_gpu(getattr(optimizer, name), array)
        if has_exact and optimizer.master is not None:
            copy_to_gpu(optimizer.master, owned.exact)
        elif has_exact and not trainer.precision.bf16:
            params = flat(trainer.params)
            for part in trainer.shares.parts_of(trainer.ranks.rank):
                copy_to_gpu(params[part.begin : part.begin + part.size],
                            owned.exact[part.local : part.local + part.size])
            trainer.messages.send_all_weights()
        optimizer.set_step(step, recent)


def recent_values(trainer):
    """(2,) RECENT: losses and norms of the last updates, or zeros if outliers are not skipped."""
    with trainer.device.stream:
        return trainer.optimizer.recent.get().view(RECENT)


@dataclasses.dataclass
class OwnedShare(Owned):
    """The optimizer state of one rank of several, on the host: as Owned, of its parts."""

    shares: Shares = None
    rank: int = 0

    ranks = property(lambda self: self.shares.rank_count)

    def read(self, f, header, hint):
        """Fill the arrays from the files of all ranks that wrote a state, any number of them; f:
        rank 0's."""
        rank_count = int(header[2])
        ours = bool(header[40])
        arrays = list(self.in_file(header[4]).values())
        if rank_count > 1 and not ours and is_whole(f, len(arrays) * self.shares.size):
            rank_count = 1  # llm.c without ZeRO: each rank's file has all
        sources = Shares(self.table, rank_count, llmc=not ours)

        with contextlib.ExitStack() as stack:
            files = [(f, header)]
            for rank in range(1, rank_count):
                other = stack.enter_context(open_input(rank_path(f.name, rank), hint))
                found = read_state_header(other, hint)
                files.append((other, found))
                different = [slot for slot in (2, 4, 5, 10, 43, 44) if found[slot] != header[slot]]
                if different or found[3] != rank:
                    raise UserError(f"{other.name}: does not belong to {f.name}; {hint}")

            ends = [check_state_size(*file, len(arrays) * sources.share_size(rank), sources.size,
                                     hint) for rank, file in enumerate(files)]
            for file in files[self.rank :: self.ranks]:  # each rank checks its part of the files
                check_crc(*file, hint)

            for i, array in enumerate(arrays):
                for rank, (source, _) in enumerate(files) if array is not None else ():
                    begin = HEADER_BYTES + 4 * i * sources.share_size(rank)
                    self.read_from(source, begin, sources.parts_of(rank), array)
        return ends[0]

    def read_from(self, f, start, sources, array):
        """Read what `array` needs from one rank's file, in which that rank's array begins at byte
        `start`."""
        for source, target in itertools.product(sources, self.shares.parts_of(self.rank)):
            first = max(source.begin, target.begin)
            end = min(source.begin + source.size, target.begin + target.size)
            if first < end:
                f.seek(start + 4 * (source.local + first - source.begin))
                read_into(f,
                          array[target.local + first - target.begin : target.local + end
                                - target.begin])


# --------------------------------------------------------------------------------------------------
# files


class TrainerSaver(Saver):
    """Writes checkpoints: on one GPU while the next steps run; on several, training waits."""

    def __init__(self, trainer):
        super().__init__(trainer, trainer.settings)
        self.pool = ThreadPoolExecutor(1)
        self.complete = trainer.complete_weights
        self.writing = None  # the save in progress

    def restore(self, step, loader, random):
        trainer = self.model
        settings = self.settings
        owned = empty_state(trainer)
        restored = trainer.ranks.attempt(lambda: restore(settings, owned, step, loader, random))
        has_exact, notes = restored[trainer.ranks.rank]
        if not trainer.linears.restore(notes) and trainer.ranks.is_first:
            print("note: the checkpoint has no scales of FP8: this run finds its own",
                  file=sys.stderr)
        set_state(trainer, owned, has_exact, step, read_recent(notes))

        before = notes.get("precision")
        now = describe_precision(settings)
        if before not in (None, now) and trainer.ranks.is_first:
            print(f"note: the checkpoint is of a run in {before}, this one is in {now}: pass the"
                  " flags of the first run to repeat it", file=sys.stderr)

    def save(self, progress, notes):
        """Copy weights and state to the host, and start to write them."""
        self.wait()
        trainer = self.model
        settings = self.settings
        ranks = self.model.ranks
        self.complete()
        params = params_now(trainer) if ranks.is_first else None
        notes = {**notes, "precision": describe_precision(settings),
                 **notes_on(recent_values(trainer)), **trainer.linears.notes()}
        version = 5 if settings.precision.bf16 else 3

        arguments = (settings, trainer.config, params, state_now(trainer), progress, notes, version,
                     ranks)
        if ranks.size > 1:
            save_checkpoint(*arguments)
        else:
            self.writing = self.pool.submit(save_checkpoint, *arguments)

    def wait(self):
        writing = self.writing
        self.writing = None
        if writing:
            writing.result()

    def check(self):
        if self.writing and self.writing.done():
            self.wait()

    def close(self, failed):
        self.pool.shutdown()
        if not failed:
            self.wait()
        elif self.writing and (error := self.writing.exception()):
            print(f"note: the last checkpoint was not saved: {error}", file=sys.stderr)
