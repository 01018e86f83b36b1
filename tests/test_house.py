"""Who imports whom: dev/lines.py's findings; which version this is."""

import re


from conftest import ROOT
from lines import closure, count, files, imports


def test_a_cpu_run_loads_nothing_of_a_gpu():
    loaded = closure("train_gpt2.py")
    assert not [path for path in loaded if path.startswith("llmc/gpu")] and sum(map(count, loaded)) <= 3000
    assert "llmc/loop.py" in loaded and "llmc/loop.py" in closure("train_gpt2_cuda.py")


def test_nothing_runs_in_circles():
    """Nor from llmc/ up to the programs, or from a CPU's files to a GPU's."""
    after = {path: set(imports(path)) - {path} for path in files("llmc/*.py", "train_*.py")}
    for path, used in after.items():
        assert not path.startswith("llmc/") or all(name.startswith("llmc/") for name in used), path
        assert path.startswith(("llmc/gpu/", "train_")) or not any(name.startswith("llmc/gpu/") for name in used), path
    while after:
        last = [path for path, used in after.items() if not used & after.keys()]
        assert last, f"a circle of {sorted(after)}"
        for path in last:
            del after[path]


def test_one_version():
    """With its date, where it has one."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CHANGELOG.md", "CITATION.cff")]
    version, date = re.search(r"^## (\S+), (\S+)$", texts[1], re.M).groups()
    assert f'version = "{version}"' in texts[0] and f"version: {version}\ndate-released: {date}\n" in texts[2]
