"""The GPU trainer as a user runs it: what it prints, graph and launches, resuming to the bit,
memory, faults."""

import dataclasses
import functools
import gc
import os
import re
import shutil
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

import llmc.gpu.cublaslt
import llmc.gpu.saver
import llmc.gpu.trainer
import llmc.progress
import train_gpt2_cuda as cuda
import train_llama3
import train_speedrun
from conftest import (GPT2_124M, assert_one_line_error, optimizer_of, random_params,
                      remove_after, run_program)
from llmc.checkpoint import owned_by_one, read_model, read_optimizer_state, write_model
from llmc.gpu.device import cp
from llmc.errors import UserError
from llmc.gpu.geometry import check_sizes, launch_geometry
from llmc.gpu.plan import RESERVE, check_memory, memory_plan
from llmc.gpu.trainer import Trainer, open_trainer
from llmc.llmc_lines import LlmcCudaLines
from llmc.loop import Update
from llmc.resume import checkpoint_paths, complete_checkpoints, newest_checkpoint
from llmc.sampler import Choice, Random
from llmc.settings import Settings
from llmc.tensors import allocate, bf16_bits, flat, views
from test_parity import need
from train_gpt2 import Config, GPT2

FAST = ("-b", 2, "-t", 24, "-g", 16, "--lines", "llmc")  # whose losses have more digits
IGNORED = r"^(settings|resuming|first step|kernels|total average|allocated|[|+]).*\n"
FLOAT32 = ("--dtype", "float32", "--tf32", 0)


def train(*flags, program="train_gpt2_cuda.py", **options):
    return run_program(program, *FAST, *flags, **options)


def losses_and_samples(text):
    """A run's lines, less timings and what only a first or a resumed run prints."""
    text = re.sub(r" \([0-9.]+ ms, \d+ tok/s\)", "", text)
    return re.sub(IGNORED, "", text, flags=re.MULTILINE)


def train_losses(text):
    return [float(x) for x in re.findall(r"train loss (\d+\.\d+)", text)]


# --------------------------------------------------------------------------------------------------
# with no GPU


@pytest.mark.parametrize("changes, words", (
    (dict(name="Tesla V100", arch="sm_70"), "V100 has compute capability 7.0, expected 7.5"),
    (dict(shared=16 << 10), "bytes of shared memory in a block")))
def test_a_gpu_that_is_too_small(fake_gpu, heads, run_here, changes, words):
    fake_gpu.gpu = fake_gpu.gpu._replace(**changes)
    assert_one_line_error(run_here(cuda, *FAST, check=False), words, "train_gpt2.py")


def test_an_error_of_the_gpu_is_one_line(monkeypatch, run_here):
    error = pytest.importorskip("cupy").cuda.runtime.CUDARuntimeError(2)
    monkeypatch.setattr(cuda, "open_gpu", Mock(side_effect=error))
    run_here(cuda, fails=("out of memory", "nvidia-smi"))


@pytest.mark.parametrize("recompute", (0, 1, 2))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_a_run_on_a_fake_gpu(fake_gpu, heads, run_here, dtype, recompute):
    """From flags to a checkpoint and on from there; a captured step launches what one without a
    graph does."""
    flags = (*FAST, "-v", 2, "-s", 2, "-n", 2, "-nk", 1, "-o", "run", "-d", 96, "--dtype", dtype,
             "--recompute",
             recompute)
    steps = []
    for graph, more in ((0, ("-x", 2)), (1, ("-x", 4, "-y", 1))):
        fake_gpu.launches.clear()
        done = run_here(cuda, *flags, "--graph", graph, *more)
        assert (re.findall(r"^step +(\d)/", done.stdout, re.MULTILINE)
                == (["3", "4"] if graph else ["1", "2"]))
        assert (done.stdout.count("val loss 0.000000") == 2
                and done.stdout.count("generating:") == 1 + graph)
        first, second, *_ = (i for i, launch in enumerate(fake_gpu.launches)
                             if launch.name == "adamw_update")
        steps.append([(launch.name, launch.stream % 3)
                      for launch in fake_gpu.launches[first + 1 : second + 1]])
    assert steps[0] == steps[1] and steps[0][0][0] == "copy_batch"
    assert "resuming at step 2 from run" in done.stdout and done.stderr == ""
    assert complete_checkpoints("run") == [4]


