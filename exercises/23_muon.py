"""Muon. One idea: a matrix is updated in all its directions by the same length, which products of
matrices alone can bring about."""

import math  # noqa: F401

import numpy as np  # noqa: F401


def orthogonalize(matrix, steps, coefficients):
    """(rows, columns) -> nearly U V^T of U S V^T: all directions become equally long. Each
    Newton-Schulz step turns a singular value s, at first at most 1, into a s + b s^3 + c s^5, and
    keeps U and V."""
    raise NotImplementedError  # about 7 lines


def muon_update(param, m, grad, learning_rate, momentum, weight_decay, grad_scale, newton_schulz):
    """One Muon step on a matrix (rows, columns), param and m in place.
    https://kellerjordan.github.io/posts/muon/"""
    raise NotImplementedError  # about 5 lines
