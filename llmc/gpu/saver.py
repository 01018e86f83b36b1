"""Checkpoints of a Trainer: written while training goes on, and read to resume it."""

import sys
from concurrent.futures import ThreadPoolExecutor

from llmc.gpu.precision import describe_precision
from llmc.loop import Saver
from llmc.outliers import notes_on, read_recent
from llmc.resume import restore, save_checkpoint


class TrainerSaver(Saver):
    """Writes checkpoints: on one GPU while the next steps run; on several, training waits."""

    def __init__(self, trainer):
        super().__init__(trainer, trainer.settings)
        self.pool = ThreadPoolExecutor(1)
        self.complete, self.writing = trainer.complete_weights, None  # writing: the save in progress

    def restore(self, step, loader, random):
        trainer, settings = self.model, self.settings
        owned = trainer.state_now(room=True)
        restored = trainer.ranks.attempt(lambda: restore(settings, owned, step, loader, random))
        has_exact, notes = restored[trainer.ranks.rank]
        if trainer.fp8 and not trainer.fp8.restore(notes) and trainer.ranks.is_first:
            print("note: the checkpoint has no scales of FP8: this run finds its own", file=sys.stderr)
        trainer.set_state(owned, has_exact, step, read_recent(notes))
        before, now = notes.get("precision"), describe_precision(settings)
        if before not in (None, now) and trainer.ranks.is_first:
            print(f"note: the checkpoint is of a run in {before}, this one is in {now}: pass the flags of the first run"
                  " to repeat it", file=sys.stderr)

    def save(self, progress, notes):
        """Copy weights and state to the host, and start to write them."""
        self.wait()
        trainer, settings, ranks = self.model, self.settings, self.model.ranks
        self.complete()
        params = trainer.params_now() if ranks.is_first else None
        notes = {**notes, "precision": describe_precision(settings), **notes_on(trainer.recent_values()),
                 **(trainer.fp8.notes() if trainer.fp8 else {})}
        version = 5 if settings.precision.bf16 else 3
        arguments = settings, trainer.config, params, trainer.state_now(), progress, notes, version, ranks
        if ranks.size > 1:
            save_checkpoint(*arguments)
        else:
            self.writing = self.pool.submit(save_checkpoint, *arguments)

    def wait(self):
        writing, self.writing = self.writing, None
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
