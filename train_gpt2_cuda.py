"""
GPT-2 training on a GPU: the loop of train_gpt2.py, with our CUDA kernels for the layers, and for matrix products those or cuBLASLt.

What it is: the same chapters in the same order, over the same tensor tables, files, data loader and checkpoints, which it
imports. CuPy holds the memory and launches; kernels/*.cu do the work, one file a layer, compiled at the first start for the
GPU and the model at hand. What it needs: an NVIDIA driver and the pip packages of requirements.txt, no CUDA toolkit.

    python prepro_tinyshakespeare.py
    python export_weights.py
    python train_gpt2_cuda.py                 # B=4, T=1024, one epoch, in bfloat16 where the GPU has it
    python train_gpt2_cuda.py --check         # compares every activation and gradient with train_gpt2.py on one batch
    python train_gpt2_cuda.py --profile 10    # where the time of a step goes, kernel by kernel

A step never waits for the host: it is one CUDA graph, from the copy of the batch out of pinned memory to AdamW, and the host
prints a step's loss while the next one runs. Results are bit-identical from run to run and across a resume: every sum has a
fixed order, there are no atomic additions of floats, and the products' algorithms, once searched, are kept in a cache and recorded in
checkpoints.
"""

import time

START = time.perf_counter()  # for the time to the first step

import bisect
import contextlib
import dataclasses
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

import train_gpt2  # before NumPy: it tells OpenBLAS how to run

import numpy as np

from train_gpt2 import (
    Interruption,
    Log,
    Progress,
    Random,
    Row,
    Settings,
    UserError,
    allocate,
    bf16_bits,
    bf16_to_float32,
    check_tensor,
    checkpoint_paths,
    chunks,
    count_parameters,
    decay_spans,
    find_checkpoint,
    flag_of,
    flat,
    generate,
    go_back,
    layer,
    learning_rate_at,
    load_tokenizer,
    open_data,
    option,
    parameter_table,
    parse_settings,
    print_changed_settings,
    read_start,
    replacing,
    restore,
    resume_command,
    run_main,
    save_checkpoint,
    table_bytes,
    validate,
    views,
)

# While it is imported, CuPy makes a directory in $HOME, which need not be writable, for kernels of its own; training uses none of those.
os.environ.setdefault("CUPY_CACHE_IN_MEMORY", "1")
os.environ.setdefault("CUPY_CACHE_DIR", tempfile.gettempdir())

try:
    import cupy as cp
    from cuda.bindings import driver
    from cuda.core import Program, ProgramOptions
    from nvmath.bindings import cublasLt as lt

    MISSING = None
    GPU_ERRORS = cp.cuda.runtime.CUDARuntimeError, cp.cuda.driver.CUDADriverError, lt.cuBLASLtError
except ImportError as error:
    MISSING, GPU_ERRORS = error, ()

# ----------------------------------------------------------------------------------------------------------------------
# settings: those of train_gpt2.py, some with other defaults, and what only a GPU has


def with_default(name, default, help=None):
    """A field of Settings with another default, and perhaps another help text."""
    metadata = dict(Settings.__dataclass_fields__[name].metadata)
    return dataclasses.field(default=default, metadata={**metadata, "help": help or metadata["help"]})


class Precision(NamedTuple):
    """What a run computes in. Parameters, activations and gradients have `dtype`, but the residual stream; statistics, losses and AdamW's
    state are float32."""

    dtype: str = "float32"
    tf32: int = 1  # products of float32 operands round them to TF32
    float32_grads: int = 0  # the gradients of the weights are float32 in a bfloat16 run, too

    @property
    def bf16(self):
        return self.dtype == "bfloat16"

    @property
    def stream(self):
        """Of the residual stream. Each layer adds to it twice, and all roundings of the sums stay: in half precision, 3 bits more than
        bfloat16 has in as many bytes. Its range, up to 65504, does for sums of layers' outputs, and saturates."""
        return "float16" if self.bf16 else self.dtype

    @property
    def grads(self):
        return "float32" if self.float32_grads else self.dtype

    @property
    def pack(self):
        """Elements in 16 bytes, which a thread works on."""
        return 8 if self.bf16 else 4

    @property
    def products(self):
        """The name of what products multiply, and add up in float32."""
        return "bf16" if self.bf16 else "tf32" if self.tf32 else "float32"


@dataclass
class CudaSettings(Settings):
    """What one training run on a GPU does. The defaults are those of llm.c's CUDA program of April 2024, but for
    the dtype and the learning rate."""

    T: int = with_default("T", 1024)
    steps: int = with_default("steps", 0, "number of updates (0: one epoch)")
    val_every: int = with_default("val_every", 20)
    val_batches: int = with_default("val_batches", 20)
    final_reports: int = with_default("final_reports", 1)

    dtype: str = option("auto", group="gpu", choices=("auto", "bfloat16", "float32"),
                        help="of parameters, activations and gradients; with bfloat16, the residual stream is in half precision (auto:"
                        " bfloat16 where the GPU has it, sm_80 and newer)")
    master_weights: int = option(1, "-w", group="gpu", choices=(0, 1), help="bfloat16: 1: AdamW works on a float32 copy of the weights")
    stochastic_rounding: int = option(0, group="gpu", metavar="SEED",
                                      help="bfloat16: round new weights up or down at random, from this seed (0: to nearest)")
    float32_grads: int = option(0, group="gpu", choices=(0, 1), help="bfloat16: 1: gradients of weights are kept, and added up, in float32")
    tf32: int = option(1, group="gpu", choices=(0, 1), help="float32: 1: matrix products round their operands to TF32")
    recompute: int = option(-1, group="gpu", choices=(-1, 0, 1, 2),
                            help="what the backward pass computes again to save memory (0: nothing, 1: GELU, 2: layernorms too,"
                            " -1: nothing in bfloat16, GELU in float32)")
    matmul: str = option("auto", group="gpu", choices=("auto", "cublaslt", "kernels"),
                         help="matrix products by cuBLASLt or by our kernels (auto: what is faster at each shape in bfloat16 on sm_90,"
                         " cublaslt elsewhere)")
    arch: str = option("native", group="gpu", choices=("native", "sm_80"), help="sm_80: kernels without what only newer GPUs have")
    graph: int = option(1, group="gpu", choices=(0, 1), help="1: a step is one CUDA graph; 0: launch by launch, the same results")
    compare: bool = option(False, "--check", group="gpu", help="compare one batch with train_gpt2.py, tensor by tensor, and exit")
    profile: int = option(0, group="gpu", help="time that many steps kernel by kernel, and exit")

    AT_LEAST: ClassVar = {**Settings.AT_LEAST, "steps": 0, "profile": 0, "stochastic_rounding": 0}

    @property
    def precision(self):
        return Precision(self.dtype, self.tf32, self.float32_grads)

    @property
    def master(self):
        """Whether there are float32 weights beside the model's."""
        return self.dtype == "bfloat16" and bool(self.master_weights)


def settle(settings, arch):
    """Replace what is left to the GPU in settings; raises UserError for a dtype that it lacks and for flags that would have no
    effect."""
    has_bfloat16 = int(arch[3:].rstrip("a")) >= 80
    if settings.arch != "native" and not has_bfloat16:
        raise UserError(f"--arch {settings.arch}: this GPU is {arch}")
    if settings.dtype == "auto":
        settings.dtype = "bfloat16" if has_bfloat16 else "float32"
    if settings.dtype == "bfloat16" and not has_bfloat16:
        raise UserError(f"--dtype bfloat16: this GPU is {arch}, expected sm_80 or newer: pass --dtype float32")
    if settings.dtype == "bfloat16" and not settings.tf32:
        raise UserError("--tf32 0: this run is in bfloat16, whose products know no TF32: pass --dtype float32, too")
    if not has_bfloat16:
        settings.tf32 = 0  # which came with the same tensor cores
    if settings.dtype == "float32":
        for name, default in (("master_weights", 1), ("stochastic_rounding", 0), ("float32_grads", 0)):
            if getattr(settings, name) != default:
                raise UserError(f"{flag_of(settings, name)} {getattr(settings, name)}: this run is in float32, and the flag is for"
                                " bfloat16: pass --dtype bfloat16")
    if settings.compare and (settings.profile or settings.total_batch_size):
        other = "profile" if settings.profile else "total_batch_size"
        raise UserError(f"{flag_of(settings, other)} {getattr(settings, other)}: --check looks at one batch and exits: pass one of the two")
    if settings.recompute == -1 and settings.compare:
        settings.recompute = 0  # so that every row is there to be compared
    if settings.recompute == -1:
        settings.recompute = 0 if settings.dtype == "bfloat16" else 1
    return settings


# ----------------------------------------------------------------------------------------------------------------------
# layout: the tables of activations. Rows that are only alive in one phase of a step share their memory with the other phases'.

ALIGN = 256  # bytes; cuBLASLt's fastest algorithms ask for it


def activation_table(config, B, T, recompute, dtype):
    """name -> Row for what the forward pass leaves behind for the backward pass."""
    L, NH, C, stream = config.L, config.NH, config.C, Precision(dtype).stream
    table = {
        "encoded": Row((B, T, C), stream),
        "ln1": Row((L, B, T, C), dtype),  # not with recompute 2
        "ln1_mean": Row((L, B, T)),
        "ln1_rstd": Row((L, B, T)),
        "qkv": Row((L, B, T, 3 * C), dtype),
        "atty": Row((L, B, T, C), dtype),
        "lse": Row((L, B, NH, T)),  # all that is kept of the (T, T) matrices: log of the sum of exp of each row's scores
        "residual2": Row((L, B, T, C), stream),
        "ln2": Row((L, B, T, C), dtype),  # not with recompute 2
        "ln2_mean": Row((L, B, T)),
        "ln2_rstd": Row((L, B, T)),
        "fch": Row((L, B, T, 4 * C), dtype),
        "fch_gelu": Row((L, B, T, 4 * C), dtype),  # not with recompute 1 and 2
        "residual3": Row((L, B, T, C), stream),
        "lnf": Row((B, T, C), dtype),
        "lnf_mean": Row((B, T)),
        "lnf_rstd": Row((B, T)),
        "losses": Row((B, T)),
    }
    return {name: row for name, row in table.items() if name not in RECOMPUTED[recompute]}


RECOMPUTED = {0: (), 1: ("fch_gelu",), 2: ("fch_gelu", "ln1", "ln2")}  # rows with one layer's room, in the phases that need them


def phase_tables(config, B, T, recompute, sm_count, dtype):
    """phase -> table of what lives in that phase alone. The three lie over one another: each phase ends what the one before
    left there. The logits are the largest, but where the vocabulary or the batch is small beside the layers."""
    NH, C, Vp = config.NH, config.C, config.Vp
    again = {"fch_gelu": Row((B, T, 4 * C), dtype), "ln1": Row((B, T, C), dtype), "ln2": Row((B, T, C), dtype)}
    again = {name: row for name, row in again.items() if name in RECOMPUTED[recompute]}
    L, rows = config.L, sum_rows(config, B, T, sm_count, Precision(dtype).pack)
    return {
        "forward": {
            "branch": Row((B, T, C), dtype),  # attproj or fcproj, until the next layernorm adds it to the residual stream
            **again,
        },
        "classifier": {"logits": Row((B, T, Vp), dtype)},  # overwritten with their gradient
        "backward": {
            "dfch": Row((B, T, 4 * C), dtype),  # of fch_gelu, then in place of fch
            "dqkv": Row((B, T, 3 * C), dtype),
            "D": Row((B, NH, T)),  # within attention_backward
            **again,
            # Sums over rows, one row of them for each block of a kernel, until column_sums ends the backward pass.
            "lnf_sums": Row((rows.layernorm, 3 * C)),
            "gelu_sums": Row((L, rows.gelu, 4 * C)),
            "ln2_sums": Row((L, rows.layernorm, 3 * C)),
            "attention_sums": Row((L, rows.attention, 3 * C)),
            "ln1_sums": Row((L, rows.layernorm, 3 * C)),
        },
    }


def stream_table(config, B, T, dtype):
    """name -> Row for what lives across phases."""
    table = {
        "dresidual": Row((B, T, config.C), dtype),  # of the residual stream, through the whole backward pass
        "dbranch": Row((B, T, config.C), dtype),  # of a layernorm's or the attention's output; dies in the next call
    }
    if dtype == "float32":
        table["transposed"] = Row((config.C, B * T))  # an operand of a weight gradient; dies in that product
    return table


def batch_table(B, T, micro_steps):
    """name -> Row for what the host sends for one update: four bytes an entry."""
    N = B * T
    return {
        "learning_rate": Row((1,)),
        "inputs": Row((micro_steps, B, T), "int32"),
        "targets": Row((micro_steps, B, T), "int32"),
        "order": Row((micro_steps, N), "int32"),  # the places of `inputs`, sorted by token: see encoder_backward
        "first": Row((micro_steps, N + 1), "int32"),  # where each token's run begins in `order`,
        "tokens": Row((micro_steps, N), "int32"),  # and which token that is
    }


