"""Attention's backward pass. One idea: walk the forward pass from its last line to its first; the
softmax gives dpreatt = att * (datt - the sum of att * datt over a row)."""

import math  # noqa: F401

import numpy as np  # noqa: F401


def attention_backward(dinp, dpreatt, datt, dout, inp, att, B, T, C, NH):
    """dinp (B,T,3C) =; dpreatt, datt (B,NH,T,T) = (scratch); dout (B,T,C)."""
    raise NotImplementedError  # about 10 lines
