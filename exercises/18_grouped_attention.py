"""Grouped queries, backward. One idea: a key and value head is read by several query heads, and
gets the sum of their gradients."""

import math  # noqa: F401

import numpy as np  # noqa: F401

from train_llama3 import split_heads  # noqa: F401


def attention_backward(dinp, datt, dout, inp, att, B, T, NH, NKV, HS):
    """dinp (B,T,Q+2K) =; datt (B,NH,T,T) = (scratch); dout (B,T,Q). The gradients of a key or value
    head are summed over its query heads, in their order."""
    raise NotImplementedError  # about 10 lines
