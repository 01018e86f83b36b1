"""What surrounds a training step on a GPU: opening the model there, batches in pinned memory, the
step's graph, reports.

Of an architecture, a class like GPT2 of train_gpt2_cuda.py, it uses HAS, LAYERS, INPUTS,
RECOMPUTED, parameter_table, tables, Optimizer, resolve_auto and what decoder.py asks for; of its
instances, activations (among them `losses`), training_activations, trunk, classify, backward,
micro_step, train_step, update and capture."""

import math
import time
from types import SimpleNamespace

import numpy as np

from llmc.dataloader import NO_TARGETS, total_weight
from llmc.errors import UserError
from llmc.gpu.batch import sort_tokens, sorted_tokens
from llmc.gpu.device import Device, copy_to_gpu, cp, pinned_array, to_float32
from llmc.gpu.geometry import check_sizes, kernel_files, launch_geometry
from llmc.gpu.matmul import Linears, Matmul
from llmc.gpu.memory import Block, allocate_plan
from llmc.gpu.messages import Messages
from llmc.gpu.plan import check_memory, shares_of, state_name
from llmc.gpu.precision import copy_weights
from llmc.loop import Update, check_update
from llmc.outliers import reason_to_skip
from llmc.single_process import SINGLE_PROCESS
from llmc.tensors import Tensors, allocate, flat, views

NOT_READY = 600  # cudaErrorNotReady

# --------------------------------------------------------------------------------------------------
# opening a model on a GPU

# bytes of shared memory that attention's kernels declare themselves, at most
STATIC_SHARED = 10 << 10


def open_device(architecture, gpu, config, precision, matmul="auto", text=False):
    """(Device with this model's kernels, Matmul). text: with a Decoder's kernels, too. Raises
    UserError for a model that is too large for the kernels or this GPU."""
    check_sizes(config, precision.fp8, architecture.HAS.qknorm)
    files = kernel_files(architecture, config, precision, gpu.arch, matmul)
    needed = max(files["attention"].shared.values()) + STATIC_SHARED
    if needed > gpu.shared:
        raise UserError(f"heads of {config.HS} channels need {needed} bytes of shared memory in a"
                        f" block, {gpu.name} has {gpu.shared}: train this model with: python"
                        f" {type(config).__module__}.py")

    files = list(files.values())
    geometry = launch_geometry(config, precision, gpu.arch)
    if text:
        from llmc.gpu.decode_geometry import decode_files  # here: only runs that draw text need it
        files += decode_files(architecture, config, precision, geometry, gpu.shared)
    device = Device(gpu, files, geometry)
    return device, Matmul(device, precision, matmul)


def open_trainer(architecture, gpu, config, params, settings, ranks=SINGLE_PROCESS):
    """A Trainer of this model on this GPU; `settings` are resolved. The first rank draws the
    samples."""
    text = int(settings.sample_every > 0 and ranks.is_first)
    device, matmul = open_device(architecture, gpu, config, settings.precision, settings.matmul,
                                 text > 0)
    print(f"kernels: {device.compiled} compiled, {device.cached} from the cache")
    return Trainer(architecture, config, settings, matmul, params, ranks, text)


# --------------------------------------------------------------------------------------------------
# forward passes


class ForwardPasses:
    """What a Trainer and an Evaluator share: forward passes over the host's batches. They set
    params, grads, linears, messages, model and batch."""

    def __init__(self, architecture, config, settings, matmul):
        self.architecture = architecture
        self.config = config
        self.settings = settings
        self.device = matmul.device
        self.matmul = matmul
        with self.device.stream:
            self.loss = cp.zeros(1, np.float32)  # of an evaluation

    def make_model(self, buffers):
        """buffers: an array of bytes for each entry of the architecture's tables."""
        return self.architecture(self.config, self.settings, self.linears, self.messages,
                                 self.params, self.grads, buffers)

    def forward(self, inputs, targets, weights=None, total=None):
        """inputs, targets (B, T) integer ids, weights (B, T) on the host -> the loss, a float: the
        mean or, with weights, the sum of weights * losses over `total`, by default their sum."""
        B, T = inputs.shape
        if weights is None:
            weights, total = np.ones((B, T)), B * T
        elif total is None:
            total = float(np.sum(weights, dtype=np.float64))

        def on_gpu(room, values):  # room: of the training batch, which the next step overwrites
            values = np.ascontiguousarray(values, room.dtype)
            return copy_to_gpu(room.reshape(-1)[: B * T], values).reshape(B, T)

        with self.device.stream:
            acts = self.model.activations(B, T)
            inputs_there = on_gpu(self.batch.inputs, inputs)
            targets_there = on_gpu(self.batch.targets, targets)
            weights_there = on_gpu(self.batch.weights, weights)
            self.model.trunk(acts, inputs_there)
            loss_done = self.model.classify(acts, targets_there, weights_there, self.loss,
                                            1.0 / total, train=False)
            self.device.wait(loss_done)
            return float(self.loss.get()[0])

    def losses(self, inputs, targets):
        """inputs, targets (B, T) integer ids on the host -> the losses of the targets (B, T),
        float32."""
        self.forward(inputs, targets)
        with self.device.stream:
            return self.model.activations(*inputs.shape).losses.get()


