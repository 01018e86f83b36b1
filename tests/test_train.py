"""The training program as a user runs it: lines, logs, resuming to the bit, interruptions,
outliers, schedules."""

import collections
import dataclasses
import json
import math
import os
import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import evaluate
import generate
import llmc.gpu.precision
import llmc.llmc_lines
import llmc.loop
import llmc.progress
import llmc.single_process
import llmc.threads
import plot_log
import train_gpt2
import train_gpt2_cuda
from conftest import (FAST, ROOT, SMALL, draw_slowly, make_model, random_params, remove_after, trainer_of)
from llmc.api import load
from llmc.checkpoint import write_model
from llmc.dataloader import DataLoader, open_data, write_tokens
from llmc.errors import UserError
from llmc.outliers import LOSS, RECENT, WINDOW, notes_on, read_recent, z_score
from llmc.resume import checkpoint_paths, complete_checkpoints, newest_checkpoint
from llmc.settings import parse_settings, Settings
from llmc.tensors import table_elements
from llmc.tokenizer import read_tokenizer, write_tokenizer
from train_gpt2 import activation_table, GPT2
from train_llama3 import Llama3
from train_speedrun import Speedrun
from test_logs import read_table


def assert_goes_on(whole, rest, begin, step):
    """What a resumed run in parts/ printed from `begin` on, less timings, its log and its
    checkpoint of this step are, byte for byte, those of one in whole/ that was not interrupted."""
    whole, rest = (re.sub(r" \(took [0-9.]+ ms\)", "", text) for text in (whole, rest))
    assert whole.endswith(rest[rest.index(begin) :])
    for name in ("main.log", *checkpoint_paths("", step)):
        assert Path("parts", name).read_bytes() == Path("whole", name).read_bytes(), name


def untimed(text):
    return re.sub(r"\d+(\.\d\d)? (m?s|min)\b|\d+ tok/s", "TIME", text)


def test_lines(workplace, run_here):
    """No flags: seven lines of what the run is; steps are counted from 1; llm.c's lines, with
    --lines llmc, are its own to the byte, with the same losses: samples come after validation and
    before the update."""
    config = dataclasses.replace(SMALL, maxT=64)
    write_model("gpt2_124M.bin", config, random_params(config))
    os.unlink("gpt2_tokenizer.bin")
    text = run_here(train_gpt2, "-s", 40, "-o", "run", "-g", 16).stdout
    lines = text.splitlines()
    names = ["settings:", "model", "data", "run", "device", "output", "memory"]
    assert [line.split()[0] for line in lines[:7]] == names
    parameters = 257 * 24 + 64 * 24 + 2 * (12 * 24**2 + 13 * 24) + 2 * 24
    assert (lines[1]
            == f"model     gpt2_124M.bin: L=2 NH=3 C=24 maxT=64 V=257, {parameters:,} parameters")
    assert lines[2:4] == ["data      data/tiny_shakespeare: 15 batches of 4 x 64 tokens, 3 to"
                          " validate",
                          "run       41 steps of 256 tokens: 2.73 epochs"]
    expected = []
    for step in range(41):
        expected += [f"step {step:>2}/41 | val loss X"] * (step % 10 == 0)
        expected += ["step 40/41 | validation was lowest at step 10, X: more steps overfit"
                     " (--patience stops then, and keeps the best model)", "generating:", "---",
                     "IDS", "---"] * (step == 40)
        expected += [f"step {step + 1:>2}/41 | train loss X | norm X | lr 1.00e-04 | TIME | TIME"]
        expected[-1] += " | TIME left" * (step < 40)
    expected += ["41 steps in TIME, TIME while training; the model is in run"]
    printed = re.sub(r"\d\.\d{4}\b|(?<=norm )\d\.\d\d", "X", untimed(text))
    printed = re.sub(r"^(\d+ ){15}$", "IDS", printed, flags=re.MULTILINE)
    assert printed.splitlines()[7:] == expected
    theirs = run_here(train_gpt2, "--lines", "llmc").stdout
    expected = ["[GPT-2]", "max_seq_len: 64", "vocab_size: 257", "num_layers: 2", "num_heads: 3",
                "channels: 24",
        f"num_parameters: {parameters}", "train dataset num_batches: 15",
                "val dataset num_batches: 2",
        f"num_activations: {table_elements(activation_table(config, 4, 64))}"]
    for step in range(41):
        expected += (["val loss X"] * (step % 10 == 0) + ["generating:", "---", "IDS", "---"]
                     * (step in (20, 40)))
        expected += [f"step {step}: train loss X (took X ms)"]
    printed = re.sub(r"\d+\.\d{6}\b", "X",
                     re.sub(r"^(\d+ ){63}$", "IDS", theirs, flags=re.MULTILINE))
    assert printed.splitlines() == expected
    ours, theirs = ([float(x) for x in re.findall(r"loss (\d\S+)", output)]
                    for output in (text, theirs))
    assert len(ours) == 46 and np.allclose(ours, theirs, rtol=0, atol=0.51e-4)


