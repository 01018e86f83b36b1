"""A run's logs, one event a line: main.log in llm.c's format, and main.csv beside it, for tables and plots."""

import os
import re
import time

from llmc.errors import UserError
from llmc.files import errors_of_writing, make_directory, replacing

RULE = re.compile(r"--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ---")  # separates a run's lines from those of earlier runs
COLUMNS = ("step", "tokens", "seconds", "train_loss", "val_loss", "learning_rate", "norm", "tokens_per_second",
           "hellaswag")


def last_run(lines):
    """The index of the first line of the last run in a log: after the last rule, or 0."""
    return max((i for i, line in enumerate(lines, 1) if RULE.fullmatch(line.rstrip("\n"))), default=0)


class Log:
    """A run's log, one event a line, the step first: `s:0 tel:5.2520` (validation), `s:0 trl:5.3562` (training),
    `s:0 eval:0.2955` (HellaSwag).

    In a run directory (main.log), training lines also have the learning rate and the gradient norm, and main.csv has
    the same events as rows of COLUMNS: `tokens` trained on so far, `seconds` since the run's first start without its
    pauses. A new run keeps earlier ones: it appends to the log after a rule with the date, and renames the old table to
    main.1.csv. A resumed run drops what the interrupted one wrote after its checkpoint.
    """

    def __init__(self, settings, first_step=0):
        self.file, self.table, self.detailed = None, None, settings.output_dir is not None
        if not settings.output:
            return
        path = os.path.join(settings.output, "main.log") if self.detailed else settings.output
        make_directory(os.path.dirname(path))
        self.file = opened(path, first_step, kept_lines, "lines like 's:0 trl:4.1234'")
        if self.file.tell() and not first_step:
            self.file.seek(-1, os.SEEK_END)
            self.write("" if self.file.read() == b"\n" else "\n", end="")
            self.write(time.strftime("--- %Y-%m-%d %H:%M:%S ---"))
        if self.detailed:
            self.tokens = settings.update_tokens
            self.open_table(os.path.join(settings.output, "main.csv"), first_step)

    def open_table(self, path, first_step):
        if not first_step and os.path.lexists(path):
            number = next(n for n in range(1, 1 << 30) if not os.path.lexists(numbered(path, n)))
            with errors_of_writing(path):
                os.rename(path, numbered(path, number))
        self.table = opened(path, first_step, kept_rows, f"rows of {','.join(COLUMNS)}")
        self.table.seek(0)
        head, *rows = [line.split(",") for line in self.table.read().decode().splitlines()] or [None]
        if not head:
            self.write(",".join(COLUMNS), file=self.table)
        self.began = time.perf_counter() - (float(rows[-1][2]) if rows else 0.0)
        tokens = max(int(row[1]) for row in rows) if rows else first_step * self.tokens  # -d may have changed
        self.tokens_before = tokens - first_step * self.tokens

    def write(self, line, end="\n", file=None):
        file = file or self.file
        if file:
            with errors_of_writing(file.name):
                file.write((line + end).encode())

    def write_row(self, step, done, train="", val="", learning_rate="", norm="", rate="", hellaswag=""):
        if self.table:
            seconds, tokens = f"{time.perf_counter() - self.began:.3f}", self.tokens_before + done * self.tokens
            row = (step, tokens, seconds, train, val, learning_rate, norm, rate, hellaswag)
            self.write(",".join(map(str, row)), file=self.table)

    def validation(self, step, loss):
        self.write(f"s:{step} tel:{loss:.4f}")
        self.write_row(step, step, val=f"{loss:.6f}")

    def evaluation(self, step, accuracy):
        self.write(f"s:{step} eval:{accuracy:.4f}")
        self.write_row(step, step, hellaswag=f"{accuracy:.6f}")

    def training(self, step, loss, learning_rate, norm, seconds):
        """Log update number `step`, from 0, which took `seconds`. norm: the gradient norm; may be None for a plain .log
        file."""
        self.write(f"s:{step} trl:{loss:.4f}" + (f" lr:{learning_rate:.6f} norm:{norm:.2f}" if self.detailed else ""))
        if self.table:
            self.write_row(step, step + 1, f"{loss:.6f}", "", f"{learning_rate:.6g}", f"{norm:.4f}",
                           f"{self.tokens / seconds:.0f}")


def opened(path, first_step, kept, form):
    """Open a log to append to; when a run resumes, keep only the lines that kept(lines, first_step) returns."""
    with errors_of_writing(path):
        if os.path.exists(path) and not os.path.isfile(path):
            raise UserError(f"{path}: is not a file; choose another -o")
        if first_step and os.path.exists(path):
            with open(path, errors="surrogateescape", newline="") as f:
                lines = [line + "\n" for line in f.read().split("\n")[:-1]]
            try:
                lines = kept(lines, first_step)
            except (TypeError, ValueError):
                raise UserError(f"{path}: is not a training log ({form}); move it away to go on") from None
            with replacing(path) as f:
                f.write("".join(lines).encode(errors="surrogateescape"))
        return open(path, "a+b", buffering=0)


def kept_lines(lines, first_step):
    """Return main.log's lines before the last run, and of the last run those of steps before first_step."""
    first = last_run(lines)
    return lines[:first] + [line for line in lines[first:] if int(re.match(r"s:([0-9]{1,10}) ", line)[1]) < first_step]


def kept_rows(lines, first_step):
    """Return main.csv's head and its rows before first_step; raises ValueError or TypeError for any other file."""
    if lines and lines[0] != ",".join(COLUMNS) + "\n":
        raise ValueError
    rows = [re.fullmatch(r"([0-9]{1,10}),[0-9]+,[0-9]{1,10}\.[0-9]+(,[0-9a-z.+-]*){6}\n", line) for line in lines[1:]]
    return lines[:1] + [row[0] for row in rows if int(row[1]) < first_step]


def numbered(path, number):
    """main.csv -> main.1.csv."""
    stem, extension = os.path.splitext(path)
    return f"{stem}.{number}{extension}"
