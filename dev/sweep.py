"""
Train a run for each combination of flags (-l 3e-4,6e-4 are two), on this machine's GPUs, and compare their losses.

    python dev/sweep.py -o runs/sweep -l 3e-4,6e-4,1.2e-3 --seed 1,2,3 -e d4 -i data/mine -b 16 -x 500

The flags are those of train_gpt2_cuda.py if there is a GPU, else of train_gpt2.py. Commas separate the values of a
flag, and each combination is a run: here nine, in runs/sweep/l=0.0003_seed=1 and so on, each with its output in
output.txt. Each GPU, or the CPU, trains one at a time; with no -s, it draws no samples, but validates at the end, too.

At the end it prints a table, best validation loss first, writes it to sweep.csv there, and draws sweep.png: the last
validation loss against the flag with the most values, a line for each combination of the others, through the mean of
several seeds. Ctrl-C saves the runs and stops; the same command resumes them, also with other values of the same flags.
If a run fails, it is named, the others go on, and the exit status is 1.
"""

import csv
import dataclasses
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from root import ROOT
import numpy as np

from llmc.errors import UserError, import_package, run_main
from llmc.files import locked, make_directory, replacing
from llmc.gpu.device import count_gpus
from llmc.settings import Settings, field_flags, flag_of, parse_settings
from plot_log import add_legend, picture

RESULTS = {"val_loss": ".6f", "best_val_loss": ".6f", "train_loss": ".6f", "seconds": ".1f"}


class Run(NamedTuple):
    values: dict  # of the swept flags: {field of the settings: value}
    arguments: list  # for the trainer
    directory: str
    started = property(lambda self: os.path.join(self.directory, "started.txt"))  # has the arguments
    finished = property(lambda self: os.path.join(self.directory, "finished.txt"))


def plan(argv, trainer):
    """Return (settings of the first run, swept fields, runs); the trainer's parser checks every combination."""
    words = (re.fullmatch(r"(--?\w+=)?(.*)", word, re.DOTALL).groups("") for word in argv)
    choices = [[flag + value for value in values.split(",")] for flag, values in words]
    description = (__doc__ or "\n").split("\n")[1]
    combinations = [("--sample_every=0", "--final_reports=1", *line) for line in itertools.product(*choices)]
    lines = [parse_settings(trainer, description, line) for line in combinations]
    first = lines[0]
    swept = [field.name for field in dataclasses.fields(first)
             if len({getattr(settings, field.name) for settings in lines}) > 1]
    swept.sort(key=lambda name: name == "seed")  # the seed last
    for name in {"output", "resume", "gpus"}.intersection(swept):
        raise UserError(f"{flag_of(first, name)}: expected one value, for the whole sweep")
    if getattr(first, "gpus", 1) > 1:
        raise UserError("--gpus: a sweep trains each run on one GPU: leave the flag out")
    if not first.output_dir:
        raise UserError(f"-o {first.output}: expected the sweep's directory, for its runs and table: pass -o DIR")
    if not swept:
        raise UserError("no flag has several values: separate them by commas, as in -l 3e-4,6e-4")
    runs = {}
    for settings, words in zip(lines, combinations):
        values = {name: getattr(settings, name) for name in swept}
        name = "_".join(f"{field_flags(settings.__dataclass_fields__[key])[0].lstrip('-')}="
                        + re.sub(r"[^\w.+-]", "-", str(value)) for key, value in values.items())
        if name in runs:
            raise UserError(f"{name}: two runs would have this name: give each value once")
        settings = dataclasses.replace(settings, output=os.path.join(first.output, name), resume=1)
        settings.check()  # also the name of the directory
        arguments = [*words, f"--output={settings.output}", "--resume=1"]
        runs[name] = Run(values, arguments, settings.output)
    return first, swept, list(runs.values())


def train_all(runs, program, slots):
    """Train the runs, one per slot at a time; a slot is the environment variables for one. Returns the directories of
    runs that failed. On Ctrl-C, SIGTERM or SIGHUP, the runs save and stop, and KeyboardInterrupt is raised."""
    queue, free, running, failed = list(runs), list(slots), {}, []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with import_package("tqdm", "a sweep").tqdm(total=len(runs), unit="run", disable=None) as bar:
        try:
            while running or queue:
                while queue and free:
                    run, slot = queue.pop(0), free.pop(0)
                    make_directory(run.directory)
                    with replacing(run.started) as f:
                        f.write(shlex.join(run.arguments).encode(errors="surrogateescape"))
                    with open(os.path.join(run.directory, "output.txt"), "ab") as f:
                        command = [sys.executable, os.path.join(ROOT, program), *run.arguments]
                        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=f,
                                                   stderr=subprocess.STDOUT, env={**os.environ, **slot},
                                                   start_new_session=True)  # no signals from the terminal
                    running[process] = run, slot
                for process in [process for process in running if process.poll() is not None]:
                    run, slot = running.pop(process)
                    free.append(slot)
                    if process.returncode == 0:
                        open(run.finished, "w").close()
                    else:
                        failed.append(run.directory)
                        with open(os.path.join(run.directory, "output.txt"), errors="replace") as f:
                            last = (f.read().strip().splitlines() or ["it printed nothing"])[-1]
                        bar.write(f"{run.directory}: failed ({process.returncode}): {last}", file=sys.stderr)
                    bar.update()
                time.sleep(0.1)
        finally:  # after Ctrl-C, runs are left: they save, as after one of their own
            for process in running:
                process.send_signal(signal.SIGINT)
            for process in running:
                process.wait()
    return failed


