"""
Parity with PyTorch, tensor by tensor: is the hand-written backward pass right to the last digits?

    python test_gpt2.py                       # gpt2_124M.bin and its debug state; of Llama 3; or of a trained speed run
    python test_gpt2.py --backend cuda-bf16   # of the page for GPUs; BACKENDS has more
    pytest test_gpt2.py                       # random small models, made on the spot
    pytest test_gpt2.py -m large              # random GPT-2 124M

The ladder: logits, losses, the gradients in the order of the backward pass, the losses of the next steps, the same run
twice, the optimizer's update. The first row that fails says where to look.

The tolerances, and why:
    logits, loss, gradients   FACTOR times the error that rounding alone causes with this model and batch, measured by
                              NoisyGPT2, with random errors in float64. The bound on single elements catches one
                              large error; that on the 2-norm, small errors everywhere: in a large tensor of at least
                              100 tokens it hardly varies, and NORM_FACTOR is enough. dev/verdict.py checks on randomly
                              drawn models that a correct trainer never fails.
                              Losses are compared position by position: a few noisy runs say little about the error of
                              their mean, a single number.
    losses                    the same, after one update and after two. Rounding errors grow from step to step; from
                              the step where they reach 1 percent of the loss, losses are not compared.
    state's losses            of up to ten updates with the usual eps, beside the trainer's: STATE_LOSSES, tens of
                              times what rounding causes in random models.
    update                    a few roundings: AdamW's, or Muon's, is recomputed in float64 from the trainer's own
                              gradients and moments, with weight decay and clipping.
"""

import argparse
import contextlib
import ctypes
import functools
import gc
import io
import math
import os
import sys
import zlib
from typing import NamedTuple

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np

try:
    import pytest
    import torch
    from torch.nn import functional as F
except ImportError as error:
    sys.exit(f"test_gpt2.py: error: {error.name} cannot be imported: pip install -r requirements-test.txt")

import train_gpt2
import train_gpt2_cuda as cuda
from export_weights import VOCABULARIES
from llmc.api import architecture_of, load_model, on_gpu
from llmc.checkpoint import read_model, write_model
from llmc.debugstate import check_tensor, read_debug_state, write_debug_state
from llmc.gpu.device import copy_to_gpu, cp, gpu_errors_as_lines, open_gpu, to_float32
from llmc.errors import UserError, run_main
from llmc.files import chunks, export_hint, open_input
from llmc.gpu.precision import Precision
from llmc.tensors import bf16_bits, bf16_to_float32, flat, views
from llmc.gpu.trainer import Trainer, open_device, open_trainer
from reference import (ADAMW, CAP, EPS, SCALE, MuonAndAdamW, collect_gradients, half_rotations, make_debug_state, muon,
                       optimizer_of, overfit, page_of, rotated, rotations, swapped, to_reference,
                       torch_errors_as_lines)
from train_gpt2 import GPT2, random_model, random_params
from train_llama3 import Llama3
from train_speedrun import Speedrun

FACTOR, NORM_FACTOR = 6.0, 2.8
EQUAL_ADDENDS = 4.0  # rounding errors of equal numbers are equal, those of the noisy runs random
STEPS = 3
STATE_LOSSES = {"numpy": 1e-4, "float32": 1e-4, "tf32": 1e-3, "bf16": 1e-2, "fp8": 2e-2}  # relative; see above
LARGE = 10**8  # parameters; with more, two noisy runs already average over enough elements
CHAOS = 1e-2  # fraction of the losses: see above
# With the usual eps of 1e-8, the first updates are +-learning_rate, even where a gradient is nearly 0 and rounding
# decides its sign: the losses after them would tell little.
SMOOTH = {**ADAMW, "eps": 1e-3}
# Settings for the row update: they use each part of it, with a decay that is large enough to show.
ADAMW_CHECK = dict(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip=0.01)

# ----------------------------------------------------------------------------------------------------------------------
# rounding
#
# How large an error does rounding alone cause in GPT-2? The forward and backward pass in float64, with random errors of
# the size that each operation makes in the precision of a run: Monte Carlo arithmetic (Parker 1997, "Monte Carlo
# Arithmetic: exploiting randomness in floating-point arithmetic").
#
# Several such runs, compared with the exact one, show for each tensor of this model and batch the error that rounding
# causes in any correct implementation, whatever its order of sums. An implementation that rounds as often has errors of
# the same size, whose 2-norm over thousands of elements hardly varies. PyTorch's own error would be a worse yardstick:
# it is one sample, and 0 where PyTorch happens to be exact, as in a single row.
#
# An element-wise operation that gives x in exact arithmetic gives x (1 + 0.42 u e), with e normal: rounding errors are
# uniform within half a unit in the last place, and the logarithms of numbers are uniform between powers of 2. A sum of
# K products a b, in sequential chains of at most n, has an error with a standard deviation of 0.42 u sqrt(min(K, n)/2 +
# 1) sqrt(sum of (a b)^2): each partial sum of a chain is rounded, and the partial sums grow like a random walk. A
# trained model's drift, which `product` knows; other sums have fewer terms, or are pairwise.

# unit roundoff: half a unit in the last place
FLOAT32, TF32, BFLOAT16, FLOAT16 = 2.0**-24, 2.0**-11, 2.0**-8, 2.0**-11


RMS = math.sqrt(1 / 3 * 3 / 8 / math.log(2))  # 0.42: root mean square of a rounding error over the unit roundoff


class Float8(NamedTuple):
    unit: float  # unit roundoff
    floor: float  # root mean square of the smallest numbers' rounding errors, over a tensor's amax


E4M3 = Float8(2.0**-4, 2.0**-9 / math.sqrt(12) / 112)  # a tensor's scale brings its amax to 112 or more
WEIGHT = Float8(2.0**-3.5, 2.0**-9 / math.sqrt(6) / 112)  # E4M3, rounded at random: twice the variance
GRADIENT = Float8(2.0**-4, 2.0**-9 / math.sqrt(12) / 28)
E5M2 = Float8(2.0**-2.5, 2.0**-16 / math.sqrt(6) / 2.0**14)  # of dlogits, about 2^15, rounded at random