class Evaluator(ForwardPasses):
    """A model on this GPU for forward passes alone: weights and activations, in float32, with TF32
    matmuls where the GPU has them. B and T are set by allocate_activations."""

    grads = None

    def __init__(self, architecture, gpu, config, params):
        settings = architecture.resolve_auto(architecture.Settings(dtype="float32"), gpu.arch)
        _, matmul = open_device(architecture, gpu, config, settings.precision, settings.matmul)
        super().__init__(architecture, config, settings, matmul)
        self.linears = Linears(matmul)
        self.messages = Messages()

        with self.device.stream:
            self.params = allocate(architecture.parameter_table(config), cp)
            copy_weights(self.device, self.params, params)
            matmul.allocate()

    def allocate_activations(self, B, T):
        """Make room for forward passes over (B, T) tokens, or fewer."""
        tables = self.architecture.tables(self.config, self.settings, B, T, self.device)
        plan = {what: Block(group, scratch=True) for what, group in tables.items()}
        with self.device.stream:
            self.model = self.make_model(allocate_plan(plan))
            self.batch = SimpleNamespace(inputs=cp.empty(B * T, np.int32),
                                         targets=cp.empty(B * T, np.int32),
                                         weights=cp.empty(B * T, np.float32))


# --------------------------------------------------------------------------------------------------
# training: what a run has, by its settings; then the Trainer


def choose_linears(architecture, matmul, settings):
    """The linear layers of a run: in bfloat16 or float32, or, with --dtype fp8, in 8 bits.
    Allocates nothing."""
    if not settings.precision.fp8:
        return Linears(matmul)
    from llmc.gpu.fp8_linears import Fp8Linears  # here: few runs need it
    return Fp8Linears(matmul, architecture, settings)


def open_nccl(ranks, settings):
    """An Nccl, or None on one GPU; opened before free memory is counted, of which it takes some."""
    if ranks.size == 1:
        return None
    from llmc.gpu.several.nccl import Nccl  # here: a run on one GPU does not need it
    return Nccl(ranks, settings.B * settings.T)


def choose_messages(ranks, nccl, device, settings, config):
    """The Messages of a run."""
    if ranks.size == 1:
        return Messages()
    from llmc.gpu.several.zero import ZeroMessages  # here, too
    return ZeroMessages(ranks, nccl, device, settings.own_micro_steps, config.L)