def test_fewer_lines_and_verbose_ones(workplace, train, run_here):
    """A log has all steps, and losses alone. What else it has cannot be plotted."""
    flags = ("-x", 8, "-s", 0, "--print_every", 3, "-d", 32, "-v", 4, "--lines", "short",
             "--verbose")
    output = train(*flags, "-o", "run.log")
    log = Path("run.log")
    assert "8 steps of 32 tokens: 0.06 epochs" in output
    assert re.findall(r"^step (\d)/8 \| (train|val)", output, re.MULTILINE) == [
        ("0", "val"), ("1", "train"), ("3", "train"), ("4", "val"), ("6", "train"), ("8", "train"),
        ("8", "val")]
    for field in dataclasses.fields(Settings):
        assert re.search(rf"^\| {field.name} +\| ", output, re.MULTILINE), field.name
    assert re.findall(r"^allocated \d+ MiB for (.*)$", output, re.MULTILINE) == [
        "parameters", "gradients", "AdamW's m", "AdamW's v", "activations",
        "gradients of activations"]
    events = [f"s:{i} {what}:L" for i in range(9) for what in ("tel", "trl")
              if (i % 4 == 0, i < 8)[what == "trl"]]
    assert re.sub(r"\d+\.\d{4}", "L", log.read_text()).splitlines() == events
    log.write_text(log.read_text() + "hello\n")
    run_here(plot_log, log, fails=("run.log:12", "hello"))


@pytest.mark.parametrize("flags, steps, warmup", (
    ((), 70, 35), (("-u", 9), 70, 9), (("-x", 3), 3, 1)))
def test_a_small_text_is_not_learnt_by_heart(workplace, run_here, monkeypatch, flags, steps,
                                             warmup):
    """Of random weights: ten epochs of seven batches, unless -x says more. The first step ends the
    run."""
    monkeypatch.setattr(train_gpt2, "train_step", Mock(side_effect=UserError("enough")))
    done = run_here(train_gpt2, "-e", "d2", "-b", 7, "-t", 80, "-s", 0, "-v", 0, *flags,
                    fails=["enough"])
    assert f"\nrun       {steps} steps of 560 tokens" in done.stdout
    assert f" warmup_steps={warmup}" in done.stdout


DATA = "--data", "data/tiny_shakespeare", "--device", "cpu"
LOSSES = 5.0, 4.0, 4.5, 4.2, 4.1, 4.6, 4.7, 4.8, 4.9, 5.0  # of validations, two steps apart


@pytest.mark.parametrize("flags, steps", (((), 30), (("-x", 0), 3)))
def test_an_epoch_of_updates_of_two_batches(workplace, run_here, monkeypatch, flags, steps):
    """Of seven batches: three updates."""
    monkeypatch.setattr(train_gpt2, "train_step", Mock(side_effect=UserError("enough")))
    flags = *"-e d2 -b 7 -t 80 -d 1120 -s 0 -v 0".split(), *flags
    printed = run_here(train_gpt2, *flags, fails=["enough"]).stdout
    assert f"\nrun       {steps} steps of 1120 tokens" in printed


