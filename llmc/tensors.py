"""One layout, as data: a model's tensors are a table, name -> Row. Sizes, offsets, the buffer, its
views, the order in a checkpoint, the memory report, the optimizer's and the tests' loops all derive
from the table."""

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from llmc.errors import UserError
from llmc.files import chunks


class Row(NamedTuple):
    """One tensor of a table."""

    shape: tuple
    dtype: str = "float32"
    stacked: bool = False  # the first axis is the layer
    vocabulary: bool = False  # the first axis is the token, V rows padded to Vp
    decays: bool = False  # weight decay applies
    # its gradient is complete before the layers' are: several GPUs send it then
    early: bool = False
    # initialized to ones; in bfloat16 always rounded stochastically: see kernels/update.cu
    ones: bool = False
    rate: float = 1.0  # AdamW's learning rate, and
    decay: float = 1.0  # its weight decay, where it applies, as factors of the run's
    matrices: int = 0  # that Muon sees in one layer of it; 0: AdamW updates it

    size = property(lambda self: math.prod(self.shape))
    # whether each layer has a matrix in it, whose gradient several GPUs send apart
    is_matrix = property(lambda self: self.stacked and self.decays)
    # the NumPy dtype. NumPy has no bfloat16: such a tensor is an array of its bits, uint16
    stored_as = property(lambda self: np.dtype("uint16" if self.dtype == "bfloat16"
                                               else self.dtype))

    def bytes(self, align=1):
        """Rounded up to a multiple of `align`."""
        return -(-self.size * self.stored_as.itemsize // align) * align


def table_elements(table):
    return sum(row.size for row in table.values())


def table_bytes(table, align=1):
    return sum(row.bytes(align) for row in table.values())


class Tensors(SimpleNamespace):
    """Named views of one buffer, in the table's order: `params.qkvw[l]` is (3C, C). Also has
    `table` and `buffer`."""


def views(table, buffer, align=1):
    """Lay a table's tensors over the start of a byte buffer (NumPy or CuPy), each at a multiple of
    `align` bytes."""
    tensors = {}
    offset = 0
    for name, row in table.items():
        tensors[name] = buffer[offset : offset + row.bytes()].view(row.stored_as).reshape(row.shape)
        offset += row.bytes(align)
    return Tensors(table=table, buffer=buffer[:offset], **tensors)


def allocate(table, xp=np):
    """Allocate one zeroed buffer for a table, in NumPy or CuPy (`xp`), aligned for vector loads;
    returns its views."""
    size = table_bytes(table)
    buffer = xp.zeros(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64 if xp is np else 0  # CuPy aligns to 512 bytes
    return views(table, buffer[start : start + size])


def flat(tensors):
    """View the buffer of a table with a single dtype as one vector, for the optimizer and the
    files."""
    return tensors.buffer.view(next(iter(tensors.table.values())).stored_as)


def layer(tensors, l):
    """Layer l's slice of every tensor that is stacked over layers, and the others: layer(params,
    l).qkvw is (3C, C)."""
    return SimpleNamespace(**{name: getattr(tensors, name)[l] if row.stacked
                              else getattr(tensors, name)
                              for name, row in tensors.table.items()})


def unpadded(tensors, V):
    """Yield each tensor as a flat vector, in the table's order, without the vocabulary's rows from
    V on."""
    for name, row in tensors.table.items():
        tensor = getattr(tensors, name)
        yield (tensor[:V] if row.vocabulary else tensor).reshape(-1)


def bf16_bits(x):
    """float32 array -> uint16 array of its bfloat16 bits, rounded to nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16).astype(np.uint16)


def bf16_to_float32(bits, out=None):
    """uint16 array of bfloat16 bits -> float32 array, which is `out` if given."""
    return np.left_shift(bits, 16, out=None if out is None else out.view(np.uint32),
                         dtype=np.uint32).view(np.float32)


def check_finite(where, tensors, hint):
    """Raise UserError that names the first tensor, float32 or bfloat16, with a NaN or infinity, if
    there is one."""
    for name in tensors.table:
        for piece in chunks(getattr(tensors, name).reshape(-1)):
            if not (np.isfinite(piece) if piece.dtype == np.float32
                    else piece & 0x7F80 != 0x7F80).all():
                raise UserError(f"{where}: tensor {name} holds NaN or infinite values; {hint}")