def memory_plan(config, settings, sm_count):
    """What the trainer allocates: [(bytes, what for)]."""
    B, T, recompute, precision = settings.B, settings.T, settings.recompute, settings.precision
    parameters = table_bytes(parameter_table(config))
    phases = phase_tables(config, B, T, recompute, sm_count, precision.dtype)
    return [
        (table_bytes(parameter_table(config, precision.dtype)), "parameters"),
        *([(parameters, "float32 master weights")] if settings.master else []),
        (table_bytes(parameter_table(config, precision.grads)), "gradients"),
        (2 * parameters, "AdamW's moments"),
        (table_bytes(activation_table(config, B, T, recompute, precision.dtype), ALIGN), "activations"),
        (max(table_bytes(table, ALIGN) for table in phases.values()), "logits, and in other phases scratch"),
        (table_bytes(stream_table(config, B, T, precision.dtype), ALIGN), "gradients between layers"),
        (2 * WORKSPACE, "the products' workspaces"),
        (table_bytes(batch_table(B, T, settings.micro_steps)) + (64 << 10), "the batch"),
    ]


# ----------------------------------------------------------------------------------------------------------------------
# the GPU, and the directory in which compiled kernels and chosen algorithms are kept


def open_gpu(arch="native"):
    """Name and architecture of the current GPU; raises UserError that says what is missing. arch "sm_80": as if it had nothing
    that only its own generation has."""
    instead = "with no GPU, train with: python train_gpt2.py"
    if MISSING is not None:
        reason = next((line.strip() for line in str(MISSING).splitlines() if line.strip(" =-")), repr(MISSING))
        what = f"the Python package {MISSING.name} cannot" if MISSING.name else f"CuPy, or a package beside it, cannot ({reason})"
        raise UserError(f"{what} be imported: pip install -r requirements.txt; {instead}")
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise UserError(f"no usable NVIDIA GPU ({str(error).split(': ')[-1]}): nvidia-smi should list one, with a driver of 580"
                        f" or newer; {instead}") from None
    if count == 0:
        raise UserError(f"no NVIDIA GPU is visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}); {instead}")
    properties = cp.cuda.runtime.getDeviceProperties(0)
    name, capability = properties["name"].decode(), (properties["major"], properties["minor"])
    if capability < (7, 5):
        raise UserError(f"{name} has compute capability {capability[0]}.{capability[1]}, expected 7.5 or newer; {instead}")
    try:
        cp.cuda.runtime.memGetInfo()  # makes the context
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise UserError(f"{name}: {str(error).split(': ')[-1]}: does another process hold its memory? See nvidia-smi; {instead}") from None
    named = architecture(*capability)
    return SimpleNamespace(name=name, arch=named if arch == "native" else named.rstrip("a"), sm_count=properties["multiProcessorCount"],
                           shared=properties["sharedMemPerBlockOptin"])


def architecture(major, minor):
    """The compiler's name for a GPU; with a, the instructions that this one generation has (wgmma, on Hopper)."""
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


class Cache:
    """A directory of files that can be made again, each with its digest in its name; a damaged one counts as absent.

    When the directory cannot be written to, what would go there goes to a temporary one, with one warning.
    """

    def __init__(self, path=None):
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        self.path = path or os.environ.get("TRAIN_GPT2_CACHE") or os.path.join(root, "train_gpt2")
        self.temporary, self.lock = None, threading.Lock()  # kernels are compiled, and kept, by several threads

    def find(self, key, suffix):
        """(path, content) of the file that `key` (a text) stands for, or None."""
        for directory in filter(None, (self.path, self.temporary and self.temporary.name)):
            for path in glob.glob(os.path.join(glob.escape(directory), f"{digest(key.encode())}-*{suffix}")):
                with contextlib.suppress(OSError), open(path, "rb") as f:
                    content = f.read()
                    if path.endswith(f"-{digest(content)}{suffix}"):
                        return path, content
                print(f"warning: {path}: is damaged, and made again", file=sys.stderr)
                with contextlib.suppress(OSError):
                    os.unlink(path)
        return None

    def keep(self, key, suffix, content):
        """Write `content` and return its path."""
        name = f"{digest(key.encode())}-{digest(content)}{suffix}"
        with self.lock, self.alone("writing"):
            if self.temporary is None:
                try:
                    os.makedirs(self.path, exist_ok=True)
                    return self.write(os.path.join(self.path, name), content)
                except (OSError, UserError) as error:
                    self.temporary = tempfile.TemporaryDirectory(prefix="train_gpt2_")
                    print(f"warning: {self.path}: cannot be written ({getattr(error, 'strerror', None) or error}); the next start"
                          " compiles and searches again, and may round differently. TRAIN_GPT2_CACHE=DIR names another place",
                          file=sys.stderr)
            return self.write(os.path.join(self.temporary.name, name), content)

    def write(self, path, content):
        with replacing(path) as f:
            f.write(content)
        for other in glob.glob(os.path.join(glob.escape(os.path.dirname(path)), os.path.basename(path)[:33] + "*")):
            if other != path:
                with contextlib.suppress(OSError):
                    os.unlink(other)
        return path

    @contextlib.contextmanager
    def alone(self, work, notice=""):
        """While this lasts, no other process is at this work on the same directory; who has to wait prints `notice`. Where the system
        has no locks of files, or the directory cannot be written to, that is not seen to."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                os.makedirs(self.path, exist_ok=True)
                file = stack.enter_context(open(os.path.join(self.path, f"{work}.lock"), "ab"))
                if fcntl:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        print(notice, end="", file=sys.stderr, flush=True)
                        fcntl.flock(file, fcntl.LOCK_EX)
            yield


def digest(content):
    return hashlib.sha256(content).hexdigest()[:32]


# ----------------------------------------------------------------------------------------------------------------------
# kernels: compiled here, for this GPU and this model; needs no GPU itself

KERNELS = {  # file -> its kernels
    "encoder": ("encoder_forward", "encoder_backward_wte", "encoder_backward_wpe"),
    "layernorm": ("residual_layernorm_forward", "layernorm_backward"),
    "attention": ("attention_forward", "attention_backward_dquery", "attention_backward_dkv"),
    "gelu": ("gelu_forward", "gelu_backward"),
    "matmul": ("matmul_forward", "matmul_forward_gelu", "matmul_backward_inp", "matmul_backward_inp_gelu", "matmul_backward_weight"),
    "classifier": ("classifier",),
    "transpose": ("transpose",),
    "column_sums": ("column_sums",),
    "update": ("begin_step", "loss_mean", "global_norm", "prepare_update", "adamw_update", "round_weights", "hold", "fill_random"),
}
HOPPER_ONLY = {  # .cu file -> kernels that the one for other GPUs has not
    "matmul_hopper_bf16": ("matmul_forward_narrow", "matmul_backward_inp_narrow", "matmul_backward_weight_narrow"),
}
ATTENTION_FILES = {  # instead of attention.cu where it can be: the same kernels, (bfloat16, Hopper's own instructions)
    (False, False): "attention",
    (False, True): "attention_hopper",
    (True, False): "attention_bf16",
    (True, True): "attention_hopper_bf16",
}
KERNEL_DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "kernels")


def check_sizes(config):
    """Raise UserError for a model that the kernels are not written for."""
    HS = config.C // config.NH
    if HS % 16 or HS > 128 or config.C > 8192:
        raise UserError(f"C={config.C} with NH={config.NH} heads: the GPU kernels expect C up to 8192 and heads of C / NH = 16, 32, ..."
                        " 128 channels; train this model with: python train_gpt2.py")


def kernel_constants(config, precision):
    """The -D constants that a kernel is compiled with."""
    return {"MODEL_C": config.C, "MODEL_NH": config.NH, "MODEL_V": config.V, "MODEL_VP": config.Vp, "BFLOAT16": int(precision.bf16),
            "FLOAT32_GRADS": int(precision.grads == "float32"), "TF32": precision.tf32}


def compile_kernels(name, arch, constants):
    """kernels/<name>.cu -> the bytes of a cubin for `arch` (like sm_90a); raises UserError with the compiler's first error."""
    path = os.path.join(KERNEL_DIRECTORY, f"{name}.cu")
    try:
        with open(path) as f:
            source = f.read()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    options = ProgramOptions(name=path, arch=arch, std="c++17", include_path=[KERNEL_DIRECTORY, *cuda_include()],
                             define_macro=[(key, str(value)) for key, value in constants.items()],
                             split_compile=0)  # a file's kernels on all cores
    try:
        return bytes(Program(source, "c++", options).compile("cubin").code)
    except Exception as error:  # cuda.core has a class of its own for each way to fail
        lines = str(error).splitlines()
        for package, sign in (("nvidia-cuda-nvrtc", "libnvrtc"), ("nvidia-cuda-runtime", 'open source file "cuda_')):
            if sign in str(error):
                raise UserError(f"the Python package {package} is missing, without which {path} does not compile: pip install -r"
                                " requirements.txt; or train on the CPU: python train_gpt2.py") from None
        first = next((line for line in lines if "error" in line and "NVRTC_ERROR" not in line), lines[0] if lines else repr(error))
        raise UserError(f"{path} does not compile for {arch}: {first.strip()}") from None


def cuda_include():
    """The directory of CUDA's headers in the package nvidia-cuda-runtime."""
    spec = importlib.util.find_spec("nvidia")
    found = [path for root in (spec.submodule_search_locations if spec else []) for path in glob.glob(os.path.join(root, "*", "include"))]
    return [path for path in found if os.path.exists(os.path.join(path, "cuda_bf16.h"))]


def compiler_version():
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
    return "unknown"


def kernel_key(name, arch, constants):
    """What a cubin depends on, as text."""
    parts = [compiler_version(), arch, json.dumps(constants)]
    for path in (os.path.join(KERNEL_DIRECTORY, f"{name}.cu"), *sorted(glob.glob(os.path.join(KERNEL_DIRECTORY, "*.cuh")))):
        with contextlib.suppress(OSError), open(path) as f:
            parts.append(f.read())
    return "\n".join(parts)


def use_hopper(arch, config, precision):
    """Whether attention runs on Hopper's own tensor core instructions, or on those of every GPU from sm_80 on."""
    return arch == "sm_90a" and config.C // config.NH == 64 and bool(precision.tf32 or precision.bf16)


def matmul_hopper(arch, precision):
    """Whether our matrix products run on Hopper's own tensor core instructions."""
    return arch == "sm_90a" and precision.bf16


def matmul_file(arch, precision):
    return "matmul_hopper_bf16" if matmul_hopper(arch, precision) else "matmul"


def settle_matmul(matmul, arch, precision):
    """What "auto" stands for: only Hopper's products are worth timing beside cuBLASLt's."""
    return "cublaslt" if matmul == "auto" and not matmul_hopper(arch, precision) else matmul


def kernel_files(arch, config, precision, matmul="kernels"):
    """{name: .cu file} of a run, in the order of KERNELS."""
    files = {name: name for name in KERNELS}
    files["attention"] = ATTENTION_FILES[precision.bf16, use_hopper(arch, config, precision)]
    files["matmul"] = matmul_file(arch, precision)
    if matmul == "cublaslt":
        del files["matmul"]
    return files


def kernels_of(name, file):
    """The kernels of one of kernel_files."""
    return KERNELS[name] + HOPPER_ONLY.get(file, ())


def prepare_kernels(cache, arch, config, precision, matmul):
    """Compile all kernels that the cache does not have; returns ({name: path of a cubin}, how many were compiled)."""
    constants, files = kernel_constants(config, precision), kernel_files(arch, config, precision, matmul)

    def prepare(file):
        key = kernel_key(file, arch, constants)
        found = cache.find(key, ".cubin")
        if found:
            return found[0], False
        return cache.keep(key, ".cubin", compile_kernels(file, arch, constants)), True

    with ThreadPoolExecutor(len(KERNELS)) as pool:
        results = dict(zip(files, pool.map(prepare, files.values())))
    return {name: path for name, (path, _) in results.items()}, sum(compiled for _, compiled in results.values())


