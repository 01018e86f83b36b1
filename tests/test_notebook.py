"""doc/first_run.ipynb: its cells run one after the other, and what is stored in it is what a run prints."""

import base64
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from conftest import ROOT

PAGE = ROOT / "doc" / "first_run.ipynb"
CELLS = [cell for cell in json.loads(PAGE.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def check(printed, steps):
    assert re.search(rf"^step +{steps}/{steps} \| train loss \d\.\d{{4}} \|", printed, re.MULTILINE)
    assert re.search(r"^Saved \d+ tokens to data/first_run_train.bin", printed, re.MULTILINE)
    assert "the model is in runs/first_run" in printed and "wrote losses.png" in printed
    assert "First Citizen:" in printed and "ROMEO:" in printed


def test_what_is_stored():
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    pictures = ["".join(output["data"]["image/png"]) for output in outputs if "image/png" in output.get("data", {})]
    check(printed, 700)
    assert len(pictures) == 1 and base64.b64decode(pictures[0]).startswith(b"\x89PNG")
    assert not re.search(r"^/|[ '\"](/work|/tmp|/home|/root)|\x1b|\r(?!\n)|Warning", printed, re.MULTILINE)
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1)), "run once, in their order"


def test_it_runs(tmp_path, monkeypatch, run_here):
    """In this process: a line that begins with ! is a program with its flags."""
    pytest.importorskip("IPython")
    monkeypatch.chdir(tmp_path)
    for name, value in dict(FIRST_RUN_STEPS="4", FIRST_RUN_TEXT="my text.txt", TQDM_DISABLE="1").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train_gpt2.py").touch()  # so the cells know where they are
    (tmp_path / "my text.txt").write_text("First Citizen: what, ROMEO!\n" * 400)

    def run(command):
        program, *flags = shlex.split(command)
        printed.append(run_here(importlib.import_module(Path(program).stem), *flags).stdout)

    printed = []
    names = {"run": run, "print": lambda *words, **_: printed.append(" ".join(map(str, words)))}
    for cell in CELLS:
        code = "".join(cell["source"]).replace("\\\n", "")
        code = re.sub(r"^!\{python\} (.*)", r"run(f'''\1''')", code, flags=re.MULTILINE)
        exec(re.sub(r"^( *)(!rm|%pip) .*", r"\1pass", code, flags=re.MULTILINE), names)
    check("".join(printed), 4)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
