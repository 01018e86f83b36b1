"""Several GPUs: how gradients and weights travel (ZeRO stage 2; Rajbhandari et al. 2019,
https://arxiv.org/abs/1910.02054).

Each rank computes the gradients of its own micro-batches, and holds only its share of the optimizer state: moments,
float32 weights and, with gradient accumulation, float32 sums of gradients. During each backward pass, it sends every
other rank that one's part of each matrix's gradient, as soon as it is computed. The owner adds them up in the order of
the micro-batches, whichever ranks computed them, so that an update has the same bits on 1, 2, 4, 8 or 16 GPUs. This
moves as many bytes as a reduce-scatter. The new weights arrive before the next forward pass needs them. A checkpoint
has a file of each rank's share, from which any number of ranks can resume.
"""

import collections
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import os
import warnings

from llmc.checkpoint import (Owned, check_crc, check_state_size, is_whole, rank_path,
                             read_state_header)
from llmc.errors import UserError
from llmc.files import HEADER_BYTES, open_input, read_into
from llmc.gpu.device import cp
from llmc.gpu.shares import CHUNKS, REST, Shares
from llmc.tensors import flat


class Nccl:
    """Communication between the ranks' GPUs. NCCL only moves bytes, and adds up what is exact in any order.

    Where NVLink or PCI Express connects all GPUs, copy engines move the bytes, and leave the multiprocessors to the
    matmuls: NCCL 2.28's "zero-CTA" collectives, which need memory that all ranks have registered as a window. As they
    start slowly, the more so the more GPUs there are, few tokens on more than two GPUs leave it to kernels."""

    SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
    POINTER, SIZE, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    NOT_IN_CUPY = {
        "ncclMemAlloc": (POINTER, SIZE),
        "ncclCommWindowRegister": (POINTER, POINTER, SIZE, POINTER, INT),
        "ncclAlltoAll": (POINTER, POINTER, SIZE, INT, POINTER, POINTER),
    }

    def __init__(self, ranks, tokens):
        """ranks: a Ranks; tokens: of a micro-batch. Raises UserError if NCCL is missing, too old, or fails."""
        os.environ.setdefault("NCCL_CTA_POLICY", "2" if ranks.size == 2 or tokens > 4096 else "0")  # ZERO, DEFAULT
        with warnings.catch_warnings(action="ignore"):
            from cupy.cuda import nccl  # imported here: a run on one GPU does not need it
        version = nccl.get_version() if nccl.available else 0
        if version < 22800:
            found = f"is {version // 10000}.{version // 100 % 100}" if version else "cannot be loaded"
            raise UserError(f"NCCL, for several GPUs, {found}, expected 2.28 or newer: pip install -r"
                            " requirements-gpu.txt")
        self.nccl, self.rank, self.ranks = nccl, ranks.rank, ranks.size
        self.library = ctypes.CDLL("libnccl.so.2")  # CuPy has loaded it
        with self.errors_as_lines():
            unique_id = nccl.get_unique_id().hex() if ranks.is_first else None
            self.communicator = nccl.NcclCommunicator(ranks.size, bytes.fromhex(ranks.gather(unique_id)[0]), ranks.rank)

    def allocate(self, size):
        """Allocate (size,) uint8 zeros on the GPU for collectives. All ranks must allocate the same, in one order."""
        pointer, window = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("ncclMemAlloc", ctypes.byref(pointer), size)
        self.call("ncclCommWindowRegister", self.communicator.comm, pointer, size, ctypes.byref(window), self.SYMMETRIC)
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
        except self.nccl.NcclError as error:  # also from the first message between two ranks, which connects them
            raise UserError(f"NCCL cannot connect the GPUs ({error}): if for want of memory, take a smaller -b;"
                            " NCCL_DEBUG=INFO says more") from None

    def exchange(self, sends, receives, stream):
        """Send and receive lists of (rank, array), which must be in the same order for each pair of ranks."""
        with self.errors_as_lines():
            self.nccl.groupStart()
            for move, messages in ((self.communicator.send, sends), (self.communicator.recv, receives)):
                for peer, array in messages:
                    move(array.data.ptr, array.nbytes, self.nccl.NCCL_INT8, peer, stream.ptr)
            self.nccl.groupEnd()

    def all_to_all(self, target, source, stream):
        """Part r of target (n,) = part `rank` of rank r's source (n,), each cut into `ranks` equal parts. target must
        have the same offset in its allocation on all ranks, because copy engines write there."""
        self.call("ncclAlltoAll", source.data.ptr, target.data.ptr, source.nbytes // self.ranks, self.nccl.NCCL_INT8,
                  self.communicator.comm, stream.ptr)

    def all_gather(self, array, stream):
        """Part r of array (n,) = part r of rank r's array, which has the same offset in its allocation on all ranks."""
        size = array.nbytes // self.ranks
        with self.errors_as_lines():
            self.communicator.allGather(array.data.ptr + self.rank * size, array.data.ptr, size, self.nccl.NCCL_INT8,
                                        stream.ptr)

    def add_up(self, total, addend, stream, largest=False):
        """total (n,) = the sum over the ranks of addend (n,), float32, int32 or int64, or the largest; exact for
        integers, and where at most one rank's addend is not 0."""
        kind = getattr(self.nccl, f"NCCL_{addend.dtype.name.upper()}")
        operation = self.nccl.NCCL_MAX if largest else self.nccl.NCCL_SUM
        with self.errors_as_lines():
            self.communicator.allReduce(addend.data.ptr, total.data.ptr, addend.size, kind, operation, stream.ptr)

    def check(self):
        """Raise UserError if a message has failed since it was launched."""
        try:
            self.communicator.check_async_error()
        except self.nccl.NcclError as error:
            raise UserError(f"NCCL lost another GPU ({error}); the last checkpoint, if any, is whole: resume with -y 1;"
                            " NCCL_DEBUG=INFO says more") from None

    def close(self):
        """Leave the communicator; nothing may be in flight. (Not by `destroy`, which waits for the other ranks.)"""
        self.communicator.abort()


