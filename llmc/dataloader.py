"""Token files and the loader that reads batches from them.

A token file is raw int32 (llm.c of April 2024), or a header with [2] the count, then uint16 (llm.c of today). The count
has 64 bits here; llm.c reads the lower half. Readers tell the two formats apart by the magic.
"""

import contextlib
import glob
import itertools
import os
import re

import numpy as np

from llmc.errors import UserError
from llmc.files import (CHUNK, HEADER_BYTES, KINDS, TOKENS_MAGIC, check_size, make_header, open_input, read_header,
                        read_into, replacing)
from llmc.shuffle import SEED, Position, first_position, samples_from
from llmc.threads import read_ahead

TOKENS_HINT = "make it with: python prepro_tinyshakespeare.py (of your own text: prepro_text.py)"
CHECK_AHEAD = 1 << 27  # tokens of a file that are checked before its use, in about a second; the others when read


def write_tokens(path, pieces, count, format="int32"):
    """Write `count` tokens from an iterable of integer arrays, as 'int32' or 'uint16'; ValueError for another count."""
    written = 0
    with replacing(path) as f:
        if format == "uint16":
            header = make_header(TOKENS_MAGIC, 1)
            header[2:4] = np.array([count], "<u8").view("<i4")
            f.write(header)
        for piece in pieces:
            f.write(np.asarray(piece).astype("<i4" if format == "int32" else "<u2"))
            written += len(piece)
        if written != count:
            raise ValueError(f"{path}: {count} tokens announced, {written} given")


class TokenFile:
    """Where a file's tokens are: dtype, offset in bytes, and size, the number of tokens, by its header and byte size.
    The tokens themselves are checked later.

    Raises UserError for fewer than `least` tokens (`why` ends the message), or an impossible size.
    """

    def __init__(self, path, V, least=1, why=""):
        self.path, self.V = path, V
        with open_input(path, TOKENS_HINT) as f:
            self.bytes = os.fstat(f.fileno()).st_size
            start = f.read(HEADER_BYTES)
            magic = int(np.frombuffer(start[:4], "<i4")[0]) if len(start) >= 4 else None
            if magic == TOKENS_MAGIC:
                f.seek(0)
                header = read_header(f, TOKENS_MAGIC, TOKENS_HINT)
                version, self.size = int(header[1]), int(header[2:4].view("<u8")[0])
                if version != 1:
                    raise UserError(f"{path}: token file version {version}, expected 1; {TOKENS_HINT}")
                check_size(f, HEADER_BYTES + 2 * self.size, f"{self.size} uint16 tokens", TOKENS_HINT)
                self.dtype, self.offset = np.dtype("<u2"), HEADER_BYTES
            else:
                if magic in KINDS:
                    raise UserError(f"{path}: it is a {KINDS[magic]} (magic {magic}), expected a token file;"
                                    f" {TOKENS_HINT}")
                if self.bytes % 4:
                    raise UserError(f"{path}: {self.bytes} bytes, expected a whole number of int32 tokens;"
                                    f" {TOKENS_HINT}")
                self.dtype, self.offset, self.size = np.dtype("<i4"), 0, self.bytes // 4
        if self.size < least:
            raise UserError(f"{path}: {self.size} tokens, expected at least {least}{why}")

    def open(self):
        """Open the file for reading; raises UserError if its size has changed."""
        f = open_input(self.path, TOKENS_HINT)
        if os.fstat(f.fileno()).st_size != self.bytes:
            with f:
                check_size(f, self.bytes, f"the {self.size} tokens that it had when the run began", TOKENS_HINT)
        return f

    def read(self, f, start, count):
        """Read tokens start .. start + count - 1 from the open file; raises UserError for an id outside 0 .. V - 1, or
        if the file has shrunk (which would kill the process if it were mapped)."""
        tokens = np.empty(count, self.dtype)
        f.seek(self.offset + start * self.dtype.itemsize)
        read_into(f, tokens)
        check_ids(self.path, tokens, self.V)
        return tokens

    def check(self, count):
        """Check the first `count` tokens, or all if there are fewer: one piece each time the generator advances."""
        with self.open() as f:
            for start in range(0, min(count, self.size), CHUNK):
                self.read(f, start, min(CHUNK, self.size - start))
                yield


def check_ids(path, tokens, V):
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= V:
        raise UserError(f"{path}: token id {low if low < 0 else high}, expected 0 to {V - 1}: the file was made for"
                        " another vocabulary than the model's")


