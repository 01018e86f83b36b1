"""The pages of doc/: their Python blocks run and print what the page says, CUDA blocks compile, what they link to or
name exists; the notebook's cells run one after the other, and what is stored in it is what a run prints."""

import ast
import base64
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT
from llmc.gpu.compiler import compile_kernels

DIRECTORY = ROOT / "doc" / "layernorm"
sys.path.insert(0, str(DIRECTORY))
from run_page import cuda_name, read_blocks, run_blocks

PAGE = (DIRECTORY / "layernorm.md").read_text(encoding="utf-8")
BLOCKS = read_blocks(PAGE)
NOTEBOOK = json.loads((ROOT / "doc" / "first_run.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name, count", (("layernorm/layernorm.md", 11), ("attention/attention.md", 9),
                                         ("walkthrough.md", 10)))
def test_python_blocks(name, count):
    path = ROOT / "doc" / name
    blocks = read_blocks(path.read_text(encoding="utf-8"), path)
    assert sum(block.kind == "python" and block.output is not None for block in blocks) == count
    assert len(blocks) == count or blocks == BLOCKS
    with np.printoptions():  # which the page sets
        run_blocks(blocks, ["python"], path)


@pytest.mark.parametrize("name", ("layernorm/layernorm.md", "attention/attention.md", "walkthrough.md", "python.md"))
def test_blocks_can_be_pasted(name):
    """Python's prompt wants an empty line after the body of a loop or a function."""
    for block in read_blocks((ROOT / "doc" / name).read_text(encoding="utf-8")):
        lines = block.content.splitlines() if block.kind.startswith("python") else []
        ends = [node.end_lineno for node in ast.parse("\n".join(lines)).body if hasattr(node, "body")]
        assert [lines[end] for end in ends if lines[end:] and lines[end]] == []


@pytest.mark.gpu
def test_gpu_blocks():
    figures = run_blocks(BLOCKS, ["python", "python gpu"])
    assert re.search(r"^kernels/layernorm.cu +\d+\.\d +\d+ +\d+%$", figures, re.MULTILINE), figures


def test_cuda_blocks_compile(tmp_path, fake_gpu, monkeypatch):
    pytest.importorskip("cuda.core")
    cuda = [block for block in BLOCKS if block.kind == "cuda"]
    assert sorted(map(cuda_name, cuda)) == ["backward.cu", "thread_a_row.cu", "warp_a_row.cu"]
    for block in cuda:
        path = tmp_path / cuda_name(block)
        path.write_text(block.content)
        cubin = compile_kernels(str(path.with_suffix("")), "sm_80", {"MODEL_C": 768})
        kernels = re.findall(r'extern "C" __global__ void (\w+)', block.content)
        assert kernels and all(b".text." + kernel.encode() in cubin for kernel in kernels)
    monkeypatch.setitem(sys.modules, "cupy", fake_gpu.cp)
    first = next(block for block in BLOCKS if block.kind == "python gpu")
    run_blocks([*cuda, first], [first.kind])  # which loads a kernel of theirs


@pytest.mark.parametrize("name", ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(
    str(path.relative_to(ROOT)) for directory in ("doc", "dev") for path in sorted(ROOT.glob(f"{directory}/**/*.md")))))
def test_what_a_page_names_exists(name):
    """Targets of relative links, paths of this project, and programs in commands."""
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    paths = re.findall(r"(?<![\w/.~-])(?:llmc|kernels|dev|doc|tests|scripts)/[\w./-]*\w(?![\w/*{<])", text)
    programs = re.findall(r"\bpython ([\w/]+\.py)", text)
    missing = [link for link in links if not ((ROOT / name).parent / link).exists()]
    assert missing + [path for path in (*paths, *programs) if not (ROOT / path).exists()] == []


def check_notebook(printed, steps):
    assert re.search(rf"^step +{steps}/{steps} \| train loss \d\.\d{{4}} \|", printed, re.MULTILINE)
    assert re.search(r"^Saved \d+ tokens to data/first_run_train.bin", printed, re.MULTILINE)
    assert "the model is in runs/first_run" in printed and "wrote losses.png" in printed
    assert "First Citizen:" in printed and "ROMEO:" in printed


def test_what_the_notebook_stores():
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    pictures = ["".join(output["data"]["image/png"]) for output in outputs if "image/png" in output.get("data", {})]
    check_notebook(printed, 700)
    assert len(pictures) == 1 and base64.b64decode(pictures[0]).startswith(b"\x89PNG")
    assert not re.search(r"^/|[ '\"](/work|/tmp|/home|/root)|\x1b|\r(?!\n)|Warning", printed, re.MULTILINE)
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1)), "run once, in their order"


def test_the_notebook_runs(tmp_path, monkeypatch, run_here):
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
    check_notebook("".join(printed), 4)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
