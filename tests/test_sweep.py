"""dev/sweep.py: runs by combinations of flags, one after the other on the CPU and side by side on GPUs, which are fake
here."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sweep
from conftest import ROOT, assert_one_line_error
from llmc.errors import UserError
from llmc.logger import COLUMNS
from llmc.resume import newest_checkpoint
from train_gpt2_cuda import CudaSettings

FAST = ("-o", "s", "-b", 2, "-t", 8, "-m", 2, "-v", 4)


@pytest.fixture
def without_gpu(monkeypatch):
    def none():
        raise UserError("no GPU here: says the test; train elsewhere")

    monkeypatch.setattr(sweep, "count_gpus", none)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def table_of(done):
    """The rows printed, without what depends on the time."""
    lines = done.stdout.split("\n")
    assert lines[-2].startswith("wrote ") and not lines[-1]
    return [line.split()[:-2] for line in lines[1:-2]]


def test_runs_table_and_picture(workplace, run_here, without_gpu, monkeypatch):
    """A run for each combination, of which one diverges; again without it, there is nothing left to train."""
    monkeypatch.setattr(sweep, "THREADS", 6)
    flags = (*FAST, "-x", 10, "--jobs", 3, "--shuffle=1", "--seed", "1,2")
    done = run_here(sweep, *flags, "-l", "0.01,1e-3,1e38", check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("6 runs of train_gpt2.py; 3 at a time on the CPU with 2 threads each (no GPU here)\n")
    for seed in (1, 2):
        assert f"s/l=1e+38_seed={seed}: failed (exit status 1): train_gpt2.py: error: after 1 steps" in done.stderr
    assert done.stderr.endswith("error: 2 of 6 runs failed: l=1e+38_seed=1, l=1e+38_seed=2\n")
    head, *rows = table_of(done)
    assert head == ["learning_rate", "seed", "state", "val_loss", "best_val_loss", "train_loss"]
    assert [row[2] for row in rows] == 4 * ["finished"] + 2 * ["failed"]
    assert sorted(row[:2] for row in rows[:4]) == [[rate, seed] for rate in ("0.001", "0.01") for seed in "12"]
    best = [float(row[4]) for row in rows]
    assert best[:4] == sorted(best[:4])
    for rate, seed, _, val, best, train in rows[:4]:
        log = list(csv.DictReader(open(f"s/l={rate}_seed={seed}/main.csv", newline="")))
        losses = [row["val_loss"] for row in log if row["val_loss"]]
        assert len(losses) == 4 and (val, best) == (losses[-1], min(losses)), "0, 4, 8, and after the last step"
        assert float(train) == pytest.approx(sum(float(row["train_loss"] or 0) for row in log) / 10, abs=1e-6)
        assert newest_checkpoint(f"s/l={rate}_seed={seed}") == 10
        output = Path(f"s/l={rate}_seed={seed}/output.txt").read_text()
        assert "CPU, 2 threads" in output and "generating" not in output
    assert len({tuple(row[3:]) for row in rows}) == 6, "each seed has its order"
    printed = [line.split() for line in done.stdout.split("\n")[1:-2]]
    assert list(csv.reader(open("s/sweep.csv", newline=""))) == printed
    assert Path("s/sweep.png").read_bytes().startswith(b"\x89PNG")

    for name in ("s/sweep.csv", "s/sweep.png"):
        os.unlink(name)
    monkeypatch.setattr(subprocess, "Popen", None)
    done = run_here(sweep, *flags, "-l", "1e-2,0.001")
    assert done.stdout.startswith("4 runs of train_gpt2.py, 4 finished before; ")
    assert table_of(done) == [head, *rows[:4]] and os.path.exists("s/sweep.csv") and os.path.exists("s/sweep.png")


def test_ctrl_c_saves_and_the_same_command_goes_on(workplace, run_here, without_gpu):
    """The table and the models are those of a sweep that was not stopped. The signal goes to the whole group, as a
    terminal's does: each run must get one, not two, at which it would stop without a checkpoint."""
    steps = 600
    flags = (*FAST, "-x", steps, "-l", "0.001,0.002", "--jobs", 2)
    command = [sys.executable, str(ROOT / "dev" / "sweep.py"), *map(str, flags)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, start_new_session=True)
    until = time.monotonic() + 60
    names = ("l=0.001", "l=0.002")
    while not all(os.path.exists(f"s/{name}/main.csv") and os.path.getsize(f"s/{name}/main.csv") > 200
                  for name in names):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert re.search(r"stopped with [01] of 2 runs finished; go on with: python \S+sweep.py -o s ", errors), errors
    assert "Traceback" not in errors and all(newest_checkpoint(f"s/{name}") for name in names)
    again = table_of(run_here(sweep, *flags))
    assert [row[1] for row in again[1:]] == ["finished", "finished"]
    assert any("resuming at step" in Path(f"s/{name}/output.txt").read_text() for name in names)
    whole = table_of(run_here(sweep, *flags, "-o", "whole"))
    assert again == whole
    for name in names:
        model = f"{name}/model_{steps:08d}.bin"
        assert Path("s", model).read_bytes() == Path("whole", model).read_bytes()


