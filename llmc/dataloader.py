"""Token files, and the loader of batches. A token file is raw int32 (llm.c of April 2024) or, as
its magic tells, a header with [2] the count (64 bits; llm.c reads the lower half) and [4] the bytes
of text (64 bits, ours), then uint16 (llm.c of today) or uint32 (its Llama), or, as its ids tell,
raw uint16 (nanoGPT). NAME_weights.bin beside NAME.bin has a byte for each token: how much its loss
counts as a target."""

import filecmp
import glob
import itertools
import math
import os
import re
import sys

import numpy as np

from llmc.errors import UserError
from llmc.files import (FILE_CHUNK, HEADER_BYTES, KINDS, TOKENS32_MAGIC, TOKENS_MAGIC, check_size,
                        make_header,
                        open_input, read_header, read_into, replacing)
from llmc.shuffle import SEED, first_position, samples_from

SAMPLE_BYTES = 1 << 22  # the start of a file without a header, which tells of what type it is
HEADERS = {"uint16": (TOKENS_MAGIC, 1, np.dtype("<u2")),
           "uint32": (TOKENS32_MAGIC, 7, np.dtype("<u4"))}


def tokens_hint(path):
    """How to make a token file, by its name."""
    if "tiny_shakespeare" in path:
        return "make it with: python prepro_tinyshakespeare.py"
    prefix = re.fullmatch(r"(.*)_(train|val)\.bin", path)
    if prefix and os.path.isfile(prefix[1]):
        return (f"to train on {prefix[1]}: python prepro_text.py {prefix[1]} --output data/mine,"
                " then -i data/mine")
    if prefix and glob.glob(f"{glob.escape(prefix[1])}_{prefix[2]}_*.bin"):
        return f'pass its shards, "{prefix[1]}_{prefix[2]}_*.bin"'
    if prefix and os.path.isfile(f"{prefix[1]}_train.bin"):
        return (f"there is {prefix[1]}_train.bin: train with -v 0, or pass it, or other tokens, as"
                " -j or --data")
    return ("make it of your text with: python prepro_text.py FILE --output"
            f" {prefix[1] if prefix else 'PREFIX'}")


def write_tokens(path, arrays, count, format="int32", text_bytes=0, row=0):
    """Write the `count` tokens of an iterable of integer arrays, as 'int32', 'uint16' or 'uint32'.
    text_bytes: how many bytes of text all but the first stand for, if one knows; row: tokens that
    are to be trained on together, if they are rows. Raw int32 has no place for these two."""
    magic, version, dtype = HEADERS.get(format, (None, None, "<i4"))
    with replacing(path) as f:
        if magic:
            header = make_header(magic, version)
            header[2:6] = np.array([count, text_bytes], "<u8").view("<i4")
            header[6] = row
            f.write(header)
        for array in arrays:
            f.write(np.asarray(array).astype(dtype))


def weights_beside(path):
    """The name of the file of weights of a token file."""
    return f"{path.removesuffix('.bin')}_weights.bin"


