"""Squared ReLU. One idea: the slope of a square is twice what was squared, and 0 stays 0."""

import math  # noqa: F401

import numpy as np  # noqa: F401


def relu2_forward(out, inp, N):
    """out (N,) = max(inp, 0)^2. Primer, So et al. 2021, https://arxiv.org/abs/2109.08668"""
    raise NotImplementedError  # about 1 line


def relu2_backward(dinp, inp, dout, N):
    """dinp (N,) = dout * 2 max(inp, 0); dinp may be dout itself."""
    raise NotImplementedError  # about 1 line
