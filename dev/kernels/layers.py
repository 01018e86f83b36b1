"""
The memory-bound layers of the kernel library, and their versions from the simplest to the live one. lab.py says what a
layer is; the kernels are in the .cu files beside this one, each under a comment that says its idea.
"""

import math

from lab import EXACT, SUMS, SWEEP, Layer, blocks, cuda, np, size_of, torch, train_gpt2, version
from llmc.gpu.batch import sort_tokens
from llmc.tensors import bf16_bits
from llmc.gpu.trainer import adamw_update, global_norm
from llmc.gpu.shares import CHUNK, CHUNKS

F = torch.nn.functional


def warps(block):
    return block // 32


def waves(lab, block):
    """Return how many blocks of this size fill the GPU once: a multiprocessor holds 2048 threads and 32 blocks."""
    return lab.sm_count * min(32, 2048 // block)


# ----------------------------------------------------------------------------------------------------------------------
# embedding


class EncoderForward(Layer):
    """out = wte[inp] + wpe"""

    name, file, shapes = "encoder_forward", "encoder", ((3, 97),)
    checked = {"out": EXACT}

    def tensors(self):
        B, T, C = self.B, self.T, self.C
        return {"out": self.unwritten(B, T, C, dtype=self.precision.residual), "inp": self.tokens(),
                "wte": self.random(self.Vp, C), "wpe": self.random(self.config.maxT, C)}

    def oracle(self, t):
        train_gpt2.encoder_forward(t.out, t.inp, t.wte, t.wpe, self.B, self.T, self.C)

    def bytes(self, a):
        return 2 * size_of(a.out)

    def library(self, t):
        return lambda: {"out": F.embedding(t.inp, t.wte) + t.wpe[: self.T]}

    @version(*SWEEP)
    def thread_an_element(self, lab, a, block):
        lab.launch("encoder_forward_thread_an_element", (blocks(self.N * self.C, block),), (block,), a.out, a.inp,
                   a.wte, a.wpe, self.B, self.T)

    @version(*SWEEP)
    def pack_a_thread(self, lab, a, block):
        lab.launch("encoder_forward_pack_a_thread", (blocks(self.N * self.C, block * self.pack),), (block,), a.out,
                   a.inp, a.wte, a.wpe, self.B, self.T)

    @version(256)
    def live(self, lab, a, block):
        cuda.encoder_forward(lab.device, a.out, a.inp, a.wte, a.wpe, self.B, self.T, self.C)


class EncoderBackward(Layer):
    """dwte += the sum of dout over the positions of each token; dwpe = the sum over the batch"""

    name, file, shapes, float32_grads = "encoder_backward", "encoder", ((3, 97),), True
    checked = {"dwte": SUMS, "dwpe": SUMS}

    def tensors(self):
        B, T, C, N, maxT = self.B, self.T, self.C, self.N, self.config.maxT
        inp, order, begins, tokens = self.tokens(), *(np.zeros(size, np.int32) for size in (N, N + 1, N))
        sort_tokens(order, begins, tokens, inp)
        self.different = np.unique(inp).size
        return {"dwte": self.random(self.Vp, C, dtype="float32"), "dwpe": self.unwritten(maxT, C, dtype="float32"),
                "partials": self.unwritten(self.sum_rows().wte, C, dtype="float32"), "dout": self.random(B, T, C),
                "inp": inp, "order": order, "begins": begins, "tokens": tokens}

    def oracle(self, t):
        train_gpt2.encoder_backward(t.dwte, t.dwpe, t.dout, t.inp, self.B, self.T, self.C)

    def bytes(self, a):
        return size_of(a.dout, a.dwpe) + 2 * self.different * self.C * 4

    def library(self, t):
        def call():
            t.dwte.add_(torch.ops.aten.embedding_dense_backward(t.dout, t.inp, self.Vp, -1, False))
            dwpe = torch.zeros_like(t.dwpe)
            torch.sum(t.dout, 0, dtype=torch.float32, out=dwpe[: self.T])
            return {"dwte": t.dwte, "dwpe": dwpe}

        return call

    @version(*SWEEP)
    def atomics(self, lab, a, block):
        lab.clear(a.dwpe)
        lab.launch("encoder_backward_atomics", (blocks(self.N * self.C, block),), (block,), a.dwte, a.dwpe, a.dout,
                   a.inp, self.B, self.T)

    @version(*SWEEP)
    def wpe_apart(self, lab, a, block):
        lab.launch("encoder_backward_wte_atomics", (blocks(self.N * self.C, block),), (block,), a.dwte, a.dout, a.inp,
                   self.N)
        lab.launch("encoder_backward_wpe", (blocks(a.dwpe.size, 256 * self.pack),), (256,), a.dwpe, a.dout, self.B,
                   self.T, a.dwpe.shape[0])

    @version(256)
    def live(self, lab, a, block):
        cuda.encoder_backward(lab.device, a.dwte, a.dwpe, a.partials, a.dout, a.order, a.begins, a.tokens, self.B,
                              self.T, self.C)


# ----------------------------------------------------------------------------------------------------------------------
# layernorm and the residual stream


class LayernormForward(Layer):
    """out = (inp - mean) * rstd * weight + bias, with mean and rstd of each row"""

    name, file = "layernorm_forward", "layernorm_forward"
    checked = {"out": SUMS, "mean": SUMS, "rstd": SUMS}

    def tensors(self):
        B, T, C = self.B, self.T, self.C
        return {"out": self.unwritten(B, T, C), "mean": self.unwritten(B, T, dtype="float32"),
                "rstd": self.unwritten(B, T, dtype="float32"),
                "inp": self.random(B, T, C, mean=1, dtype=self.precision.residual), "weight": self.random(C),
                "bias": self.random(C)}

    def oracle(self, t):
        train_gpt2.layernorm_forward(t.out, t.mean, t.rstd, t.inp, t.weight, t.bias, self.B, self.T, self.C)

    def bytes(self, a):
        return size_of(a.out, a.inp)

    def library(self, t):
        names, inp = ("out", "mean", "rstd"), t.inp.to(t.weight.dtype)  # PyTorch's takes only one dtype
        return lambda: dict(zip(names, torch.native_layer_norm(inp, (self.C,), t.weight, t.bias, 1e-5)))

    def launch(self, lab, kernel, a, rows, block, shared=0):
        """rows: how many a block does."""
        lab.launch(kernel, (blocks(self.N, rows),), (block,), a.out, a.mean, a.rstd, a.inp, a.weight, a.bias, self.N,
                   shared=shared)

    @version(*SWEEP)
    def thread_a_row(self, lab, a, block):
        self.launch(lab, "layernorm_forward_thread_a_row", a, block, block)

    @version(*SWEEP)
    def statistics_apart(self, lab, a, block):
        lab.launch("layernorm_forward_statistics", (self.N,), (block,), a.mean, a.rstd, a.inp)
        lab.launch("layernorm_forward_normalize", (blocks(self.N * self.C, block),), (block,), a.out, a.mean, a.rstd,
                   a.inp, a.weight, a.bias, self.N)

    @version(*SWEEP)
    def warp_a_row(self, lab, a, block):
        self.launch(lab, "layernorm_forward_warp_a_row", a, warps(block), block)

    @version(*SWEEP)
    def one_pass(self, lab, a, block):
        self.launch(lab, "layernorm_forward_one_pass", a, warps(block), block)

    @version(*SWEEP)
    def block_a_row(self, lab, a, block):
        lab.launch("layernorm_forward_block_a_row", (self.N,), (block,), a.out, a.mean, a.rstd, a.inp, a.weight, a.bias)

    def shared_bytes(self, block):
        return (2 + warps(block)) * self.C * 16 // self.pack

    @version(*SWEEP, fits=lambda layer, block: layer.shared_bytes(block) <= layer.gpu.shared)
    def shared_memory(self, lab, a, block):
        self.launch(lab, "layernorm_forward_shared_memory", a, warps(block), block, self.shared_bytes(block))

    @version(256)
    def live(self, lab, a, block):
        cuda.residual_layernorm_forward(lab.device, None, a.out, a.mean, a.rstd, a.inp, None, a.weight, a.bias, self.B,
                                        self.T, self.C)


class LayernormBackward(Layer):
    """dinp += the gradient through a layernorm; dweight, dbias = sums over all rows"""

    name, file, float32_grads = "layernorm_backward", "layernorm_backward", True
    checked = {"dinp": SUMS, "dweight": SUMS, "dbias": SUMS}

    def tensors(self):
        B, T, C = self.B, self.T, self.C
        inp = self.random(B, T, C, mean=1, dtype=self.precision.residual)
        mean = inp.mean(axis=-1, dtype=np.float32)
        rstd = 1 / np.sqrt(inp.var(axis=-1, dtype=np.float32) + np.float32(1e-5))
        rows = self.sum_rows().layernorm
        return {"dinp": self.random(B, T, C), "dweight": self.unwritten(C, dtype="float32"),
                "dbias": self.unwritten(C, dtype="float32"), "dout": self.random(B, T, C), "inp": inp,
                "weight": self.random(C), "mean": mean, "rstd": rstd,
                "partials": self.unwritten(32 * self.gpu.sm_count, 2 * C, dtype="float32"),
                "done": np.zeros(1, np.int32), "live_partials": self.unwritten(rows, 3 * C, dtype="float32")}

    def oracle(self, t):
        train_gpt2.layernorm_backward(t.dinp, t.dweight, t.dbias, t.dout, t.inp, t.weight, t.mean, t.rstd, self.B,
                                      self.T, self.C)

    def bytes(self, a):
        return size_of(a.dinp, a.dinp, a.dout, a.inp)

    def library(self, t):
        inp = t.inp.to(t.weight.dtype)  # PyTorch's takes only one dtype
        _, mean, rstd = torch.native_layer_norm(inp, (self.C,), t.weight, t.weight, 1e-5)

        def call():
            dinp, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
                t.dout, inp, (self.C,), mean, rstd, t.weight, t.weight, (True, True, True))
            return {"dinp": t.dinp.add_(dinp), "dweight": dweight, "dbias": dbias}

        return call

    def given(self, a):
        return a.dout, a.inp, a.weight, a.mean, a.rstd, self.N

    @version(*SWEEP)
    def thread_a_row(self, lab, a, block):
        lab.clear(a.dweight)
        lab.clear(a.dbias)
        lab.launch("layernorm_backward_thread_a_row", (blocks(self.N, block),), (block,), a.dinp, a.dweight, a.dbias,
                   *self.given(a))

    @version(*SWEEP)
    def atomics(self, lab, a, block):
        lab.clear(a.dweight)
        lab.clear(a.dbias)
        lab.launch("layernorm_backward_atomics", (blocks(self.N, warps(block)),), (block,), a.dinp, a.dweight, a.dbias,
                   *self.given(a))

    @version(*SWEEP)
    def shared_memory(self, lab, a, block):
        lab.clear(a.dweight)
        lab.clear(a.dbias)
        lab.launch("layernorm_backward_shared_memory", (min(waves(lab, block), blocks(self.N, warps(block))),),
                   (block,), a.dinp, a.dweight, a.dbias, *self.given(a), shared=8 * self.C)

    @version(*SWEEP)
    def last_block(self, lab, a, block):
        lab.launch("layernorm_backward_last_block", (min(waves(lab, block), self.N),), (block,), a.dinp, a.dweight,
                   a.dbias, a.partials, a.done, *self.given(a), shared=8 * self.C)

    @version(256)
    def live(self, lab, a, block):
        cuda.layernorm_backward(lab.device, a.dinp, a.live_partials, a.dout, a.inp, a.weight, a.mean, a.rstd, 1,
                                self.B, self.T, self.C)
        cuda.column_sums(lab.device, [(a.live_partials, (a.dweight, a.dbias, None))])


