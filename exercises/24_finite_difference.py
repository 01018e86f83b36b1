"""A gradient without calculus. One idea: change one number a little, both ways, and see what the
result does. All backward functions are tested so."""

import math  # noqa: F401

import numpy as np  # noqa: F401


def finite_difference(forward, x, dout, h=1e-5):
    """The gradient of sum(forward() * dout) with respect to x, which forward reads, by central
    differences. x is left as it was."""
    raise NotImplementedError  # about 10 lines