def open_tokens(path, V, least=1, why=""):
    """Check every token of a file, and map it into memory, as a 1-D integer array."""
    file = TokenFile(path, V, least, why)
    exhaust(file.check(file.size))
    return np.memmap(path, file.dtype, "r", file.offset, (file.size,))


def exhaust(iterator):
    for _ in iterator:
        pass


def is_pattern(name):
    """Whether a name is a glob, and not the name of a file."""
    return glob.has_magic(name) and not os.path.exists(name)


def find_files(pattern):
    """Return the files of a name or a glob, sorted. An existing directory is taken literally, brackets and all."""
    if not is_pattern(pattern):
        return [pattern]
    directory, name = os.path.split(pattern)
    return sorted(glob.glob(os.path.join(glob.escape(directory) if os.path.isdir(directory) else directory, name)))


def names_shards(data):
    """Whether -i names training shards, by path or glob, rather than a prefix."""
    return data.endswith(".bin") or is_pattern(data) and not os.path.exists(f"{data}_train.bin")


def tokenizer_beside(data):
    """Return PREFIX_tokenizer.bin, where a prepro script writes the vocabulary of PREFIX_train.bin; "" if shards are
    not named like this."""
    if not names_shards(data):
        return f"{data}_tokenizer.bin"
    directory, name = os.path.split(data)
    prefix, train, _ = name.rpartition("train")
    return os.path.join(directory, f"{prefix}tokenizer.bin") if train else ""


def validation_name(train):
    """data/x_train_*.bin -> data/x_val_*.bin; data/x_train/*.bin -> data/x_val/*.bin."""
    directory, name = os.path.split(train)
    if "train" in name:
        name = "val".join(name.rsplit("train", 1))
    else:  # the word, not a part of one
        directory = re.sub(r"^(.*(?<![A-Za-z]))train(?![A-Za-z])", r"\1val", directory)
    return os.path.join(directory, name)


def data_paths(settings):
    """Return (training shards, validation shards) that -i and -j name; with -v 0, no validation shards. Raises
    UserError when a pattern matches nothing, or when -j is needed and cannot be made from -i."""
    train = settings.data if names_shards(settings.data) else f"{settings.data}_train.bin"
    val, val_flag = settings.val_data, "-j"
    if not val:
        val, val_flag = validation_name(train), "-j, made from -i,"
        if val == train and settings.val_every:
            raise UserError(f"-i {train}: there is no 'train' in it to make the validation files' name from: pass -j"
                            " FILES too")
    paths = []
    for flag, pattern, needed in (("-i", train, True), (val_flag, val, settings.val_every)):
        paths.append(find_files(pattern) if needed else [])
        if needed and not paths[-1]:
            raise UserError(f"{flag} {pattern}: no file matches; {TOKENS_HINT}")
    return paths


def open_data(settings, V, rank=0, ranks=1):
    """Return the loaders of the training data, whose batches the ranks share, and of the validation data, which may be
    a single sequence; with -v 0, the second is None."""
    train_paths, val_paths = data_paths(settings)
    shuffle = len(train_paths) > 1 if settings.shuffle == -1 else bool(settings.shuffle)
    ahead = 2 * settings.micro_steps // ranks
    return (DataLoader(train_paths, V, settings.B, settings.T, shuffle, settings.spread, ahead, rank, ranks,
                       seed=settings.seed),
            DataLoader(val_paths, V, settings.B, settings.T, least=settings.T + 1,
                       why=" for one sequence (T+1); take a smaller -t, or more text") if val_paths else None)


