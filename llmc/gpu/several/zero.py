"""Several GPUs: how gradients and weights travel (ZeRO stage 2; Rajbhandari et al. 2019,
https://arxiv.org/abs/1910.02054).

Each rank computes the gradients of its own micro-batches, and holds only its share of the optimizer
state: moments, float32 weights and, with gradient accumulation, float32 sums of gradients. During
each backward pass, it sends every other rank that one's part of each matrix's gradient, as soon as
it is computed. The owner adds them up in the order of the micro-batches, whichever ranks computed
them, so that an update has the same bits on 1, 2, 4, 8 or 16 GPUs. This moves as many bytes as a
reduce-scatter. The new weights arrive before the next forward pass needs them."""

import collections
import functools
import itertools

from llmc.gpu.messages import REST, Messages
from llmc.tensors import flat


class ZeroMessages(Messages):
    """The messages of a step, all on the communication stream, and the events at which they have
    arrived. A message is a function of a stream:

        gradient_sends[name, layer]  send each owner its part of a matrix's gradient; receive every
                                     rank's gradient of the part that this rank owns. (REST, None):
                                     of embeddings, biases and norms
        weight_sends[layer]          send this rank's new weights of the layer's matrices to all,
                                     and receive theirs; None: of what is outside the layers

    A segment that divides into equal parts has a collective of its own. All other segments, and
    small ones of REST, share a group of point-to-point messages: a copy engine takes 20 us to
    start, which nothing hides at the end of a backward pass."""

    # gradient_done launches the norm of the "other layers"
    norm_groups = "first layer", "outside the layers"
    # the next forward pass begins with the first two
    update_groups = "first layer", "outside the layers", "other layers"
    # group -> layer whose weights travel, once updated; "matrices" are Muon's
    WEIGHTS = {"first layer": 0, "outside the layers": None, "matrices": 0}

    LARGE = 1 << 22  # elements

    def __init__(self, ranks, nccl, device, own_micro_steps, L):
        self.ranks = ranks
        self.nccl = nccl
        self.device = device
        self.rank = ranks.rank
        self.rank_count = ranks.size
        self.own_micro_steps = own_micro_steps
        self.L = L
        self.micro_batch = None  # number of the one that is launched; None outside of a step
        self.matrices_sent = 0  # in this micro-batch
        self.gradients_arrived = {}
        self.weights_arrived = {}  # events
        self.gradient_sends = collections.defaultdict(list)
        self.weight_sends = collections.defaultdict(list)

    def start(self, params, grads, received, shares, optimizer, linears):
        """Make the lists of messages. params, grads: Tensors on the GPU; received (received_size,):
        room for each rank's gradients of the parts that this rank owns; shares: a Shares."""
        self.shares = shares
        self.optimizer = optimizer
        self.linears = linears
        params = flat(params)
        grads = flat(grads)
        owned = {part.segment: part for part in shares.parts_of(self.rank)}
        small = collections.defaultdict(PointToPoint)

        for segment in shares.segments:
            mine = owned.get(segment)
            key = segment.name, segment.layer
            # parts begin at multiples of 8
            has_equal_parts = segment.size % (8 * self.rank_count) == 0
            if has_equal_parts and (segment.name != REST or segment.size >= self.LARGE):
                whole = slice(segment.begin, segment.begin + segment.size)
                arriving = received[mine.received : mine.received + segment.size]
                send_gradients = functools.partial(self.nccl.all_to_all, arriving, grads[whole])
                send_weights = functools.partial(self.nccl.all_gather, params[whole])
                self.gradient_sends[key].append(send_gradients)
                self.weight_sends[segment.layer].append(send_weights)
                continue

            messages = small[key]
            for r, (begin, size) in enumerate(shares.cut(segment)):
                if size:
                    messages.gradients_sent.append((r, grads[begin : begin + size]))
                if mine:
                    place = mine.received + r * mine.size
                    messages.gradients_received.append((r, received[place : place + mine.size]))
                if mine and r != self.rank:
                    messages.weights_sent.append((r, params[mine.begin : mine.begin + mine.size]))
                if size and r != self.rank:
                    messages.weights_received.append((r, params[begin : begin + size]))

        for key, messages in small.items():
            gradients = messages.gradients_sent, messages.gradients_received
            weights = messages.weights_sent, messages.weights_received
            self.gradient_sends[key].insert(0, functools.partial(self.nccl.exchange, *gradients))
            # last, because it is a kernel, which would wait behind AdamW's blocks
            self.weight_sends[key[1]].append(functools.partial(self.nccl.exchange, *weights))

    def connect(self):
        """Send each message once, before the capture, because two ranks connect at their first
        message."""
        for name, l in self.gradient_sends:
            self.send_gradients(name, l)
        self.send_all_weights()
        self.add_up(self.optimizer.scalars, self.optimizer.own_scalars)

    # -- messages, all on one stream, because NCCL needs one order

    def send(self, sends, name, computed=None):
        """Launch messages; computed: an event to wait for first. Returns an event."""
        with self.device.beside(self.device.comm) as done:
            self.device.wait(computed)
            with self.device.span(name):
                for send in sends:
                    send(self.device.stream)
        return done

    def send_gradients(self, name, l=None, computed=None):
        """Send and receive the gradients of layer l's matrix, or of the rest."""
        words = ["gradients"]
        if l is not None:
            words.append(str(l))
        if name != REST:
            words.append(name)
        label = " ".join(words)
        self.gradients_arrived[name, l] = self.send(self.gradient_sends[name, l], label, computed)

    def send_weights(self, l):
        """Send and receive the weights that each rank has updated. l: whose matrices; None: what
        is outside the layers."""
        label = "weights" if l is None else f"weights {l}"
        self.weights_arrived[l] = self.send(self.weight_sends[l], label)

    def send_all_weights(self):
        for l in (*range(self.L), None):
            self.send_weights(l)
        self.device.wait(self.weights_arrived[None])

    def add_up(self, total, addend, largest=False):
        """total = the sum over the ranks of addend, or the largest."""
        with self.device.beside(self.device.comm) as done:
            self.nccl.add_up(total, addend, self.device.stream, largest=largest)
        self.device.wait(done)

    # -- the model's hooks

    def step_begins(self):
        self.micro_batch = 0
        self.matrices_sent = 0

    def step_ends(self):
        self.micro_batch = None

    def layer_begins(self, l):
        """In an update's first forward pass, wait for the layer's matrices, and have those of the
        next two layers on their way; the first layer's have arrived in the previous step."""
        if self.micro_batch != 0:
            return
        if l > 0:
            self.device.wait(self.weights_arrived[l])
        for ahead in (1, 2) if l == 0 else (l + 2,):
            if ahead < self.L:
                self.send_weights(ahead)
        self.linears.layer_arrived(l, self.ranks.is_first)

    def gradient_done(self, name, l=None, event=None):
        """Send the gradient. The last matrix of an update is of the first layer: while it travels,
        the norm of the other layers' gradients is computed. REST ends the micro-batch."""
        if self.micro_batch is None:
            return
        self.send_gradients(name, l, event)
        if name == REST:
            self.micro_batch += 1
            self.matrices_sent = 0
            return

        self.matrices_sent += 1
        if l != 0:
            self.others_arrived = self.gradients_arrived[name, l]  # messages arrive in order
        is_last_matrix = self.matrices_sent == len(self.gradient_sends) - 1
        is_last_micro_batch = self.micro_batch == self.own_micro_steps - 1
        if is_last_matrix and is_last_micro_batch and self.L > 1:
            self.device.wait(self.others_arrived)
            self.optimizer.norm_of("other layers")

    # -- the optimizer's hooks

    def wait_for_gradients(self):
        """REST's are the last to arrive."""
        self.device.wait(self.gradients_arrived[REST, None])

    def group_updated(self, group):
        """The other layers' weights travel during the next forward pass."""
        if group in self.WEIGHTS:
            self.send_weights(self.WEIGHTS[group])

    def wait_for_weights(self):
        for l in (0, None):
            self.device.wait(self.weights_arrived[l])

    def to_matrices(self, stack, share, whole):
        """Matrices travel from the ranks' shares to the rank that works on them."""
        there, here = matrix_parts(self.shares, stack, self.rank)
        sends = [(rank, share[part]) for rank, part in there]
        receives = [(rank, whole[part]) for rank, part in here]
        self.exchange("to matrices", sends, receives)

        n = sum(part.stop - part.start for _, part in here) // stack.size
        return whole[: n * stack.size].reshape(n, stack.rows, stack.columns)

    def to_share(self, stack, matrices, share):
        there, here = matrix_parts(self.shares, stack, self.rank)
        sends = [(rank, matrices.reshape(-1)[part]) for rank, part in here]
        receives = [(rank, share[part]) for rank, part in there]
        self.exchange("to shares", sends, receives)
        return share

    def exchange(self, name, sends, receives):
        send = functools.partial(self.nccl.exchange, sends, receives)
        self.device.wait(self.send([send], name))


class PointToPoint:
    """Lists of (rank, array) for Nccl.exchange."""

    def __init__(self):
        self.gradients_sent = []
        self.gradients_received = []
        self.weights_sent = []
        self.weights_received = []


def matrix_parts(shares, stack, rank):
    """Muon's messages, two lists of (rank, slice): the parts of this rank's share of a stack, with
    the rank that works on each; the parts of the matrices that this rank works on, with the rank
    whose share has each. Each rank works on adjacent matrices."""
    count = shares.rank_count
    edges = [stack.begin + stack.count * r // count * stack.size for r in range(count + 1)]
    there = []
    here = []
    for source, owner in itertools.product(range(count), repeat=2):
        parts = stack.parts_of(shares, source)
        for part in parts if rank in (source, owner) else ():
            begin = max(part.begin, edges[owner])
            end = min(part.begin + part.size, edges[owner + 1])
            if begin >= end:
                continue

            if source == rank:
                local = part.local - parts[0].local - part.begin
                there.append((owner, slice(local + begin, local + end)))
            if owner == rank:
                here.append((source, slice(begin - edges[owner], end - edges[owner])))
    return there, here
