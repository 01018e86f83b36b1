"""NCCL, which carries tensors between the GPUs of a run, by CuPy's bindings and, for what these
lack, ctypes."""

import contextlib
import ctypes
import os
import warnings

from llmc.errors import UserError
from llmc.gpu.device import cp


class Nccl:
    """Communication between the ranks' GPUs. NCCL only moves bytes, and adds up what is exact in
    any order.

    Where NVLink or PCI Express connects all GPUs, copy engines move the bytes, and leave the
    multiprocessors to the matmuls: NCCL 2.28's "zero-CTA" collectives, which need memory that all
    ranks have registered as a window. As they start slowly, the more so the more GPUs there are,
    few tokens on more than two GPUs leave it to kernels."""

    SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
    POINTER = ctypes.c_void_p
    SIZE = ctypes.c_size_t
    INT = ctypes.c_int
    NOT_IN_CUPY = {
        "ncclMemAlloc": (POINTER, SIZE),
        "ncclCommWindowRegister": (POINTER, POINTER, SIZE, POINTER, INT),
        "ncclAlltoAll": (POINTER, POINTER, SIZE, INT, POINTER, POINTER),
    }

    def __init__(self, ranks, tokens):
        """ranks: a Ranks; tokens: of a micro-batch. Raises UserError if NCCL is missing, too old,
        or fails."""
        by_copy_engines = ranks.size == 2 or tokens > 4096
        os.environ.setdefault("NCCL_CTA_POLICY", "2" if by_copy_engines else "0")  # ZERO, DEFAULT
        with warnings.catch_warnings(action="ignore"):
            from cupy.cuda import nccl  # imported here: a run on one GPU does not need it
        version = nccl.get_version() if nccl.available else 0
        if version < 22800:
            found = "cannot be loaded"
            if version:
                found = f"is {version // 10000}.{version // 100 % 100}"
            raise UserError(f"NCCL, for several GPUs, {found}, expected 2.28 or newer: pip install"
                            " -r requirements-gpu.txt")
        self.nccl = nccl
        self.rank = ranks.rank
        self.rank_count = ranks.size
        self.library = ctypes.CDLL("libnccl.so.2")  # CuPy has loaded it
        with self.errors_as_lines():
            unique_id = nccl.get_unique_id().hex() if ranks.is_first else None
            unique_id = bytes.fromhex(ranks.gather(unique_id)[0])
            self.communicator = nccl.NcclCommunicator(ranks.size, unique_id, ranks.rank)

    def allocate(self, size):
        """Allocate (size,) uint8 zeros on the GPU for collectives. All ranks must allocate the
        same, in one order."""
        pointer = ctypes.c_void_p()
        window = ctypes.c_void_p()
        self.call("ncclMemAlloc", ctypes.byref(pointer), size)
        self.call("ncclCommWindowRegister", self.communicator.comm, pointer, size,
                  ctypes.byref(window), self.SYMMETRIC)
        memory = cp.cuda.UnownedMemory(pointer.value, size, self)
        array = cp.ndarray((size,), cp.uint8, cp.cuda.MemoryPointer(memory, 0))
        array.fill(0)
        return array

    def call(self, name, *arguments):
        """Call a function of NOT_IN_CUPY."""
        function = getattr(self.library, name)
        function.argtypes = self.NOT_IN_CUPY[name]
        with self.errors_as_lines():
            self.nccl.check_status(function(*arguments))

    @contextlib.contextmanager
    def errors_as_lines(self):
        try:
            yield
        # the first message between two ranks, which connects them, can fail so, too
        except self.nccl.NcclError as error:
            raise UserError(f"NCCL cannot connect the GPUs ({error}): if for want of memory, take a"
                            " smaller -b; NCCL_DEBUG=INFO says more") from None

    def exchange(self, sends, receives, stream):
        """Send and receive lists of (rank, array), which must be in the same order for each pair of
        ranks."""
        with self.errors_as_lines():
            self.nccl.groupStart()
            for move, messages in ((self.communicator.send, sends),
                                   (self.communicator.recv, receives)):
                for peer, array in messages:
                    move(array.data.ptr, array.nbytes, self.nccl.NCCL_INT8, peer, stream.ptr)
            self.nccl.groupEnd()

    def all_to_all(self, target, source, stream):
        """Part r of target (n,) = part `rank` of rank r's source (n,), each cut into `ranks` equal
        parts. target must have the same offset in its allocation on all ranks, because copy engines
        write there."""
        self.call("ncclAlltoAll", source.data.ptr, target.data.ptr,
                  source.nbytes // self.rank_count, self.nccl.NCCL_INT8, self.communicator.comm,
                  stream.ptr)

    def all_gather(self, array, stream):
        """Part r of array (n,) = part r of rank r's array, which has the same offset in its
        allocation on all ranks."""
        size = array.nbytes // self.rank_count
        with self.errors_as_lines():
            self.communicator.allGather(array.data.ptr + self.rank * size, array.data.ptr, size,
                                        self.nccl.NCCL_INT8, stream.ptr)

    def add_up(self, total, addend, stream, largest=False):
        """total (n,) = the sum over the ranks of addend (n,), float32, int32 or int64, or the
        largest; exact for integers, and where at most one rank's addend is not 0."""
        kind = getattr(self.nccl, f"NCCL_{addend.dtype.name.upper()}")
        operation = self.nccl.NCCL_MAX if largest else self.nccl.NCCL_SUM
        with self.errors_as_lines():
            self.communicator.allReduce(addend.data.ptr, total.data.ptr, addend.size, kind,
                                        operation, stream.ptr)

    def check(self):
        """Raise UserError if a message has failed since it was launched."""
        try:
            self.communicator.check_async_error()
        except self.nccl.NcclError as error:
            raise UserError(f"NCCL lost another GPU ({error}); the last checkpoint, if any, is"
                            " whole: resume with -y 1; NCCL_DEBUG=INFO says more") from None

    def close(self):
        """Leave the communicator; nothing may be in flight. (Not by `destroy`, which waits for the
        other ranks.)"""
        self.communicator.abort()
