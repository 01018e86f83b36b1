"""Checkpoints of a Trainer: written while training goes on, and read to resume it."""

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor

from llmc.checkpoint import Progress
from llmc.outliers import notes_on, read_recent
from llmc.gpu.precision import describe_precision
from llmc.resume import delete_old_checkpoints, notes_of, restore, save_checkpoint
from llmc.threads import leave_signals_alone


class Saver:
    """Writes checkpoints: on one GPU while the next steps run; on several before, because ranks wait for each other."""

    def __init__(self, trainer, train_loader, random, interruption):
        self.trainer, self.train_loader, self.random, self.interruption = trainer, train_loader, random, interruption
        self.pool = ThreadPoolExecutor(1, initializer=leave_signals_alone)
        self.writing, self.saved = None, None  # the save in progress; the step that was saved last

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.pool.shutdown()
        if kind is None:
            self.wait()
        elif self.writing and (error := self.writing.exception()):
            print(f"note: the last checkpoint was not saved: {error}", file=sys.stderr)

    def save(self, done):
        """Copy weights and state after `done` updates to the host, and start to write them."""
        self.wait()
        self.saved = done
        trainer, settings, ranks = self.trainer, self.trainer.settings, self.trainer.ranks
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.interruption.saving())
            batch = (settings.B, settings.T, settings.spread)
            progress = Progress(done, self.random.state, self.train_loader.position, batch)
            trainer.complete_weights()
            params = trainer.params_now() if ranks.is_first else None
            owned = trainer.state_now()
            notes = {**trainer.matmul.notes(), "precision": describe_precision(settings),
                     "update_tokens": settings.update_tokens, **notes_on(trainer.recent_values())}
            saving = stack.pop_all()  # exited once all is written

        def write():
            with saving:
                save_checkpoint(settings.output_dir, trainer.config, params, owned, progress, notes,
                                version=5 if settings.precision.bf16 else 3, ranks=ranks)
                if ranks.is_first:
                    delete_old_checkpoints(settings, done)

        if ranks.size > 1:
            write()
        else:
            self.writing = self.pool.submit(write)

    def wait(self):
        """Wait until the last checkpoint is on the disk; if writing it failed, raise its error."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def check(self):
        """Without waiting, raise the error of a checkpoint that could not be written."""
        if self.writing and self.writing.done():
            self.wait()


def resume(trainer, step, train_loader, random):
    """Restore trainer, loader and sampler from a checkpoint; print how the run will differ from the first one."""
    settings, matmul, ranks = trainer.settings, trainer.matmul, trainer.ranks
    owned = trainer.state_room(with_exact=trainer.master is not None or not trainer.precision.bf16)
    has_exact = restore(settings, owned, step, train_loader, random)
    with notes_of(settings, step) as notes:
        same, recent = matmul.recall(notes), read_recent(notes)
    trainer.set_state(owned if has_exact else owned._replace(exact=None), step, recent)
    before, now = notes.get("precision"), describe_precision(settings)
    if before not in (None, now) and ranks.is_first:
        print(f"note: the checkpoint is of a run in {before}, this one is in {now}: pass the flags of the first run to"
              " repeat it", file=sys.stderr)
    if not same and ranks.is_first:
        found = matmul.identity_in(notes)
        found = f"is from {found}" if found else "names no GPU, as train_gpt2.py's and llm.c's do not"
        print(f"note: the checkpoint {found}, this is {matmul.identity}: what follows agrees up to rounding",
              file=sys.stderr)