class ResidualForward(Layer):
    """out = inp1 + inp2"""

    name, file = "residual_forward", "residual"
    checked = {"out": EXACT}

    def tensors(self):
        shape, stream = (self.B, self.T, self.C), self.precision.residual
        return {"out": self.unwritten(*shape, dtype=stream), "inp1": self.random(*shape, dtype=stream),
                "inp2": self.random(*shape)}

    def oracle(self, t):
        train_gpt2.residual_forward(t.out, t.inp1, t.inp2, t.out.size)

    def bytes(self, a):
        return size_of(a.out, a.inp1, a.inp2)

    def library(self, t):
        inp1 = t.inp1.to(t.inp2.dtype)  # a sum of two dtypes would have a third
        return lambda: {"out": inp1 + t.inp2}

    def launch(self, lab, kernel, a, block, elements):
        """elements: how many a thread does."""
        lab.launch(kernel, (blocks(a.out.size, elements * block),), (block,), a.out, a.inp1, a.inp2,
                   np.int64(a.out.size))

    @version(*SWEEP)
    def thread_an_element(self, lab, a, block):
        self.launch(lab, "residual_forward_thread_an_element", a, block, 1)

    @version(*SWEEP)
    def pack_a_thread(self, lab, a, block):
        self.launch(lab, "residual_forward_pack_a_thread", a, block, self.pack)

    @version(*SWEEP)
    def packs_a_thread(self, lab, a, block):
        self.launch(lab, "residual_forward_packs_a_thread", a, block, 4 * self.pack)


