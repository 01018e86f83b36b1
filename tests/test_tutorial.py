"""The pages of doc/: blocks run and print what the page says, or compile; what they name exists;
the notebook runs, and stores what a run prints. scripts/: each runs for a short time, or with a
Python that only notes its commands."""

import base64
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import evaluate
import generate
from conftest import ROOT
from llmc.api import architecture_of, on_gpu, pages
from llmc.gpu.compiler import compile_kernels
from llmc.settings import parse_settings
from prepro import fineweb

DIRECTORY = ROOT / "doc" / "layernorm"
sys.path.insert(0, str(DIRECTORY))
from run_page import cuda_name, read_blocks, run_blocks

BLOCKS = read_blocks((DIRECTORY / "layernorm.md").read_text(encoding="utf-8"))
NOTEBOOK = json.loads((ROOT / "doc" / "first_run.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name, count",
                         (("layernorm/layernorm.md", 9), ("attention/attention.md", 9),
                          ("walkthrough.md", 10)))
def test_python_blocks(name, count):
    path = ROOT / "doc" / name
    blocks = read_blocks(path.read_text(encoding="utf-8"), path)
    assert sum(block.kind == "python" and block.output is not None for block in blocks) == count
    assert len(blocks) == count or blocks == BLOCKS
    with np.printoptions():  # which the page sets
        run_blocks(blocks, ["python"], path)


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
    str(path.relative_to(ROOT)) for directory in ("doc", "dev")
    for path in sorted(ROOT.glob(f"{directory}/**/*.md")))))
def test_what_a_page_names_exists(name):
    """Targets of relative links, paths of this project, and programs in commands."""
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    pattern = r"(?<![\w/.~-])(?:llmc|kernels|dev|doc|tests|scripts)/[\w./-]*\w(?![\w/*{<])"
    paths = re.findall(pattern, text)
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
    pictures = ["".join(output["data"]["image/png"]) for output in outputs
                if "image/png" in output.get("data", {})]
    check_notebook(printed, 700)
    assert len(pictures) == 1 and base64.b64decode(pictures[0]).startswith(b"\x89PNG")
    assert not re.search(r"^/|[ '\"](/work|/tmp|/home|/root)|\x1b|\r(?!\n)|Warning", printed,
                         re.MULTILINE)
    assert ([cell["execution_count"] for cell in CELLS]
            == list(range(1, len(CELLS) + 1))), "run once, in their order"