@pytest.mark.parametrize("patience, last", ((0, 12), (3, 8), (4, 10)))
def test_a_run_that_overfits(workplace, run_here, monkeypatch, patience, last):
    """It is said once; with --patience, it ends there, and says why and which checkpoint is the
    best, which stays; the command may go on."""
    monkeypatch.setattr(llmc.loop, "validate", lambda *_, losses=iter(LOSSES): (next(losses), None))
    flags = *"-e d2 -x 12 -b 2 -t 8 -v 2 -s 0 -o run -n 2 -nk 1 --patience".split(), patience
    printed = run_here(train_gpt2, *flags).stdout
    stops = (f"step {last:>2}/12 | stopped by --patience {patience}: that many validations in a row"
             " were above 4.0000, of step 2; the best checkpoint is run/model_00000002.bin\n")
    assert printed.count(stops) == bool(patience)
    assert printed.count("validation was lowest at step 2, 4.0000: more steps") == (not patience)
    assert complete_checkpoints("run") == [2] * bool(patience) + [last]
    assert f"\n{last} steps in " in printed
    run_here(train_gpt2, *flags, "-y", 1)  # whose validations are above the lowest of before
    assert complete_checkpoints("run") == [2] * bool(patience) + [12]


@pytest.mark.parametrize("flags, kept", (
    ((), [2, 8]), (("-n", 3), [2, 3, 6, 8]), (("-n", 3, "-nk", 1), [2, 8]),
    (("-n", 5, "-nk", 2), [2, 5, 8]), (("-n", 4, "-nm", 4, "-nk", 1), [2, 4, 8]),
    (("--patience", 9), [2, 12])))
def test_patience_keeps_the_best_and_the_newest_of_its_own(
        workplace, run_here, monkeypatch, flags, kept):
    """-n's checkpoints stay as without it. Validations are lowest at steps 0, then 2."""
    monkeypatch.setattr(llmc.loop, "validate", lambda *_, losses=iter(LOSSES): (next(losses), None))
    begin = "-e d2 -x 12 -b 2 -t 8 -v 2 -s 0 -o run --patience 3".split()
    printed = run_here(train_gpt2, *begin, *flags).stdout
    assert complete_checkpoints("run") == kept
    assert printed.endswith("; the model is in run, the best one of step 2\n")


def test_a_model_that_only_gets_worse(workplace, run_here, monkeypatch):
    """The one that the run started from is kept, as the best."""
    monkeypatch.setattr(llmc.loop, "validate", lambda *_, steps=iter(range(9)): (next(steps), None))
    begin = "-e d2 -x 12 -b 2 -t 8 -v 2 -s 0 -o run --patience 2".split()
    printed = run_here(train_gpt2, *begin).stdout
    assert complete_checkpoints("run") == [0, 4]
    assert "the best checkpoint is run/model_00000000.bin" in printed
    with open("run/model_00000000.bin", "r+b") as f:
        f.truncate(2000)
    run_here(generate, "run", "--checkpoint", 0,
             fails=("model_00000000.bin", "pass --checkpoint 4"))


