"""The files of models, debug states and optimizer states, with one reader and one writer for each.

Functions that read a model take `parameter_table`, the architecture's function config -> table.

Model, in llm.c's format: header [2] maxT [3] V [4] L [5] NH [6] C [7] Vp, then the tensors of the table.
    Version 1: float32, V rows in the vocabulary's tensors. Version 3: float32, Vp rows. Version 5: bfloat16, Vp rows.
Debug state, in llm.c's format: header [2] B [3] T, then x, y int32 (B, T); logits float32 (B, T, V); loss; the
    gradients of the parameters, with V rows in version 1 and Vp in version 2: what a PyTorch run saw and computed, for
    the parity test. This project adds a trailer: float64 [5] learning rate, beta1, beta2, eps, weight decay; float32
    [n] the losses of n training steps on that batch; and in the header [8] trailer version (0: none), [9] n, [10]
    CRC-32 of the weights.
Optimizer state, in llm.c's format, one file per rank: header [2] ranks [3] rank [4] master weights 0/1 [5] shuffle 0/1
    [10] step, u64 at [20] sampler state, at [30] shard, at [32] sample; this project adds [40] B [41] T [42] spread,
    [43] 1 if [44] is the CRC-32 of the model file that it belongs to. Then the rank's share (zero.py) of m, v, and any
    master weights, float32; then, for shuffled data, its order (shuffle.py). Version 2: from several ranks of this
    project, which divides the parameters differently from llm.c.
"""

import contextlib
import dataclasses
import itertools
import os
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from llmc.errors import UserError
from llmc.files import (EXPORT, HEADER_BYTES, MODEL_MAGIC, OPTIMIZER_MAGIC, STATE_MAGIC, check_size, chunks,
                        make_header, open_input, read_header, read_into, replacing)
from llmc.shuffle import Position, read_shuffle, write_shuffle
from llmc.tensors import Tensors, allocate, bf16_bits, bf16_to_float32, check_finite, flat, table_elements, unpadded
from llmc.gpu.zero import Shares

EXPORT_STATE = f"{EXPORT} --debug_state 1"

# ----------------------------------------------------------------------------------------------------------------------
# models


@dataclass(frozen=True)
class Config:
    """The sizes of a model, as in the header of its checkpoint."""

    maxT: int
    V: int
    L: int
    NH: int
    C: int
    Vp: int  # V padded with zero rows (V itself in a file without padding)

    def describe(self):
        return f"maxT={self.maxT} V={self.V} L={self.L} NH={self.NH} C={self.C} Vp={self.Vp}"


