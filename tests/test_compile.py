"""Kernels without a GPU: they compile, their blocks fit, each launch passes what its kernel takes."""

import dataclasses
import functools
import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import llmc.gpu.compiler
import train_gpt2_cuda as cuda
import train_llama3
import train_llama3_cuda as llama_cuda
import train_speedrun
import train_speedrun_cuda as speedrun_cuda
from conftest import ROOT
from fake_gpu import Array
from llmc.gpu.compiler import IMPORTING, KernelFile, compile_kernels, prepare_kernels
from llmc.errors import UserError
from llmc.gpu.fp8 import LINEARS
from llmc.gpu.geometry import hopper_matmul, kernel_files
from llmc.gpu.precision import Precision
from llmc.tensors import allocate
from llmc.gpu.trainer import STATIC_SHARED, Trainer, open_device
from train_gpt2 import Config
from test_kernels import MODELS, PRECISIONS
from test_kernels import LLAMAS

SPEEDRUN = train_speedrun.Config(1024, 50257, 1, 6, 768, 50304)  # s12


COMPILED = "sm_90a", "bf16"  # others: make test-124M


OTHERS = [case for case in itertools.product(("sm_75", "sm_80", "sm_90a", "sm_100"), PRECISIONS)
          if case != COMPILED and (case[0] != "sm_75" or "bf16" not in case[1])]


BOUNDS = (r"(?:__cluster_dims__\([^)]*\)"
          r" )?(?:BOUNDS\s+|__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?")


EXTERN = re.compile(rf'(?:extern "C" __global__ void {BOUNDS}|MATMUL )(\w+)\(([^)]*)\)')


def compile_file(file, arch):
    """The cubin of a KernelFile, in which all its kernels are."""
    with IMPORTING:
        pytest.importorskip("cuda.core")
    cubin = compile_kernels(file.name, arch, file.constants)
    assert (cubin[:4] == b"\x7fELF"
            and all(b".text." + kernel.encode() + b"\0" in cubin for kernel in file.kernels))
    return cubin


