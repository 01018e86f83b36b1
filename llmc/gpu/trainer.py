"""Training a model on GPUs: buffers, batches, the captured step, AdamW over this rank's share, several GPUs, state.

It knows parameters, gradients and steps, but no layer: an architecture is a class like GPT2 of train_gpt2_cuda.py, with
parameter_table and tables, which say what to allocate, and what decoder.py asks for. Its instances have activations
(among them `losses`, (B, T)), trunk, classify, and backward, which joins the side stream.
"""

import functools
import time
from types import SimpleNamespace

import numpy as np

from llmc.alone import ALONE
from llmc.errors import UserError
from llmc.gpu.batch import batch_table, sort_tokens
from llmc.gpu.decoder import Decoder, decode_files, decode_geometry
from llmc.gpu.device import Device, copy_to_gpu, cp, pinned_array, pointer, record_event, to_float32
from llmc.gpu.geometry import BLOCK_THREADS, blocks, check_sizes, kernel_files, launch_geometry
from llmc.gpu.matmul import Matmul
from llmc.gpu.fp8 import Fp8
from llmc.gpu.memory import check_memory, group_bytes, makes_text, recomputed_inputs
from llmc.gpu.precision import round_weights
from llmc.gpu.shares import CHUNKS, REST, OwnedShare, Shares
from llmc.gpu.zero import Messages, Nccl
from llmc.loop import Update
from llmc.outliers import RECENT, reason_to_skip
from llmc.tensors import Tensors, allocate, flat, table_bytes, views

# ----------------------------------------------------------------------------------------------------------------------
# launches of kernels/update.cu, and its structs

STEP_CONTROL = np.dtype([("step", "i8"), ("steps_begun", "i8"), ("rate", "f4"), ("eps", "f4"),
                         ("learning_rate", "f4"), ("grad_scale", "f4"), ("halted", "i4"), ("skipped", "i4")])
REPORT = np.dtype([("loss", "f4"), ("norm", "f4"), ("loss_z", "f4"), ("norm_z", "f4")])
NOT_READY = 600  # cudaErrorNotReady
CALIBRATIONS = 4  # passes that find FP8's first scales


