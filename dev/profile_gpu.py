"""
Where the time of a training step goes, kernel by kernel; needs a GPU.

    make profile                            # the model of make train; another: MODEL=gpt2_d12.bin ARGS="-b 64"
    python dev/profile_gpu.py -e l12 -b 32 --matmul cublaslt                # with SwiGLU as a kernel of its own

The flags are those of train_gpt2_cuda.py; -x is the number of timed steps (10 if not given), on
random tokens with learning rate 0. Each launch is timed alone, on one stream, by a pair of events,
minus the time of a pair with nothing in between. Matmuls are named after the weight that they work
on. Rates count operations for matmuls and attention, and for all other kernels the bytes of large
arrays, once per necessary read or write. The peaks, a large matmul and a copy, are measured right
before. Where Nsight Compute (ncu) is installed, a run of one step under it says how many MB each
kernel really moved from and to the GPU's memory. Under Nsight Systems, the same names are NVTX
ranges.
"""

import contextlib
import csv
import functools
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import root  # noqa: F401  (it finds the modules)
import numpy as np

from llmc.errors import UserError, run_main
from llmc.gpu.compiler import KernelFile
from llmc.gpu.device import (Device, TensorMap, copy_to_gpu, cp, describe_gpu, gpu_errors_as_lines,
                             open_gpu)
from llmc.gpu.fp8 import DLOGITS_SCALE
from llmc.gpu.cublaslt import is_transposed
from llmc.gpu.matmul import Linear
from llmc.gpu.precision import describe_precision
from llmc.gpu.trainer import open_device, open_trainer  # noqa: F401  (for the kernel library, too)
from llmc.gpu.shares import CHUNKS, UPDATE_CHUNK
from llmc.resume import read_start
from llmc.settings import parse_settings
from llmc.tensors import Row, bf16_bits
from llmc.api import architecture_of, on_gpu
from train_gpt2_cuda import JOB, CudaSettings

STEPS = 10

# --------------------------------------------------------------------------------------------------
# what a launch is, from its name and arguments


def is_matmul(name):
    return name == "cublaslt" or name.startswith("matmul_")


def array_of(argument):
    """Return the array that a kernel's argument stands for, or None."""
    argument = argument.array if isinstance(argument, TensorMap) else argument
    return argument if hasattr(argument, "data") and getattr(argument, "ndim", 0) else None


def tensor_at(tensors, array):
    """Return the name of the tensor in whose memory an array begins, or None."""
    for name in tensors.table:
        tensor = getattr(tensors, name)
        if 0 <= array.data.ptr - tensor.data.ptr < tensor.nbytes:
            return name
    return None


def label(name, arguments, params, grads, operands=None):
    """Name a launch by its kernel, or a matmul by its weight: "matmul qkv", "matmul qkv dinp",
    "matmul qkv dweight". operands: FP8's Tensors, or None."""
    if not is_matmul(name):
        return name
    for array in filter(lambda array: array is not None, map(array_of, arguments)):
        dweight = tensor_at(grads, array)
        weight = tensor_at(params, array)
        operand = operands and tensor_at(operands, array) or ""
        if re.fullmatch("[a-z]+w(_t)?", operand):
            of = " dinp" * operand.endswith("_t")
            return f"matmul {operand.removesuffix('_t').removesuffix('w')}{of}"
        if dweight or weight:
            forward = (is_transposed(arguments[2]) if name == "cublaslt"
                       else name.startswith("matmul_forward"))
            of = weight or dweight
            of = "logits" if of in ("wte", "lm_head") else of.removesuffix("w")
            return f"matmul {of}{' dweight' if dweight else '' if forward else ' dinp'}"
    return name


# matmul -> indices of the arguments that are its weight or the gradient of one, and an operand of N
# rows
MATMULS = {"matmul_forward": (2, 1), "matmul_forward_gelu": (3, 2), "matmul_forward_rope": (2, 1),
           "matmul_forward_swiglu": (3, 2), "matmul_backward_inp": (2, 1),
           "matmul_backward_inp_gelu": (3, 2),
           "matmul_backward_inp_swiglu": (2, 1), "matmul_backward_weight": (0, 3),
           "matmul_fp8": (2, 1),
           "matmul_fp8_gelu": (3, 2), "matmul_fp8_gelu_backward": (3, 2),
           "matmul_fp8_inp": (2, 1), "matmul_fp8_weight": (0, 3),
           "matmul_fp8_weight_across": (0, 3), "matmul_fp8_classifier_inp": (4, 3),
           "matmul_fp8_qknorm": (3, 2)}
# kernel -> (index of an argument that is (B,T,NH*HS), number of (T,T) matmuls per head of queries)
ATTENTION = {"attention_forward": (0, 2), "attention_backward_dquery": (3, 3),
             "attention_backward_dkv": (2, 4), "attention_backward": (4, 5)}