class Several:
    """What of a step is on the communication stream: messages, and the events at which they have arrived. Messages are
    lists of functions of a stream. gradient_sends[(name, layer or None) or REST] sends a micro-batch's gradients to
    their owners, and receives all ranks' of this rank's part; weight_sends[layer, or None for the rest] sends this
    rank's new weights to all. What has equal parts is sent by a collective of its own, the others by a group of
    point-to-point messages; so are small segments of the rest, because a copy engine takes 20 us to start, which
    nothing hides at the end of a backward pass."""

    LARGE = 1 << 22  # elements

    def __init__(self, trainer, received):
        """received (received_size,): the gradients of this rank's part of all ranks, on the GPU."""
        self.device, self.optimizer, self.fp8 = trainer.device, trainer.optimizer, trainer.fp8
        self.ranks, self.peers, self.shares = ranks, peers, shares = trainer.ranks, trainer.peers, trainer.shares
        self.own_micro_steps, self.L = trainer.settings.own_micro_steps, trainer.config.L
        params, grads = flat(trainer.params), flat(trainer.grads)
        self.gradients_arrived, self.weights_arrived = {}, {}  # events
        self.micro_batch = self.next_layer = None  # in a step: of the backward pass; whose weights are read next
        self.gradient_sends, self.weight_sends = collections.defaultdict(list), collections.defaultdict(list)
        rank, owned = ranks.rank, {piece.segment: piece for piece in shares.pieces(ranks.rank)}
        small = collections.defaultdict(lambda: ([], [], [], []))  # gradients sent, received, weights sent, received
        for segment in shares.segments:
            mine, key = owned.get(segment), segment[:2]
            if segment.size % (8 * ranks.size) == 0 and (segment.name is not None or segment.size >= self.LARGE):
                whole = slice(segment.begin, segment.begin + segment.size)
                arriving = received[mine.received : mine.received + segment.size]
                self.gradient_sends[key].append(functools.partial(peers.all_to_all, arriving, grads[whole]))
                self.weight_sends[segment.layer].append(functools.partial(peers.all_gather, params[whole]))
                continue
            gradients_sent, gradients_received, weights_sent, weights_received = small[key]
            for r, (begin, size) in enumerate(shares.parts(segment)):
                if size:
                    gradients_sent.append((r, grads[begin : begin + size]))
                if mine:
                    gradients_received.append((r, received[mine.received + r * mine.size :][: mine.size]))
                if mine and r != rank:
                    weights_sent.append((r, params[mine.begin : mine.begin + mine.size]))
                if size and r != rank:
                    weights_received.append((r, params[begin : begin + size]))
        for key, (*gradients, sent, arriving) in small.items():
            self.gradient_sends[key].insert(0, functools.partial(peers.exchange, *gradients))
            # last, because it is a kernel, which would wait behind AdamW's blocks
            self.weight_sends[key[1]].append(functools.partial(peers.exchange, sent, arriving))

    def connect(self):
        """Send each message once, before the capture, because two ranks connect at their first message."""
        for key in self.gradient_sends:
            self.send_gradients(key)
        self.send_all_weights()
        self.add_up(self.optimizer.scalars, self.optimizer.own_scalars)

    def send_gradients(self, key, computed=None):
        """Send and receive a matrix's gradients. key: (name, layer), (name, None) or REST; computed: an event to wait
        for first."""
        name = " ".join(["gradients", *(str(part) for part in reversed(key) if part is not None)])
        self.gradients_arrived[key] = self.send(self.gradient_sends[key], name, computed)

    def send_weights(self, l):
        """Send and receive the weights that each rank has updated. l: whose matrices; None: the rest."""
        name = "weights" if l is None else f"weights {l}"
        self.weights_arrived[l] = self.send(self.weight_sends[l], name)

    def send(self, sends, name, computed=None):
        """Returns an event. All messages are on one stream, because NCCL needs one order."""
        with self.device.beside(self.device.comm) as done:
            self.device.wait(computed)
            with self.device.span(name):
                for send in sends:
                    send(self.device.stream)
        return done

    def send_all_weights(self):
        for l in (*range(self.L), None):
            self.send_weights(l)
        self.device.wait(self.weights_arrived[None])

    def add_up(self, total, addend, largest=False):
        """total = the sum over the ranks of addend, or the largest."""
        with self.device.beside(self.device.comm) as done:
            self.peers.add_up(total, addend, self.device.stream, largest=largest)
        self.device.wait(done)

    def layer_begins(self, l):
        """Before layer l of an update's first forward pass: wait for its matrices, and have those of the next two
        layers on their way; the first layer's have arrived in the previous step."""
        if l > 0:
            self.device.wait(self.weights_arrived[l])
        for ahead in range(1 if l == 0 else l + 2, min(l + 3, self.L)):
            self.send_weights(ahead)
        if self.fp8:
            self.fp8.quantize_weights(slice(l, l + 1), again=not self.ranks.is_first)

    def weight_done(self, name, l, computed):
        """Send the gradient of layer l's matrix `name`, after the event `computed`. The last one is the first layer's
        qkvw. While it travels, the norm of the other layers' gradients is computed."""
        if self.micro_batch is None:
            return
        self.send_gradients((name, l), computed)
        is_last = self.micro_batch == self.own_micro_steps - 1 and (name, l) == ("qkvw", 0)
        if is_last and self.L > 1:
            self.device.wait(self.gradients_arrived[name, 1])
            self.optimizer.norm_of("other layers")


