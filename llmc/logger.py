"""What a run prints and logs: the table that it begins with, and its log file."""

import os
import re
import time

from llmc.errors import UserError
from llmc.files import make_directory, replacing

RULE = re.compile(r"--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ---")  # before a run's lines in a file that held others


def last_run(lines):
    """The index of the first line of the last run in a log: after the last rule, or 0."""
    return max((i for i, line in enumerate(lines, 1) if RULE.fullmatch(line.rstrip("\n"))), default=0)


class Log:
    """A run's log, one event a line, the step first: `s:0 tel:5.2520` (validation), `s:0 trl:5.3562` (training),
    `s:0 eval:0.2955` (HellaSwag).

    In a run directory (main.log) training lines go on with the learning rate and the gradient norm. A new run keeps
    what a file holds already, and goes on after a rule with the date. A resumed run drops what an interrupted one
    logged beyond its checkpoint.
    """

    def __init__(self, settings, first_step=0):
        self.file, self.detailed = None, settings.output_dir is not None
        if not settings.output:
            return
        path = os.path.join(settings.output, "main.log") if self.detailed else settings.output
        make_directory(os.path.dirname(path))
        try:
            if os.path.exists(path) and not os.path.isfile(path):
                raise UserError(f"{path}: is not a file; choose another -o")
            if first_step and os.path.exists(path):
                with open(path, errors="surrogateescape", newline="") as f:
                    lines = [line + "\n" for line in f.read().split("\n")[:-1]]
                first = last_run(lines)
                kept = [line for line in lines[first:] if int(re.match(r"s:([0-9]{1,10}) ", line)[1]) < first_step]
                with replacing(path) as f:
                    f.write("".join(lines[:first] + kept).encode(errors="surrogateescape"))
            self.file = open(path, "a+b", buffering=0)
            if self.file.tell() and not first_step:
                self.file.seek(-1, os.SEEK_END)
                self.write("" if self.file.read() == b"\n" else "\n", end="")
                self.write(time.strftime("--- %Y-%m-%d %H:%M:%S ---"))
        except TypeError:
            raise UserError(f"{path}: is not a training log (lines like 's:0 trl:4.1234'); move it away to go"
                            " on") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); choose another -o") from None

    def write(self, line, end="\n"):
        if self.file:
            try:
                self.file.write((line + end).encode())
            except OSError as error:
                raise UserError(f"{self.file.name}: cannot be written ({error.strerror})") from None

    def validation(self, step, loss):
        self.write(f"s:{step} tel:{loss:.4f}")

    def evaluation(self, step, accuracy):
        self.write(f"s:{step} eval:{accuracy:.4f}")

    def training(self, step, loss, learning_rate, norm):
        self.write(f"s:{step} trl:{loss:.4f}" + (f" lr:{learning_rate:.6f} norm:{norm:.2f}" if self.detailed else ""))


def print_table(groups):
    """A box around groups of (name, value)."""
    groups = [[(name, str(value)) for name, value in rows] for rows in groups]
    width = max(50, *(len(value) for rows in groups for _, value in rows))
    line = f"+-{'-' * 21}-+-{'-' * width}-+"
    for rows in groups:
        print(line)
        for name, value in rows:
            print(f"| {name:<21} | {value:<{width}} |")
    print(line)
