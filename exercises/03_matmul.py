"""A linear layer's backward pass. One idea: each operand's gradient is dout times the other
operand, summed over what the two have in common."""

import math  # noqa: F401

import numpy as np  # noqa: F401


def matmul_backward(dinp, dweight, dbias, dout, inp, weight, B, T, C, OC):
    """dinp (B,T,C) =, dweight (OC,C) =, dbias (OC,) = (None: no bias); dout (B,T,OC)."""
    raise NotImplementedError  # about 6 lines
