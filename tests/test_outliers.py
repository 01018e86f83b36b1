"""Updates that are outliers are skipped: --skip_loss_zscore, --skip_norm_zscore."""

import collections
import json
import math

import numpy as np
import pytest

import train_gpt2
from conftest import SMALL
from llmc.dataloader import write_tokens
from llmc.outliers import LOSS, RECENT, WINDOW, notes_on, read_recent, z_score

DAMAGED = 140  # the update whose batch is
FLAGS = ("-b", 2, "-t", 8, "-v", 0, "-s", 0, "-l", 1e-2, "-u", 20, "-n", 70)


def test_z_scores_are_those_of_the_last_values():
    """And those of a checkpoint's notes go on as they were."""
    rng, recent, last = np.random.default_rng(0), np.zeros(2, RECENT), collections.deque(maxlen=WINDOW)
    for i, x in enumerate(rng.standard_normal(400).astype(np.float32)):
        last.append(float(x))
        expected = (x - np.mean(last)) / np.std(last) if i >= WINDOW else 0.0  # as llm.c, from the 129th on
        assert abs(z_score(recent[LOSS], x) - expected) < 1e-6
        if i in (5, 300):
            recent = read_recent(json.loads(json.dumps(notes_on(recent))))
    before = recent.copy()
    assert z_score(recent[LOSS], math.inf) == math.inf and np.array_equal(recent, before)
    recent[LOSS]["values"] = 2.0
    assert z_score(recent[LOSS], 2.0) == 0.0
    assert notes_on(np.zeros(2, RECENT)) == {} and not read_recent({}).view(np.uint8).any()


@pytest.fixture
def damaged(workplace):
    """Text of four tokens, but for one batch, which has them all."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, 16 * 150 + 1)
    tokens[16 * DAMAGED + 1 : 16 * (DAMAGED + 1)] = rng.integers(0, SMALL.V, 15)
    write_tokens(workplace / "data" / "tiny_shakespeare_train.bin", [tokens], len(tokens))
    return workplace


@pytest.mark.parametrize("flag, what", (("-sl", "loss"), ("-sg", "norm")))
def test_a_damaged_batch_changes_no_weight(damaged, run_here, flag, what):
    """Which is said; and a run that is resumed before it decides the same."""
    def run(steps, *flags):
        return run_here(train_gpt2, *FLAGS, "-x", steps, *flags).stdout

    said = [line for line in run(142, "-o", "whole", flag, 5).splitlines() if "skipped" in line]
    assert said[0].startswith(f"step {DAMAGED + 1}/142 | update skipped: {what} z-score ")
    assert said[0].endswith(", above 5") and said[1:] == ["updates skipped: 1"]
    run(DAMAGED, "-o", "parts", flag, 5)
    before = (damaged / "parts" / f"model_{DAMAGED:08d}.bin").read_bytes()
    run(DAMAGED + 1, "-o", "parts", flag, 5, "-y", 1)
    assert (damaged / "parts" / f"model_{DAMAGED + 1:08d}.bin").read_bytes() == before
    run(142, "-o", "parts", flag, 5, "-y", 1)
    for name in ("model_00000142.bin", "state_00000142_00000.bin", "DONE_00000142"):
        assert (damaged / "parts" / name).read_bytes() == (damaged / "whole" / name).read_bytes()


@pytest.mark.parametrize("notes", ('{"recent": [1, 2]}', "[]", "{"))
def test_damaged_notes_are_refused(workplace, run_here, notes):
    run_here(train_gpt2, *FLAGS, "-x", 1, "-o", "run")
    (workplace / "run" / "DONE_00000001").write_text(notes)
    run_here(train_gpt2, *FLAGS, "-x", 2, "-o", "run", "-y", 1, fails=("DONE_00000001: cannot be read; remove ",))
