"""Rotary positions. One idea: the gradient of a rotation is rotated back."""

import math  # noqa: F401

import numpy as np  # noqa: F401


def rope_forward(qkv, cos, sin, B, T, heads, HS):
    """Rotate, in place, the first `heads` heads (queries and keys) of qkv (B,T,Q+2K): each pair of
    neighbours (a, b) at position t by its angle, to (a cos - b sin, a sin + b cos). cos, sin
    (T,HS/2).

    RoFormer, Su et al. 2021, https://arxiv.org/abs/2104.09864
    """
    raise NotImplementedError  # about 4 lines


def rope_backward(dqkv, cos, sin, B, T, heads, HS):
    """Rotate dqkv back, in place: a rotation's inverse is its transpose."""
    raise NotImplementedError  # about 1 line
