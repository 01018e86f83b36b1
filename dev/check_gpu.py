"""
Is the GPU's forward and backward pass right? One random batch, tensor by tensor beside
train_gpt2.py or, for a Llama, train_llama3.py; needs a GPU.

    make check                              # d4 with random weights; another: MODEL=gpt2_d12.bin ARGS="-t 256"
    make check MODEL=l4                     # a Llama
    python dev/check_gpu.py -e gpt2_d12.bin -b 2 -t 128 --dtype float32 --tf32 0

The flags are those of train_gpt2_cuda.py, but --recompute is 0 by default, so that every activation
is kept. It prints one row for each activation, the logits, their gradient and the gradients of the
weights. If a row is red, it also names the first wrong tensor and the launches that computed it,
and the exit status is 1.
"""

import collections
import contextlib
import math
import sys
from dataclasses import dataclass

import root  # noqa: F401  (it finds the modules)
import numpy as np

from llmc.gpu.batch import sorted_tokens
from llmc.gpu.device import copy_to_gpu, cp, gpu_errors_as_lines, to_float32
from llmc.errors import UserError, run_main
from llmc.settings import parse_settings, with_default
from llmc.tensors import bf16_bits, bf16_to_float32, flat, views
from llmc.api import architecture_of
from profile_gpu import array_of, label, open_model, open_trainer
from train_gpt2_cuda import JOB, CudaSettings
from llmc.debugstate import check_tensor

# The largest error allowed in a row, as a fraction of its largest value: float32 sums in another
# order stay below 1e-4 through all layers, TF32 operands keep 11 bits, bfloat16 tensors 8. In
# bfloat16, both start from the rounded weights. test_gpt2.py's noisy runs of GPT-2 124M have errors
# of up to 1.3 percent in bfloat16, 13 percent in FP8. Tensors that FP8 has in 8 bits alone, such as
# ln1 or the gradient of fch, have no row: the next one shows their errors.
TOLERANCES = {"fp8": 4e-1, "bf16": 5e-2, "tf32": 1e-2, "float32": 1e-4}


@dataclass
class CheckSettings(CudaSettings):
    recompute: int = with_default(CudaSettings, "recompute", 0)


# --------------------------------------------------------------------------------------------------
# gradients of logits in 8 bits

