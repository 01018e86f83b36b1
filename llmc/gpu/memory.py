"""Allocations on the GPU."""

from typing import NamedTuple

import numpy as np

from llmc.gpu.device import cp
from llmc.gpu.matmul import ALIGN
from llmc.tensors import table_bytes, views


class Block(NamedTuple):
    """One allocation."""

    tables: dict  # phase -> table; the tables of different phases take turns in the memory
    align: int = ALIGN  # of each tensor, in bytes
    scratch: bool = False  # written before it is read, so not zeroed
    travels: bool = False  # messages between GPUs read and write it: NCCL allocates it

    @property
    def bytes(self):
        return max(table_bytes(table, self.align) for table in self.tables.values())

    def allocate(self, nccl=None):
        """Its bytes on the GPU; nccl: an Nccl, of a run on several."""
        if self.travels and nccl:
            return nccl.allocate(self.bytes)
        return (cp.empty if self.scratch else cp.zeros)(self.bytes, np.uint8)

    def over(self, buffer):
        """The Tensors of its only table."""
        table, = self.tables.values()
        return views(table, buffer, self.align)


def allocate_plan(plan, nccl=None):
    """{what: bytes on the GPU}; all ranks allocate what travels in the plan's order."""
    return {what: block.allocate(nccl) for what, block in plan.items()}
