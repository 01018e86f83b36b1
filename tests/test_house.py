"""The ruler, and who imports whom, as dev/lines.py finds; which version this is."""

import importlib
import re
from pathlib import Path

import pytest

from conftest import ROOT
from lines import (FUNCTION_LINES, assignments, closure, code_files, count, files, functions, imports,
                   long_lines, most_lines)


def test_a_cpu_run_loads_nothing_of_a_gpu():
    loaded = closure("train_gpt2.py")
    assert not [path for path in loaded if path.startswith("llmc/gpu")]
    assert "llmc/loop.py" in loaded and "llmc/loop.py" in closure("train_gpt2_cuda.py")


def test_a_bfloat16_run_on_one_gpu_loads_nothing_of_8_bits_of_several_gpus_or_of_text():
    """But within functions, which other runs call."""
    loaded = closure("train_gpt2_cuda.py")
    assert not [path for path in loaded if re.search("/several/|/fp8|/decoder", path)]
    assert "llmc/gpu/messages.py" in loaded


def test_the_ruler():
    """At most 2 percent of all lines are longer than 100 columns; files and functions are what one can
    hold, but a backward pass, which is a list of launches; a statement does one thing."""
    lines = sum(map(count, code_files()))
    assert sum(map(long_lines, code_files())) <= 0.02 * lines
    assert not [path for path in code_files() if count(path) > most_lines(path)]
    assert not [found for found in functions()
                if found[0] > FUNCTION_LINES and found[2] != "backward"]
    total, packed = assignments()
    assert packed <= 0.05 * total


@pytest.mark.parametrize("path", [path for path in files("dev/*.py") if "/kernels/" not in path])
def test_a_program_s_imports_exist(path):
    importlib.import_module(Path(path).stem)


def level(path):
    """Who may import whom: only what has the same level, or a lower one."""
    return (0 if path.startswith("llmc/") else 2
            if path.startswith(("tests/", "exercises/", "dev/", "doc/")) else 1)


def test_nothing_runs_in_circles():
    """Nor up, from llmc/ to the programs, say, or from a CPU's files to a GPU's: also within
    functions. (Strings that importlib gets are no imports here: llmc/api.py finds a page so.)"""
    after = {path: set(imports(path, everywhere=True)) - {path} for path in files("*.py")}
    for path, used in after.items():
        assert all(level(name) <= level(path) for name in used), path
        loaded = {name for name in imports(path) if name.startswith("llmc/gpu/")}
        if level(path) < 2 and not path.startswith("llmc/gpu/") and not path.endswith("_cuda.py"):
            # is there a GPU?
            allowed = ("device",) if path in ("evaluate.py", "generate.py", "train_rl.py") else ()
            assert (path in ("test_gpt2.py", "backends.py")
                    or loaded <= {f"llmc/gpu/{name}.py" for name in ("__init__", *allowed)}), path
    while after:
        last = [path for path, used in after.items() if not used & after.keys()]
        assert last, f"a circle of {sorted(after)}"
        for path in last:
            del after[path]


def test_one_version():
    """With its date, where it has one."""
    texts = [(ROOT / name).read_text(encoding="utf-8")
             for name in ("pyproject.toml", "CHANGELOG.md", "CITATION.cff")]
    version, date = re.search(r"^## (\S+), (\S+)$", texts[1], re.M).groups()
    assert (f'version = "{version}"' in texts[0]
            and f"version: {version}\ndate-released: {date}\n" in texts[2])