class SharedPasses:
    """What a page's model does otherwise on several GPUs: it sends each gradient when it is computed, and waits for
    each layer's weights. `several` is a Several."""

    def train_step(self, trainer):
        self.several.micro_batch, self.several.next_layer = 0, 0
        super().train_step(trainer)
        self.several.micro_batch = self.several.next_layer = None

    def linear(self, name, l=0):
        if name == "qkv" and l == self.several.next_layer:
            self.several.next_layer = l + 1 if l + 1 < self.config.L else None
            self.several.layer_begins(l)
        return super().linear(name, l)

    def backward_head(self, acts, scale):
        super().backward_head(acts, scale)
        if "lm_head" in self.params.table:
            self.several.weight_done("lm_head", None, None)

    def weight_gradient(self, name, l, dout, inp):
        done = super().weight_gradient(name, l, dout, inp)
        self.several.weight_done(f"{name}w", l, done)
        return done

    def backward(self, acts, by_token, scale):
        super().backward(acts, by_token, scale)
        if self.several.micro_batch is not None:
            self.several.send_gradients(REST)
            self.several.micro_batch += 1


class SharedUpdate:
    """What a page's optimizer does otherwise on several GPUs. The next forward pass begins with the first layer and the
    rest: AdamW updates them first, and they travel meanwhile. Muon updates all matrices after the rest."""

    SENT = {"first layer": 0, "rest": None, "matrices": 0}  # group -> layer whose weights travel once it is updated

    def share(self, several):
        self.several, chunks = several, self.groups["all"]
        first, rest, _ = (CHUNKS.itemsize * end for end in self.ends)
        self.groups |= {"first layer": chunks[:first], "rest": chunks[first:rest], "other layers": chunks[rest:]}
        self.scalars = self.own_scalars.copy()  # of all ranks

    def loss(self, i):
        return super().loss(i * self.ranks + self.several.ranks.rank)  # its number among the update's micro-batches

    def accumulate(self, i):
        self.device.wait(self.several.gradients_arrived.get(REST))
        super().accumulate(i)

    def global_norm(self):
        self.device.wait(self.several.gradients_arrived[REST])
        self.norm_of("first layer")
        self.norm_of("rest")
        self.several.add_up(self.scalars, self.own_scalars)

    def update(self):
        super().update()
        for l in (0, None):
            self.device.wait(self.several.weights_arrived[l])

    def update_of(self, group):
        for part in ("first layer", "rest", "other layers") if group == "all" else (group,):
            super().update_of(part)
            if part in self.SENT:
                self.several.send_weights(self.SENT[part])

    # -- of an optimizer of whole matrices, as Muon: they travel from the ranks' shares to the rank that works on them

    def to_matrices(self, stack):
        there, here = matrix_parts(self.several.shares, stack, self.several.ranks.rank)
        self.exchange("to matrices", [(rank, self.u[part]) for rank, part in there],
                      [(rank, self.x[part]) for rank, part in here])
        n = sum(part.stop - part.start for _, part in here) // stack.size
        return self.x[: n * stack.size].reshape(n, stack.rows, stack.columns)

    def to_shares(self, stack, matrices):
        there, here = matrix_parts(self.several.shares, stack, self.several.ranks.rank)
        self.exchange("to shares", [(rank, matrices.reshape(-1)[part]) for rank, part in here],
                      [(rank, self.u[part]) for rank, part in there])
        return self.u

    def exchange(self, name, sends, receives):
        send = functools.partial(self.several.peers.exchange, sends, receives)
        self.device.wait(self.several.send([send], name))


