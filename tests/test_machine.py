"""A run and its machine: busy cores, launchers, signals, a terminal, a reader that goes away."""

import contextlib
import fcntl
import itertools
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import llmc.gpu.precision
import llmc.llmc_lines
import llmc.loop
import llmc.progress
import llmc.single_process
import llmc.threads
import train_gpt2
from conftest import FAST, ROOT, assert_one_line_error, trainer_of
from llmc.resume import newest_checkpoint
from llmc.single_process import LAUNCHERS
from llmc.tokenizer import write_tokenizer
from train_gpt2 import GPT2
from train_llama3 import Llama3
from train_speedrun import Speedrun
from test_train import assert_goes_on, untimed


def start(*flags, **streams):
    return subprocess.Popen([sys.executable, str(ROOT / "train_gpt2.py"),
                             *map(str, (*FAST, *flags))], **streams)


def test_a_terminal_shows_a_bar_below_the_lines(workplace, train, monkeypatch):
    """Of 100 columns; nothing is left of it: the lines, samples included, are those of a pipe."""
    pytest.importorskip("tqdm")
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    write_tokenizer("gpt2_tokenizer.bin", [b"<%d>" % id for id in range(257)], 256)
    flags = ("-x", 6, "-v", 3, "-s", 3, "--lines", "short")
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = start(*flags, "-o", "run", stdin=theirs, stdout=theirs, stderr=theirs)
    wrote = b""
    screen = []
    os.close(theirs)
    with contextlib.suppress(OSError):  # its end
        while piece := os.read(terminal, 1 << 16):
            wrote += piece
    os.close(terminal)
    for line in wrote.decode().split("\n"):
        row = ""
        for written in line.split("\r"):
            row = written + row[len(written) :]
            assert len(written) <= 100 or "|" not in written, "the bar wraps"
        screen.append(untimed(row.rstrip()))
    plain = untimed(train(*flags, "-o", "run2").replace("run2", "run")).splitlines()
    assert process.wait(timeout=60) == 0 and screen[1:] == [*plain[1:], ""]
    assert all(words in wrote.decode()
               for words in ("validating   0%|", "training  17%|", "saving 100%|", "█"))


@pytest.fixture
def two_cores(monkeypatch):
    """two_cores(busy): a machine of two cores, of which other programs use `busy`."""
    def change(busy):
        times = itertools.count(-1e9, 9.0)
        monkeypatch.setattr(llmc.threads.Others, "measure", lambda _: (t := next(times), t * busy))

    monkeypatch.setattr(llmc.threads, "THREADS", 2)
    monkeypatch.setattr(llmc.threads, "count_threads", lambda: 2)
    monkeypatch.setattr(llmc.threads.time, "sleep", lambda _: None)
    monkeypatch.delenv("OMP_NUM_THREADS")
    yield change
    monkeypatch.undo()
    llmc.threads.set_openblas_threads(llmc.threads.THREADS)


def test_threads_beside_busy_programs(workplace, run_here, monkeypatch, two_cores):
    """As many as there are free cores, as OMP_NUM_THREADS would have it; a run keeps its number."""
    def train(steps, directory, *more):
        flags = ("-e", "d2", "-v", 0, "-s", 0, "-k", "constant", "-u", 0, "--lines", "short")
        return run_here(train_gpt2, *FAST, *flags, "-x", steps, "-o", directory, *more)

    for busy, count in ((0.4, 2), (1.3, 1), (2.0, 1)):
        two_cores(busy)
        done = train(3, f"busy{busy}")
        assert f"\ndevice    CPU, {count} thread" in done.stdout
        assert done.stderr.count(f"use {busy} of 2 cores: this run has 1 of 2") == (count == 1)
        monkeypatch.setattr(llmc.threads, "THREADS", 2)
    two_cores(0.0)
    kept = train(5, "busy1.3", "-y", 1)
    assert "\ndevice    CPU, 1 thread, " in kept.stdout and not kept.stderr
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    train(5, "whole")
    models = [Path(directory, "model_00000005.bin") for directory in ("busy1.3", "whole")]
    assert models[0].read_bytes() == models[1].read_bytes()
    other = train(6, "busy0.4", "-y", 1)
    assert "had 2 threads, now it has 1: sums may be rounded" in other.stderr
    assert "(OMP_NUM_THREADS=2 continues bit for bit)" in other.stderr


@pytest.mark.parametrize("given, busy, notes", ((False, 1.0, 1), (False, 0.2, 0), (True, 1.0, 0)))
def test_programs_that_slow_a_run_down_are_told_once(
        workplace, run_here, monkeypatch, two_cores, given, busy, notes):
    two_cores(0.0)
    monkeypatch.setattr(train_gpt2, "fit_threads", lambda _: two_cores(busy) or 2)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
    done = run_here(train_gpt2, *FAST, "-x", 4, "-v", 0, "-s", 0)
    assert done.stderr.count(f"note: other programs use {busy} of 2 cores, which makes 2 threads"
                             " slow: OMP_NUM_THREADS=1 may be faster") == notes


