"""The training program as a user runs it: what it prints and logs, resuming to the bit, interruptions,
schedules, plots."""

import csv
import dataclasses
import fcntl
import functools
import os
import pty
import random
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import numpy as np
import pytest

import llmc.resume
import llmc.logger
import llmc.progress
import train_gpt2
import train_gpt2_cuda
from conftest import (GPT2_124M, ROOT, SMALL, SMALL_HEADS, assert_one_line_error, random_params, remove_after,
                      run_program)
from llmc.checkpoint import Config, owned_by_one, read_model, read_optimizer_state, write_model
from llmc.dataloader import DataLoader, write_tokens
from llmc.errors import Interruption, UserError
from llmc.resume import checkpoint_paths, complete_checkpoints, newest_checkpoint, stopped
from llmc.sampler import Random, sample_multinomial
from llmc.schedulers import learning_rate_at
from llmc.settings import Settings
from llmc.tensors import allocate, flat, table_elements
from llmc.tokenizer import read_tokenizer, write_tokenizer
from train_gpt2 import GPT2, activation_table, parameter_table

FAST = ("-b", 2, "-t", 8, "-g", 16, "--lines", "llmc")  # whose losses have more digits


@pytest.fixture
def train(run_here):
    """train(flag, ...): what a short run of the trainer prints, in this process."""
    return lambda *flags: run_here(train_gpt2, *FAST, *flags).stdout


def losses_and_samples(text):
    """The output less the timings, and less what only a first or only a resumed run prints."""
    text = re.sub(r" \(took [0-9.]+ ms\)", "", text)
    return re.sub(r"^(settings|resuming|no complete).*\n", "", text, flags=re.MULTILINE)


# ----------------------------------------------------------------------------------------------------------------------
# output


def test_llm_c_s_lines(workplace, run_here):
    """With --lines llmc, to the byte: 41 updates, validation at 0, 10, 20, 30, 40, samples at 20 and 40, after
    validation and before the update."""
    large = Config(maxT=64, V=257, L=1, NH=1, C=8, Vp=384)
    write_model("gpt2_124M.bin", large, random_params(large))
    output = run_here(train_gpt2, "--lines", "llmc").stdout
    settings, *lines = output.split("\n")
    assert settings == "settings: lines=llmc" and lines[:10] == [
        "[GPT-2]", "max_seq_len: 64", "vocab_size: 257", "num_layers: 1", "num_heads: 1", "channels: 8",
        f"num_parameters: {257 * 8 + 64 * 8 + 12 * 64 + 13 * 8 + 2 * 8}", "train dataset num_batches: 15",
        "val dataset num_batches: 2",
        f"num_activations: {table_elements(activation_table(large, 4, 64))}",
    ]  # fmt: skip
    events = re.findall(r"^(val loss|step \d+:|generating:)", output, re.MULTILINE)
    expected = []
    for step in range(41):
        expected += ["val loss"] * (step % 10 == 0) + ["generating:"] * (step in (20, 40)) + [f"step {step}:"]
    assert events == expected
    for line in re.findall(r"^step .*|^val loss .*", output, re.MULTILINE):
        assert re.fullmatch(r"val loss \d+\.\d{6}|step \d+: train loss \d+\.\d{6} \(took \d+\.\d{6} ms\)", line)
    assert re.search(r"^generating:\n---\n.*?\n---\nstep 20", output, re.DOTALL | re.MULTILINE)


STEP = r"step +\d+/\d+ \| train loss \d+\.\d{4} \| (\d+\.\d\d m?s) \| \d+ tok/s( \| \d+\.\d% MFU)?( \| \d+ s left)?"


def untimed(line):
    return re.sub(r"\d+\.\d\d m?s \| .*|\d+ s, \d+ tok/s", "TIME", line)


def test_lines(workplace, run_here):
    """No flags: seven lines of what the run is; steps are counted from 1; losses are those of llm.c's lines."""
    config = dataclasses.replace(SMALL, maxT=64)
    write_model("gpt2_124M.bin", config, random_params(config))
    lines = run_here(train_gpt2, "-s", 40, "-o", "run", "-g", 16).stdout.splitlines()
    names = ["settings:", "model", "data", "run", "device", "output", "memory"]
    assert [line.split()[0] for line in lines[:7]] == names
    parameters = 257 * 24 + 64 * 24 + 2 * (12 * 24**2 + 13 * 24) + 2 * 24
    assert lines[1] == f"model     gpt2_124M.bin: L=2 NH=3 C=24 maxT=64 V=257, {parameters:,} parameters"
    assert lines[2:4] == ["data      data/tiny_shakespeare: 15 batches of 4 x 64 tokens, 3 to validate",
                          "run       41 steps of 256 tokens: 2.73 epochs"]
    sample = lines.index("generating:")
    end = lines.index("---", sample + 2)
    steps = [line for line in lines[7:-1] if line.startswith("step")]
    assert lines[sample - 1].startswith("step 40/41 | val loss ") and steps == lines[7:sample] + lines[end + 1 : -1]
    assert all(re.fullmatch(STEP, line) or re.fullmatch(r"step +\d+/41 \| val loss \d\.\d{4}", line) for line in steps)
    assert re.fullmatch(r"41 steps in \d+ s, \d+ tok/s while training; the model is in run", lines[-1])
    events = re.findall(r"^step +(\d+)/41 \| (train|val)", "\n".join(steps), re.MULTILINE)
    assert events == [(str(step + (what == "train")), what) for step in range(41)
                      for what in (("val", "train") if step % 10 == 0 else ("train",))]
    assert [" left" in line for line in steps if "train" in line] == [True] * 40 + [False]
    theirs = run_here(train_gpt2, "-s", 0, "--lines", "llmc").stdout
    ours, theirs = ([float(x) for x in re.findall(r"loss (\S+)", text)] for text in ("\n".join(steps), theirs))
    assert len(ours) == 46 and np.allclose(ours, theirs, rtol=0, atol=0.51e-4)