class Device:
    """The GPU as the layers see it: a stream, `launch` for kernels, and `products`. A second stream takes work `aside`."""

    def __init__(self, gpu, config, precision, cache, matmul="auto"):
        self.gpu, self.sm_count, self.precision = gpu, gpu.sm_count, precision
        self.maps = {}
        self.stream = self.main = cp.cuda.Stream(non_blocking=True)
        self.side = cp.cuda.Stream(non_blocking=True)
        self.attention = attention_launches(config, precision, gpu.arch)
        needed = max(launch.shared for launch in self.attention.values()) + STATIC_SHARED
        if needed > gpu.shared:
            raise UserError(f"heads of {config.C // config.NH} channels need {needed} bytes of shared memory in a block, {gpu.name} has"
                            f" {gpu.shared}: train this model with: python train_gpt2.py")
        matmul = settle_matmul(matmul, gpu.arch, precision)
        paths, self.compiled = prepare_kernels(cache, gpu.arch, config, precision, matmul)
        self.functions, self.files = {}, len(paths)
        for name, file in kernel_files(gpu.arch, config, precision, matmul).items():
            module = cp.RawModule(path=paths[name])
            self.functions.update({kernel: module.get_function(kernel) for kernel in kernels_of(name, file)})
        for name, launch in self.attention.items():
            self.functions[name].max_dynamic_shared_size_bytes = launch.shared
        self.functions["layernorm_backward"].max_dynamic_shared_size_bytes = layernorm_shared(config.C, precision, gpu.arch)
        self.rows_on_chip = rows_on_chip(config, precision, gpu.arch)
        if self.rows_on_chip:
            self.functions["classifier"].max_dynamic_shared_size_bytes = 16 // precision.pack * config.Vp
        self.products = Products(self, cache, matmul)
        self.profile = None  # a Profile while --profile times

    def launch(self, name, grid, block, *arguments, shared=0, bytes=0, flops=0, label=None):
        """Run a kernel. Python ints go as int, floats as float, arrays as pointers, None as a null pointer; `bytes` and
        `flops` are what it has to move and to compute, for --profile, which knows it as `label`."""
        arguments = tuple(convert(argument) for argument in arguments)
        with self.record(label or name, bytes, flops):
            self.functions[name](grid, block, arguments, shared_mem=shared)

    def grid(self, elements):
        """Blocks of 256 threads for so many elements, a thread for each 16 bytes of the run's dtype."""
        return (blocks(elements, self.precision.pack * 256),)

    def tensor_map(self, array, rows, columns):
        """What TMA needs to cut boxes of (rows, columns) out of a bfloat16 or float32 array (B,T,C) or (T,C): a kernel's argument.
        A row of a box is 64 or 128 bytes, whose 16-byte units are permuted, so that those of a column lie in different banks."""
        key = array.data.ptr, array.shape, array.dtype, rows, columns
        if key not in self.maps:
            B, T, C = array.shape if array.ndim == 3 else (1, *array.shape)
            kinds, swizzles, row = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle, array.itemsize * C
            swizzle = {64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B, 128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B}[array.itemsize * columns]
            kind = kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if array.itemsize == 2 else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32
            ints = [[driver.cuuint64_t(n) for n in numbers] for numbers in ((C, T, B), (row, row * T))]
            boxes = [[driver.cuuint32_t(n) for n in numbers] for numbers in ((columns, rows, 1), (1, 1, 1))]
            error, made = driver.cuTensorMapEncodeTiled(
                kind, 3, array.data.ptr, *ints, *boxes, driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
            if error != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"cuTensorMapEncodeTiled of {array.shape}: {error}")
            self.maps[key] = np.void(np.array([int(word) for word in made.opaque], np.uint64).tobytes())
        return self.maps[key]

    def aside(self, work):
        """Run work() on the second stream, beside what this one does from here on; returns an event for `wait`. Where calls are
        timed one by one, work() runs right here."""
        if self.profile or self.products.searching:
            return work()
        before, after = cp.cuda.Event(disable_timing=True), cp.cuda.Event(disable_timing=True)
        before.record(self.main)
        self.side.wait_event(before)
        self.stream = self.side
        with self.side:
            work()
        self.stream = self.main
        after.record(self.side)
        return after

    def wait(self, event):
        """Let this stream wait for what was put aside; None: nothing was."""
        if event is not None:
            self.main.wait_event(event)

    def record(self, name, bytes=0, flops=0):
        return self.profile.record(name, bytes, flops) if self.profile else contextlib.nullcontext()


def convert(argument):
    """A kernel's argument as CuPy wants it."""
    if argument is None:
        return np.uint64(0)
    if type(argument) in (int, bool):  # not a subclass: np.float64 is a float, too
        return np.int32(argument)
    return np.float32(argument) if type(argument) is float else argument


