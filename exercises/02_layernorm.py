"""Layer normalization. One idea: mean and rstd depend on every number of a row, so that the
gradient of a number has two corrections, which are means over the row."""

import math  # noqa: F401

import numpy as np  # noqa: F401


def layernorm_forward(out, mean, rstd, inp, weight, bias, B, T, C):
    """out (B,T,C) = (inp - mean) * rstd * weight + bias; mean, rstd (B,T) = those of each row.
    Variance is biased.

    Layer Normalization, Ba et al. 2016, https://arxiv.org/abs/1607.06450
    """
    raise NotImplementedError  # about 5 lines


def layernorm_backward(dinp, dweight, dbias, dout, inp, weight, mean, rstd, B, T, C):
    """dinp (B,T,C) +=; dweight, dbias (C,) =."""
    raise NotImplementedError  # about 6 lines
