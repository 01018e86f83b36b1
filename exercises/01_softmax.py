"""Softmax, stable. One idea: exp of a large number overflows, but subtracting a row's maximum
changes nothing."""

import math  # noqa: F401

import numpy as np  # noqa: F401


def softmax_forward(probs, logits, B, T, V):
    """probs (B,T,V) = softmax of each row of logits (B,T,V), the row's maximum subtracted first."""
    raise NotImplementedError  # about 3 lines
