"""Several GPUs: who owns which elements of the parameters, and how gradients and weights travel.

Each rank computes the gradients of micro-batches of its own. Of the optimizer, a rank has its share alone: moments,
float32 weights, and the float32 sums of gradients (stage 2 of ZeRO; Rajbhandari et al. 2019,
https://arxiv.org/abs/1910.02054). After each micro-batch, every rank sends each other rank that part of its gradients
which this one owns. The owner adds them up in the order of the micro-batches, whoever computed them, so that an update
has the same bits on 1, 2, 4, 8 or 16 GPUs. This moves as many bytes as a reduce-scatter. The new weights return before
the next forward pass needs them.

A share is cut out of every tensor, of matrices out of each layer's, so that each transfer keeps all ranks busy.
"""

import contextlib
import warnings
from typing import NamedTuple

import numpy as np

from llmc.errors import UserError

PARTS = 16  # of a segment: numbers of ranks that divide it cut segments at the same places
CHUNK = 8192  # elements, at most
CHUNKS = np.dtype([("local", "i8"), ("flat", "i8"), ("count", "i4"), ("index", "i4"), ("decay", "f4"),
                   ("padding", "i4")])  # struct Chunk of update.cu


class Segment(NamedTuple):
    """A matrix of one layer, or another tensor of all layers, consecutive in the flat buffer of the parameters."""

    name: str
    begin: int
    size: int
    bucket: int  # whose elements travel together: see Shares.buckets
    decay: float


class Piece(NamedTuple):
    """What a rank owns of a segment."""

    begin: int  # in the flat buffer
    local: int  # in the share's buffers
    size: int
    segment: Segment


def cut(size, part, parts):
    """Where part number `part` of a segment begins: at a multiple of 8 elements, but for the end."""
    return size if part == parts else size // 8 * part // parts * 8


def cut_evenly(size, part, parts):
    """llm.c's."""
    return size * part // parts


