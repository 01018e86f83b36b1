"""The files of models and optimizer states, in llm.c's formats (doc/formats.md): a reader and a
writer for each. A model has version 1 (float32, V rows in the vocabulary's tensors), 3 (float32, Vp
rows) or 5 (bfloat16, Vp rows)."""

import dataclasses
import os
import zlib
from typing import NamedTuple

import numpy as np

from llmc.errors import UserError
from llmc.files import (HEADER_BYTES, OPTIMIZER_MAGIC, check_size, chunks, export_hint, make_header,
                        open_input,
                        read_header, read_into, replacing)
from llmc.shuffle import Position, read_shuffle, write_shuffle
from llmc.tensors import allocate, bf16_bits, bf16_to_float32, check_finite, flat, table_elements

CRC = slice(45, 47)  # a state's header slots of 1 and the CRC-32 of the file without these
U64 = [20, 21, 30, 31, 32, 33]  # a state's header slots of three u64: sampler state, shard, sample


def padded(V):
    """V rounded up to the next multiple of 128."""
    return -(-V // 128) * 128


def without_padding(config, params, V):
    """The Config of a model whose vocabulary has V tokens: rows beyond them are padding, and are
    set to 0. (It may also have more tokens than the model has rows: one that was added, say.)"""
    V = min(V, config.V)
    for name, row in params.table.items():
        if row.vocabulary:
            getattr(params, name)[V:] = 0
    return dataclasses.replace(config, V=V)


def tensors_in_file(config, params, version):
    """Yield the tensors of a checkpoint, flat, in its order; of the vocabulary's, the rows that the
    file has."""
    rows = config.Vp if config.PADDED and version != 1 else config.V
    for name, size in config.file_tensors():
        tensor = np.zeros(size, np.float32) if name is None else getattr(params, name)
        yield (tensor[:rows] if name and params.table[name].vocabulary else tensor).reshape(-1)


def read_model(path, architecture, hint=None):
    """(config, params) of a file: float32, Vp rows, a multiple of 128. Raises UserError for damage,
    NaN, infinity."""
    hint = hint or export_hint(path)
    with open_input(path, hint) as f:
        header = read_header(f, architecture.MAGIC, hint, architecture.Config.HEADER_BYTES)
        version = int(header[1])
        stored = architecture.Config.from_header(header)
        if version not in (1, 3, 5):
            raise UserError(f"{path}: model version {version}, expected 1, 3 or 5 (2 and 4 are"
                            f" mixed layouts that llm.c used for three days in May 2024); {hint}")
        for field in dataclasses.fields(stored):
            if field.default is dataclasses.MISSING and (value := getattr(stored, field.name)) < 1:
                raise UserError(f"{path}: header field {field.name} is {value}, expected at least"
                                f" 1; {hint}")
        if wrong := stored.fault():
            raise UserError(f"{path}: {wrong}; {hint}")
        size = (stored.HEADER_BYTES + sum(size for _, size in stored.file_tensors())
                * (2 if version == 5 else 4))
        check_size(f, size, f"version {version}, {stored.describe()}", hint)
        config = dataclasses.replace(stored, Vp=padded(stored.Vp))
        params = allocate(architecture.parameter_table(config))
        for tensor in tensors_in_file(stored, params, version):
            for piece in chunks(tensor):
                data = np.empty(piece.size, np.uint16) if version == 5 else piece
                read_into(f, data)
                if version == 5:
                    bf16_to_float32(data, out=piece)
    config = without_padding(config, params, config.V)  # whatever a file holds there
    check_finite(path, params, hint)
    return config, params


def write_model(path, config, params, version=3):
    """Write a model checkpoint: version 1, 3 (float32) or 5 (bfloat16, rounded to nearest even).
    Returns its CRC-32."""
    header = config.to_header(version)
    crc = zlib.crc32(header)
    with replacing(path) as f:
        f.write(header)
        for tensor in tensors_in_file(config, params, version):
            for piece in chunks(tensor):
                piece = bf16_bits(piece) if version == 5 and piece.dtype == np.float32 else piece
                f.write(piece)
                crc = zlib.crc32(piece, crc)
    return crc


class Progress(NamedTuple):
    """Where a run stands, apart from its weights and moments."""

    step: int  # updates done
    rng_state: int
    position: Position  # in the training data; None if it cannot be continued
    batch: tuple  # (B, T, spread), which the position depends on; (0, 0, 0) from llm.c
    model_crc: int | None = None  # CRC-32 of the model file that belongs to it; None from llm.c


class SeveralRanks(UserError):
    """A state of which each rank's file has a share; raised before anything is read."""


@dataclasses.dataclass
class Owned:
    """The optimizer state of a run on one device, on the host: flat float32 arrays in the order of
    the table."""

    table: dict
    state: dict  # name, as in the optimizer's STATE -> array
    # float32 weights, if the model's are rounded; or room to read them
    exact: np.ndarray | None = None

    rank, ranks = 0, 1  # llmc/gpu/saver.py has the share of one of several

    def in_file(self, has_exact):
        """{name: array} in the order of a state file; None: there is no room for float32
        weights."""
        return self.state | ({"float32 weights": self.exact} if has_exact else {})

    def check(self, where, hint):
        """Raise UserError for values that are not finite."""
        for kind, array in self.in_file(self.exact is not None).items():
            if not all(np.isfinite(piece).all() for piece in chunks(array)):
                raise UserError(f"{where}: the optimizer's {kind}: NaN or infinite values; {hint}")

    def read(self, f, header, hint):
        """Fill the arrays from an open state file; returns the offset of the data order after
        them."""
        size = table_elements(self.table)
        arrays = self.in_file(header[4]).values()
        # llm.c without ZeRO: each rank's file has all
        if header[2] > 1 and not is_whole(f, len(arrays) * size):
            raise SeveralRanks(f"{f.name}: is of {header[2]} ranks: resume on GPUs: python"
                               " train_gpt2_cuda.py")
        end = check_state_size(f, header, len(arrays) * size, size, hint)
        check_crc(f, header, hint)
        for i, array in enumerate(arrays):
            if array is not None:
                f.seek(HEADER_BYTES + 4 * i * size)
                read_into(f, array)
        return end


def owned_by_one(optimizer, exact=None):
    """The Owned of a run on one device. exact: None, or Tensors."""
    tensors = [getattr(optimizer, name) for name in optimizer.STATE]
    return Owned(tensors[0].table, dict(zip(optimizer.STATE, map(flat, tensors))), exact
                 and flat(exact))


def write_optimizer_state(path, owned, progress):
    """Write a rank's share, and where the run stands."""
    shard, sample, shuffle = progress.position
    ranks = owned.ranks
    header = make_header(OPTIMIZER_MAGIC, 1 if ranks == 1 else 2, ranks, owned.rank,
                         int(owned.exact is not None), int(shuffle is not None))
    header[10] = progress.step
    header[U64] = np.array([progress.rng_state, shard, sample], "<u8").view("<i4")
    header[40:43] = progress.batch
    if progress.model_crc is not None:
        header[43:45] = 1, np.uint32(progress.model_crc).view(np.int32)
    with replacing(path) as f:
        f.write(header)
        for array in owned.in_file(owned.exact is not None).values():
            f.write(array)
        if shuffle is not None:
            write_shuffle(f, shuffle)
        f.flush()
        header[CRC] = 1, np.uint32(crc_of_state(f.name, header)).view(np.int32)
        f.seek(0)
        f.write(header)


def read_optimizer_state(path, owned, hint="train again"):
    """Fill `owned` from a state; `path` is rank 0's file. Returns (Progress, whether the files have
    float32 weights; without them, owned.exact is not filled). Raises UserError for a missing or
    damaged file, or another model's."""
    with open_input(path, hint) as f:
        header = read_state_header(f, hint)
        end = owned.read(f, header, hint)
        shuffle = read_shuffle(f, end, hint) if header[5] else None
    has_exact = bool(header[4])
    dataclasses.replace(owned, exact=owned.exact if has_exact else None).check(path, hint)
    rng_state, shard, sample = header[U64].view("<u8").tolist()
    crc = int(header[44:45].view("<u4")[0]) if header[43] == 1 else None
    position = Position(shard, sample, shuffle)
    # llm.c's ranks shuffle each in an order of its own: not to be continued
    if header[2] > 1 and not header[40]:
        position = None if shuffle else position._replace(sample=position.sample * int(header[2]))
    return Progress(int(header[10]), rng_state, position, tuple(header[40:43].tolist()),
                    crc), has_exact


def read_state_header(f, hint):
    """Read and check the header of an open state file, (256,) int32."""
    header = read_header(f, OPTIMIZER_MAGIC, hint)
    version, ranks, rank, master, shuffled = (int(x) for x in header[1:6])
    expected = 2 if ranks > 1 and header[40] else 1
    flags = {master, shuffled, int(header[CRC][0])}
    if version != expected or not 0 <= rank < ranks or not flags <= {0, 1} or header[10] < 0:
        raise UserError(f"{f.name}: version {version}, rank {rank} of {ranks}, master weights"
                        f" {master}, shuffled {shuffled}, step {header[10]}; expected version 1,"
                        f" of several ranks of this project's 2; {hint}")
    return header


def crc_of_state(path, header):
    """CRC-32 of a state file with this header, in which the slots of its own CRC are 0."""
    header = header.copy()
    header[CRC] = 0
    return zlib.crc32(np.memmap(path, np.uint8, "r")[HEADER_BYTES:], zlib.crc32(header))


def check_crc(f, header, hint):
    """Raise UserError unless an open state file's bytes are those that were written. llm.c's files,
    and older ones, have no CRC-32."""
    has_crc, saved = header[CRC].view("<u4").tolist()
    if has_crc and crc_of_state(f.name, header) != saved:
        raise UserError(f"{f.name}: is damaged (another CRC-32 than when it was saved); {hint}")


def is_whole(f, elements):
    """Whether a state file has so many elements, those of all ranks, whatever the number of
    ranks."""
    return os.fstat(f.fileno()).st_size >= HEADER_BYTES + 4 * elements


def check_state_size(f, header, elements, parameters, hint):
    """Check the size of a state file, and return the offset after its elements, where the data
    order begins."""
    end = HEADER_BYTES + 4 * elements
    if not header[5] or not is_whole(f, elements):
        check_size(f, end, f"the optimizer of a model with {parameters} parameters", hint)
    return end


def rank_path(path, rank):
    """state_00000500_00000.bin -> the path of another rank's file. rank may also be a pattern for
    the five digits."""
    return f"{path[:-9]}{rank:0>5}.bin"
