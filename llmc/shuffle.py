"""The order in which a run reads its data, llm.c's. Sample i of a shard is its B*T+1 tokens from
token i*B*T on, the batch of one micro-step. An epoch reads each sample of each shard once: in
order, or shuffled, with the shards permuted for each epoch and the samples for each shard.
Positions count the micro-steps of all GPUs together."""

from typing import NamedTuple

import numpy as np

from llmc.errors import UserError

SEED = 42  # llm.c's
# In a state file: u64 number of shards, int32 each; u64 number of samples, int32 each; the
# generator, llm.c's struct. `left` is the number of unused words of the state plus 1: at 1, the
# next draw generates a new state.
MT19937 = np.dtype([("seed", "<u8"), ("left", "<i4"), ("next", "<u4"), ("state", "<u4", 624),
                    ("matrix", "<u4", 2)])


class Shuffle(NamedTuple):
    """The current permutations, and the random state that the next ones are drawn from."""

    shards: np.ndarray  # (shards,) int32, of this epoch
    samples: np.ndarray  # (samples,) int32, of the current shard
    key: np.ndarray  # (624,) uint32, the state of mt19937 after both were drawn
    index: int  # how many words of the state are used up, 1 to 624
    seed: int = SEED  # of the run


class Position(NamedTuple):
    """Where a run is in its data."""

    shard: int = 0  # number of shards of this epoch before the current one
    sample: int = 0  # number of samples already read of the current one
    shuffle: Shuffle | None = None  # None: in order

    def number(self):
        """The current shard, as an index into the sorted files."""
        return self.shard if self.shuffle is None else int(self.shuffle.shards[self.shard])


def first_position(counts, shuffle, seed=SEED):
    """The Position where a run begins, in shards of `counts` samples. seed: for shuffling, 0 to
    2^32 - 1."""
    if not shuffle:
        return Position()
    # by init_genrand, as in PyTorch and llm.c
    _, key, index, *_ = np.random.RandomState(seed).get_state()
    return Position(0, 0,
                    next_shuffle(Shuffle(np.arange(len(counts)), np.arange(0), key, index, seed), 0,
                                 counts))


def next_shuffle(before, shard, counts):
    """The Shuffle for an epoch's shard number `shard`. Number 0 also permutes the shards, from
    their previous order."""
    random = np.random.RandomState()
    random.set_state(("MT19937", before.key, before.index))
    shards = permuted(before.shards, random) if shard == 0 else before.shards
    samples = permuted(np.arange(counts[shards[shard]]), random)
    _, key, index, *_ = random.get_state()
    return Shuffle(shards, samples, key, index, before.seed)


def permuted(items, random):
    """Fisher-Yates shuffle, from the last item down: swap item i with item j = the next 32 random
    bits modulo i + 1."""
    i = np.arange(len(items) - 1, 0, -1)
    j = random.randint(0, 1 << 32, len(i), np.uint32) % (i + 1)
    items = items.tolist()
    for a, b in zip(i.tolist(), j.tolist()):
        items[a], items[b] = items[b], items[a]
    return np.array(items, np.int32)


def samples_from(position, counts):
    """Yield the samples from a position on, without end: (Position after it, shard number, sample
    number)."""
    shard, sample, shuffle = position
    while True:
        number = Position(shard, sample, shuffle).number()
        while sample < counts[number]:
            index = sample if shuffle is None else int(shuffle.samples[sample])
            sample += 1
            yield Position(shard, sample, shuffle), number, index
        shard = (shard + 1) % len(counts)
        sample = 0
        if shuffle is not None:
            shuffle = next_shuffle(shuffle, shard, counts)


def write_shuffle(f, shuffle):
    for permutation in (shuffle.shards, shuffle.samples):
        f.write(np.array([len(permutation)], "<u8"))
        f.write(permutation.astype("<i4"))
    f.write(np.array([(shuffle.seed, 625 - shuffle.index, shuffle.index, shuffle.key,
                       (0, 0x9908B0DF))], MT19937))


def read_shuffle(f, start, hint):
    """Read the Shuffle at the end of an open state file, from byte `start` on; raises UserError if
    it is damaged."""
    f.seek(start)
    data = f.read()
    spans = []
    end = 0
    for _ in ("shards", "samples"):
        count = int.from_bytes(data[end : end + 8], "little")
        spans.append((count, end + 8))
        end += 8 + 4 * count
    if len(data) != end + MT19937.itemsize:
        raise UserError(f"{f.name}: its data order has {len(data)} bytes, expected"
                        f" {end + MT19937.itemsize}; {hint}")
    orders = [np.frombuffer(data, "<i4", *span) for span in spans]
    seed, left, index, key, _ = np.frombuffer(data, MT19937, 1, end)[0]
    # llm.c has 0 before the first draw: no word is left then either
    index = 624 if left == 1 else int(index)
    if not 0 < index <= 624 or any((np.sort(order) != np.arange(len(order))).any()
                                   for order in orders):
        raise UserError(f"{f.name}: its data order is damaged; {hint}")
    return Shuffle(*orders, key, index, int(seed))
