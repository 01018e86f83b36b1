"""The trainers that test_gpt2.py can test, on one batch: the page for CPUs, and that for GPUs in each
precision."""

import contextlib
import functools
import io

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np

import train_gpt2
from llmc.api import on_gpu
from llmc.gpu.device import open_gpu, to_float32
from llmc.tensors import bf16_bits, bf16_to_float32, flat, views
from llmc.gpu.trainer import open_trainer
from reference import (page_of)

STEPS = 3


class NumpyRun:
    """The page for CPUs, on one batch, from a copy of the weights."""

    def __init__(self, config, params, x, y, settings):
        self.x = x
        self.y = y
        self.config = config
        self.steps = 0
        self.settings = page_of(config).Settings(B=x.shape[0], T=x.shape[1],
                                                 **{"schedule": "constant", **settings})
        self.model = page_of(config)(config, views(params.table, params.buffer.copy()))
        self.model.allocate_activations(*x.shape)
        self.model.allocate_training(*x.shape)

    def next_batch(self):
        return self.x, self.y

    def logits(self):
        self.model.forward(self.x, self.y)
        return self.model.acts.logits.copy()

    def step(self):
        """Make one update; returns the mean loss before it and the losses (B, T)."""
        self.steps += 1
        loss = train_gpt2.train_step(self.model, self, self.settings, self.steps - 1).loss
        return loss, self.model.acts.losses.copy()

    def copy(self, name):
        """Return a copy of params, m, v or the last step's grads, by name: float32 Tensors."""
        tensors = getattr(self.model.optimizer if name in ("m", "v") else self.model, name)
        return views(tensors.table, tensors.buffer.copy())


class CudaRun:
    """The page for GPUs, on one batch."""

    def __init__(self, config, params, x, y, settings, dtype="float32", tf32=1, arch="native",
                 matmul="auto"):
        B, T = x.shape
        gpu = open_gpu(arch)
        architecture = on_gpu(page_of(config))
        self.x = x
        self.y = y
        self.config = config
        settings = architecture.Settings(B=B, T=T, steps=STEPS, dtype=dtype, tf32=tf32,
                                         matmul=matmul, **settings)
        self.settings = architecture.resolve_auto(settings, gpu.arch)
        with contextlib.redirect_stdout(io.StringIO()):  # hide the report of allocations
            self.trainer = open_trainer(architecture, gpu, config, params, self.settings)
            self.trainer.prepare((x, y))

    def logits(self):
        trainer = self.trainer
        trainer.forward(self.x, self.y)
        return to_float32(trainer.model.activations(*self.x.shape).logits[..., : trainer.config.V])

    def step(self):
        """Make one update; returns the mean loss before it and the losses (B, T)."""
        trainer = self.trainer
        loss = trainer.end_step(trainer.begin_step([(self.x, self.y)],
                                                   self.settings.learning_rate)).loss
        return loss, trainer.model.activations(*self.x.shape).losses.get()

    def copy(self, name):
        """Return params (float32 master weights, if any), m, v or the last step's grads, by name:
        float32 Tensors."""
        trainer = self.trainer
        exact = name == "params" and trainer.settings.master
        owner = trainer.optimizer if exact or name in ("m", "v") else trainer
        return trainer.to_host(getattr(owner, "master" if exact else name))


BACKENDS = {
    "numpy": NumpyRun,
    "cuda": functools.partial(CudaRun, tf32=0),
    "cuda-tf32": CudaRun,
    "cuda-bf16": functools.partial(CudaRun, dtype="bfloat16"),
    "cuda-fp8": functools.partial(CudaRun, dtype="fp8"),  # on Hopper
    "cuda-bf16-sm_80": functools.partial(CudaRun, dtype="bfloat16", arch="sm_80"),
    # on Hopper, without cuBLASLt
    "cuda-bf16-kernels": functools.partial(CudaRun, dtype="bfloat16", matmul="kernels"),
}


def precision_of(backend):
    """Return the backend's key in ROUNDOFFS."""
    return next((name for name in ("numpy", "bf16", "fp8", "tf32") if name in backend), "float32")


def starting_weights(params, precision):
    """The weights in the run's dtype, which both the run and the yardstick start from."""
    if precision not in ("bf16", "fp8"):
        return params
    return views(params.table, bf16_to_float32(bf16_bits(flat(params))).view(np.uint8))


def replay(run):
    """Run STEPS steps from the start and return {row: array}."""
    rows = {"logits": run.logits()}
    means = []
    losses = []
    for step in range(STEPS):
        mean, positions = run.step()
        means.append(mean)
        losses.append(positions)
        if step == 0:
            grads = run.copy("grads")
    rows |= {f"d{name}": getattr(grads, name) for name in grads.table}
    return {**rows, "losses": np.array(losses), "means": np.array(means),
            "params": flat(run.copy("params"))}
