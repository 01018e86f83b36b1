"""Ranks as processes, and train_gpt2_cuda.py on fake GPUs: update.cu's kernels in NumPy; in place
of the model, gradients and losses that are a function of the batch; messages over
torch.distributed."""

import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))
if __name__ == "__main__":
    sys.modules["cupy"] = None  # takes its time

import numpy as np

import llmc.gpu.device
import llmc.gpu.trainer
import llmc.gpu.several.nccl
import train_gpt2
import train_gpt2_cuda as cuda
from fake_gpu import FakeGPU, install
from llmc.errors import run_main
from llmc.gpu.device import to_float32
from llmc.single_process import LAUNCHERS
from llmc.tensors import bf16_bits, flat
from llmc.gpu.shares import CHUNKS
from train_gpt2_cuda import STEP_CONTROL

here = SimpleNamespace()  # .trainer: of this process


def stored(values, like):
    return bf16_bits(np.ascontiguousarray(values)) if like.dtype == np.uint16 else values


def copy_batch(batch, pinned, control, words, begin, end):
    half = here.trainer.staged[int(control.view(STEP_CONTROL)["steps_begun"][0])
                               % 2].buffer.view(np.int32)
    batch.view(np.int32)[begin:end] = half[begin:end]


def classifier(losses, logits, targets, weights, dloss, write_gradient, N):
    losses[...] = np.float32(targets.sum() % 97) / 9
    if write_gradient:
        here.trainer.fake_targets = targets
        here.trainer.fake_weight = weights.sum()


def layernorm_backward(*arguments):
    """The backward pass: the first of its kernels."""
    targets = here.trainer.fake_targets
    here.trainer.fake_targets = None
    if targets is not None:
        grads = flat(here.trainer.grads)
        rng = np.random.default_rng(int(targets.sum()) + 1)
        grads[...] = stored(rng.standard_normal(grads.size, np.float32)
                            * np.float32(rng.uniform(0.01, 1.0) * here.trainer.fake_weight), grads)
        here.trainer.grads.wte[here.trainer.config.V :] = 0  # of padding


def loss_mean(loss, losses, weights, scale, N):
    weighed = losses.reshape(-1)[:N] * weights.reshape(-1)[:N]
    loss[...] = weighed.sum(dtype=np.float32) * scale


def summed(sums, gradients, chunks, rank_count):
    """(chunk, its place in a share, its gradients of all ranks added up), of each."""
    for chunk in chunks.view(CHUNKS):
        n = chunk["count"]
        at = slice(chunk["local"], chunk["local"] + chunk["count"])
        total = np.zeros(n, np.float32) if sums is None else np.array(sums[at])
        for r in range(rank_count):
            begin = chunk["received"] + r * int(chunk["stride"])
            total += to_float32(gradients[begin : begin + n])
        yield chunk, at, total


def add_gradients(sums, gradients, chunks, rank_count, first):
    for _, at, total in summed(None if first else sums, gradients, chunks, rank_count):
        sums[at] = total


def global_norm(partials, sums, gradients, chunks, rank_count):
    for chunk, _, total in summed(sums, gradients, chunks, rank_count):
        partials[chunk["index"]] = np.dot(total, total)


def prepare_update(control, reports, losses, partials, rate_and_scale, beta1, beta2, eps, grad_clip,
                   micro_steps, chunks, recent, skip_loss, skip_norm):
    learning_rate, scale = rate_and_scale
    c = control.view(STEP_CONTROL)[0]
    assert partials.size == chunks and not skip_loss and not skip_norm
    norm = np.sqrt(partials.sum(dtype=np.float32)) * scale
    loss = sum(losses[:micro_steps].ravel(), np.float32(0)) * scale
    c["step"] += 1
    c["eps"] = eps
    c["learning_rate"] = learning_rate
    c["grad_scale"] = scale * (grad_clip / norm if grad_clip and norm > grad_clip else 1.0)
    c["skipped"] = not scale
    here.trainer.reports[int(c["steps_begun"]) % 2] = loss, norm, 0, 0
    c["steps_begun"] += 1


def adamw_update(params, master, m, v, sums, gradients, chunks, rank_count, control, beta2,
                 one_minus_beta1, one_minus_beta2, seed):
    c = control.view(STEP_CONTROL)[0]
    if c["skipped"]:
        return
    for chunk, at, total in summed(sums, gradients, chunks, rank_count):
        there = slice(chunk["flat"], chunk["flat"] + chunk["count"])
        p = to_float32(params[there]) if master is None else master[at]
        train_gpt2.adamw_update(p, m[at], v[at], total, c["learning_rate"], 1 - one_minus_beta1,
                                beta2, c["eps"],
                                chunk["decay"], c["grad_scale"], int(c["step"]), total.size)
        params[there] = stored(p, params)