@pytest.mark.parametrize("flags, words", (
    (("-l", 0.1), ("no flag has several values", "-l 3e-4,6e-4")),
    (("-l", "0.1,-2"), ("-l/--learning_rate -2.0", "at least 0")),
    (("-d", "16,20"), ("-d/--total_batch_size 20", "multiple of B*T = 16")),
    (("-l", "0.1,0.2,1e-1"), ("l=0.1", "two runs")),
    (("-i", "a/b,a-b"), ("i=a-b", "two runs")),
    (("-l", "0.1,0.2", "-y", "0,1"), ("-y/--resume", "one value")),
    (("-o", "s,t"), ("-o/--output", "one value")),
    (("-l", "0.1,0.2", "--jobs", "1,2"), ("--jobs", "one value")),
    (("-l", "0.1,0.2", "--jobs", "-1"), ("--jobs -1", "at least 0")),
    (("-l", "0.1,0.2", "-o", ""), ("no -o", "pass -o DIR")),
    (("-l", "0.1,0.2", "-o", "s.log"), ("-o s.log", "pass -o DIR")),
))
def test_refused_before_anything_starts(workplace, run_here, without_gpu, flags, words):
    assert_one_line_error(run_here(sweep, *FAST, *flags, check=False), *words)
    assert sorted(os.listdir()) == ["data", "gpt2_124M.bin", "gpt2_tokenizer.bin"]


@pytest.mark.parametrize("flags, words", ((("-l", "0.1,x"), "invalid float value: 'x'"),
                                          (("-l", "0.1,0.2", "--depth", "3"), "unrecognized arguments: --depth 3"),
                                          (("--shuffle", "1,2"), "invalid choice: 2")))
def test_refused_by_the_trainer_s_parser(workplace, run_here, without_gpu, flags, words):
    done = run_here(sweep, *FAST, *flags, check=False)
    assert done.returncode == 2 and words in done.stderr.splitlines()[-1] and not os.path.exists("s")


def test_what_a_directory_holds(workplace, run_here, without_gpu):
    run_here(sweep, *FAST, "-x", 1, "-v", 0, "-l", "0.001,0.002")
    for flags, words in ((("-x", 2), ("with --steps=1", "has --steps=2")),
                         (("-x", 1, "-u", "0,1"), ("with none of it", "has --warmup_steps=...")),
                         (("-x", 1, "--grad_clip", 1), ("with none of it", "has --grad_clip=1.0"))):
        done = run_here(sweep, *FAST, "-v", 0, *flags, "-l", "0.001,0.002", check=False)
        assert_one_line_error(done, "s: is of another sweep", *words, "choose another -o")
    for name in os.listdir("s/l=0.001"):
        os.unlink(f"s/l=0.001/{name}")
    done = run_here(sweep, *FAST, "-x", 1, "-v", 0, "-l", "0.001,0.002,0.003", "--dark")
    assert "3 runs of train_gpt2.py, 1 finished before" in done.stdout, "one was removed, one is new"
    assert [row[1] for row in table_of(done)[1:]] == 3 * ["finished"]
    for text in ("{", "[]", '{"command": 3, "finished": []}', "[" * 100000):
        Path("s/sweep.json").write_text(text)
        done = run_here(sweep, *FAST, "-x", 1, "-l", "0.001,0.002", check=False)
        assert_one_line_error(done, "s/sweep.json", "remove it")