def test_steps_go_on_while_a_checkpoint_is_written(fake_gpu, heads, run_here, at_call):
    """And what fails is a line, soon, with the checkpoint before whole."""
    flags = (*FAST, "-v", 0, "-s", 0, "-n", 1, "-o", "run")
    second = threading.Event()
    begun = []
    at_call(Trainer, "begin_step", 1, second.set)
    at_call(llmc.gpu.saver, "save_checkpoint", 0, lambda: begun.append(second.wait(10)))
    run_here(cuda, *flags, "-x", 3)
    assert begun == [True] and newest_checkpoint("run") == 3
    at_call(llmc.gpu.saver, "save_checkpoint", 0,
            Mock(side_effect=UserError("run/state: no space left on device")))
    done = run_here(cuda, *flags, "-n", 30, "-x", 60, "-y", 1, check=False)
    assert_one_line_error(done, "run/state: no space left on device")
    assert "\nstep   30/60" in done.stdout and "\nstep   59/60" not in done.stdout
    assert newest_checkpoint("run") == 3


def test_learning_rates_reach_the_gpu_and_the_log(fake_gpu, heads, run_here, monkeypatch):
    rates = []
    begin = Trainer.begin_step
    monkeypatch.setattr(Trainer, "begin_step", lambda trainer, batches, rate: rates.append(rate)
                        or begin(
        trainer, batches, rate))
    run_here(cuda, *FAST, "-s", 0, "-x", 4, "-l", 1e-3, "-u", 4, "-o", "run")
    assert rates == pytest.approx([0.00025, 0.0005, 0.00075, 0.001])
    logged = re.findall(r"lr:(\S+)", (heads / "run" / "main.log").read_text())
    assert list(map(float, logged)) == pytest.approx(rates, abs=1e-6)