class Shares:
    """How `ranks` ranks divide a table of parameters.

    buckets: how many there are. Bucket l has the matrices of layer l; the last one all else: embeddings, biases,
    layernorms, whose gradients are complete when the backward pass is.
    """

    def __init__(self, table, ranks, weight_decay=0.0, decay_all=False, llmc=False):
        """llmc: as llm.c divides them, which cuts each layer's part of any tensor."""
        self.table, self.ranks, self.cut, self.segments, begin = table, ranks, cut_evenly if llmc else cut, [], 0
        layers = max((row.shape[0] for row in table.values() if row.stacked), default=0)
        self.buckets = layers + 1
        for name, row in table.items():
            count = row.shape[0] if row.stacked and (row.decays or llmc) else 1
            decay = weight_decay if decay_all or row.decays else 0.0
            for l in range(count):
                bucket = l if row.stacked and row.decays else layers
                self.segments.append(Segment(name, begin, row.size // count, bucket, decay))
                begin += row.size // count
        self.size = begin  # of all parameters

    def pieces(self, rank):
        """The Pieces of a rank, in the flat buffer's order."""
        pieces, local = [], 0
        for segment in self.segments:
            first, end = (self.cut(segment.size, rank + i, self.ranks) for i in (0, 1))
            if end > first:
                pieces.append(Piece(segment.begin + first, local, end - first, segment))
                local += end - first
        return pieces

    def share_size(self, rank):
        """Elements that a rank owns."""
        return sum(piece.size for piece in self.pieces(rank))

    def bucket_pieces(self, rank, bucket):
        return [piece for piece in self.pieces(rank) if piece.segment.bucket == bucket]

    def chunks(self, rank):
        """The chunks of a rank's share, (n,) CHUNKS, bucket after bucket; where each bucket's end; and how many chunks
        there are on all ranks.

        A sum over all parameters is that of sums over chunks, in the order of their index. Chunks are the same for all
        numbers of ranks that divide PARTS.
        """
        chunks, index = [[] for _ in range(self.buckets)], 0
        owned = {piece.segment.begin: piece for piece in self.pieces(rank)}
        for _, begin, size, bucket, decay in self.segments:
            edges = sorted({cut(size, part, parts) for parts in (PARTS, self.ranks) for part in range(parts + 1)})
            piece = owned.get(begin)
            for edge, end in zip(edges, edges[1:]):
                for first in range(edge, end, CHUNK):
                    flat, count = begin + first, min(CHUNK, end - first)
                    if piece and piece.begin <= flat < piece.begin + piece.size:
                        chunks[bucket].append((piece.local + flat - piece.begin, flat, count, index, decay, 0))
                    index += 1
        ends = np.cumsum([len(bucket) for bucket in chunks]).tolist()
        return np.array([chunk for bucket in chunks for chunk in bucket], CHUNKS), ends, index

    def take(self, flat, rank):
        """A rank's share of a flat array on the host."""
        if self.ranks == 1:
            return flat
        pieces = [flat[piece.begin : piece.begin + piece.size] for piece in self.pieces(rank)]
        return np.concatenate([flat[:0], *pieces])


class Nccl:
    """The other ranks' GPUs: NCCL's point-to-point messages, which move bytes, and its sum."""

    def __init__(self, ranks):
        """ranks: of ranks.py. Raises UserError where NCCL is missing, or fails."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from cupy.cuda import nccl  # a run on one GPU does not need it
        if not nccl.available:
            raise UserError("NCCL, for several GPUs, cannot be loaded: pip install -r requirements-gpu.txt")
        self.nccl = nccl
        with self.errors_as_lines():
            unique_id = nccl.get_unique_id().hex() if ranks.is_first else None
            self.communicator = nccl.NcclCommunicator(ranks.size, bytes.fromhex(ranks.gather(unique_id)[0]), ranks.rank)

    def connect(self, others, arrays, stream):
        """Send the first messages, for which NCCL takes the memory that it needs; arrays: two of a float32 each."""
        here, there = arrays
        self.exchange([(rank, here) for rank in others], [(rank, there) for rank in others], stream)
        self.add_up(there, here, stream)
        stream.synchronize()

    @contextlib.contextmanager
    def errors_as_lines(self):
        try:
            yield
        except self.nccl.NcclError as error:  # also at the first message between two ranks: it connects them
            raise UserError(f"NCCL cannot connect the GPUs ({error}): if for want of memory, take a smaller -b;"
                            " NCCL_DEBUG=INFO says more") from None

    def exchange(self, sends, receives, stream):
        """sends, receives: (other rank, array) each, in the same order for each pair of ranks."""
        with self.errors_as_lines():
            self.nccl.groupStart()
            for peer, array in sends:
                self.communicator.send(array.data.ptr, array.nbytes, self.nccl.NCCL_INT8, peer, stream.ptr)
            for peer, array in receives:
                self.communicator.recv(array.data.ptr, array.nbytes, self.nccl.NCCL_INT8, peer, stream.ptr)
            self.nccl.groupEnd()

    def add_up(self, total, addend, stream):
        """total (n,) = the sum over the ranks of addend (n,), float32."""
        with self.errors_as_lines():
            self.communicator.allReduce(addend.data.ptr, total.data.ptr, addend.size, self.nccl.NCCL_FLOAT32,
                                        self.nccl.NCCL_SUM, stream.ptr)

    def close(self):
        """Leave the others, with nothing underway. (Not `destroy`, which waits for them.)"""
        self.communicator.abort()


class Messages:
    """What a rank sends and receives, by bucket: gradients to those who own them, new weights from them."""

    def __init__(self, peers, shares, ranks, params, grads, received):
        """peers: Nccl; params, grads (parameters,), received (other ranks, share_size) on the GPU."""
        self.peers, mine, others = peers, ranks.rank, [rank for rank in range(ranks.size) if rank != ranks.rank]
        self.gradients, self.weights = [], []

        def views(array, rank, bucket, place="begin"):
            begins = [(getattr(piece, place), piece.size) for piece in shares.bucket_pieces(rank, bucket)]
            return [array[begin : begin + size] for begin, size in begins]

        for bucket in range(shares.buckets):
            self.gradients.append((
                [(rank, view) for rank in others for view in views(grads, rank, bucket)],
                [(rank, view) for rank, row in zip(others, received) for view in views(row, mine, bucket, "local")]))
            self.weights.append((
                [(rank, view) for rank in others for view in views(params, mine, bucket)],
                [(rank, view) for rank in others for view in views(params, rank, bucket)]))

    def send_gradients(self, bucket, stream):
        """Of one micro-batch; and receive the others' into `received`."""
        self.peers.exchange(*self.gradients[bucket], stream)

    def send_weights(self, bucket, stream):
        """This rank's; and receive the others' into params."""
        self.peers.exchange(*self.weights[bucket], stream)

    def add_up(self, total, addend, stream):
        """total (n,) = the sum over all ranks of addend (n,): exact, where one rank alone has other than 0."""
        self.peers.add_up(total, addend, stream)
