"""A run's log and table, and how it writes durations."""

import csv
import math
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import llmc.gpu.precision
import llmc.llmc_lines
import llmc.loop
import llmc.progress
import llmc.single_process
import llmc.threads
import plot_log
import train_gpt2
from conftest import (FAST, SMALL, make_model, remove_after)
from llmc.dataloader import DataLoader
from llmc.settings import Settings
from llmc.tensors import flat


def test_durations_and_utilization(capsys):
    """Peaks of dense matmuls, by the names that CUDA gives, of whole GPUs; tokens of whole
    updates."""
    settings = Settings(B=2, T=8, total_batch_size=32)
    for console, words in ((llmc.progress.Console, "0.50 s | 64 tok/s | 50.0% MFU"),
                           (llmc.llmc_lines.LlmcCudaLines, "500.000000 ms, 64 tok/s")):
        console = console(Mock(settings=settings, begin=0, lowest=(math.inf, 0)))
        console.peak = 128.0
        assert words in console.training_line(0, llmc.loop.Update(1.0, None, 0.5, None), 0.1, 9.0)
        console.began = 0.0
        console.seconds = 2.0
        console.print_end(4)
    assert ", 64 tok/s while training" in capsys.readouterr().out
    seconds = (0, 99.4, 100, 60 * 99, 60 * 130, 3600 * 47.5, 3600 * 76.2)
    assert list(map(llmc.progress.duration, seconds)) == [
        "0 s", "99 s", "2 min", "99 min", "2 h 10 min", "47 h 30 min", "3 d 4 h"]
    for name, bf16 in (("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756e12),
                       ("NVIDIA A10G", 70e12),
                       ("NVIDIA A10", 125e12), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
                       ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("a fake GPU", None)):
        assert llmc.gpu.precision.peak_flops(name, "bf16") == bf16, name


def test_logs_of_several_runs_in_a_directory(workplace, train):
    """A resumed run drops lines of its own alone; a new run's files leave those of another, and
    notes, alone."""
    flags = ("-x", 4, "-v", 0, "-s", 0, "-o", "run")
    log = Path("run/main.log")
    notes = b"my notes\r\n\xff and more\n"
    os.mkdir("run")
    Path("run/main.csv").write_bytes(notes)
    train(*flags)
    remove_after("run", 0)
    old = log.read_text()
    train(*flags, "-n", 2)
    remove_after("run", 2)
    text = log.read_text()
    train(*flags, "-y", 1)
    assert log.read_text() == text == old == Path("run/main.1.log").read_text()
    assert Path("run/main.1.csv").read_bytes() == notes
    assert len(read_table("run/main.2.csv")) == len(read_table("run/main.csv")) == 4


def read_table(path):
    """main.csv as rows, less what differs from run to run: seconds and tokens/s."""
    with open(path, newline="") as f:
        return [{name: value for name, value in row.items()
                 if name not in ("seconds", "tokens_per_second")}
                for row in csv.DictReader(f)]


def test_table(workplace, run_here):
    """The log's events as rows, with the screen's steps; seconds go on where the interrupted run
    stopped. A step's loss is the mean of its batches', its norm that before clipping."""
    flags = (*FAST, "-s", 0, "-l", 0.001, "-o", "run", "--grad_clip", 0.1)
    run_here(train_gpt2, *flags, "-x", 4, "-v", 2, "-d", 32)
    log = (workplace / "run" / "main.log").read_text().splitlines()
    rows = list(csv.DictReader(open("run/main.csv", newline="")))
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 2, 3, 4, 4] and len(log) == 7
    assert [int(row["tokens"]) for row in rows] == [0, 32, 64, 64, 96, 128, 128]
    assert log == [f"s:{row['step']} tel:{float(row['val_loss']):.4f}" if row["val_loss"] else
                   f"s:{int(row['step']) - 1} trl:{float(row['train_loss']):.4f} lr:0.001000"
                   f" norm:{float(row['norm']):.2f}" for row in rows]
    model = make_model(2, 8, 2)
    loader = DataLoader(["data/tiny_shakespeare_train.bin"], SMALL.V, 2, 8)
    losses = [(model.forward(*loader.next_batch()), model.backward(micro_step, 2))[0]
              for micro_step in (0, 1)]
    found = float(rows[1]["train_loss"])
    norm = np.linalg.norm(flat(model.grads))
    assert found == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(rows[1]["norm"]) == pytest.approx(norm, abs=1e-4) and norm > 0.2
    assert ({row["learning_rate"] for row in rows if float(row["tokens_per_second"] or 0)}
            == {"0.001"})
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    assert plot_log.read_log("run/main.csv") == plot_log.read_log("run")
    assert run_here(train_gpt2, *flags, "-x", 5, "-v", 0, "-d", 32, "-y", 1).stderr == ""
    more = list(csv.DictReader(open("run/main.csv", newline="")))
    assert more[:6] == rows[:6] and len(more) == 7 and more[6]["step"] == "5"
    assert seconds[5] < float(more[6]["seconds"]) < seconds[5] + 60
    note = run_here(train_gpt2, *flags, "-x", 6, "-v", 0, "-d", 64, "-y", 1).stderr
    assert (note.startswith("note: ")
            and all(words in note for words in ("32 tokens", "64", "-d 32")))
    assert [row["tokens"] for row in read_table("run/main.csv")][-2:] == ["160", "224"]
