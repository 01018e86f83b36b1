"""
Train a run for each combination of flags (-l 3e-4,6e-4 are two), on this machine's GPUs, and compare their losses.

    python dev/sweep.py -o runs/sweep -l 3e-4,6e-4,1.2e-3 --seed 1,2,3 -e d4 -i data/mine -b 16 -x 500

The flags are those of train_gpt2_cuda.py if there is a GPU, else of train_gpt2.py. Commas separate the values of a
flag, and each combination is a run: here nine, in runs/sweep/l=0.0003_seed=1 and so on, each with its output in
output.txt. Each GPU (of CUDA_VISIBLE_DEVICES, if set) trains one run at a time; on a CPU, one run has all cores, or
with `--jobs N`, N runs share them. Unlike the trainer, a sweep draws no samples, and validates after the last step,
unless -s and --final_reports say otherwise.

At the end it prints a table, best validation loss first, writes it to runs/sweep/sweep.csv, and draws sweep.png: the
last validation loss against the flag with the most values, one line per combination of the others, through the mean of
several seeds. Ctrl-C (SIGTERM, SIGHUP) saves the runs and stops; the same command resumes them, also after a crash, and
also with other values of the same flags. If a run fails, say because its learning rate is too high, it is named, the
others go on, and the exit status is 1.
"""

import csv
import dataclasses
import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from typing import NamedTuple

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np
from tqdm import tqdm

from llmc.gpu.device import count_gpus
from llmc.errors import Interruption, UserError, run_main
from llmc.files import errors_of_writing, locked, make_directory, open_input, replacing
from llmc.settings import Settings, field_flags, flag_of, option, parse_settings, with_default
from llmc.threads import THREADS
from plot_log import add_legend, picture
from to_tensorboard import read_table

LAST = 10  # updates whose mean is the training loss
RESULTS = ("val_loss", "best_val_loss", "train_loss", "seconds", "tokens_per_second")

# ----------------------------------------------------------------------------------------------------------------------
# the runs


class Run(NamedTuple):
    """One combination of values."""

    name: str  # of its directory in the sweep's
    values: dict  # of the swept flags: {field of the settings: value}
    arguments: list  # for the trainer
    directory: str


def visible_gpus():
    """Return ([the name of each GPU for CUDA_VISIBLE_DEVICES], why there are none, or None)."""
    try:
        count = count_gpus()
    except UserError as error:
        return [], re.split("[:;] ", str(error))[0]
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",")[:count] if names else [str(i) for i in range(count)], None


def sweep_settings(trainer):
    """Return the trainer's settings class, extended by a sweep's own flags."""
    own = [
        ("sample_every", int, with_default(trainer, "sample_every", 0)),
        ("final_reports", int, with_default(trainer, "final_reports", 1)),
        ("jobs", int, option(0, group="sweep", help="runs at a time (0: one a GPU; on a CPU one)")),
        ("dark", bool, option(False, group="sweep", help="the picture on black")),
    ]
    namespace = {"AT_LEAST": {**trainer.AT_LEAST, "jobs": 0}}
    return dataclasses.make_dataclass("SweepSettings", own, bases=(trainer,), namespace=namespace)


def combinations(argv):
    """Return all command lines that one with commas stands for."""
    choices = []
    for argument in argv:
        flag, values = re.fullmatch(r"(--?\w+=)?(.*)", argument, re.DOTALL).groups("")
        choices.append([flag + value for value in values.split(",")])
    return itertools.product(*choices)