class ResidualLayernormForward(Layer):
    """residual = inp1 + inp2; out = its layernorm"""

    name, file = "residual_layernorm_forward", "residual"
    checked = {"residual": EXACT, "out": SUMS, "mean": SUMS, "rstd": SUMS}

    def tensors(self):
        B, T, C, stream = self.B, self.T, self.C, self.precision.residual
        return {"residual": self.unwritten(B, T, C, dtype=stream), "out": self.unwritten(B, T, C),
                "mean": self.unwritten(B, T, dtype="float32"), "rstd": self.unwritten(B, T, dtype="float32"),
                "inp1": self.random(B, T, C, mean=1, dtype=stream), "inp2": self.random(B, T, C),
                "weight": self.random(C), "bias": self.random(C)}

    def oracle(self, t):
        np.add(t.inp1, t.inp2, out=t.residual)
        # the layernorm reads the sum as it is stored
        stored = t.residual.astype(np.float16).astype(np.float64) if self.precision.bf16 else t.residual
        train_gpt2.layernorm_forward(t.out, t.mean, t.rstd, stored, t.weight, t.bias, self.B, self.T, self.C)

    def bytes(self, a):
        return size_of(a.residual, a.out, a.inp1, a.inp2)

    def library(self, t):
        inp1 = t.inp1.to(t.inp2.dtype)  # a sum of two dtypes would have a third

        def call():
            residual = inp1 + t.inp2
            out, mean, rstd = torch.native_layer_norm(residual, (self.C,), t.weight, t.bias, 1e-5)
            return {"residual": residual, "out": out, "mean": mean, "rstd": rstd}

        return call

    @version(*SWEEP)
    def apart(self, lab, a, block):
        """The best addition, then the live layernorm of the stored sum."""
        lab.launch("residual_forward_pack_a_thread", (blocks(a.out.size, self.pack * block),), (block,), a.residual,
                   a.inp1, a.inp2, np.int64(a.out.size))
        cuda.residual_layernorm_forward(lab.device, None, a.out, a.mean, a.rstd, a.residual, None, a.weight, a.bias,
                                        self.B, self.T, self.C)

    @version(256)
    def live(self, lab, a, block):
        cuda.residual_layernorm_forward(lab.device, a.residual, a.out, a.mean, a.rstd, a.inp1, a.inp2, a.weight,
                                        a.bias, self.B, self.T, self.C)


