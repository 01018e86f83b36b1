"""RMSNorm: layer normalization without the mean and the bias. One idea: what is left of the
gradient's two corrections?
"""

import math  # noqa: F401

import numpy as np  # noqa: F401


def rmsnorm_forward(out, rstd, inp, weight, eps, B, T, C):
    """out (B,T,C) = inp * rstd * weight; rstd (B,T) = 1 / sqrt(mean of inp^2 + eps).

    Root Mean Square Layer Normalization, Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467
    """
    raise NotImplementedError  # about 2 lines


def rmsnorm_backward(dinp, dweight, dout, inp, weight, rstd, B, T, C):
    """dinp (B,T,C) +=; dweight (C,) =."""
    raise NotImplementedError  # about 4 lines
