"""Sampling: llm.c's random number generator, and text generation."""

import re
import sys
from typing import NamedTuple

import numpy as np

from llmc.errors import UserError


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
    """The first id at which the running sum of probs (V,) exceeds coin; the last id if rounding
    keeps all below it."""
    return min(int(np.searchsorted(np.cumsum(probs), np.float32(coin), side="right")),
               probs.size - 1)


class Choice(NamedTuple):
    """How the next token is drawn. top_p: Holtzman et al. 2019, https://arxiv.org/abs/1904.09751"""

    temperature: float = 1.0  # divides the logits; 0: the likeliest token
    top_k: int = 0  # only among this many of the likeliest tokens (0: all)
    # only among the fewest of the likeliest tokens that together have this probability
    top_p: float = 1.0

    def draw(self, logits, coin):
        """Draw an id from logits (V,) float32 with a coin in [0, 1). Equally likely tokens are
        ordered by id."""
        with np.errstate(over="ignore"):  # overflow to inf, and to logits of -inf, is right
            temperature = np.float32(self.temperature)
            if temperature == 0.0:
                return int(np.argmax(logits))
            if temperature != 1.0:
                logits = (logits - np.maximum.reduce(logits)) / temperature
        probs = np.exp(logits - np.maximum.reduce(logits))
        probs *= np.float32(1.0) / np.add.reduce(probs)
        if not self.top_k and self.top_p == 1.0:
            return sample_multinomial(probs, coin)
        least = (np.partition(probs, -self.top_k)[-self.top_k] if 0 < self.top_k < probs.size
                 else 0.0)
        ids = np.flatnonzero(~(probs < least))  # a few sort 10 times faster than all
        likeliest = ids[np.argsort(-probs[ids], kind="stable")[: self.top_k or None]]
        sums = np.cumsum(probs[likeliest])
        count = 1 + int(np.searchsorted(sums, np.float32(self.top_p) * sums[-1], side="left"))
        kept = np.sort(likeliest[:count])
        probs = probs[kept]
        return int(kept[sample_multinomial(probs, np.float32(coin) * np.add.reduce(probs))])


class Writer:
    """Prints each id at once, as text or, without a tokenizer, as a number. Control characters are
    stripped, and marks that change the direction of text."""

    STRIPPED = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

    def __init__(self, tokenizer):
        self.stream = tokenizer.stream() if tokenizer else None

    def write(self, id):
        self.print(self.stream.add(id) if self.stream else f"{id} ")

    def end(self):
        self.print((self.stream.end() if self.stream else "") + "\n")

    def print(self, text):
        sys.stdout.buffer.write(self.STRIPPED.sub("", text).encode(errors="replace"))
        sys.stdout.buffer.flush()


def draw(decoder, prompt, count, randoms, choice, want_logprobs=False):
    """Draw `count` tokens after prompt (1, T) int32, in one sequence for each of `randoms`. Yields,
    for each position, the ids (B,) int32, and their log-probabilities (B,) or None. decoder:
    logits(tokens (B, t), position of the first)
    -> logits (B, V) of the next token. Beyond its T positions, it starts over from the last T/2
    tokens."""
    B = len(randoms)
    T = prompt.shape[1]
    tokens = np.empty((B, T + count), np.int32)
    tokens[:, :T] = prompt
    begin = seen = 0  # where the decoder's context begins; how many tokens it has seen
    for t in range(T, T + count):
        if t - begin > decoder.T:
            begin = seen = t - max(1, decoder.T // 2)
        rows = 1 if t == T else B  # the prompt is the same in all sequences
        logits = decoder.logits(tokens[:rows, seen:t], seen - begin)
        seen = t
        check_diverged(logits)
        if t == T:
            logits = np.repeat(logits, B, axis=0)
            decoder.share_first(B, T)
        tokens[:, t] = [choice.draw(row, random.f32()) for row, random in zip(logits, randoms)]
        if want_logprobs:
            x = logits.astype(np.float64) - logits.max(-1, keepdims=True)
            logprobs = x[np.arange(B), tokens[:, t]] - np.log(np.exp(x).sum(-1))
        yield tokens[:, t], logprobs if want_logprobs else None


def check_diverged(logits):
    """Raise UserError if a logit, or log-probability, is NaN or inf."""
    if not np.maximum.reduce(logits, None) < np.inf:
        raise UserError("the model's logits are not finite: it has diverged")


def end_of_text(tokenizer, V):
    """The id of the end-of-text token; without a tokenizer V - 1, as in GPT-2's vocabulary and
    ours."""
    return tokenizer.eot if tokenizer else V - 1


def print_sample(steps, tokenizer):
    """Print a trainer's sample. steps: what draw yields for one sequence."""
    print("generating:\n---", flush=True)
    writer = Writer(tokenizer)
    for ids, _ in steps:
        writer.write(ids[0])
    writer.end()
    print("---", flush=True)
