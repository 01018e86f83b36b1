"""The precision of a run on a GPU: the dtypes of its tensors and matmuls, how the output names
them, and the peak that such matmuls can reach, of which MFU is a fraction."""

import re
from typing import NamedTuple

import numpy as np

from llmc.errors import UserError
from llmc.gpu.compiler import capability
from llmc.gpu.device import copy_to_gpu, cp
from llmc.gpu.geometry import blocks, pack
from llmc.tensors import flat

PART = 1 << 22  # weights that are rounded to bfloat16 at a time


class Precision(NamedTuple):
    """The dtypes of a run. Parameters and activations have `dtype`, except the residual stream;
    statistics, losses and AdamW's state are float32."""

    dtype: str = "float32"
    tf32: int = 1  # matmuls round float32 operands to TF32
    float32_grads: int = 0  # the gradients of the weights are float32 in a bfloat16 run, too
    fp8: bool = False  # a bfloat16 run with most matmuls in 8 bits: llmc/gpu/fp8.py

    @property
    def bf16(self):
        return self.dtype == "bfloat16"

    @property
    def residual(self):
        """dtype of the residual stream. Each layer adds to it twice, and rounding errors
        accumulate: float16 has 3 bits more in its mantissa than bfloat16. Its range, up to 65504,
        is wide enough; larger values saturate."""
        return "float16" if self.bf16 else self.dtype

    @property
    def grads(self):
        """dtype of the gradients of the weights."""
        return "float32" if self.float32_grads else self.dtype

    @property
    def matmul(self):
        """What matmuls round their operands to; they accumulate in float32."""
        return "bf16" if self.bf16 else "tf32" if self.tf32 else "float32"


def has_bfloat16(arch):
    """Whether its tensor cores know bfloat16, and TF32, which came with it."""
    return capability(arch) >= 80


def resolve_dtype(dtype, arch):
    """The dtype of a run on this GPU; "auto" is bfloat16 where there is one. Raises UserError where
    there is not."""
    if dtype == "fp8" and arch != "sm_90a":
        raise UserError(f"--dtype fp8: this GPU is {arch}; the kernels are for Hopper, sm_90a: pass"
                        " --dtype bfloat16")
    if dtype == "bfloat16" and not has_bfloat16(arch):
        raise UserError(f"--dtype bfloat16: this GPU is {arch}, expected sm_80 or newer: pass"
                        " --dtype float32")
    return dtype if dtype != "auto" else "bfloat16" if has_bfloat16(arch) else "float32"


def copy_weights(device, tensors, params):
    """Copy params, float32 Tensors on the host, to Tensors on the GPU; to bfloat16 ones, they are
    rounded to nearest there, a part at a time."""
    exact = flat(params)
    copies = flat(tensors)
    threads = device.geometry.UPDATE_THREADS
    if copies.dtype == np.float32:
        copy_to_gpu(copies, exact)
        return
    scratch = cp.empty(PART, np.float32)
    for begin in range(0, exact.size, PART):
        part = slice(begin, begin + PART)
        out = copies[part]
        inp = copy_to_gpu(scratch[: exact[part].size], exact[part])
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


def flops_per_token(parameters, config, T):
    """Floating-point operations per token of training, as llm.c counts them: 6 N, a multiplication
    and an addition for each of N parameters in three matmuls (output, gradients of input and
    weight); 6 L NH HS T, the two matmuls of causal attention, over T / 2 positions on average.
    Kaplan et al. 2020, https://arxiv.org/abs/2001.08361"""
    return 6 * parameters + 6 * config.L * config.NH * config.HS * T


# CUDA's name -> dense TFLOP/s with float32 accumulation, (bf16, TF32): NVIDIA's data sheets,
# whitepapers
PEAKS = {r"B200": (2250, 1125), r"H[12]00 NVL": (835.5, 417.5),
         r"G?H200.*|H100 .*HBM3": (989.4, 494.7), r"H100 PCIe": (756, 378), r"A100.*": (312, 156),
         r"A30": (165, 82), r"A40": (149.7, 74.8), r"A10": (125, 62.5), r"A10G": (70, 35),
         r"L4": (121, 60.5), r"L40S": (362, 183), r"RTX A6000": (154.8, 77.4),
         r"RTX 3090": (71, 35.6), r"RTX 4090": (165.2, 82.6), r"RTX 5090": (209.5, 104.8),}


def peak_flops(name, kind):
    """Peak FLOP/s of a GPU for matmuls of kind bf16 or tf32; None if it is not known (for a MIG
    slice, say)."""
    name = re.sub(r"^(NVIDIA )?(GeForce )?", "", name)
    found = [peaks for pattern, peaks in PEAKS.items() if re.fullmatch(pattern, name)
             and " MIG " not in name]
    return dict(zip(("bf16", "tf32"), found[0])).get(kind, 0) * 1e12 or None if found else None


def peak_rate(gpu, ranks, settings, config, parameters):
    """Tokens/s at which training would use all FLOP/s of `ranks` GPUs; None if their peak is not
    known."""
    peak = peak_flops(gpu.name, settings.precision.matmul)
    return peak and ranks * peak / flops_per_token(parameters, config, settings.T)