def blocks(n, block):
    return -(-n // block)


def near_power_of_2(x):
    return 2.0 ** round(math.log2(x))


# ----------------------------------------------------------------------------------------------------------------------
# matrix products, by cuBLASLt or by our kernels

WORKSPACE = 32 << 20  # bytes, as cuBLAS recommends for Hopper


class Products:
    """out = inp @ weight^T and its two gradients, with and without GELU: by cuBLASLt, by our kernels or, "auto", by what is faster.

    While `searching`, ways to do a product are timed at the first call of a shape, on the data at hand, and kept in `chosen`: all for the
    cache and the next start; those that the training step then uses for the checkpoint, because another way adds up in another order.
    """

    def __init__(self, device, cache, matmul):
        self.device, self.cache = device, cache
        self.chosen, self.used, self.searched = {}, set(), 0
        self.searching = False  # True while the training step's shapes come by; for others the first way has to do
        self.workspace = None  # WORKSPACE bytes for each of the device's two streams, given when the memory is allocated
        self.kernels = MatmulKernels(device, self) if matmul != "cublaslt" else None
        self.cublaslt = CublasLt(device, self) if matmul != "kernels" else None
        self.ways = {name: way for name, way in (("kernels", self.kernels), ("cublaslt", self.cublaslt)) if way}
        library = [f"cuBLASLt {self.cublaslt.version}"] if self.cublaslt else []
        self.identity = f"{device.gpu.name}, {device.gpu.arch}, {' and '.join(library + ['our kernels'] * bool(self.kernels))}"
        self.known, self.recorded = {}, {}  # what a checkpoint recorded and the cache knows; the former alone

    def cache_key(self):
        """What the choices of earlier starts depended on: beside GPU and library, the kernels, and how they were timed."""
        kernels = (kernel_key(name, self.device.gpu.arch, {}) for name in ("matmul_hopper_bf16", "matmul", "gelu", "transpose"))
        return "\n".join([f"algorithms, timed without launching, {self.identity}", *kernels])

    @contextlib.contextmanager
    def search(self):
        """While this lasts, ways are timed where neither the cache nor a checkpoint knows one; then, the cache does. One process after the
        other: two at a time would disturb each other, and choose differently."""
        with self.cache.alone("searching", "another process searches for the fastest matrix products: this one waits for it\n"):
            found = self.cache.find(self.cache_key(), ".json")
            before = json.loads(found[1]) if found else {}
            self.known, self.searching = {**before, **self.known}, True
            try:
                yield
            finally:
                self.searching = False
            together = {**self.known, **self.chosen}
            if together != before:
                self.cache.keep(self.cache_key(), ".json", json.dumps(together, indent=1).encode())

    def notes(self):
        """What a checkpoint records: the same after a start that had to search as after one that knew."""
        return {"products": {"on": self.identity, "algorithms": {key: self.chosen[key] for key in sorted(self.used & self.chosen.keys())}}}

    def recall(self, notes):
        """Use what a checkpoint records; returns False when it is of another GPU or library. Raises ValueError for notes that are
        damaged."""
        recorded = notes.get("products", {})
        if recorded.get("on") != self.identity:
            return False
        for value in recorded["algorithms"].values():
            if not isinstance(value, str):
                np.array([(value,)], lt.matmul_algo_dtype)
        self.recorded = recorded["algorithms"]
        self.known = {**self.known, **self.recorded}
        return True

    def repeats(self):
        """Whether each product that a checkpoint recorded is done as it says, as far as it occurs in this run."""
        return all(self.chosen.get(key, value) == value for key, value in self.recorded.items())

    def scratch(self):
        """The workspace of the stream at hand."""
        return self.workspace[int(self.device.stream is self.device.side)]

    def pick(self, key, ways):
        """Of ways {name: call}, the name of the recorded one, or of the fastest, or, while not searching, of the first."""
        if len(ways) == 1:
            return next(iter(ways))
        if not self.searching:
            self.used.add(key)
        elif key not in self.chosen:
            name = self.known.get(key)
            if name not in ways:
                name = list(ways)[fastest(self.device, list(ways.values()))]
                self.searched += 1
            self.chosen[key] = name
        return self.chosen.get(key, next(iter(ways)))

    def by_shape(self, operation, *arguments, **options):
        """`operation` by what is the fastest at this shape, the last three arguments."""
        key = f"{operation} {' '.join(map(str, arguments[-3:]))} {self.device.precision.products}"
        ways = self.ways_of(operation, *arguments, **options)
        ways[self.pick(key, ways)]()

    def ways_of(self, operation, *arguments, **options):
        """{way: call} of an operation that is no weight gradient."""
        ways = {name: functools.partial(getattr(way, operation), *arguments, **options) for name, way in self.ways.items()}
        if "kernels" in ways and self.ways["kernels"].hopper and operation in ("forward", "backward_inp"):
            ways["kernels narrow"] = functools.partial(ways["kernels"], narrow=True)
        return ways

    def forward(self, name, out, inp, weight, bias, N, C, OC):
        """out (N,OC) = inp (N,C) @ weight (OC,C)^T + bias (None: no bias)."""
        self.by_shape("forward", name, out, inp, weight, bias, N, C, OC)

    def forward_gelu(self, name, out, gelu, inp, weight, bias, N, C, OC):
        """The same, and gelu (N,OC) = GELU(out)."""
        self.by_shape("forward_gelu", name, out, gelu, inp, weight, bias, N, C, OC)

    def backward_inp(self, name, dinp, dout, weight, N, C, OC, scale=1.0):
        """dinp (N,C) = scale * dout (N,OC) @ weight (OC,C)."""
        self.by_shape("backward_inp", name, dinp, dout, weight, N, C, OC, scale=scale)

    def backward_inp_gelu(self, name, dinp, sums, again, dout, weight, inp, N, C, OC):
        """dinp (N,C) = dout (N,OC) @ weight (OC,C) * GELU'(inp); sums (tiles of 128 rows, C) =, for column_sums: of dinp; again (N,C) =
        GELU(inp), if not None."""
        self.by_shape("backward_inp_gelu", name, dinp, sums, again, dout, weight, inp, N, C, OC)

    def backward_weight(self, name, dweight, dout, inp, transposed, N, C, OC, accumulate, scale=1.0):
        """dweight (OC,C) = (or += if accumulate) scale * dout (N,OC)^T @ inp (N,C); transposed: scratch for the smaller of the two."""
        precision, ways = self.device.precision, {}
        for way in self.ways.values():
            ways.update(way.backward_weight(name, dweight, dout, inp, transposed, N, C, OC, scale))
        key = f"backward_weight {N} {C} {OC} {precision.products} to {precision.grads}"
        ways[self.pick(key, {way: functools.partial(call, 0) for way, call in ways.items()})](accumulate)


RESOLUTION = 0.5e-6  # seconds: that of CUDA's events
IN_FRONT = 1.15  # times the least time: whoever took longer at first is not timed again


def fastest(device, calls):
    """Which of the calls takes the least time; the first one, if no other is faster by more than can be told. Those in front are timed
    again, in turns: the clock falls while the GPU gets warm, and a product by up to 15 percent with it."""
    times = [measure(device, call, 1) for call in calls]
    front = {0, *sorted(range(len(calls)), key=times.__getitem__)[:6]}
    front = [i for i in sorted(front) if times[i] <= IN_FRONT * min(times) + RESOLUTION]
    if len(front) == 1:
        return front[0]
    rounds = 7 if min(times) < 2e-3 else 3
    again = np.median([[measure(device, calls[i], 1) for i in front] for _ in range(rounds)], axis=0)
    return front[0 if again[0] <= again.min() + RESOLUTION else int(np.argmin(again))]


class MatmulKernels:
    """The products by matmul_hopper_bf16.cu or matmul.cu, with GELU beside them. A tile of the result is BM rows by `wide` columns, or
    NARROW ones on Hopper, of which 1280 and 1600 are multiples, but not of 192."""

    BM, NARROW = 128, 160
    HOPPER_SHARED = 2 * (4 * (BM + 192) * 64 + 4 * BM * 64)  # bytes of a block: four steps of both operands, four strips of 64 columns

    def __init__(self, device, products):
        self.device, self.products = device, products
        self.hopper = matmul_hopper(device.gpu.arch, device.precision)
        self.wide, self.threads = (192, 384) if self.hopper else (128, 256)
        self.shared = self.HOPPER_SHARED if self.hopper else 3 * 2 * 10240
        for name in kernels_of("matmul", matmul_file(device.gpu.arch, device.precision)):
            device.functions[name].max_dynamic_shared_size_bytes = self.shared
        tiles = WORKSPACE // (4 * self.BM * self.wide)  # whose sums have room in the workspace
        self.done = cp.zeros((2, tiles), np.int32)  # for each stream: parts of a tile that are added up; 0 again after each product

    def launch(self, kernel, name, M, N, K, *arguments, splits=1):
        wide = self.NARROW if kernel.endswith("_narrow") else self.wide
        tiles = blocks(M, self.BM) * blocks(N, wide)
        band = 32 if blocks(N, wide) > 64 else 8  # so many rows of tiles in turn: what they share is in the L2 cache
        grid = min(tiles * splits, self.device.sm_count) if self.hopper else tiles * splits
        threads = self.threads + 128 * (self.hopper and kernel == "matmul_forward_gelu")  # a warpgroup of its own does GELU
        self.device.launch(kernel, (grid,), (threads,), *arguments, M, N, K, band, *([splits] if "weight" in kernel else []),
                           shared=self.shared, flops=2 * M * N * K, label=name)

    def matrix(self, array, rows, columns, box, box_columns=64):
        """An operand or a result as the kernels take it; box, box_columns: what TMA copies at once."""
        return self.device.tensor_map(array.reshape(rows, columns), box, box_columns) if self.hopper else array

    def forward(self, name, out, inp, weight, bias, N, C, OC, narrow=False):
        kernel, wide, strip = ("matmul_forward_narrow", self.NARROW, 32) if narrow else ("matmul_forward", self.wide, 64)
        self.launch(kernel, name, N, OC, C, self.matrix(out, N, OC, self.BM, strip), self.matrix(inp, N, C, self.BM),
                    self.matrix(weight, OC, C, wide), bias)

    def forward_gelu(self, name, out, gelu, inp, weight, bias, N, C, OC):
        self.launch("matmul_forward_gelu", name, N, OC, C, self.matrix(out, N, OC, self.BM), self.matrix(gelu, N, OC, self.BM),
                    self.matrix(inp, N, C, self.BM), self.matrix(weight, OC, C, self.wide), bias)

    def backward_inp(self, name, dinp, dout, weight, N, C, OC, scale=1.0, narrow=False):
        kernel, strip = ("matmul_backward_inp_narrow", 32) if narrow else ("matmul_backward_inp", 64)
        self.launch(kernel, name, N, C, OC, self.matrix(dinp, N, C, self.BM, strip), self.matrix(dout, N, OC, self.BM),
                    self.matrix(weight, OC, C, 64), float(scale))

    def backward_inp_gelu(self, name, dinp, sums, again, dout, weight, inp, N, C, OC):
        self.launch("matmul_backward_inp_gelu", name, N, C, OC, self.matrix(dinp, N, C, self.BM), sums, self.matrix(dout, N, OC, self.BM),
                    self.matrix(weight, OC, C, 64), self.matrix(inp, N, C, self.BM))
        if again is not None:
            gelu_forward(self.device, again, inp)

    def backward_weight(self, name, dweight, dout, inp, transposed, N, C, OC, scale):
        """{way: call(accumulate)}: with the inner dimension in so many parts, where there are few tiles for many multiprocessors, and
        on Hopper in narrow tiles, too."""
        def call(kernel, splits, accumulate):
            done = self.done[int(self.device.stream is self.device.side)]
            self.launch(kernel, name, OC, C, N, self.matrix(dweight, OC, C, self.BM, 32), self.products.scratch(), done,
                        self.matrix(dout, N, OC, 64), self.matrix(inp, N, C, 64), float(scale), int(accumulate), splits=splits)

        few = blocks(OC, self.BM) * blocks(C, self.wide) <= min(2 * self.device.sm_count, self.done.shape[1])
        parts = [splits for splits in (1, 2, 3, 4, 5, 7, 9, 11) if splits == 1 or few and N >= 256 * splits]
        ways = {f"kernels {splits}": functools.partial(call, "matmul_backward_weight", splits) for splits in parts}
        if self.hopper:
            room = blocks(OC, self.BM) * blocks(C, self.NARROW) <= self.done.shape[1]
            ways |= {f"kernels {splits} narrow": functools.partial(call, "matmul_backward_weight_narrow", splits)
                     for splits in parts if splits == 1 or splits < 5 and room}
        return ways


# cuBLASLt is column-major: our (rows, columns) array is its (columns, rows) matrix.
CANDIDATES = 32  # algorithms that a search times
# Tensor cores cut off what an addition leaves below the last bit of a sum: of 50304 TF32 products in one chain, the gradient of lnf, that
# is seen in the losses. So many at most, where they can be halved that often, as Vp and 4C can; such sums are added to each other in
# float32: dev/products.md. (A bfloat16 result hides it.)
LONGEST_CHAIN = 6400
FLOAT32, BFLOAT16, COMPUTE_FLOAT32, COMPUTE_TF32 = 0, 14, 68, 77  # cudaDataType_t, cublasComputeType_t


class CublasLt:
    """The products by the algorithms that cuBLASLt proposes, of which the fastest is searched, and GELU by gelu.cu."""

    def __init__(self, device, products):
        self.device, self.products = device, products
        try:
            self.handle, self.version = lt.create(), lt.get_version()
        except RuntimeError as error:
            raise UserError(f"cuBLASLt cannot be loaded ({str(error).splitlines()[0]}): pip install nvidia-cublas") from None
        self.plans = {}

    def forward(self, name, out, inp, weight, bias, N, C, OC):
        self.multiply(name, out, weight, inp, OC, N, C, "TN", bias=bias)

    def forward_gelu(self, name, out, gelu, inp, weight, bias, N, C, OC):
        self.forward(name, out, inp, weight, bias, N, C, OC)
        gelu_forward(self.device, gelu, out)

    def backward_inp(self, name, dinp, dout, weight, N, C, OC, scale=1.0):
        dout, weight = dout.reshape(N, OC), weight.reshape(OC, C)
        length = OC // self.chains(OC)
        for begin in range(0, OC, length):
            part = slice(begin, begin + length)
            self.multiply(name, dinp, weight[part], dout[:, part], C, N, length, "NN", accumulate=begin > 0, scale=scale, b_stride=OC)

    def chains(self, k):
        """In how many equal parts to add up k products: see LONGEST_CHAIN."""
        limited, parts = self.device.precision.products == "tf32", 1
        while limited and k > parts * LONGEST_CHAIN and k % (8 * parts) == 0:  # rows of 16 bytes in each part
            parts *= 2
        return parts

    def backward_inp_gelu(self, name, dinp, sums, again, dout, weight, inp, N, C, OC):
        self.backward_inp(name, dinp, dout, weight, N, C, OC)
        gelu_backward(self.device, dinp, sums, again, inp, dinp)

    def backward_weight(self, name, dweight, dout, inp, transposed, N, C, OC, scale):
        """{way: call(accumulate)}. In TF32, the smaller operand may be transposed first: see transpose.cu."""
        def direct(accumulate):
            self.multiply(name, dweight, inp, dout, C, OC, N, "NT", accumulate=accumulate, scale=scale)

        def transposed_first(accumulate):
            if C <= OC:
                transpose(self.device, transposed, inp, N, C)
                self.multiply(name, dweight, transposed, dout, C, OC, N, "TT", accumulate=accumulate, scale=scale)
            else:
                transpose(self.device, transposed, dout, N, OC)
                self.multiply(name, dweight, inp, transposed, C, OC, N, "NN", accumulate=accumulate, scale=scale)

        return {"direct": direct} if self.device.precision.bf16 else {"direct": direct, "transposed": transposed_first}

    def multiply(self, name, out, a, b, m, n, k, transposed, bias=None, accumulate=False, scale=1.0, b_stride=None):
        """Column-major out (m,n) = (+=) scale * op(a) (m,k) @ op(b) (k,n) + bias (m,), `transposed` 'T' or 'N' for a and b. b_stride: from
        one column of b as it lies to the next (none: its rows)."""
        to = FLOAT32 if out.dtype == np.float32 else BFLOAT16
        widened = " to float32" if self.device.precision.bf16 and to == FLOAT32 else ""
        b_rows = n if transposed[1] == "T" else k
        part = "" if b_stride in (None, b_rows) else f" of {b_stride}"
        key = f"{transposed} {m} {n} {k}{part} {'bias ' if bias is not None else ''}{self.device.precision.products}{widened}"
        if key not in self.plans:
            epilogue = lt.Epilogue.DEFAULT if bias is None else lt.Epilogue.BIAS
            self.plans[key] = self.describe(m, n, k, transposed, epilogue, to, b_stride or b_rows)
        plan = self.plans[key]
        if bias is not None:
            set_attribute(plan.description, lt.MatmulDescAttribute.BIAS_POINTER, bias.data.ptr)
        call = SimpleNamespace(plan=plan, a=a.data.ptr, b=b.data.ptr, out=out.data.ptr,
                               scale=np.full(1, scale, np.float32), beta=np.full(1, accumulate, np.float32))
        if plan.algorithm is None:
            plan.algorithm = self.choose(key, call)
        if not self.products.searching:
            self.products.used.add(key)
        with self.device.record(name, flops=2 * m * n * k):
            self.run(call, plan.algorithm)

    def describe(self, m, n, k, transposed, epilogue, to, b_stride):
        precision = self.device.precision
        description = lt.matmul_desc_create(COMPUTE_TF32 if precision.tf32 and not precision.bf16 else COMPUTE_FLOAT32, FLOAT32)
        set_attribute(description, lt.MatmulDescAttribute.TRANSA, transposed[0] == "T")
        set_attribute(description, lt.MatmulDescAttribute.TRANSB, transposed[1] == "T")
        set_attribute(description, lt.MatmulDescAttribute.EPILOGUE, int(epilogue))
        a_shape = (k, m) if transposed[0] == "T" else (m, k)
        b_shape = (n, k) if transposed[1] == "T" else (k, n)
        of = BFLOAT16 if precision.bf16 else FLOAT32
        layouts = [lt.matrix_layout_create(type, *shape, stride)
                   for type, shape, stride in ((of, a_shape, a_shape[0]), (of, b_shape, b_stride), (to, (m, n), m))]
        return SimpleNamespace(description=description, layouts=layouts, algorithm=None)

    def run(self, call, algorithm):
        plan, (a, b, d) = call.plan, call.plan.layouts
        lt.matmul(self.handle, plan.description, call.scale.ctypes.data, call.a, a, call.b, b, call.beta.ctypes.data, call.out, d,
                  call.out, d, algorithm.ctypes.data, self.products.scratch().data.ptr, WORKSPACE,
                  self.device.stream.ptr)

    def choose(self, key, call):
        """The recorded algorithm for this shape, or the fastest of cuBLASLt's candidates; while not searching, its first."""
        products = self.products
        if key in products.known and products.searching:
            algorithm = np.array([(products.known[key],)], lt.matmul_algo_dtype)
            if self.runs(call, algorithm):
                products.chosen[key] = products.known[key]
                return algorithm
        proposals = self.propose(call.plan)[: CANDIDATES if products.searching else 1]
        candidates = [candidate for candidate in proposals if self.runs(call, candidate)]
        if not candidates:
            raise UserError(f"cuBLASLt has no algorithm for a product of shape {key} on {products.identity}")
        if not products.searching:
            return candidates[0]
        found = candidates[fastest(self.device, [functools.partial(self.run, call, candidate) for candidate in candidates])]
        products.chosen[key] = found["data_"][0].tolist()
        products.searched += 1
        return found

    def propose(self, plan):
        """cuBLASLt's candidates, most promising first; each as a (1,) array. Those for other shapes than the training step's add up
        each sum as a whole: some of the others split the last tiles' sums, and a row comes out otherwise there than in the tiles before."""
        whole, in_float32, in_any = 0, 2, 7  # cublasLtReductionScheme_t: what the parts of a sum are added up in
        schemes = whole if not self.products.searching else in_float32 if self.device.precision.bf16 else in_any
        preference = lt.matmul_preference_create()
        set_attribute(preference, lt.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES, WORKSPACE, of="preference")
        set_attribute(preference, lt.MatmulPreferenceAttribute.REDUCTION_SCHEME_MASK, schemes, of="preference")
        results, count = np.zeros(CANDIDATES, lt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
        a, b, d = plan.layouts
        lt.matmul_algo_get_heuristic(self.handle, plan.description, a, b, d, d, preference, CANDIDATES, results.ctypes.data,
                                     count.ctypes.data)
        lt.matmul_preference_destroy(preference)
        return [np.ascontiguousarray(results["algo"][i : i + 1]) for i in range(int(count[0])) if results["state"][i] == 0]

    def runs(self, call, algorithm):
        try:
            self.run(call, algorithm)
        except lt.cuBLASLtError:
            return False
        return True


def set_attribute(target, attribute, value, of="desc"):
    """Set an attribute of a cuBLASLt product's description or preference."""
    dtype = getattr(lt, f"get_matmul_{of}_attribute_dtype")(attribute)
    buffer = np.array([value], dtype)
    getattr(lt, f"matmul_{of}_set_attribute")(target, attribute, buffer.ctypes.data, buffer.nbytes)


# ----------------------------------------------------------------------------------------------------------------------
# layers, in network order, with the arguments of train_gpt2.py's; `device` first. `accumulate` (0 or 1) adds to weight gradients
# instead of overwriting them. `bytes` is what has to move through memory, the tensors counted once each.

def size_of(*tensors):
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def encoder_forward(device, out, inp, wte, wpe, B, T, C):
    """out (B,T,C) = wte[inp] + wpe. inp (B,T) int32."""
    device.launch("encoder_forward", encoder_grid(device, B * T, C), (256,), out, inp, wte, wpe, B * T, T, bytes=2 * size_of(out))


def encoder_backward(device, dwte, dwpe, dout, order, first, tokens, accumulate, B, T, C, runs):
    """dwte += the sum of dout over the places of each token; dwpe = (+=) the sum over the batch. order, first, tokens, runs: see
    sort_tokens; runs is for --profile alone."""
    device.launch("encoder_backward_wpe", device.grid(dwpe.size), (256,), dwpe, dout, accumulate, B, T, dwpe.shape[0],
                  bytes=size_of(dout, dwpe))
    groups, spans = encoder_grid(device, B * T, C)
    grid = min(groups, 6 * device.sm_count), spans  # H200, B=64: 60 us, with a block for each group 68
    device.launch("encoder_backward_wte", grid, (256,), dwte, dout, order, first, tokens, B * T,
                  bytes=size_of(dout, order) + 2 * runs * size_of(dwte[0]))


def encoder_grid(device, N, C):
    """A warp for each of N rows and of the equal parts of C channels, as in encoder.cu: a lane has up to 4 packs."""
    return blocks(N, 8), blocks(C, 4 * 32 * device.precision.pack)


def sort_tokens(order, first, tokens, inp):
    """What encoder_backward needs to add up each token's rows in a fixed order; on the host. inp (B,T) -> order (N,): the places b*T+t,
    sorted by token, earlier ones first; first (N+1,): where each token's run of places starts, N after the last one; tokens (N,): of each
    run, 0 after the last one. All int32. Returns how many runs there are."""
    inp = inp.reshape(-1)
    order[:] = np.argsort(inp.astype(np.uint16) if inp.max() < 65536 else inp, kind="stable")  # a radix sort for 16 bits
    ordered = inp[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    first[: starts.size], first[starts.size :] = starts, inp.size
    tokens[: starts.size], tokens[starts.size :] = ordered[starts], 0
    return starts.size


def row_warps(C):
    """Warps that share a row of C elements, as in layernorm.cu."""
    return 1 if C <= 768 else 2 if C <= 1536 else 4 if C <= 3072 else 8


def residual_layernorm_forward(device, residual, out, mean, rstd, inp1, inp2, weight, bias, B, T, C):
    """residual = inp1 + inp2 (both None: none), out = its layernorm. All (B,T,C) but mean, rstd (B,T) and weight, bias (C,); residual and
    inp1 in Precision.stream."""
    grid = (blocks(B * T, 8 // row_warps(C)),)
    device.launch("residual_layernorm_forward", grid, (256,), residual, out, mean, rstd, inp1, inp2, weight, bias, B * T,
                  bytes=size_of(residual, out, inp1, inp2))


def layernorm_backward(device, dinp, sums, dout, inp, weight, mean, rstd, accumulate, B, T, C):
    """dinp (B,T,C) = (+= if accumulate); sums (layernorm_blocks, 3C) =, for column_sums: of dweight, dbias, and the new dinp, over its
    rows; inp in Precision.stream."""
    device.launch("layernorm_backward", (sums.shape[0],), (256,), dinp, sums, dout, inp, weight, mean, rstd, accumulate, B * T,
                  shared=layernorm_shared(C, device.precision, device.gpu.arch),
                  bytes=size_of(dinp, dinp if accumulate else None, dout, inp))


def layernorm_shared(C, precision, arch):
    """Bytes of shared memory for layernorm_backward: where layernorm.cu copies rows AHEAD, two of each operand for each group."""
    number = int(arch[3:].rstrip("a"))
    ahead = precision.bf16 and number not in (86, 89) and number < 120
    return 8 // row_warps(C) * 6 * 2 * C if ahead else 0


def sum_rows(config, B, T, sm_count, pack):
    """How many rows of sums the blocks of each kernel leave."""
    N, C = B * T, config.C
    return SimpleNamespace(
        layernorm=min((2 if pack == 8 else 1) * sm_count, blocks(N, 8 // row_warps(C))),  # what a multiprocessor has room for
        gelu=blocks(N, MatmulKernels.BM),
        attention=B * blocks(T, ATTENTION_ROWS),
    )


def norm_blocks(sm_count):
    """Blocks of global_norm: as many as the GPU holds."""
    return 8 * sm_count


JOB = np.dtype([("partials", "u8"), ("out", "u8", 3), ("width", "i4"), ("rows", "i4"), ("columns", "i4"), ("padding", "i4")])


def sum_jobs(jobs):
    """[(partials (rows, columns), (out, ...))] -> what column_sums takes: one out, or three for the thirds of the columns, which may
    be None."""
    table = np.zeros(len(jobs), JOB)
    for job, (partials, outs) in zip(table, jobs):
        rows, columns = partials.shape
        job["partials"], job["width"], job["rows"], job["columns"] = partials.data.ptr, columns // len(outs), rows, columns
        job["out"][: len(outs)] = [0 if out is None else out.data.ptr for out in outs]
    return SimpleNamespace(count=len(jobs), columns=int(table["columns"].max()), bytes=sum(size_of(partials) for partials, _ in jobs),
                           table=cp.asarray(table.view(np.uint8)))


def column_sums(device, jobs, accumulate):
    """out = (+=) the sums over the rows of partials, for each of sum_jobs' jobs."""
    device.launch("column_sums", (blocks(jobs.columns, 32), jobs.count), (512,), jobs.table, accumulate, bytes=jobs.bytes)


def transpose(device, out, inp, rows, columns):
    """out (columns, rows) = inp (rows, columns)^T."""
    device.launch("transpose", (blocks(columns, 64), blocks(rows, 64)), (256,), out, inp, rows, columns, bytes=2 * size_of(inp))


STATIC_SHARED = 9 << 10  # bytes that attention's kernels declare themselves, at most
ATTENTION_ROWS = 64  # whose sums attention_backward leaves in one row


def attention_launches(config, precision, arch):
    """kernel -> rows and threads of a block, bytes of shared memory, and the arguments that TMA reads, as in the file
    of ATTENTION_FILES."""
    HS, names = config.C // config.NH, KERNELS["attention"]
    hopper = use_hopper(arch, config, precision)
    if precision.bf16 and hopper:
        boxes = {names[0]: 4 + 4 * 4, names[1]: 8 + 8 * 2, names[2]: 8 + 8 * 2}  # of 64 rows of a head, in shared memory
        maps = {names[0]: ((2, 64), (0, 16)), names[1]: ((4, 64), (3, 64), (5, 64), (0, 16)),  # argument, rows of a box:
                names[2]: ((3, 64), (2, 64), (0, 16))}  # inp, dout, out; what is written
        # From so many items a multiprocessor on, one block stays there and takes one after the other; below, the GPU shares them out
        # better: B=4, T=1024 on an H200, backward 0.079 ms instead of 0.105, forward 0.029 instead of 0.026.
        rounds = {names[0]: 1, names[1]: 8, names[2]: 8}
        return {name: SimpleNamespace(rows=128, threads=384, shared=boxes[name] * 64 * HS * 2 + 1024, maps=maps[name], rounds=rounds[name])
                for name in names}
    if precision.bf16:
        forward_rows, dkv_passing = (128, 64) if HS <= 64 else (64, 32)
        sizes = {names[0]: (forward_rows, 64), names[1]: (64, 64), names[2]: (64, dkv_passing)}  # rows of a block, of a passing tile
        return {name: SimpleNamespace(rows=rows, threads=128, shared=4 * passing * (2 * (HS + 8) + 4), maps=())
                for name, (rows, passing) in sizes.items()}
    if hopper:
        tiles = {"attention_forward": 3 * 2, "attention_backward_dquery": 3 * 3 + 2, "attention_backward_dkv": 2 * 4 + 2}
        return {name: SimpleNamespace(rows=128, threads=384, shared=count * 64 * 64 * 4 + 1024, maps=()) for name, count in tiles.items()}
    passing = 64 if HS <= 64 and arch != "sm_75" else 32
    shared = 4 * (4 * passing * blocks(HS, 32) * 32 + 4 * passing)
    rows = {"attention_forward": 128 if HS <= 64 and precision.tf32 else 64, "attention_backward_dquery": 64, "attention_backward_dkv": 64}
    return {name: SimpleNamespace(rows=count, threads=128, shared=shared, maps=()) for name, count in rows.items()}


def attention_flops(B, T, C, products):
    """Of so many (T,T) products for each head; half of each is masked."""
    return products * 2 * B * C * T * (T + 1) // 2


def attention_forward(device, out, lse, inp, config, B, T):
    """Causal attention: out (B,T,C) =, lse (B,NH,T) =; inp (B,T,3C)."""
    launch_attention(device, "attention_forward", (out, lse, inp), config, B, T, products=2, bytes=size_of(out, inp))


def attention_backward(device, dinp, D, sums, dout, inp, out, lse, config, B, T):
    """dinp (B,T,3C) =; sums (B * tiles, 3C) =, for column_sums: of dinp; D (B,NH,T): scratch; dout, out (B,T,C)."""
    launch_attention(device, "attention_backward_dquery", (dinp, D, sums, dout, inp, out, lse), config, B, T, products=3,
                     bytes=size_of(dout, inp, out) + size_of(dinp) // 3)
    launch_attention(device, "attention_backward_dkv", (dinp, sums, dout, inp, lse, D), config, B, T, products=4,
                     bytes=size_of(dout, inp) + size_of(dinp) // 3 * 2)


def launch_attention(device, name, arguments, config, B, T, products, bytes):
    launch, extra = device.attention[name], ()
    grid = config.NH, blocks(T, launch.rows), B
    if launch.maps:
        items = math.prod(grid)
        grid = (device.sm_count if items >= launch.rounds * device.sm_count else items,)
        extra = B, *(device.tensor_map(arguments[i], rows, config.C // config.NH) for i, rows in launch.maps)
    device.launch(name, grid, (launch.threads,), *arguments, T, *extra, shared=launch.shared, bytes=bytes,
                  flops=attention_flops(B, T, config.C, products))


def gelu_forward(device, out, inp):
    """out (B,T,4C) = GELU(inp)."""
    device.launch("gelu_forward", device.grid(out.size), (256,), out, inp, out.size // out.shape[-1], bytes=size_of(out, inp))


def gelu_backward(device, dinp, sums, out, inp, dout):
    """dinp (B,T,4C) = dout * gelu'(inp), dinp may be dout; sums (blocks, 4C) =, for column_sums: of dinp; out = GELU(inp) again, if
    not None."""
    OC = dinp.shape[-1]
    device.launch("gelu_backward", (blocks(OC, 32 * device.precision.pack), sums.shape[0]), (32, 8), dinp, sums, out, inp, dout,
                  dinp.size // OC, bytes=size_of(dinp, inp, dout, out))


def classifier(device, losses, logits, targets, dloss, write_gradient, B, T):
    """losses (B,T) = cross entropy of the logits (B,T,Vp), which become their gradient times dloss; targets (B,T) int32."""
    grid, shared = B * T, 0
    if device.rows_on_chip:
        grid, shared = min(device.rows_on_chip * device.sm_count, B * T), logits.nbytes // (B * T)
    threads = classifier_threads(device.rows_on_chip, device.precision)
    device.launch("classifier", (grid,), (threads,), losses, logits, targets, float(dloss), int(write_gradient), B * T, shared=shared,
                  bytes=size_of(logits) * (1 + write_gradient))


def rows_on_chip(config, precision, arch):
    """How many rows of logits classifier.cu keeps in a multiprocessor's shared memory, one for each of its blocks there."""
    row = config.Vp * (2 if precision.bf16 else 4)
    return 0 if arch != "sm_90a" or row > 220 << 10 else 2 if row <= 110 << 10 else 1


def classifier_threads(rows, precision):
    """Of a block of classifier.cu, with so many rows_on_chip."""
    return 1024 // rows if rows else 256 if precision.bf16 else 1024


# ----------------------------------------------------------------------------------------------------------------------
# model


class GPT2:
    """A model, its gradients and its optimizer on the GPU. Everything is allocated here, once, but for a table of sums that the first
    backward pass makes; smaller batches and shorter sequences use the start of the same buffers."""

    def __init__(self, device, config, params, settings):
        """params: float32 Tensors on the host. Raises UserError when it does not all fit into the GPU's free memory."""
        self.device, self.config, self.settings = device, config, settings
        self.micro_steps, self.shapes = settings.micro_steps, {}
        self.want_norm = bool(settings.grad_clip or settings.output_dir)
        check_memory(device, config, settings)
        table, precision = parameter_table(config), device.precision
        with device.stream:
            self.params, self.grads = (allocate(parameter_table(config, dtype), cp) for dtype in (precision.dtype, precision.grads))
            self.m, self.v = allocate(table, cp), allocate(table, cp)
            self.master = allocate(table, cp) if settings.master else None
            self.set_params(params)
            B, T, recompute = settings.B, settings.T, settings.recompute
            phases = phase_tables(config, B, T, recompute, device.sm_count, precision.dtype)
            self.activations = cp.empty(table_bytes(activation_table(config, B, T, recompute, precision.dtype), ALIGN), np.uint8)
            self.phases = cp.empty(max(table_bytes(phase, ALIGN) for phase in phases.values()), np.uint8)
            self.streams = cp.empty(table_bytes(stream_table(config, B, T, precision.dtype), ALIGN), np.uint8)
            device.products.workspace = cp.empty((2, WORKSPACE), np.uint8)
            self.batch = allocate(batch_table(B, T, self.micro_steps), cp)
            self.control = cp.zeros(5, np.int64)  # struct Control of update.cu; [0] is the number of updates done
            self.loss = cp.zeros(1, np.float32)
            self.norm_partials = cp.zeros(norm_blocks(device.sm_count) if self.want_norm else 0, np.float32)
            spans = decay_spans(table, settings)
            self.stops = cp.asarray(np.array([stop for _, stop, _ in spans], np.int64))
            self.decays = cp.asarray(np.array([decay for _, _, decay in spans], np.float32))
        self.param_layers = [layer(self.params, l) for l in range(config.L)]
        self.grad_layers = [layer(self.grads, l) for l in range(config.L)]

        # Two halves of pinned memory: the host fills one while the GPU works on the step of the other.
        table = batch_table(B, T, self.micro_steps)
        self.pinned = pinned_array(2 * table_bytes(table))
        halves = self.pinned.reshape(2, -1)
        self.staged = [views(table, halves[0]), views(table, halves[1])]
        self.reports = pinned_array(16).view(np.float32).reshape(2, 2)  # loss, norm
        self.started, self.finished = [cp.cuda.Event() for _ in range(2)], [cp.cuda.Event() for _ in range(2)]
        self.launches, self.graph, self.runs = 0, None, 0

    # -- views of the buffers, for the batch at hand

    def shape(self, B, T):
        """The tables' views for batches of (B, T), made once: acts, layers (forward), backward_layers, forward, classifier, backward."""
        if (B, T) not in self.shapes:
            config, recompute, dtype = self.config, self.settings.recompute, self.device.precision.dtype
            phases = phase_tables(config, B, T, recompute, self.device.sm_count, dtype)
            s = SimpleNamespace(B=B, T=T, acts=views(activation_table(config, B, T, recompute, dtype), self.activations, ALIGN))
            for phase, table in phases.items():
                setattr(s, phase, views(table, self.phases, ALIGN))
            s.streams = views(stream_table(config, B, T, dtype), self.streams, ALIGN)
            s.layers = [layer(s.acts, l) for l in range(config.L)]
            s.backward_layers = [layer(s.acts, l) for l in range(config.L)]
            for name in RECOMPUTED[recompute]:
                for a, b in zip(s.layers, s.backward_layers):
                    setattr(a, name, getattr(s.forward, name))
                    setattr(b, name, getattr(s.backward, name))
            s.jobs = None  # of the backward pass, which only training's shape has
            self.shapes[B, T] = s
        return self.shapes[B, T]

    def jobs(self, scratch):
        """What column_sums adds up at the end of a backward pass: gradients of biases and of layernorms. A layernorm's third sum
        is the gradient of the bias of the projection that its input came from."""
        g, jobs = self.grad_layers, [(scratch.lnf_sums, (self.grads.lnfw, self.grads.lnfb, self.grad_layers[-1].fcprojb))]
        for l in reversed(range(self.config.L)):
            before = g[l - 1].fcprojb if l > 0 else None
            jobs += [(scratch.gelu_sums[l], (g[l].fcb,)), (scratch.ln2_sums[l], (g[l].ln2w, g[l].ln2b, g[l].attprojb)),
                     (scratch.attention_sums[l], (g[l].qkvb,)), (scratch.ln1_sums[l], (g[l].ln1w, g[l].ln1b, before))]
        return sum_jobs(jobs)

    # -- forward and backward

    def trunk(self, inputs, s):
        """Token ids (B, T) on the GPU -> s.acts.lnf (B, T, C): all but the classifier."""
        device, config, params, acts = self.device, self.config, self.params, s.acts
        products, branch = device.products, s.forward.branch
        B, T, C, N = s.B, s.T, config.C, s.B * s.T

        encoder_forward(device, acts.encoded, inputs, params.wte, params.wpe, B, T, C)
        a, p, residual = s.layers[0], self.param_layers[0], acts.encoded
        residual_layernorm_forward(device, None, a.ln1, a.ln1_mean, a.ln1_rstd, residual, None, p.ln1w, p.ln1b, B, T, C)
        for l in range(config.L):
            p, a = self.param_layers[l], s.layers[l]
            products.forward("matmul qkv", a.qkv, a.ln1, p.qkvw, p.qkvb, N, C, 3 * C)
            attention_forward(device, a.atty, a.lse, a.qkv, config, B, T)
            products.forward("matmul attproj", branch, a.atty, p.attprojw, p.attprojb, N, C, C)
            residual_layernorm_forward(device, a.residual2, a.ln2, a.ln2_mean, a.ln2_rstd, residual, branch, p.ln2w, p.ln2b, B, T, C)
            products.forward_gelu("matmul fc", a.fch, a.fch_gelu, a.ln2, p.fcw, p.fcb, N, C, 4 * C)
            products.forward("matmul fcproj", branch, a.fch_gelu, p.fcprojw, p.fcprojb, N, 4 * C, C)
            residual = a.residual3
            if l + 1 < config.L:
                a2, p2 = s.layers[l + 1], self.param_layers[l + 1]
                normed = (a2.ln1, a2.ln1_mean, a2.ln1_rstd), (p2.ln1w, p2.ln1b)
            else:
                normed = (acts.lnf, acts.lnf_mean, acts.lnf_rstd), (params.lnfw, params.lnfb)
            residual_layernorm_forward(device, residual, *normed[0], a.residual2, branch, *normed[1], B, T, C)

    def classify(self, targets, s, train, accumulate=0):
        """self.loss = (+=) the mean of s.acts.losses; with `train`, the logits' gradient takes their place. Returns an event for the loss,
        which is made aside."""
        device, config, N = self.device, self.config, s.B * s.T
        logits = s.classifier.logits
        device.products.forward("matmul logits", logits, s.acts.lnf, self.params.wte, None, N, config.C, config.Vp)
        share = 1.0 / (N * self.micro_steps) if train else 1.0 / N
        classifier(device, s.acts.losses, logits, targets, near_power_of_2(share), train, s.B, s.T)
        return device.aside(lambda: device.launch("loss_mean", (1,), (1024,), self.loss, s.acts.losses, share, accumulate, N))

    def rest_of_share(self, N):
        """What dlogits lack: they carry the power of 2 next to each token's share of the loss, 1 / (N * micro_steps), because the share
        itself would be rounded to the run's dtype, the same way in each of them (1/51 is 0.2 percent off in bfloat16)."""
        share = 1.0 / (N * self.micro_steps)
        return share / near_power_of_2(share)

    def backward(self, micro_step, s):
        """grads = (+= after the first micro step) the gradients of the last batch, whose dlogits are in place of the logits."""
        device, config, grads, acts, batch = self.device, self.config, self.grads, s.acts, self.batch
        products, scratch, more = device.products, s.backward, int(micro_step > 0)
        dresidual, dbranch, transposed = s.streams.dresidual, s.streams.dbranch, getattr(s.streams, "transposed", None)
        B, T, C, N = s.B, s.T, config.C, s.B * s.T

        dlogits, rest = s.classifier.logits, self.rest_of_share(N)
        products.backward_inp("matmul logits dinp", dbranch, dlogits, self.params.wte, N, C, config.Vp, scale=rest)
        products.backward_weight("matmul logits dweight", grads.wte, dlogits, acts.lnf, transposed, N, C, config.Vp, more, scale=rest)
        layernorm_backward(device, dresidual, scratch.lnf_sums, dbranch, s.layers[-1].residual3, self.params.lnfw, acts.lnf_mean,
                           acts.lnf_rstd, 0, B, T, C)
        dfch_free = dqkv_free = None  # events: the products aside that read dfch and dqkv of the layer before are done
        for l in reversed(range(config.L)):
            p, a, g = self.param_layers[l], s.backward_layers[l], self.grad_layers[l]
            residual = acts.encoded if l == 0 else s.layers[l - 1].residual3
            again = {name: getattr(a, name) for name in RECOMPUTED[self.settings.recompute]}

            def weight(name, dweight, dout, inp, C, OC):
                """The gradient of a weight, on the second stream; nothing waits for it but whoever overwrites dout or inp."""
                return device.aside(lambda: products.backward_weight(name, dweight, dout, inp, transposed, N, C, OC, more))

            device.wait(dfch_free)
            products.backward_inp_gelu("matmul fcproj dinp", scratch.dfch, scratch.gelu_sums[l], again.get("fch_gelu"), dresidual,
                                       p.fcprojw, a.fch, N, 4 * C, C)
            dresidual_free = weight("matmul fcproj dweight", g.fcprojw, dresidual, a.fch_gelu, 4 * C, C)
            if "ln2" in again:
                residual_layernorm_forward(device, None, a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, None, p.ln2w, p.ln2b, B, T, C)
            dfch_free = weight("matmul fc dweight", g.fcw, scratch.dfch, a.ln2, C, 4 * C)
            products.backward_inp("matmul fc dinp", dbranch, scratch.dfch, p.fcw, N, C, 4 * C)
            device.wait(dresidual_free)
            layernorm_backward(device, dresidual, scratch.ln2_sums[l], dbranch, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd, 1, B, T, C)
            dresidual_free = weight("matmul attproj dweight", g.attprojw, dresidual, a.atty, C, C)
            products.backward_inp("matmul attproj dinp", dbranch, dresidual, p.attprojw, N, C, C)
            device.wait(dqkv_free)
            attention_backward(device, scratch.dqkv, scratch.D, scratch.attention_sums[l], dbranch, a.qkv, a.atty, a.lse, config, B, T)
            if "ln1" in again:
                residual_layernorm_forward(device, None, a.ln1, a.ln1_mean, a.ln1_rstd, residual, None, p.ln1w, p.ln1b, B, T, C)
            dqkv_free = weight("matmul qkv dweight", g.qkvw, scratch.dqkv, a.ln1, C, 3 * C)
            products.backward_inp("matmul qkv dinp", dbranch, scratch.dqkv, p.qkvw, N, C, 3 * C)
            device.wait(dresidual_free)
            layernorm_backward(device, dresidual, scratch.ln1_sums[l], dbranch, residual, p.ln1w, a.ln1_mean, a.ln1_rstd, 1, B, T, C)
        s.jobs = s.jobs or self.jobs(scratch)
        column_sums(device, s.jobs, more)
        encoder_backward(device, grads.wte, grads.wpe, dresidual, batch.order[micro_step], batch.first[micro_step],
                         batch.tokens[micro_step], more, B, T, C, self.runs)
        device.wait(dqkv_free)  # the last that was put aside: all of it is done

    def update(self):
        """AdamW over the flat buffers, and the report to the host."""
        device, settings = self.device, self.settings
        params, m, v, grads = (flat(tensors) for tensors in (self.params, self.m, self.v, self.grads))
        master = flat(self.master) if self.master else None
        count, partials = params.size, self.norm_partials
        if self.want_norm:
            device.launch("global_norm", (partials.size,), (256,), partials, grads, np.int64(count), bytes=grads.nbytes)
        device.launch("prepare_update", (1,), (256,), self.control, pointer(self.reports), self.loss, partials, self.batch.learning_rate,
                      np.float64(settings.beta1), np.float64(settings.beta2), np.float64(settings.eps), settings.grad_clip, partials.size)
        device.launch("adamw_update", (blocks(count, 4 * 256),), (256,), params, master, m, v, grads, self.control,
                      self.stops, self.decays, settings.beta2, 1.0 - settings.beta1, 1.0 - settings.beta2, settings.stochastic_rounding,
                      np.int64(count), bytes=size_of(params, grads, m, m, v, v) + (size_of(master, master) or params.nbytes))

    def micro_step(self, micro_step, here=None):
        """Forward and backward of one batch that lies in self.batch, all but `inputs` from the event `here` on."""
        s = self.shape(self.settings.B, self.settings.T)
        self.trunk(self.batch.inputs[micro_step], s)
        self.device.wait(here)
        self.classify(self.batch.targets[micro_step], s, train=1, accumulate=int(micro_step > 0))
        self.backward(micro_step, s)

    # -- a training step, of which the GPU does everything

    def step_kernels(self):
        inputs = 1 + self.batch.inputs.size  # words: the learning rate and these come first
        self.copy_batch("batch inputs", 0, inputs)
        rest = self.device.aside(lambda: self.copy_batch("batch rest", inputs))  # beside the forward pass
        for micro_step in range(self.micro_steps):
            self.micro_step(micro_step, rest)
        self.update()

    def copy_batch(self, label, begin, end=None):
        """Bring words begin .. end - 1 (none: all from begin on) from the half of the pinned memory whose turn it is."""
        words = self.batch.buffer.nbytes // 4
        end = end or words
        self.device.launch("begin_step", (blocks(end - begin, 256),), (256,), self.batch.buffer, pointer(self.pinned), self.control, words,
                           begin, end, label=label)

    def prepare(self):
        """Choose the products' algorithms on a batch of random tokens, and capture the step as a graph. Changes no weight."""
        settings, rng = self.settings, np.random.default_rng(0)
        with self.device.stream:
            batch = rng.integers(0, self.config.V, (2, settings.B, settings.T), dtype=np.int32)
            self.stage(self.staged[0], [batch] * self.micro_steps, 0.0)
            copy_to_gpu(self.batch.buffer, self.staged[0].buffer)
            with self.device.products.search():
                self.micro_step(0)
            self.device.stream.synchronize()
            if settings.graph:
                self.device.stream.begin_capture()
                self.step_kernels()
                self.graph = self.device.stream.end_capture()
                self.graph.upload(self.device.stream)

    def stage(self, half, batches, learning_rate):
        """Lay micro_steps batches (inputs, targets) into half of the pinned memory."""
        half.learning_rate[0] = learning_rate
        for i, (inputs, targets) in enumerate(batches):
            half.inputs[i], half.targets[i] = inputs, targets
            self.runs = sort_tokens(half.order[i], half.first[i], half.tokens[i], inputs)

    def begin_step(self, batches, learning_rate):
        """Start one update and return its number; the GPU may still be at the one before."""
        half = self.launches % 2
        self.finished[half].synchronize()  # the update before the last one, which read this half
        self.stage(self.staged[half], batches, learning_rate)
        with self.device.stream as stream:
            self.started[half].record(stream)
            if self.graph:
                self.graph.launch(stream)
            else:
                self.step_kernels()
            self.finished[half].record(stream)
        self.launches += 1
        return self.launches - 1

    def end_step(self, number):
        """Wait for an update of begin_step's, one of the last two: (loss, gradient norm or None, milliseconds)."""
        half = number % 2
        self.finished[half].synchronize()
        loss, norm = self.reports[half].tolist()
        return loss, norm if self.want_norm else None, cp.cuda.get_elapsed_time(self.started[half], self.finished[half])

    # -- what reports and checkpoints need

    def forward(self, inputs, targets):
        """inputs, targets (B, T) integer ids on the host -> the mean loss, a float."""
        B, T = inputs.shape
        with self.device.stream:
            s = self.shape(B, T)
            on_gpu = [copy_to_gpu(room.reshape(-1)[: B * T], np.ascontiguousarray(ids, np.int32).reshape(-1))
                      for room, ids in ((self.batch.inputs, inputs), (self.batch.targets, targets))]
            self.trunk(on_gpu[0], s)
            self.device.wait(self.classify(on_gpu[1], s, train=0))
            return float(self.loss.get()[0])

    def next_token_probs(self, tokens):
        """tokens (T,) -> the distribution (V,) of the token that follows; one forward pass over T, rounded up to a multiple of
        64 so that few different shapes occur: what stands after a position does not change it."""
        V, C, Vp, count = self.config.V, self.config.C, self.config.Vp, tokens.size
        T = min(blocks(count, 64) * 64, self.settings.T)
        padded = np.zeros(T, np.int32)
        padded[:count] = tokens
        with self.device.stream:
            s = self.shape(1, T)
            self.trunk(copy_to_gpu(self.batch.inputs.reshape(-1)[:T], padded), s)
            logits = s.classifier.logits.reshape(-1)[:Vp]
            self.device.products.forward("matmul logits", logits, s.acts.lnf[0, count - 1], self.params.wte, None, 1, C, Vp)
            row = to_float32(logits[:V])
        probs = np.empty(V, np.float32)
        train_gpt2.softmax_forward(probs, row, 1, 1, V)
        return probs

    def to_host(self, tensors):
        """A float32 copy of params, grads, m, v or master on the host, as Tensors."""
        with self.device.stream:
            return views(parameter_table(self.config), to_float32(flat(tensors)).view(np.uint8))

    def set_params(self, params):
        """Take over weights from the host, float32 Tensors; bfloat16 ones are rounded from them."""
        if not self.device.precision.bf16:
            copy_to_gpu(self.params.buffer, params.buffer)
            return
        exact = self.master or self.m
        copy_to_gpu(exact.buffer, params.buffer)
        rounded, count = flat(self.params), flat(self.params).size
        self.device.launch("round_weights", self.device.grid(count), (256,), rounded, flat(exact), np.int64(count))
        if exact is self.m:
            self.m.buffer.fill(0)

    def set_state(self, params, moments, step):
        """Go on from a checkpoint: Tensors on the host; params are its master weights, if it has any. A bfloat16 model keeps the
        weights that it was made with, which need not be those rounded to nearest."""
        with self.device.stream:
            exact = self.master if self.device.precision.bf16 else self.params
            for ours, theirs in zip((self.m, self.v, exact), (*moments, params)):
                if ours:
                    copy_to_gpu(ours.buffer, theirs.buffer)
            copy_to_gpu(self.control[:1], np.array([step], self.control.dtype))


def to_float32(array):
    """An array of the GPU's on the host; bfloat16 bits and halves as float32."""
    array = array.get()
    if array.dtype == np.float16:
        return array.astype(np.float32)
    return bf16_to_float32(array) if array.dtype == np.uint16 else array


def copy_to_gpu(target, source):
    """Copy a host array into an array on the GPU of the same size; returns the latter."""
    target.view(np.uint8).reshape(-1).set(source.view(np.uint8).reshape(-1))
    return target


def pinned_array(size):
    """Bytes of host memory that the GPU reads and writes over the bus, at the same address."""
    return np.frombuffer(cp.cuda.alloc_pinned_memory(size), np.uint8, size)


def pointer(array):
    """The address of a pinned array, as a kernel's argument."""
    return np.uint64(array.ctypes.data)


GRID_LAYERS = 65535  # of a CUDA grid: attention has one for each sequence, transpose one for each 64 places


def check_memory(device, config, settings):
    """Print what will be allocated; raise UserError that says how much is needed, how much is free, and what would fit."""
    plan = memory_plan(config, settings, device.sm_count)
    needed, free = sum(size for size, _ in plan), free_memory()
    if needed > free:
        largest = min(largest_batch(config, settings, device.sm_count, free), GRID_LAYERS)
        mend = f"the largest batch that fits is -b {largest}" if largest else "not even -b 1 fits: take a smaller -t or model"
        least = dataclasses.replace(settings, recompute=2)
        if sum(size for size, _ in memory_plan(config, least, device.sm_count)) <= free:
            mend += ", or pass --recompute 2"
        raise UserError(f"-b {settings.B} -t {settings.T} needs {needed + RESERVE >> 20} MiB of GPU memory,"
                        f" {free + RESERVE >> 20} MiB are free; {mend}")
    if settings.B > GRID_LAYERS:
        raise UserError(f"-b {settings.B}: expected at most {GRID_LAYERS}, the layers of a CUDA grid: gather more with -d")
    if settings.B * settings.T > 64 * GRID_LAYERS:
        raise UserError(f"-b {settings.B} -t {settings.T}: {settings.B * settings.T} tokens, expected at most {64 * GRID_LAYERS}, 64 for"
                        " each layer of a CUDA grid: take a smaller -b, and gather more with -d")
    for size, what in plan:
        print(f"allocated {blocks(size, 1 << 20)} MiB for {what}")


RESERVE = 256 << 20  # bytes beside the plan: for cuBLASLt's kernels, the graph, small tables and rounding up


def free_memory():
    """Bytes that the plan may use."""
    return cp.cuda.runtime.memGetInfo()[0] - RESERVE


def largest_batch(config, settings, sm_count, free):
    """The largest B up to settings.B for which `free` bytes are enough; 0 when there is none."""
    def too_large(B):
        return sum(size for size, _ in memory_plan(config, dataclasses.replace(settings, B=B), sm_count)) > free

    return bisect.bisect_left(range(1, settings.B + 1), True, key=too_large)


# ----------------------------------------------------------------------------------------------------------------------
# check and profile


def check(device, config, params, settings):
    """Print one row for each gradient, and each activation that settings.recompute keeps, of one random batch, the GPU beside
    train_gpt2.py, and after them what went wrong first, and in which kernel; True when all agree.

    A row may be off by this fraction of its largest value: float32 sums in another order stay below 1e-4 through all
    layers, TF32 operands keep 11 bits, bfloat16 tensors 8. In bfloat16, both start from the rounded weights.
    """
    tolerance = {"bf16": 5e-2, "tf32": 1e-2, "float32": 1e-4}[settings.precision.products]
    if settings.precision.bf16:
        params = views(params.table, bf16_to_float32(bf16_bits(flat(params))).view(np.uint8))
    B, T, V = settings.B, settings.T, config.V
    rng = np.random.default_rng(0)
    inputs, targets = (rng.integers(0, V, (B, T), dtype=np.int32) for _ in range(2))
    got = run_on_gpu(device, config, params, inputs, targets, settings)
    expected = {name: row for name, row in run_on_cpu(config, params, inputs, targets).items() if name in got}
    allowed = {name: tolerance * float(np.abs(reference).max()) for name, reference in expected.items()}
    red = [name for name, reference in expected.items() if not check_tensor(name, got[name], reference, allowed[name])]
    unseen = []  # what made rows that are not kept, since the last one that is
    for name, l, kernels in order_of_computation(config.L) if red else ():
        unseen.append(kernels)
        if name not in expected:
            continue
        pair = [rows[name] if l is None else rows[name][l] for rows in (got, expected)]
        if not check_tensor(name, *pair, allowed[name], print_row=False):
            print(f"first wrong: {name}{'' if l is None else f' of layer {l}'}, from {' or '.join(unseen)}")
            break
        unseen.clear()
    print(f"overall okay: {int(not red)}")
    return not red


LAYERNORM_FORWARD = "residual_layernorm_forward"
FORWARD_ORDER = (  # of a layer: row, what makes it
    ("ln1_mean", LAYERNORM_FORWARD), ("ln1_rstd", LAYERNORM_FORWARD), ("ln1", LAYERNORM_FORWARD), ("qkv", "matmul qkv"),
    ("atty", "attention_forward"), ("lse", "attention_forward"), ("residual2", f"matmul attproj or {LAYERNORM_FORWARD}"),
    ("ln2_mean", LAYERNORM_FORWARD), ("ln2_rstd", LAYERNORM_FORWARD), ("ln2", LAYERNORM_FORWARD), ("fch", "matmul fc"),
    ("fch_gelu", "gelu_forward or matmul fc"), ("residual3", f"matmul fcproj or {LAYERNORM_FORWARD}"),
)
BACKWARD_ORDER = (
    ("dfcprojb", "layernorm_backward"), ("dfcprojw", "matmul fcproj dweight"), ("dfcb", "matmul fcproj dinp or gelu_backward"),
    ("dfcw", "matmul fc dweight"), ("dln2b", "matmul fc dinp or layernorm_backward"), ("dln2w", "layernorm_backward"),
    ("dattprojb", "layernorm_backward"), ("dattprojw", "matmul attproj dweight"), ("dqkvb", "matmul attproj dinp or attention_backward"),
    ("dqkvw", "matmul qkv dweight"), ("dln1b", "matmul qkv dinp or layernorm_backward"), ("dln1w", "layernorm_backward"),
)


def order_of_computation(L):
    """(row, layer or None, the kernels between it and the rows before) of one forward and backward pass of L layers."""
    yield "encoded", None, "encoder_forward"
    for l in range(L):
        yield from ((name, l, kernels) for name, kernels in FORWARD_ORDER)
    yield from ((name, None, LAYERNORM_FORWARD) for name in ("lnf_mean", "lnf_rstd", "lnf"))
    yield "logits", None, "matmul logits"
    yield from ((name, None, "classifier") for name in ("losses", "dlogits"))
    yield from (("dlnfb", None, "matmul logits dinp or layernorm_backward"), ("dlnfw", None, "layernorm_backward"))
    for l in reversed(range(L)):
        yield from ((name, l, kernels) for name, kernels in BACKWARD_ORDER)
    yield from (("dwpe", None, "layernorm_backward or encoder_backward"), ("dwte", None, "matmul logits dweight or encoder_backward"))


def run_on_cpu(config, params, inputs, targets):
    """{row: array} of one forward and backward pass of train_gpt2.py."""
    B, T = inputs.shape
    print(f"train_gpt2.py computes B={B} T={T} ...", file=sys.stderr)
    model = train_gpt2.GPT2(config, params)
    model.allocate_activations(B, T)
    model.allocate_training(B, T)
    model.forward(inputs, targets)
    acts, rows = model.acts, {}
    for name in activation_table(config, B, T, recompute=0, dtype="float32"):
        if name == "lse":
            largest = acts.preatt.max(axis=-1)
            rows[name] = largest + np.log(np.exp(acts.preatt - largest[..., None]).sum(axis=-1))
        else:
            rows[name] = getattr(acts, name)
    rows["logits"] = acts.logits.copy()
    model.backward()
    rows["dlogits"] = acts.logits
    return {**rows, **{f"d{name}": getattr(model.grads, name) for name in model.grads.table}}


def run_on_gpu(device, config, params, inputs, targets, settings):
    """{row: array} of one forward and backward pass of this file, by the products that training would choose."""
    model = GPT2(device, config, params, dataclasses.replace(settings, graph=0))
    model.prepare()
    poison(model)
    model.forward(inputs, targets)
    s = model.shape(*inputs.shape)
    rows = {"logits": to_float32(s.classifier.logits[..., : config.V])}
    model.stage(model.staged[0], [(inputs, targets)], 0.0)
    with device.stream:
        copy_to_gpu(model.batch.buffer, model.staged[0].buffer)
        poison(model)
        model.trunk(model.batch.inputs[0], s)
        model.classify(model.batch.targets[0], s, train=1)
        rows["dlogits"] = to_float32(s.classifier.logits[..., : config.V]) * np.float32(model.rest_of_share(inputs.size))
        model.backward(0, s)
        rows.update({name: to_float32(getattr(s.acts, name)) for name in s.acts.table})
    grads = model.to_host(model.grads)
    return {**rows, **{f"d{name}": getattr(grads, name) for name in grads.table}}


def poison(model):
    """NaN into every activation and gradient: what a kernel fails to write, a check finds."""
    with model.device.stream:
        for buffer in (model.activations, model.phases, model.streams, model.grads.buffer):
            buffer.data.memset_async(0xFF, buffer.nbytes)  # of whatever type


class Profile:
    """Times every launch with a pair of events, less what a pair takes with nothing between its two (H200: 1.3 us)."""

    def __init__(self, device):
        self.stream, self.launches = device.stream, []
        self.nothing = 1000 * min(measure(device, lambda: None) for _ in range(5))  # ms; a busy host makes it longer, never shorter

    @contextlib.contextmanager
    def record(self, name, bytes, flops):
        start, end = cp.cuda.Event(), cp.cuda.Event()
        cp.cuda.nvtx.RangePush(name)
        start.record(self.stream)
        yield
        end.record(self.stream)
        cp.cuda.nvtx.RangePop()
        self.launches.append((name, start, end, bytes, flops))

    def rows(self, steps):
        """kernel -> calls, ms, bytes and flops of one step, the longest first."""
        self.stream.synchronize()
        rows = {}
        for name, start, end, bytes, flops in self.launches:
            row = rows.setdefault(name, SimpleNamespace(calls=0, ms=0.0, bytes=0, flops=0))
            row.calls += 1 / steps
            row.ms += max(0.0, cp.cuda.get_elapsed_time(start, end) - self.nothing) / steps
            row.bytes += bytes / steps
            row.flops += flops / steps
        return dict(sorted(rows.items(), key=lambda item: -item[1].ms))


def time_kernels(model, steps):
    """Time `steps` steps launch by launch, on random tokens; the learning rate is 0. Returns Profile.rows. The GPU waits until a step is
    launched, as far as the driver's queue goes (some 300 kernels): between a kernel's two events, it must not wait for Python."""
    device, settings = model.device, model.settings
    rng = np.random.default_rng(0)
    model.graph = None
    launching = 0.0  # seconds
    for step in range(4 + steps):
        if step in (3, 4):  # warm; one more, which shows how long launching takes
            device.profile = Profile(device)
        batches = [rng.integers(0, model.config.V, (2, settings.B, settings.T), dtype=np.int32) for _ in range(model.micro_steps)]
        device.functions["hold"]((1,), (1,), (np.int32(1e6 * launching),), stream=device.stream)
        begin = time.perf_counter()
        number = model.begin_step(batches, 0.0)
        if step == 3:
            launching = time.perf_counter() - begin
        model.end_step(number)
    finished, device.profile = device.profile, None
    return finished.rows(steps)


def profile(model, steps):
    """Print where the time of a step goes."""
    device = model.device
    bandwidth, peak = measure_copy(device), measure_product(device)  # bytes a second, operations a second
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s, large matrix product {peak / 1e12:.0f} TFLOP/s, both measured")
    rows = time_kernels(model, steps)
    total = sum(row.ms for row in rows.values())
    print(f"{'kernel':<28} {'calls':>6} {'ms':>9} {'rate':>16} {'of peak':>8} {'share':>7}")
    for name, row in rows.items():
        seconds = row.ms / 1000 or math.inf  # no time at all is none that was measured
        if row.flops:
            rate, part = f"{row.flops / seconds / 1e12:.1f} TFLOP/s", row.flops / seconds / peak
        else:
            rate, part = f"{row.bytes / seconds / 1e9:.0f} GB/s", row.bytes / seconds / bandwidth
        print(f"{name:<28} {row.calls:>6.0f} {row.ms:>9.4f} {rate:>16} {part:>8.1%} {row.ms / total:>7.1%}")
    print(f"{'all':<28} {sum(row.calls for row in rows.values()):>6.0f} {total:>9.4f}")


HOLD = 100  # microseconds, in which Python launches a call


def measure(device, call, repeats=5):
    """Median seconds of call() on the GPU, which runs once more before that; launching counts only as far as it takes longer than HOLD."""
    times = []
    for _ in range(repeats + 1):
        start, end = cp.cuda.Event(), cp.cuda.Event()
        device.functions["hold"]((1,), (1,), (np.int32(HOLD),), stream=device.stream)
        start.record(device.stream)
        call()
        end.record(device.stream)
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, end) / 1000)
    return sorted(times[1:])[repeats // 2]


def measure_copy(device):
    """Bytes a second, read and written, of a copy within the GPU's memory."""
    size = min(1 << 30, cp.cuda.runtime.memGetInfo()[0] // 4)
    with device.stream:
        source, target = cp.zeros(size, np.uint8), cp.empty(size, np.uint8)
        return 2 * size / measure(device, lambda: cp.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, size, 3, device.stream.ptr))


def measure_product(device):
    """Operations a second of a large product of random numbers, in the run's precision."""
    n = 8192 if cp.cuda.runtime.memGetInfo()[0] > 4 << 30 else 2048
    with device.stream:
        a, b, out = (cp.empty((n, n), Row((), device.precision.dtype).stored_as) for _ in range(3))
        for tensor in (a, b):
            device.launch("fill_random", (blocks(n * n, 256),), (256,), tensor, np.int64(n * n))
        return 2 * n**3 / measure(device, lambda: device.products.forward("peak", out, a, b, None, n, n, n))


# ----------------------------------------------------------------------------------------------------------------------
# main


def print_table(rows):
    """A box around names and values."""
    rows = [(name, str(value)) for name, value in rows]
    width = max(50, *(len(value) for _, value in rows))
    line = f"+-{'-' * 21}-+-{'-' * width}-+"
    print(line)
    for i, (name, value) in enumerate(rows):
        print(f"| {name:<21} | {value:<{width}} |")
        if i + 1 < len(rows) and rows[i + 1][0] in ("device", "model", "train batches"):
            print(line)
    print(line)


def describe(settings, config, gpu, train_loader, val_loader, model_path, rounded):
    """The rows of the table that a run begins with. rounded: the model's weights are not quite those of its file."""
    driver = cp.cuda.runtime.driverGetVersion()
    return [
        ("training data", settings.data),
        ("output", settings.output or "none"),
        ("batch size B", settings.B),
        ("sequence length T", settings.T),
        ("tokens in an update", settings.B * settings.T * settings.micro_steps),
        ("learning rate", f"{settings.learning_rate:e}"),
        ("updates", settings.steps),
        ("validate every", settings.val_every),
        ("validation batches", min(settings.val_batches, val_loader.num_batches)),
        ("sample every", settings.sample_every),
        ("tokens in a sample", settings.sample_tokens),
        ("device", f"{gpu.name}, {gpu.arch}, CUDA {driver // 1000}.{driver % 1000 // 10}"),
        ("precision", describe_precision(settings)),
        ("model", f"{model_path}{', rounded from float32 to bfloat16' if rounded else ''}"),
        ("max_seq_len", config.maxT),
        ("vocab_size", config.V),
        ("padded_vocab_size", config.Vp),
        ("num_layers", config.L),
        ("num_heads", config.NH),
        ("channels", config.C),
        ("num_parameters", count_parameters(config)),
        ("train batches", train_loader.num_batches),
        ("val batches", val_loader.num_batches),
    ]


def describe_precision(settings):
    if not settings.precision.bf16:
        return f"float32, {'TF32' if settings.tf32 else 'float32'} products"
    parts = ["bfloat16", f"{'float32' if settings.master else 'no'} master weights"]
    if settings.float32_grads:
        parts.append("float32 gradients")
    if settings.stochastic_rounding:
        parts.append(f"stochastic rounding from seed {settings.stochastic_rounding}")
    return ", ".join(parts)


def resolve_steps(settings, train_loader, first_step):
    """-x 0 means one epoch; raises UserError when a checkpoint is beyond the last step."""
    if settings.steps == 0:
        settings.steps = max(1, train_loader.num_batches // settings.micro_steps)
    if first_step is not None and first_step > settings.steps:
        raise UserError(f"{settings.output}: its checkpoint is of step {first_step}, beyond -x {settings.steps}: pass a larger -x")


@contextlib.contextmanager
def gpu_errors_as_lines():
    """For a program's main(): what CUDA or one of its libraries reports is a line, too."""
    try:
        yield
    except GPU_ERRORS as error:
        raise UserError(f"the GPU or one of CUDA's libraries failed ({str(error).splitlines()[0]}): if for want of memory, or as it could"
                        " not be initialized, another process may hold the GPU's memory: see nvidia-smi") from None


@gpu_errors_as_lines()
def main():
    settings = parse_settings(CudaSettings, "Train GPT-2 on a GPU, with CuPy and CUDA kernels.")
    sys.stdout.reconfigure(line_buffering=True)
    first_step = find_checkpoint(settings)
    gpu = open_gpu(settings.arch)
    given = dataclasses.replace(settings)
    settle(settings, gpu.arch)
    loading = time.perf_counter()
    config, params = read_start(settings, first_step)
    loading = time.perf_counter() - loading
    check_sizes(config)
    if settings.compare or settings.profile:
        print(f"{gpu.name}, {gpu.arch}, {describe_precision(settings)}, B={settings.B} T={settings.T}")
    if settings.compare:
        return 0 if check(Device(gpu, config, settings.precision, Cache(), settings.matmul), config, params, settings) else 1
    if settings.profile:
        model = GPT2(Device(gpu, config, settings.precision, Cache(), settings.matmul), config, params, settings)
        model.prepare()
        return profile(model, settings.profile)

    tokenizer = load_tokenizer(settings.tokenizer, config.V)
    train_loader, val_loader = open_data(settings, config.V)
    random = Random()

    print_changed_settings(given)
    resolve_steps(settings, train_loader, first_step)
    rounded = settings.precision.bf16 and not is_bfloat16(params)
    model_path = settings.model if first_step is None else checkpoint_paths(settings.output_dir, first_step)[0]
    print_table(describe(settings, config, gpu, train_loader, val_loader, model_path, rounded))
    device = Device(gpu, config, settings.precision, Cache(), settings.matmul)
    print(f"kernels: {device.compiled} compiled, {device.files - device.compiled} from the cache")
    model = GPT2(device, config, params, settings)
    if first_step is not None:
        resume(model, params, first_step, train_loader, random)
    model.prepare()
    if not device.products.repeats():
        print("note: some products' algorithms that the checkpoint records do not run here: what follows agrees up to rounding",
              file=sys.stderr)
    print(f"matrix products: {device.products.searched} shapes searched for the fastest algorithm, the others known")
    return train(model, train_loader, val_loader, tokenizer, random, first_step or 0, loading)


def is_bfloat16(params):
    """Whether rounding to bfloat16 changes no weight."""
    return not any((piece.view(np.uint32) & 0xFFFF).any() for piece in chunks(flat(params)))


def resume(model, params, step, train_loader, random):
    """Read the optimizer's state and the products' algorithms of a checkpoint."""
    settings, config = model.settings, model.config
    moments = allocate(params.table), allocate(params.table)
    restore(settings, config, params, moments, step, train_loader, random)
    model.set_state(params, moments, step)
    _, _, marker = checkpoint_paths(settings.output_dir, step)
    try:
        with open(marker) as f:
            notes = json.loads(f.read() or "{}")
        same = model.device.products.recall(notes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise UserError(f"{marker}: cannot be read; {go_back(marker)}") from None
    before, now = notes.get("precision"), describe_precision(settings)
    if before not in (None, now):
        print(f"note: the checkpoint is of a run in {before}, this one is in {now}: pass the flags of the first run to repeat it",
              file=sys.stderr)
    if not same:
        found = notes.get("products", {}).get("on", "the CPU")
        print(f"note: the checkpoint is from {found}, this is {model.device.products.identity}: what follows agrees up to rounding",
              file=sys.stderr)


def train(model, train_loader, val_loader, tokenizer, random, first_step, loading):
    """The training loop; returns the exit status. A step is: validate, sample, update, save; its line is printed while the
    next one runs, unless something else is due in between."""
    settings, config, directory = model.settings, model.config, model.settings.output_dir
    log = Log(settings, first_step)
    interruption = Interruption()
    running, times = None, []  # (step, number of begin_step) of the update whose line is still to be printed

    def finish():
        nonlocal running
        if running is None:
            return
        (step, number), running = running, None
        loss, norm, ms = model.end_step(number)
        if not math.isfinite(loss):
            raise UserError(f"step {step + 1}: the loss is {loss}; the last checkpoint, if any, is kept: {train_gpt2.DIVERGED}")
        tokens = settings.B * settings.T * settings.micro_steps
        print(f"step {step + 1:4d}/{settings.steps}: train loss {loss:f} ({ms:f} ms, {tokens / ms * 1000:.0f} tok/s)")
        if not times:
            seconds = time.perf_counter() - START
            print(f"first step finished {seconds - loading:.2f} s after the start, and {loading:.2f} s for reading the model")
        times.append(ms)
        log.training(step, loss, learning_rate_at(settings, step), norm or 0.0)

    for step in range(first_step, settings.steps + 1):
        last = step == settings.steps
        final = last and settings.final_reports
        validation = settings.val_every and (step % settings.val_every == 0 or final)
        sample = settings.sample_every and step > 0 and (step % settings.sample_every == 0 or final)
        if validation or sample or last:
            finish()
        if validation:
            loss = validate(model, val_loader, settings.val_batches, step)
            print(f"val loss {loss:f}")
            log.validation(step, loss)
        if sample:
            generate(model.next_token_probs, random, tokenizer, config.V, settings.sample_tokens, settings.T)
        if last:
            break
        batches = [train_loader.next_batch() for _ in range(settings.micro_steps)]
        begun = step, model.begin_step(batches, learning_rate_at(settings, step))
        finish()
        running = begun

        done = step + 1
        due = settings.checkpoint_every and (done % settings.checkpoint_every == 0 or done == settings.steps)
        stop = interruption.signal  # which may come at any moment: read once
        if stop or (directory and due):
            finish()
        if directory and (due or stop):
            batch = (settings.B, settings.T, settings.spread)
            progress = Progress(done, random.state, train_loader.shard, train_loader.sample, batch)
            params, *moments = (model.to_host(tensors) for tensors in (model.params, model.m, model.v))
            notes = {**model.device.products.notes(), "precision": describe_precision(settings)}
            save_checkpoint(directory, config, params, moments, progress, notes,
                            version=5 if settings.precision.bf16 else 3, master=model.to_host(model.master) if model.master else None)
        if stop:
            how = f"go on with: {resume_command(settings)}" if directory else "nothing was saved: there is no -o DIR"
            print(f"stopped after step {done}; {how}", file=sys.stderr)
            return 128 + stop
    if times:
        print(f"total average iteration time: {sum(times) / len(times):f} ms")
    return 0


if __name__ == "__main__":
    run_main(main)
