"""The precision of a run on a GPU: the dtypes of its tensors and matmuls, and how the output names them."""

from typing import NamedTuple

import numpy as np

from llmc.errors import UserError
from llmc.gpu.compiler import capability
from llmc.gpu.device import copy_to_gpu, cp
from llmc.gpu.geometry import blocks, pack
from llmc.tensors import flat

PART = 1 << 22  # weights that are rounded to bfloat16 at a time


class Precision(NamedTuple):
    """The dtypes of a run. Parameters and activations have `dtype`, except the residual stream; statistics, losses and
    AdamW's state are float32."""

    dtype: str = "float32"
    tf32: int = 1  # matmuls round float32 operands to TF32
    float32_grads: int = 0  # the gradients of the weights are float32 in a bfloat16 run, too
    fp8: bool = False  # a bfloat16 run with most matmuls in 8 bits: llmc/gpu/fp8.py

    @property
    def bf16(self):
        return self.dtype == "bfloat16"

    @property
    def residual(self):
        """dtype of the residual stream. Each layer adds to it twice, and rounding errors accumulate: float16 has 3 bits
        more in its mantissa than bfloat16. Its range, up to 65504, is wide enough; larger values saturate."""
        return "float16" if self.bf16 else self.dtype

    @property
    def grads(self):
        """dtype of the gradients of the weights."""
        return "float32" if self.float32_grads else self.dtype

    @property
    def pack(self):
        """Elements in 16 bytes, which a thread works on."""
        return 8 if self.bf16 else 4

    @property
    def matmul(self):
        """What matmuls round their operands to; they accumulate in float32."""
        return "bf16" if self.bf16 else "tf32" if self.tf32 else "float32"


def has_bfloat16(arch):
    """Whether its tensor cores know bfloat16, and TF32, which came with it."""
    return capability(arch) >= 80


def resolve_dtype(dtype, arch):
    """The dtype of a run on this GPU; "auto" is bfloat16 where there is one. Raises UserError where there is not."""
    if dtype == "fp8" and arch != "sm_90a":
        raise UserError(f"--dtype fp8: this GPU is {arch}; the kernels are for Hopper, sm_90a: pass --dtype bfloat16")
    if dtype == "bfloat16" and not has_bfloat16(arch):
        raise UserError(f"--dtype bfloat16: this GPU is {arch}, expected sm_80 or newer: pass --dtype float32")
    return dtype if dtype != "auto" else "bfloat16" if has_bfloat16(arch) else "float32"


def copy_weights(device, tensors, params):
    """Copy params, float32 Tensors on the host, to Tensors on the GPU; to bfloat16 ones, they are rounded to nearest
    there, a part at a time."""
    exact, copies, threads = flat(params), flat(tensors), device.geometry.UPDATE_THREADS
    if copies.dtype == np.float32:
        copy_to_gpu(copies, exact)
        return
    scratch = cp.empty(PART, np.float32)
    for begin in range(0, exact.size, PART):
        part = slice(begin, begin + PART)
        out, inp = copies[part], copy_to_gpu(scratch[: exact[part].size], exact[part])
        grid = (blocks(out.size, threads * pack(out)),)
        device.launch("round_weights", grid, (threads,), out, inp, np.int64(out.size))


def describe_precision(settings):
    """Describe a run's precision, as printed and as recorded in checkpoints."""
    if not settings.precision.bf16:
        return f"float32, {'TF32' if settings.tf32 else 'float32'} products"
    parts = ["bfloat16", *["FP8 matmuls"] * settings.precision.fp8,
             f"{'float32' if settings.master else 'no'} master weights"]
    if settings.float32_grads:
        parts.append("float32 gradients")
    if settings.stochastic_rounding:
        parts.append(f"stochastic rounding from seed {settings.stochastic_rounding}")
    return ", ".join(parts)