def test_fewer_lines(workplace, train):
    output = train("-x", 8, "-d", 32, "-v", 4, "-s", 0, "--print_every", 3, "--lines", "short")
    assert "run       8 steps of 32 tokens: 0.06 epochs\n" in output
    assert re.findall(r"^step (\d)/8 \| (train|val)", output, re.MULTILINE) == [
        ("0", "val"), ("1", "train"), ("3", "train"), ("4", "val"), ("6", "train"), ("8", "train"), ("8", "val")]
    assert re.findall(r"^step (\d):", train("-x", 8, "-v", 0, "-s", 0, "--print_every", 3), re.MULTILINE) == [
        "0", "2", "5", "7"]


def test_verbose(workplace, train):
    """All settings in a box, and the memory that each part takes."""
    output = train("-x", 1, "-v", 0, "-s", 0, "--lines", "short", "--verbose")
    for field in dataclasses.fields(Settings):
        assert re.search(rf"^\| {field.name} +\| ", output, re.MULTILINE), field.name
    box = [line for line in output.splitlines() if line[0] in "+|"]
    assert len({len(line) for line in box}) == 1 and "| device " in output
    parts = re.findall(r"^allocated (\d+) MiB for (.*)$", output, re.MULTILINE)
    assert [what for _, what in parts] == ["parameters", "gradients", "AdamW's moments", "activations",
                                           "gradients of activations"]


def test_memory_is_printed(capsys):
    for plan, verbose in (([(3 << 29, "a"), (1 << 20, "b")], False), ([(50 << 20, "a")], False), ([(1, "a")], True)):
        llmc.progress.print_memory(plan, verbose)
    assert capsys.readouterr().out == "memory    1.5 GiB\nmemory    50 MiB\nallocated 1 MiB for a\n"


def test_the_memory_plan_is_what_the_model_allocates():
    settings = Settings(B=2, T=8, total_batch_size=32)
    model = GPT2(SMALL, random_params(SMALL))
    model.allocate_activations(2, 8)
    model.allocate_training(2, 8, settings.micro_steps)
    decoder = train_gpt2.Decoder(SMALL, model.params, 1, 8)
    plan = {what: size for size, what in train_gpt2.memory_plan(SMALL, settings)}
    tensors = (model.params, model.grads, model.micro_grads, model.m, model.v, model.scratch, decoder.cache)
    buffers = model.activations_buffer, decoder.buffer
    assert sum(plan.values()) == sum(t.buffer.size for t in tensors) + sum(buffer.size for buffer in buffers)


def on_a_terminal(*flags, interrupt=None, columns=100, **environment):
    """train_gpt2.py on a terminal: (all that it wrote, what is left on the screen, exit status). interrupt: what is
    on the screen when Ctrl-C is pressed."""
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    modes = termios.tcgetattr(theirs)
    modes[3] |= termios.NOFLSH  # Ctrl-C leaves what we have not read yet
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    environment = {**{name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}, **environment}
    process = subprocess.Popen([sys.executable, str(ROOT / "train_gpt2.py"), *map(str, (*FAST[:6], *flags))],
                               stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
                               preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)))
    os.close(theirs)
    data = b""
    while True:
        try:
            data += os.read(terminal, 1 << 16)
        except OSError:  # its end
            break
        if interrupt and interrupt in data.decode(errors="replace"):
            os.write(terminal, b"\x03")
            interrupt = None
    os.close(terminal)
    lines, column = [[]], 0
    for letter in data.decode(errors="replace"):
        if letter == "\n":
            lines.append([])
        elif letter == "\r":
            column = 0
        else:
            row = lines[-1]
            row.extend(" " * (column + 1 - len(row)))
            row[column] = letter
            column += 1
            assert column <= columns or "|" not in letter, "the bar wraps"
    return data.decode(errors="replace"), ["".join(row).rstrip() for row in lines], process.wait(timeout=60)


def test_a_terminal_shows_a_bar_below_the_lines(workplace, train):
    """Which leaves nothing behind: the lines, samples included, are those of a pipe."""
    pytest.importorskip("tqdm")
    write_tokenizer("gpt2_tokenizer.bin", [b"<%d>" % id for id in range(257)], 256)
    flags = ("-x", 6, "-v", 3, "-s", 3)
    wrote, screen, status = on_a_terminal(*flags, "-o", "run")
    plain = train(*flags, "-o", "run2", "--lines", "short").replace("run2", "run").splitlines()
    assert status == 0 and list(map(untimed, screen[1:])) == [*map(untimed, plain[1:]), ""]
    for words in ("validating   0%|", "training  17%|", "saving 100%|", "█", ", val loss 5."):
        assert words in wrote
    assert "%|" not in "".join(screen)


def test_ctrl_c_takes_the_bar_s_place(workplace):
    pytest.importorskip("tqdm")
    wrote, screen, status = on_a_terminal("-x", 10**6, "-v", 0, "-s", 0, "-o", "run", interrupt="step       5/")
    assert status == 130 and "training" in wrote and "%|" not in "".join(screen), screen[-9:]
    assert screen.count("finishing this step; Ctrl-C once more to stop at once") == 1
    done = newest_checkpoint("run")
    assert re.findall(r"^step +(\d+)/1000000 \| train", "\n".join(screen), re.MULTILINE)[-1] == str(done)
    assert screen[-2].startswith(f"stopped after step {done}; go on with: python ")


def test_an_error_takes_the_bar_s_place(workplace):
    _, screen, status = on_a_terminal("-x", 50, "-l", 1e30, "-v", 0, "-s", 0)
    error = next(line for line in screen if "error" in line)
    assert status == 1 and re.match(r"train_gpt2.py: error: after \d steps: the loss is nan", error), screen