def add_gradients(device, sums, gradients, chunks, ranks, first):
    """sums (elements of the chunks,) = (+= if not first) the gradients of one micro-batch of each rank, added in the
    order of ranks. gradients: the receive buffer; chunks: CHUNKS of shares.py as bytes, which say what is where."""
    device.launch("add_gradients", (chunks.size // CHUNKS.itemsize,), (device.geometry.UPDATE_THREADS,), sums,
                  gradients, chunks, ranks, int(first))


def global_norm(device, partials, sums, gradients, chunks, ranks):
    """partials[a chunk's index] = the sum of squares of its gradients, which are sums (None: 0) + those of each rank's
    last micro-batch. partials: (chunks of all ranks,)."""
    device.launch("global_norm", (chunks.size // CHUNKS.itemsize,), (device.geometry.UPDATE_THREADS,), partials, sums,
                  gradients, chunks, ranks)


def adamw_update(device, params, master, m, v, sums, gradients, chunks, ranks, control, beta1, beta2, seed):
    """One AdamW step for the chunks' elements of params (parameters,), and of this rank's master (may be None), m, v.
    The gradients are sums (None: 0) + those of each rank's last micro-batch."""
    g = device.geometry
    grid = (chunks.size // CHUNKS.itemsize * (g.UPDATE_CHUNK // (g.UPDATE_THREADS * g.UPDATE_ADAMW_NUMBERS)),)
    device.launch("adamw_update", grid, (g.UPDATE_THREADS,), params, master, m, v, sums, gradients, chunks, ranks,
                  control, beta2, 1.0 - beta1, 1.0 - beta2, seed)


# ----------------------------------------------------------------------------------------------------------------------
# opening a model on a GPU

STATIC_SHARED = 10 << 10  # bytes of shared memory that attention's kernels declare themselves, at most


def open_device(architecture, gpu, config, precision, matmul="auto", text=False):
    """(Device with this model's kernels, Matmul). text: with a Decoder's kernels, too. Raises UserError for a model
    that is too large for the kernels or this GPU."""
    check_sizes(config, precision.fp8)
    files = kernel_files(architecture, config, precision, gpu.arch, matmul)
    needed = max(files["attention"].shared.values()) + STATIC_SHARED
    if needed > gpu.shared:
        raise UserError(f"heads of {config.HS} channels need {needed} bytes of shared memory in a block,"
                        f" {gpu.name} has {gpu.shared}: train this model with: python train_gpt2.py")
    geometry, files = launch_geometry(config, precision, gpu.arch), list(files.values())
    if text:
        vars(geometry).update(decode_geometry(architecture, config, precision, gpu.shared))
        files += decode_files(config, precision, geometry)
    device = Device(gpu, files, geometry)
    return device, Matmul(device, precision, matmul)


def open_trainer(architecture, gpu, config, params, settings, ranks=ALONE):
    """A Trainer of this model on this GPU; `settings` are resolved. The first rank draws the samples."""
    text = settings.sample_every > 0 and ranks.is_first
    device, matmul = open_device(architecture, gpu, config, settings.precision, settings.matmul, text)
    print(f"kernels: {device.compiled} compiled, {device.cached} from the cache")
    return Trainer(architecture, config, settings, matmul, params, ranks)


def open_evaluator(architecture, gpu, config, params):
    """An Evaluator of this model on this GPU, in float32, with TF32 matmuls where the GPU has them."""
    settings = architecture.resolve_auto(architecture.Settings(dtype="float32"), gpu.arch)
    _, matmul = open_device(architecture, gpu, config, settings.precision, settings.matmul)
    return Evaluator(architecture, config, settings, matmul, params)


# ----------------------------------------------------------------------------------------------------------------------
# forward passes, and training


class ForwardPasses:
    """What a Trainer and an Evaluator share: forward passes over the host's batches. They allocate params, batch, model
    and loss (1,)."""

    grads = None

    def __init__(self, architecture, config, settings, matmul):
        self.architecture, self.config, self.settings = architecture, config, settings
        self.device, self.matmul = matmul.device, matmul

    def make_model(self, B, T):
        tables = self.architecture.tables(self.config, self.settings, B, T, self.device.sm_count, self.device.geometry)
        buffers = {what: cp.empty(group_bytes(group), np.uint8) for what, group in tables.items()}
        return self.architecture(self.config, self.settings, self.matmul, self.params, self.grads, buffers)

    def forward(self, inputs, targets):
        """inputs, targets (B, T) integer ids on the host -> the mean loss, a float."""
        B, T = inputs.shape
        with self.device.stream:
            acts = self.model.activations(B, T)
            inputs, targets = (copy_to_gpu(room.reshape(-1)[: B * T], np.ascontiguousarray(ids, np.int32).reshape(-1))
                               for room, ids in ((self.batch.inputs, inputs), (self.batch.targets, targets)))
            self.model.trunk(acts, inputs)
            self.device.wait(self.model.classify(acts, targets, self.loss, 1.0 / (B * T), train=False))
            return float(self.loss.get()[0])

    def losses(self, inputs, targets):
        """inputs, targets (B, T) integer ids on the host -> the losses of the targets (B, T), float32."""
        self.forward(inputs, targets)
        with self.device.stream:
            return self.model.activations(*inputs.shape).losses.get()


class Evaluator(ForwardPasses):
    """A model on the GPU for forward passes alone: weights and activations, in float32."""

    def __init__(self, architecture, config, settings, matmul, params):
        """Arguments as of Trainer. B and T are set by allocate_activations."""
        super().__init__(architecture, config, settings, matmul)
        with self.device.stream:
            self.params = allocate(architecture.parameter_table(config), cp)
            copy_to_gpu(self.params.buffer, params.buffer)
            self.loss = cp.zeros(1, np.float32)
            matmul.allocate()

    def allocate_activations(self, B, T):
        """Make room for forward passes over (B, T) tokens, or fewer."""
        self.model = self.batch = None  # frees the old buffers first
        with self.device.stream:
            self.model = self.make_model(B, T)
            self.batch = SimpleNamespace(inputs=cp.empty(B * T, np.int32), targets=cp.empty(B * T, np.int32))


class Trainer(ForwardPasses):
    """A model in training: its weights, gradients and optimizer on the GPU. Everything is allocated here, once. Each of
    several GPUs computes the gradients of its own micro-batches, and updates its share of the weights."""

    fp8 = None  # in a run of --dtype fp8, an Fp8

    def __init__(self, architecture, config, settings, matmul, params, ranks=ALONE):
        """architecture: a class like GPT2; params: float32 Tensors on the host; ranks: a Ranks. Raises UserError if not
        everything fits into the GPU's free memory."""
        super().__init__(architecture, config, settings, matmul)
        self.ranks, self.precision, device = ranks, settings.precision, self.device
        self.messages = self.peers = None
        if ranks.size > 1:  # before check_memory, as NCCL takes memory, too
            self.peers = Nccl(ranks)
            with device.stream:
                self.peers.connect(device.stream)
        self.plan = check_memory(architecture, config, settings, device)
        with device.stream:
            self.params = self.allocate_shared(architecture.parameter_table(config, self.precision.dtype))
            self.grads = self.allocate_shared(architecture.parameter_table(config, self.precision.grads))
            self.shares = Shares(self.params.table, ranks.size, settings.weight_decay, settings.decay == "all")
            share, (chunks, ends, count) = self.shares.share_size(ranks.rank), self.shares.chunks(ranks.rank)
            self.m, self.v = cp.zeros(share, np.float32), cp.zeros(share, np.float32)
            self.master = cp.zeros(share, np.float32) if settings.master else None
            self.gradient_sums = cp.zeros(share, np.float32) if settings.own_micro_steps > 1 else None
            self.received = flat(self.grads)  # gradients of all ranks
            chunks = cp.asarray(chunks.view(np.uint8))
            first, rest, _ = (CHUNKS.itemsize * end for end in ends)
            self.groups = {"first layer": chunks[:first], "rest": chunks[first:rest], "other layers": chunks[rest:],
                           "all": chunks}
            self.set_params(params)
            self.model = self.make_model(settings.B, settings.T)
            if self.precision.fp8:
                recomputed = recomputed_inputs(architecture, settings)
                N, fuses_gelu = settings.B * settings.T, "gelu" in architecture.KERNELS
                self.fp8 = self.model.fp8 = Fp8(matmul, self.params, N, recomputed, fuses_gelu)
            matmul.allocate()
            self.batch = allocate(batch_table(settings.B, settings.T, settings.own_micro_steps), cp)
            self.control = cp.zeros(STEP_CONTROL.itemsize, np.uint8)
            self.recent = cp.zeros(2 * RECENT.itemsize, np.uint8) if settings.skips_outliers else None
            self.loss = cp.zeros(1, np.float32)  # of an evaluation
            # both: losses of micro-batches, then sums of squares of chunks. own: this rank's, 0 for the other ranks'
            self.own_parts = cp.zeros(settings.micro_steps + count * settings.needs_norm, np.float32)
            self.all_parts = self.own_parts
            if ranks.size > 1:
                self.all_parts = cp.zeros(self.own_parts.size, np.float32)
                received = self.peers.allocate(self.shares.received_size() * self.received.itemsize)
                self.received = received.view(self.received.dtype)
                self.messages = Messages(self.peers, self.shares, ranks.rank, flat(self.params), flat(self.grads),
                                         self.received)
        if makes_text(device):
            self.decoder = Decoder(architecture, device, config, self.params, self.precision, 1, settings.T)

        # Pinned memory has two halves: the host fills one while the GPU runs the step of the other.
        self.pinned = pinned_array(2 * self.batch.buffer.nbytes)
        self.staged = [views(self.batch.table, half) for half in self.pinned.reshape(2, -1)]
        self.reports = pinned_array(2 * REPORT.itemsize).view(REPORT)
        self.started, self.finished = [cp.cuda.Event() for _ in range(2)], [cp.cuda.Event() for _ in range(2)]
        self.steps_begun, self.graph = 0, None
        self.gradients_arrived, self.weights_arrived = {}, {}  # events
        self.weights_behind = False  # other ranks have updated weights that have not arrived here

    def allocate_shared(self, table):
        """Tensors that NCCL can send, if there are several GPUs."""
        return views(table, self.peers.allocate(table_bytes(table))) if self.peers else allocate(table, cp)

    def set_params(self, params):
        """Copy the weights, float32 Tensors, from the host. In bfloat16, they are rounded on the GPU, a share's size at
        a time, with m as scratch."""
        if not self.precision.bf16:
            copy_to_gpu(self.params.buffer, params.buffer)
            return
        exact, rounded, size = flat(params), flat(self.params), self.m.size // 8 * 8  # whole packs of round_weights
        for begin in range(0, exact.size, size):
            part = slice(begin, begin + size)
            round_weights(self.device, rounded[part], copy_to_gpu(self.m[: exact[part].size], exact[part]))
        self.m.fill(0)
        if self.master is not None:
            copy_to_gpu(self.master, self.shares.take(exact, self.ranks.rank))

    # -- an update: prepare, once; then begin_step and end_step

    def prepare(self, batch=None):
        """Run a batch, (inputs, targets), by default of random tokens, which loads all kernels, and capture the step as
        a graph. Changes no weight. FP8's first scales are those for the first rank's batch."""
        settings = self.settings
        if batch is None:
            batch = np.random.default_rng(0).integers(0, self.config.V, (2, settings.B, settings.T), dtype=np.int32)
        with self.device.stream:
            self.stage(0, [batch] * settings.own_micro_steps, 0.0)
            copy_to_gpu(self.batch.buffer, self.staged[0].buffer)
            if self.fp8:
                self.calibrate()
                self.fp8.quantise_weights()
            self.compute(0)
            if self.fp8:
                self.fp8.forget()
            if self.messages:  # before the capture, because two ranks connect at their first message
                for key in self.messages.gradient_sends:
                    self.send_gradients(key)
                self.send_all_weights()
                self.add_up_parts()
            self.device.synchronize()
            if settings.graph:
                self.device.stream.begin_capture()
                self.launch_step()
                self.graph = self.device.stream.end_capture()
                self.graph.upload(self.device.stream)

    def calibrate(self):
        """Find FP8's first scales, unless a checkpoint had them: with the batch that is on the GPU, again and again,
        because what has too small a scale is 0, and so is what is computed from it."""
        if not self.fp8.updates:
            for _ in range(CALIBRATIONS):
                self.fp8.state.updates.fill(0)  # the last one's numbers replace the earlier ones'
                self.fp8.quantise_weights()
                self.compute(0)
                if not self.ranks.is_first:  # the same scales on any number of GPUs
                    self.fp8.forget()
                self.prepare_scales()
            self.fp8.updates = 1

    def begin_step(self, batches, learning_rate):
        """Start one update with own_micro_steps batches (inputs, targets), and return its number. The one before may
        still be running."""
        number, half = self.steps_begun, self.steps_begun % 2
        self.wait(self.finished[half])  # the update before the last one has read this half
        self.stage(half, batches, learning_rate)
        with self.device.stream as stream:
            self.started[half].record(stream)
            if self.graph:
                self.graph.launch(stream)
            else:
                self.launch_step()
            self.finished[half].record(stream)
        self.steps_begun, self.weights_behind = number + 1, self.messages is not None
        return number

    def end_step(self, number):
        """Wait for update `number`, one of the last two; returns its Update."""
        half = number % 2
        self.wait(self.finished[half])
        loss, norm, *z_scores = self.reports[half].item()
        seconds = cp.cuda.get_elapsed_time(self.started[half], self.finished[half]) / 1000
        return Update(loss, norm if self.settings.needs_norm else None, seconds,
                      reason_to_skip(self.settings, *z_scores), self.fp8 and self.fp8.counts(number))

    # -- the same in three calls, from Python: forward, compute_gradients, update_now

    def compute_gradients(self, inputs, targets):
        """self.grads = the gradients of the loss of the last forward pass, which was over this full batch."""
        B, T, batch, half = self.settings.B, self.settings.T, self.batch, self.staged[0]
        self.stage(0, [(inputs, targets)], 0.0)
        with self.device.stream:
            copy_to_gpu(batch.buffer, half.buffer)
            acts, scale = self.model.activations(B, T), 1.0 / (B * T)
            if self.fp8:
                self.calibrate()
                self.fp8.trains = True
                self.model.trunk(acts, batch.inputs[0], self.layer_begins)  # again, in 8 bits
            self.model.classify(acts, batch.targets[0], self.own_parts[:1], scale, train=True)
            self.model.backward(acts, batch.order[0], batch.piece_begins[0], batch.piece_tokens[0], scale)
            if self.fp8:
                self.fp8.trains = False

    def update_now(self, learning_rate):
        with self.device.stream:
            copy_to_gpu(self.batch.learning_rate, np.array([learning_rate], np.float32))
            self.update()

    def wait(self, event):
        """Wait for an event of the GPU. Of several GPUs: raises UserError if another rank, or NCCL, fails meanwhile,
        because the GPU would wait for its messages for ever."""
        while self.peers and cp.cuda.runtime.eventQuery(event.ptr) == NOT_READY:
            self.peers.check()
            self.ranks.check()
            time.sleep(0.0002)
        event.synchronize()

    def stage(self, half, batches, learning_rate):
        """Write learning rate, own_micro_steps batches, and their sorted positions to one half of the pinned memory."""
        staged = self.staged[half]
        staged.learning_rate[0] = learning_rate
        for i, (inputs, targets) in enumerate(batches):
            staged.inputs[i], staged.targets[i] = inputs, targets
            sort_tokens(staged.order[i], staged.piece_begins[i], staged.piece_tokens[i], inputs)

    def launch_step(self):
        """Launch all that the GPU does for one update."""
        words = 1 + self.batch.inputs.size
        self.copy_batch(0, words)  # learning rate and inputs
        with self.device.beside(self.device.side) as batch_copied:  # the rest, beside the forward pass
            self.copy_batch(words, self.batch.buffer.nbytes // 4)
        for i in range(self.settings.own_micro_steps):
            self.compute(i, batch_copied, functools.partial(self.weight_done, i) if self.messages else None,
                         self.layer_begins if i == 0 else None)
            if self.messages:
                self.send_gradients(REST)
        self.update()

    def copy_batch(self, begin, end):
        """Copy words begin .. end - 1 from the current half of the pinned memory to self.batch, by a kernel, because a
        memcpy in a graph always has the same source."""
        self.device.launch("copy_batch", (blocks(end - begin, BLOCK_THREADS),), (BLOCK_THREADS,), self.batch.buffer,
                           pointer(self.pinned), self.control, self.batch.buffer.nbytes // 4, begin, end)

    def compute(self, i, batch_copied=None, weight_done=None, layer_begins=None):
        """Run forward and backward on batch i of self.batch. In between, add up the previous batch's gradients, which
        the backward pass overwrites. batch_copied: an event, after which targets and sorted positions are on the GPU;
        weight_done, layer_begins: see GPT2.backward, GPT2.trunk."""
        batch, B, T = self.batch, self.settings.B, self.settings.T
        number = i * self.ranks.size + self.ranks.rank  # among the update's micro-batches
        acts, scale = self.model.activations(B, T), 1.0 / (B * T * self.settings.micro_steps)
        if self.fp8:
            self.fp8.trains = True
        with self.device.span(f"forward {i}"):
            self.model.trunk(acts, batch.inputs[i], layer_begins)
            self.device.wait(batch_copied)
            self.model.classify(acts, batch.targets[i], self.own_parts[number : number + 1], scale, train=True)
        if i > 0:
            self.add_gradients(i - 1)
        with self.device.span(f"backward {i}"):
            self.model.backward(acts, batch.order[i], batch.piece_begins[i], batch.piece_tokens[i], scale, weight_done)
        if self.fp8:
            self.fp8.trains = False

    def weight_done(self, i, name, l, computed):
        """Send the gradient of layer l's matrix `name` in micro-batch i, after the event `computed`. The last one is of
        the first layer's first matrix. While it travels, the norm of the other layers' gradients is computed."""
        self.send_gradients((name, l), computed)
        is_last = i == self.settings.own_micro_steps - 1 and l == 0 and name == self.shares.first_matrix
        if is_last and self.shares.layers > 1:
            self.device.wait(self.gradients_arrived[name, 1])
            self.global_norm("other layers")

    def send_gradients(self, key, computed=None):
        """Send and receive a matrix's gradients. key: (name, layer), (name, None) or REST; computed: an event to wait
        for first."""
        name = " ".join(["gradients", *(str(part) for part in reversed(key) if part is not None)])
        self.gradients_arrived[key] = self.send(self.messages.gradient_sends[key], name, computed)

    def send_weights(self, l):
        """Send and receive the weights that each rank has updated. l: whose matrices; None: the rest."""
        name = "weights" if l is None else f"weights {l}"
        self.weights_arrived[l] = self.send(self.messages.weight_sends[l], name)

    def send(self, sends, name, computed=None):
        """Returns an event. All messages are on one stream, because NCCL needs one order."""
        with self.device.beside(self.device.comm) as done:
            self.device.wait(computed)
            with self.device.span(name):
                for send in sends:
                    send(self.device.stream)
        return done

    def layer_begins(self, l):
        """Before layer l of an update's first forward pass: wait for its matrices, and have those of the next two
        layers on their way; the first layer's have arrived in the previous step."""
        if self.messages:
            if l > 0:
                self.device.wait(self.weights_arrived[l])
            for ahead in range(1 if l == 0 else l + 2, min(l + 3, self.shares.layers)):
                self.send_weights(ahead)
        if self.fp8 and (self.messages or l == 0):
            self.fp8.quantise_weights(slice(l, l + 1 if self.messages else None), again=not self.ranks.is_first)

    def add_gradients(self, i):
        """Add the gradients of micro-batch i to self.gradient_sums."""
        self.device.wait(self.gradients_arrived.get(REST))
        with self.device.span(f"add {i}"):
            add_gradients(self.device, self.gradient_sums, self.received, self.groups["all"], self.ranks.size, i == 0)

    def complete_weights(self):
        """Between two updates, complete self.params on every rank. All ranks must call this."""
        if self.weights_behind:
            with self.device.stream as stream:
                self.send_all_weights()
            self.wait(record_event(stream))
        self.weights_behind = False

    def send_all_weights(self):
        for l in (*range(self.shares.layers), None):
            self.send_weights(l)
        self.device.wait(self.weights_arrived[None])

    def add_up_parts(self):
        """self.all_parts = the sum over the ranks of self.own_parts; returns an event."""
        with self.device.beside(self.device.comm) as done:
            self.peers.add_up(self.all_parts, self.own_parts, self.device.stream)
        return done

    def prepare_scales(self):
        """At the end of an update: FP8's scales of the next one, from the largest numbers on all ranks."""
        if self.messages:
            with self.device.beside(self.device.comm) as done:
                largest, counts = self.fp8.state.largest, self.fp8.state.counts
                self.peers.add_up(largest, largest, self.device.stream, largest=True)
                self.peers.add_up(counts, counts, self.device.stream)
            self.device.wait(done)
        self.fp8.prepare_scales()

    def close(self):
        """Free the graph and leave NCCL, after the last update."""
        self.device.synchronize()
        self.graph = None  # before the communicator that it has captured
        self.ranks.gather(None)  # from here on, no rank reads another's memory
        if self.peers:
            self.peers.close()

    def update(self):
        """Run AdamW over this rank's share, and write the report to the host. On several GPUs, the first layer and the
        rest are updated first: the next forward pass begins with them, and they travel during the other updates."""
        device, settings, micro_steps = self.device, self.settings, self.settings.micro_steps
        threads, parts = device.geometry.UPDATE_THREADS, self.all_parts
        if self.messages:
            device.wait(self.gradients_arrived[REST])
            self.global_norm("first layer")
            self.global_norm("rest")
            device.wait(self.add_up_parts())
        else:
            self.global_norm()
        if self.fp8:
            self.prepare_scales()
        device.launch("prepare_update", (1,), (threads,), self.control, pointer(self.reports), parts,
                      parts[micro_steps:], self.batch.learning_rate, np.float64(settings.beta1),
                      np.float64(settings.beta2), np.float64(settings.eps), settings.grad_clip, micro_steps,
                      parts.size - micro_steps, self.recent, settings.skip_loss_zscore, settings.skip_norm_zscore)
        if self.messages:
            self.adamw("first layer")
            self.send_weights(0)
            self.adamw("rest")
            self.send_weights(None)
            self.adamw("other layers")
            device.wait(self.weights_arrived[None])
        else:
            self.adamw()

    def global_norm(self, group="all"):
        chunks = self.groups[group]
        if self.settings.needs_norm and chunks.size:
            with self.device.span(f"norm {group}"):
                global_norm(self.device, self.own_parts[self.settings.micro_steps :], self.gradient_sums, self.received,
                            chunks, self.ranks.size)

    def adamw(self, group="all"):
        settings, chunks = self.settings, self.groups[group]
        if chunks.size:
            with self.device.span(f"adamw {group}"):
                adamw_update(self.device, flat(self.params), self.master, self.m, self.v, self.gradient_sums,
                             self.received, chunks, self.ranks.size, self.control, settings.beta1, settings.beta2,
                             settings.stochastic_rounding)

    # -- state: between the GPU and the host's checkpoints

    def to_host(self, tensors):
        """Copy params or grads or, on one GPU, the array m, v or master to the host, as float32 Tensors."""
        table = {name: row._replace(dtype="float32") for name, row in self.params.table.items()}
        array = flat(tensors) if isinstance(tensors, Tensors) else tensors
        with self.device.stream:
            return views(table, to_float32(array).view(np.uint8))

    def params_now(self):
        """Copy the weights to the host unchanged: bfloat16 bits in a bfloat16 run."""
        with self.device.stream:
            return views(self.params.table, self.params.buffer.get())

    def state_room(self, with_exact):
        """Allocate room on the host for this rank's share of the optimizer state."""
        arrays = [np.empty(self.m.size, np.float32) for _ in range(3 if with_exact else 2)]
        return self.owned(*arrays)

    def state_now(self):
        """Copy this rank's share of the optimizer state to the host."""
        with self.device.stream:
            return self.owned(self.m.get(), self.v.get(), None if self.master is None else self.master.get())

    def owned(self, m, v, exact=None):
        return OwnedShare(self.params.table, m, v, exact, self.shares, self.ranks.rank)

    def set_state(self, owned, has_exact, step, recent):
        """Continue from a checkpoint. owned: this rank's share; has_exact: whether it has float32 weights; recent: (2,)
        RECENT. A bfloat16 model keeps its weights: they may be owned.exact rounded stochastically."""
        with self.device.stream:
            copy_to_gpu(self.m, owned.m)
            copy_to_gpu(self.v, owned.v)
            if has_exact and self.master is not None:
                copy_to_gpu(self.master, owned.exact)
            elif has_exact and not self.precision.bf16:
                for piece in self.shares.pieces(self.ranks.rank):
                    copy_to_gpu(flat(self.params)[piece.begin : piece.begin + piece.size],
                                owned.exact[piece.local : piece.local + piece.size])
                if self.messages:
                    self.send_all_weights()
            copy_to_gpu(self.control[:8], np.array([step], np.int64).view(np.uint8))  # its first field
            if self.recent is not None:
                copy_to_gpu(self.recent, recent)

    def recent_values(self):
        """(2,) RECENT: losses and norms of the last updates, or zeros if outliers are not skipped."""
        with self.device.stream:
            return np.zeros(2, RECENT) if self.recent is None else self.recent.get().view(RECENT)
