"""
The memory-bound layers of the kernel library, and their rungs from the simplest to the live one.
lab.py says what a layer is; the kernels are in the .cu files beside this one, each under a comment
that says its idea.
"""

import math

import torch.nn.functional as F

from lab import (BLOCK, EXACT, PACK, SUMS, SWEEP, THREAD, WARP, Kernel, Layer, bf16_bits, blocks,
                 cuda, launcher, np,
                 rung, size_of, torch, train_gpt2)
from llmc.gpu.batch import SortedTokens, sort_tokens
from train_gpt2_cuda import STEP_CONTROL, adamw_update
from llmc.gpu.shares import UPDATE_CHUNK, CHUNKS


class EncoderForward(Layer):
    """out = wte[inp] + wpe"""

    name = "encoder_forward"
    shapes = ((3, 97),)
    checked = {"out": EXACT}
    moved = ("out", "out")

    def tensors(self):
        self.work = self.N * self.C
        return {"out": self.unwritten(*self.sizes(), dtype=self.precision.residual),
                "inp": self.tokens(),
                "wte": self.random(self.Vp, self.C), "wpe": self.random(self.config.maxT, self.C)}

    def library(self, t):
        return lambda: {"out": F.embedding(t.inp, t.wte) + t.wpe[: self.T]}

    def arguments(self, a):
        return *self.given(a), self.B, self.T

    thread_an_element = Kernel(THREAD)
    pack_a_thread = Kernel(PACK)
    live = launcher(lambda self, device, a: cuda.encoder_forward(device, *self.given(a),
                                                                 *self.sizes()))


class EncoderBackward(EncoderForward):
    """dwte += the sum of dout over the positions of each token; dwpe = the sum over the batch"""

    name, float32_grads = "encoder_backward", True
    checked = {"dwte": SUMS, "dwpe": SUMS}
    signature = ("dwte", "dwpe", "dout", "inp")

    def tensors(self):
        B = self.B
        T = self.T
        C = self.C
        N = self.N
        maxT = self.config.maxT
        inp, order, begins, tokens = self.tokens(), *(np.zeros(size, np.int32)
                                                      for size in (N, N + 1, N))
        sort_tokens(order, begins, tokens, inp)
        self.work = N * C
        self.different = np.unique(inp).size
        return {"dwte": self.random(self.Vp, C, dtype="float32"), "dwpe": self.float32(maxT, C),
                "partials": self.float32(self.sum_rows().wte, C), "dout": self.random(B, T, C),
                "inp": inp,
                "order": order, "begins": begins, "tokens": tokens}

    def bytes(self, a):
        return size_of(a.dout, a.dwpe) + 2 * self.different * self.C * 4

    def library(self, t):
        def call():
            t.dwte.add_(torch.ops.aten.embedding_dense_backward(t.dout, t.inp, self.Vp, -1, False))
            dwpe = torch.zeros_like(t.dwpe)
            torch.sum(t.dout, 0, dtype=torch.float32, out=dwpe[: self.T])
            return {"dwte": t.dwte, "dwpe": dwpe}

        return call

    atomics = Kernel(THREAD, adds_to=("dwpe",))
    live = launcher(lambda self, device, a: cuda.encoder_backward(
        device, a.dwte, a.dwpe, a.partials, a.dout, SortedTokens(a.order, a.begins, a.tokens),
        *self.sizes()))