def test_which_checkpoint_of_a_run_is_taken(workplace, run_here, monkeypatch):
    """By default the best, which is said; a run without --patience has no best one."""
    monkeypatch.setattr(llmc.loop, "validate", lambda *_, losses=iter(LOSSES): (next(losses), None))
    run_here(train_gpt2, *"-x 8 -b 2 -t 8 -v 2 -s 0 -o run -l 0.01 -n 6 --patience 3".split())
    texts = {}
    note = "note: run: this is the best checkpoint, of step 2, validation loss 4.0000; the last is"
    for flags, path in (((), "run"), (("--checkpoint", "best"), "run/model_00000002.bin"),
                        (("--checkpoint", 6), "run/model_00000006.bin"),
                        (("--checkpoint", "last"), "run/model_00000008.bin")):
        done = run_here(generate, "run", *flags, "--tokens", 20, "--device", "cpu", "--json")
        assert (f"{note} run/model_00000008.bin" in done.stderr) == (not flags)
        file = run_here(generate, path, "--tokens", 20, "--device", "cpu", "--json")
        assert done.stdout == file.stdout
        texts[path] = done.stdout
        of_run, of_file = (json.loads(run_here(evaluate, *words, *DATA, "--json").stdout)
                           for words in (("run", *flags), (path,)))
        assert of_run | {"model": path} == of_file
    assert len(set(texts.values())) == 3 and texts["run"] == texts["run/model_00000002.bin"]
    expected = load("run/model_00000006.bin").loss("abc")
    assert load("run", checkpoint=6).loss("abc") == expected != load("run").loss("abc")
    wrong = ("run", "--checkpoint", 5), ("run/model_00000002.bin", "--checkpoint", "last")
    expected = "no checkpoint 5: expected last, one of the steps 2, 6, 8", "is a file, not the"
    for flags, words in zip(wrong, expected):
        run_here(generate, *flags, fails=[words])
    run_here(train_gpt2, *"-x 9 -b 2 -t 8 -v 0 -s 0 -o run -y 1".split())
    assert not run_here(generate, "run", "--tokens", 2, "--device", "cpu").stderr
    run_here(generate, "run", "--checkpoint", "best", fails=["no checkpoint best: expected last"])


def test_the_memory_plan_is_what_the_model_allocates():
    settings = Settings(B=2, T=8, total_batch_size=32)
    model = make_model(2, 8, settings.micro_steps)
    decoder = train_gpt2.Decoder(SMALL, model.params, 1, 8)
    tensors = (model.params, model.grads, model.micro_grads, model.optimizer.m, model.optimizer.v,
               model.scratch, \
         decoder.cache)
    buffers = [model.activations_buffer, decoder.buffer, *(tensor.buffer for tensor in tensors)]
    plan = train_gpt2.memory_plan(GPT2, SMALL, settings)
    assert sum(size for size, _ in plan) == sum(buffer.size for buffer in buffers)


def test_samples_and_validation(workplace, train):
    """A sample is as from forward passes, also where it is longer than T; validation, the mean of
    the first batches."""
    os.unlink("gpt2_tokenizer.bin")
    output = train("-t", 5, "-g", 40, "-x", 1, "-s", 1, "-v", 1, "-m", 3, "-l", 0.0)
    assert [int(word) for word in output.split("---")[1].split()] == draw_slowly(5, [256], 39)
    model = make_model(2, 5)
    loader = DataLoader(["data/tiny_shakespeare_val.bin"], SMALL.V, 2, 5)
    want = np.mean([model.forward(*loader.next_batch()) for _ in range(3)])
    assert float(re.search(r"val loss (\S+)", output)[1]) == pytest.approx(want, abs=1e-6)
    assert "generating:" in train("-t", 1, "-g", 4, "-x", 1, "-s", 1, "-v",
                                  0), "not one that moves by 0"


@pytest.mark.parametrize("page, more", (
    *((GPT2, order)
      for order in ((), ("--shuffle", 1), ("--spread", 1), ("--shuffle", 1, "--spread", 1))),
    *((page, ("-e", size, "--print_every", 1))
      for page, size in ((Llama3, "l2"), (Speedrun, "s2")))))
def test_resumed_run_is_bit_equal(workplace, run_here, page, more):
    """Also once it is finished: then nothing is done. Its model writes text, and is for its own
    page alone."""
    def train(*flags):
        return run_here(trainer_of(page), *FAST, *flags).stdout

    flags = (*"-x 9 -v 3 -s 3 -u 2 -k cosine -c 0.1 --grad_clip 1 -d 32 -l 0.01 -n 4".split(),
             *more)
    whole = train(*flags, "-o", "whole")
    train(*flags, "-o", "parts")
    remove_after("parts", 4)
    rest = train(*flags, "-o", "parts", "-y", 1)
    assert "resuming at step 4 from parts" in rest
    assert "step 9:" not in train(*flags, "-o", "parts", "-y", 1)
    assert_goes_on(whole, rest, "step 4:", 9)
    assert read_table("whole/main.csv") == read_table("parts/main.csv")
    assert set(os.listdir("whole")) == set(os.listdir("parts"))
    if page is not GPT2:
        text = run_here(generate, "whole", "--prompt", "ab", "--tokens", 20, "--ignore_eot",
                        "--device", "cpu").stdout
        assert text.startswith("ab") and len(text) > 10
        run_here(train_gpt2, "-e", "whole",
                 fails=(f"checkpoint of {page.__module__}.py", "run the other page"))


