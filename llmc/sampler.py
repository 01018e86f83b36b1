"""Sampling: llm.c's random numbers, and text from a model."""

import codecs
import sys

import numpy as np


class Random:
    """xorshift64*, which llm.c samples with. https://en.wikipedia.org/wiki/Xorshift#xorshift*"""

    def __init__(self, state=1337):
        self.state = state

    def u32(self):
        s = self.state
        s ^= s >> 12
        s ^= (s << 25) & 0xFFFFFFFFFFFFFFFF
        s ^= s >> 27
        self.state = s
        return (s * 0x2545F4914F6CDD1D & 0xFFFFFFFFFFFFFFFF) >> 32

    def f32(self):
        """A float in [0, 1) with 24 random bits."""
        return (self.u32() >> 8) / 16777216.0


def sample_multinomial(probs, coin):
    """The first id whose running sum of probs (V,) exceeds coin; the last id when rounding leaves none."""
    return min(int(np.searchsorted(np.cumsum(probs), np.float32(coin), side="right")), probs.size - 1)


def generate(next_token_probs, random, tokenizer, V, length, T):
    """Print `length` - 1 sampled tokens after an end-of-text token, each as soon as it is known.

    next_token_probs: tokens (t,) int32 -> (V,) float32, called with the last T tokens. tokenizer: None prints ids.
    """
    print("generating:\n---", flush=True)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a letter may be of several tokens
    tokens = np.full(length, tokenizer.eot if tokenizer else V - 1, np.int32)  # each vocabulary ends with end of text
    for t in range(1, length):
        tokens[t] = sample_multinomial(next_token_probs(tokens[max(0, t - T) : t]), random.f32())
        text = tokenizer.printable(tokens[t]) if tokenizer else b"%d " % tokens[t]
        sys.stdout.buffer.write(decoder.decode(text).encode())
        sys.stdout.buffer.flush()
    sys.stdout.buffer.write(decoder.decode(b"", final=True).encode())
    print("\n---", flush=True)
