"""Which rank owns which elements of the parameters. Every rank owns a part of each layer's matrices, and of each run of
adjacent other tensors, so that each transfer keeps all ranks busy."""

import bisect
import itertools
from typing import NamedTuple

import numpy as np

PARTS = 16  # of a segment, which no chunk crosses: chunks are the same for any number of ranks that divides 16
UPDATE_CHUNK = 8192  # elements, at most
CHUNKS = np.dtype([("local", "i8"), ("flat", "i8"), ("received", "i8"), ("stride", "i4"), ("count", "i4"),
                   ("index", "i4"), ("rate", "f4"), ("decay", "f4"), ("at_random", "i4")], align=True)  # update.cuh's
REST = None, None  # instead of a matrix's (name, layer): embeddings, biases, layernorms


class Segment(NamedTuple):
    """One layer's matrix, an untied classifier's weight, or tensors of the rest that are adjacent in the flat buffer
    of the parameters."""

    name: str | None
    layer: int | None
    begin: int
    size: int


class Piece(NamedTuple):
    """The part of a segment that a rank owns. Offsets and size are in elements."""

    begin: int  # in the flat buffer
    local: int  # in the buffers of the rank's share
    received: int  # in the receive buffer, the same on all ranks: rank 0's gradients of it, then the other ranks'
    size: int
    segment: Segment


class Shares:
    """How `ranks` ranks divide a table of parameters."""

    def __init__(self, table, ranks, weight_decay=0.0, decay_all=False, llmc=False, rates=None):
        """llmc: divide as llm.c does, which cuts every tensor layer by layer. rates: AdamW.RATES."""
        self.table, self.ranks, self.llmc, self.segments = table, ranks, llmc, []
        self.spans, self.size = [], 0  # (begin, rate, decay, whether rounded at random), until the next one's begin
        for name, row in table.items():
            is_matrix = row.stacked and row.decays
            treatment = (rates or {}).get(name, 1.0), weight_decay if decay_all or row.decays else 0.0, row.ones
            if not self.spans or self.spans[-1][1:] != treatment:
                self.spans.append((self.size, *treatment))
            count = row.shape[0] if is_matrix or row.stacked and llmc else 1
            for l in range(count):
                key = (name, l) if is_matrix else (name, None) if row.early else REST
                segment = Segment(*key, self.size, row.size // count)
                self.size += segment.size
                if self.segments and segment[:2] == REST == self.segments[-1][:2] and not llmc:
                    before = self.segments.pop()
                    segment = before._replace(size=before.size + segment.size)
                self.segments.append(segment)

    def pieces(self, rank):
        """The Pieces of a rank, in the flat buffer's order."""
        pieces, local, received = [], 0, 0
        for segment in self.segments:
            begin, size = self.parts(segment)[rank]
            if size:
                pieces.append(Piece(begin, local, received, size, segment))
            local += size
            received += self.room(segment)
        return pieces

    def cut(self, size, part, parts):
        """Where part number `part` of a segment begins: at a multiple of 8 elements, or, like its end, at any."""
        unit = 1 if self.llmc or part == parts else 8
        return size // unit * part // parts * unit

    def room(self, segment):
        """Elements of the receive buffer for a segment: all ranks' gradients of its largest piece, the last rank's."""
        return self.ranks * self.parts(segment)[-1][1]

    def received_size(self):
        """Elements of the receive buffer; it has gaps where other ranks receive more."""
        return sum(map(self.room, self.segments))

    def parts(self, segment):
        """(begin, size) of each rank's part, in the flat buffer."""
        edges = [segment.begin + self.cut(segment.size, rank, self.ranks) for rank in range(self.ranks + 1)]
        return [(begin, end - begin) for begin, end in itertools.pairwise(edges)]

    def share_size(self, rank):
        """Elements that a rank owns; the last rank owns the most."""
        return sum(piece.size for piece in self.pieces(rank))

    def chunks(self, rank):
        """Return a rank's chunks, (n,) CHUNKS; where their three groups end: the first layer's matrices, the rest, the
        other layers' matrices; and how many chunks all ranks have. Sums over all parameters add up the chunks' in the
        order of `index`. received: where rank 0's gradients begin in the receive buffer; stride: from one rank's to the
        next's."""
        groups, index, starts = ([], [], []), 0, [start for start, *_ in self.spans]
        owned = {piece.segment.begin: piece for piece in self.pieces(rank)}
        for _, layer, begin, size in self.segments:
            chunks = groups[0 if layer == 0 else 1 if layer is None else 2]
            edges = {begin + self.cut(size, part, parts) for parts in (PARTS, self.ranks) for part in range(parts + 1)}
            edges |= {start for start in starts if begin < start < begin + size}
            piece = owned.get(begin)
            for edge, end in itertools.pairwise(sorted(edges)):
                treatment = self.spans[bisect.bisect(starts, edge) - 1][1:]
                for flat in range(edge, end, UPDATE_CHUNK):
                    count = min(UPDATE_CHUNK, end - flat)
                    if piece and piece.begin <= flat < piece.begin + piece.size:
                        within = flat - piece.begin
                        chunks.append((piece.local + within, flat, piece.received + within, piece.size, count, index,
                                       *treatment))
                    index += 1
        ends = np.cumsum([len(chunks) for chunks in groups]).tolist()
        return np.array([chunk for chunks in groups for chunk in chunks], CHUNKS), ends, index

    def take(self, flat, rank):
        """Copy a rank's share out of a flat array on the host; on one rank, return the array itself."""
        if self.ranks == 1:
            return flat
        return np.concatenate([flat[:0], *(flat[at.begin : at.begin + at.size] for at in self.pieces(rank))])