def test_a_terminal_without_tqdm_shows_plain_lines(workplace):
    (workplace / "tqdm.py").write_text("raise ImportError")
    for environment in ({"PYTHONPATH": str(workplace)}, {"TQDM_DISABLE": "1"}):
        wrote, screen, status = on_a_terminal("-x", 2, "-v", 0, "-s", 0, **environment)
        assert status == 0 and "%|" not in wrote and screen[-2].startswith("2 steps in ")


def test_the_time_that_is_left(monkeypatch):
    """From the pace of all but the first step, with what is between them."""
    clock = iter([0.0, 10.0, 12.0, 15.0])
    monkeypatch.setattr(llmc.progress.time, "perf_counter", lambda: next(clock))
    console = llmc.progress.Console(Settings(steps=100), 10)
    console.began = console.timed_from = next(clock)
    left = []
    for step, seconds in enumerate((10.0, 1.0, 1.0), 10):
        console.done = step + 1
        left.append(console.time_left(seconds))
    assert left == [890.0, 2.0 * 88, 2.5 * 87]


def test_the_numbers_of_a_line(monkeypatch, capsys):
    """Of a run that goes on at step 10, with two micro-batches a step and a line every five."""
    monkeypatch.setattr(llmc.progress.time, "perf_counter", lambda: 7.0)
    console = llmc.progress.Console(Settings(B=2, T=8, total_batch_size=32, steps=13, print_every=5), 10)
    console.start(None)
    for step in (10, 11, 12):
        console.training(step, 4.0, 0.5, "")
    console.end()
    assert capsys.readouterr().out == (
        "step 11/13 | train loss 4.0000 | 0.50 s | 64 tok/s | 1 s left\n"
        "step 13/13 | train loss 4.0000 | 0.50 s | 64 tok/s\n3 steps in 0 s, 64 tok/s while training\n")


def test_durations():
    seconds = (0, 99.4, 100, 60 * 99, 60 * 130, 3600 * 47.5, 3600 * 76.2)
    assert list(map(llmc.progress.duration, seconds)) == [
        "0 s", "99 s", "2 min", "99 min", "2 h 10 min", "47 h 30 min", "3 d 4 h"]
    assert [llmc.progress.step_time(s) for s in (0.00709, 0.0999, 0.1, 0.64, 61.0)] == [
        "7.09 ms", "99.90 ms", "0.10 s", "0.64 s", "61.00 s"]


def test_model_flops_utilization():
    """llm.c's formula; peaks of dense matmuls, by the names that CUDA gives, of whole GPUs."""
    counted = llmc.progress.flops_per_token(124439808, GPT2_124M, 1024)
    assert counted == 6 * 124439808 + 6 * 12 * 768 * 1024
    peak = llmc.progress.peak_flops
    for name, bf16 in (("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100-PCIE-40GB", 312), ("NVIDIA H100 80GB HBM3", 989.4),
                       ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835.5), ("NVIDIA H200", 989.4),
                       ("NVIDIA GH200 480GB", 989.4), ("NVIDIA L4", 121), ("NVIDIA A10", 125), ("NVIDIA A10G", 70),
                       ("NVIDIA GeForce RTX 3090", 71), ("NVIDIA GeForce RTX 4090", 165.2)):
        assert peak(name, "bf16") == bf16 * 1e12, name
        assert 1.9 * peak(name, "tf32") < peak(name, "bf16") < 2.1 * peak(name, "tf32"), name
        assert peak(name, "float32") is None
    for name in ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX A4000",
                 "NVIDIA L40", "a fake GPU"):
        assert peak(name, "bf16") is None, name


def test_sample_is_drawn_from_the_model_with_llm_c_s_stream(workplace, train):
    """The first sample follows from a forward pass over the whole buffer, row 0, position t-1, as llm.c computes it."""
    output = train("-t", 16, "-x", 1, "-s", 1, "-v", 0, "-l", 0.0, "--tokenizer", "none.bin")
    got = [int(word) for word in output.split("---")[1].split()]
    model = GPT2(SMALL, random_params(SMALL))
    model.allocate_activations(4, 16)
    tokens, stream = np.full((4, 16), 256, np.int32), Random()
    for position in range(1, 16):
        model.forward(tokens, tokens)
        tokens[:, position] = sample_multinomial(model.acts.probs[0, position - 1], stream.f32())
    assert got == tokens[0, 1:].tolist()


def test_a_sample_may_be_longer_than_the_context(workplace, train):
    output = train("-t", 5, "-g", 40, "-x", 1, "-s", 1, "-v", 0, "-l", 0.0, "--tokenizer", "none.bin")
    got = [int(word) for word in output.split("---")[1].split()]
    model = GPT2(SMALL, random_params(SMALL))
    model.allocate_activations(1, 5)
    tokens, begin, stream = [256], 0, Random()
    for t in range(1, 40):
        begin = t - 2 if t - begin > 5 else begin  # the window moves on by half
        context = np.array([tokens[begin:]], np.int32)
        model.forward(context, context)
        tokens.append(sample_multinomial(model.acts.probs[0, -1], stream.f32()))
    assert got == tokens[1:]
    assert "generating:" in train("-t", 1, "-g", 4, "-x", 1, "-s", 1, "-v", 0), "not one that moves by 0"


def test_validation_is_the_mean_of_the_first_batches(workplace, train):
    output = train("-x", 1, "-v", 1, "-m", 3, "-s", 0)
    model, loader = GPT2(SMALL, random_params(SMALL)), DataLoader(["data/tiny_shakespeare_val.bin"], SMALL.V, 2, 8)
    model.allocate_activations(2, 8)
    want = np.mean([model.forward(*loader.next_batch()) for _ in range(3)])
    assert float(re.search(r"val loss (\S+)", output)[1]) == pytest.approx(want, abs=1e-6)
    assert "val loss" in train("-x", 1, "-v", 1, "-m", 1000, "-s", 0), "more batches than there are means all there are"


