"""What several test files share: small models and data on disk, and the programs run as a user runs them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import train_gpt2  # first: it tells OpenBLAS how to run, before NumPy is imported

import numpy as np
import pytest

from train_gpt2 import Config, allocate, flat, parameter_table, write_model, write_tokenizer, write_tokens

ROOT = Path(__file__).parent.parent
SMALL = Config(maxT=32, V=257, L=2, NH=3, C=24, Vp=384)


def random_params(config, seed=0):
    """Weights N(0, 0.1), the padding rows of wte 0; a large spread, so that samples differ and gradients are not tiny."""
    params = allocate(parameter_table(config))
    flat(params)[:] = np.random.default_rng(seed).standard_normal(flat(params).size, dtype=np.float32) * np.float32(0.1)
    params.wte[config.V :] = 0.0
    return params


def run_program(*command, check=True, cwd=None, timeout=120, **environment):
    """Run `python PROGRAM ...` from the project's root; returns the finished process, its output as text."""
    program, *arguments = map(str, command)
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run([sys.executable, str(ROOT / program), *arguments], cwd=cwd, capture_output=True, timeout=timeout,
                          env={**os.environ, "PYTHONPATH": path, **environment})
    done.stdout, done.stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    assert not check or done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done


def assert_one_line_error(done, *words):
    """Exit status 1, and one line on stderr that has all these words and is no traceback."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 1, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert len(lines) == 1 and "error: " in lines[0], done.stderr
    for word in words:
        assert str(word) in lines[0], f"{word!r} is not in {lines[0]!r}"


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A directory with a small model, tokenizer and token files, which is the current directory of the test."""
    write_model(tmp_path / "gpt2_124M.bin", SMALL, random_params(SMALL))
    write_tokenizer(tmp_path / "gpt2_tokenizer.bin", [bytes([i]) for i in range(256)] + [b"<|endoftext|>"], 256)
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(3)
    for split, count in (("train", 4000), ("val", 600)):
        tokens = rng.integers(0, SMALL.V, count, dtype=np.int32)
        write_tokens(tmp_path / "data" / f"tiny_shakespeare_{split}.bin", [tokens], count)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def gpt2_vocabulary():
    """The environment in which tiktoken has GPT-2's vocabulary with no network; skips the test where it is not to be had."""
    candidates = [os.environ.get("TIKTOKEN_CACHE_DIR"), os.path.join(tempfile.gettempdir(), "data-gym-cache"),
                  str(ROOT.parent / "shared" / "data" / "tiktoken_cache")]
    for directory in filter(None, candidates):
        if os.path.exists(os.path.join(directory, "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")):
            return {"TIKTOKEN_CACHE_DIR": directory}
    pytest.skip("GPT-2's vocabulary is neither in TIKTOKEN_CACHE_DIR nor in tiktoken's own cache")


@pytest.fixture(scope="session")
def tiny_shakespeare():
    """The path of the text; skips the test where it is not to be had."""
    for path in (ROOT / "data" / "tiny_shakespeare.txt", ROOT.parent / "shared" / "data" / "tiny_shakespeare.txt"):
        if path.exists():
            return path
    pytest.skip("tiny_shakespeare.txt is not in data/: run python prepro_tinyshakespeare.py once")


@pytest.fixture
def small_model():
    """A GPT2 over SMALL with everything allocated for B=2, T=8."""
    model = train_gpt2.GPT2(SMALL, random_params(SMALL))
    model.allocate_activations(2, 8)
    model.allocate_training(2, 8)
    return model