# ----------------------------------------------------------------------------------------------------------------------
# GELU, and the gradient of the bias before it


class GeluForward(Layer):
    """out = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))"""

    name, file = "gelu_forward", "gelu"
    checked = {"out": EXACT}

    def tensors(self):
        shape = self.B, self.T, 4 * self.C
        return {"out": self.unwritten(*shape), "inp": self.random(*shape, spread=3)}

    def oracle(self, t):
        train_gpt2.gelu_forward(t.out, t.inp, t.out.size)

    def bytes(self, a):
        return size_of(a.out, a.inp)

    def library(self, t):
        return lambda: {"out": F.gelu(t.inp, approximate="tanh")}

    @version(*SWEEP)
    def thread_an_element(self, lab, a, block):
        lab.launch("gelu_forward_thread_an_element", (blocks(a.out.size, block),), (block,), a.out, a.inp,
                   np.int64(a.out.size))

    @version(*SWEEP)
    def pack_a_thread(self, lab, a, block):
        lab.launch("gelu_forward_pack_a_thread", (blocks(a.out.size, self.pack * block),), (block,), a.out, a.inp,
                   np.int64(a.out.size))

    @version(*SWEEP)
    def sigmoid(self, lab, a, block):
        lab.launch("gelu_forward_sigmoid", (blocks(a.out.size, self.pack * block),), (block,), a.out, a.inp,
                   np.int64(a.out.size))

    @version(256)
    def live(self, lab, a, block):
        cuda.gelu_forward(lab.device, a.out, a.inp, self.N, 4 * self.C)


