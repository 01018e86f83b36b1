"""A micro-batch on the GPU: tokens, and their positions sorted by token."""

from typing import NamedTuple

import numpy as np

from llmc.gpu.geometry import ENCODER_PIECE
from llmc.tensors import Row


class SortedTokens(NamedTuple):
    """A micro-batch's positions, sorted by token: see sort_tokens."""

    order: object
    piece_begins: object
    piece_tokens: object


def sorted_tokens(batch, i):
    """The SortedTokens of micro-batch i. batch: Tensors of batch_table."""
    return SortedTokens(batch.order[i], batch.piece_begins[i], batch.piece_tokens[i])


def batch_table(B, T, micro_steps):
    """name -> Row for what the host sends to the GPU for one update; every element has 4 bytes."""
    N = B * T
    return {
        # the learning rate; what losses and gradients are multiplied by: see Trainer.weigh
        "rate_and_scale": Row((2,)),
        "inputs": Row((micro_steps, B, T), "int32"),
        "targets": Row((micro_steps, B, T), "int32"),
        "weights": Row((micro_steps, B, T)),  # of the targets' losses, between -1 and 1
        "order": Row((micro_steps, N), "int32"),  # these three: see sort_tokens
        "piece_begins": Row((micro_steps, N + 1), "int32"),
        "piece_tokens": Row((micro_steps, N), "int32"),
    }


def sort_tokens(order, piece_begins, piece_tokens, inp):
    """Sort the positions of inp (B,T) by token, on the host, so that encoder_backward adds rows in
    a fixed order.

    order (N,) = the positions b*T+t, grouped by token, ascending in each group. Tokens with more
    than ENCODER_PIECE positions come first: their groups are cut into pieces of at most
    ENCODER_PIECE. Every other group is one piece. piece_begins (N+1,) = where in `order` each piece
    begins, then N up to the end. piece_tokens (N,) = the token of each piece, or ~token if its
    group is cut, then 0 up to the end. All int32."""
    inp = inp.reshape(-1)
    # for each position: whether its token's group is one piece
    whole = np.bincount(inp)[inp] <= ENCODER_PIECE
    # 16 bits: a radix sort
    halves = (inp.astype(np.uint16), (inp >> 16).astype(np.uint16))[: 1 + (inp.max() >= 65536)]
    order[:] = np.lexsort((*halves, whole))
    ordered = inp[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    counts = np.diff(starts, append=inp.size)
    # each position's index in its token's group
    number = np.arange(inp.size) - np.repeat(starts, counts)
    begins = np.flatnonzero(number % ENCODER_PIECE == 0)
    tokens = ordered[begins]
    piece_begins[: begins.size] = begins
    piece_begins[begins.size :] = inp.size
    piece_tokens[: begins.size] = np.where(whole[order[begins]], tokens, ~tokens)
    piece_tokens[begins.size :] = 0