def round_weights(out, exact, count):
    out[...] = stored(np.array(exact), out)


class FakeNccl:
    """Nccl, over torch.distributed: what is sent goes to all."""

    def __init__(self, ranks, tokens):
        self.rank = ranks.rank
        self.size = ranks.size
        self.gather = ranks.gather

    connect = check = close = lambda *_: None

    def allocate(self, size):
        self.window = llmc.gpu.device.cp.zeros(size, np.uint8)
        return self.window

    def all_to_all(self, target, source, stream):
        """As copy engines do it: to the same place of all ranks' windows, which was allocated
        last."""
        places = self.gather(target.ctypes.data - self.window.ctypes.data)
        assert len(set(places)) == 1, f"different places on different ranks: {places}"
        parts = [list(enumerate(np.split(array, self.size))) for array in (source, target)]
        self.exchange(*parts, stream)

    def all_gather(self, array, stream):
        parts = np.split(array, self.size)
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.exchange([(rank, parts[self.rank]) for rank in others],
                      [(rank, parts[rank]) for rank in others], stream)

    def exchange(self, sends, receives, stream):
        assert (stream
                is here.trainer.device.comm), "NCCL needs one order of all messages: that of one stream"
        stream.launched += 1
        for rank, messages in enumerate(self.gather([(peer, np.array(array))
                                                     for peer, array in sends])):
            arrived = [array for peer, array in messages if peer == self.rank]
            for array, data in zip([array for peer, array in receives if peer == rank], arrived,
                                   strict=True):
                array[...] = data

    def add_up(self, total, addend, stream, largest=False):
        assert stream is here.trainer.device.comm
        stream.launched += 1
        total[...] = (np.max if largest else np.sum)(self.gather(np.array(addend)), axis=0)


SERVER = multiprocessing.get_context("forkserver")


def fork_ranks(function, size, flags=(), names=LAUNCHERS[0], **variables):
    """Start the function in `size` processes with the variables of a launcher; what rank r prints
    goes to the files out<r> and err<r>. A socket that is bound and does not listen keeps the port
    where they meet from others."""
    SERVER.set_forkserver_preload(["torch.distributed", "fake_gpus"])
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, Path(__file__).parents[:2]), before])
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as Ranks sets it before it imports torch
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", 0))
    processes = []
    for rank in range(size):
        environ = dict(zip(names, map(str, (rank, size, rank)))) | variables
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.getsockname()[1])}
        work = function, [function.__name__, *map(str, flags)], environ, os.getcwd(), rank
        processes.append(SERVER.Process(target=run_rank, args=work))
        processes[-1].start()
        processes[-1].place = place
    os.environ["PYTHONPATH"] = before
    return processes


def run_rank(work, argv, environ, directory, rank):
    os.setsid()
    os.chdir(directory)
    for number, name in ((1, f"out{rank}"), (2, f"err{rank}")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
    os.environ.update(environ)
    sys.argv = argv
    run_main(work)


def wait_for(words, processes):
    """Until rank 0 has printed them."""
    while not os.path.exists("out0") or words not in Path("out0").read_text():
        time.sleep(0.01)
        assert processes[0].exitcode is None


def end_ranks(processes):
    """([exit status], rank 0's stdout, what all wrote on stderr), once they have ended."""
    for process in processes:
        process.join(60)
        process.kill()
    texts = [Path(f"err{rank}").read_text() for rank in range(len(processes))]
    assert not any(Path(f"out{rank}").read_text() for rank in range(1, len(processes)))
    return [process.exitcode for process in processes], Path("out0").read_text(), "".join(texts)


def main():
    def init(trainer, *arguments):
        here.trainer = trainer
        make(trainer, *arguments)

    def device(index=None):
        index = chosen[-1] if index is None else index
        return SimpleNamespace(pci_bus_id=f"0000:{index:02d}:00.0",
                               use=lambda: chosen.append(index))

    fake = FakeGPU()
    chosen = [0]
    fake.compute = globals()
    fake.cp.cuda.Device = device  # the functions above have the kernels' names
    fake.cp.cuda.runtime.getDeviceCount = lambda: 4
    fake.cp.cuda.runtime.getDevice = lambda: chosen[-1]
    install(fake, setattr)
    llmc.gpu.several.nccl.Nccl = FakeNccl
    make = llmc.gpu.trainer.Trainer.__init__
    llmc.gpu.trainer.Trainer.__init__ = init
    run_main(cuda.main)


if __name__ == "__main__":
    main()
