"""The GPU trainer's wiring, on a fake GPU: all that is large is in the plan, hooks are called; and what it
says where a GPU, a package or a compiler is missing."""

import os
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest

import llmc.gpu.cublaslt
import llmc.gpu.saver
import llmc.gpu.trainer
import llmc.progress
import train_gpt2_cuda as cuda
import train_llama3
import train_llama3_cuda
import train_speedrun
import train_speedrun_cuda
from conftest import (ROOT, assert_one_line_error, random_params,
                      run_program)
from llmc.gpu.compiler import compile_kernels
from llmc.errors import UserError
from llmc.gpu.precision import PART
from llmc.gpu.trainer import open_trainer
from llmc.gpu.messages import Messages
from train_gpt2 import Config

class HeardMessages(Messages):
    """What the page tells other GPUs."""

    def __init__(self):
        self.heard = []

    def layer_begins(self, l):
        self.heard.append(("begins", l))

    def gradient_done(self, name, l=None, event=None):
        self.heard.append((name, l))


HOOKED = ((cuda.GPT2, Config(64, 257, 3, 2, 128, 384)),
          (train_llama3_cuda.Llama3,
           train_llama3.Config(64, 257, 3, 2, 1, 128, 384, 256, 64, tied=0)),
          (train_speedrun_cuda.Speedrun, train_speedrun.Config(64, 257, 3, 2, 128, 384)))


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
def test_make_train_leaves_a_gpu_alone_that_cannot_be_used(tmp_path):
    """nvidia-smi lists one, CUDA has none: the trainer's own line says why, and the CPU trains."""
    pytest.importorskip("cupy")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: of another time'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    # of `make -j test`
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env |= {"PATH": f"{tmp_path}{os.pathsep}{env['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["make", "-n", "train", f"PYTHON={sys.executable}"], cwd=ROOT,
                          capture_output=True, text=True, env=env)
    assert (done.returncode == 0 and " train_gpt2.py " in done.stdout
            and "train_gpt2_cuda.py" not in done.stdout)
    assert done.stderr and all(line.startswith("device.py: error: no ")
                               for line in done.stderr.splitlines())


def test_with_no_gpu_it_names_the_cpu_trainer(tmp_path, monkeypatch):
    """Also where CuPy cannot make a directory in the user's home while it is imported."""
    for name in ("CUPY_CACHE_DIR", "CUPY_CACHE_IN_MEMORY"):  # set here already
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").write_text("")
    done = run_program("train_gpt2_cuda.py", check=False, CUDA_VISIBLE_DEVICES="",
                       HOME=str(tmp_path / "file" / "home"))
    assert_one_line_error(done, "GPU", "python train_gpt2.py")
    assert ("driver" in done.stderr) == any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))


def test_with_a_package_missing_it_names_it(tmp_path):
    """PyTorch is for several GPUs alone."""
    (tmp_path / "torch.py").write_text("raise ImportError")
    for error, what in (
            ("ModuleNotFoundError(\"No module named 'cupy'\", name='cupy')",
             "the Python package cupy cannot be"),
            ("ImportError('\\n====\\nFailed to import CuPy.\\nMore.')",
             "CuPy, or a package beside it, cannot (Failed to import CuPy.)")):
        (tmp_path / "cupy.py").write_text(f"raise {error}\n")
        done = run_program("train_gpt2_cuda.py", check=False, PYTHONPATH=str(tmp_path))
        assert_one_line_error(done, what, "pip install -r requirements-gpu.txt",
                              "python train_gpt2.py")
    done = run_program("train_gpt2_cuda.py", "--gpus", 2, check=False, PYTHONPATH=str(tmp_path))
    assert_one_line_error(done, "a run on several GPUs needs the Python package torch")


@pytest.mark.parametrize("error, words", ((None, "cuda.core cannot be imported"),
    ("Failure finding \"libnvrtc.so\"", "nvidia-cuda-nvrtc is missing.*gelu.cu"),
    ("cannot open source file \"cuda_bf16.h\"", "nvidia-cuda-runtime is missing.*gelu.cu")))
def test_without_a_compiler_or_its_headers_it_names_the_package(error, words, monkeypatch):
    module = error and Mock(Program=Mock(side_effect=RuntimeError(error)))
    monkeypatch.setitem(sys.modules, "cuda.core", module)
    with pytest.raises(UserError,
                       match=f"{words}.*pip install -r requirements-gpu.txt.*python train_gpt2.py"):
        compile_kernels("gelu", "sm_80", {})


@pytest.mark.parametrize("dtype", ("bfloat16", "fp8", "float32"))
def test_all_that_is_large_is_in_the_plan(fake_gpu, dtype):
    """What is printed and checked is what is allocated, but for tables of less than 64 KiB."""
    sizes = []
    zeros = fake_gpu.cp.zeros
    fake_gpu.cp.zeros = fake_gpu.cp.empty = (lambda shape, dtype: sizes.append(zeros(shape, dtype))
                                             or sizes[-1])
    settings = cuda.resolve_auto(cuda.CudaSettings(B=2, T=48, dtype=dtype), "sm_90a")
    trainer = open_trainer(cuda.GPT2, fake_gpu.gpu, HOOKED[0][1], random_params(HOOKED[0][1]),
                           settings)
    large = sorted(array.nbytes for array in sizes if array.nbytes >= 64 << 10)
    rounding = [4 * PART] * (dtype != "float32")  # room of copy_weights, free again
    planned = [block.bytes for block in trainer.plan.values() if block.bytes >= 64 << 10]
    assert large == sorted(planned + rounding)


@pytest.mark.parametrize("architecture, config", HOOKED, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("dtype", ("bfloat16", "fp8", "float32"))
def test_hooks_are_called_for_each_layer_and_each_gradient(fake_gpu, architecture, config, dtype,
                                                           monkeypatch):
    """Layers forward; then, as they are computed, an untied classifier's gradient, each matrix's of
    each layer, last to first, and the rest's."""
    monkeypatch.setattr(llmc.gpu.trainer, "Messages", HeardMessages)
    settings = architecture.resolve_auto(architecture.Settings(B=2, T=48, dtype=dtype), "sm_90a")
    trainer = open_trainer(architecture, fake_gpu.gpu, config, random_params(config), settings)
    trainer.prepare()
    trainer.messages.heard.clear()
    trainer.model.train_step(trainer)
    head = [("lm_head", None)] * ("lm_head" in trainer.params.table)
    matrices = [(name, l) for l in (2, 1, 0) for name in ("fcprojw", "fcw", "attprojw", "qkvw")]
    assert (trainer.messages.heard == [("begins", l) for l in range(3)] + head + matrices
            + [("rest", None)])
