"""
How large an error does rounding alone cause in a model? The forward and backward pass in float64,
with random errors of the size that each operation makes in the precision of a run: Monte Carlo
arithmetic (Parker 1997, "Monte Carlo Arithmetic: exploiting randomness in floating-point
arithmetic"). test_gpt2.py takes its tolerances from here.

Several such runs, compared with the exact one, show for each tensor of this model and batch the
error that rounding causes in any correct implementation, whatever its order of sums. An
implementation that rounds as often has errors of the same size, whose 2-norm over thousands of
elements hardly varies. PyTorch's own error would be a worse yardstick: it is one sample, and 0
where PyTorch happens to be exact, as in a single row.

An element-wise operation that gives x in exact arithmetic gives x (1 + 0.42 u e), with e normal:
rounding errors are uniform within half a unit in the last place, and the logarithms of numbers are
uniform between powers of 2. A sum of K products a b, in sequential chains of at most n, has an
error with a standard deviation of 0.42 u sqrt(min(K, n)/2 + 1) sqrt(sum of (a b)^2): each partial
sum of a chain is rounded, and the partial sums grow like a random walk. A trained model's drift,
which `product` knows; other sums have fewer terms, or are pairwise.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from reference import CAP, EPS, SCALE, collect_gradients, half_rotations, optimizer_of, rotated, rotations, swapped
from reference import to_reference
from train_gpt2 import GPT2
from train_llama3 import Llama3
from train_speedrun import Speedrun

# unit roundoff: half a unit in the last place
FLOAT32 = 2.0**-24
TF32 = 2.0**-11
BFLOAT16 = 2.0**-8
FLOAT16 = 2.0**-11


# 0.42: root mean square of a rounding error over the unit roundoff
RMS = math.sqrt(1 / 3 * 3 / 8 / math.log(2))


class Float8(NamedTuple):
    unit: float  # unit roundoff
    floor: float  # root mean square of the smallest numbers' rounding errors, over a tensor's amax


# a tensor's scale brings its amax to 112 or more
E4M3 = Float8(2.0**-4, 2.0**-9 / math.sqrt(12) / 112)
GRADIENT = Float8(2.0**-3, 2.0**-16 / math.sqrt(12) / 112)  # E5M2
# of dlogits, about 2^15, in E5M2, rounded at random
DLOGITS = Float8(2.0**-2.5, 2.0**-16 / math.sqrt(6) / 2.0**14)


class Roundoff(NamedTuple):
    """Unit roundoffs of a run: of sums, matmul operands, stored tensors and the residual stream;
    chain: how many terms are added up one after the other."""

    chain: float = math.inf  # GPUs add up a tile's products one after the other
    sums: float = FLOAT32
    operands: float = 0.0
    tensors: float = FLOAT32
    residual: float = FLOAT32
    # operands of 8 bits in the matmuls of qkv, fc and fcproj, and the classifier's
    fp8: bool = False


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
        self.config = config
        self.u = roundoff
        self.model = to_reference(config, params, dtype=torch.float64)
        self.generator = torch.Generator().manual_seed(seed)
        self.operations = operations(self)

    def noise(self, x):
        return torch.randn(x.shape, generator=self.generator)  # float32: twice as fast

    def rounded(self, x, u):
        """Return x with a random rounding error in each element, of unit roundoff u."""
        return torch.mul(x, self.noise(x).mul_(RMS * u)).add_(x) if u else x

    def error(self, K):
        """Return the standard deviation of the error of a sum of K terms, over the root of the sum
        of their squares."""
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
        """x, rounded as an operand of a matmul. fp8: None or, of a run in FP8, E4M3, GRADIENT or
        DLOGITS."""
        if not (fp8 and self.u.fp8):
            return self.rounded(x, self.u.operands)
        size = x.abs()
        # 0 stays
        error = torch.maximum(RMS * fp8.unit * size, torch.minimum(size, fp8.floor * size.max()))
        return error.mul_(self.noise(x)).add_(x)

    def product(self, a, b, of_a=None, of_b=None):
        """a @ b. of_a, of_b: as `operand` takes them."""
        a = self.operand(a, of_a)
        b = self.operand(b, of_b)
        exact = a @ b
        squares = (a * a) @ (b * b)
        K = a.shape[-1]
        n = min(K, self.u.chain)
        chains = max(1, K / self.u.chain)
        # Of a sum that is known, partial sums are a Brownian bridge; the sums of several chains are
        # added up, too.
        drift = n * n / (3 * K)
        walk = n / 2 + 1 - n * n / (3 * K)
        if chains > 1:
            drift = drift + chains / 3
            walk = walk + chains / 6
        error = squares.mul_(walk).add_(exact.square(), alpha=drift).sqrt_().mul_(RMS * self.u.sums)
        return error.mul_(self.noise(error)).add_(exact)

    def run(self, x, y, settings, steps):
        """Train on one batch of token ids (B, T) and return float64 arrays: {"logits", "dwte", ...}
        of the first step, and "losses" (steps, B, T), of each position before each step's
        update."""
        x, y = (torch.from_numpy(ids).long() for ids in (x, y))
        master = ([p.detach().clone() for p in self.model.parameters()] if self.u.tensors > FLOAT32
                  else None)
        optimizer = optimizer_of(self.model, settings, x.numel())
        all_losses = []
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

        They are really rounded, not with random errors: equal updates have rounding errors of the
        same sign."""
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
        B, T = x.shape
        C, NH = self.config.C, self.config.NH
        op = self.operations
        model = self.model
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
        logits = op.store(op.matmul(normed, model.wte.weight.T, DLOGITS))
        probs = op.softmax(logits).flatten(0, 1)[torch.arange(B * T), y.flatten()]
        return logits, op.single(-torch.log(probs)).view(B, T)