def test_logs(workplace, train):
    train("-x", 3, "-v", 2, "-m", 1, "-s", 0, "-o", "april.log")
    lines = (workplace / "april.log").read_text().splitlines()
    lines = [re.sub(r"\d+\.\d{4}", "L", line) for line in lines]
    assert lines == ["s:0 tel:L", "s:0 trl:L", "s:1 trl:L", "s:2 tel:L", "s:2 trl:L"]
    train("-x", 3, "-v", 2, "-m", 1, "-s", 0, "-o", "run", "-l", 0.001)
    lines = (workplace / "run" / "main.log").read_text().splitlines()
    assert re.fullmatch(r"s:0 tel:\d\.\d{4}", lines[0])
    assert re.fullmatch(r"s:0 trl:\d\.\d{4} lr:0\.001000 norm:\d+\.\d\d", lines[1])


def test_a_log_is_appended_to(workplace, train):
    """After a rule with the date, whatever the file holds; a resumed run drops lines of its own alone."""
    (workplace / "notes.log").write_bytes(b"my notes\r\n\xff and no end of line")
    train("-x", 1, "-v", 0, "-s", 0, "-o", "notes.log")
    train("-x", 1, "-v", 0, "-s", 0, "-o", "notes.log")
    lines = (workplace / "notes.log").read_bytes().split(b"\n")
    assert lines[:2] == [b"my notes\r", b"\xff and no end of line"] and len(lines) == 7
    assert all(re.fullmatch(rb"--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ---", lines[i]) for i in (2, 4))
    assert lines[3] == lines[5] and lines[3].startswith(b"s:0 trl:")

    train("-x", 4, "-v", 0, "-s", 0, "-o", "run")
    remove_after("run", 0)
    old = (workplace / "run" / "main.log").read_text()
    train("-x", 4, "-v", 0, "-s", 0, "-o", "run", "-n", 2)
    remove_after("run", 2)
    text = (workplace / "run" / "main.log").read_text()
    train("-x", 4, "-v", 0, "-s", 0, "-o", "run", "-y", 1)
    assert (workplace / "run" / "main.log").read_text() == text and text.startswith(old) and text.endswith(old)
    assert text.count("---") == 2


def read_table(path):
    """main.csv as rows, less what differs from run to run: seconds and tokens/s."""
    with open(path, newline="") as f:
        return [{name: value for name, value in row.items() if name not in ("seconds", "tokens_per_second")}
                for row in csv.DictReader(f)]


def test_table(workplace, train):
    """The log's events as rows: the same steps and losses; seconds go on where the interrupted run stopped."""
    train("-x", 4, "-v", 2, "-s", 0, "-d", 32, "-l", 0.001, "-o", "run")
    log = (workplace / "run" / "main.log").read_text().splitlines()
    rows = list(csv.DictReader(open("run/main.csv", newline="")))
    assert [int(row["step"]) for row in rows] == [0, 0, 1, 2, 2, 3, 4] and len(log) == 7
    assert [int(row["tokens"]) for row in rows] == [0, 32, 64, 64, 96, 128, 128]
    for line, row in zip(log, rows):
        kind, loss = ("tel", row["val_loss"]) if row["val_loss"] else ("trl", row["train_loss"])
        assert line.startswith(f"s:{row['step']} {kind}:{float(loss):.4f}")
        if kind == "trl":
            assert line.endswith(f" lr:{float(row['learning_rate']):.6f} norm:{float(row['norm']):.2f}")
            assert float(row["tokens_per_second"]) > 0
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    train("-x", 5, "-v", 0, "-s", 0, "-d", 32, "-l", 0.001, "-o", "run", "-y", 1)
    more = list(csv.DictReader(open("run/main.csv", newline="")))
    assert more[:6] == rows[:6] and len(more) == 7 and more[6]["step"] == "4"
    assert seconds[5] < float(more[6]["seconds"]) < seconds[5] + 60
    train("-x", 6, "-v", 0, "-s", 0, "-d", 64, "-o", "run", "-y", 1)  # updates of twice as many tokens
    assert [row["tokens"] for row in read_table("run/main.csv")][-2:] == ["160", "224"]


def test_the_rate_of_a_row(tmp_path):
    log = llmc.logger.Log(Settings(B=2, T=8, total_batch_size=32, output=str(tmp_path)))
    log.training(0, 4.0, 1e-3, 1.0, 0.5)
    assert (tmp_path / "main.csv").read_text().splitlines()[1].split(",")[7] == "64"


def test_a_new_run_keeps_the_table_of_another(workplace, train):
    (workplace / "run").mkdir()
    (workplace / "run" / "main.csv").write_text("my notes")
    for number in (1, 2):
        train("-x", 2, "-v", 0, "-s", 0, "-o", "run")
        remove_after("run", 0)
        assert len(read_table("run/main.csv")) == 2 and (workplace / "run" / f"main.{number}.csv").exists()
    assert (workplace / "run" / "main.1.csv").read_text() == "my notes" and len(read_table("run/main.2.csv")) == 2