def plan(argv, trainer):
    """Return (settings of the first run, swept fields, runs); the trainer's parser checks every combination."""
    settings_class, title = sweep_settings(trainer), __doc__.strip().split("\n")[0]
    all_settings = [parse_settings(settings_class, title, line) for line in combinations(argv)]
    first = all_settings[0]
    swept = [field.name for field in dataclasses.fields(first)
             if len({getattr(settings, field.name) for settings in all_settings}) > 1]
    swept.sort(key=lambda name: name == "seed")  # the seed last
    for name in ("output", "resume", "jobs", "dark"):
        if name in swept:
            raise UserError(f"{flag_of(first, name)}: expected one value, for the whole sweep")
    if any(getattr(settings, "gpus", 1) > 1 for settings in all_settings):
        raise UserError("--gpus: a sweep trains each run on one GPU: leave the flag out")
    if not first.output_dir:
        found = f"-o {first.output}" if first.output else "no -o"
        raise UserError(f"{found}: expected the sweep's directory, for its runs and their table: pass -o DIR")
    if not swept:
        raise UserError("no flag has several values: separate them by commas, as in -l 3e-4,6e-4")
    runs = {}
    for settings in all_settings:
        values = {name: getattr(settings, name) for name in swept}
        name = "_".join(f"{short_name(first, key)}={printable(value)}" for key, value in values.items())
        if name in runs:
            raise UserError(f"{name}: two runs would have this name: give each value once")
        directory = os.path.join(first.output, name)
        settings = dataclasses.replace(settings, output=directory, resume=1)
        settings.check()  # also the name of the directory
        runs[name] = Run(name, values, list(arguments(settings, trainer).values()), directory)
    return first, swept, list(runs.values())


def short_name(settings, name):
    """Return a field's flag without dashes: l for learning_rate."""
    field = settings.__dataclass_fields__[name]
    return field_flags(field)[0].lstrip("-")


def printable(value):
    """Return a value as a part of a directory's name."""
    return re.sub(r"[^\w.+-]", "-", str(value))


def arguments(settings, trainer):
    """Return {field: argument} for the trainer's settings that are not at their defaults."""
    found = {}
    for field in dataclasses.fields(trainer):
        value = getattr(settings, field.name)
        if value != field.default:
            flag = field_flags(field)[-1]
            found[field.name] = flag if value is True else f"{flag}={value}"
    return found


def shared_arguments(settings, swept, trainer):
    """Return the arguments that all runs share, and the swept flags as `flag=...`."""
    shared = arguments(dataclasses.replace(settings, output="", resume=0), trainer)
    return [*(argument for name, argument in shared.items() if name not in swept),
            *(f"{field_flags(settings.__dataclass_fields__[name])[-1]}=..." for name in swept)]


# ----------------------------------------------------------------------------------------------------------------------
# what is kept between starts


class Record:
    """SWEEP/sweep.json: what the runs have in common, and which of them have finished."""

    def __init__(self, directory, command):
        """Read an earlier start's record; raises UserError if it is of another sweep. command: the trainer, the flags
        that all runs share, and the swept ones."""
        self.path, self.command, self.finished = os.path.join(directory, "sweep.json"), command, []
        if not os.path.lexists(self.path):
            return
        mend = "remove it to start each run that is not finished, and finished ones for their last validation"
        with open_input(self.path, mend) as f:
            try:
                found = json.load(f)
                before, self.finished = ([str(item) for item in found[key]] for key in ("command", "finished"))
            except (ValueError, LookupError, TypeError, RecursionError):
                raise UserError(f"{self.path}: not a sweep's record; {mend}") from None
        theirs, ours = ([item for item in one if item not in other] or ["none of it"]
                        for one, other in ((before, command), (command, before)))
        if before != command:
            raise UserError(f"{directory}: is of another sweep, with {' '.join(theirs)}, where this one has"
                            f" {' '.join(ours)}: choose another -o")
        self.finished = [name for name in self.finished if os.path.exists(os.path.join(directory, name, "main.csv"))]

    def add(self, run):
        self.finished.append(run.name)
        self.write()

    def write(self):
        with replacing(self.path) as f:
            f.write(json.dumps({"command": self.command, "finished": self.finished}, indent=1).encode() + b"\n")


# ----------------------------------------------------------------------------------------------------------------------
# training