class LayernormForward(Layer):
    """out = (inp - mean) * rstd * weight + bias, with mean and rstd of each row"""

    name = "layernorm_forward"
    moved = ("out", "inp")
    checked = {"out": SUMS, "mean": SUMS, "rstd": SUMS}

    def tensors(self):
        B, T, C = self.sizes()
        return {"out": self.unwritten(B, T, C), "mean": self.float32(B, T),
                "rstd": self.float32(B, T),
                "inp": self.random(B, T, C, mean=1, dtype=self.precision.residual),
                "weight": self.random(C),
                "bias": self.random(C)}

    def library(self, t):
        inp = t.inp.to(t.weight.dtype)  # PyTorch's takes only one dtype
        return lambda: dict(zip(self.checked,
                                torch.native_layer_norm(inp, (self.C,), t.weight, t.bias, 1e-5)))

    thread_a_row = Kernel(THREAD)
    warp_a_row = Kernel(WARP)
    shared_memory = Kernel(WARP,
                           shared=lambda self, block: (2 + block // 32) * self.C * 16 // self.pack)
    live = launcher(lambda self, device, a: cuda.residual_layernorm_forward(
        device, None, a.out, a.mean, a.rstd, a.inp, None, a.weight, a.bias, *self.sizes()))


class LayernormBackward(Layer):
    """dinp += the gradient through a layernorm; dweight, dbias = sums over all rows"""

    name, float32_grads = "layernorm_backward", True
    moved = "dinp", "dinp", "dout", "inp"
    checked = {"dinp": SUMS, "dweight": SUMS, "dbias": SUMS}
    signature = ("dinp", "dweight", "dbias", "dout", "inp", "weight", "mean", "rstd")

    def tensors(self):
        B, T, C = self.sizes()
        inp = self.random(B, T, C, mean=1, dtype=self.precision.residual)
        mean = inp.mean(axis=-1, dtype=np.float32)
        rstd = 1 / np.sqrt(inp.var(axis=-1, dtype=np.float32) + np.float32(1e-5))
        return {"dinp": self.random(B, T, C), "dweight": self.float32(C), "dbias": self.float32(C),
                "dout": self.random(B, T, C), "inp": inp, "weight": self.random(C), "mean": mean,
                "rstd": rstd,
                "partials": self.float32(self.sum_rows().layernorm, 3 * C)}

    def library(self, t):
        inp = t.inp.to(t.weight.dtype)  # PyTorch's takes only one dtype
        _, mean, rstd = torch.native_layer_norm(inp, (self.C,), t.weight, t.weight, 1e-5)

        def call():
            dinp, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
                t.dout, inp, (self.C,), mean, rstd, t.weight, t.weight, (True, True, True))
            return {"dinp": t.dinp.add_(dinp), "dweight": dweight, "dbias": dbias}

        return call

    thread_a_row = Kernel(THREAD, adds_to=("dweight", "dbias"))
    atomics = Kernel(WARP, adds_to=("dweight", "dbias"))
    # as many blocks as the GPU holds: 2048 threads and 32 blocks a multiprocessor
    shared_memory = Kernel(
        grid=lambda self, lab, block: (min(lab.sm_count * min(32, 2048 // block),
                                           blocks(self.N, block // 32)),),
        shared=lambda self, block: 8 * self.C, adds_to=("dweight", "dbias"))

    @rung(256)
    def live(self, lab, a, block):
        cuda.layernorm_backward(lab.device, a.dinp, a.partials, a.dout, a.inp, a.weight, a.mean,
                                a.rstd, 1, self.B, self.T, self.C)
        cuda.column_sums(lab.device, [(a.partials, (a.dweight, a.dbias, None))])


class Gelu(Layer):
    """What both directions share: kernels and NumPy functions take the number of elements, of
    (B,T,4C)."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.shape = (self.B, self.T, 4 * self.C)
        self.work = self.N * 4 * self.C

    def sizes(self):
        return (self.work,)

    def arguments(self, a):
        return *self.given(a), np.int64(self.work)


class GeluForward(Gelu):
    """out = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))"""

    name = "gelu_forward"
    checked = {"out": EXACT}
    moved = ("out", "inp")

    def tensors(self):
        return {"out": self.unwritten(*self.shape), "inp": self.random(*self.shape, spread=3)}

    def library(self, t):
        return lambda: {"out": F.gelu(t.inp, approximate="tanh")}

    thread_an_element = Kernel(THREAD)
    pack_a_thread = Kernel(PACK)
    sigmoid = Kernel(PACK)
    live = launcher(lambda self, device, a: cuda.gelu_forward(device, a.out, a.inp, self.N,
                                                              4 * self.C))


class GeluBackward(Gelu):
    """dinp = dout * the slope of GELU at inp (the live rung leaves column sums, too)"""

    name = "gelu_backward"
    checked = {"dinp": EXACT}
    signature = moved = ("dinp", "inp", "dout")

    def tensors(self):
        return {"dinp": self.unwritten(*self.shape), "inp": self.random(*self.shape, spread=3),
                "dout": self.random(*self.shape),
                "sums": self.float32(self.sum_rows().gelu, 4 * self.C)}

    def library(self, t):
        return lambda: {"dinp": torch.ops.aten.gelu_backward(t.dout, t.inp, approximate="tanh")}

    pack_a_thread = Kernel(PACK)
    live = launcher(lambda self, device, a: cuda.gelu_backward(device, a.dinp, a.sums, None, a.inp,
                                                               a.dout, self.N, 4 * self.C))


class BiasBackward(Layer):
    """dbias = the sum of dout over all rows"""

    name, float32_grads = "bias_backward", True
    checked = {"dbias": SUMS}
    moved = ("dout",)
    signature = ("dbias", "dout")

    def tensors(self):
        return {"dbias": self.float32(self.config.F), "dout": self.random(self.N, self.config.F),
                "partials": self.float32(blocks(self.N, 128), self.config.F)}

    def oracle(self, t):
        t.dbias[:] = t.dout.sum(axis=0)

    def library(self, t):
        return lambda: {"dbias": t.dout.sum(0, dtype=torch.float32)}

    def columns(self, per_block):
        return blocks(self.config.F, per_block)

    atomics = Kernel(grid=lambda self, lab, block: (self.columns(block),
                                                    blocks(self.N, 32)), adds_to=("dbias",))
    fixed_order = Kernel(grid=lambda self, lab, block: (self.columns(32),))

    @rung(*SWEEP)
    def two_stages(self, lab, a, block):
        grid = self.columns(block * self.pack), blocks(self.N, 128)
        lab.launch("bias_backward_partial_sums", grid, (block,), a.partials, a.dout, self.N)
        cuda.column_sums(lab.device, [(a.partials, (a.dbias,))])


class Logits(Layer):
    """What these layers share. The padding of the logits is NaN, because no result may depend on
    it."""

    shapes = ((3, 97),)

    def logits(self):
        logits = self.random(self.B, self.T, self.Vp, spread=4)
        logits[..., self.V :] = 0xFFFF if self.precision.bf16 else np.nan
        return logits

    def whole_rows(self, logits):
        """Set the padding to -infinity for PyTorch, which knows no padding; returns the logits
        (N,Vp)."""
        logits[..., self.V :] = -torch.inf
        return logits.view(self.N, self.Vp)


class Softmax(Logits):
    """probs = exp(logits - the row's largest) / their sum, 0 in the padding"""

    name = "softmax"
    checked = {"probs": SUMS}
    moved = ("probs", "logits")

    def tensors(self):
        return {"probs": self.unwritten(self.B, self.T, self.Vp), "logits": self.logits()}

    def oracle(self, t):
        train_gpt2.softmax_forward(t.probs[..., : self.V], t.logits[..., : self.V], self.B, self.T,
                                   self.V)
        t.probs[..., self.V :] = 0.0

    def library(self, t):
        logits = self.whole_rows(t.logits)
        return lambda: {"probs": torch.softmax(logits, -1)}

    thread_a_row = Kernel(THREAD)
    warp_a_row = Kernel(WARP)
    online = Kernel(BLOCK)


class Classifier(Logits):
    """losses = log(the sum of exp(logits)) - the target's logit; logits = their gradient, (probs -
    one-hot) * dloss"""

    name = "classifier"
    moved = ("logits", "logits")
    checked = {"losses": SUMS, "logits": SUMS}

    def tensors(self):
        return {"losses": self.float32(self.B, self.T), "logits": self.logits(),
                "targets": self.tokens(), "weights": np.ones((self.B, self.T), np.float32),
                "probs": self.unwritten(self.B, self.T, self.Vp)}

    def oracle(self, t):
        sizes = self.B, self.T, self.V
        probs, dlogits = np.empty((2, *sizes))
        train_gpt2.softmax_forward(probs, t.logits[..., : self.V], *sizes)
        train_gpt2.crossentropy_forward(t.losses, t.logits[..., : self.V], probs, t.targets, *sizes)
        train_gpt2.crossentropy_softmax_backward(dlogits, np.full(sizes[:2], 1 / self.N), probs,
                                                 t.targets, *sizes)
        t.logits[..., : self.V] = dlogits
        t.logits[..., self.V :] = 0.0

    def library(self, t):
        logits = self.whole_rows(t.logits).requires_grad_()
        targets = t.targets.long().view(-1)

        def call():
            losses = F.cross_entropy(logits, targets, reduction="none")
            (dlogits,) = torch.autograd.grad(losses, logits, torch.full_like(losses, 1.0 / self.N))
            return {"losses": losses.detach(), "logits": dlogits}

        return call

    @rung(*SWEEP)
    def apart(self, lab, a, block):
        """Softmax, loss and gradient, a kernel each; the probabilities are stored in between."""
        lab.launch("softmax_online", (self.N,), (block,), a.probs, a.logits, self.N)
        lab.launch("crossentropy_forward", (self.N,), (block,), a.losses, a.logits, a.targets,
                   self.N)
        lab.launch("crossentropy_softmax_backward", (blocks(a.probs.size, self.pack * block),),
                   (block,), a.logits, a.probs, a.targets, 1.0 / self.N, self.N)

    def arguments(self, a):
        return a.losses, a.logits, a.targets, 1.0 / self.N, self.N

    fused = Kernel(BLOCK)
    live = launcher(lambda self, device, a: cuda.classifier(device, a.losses, a.logits, a.targets,
                                                            a.weights, 1.0 / self.N, 1, self.B,
                                                            self.T))


def chunks_of(count, decay=0.0):
    """The CHUNKS, as bytes, of `count` parameters on one GPU."""
    chunks = np.zeros(blocks(count, UPDATE_CHUNK), CHUNKS)
    chunks["local"] = chunks["flat"] = chunks["received"] = UPDATE_CHUNK * np.arange(chunks.size)
    chunks["count"] = np.minimum(UPDATE_CHUNK, count - chunks["flat"])
    chunks["index"] = np.arange(chunks.size)
    chunks["rate"] = 1.0
    chunks["decay"] = decay
    return chunks.view(np.uint8)


class AdamWUpdate(Layer):
    """params, m, v: one step of AdamW; in bfloat16 with float32 master weights"""

    name = "adamw_update"
    settings = 1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5, 3
    learning_rate, beta1, beta2, eps, weight_decay, grad_scale, step = settings
    rate = learning_rate * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    scaled_eps = eps * math.sqrt(1 - beta2**step)

    def __init__(self, *arguments):
        super().__init__(*arguments)
        written = ("params", "master", "m", "v") if self.precision.bf16 else ("params", "m", "v")
        self.checked = dict.fromkeys(written, SUMS)
        # bfloat16 params are not read
        self.moved = *written, *written[int(self.precision.bf16) :], "grads"

    def tensors(self):
        count = self.N * 4 * self.C
        exact = self.random(count, dtype="float32")
        control = np.zeros(1, STEP_CONTROL)
        control["step"] = self.step
        control["rate"] = self.rate
        control["eps"] = self.scaled_eps
        control["learning_rate"] = self.learning_rate
        control["grad_scale"] = self.grad_scale
        weights = ({"params": bf16_bits(exact), "master": exact} if self.precision.bf16
                   else {"params": exact})
        return {**weights, "m": self.random(count, spread=0.1, dtype="float32"),
                "v": self.random(count, dtype="float32") ** 2, "grads": self.random(count),
                "control": control.view(np.uint8), "chunks": chunks_of(count, self.weight_decay)}

    def oracle(self, t):
        exact = t.master if self.precision.bf16 else t.params
        train_gpt2.adamw_update(exact, t.m, t.v, t.grads, *self.settings, exact.size)
        t.params[...] = exact

    def library(self, t):
        if self.precision.bf16:  # PyTorch has no master weights beside bfloat16 ones
            return None
        params = torch.nn.Parameter(t.params)
        params.grad = t.grads * self.grad_scale
        optimizer = torch.optim.AdamW([params], lr=self.learning_rate,
                                      betas=(self.beta1, self.beta2), eps=self.eps,
                                      weight_decay=self.weight_decay, fused=True)
        optimizer.state[params] = {"step": torch.tensor(self.step - 1.0, device=params.device),
                                   "exp_avg": t.m,
                                   "exp_avg_sq": t.v}

        def call():
            optimizer.step()
            return {"params": t.params, "m": t.m, "v": t.v}

        return call

    def updated(self, a):
        return a.params, getattr(a, "master", None), a.m, a.v

    @rung(*SWEEP)
    def thread_an_element(self, lab, a, block):
        lab.launch("adamw_update_thread_an_element", (blocks(a.m.size, block),), (block,),
                   *self.updated(a), a.grads, *self.settings, np.int64(a.m.size))

    @rung(*SWEEP)
    def pack_a_thread(self, lab, a, block):
        lab.launch("adamw_update_pack_a_thread", (blocks(a.m.size, self.pack * block),), (block,),
                   *self.updated(a), a.grads, self.rate, self.beta1, self.beta2, self.scaled_eps,
                   1 - self.learning_rate * self.weight_decay, self.grad_scale, np.int64(a.m.size))

    live = launcher(lambda self, device, a: adamw_update(
        device, *self.updated(a), None, a.grads, a.chunks, 1, a.control, self.beta1, self.beta2, 0))