class Roundoff(NamedTuple):
    """Unit roundoffs of a run: of sums, matmul operands, stored tensors and the residual stream; chain: how many terms
    are added up one after the other."""

    chain: float = math.inf  # GPUs add up a tile's products one after the other
    sums: float = FLOAT32
    operands: float = 0.0
    tensors: float = FLOAT32
    residual: float = FLOAT32
    fp8: bool = False  # operands of 8 bits in the matmuls of qkv, fc and fcproj, and the classifier's


ROUNDOFFS = {
    "numpy": Roundoff(chain=512),  # BLAS libraries cut K into blocks; OpenBLAS's have up to 384
    "float32": Roundoff(),
    "tf32": Roundoff(operands=TF32),
    "bf16": Roundoff(tensors=BFLOAT16, residual=FLOAT16),
    "fp8": Roundoff(tensors=BFLOAT16, residual=FLOAT16, fp8=True),
}


class NoisyGPT2:
    """A GPT-2 with random rounding errors; `run` returns the rows that test_gpt2.py compares."""

    eps = property(lambda self: self.config.eps)  # of RMSNorm

    def __init__(self, config, params, roundoff, seed):
        self.config, self.u = config, roundoff
        self.model = to_reference(config, params, dtype=torch.float64)
        self.generator = torch.Generator().manual_seed(seed)
        self.operations = operations(self)

    def noise(self, x):
        return torch.randn(x.shape, generator=self.generator)  # float32: twice as fast

    def rounded(self, x, u):
        """Return x with a random rounding error in each element, of unit roundoff u."""
        return torch.mul(x, self.noise(x).mul_(RMS * u)).add_(x) if u else x

    def error(self, K):
        """Return the standard deviation of the error of a sum of K terms, over the root of the sum of their squares."""
        return RMS * self.u.sums * math.sqrt(min(K, self.u.chain) / 2 + 1)

    def column_sums(self, x):
        """The sums over all rows of x (..., C)."""
        x = x.reshape(-1, x.shape[-1])
        return x.sum(0) + self.error(len(x)) * (x * x).sum(0).sqrt() * self.noise(x[0])

    def row_sums(self, x):
        """The sums over the last axis, with that axis kept."""
        error = self.error(x.shape[-1]) * (x * x).sum(-1, keepdim=True).sqrt()
        return x.sum(-1, keepdim=True) + error * self.noise(error)

    def operand(self, x, fp8):
        """x, rounded as an operand of a matmul. fp8: None or, of a run in FP8, E4M3, WEIGHT, GRADIENT or E5M2."""
        if not (fp8 and self.u.fp8):
            return self.rounded(x, self.u.operands)
        size = x.abs()
        error = torch.maximum(RMS * fp8.unit * size, torch.minimum(size, fp8.floor * size.max()))  # 0 stays
        return error.mul_(self.noise(x)).add_(x)

    def product(self, a, b, of_a=None, of_b=None):
        """a @ b. of_a, of_b: as `operand` takes them."""
        a, b = self.operand(a, of_a), self.operand(b, of_b)
        exact, squares, K = a @ b, (a * a) @ (b * b), a.shape[-1]
        n, chains = min(K, self.u.chain), max(1, K / self.u.chain)
        # Of a sum that is known, partial sums are a Brownian bridge; the sums of several chains are added up, too.
        drift, walk = n * n / (3 * K), n / 2 + 1 - n * n / (3 * K)
        if chains > 1:
            drift, walk = drift + chains / 3, walk + chains / 6
        error = squares.mul_(walk).add_(exact.square(), alpha=drift).sqrt_().mul_(RMS * self.u.sums)
        return error.mul_(self.noise(error)).add_(exact)

    def run(self, x, y, settings, steps):
        """Train on one batch of token ids (B, T) and return float64 arrays: {"logits", "dwte", ...} of the
        first step, and "losses" (steps, B, T), of each position before each step's update."""
        x, y = (torch.from_numpy(ids).long() for ids in (x, y))
        master = [p.detach().clone() for p in self.model.parameters()] if self.u.tensors > FLOAT32 else None
        optimizer, all_losses = optimizer_of(self.model, settings, x.numel()), []
        for step in range(steps):
            with torch.set_grad_enabled(step == 0 or step < steps - 1):
                logits, losses = self.forward(x, y)
            all_losses.append(losses.detach().numpy())
            if step == 0 or step < steps - 1:
                optimizer.zero_grad()
                losses.mean().backward()
            if step == 0:
                grads = collect_gradients(self.config, self.model, "float64")
                rows = {"logits": logits.detach().numpy()}
                rows |= {f"d{name}": getattr(grads, name) for name in grads.table}
            if step < steps - 1:
                self.update(optimizer, master)
        return {**rows, "losses": np.array(all_losses)}

    @torch.no_grad()
    def update(self, optimizer, master):
        """A step on the float32 weights: `master` or, if that is None, the model's own.

        They are really rounded, not with random errors: equal updates have rounding errors of the same sign."""
        weights = list(self.model.parameters())
        for weight, exact in zip(weights, master or ()):
            weight.copy_(exact)
        optimizer.step()
        for weight in weights:
            weight.copy_(weight.float())
        for weight, exact in zip(weights, master or ()):
            exact.copy_(weight)
            weight.copy_(weight.bfloat16())

    def forward(self, x, y):
        (B, T), C, NH, op, model = x.shape, self.config.C, self.config.NH, self.operations, self.model
        later = torch.ones(T, T, dtype=torch.bool).triu(1)

        def linear(inp, module, fp8=GRADIENT):
            return op.store(op.bias(op.matmul(inp, module.weight.T, fp8), module.bias))

        residual = op.add(model.wte(x) + model.wpe(torch.arange(T)))
        for block in model.h:
            normed = op.layernorm(residual, block.ln_1.weight, block.ln_1.bias)
            qkv = linear(normed, block.attn.c_attn).split(C, dim=2)
            query, key, value = (part.view(B, T, NH, C // NH).transpose(1, 2) for part in qkv)
            scores = op.single(op.matmul(query, key.transpose(-2, -1)) / math.sqrt(C // NH))
            att = op.store(op.softmax(scores.masked_fill(later, -torch.inf)))
            heads = op.store(op.matmul(att, value)).transpose(1, 2).reshape(B, T, C)
            residual = op.add(residual + linear(heads, block.attn.c_proj, fp8=None))
            normed = op.layernorm(residual, block.ln_2.weight, block.ln_2.bias)
            gelu = op.store(op.single(F.gelu(linear(normed, block.mlp.c_fc), approximate="tanh")))
            residual = op.add(residual + linear(gelu, block.mlp.c_proj))
        normed = op.layernorm(residual, model.ln_f.weight, model.ln_f.bias)
        logits = op.store(op.matmul(normed, model.wte.weight.T, E5M2))
        probs = op.softmax(logits).flatten(0, 1)[torch.arange(B * T), y.flatten()]
        return logits, op.single(-torch.log(probs)).view(B, T)


class NoisyLlama(NoisyGPT2):
    """A Llama 3 with random rounding errors."""

    def forward(self, x, y):
        (B, T), config, op, model = x.shape, self.config, self.operations, self.model.model
        later, cos_sin = torch.ones(T, T, dtype=torch.bool).triu(1), list(rotations(config, T, model.norm.weight))

        def linear(inp, module, fp8=GRADIENT):
            return op.store(op.matmul(inp, module.weight.T, fp8))

        def rotated(part):
            cos, sin = cos_sin
            return op.single(op.single(part * cos) + op.single(swapped(part) * sin))

        residual = model.embed_tokens(x)
        for block in model.layers:
            normed = op.rmsnorm(residual, block.input_layernorm.weight)
            attn, mlp = block.self_attn, block.mlp
            query, key, value = (linear(normed, module).view(B, T, -1, config.HS).transpose(1, 2)
                                 for module in (attn.q_proj, attn.k_proj, attn.v_proj))
            key, value = (part.repeat_interleave(config.NH // config.NKV, 1) for part in (rotated(key), value))
            scores = op.single(op.matmul(rotated(query), key.transpose(-2, -1)) / math.sqrt(config.HS))
            att = op.store(op.softmax(scores.masked_fill(later, -torch.inf)))
            heads = op.store(op.matmul(att, value)).transpose(1, 2).reshape(B, T, config.Q)
            residual = op.add(residual + linear(heads, attn.o_proj, fp8=None))
            normed = op.rmsnorm(residual, block.post_attention_layernorm.weight)
            gate = op.single(F.silu(linear(normed, mlp.gate_proj)))
            residual = op.add(residual + linear(op.store(op.single(linear(normed, mlp.up_proj) * gate)), mlp.down_proj))
        logits = op.store(op.matmul(op.rmsnorm(residual, model.norm.weight), self.model.head().T, E5M2))
        probs = op.softmax(logits).flatten(0, 1)[torch.arange(B * T), y.flatten()]
        return logits, op.single(-torch.log(probs)).view(B, T)


class NoisySpeedrun(NoisyGPT2):
    """A speed run's GPT with random rounding errors."""

    eps = EPS  # like all constants here the reference's: with the page's, a wrong one would widen the tolerance

    def forward(self, x, y):
        (B, T), config, op, p = x.shape, self.config, self.operations, self.model
        NH, HS, later = config.NH, config.HS, torch.ones(T, T, dtype=torch.bool).triu(1)
        angles = half_rotations(config, T, p.wte, lambda part: self.rounded(part, self.u.sums))
        scales = torch.full((HS,), SCALE * math.sqrt(HS), dtype=torch.float64), torch.ones(HS, dtype=torch.float64)

        def linear(inp, weight, bias, fp8=GRADIENT):
            return op.store(op.bias(op.matmul(inp, weight.T, fp8), bias))

        residual = op.rmsnorm(p.wte[x], p.ln0w)
        for l in range(config.L):
            qkv = linear(op.rmsnorm(residual, p.ln1w[l]), p.qkvw[l], p.qkvb[l])
            query, key, value = (part.view(B, T, NH, HS) for part in qkv.split(config.C, dim=2))
            query, key = (op.single(rotated(op.rmsnorm(part, scale), *angles))
                          for part, scale in zip((query, key), scales))
            query, key, value = (part.transpose(1, 2) for part in (query, key, value))
            scores = op.single(op.matmul(query, key.transpose(-2, -1)) / math.sqrt(HS))
            att = op.store(op.softmax(scores.masked_fill(later, -torch.inf)))
            heads = op.store(op.matmul(att, value)).transpose(1, 2).reshape(B, T, config.C)
            residual = op.add(residual + linear(heads, p.attprojw[l], p.attprojb[l], fp8=None))
            fch = linear(op.rmsnorm(residual, p.ln2w[l]), p.fcw[l], p.fcb[l])
            relu2 = op.store(op.single(F.relu(fch).square()))
            residual = op.add(residual + linear(relu2, p.fcprojw[l], p.fcprojb[l]))
        z = op.store(op.bias(op.matmul(op.rmsnorm(residual, p.lnfw), p.lm_head.T, E5M2), p.lm_headb))
        logits = op.single(z * torch.rsqrt(1 + (z / CAP).square()))
        probs = op.softmax(logits).flatten(0, 1)[torch.arange(B * T), y.flatten()]
        return logits, op.single(-torch.log(probs)).view(B, T)


NOISY = {GPT2: NoisyGPT2, Llama3: NoisyLlama, Speedrun: NoisySpeedrun}


class Operations(NamedTuple):
    """The differentiable operations of a noisy run."""

    single: object  # rounds to float32, forward and backward
    store: object  # rounds to the dtype of tensors
    add: object  # rounds to the dtype of the residual stream; its gradient to that of tensors
    bias: object
    matmul: object  # of a, b and, in FP8, the gradient's format: GRADIENT or E5M2
    layernorm: object
    rmsnorm: object
    softmax: object


def operations(run):
    """Return Operations with the random errors of `run`, in the forward and in the backward pass."""
    u = run.u

    def rounding(forward_u, backward_u):
        class Rounding(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return run.rounded(x, forward_u)

            @staticmethod
            def backward(ctx, g):
                return run.rounded(g, backward_u)

        return Rounding.apply

    class Bias(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, bias):
            return run.rounded(x + bias, u.sums)

        @staticmethod
        def backward(ctx, g):
            return g, run.rounded(run.column_sums(g), u.tensors)

    class Matmul(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b, fp8=None):
            ctx.save_for_backward(a, b)
            ctx.fp8, ctx.input_fp8, ctx.weight_fp8 = fp8, fp8 and E4M3, fp8 and WEIGHT
            return run.product(a, b, ctx.input_fp8, ctx.weight_fp8)

        @staticmethod
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            da = run.rounded(run.product(g, b.transpose(-1, -2), ctx.fp8, ctx.weight_fp8), u.tensors)
            if b.dim() == 2:  # a weight: its gradient sums over all rows
                a, g = a.flatten(0, -2), g.flatten(0, -2)
            return da, run.rounded(run.product(a.transpose(-1, -2), g, ctx.input_fp8, ctx.fp8), u.tensors), None

    class Layernorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            C = x.shape[-1]
            centered = run.rounded(x - run.row_sums(x) / C, u.sums)
            rstd = run.rounded((run.row_sums(centered * centered) / C + 1e-5).rsqrt(), u.sums)
            normed = run.rounded(centered * rstd, u.sums)
            ctx.save_for_backward(normed, rstd, weight)
            return run.rounded(run.rounded(normed * weight + bias, u.sums), u.tensors)

        @staticmethod
        def backward(ctx, g):
            normed, rstd, weight = ctx.saved_tensors
            C, dnormed = g.shape[-1], run.rounded(g * weight, u.sums)
            inner = dnormed - run.row_sums(dnormed) / C - normed * run.row_sums(dnormed * normed) / C
            dx = run.rounded(run.rounded(run.rounded(inner, u.sums) * rstd, u.sums), u.tensors)
            sums = run.column_sums(g * normed), run.column_sums(g)
            return dx, *(run.rounded(total, u.tensors) for total in sums)

    class RMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            rstd = run.rounded((run.row_sums(x * x) / x.shape[-1] + run.eps).rsqrt(), u.sums)
            normed = run.rounded(x * rstd, u.sums)
            ctx.save_for_backward(normed, rstd, weight)
            return run.rounded(run.rounded(normed * weight, u.sums), u.tensors)

        @staticmethod
        def backward(ctx, g):
            normed, rstd, weight = ctx.saved_tensors
            dnormed = run.rounded(g * weight, u.sums)
            inner = dnormed - normed * run.row_sums(dnormed * normed) / g.shape[-1]
            dx = run.rounded(run.rounded(run.rounded(inner, u.sums) * rstd, u.sums), u.tensors)
            return dx, run.rounded(run.column_sums(g * normed), u.tensors)

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x = x - x.amax(-1, keepdim=True)
            exponent = x.masked_fill(~torch.isfinite(x), 0.0).abs()  # error u |x| in x: relative error u |x| in exp(x)
            e = torch.exp(x) * (1.0 + u.sums * (RMS * exponent + 1.0) * run.noise(x))
            probs = run.rounded(e / run.row_sums(e), u.sums)
            ctx.save_for_backward(probs)
            return probs

        @staticmethod
        def backward(ctx, g):
            probs, = ctx.saved_tensors
            return run.rounded(run.rounded(g - run.row_sums(probs * g), u.sums) * probs, u.tensors)

    return Operations(rounding(u.sums, u.sums), rounding(u.tensors, u.tensors), rounding(u.residual, u.tensors),
                      Bias.apply, Matmul.apply, Layernorm.apply, RMSNorm.apply, Softmax.apply)


# ----------------------------------------------------------------------------------------------------------------------
# the trainers under test, and PyTorch


class NumpyRun:
    """The page for CPUs, on one batch, from a copy of the weights."""

    def __init__(self, config, params, x, y, settings):
        self.x, self.y, self.config, self.steps = x, y, config, 0
        self.settings = page_of(config).Settings(B=x.shape[0], T=x.shape[1], **{"schedule": "constant", **settings})
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

    def __init__(self, config, params, x, y, settings, dtype="float32", tf32=1, arch="native", matmul="auto"):
        (B, T), gpu, architecture = x.shape, open_gpu(arch), on_gpu(page_of(config))
        self.x, self.y, self.config = x, y, config
        settings = architecture.Settings(B=B, T=T, steps=STEPS, dtype=dtype, tf32=tf32, matmul=matmul, **settings)
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
        loss = trainer.end_step(trainer.begin_step([(self.x, self.y)], self.settings.learning_rate)).loss
        return loss, trainer.model.activations(*self.x.shape).losses.get()

    def copy(self, name):
        """Return params (float32 master weights, if any), m, v or the last step's grads, by name: float32 Tensors."""
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
    "cuda-bf16-kernels": functools.partial(CudaRun, dtype="bfloat16", matmul="kernels"),  # on Hopper, without cuBLASLt
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
    rows, means, losses = {"logits": run.logits()}, [], []
    for step in range(STEPS):
        mean, positions = run.step()
        means.append(mean)
        losses.append(positions)
        if step == 0:
            grads = run.copy("grads")
    rows |= {f"d{name}": getattr(grads, name) for name in grads.table}
    return {**rows, "losses": np.array(losses), "means": np.array(means), "params": flat(run.copy("params"))}


def run_pytorch(config, params, x, y):
    """Do the same in PyTorch in float64 and return {row: array}."""
    model, rows, losses = to_reference(config, params, dtype=torch.float64), {}, []
    x, y = (torch.from_numpy(ids).long() for ids in (x, y))

    def capture(logits, loss):
        rows["logits"], grads = logits.detach().numpy(), collect_gradients(config, model, "float64")
        rows.update({f"d{name}": getattr(grads, name) for name in grads.table})

    def record(model, inputs, outputs):
        losses.append(F.cross_entropy(outputs[0].detach().flatten(0, 1), y.flatten(), reduction="none").view(y.shape))

    model.register_forward_hook(record)
    overfit(model, x, y, STEPS - 1, SMOOTH, capture=capture)
    with torch.no_grad():
        model(x, y)
    return {**rows, "losses": np.array(losses)}


# ----------------------------------------------------------------------------------------------------------------------
# the yardstick, and the ladder


class Yardstick:
    """The exact rows for this model and batch, and the error allowed in each."""

    def __init__(self, config, params, x, y, precision):
        self.exact, self.tokens = run_pytorch(config, params, x, y), x.size
        self.places = places(config, params.table)
        errors = []  # for each noisy run: {place: (largest error, 2-norm)}
        for seed, steps in enumerate((STEPS, 1) if flat(params).size > LARGE else [STEPS] * max(4, 32 // x.size)):
            rows = NOISY[page_of(config)](config, params, ROUNDOFFS[precision], seed).run(x, y, SMOOTH, steps)
            errors.append({(name, l): error_of(at(rows, (name, l)), at(self.exact, (name, l)))
                           for name, l in self.places if name != "losses" or l < steps})
            if flat(params).size > LARGE:
                gc.collect()  # a noisy run is part of a reference cycle, and holds gigabytes for GPT-2 124M
        self.allowed = {}  # place -> (largest error of an element, 2-norm)
        for place in self.places:
            unit = FLOAT32 * np.abs(at(self.exact, place)).max()  # results are stored in float32 at best
            largest = max(run[place][0] for run in errors if place in run)
            norm = np.sqrt(np.mean([run[place][1] ** 2 for run in errors if place in run]))
            self.allowed[place] = FACTOR * max(largest, unit), self.norm_factor(place) * max(norm, unit)
            if not self.exact["logits"].any():  # a head of zeros, whose gradients add equal numbers
                self.allowed[place] = tuple(EQUAL_ADDENDS * error for error in self.allowed[place])
        self.compared = next((step for step in range(1, STEPS) if self.is_chaotic(step)), STEPS)
        self.places = [(name, l) for name, l in self.places if name != "losses" or l < self.compared]

    def norm_factor(self, place):
        return NORM_FACTOR if self.tokens >= 100 and at(self.exact, place).size >= 10_000 else FACTOR

    def is_chaotic(self, step):
        place, norm = ("losses", step), np.linalg.norm(self.exact["losses"][step])
        return not self.allowed[place][1] < self.norm_factor(place) * CHAOS * norm

    def judge(self, rows):
        """Print a row for each tensor, and the first that is wrong; return whether all are within the tolerances."""
        red = [place for place in self.places if not self.check(rows, place, print_row=False)]
        for name in dict.fromkeys(name for name, _ in self.places):
            mine = [place for place in self.places if place[0] == name]
            worst = max(mine, key=lambda place: (place in red, self.excess(rows, place)))
            self.check(rows, worst)
        means, terms = rows["losses"].mean((1, 2), dtype=np.float64), rows["losses"][0].size
        okay = check_tensor("mean loss", rows["means"], means, FACTOR * FLOAT32 * math.sqrt(terms) * means)
        if self.compared < STEPS:
            print(f"{'':<12} losses after {self.compared} updates: rounding alone changes them by more than 1 percent")
        if red:
            print(f"first wrong: {describe(red[0])}")
        return okay and not red

    def check(self, rows, place, print_row=True):
        got, exact = at(rows, place), at(self.exact, place)
        return check_tensor(describe(place), got, exact, *self.allowed[place], print_row=print_row)

    def excess(self, rows, place):
        """Return a place's error as a fraction of its tolerance."""
        errors = zip(error_of(at(rows, place), at(self.exact, place)), self.allowed[place])
        return max(error / allowed if error else 0.0 for error, allowed in errors)

    def worst(self, rows):
        """Return (largest error as a fraction of its tolerance, its tensor)."""
        return max((self.excess(rows, place), describe(place)) for place in self.places)


BELOW = "wpe", "wte", "ln0w"  # the layers


def places(config, table):
    """Return all places, (row, layer or step or None), in the order in which a run computes them."""
    alone = [name for name, row in reversed(table.items()) if not row.stacked]
    stacked = [name for name, row in reversed(table.items()) if row.stacked]
    layers = [(f"d{name}", l) for l in reversed(range(config.L)) for name in stacked]
    below = [(f"d{name}", None) for name in alone if name in BELOW]
    above = [(f"d{name}", None) for name in sorted(alone, key=lambda name: "lm_head" not in name) if name not in BELOW]
    return [("logits", None), ("losses", 0), *above, *layers, *below, *(("losses", step) for step in range(1, STEPS))]


def at(rows, place):
    name, l = place
    return rows[name] if l is None else rows[name][l]


def describe(place):
    name, l = place
    return name if l is None else f"{name}[{l}]"


def error_of(got, exact):
    """Return (largest, 2-norm) of the difference."""
    difference = np.abs(got - exact)
    return float(difference.max()), float(np.linalg.norm(difference))


def judge_update(run):
    """Check two updates of a run with ADAMW_CHECK against the optimizer in float64, on the run's own gradients and
    moments.

    The tolerance is a few roundings, of Muon's steps what they make of one. Prints the tensors that exceed it, and a
    summary; returns whether none does.
    """
    s, okay, state, is_speedrun = run.settings, True, ("params", "m", "v"), page_of(run.config) is Speedrun
    before = [run.copy(name) for name in state]
    for step in (1, 2):
        run.step()
        after, grads = [run.copy(name) for name in state], run.copy("grads")
        norm = np.sqrt(sum(np.vdot(piece.astype(np.float64), piece) for piece in chunks(flat(grads))))
        for name, row in grads.table.items():
            tensors, grad_scale = [getattr(t, name) for t in (*before, *after, grads)], min(1.0, s.grad_clip / norm)
            if is_speedrun and name in MuonAndAdamW.PARTS:
                shape = -1, row.shape[1] // MuonAndAdamW.PARTS[name], row.shape[2]
                pieces = zip(*(x.reshape(shape) for x in tensors))
                expect = functools.partial(expect_muon, s, grad_scale)
            else:
                rate, decay = (MuonAndAdamW.rate(name), MuonAndAdamW.DECAY) if is_speedrun else (1.0, 1.0)
                decay *= s.decay == "all" or row.decays
                pieces = zip(*(chunks(x.reshape(-1)) for x in tensors))  # float64 copies of the whole would be slow
                expect = functools.partial(expect_adamw, s, step, grad_scale, rate, s.weight_decay * decay)
            for number, piece in enumerate(pieces):  # of 2^20 elements, or a matrix
                if not all(check_tensor(what, *rest, print_row=False) for what, *rest in expect(*piece)):
                    at = f"{name}[{number}]" if number or len(piece[0]) < row.size else name
                    okay &= all([check_tensor(f"update {what} {at}", *rest) for what, *rest in expect(*piece)])
                    break
        before = after
    print(f"{'update':<12} two, from its own gradients, in float64  {'ok' if okay else 'FAIL'}")
    return okay


def expect_muon(s, grad_scale, p0, m0, v0, p1, m1, v1, g):
    """As expect_adamw, of a matrix (rows, columns) and Muon."""
    g = g.astype(np.float64) * grad_scale
    p, m, g = (torch.from_numpy(x.astype(np.float64)) for x in (p0, m0, g))
    newton_schulz = steps, (a, *_) = MuonAndAdamW.steps_for(s.update_tokens)
    muon(p, g, m, s.learning_rate, s.weight_decay, *newton_schulz)
    yield "v", v1, v0, 0.0
    yield "m", m1, m.numpy(), 32 * FLOAT32 * (np.abs(m0) + np.abs(g.numpy())) + np.finfo(np.float32).tiny
    update = p.numpy() - p0 * (1 - s.learning_rate * s.weight_decay)
    # Steps enlarge rounding errors, where singular values are small by a each: 30 random models have a sixth of this.
    yield "p", p1, p.numpy(), FLOAT32 * (4 * np.abs(p0) + 12 * a**steps * np.abs(update).max())


def expect_adamw(s, step, grad_scale, rate, weight_decay, p0, m0, v0, p1, m1, v1, g):
    """Yield (name, found, expected, tolerance) for m, v and p after an update from p0, m0, v0 to p1, m1, v1."""
    p0, m0, v0, g = (x.astype(np.float64) for x in (p0, m0, v0, g))
    g *= grad_scale
    m, v = s.beta1 * m0 + (1 - s.beta1) * g, s.beta2 * v0 + (1 - s.beta2) * g * g
    rate *= s.learning_rate
    update = rate * (m1 / (1 - s.beta1**step)) / (np.sqrt(v1 / (1 - s.beta2**step)) + s.eps)
    p = p0 * (1 - rate * weight_decay) - update
    tiny = np.finfo(np.float32).tiny
    yield "m", m1, m, 32 * FLOAT32 * (np.abs(m0) + np.abs(g)) + tiny  # most of these roundings are the norm's
    yield "v", v1, v, 80 * FLOAT32 * v + tiny
    yield "p", p1, p, FLOAT32 * (4 * np.abs(p0) + 16 * np.abs(update)) + tiny


def climb(model_path, state_path, backend="numpy"):
    """Print one row per tensor; return whether all are within the tolerances and a second run repeats the first."""
    open_input(model_path, export_hint(model_path)).close()
    architecture, config, params = load_model(model_path)
    require(backend, architecture)
    head = params.lm_head[: config.V] if architecture is Speedrun else np.empty(0)
    if head.any() and len({row.tobytes() for row in head}) < 0.9 * config.V:
        raise UserError(f"--model {model_path}: rows of its classifier are equal, those of tokens that it has not seen,"
                        " and so are rounding errors, which tolerances take as random: train on a vocabulary of the"
                        " text's own (prepro_text.py --vocabulary chars)")
    state = read_debug_state(state_path, config, params)
    x, y = state.x, state.y
    print(f"{model_path}: {config.describe()}, B={x.shape[0]} T={x.shape[1]}, backend {backend}")
    precision = precision_of(backend)
    params = starting_weights(params, precision)
    yardstick, okay = Yardstick(config, params, x, y, precision), True
    rounded = not (flat(params).view(np.uint32) & 0xFFFF).any()  # a bfloat16 file; the state is of the float32 weights
    if precision == "numpy":
        okay = judge_debug_state(Yardstick(config, params, x, y, "bf16") if rounded else yardstick, state)
    make = functools.partial(BACKENDS[backend], config, params, x, y)
    rows = replay(make(SMOOTH))
    okay &= yardstick.judge(rows)
    again = replay(make(SMOOTH))
    same = all(np.array_equal(rows[name], again[name]) for name in rows)
    print(f"{'run twice':<12} {'bit for bit the same' if same else 'differs'}  {'ok' if same else 'FAIL'}")
    if state.losses is not None:
        run = make({**state.optimizer, "decay": "all"})
        okay &= judge_state_losses(run, state.losses[:10], STATE_LOSSES["bf16" if rounded else precision])
    return judge_update(make(ADAMW_CHECK)) and okay and same


def judge_state_losses(run, expected, tolerance):
    """Print the debug state's losses beside those of a run, step by step; return whether they agree."""
    okay = True
    for step, loss in enumerate(expected.tolist(), 1):
        found = run.step()[0]
        right = abs(found - loss) <= tolerance * loss
        print(f"{f'step {step}':<12} loss {found:.6f}, the debug state has {loss:.6f}  {'ok' if right else 'FAIL'}")
        okay &= right
    return okay


def judge_debug_state(yardstick, state):
    """Return whether the debug state agrees with a float32 run; print a row for each tensor that does not."""
    rows = {"logits": state.logits, **{f"d{name}": getattr(state.grads, name) for name in state.grads.table}}
    errors = {place: error_of(at(rows, place), at(yardstick.exact, place))[0] for place in yardstick.places
              if place[0] != "losses"}
    errors["losses", 0] = abs(state.loss - yardstick.exact["losses"][0].mean())
    for place, error in errors.items():
        if not error <= 2 * yardstick.allowed[place][0]:
            print(f"{describe(place):<12} the debug state itself has an error of {error:.3e}: was it computed in"
                  " float32, from these very weights and not their bfloat16 copy?  FAIL")
    return all(error <= 2 * yardstick.allowed[place][0] for place, error in errors.items())


def untied_llama():
    """(config, params): its classifier has a weight of its own, its heads more channels than the residual stream."""
    config = Llama3.Config(64, 250, 2, 6, 2, 96, 256, 200, 32, tied=0, factor=8, original=16)
    return config, random_params(Llama3.parameter_table(config), config.V, config.L, seed=42)


def write_pair(directory, name, vocabulary, B, T):
    """Write a random model and its debug state on random tokens; returns their paths."""
    if name == "untied":
        config, params = untied_llama()
    elif name in Speedrun.SIZES:  # its own random weights are 0 where gradients would be 0, too
        config = Speedrun.random_model(name, VOCABULARIES[vocabulary])[0]
        params = random_params(Speedrun.parameter_table(config), config.V, config.L, seed=42)
    else:
        config, params = architecture_of(name).random_model(name, VOCABULARIES[vocabulary])
    tokens = np.random.default_rng(1).integers(0, config.V, B * T + 1, dtype=np.int32)
    x, y = tokens[:-1].reshape(B, T), tokens[1:].reshape(B, T)
    paths = str(directory / "model.bin"), str(directory / "debug_state.bin")
    write_model(paths[0], config, params)
    write_debug_state(paths[1], config, make_debug_state(config, params, x, y, STEPS)[0], config.STATES[-1])
    return paths


def require(backend, architecture=GPT2):
    """Raise UserError if this backend cannot run here, or not for this architecture."""
    if backend != "numpy" and architecture is Speedrun:
        raise UserError(f"--backend {backend}: of a speed run's GPT, only numpy; its kernels: pytest"
                        " tests/test_speedrun.py")
    if backend != "numpy":
        dtype = {"bf16": "bfloat16", "fp8": "fp8"}.get(precision_of(backend), "float32")
        cuda.resolve_auto(cuda.CudaSettings(dtype=dtype), open_gpu().arch)


def need(backend):
    """Skip the test if this backend cannot run here."""
    try:
        require(backend)
    except UserError as error:
        pytest.skip(str(error))


all_backends = pytest.mark.parametrize("backend", [
    pytest.param(backend, marks=pytest.mark.gpu if "cuda" in backend else ()) for backend in BACKENDS])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """pair(name, vocabulary, B, T) -> paths of a random model and its debug state, written once; its Yardstick is
    computed once, too."""
    compute, known = Yardstick, {}

    def compute_once(config, params, x, y, precision):
        key = zlib.crc32(params.buffer), x.tobytes(), precision
        if key not in known:
            known[key] = compute(config, params, x, y, precision)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "Yardstick", compute_once)
        yield functools.cache(lambda *sizes: write_pair(tmp_path_factory.mktemp("pair"), *sizes))


def test_a_small_speed_run_agrees_with_pytorch(pair, tmp_path):
    model, state = pair("s2", "bytes", 2, 33)
    assert climb(model, state)
    write_model(tmp_path / "0.bin", *Speedrun.random_model("s2", VOCABULARIES["bytes"]))
    with pytest.raises(UserError, match="classifier are equal"):
        climb(tmp_path / "0.bin", state)


@all_backends
@pytest.mark.parametrize("vocabulary, B, T", (
    ("bytes", 2, 33), pytest.param("gpt2", 2, 9, marks=pytest.mark.large)))
def test_small_models_agree_with_pytorch(pair, vocabulary, B, T, backend):
    need(backend)
    assert climb(*pair("d2", vocabulary, B, T), backend)


def test_a_model_whose_logits_are_far_from_0():
    """As a trained one's are: their sums drift."""
    config = GPT2.Config(64, 257, 1, 2, 192, 384)
    params = random_params(GPT2.parameter_table(config), config.V, config.L, seed=42)
    params.lnfb.fill(1.0)
    params.wte[: config.V] -= 0.03
    x, y = np.random.default_rng(1).integers(0, config.V, (2, 4, 33), dtype=np.int32)
    assert Yardstick(config, params, x, y, "numpy").judge(replay(NumpyRun(config, params, x, y, SMOOTH)))


@pytest.mark.gpu
@pytest.mark.parametrize("name, backend", [
    (name, backend) for name in ("l2", "untied") for backend in BACKENDS
    if "cuda" in backend and (name, backend) != ("untied", "cuda-fp8")])  # F=200: FP8 expects a multiple of 16
def test_small_llamas_agree_with_pytorch(pair, name, backend):
    """In NumPy, they do in tests/test_llama.py."""
    need(backend)
    assert climb(*pair(name, "bytes", 2, 33), backend)


@pytest.mark.large
@all_backends
def test_gpt2_124M_agrees_with_pytorch(tmp_path, backend):
    need(backend)
    assert climb(*write_pair(tmp_path, "d12", "gpt2", 4, 64), backend)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("dtype, matmul", (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "kernels")))
@pytest.mark.parametrize("B", (64, 96))
def test_indices_beyond_32_bits(B, dtype, matmul):
    """One forward and backward pass with B*T*Vp beyond 2^31 (B=64) and 2^32 (B=96), on B equal rows: their losses are
    the same bit for bit, and the gradients are those of one row."""
    need("cuda")
    T, (config, params), gpu = 1024, random_model("d12", VOCABULARIES["gpt2"]), open_gpu()
    tokens = np.random.default_rng(0).integers(0, config.V, T + 1, dtype=np.int32)
    precision = Precision(dtype)
    (device, matmuls), results = open_device(cuda.GPT2, gpu, config, precision, matmul), []
    for rows in (B, 1):
        gc.collect()
        cp.get_default_memory_pool().free_all_blocks()  # from the previous model
        try:
            settings = cuda.resolve_auto(cuda.CudaSettings(B=rows, T=T, dtype=dtype, matmul=matmul), gpu.arch)
            trainer = Trainer(cuda.GPT2, config, settings, matmuls, params)
        except UserError as error:
            pytest.skip(str(error))
        trainer.stage(0, [(np.tile(tokens[:-1], (rows, 1)), np.tile(tokens[1:], (rows, 1)))], 0.0)
        with device.stream:
            for buffer in (*trainer.model.buffers.values(), trainer.grads.buffer):
                buffer.data.memset_async(0xFF, buffer.nbytes)  # NaN, in every dtype
            copy_to_gpu(trainer.batch.buffer, trainer.staged[0].buffer)
            trainer.model.micro_step(trainer, 0)
            results.append((trainer.model.activations(rows, T).losses.get(), trainer.to_host(trainer.grads)))
        del trainer
    (losses, grads), (_, expected) = results
    assert np.isfinite(losses).all() and (losses == losses[0]).all()
    for name in grads.table:
        reference = getattr(expected, name)
        tolerance = (5e-2 if precision.bf16 else 5e-3) * float(np.abs(reference).max())
        assert check_tensor(f"d{name}", getattr(grads, name), reference, tolerance)


@pytest.fixture
def run_here(monkeypatch, capsys):
    """run_here(paths) -> (exit status, output lines) of this file run as a program."""

    def run(paths):
        monkeypatch.setattr(sys, "argv", ["test_gpt2.py", "--model", paths[0], "--state", paths[1]])
        return main(), capsys.readouterr().out.splitlines()

    return run


def test_the_program_fails_when_a_gradient_is_wrong(pair, run_here, monkeypatch):
    """A factor of 1 + 1e-4 in GELU's backward pass fails the gradients after it, and only those; exit status 1."""
    right, paths = train_gpt2.gelu_backward, pair("d2", "bytes", 2, 33)

    def wrong(dinp, inp, dout, N):
        right(dinp, inp, dout, N)
        dinp *= np.float32(1.0001)

    status, lines = run_here(paths)
    assert status == 0 and lines[-1] == "overall okay: 1" and not any("FAIL" in line for line in lines)
    monkeypatch.setattr(train_gpt2, "gelu_backward", wrong)
    status, lines = run_here(paths)
    assert status == 1 and lines[-1] == "overall okay: 0"
    red = {line.split()[0].split("[")[0] for line in lines if line.endswith("FAIL")}
    assert {"dfcb", "dfcw"} <= red and not {"logits", "dlnfw", "dlnfb"} & red


@pytest.mark.parametrize("row, error", (("dfcb[0]", 1.0), ("logits", np.nan)))
def test_a_debug_state_full_of_errors_does_not_widen_the_tolerance(pair, run_here, tmp_path, row, error):
    model, state_path = pair("d2", "bytes", 2, 33)
    config, params = read_model(model, GPT2)
    state = read_debug_state(state_path, config, params)
    tensor = state.logits if row == "logits" else state.grads.fcb
    tensor[0, 0] += error
    write_debug_state(tmp_path / "state.bin", config, state)
    status, lines = run_here((model, str(tmp_path / "state.bin")))
    assert status == 1 and any(line.startswith(f"{row} ") and "debug state itself" in line for line in lines)


def test_out_of_memory_is_a_line(pair, monkeypatch, run_here):
    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(sys.modules[__name__], "Yardstick", no_memory)
    with pytest.raises(UserError, match="PyTorch: CUDA out of memory. Tried to allocate 2.00 GiB.$"):
        run_here(pair("d2", "bytes", 2, 33))


def test_the_program_without_its_files(tmp_path, run_here):
    with pytest.raises(UserError, match="model.bin: no such file; .*export_weights.py"):
        run_here((str(tmp_path / "model.bin"), str(tmp_path / "state.bin")))


def reuse_freed_memory():
    """Make glibc reuse freed memory. By default it maps each large array anew, and of 124M's two minutes, one went into
    clearing the pages of float64 tensors."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt:
        M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


@torch_errors_as_lines()
@gpu_errors_as_lines()
def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n")[0])
    parser.add_argument("--model", default="gpt2_124M.bin", help="model checkpoint")
    parser.add_argument("--state", help="its debug state (default: the model's name with _debug_state)")
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="numpy", help="the trainer under test")
    args = parser.parse_args()
    if os.path.isdir(args.model):
        raise UserError(f"--model {args.model}: a directory, expected a .bin file, with its debug state beside it: run"
                        f" python export_weights.py --model {args.model} --input TOKENS_val.bin")
    require(args.backend)
    reuse_freed_memory()
    state = args.state or args.model.removesuffix(".bin").removesuffix("_bf16") + "_debug_state.bin"
    okay = climb(args.model, state, args.backend)
    print(f"overall okay: {int(okay)}")
    return 0 if okay else 1


if __name__ == "__main__":
    run_main(main)