class TokenFile:
    """A file's tokens: dtype, offset in bytes, size, their number, text_bytes and row, see
    write_tokens, and weights, the path of their file, or None. Raises UserError for an impossible size or fewer
    than `least` tokens (`why` ends the message). Ids are checked when they are read."""

    def __init__(self, path, V, least=1, why=""):
        self.path = path
        self.V = V
        self.hint = (hint := tokens_hint(str(path)))
        self.text_bytes = self.row = 0
        with open_input(path, hint) as f:
            size = os.fstat(f.fileno()).st_size
            found = int.from_bytes(f.read(4), "little")
            if found in KINDS:
                f.seek(0)
                format = "uint32" if found == TOKENS32_MAGIC else "uint16"
                magic, version, self.dtype = HEADERS[format]
                header = read_header(f, magic, hint)
                self.offset = HEADER_BYTES
                self.size, self.text_bytes = header[2:6].view("<u8").tolist()
                self.row = int(header[6])
                if header[1] != version:
                    raise UserError(f"{path}: token file version {header[1]}, expected {version};"
                                    f" {hint}")
                check_size(f, self.offset + self.dtype.itemsize * self.size,
                           f"{self.size} {format} tokens", hint)
            else:
                f.seek(0)
                is_uint16 = size % 2 == 0 and is_raw_uint16(f.read(SAMPLE_BYTES), size, V)
                self.dtype = np.dtype("<u2" if is_uint16 else "<i4")
                self.offset = 0
                self.size = size // self.dtype.itemsize
                if size % self.dtype.itemsize:
                    raise UserError(f"{path}: {size} bytes, expected a whole number of int32"
                                    f" tokens; {hint}")
                if is_uint16:
                    print(f"note: {path}: has no header: its ids are uint16, as nanoGPT writes"
                          " them", file=sys.stderr)
        if self.size < least:
            raise UserError(f"{path}: {self.size} tokens, expected at least {least}{why}")
        self.weights = weights_beside(str(path))
        if not os.path.lexists(self.weights):
            self.weights = None
        else:
            with open_input(self.weights, hint) as f:
                check_size(f, self.size, f"a byte for each token of {path}", hint)

    def read(self, f, start, count):
        """Read tokens start .. start + count - 1 from the open file; raises UserError for an id
        outside 0 .. V - 1."""
        tokens = np.empty(count, self.dtype)
        f.seek(self.offset + start * self.dtype.itemsize)
        read_into(f, tokens)
        check_ids(self.path, tokens, self.V)
        return tokens

    def read_weights(self, f, start, count):
        """As `read`, of the open file of weights: bytes."""
        weights = np.empty(count, np.uint8)
        f.seek(start)
        read_into(f, weights)
        return weights

    def check(self, count):
        with open_input(self.path, self.hint) as f:
            for start in range(0, min(count, self.size), FILE_CHUNK):
                self.read(f, start, min(FILE_CHUNK, self.size - start))