STUB = f"""import os, sys, time
directory = next(a for a in sys.argv if a.startswith("--output="))[9:]
start = time.time()
open(directory + "/started", "w").close()
while directory[-4:] in ("=0.1", "=0.2") and not all(os.path.exists(directory[:-1] + n + "/started") for n in "12"):
    time.sleep(0.01)
    assert time.time() < start + 20
if "learning_rate=0.3" in str(sys.argv):
    os.kill(os.getpid(), 9)
with open(directory + "/main.csv", "w") as f:
    print("{','.join(COLUMNS)}", "1,8,0.5,4.5,,0.1,1.0,100,", "2,8,0.6,,4.25,,,,", sep="\\n", file=f)
with open("gpus.txt", "a") as f:
    print(os.environ["CUDA_VISIBLE_DEVICES"], start, time.time(), *sys.argv[1:], file=f)
"""


def test_gpus_take_one_run_at_a_time(tmp_path, run_here, monkeypatch):
    """Those of CUDA_VISIBLE_DEVICES, as it calls them; one that a run was killed on is free again."""
    (tmp_path / "train_gpt2_cuda.py").write_text(STUB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "ROOT", str(tmp_path))
    monkeypatch.setattr(sweep, "count_gpus", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7e")
    done = run_here(sweep, "-o", "s", "-l", "0.1,0.2,0.3,0.4,0.5,0.6", check=False)
    assert done.stdout.startswith("6 runs of train_gpt2_cuda.py; 2 at a time on GPU 5, GPU-7e\n")
    assert "s/l=0.3: failed (killed by SIGKILL): it printed nothing" in done.stderr and done.returncode == 1
    seen = [line.split() for line in open("gpus.txt")]
    assert {gpu for gpu, *_ in seen} == {"5", "GPU-7e"} and len(seen) == 5
    for gpu in ("5", "GPU-7e"):
        times = sorted((float(start), float(end)) for name, start, end, *_ in seen if name == gpu)
        assert all(end <= start for (_, end), (start, _) in zip(times, times[1:]))
    spans = sorted((float(start), float(end), gpu) for gpu, start, end, *_ in seen)
    assert spans[0][1] > spans[1][0], "two at the same time"
    assert seen[0][3:] in [[f"--output=s/l={rate}", f"--learning_rate={rate}", "--sample_every=0", "--resume=1"]
                           for rate in ("0.1", "0.2")], "but for what differs, the trainer's defaults"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    run_here(sweep, "-o", "t", "-l", "0.1,0.2", "--jobs", 3)
    assert {line.split()[0] for line in list(open("gpus.txt"))[5:]} == {"0", "1"}


def test_what_the_picture_shows(tmp_path, monkeypatch):
    """The flag with the most values along the axis, logarithmic where they are spread by factors; seeds are averaged;
    no run that has failed."""
    shown = []
    monkeypatch.setattr(sweep, "add_legend", lambda axes: shown.append(axes) or axes.legend())
    settings = sweep.sweep_settings(sweep.Settings)()
    path = str(tmp_path / "sweep.png")

    swept = ["B", "learning_rate", "seed"]
    rows = [{"B": B, "learning_rate": rate, "seed": seed, "state": "finished", "val_loss": loss}
            for B in (2, 4) for rate, loss in ((1e-4, 5.0), (1e-3, 4.0), (1e-2, 6.0)) for seed in (1, 2, 3, 4)]
    assert sweep.draw(settings, swept, [*rows, {**rows[0], "state": "failed", "val_loss": 0.1}], path)
    axes = shown.pop()
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "learning rate"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["B 2, mean of 4 seeds", "B 4, mean of 4 seeds", "best 4.0000: B 2, learning_rate 0.001, seed 1"]
    assert list(axes.lines[0].get_xdata()) == [1e-4, 1e-3, 1e-2] and list(axes.lines[0].get_ydata()) == [5.0, 4.0, 6.0]
    words = [{"schedule": k, "state": "finished", "val_loss": 4.0} for k in ("cosine", "linear", "wsd")]
    assert sweep.draw(settings, ["schedule"], words, path) and shown.pop().get_xscale() == "linear"
    seeds = [{"seed": seed, "state": "finished", "val_loss": 4.0} for seed in (1, 2, 3)]
    assert sweep.draw(settings, ["seed"], seeds, path) and shown.pop().get_xscale() == "linear"
    assert not sweep.draw(settings, ["seed"], [{"seed": 1, "state": "failed", "val_loss": 4.0}], path)


def test_a_run_has_one_gpu():
    with pytest.raises(UserError, match="--gpus: a sweep trains each run on one GPU"):
        sweep.plan(["-o", "runs", "-l", "1e-3,1e-4", "--gpus", "2"], CudaSettings)