def test_a_run_s_newest_model_and_vocabulary_are_for_others(workplace, train, run_here):
    """-e takes its directory. Another vocabulary of the same size would change the meaning of all
    ids."""
    flags = ("-b", 2, "-t", 8, "-v", 0, "-s", 0, "-x", 3)
    train(*flags, "-n", 1, "-o", "run")
    tuned = run_here(train_gpt2, *flags, "-e", "run", "-o", "tuned").stdout
    assert "\nmodel     run/model_00000003.bin: L=2" in tuned and newest_checkpoint("tuned") == 3
    tokens = read_tokenizer("gpt2_tokenizer.bin")
    write_tokenizer("other.bin", tokens.tokens[::-1], tokens.eot)
    for begin in (("-o", "run", "-y", 1), ("-e", "run")):
        run_here(train_gpt2, *flags, "--tokenizer", "other.bin", *begin,
                 fails=("other.bin: is another", "run/token"))
    assert read_tokenizer("run/tokenizer.bin") == tokens
    os.mkdir("hf")
    run_here(train_gpt2, *flags, "-e", "hf", fails=("hf: holds no checkpoint", "-o DIR"))
    Path("hf/config.json").write_text("{}")
    run_here(train_gpt2, *flags, "-e", "hf",
             fails=("-e hf: a Hugging Face folder", "export_weights.py --model hf"))


def test_z_scores_are_those_of_the_last_values():
    """And those of a checkpoint's notes go on as they were."""
    rng = np.random.default_rng(0)
    recent = np.zeros(2, RECENT)
    last = collections.deque(maxlen=WINDOW)
    for i, x in enumerate(rng.standard_normal(400).astype(np.float32)):
        last.append(float(x))
        # as llm.c, from the 129th on
        expected = (x - np.mean(last)) / np.std(last) if i >= WINDOW else 0.0
        assert abs(z_score(recent[LOSS], x) - expected) < 1e-6
        if i in (5, 300):
            recent = read_recent(json.loads(json.dumps(notes_on(recent))))
    before = recent.copy()
    assert z_score(recent[LOSS], math.inf) == math.inf and np.array_equal(recent, before)
    recent[LOSS]["values"] = 2.0
    assert z_score(recent[LOSS], 2.0) == 0.0
    assert notes_on(np.zeros(2, RECENT)) == {} and not read_recent({}).view(np.uint8).any()


@pytest.mark.parametrize("flag, what", (("-sl", "loss"), ("-sg", "norm")))
def test_a_damaged_batch_changes_no_weight(workplace, train, run_here, flag, what, damaged=140):
    """Text of four tokens, but for one update's batch, which is skipped, by a resumed run, too.
    This is said."""
    def run(steps, directory, *more):
        flags = ("-v", 0, "-s", 0, "-l", 1e-2, "-u", 20, "-n", 70, "--lines", "short", flag, 5)
        return train(*flags, "-x", steps, "-o", directory, *more)

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, 16 * 150 + 1)
    tokens[16 * damaged + 1 : 16 * (damaged + 1)] = rng.integers(0, SMALL.V, 15)
    write_tokens("data/tiny_shakespeare_train.bin", [tokens], len(tokens))
    said = [line for line in run(142, "whole").splitlines() if "skipped" in line]
    assert said[0].startswith(f"step {damaged + 1}/142 | update skipped: {what} z-score ")
    assert said[0].endswith(", above 5") and said[1:] == ["updates skipped: 1"]
    run(damaged, "parts")
    before = Path(f"parts/model_{damaged:08d}.bin").read_bytes()
    run(damaged + 1, "parts", "-y", 1)
    assert Path(f"parts/model_{damaged + 1:08d}.bin").read_bytes() == before
    run(142, "parts", "-y", 1)
    for name in checkpoint_paths("", 142):
        assert Path("parts", name).read_bytes() == Path("whole", name).read_bytes()
    Path("whole/DONE_00000142").write_text("{")
    run_here(train_gpt2, *FAST, "-x", 143, "-o", "whole", "-y", 1,
             fails=["DONE_00000142: cannot be read; remove "])


