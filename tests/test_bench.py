"""The programs of dev/ that measure: bench.py, compare_losses.py, sweep.py; check_gpu.py on a GPU;
profile_gpu.py also on a fake one: what it makes of the launches of a step."""

import contextlib
import csv
import re
import subprocess
import sys
import unittest.mock
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bench
import bench_runs
import check_gpu
import compare_losses
import llmc.gpu.device
import profile_gpu
import sweep
import train_gpt2
from conftest import ROOT, SMALL_HEADS, assert_one_line_error, random_params
from llmc.api import on_gpu, pages
from llmc.checkpoint import write_model
from llmc.errors import UserError
from llmc.gpu.fp8 import Fp8
from llmc.gpu.geometry import KERNELS
from llmc.settings import parse_settings
from test_parity import need, untied_llama
from train_gpt2 import GPT2
from train_llama3 import Llama3

SWEEP = ("-o", "s", "-b", 2, "-t", 8, "-m", 2, "-v", 4)


@pytest.mark.parametrize("model", ("gpt2_124M.bin", "d2"))
def test_pytorch_by_other_kernels_computes_the_same(workplace, run_here, model):
    """Its losses, on the CPU, over four updates with accumulation, clipping, decay and a schedule
    are train_gpt2.py's. A run that it starts has all settings, also -b 4, the default of a file,
    but not of d2."""
    flags = ("-e", model, "-b", 4, "-t", 16, "-d", 128, "-x", 4, "-l", 1e-3, "-u", 2, "-k",
             "cosine", "-c", 0.1,
             "--grad_clip", 0.5, "-o", "run")
    run_here(train_gpt2, *flags, "-v", 0, "-s", 0)
    settings = parse_settings(compare_losses.Comparison, "", [*map(str, flags), "--run", "run"])
    ours = parse_settings(compare_losses.TRAINED, "", compare_losses.flags_of(settings))
    changed = {name for name, value in vars(ours).items() if getattr(settings, name) != value}
    assert (changed - {"final_reports", "print_every", "given"}
            == {"val_every", "sample_every", "lines"})
    assert ours.print_every == 1
    expected = compare_losses.run_ours(settings)
    for others in (False, True):
        losses = compare_losses.run_pytorch(settings, 4, "test", others=others)
        # main.csv has six digits
        assert len(losses) == 4 and np.allclose(losses, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("program, flags",
                         ((bench, ("gpu",)), (bench, ("attention",)), (bench, ("matmul",)),
                          (bench, ("scale",)), (check_gpu, ()), (profile_gpu, ())))
def test_what_needs_a_gpu_says_so(monkeypatch, run_here, program, flags):
    monkeypatch.setattr(llmc.gpu.device.cp.cuda.runtime, "getDeviceCount", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_one_line_error(run_here(program, *flags, check=False), "GPU")


def test_a_sweep_s_runs_table_and_picture(workplace, run_here, monkeypatch):
    """One learning rate is too high: those runs fail, and are tried again by the same command."""
    monkeypatch.setattr(sweep, "count_gpus",
                        unittest.mock.Mock(side_effect=UserError("no GPU here")))
    flags = (*SWEEP, "-x", 10, "--seed", "1,2")
    done = run_here(sweep, *flags, "-l", "1e-3,1e38", check=False)
    assert (done.returncode == 1
            and "s/l=1e+38_seed=1: failed (1): train_gpt2.py: error:" in done.stderr)
    done = run_here(sweep, *flags, "-l", "1e-3,1e38", check=False)
    assert done.stdout.startswith("4 runs of train_gpt2.py, 2 to train")
    rows = list(csv.reader(open("s/sweep.csv", newline="")))
    assert rows[0] == ["learning_rate", "seed", "state", *sweep.RESULTS]
    assert [row[2] for row in rows[1:]] == ["finished"] * 2 + ["failed"] * 2
    assert " lr 1.00e-03 " in Path("s/l=0.001_seed=1/output.txt").read_text()
    assert Path("s/sweep.png").read_bytes().startswith(b"\x89PNG")
    for flags, words in ((("-l", 0.1), "no flag has several values"),
                         (("-l", "0.1,0.2,1e-1"), "two runs"),
                         (("-o", "s,t"), "one value"),
                         (("-x", 9, "--seed", "1,2", "-l", "1e-3,1e38"),
                          "s/l=0.001_seed=1: a run with other flags")):
        assert_one_line_error(run_here(sweep, *SWEEP, *flags, check=False), words)
    flags = ("-x", 10, "--seed", "1,2", "-l", "1e-3,1e38")
    table = Path("s/l=0.001_seed=1/main.csv")
    for data in (b"step,val_loss\n1,x\n", b"a\n1,2\n", b"\xff\n", b"step\n" + b"9" * 200000):
        table.write_bytes(data)
        words = table, "is damaged", "remove s/l=0.001_seed=1 to train"
        run_here(sweep, *SWEEP, *flags, fails=words)
    Path("s/l=0.001_seed=1/started.txt").write_bytes(b"\xff")
    run_here(sweep, *SWEEP, *flags, fails=["s/l=0.001_seed=1: a run with other flags"])


def test_llm_c_s_make_targets_say_what_to_run():
    """In a line each, with a program that is there."""
    targets = [f"{name}{of}" for name in ("train_gpt2", "test_gpt2") for of in ("", "cu", "fp32cu")]
    lines = subprocess.check_output(["make", "-s", *targets], cwd=ROOT, text=True).splitlines()
    for target, line in zip(targets, lines, strict=True):
        program, *_ = line.removeprefix("nothing to compile: python ").split()
        expected = re.sub(r"(fp32)?cu$", "_cuda" if target.startswith("train") else "", target)
        assert program == f"{expected}.py" and (ROOT / program).exists()


@pytest.mark.parametrize("along, values, scale", (
    ("learning_rate", (6e-4, 1e-3), "log"), ("learning_rate", (0.0, 1e-3), "linear"),
    ("weight_decay", (0.01, 0.1), "log"), ("weight_decay", (0.1, 0.2), "linear"),
    ("B", (1, 64), "linear")))
def test_a_sweep_s_axis(monkeypatch, along, values, scale):
    """Learning rates are compared by their ratio, however few they are."""
    axes = []
    monkeypatch.setattr(sweep, "picture", lambda _: contextlib.nullcontext(axes[0]))
    axes.append(pytest.importorskip("matplotlib.figure").Figure().subplots())
    rows = [{along: value, "state": "finished", "val_loss": 1.0} for value in values]
    sweep.draw([along], rows, "val_loss", "")
    assert axes[0].get_xscale() == scale


# --------------------------------------------------------------------------------------------------
# check_gpu.py, profile_gpu.py

B, T = 2, 32
MODELS = {GPT2: (SMALL_HEADS, random_params(SMALL_HEADS)), Llama3: untied_llama()}


def open_trainer(fake_gpu, page=GPT2, arch="sm_90a", **settings):
    architecture = on_gpu(page)
    gpu = fake_gpu.gpu._replace(arch=arch)
    settings = architecture.resolve_auto(architecture.Settings(**{"B": B, "T": T, **settings}),
                                         arch)
    trainer = profile_gpu.open_trainer(architecture, gpu, *MODELS[page], settings)
    trainer.prepare()
    fake_gpu.launches.clear()
    return trainer


@pytest.fixture
def model(page, tmp_path):
    path = tmp_path / "model.bin"
    write_model(path, *MODELS[page])
    return path


each_page = pytest.mark.parametrize("page", pages()[:2])


@pytest.mark.gpu
@each_page
@pytest.mark.parametrize("flags",
                         ((), ("--recompute", 2), ("--arch", "sm_80"),
                          ("--dtype", "float32", "--tf32", 0)))
def test_a_gpu_agrees_with_the_cpu(model, run_here, flags):
    done = run_here(check_gpu, "-e", model, "-b", 3, "-t", 48, *flags)
    assert done.stdout.endswith("overall okay: 1\n") and "FAIL" not in done.stdout


@pytest.mark.gpu
@each_page
@pytest.mark.parametrize("right", (True, False))
def test_fp8_agrees_with_the_cpu(page, run_here, monkeypatch, right):
    """Of the smallest models, whose heads have 64 channels; not if the products are read with half
    of a scale."""
    need("cuda-fp8")
    multiply = Fp8.multiply
    if not right:
        monkeypatch.setattr(Fp8, "multiply",
                            lambda *rest, scale=1.0, **more: multiply(*rest, scale=2 * scale,
                                                                      **more))
    done = run_here(check_gpu, "-e", next(iter(page.SIZES)), "-b", 3, "-t", 48, "--dtype", "fp8",
                    check=right)
    assert f"overall okay: {int(right)}" in done.stdout
    assert ("first wrong: qkv of layer 0, from matmul qkv" in done.stdout) != right


@pytest.mark.gpu
@pytest.mark.parametrize("page, function, line", (
    (GPT2, "gelu_forward", "fch_gelu of layer 0"), (GPT2, "layernorm_forward", "ln1 of layer 0"),
    (GPT2, "gelu_backward", "dfcb of layer 1"), (GPT2, "encoder_backward", "dwpe"),
    (Llama3, "rope_forward", "qkv of layer 0"), (Llama3, "swiglu_forward", "fch_swiglu of layer 0"),
    (Llama3, "swiglu_backward", "dfcw of layer 1"), (Llama3, "rope_backward", "dqkvw of layer 1")))
def test_a_wrong_function_is_found_on_a_gpu(page, model, run_here, monkeypatch, function, line):
    """The first result of a function of the page in NumPy is 20 percent too large."""
    module = sys.modules[page.__module__]
    right = getattr(module, function)

    def wrong(out, *arguments):
        right(out, *arguments)
        (arguments[0] if function == "encoder_backward" else out).__imul__(1.2)

    monkeypatch.setattr(module, function, wrong)
    done = run_here(check_gpu, "-e", model, "-b", 3, "-t", 48, "--dtype", "float32", check=False)
    assert (done.returncode == 1 and f"first wrong: {line}, from " in done.stdout
            and "overall okay: 0" in done.stdout)


@pytest.mark.gpu
@each_page
@pytest.mark.parametrize("flags", ((), ("--matmul", "cublaslt", "--dtype", "float32", "-d", 96)))
def test_the_profile_of_a_gpu(model, run_here, flags):
    lines = run_here(profile_gpu, "-e", model, "-b", 3, "-t", 16, "-x", 2,
                     *flags).stdout.splitlines()
    assert (any(line.startswith("matmul qkv dweight") for line in lines)
            and lines[-1].startswith("all "))
    shares = [float(found[1])
              for found in (re.search(r"/s +[\d.]+% +([\d.]+)%", line) for line in lines) if found]
    assert len(shares) > 20 and sum(shares) == pytest.approx(100, abs=2)


def observed_step(trainer):
    """[(kernel, arguments)] of one step."""
    step = []
    trainer.graph = None
    trainer.device.observer = lambda *launch: step.append(launch) or contextlib.nullcontext()
    batch = np.zeros((2, B, T), np.int32)
    trainer.end_step(trainer.begin_step([batch] * trainer.settings.own_micro_steps, 0.0))
    return step


@each_page
@pytest.mark.parametrize("settings",
                         ({"matmul": "kernels", "total_batch_size": 2 * B * T},
                          {"matmul": "cublaslt"},
                          {"arch": "sm_80", "recompute": 2}, {"dtype": "float32"},
                          {"dtype": "fp8"}))
def test_the_launches_of_a_step_have_labels_and_work(fake_gpu, page, settings):
    """Each weight's three matmuls, whoever does them; and no kernel is unknown but those that a
    step never launches."""
    if settings.get("dtype") == "fp8" and page is Llama3:  # F=200
        pytest.raises(UserError, open_trainer, fake_gpu, page,
                      **settings).match("expects multiples of 16")
        return
    trainer = open_trainer(fake_gpu, page, grad_clip=1.0, **settings)
    labels = set()
    flops = 0
    for name, arguments in observed_step(trainer):
        operands = trainer.linears.operands
        labels.add(profile_gpu.label(name, arguments, trainer.params, trainer.grads, operands))
        moved, computed = profile_gpu.work(name, arguments, trainer.config)
        flops += computed * profile_gpu.is_matmul(name)
        # the last: no token is cut
        idle = name in ("prepare_update", "prepare_scales", "encoder_backward_wte_cut")
        assert (moved > 0) + (computed > 0) == (not idle), name
    weights = "qkv", "attproj", "fc", "fcproj", "logits"
    assert {what for what in labels if what.startswith("matmul")} == {
        f"matmul {weight}{of}" for weight in weights for of in ("", " dinp", " dweight")}
    matrices = sum(row.size for row in trainer.params.table.values() if len(row.shape) == 3)
    assert (flops == trainer.settings.micro_steps * 6 * B * T
            * (matrices + trainer.config.Vp * trainer.config.C))
    kernels = {kernel.removesuffix("_narrow") for kernels in KERNELS.values() for kernel in kernels}
    known = {*profile_gpu.MATMULS, *profile_gpu.ATTENTION, *profile_gpu.ARRAYS, *profile_gpu.BYTES,
             "rope_forward",
             "qknorm_forward"}
    assert kernels - known == {"round_weights"}


def test_the_walkthrough_has_the_kernels_of_a_step_in_order(fake_gpu):
    """doc/walkthrough.md, whose layers are written once: the names of a step with matmuls by
    cuBLASLt."""
    text = (ROOT / "doc" / "walkthrough.md").read_text(encoding="utf-8")
    rows = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        if section.startswith(("The matmuls by our kernels", "What it adds up to")):
            continue
        names = re.findall(r"^\| `?((?!kernel)\w[\w ]*)`? \|", section, re.MULTILINE)
        rows += names * (SMALL_HEADS.L if "twelve times" in section.split("\n")[0] else 1)
    trainer = open_trainer(fake_gpu, matmul="cublaslt")
    step = [profile_gpu.label(*launch, trainer.params, trainer.grads)
            for launch in observed_step(trainer)]
    # the kernels of heads of 64 on Hopper, in the place of those of this model's heads of 16
    of_hopper = {"attention_backward_start": "attention_backward_dquery",
                 "attention_backward": "attention_backward_dkv"}
    step = [of_hopper.get(name, name) for name in step]
    assert [name if "batch" not in name else "copy_batch" for name in rows] == step


@pytest.mark.parametrize("flags", (("generate", "-b", "0"), ("attention", "-t", "8", "-1"),
                                   ("scale", "--gpus", "x")))
def test_numbers_of_the_benchmarks_are_positive(capsys, flags):
    with pytest.raises(SystemExit):
        bench.parse_arguments(flags)
    assert f"argument {flags[1]}: invalid positive value: '{flags[-1]}'" in capsys.readouterr().err


def test_the_line_to_send_in(monkeypatch):
    """A batch that does not fit is left out; PyTorch's figure is its best."""
    monkeypatch.setattr(bench_runs.subprocess, "run",
                        lambda *_, **options: SimpleNamespace(stdout="580.1\n"))
    results = [(bench.Job("gpu", name, "bfloat16", B, 1024, recompute=recompute), result)
               for name, B, recompute, result in (
                   ("ours", 4, -1, {"ms": 7.331}), ("compile", 4, -1, {"ms": 24.1}),
                   ("reduce-overhead", 4, -1, {"ms": 11.02}), ("ours", 32, -1, {"ms": 49.3}),
                   ("compile", 32, -1, {"failed": "out of memory"}),
                   ("ours", 32, 1, {"ms": 51.0}), ("ours", 64, -1, {"failed": "out of memory"}))]
    assert (bench_runs.line_to_send("A card, sm_89; 2026-11-29", results)
            == "A card, sm_89; 2026-11-29; driver 580.1; bfloat16, ms (PyTorch's):"
               " B=4 7.33 (11.02), B=32 49.30")


def test_a_card_without_bfloat16_is_measured_in_float32(monkeypatch, capsys):
    runtime = SimpleNamespace(getDeviceProperties=lambda _: {"major": 7})
    monkeypatch.setattr(bench, "cp", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(bench, "count_gpus", lambda: 1)
    ours = {"ms": 80.0, "first": 9.0, "memory": 4 << 30, "used": 5 << 30, "gpu": "Tesla T4",
            "machine": "Tesla T4, sm_75", "matmul": 4e12, "bandwidth": 2.5e11}
    theirs = {"ms": 90.0, "torch": "2.11",
              **{key: ours[key] for key in ("first", "memory", "used", "gpu")}}
    monkeypatch.setattr(bench, "measure_all", lambda jobs: [
        (job, {"B": job.B, **(ours if job.name == "ours" else theirs)}) for job in jobs])
    bench.bench_gpu(SimpleNamespace(only=None))
    line = capsys.readouterr().out.splitlines()[-1]
    assert "Tesla T4, sm_75, PyTorch 2.11" in line
    figures = ", ".join(f"B={B} 80.00 (90.00)" for B in (1, 4, 8))
    assert line.endswith(f"float32, ms (PyTorch's): {figures}")


def test_what_fits_is_what_was_measured(capsys):
    """124M at B=32 took 14.8 GiB of an H200; less never fits more; doc/speed.md has this table."""
    assert 31 <= bench_runs.most_that_fits("d12", 0, 14.8 * 2**30) <= 33
    bench_runs.bench_memory(None)
    table = capsys.readouterr().out
    assert table in (ROOT / "doc/speed.md").read_text()
    rows = [re.findall(r"-b (\d+)", line) for line in table.splitlines()[2:]]
    assert len(rows) == 8 and all(list(map(int, row)) == sorted(map(int, row)) for row in rows)
    for without, recomputed in zip(rows[::2], rows[1::2]):
        assert len(without) <= len(recomputed)
        assert all(int(a) <= int(b) for a, b in zip(without[::-1], recomputed[::-1]))