class DataLoader:
    """Reads (B, T) batches from one or more token files, in order or shuffled, and starts over when all are used up.

    A batch is a sample as in shuffle.py: its rows are consecutive, and the targets are the inputs shifted by one token.
    With `spread`, row b of sample i is instead row i of the b-th of B equal parts of the shard. With several GPUs, rank
    `rank` of `ranks` takes every ranks-th sample, so that together they see the batches that one GPU would see.

    The constructor reads the headers of all files and checks the first shard's tokens. Each other shard is checked
    while the one before it is in use, by the thread that reads up to `ahead` batches before they are asked for. Two
    files are open at a time.

    position: after the last batch taken and those that the other ranks took with it.
    num_batches: of B*T tokens, as llm.c counts. batches_per_epoch: only those whose last target is there, too.
    whole_batches: those of whole_set.
    """

    def __init__(self, paths, V, B, T, shuffle=False, spread=False, ahead=2, rank=0, ranks=1, seed=SEED,
                 least=None, why=" for one batch (B*T+1); take a smaller -b or -t, or more text"):
        self.B, self.T, self.spread, self.ahead, self.rank, self.ranks = B, T, spread, ahead, rank, ranks
        self.shards = [TokenFile(path, V, least or B * T + 1, why) for path in paths]
        self.checks = [shard.check(CHECK_AHEAD) for shard in self.shards]
        self.counts = [(shard.size - 1) // (B * T) for shard in self.shards]  # samples with all their targets
        self.num_batches = max(1, sum(shard.size // (B * T) for shard in self.shards))
        self.batches_per_epoch = sum(self.counts)
        self.whole_batches = sum(count + ((shard.size - 1) // T > count * B)
                                 for shard, count in zip(self.shards, self.counts))
        self.batches = None
        self.seek(first_position(self.counts, shuffle, seed))

    def seek(self, position, found_in="the checkpoint"):
        """Continue at a position; raises UserError, which names `found_in`, if these files do not have it."""
        shards, shuffle = len(self.shards), position.shuffle
        if not (position.shard < shards and (shuffle is None or len(shuffle.shards) == shards)
                and position.sample <= self.counts[position.number()]
                and (shuffle is None or len(shuffle.samples) == self.counts[position.number()])):
            shuffled = "" if shuffle is None else f", shuffled, of {len(shuffle.shards)}"
            raise UserError(f"{found_in}: is at batch {position.sample} of data shard {position.shard}{shuffled}, which"
                            " these token files do not have: resume with the -i, -b and -t of the first run")
        if self.batches:
            self.batches.close()
        self.position = position
        exhaust(self.checks[position.number()])
        self.batches = read_ahead(self.read_from(position), self.ahead)

    def next_batch(self):
        """Return inputs (B, T) and targets (B, T), int32. The end of a file, with fewer than B*T targets, is skipped,
        as in llm.c."""
        inputs, targets, self.position = next(self.batches)
        return inputs, targets

    def read_from(self, position):
        """Yield this rank's batches from a position on, without end: (inputs, targets, Position after them)."""
        samples = samples_from(position, self.counts)
        with contextlib.closing(ShardReader(self)) as reader:
            for group in zip(*[samples] * self.ranks):  # one for each rank
                after, number, index = group[self.rank]
                stride = self.counts[number] if self.spread else 1  # from one row to the next
                first = index if self.spread else index * self.B
                rows = range(first, first + self.B * stride, stride)
                yield *reader.read(number, rows), group[-1][0]
                upcoming = after.next_number(len(self.shards))
                if upcoming is not None:
                    next(self.checks[upcoming], None)

    def whole_set(self):
        """Return batches that cover each file once, from the start. The ends of the files come last, each a smaller
        batch of whole rows. (If one lacks only the last target of a full batch, llm.c reads the first batch again.)"""
        return read_ahead(self.read_whole_set(), self.ahead)

    def read_whole_set(self):
        B, T = self.B, self.T
        with contextlib.closing(ShardReader(self)) as reader:
            for _, number, index in itertools.islice(samples_from(Position(), self.counts), sum(self.counts)):
                yield reader.read(number, range(index * B, (index + 1) * B))
            for number, (shard, count) in enumerate(zip(self.shards, self.counts)):
                rows = range(count * B, (shard.size - 1) // T)
                if rows:
                    yield reader.read(number, rows)


class ShardReader:
    """Reads rows from a loader's token files; keeps one of them open."""

    def __init__(self, loader):
        self.loader, self.number, self.file = loader, None, None

    def read(self, number, rows):
        """Return inputs and targets (rows, T), int32, of rows of shard `number`; row i is T+1 tokens from i*T on."""
        shard, T = self.loader.shards[number], self.loader.T
        if number != self.number:
            self.close()
            exhaust(self.loader.checks[number])
            self.number, self.file = number, shard.open()
        if rows.step == 1:
            tokens = shard.read(self.file, rows.start * T, len(rows) * T + 1).astype(np.int32)
            return tokens[:-1].reshape(-1, T), tokens[1:].reshape(-1, T)
        tokens = np.stack([shard.read(self.file, row * T, T + 1) for row in rows]).astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]

    def close(self):
        if self.file:
            self.file.close()
