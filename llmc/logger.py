"""What a run prints and logs: the table that it begins with, and its log file."""

import os
import re

from llmc.errors import UserError
from llmc.files import make_directory, replacing


class Log:
    """A run's log, one event a line, the step first: `s:0 tel:5.2520` (validation), `s:0 trl:5.3562` (training).

    In a run directory (main.log) training lines go on with the learning rate and the gradient norm. A resumed run drops
    what an interrupted one logged beyond its checkpoint.
    """

    def __init__(self, settings, first_step=0):
        self.file, self.detailed = None, settings.output_dir is not None
        if not settings.output:
            return
        path = os.path.join(settings.output, "main.log") if self.detailed else settings.output
        make_directory(os.path.dirname(path))
        try:
            kept = []
            if first_step and os.path.exists(path):
                with open(path) as f:
                    lines = [line for line in f if line.endswith("\n")]
                kept = [line for line in lines if int(re.match(r"s:(\d{1,10}) ", line)[1]) < first_step]
            with replacing(path) as f:
                f.write("".join(kept).encode())
            self.file = open(path, "a", buffering=1)
        except (TypeError, UnicodeDecodeError):
            raise UserError(f"{path}: is not a training log (lines like 's:0 trl:4.1234'); move it away to go"
                            " on") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); choose another -o") from None

    def write(self, line):
        if self.file:
            try:
                self.file.write(line + "\n")
            except OSError as error:
                raise UserError(f"{self.file.name}: cannot be written ({error.strerror})") from None

    def validation(self, step, loss):
        self.write(f"s:{step} tel:{loss:.4f}")

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