def test_plots(workplace, run_here):
    import plot_log

    (workplace / "run").mkdir()
    for name in ("april.log", "run/main.log"):
        (workplace / name).write_text("s:0 tel:5.2\ns:0 trl:4.1\ns:1 trl:3.9\n")
    (workplace / "run/main.log").write_text("notes\n--- 2026-01-31 12:00:00 ---\ns:0 trl:4.1\n")
    assert plot_log.read_log("run/main.log") == {"trl": ([0], [4.1])}, "the last run"
    for cut in ("s:30 tr", "s:30 trl:3."):
        (workplace / "cut.log").write_text("s:29 trl:3.4\n" + cut)
        assert plot_log.read_log("cut.log") == {"trl": ([29], [3.4])}
    (workplace / "bad.log").write_text("s:0 trl:4.1\nhello\n")
    assert run_here(plot_log, "april.log", "run", "-o", "losses.png").stdout == "wrote losses.png\n"
    assert (workplace / "losses.png").read_bytes().startswith(b"\x89PNG") and not list(workplace.glob("*.tmp"))
    run_here(plot_log, "april.log", "-o", "dark.svg", "--dark", "--smooth", 0)
    assert b"<svg" in (workplace / "dark.svg").read_bytes()
    assert_one_line_error(run_here(plot_log, "april.log", "--smooth", -1, check=False), "--smooth -1")
    assert_one_line_error(run_here(plot_log, "april.log", "-o", "losses.xyz", check=False), "losses.xyz", ".png")
    assert_one_line_error(run_here(plot_log, "april.log", "-o", "losses.pgf", check=False), "losses.pgf", ".png")
    assert_one_line_error(run_here(plot_log, "bad.log", check=False), "bad.log:2", "hello")
    assert_one_line_error(run_here(plot_log, "none.log", check=False), "none.log", "no such file")


def test_what_a_plot_shows():
    """The running mean over the losses; the names of runs; the best validation; what only the first steps reach is
    beyond the upper edge, but for a validation that stays there."""
    import plot_log

    losses = [9.0, 8.0] + [2.0, 1.0] * 49
    steps = list(range(100))
    logs = {"a$b": {"trl": (steps, losses), "tel": ([0, 50, 99], [9.0, 1.6, 1.7])},
            "_c": {"tel": ([3], [1.5]), "eval": ([3], [1.6])}}
    assert plot_log.running_mean([1.0, 2.0, 6.0, 7.0], 1).tolist() == [1.5, 3.0, 5.0, 6.5]
    assert plot_log.running_mean(losses, 0).tolist() == losses
    assert plot_log.running_mean([1.0, 2.0], 10**20).tolist() == [1.5, 1.5]
    _, axes = plot_log.plt.subplots()
    plot_log.draw_losses(axes, logs)
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["a$b", "best validation 1.6000, step 50", "_c", "best validation 1.5000, step 3"]
    assert 0.9 < axes.get_ylim()[0] < 1.0 and 1.7 < axes.get_ylim()[1] < 3.0
    logs["a$b"]["tel"][1][2] = 5.0
    plot_log.draw_losses(axes, logs)
    assert 5.0 < axes.get_ylim()[1] < 5.5
    plot_log.plt.close("all")
    for paths, names in ((["runs/a/main.log", "b.log", "x/c.txt"], ["a", "b", "c.txt"]),
                         (["one/a/main.log", "two/a/main.log"], ["one/a", "two/a"]),
                         (["a.log", "a/main.log", "a.log"], ["a", "a (2)", "a (3)"])):
        assert plot_log.run_names(paths) == names


def test_two_runs_are_bit_equal(workplace, train):
    flags = ("-x", 6, "-v", 3, "-s", 3, "--grad_clip", 1)
    assert losses_and_samples(train(*flags)) == losses_and_samples(train(*flags))


# ----------------------------------------------------------------------------------------------------------------------
# resuming

RUN = ("-x", 9, "-v", 3, "-s", 3, "-u", 2, "-k", "cosine", "-c", 0.1, "--grad_clip", 1, "-d", 32)


@pytest.mark.parametrize("order", ((), ("--shuffle", 1), ("--spread", 1), ("--shuffle", 1, "--spread", 1)))
def test_resumed_run_is_bit_equal(workplace, order, train):
    flags = (*RUN, "-l", 0.01, *order)
    whole = losses_and_samples(train(*flags, "-o", "whole", "-n", 4))
    train(*flags, "-o", "parts", "-n", 4)
    remove_after("parts", 4)
    rest = train(*flags, "-o", "parts", "-n", 4, "-y", 1)
    assert "resuming at step 4 from parts" in rest
    rest = losses_and_samples(rest)
    assert whole.endswith(rest[rest.index("step 4:") :])
    assert read_table("whole/main.csv") == read_table("parts/main.csv")
    for name in ("main.log", "model_00000009.bin", "state_00000009_00000.bin", "DONE_00000009"):
        assert (workplace / "whole" / name).read_bytes() == (workplace / "parts" / name).read_bytes(), name


@pytest.mark.parametrize("every", (0, 2, 5))
def test_a_run_ends_with_a_saved_model(workplace, train, every):
    """Also where none is due; the vocabulary is beside it; and a longer run goes on from there as if it had not
    ended."""
    flags = ("-v", 0, "-s", 2, "-l", 0.01, "-n", every, "-o")
    whole = losses_and_samples(train(*flags, "whole", "-x", 8))
    train(*flags, "parts", "-x", 5)
    assert newest_checkpoint("parts") == 5
    assert (workplace / "parts" / "tokenizer.bin").read_bytes() == (workplace / "gpt2_tokenizer.bin").read_bytes()
    rest = losses_and_samples(train(*flags, "parts", "-x", 8, "-y", 1))
    assert whole.endswith(rest[rest.index("step 5:") :])
    for name in ("main.log", "model_00000008.bin", "state_00000008_00000.bin"):
        assert (workplace / "whole" / name).read_bytes() == (workplace / "parts" / name).read_bytes(), name


def test_a_run_keeps_its_vocabulary(workplace, train, run_here):
    """Another of the same size would change the meaning of all ids."""
    train("-x", 1, "-v", 0, "-s", 0, "-o", "run")
    tokens = read_tokenizer("gpt2_tokenizer.bin")
    write_tokenizer("other.bin", tokens.tokens[::-1], tokens.eot)
    flags = ("-b", 2, "-t", 8, "-x", 2, "-v", 0, "-s", 0, "-o", "run", "-y", 1, "--tokenizer", "other.bin")
    assert_one_line_error(run_here(train_gpt2, *flags, check=False), "other.bin: is another vocabulary", "run/token")
    assert read_tokenizer("run/tokenizer.bin").tokens == tokens.tokens