def test_the_notebook_runs(here, monkeypatch, run_here):
    """In this process: a line that begins with ! is a program with its flags."""
    pytest.importorskip("IPython")
    for name, value in dict(FIRST_RUN_STEPS="4", FIRST_RUN_TEXT="my text.txt",
                            TQDM_DISABLE="1").items():
        monkeypatch.setenv(name, value)
    (here / "train_gpt2.py").touch()  # so the cells know where they are
    (here / "my text.txt").write_text("First Citizen: what, ROMEO!\n" * 400)

    def run(command):
        program, *flags = shlex.split(command)
        printed.append(run_here(importlib.import_module(Path(program).stem), *flags).stdout)

    printed = []
    names = {"run": run, "print": lambda *words, **_: printed.append(" ".join(map(str, words)))}
    for cell in CELLS:
        code = "".join(cell["source"]).replace("\\\n", "")
        code = re.sub(r"^!\{python\} (.*)", r"run(f'''\1''')", code, flags=re.MULTILINE)
        exec(re.sub(r"^( *)(!rm|!git|%pip) .*", r"\1pass", code, flags=re.MULTILINE), names)
    check_notebook("".join(printed), 4)
    assert (here / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_the_notebook_makes_the_clone(here, monkeypatch):
    """Where it is opened outside of one, once."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    code = "".join(CELLS[0]["source"])
    names = {"clone": lambda address: subprocess.run(
        ["git", "clone", "-q", "--depth", "1", address, "first_run_clone"], check=True)}
    code = code.replace('!git clone -q --depth 1 "{REPOSITORY}" first_run_clone',
                        "clone(REPOSITORY)")
    with pytest.raises(AssertionError, match="set REPOSITORY to the address"):
        exec(code, names)
    monkeypatch.setenv("FIRST_RUN_REPOSITORY", f"file://{ROOT}")
    exec(code, names)
    assert Path.cwd().name == "first_run_clone" and Path("train_gpt2.py").is_file()
    exec(code, names)
    assert sys.path[0] == os.getcwd() and Path("doc/first_run.ipynb").is_file()


# --------------------------------------------------------------------------------------------------
# scripts/

RECIPES = [f"{path.name} {size}" for path in sorted((ROOT / "scripts").glob("run_*.sh"))
           for size in re.findall(r"^(\d+M)\)$", path.read_text(encoding="utf-8"), re.MULTILINE)
           or [""]]
NOTES = (f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]),"
         " file=open('commands', 'a'))\n")
PARSERS = {"evaluate.py": evaluate.parse_arguments, "generate.py": generate.parse_arguments,
           "prepro/fineweb.py": fineweb.parse_arguments}
TRAINERS = {f"{trainer.__module__}.py": trainer for page in pages()
            for trainer in (page, on_gpu(page))}


@pytest.fixture
def project(here, monkeypatch):
    """The recipes in an empty project, the current directory; project(text) makes `python`; a GPU
    is listed."""
    shutil.copytree(ROOT / "scripts", here / "scripts")
    (here / "bin").mkdir()
    (here / "data").mkdir()
    monkeypatch.setenv("PATH", f"{here / 'bin'}:{os.environ['PATH']}")

    def make(text, name="python"):
        (here / "bin" / name).write_text(text)
        (here / "bin" / name).chmod(0o755)

    make("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n", "nvidia-smi")
    return make


def run_recipe(recipe, *flags, cwd=None, **variables):
    done = subprocess.run([os.path.abspath(os.path.join("scripts", recipe)), *map(str, flags)],
                          text=True, cwd=cwd,
                          capture_output=True, env={**os.environ, **variables}, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_flag_is_one_of_the_program_s(project, recipe, monkeypatch):
    project(NOTES)
    run_recipe(*recipe.split(), "-x", 7)
    programs = set()
    for program, *flags in map(json.loads, open("commands")):
        programs.add(re.split("[_/]", program)[0])
        assert program == "-m" or (ROOT / program).is_file()
        monkeypatch.setattr(sys, "argv", [program, *flags])
        if program in PARSERS:
            PARSERS[program]()
        if program in TRAINERS:
            here = TRAINERS[program]
            # the same flags on both pages
            either = here, architecture_of(flags[flags.index("-e") + 1])
            for settings in (parse_settings(cls.Settings, "", flags) for cls in either):
                assert on_gpu(architecture_of(settings.model)) is here
                assert settings.steps == 7 and settings.shuffle == 1
                assert settings.resume and settings.checkpoint_every and settings.checkpoints_keep
                prefix = settings.data.removesuffix("_train_*.bin")
            directory = settings.output
        if program in ("evaluate.py", "generate.py"):
            assert flags[0] == directory, "of the run"
        if program == "evaluate.py":
            assert flags[flags.index("--data") + 1] in (prefix, f"{prefix}_val_*.bin")
    assert {"prepro", "train", "evaluate.py", "generate.py"} <= programs


def test_an_unknown_size_is_one_line(project):
    error = pytest.raises(AssertionError, run_recipe, "run_gpt2.sh", "125M")
    assert error.match(r"^run_gpt2.sh: error: size '125M': expected 124M, 350M, 774M or 1558M\n")


def test_from_text_to_text(project, tmp_path):
    project(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for path in (ROOT / "llmc", ROOT / "prepro", *ROOT.glob("*.py")):
        os.symlink(path, path.name)
    (tmp_path / "data" / "tiny_shakespeare.txt").write_bytes(b"def main(ROMEO):\n    return ROMEO\n"
                                                             * 100)
    short = ("-e", "s2", "-b", 2, "-t", 16, "-v", 2, "-s", 0, "-n", 2)
    first = run_recipe("run_shakespeare_char.sh", *short, "-x", 2, cwd="bin",
                       CUDA_VISIBLE_DEVICES="")
    again = run_recipe("run_shakespeare_char.sh", *short, "-x", 4, cwd="bin",
                       CUDA_VISIBLE_DEVICES="")
    assert ("resuming at step 2 from runs/shakespeare_char" in again
            and "Saved" not in again), "data is made once"
    for printed, step in ((first, 2), (again, 4)):
        assert re.search(rf"^step {step}/{step} \| train loss \d", printed, re.MULTILINE)
        table, sample = printed.split("| model ")[1].split("ROMEO:")
        assert (re.search(r"^\| context +\| 16 ", table, re.MULTILINE)
                and re.search(r"loss +\| \d", table) and sample)
