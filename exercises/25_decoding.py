"""Attention with a cache, as text is drawn. One idea: keys and values of earlier positions never
change, so that a new position computes its own alone."""

import math  # noqa: F401

import numpy as np  # noqa: F401


def attention_decode(out, att, keys, values, inp, position, B, T, C, NH):
    """Causal attention of T new positions, from `position` on: out (B,T,C) =; att
    (B,NH,T,position+T) =, as above. keys, values (B,NH,>=position+T,HS) are the cache; inp's
    (B,T,3C) are appended to it first."""
    raise NotImplementedError  # about 9 lines