def test_fine_tuning_starts_from_a_run_s_newest_model(workplace, train, run_here):
    """-e takes the run's directory; a vocabulary other than the run's, or a folder of another kind, is refused."""
    flags = ("-v", 0, "-s", 0, "-x", 3)
    train(*flags, "-n", 1, "-o", "run")
    tuned = run_here(train_gpt2, "-b", 2, "-t", 8, *flags, "-e", "run", "-o", "tuned").stdout
    assert "\nmodel     run/model_00000003.bin: L=2" in tuned and newest_checkpoint("tuned") == 3
    of_run, of_file, of_first = (losses_and_samples(train(*flags, "-e", model))
                                 for model in ("run", "run/model_00000003.bin", "run/model_00000001.bin"))
    assert of_run == of_file != of_first

    tokens = read_tokenizer("gpt2_tokenizer.bin")
    write_tokenizer("other.bin", tokens.tokens[::-1], tokens.eot)
    for name in ("empty", "hf"):
        (workplace / name).mkdir()
    (workplace / "hf" / "config.json").write_text("{}")
    for changed, words in ((("run", "--tokenizer", "other.bin"), ("other.bin: is another vocabulary", "run/tokenizer")),
                           (("empty",), ("empty: holds no checkpoint", "-o DIR")),
                           (("hf",), ("-e hf: a Hugging Face folder", "export_weights.py --model hf"))):
        assert_one_line_error(run_here(train_gpt2, *flags, "-e", *changed, check=False), *words)


def test_a_run_of_a_log_alone_saves_nothing(workplace, train):
    before = sorted(os.listdir())
    train("-x", 2, "-v", 0, "-s", 0, "-o", "x.log")
    assert sorted(os.listdir()) == sorted([*before, "x.log"])


def test_resuming_a_finished_run_does_nothing_new(workplace, train):
    train(*RUN, "-o", "run", "-n", 9)

    def files():
        return {path.name: path.name == "main.csv" and read_table(path) or path.read_bytes()
                for path in (workplace / "run").iterdir()}

    before = files()
    assert "step 9:" not in train(*RUN, "-o", "run", "-n", 9, "-y", 1)
    assert before == files()


def start(*flags, cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE):
    return subprocess.Popen([sys.executable, str(ROOT / "train_gpt2.py"), *map(str, (*FAST, *flags))], cwd=cwd,
                            stdout=stdout, stderr=stderr, text=True)


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_interruption_saves_and_says_how_to_go_on(workplace, number):
    flags = ("-x", 100000, "-v", 0, "-s", 0, "-o", "run")
    process = start(*flags, cwd=workplace)
    for line in process.stdout:
        if line.startswith("step 5:"):
            break
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in errors
    stopped = int(re.search(r"stopped after step (\d+); go on with: python (.*)", errors)[1])
    assert newest_checkpoint("run") == stopped + 1
    command = re.search(r"go on with: python (.*)", errors)[1].split()
    command[command.index("100000")] = str(stopped + 3)
    resumed = run_program("train_gpt2.py", *command[1:]).stdout
    assert f"resuming at step {stopped + 1}" in resumed and f"step {stopped + 2}: train loss" in resumed


def test_interruption_without_a_directory_says_that_nothing_was_saved(workplace):
    process = start("-x", 100000, "-v", 0, "-s", 0, cwd=workplace)
    for line in process.stdout:
        if line.startswith("step 2:"):
            break
    process.send_signal(signal.SIGINT)
    assert "nothing was saved" in process.communicate(timeout=60)[1] and process.returncode == 130


def test_ctrl_c_in_a_pipeline_saves_although_the_reader_is_gone(workplace):
    """In `train | tee`, Ctrl-C ends tee too, and first: nobody reads our stdout any more when the step is done."""
    process = start("-x", 100000, "-v", 0, "-s", 0, "-o", "run", cwd=workplace)
    for line in process.stdout:
        if line.startswith("step 5:"):
            break
    process.send_signal(signal.SIGINT)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 130 and "go on with: python" in errors and "Traceback" not in errors
    assert newest_checkpoint("run") is not None


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
def test_a_signal_saves_although_nobody_reads_stdout_or_stderr(workplace, number):
    """2>&1 | tee log, a closed terminal: the line that says so finds no reader either."""
    read, write = os.pipe()
    process = start("-x", 100000, "-v", 0, "-s", 0, "-o", "run", cwd=workplace, stdout=write, stderr=write)
    os.close(write)
    with open(read) as f:
        for line in f:
            if line.startswith("step 5:"):
                break
        process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert newest_checkpoint("run") >= 6


def test_a_signal_saves_although_a_full_pipe_is_not_read(workplace):
    read, write = os.pipe()
    process = start("-x", 100000, "-v", 0, "-s", 0, "-o", "run", cwd=workplace, stdout=write)
    while select.select([], [write], [], 0)[1]:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 128 + signal.SIGTERM
    assert newest_checkpoint("run") == (workplace / "run" / "main.log").read_text().count("trl")
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("flags", (("-s", 3, "-g", 10**6), ("-v", 3, "-m", 10**6)))
def test_a_signal_within_a_sample_or_a_validation(workplace, flags):
    """Both end at once, and are done again by the resumed run, with the same random numbers."""
    write_tokens("data/tiny_shakespeare_val.bin", [np.zeros(2 * 10**6, np.int32)], 2 * 10**6)
    run = ("-x", 5, "-v", 0, "-s", 0, "-o", "run", *flags)
    process = start(*run, cwd=workplace)
    for line in process.stdout:
        if line.startswith("generating:" if flags[0] == "-s" else "num_activations:"):
            break
    while not os.path.exists("run/main.csv"):
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=10)[1]
    assert process.returncode == 130
    if flags[0] == "-v":  # which is due before the first step, too
        assert "stopped before the first step" in errors and newest_checkpoint("run") is None
        return
    assert "stopped after step 2; go on" in errors and newest_checkpoint("run") == 3
    short = ("-s", 3, "-g", 20, "-v", 0, "-n", 5, "-x", 5)
    rest = run_program("train_gpt2.py", *FAST, *short, "-o", "run", "-y", 1).stdout
    whole = run_program("train_gpt2.py", *FAST, *short, "-o", "whole").stdout
    rest = losses_and_samples(rest)
    assert losses_and_samples(whole).endswith(rest[rest.index("generating:") :]) and rest.count("step ") == 2
    for name in ("main.log", "model_00000005.bin", "state_00000005_00000.bin"):
        assert (workplace / "run" / name).read_bytes() == (workplace / "whole" / name).read_bytes(), name