# Where the numbers of each 16 along the inner dimension of a matmul are stored; kernels/fp8.cuh
# tells why.
# (N,C), and weights in both copies
COLUMN_ORDER = np.array([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
ROW_ORDER = np.arange(16).reshape(2, 8).T.ravel()  # transposed copies of all else: 0, 8, 1, 9 ...


def decode_e5m2(bits):
    """(...) uint8 -> (...) float32: the first half of a float16."""
    return (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float32)


def natural(stored, order):
    """(...,n), n a multiple of 16, as stored in COLUMN_ORDER or ROW_ORDER -> the same in natural
    order."""
    return stored.reshape(*stored.shape[:-1], -1, 16)[..., np.argsort(order)].reshape(stored.shape)


def dlogits_of(logits):
    """What the classifier has left in place of logits (...,Vp) on the GPU -> (...,Vp) float32."""
    halves = logits.view(np.uint8).get().reshape(*logits.shape[:-1], 2, -1)
    return decode_e5m2(natural(halves[..., 0, :], COLUMN_ORDER))


# --------------------------------------------------------------------------------------------------
# which launch wrote what


class Recorder:
    """An observer that finds which launches write each watched row, (name, layer or None).

    Rows are poisoned first: a launch has written those whose first or last bytes are no longer
    poison. A kernel's first argument is a result, so a written row that comes there again is
    accumulated into. A row that column_sums writes takes its place in the order from the launch
    that left the partial sums."""

    def __init__(self, trainer):
        self.tensors = trainer.params, trainer.grads, trainer.linears.operands
        self.launches = []  # their labels, in order
        self.writers = collections.defaultdict(list)  # row -> indices of the launches that write it
        self.place = {}  # row -> index of the launch whose work shows in it
        self.unwritten = {}
        self.addresses = {}  # row -> array, address -> row
        self.latest = {}  # address -> the latest launch that had it as an argument
        self.logits = self.dlogits = None
        self.dlogits_of = dlogits_of if trainer.precision.fp8 else to_float32

    def watch(self, rows):
        """Watch the rows that the launches from here on should write; accumulation into earlier
        rows is not noticed."""
        self.unwritten |= rows
        self.addresses = {array.data.ptr: row for row, array in rows.items()}

    @contextlib.contextmanager
    def __call__(self, name, arguments):
        i = len(self.launches)
        self.launches.append(label(name, arguments, *self.tensors))
        if name.startswith("classifier"):
            self.logits = to_float32(arguments[1])
        yield
        arrays = [array_of(argument) for argument in arguments]
        if arrays[0] is not None and self.addresses.get(arrays[0].data.ptr) in self.writers:
            self.wrote(self.addresses[arrays[0].data.ptr], i)
        for row in [row for row, array in self.unwritten.items() if is_written(array)]:
            del self.unwritten[row]
            self.wrote(row, i)
        if name.startswith("classifier"):  # it writes the gradient over the logits
            self.dlogits = self.dlogits_of(arguments[1])
            self.wrote(("dlogits", None), i)
        if name == "column_sums":
            for job in arrays[0].get().view(JOB):
                for row in filter(None, map(self.addresses.get, job["out"].tolist())):
                    self.place[row] = self.latest.get(int(job["partials"]), i)
                    self.writers[row].insert(0, self.place[row])
        self.latest |= {array.data.ptr: i for array in arrays if array is not None}

    def wrote(self, row, i):
        self.writers[row].append(i)
        self.place[row] = i

    def first_wrong(self, is_wrong):
        """Return (first wrong row in order of computation, labels of launches since the last right
        row), or None."""
        rows = collections.defaultdict(list)
        since = []
        for row, i in self.place.items():
            rows[i].append(row)
        for i, launch in enumerate(self.launches):
            since.append(launch)
            for row in rows[i]:
                if is_wrong(*row):
                    return row, list(dict.fromkeys([*since,
                                                    *(self.launches[j]
                                                      for j in self.writers[row])]))
            if rows[i]:
                since = []
        return None


def poison(stream, *buffers):
    """Fill buffers with NaN of any dtype: all bits are 1."""
    for buffer in buffers:
        cp.cuda.runtime.memsetAsync(buffer.data.ptr, 0xFF, buffer.nbytes, stream.ptr)


def is_written(array):
    """Whether the first or the last bytes of an array are no longer poison."""
    content = array.reshape(-1).view(np.uint8)
    return any((end.get() != 0xFF).any() for end in (content[:16], content[-16:]))


def rows_of(tensors, table, prefix=""):
    """Return {(name, layer or None): array}."""
    rows = {}
    for name, row in table.items():
        tensor = getattr(tensors, name)
        rows |= ({(prefix + name, l): tensor[l] for l in range(row.shape[0])} if row.stacked else
                 {(prefix + name, None): tensor})
    return rows


def describe_row(name, l):
    return name if l is None else f"{name} of layer {l}"


# --------------------------------------------------------------------------------------------------
# the two runs; both return {row's name: array}


def run_on_cpu(architecture, config, params, inputs, targets):
    """Run one forward and backward pass of the architecture's page in NumPy."""
    B, T = inputs.shape
    print(f"{architecture.__module__}.py computes B={B} T={T} ...", file=sys.stderr)
    model = architecture(config, params)
    model.allocate_activations(B, T)
    model.allocate_training(B, T)
    model.forward(inputs, targets)
    acts = model.acts
    rows = {name: getattr(acts, name) for name in acts.table}
    rows["lse"] = np.stack([log_sum_exp(qkv, config) for qkv in acts.qkv])
    rows["logits"] = acts.logits.copy()
    model.backward()
    rows["dlogits"] = acts.logits
    return {**rows, **{f"d{name}": getattr(model.grads, name) for name in model.grads.table}}


def log_sum_exp(qkv, config):
    """The log of the sum of exp of each row's scores (B,NH,T), from qkv (B,T,(NH+2NKV)*HS)."""
    NH = config.NH
    NKV = config.NKV
    HS = config.HS
    B, T, _ = qkv.shape
    heads = qkv.reshape(B, T, -1, HS).swapaxes(1, 2)
    scores = (heads[:, :NH] @ np.repeat(heads[:, NH : NH + NKV], NH // NKV, axis=1).swapaxes(2, 3)
              / math.sqrt(HS))
    scores[..., ~np.tri(T, dtype=bool)] = -np.inf
    largest = scores.max(axis=-1)
    return largest + np.log(np.exp(scores - largest[..., None]).sum(axis=-1))


def run_on_gpu(trainer, inputs, targets):
    """Run the same pass on the GPU, with the matmuls that training would choose; also return its
    Recorder."""
    device = trainer.device
    config = trainer.config
    batch = trainer.batch
    N = inputs.size
    model, acts = trainer.model, trainer.acts
    tables = model.tables(config, trainer.settings, *inputs.shape, device)
    kept = tables["activations"]["activations"]
    if trainer.precision.fp8:
        trainer.linears.weights_changed()  # a pass of an update, which has lnf in 8 bits
        kept = {name: row for name, row in kept.items() if name != "lnf"}
    recorder = Recorder(trainer)
    trainer.stage(0, [(inputs, targets)], 0.0)
    with device.stream:
        copy_to_gpu(batch.buffer, trainer.staged[0].buffer)
        poison(device.stream, *model.buffers.values(), trainer.grads.buffer)
        device.observer = recorder
        recorder.watch(rows_of(acts, kept))
        model.trunk(acts, batch.inputs[0])
        poison(device.stream, acts.logits)  # the forward pass keeps other rows in this memory
        recorder.watch({("logits", None): acts.logits})
        model.classify(acts, batch.targets[0], batch.weights[0], trainer.loss, 1 / N, train=1)
        recorder.watch(rows_of(trainer.grads, trainer.grads.table, "d"))
        model.backward(acts, sorted_tokens(batch, 0), 1 / N)
        device.observer = None
        rows = {name: to_float32(getattr(acts, name)) for name in kept}
    rows["logits"] = recorder.logits[..., : config.V]
    unscaled = np.float32(1 / N / model.linears.dlogits_scale(1 / N))
    rows["dlogits"] = recorder.dlogits[..., : config.V] * unscaled
    grads = trainer.to_host(trainer.grads)
    return {**rows, **{f"d{name}": getattr(grads, name) for name in grads.table}}, recorder


# --------------------------------------------------------------------------------------------------
# main


def compare(got, expected, recorder, tolerance):
    """Print a row for each tensor of `got`, and what went wrong first; return whether all agree."""
    allowed = {name: tolerance * float(np.abs(expected[name]).max()) for name in got}
    red = [name for name in got if not check_tensor(name, got[name], expected[name], allowed[name])]

    def is_wrong(name, l):
        pair = [rows[name] if l is None else rows[name][l] for rows in (got, expected)]
        return not check_tensor(name, *pair, allowed[name], print_row=False)

    if recorder.unwritten:
        print(f"never written: {', '.join(describe_row(*row) for row in recorder.unwritten)}")
    if red and (first := recorder.first_wrong(is_wrong)):
        row, launches = first
        print(f"first wrong: {describe_row(*row)}, from {' or '.join(launches)}")
    print(f"overall okay: {int(not red)}")
    return not red


def check(architecture, gpu, config, params, settings):
    """Whether the architecture's page for GPUs agrees with that in NumPy. Raises UserError for a
    speed run's."""
    if architecture.HAS.qknorm:
        raise UserError(f"-e {settings.model}: expected GPT-2 or a Llama; speed runs: pytest"
                        " tests/test_speedrun.py")
    if settings.precision.bf16:
        params = views(params.table, bf16_to_float32(bf16_bits(flat(params))).view(np.uint8))
    inputs, targets = np.random.default_rng(0).integers(0, config.V, (2, settings.B, settings.T),
                                                        dtype=np.int32)
    trainer = open_trainer(architecture, gpu, config, params, settings)
    trainer.prepare((inputs, targets))
    got, recorder = run_on_gpu(trainer, inputs, targets)
    expected = run_on_cpu(architecture_of(settings.model), config, params, inputs, targets)
    precision = settings.precision
    return compare(got, expected, recorder,
                   TOLERANCES["fp8" if precision.fp8 else precision.matmul])


@gpu_errors_as_lines()
def main():
    settings = parse_settings(CheckSettings,
                              "Compare one batch with the page in NumPy, tensor by tensor.")
    settings.graph = settings.total_batch_size = 0  # one batch, launch by launch
    return 0 if check(*open_model(settings)) else 1


if __name__ == "__main__":
    run_main(main)