def test_lines(fake_gpu, heads, run_here, monkeypatch):
    """--verbose has the box and the memory; utilization is of a known GPU's peak, at 1 ms a
    step."""
    monkeypatch.setattr(llmc.progress, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    flags = (*FAST[:6], "-s", 0, "-x", 3)
    lines = run_here(cuda, *flags).stdout.splitlines()
    assert (" ".join(line.split()[0] for line in lines[:8])
            == "settings: model data run device output kernels: memory")
    assert lines[4] == "device    a fake GPU, sm_90a, CUDA 13.0, bfloat16, float32 master weights"
    assert lines[8:14] == ["step 0/3 | val loss 0.0000"] + [
        f"step {step}/3 | train loss 0.0000 | 1.00 ms | 48000 tok/s" + " | 0 s left" * (step < 3)
        for step in (1, 2, 3)
    ] + ["step 3/3 | val loss 0.0000", "3 steps in 0 s, 48000 tok/s while training"]
    fake_gpu.gpu = fake_gpu.gpu._replace(name="NVIDIA H200")
    output = run_here(cuda, *flags, "--verbose").stdout
    parameters = 257 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32  # less wpe
    used = (6 * parameters + 6 * 2 * 32 * 24) * 48000 / 989.4e12
    assert output.count(f" | 48000 tok/s | {used:.1%} MFU") == 3
    assert "\n| beta2 " in output and "\nallocated 1 MiB for parameters\n" in output
    theirs = run_here(cuda, *FAST, "-s", 0, "-x", 3).stdout
    assert re.findall("^step .*", theirs, re.MULTILINE) == [
        f"step    {step}/3: train loss 0.000000 (1.000000 ms, 48000 tok/s)" for step in (1, 2, 3)]
    assert theirs.endswith("\nval loss 0.000000\ntotal average iteration time: 1.000000 ms\n")


HEAD = """\
+-----------------------+----------------------------------------------------+
| Parameter             | Value                                              |
+-----------------------+----------------------------------------------------+
| input dataset prefix  | data/tiny_shakespeare                              |
| output log file       | a_long_name_that_is_wider_than_50_characters_is_not_cut.log |
| batch size B          | 2                                                  |
| sequence length T     | 24                                                 |
| learning rate         | 0.001000                                           |
| val_loss_every        | 20                                                 |
| val_max_batches       | 20                                                 |
| sample_every          | 0                                                  |
| genT                  | 16                                                 |
+-----------------------+----------------------------------------------------+
| device                | a fake GPU                                         |
| TF32                  | enabled                                            |
+-----------------------+----------------------------------------------------+
| max_sequence_length T | 64                                                 |
| vocab_size V          | 257                                                |
| num_layers L          | 2                                                  |
| num_heads NH          | 2                                                  |
| channels C            | 32                                                 |
| num_parameters        | 35744                                              |
+-----------------------+----------------------------------------------------+
| train_num_batches     | 3                                                  |
| val_num_batches       | 12                                                 |
+-----------------------+----------------------------------------------------+
"""


def test_the_head_of_llm_c_s_program(fake_gpu, heads, run_here):
    """As printf writes it in commit 716a2ed; tokens a second are cut off, not rounded."""
    log = "a_long_name_that_is_wider_than_50_characters_is_not_cut.log"
    flags = ("-s", 0, "-x", 3, "-l", 1e-3, "--dtype", "float32", "-o", log)
    printed = run_here(cuda, *FAST, *flags).stdout
    assert printed[printed.index("+") :].startswith(HEAD)
    assert re.findall(r"^allocated 0 MiB for (.*)", printed, re.MULTILINE)[0] == "model parameters"
    lines = LlmcCudaLines(SimpleNamespace(begin=0, settings=Settings(B=2, T=24, steps=3)))
    line = lines.training_line(0, Update(4.0, None, 0.00109999, None), 0.0, 0.0)  # 43636.76
    assert line == "step    1/3: train loss 4.000000 (1.099990 ms, 43636 tok/s)"


@pytest.mark.parametrize("fp8, config, words",
                         ((0, Config(64, 257, 1, 3, 24, 384), "C=24 with NH=3.*train_gpt2.py"),
    (0, Config(64, 257, 1, 1, 144, 384), "C=144 with NH=1.*train_gpt2.py"),
    (0, train_llama3.Config(64, 257, 1, 4, 2, 48, 384, 204, 16), "F=204.*train_llama3.py"),
    (1, Config(64, 257, 2, 1, 200, 384),
 "C=200, F=800: --dtype fp8 expects multiples of 16: pass --dtype bf"),
    (1, Config(64, 131100, 2, 1, 64, 131200),
 "131200 rows of .* weight: --dtype fp8 expects .* up to 131072: pass"),
    (0, train_speedrun.Config(64, 257, 1, 3, 240, 384),
 "heads of 80 channels: on a GPU, QK-norm .*train_speedrun.py")))
def test_a_model_that_the_kernels_do_not_take(fp8, config, words):
    pytest.raises(UserError, check_sizes, config, fp8,
                  type(config) is train_speedrun.Config).match(words)


@pytest.mark.parametrize("arch, settings, words", (
    ("sm_75", dict(dtype="bfloat16"), "--dtype bfloat16: this GPU is sm_75"),
    ("sm_90a", dict(dtype="fp8", matmul="cublaslt"), "--matmul cublaslt"),
    *((arch, dict(dtype="fp8"), f"--dtype fp8: this GPU is {arch}; .*: pass --dtype bfloat16")
      for arch in ("sm_75", "sm_80", "sm_89", "sm_100a")),
    *((arch, dict(dtype=dtype, matmul="kernels"),
       f"--matmul kernels: .* this run is {dtype} on {arch}: leave the flag")
      for arch, dtype in (("sm_75", "float32"), ("sm_80", "bfloat16"), ("sm_90a", "float32"))),
    ("sm_75", dict(arch="sm_80"), "--arch sm_80: this GPU is sm_75")))
def test_what_a_gpu_lacks_is_refused(arch, settings, words):
    pytest.raises(UserError, cuda.resolve_auto, cuda.CudaSettings(**settings), arch).match(words)


def test_what_is_left_to_the_gpu():
    for arch, *expected in (("sm_75", "float32", 1), ("sm_80", "bfloat16", 0),
                            ("sm_90a", "bfloat16", 0)):
        settings = cuda.resolve_auto(cuda.CudaSettings(), arch)
        assert [settings.dtype, settings.recompute] == expected
    for arch, kind in (("sm_75", "float32"), ("sm_80", "tf32")):
        assert cuda.resolve_auto(cuda.CudaSettings(dtype="float32"), arch).precision.matmul == kind
    assert cuda.resolve_auto(cuda.CudaSettings(dtype="float32", tf32=0, recompute=2),
                             "sm_90a").recompute == 2


# --------------------------------------------------------------------------------------------------
# with a GPU


LLAMAS = {f"{name} Llama": train_llama3.Config(64, 257, 3, 4, 2, 192, 384, 384, 64, tied=tied,
                                               factor=8)
          # heads and more channels of queries as Hopper's kernels want
          for name, tied in (("tied", 1), ("untied", 0))}

SPEEDRUN = train_speedrun.Config(64, 257, 3, 2, 128, 384)


def page_and_flags(model):
    """Of GPT-2, the speed run's model, or one of LLAMAS, which is written here."""
    if model == "GPT-2":
        return "train_gpt2", ()
    if model == "speed run":
        write_model("speedrun.bin", SPEEDRUN, random_params(SPEEDRUN, spread=0.05, ones=1.0))
        return "train_speedrun", ("-e", "speedrun.bin", "-k", "constant")
    write_model("llama.bin", LLAMAS[model], random_params(LLAMAS[model], spread=0.05, ones=1.0))
    return "train_llama3", ("-e", "llama.bin")


@pytest.mark.parametrize("model", ("GPT-2", *LLAMAS, "speed run"))
def test_losses_and_samples_are_those_of_the_cpu_trainer(gpu, heads, model):
    page, flags = page_and_flags(model)
    flags += ("-x", 6, "-v", 3, "-s", 3, "-m", 3, "-l", 0.001, "-d", 96, "--grad_clip", 1, "-c",
              0.1,
              "--final_reports", 1)
    on_gpu = train(*flags, *FLOAT32, program=f"{page}_cuda.py").stdout
    on_cpu = train(*flags, program=f"{page}.py").stdout
    losses = [[float(x) for x in re.findall(r"loss (\d+\.\d+)", output)]
              for output in (on_gpu, on_cpu)]
    assert len(losses[0]) == 9 and np.allclose(*losses, rtol=0, atol=2e-5)
    samples = [re.findall(r"---\n(.*?)\n---", output, re.DOTALL) for output in (on_gpu, on_cpu)]
    assert len(samples[0]) == 2 and samples[0] == samples[1]


DTYPES = {
    "float32": ("--dtype", "float32"), "bfloat16": ("--dtype", "bfloat16"),
    "sm_80": ("--dtype", "bfloat16", "--arch", "sm_80"),
    "kernels": ("--dtype", "bfloat16", "--matmul", "kernels"),
    "float32-grads": ("--dtype", "bfloat16", "--float32_grads", 1),
    "no-master": ("--dtype", "bfloat16", "-w", 0),
    "stochastic": ("--dtype", "bfloat16", "-w", 0, "--stochastic_rounding", 5),
    "fp8": ("--dtype", "fp8"),
}
OF_LLAMA = {name: DTYPES[name] for name in ("float32", "bfloat16", "fp8", "sm_80")}
OF_LLAMA["kernels"] = *DTYPES["kernels"], "--float32_grads", 1


@pytest.fixture(params=[("GPT-2", *dtype) for dtype in DTYPES.items()] + [
    (model, *dtype) for model in (*LLAMAS, "speed run") for dtype in OF_LLAMA.items()],
    ids=lambda kind: f"{kind[0]}-{kind[1]}")
def kind(request, gpu, heads):
    """(a model's name, train(flag, ...) of it, the flags of a dtype)."""
    model, _, flags = request.param
    need("cuda-fp8" if "fp8" in flags else "cuda" if "float32" in flags else "cuda-bf16")
    page, of_model = page_and_flags(model)
    return model, functools.partial(train, *of_model, program=f"{page}_cuda.py"), flags


def test_bfloat16_trains_like_float32(kind):
    """Losses over 60 steps at a high learning rate stay near those of float32; every variant is its
    own run. At 0.003, rounding weights and gradients alone changes the untied Llama's losses by
    0.08, on the CPU."""
    model, train, dtype = kind
    flags = ("-x", 60, "-v", 0, "-s", 0, "-l", 0.003 if model == "GPT-2" else 0.001)
    losses = [train_losses(train(*flags, *more).stdout) for more in (FLOAT32, dtype)]
    assert (len(losses[0]) == 60
            and np.allclose(*losses, rtol=0, atol=0.1 if "fp8" in dtype else 0.03))


RUN = ("-x", 9, "-v", 3, "-s", 3, "-u", 2, "-k", "cosine", "-c", 0.1, "--grad_clip", 1, "-d", 96,
       "-l", 0.01)


def test_graph_launches_recomputation_and_a_resume_give_the_same_bits(heads, kind):
    """What is printed, the weights, AdamW's moments and the logged norms."""
    model, train, dtype = kind
    flags = (*RUN, *(() if model == "GPT-2" else ("-l", 0.001)), "--shuffle", 1, "-n", 4, *dtype)

    def files(directory):
        names = "model_00000009.bin", "state_00000009_00000.bin", "DONE_00000009", "main.log"
        return [(heads / directory / name).read_bytes() for name in names]

    def run(directory, *more):
        shutil.rmtree(directory, ignore_errors=True)
        output = train(*flags, *more, "-o", directory).stdout
        output = output[output.index("val loss"):]  # after the settings
        return losses_and_samples(output), files(directory)

    whole = run("whole")
    assert "step    9/9" in whole[0] and "nan" not in whole[0]
    for more in (("--graph", 1), ("--graph", 0), ("--recompute", 0), ("--recompute", 1),
                 ("--recompute", 2)):
        assert run("parts", *more) == whole, more
    remove_after("parts", 4)
    rest = train(*flags, "-o", "parts", "-y", 1, TRAIN_GPT2_CACHE=str(heads / "empty"))
    assert "resuming at step 4 from parts" in rest.stdout and rest.stderr == ""
    rest = losses_and_samples(rest.stdout)
    assert whole[0].endswith(rest[rest.index("step    5/9:") :]) and files("parts") == whole[1]


@pytest.mark.parametrize("dtype", ("auto", "float32"))
def test_memory_in_use_does_not_grow(gpu, heads, dtype):
    """From the second step to the last, with validation, samples and checkpoints between them: no
    allocation in CuPy's pool, nor beside it but by the first sample, whose graph is made then."""
    gc.collect()  # what earlier tests left is not freed meanwhile
    config, params = read_model("gpt2_124M.bin", GPT2)
    settings = cuda.resolve_auto(cuda.CudaSettings(B=2, T=24, steps=30, dtype=dtype), gpu.arch)
    trainer = open_trainer(cuda.GPT2, gpu, config, params, settings)
    assert (settings.dtype != "bfloat16"
            or np.array_equal(bf16_bits(flat(trainer.to_host(trainer.params))),
                              bf16_bits(flat(params))))
    trainer.prepare()
    used = []
    rng = np.random.default_rng(0)
    for step in range(30):
        number = trainer.begin_step([rng.integers(0, config.V, (2, 2, 24), dtype=np.int32)], 1e-3)
        trainer.end_step(number)
        if step % 5 == 4:
            trainer.forward(*rng.integers(0, config.V, (2, 2, 24), dtype=np.int32))
            list(trainer.decoder.draw(np.array([[5]], np.int32), 30 + step, [Random()], Choice()))
            trainer.to_host(trainer.optimizer.m)
        # other tests use it, too
        free = 0 if "PYTEST_XDIST_WORKER" in os.environ else cp.cuda.runtime.memGetInfo()[0]
        used.append((free, cp.get_default_memory_pool().used_bytes()))
    assert len({pool for _, pool in used[1:]}) == 1
    assert len(set(used[1:4])) == 1 and len(set(used[5:])) == 1


def test_a_bfloat16_checkpoint(gpu, heads):
    """The model is of version 5; the masters are beside the moments, and the CPU trainer goes on
    from them."""
    done = train(*RUN, "--dtype", "bfloat16", "-o", "run", "-n", 5)
    model, state, _ = checkpoint_paths("run", 5)
    assert np.fromfile(model, "<i4", 2)[1] == 5
    config, params = read_model(model, GPT2)
    moments = [allocate(params.table) for _ in range(2)]
    master = views(params.table, params.buffer.copy())
    assert read_optimizer_state(state, owned_by_one(optimizer_of(*moments), master))[1]
    assert not np.array_equal(flat(master), flat(params))
    for name, row in params.table.items():
        rounded, exact = (getattr(tensors, name) for tensors in (params, master))
        if row.ones:  # rounded stochastically: to one of the two numbers beside it
            assert np.all(np.abs(rounded - exact) < 2.0**-7 * np.abs(exact))
        else:
            assert np.array_equal(bf16_bits(rounded), bf16_bits(exact)), name
    remove_after("run", 5)
    rest = train(*RUN, "-o", "run", "-y", 1, program="train_gpt2.py")
    tails = [train_losses(output)[-4:] for output in (rest.stdout, done.stdout)]
    assert len(tails[0]) == 4 and np.allclose(*tails, rtol=0, atol=0.02)
    write_model("gpt2_124M.bin", config, params, 5)
    short = "-x", 1, "-s", 0, "--dtype", "bfloat16", "--lines", "short"
    assert "float32 master weights" in train(*short).stdout
    assert "no master weights" in train(*short, "-w", 0).stdout


@pytest.mark.parametrize("first, second", (("train_gpt2.py", "train_gpt2_cuda.py"),
                                           ("train_gpt2_cuda.py", "train_gpt2.py")))
def test_a_checkpoint_moves_between_the_trainers(gpu, heads, first, second):
    flags = (*RUN, "--final_reports", 1, "-o", "run", "-n", 5)
    extra = {"train_gpt2.py": (), "train_gpt2_cuda.py": FLOAT32}
    whole = train(*RUN, "--final_reports", 1, program="train_gpt2.py").stdout
    train(*flags, *extra[first], program=first)
    remove_after("run", 5)
    rest = train(*flags, *extra[second], "-y", 1, program=second)
    assert "resuming at step 5 from run" in rest.stdout
    tail = train_losses(rest.stdout)
    assert len(tail) == 4 and np.allclose(tail, train_losses(whole)[-4:], rtol=0, atol=1e-4)


def test_recomputation_is_named_where_it_helps(fake_gpu):
    settings = cuda.resolve_auto(cuda.CudaSettings(B=4), "sm_90a")
    h100 = SimpleNamespace(sm_count=132,
                           geometry=launch_geometry(GPT2_124M, settings.precision, "sm_90a"))

    def needed(**changed):
        plan = memory_plan(cuda.GPT2, GPT2_124M, dataclasses.replace(settings, **changed), h100)
        return sum(block.bytes for block in plan.values())

    def check(free, words, **changed):
        fake_gpu.free = free + RESERVE
        with pytest.raises(UserError, match=f"{words}$"):
            check_memory(cuda.GPT2, GPT2_124M, dataclasses.replace(settings, **changed), h100)

    least = [needed(recompute=r) for r in (0, 1, 2)]
    layer = 2 * 12 * 4 * settings.T * 768  # bytes of a tensor (L,B,T,C)
    assert least[0] - least[1] == 4 * layer and least[1] - least[2] == 2 * layer
    both = "the largest batch that fits is -b 3, or pass --recompute 2"
    accumulated = {"total_batch_size": 512 * 1024}  # a larger batch, and sums of gradients
    check(needed(**accumulated) - 1, both.replace("3", "2"), **accumulated)  # divides -d
    check(least[0] - 1, both)
    check(least[1] - 1, "or pass --recompute 2")
    check(least[2] - 1, "the largest batch that fits is -b 2")
    check(least[2] - 1, "-b 3", recompute=2)
    fake_gpu.free = needed(B=7, recompute=2) + RESERVE
    assert check_memory(cuda.GPT2, GPT2_124M, settings, h100)[1] < 7
    settings.recompute = 2
    assert check_memory(cuda.GPT2, GPT2_124M, settings, h100)[1] == 7
    for B in (4, 1):
        check(1 << 20, "257 MiB are free; not even -b 1 fits: take a smaller -t or model", B=B)