def matrix_parts(shares, stack, rank):
    """Which rank works on what part of this rank's share of a stack, [(rank, slice)]; and which rank's share has what
    part of the matrices that this one works on. Each rank works on adjacent matrices."""
    edges = [stack.begin + stack.count * r // shares.ranks * stack.size for r in range(shares.ranks + 1)]
    there, here = [], []
    for source, owner in itertools.product(range(shares.ranks), repeat=2):
        pieces = stack.pieces(shares, source)
        for piece in pieces if rank in (source, owner) else ():
            begin, end = max(piece.begin, edges[owner]), min(piece.begin + piece.size, edges[owner + 1])
            if begin >= end:
                continue
            if source == rank:
                local = piece.local - pieces[0].local - piece.begin
                there.append((owner, slice(local + begin, local + end)))
            if owner == rank:
                here.append((source, slice(begin - edges[owner], end - edges[owner])))
    return there, here


@dataclasses.dataclass
class OwnedShare(Owned):
    """The optimizer state of one rank of several, on the host: as Owned, of its pieces."""

    shares: Shares = None
    rank: int = 0

    ranks = property(lambda self: self.shares.ranks)

    def read(self, f, header, hint):
        """Fill the arrays from the files of all ranks that wrote a state, any number of them; f: rank 0's."""
        ranks, ours, arrays = int(header[2]), bool(header[40]), self.in_file(header[4]).values()
        if ranks > 1 and not ours and is_whole(f, len(arrays) * self.shares.size):
            ranks = 1  # llm.c without ZeRO: each rank's file has all
        sources = Shares(self.table, ranks, llmc=not ours)
        with contextlib.ExitStack() as stack:
            files = [(f, header)]
            for rank in range(1, ranks):
                other = stack.enter_context(open_input(rank_path(f.name, rank), hint))
                files.append((other, read_state_header(other, hint)))
                different = [slot for slot in (2, 4, 5, 10, 43, 44) if files[-1][1][slot] != header[slot]]
                if different or files[-1][1][3] != rank:
                    raise UserError(f"{other.name}: does not belong to {f.name}; {hint}")
            ends = [check_state_size(*file, len(arrays) * sources.share_size(rank), sources.size, hint)
                    for rank, file in enumerate(files)]
            for file in files[self.rank :: self.ranks]:  # each rank checks its part of the files
                check_crc(*file, hint)
            for i, array in enumerate(arrays):
                for rank, (source, _) in enumerate(files) if array is not None else ():
                    self.read_from(source, HEADER_BYTES + 4 * i * sources.share_size(rank), sources.pieces(rank), array)
        return ends[0]

    def read_from(self, f, start, sources, array):
        """Read what `array` needs from one rank's file, in which that rank's array begins at byte `start`."""
        for source, target in itertools.product(sources, self.shares.pieces(self.rank)):
            first, end = max(source.begin, target.begin), min(source.begin + source.size, target.begin + target.size)
            if first < end:
                f.seek(start + 4 * (source.local + first - source.begin))
                read_into(f, array[target.local + first - target.begin : target.local + end - target.begin])
