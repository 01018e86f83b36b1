"""Attention. One idea: a position's output is an average of the values of positions up to it,
weighted by a softmax of scores."""

import math  # noqa: F401

import numpy as np  # noqa: F401


def attention_forward(out, preatt, att, inp, B, T, C, NH):
    """Causal multi-head attention: out (B,T,C) =; preatt (scaled scores), att (their softmax)
    (B,NH,T,T) =.

    inp (B,T,3C) holds query, key, value side by side, each NH heads of HS. Above the diagonal,
    preatt is -inf, att 0.
    Attention Is All You Need, Vaswani et al. 2017, https://arxiv.org/abs/1706.03762
    """
    raise NotImplementedError  # about 7 lines
