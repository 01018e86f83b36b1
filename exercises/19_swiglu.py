"""SwiGLU. One idea: a product of two halves has two gradients, and one of them goes through
SiLU."""

import math  # noqa: F401

import numpy as np  # noqa: F401


def swiglu_forward(out, inp, N, F):
    """out (N,F) = up * gate * sigmoid(gate); inp (N,2F) holds up, then gate.

    GLU Variants Improve Transformer, Shazeer 2020, https://arxiv.org/abs/2002.05202
    """
    raise NotImplementedError  # about 2 lines


def swiglu_backward(dinp, inp, dout, N, F):
    """dinp (N,2F) =: dup = dout * gate * s, dgate = dout * up * s * (1 + gate * (1 - s)), s =
    sigmoid(gate)."""
    raise NotImplementedError  # about 5 lines
