"""A micro-batch as the GPU takes it: tokens, and their positions sorted by token."""

import numpy as np

from llmc.kernels import ENCODER_PIECE
from llmc.tensors import Row


def batch_table(B, T, micro_steps):
    """name -> Row for what the host sends for one update: four bytes an entry."""
    N = B * T
    return {
        "learning_rate": Row((1,)),
        "inputs": Row((micro_steps, B, T), "int32"),
        "targets": Row((micro_steps, B, T), "int32"),
        "order": Row((micro_steps, N), "int32"),  # these three: see sort_tokens
        "piece_begins": Row((micro_steps, N + 1), "int32"),
        "piece_tokens": Row((micro_steps, N), "int32"),
    }


def sort_tokens(order, piece_begins, piece_tokens, inp):
    """What encoder_backward needs to add up each token's rows in a fixed order; on the host.

    inp (B,T) -> order (N,): the positions b*T+t, each token's side by side, earlier ones first; first the tokens at
    more than ENCODER_PIECE positions, which are cut into pieces of so many, the last one shorter; then the others, each
    of which is one piece. piece_begins (N+1,): where in `order` each piece begins, N after the last one; piece_tokens
    (N,): the token of each piece, ~token where it is cut, 0 after the last one. All int32.
    """
    inp = inp.reshape(-1)
    whole = np.bincount(inp)[inp] <= ENCODER_PIECE  # of each position: whether its token is one piece
    order[:] = np.lexsort((inp.astype(np.uint16) if inp.max() < 65536 else inp, whole))  # radix sort for 16 bits
    ordered = inp[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    counts = np.diff(starts, append=inp.size)
    number = np.arange(inp.size) - np.repeat(starts, counts)  # of each position, among its token's
    begins = np.flatnonzero(number % ENCODER_PIECE == 0)
    tokens = ordered[begins]
    piece_begins[: begins.size], piece_begins[begins.size :] = begins, inp.size
    piece_tokens[: begins.size], piece_tokens[begins.size :] = np.where(whole[order[begins]], tokens, ~tokens), 0