def is_raw_uint16(start, size, V):
    """Whether the ids of a file of `size` bytes without a header, which begins with the bytes
    `start`, are uint16: as int32, some are none of V, and both halves of such an int32 are as
    large, by their medians. (The upper halves of true int32 ids are nearly all 0.) Text and NumPy's
    files are no ids."""
    start = start[: len(start) // 4 * 4]
    ids = np.frombuffer(start, "<i4")
    if not ids.size or V > 1 << 16 or size % 4 == 0 and 0 <= ids.min() and ids.max() < V:
        return False

    is_text = not (np.frombuffer(start, np.uint8) < 9).any()
    if is_text or start.startswith(b"\x93NUMPY"):
        return False
    lower, upper = np.median(np.frombuffer(start, "<u2").reshape(-1, 2), axis=0)
    return bool(0 < lower <= 2 * upper <= 4 * lower)


def check_ids(path, tokens, V):
    low = int(tokens.min())
    high = int(tokens.max())
    if low < 0 or high >= V:
        raise UserError(f"{path}: token id {low if low < 0 else high}, expected 0 to {V - 1}: the"
                        " file was made for another vocabulary than the model's")


def open_tokens(path, V, least=1, why=""):
    """Check every token of a file, and map it into memory, as a 1-D integer array."""
    file = TokenFile(path, V, least, why)
    file.check(file.size)
    return np.memmap(path, file.dtype, "r", file.offset, (file.size,))


def is_pattern(name):
    return glob.has_magic(name) and not os.path.exists(name)


def find_files(pattern):
    """The token files of a pattern, without those of weights."""
    if not is_pattern(pattern):
        return [pattern]
    found = sorted(glob.glob(pattern))
    return [path for path in found if not path.endswith("_weights.bin")]


def names_shards(data):
    """Whether -i names training shards, by path or glob, rather than a prefix."""
    return data.endswith(".bin") or is_pattern(data) and not os.path.exists(f"{data}_train.bin")


def tokenizer_beside(data):
    """PREFIX_tokenizer.bin, which prepro scripts write beside PREFIX_train.bin, PREFIX_val.bin; ""
    for other names. Of a pattern, the first such file that is there; raises UserError if there are
    several, and they differ."""
    if not names_shards(data):
        return f"{data}_tokenizer.bin"
    matches = (re.match(r"(.*)(train|val)[^/\\]*$", path) for path in [*find_files(data), data])
    paths = [f"{match[1]}tokenizer.bin" for match in matches if match]
    there = [path for path in dict.fromkeys(paths) if os.path.isfile(path)]
    for path in there[1:]:
        if not filecmp.cmp(path, there[0], shallow=False):
            raise UserError(f"{data}: matches files of different vocabularies, {there[0]} and"
                            f" {path}: choose files of one")
    return next(iter(there + paths[-1:]), "")


def validation_name(train):
    """data/x_train_*.bin -> data/x_val_*.bin; data/x_train/*.bin -> data/x_val/*.bin."""
    directory, name = os.path.split(train)
    if "train" in name:
        name = "val".join(name.rsplit("train", 1))
    else:  # the word, not a part of one
        directory = re.sub(r"^(.*(?<![A-Za-z]))train(?![A-Za-z])", r"\1val", directory)
    return os.path.join(directory, name)


def data_paths(settings):
    """[training shards, validation shards] that -i and -j name; with -v 0, none of the second.
    Raises UserError when a pattern matches nothing, or when -j is needed and cannot be made from
    -i."""
    train = settings.data if names_shards(settings.data) else f"{settings.data}_train.bin"
    val = settings.val_data or validation_name(train)
    if settings.val_every and val == train and not settings.val_data:
        raise UserError(f"-i {train}: has no 'train' in it to replace by 'val' for the validation"
                        " files: pass -j FILES")
    paths = []
    for flag, pattern, needed in (("-i", train, True), ("-j", val, settings.val_every)):
        paths.append(find_files(pattern) if needed else [])
        if needed and not paths[-1]:
            raise UserError(f"{flag} {pattern}: no file matches; {tokens_hint(pattern)}")
    return paths


def open_data(settings, V, rank=0, ranks=1):
    """The loaders of training data, whose batches the ranks share, and of validation data: None
    with -v 0."""
    train_paths, val_paths = data_paths(settings)
    shuffle = len(train_paths) > 1 if settings.shuffle == -1 else bool(settings.shuffle)
    return (DataLoader(train_paths, V, settings.B, settings.T, shuffle, settings.spread, rank,
                       ranks, settings.seed, single=bool(settings.overfit_single_batch)),
            DataLoader(val_paths, V, settings.B, settings.T, least=settings.T + 1,
                       why=" for one sequence (T+1); take a smaller -t, or more text") if val_paths
            else None)


class DataLoader:
    """Reads (B, T) batches from one or more token files, in order or shuffled, and starts over at
    their end.

    A batch is a sample as in shuffle.py: its rows are consecutive, and the targets are the inputs
    shifted by one token. With `spread`, row b of sample i is instead row i of the b-th of B equal
    parts of the shard. Rank `rank` of `ranks` reads every ranks-th sample; with `single`, always
    the first. position: after the last batch of all ranks. whole_batches: of whole_set.
    num_batches: of B*T tokens, as llm.c counts. batches_per_epoch: with all targets."""

    def __init__(self, paths, V, B, T, shuffle=False, spread=False, rank=0, ranks=1, seed=SEED,
                 least=None,
                 single=False, why=" for one batch (B*T+1); take a smaller -b or -t, or more text"):
        self.B = B
        self.T = T
        self.spread = spread
        self.rank = rank
        self.ranks = ranks
        self.single = single
        self.shards = [TokenFile(path, V, least or B * T + 1, why) for path in paths]
        self.has_weights = any(shard.weights for shard in self.shards)
        if self.has_weights and not all(shard.weights for shard in self.shards):
            raise UserError(f"{next(s.path for s in self.shards if not s.weights)}: no file of"
                            " weights beside it, expected one for each shard or for none")
        # samples with all their targets
        self.counts = [(shard.size - 1) // (B * T) for shard in self.shards]
        self.num_batches = max(1, sum(shard.size // (B * T) for shard in self.shards))
        self.batches_per_epoch = sum(self.counts)
        # rounded up
        self.whole_batches = sum(-(-((shard.size - 1) // T) // B) for shard in self.shards)
        # another vocabulary's file should end the run now, not hours later
        self.shards[0].check(1 << 27)
        self.seek(first_position(self.counts, shuffle, seed))

    def seek(self, position, found_in="the checkpoint"):
        """Continue at a position; raises UserError, which names `found_in`, if these files do not
        have it."""
        shards = len(self.shards)
        shuffle = position.shuffle
        count = -1
        if position.shard < shards and (shuffle is None or len(shuffle.shards) == shards):
            count = self.counts[position.number()]
        if position.sample > count or shuffle is not None and len(shuffle.samples) != count:
            shuffled = "" if shuffle is None else f", shuffled, of {len(shuffle.shards)}"
            raise UserError(f"{found_in}: is at batch {position.sample} of data shard"
                            f" {position.shard}{shuffled}, which these token files do not have:"
                            " resume with the -i, -b and -t of the first run")
        self.position = position
        self.ahead = []  # ahead: (batch, position after it), read but not used yet

    def next_batch(self):
        """Return inputs and targets (B, T), int32, and, if there are, the targets' weights (B, T),
        float32. A file's end with fewer than B*T targets is skipped, as in llm.c."""
        self.read_ahead(1)
        batch, self.position = self.ahead.pop(0)
        return batch

    def read_ahead(self, count):
        """Read the next `count` batches now, so that next_batch cannot fail."""
        while len(self.ahead) < count:
            begin = self.ahead[-1][1] if self.ahead else self.position
            # one for each rank
            samples = list(itertools.islice(samples_from(begin, self.counts), self.ranks))
            _, number, index = samples[self.rank]
            position = samples[-1][0]
            if self.single:
                _, number, index = samples[0]
                position = begin
            rows = (range(index, self.B * self.counts[number], self.counts[number]) if self.spread
                    else
                    range(index * self.B, (index + 1) * self.B))
            self.ahead.append((self.read(number, rows), position))

    def whole_set(self):
        """Yield batches that cover each file once. The ends of the files come last, each a smaller
        batch of whole rows. (If one lacks only the last target of a full batch, llm.c reads the
        first batch again.)"""
        for number, count in enumerate(self.counts):
            yield from (self.read(number, range(i * self.B, (i + 1) * self.B))
                        for i in range(count))
        for number, (shard, count) in enumerate(zip(self.shards, self.counts)):
            if rows := range(count * self.B, (shard.size - 1) // self.T):
                yield self.read(number, rows)

    def read(self, number, rows):
        """Return a batch, as next_batch, of rows of shard `number`; row i is T+1 tokens from i*T
        on."""
        shard = self.shards[number]
        T = self.T
        with open_input(shard.path, shard.hint) as f:
            tokens = np.stack([shard.read(f, row * T, T + 1) for row in rows]).astype(np.int32)
        if not self.has_weights:
            return tokens[:, :-1], tokens[:, 1:]
        with open_input(shard.weights, shard.hint) as f:
            weights = np.stack([shard.read_weights(f, row * T + 1, T) for row in rows])
        return tokens[:, :-1], tokens[:, 1:], weights.astype(np.float32)


NO_TARGETS = "none of its targets has a weight"  # why an update is skipped


def total_weight(batches):
    """The sum of all weights of an update's batches; None if they have none."""
    if len(batches[0]) == 2:
        return None
    return math.fsum(float(np.sum(weights, dtype=np.float64)) for *_, weights in batches)
