"""Cross entropy, and its gradient through the softmax. One idea: together, that is probabilities
minus one-hot targets.
"""

import math  # noqa: F401

import numpy as np  # noqa: F401


def crossentropy_forward(losses, logits, probs, targets, B, T, V):
    """losses (B,T) = -log of each target's probability; below float32's smallest normal number,
    from logits (B,T,V)."""
    raise NotImplementedError  # about 4 lines


def crossentropy_softmax_backward(dlogits, dlosses, probs, targets, B, T, V):
    """dlogits (B,T,V) = (probs - one-hot(targets)) * dlosses (B,T) of each row: the gradient
    through both layers."""
    raise NotImplementedError  # about 3 lines