class NoisyLlama(NoisyGPT2):
    """A Llama 3 with random rounding errors."""

    def forward(self, x, y):
        B, T = x.shape
        config = self.config
        op = self.operations
        model = self.model.model
        later = torch.ones(T, T, dtype=torch.bool).triu(1)
        cos_sin = list(rotations(config, T, model.norm.weight))

        def linear(inp, module, fp8=GRADIENT):
            return op.store(op.matmul(inp, module.weight.T, fp8))

        def rotated(part):
            cos, sin = cos_sin
            return op.single(op.single(part * cos) + op.single(swapped(part) * sin))

        residual = model.embed_tokens(x)
        for block in model.layers:
            normed = op.rmsnorm(residual, block.input_layernorm.weight)
            attn = block.self_attn
            mlp = block.mlp
            query, key, value = (linear(normed, module).view(B, T, -1, config.HS).transpose(1, 2)
                                 for module in (attn.q_proj, attn.k_proj, attn.v_proj))
            key, value = (part.repeat_interleave(config.NH // config.NKV, 1)
                          for part in (rotated(key), value))
            scores = op.single(op.matmul(rotated(query), key.transpose(-2, -1))
                               / math.sqrt(config.HS))
            att = op.store(op.softmax(scores.masked_fill(later, -torch.inf)))
            heads = op.store(op.matmul(att, value)).transpose(1, 2).reshape(B, T, config.Q)
            residual = op.add(residual + linear(heads, attn.o_proj, fp8=None))
            normed = op.rmsnorm(residual, block.post_attention_layernorm.weight)
            gate = op.single(F.silu(linear(normed, mlp.gate_proj)))
            residual = op.add(residual
                              + linear(op.store(op.single(linear(normed, mlp.up_proj) * gate)),
                                       mlp.down_proj))
        logits = op.store(op.matmul(op.rmsnorm(residual, model.norm.weight), self.model.head().T,
                                    DLOGITS))
        probs = op.softmax(logits).flatten(0, 1)[torch.arange(B * T), y.flatten()]
        return logits, op.single(-torch.log(probs)).view(B, T)


class NoisySpeedrun(NoisyGPT2):
    """A speed run's GPT with random rounding errors."""

    # like all constants here the reference's: with the page's, a wrong one would widen the
    # tolerance
    eps = EPS

    def forward(self, x, y):
        B, T = x.shape
        config = self.config
        op = self.operations
        p = self.model
        NH, HS = config.NH, config.HS
        later = torch.ones(T, T, dtype=torch.bool).triu(1)
        angles = half_rotations(config, T, p.wte, lambda part: self.rounded(part, self.u.sums))
        scales = torch.full((HS,), SCALE * math.sqrt(HS),
                            dtype=torch.float64), torch.ones(HS, dtype=torch.float64)

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
        z = op.store(op.bias(op.matmul(op.rmsnorm(residual, p.lnfw), p.lm_head.T, DLOGITS),
                             p.lm_headb))
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
    matmul: object  # of a, b and, in FP8, the gradient's format: GRADIENT or DLOGITS
    layernorm: object
    rmsnorm: object
    softmax: object


def operations(run):
    """Return Operations with the random errors of `run`, in the forward and in the backward
    pass."""
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

    return Operations(rounding(u.sums, u.sums), rounding(u.tensors, u.tensors),
                      rounding(u.residual, u.tensors),
                      *sums_of(run), *norms_of(run))


def sums_of(run):
    """(bias, matmul) of Operations."""
    u = run.u

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
            ctx.fp8 = fp8
            ctx.operands_fp8 = fp8 and E4M3
            return run.product(a, b, ctx.operands_fp8, ctx.operands_fp8)

        @staticmethod
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            da = run.rounded(run.product(g, b.transpose(-1, -2), ctx.fp8, ctx.operands_fp8),
                             u.tensors)
            if b.dim() == 2:  # a weight: its gradient sums over all rows
                a = a.flatten(0, -2)
                g = g.flatten(0, -2)
            return da, run.rounded(run.product(a.transpose(-1, -2), g, ctx.operands_fp8, ctx.fp8),
                                   u.tensors), None

    return Bias.apply, Matmul.apply


def norms_of(run):
    """(layernorm, rmsnorm, softmax) of Operations."""
    u = run.u

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
            C = g.shape[-1]
            dnormed = run.rounded(g * weight, u.sums)
            inner = (dnormed - run.row_sums(dnormed) / C - normed * run.row_sums(dnormed * normed)
                     / C)
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
            # error u |x| in x: relative error u |x| in exp(x)
            exponent = x.masked_fill(~torch.isfinite(x), 0.0).abs()
            e = torch.exp(x) * (1.0 + u.sums * (RMS * exponent + 1.0) * run.noise(x))
            probs = run.rounded(e / run.row_sums(e), u.sums)
            ctx.save_for_backward(probs)
            return probs

        @staticmethod
        def backward(ctx, g):
            probs, = ctx.saved_tensors
            return run.rounded(run.rounded(g - run.row_sums(probs * g), u.sums) * probs, u.tensors)

    return Layernorm.apply, RMSNorm.apply, Softmax.apply
