"""What exercises ask for and no page has: a gradient by finite differences, by which the tests
check every layer, and byte-pair encoding."""

import collections

import numpy as np


def finite_difference(forward, x, dout, h=1e-5):
    """The gradient of sum(forward() * dout) with respect to x, which forward reads, by central
    differences. x is left as it was."""
    gradient = np.empty_like(x)
    for index in np.ndindex(x.shape):
        keep = x[index]
        x[index] = keep + h
        above = np.sum(forward() * dout)
        x[index] = keep - h
        below = np.sum(forward() * dout)
        x[index] = keep
        gradient[index] = (above - below) / (2 * h)
    return gradient


def merge(ids, pair, token):
    """ids, a list, with each (a, b) of the pair, from left to right, replaced by the token."""
    merged = []
    i = 0
    while i < len(ids):
        if tuple(ids[i : i + 2]) == pair:
            merged.append(token)
            i += 2
        else:
            merged.append(ids[i])
            i += 1
    return merged


def learn_merges(ids, count):
    """A list of at most `count` pairs: each is the most frequent pair of neighbors in ids, of
    equally frequent ones the smallest, and becomes the token 256 + its number before the next one
    is counted. ids are bytes. It ends early when no pair occurs twice.

    Neural Machine Translation of Rare Words with Subword Units, Sennrich et al. 2016,
    https://arxiv.org/abs/1508.07909
    """
    ids = list(ids)
    merges = []
    while len(merges) < count:
        pairs = collections.Counter(zip(ids, ids[1:]))
        pair = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
        if pairs[pair] < 2:
            break
        ids = merge(ids, pair, 256 + len(merges))
        merges.append(pair)
    return merges


def encode(ids, merges):
    """Bytes -> the list of their tokens, by merges in the order in which they were learned."""
    ids = list(ids)
    for number, pair in enumerate(merges):
        ids = merge(ids, pair, 256 + number)
    return ids
