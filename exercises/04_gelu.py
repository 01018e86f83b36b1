"""GELU's derivative. One idea: the chain rule through tanh, whose derivative is 1 - tanh^2."""

import math  # noqa: F401

import numpy as np  # noqa: F401


def gelu_backward(dinp, inp, dout, N):
    """dinp (N,) = dout * gelu'(inp); dinp may be dout itself."""
    raise NotImplementedError  # about 4 lines
