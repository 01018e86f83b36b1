"""QK-norm: each query and key gets the same length. One idea: the gradient along x itself is lost,
and this can be computed from what came out."""

import math  # noqa: F401

import numpy as np  # noqa: F401

from train_speedrun import EPS, SCALE  # noqa: F401


def qknorm_forward(qkv, rstd, B, T, NH, HS):
    """Normalize, in place, each query and key of qkv (B,T,3C): x * rstd, rstd (B,T,2NH) = 1 /
    sqrt(mean of x^2 + eps). Queries are also multiplied by SCALE * sqrt(HS), which with attention's
    1 / sqrt(HS) makes SCALE.

    Query-Key Normalization for Transformers, Henry et al. 2020, https://arxiv.org/abs/2010.04245
    """
    raise NotImplementedError  # about 4 lines


def qknorm_backward(dqkv, qkv, rstd, B, T, NH, HS):
    """Turn dqkv (B,T,3C), in place, from the gradient of what qknorm_forward wrote into that of
    what it read. Both may be rotated, and dqkv stays so: a rotation keeps products of the two, and
    rstd is one number for all of a head."""
    raise NotImplementedError  # about 6 lines