def cases_to_compile(arch, precision):
    """(architecture, layer, config) of each file that a test compiles."""
    # whose code depends on the gradients' dtype
    with_gradients = "encoder", "matmul", "column_sums", "update"
    layers = with_gradients if precision.float32_grads else cuda.GPT2.LAYERS
    cases = [(layer, MODELS[0]) for layer in layers if layer != "matmul"
             or hopper_matmul(precision, arch)]
    if arch == "sm_90a":  # of matmuls and attention, only the size of a head matters, the same here
        cases += [(layer, MODELS[2]) for layer, _ in cases if layer not in ("matmul", "attention")]
    if arch == "sm_80":
        cases += [("layernorm", Config(1024, 131, 1, C // 64, C, 256)) for C in (2560, 8192)]
    yield from ((cuda.GPT2, *case) for case in cases)
    # not in make test: it takes long
    if precision.float32_grads and hopper_matmul(precision, arch):
        yield speedrun_cuda.Speedrun, "matmul", SPEEDRUN
    if not precision.float32_grads:
        llamas = itertools.product(("rmsnorm", "rope", "swiglu", "classifier"), LLAMAS[1:])
        yield from ((llama_cuda.Llama3, *case) for case in llamas)
        classifier = (("classifier_capped",) if hopper_matmul(precision, arch)
                      else ("classifier", "logits_bias"))
        speedruns = ("rmsnorm", "qknorm", "gelu", *classifier, "muon")
        yield from ((speedrun_cuda.Speedrun, layer, SPEEDRUN) for layer in speedruns)
        yield llama_cuda.Llama3, "classifier", dataclasses.replace(LLAMAS[0], V=128256, Vp=128256)
        yield llama_cuda.Llama3, "attention", LLAMAS[2]
        yield llama_cuda.Llama3, "attention", dataclasses.replace(LLAMAS[2], NH=6, NKV=3, HS=80)


@pytest.mark.parametrize("arch, precision",
                         (COMPILED, *(pytest.param(*x, marks=pytest.mark.large) for x in OTHERS)))
def test_kernels_compile_with_no_gpu(arch, precision):
    precision = PRECISIONS[precision]
    files = []
    for architecture, layer, config in cases_to_compile(arch, precision):
        of_run = kernel_files(architecture, config, precision, arch)
        files.append(of_run[layer])
        if layer == "attention" and "attention_backward" in of_run:
            files.append(of_run["attention_backward"])
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda file: compile_file(file, arch), files))
    hopper = (kernel_files(cuda.GPT2, MODELS[0], precision, arch)["attention"].name
              == "hopper/attention")
    assert hopper == (arch == "sm_90a" and precision.bf16)


@pytest.mark.parametrize("arch, precision",
                         (("sm_75", "float32"), ("sm_80", "float32"), ("sm_80", "bf16")))
def test_other_products_of_tensor_cores_compile(arch, precision):
    """mma.cuh has each of its own; test_kernels_compile_with_no_gpu compiles the other two."""
    files = kernel_files(llama_cuda.Llama3, LLAMAS[2], PRECISIONS[precision], arch)
    compile_file(files["attention"], arch)
    assert ("attention_backward" in files) == PRECISIONS[precision].bf16
    if "attention_backward" in files:
        compile_file(files["attention_backward"], arch)


def test_blocks_fit_into_the_shared_memory_of_every_gpu():
    """Of attention: 64 KB before sm_80, 99 KB on sm_86 and sm_89, 227 KB on Hopper. Of layernorm,
    where rows are copied ahead: two blocks into a multiprocessor's, but for the longest rows."""
    for arch, limit in (("sm_75", 64 << 10), ("sm_86", 99 << 10), ("sm_90a", 227 << 10)):
        for HS, precision in itertools.product((64,) if arch == "sm_75" else (16, 64, 80, 128),
                                               PRECISIONS.values()):
            files = kernel_files(cuda.GPT2, Config(1024, 131, 1, 2, 2 * HS, 256), precision, arch)
            assert max(files["attention"].shared.values()) + STATIC_SHARED <= limit
            # sm_75 has no bfloat16; 1 KB of each block is the system's
            if "attention_backward" in files and arch != "sm_75":
                shared = files["attention_backward"].shared["attention_backward"]
                assert shared <= limit and (HS > 64 or 2 * (shared + 1024) <= 227 << 10)
    for arch, C, precision in itertools.product(("sm_80", "sm_86", "sm_90a"), (64, 1600, 8192),
                                                PRECISIONS.values()):
        file = kernel_files(cuda.GPT2, Config(1024, 131, 1, 1, C, 256), precision,
                            arch)["layernorm"]
        shared = file.shared["layernorm_backward"]
        assert shared <= (96 << 10) and (C == 8192 or 2 * shared <= 160 << 10)
        assert bool(shared) == (precision.bf16 and arch != "sm_86")


@functools.cache
def signatures(name):
    """{kernel: [(type, name) of each parameter]} of <name>.cu, which is in kernels/ if it is not a
    whole path."""
    text = re.sub(r"//[^\n]*|#define[^\n]*", "", (ROOT / "kernels" / f"{name}.cu").read_text())
    words = {kernel: [re.sub(r"\bconst\b|__grid_constant__", "", p).split()
                      for p in parameters.split(",")]
             for kernel, parameters in EXTERN.findall(text)}
    return {kernel: [(" ".join(word[:-1]), word[-1]) for word in parameters]
            for kernel, parameters in words.items()}


def accepts(precision, kind, argument):
    """Whether a kernel's parameter takes this, as CuPy would pass it: arrays as pointers, numbers
    by value."""
    if not kind.endswith("*"):
        numbers = {"int": np.int32, "int64": np.int64, "float": np.float32, "double": np.float64}
        return type(argument) is numbers.get(kind, np.void)  # else a struct
    if not isinstance(argument, Array):
        return type(argument) is np.uint64  # a null pointer, or one to pinned memory
    types = {"element": precision.dtype, "residual_element": precision.residual,
             "gradient": precision.grads}
    stored = types.get(kind[:-1], kind[:-1])
    dtypes = {"bfloat16": "u2", "float16": "f2", "float32": "f4", "float": "f4", "int": "i4",
              "int64": "i8"}
    # bytes stand for anything
    return stored not in dtypes or argument.dtype in (dtypes[stored], "u1")


def check_launches(launches, gpu, precision, parameters):
    """Number and types of arguments, grids and blocks, but of cuBLASLt. parameters: kernel ->
    [(type, name)]."""
    for launch in (launch for launch in launches if launch.name != "cublaslt"):
        assert 1 <= np.prod(launch.block) <= 1024 and launch.shared <= gpu.shared
        assert (all(type(n) is int and n >= 1 for n in launch.grid)
                and max((*launch.grid[1:], 1)) < 2**16)
        expected = parameters[launch.name]
        assert len(launch.arguments) == len(expected), launch.name
        for (kind, name), argument in zip(expected, launch.arguments):
            fits = name == "batch" or accepts(precision, kind, argument)  # words of any type
            assert fits, f"{launch.name}: {kind} {name} is given {type(argument)}"


@pytest.mark.parametrize("recompute", (0, 1, 2))
@pytest.mark.parametrize("arch, precision, library", [
    ("sm_75", "float32", "auto"), *itertools.product(("sm_80", "sm_90a"), PRECISIONS, ("auto",)),
    ("sm_90a", "fp8", "auto"),
    *itertools.product(("sm_90a",), ("bf16", "bf16-float32-grads"), ("kernels", "cublaslt"))])
@pytest.mark.parametrize("architecture, config", ((cuda.GPT2, Config(64, 257, 2, 3, 192, 384)),
    (llama_cuda.Llama3, train_llama3.Config(64, 257, 2, 4, 2, 192, 384, 384, 48, tied=0)),
    # QKV: two narrow tiles
    (llama_cuda.Llama3, train_llama3.Config(64, 257, 2, 3, 1, 192, 384, 384, 64, tied=0)),
    (speedrun_cuda.Speedrun, train_speedrun.Config(64, 257, 2, 3, 192, 384))),
    ids=("gpt2", "llama", "narrow", "speedrun"))
def test_every_launch_passes_what_its_kernel_takes(fake_gpu, architecture, config, arch, precision,
                                                   library, recompute):
    """A step with accumulation, on a fake GPU; every kernel that is loaded is launched in it, but
    in FP8."""
    T = 40 if recompute else 32
    gpu = fake_gpu.gpu._replace(arch=arch)
    precision = {"fp8": Precision("bfloat16", fp8=True), **PRECISIONS}[precision]
    settings = architecture.Settings(
        B=3, T=T, total_batch_size=6 * T, dtype="fp8" if precision.fp8 else precision.dtype,
        tf32=precision.tf32,
        float32_grads=precision.float32_grads, grad_clip=1.0, recompute=recompute, graph=0)
    _, matmul = open_device(architecture, gpu, config, precision, library)
    trainer = Trainer(architecture, config, settings, matmul,
                      allocate(architecture.parameter_table(config)))
    batch = np.ones((2, 3, T), np.int32)
    trainer.compute_gradients(*batch)
    assert not precision.fp8 or trainer.linears.fp8.updates == 1, "it has found scales"
    trainer.prepare()
    fake_gpu.launches.clear()
    reported = trainer.end_step(trainer.begin_step([batch, batch], 1e-3))
    assert reported == (0.0, 0.0, 0.001, None, None, (0, 0) if precision.fp8 else None)
    files = kernel_files(architecture, config, precision, arch, library).values()
    parameters = {kernel: types for file in files
                  for kernel, types in signatures(file.name).items()}
    check_launches(fake_gpu.launches, gpu, precision, parameters)
    if precision.fp8:
        multiplied = sum(launch.name.startswith("matmul_fp8") for launch in fake_gpu.launches)
        assert multiplied == 6 * (len(LINEARS) * config.L + 1), "all are in 8 bits"
        fake_gpu.launches.clear()
        trainer.forward(*batch)
        assert not any(re.search("fp8|quantize", launch.name) for launch in fake_gpu.launches)
        return
    launched = {launch.name for launch in fake_gpu.launches}
    assert (("cublaslt" in launched)
            == (matmul.cublaslt is not None or architecture is speedrun_cuda.Speedrun))
    unused = {"round_weights", "transpose", "gelu_forward", "gelu_backward"}
    unused |= {"matmul_backward_weight"} if library == "auto" else set()
    if architecture is llama_cuda.Llama3:
        unused |= {"encoder_backward_wpe", "matmul_forward_gelu", "matmul_backward_inp_gelu"}
        unused |= {"matmul_forward_rope"} if config.NH == 3 else set()  # the narrow one is
        unused |= {"rope_forward", "swiglu_forward", "swiglu_backward"} if matmul.kernels else set()
    if architecture is speedrun_cuda.Speedrun:
        unused |= {"encoder_backward_wpe"}
    loaded = {kernel for file in files for kernel in file.kernels
              if not kernel.endswith(("narrow", "fp8"))}
    assert loaded - launched <= unused


def test_the_cache(tmp_path, monkeypatch):
    """What is there is not compiled again, unless it is damaged; other constants, or another
    source, are other files."""
    pytest.importorskip("cuda.core")
    (tmp_path / "a.cu").write_text('extern "C" __global__ void a() {}\n')
    monkeypatch.setattr(llmc.gpu.compiler, "KERNEL_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("TRAIN_GPT2_CACHE", str(tmp_path / "new" / "cache"))
    file = KernelFile("a", ("a",), {"N": 1})
    (path,), compiled = prepare_kernels("sm_80", [file])
    assert compiled == 1 and prepare_kernels("sm_80", [file]) == ([path], 0)
    cubin = Path(path).read_bytes()
    for damaged in (cubin[: len(cubin) // 2], b"", cubin[:-1] + bytes([cubin[-1] ^ 1])):
        Path(path).write_bytes(damaged)
        assert prepare_kernels("sm_80", [file]) == ([path], 1)
        assert Path(path).read_bytes() == cubin
    assert prepare_kernels("sm_80", [file, file._replace(constants={"N": 2})])[1] == 1
    (tmp_path / "a.cu").write_text('extern "C" __global__ void a() { __syncthreads(); }\n')
    assert (prepare_kernels("sm_80", [file])[1] == 1
            and len(os.listdir(tmp_path / "new" / "cache")) == 3)
    monkeypatch.setenv("TRAIN_GPT2_CACHE", str(tmp_path / "a.cu" / "cache"))
    error = pytest.raises(UserError, prepare_kernels, "sm_80", [file])
    assert error.match("a.cu/cache: cannot be written.*TRAIN_GPT2_CACHE=DIR")