class GeluBackward(Layer):
    """dinp = dout * the slope of GELU at inp (the live version leaves column sums, too)"""

    name, file = "gelu_backward", "gelu"
    checked = {"dinp": EXACT}

    def tensors(self):
        shape = self.B, self.T, 4 * self.C
        rows = self.sum_rows().gelu
        return {"dinp": self.unwritten(*shape), "inp": self.random(*shape, spread=3), "dout": self.random(*shape),
                "sums": self.unwritten(rows, 4 * self.C, dtype="float32")}

    def oracle(self, t):
        train_gpt2.gelu_backward(t.dinp, t.inp, t.dout, t.dinp.size)

    def bytes(self, a):
        return size_of(a.dinp, a.inp, a.dout)

    def library(self, t):
        return lambda: {"dinp": torch.ops.aten.gelu_backward(t.dout, t.inp, approximate="tanh")}

    @version(*SWEEP)
    def thread_an_element(self, lab, a, block):
        lab.launch("gelu_backward_thread_an_element", (blocks(a.dinp.size, block),), (block,), a.dinp, a.inp, a.dout,
                   np.int64(a.dinp.size))

    @version(*SWEEP)
    def pack_a_thread(self, lab, a, block):
        lab.launch("gelu_backward_pack_a_thread", (blocks(a.dinp.size, self.pack * block),), (block,), a.dinp, a.inp,
                   a.dout, np.int64(a.dinp.size))

    @version(256)
    def live(self, lab, a, block):
        cuda.gelu_backward(lab.device, a.dinp, a.sums, None, a.inp, a.dout, self.N, 4 * self.C)


