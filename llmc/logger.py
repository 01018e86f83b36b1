"""A run's logs, one event a line: main.log in llm.c's format, and main.csv beside it, for tables
and plots."""

import os
import re
import time

from llmc.errors import UserError
from llmc.files import errors_of_writing, make_directory, replacing

COLUMNS = ["step", "tokens", "seconds", "train_loss", "val_loss", "learning_rate", "norm",
           "tokens_per_second", "hellaswag"]
# with --dtype fp8: how many numbers of an update
FP8_COLUMNS = ["fp8_saturated", "fp8_underflowed"]
# of the log or the table; groups: its step and, of an update in the table, where steps count from
# 1, its loss
LINE = re.compile(r"(?:s:)?([0-9]{1,10})(?:"
                  r" |,[0-9]+,[0-9]{1,10}\.[0-9]+,([0-9a-z.+-]*)(?:,[0-9a-z.+-]*){5,7}\n)")


class Log:
    """A run's log: `s:0 tel:5.2520` (validation), `s:0 trl:5.3562` (training), `s:0 eval:0.2955`
    (HellaSwag). In a run's directory, training lines also have learning rate and norm, and main.csv
    has the events as rows of COLUMNS: `step` as on the screen, `tokens` trained on, `seconds` of
    training, without pauses. A new run renames earlier files to main.1.log and main.1.csv; a
    resumed run deletes the lines after its checkpoint."""

    def __init__(self, settings, first_step=0):
        self.file = None
        self.table = None
        self.detailed = settings.output_dir is not None
        self.columns = COLUMNS + FP8_COLUMNS * (getattr(settings, "dtype", None) == "fp8")
        if not settings.output:
            return
        path = os.path.join(settings.output, "main.log") if self.detailed else settings.output
        make_directory(os.path.dirname(path))
        self.file = opened(path, first_step)
        if not self.detailed:
            return
        self.tokens = settings.update_tokens
        self.table = opened(os.path.join(settings.output, "main.csv"), first_step)
        if not self.table.tell():
            append(self.table, ",".join(self.columns) + "\n")
        self.table.seek(0)
        table = [line.decode().rstrip("\n").split(",") for line in self.table]
        rows = table[1:]
        if table:  # a link to /dev/null has no head
            self.columns = table[0]  # --dtype may have changed
        self.began = time.perf_counter() - (float(rows[-1][2]) if rows else 0.0)
        # -d may have changed
        tokens = max(int(row[1]) for row in rows) if rows else first_step * self.tokens
        self.tokens_before = tokens - first_step * self.tokens

    def validation(self, step, loss):
        self.write(step, step, f"tel:{loss:.4f}", val_loss=f"{loss:.6f}")

    def evaluation(self, step, accuracy):
        self.write(step, step, f"eval:{accuracy:.4f}", hellaswag=f"{accuracy:.6f}")

    def training(self, step, learning_rate, update):
        """Log update number `step`, from 0, an Update. A .log file needs no norm."""
        if not self.detailed:
            return self.write(step, step + 1, f"trl:{update.loss:.4f}")
        self.write(step, step + 1,
                   f"trl:{update.loss:.4f} lr:{learning_rate:.6f} norm:{update.norm:.2f}",
                   train_loss=f"{update.loss:.6f}", learning_rate=f"{learning_rate:.6g}",
                   norm=f"{update.norm:.4f}",
                   tokens_per_second=f"{self.tokens / update.seconds:.0f}",
                   **dict(zip(FP8_COLUMNS, update.fp8 or ())))

    def write(self, step, done, event, **row):
        """Write an event after `done` updates to the log and, as a row, to the table."""
        if self.file:
            append(self.file, f"s:{step} {event}\n")
        if self.table:
            row |= {"step": done, "tokens": self.tokens_before + done * self.tokens,
                    "seconds": f"{time.perf_counter() - self.began:.3f}"}
            append(self.table, ",".join(str(row.get(name, "")) for name in self.columns) + "\n")


def append(file, text):
    with errors_of_writing(file.name):
        file.write(text.encode())


def opened(path, first_step):
    """Open a log: of a run that resumes, without its lines from first_step on; else empty, an older
    one is renamed."""
    with errors_of_writing(path):
        if first_step and os.path.exists(path):
            with open(path, errors="replace") as f:
                lines = f.readlines()
            first = int(bool(lines) and lines[0].startswith("step,"))  # a table has a head
            # a killed run may cut one
            steps = [LINE.match(line) for line in lines[first:] if line.endswith("\n")]
            if None in steps:
                raise UserError(f"{path}: is not a training log; move it away to go on")
            kept = [step.string for step in steps if int(step[1]) < first_step + bool(step[2])]
            with replacing(path) as f:
                f.write("".join(lines[:first] + kept).encode())
        elif os.path.isfile(path) and os.path.getsize(path):  # of an earlier run
            name, suffix = os.path.splitext(path)
            number = 1
            while os.path.exists(old := f"{name}.{number}{suffix}"):
                number += 1
            os.rename(path, old)
        return open(path, "a+b", buffering=0)