def result(run, state):
    """A run's row of the table, {column: value}, without the values that it does not have. Raises
    UserError for a damaged main.csv."""
    row, path, found = {**run.values, "state": state}, os.path.join(run.directory, "main.csv"), {}
    if os.path.exists(path):
        try:
            with open(path, newline="") as f:
                for line in csv.DictReader(f):
                    for name, value in line.items():
                        if value:
                            found.setdefault(name, []).append(float(value))
        except (ValueError, TypeError, csv.Error) as error:
            raise UserError(f"{path}: is damaged ({error}): remove {run.directory} to train that"
                            " run again") from None
    if "val_loss" in found:
        row["val_loss"], row["best_val_loss"] = found["val_loss"][-1], min(found["val_loss"])
    if "train_loss" in found:
        row["train_loss"] = float(np.mean(found["train_loss"][-10:]))
    if "seconds" in found:
        row["seconds"] = found["seconds"][-1]
    return row


def draw(swept, results, loss, path):
    """Draw the finished runs' losses, against the flag with the most values that is not the seed."""
    results = [row for row in results if row["state"] == "finished" and loss in row]
    if not results:
        return
    along = max(swept, key=lambda name: (name != "seed", len({row[name] for row in results})))
    lines = {}  # the other flags but the seed -> value along the axis -> losses
    for row in results:
        label = ", ".join(f"{name} {row[name]}" for name in swept if name not in (along, "seed"))
        lines.setdefault(label, {}).setdefault(row[along], []).append(row[loss])
    with picture(path) as axes:
        for index, (label, points) in enumerate(lines.items()):
            x = sorted(points)
            axes.plot(x, [np.mean(points[value]) for value in x], color=f"C{index}", label=label or "runs")
            axes.plot(*zip(*((value, y) for value in x for y in points[value])), f"C{index}o")
        is_wide = isinstance(x[0], float) and x[-1] > 5 * x[0]
        if x[0] > 0 and (along == "learning_rate" or is_wide):
            axes.set_xscale("log")
        axes.set_xlabel(along.replace("_", " "))
        axes.set_ylabel(f"{loss.replace('_', ' ')}, nats a token")
        add_legend(axes)


def main():
    try:
        count = count_gpus()
        gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]
        from train_gpt2_cuda import CudaSettings as trainer
    except UserError:
        gpus, trainer = [], Settings
    settings, swept, runs = plan(sys.argv[1:], trainer)
    program, slots = "train_gpt2_cuda.py" if gpus else "train_gpt2.py", [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
    with locked(settings.output):
        for run in runs:
            arguments = shlex.join(run.arguments).encode(errors="surrogateescape")
            if os.path.exists(run.started) and Path(run.started).read_bytes() != arguments:
                raise UserError(f"{run.directory}: a run with other flags: pass the same, or another -o")
            if os.path.exists(run.finished):
                result(run, "finished")  # a damaged table should end the sweep now, not hours later
        waiting = [run for run in runs if not os.path.exists(run.finished)]
        print(f"{len(runs)} runs of {program}, {len(waiting)} to train; on {len(gpus) or 'no'} GPUs")
        try:
            failed = train_all(waiting, program, slots or [{}])
        except KeyboardInterrupt:
            print(f"stopped; to go on: {shlex.join(['python', *sys.argv])}", file=sys.stderr)
            return 128 + signal.SIGINT
        results = [result(run, "failed" if run.directory in failed else "finished") for run in runs]
        results.sort(key=lambda row: (row["state"] != "finished", row.get("best_val_loss", row.get("train_loss", 0.0))))
        table = [[*swept, "state", *RESULTS]]
        table += [[format(row[name], RESULTS.get(name, "")) if name in row else "" for name in table[0]]
                  for row in results]
        widths, path = [max(map(len, column)) for column in zip(*table)], os.path.join(settings.output, "sweep")
        for row in table:
            print("  ".join(f"{cell or '-':>{width}}" for cell, width in zip(row, widths)))
        with replacing(f"{path}.csv") as f:  # no value has a comma
            f.write("".join(",".join(row) + "\n" for row in table).encode(errors="surrogateescape"))
        draw(swept, results, "val_loss" if settings.val_every else "train_loss", f"{path}.png")
        print(f"wrote {path}.csv and {path}.png")
    if failed:
        raise UserError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(map(os.path.basename, failed))}")


if __name__ == "__main__":
    run_main(main)