def train_all(runs, trainer, slots, record):
    """Train the runs, one per slot at a time; a slot is the environment variables for one.

    Returns ({name of a failed run: why}, the signal that stopped the sweep or None).
    """
    queue, free, running, failed, interruption = list(runs), list(slots), {}, {}, Interruption()
    passed_on = False
    with tqdm(total=len(runs), unit="run", desc="sweep", dynamic_ncols=True) as bar:
        try:
            while running or queue and interruption.signal is None:
                if interruption.signal and not passed_on:
                    passed_on = True
                    for process in running:
                        process.send_signal(interruption.signal)
                while queue and free and interruption.signal is None:
                    run, slot = queue.pop(0), free.pop(0)
                    running[start(run, trainer, slot)] = run, slot
                for process in [process for process in running if process.poll() is not None]:
                    run, slot = running.pop(process)
                    free.append(slot)
                    if process.returncode == 0:
                        record.add(run)
                    elif interruption.signal is None:
                        failed[run.name] = ending(process.returncode, run)
                        bar.write(f"{run.directory}: {failed[run.name]}", file=sys.stderr)
                    bar.update(interruption.signal is None or process.returncode == 0)
                bar.set_postfix_str(", ".join(position(run) for run, _ in running.values()), sys.stderr.isatty())
                time.sleep(0.1)
        finally:  # after a second Ctrl-C, runs are left: stop them
            for process in running:
                process.send_signal(signal.SIGINT)
            for process in running:
                process.wait()
    return failed, interruption.signal


def start(run, trainer, slot):
    """Start a process that trains this run from its newest checkpoint, and gets no signals from the terminal."""
    make_directory(run.directory)
    path, program = os.path.join(run.directory, "output.txt"), os.path.normpath(os.path.join(ROOT, trainer))
    with errors_of_writing(path), open(path, "ab") as f:
        return subprocess.Popen([sys.executable, program, *run.arguments], stdin=subprocess.DEVNULL, stdout=f,
                                stderr=subprocess.STDOUT, env={**os.environ, **slot}, start_new_session=True)


def ending(status, run):
    """Describe how a run failed: its exit status or the signal that ended it, and the last line that it printed."""
    with open(os.path.join(run.directory, "output.txt"), errors="replace") as f:
        last = ([line.strip() for line in f if line.strip()] or ["it printed nothing"])[-1]
    how = f"exit status {status}" if status > 0 else f"killed by {signal.Signals(-status).name}"
    return f"failed ({how}): {last}"