class BiasGradient(Layer):
    """dbias (4C,) = the sum of dout (B,T,4C) over all rows"""

    name, file, float32_grads = "bias_gradient", "bias_gradient", True
    checked = {"dbias": SUMS}

    def tensors(self):
        OC, parts = 4 * self.C, 32 * self.gpu.sm_count
        return {"dbias": self.unwritten(OC, dtype="float32"), "dout": self.random(self.B, self.T, OC),
                "partials": self.unwritten(parts, OC, dtype="float32")}

    def oracle(self, t):
        np.sum(t.dout, axis=(0, 1), out=t.dbias)

    def bytes(self, a):
        return size_of(a.dout)

    def library(self, t):
        return lambda: {"dbias": torch.sum(t.dout, (0, 1), dtype=torch.float32)}

    def parts(self, lab, block, columns):
        """Return how many parts to split the rows into, so that blocks of that many columns fill the GPU."""
        return max(1, min(waves(lab, block) // blocks(4 * self.C, columns), blocks(self.N, warps(block))))

    @version(*SWEEP)
    def thread_a_column(self, lab, a, block):
        lab.launch("bias_gradient_thread_a_column", (blocks(4 * self.C, block),), (block,), a.dbias, a.dout, self.N)

    @version(*SWEEP)
    def shared_memory(self, lab, a, block):
        lab.launch("bias_gradient_shared_memory", (4 * self.C // 32,), (block,), a.dbias, a.dout, self.N)

    @version(*SWEEP)
    def atomics(self, lab, a, block):
        lab.clear(a.dbias)
        lab.launch("bias_gradient_atomics", (4 * self.C // 32, self.parts(lab, block, 32)), (block,), a.dbias, a.dout,
                   self.N)

    @version(*SWEEP)
    def two_stages(self, lab, a, block):
        """The second stage is the live one."""
        columns = 32 * self.pack
        partials = a.partials[: self.parts(lab, block, columns)]
        lab.launch("bias_gradient_two_stages", (blocks(4 * self.C, columns), len(partials)), (block,), partials,
                   a.dout, self.N)
        cuda.column_sums(lab.device, [(partials, (a.dbias,))])


# ----------------------------------------------------------------------------------------------------------------------
# softmax and cross entropy, over the whole vocabulary


def live_block(layer, block):
    return block == layer.geometry.CLASSIFIER_THREADS


class Logits(Layer):
    """What these layers share. The padding of the logits is NaN, because no result may depend on it."""

    shapes = ((3, 97),)

    def logits(self):
        logits = self.random(self.B, self.T, self.Vp, spread=4)
        logits[..., self.V :] = 0xFFFF if self.precision.bf16 else np.nan
        return logits

    def probabilities(self, logits):
        """(B,T,V) float64"""
        probs = np.empty((self.B, self.T, self.V))
        train_gpt2.softmax_forward(probs, logits[..., : self.V], self.B, self.T, self.V)
        return probs

    def whole_rows(self, logits):
        """Set the padding to -infinity for PyTorch, which knows no padding; returns the logits (N,Vp)."""
        logits[..., self.V :] = -torch.inf
        return logits.view(self.N, self.Vp)


class Softmax(Logits):
    """probs = exp(logits - the row's largest) / their sum, 0 in the padding"""

    name, file = "softmax", "softmax"
    checked = {"probs": SUMS}

    def tensors(self):
        return {"probs": self.unwritten(self.B, self.T, self.Vp), "logits": self.logits()}

    def oracle(self, t):
        t.probs[...] = 0.0
        t.probs[..., : self.V] = self.probabilities(t.logits)

    def bytes(self, a):
        return size_of(a.probs, a.logits)

    def library(self, t):
        logits = self.whole_rows(t.logits)
        return lambda: {"probs": torch.softmax(logits, -1)}

    @version(*SWEEP)
    def thread_a_row(self, lab, a, block):
        lab.launch("softmax_thread_a_row", (blocks(self.N, block),), (block,), a.probs, a.logits, self.N)

    @version(*SWEEP)
    def warp_a_row(self, lab, a, block):
        lab.launch("softmax_warp_a_row", (blocks(self.N, warps(block)),), (block,), a.probs, a.logits, self.N)

    @version(*SWEEP)
    def block_a_row(self, lab, a, block):
        lab.launch("softmax_block_a_row", (self.N,), (block,), a.probs, a.logits)

    @version(*SWEEP)
    def online(self, lab, a, block):
        lab.launch("softmax_online", (self.N,), (block,), a.probs, a.logits)


class CrossentropyForward(Logits):
    """losses = log(the sum of exp(logits)) - the target's logit"""

    name, file = "crossentropy_forward", "cross_entropy"
    checked = {"losses": SUMS}

    def tensors(self):
        return {"losses": self.unwritten(self.B, self.T, dtype="float32"), "logits": self.logits(),
                "targets": self.tokens()}

    def oracle(self, t):
        train_gpt2.crossentropy_forward(t.losses, self.probabilities(t.logits), t.targets, self.B, self.T, self.V)

    def bytes(self, a):
        return size_of(a.logits)

    def library(self, t):
        logits, targets = self.whole_rows(t.logits), t.targets.long().view(-1)
        return lambda: {"losses": F.cross_entropy(logits, targets, reduction="none")}

    @version(*SWEEP)
    def thread_a_row(self, lab, a, block):
        lab.launch("crossentropy_forward_thread_a_row", (blocks(self.N, block),), (block,), a.losses, a.logits,
                   a.targets, self.N)

    @version(*SWEEP)
    def warp_a_row(self, lab, a, block):
        lab.launch("crossentropy_forward_warp_a_row", (blocks(self.N, warps(block)),), (block,), a.losses, a.logits,
                   a.targets, self.N)

    @version(*SWEEP)
    def block_a_row(self, lab, a, block):
        lab.launch("crossentropy_forward_block_a_row", (self.N,), (block,), a.losses, a.logits, a.targets)

    @version(256, 512, 1024, fits=live_block)
    def live(self, lab, a, block):
        cuda.classifier(lab.device, a.losses, a.logits, a.targets, 1.0, 0, self.B, self.T)


class CrossentropySoftmaxBackward(Logits):
    """dlogits = (probs - one-hot(targets)) * dloss, 0 in the padding"""

    name, file = "crossentropy_softmax_backward", "cross_entropy"
    checked = {"dlogits": EXACT}

    def tensors(self):
        # any numbers will do for probabilities
        return {"dlogits": self.unwritten(self.B, self.T, self.Vp), "probs": self.logits(), "targets": self.tokens()}

    def oracle(self, t):
        B, T, V, dlogits = self.B, self.T, self.V, np.empty((self.B, self.T, self.V))
        train_gpt2.crossentropy_softmax_backward(dlogits, np.full((B, T), 1.0 / self.N), t.probs[..., :V], t.targets,
                                                 B, T, V)
        t.dlogits[...] = 0.0
        t.dlogits[..., :V] = dlogits

    def bytes(self, a):
        return size_of(a.dlogits, a.probs)

    @version(*SWEEP)
    def thread_an_element(self, lab, a, block):
        lab.launch("crossentropy_softmax_backward_thread_an_element", (blocks(a.probs.size, block),), (block,),
                   a.dlogits, a.probs, a.targets, 1.0 / self.N, self.N)

    @version(*SWEEP)
    def pack_a_thread(self, lab, a, block):
        lab.launch("crossentropy_softmax_backward_pack_a_thread", (blocks(a.probs.size, self.pack * block),), (block,),
                   a.dlogits, a.probs, a.targets, 1.0 / self.N, self.N)


class Classifier(Logits):
    """losses = cross entropy of the logits, which become their gradient times dloss"""

    name, file, uses = "classifier", "cross_entropy", ("softmax",)
    checked = {"losses": SUMS, "logits": SUMS}

    def tensors(self):
        return {"losses": self.unwritten(self.B, self.T, dtype="float32"), "logits": self.logits(),
                "targets": self.tokens(), "probs": self.unwritten(self.B, self.T, self.Vp)}

    def oracle(self, t):
        B, T, V, dlogits = self.B, self.T, self.V, np.empty((self.B, self.T, self.V))
        probs = self.probabilities(t.logits)
        train_gpt2.crossentropy_forward(t.losses, probs, t.targets, B, T, V)
        train_gpt2.crossentropy_softmax_backward(dlogits, np.full((B, T), 1.0 / self.N), probs, t.targets, B, T, V)
        t.logits[...] = 0.0
        t.logits[..., :V] = dlogits

    def bytes(self, a):
        return size_of(a.logits, a.logits)

    def library(self, t):
        logits, targets = self.whole_rows(t.logits).requires_grad_(), t.targets.long().view(-1)

        def call():
            losses = F.cross_entropy(logits, targets, reduction="none")
            (dlogits,) = torch.autograd.grad(losses, logits, torch.full_like(losses, 1.0 / self.N))
            return {"losses": losses.detach(), "logits": dlogits}

        return call

    @version(*SWEEP)
    def apart(self, lab, a, block):
        """Softmax, loss and gradient, a kernel each; the probabilities are stored in between."""
        lab.launch("softmax_online", (self.N,), (block,), a.probs, a.logits)
        lab.launch("crossentropy_forward_block_a_row", (self.N,), (block,), a.losses, a.logits, a.targets)
        lab.launch("crossentropy_softmax_backward_pack_a_thread", (blocks(a.probs.size, self.pack * block),), (block,),
                   a.logits, a.probs, a.targets, 1.0 / self.N, self.N)

    @version(*SWEEP)
    def fused(self, lab, a, block):
        lab.launch("classifier_fused", (self.N,), (block,), a.losses, a.logits, a.targets, 1.0 / self.N)

    @version(256, 512, 1024, fits=live_block)
    def live(self, lab, a, block):
        cuda.classifier(lab.device, a.losses, a.logits, a.targets, 1.0 / self.N, 1, self.B, self.T)


# ----------------------------------------------------------------------------------------------------------------------
# the update: over B*T*4C parameters, which for the default sizes is nearly as many as GPT-2 124M has

CONTROL = np.dtype([("step", "i8"), ("steps_begun", "i8"), ("rate", "f4"), ("eps", "f4"), ("learning_rate", "f4"),
                    ("grad_scale", "f4"), ("halted", "i4"), ("skipped", "i4")])  # struct Control of kernels/update.cu


def chunks_of(count, decay=0.0):
    """Return the CHUNKS, as bytes, of `count` parameters on one GPU."""
    chunks = np.zeros(blocks(count, CHUNK), CHUNKS)
    chunks["local"] = chunks["flat"] = chunks["received"] = CHUNK * np.arange(chunks.size)
    chunks["count"] = np.minimum(CHUNK, count - chunks["flat"])
    chunks["index"], chunks["decay"] = np.arange(chunks.size), decay
    return chunks.view(np.uint8)


class AdamWUpdate(Layer):
    """params, m, v: one step of AdamW; in bfloat16 with float32 master weights"""

    name, file = "adamw_update", "adamw"
    learning_rate, beta1, beta2, eps, weight_decay, grad_scale, step = 1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5, 3
    rate = learning_rate * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    scaled_eps = eps * math.sqrt(1 - beta2**step)

    @property
    def checked(self):
        return dict.fromkeys(("params", "master", "m", "v") if self.precision.bf16 else ("params", "m", "v"), SUMS)

    def tensors(self):
        count = self.N * 4 * self.C
        exact = self.random(count, dtype="float32")
        weights = {"params": bf16_bits(exact), "master": exact} if self.precision.bf16 else {"params": exact}
        control = np.array([(self.step, 0, self.rate, self.scaled_eps, self.learning_rate, self.grad_scale, 0, 0)],
                           CONTROL)
        return {**weights, "m": self.random(count, spread=0.1, dtype="float32"),
                "v": self.random(count, dtype="float32") ** 2, "grads": self.random(count),
                "control": control.view(np.int64), "chunks": chunks_of(count, self.weight_decay)}

    def oracle(self, t):
        exact = t.master if self.precision.bf16 else t.params
        train_gpt2.adamw_update(exact, t.m, t.v, t.grads, self.learning_rate, self.beta1, self.beta2, self.eps,
                                self.weight_decay, self.grad_scale, self.step, exact.size)
        t.params[...] = exact

    def bytes(self, a):
        weights = (a.params, a.master, a.master) if self.precision.bf16 else (a.params, a.params)
        return size_of(*weights, a.grads, a.m, a.m, a.v, a.v)

    def library(self, t):
        if self.precision.bf16:  # PyTorch has no master weights beside bfloat16 ones
            return None
        params = torch.nn.Parameter(t.params)
        params.grad = t.grads * self.grad_scale
        optimizer = torch.optim.AdamW([params], lr=self.learning_rate, betas=(self.beta1, self.beta2), eps=self.eps,
                                      weight_decay=self.weight_decay, fused=True)
        optimizer.state[params] = {"step": torch.tensor(self.step - 1.0, device=params.device), "exp_avg": t.m,
                                   "exp_avg_sq": t.v}

        def call():
            optimizer.step()
            return {"params": t.params, "m": t.m, "v": t.v}

        return call

    def updated(self, a):
        return a.params, getattr(a, "master", None), a.m, a.v, a.grads

    @version(*SWEEP)
    def thread_an_element(self, lab, a, block):
        lab.launch("adamw_update_thread_an_element", (blocks(a.m.size, block),), (block,), *self.updated(a),
                   self.learning_rate, self.beta1, self.beta2, self.eps, self.weight_decay, self.grad_scale, self.step,
                   np.int64(a.m.size))

    @version(*SWEEP)
    def pack_a_thread(self, lab, a, block):
        lab.launch("adamw_update_pack_a_thread", (blocks(a.m.size, self.pack * block),), (block,), *self.updated(a),
                   self.rate, self.beta1, self.beta2, self.scaled_eps, 1 - self.learning_rate * self.weight_decay,
                   self.grad_scale, np.int64(a.m.size))

    @version(256)
    def live(self, lab, a, block):
        *updated, grads = self.updated(a)
        adamw_update(lab.device, *updated, None, grads, a.chunks, 1, a.control, self.beta1, self.beta2, 0)


class GlobalNorm(Layer):
    """squares = the sum of the squares of all gradients"""

    name, file = "global_norm", "global_norm"
    checked = {"squares": 20 * SUMS}  # atomics_a_thread adds to one number from every thread of the GPU

    def tensors(self):
        count = self.N * 4 * self.C
        partials = max(32 * self.gpu.sm_count, blocks(count, CHUNK))
        return {"squares": self.unwritten(1, dtype="float32"), "grads": self.random(count),
                "partials": self.unwritten(partials, dtype="float32"), "chunks": chunks_of(count)}

    def oracle(self, t):
        t.squares[0] = train_gpt2.global_norm(t.grads, t.grads.size) ** 2

    def bytes(self, a):
        return size_of(a.grads)

    def library(self, t):
        return lambda: {"squares": torch.linalg.vector_norm(t.grads, dtype=torch.float32) ** 2}

    @version(*SWEEP)
    def atomics_a_thread(self, lab, a, block):
        lab.clear(a.squares)
        lab.launch("global_norm_atomics_a_thread", (waves(lab, block),), (block,), a.squares, a.grads,
                   np.int64(a.grads.size))

    @version(*SWEEP)
    def atomics_a_block(self, lab, a, block):
        lab.clear(a.squares)
        lab.launch("global_norm_atomics_a_block", (waves(lab, block),), (block,), a.squares, a.grads,
                   np.int64(a.grads.size))

    @version(*SWEEP)
    def two_stages(self, lab, a, block):
        count = waves(lab, block)
        lab.launch("global_norm_partials", (count,), (block,), a.partials, a.grads, np.int64(a.grads.size))
        lab.launch("global_norm_total", (1,), (1024,), a.squares, a.partials, count)

    @version(256)
    def live(self, lab, a, block):
        global_norm(lab.device, a.partials, None, a.grads, a.chunks, 1)
        lab.launch("global_norm_total", (1,), (1024,), a.squares, a.partials, blocks(a.grads.size, CHUNK))