def padded(V):
    """V rounded up to the next multiple of 128."""
    return -(-V // 128) * 128


def read_config(f, mend):
    """Return (version, Config) from the header of an open model checkpoint; raises UserError for an invalid field."""
    header = read_header(f, MODEL_MAGIC, mend)
    version, maxT, V, L, NH, C, Vp = (int(x) for x in header[1:8])
    if version in (2, 4):
        raise UserError(f"{f.name}: version {version}, a mixed bfloat16 layout that llm.c used for three days in May"
                        f" 2024; expected 1, 3 or 5; {mend}")
    if version not in (1, 3, 5):
        raise UserError(f"{f.name}: model version {version}, expected 1, 3 or 5; {mend}")
    if version == 1:
        Vp = V
    for name, value in dict(maxT=maxT, V=V, L=L, NH=NH, C=C, Vp=Vp).items():
        if value < 1:
            raise UserError(f"{f.name}: header field {name} is {value}, expected at least 1; {mend}")
    if C % NH:
        raise UserError(f"{f.name}: C={C} is not divisible by NH={NH}; {mend}")
    if Vp < V:
        raise UserError(f"{f.name}: padded vocabulary Vp={Vp} is smaller than V={V}; {mend}")
    return version, Config(maxT, V, L, NH, C, Vp)


def read_model(path, parameter_table, mend=EXPORT):
    """Read a model checkpoint of version 1, 3 or 5.

    Returns (config, params): params is float32 and padded to Vp rows, a multiple of 128, whatever the file has.
    Raises UserError for anything but a whole, finite, well-formed model.
    """
    with open_input(path, mend) as f:
        version, config = read_config(f, mend)
        rows, elements = config.Vp, table_elements(parameter_table(config))
        size = HEADER_BYTES + elements * (2 if version == 5 else 4)
        check_size(f, size, f"version {version}, {config.describe()}", mend)
        config = dataclasses.replace(config, Vp=padded(rows))
        params = allocate(parameter_table(config))
        for tensor in unpadded(params, rows):
            for piece in chunks(tensor):
                if version == 5:
                    bits = np.empty(piece.size, np.uint16)
                    read_into(f, bits)
                    bf16_to_float32(bits, out=piece)
                else:
                    read_into(f, piece)
    for name, row in params.table.items():
        if row.vocabulary:
            getattr(params, name)[config.V :] = 0.0  # padding rows are never used, whatever a file holds there
    check_finite(path, params, mend)
    return config, params


def write_model(path, config, params, version=3):
    """Write a model checkpoint, version 1, 3 (float32) or 5 (bfloat16; float32 params are rounded to nearest even).
    Returns the file's CRC-32."""
    fields = (config.maxT, config.V, config.L, config.NH, config.C, 0 if version == 1 else config.Vp)
    header = make_header(MODEL_MAGIC, version, *fields)
    crc = zlib.crc32(header)
    with replacing(path) as f:
        f.write(header)
        for tensor in unpadded(params, config.V if version == 1 else config.Vp):
            for piece in chunks(tensor):
                piece = bf16_bits(piece) if version == 5 and piece.dtype == np.float32 else piece
                f.write(piece)
                crc = zlib.crc32(piece, crc)
    return crc


def fingerprint(config, params):
    """CRC-32 of the weights in bfloat16, without padding: the same for versions 1, 3 and 5 of one model."""
    crc = 0
    for tensor in unpadded(params, config.V):
        for piece in chunks(tensor):
            crc = zlib.crc32(bf16_bits(piece), crc)
    return crc


def count_parameters(config, params):
    """The number of parameters, without padding: 124439808 for GPT-2 124M."""
    return sum(tensor.size for tensor in unpadded(params, config.V))


# ----------------------------------------------------------------------------------------------------------------------
# debug states

TRAILER_VERSION = 1  # of this project's addition


@dataclass
class DebugState:
    """One batch, what PyTorch computed from it, and (from export_weights.py) the losses of more steps on it."""

    x: np.ndarray  # (B, T) int32
    y: np.ndarray  # (B, T) int32
    logits: np.ndarray  # (B, T, V) float32
    loss: float
    grads: Tensors  # the model's table
    optimizer: dict | None = None  # learning_rate, beta1, beta2, eps, weight_decay
    losses: np.ndarray | None = None  # (n,) float32
    crc: int = 0  # fingerprint of the weights it was made from


def write_debug_state(path, config, state, version=2):
    """Write a debug state with its trailer; version 1 (V rows) or 2 (Vp rows)."""
    header = make_header(STATE_MAGIC, version, *state.x.shape)
    header[8:11] = TRAILER_VERSION, len(state.losses), np.uint32(state.crc).view(np.int32)
    with replacing(path) as f:
        for part in (header, state.x.astype("<i4"), state.y.astype("<i4"), state.logits, np.float32(state.loss),
                     *unpadded(state.grads, config.V if version == 1 else config.Vp),
                     np.array(list(state.optimizer.values()), "<f8"), state.losses.astype("<f4")):
            f.write(part)


def read_debug_state(path, config, params):
    """Read a debug state, version 1 or 2, of this model; raises UserError if it is damaged or another model's."""
    with open_input(path, EXPORT_STATE) as f:
        header = read_header(f, STATE_MAGIC, EXPORT_STATE)
        version, B, T = (int(x) for x in header[1:4])
        if version not in (1, 2):
            raise UserError(f"{path}: debug state version {version}, expected 1 or 2; {EXPORT_STATE}")
        if B < 1 or not 1 <= T <= config.maxT:
            raise UserError(f"{path}: B={B} T={T}, expected B of at least 1, T of 1 to {config.maxT}; {EXPORT_STATE}")
        trailer, n, crc = int(header[8]), int(header[9]), int(header[10:11].view(np.uint32)[0])
        if trailer not in (0, TRAILER_VERSION) or n < 0:
            raise UserError(f"{path}: trailer version {trailer} with {n} losses, expected version {TRAILER_VERSION}")
        rows = config.V if version == 1 else config.Vp
        gradients = sum(tensor.size for tensor in unpadded(params, rows))
        size = HEADER_BYTES + 4 * (2 * B * T + B * T * config.V + 1 + gradients) + (40 + 4 * n if trailer else 0)
        check_size(f, size, f"version {version}, B={B} T={T} and this model ({config.describe()})", EXPORT_STATE)
        if trailer and crc != fingerprint(config, params):
            raise UserError(f"{path}: belongs to another model: it was made from other weights; {EXPORT_STATE}")

        x, y = np.empty((B, T), np.int32), np.empty((B, T), np.int32)
        logits, loss = np.empty((B, T, config.V), np.float32), np.empty(1, np.float32)
        grads = allocate(params.table)
        for part in (x, y, logits, loss, *unpadded(grads, rows)):
            read_into(f, part)
        for ids in (x, y):
            if ids.min() < 0 or ids.max() >= config.V:
                raise UserError(f"{path}: holds a token id outside 0 to {config.V - 1}; {EXPORT_STATE}")
        state = DebugState(x, y, logits, float(loss[0]), grads)
        if trailer and n:  # without a step, the settings mean nothing
            settings, losses = np.empty(5, np.float64), np.empty(n, np.float32)
            read_into(f, settings)
            read_into(f, losses)
            state.optimizer = dict(zip(("learning_rate", "beta1", "beta2", "eps", "weight_decay"), settings.tolist()))
            state.losses, state.crc = losses, crc
            learning_rate, beta1, beta2, eps, weight_decay = settings
            if not (0 <= learning_rate < np.inf and 0 <= beta1 < 1 and 0 <= beta2 < 1 and 0 < eps < np.inf
                    and 0 <= weight_decay < np.inf and np.isfinite(losses).all()):
                raise UserError(f"{path}: impossible optimizer settings or losses: {state.optimizer},"
                                f" losses {losses.tolist()}; {EXPORT_STATE}")
    return state


# ----------------------------------------------------------------------------------------------------------------------
# optimizer states: one file per rank, with its share


class Progress(NamedTuple):
    """Where a run stands, apart from its weights and moments."""

    step: int  # updates done
    rng_state: int
    position: Position  # in the training data; None if it cannot be continued: see llmc_position
    batch: tuple  # (B, T, spread), which the position depends on; (0, 0, 0) from llm.c
    model_crc: int | None = None  # CRC-32 of the model file that belongs to it; None from llm.c


class Owned(NamedTuple):
    """A rank's share of the optimizer state, on the host: float32 arrays."""

    shares: Shares
    rank: int
    m: np.ndarray
    v: np.ndarray
    exact: np.ndarray | None = None  # float32 weights, if the model's are rounded; or room to read them

    def check(self, where, mend):
        """Raise UserError for values that are not finite, or for a negative v, which is a mean of squares."""
        for kind, array in (("AdamW's m", self.m), ("AdamW's v", self.v), ("the float32 weights", self.exact)):
            for piece in self.shares.pieces(self.rank) if array is not None else ():
                at = piece.begin
                for part in chunks(array[piece.local : piece.local + piece.size]):
                    wrong, what = ~np.isfinite(part), "NaN or infinite"
                    if array is self.v and not wrong.any():
                        wrong, what = part < 0, "negative"
                    if wrong.any():
                        tensor = self.shares.tensor_at(at + int(wrong.argmax()))
                        raise UserError(f"{where}: {kind}: tensor {tensor} holds {what} values; {mend}")
                    at += part.size


def owned_by_one(m, v, exact=None):
    """The Owned of a run on one device; m, v and exact are Tensors."""
    return Owned(Shares(m.table, 1), 0, flat(m), flat(v), exact and flat(exact))


def write_optimizer_state(path, owned, progress):
    """Write a rank's share, and where the run stands. Several ranks write version 2, which llm.c refuses, because it
    divides biases and layernorms differently."""
    (shard, sample, shuffle), ranks = progress.position, owned.shares.ranks
    header = make_header(OPTIMIZER_MAGIC, 1 if ranks == 1 else 2, ranks, owned.rank, int(owned.exact is not None),
                         int(shuffle is not None))
    header[10] = progress.step
    for slot, value in ((20, progress.rng_state), (30, shard), (32, sample)):
        header[slot : slot + 2] = np.array([value], "<u8").view("<i4")
    header[40:43] = progress.batch
    if progress.model_crc is not None:
        header[43:45] = 1, np.uint32(progress.model_crc).view(np.int32)
    with replacing(path) as f:
        f.write(header)
        for array in owned[2:]:
            if array is not None:
                f.write(array)
        if shuffle is not None:
            write_shuffle(f, shuffle)


TRAIN_AGAIN = "train again with: python train_gpt2.py ... -o DIR -n STEPS"


def read_optimizer_state(path, owned, mend=TRAIN_AGAIN):
    """Fill `owned` from the files of all ranks that wrote a state; `path` is rank 0's.

    Returns (Progress, whether the files have float32 weights; without them, owned.exact is not filled). Raises
    UserError for another model's state or a missing file, before anything is filled, and for values that no run can
    have.
    """
    with contextlib.ExitStack() as stack:
        def open_state(path):
            f = stack.enter_context(open_input(path, mend))
            header = read_header(f, OPTIMIZER_MAGIC, mend)
            version, ranks, rank, master, shuffled = (int(x) for x in header[1:6])
            expected = 2 if ranks > 1 and header[40] > 0 else 1
            if version != expected or not 0 <= rank < ranks or master not in (0, 1) or shuffled not in (0, 1):
                raise UserError(f"{path}: version {version}, rank {rank} of {ranks}, master weights {master}, shuffled"
                                f" {shuffled}; expected version 1, of several ranks of this project's 2; {mend}")
            return f, header

        def check_sizes(f, header, elements):
            """Check the size of a file, and return the offset after its arrays, where the data order begins."""
            end = HEADER_BYTES + 4 * elements * (2 + int(header[4]))
            if not header[5] or os.fstat(f.fileno()).st_size < end:
                check_size(f, end, f"the optimizer of a model with {owned.shares.size} parameters", mend)
            return end

        f, header = open_state(path)
        if header[3] != 0:
            raise UserError(f"{path}: is rank {header[3]}'s, expected the first one's; {mend}")
        ranks, ours = int(header[2]), header[40] > 0
        if ranks > 1 and not ours and is_whole(f, header, owned.shares.size):
            ranks = 1  # llm.c without ZeRO: each rank's file has all
        sources = Shares(owned.shares.table, ranks, llmc=not ours)
        files = [(f, header)]
        for rank in range(1, ranks):
            files.append(open_state(rank_path(path, rank)))
            different = [slot for slot in (2, 4, 5, 10, 43, 44) if files[-1][1][slot] != header[slot]]
            if different or files[-1][1][3] != rank:
                raise UserError(f"{files[-1][0].name}: does not belong to {path}; {mend}")
        ends = [check_sizes(*file, sources.share_size(rank)) for rank, file in enumerate(files)]
        shuffle = read_shuffle(f, ends[0], mend) if header[5] else None
        for i, array in enumerate(owned[2 : 4 + int(header[4])]):
            if array is not None:
                for rank, (f, _) in enumerate(files):
                    read_share(f, HEADER_BYTES + 4 * i * sources.share_size(rank), sources, rank, array, owned)
    has_exact = bool(header[4])
    (owned if has_exact else owned._replace(exact=None)).check(path, mend)
    numbers = {slot: int(header[slot : slot + 2].view("<u8")[0]) for slot in (20, 30, 32)}
    crc = int(header[44:45].view("<u4")[0]) if header[43] == 1 else None
    position = Position(numbers[30], numbers[32], shuffle)
    progress = Progress(int(header[10]), numbers[20], position, tuple(header[40:43].tolist()), crc)
    if progress.step < 0 or progress.rng_state == 0:
        raise UserError(f"{path}: step {progress.step} and sampler state {progress.rng_state}; the file is damaged")
    if header[2] > 1 and not ours:
        progress = progress._replace(position=llmc_position(position, int(header[2])))
    return progress, has_exact


def rank_path(path, rank):
    """state_00000500_00000.bin -> the path of another rank's file. rank may also be a pattern for the five digits."""
    return f"{path[:-9]}{rank:0>5}.bin"


def is_whole(f, header, parameters):
    """Whether one file of a state of several ranks has all parameters."""
    return os.fstat(f.fileno()).st_size >= HEADER_BYTES + 4 * parameters * (2 + int(header[4]))


def read_share(f, start, sources, rank, array, owned):
    """Read what owned's `array` needs from one rank's file f, in which the rank's array begins at byte `start`."""
    for source, target in itertools.product(sources.pieces(rank), owned.shares.pieces(owned.rank)):
        first, end = max(source.begin, target.begin), min(source.begin + source.size, target.begin + target.size)
        if first < end:
            f.seek(start + 4 * (source.local + first - source.begin))
            read_into(f, array[target.local + first - target.begin : target.local + end - target.begin])


def llmc_position(position, ranks):
    """Convert the position of llm.c's ranks to one sequence of batches. None for shuffled data: each of llm.c's ranks
    shuffles in its own order, which cannot be continued."""
    return position._replace(sample=position.sample * ranks) if position.shuffle is None else None