class Trainer(ForwardPasses):
    """A model in training: its weights, gradients and optimizer on the GPU. Everything is allocated
    here, once. Each of several GPUs computes the gradients of its own micro-batches, and updates
    its share of the weights."""

    def __init__(self, architecture, config, settings, matmul, params, ranks=SINGLE_PROCESS,
                 text=0):
        """architecture: a class like GPT2; params: float32 Tensors on the host; ranks: a Ranks;
        text: with a Decoder of so many sequences. Raises UserError if not everything fits into the
        GPU's free memory."""
        super().__init__(architecture, config, settings, matmul)
        self.ranks = ranks
        self.precision = settings.precision
        self.linears = choose_linears(architecture, matmul, settings)
        self.nccl = open_nccl(ranks, settings)
        self.messages = choose_messages(ranks, self.nccl, self.device, settings, config)

        self.plan, self.largest_batch = check_memory(architecture, config, settings, self.device,
                                                     text, ranks.rank)
        with self.device.stream:
            self.buffers = allocate_plan(self.plan, self.nccl)
            self.start(params)
        if text:
            from llmc.gpu.decoder import Decoder  # here: only runs that draw text need it
            self.decoder = Decoder(architecture, self.device, config, self.params,
                                   self.tensors("text"), text, settings.T)
        self.pin()

        self.steps_begun = 0
        self.graph = None
        self.weights_behind = False  # other ranks have updated weights that have not arrived here

    def tensors(self, what):
        """The Tensors in the buffer of the plan's entry `what`."""
        return self.plan[what].over(self.buffers[what])

    def start(self, params):
        """Give each object its part of the memory, and the weights their values."""
        architecture, settings = self.architecture, self.settings
        self.params, self.grads = self.tensors("parameters"), self.tensors("gradients")
        received = flat(self.grads)
        if self.ranks.size > 1:
            received = self.tensors("gradients of all ranks").received

        self.shares = shares_of(architecture, self.config, settings)
        state = {name: getattr(self.tensors(state_name(architecture, name)), name)
                 for name in architecture.Optimizer.table(settings, self.shares, self.ranks.rank)}
        self.optimizer = architecture.Optimizer(self.matmul, settings, flat(self.params), received,
                                                state, self.shares, self.messages)
        copy_weights(self.device, self.params, params)
        if self.optimizer.master is not None:
            copy_to_gpu(self.optimizer.master, self.shares.take(flat(params), self.ranks.rank))

        self.matmul.start(self.tensors("matmul workspaces"))
        operands = self.tensors("operands in 8 bits") if self.precision.fp8 else None
        self.linears.start(self.params, operands)
        self.messages.start(self.params, self.grads, received, self.shares, self.optimizer,
                            self.linears)
        of_passes = architecture.tables(self.config, settings, settings.B, settings.T, self.device)
        self.model = self.make_model({what: self.buffers[what] for what in of_passes})
        self.acts = self.model.training_activations(settings.B, settings.T)
        self.batch = self.tensors("the batch")

    def pin(self):
        """Pinned memory for batches and reports has two halves: the host fills one while the GPU
        runs the step of the other."""
        self.pinned = pinned_array(2 * self.batch.buffer.nbytes)
        self.staged = [views(self.batch.table, half) for half in self.pinned.reshape(2, -1)]
        self.reports = pinned_array(2 * self.optimizer.REPORT.itemsize).view(self.optimizer.REPORT)
        self.started = [cp.cuda.Event() for _ in range(2)]
        self.finished = [cp.cuda.Event() for _ in range(2)]

    # -- an update: prepare, once; then begin_step and end_step

    def prepare(self, batch=None):
        """Run a batch, (inputs, targets), by default of random tokens, and capture the step as a
        graph. Changes no weight."""
        settings = self.settings
        if batch is None:
            batch = np.random.default_rng(0).integers(0, self.config.V, (2, settings.B, settings.T),
                                                      dtype=np.int32)
        without_weights = batch[:2]  # in FP8, scales are for all targets
        with self.device.stream:
            self.stage(0, [without_weights] * settings.own_micro_steps, 0.0)
            copy_to_gpu(self.batch.buffer, self.staged[0].buffer)
            self.linears.calibrate(self)  # in FP8: the first scales, by the first rank's batch
            self.linears.weights_changed()
            self.model.micro_step(self, 0)  # loads the kernels; outside of a step, it sends nothing
            self.linears.forget()  # in FP8: the amax of this batch
            self.messages.connect()
            self.device.synchronize()
            if settings.graph:
                self.graph = self.model.capture(self)

    def begin_step(self, batches, learning_rate, total=None):
        """Start one update with own_micro_steps batches (inputs, targets) or (inputs, targets,
        weights), and return its number, counted from this Trainer's first. The one before may
        still be running. total: what weighted losses are divided by, by default the sum of the
        weights."""
        number = self.steps_begun
        half = number % 2  # as copy_batch and prepare_update take, by a count of their own
        self.wait(self.finished[half])  # the update before the last one has read this half
        self.stage(half, batches, learning_rate, total)
        with self.device.stream as stream:
            self.started[half].record(stream)
            if self.graph:
                self.graph.launch(stream)
            else:
                self.model.train_step(self)
            self.finished[half].record(stream)
        self.steps_begun = number + 1
        self.weights_behind = self.ranks.size > 1
        return number

    def end_step(self, number):
        """Wait for update `number`, one of the last two; returns its Update."""
        half = number % 2
        self.wait(self.finished[half])
        loss, norm, *z = self.reports[half].item()
        _, scale = self.staged[half].rate_and_scale
        return Update(
            loss=loss,
            norm=norm if self.settings.needs_norm else None,
            seconds=cp.cuda.get_elapsed_time(self.started[half], self.finished[half]) / 1000,
            skipped=reason_to_skip(self.settings, *z) if scale else NO_TARGETS,
            z_scores=z if self.settings.skips_outliers else None,
            fp8=self.linears.counts(number),
        )

    # -- the same in three calls, from Python: forward, compute_gradients, update_now

    def compute_gradients(self, inputs, targets, weights=None, total=None):
        """self.grads = the gradients of the loss of the last forward pass, which was over this full
        batch; with weights, divided by `weigh`'s scale, which update_now makes up for."""
        acts, batch = self.acts, self.batch
        scale = 1.0 / inputs.size
        self.stage(0, [(inputs, targets) if weights is None else (inputs, targets, weights)], 0.0,
                   total)
        with self.device.stream:
            copy_to_gpu(batch.buffer, self.staged[0].buffer)
            if self.precision.fp8:
                self.linears.calibrate(self)
                self.linears.weights_changed()
                self.model.trunk(acts, batch.inputs[0])  # again, in 8 bits
            self.model.classify(acts, batch.targets[0], batch.weights[0],
                                self.optimizer.loss_place(0), scale, train=True)
            self.model.backward(acts, sorted_tokens(batch, 0), scale)

    def update_now(self, learning_rate):
        """Raises UserError if the loss or the norm is not finite: no weight changes from then
        on."""
        number = self.steps_begun
        self.steps_begun += 1
        with self.device.stream as stream:
            copy_to_gpu(self.batch.rate_and_scale[:1], np.array([learning_rate], np.float32))
            self.model.update(self)
            stream.synchronize()
        loss, norm, *_ = self.reports[number % 2].item()
        check_update(number, loss, norm)

    def wait(self, event):
        """Wait for an event of the GPU. Of several GPUs: raises UserError if another rank, or NCCL,
        fails meanwhile, because the GPU would wait for its messages for ever."""
        while self.nccl and cp.cuda.runtime.eventQuery(event.ptr) == NOT_READY:
            self.nccl.check()
            self.ranks.check()
            time.sleep(0.0002)
        event.synchronize()

    def stage(self, half, batches, learning_rate, total=None):
        """Write learning rate, own_micro_steps batches, and their sorted positions to one half of
        the pinned memory."""
        staged = self.staged[half]
        largest, scale = self.weigh(batches, total)
        staged.rate_and_scale[:] = learning_rate, scale
        for i, (inputs, targets, *weights) in enumerate(batches):
            staged.inputs[i] = inputs
            staged.targets[i] = targets
            staged.weights[i] = weights[0] / largest if weights else 1.0
            sort_tokens(staged.order[i], staged.piece_begins[i], staged.piece_tokens[i],
                        staged.inputs[i])

    def weigh(self, batches, total):
        """(largest, scale) of an update on all ranks: weights are staged as w / largest, so that 8
        bits hold each target's gradient however few have a weight; losses and gradients, which are
        of a mean over all targets, are then multiplied by scale = largest * targets / total. It is
        0 if no target has a weight."""
        if len(batches[0]) == 2:
            return 1.0, 1.0
        of_rank = total_weight(batches), max(np.abs(weights).max() for *_, weights in batches)
        totals, largest = zip(*self.ranks.gather_numbers(of_rank))
        total = total or math.fsum(totals)
        if not max(largest) or not total:
            return 1.0, 0.0
        return max(largest), max(largest) * self.settings.update_tokens / total

    def complete_weights(self):
        """Between two updates, complete self.params on every rank. All ranks must call this."""
        if self.weights_behind:
            with self.device.stream as stream:
                self.messages.send_all_weights()
            self.wait(stream.record())
        self.weights_behind = False

    def close(self):
        """Free the graph and leave NCCL, after the last update."""
        self.device.synchronize()
        self.graph = None  # before the communicator that it has captured
        self.ranks.gather(None)  # from here on, no rank reads another's memory
        if self.nccl:
            self.nccl.close()

    def to_host(self, tensors):
        """Copy params or grads or, on one GPU, an array of the optimizer's state to the host, as
        float32 Tensors."""
        array = flat(tensors) if isinstance(tensors, Tensors) else tensors
        with self.device.stream:
            return views(self.architecture.parameter_table(self.config),
                         to_float32(array).view(np.uint8))