# kernel -> indices of the arrays that it reads or writes, one for each time; small arrays, and
# those that are usually in the cache, do not count
ARRAYS = {"attention_backward_start": (2, 3), "encoder_forward": (0, 0),
          "encoder_backward_wpe": (0, 1),
          "residual_layernorm_forward": (0, 1, 4, 5),
          "residual_layernorm_forward_fp8": (0, 1, 2, 8, 9),
          "residual_rmsnorm_forward": (0, 1, 3, 4),
          "residual_rmsnorm_forward_fp8": (0, 1, 2, 7, 8), "gelu_forward": (0, 1),
          "gelu_backward": (0, 2, 3, 4),
          "swiglu_forward": (0, 1), "swiglu_backward": (0, 1, 2, 3), "transpose": (1, 1),
          "quantize": (0, 1, 2),
          "muon_squares": (1,), "muon_normalize": (0, 0), "loss_mean": (1,),
          "global_norm": (1, 2), "prepare_scales": (), "prepare_update": ()}
BYTES = {  # kernel -> the same, as bytes, where it depends on more
    "copy_batch": lambda batch, pinned, control, words, begin, end: 8 * (end - begin),
    # a row of dwte for each piece
    "encoder_backward_wte": lambda dwte, partials, dout, order, begins, tokens, N: (
        size_of(dout, order) + 2 * size_of(dwte[0]) * np.count_nonzero(begins.get() < N)),
    "encoder_backward_wte_cut": lambda dwte, partials, tokens, N: (
        size_of(partials[0]) * np.count_nonzero(tokens.get() < 0)),
    **dict.fromkeys(("layernorm_backward", "rmsnorm_backward"),
                    lambda dinp, sums, dout, inp, *rest: (
    size_of(dinp, dout, inp) + rest[-2] * size_of(dinp))),  # rest[-2]: add_residual
    # rest[-3:]: dloss, write_gradient, N; in FP8, half as many bytes are written
    **dict.fromkeys(("classifier", "classifier_capped"), lambda losses, logits, *rest: (
        size_of(logits) + rest[-2] * size_of(logits) // (1 + (rest[-3] == DLOGITS_SCALE)))),
    "logits_bias_backward": lambda partials, dlogits, factor, N: size_of(dlogits),
    "muon_momentum": lambda m, u, sums, grads, chunks, *_: (8 + u.itemsize + grads.itemsize + 4 * (
        sums is not None)) * chunks.size // CHUNKS.itemsize * UPDATE_CHUNK,
    "muon_update": lambda params, master, u, chunks, *_: (u.itemsize + params.itemsize + (
        params.itemsize if master is None else 8)) * chunks.size // CHUNKS.itemsize * UPDATE_CHUNK,
    "column_sums": lambda jobs: sum(4 * int(job["rows"]) * int(job["columns"])
                                    for job in jobs.get().view(JOB)),
    "add_gradients": lambda sums, gradients, chunks, rank_count, first: (
        size_of(sums, None if first else sums) + sums.size * rank_count * gradients.itemsize),
    "adamw_update": lambda params, master, m, v, sums, gradients, *_: (
        size_of(params, m, m, v, v, sums, gradients)
        + (size_of(master, master) or size_of(params))),
}


def size_of(*arrays):
    """Return the total bytes of arrays, some of which may be None."""
    return sum(array.nbytes for array in arrays if array is not None)


def attention_flops(B, T, Q, matmuls):
    """Return the operations of that many (T,T) matmuls for each head, without the masked half. Q:
    NH*HS."""
    return matmuls * B * Q * T * (T + 1)


def work(name, arguments, config):
    """Return (bytes that a launch must move, operations that it must do); 0 for the one that does
    not bound it."""
    if name == "cublaslt":
        stack = arguments[0].shape[0] if arguments[0].ndim == 3 else 1  # of matrices
        # M*N, M*K and N*K
        return 0, 2 * math.isqrt(math.prod(array.size for array in arguments[:3]) // stack)
    if is_matmul(name):
        weight, operand = (array_of(arguments[i]) for i in MATMULS[name.removesuffix("_narrow")])
        return 0, 2 * weight.size * operand.shape[0]
    if name.removesuffix("_fp8") in ATTENTION:
        argument, matmuls = ATTENTION[name.removesuffix("_fp8")]
        return 0, attention_flops(*arguments[argument].shape, matmuls)
    if name in ("rope_forward", "qknorm_forward"):  # of the queries and keys
        return (2 * size_of(arguments[0]) * (config.NH + config.NKV)
                // (config.NH + 2 * config.NKV), 0)
    if name in ARRAYS:
        return size_of(*(arguments[i] for i in ARRAYS[name])), 0
    return BYTES[name](*arguments), 0


# --------------------------------------------------------------------------------------------------
# timing


# microseconds for which the kernel `hold` keeps the GPU busy, while Python launches what is timed
HOLD = 100
HOLD_FILE = KernelFile(os.path.join(os.path.dirname(os.path.abspath(__file__)), "hold"), ("hold",),
                       {})
load_hold = functools.cache(lambda gpu: Device(gpu, [HOLD_FILE], None).functions["hold"])


def hold(device, microseconds):
    load_hold(device.gpu)((1,), (1,), (np.int32(microseconds),), stream=device.stream)


def measure(device, call, repeats=5, before=lambda device: hold(device, HOLD)):
    """Median seconds of call() on the GPU, after one warm-up call. before(device) keeps the GPU
    busy, while Python launches the call: launch time counts only beyond that."""
    times = []
    for _ in range(repeats + 1):
        start = cp.cuda.Event()
        end = cp.cuda.Event()
        before(device)
        start.record(device.stream)
        call()
        end.record(device.stream)
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, end) / 1000)
    return sorted(times[1:])[repeats // 2]


class Profile:
    """An observer that times every launch."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.launches = []
        # A busy host makes the time between two events longer, never shorter. H200: 1.3 us.
        self.nothing = 1000 * min(measure(trainer.device, lambda: None) for _ in range(5))

    @contextlib.contextmanager
    def __call__(self, name, arguments):
        trainer = self.trainer
        start = cp.cuda.Event()
        end = cp.cuda.Event()
        what = label(name, arguments, trainer.params, trainer.grads, trainer.linears.operands)
        cp.cuda.nvtx.RangePush(what)
        start.record(trainer.device.stream)
        yield
        end.record(trainer.device.stream)
        cp.cuda.nvtx.RangePop()
        self.launches.append((what, name, arguments, start, end))

    def rows(self, steps):
        """Return {label: calls, ms, bytes and flops per step}, the longest first. A launch's time
        is its median over the steps: now and then, the GPU has waited for Python."""
        rows = {}
        times = [cp.cuda.get_elapsed_time(start, end) for *_, start, end in self.launches]
        medians = np.median(np.reshape(times, (steps, -1)), axis=0)
        for (what, name, arguments, *_), ms in zip(self.launches, medians):  # of the first step
            row = rows.setdefault(what, SimpleNamespace(calls=0, ms=0.0, bytes=0, flops=0))
            moved, computed = work(name, arguments, self.trainer.config)
            row.calls += 1
            row.ms += max(0.0, ms - self.nothing)
            row.bytes += moved
            row.flops += computed
        return dict(sorted(rows.items(), key=lambda item: -item[1].ms))


def time_launches(trainer, steps):
    """Time `steps` steps, launch by launch; return Profile.rows. A `hold` kernel keeps the GPU busy
    until Python has launched the step, or as much as the driver's queue takes (some 300 kernels),
    because the GPU must not wait for Python between the two events of a kernel."""
    device = trainer.device
    settings = trainer.settings
    rng = np.random.default_rng(0)
    trainer.graph = None
    launching = 0.0  # seconds
    for step in range(4 + steps):
        if step in (3, 4):  # three steps warm up, one measures how long launching takes
            device.observer = Profile(trainer)
        batch = rng.integers(0, trainer.config.V, (2, settings.B, settings.T), dtype=np.int32)
        hold(device, 1e6 * launching)
        begin = time.perf_counter()
        number = trainer.begin_step([batch] * trainer.settings.own_micro_steps, 0.0)
        if step == 3:
            launching = time.perf_counter() - begin
        trainer.end_step(number)
    profile = device.observer
    device.observer = None
    return profile.rows(steps)


NCU = ("ncu", "--metrics=dram__bytes.sum", "--csv", "--print-units=base", "--nvtx",
       "--print-nvtx-rename=kernel",
       "--profile-from-start=off", "--cache-control=none", "--clock-control=none")


def measure_bytes(flags):
    """Return {label: bytes that a step's launches move from and to the GPU's memory}, counted by
    ncu in a process of its own; empty, with a line that says why, where it cannot count."""
    if not shutil.which("ncu"):
        return print("bytes are not measured: Nsight Compute (ncu) is not installed") or {}
    path = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)),
                            os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([*NCU, sys.executable, "-c",
                           "import profile_gpu as p; p.run_main(p.step_for_ncu)", *flags],
                          capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not lines:
        print("bytes are not measured:",
              ((done.stderr + done.stdout).strip().splitlines() or ["ncu failed"])[-1])
        return {}
    moved = Counter()
    for row in csv.DictReader(lines):
        moved[row["Kernel Name"].split("/")[0]] += float(row["Metric Value"].replace(",", ""))
    return moved


@gpu_errors_as_lines()
def step_for_ncu():
    """Train two steps, the second one for ncu, which names each launch by its NVTX range."""
    trainer = open_trainer(*open_model(parse_settings(CudaSettings, "")))
    trainer.prepare()
    trainer.graph, trainer.device.observer = None, Profile(trainer)
    B, T = trainer.settings.B, trainer.settings.T
    batch = np.random.default_rng(0).integers(0, trainer.config.V, (2, B, T), np.int32)
    for profiled in (False, True):
        with cp.cuda.profile() if profiled else contextlib.nullcontext():
            trainer.end_step(trainer.begin_step([batch] * trainer.settings.own_micro_steps, 0.0))
            trainer.device.stream.synchronize()


def measure_copy(device):
    """Return the bytes a second, read and written, of a copy within the GPU's memory."""
    size = min(1 << 30, cp.cuda.runtime.memGetInfo()[0] // 4)
    with device.stream as stream:
        source = cp.zeros(size, np.uint8)
        target = cp.empty(size, np.uint8)
        copy = cp.cuda.runtime.memcpyAsync
        return 2 * size / measure(device,
                                  lambda: copy(target.data.ptr, source.data.ptr, size, 3,
                                               stream.ptr))


def measure_matmul(matmul):
    """Return the operations a second of a large matmul of random numbers, in the run's
    precision."""
    device = matmul.device
    n = 8192 if cp.cuda.runtime.memGetInfo()[0] > 4 << 30 else 2048
    with device.stream:
        a, b, out = (cp.empty((n, n), Row((), matmul.precision.dtype).stored_as) for _ in range(3))
        for array in (a, b):  # zeros would be too fast
            numbers = np.random.default_rng(0).uniform(-1, 1, (n, n)).astype(np.float32)
            copy_to_gpu(array, bf16_bits(numbers) if matmul.precision.bf16 else numbers)
        return 2 * n**3 / measure(device, lambda: Linear(matmul, b).forward(out, a))


def describe(matmul):
    """The GPU and versions as text; `matmul` must have cuBLASLt."""
    return (f"{describe_gpu(matmul.device.gpu)}, CuPy {cp.__version__}, cuBLASLt"
            f" {matmul.cublaslt.version}")


# --------------------------------------------------------------------------------------------------
# main


def print_profile(rows, moved, bandwidth, peak):
    """Print a line for each kernel; moved: of measure_bytes; bandwidth in bytes/s, peak in
    operations/s."""
    total = sum(row.ms for row in rows.values())
    print(f"copy {bandwidth / 1e9:.0f} GB/s, large matmul {peak / 1e12:.0f} TFLOP/s, both measured")
    print(f"{'kernel':<28} {'calls':>6} {'ms':>9} {'rate':>16} {'of peak':>8}"
          f" {'share':>7}{'MB' * bool(moved):>11}")
    for name, row in rows.items():
        seconds = row.ms / 1000 or math.inf  # too short to be measured: no rate
        if row.flops:
            rate = f"{row.flops / seconds / 1e12:.1f} TFLOP/s"
            part = row.flops / seconds / peak
        else:
            rate = f"{row.bytes / seconds / 1e9:.0f} GB/s"
            part = row.bytes / seconds / bandwidth
        print(f"{name:<28} {row.calls:>6.0f} {row.ms:>9.4f} {rate:>16} {part:>8.1%}"
              f" {row.ms / total:>7.1%}"
              + f"{moved[name] / 1e6:>11.1f}" * bool(moved))
    print(f"{'all':<28} {sum(row.calls for row in rows.values()):>6.0f} {total:>9.4f}")


def open_model(settings):
    """(architecture, GPU, config, params, settings without "auto"); raises UserError for several
    GPUs."""
    if settings.gpus > 1:
        raise UserError(f"--gpus {settings.gpus}: this program looks at one GPU: leave the flag out")
    gpu = open_gpu(settings.arch)
    architecture = on_gpu(architecture_of(settings.model))
    settings = architecture.resolve_auto(settings, gpu.arch)
    config, params, _ = read_start(settings, None, None, architecture)
    print(f"{gpu.name}, {gpu.arch}, {describe_precision(settings)}, B={settings.B} T={settings.T}")
    return architecture, gpu, config, params, settings


@gpu_errors_as_lines()
def main():
    settings = parse_settings(CudaSettings, "Time a training step kernel by kernel.")
    # not the default of random weights: 1,000, to train
    asked = settings.given is None or "steps" in settings.given
    settings.verbose = True  # the memory of each part, too
    moved = measure_bytes(sys.argv[1:])  # before this process takes the GPU's memory
    trainer = open_trainer(*open_model(settings))
    trainer.prepare()
    peaks = measure_copy(trainer.device), measure_matmul(trainer.matmul)
    print_profile(time_launches(trainer, asked and settings.steps or STEPS), moved, *peaks)


if __name__ == "__main__":
    run_main(main)
