"""Finite differences beside derivatives that one knows; byte pairs beside Hugging Face's library."""

import collections

import numpy as np
import pytest

from answers import encode, finite_difference, learn_merges, merge
from llmc.debugstate import check_tensor

TEXT = b"the cat sat on the mat, and that cat saw the hat; aaaa aaa aa \xc3\xa9t\xc3\xa9 " * 3


@pytest.mark.parametrize("shape", ((1,), (4,), (2, 3)))
def test_finite_difference(shape):
    """Of x^3, of which a difference to one side is off by 3 h x."""
    x = np.random.default_rng(0).standard_normal(shape)
    dout = np.random.default_rng(1).standard_normal(shape)
    before = x.copy()
    got = finite_difference(lambda: x**3, x, dout)
    assert check_tensor("the gradient", got, 3 * x**2 * dout, 1e-8)
    assert check_tensor("x, afterwards,", x, before, 0.0)


@pytest.mark.parametrize("count", (0, 1, 20, 999))
def test_byte_pairs(count):
    """Each merge is of the most frequent pair; the tokens are those of the library, by the same
    merges."""
    models = pytest.importorskip("tokenizers").models
    merges = learn_merges(TEXT, count)
    assert len(merges) == count or count == 999 and len(merges) < 200
    ids = list(TEXT)
    for number, pair in enumerate(merges):
        pairs = collections.Counter(zip(ids, ids[1:]))
        most = max(pairs.values())
        assert most > 1 and pair == min(p for p in pairs if pairs[p] == most), number
        ids = merge(ids, pair, 256 + number)
    assert encode(TEXT, merges) == ids

    words = [chr(i) for i in range(256)]  # a character for each byte
    for a, b in merges:
        words.append(words[a] + words[b])
    assert len(set(words)) == len(words)
    library = models.BPE({word: i for i, word in enumerate(words)},
                         [(words[a], words[b]) for a, b in merges])
    for text in (TEXT, b"a cat, that sat", b"", b"aaaaa"):
        tokens = library.tokenize(text.decode("latin-1"))
        assert encode(text, merges) == [token.id for token in tokens]


def test_merges_from_left_to_right():
    assert merge([1, 1, 1, 2, 1], (1, 1), 9) == [9, 1, 2, 1]
    assert merge([], (1, 1), 9) == [] and learn_merges(b"abc", 5) == []
