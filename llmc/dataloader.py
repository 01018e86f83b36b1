"""Token files and the loader that reads batches from them.

A token file is raw int32 (llm.c of April 2024), or a header [2] count and uint16 (llm.c of today); readers tell the two
apart by the magic.
"""

import glob
import os
import re

import numpy as np

from llmc.errors import UserError
from llmc.files import (CHUNK, HEADER_BYTES, KINDS, TOKENS_MAGIC, check_size, make_header, open_input, read_header,
                        read_into, replacing)

TOKENS_MEND = "make it with: python prepro_tinyshakespeare.py (of your own text: prepro_text.py)"


def write_tokens(path, pieces, count, format="int32"):
    """Write `count` tokens that arrive as an iterable of integer arrays; format 'int32' or 'uint16'."""
    written = 0
    with replacing(path) as f:
        if format == "uint16":
            f.write(make_header(TOKENS_MAGIC, 1, count))
        for piece in pieces:
            f.write(np.asarray(piece).astype("<i4" if format == "int32" else "<u2"))
            written += len(piece)
        if written != count:
            raise ValueError(f"{path}: {count} tokens announced, {written} given")


def open_tokens(path, V, least=1, why=""):
    """Map a token file into memory, as a 1-D integer array on disk.

    Raises UserError when it has fewer than `least` tokens (`why` ends the message), an id that is not below V, or a
    size that cannot be.
    """
    with open_input(path, TOKENS_MEND) as f:
        size = os.fstat(f.fileno()).st_size
        start = f.read(HEADER_BYTES)
        magic = int(np.frombuffer(start[:4], "<i4")[0]) if len(start) >= 4 else None
        if magic == TOKENS_MAGIC:
            f.seek(0)
            header = read_header(f, TOKENS_MAGIC, TOKENS_MEND)
            version, count = int(header[1]), int(header[2])
            if version != 1:
                raise UserError(f"{path}: token file version {version}, expected 1; {TOKENS_MEND}")
            if count < 0:
                raise UserError(f"{path}: header says {count} tokens; {TOKENS_MEND}")
            check_size(f, HEADER_BYTES + 2 * count, f"{count} uint16 tokens", TOKENS_MEND)
            dtype, offset = "<u2", HEADER_BYTES
        else:
            if magic in KINDS:
                raise UserError(f"{path}: it is a {KINDS[magic]} (magic {magic}), expected a token file; {TOKENS_MEND}")
            if size % 4:
                raise UserError(f"{path}: {size} bytes, expected a whole number of int32 tokens; {TOKENS_MEND}")
            dtype, offset, count = "<i4", 0, size // 4
        if count < least:
            raise UserError(f"{path}: {count} tokens, expected at least {least}{why}")
        f.seek(offset)
        for begin in range(0, count, CHUNK):  # read, not mapped: a file that shrinks meanwhile is a line
            piece = np.empty(min(CHUNK, count - begin), dtype)
            read_into(f, piece)
            check_ids(path, piece, V)
    return np.memmap(path, dtype, "r", offset, (count,))


def check_ids(path, tokens, V):
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= V:
        raise UserError(f"{path}: token id {low if low < 0 else high}, expected 0 to {V - 1}: the file was made for"
                        " another vocabulary than the model's")


def is_pattern(name):
    """Whether a name is a glob: one that no file has."""
    return glob.has_magic(name) and not os.path.exists(name)


def find_files(pattern):
    """The files of a name or a glob, sorted; a directory that exists is meant as it is written, brackets and all."""
    if not is_pattern(pattern):
        return [pattern]
    directory, name = os.path.split(pattern)
    return sorted(glob.glob(os.path.join(glob.escape(directory) if os.path.isdir(directory) else directory, name)))


def names_shards(data):
    """Whether -i is the name or the glob of training shards, not a prefix."""
    return data.endswith(".bin") or is_pattern(data) and not os.path.exists(f"{data}_train.bin")


def tokenizer_beside(data):
    """PREFIX_tokenizer.bin, where a prepro script writes the vocabulary of PREFIX_train.bin; "" for shards that are not
    named so."""
    if not names_shards(data):
        return f"{data}_tokenizer.bin"
    directory, name = os.path.split(data)
    prefix, train, _ = name.rpartition("train")
    return os.path.join(directory, f"{prefix}tokenizer.bin") if train else ""


def data_paths(settings):
    """(training shards, validation shards) that -i and -j name; raises UserError when a pattern matches nothing."""
    data = settings.data
    if names_shards(data):
        val = settings.val_data or re.sub(r"train(?!.*train)", "val", data)
        if val == data:
            raise UserError(f"-i {data}: there is no 'train' in it to make the validation files' name from: pass -j"
                            " FILES too")
        train = data
    else:
        train, val = f"{data}_train.bin", settings.val_data or f"{data}_val.bin"
    paths = []
    for flag, pattern in (("-i", train), ("-j", val)):
        paths.append(find_files(pattern))
        if not paths[-1]:
            raise UserError(f"{flag} {pattern}: no file matches; {TOKENS_MEND}")
    return paths


