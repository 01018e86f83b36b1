"""
Put what programs truly print into README.md and doc/.

    python dev/readme.py train      # make train, three minutes (seconds on a GPU): doc/logs/, README.md and its picture
    python dev/readme.py notebook   # doc/first_run.ipynb, two minutes: its outputs; needs requirements-test.txt

and, on a machine with a GPU, with gpt2_d12.bin and the tokens of tiny_shakespeare there:

    python dev/readme.py epoch      # train_gpt2_cuda.py, one epoch: doc/logs/
    python dev/readme.py attention  # dev/bench.py attention: doc/speed.md

The tables of steps come from dev/bench.py cpu --readme and dev/bench.py gpu --readme.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

from root import ROOT
from llmc.errors import UserError, import_package, run_main
from llmc.files import replacing
from plot_bench import LOSSES, draw_measured

README = os.path.join(ROOT, "README.md")
SPEED = os.path.join(ROOT, "doc", "speed.md")
LOGS = os.path.join(ROOT, "doc", "logs")
NOTEBOOK = os.path.join(ROOT, "doc", "first_run.ipynb")  # FIRST_RUN_TEXT=my.txt FIRST_RUN_STEPS=50 change its run


def write_text(path, text):
    with replacing(path) as f:
        f.write(text.encode())


def split_at_markers(name, path=README):
    """Return the text up to and including `<!-- NAME begin -->`, and that from `<!-- NAME end -->` on."""
    begin, end = f"<!-- {name} begin -->", f"<!-- {name} end -->"
    with open(path, encoding="utf-8") as f:
        before, _, rest = f.read().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise UserError(f"{path}: the markers {begin} and {end} are not in it")
    return before + begin, end + after


def put_between_markers(name, text, path=README):
    """Replace the text between the two markers."""
    before, after = split_at_markers(name, path)
    write_text(path, f"{before}\n{text}\n{after}")


def output_of(command, **options):
    """Return what a command prints; raises UserError if it fails. options: of subprocess.run."""
    done = subprocess.run([str(word) for word in command], capture_output=True, encoding="utf-8", errors="replace",
                          **options)
    if done.returncode:
        raise UserError(f"{shlex.join(done.args)} failed:\n{done.stderr.strip()}")
    return done.stdout


def shorten(text, keep=2):
    """Shorten every series of training-step lines to its first and last few."""
    lines, steps = [], []
    for line in [*text.rstrip().split("\n"), None]:
        if line is not None and re.match(r"(step(?!.*val loss)|iteration) ", line):
            steps.append(line)
            continue
        lines += steps if len(steps) <= 2 * keep else [*steps[:keep], "...", *steps[-keep:]]
        steps = []
        if line is not None:
            lines.append(line)
    return "\n".join(lines)


def excerpt(text):
    """Return what make train prints in short: data, model size, first and last steps."""
    lines = text.rstrip().split("\n")
    steps, losses = ([line for line in lines if line.startswith("step ") and what in line]
                     for what in ("train loss", "val loss"))
    head = [line for line in lines if line.startswith("Saved ")][1:2]
    size = next(line for line in lines if line.startswith("model "))
    end = next(i for i, line in enumerate(lines) if " steps in " in line)
    return "\n".join([*head, size, losses[0], *steps[:2], "...", *steps[-2:], losses[-1], lines[end]])


def execute(path):
    """Run a notebook in its directory; return its text with outputs. Raises UserError with a cell's error."""
    nbclient, nbformat = (import_package(name, "a notebook") for name in ("nbclient", "nbformat"))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=1800, kernel_name="python3", record_timing=False,
                                     coalesce_streams=True, resources={"metadata": {"path": os.path.dirname(path)}})
    try:
        client.execute()
    except nbclient.exceptions.CellExecutionError as error:
        raise UserError(f"{path}: {error}") from None
    notebook.metadata.language_info = {"name": "python"}
    return nbformat.writes(notebook) + "\n"


class Section(NamedTuple):
    command: list
    page: str  # a page with markers, or a file of doc/logs
    marker: str = ""


def sections(run):
    """name -> Section. run: a directory for make train's."""
    python = sys.executable
    return {
        "train": Section(["make", "-s", "train", f"PYTHON={python}", f"RUN={run}"],
                         os.path.join(LOGS, "make_train.txt")),
        "epoch": Section([python, "train_gpt2_cuda.py", "-e", "gpt2_d12.bin"], os.path.join(LOGS, "epoch_gpu.txt")),
        "attention": Section([python, "dev/bench.py", "attention", "-b", "64", "-t", "1024", "4096"], SPEED,
                             "attention_gpu"),
    }


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n")[0])
    parser.add_argument("section", choices=("notebook", *sections("")))
    name = parser.parse_args().section
    if name == "notebook":
        return write_text(NOTEBOOK, execute(NOTEBOOK))
    with tempfile.TemporaryDirectory() as run:
        command, page, marker = sections(run)[name]
        if marker:
            split_at_markers(marker, page)  # fail now, not after all the work
        printed = output_of(command, cwd=ROOT).replace(run, "runs/first").replace(sys.executable, "python")
        output = shorten(printed)
        print(output)
        if marker:
            put_between_markers(marker, f"```\n{output}\n```", page)
        elif name == "train" and "\nkernels: " in output:  # the GPU's
            write_text(page.replace(".txt", "_gpu.txt"), output + "\n")
        else:
            write_text(page, output + "\n")
            if name == "train":
                put_between_markers("make_train", f"```\n{excerpt(printed)}\n```")
                shutil.copyfile(os.path.join(run, "main.log"), LOSSES)
                draw_measured()


if __name__ == "__main__":
    run_main(main)