def test_the_cores_that_others_use():
    """The system's figure, less what this process does itself, cannot be more than all cores."""
    others = llmc.threads.Others()
    while others.measure()[0] - others.last[0] < 0.1:
        pass
    assert -0.5 < others.cores() < os.cpu_count() + 0.5


@pytest.mark.parametrize("page", (GPT2, Llama3, Speedrun))
@pytest.mark.parametrize("names", LAUNCHERS)
def test_a_launcher_s_processes_would_all_be_the_same_run(
        workplace, run_here, monkeypatch, page, names):
    """The first says so, in one line; the others end. One process is harmless."""
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setattr(llmc.single_process.time, "sleep", lambda _: None)
    flags = ("-e", next(iter(page.SIZES)), *FAST, "-x", 1, "-v", 0, "-s", 0)
    for rank, size in ((0, 2), (1, 2), (0, 1)):
        for name, value in zip(names, (rank, size, rank)):
            monkeypatch.setenv(name, str(value))
        done = run_here(trainer_of(page), *flags, check=False)
        assert done.returncode == int(size == 2) and bool(done.stdout) == (size == 1)
        assert done.stderr.count("\n") == int((rank, size) == (0, 2))
        if done.stderr:
            one = f"{names[1]}=2: {page.__module__}.py is one process"
            assert_one_line_error(done, one, f"{page.__module__}_cuda.py takes torchrun")


@pytest.mark.parametrize("call, signals, status, saved",
                         ((4, (signal.SIGINT,), 130, 5), (4, (signal.SIGTERM,), 143, 5),
    # of two, only a second Ctrl-C is impatient
    (0, (signal.SIGINT, signal.SIGTERM, signal.SIGINT), 130, None),
    (0, (signal.SIGHUP,), 0, 7)))  # which nohup ignores
def test_a_signal_saves_and_says_how_to_resume(workplace, run_here, at_call, call, signals, status,
                                               saved):
    at_call(train_gpt2, "train_step", call,
            lambda: [os.kill(os.getpid(), number) for number in signals])
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    done = run_here(train_gpt2, *FAST, "-x", 7, "-v", 0, "-s", 0, "-o", "a run", check=False)
    signal.signal(signal.SIGHUP, old)
    assert done.returncode == status and newest_checkpoint("a run") == saved
    if saved == 5:
        command = re.search(r"stopped after step 4; .*: python (.*)", done.stderr)[1]
        resumed = run_here(train_gpt2, *shlex.split(command)[1:]).stdout
        assert re.findall(r"step (\d): train loss", resumed) == ["5", "6"]


@pytest.mark.parametrize("of, name, flags", ((train_gpt2.Decoder, "logits", ("-s", 3, "-g", 10**6)),
                                             (GPT2, "forward", ("-v", 3, "-m", 10**6))))
def test_a_signal_within_a_sample_or_a_validation(workplace, run_here, train, at_call, of, name,
                                                  flags):
    """Both end at once, and are done again by the resumed run, with the same random numbers."""
    at_call(of, name, 20, lambda: os.kill(os.getpid(), signal.SIGINT))
    done = run_here(train_gpt2, *FAST, "-x", 5, "-v", 0, "-s", 0, "-o", "parts", *flags,
                    check=False)
    assert done.returncode == 130
    if flags[0] == "-v":  # which is due before the first step, too
        assert "before the first step" in done.stderr and newest_checkpoint("parts") is None
        return
    assert "after step 2;" in done.stderr and newest_checkpoint("parts") == 3
    short = ("-s", 3, "-g", 20, "-v", 0, "-n", 5, "-x", 5)
    rest, whole = (train(*short, *more) for more in (("-o", "parts", "-y", 1), ("-o", "whole")))
    assert_goes_on(whole, rest, "generating:", 5)


@pytest.mark.parametrize("kind", ("pipe", "terminal"))
def test_a_run_whose_output_nobody_reads_saves_first(
        workplace, run_here, at_call, monkeypatch, kind):
    """Ctrl-C kills `| tee`, too; or a terminal was closed. There is no traceback, also of what was
    not yet written."""
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    monkeypatch.setattr(sys, "stdout", open(writer, "w"))
    at_call(train_gpt2, "train_step", 3, lambda: os.close(reader))
    done = run_here(train_gpt2, *FAST, "-x", 9, "-v", 0, "-s", 0, "-o", "run", check=False)
    sys.stdout.close()
    assert done.returncode == 128 + signal.SIGHUP and newest_checkpoint("run") == 4
    assert re.fullmatch("stopped after step 3; resume with: .*\n", done.stderr)
