"""The peak of which the MFU that a run prints is a fraction."""

import re


def flops_per_token(parameters, config, T):
    """Floating-point operations per token of training, as llm.c counts them: 6 N, a multiplication and an addition for
    each of N parameters in three matmuls (output, gradients of input and weight); 6 L NH HS T, the two matmuls of
    causal attention, over T / 2 positions on average. Kaplan et al. 2020, https://arxiv.org/abs/2001.08361"""
    return 6 * parameters + 6 * config.L * config.NH * config.HS * T


PEAKS = {  # CUDA's name -> dense TFLOP/s with float32 accumulation, (bf16, TF32): NVIDIA's data sheets, whitepapers
    r"B200": (2250, 1125), r"H[12]00 NVL": (835.5, 417.5), r"G?H200.*|H100 .*HBM3": (989.4, 494.7),
    r"H100 PCIe": (756, 378), r"A100.*": (312, 156), r"A30": (165, 82), r"A40": (149.7, 74.8), r"A10": (125, 62.5),
    r"A10G": (70, 35), r"L4": (121, 60.5), r"L40S": (362, 183), r"RTX A6000": (154.8, 77.4),
    r"RTX 3090": (71, 35.6), r"RTX 4090": (165.2, 82.6), r"RTX 5090": (209.5, 104.8),
}


def peak_flops(name, kind):
    """Peak FLOP/s of a GPU for matmuls of kind bf16 or tf32; None if it is not known (for a MIG slice, say)."""
    name = re.sub(r"^(NVIDIA )?(GeForce )?", "", name)
    found = [peaks for pattern, peaks in PEAKS.items() if re.fullmatch(pattern, name) and " MIG " not in name]
    return dict(zip(("bf16", "tf32"), found[0])).get(kind, 0) * 1e12 or None if found else None


def peak_rate(gpu, ranks, settings, config, parameters):
    """Tokens/s at which training would use all FLOP/s of `ranks` GPUs; None if their peak is not known."""
    peak = peak_flops(gpu.name, settings.precision.matmul)
    return peak and ranks * peak / flops_per_token(parameters, config, settings.T)
