"""
Put the times of README.md's profile into doc/walkthrough.md.

    python dev/walkthrough.py       # after: python dev/readme.py profile

It prints each row that has changed. A table whose last column is `us` has a kernel in each row: microseconds of a call, the mean of its
calls in a step. One whose last column is `ms` has a row for each of PARTS. Other tables, like that of the products by our kernels,
stay as they are, and so do all other columns: tests/test_tutorial.py holds those to what train_gpt2_cuda.py counts.
"""

import argparse
import os
import re
from typing import NamedTuple

from readme import README, ROOT, read_text, split_at_markers
from train_gpt2 import UserError, replacing, run_main

PAGE = os.path.join(ROOT, "doc", "walkthrough.md")
PARTS = {  # part of a step -> its kernels, as a regular expression; the last one takes what is left
    "matrix products": "matmul .*",
    "attention": "attention_.*",
    "GELU": "gelu_.*",
    "layernorms": ".*layernorm_.*",
    "classifier": "classifier",
    "AdamW": "adamw_update",
    "the others": ".*",
}


class Row(NamedTuple):
    """A row of one of the page's tables."""

    line: int  # from 0
    cells: list
    unit: str  # what the last column is in

    @property
    def name(self):
        return self.cells[0].strip("`")


class Times(NamedTuple):
    """What the profile says of a kernel."""

    calls: int  # in a step
    ms: float  # all of them together
    rate: float  # bytes or operations a second


def read_profile(path=README):
    """kernel -> Times."""
    before, after = split_at_markers("profile_gpu", path)
    text = read_text(path)[len(before) : -len(after)]
    rows = re.findall(r"^(\S.*?) +(\d+) +(\d+\.\d+) +([\d.]+) (TFLOP|GB)/s ", text, re.MULTILINE)
    if not rows:
        raise UserError(f"{path}: no kernel between the profile's markers: python dev/readme.py profile")
    return {name: Times(int(calls), float(ms), float(rate) * {"TFLOP": 1e12, "GB": 1e9}[unit]) for name, calls, ms, rate, unit in rows}


def part_of(kernel):
    return next(part for part, pattern in PARTS.items() if re.fullmatch(pattern, kernel))


def read_rows(lines):
    """The rows of a page's tables, in order."""
    rows, unit = [], None
    for i, line in enumerate(lines):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            unit = None
        elif unit is None:
            unit = cells[-1]
        elif not re.fullmatch("[-:| ]+", line):
            rows.append(Row(i, cells, unit))
    return rows


def refresh(path, profile):
    """Put the profile's times into the page; returns the rows that are other than before. Raises UserError for a row that the profile
    has not, and for a page without such rows."""
    lines = read_text(path).split("\n")
    sums = {part: sum(times.ms for kernel, times in profile.items() if part_of(kernel) == part) for part in PARTS}
    fresh = {"us": {kernel: f"{times.ms * 1000 / times.calls:.0f}" for kernel, times in profile.items()},
             "ms": {part: f"{ms:.1f}" for part, ms in sums.items()}}
    timed = [row for row in read_rows(lines) if row.unit in fresh]
    if not timed:
        raise UserError(f"{path}: no table whose last column is {' or '.join(fresh)}, expected doc/walkthrough.md or a page like it")
    changed = []
    for row in timed:
        known = fresh[row.unit]
        if row.name not in known:
            raise UserError(f"{path}: line {row.line + 1}: {row.name} is not in the profile of {os.path.basename(README)}, expected one of:"
                            f" {', '.join(known)}")
        line = f"| {' | '.join([*row.cells[:-1], known[row.name]])} |"
        if line != lines[row.line]:
            lines[row.line] = line
            changed.append(line)
    if changed:
        with replacing(path) as f:
            f.write("\n".join(lines).encode())
    return changed


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("page", nargs="?", default=PAGE, help="the page to refresh (default: doc/walkthrough.md)")
    print("\n".join(refresh(parser.parse_args().page, read_profile())) or "all times are the profile's already")


if __name__ == "__main__":
    run_main(main)