@pytest.mark.parametrize("trainer", (train_gpt2, train_gpt2_cuda))
def test_ctrl_c_while_a_checkpoint_is_saved(workplace, fake_gpu, run_here, monkeypatch, trainer):
    """Once, and twice: the checkpoint is finished, and with it the run, of which nothing half stays behind."""
    write_model("gpt2_124M.bin", SMALL_HEADS, random_params(SMALL_HEADS))
    real = llmc.resume.write_optimizer_state

    def interrupted(*arguments):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # the main thread takes note of it, where another one saves
        real(*arguments)

    monkeypatch.setattr(llmc.resume, "write_optimizer_state", interrupted)
    done = run_here(trainer, *FAST, "-x", 50, "-v", 0, "-s", 0, "-n", 2, "-o", "run", check=False)
    assert done.returncode == 130 and "saving a checkpoint first" in done.stderr and "-y 1" in done.stderr
    steps = [int(name[5:]) for name in sorted(os.listdir("run")) if name.startswith("DONE_")]
    assert steps == [2, 3] or trainer is train_gpt2_cuda and steps[0] == 2 < steps[-1] < 50  # where a thread saves
    assert sorted(os.listdir("run")) == sorted(["main.csv", "main.log", "tokenizer.bin", *(name for step in steps
                                                                               for name in checkpoint_paths("", step))])


def test_ctrl_c_twice_stops_at_once(workplace, run_here, monkeypatch):
    def interrupted(*arguments, **keywords):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # service managers send several: only a second Ctrl-C is impatient
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train_gpt2, "train_step", interrupted)
    done = run_here(train_gpt2, *FAST, "-x", 5, "-v", 0, "-s", 0, "-o", "run", check=False)
    assert done.returncode == 130 and done.stderr.endswith("interrupted\n")
    assert newest_checkpoint("run") is None


def test_nohup_is_respected(workplace, monkeypatch):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        Interruption()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in {**before, signal.SIGHUP: old}.items():
            signal.signal(number, handler)


def test_the_command_that_goes_on(monkeypatch, capsys):
    for flags, resume in ((["-o", "a b"], 0), (["-o", "a b", "-y", "1"], 1)):
        monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *flags])
        assert stopped(Settings(output="a b", resume=resume), 3, signal.SIGTERM) == 128 + signal.SIGTERM
        assert "after step 3; go on with: python train_gpt2.py -o 'a b' -y 1\n" in capsys.readouterr().err
        stopped(Settings(output="a b"), 3, signal.SIGTERM, has_launcher=True)
        assert "after step 3; go on with the same command and -y 1\n" in capsys.readouterr().err


def test_another_number_of_tokens_in_an_update_is_said(workplace, train, run_here):
    flags = ("-b", 2, "-t", 8, "-v", 0, "-s", 0, "-o", "run")
    run_here(train_gpt2, *flags, "-x", 1, "-d", 32)
    assert run_here(train_gpt2, *flags, "-x", 2, "-d", 32, "-y", 1).stderr == ""
    assert run_here(train_gpt2, *flags, "-x", 3, "-y", 1).stderr == (
        "note: an update of the checkpoint's run has 32 tokens, of this one 16: pass -d 32 to go on as before\n")


def test_old_checkpoints_go_but_not_for_one_that_is_incomplete(workplace, train, run_here):
    """A later one, of which a file is lost, is no reason to delete what the run goes on from."""
    flags = ("-v", 0, "-s", 0, "-o", "run")
    train("-x", 6, "-n", 2, *flags)
    os.unlink("run/state_00000006_00000.bin")
    resume = functools.partial(run_here, train_gpt2, "-b", 2, "-t", 8, "-y", 1, *flags)
    assert "going on from step 4" in resume("-x", 5, "-n", 1, "-nk", 1).stderr and complete_checkpoints("run") == [5, 6]
    assert "going on from step 5" in resume("-x", 8).stderr
    assert newest_checkpoint("run") == 8


def test_a_checkpoint_written_again_is_complete_only_at_its_end(workplace, train, monkeypatch):
    """Once a part of it was lost, the marker of the first time would vouch for files of two runs."""
    train("-v", 0, "-s", 0, "-n", 1, "-x", 2, "-o", "run")
    os.unlink("run/state_00000002_00000.bin")
    seen = []
    monkeypatch.setattr(llmc.resume, "write_model", lambda *arguments: (seen.append(complete_checkpoints("run")),
                                                                        write_model(*arguments))[1])
    train("-v", 0, "-s", 0, "-n", 1, "-x", 2, "-o", "run", "-y", 1)
    assert seen == [[1]] and complete_checkpoints("run") == [1, 2]


