"""AdamW. One idea: running means of the gradient and of its square, which begin at 0 and are too
small at first."""

import math  # noqa: F401

import numpy as np  # noqa: F401


def adamw_update(params, m, v, grads, learning_rate, beta1, beta2, eps, weight_decay, grad_scale,
                 step, N):
    """One AdamW step on flat arrays (N,), params, m and v in place; `step` counts from 1 for the
    bias correction.

    grad_scale multiplies the gradients first (clipping).
    Decoupled Weight Decay Regularization, Loshchilov and Hutter 2017,
    https://arxiv.org/abs/1711.05101"""
    raise NotImplementedError  # about 6 lines
