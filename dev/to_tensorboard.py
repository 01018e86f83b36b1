"""
A run's main.csv -> TensorBoard's event files, for those who look at their runs there. Needs: pip install tensorboard

    python dev/to_tensorboard.py runs/small runs/large -o runs/tensorboard
    tensorboard --logdir runs/tensorboard

Run it again after a run has continued: its earlier events are replaced.
"""

import argparse
import csv
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from llmc.errors import UserError, run_main
from llmc.logger import COLUMNS
from plot_log import read_lines, run_names

TAGS = {"train_loss": "loss/train", "val_loss": "loss/validation", "learning_rate": "learning_rate",
        "norm": "gradient_norm", "tokens_per_second": "tokens_per_second", "hellaswag": "hellaswag"}
SUFFIX = ".train_gpt2"  # of the files that we may replace


def read_table(path):
    """Return the rows of a main.csv, {column: value} without empty cells; raises UserError for any other file."""
    lines = read_lines(path, "make it with: python train_gpt2.py -o DIR")
    if lines[:1] != [",".join(COLUMNS)]:
        raise UserError(f"{path}: expected the columns {','.join(COLUMNS)}")
    rows = []
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            rows.append({name: float(value) for name, value in row.items() if value != ""})
            rows[-1]["step"] = int(row["step"])
        except (TypeError, ValueError, AttributeError):
            raise UserError(f"{path}:{number}: {lines[number - 1][:60]!r}, expected a row of numbers") from None
    return rows


def convert(path, directory, SummaryWriter):
    """Write one run's events; return their number of rows. The run's end is taken from its table's mtime."""
    rows = read_table(path)
    names = os.listdir(directory) if os.path.isdir(directory) else []
    before = [os.path.join(directory, name) for name in names if name.endswith(SUFFIX)]
    began = os.path.getmtime(path) - (rows[-1]["seconds"] if rows else 0.0)
    with SummaryWriter(directory, filename_suffix=SUFFIX) as writer:
        for row in rows:
            for column, tag in TAGS.items():
                if column in row:
                    writer.add_scalar(tag, row[column], row["step"], began + row["seconds"])
    for name in before:
        os.unlink(name)
    return len(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="DIR", help="a run's directory")
    parser.add_argument("-o", "--output", default=os.path.join("runs", "tensorboard"),
                        help="where each run gets a directory of events (default: runs/tensorboard)")
    args = parser.parse_args()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(f"{error.name or 'tensorboard'} cannot be imported, which writes the events: pip install"
                        " tensorboard") from None
    for run, name in zip(args.runs, run_names([os.path.join(run, "main.log") for run in args.runs])):
        directory = os.path.join(args.output, *name.split("/"))
        print(f"{convert(os.path.join(run, 'main.csv'), directory, SummaryWriter)} rows of {run} to {directory}")


if __name__ == "__main__":
    run_main(main)