def open_data(settings, V):
    """The loaders of the training and the validation data, of which one sequence will do, or less if none is read."""
    train_paths, val_paths = data_paths(settings)
    least = (settings.T + 1, " for one sequence (T+1); take a smaller -t, or more text") if settings.val_every else (1,)
    return (DataLoader(train_paths, V, settings.B, settings.T, settings.spread),
            DataLoader(val_paths, V, settings.B, settings.T, False, *least))


class DataLoader:
    """Reads (B, T) batches in order from one or more token files, and starts over when the last one is used up.

    A batch needs B*T+1 tokens (the targets are the inputs, one token on) and advances by B*T: its rows follow one
    another. With `spread`, row b reads in the b-th of B equal parts of a file instead, and advances by T.

    Every token is checked at the start. Then one file is open at a time, and read batch by batch; each batch is checked
    again, so that a file that somebody changes meanwhile ends as an error, too.

    num_batches: llm.c's count, of B*T tokens; batches_per_epoch: those whose last target is there, too.
    """

    def __init__(self, paths, V, B, T, spread=False, least=None,
                 why=" for one batch (B*T+1); take a smaller -b or -t, or more text"):
        self.V, self.B, self.T, self.spread, self.file = V, B, T, spread, None
        self.shards = [TokenFile(path, open_tokens(path, V, least or B * T + 1, why)) for path in paths]
        self.num_batches = max(1, sum(shard.size // (B * T) for shard in self.shards))
        self.batches_per_epoch = sum(map(self.batches_of, range(len(self.shards))))
        self.reset()

    def reset(self):
        self.seek(0, 0)

    def seek(self, shard, sample, found_in="the checkpoint"):
        """Continue after `sample` batches of shard number `shard`; raises UserError when the data is shorter."""
        if shard >= len(self.shards) or sample > self.batches_of(shard):
            raise UserError(f"{found_in}: is at batch {sample} of data shard {shard}, which these token files do not"
                            " have: resume with the -i, -b and -t of the first run")
        self.shard, self.sample = shard, sample

    def batches_of(self, shard):
        """Whole batches in a shard, the last target included."""
        return (self.shards[shard].size - 1) // (self.B * self.T)

    def next_batch(self):
        """inputs (B, T) and targets (B, T), int32. What is left at the end of a file, fewer than B*T targets, is not
        trained on, as in llm.c."""
        while self.sample >= self.batches_of(self.shard):
            self.shard, self.sample = (self.shard + 1) % len(self.shards), 0
        B, T = self.B, self.T
        stride = self.batches_of(self.shard) * T if self.spread else T  # from one row to the next
        first = self.sample * (T if self.spread else B * T)
        self.sample += 1
        return self.read(self.shard, range(first, first + B * stride, stride))

    def whole_set(self):
        """Batches from the start, each position once: llm.c's num_batches, then what is left of each file, a smaller
        batch of whole rows. Where nothing but one last target is missing, llm.c's last batch is another first one, and
        so it is here: losses of a run can be held against llm.c's."""
        self.reset()
        whole = [bool(self.batches_of(shard)) for shard in range(len(self.shards))]
        for _ in range(sum(shard.size // (self.B * self.T) for shard, one in zip(self.shards, whole) if one)):
            yield self.next_batch()
        for number, shard in enumerate(self.shards):
            done = self.batches_of(number) * self.B * self.T
            if not whole[number] or shard.size % (self.B * self.T):
                starts = range(done, shard.size - self.T, self.T)
                if starts:
                    yield self.read(number, starts)

    def read(self, number, starts):
        """inputs and targets (len(starts), T), int32, of the rows that begin there in shard `number`."""
        shard, T = self.shards[number], self.T
        if self.file is None or self.file.name != shard.path:
            if self.file:
                self.file.close()
            self.file = open_input(shard.path, TOKENS_MEND)
        rows = np.empty((len(starts), T + 1), shard.dtype)
        for row, start in zip(rows, starts):
            self.file.seek(shard.offset + start * shard.dtype.itemsize)
            read_into(self.file, row)
        check_ids(shard.path, rows, self.V)
        rows = rows.astype(np.int32)
        return rows[:, :-1], rows[:, 1:]


class TokenFile:
    """Where the tokens of a file are that has been checked: `tokens` are open_tokens'."""

    def __init__(self, path, tokens):
        self.path, self.dtype, self.offset, self.size = path, tokens.dtype, tokens.offset, tokens.size