@pytest.mark.parametrize("flags, updates, warmup, rate", (
    ("-x 1000", 900, 100, 0.0036), ("-x 200", 900, 100, 0.0036), ("-x 100", 900, 50, 0.0018),
    ("-x 60", 900, 30, 0.00108), ("-x 10", 900, 5, 0.0009), ("", 6, 30, 0.00108),
    ("-x 0", 60, 30, 0.00108), ("-x 60 -l 0.01 -u 3", 900, 3, 0.01),
    ("-x 60 -e m.bin", 900, 0, 1e-4)))
def test_a_short_run_warms_up_slowly(flags, updates, warmup, rate):
    """-x 1000 is as ever; what is given stays; a model file has no warm-up."""
    settings = parse_settings(Settings, "", ["-e", "d2", *flags.split()])
    settings.fit_to_text(updates)
    assert settings.warmup_steps == warmup
    assert settings.learning_rate == pytest.approx(rate)
    muon = parse_settings(Speedrun.Settings, "", ["-e", "s2", "-x", "60"])
    muon.fit_to_text(updates)
    assert (muon.warmup_steps, muon.learning_rate) == (0, 0.025)


def test_the_loss_of_a_short_run_falls(workplace):
    """With a rate that rose to 0.0036 in six steps, it jumped up by 2.1 within 20."""
    letters = np.frombuffer((ROOT / "README.md").read_bytes(), np.uint8)
    for split in ("train", "val"):
        write_tokens(f"text_{split}.bin", [letters], len(letters))
    settings = parse_settings(Settings, "", "-e d2 -i text -x 60 --seed 2".split())
    loader, _ = open_data(settings, 256, 0, 1)
    settings.fit_to_text(loader.batches_per_epoch)
    model = GPT2(*train_gpt2.random_model("d2", 256, 2, settings.T))
    model.allocate_activations(settings.B, settings.T)
    model.allocate_training(settings.B, settings.T)
    losses = [train_gpt2.train_step(model, loader, settings, step).loss for step in range(20)]
    assert max(np.diff(losses)) < 0.3 and losses[-1] < 4.4


def test_defaults(here):
    """A model file's are llm.c's, those of random weights ours; given flags come first; a file
    named d4 is a file."""
    s = Settings()
    assert (s.val_every, s.val_batches, s.sample_every, s.sample_tokens) == (10, 5, 20, 64)
    assert (s.T, s.beta1, s.beta2, s.eps, s.weight_decay) == (64, 0.9, 0.999, 1e-8, 0.0)
    names = ("B", "steps", "shuffle", "spread", "learning_rate", "warmup_steps", "schedule",
             "grad_clip")
    llmc = (4, 41, -1, 0, 1e-4, 0, "constant", 0.0)
    defaults = (16, 1000, 1, 1, 0.0018, 100, "cosine", 1.0)
    given = 16, 50, 1, 0, 1e-4, 100, "cosine", 0.0
    for flags, expected in (("-e gpt2_124M.bin", llmc), ("-e d4", defaults),
                            ("-e d4 -x 50 --spread 0 -l 1e-4 --grad_clip 0", given)):
        settings = parse_settings(Settings, "", flags.split())
        assert tuple(getattr(settings, name) for name in names) == expected
    settings = parse_settings(train_gpt2_cuda.CudaSettings, "", ["-e", "d12", "-x", "0"])
    assert (settings.B, settings.learning_rate, settings.warmup_steps) == (4, 6e-4, 100)
    (here / "d4").touch()
    assert parse_settings(Settings, "", ["-e", "d4"]).steps == 41
