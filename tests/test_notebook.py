"""doc/first_run.ipynb: it runs from the first cell to the last, and what is stored in it is what a run prints."""

import base64
import json
import re
import shutil

import pytest

import run_notebook
from conftest import ROOT
from llmc.errors import UserError

PAGE = ROOT / "doc" / "first_run.ipynb"


def outputs(notebook):
    """(all that the cells printed, the pictures that they show, as PNG)."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    printed, pictures = "", []
    for output in (output for cell in cells for output in cell["outputs"]):
        assert output["output_type"] != "error"
        printed += "".join(output.get("text", ""))
        if "image/png" in output.get("data", {}):
            pictures.append(base64.b64decode("".join(output["data"]["image/png"])))
    return printed, pictures


def check(printed, pictures, steps):
    assert re.search(rf"^step +{steps}/{steps} \| train loss \d\.\d{{4}} \|", printed, re.MULTILINE)
    assert re.search(r"^Saved \d+ tokens to data/first_run_train.bin", printed, re.MULTILINE)
    assert "the model is in runs/first_run" in printed and "wrote losses.png" in printed
    assert "First Citizen:" in printed and "ROMEO:" in printed
    assert len(pictures) == 1 and pictures[0].startswith(b"\x89PNG")


def test_what_is_stored():
    notebook = json.loads(PAGE.read_text(encoding="utf-8"))
    printed, pictures = outputs(notebook)
    check(printed, pictures, 700)
    assert not re.search(r"^/|[ '\"](/work|/tmp|/home|/root)|\x1b|\r(?!\n)|Warning", printed, re.MULTILINE)
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1)), "the cells were run once, in their order"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of what the notebook runs, with a short text, and settings for seconds instead of minutes."""
    for name in ("llmc", "dev"):
        (tmp_path / name).symlink_to(ROOT / name)
    for path in ROOT.glob("*.py"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "doc").mkdir()
    shutil.copy(PAGE, tmp_path / "doc")
    (tmp_path / "my text.txt").write_text("First Citizen: what, ROMEO!\n" * 1000)
    monkeypatch.setenv("FIRST_RUN_STEPS", "12")
    monkeypatch.setenv("FIRST_RUN_TEXT", "my text.txt")
    return tmp_path


def test_it_runs(project):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    check(*outputs(run_notebook.execute(project / "doc" / "first_run.ipynb", str(project / "doc"))), 12)


def test_a_cell_that_fails_is_an_error(project, monkeypatch):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("FIRST_RUN_STEPS", "no number")
    with pytest.raises(UserError, match="first_run.ipynb"):
        run_notebook.execute(project / "doc" / "first_run.ipynb", str(project / "doc"))
