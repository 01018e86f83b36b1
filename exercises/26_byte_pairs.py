"""Byte-pair merges, which make a vocabulary. One idea: the two tokens that are neighbors most often
become one, again and again."""

import collections  # noqa: F401


def merge(ids, pair, token):
    """ids, a list, with each (a, b) of the pair, from left to right, replaced by the token."""
    raise NotImplementedError  # about 8 lines


def learn_merges(ids, count):
    """A list of at most `count` pairs: each is the most frequent pair of neighbors in ids, of
    equally frequent ones the smallest, and becomes the token 256 + its number before the next one
    is counted. ids are bytes. It ends early when no pair occurs twice.

    Neural Machine Translation of Rare Words with Subword Units, Sennrich et al. 2016,
    https://arxiv.org/abs/1508.07909
    """
    raise NotImplementedError  # about 9 lines


def encode(ids, merges):
    """Bytes -> the list of their tokens, by merges in the order in which they were learned."""
    raise NotImplementedError  # about 3 lines
