"""scripts/: each runs, for a short time, or with a Python that only notes its commands; the flags are the programs'."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import evaluate
import generate
from conftest import ROOT
from llmc.api import architecture_of, on_gpu, pages
from llmc.settings import parse_settings
from prepro import fineweb

RECIPES = [f"{path.name} {size}" for path in sorted((ROOT / "scripts").glob("run_*.sh"))
           for size in re.findall(r"^(\d+M)\)$", path.read_text(encoding="utf-8"), re.MULTILINE) or [""]]
NOTES = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]), file=open('commands', 'a'))\n"
PARSERS = {"evaluate.py": evaluate.parse_arguments, "generate.py": generate.parse_arguments,
           "prepro/fineweb.py": fineweb.parse_arguments}
TRAINERS = {f"{trainer.__module__}.py": trainer for page in pages() for trainer in (page, on_gpu(page))}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The recipes in an empty project, the current directory; project(text) makes `python`; a GPU is listed."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def make(text, name="python"):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    make("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n", "nvidia-smi")
    return make


def run(recipe, *flags, cwd=None, **variables):
    done = subprocess.run([os.path.abspath(os.path.join("scripts", recipe)), *map(str, flags)], text=True, cwd=cwd,
                          capture_output=True, env={**os.environ, **variables}, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_flag_is_one_of_the_program_s(project, recipe, monkeypatch):
    project(NOTES)
    run(*recipe.split(), "-x", 7)
    programs = set()
    for program, *flags in map(json.loads, open("commands")):
        programs.add(re.split("[_/]", program)[0])
        assert program == "-m" or (ROOT / program).is_file()
        monkeypatch.setattr(sys, "argv", [program, *flags])
        if program in PARSERS:
            PARSERS[program]()
        if program in TRAINERS:
            here = TRAINERS[program]
            either = here, architecture_of(flags[flags.index("-e") + 1])  # the same flags on both pages
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
    with pytest.raises(AssertionError, match=r"^run_gpt2.sh: error: size '125M': expected 124M, 350M, 774M or 1558M\n"):
        run("run_gpt2.sh", "125M")


def test_from_text_to_text(project, tmp_path):
    project(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for path in (ROOT / "llmc", ROOT / "prepro", *ROOT.glob("*.py")):
        os.symlink(path, path.name)
    (tmp_path / "data" / "tiny_shakespeare.txt").write_bytes(b"def main(ROMEO):\n    return ROMEO\n" * 100)
    short = ("-e", "d2", "-b", 2, "-t", 16, "-v", 2, "-s", 0, "-n", 2)
    first = run("run_shakespeare_char.sh", *short, "-x", 2, cwd="bin", CUDA_VISIBLE_DEVICES="")
    again = run("run_shakespeare_char.sh", *short, "-x", 4, cwd="bin", CUDA_VISIBLE_DEVICES="")
    assert "resuming at step 2 from runs/shakespeare_char" in again and "Saved" not in again, "data is made once"
    for printed, step in ((first, 2), (again, 4)):
        assert re.search(rf"^step {step}/{step} \| train loss \d", printed, re.MULTILINE)
        table, sample = printed.split("| model ")[1].split("ROMEO:")
        assert re.search(r"^\| context +\| 16 ", table, re.MULTILINE) and re.search(r"loss +\| \d", table) and sample