def test_kill_at_random_moments_leaves_a_usable_checkpoint(workplace):
    """kill -9, six times, mostly while a checkpoint is being written; the run then ends as if nothing had
    happened."""
    flags = ("-x", 1000000, "-v", 0, "-s", 0, "-n", 1, "-y", 1)
    moments, progress = random.Random(5), []
    for _ in range(6):
        process = start(*flags, "-o", "killed", cwd=workplace)
        steps, times = moments.randint(2, 4), []
        for line in process.stdout:
            if line.startswith("step "):
                times.append(time.perf_counter())
                if len(times) == steps:
                    break
        a_step = (times[-1] - times[0]) / (steps - 1)  # its save included
        time.sleep(moments.uniform(0.0, 2.0) * a_step)
        process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL, process.stderr.read()
        step = newest_checkpoint("killed")
        model, state, _ = checkpoint_paths("killed", step)
        config, params = read_model(model, parameter_table)
        moments_read = [allocate(parameter_table(config)) for _ in range(2)]
        assert read_optimizer_state(state, owned_by_one(*moments_read))[0].step == step
        progress.append(step)
    assert progress == sorted(progress) and progress[-1] >= 6
    last = progress[-1] + 2
    for name, resume in (("killed", 1), ("whole", 0)):
        run_program("train_gpt2.py", *FAST, "-x", last, "-v", 0, "-s", 0, "-n", last, "-o", name, "-y", resume)
    for name in ("main.log", *checkpoint_paths("", last)[:2]):
        assert (workplace / "killed" / name).read_bytes() == (workplace / "whole" / name).read_bytes(), name


# ----------------------------------------------------------------------------------------------------------------------
# settings, schedules, data


def test_schedules():
    def rates(**settings):
        settings = Settings(learning_rate=1.0, steps=10, **settings)
        return [round(learning_rate_at(settings, step), 4) for step in range(10)]

    assert rates() == [1.0] * 10
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(schedule="linear", final_fraction=0.5) == [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55]
    cosine = rates(schedule="cosine", warmup_steps=2)
    assert cosine[:3] == [0.5, 1.0, 1.0] and cosine[6] == 0.5
    assert cosine == cosine[:1] + sorted(cosine[1:], reverse=True)
    assert rates(schedule="wsd", final_fraction=0.0) == [1.0] * 9 + [round(1 - 0.5**0.5, 4)]
    assert rates(schedule="cosine", final_fraction=0.5)[5] == 0.75
    assert rates(schedule="wsd", final_fraction=0.5, warmup_steps=2)[7:] == [1.0, 1.0, round(1 - 0.5 * 0.5**0.5, 4)]


def test_clipping_reaches_the_update(workplace, train):
    train("-x", 1, "-v", 0, "-s", 0, "-n", 1, "-o", "run", "--grad_clip", 0.01)
    m = allocate(parameter_table(SMALL))
    read_optimizer_state("run/state_00000001_00000.bin", owned_by_one(m, allocate(parameter_table(SMALL))))
    assert np.linalg.norm(flat(m)) == pytest.approx(0.01 * 0.1, rel=1e-4), "m = (1 - beta1) * clipped gradient"


def test_the_defaults_are_llm_c_s():
    s = Settings()
    assert (s.B, s.T, s.steps, s.val_every, s.val_batches, s.sample_every) == (4, 64, 41, 10, 5, 20)
    assert (s.learning_rate, s.beta1, s.beta2, s.eps, s.weight_decay) == (1e-4, 0.9, 0.999, 1e-8, 0.0)
    assert s.sample_tokens == 64


def test_help_groups_flags_and_shows_defaults():
    text = run_program("train_gpt2.py", "--help", COLUMNS="200").stdout
    for words in ("files:", "batch:", "optimizer:", "reports:", "checkpoints:", "-b N, --batch_size N",
                  "(default: 0.0001)"):
        assert words in text


def test_importing_starts_nothing():
    code = ("import sys, threading, train_gpt2; assert threading.active_count() == 1;"
            "assert not sys.modules.keys() & {'torch', 'tiktoken', 'tqdm', 'requests', 'cupy'}")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_readme_markers(tmp_path):
    import readme

    (tmp_path / "R.md").write_text("a\n<!-- x begin -->\nold\n<!-- x end -->\nb\n")
    readme.put_between_markers("x", "new", tmp_path / "R.md")
    assert (tmp_path / "R.md").read_text() == "a\n<!-- x begin -->\nnew\n<!-- x end -->\nb\n"
    with pytest.raises(UserError, match="markers"):
        readme.put_between_markers("y", "new", tmp_path / "R.md")
    text = "start\n" + "".join(f"step {i}: x\n" for i in range(9)) + "end\n"
    assert readme.shorten(text, 1) == "start\nstep 0: x\n...\nstep 8: x\nend"


def test_what_readme_takes_from_a_run(workplace, run_here):
    """The lines that the trainer prints today are those that dev/readme.py looks for."""
    import readme

    output = run_here(train_gpt2, *FAST[:6], "-x", 9, "-v", 4, "-s", 9, "--final_reports", 1, "-o", "run").stdout
    log = (workplace / "run" / "main.log").read_text()
    assert readme.loss_log(output) == re.sub(" lr.*", "", log)
    lines = readme.excerpt(f"Saved 1 tokens\nSaved 2 tokens\n{output}").split("\n")
    assert lines[0] == "Saved 2 tokens" and lines[1].startswith("model ") and lines[2].startswith("step 0/9 | val loss")
    assert [line[:8] for line in lines[3:9]] == ["step 1/9", "step 2/9", "...", "step 8/9", "step 9/9", "step 9/9"]
    assert lines[9] == "generating:" and len(lines) in (11, 12)
    short = readme.shorten(output, 1).split("\n")
    assert [line[:18] for line in short if line[:4] in ("step", "...")] == [
        "step 0/9 | val los", "step 1/9 | train l", "...", "step 4/9 | train l", "step 4/9 | val los",
        "step 5/9 | train l", "...", "step 8/9 | train l", "step 8/9 | val los", "step 9/9 | train l",
        "step 9/9 | val los"]
