"""Which rank owns which elements of the parameters. Every rank owns a part of each layer's
matrices, and of each run of adjacent other tensors, so that each transfer keeps all ranks busy."""

import bisect
import itertools
from typing import NamedTuple

import numpy as np

from llmc.gpu.messages import REST

# No chunk crosses a 16th of a segment: they are the same for any number of ranks that divides 16.
CUTS = 16
UPDATE_CHUNK = 8192  # elements, at most
CHUNKS = np.dtype([
    ("local", "i8"),  # where it begins in the buffers of the rank's share
    ("flat", "i8"),  # in the flat buffer of the parameters
    ("received", "i8"),  # in the receive buffer: rank 0's gradients of it
    ("stride", "i4"),  # from one rank's gradients to the next's
    ("count", "i4"),  # elements
    # among all ranks' chunks: sums over all parameters add up the chunks' in this order
    ("index", "i4"),
    ("rate", "f4"),  # factor of the learning rate
    ("decay", "f4"),  # weight decay
    ("at_random", "i4"),  # whether always rounded stochastically
], align=True)  # update.cuh's


class Segment(NamedTuple):
    """One layer's matrix, an untied classifier's weight, or tensors of the rest that are adjacent
    in the flat buffer of the parameters."""

    name: str  # or REST
    layer: int | None
    begin: int  # in elements, as all offsets here
    size: int


class Part(NamedTuple):
    """The part of a segment that a rank owns."""

    begin: int  # in the flat buffer
    local: int  # in the buffers of the rank's share
    # in the receive buffer, the same on all ranks: rank 0's gradients of it, then the other ranks'
    received: int
    size: int
    segment: Segment


class Treatment(NamedTuple):
    """How the optimizer treats a tensor: the last fields of CHUNKS."""

    rate: float
    decay: float
    at_random: bool


class Shares:
    """How ranks divide a table of parameters."""

    def __init__(self, table, rank_count, weight_decay=0.0, decay_all=False, llmc=False):
        """decay_all: weights of all tensors decay, not only those of rows that say so. llmc: divide
        as llm.c does, which cuts every tensor layer by layer."""
        self.table = table
        self.rank_count = rank_count
        self.llmc = llmc
        self.segments = []
        # of runs of tensors that are treated alike
        self.begins = []
        self.treatments = []
        self.size = 0

        for name, row in table.items():
            decay = row.decay * weight_decay if decay_all or row.decays else 0.0
            treatment = Treatment(row.rate, decay, row.ones)
            if not self.treatments or self.treatments[-1] != treatment:
                self.begins.append(self.size)
                self.treatments.append(treatment)
            self.add_segments(name, row)

    def add_segments(self, name, row):
        """Append the segments of the next tensor of the table; one of the rest becomes part of the
        one before."""
        is_cut = row.is_matrix or row.stacked and self.llmc
        count = row.shape[0] if is_cut else 1
        for l in range(count):
            segment = Segment(name if row.is_matrix or row.early else REST,
                              l if row.is_matrix else None, self.size, row.size // count)
            self.size += segment.size

            before = self.segments[-1] if self.segments else None
            if before and before.name == segment.name == REST and not self.llmc:
                self.segments[-1] = before._replace(size=before.size + segment.size)
            else:
                self.segments.append(segment)

    def parts_of(self, rank):
        """The Parts of a rank, in the flat buffer's order."""
        parts = []
        local = received = 0
        for segment in self.segments:
            begin, size = self.cut(segment)[rank]
            if size:
                parts.append(Part(begin, local, received, size, segment))
            local += size
            received += self.room(segment)
        return parts

    def cut(self, segment):
        """[(begin, size)] of each rank's part of a segment, in the flat buffer."""
        count = self.rank_count
        edges = [segment.begin + self.edge(segment.size, rank, count) for rank in range(count + 1)]
        return [(begin, end - begin) for begin, end in itertools.pairwise(edges)]

    def edge(self, size, number, count):
        """Where part `number` of `count` begins: at a multiple of 8 elements, or, like the last
        one's end, at any."""
        unit = 1 if self.llmc or number == count else 8
        return size // unit * number // count * unit

    def room(self, segment):
        """Elements of the receive buffer for a segment: all ranks' gradients of its largest part,
        the last rank's."""
        return self.rank_count * self.cut(segment)[-1][1]

    def received_size(self):
        """Elements of the receive buffer; it has gaps where other ranks receive more."""
        return sum(map(self.room, self.segments))

    def share_size(self, rank):
        """Elements that a rank owns; the last rank owns the most."""
        return sum(part.size for part in self.parts_of(rank))

    def chunks(self, rank):
        """What the optimizer works on. Returns

            chunks  (n,) CHUNKS of a rank: the first layer's matrices, those outside the layers, the
                    other layers' matrices
            ends    [where each of these three groups ends]
            count   how many chunks all ranks have
        """
        first_layer = []
        outside = []
        other_layers = []
        owned = {part.segment: part for part in self.parts_of(rank)}
        index = 0

        for segment in self.segments:
            if segment.layer is None:
                group = outside
            else:
                group = first_layer if segment.layer == 0 else other_layers
            part = owned.get(segment)
            for begin, end in self.runs(segment):
                treatment = self.treatments[bisect.bisect(self.begins, begin) - 1]
                for flat in range(begin, end, UPDATE_CHUNK):
                    if part and part.begin <= flat < part.begin + part.size:
                        within = flat - part.begin
                        group.append((part.local + within, flat, part.received + within, part.size,
                                      min(UPDATE_CHUNK, end - flat), index, *treatment))
                    index += 1

        groups = first_layer, outside, other_layers
        ends = np.cumsum([len(group) for group in groups]).tolist()
        return np.array([chunk for group in groups for chunk in group], CHUNKS), ends, index

    def runs(self, segment):
        """Yield the (begin, end) of the runs of elements that no edge of a part cuts, for this
        number of ranks and for CUTS, and that are treated alike."""
        edges = {segment.begin + self.edge(segment.size, number, count)
                 for count in (CUTS, self.rank_count) for number in range(count + 1)}
        edges |= {begin for begin in self.begins if segment.begin < begin < segment.begin
                  + segment.size}
        return itertools.pairwise(sorted(edges))

    def take(self, flat, rank):
        """Copy a rank's share out of a flat array on the host; on one rank, return the array
        itself."""
        if self.rank_count == 1:
            return flat
        parts = [flat[part.begin : part.begin + part.size] for part in self.parts_of(rank)]
        return np.concatenate([flat[:0], *parts])