def position(run):
    """Return how far a run is, by the last row of its table: 'l=0.0003 step 120'."""
    try:
        with open(os.path.join(run.directory, "main.csv"), "rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - 500))
            row = f.read().split(b"\n")[-2]
        return f"{run.name} step {int(row.split(b',')[0])}"
    except (OSError, LookupError, ValueError):  # it has just begun
        return run.name


# ----------------------------------------------------------------------------------------------------------------------
# the results


def result(run, state):
    """Return a run's row of the table, {column: value}, without the values that it does not have yet."""
    row = {**run.values, "state": state}
    path = os.path.join(run.directory, "main.csv")
    rows = read_table(path) if os.path.exists(path) else []
    found = {name: [r[name] for r in rows if name in r] for name in ("val_loss", "train_loss", "tokens_per_second")}
    if found["val_loss"]:
        row["val_loss"], row["best_val_loss"] = found["val_loss"][-1], min(found["val_loss"])
    if found["train_loss"]:
        row["train_loss"] = float(np.mean(found["train_loss"][-LAST:]))
        row["tokens_per_second"] = float(np.median(found["tokens_per_second"]))
    if rows:
        row["seconds"] = rows[-1]["seconds"]
    return row


def make_table(swept, results):
    """Return [[text of a cell]], column names first; finished runs before the others, lower losses before higher."""
    def order(row):
        return row["state"] != "finished", row.get("best_val_loss", row.get("train_loss", np.inf))

    formats = dict.fromkeys(RESULTS, "{:.6f}") | {"seconds": "{:.1f}", "tokens_per_second": "{:.0f}"}
    columns = [*swept, "state", *RESULTS]
    return [columns, *([formats.get(name, "{}").format(row[name]) if name in row else "" for name in columns]
                       for row in sorted(results, key=order))]


def print_table(table):
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        print("  ".join(f"{cell or '-':>{width}}" for cell, width in zip(row, widths)))


def write_csv(table, path):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    with replacing(path) as f:
        f.write(text.getvalue().encode(errors="surrogateescape"))


def draw(settings, swept, results, path):
    """Draw the picture; returns whether there is anything to draw."""
    loss = "val_loss" if settings.val_every else "train_loss"
    results = [row for row in results if row["state"] == "finished" and loss in row]
    if not results:
        return False

    def rank(name):
        """Rank a flag for the x axis: best are numbers other than seeds, and of these, the one with the most values."""
        values = {row[name] for row in results}
        return all(isinstance(value, (int, float)) for value in values), name != "seed", len(values)

    along = max(swept, key=rank)
    lines = {}  # the other flags but the seed -> value along the axis -> losses
    for row in results:
        label = ", ".join(f"{name} {row[name]}" for name in swept if name not in (along, "seed"))
        lines.setdefault(label, {}).setdefault(row[along], []).append(row[loss])
    with picture(path, settings.dark) as axes:
        for index, (label, points) in enumerate(lines.items()):
            x = sorted(points)
            seeds = max(map(len, points.values()))
            label = ", ".join(filter(None, (label, f"mean of {seeds} seeds" if seeds > 1 else "")))
            axes.plot(x, [np.mean(points[value]) for value in x], color=f"C{index}", marker="o" if seeds == 1 else None,
                      label=label or None)
            if seeds > 1:
                axes.plot(*zip(*((value, y) for value in x for y in points[value])), color=f"C{index}", marker="o",
                          markersize=4, linestyle="none", alpha=0.6)
        best = min(results, key=lambda row: row[loss])
        axes.plot(best[along], best[loss], color="C3", marker="*", markersize=13, linestyle="none", zorder=3,
                  label=f"best {best[loss]:.4f}: " + ", ".join(f"{name} {best[name]}" for name in swept))
        x = sorted({row[along] for row in results})
        if rank(along)[0]:
            if x[0] > 0 and len(x) > 2 and x[-1] - x[-2] > 1.5 * (x[1] - x[0]):  # values a factor apart
                axes.set_xscale("log")
            axes.set_xticks(x, [f"{value:g}" for value in x])
            axes.minorticks_off()
        axes.set_xlabel(along.replace("_", " "))
        axes.set_ylabel(f"{'validation' if loss == 'val_loss' else 'training'} loss, nats a token")
        axes.grid(alpha=0.3)
        add_legend(axes)
    return True


# ----------------------------------------------------------------------------------------------------------------------
# main


def main():
    gpus, why_none = visible_gpus()
    trainer, settings_class = "train_gpt2.py", Settings
    if gpus:
        from train_gpt2_cuda import CudaSettings

        trainer, settings_class = "train_gpt2_cuda.py", CudaSettings
    settings, swept, runs = plan(sys.argv[1:], settings_class)
    jobs = settings.jobs or len(gpus) or 1
    if gpus:
        slots = [{"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} for i in range(jobs)]
        where = f"on GPU {', '.join(gpus)}"
    else:
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, THREADS // jobs))
        slots = [{"OMP_NUM_THREADS": threads}] * jobs
        where = f"on the CPU with {threads} thread{'s' * (threads != '1')} each ({why_none})"
    with locked(settings.output, True):
        record = Record(settings.output, [trainer, *shared_arguments(settings, swept, settings_class)])
        return sweep(settings, swept, runs, trainer, slots, where, record)


def sweep(settings, swept, runs, trainer, slots, where, record):
    """Train the unfinished runs, then compare all; returns the exit status."""
    waiting = [run for run in runs if run.name not in record.finished]
    before = f", {len(runs) - len(waiting)} finished before" if len(waiting) < len(runs) else ""
    print(f"{len(runs)} runs of {trainer}{before}; {min(len(slots), len(runs))} at a time {where}")
    record.write()
    failed, stopped_by = train_all(waiting, trainer, slots, record) if waiting else ({}, None)
    if stopped_by:
        finished = sum(run.name in record.finished for run in runs)
        print(f"stopped with {finished} of {len(runs)} runs finished; go on with:"
              f" {shlex.join(['python', *sys.argv])}", file=sys.stderr)
        return 128 + stopped_by

    results = [result(run, "failed" if run.name in failed else "finished") for run in runs]
    table = make_table(swept, results)
    print_table(table)
    paths = [os.path.join(settings.output, name) for name in ("sweep.csv", "sweep.png")]
    write_csv(table, paths[0])
    drawn = draw(settings, swept, results, paths[1])
    print(f"wrote {', '.join(paths if drawn else paths[:1])}")
    if failed:
        raise UserError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}")
    return 0


if __name__ == "__main__":
    run_main(main)
