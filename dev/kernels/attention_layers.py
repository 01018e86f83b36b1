"""
Attention in the kernel library, forward and backward. lab.py says what a layer is; the kernels are
in attention.cu, and the first one that uses wgmma is in attention_hopper.cu. Two rungs are live:
wgmma on Hopper for heads of 64 and 128 in bfloat16, else mma_sync. The library's row is cuDNN's
attention through PyTorch in bfloat16, and PyTorch's own in float32, where cuDNN has none;
dev/bench.py attention compares with FlashAttention-2, too.
"""

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from checks import expected_results
from lab import (SUMS, TF32, Kernel, Layer, bf16_bits, blocks, cuda,
                 np, portable_arch, rung, torch, train_gpt2)
from llmc.tensors import bf16_to_float32
from llmc.gpu.attention import attention_scratch
from llmc.gpu.geometry import hopper_attention, launch_geometry
from profile_gpu import attention_flops

BF16_TWICE = 1e-2  # in bfloat16, the result that one matmul passes to the next is rounded, too
LIBRARY = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
           SDPBackend.MATH]  # the first that can run is used


def attend(qkv, NH, backends):
    """Return PyTorch's attention of qkv (B,T,3C), and its three operands, views (B,NH,T,HS)."""
    B, T, C3 = qkv.shape
    C = C3 // 3
    operands = [part.view(B, T, NH, C // NH).transpose(1, 2).requires_grad_()
                for part in qkv.detach().split(C, dim=2)]
    with sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(*operands, is_causal=True), operands


class SideBySide:
    """The gradients of query, key and value as that of qkv; concatenated only when read, so that
    this is not timed."""

    def __init__(self, grads):
        self.grads = grads

    def double(self):
        return torch.cat([grad.transpose(1, 2).flatten(2) for grad in self.grads], dim=2).double()


def on_hopper(layer, block):
    """Whether the live kernels are Hopper's; otherwise they are those of mma_sync."""
    return hopper_attention(layer.config, layer.precision, layer.gpu.arch)


def with_heads_of_64(layer, block):
    return on_hopper(layer, block) and layer.config.HS == 64


class Attention(Layer):
    """What both directions share."""

    backend = LIBRARY  # PyTorch's; dev/bench.py compares two of them

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if self.precision.bf16:
            self.library_name = "cuDNN"
            self.checked = self.checked_in_bf16

    def sizes(self):
        return self.B, self.T, self.C, self.NH

    def live_sizes(self):
        """What the live kernels' launches take."""
        return self.B, self.T, self.NH, self.NH, self.C // self.NH

    def row_grid(self, rows):
        """A grid for all rows of each head, `rows` of them a block."""
        return blocks(self.T, rows), self.NH, self.B


class AttentionForward(Attention):
    """out = softmax(query @ key^T / sqrt(HS), causal) @ value, with lse, the log of the sum of exp,
    of each row"""

    name = "attention_forward"
    checked = {"out": TF32, "lse": TF32}
    # products of bfloat16 operands are exact
    checked_in_bf16 = {"out": BF16_TWICE, "lse": 4 * SUMS}

    def tensors(self):
        B, T, C = self.B, self.T, self.C
        return {"out": self.unwritten(B, T, C), "lse": self.float32(B, self.NH, T),
                "inp": self.random(B, T, 3 * C, spread=1.5)}

    def oracle(self, t):
        preatt, att = np.empty((2, self.B, self.NH, self.T, self.T))
        train_gpt2.attention_forward(t.out, preatt, att, t.inp, *self.sizes())
        largest = preatt.max(axis=-1, keepdims=True)
        t.lse[:] = largest[..., 0] + np.log(np.exp(preatt - largest).sum(axis=-1))

    def flops(self):
        return attention_flops(self.B, self.T, self.C, 2)

    def library(self, t):
        return lambda: {"out": attend(t.inp, self.NH, self.backend)[0].detach().transpose(1, 2)}

    def arguments(self, a):
        return *self.given(a), self.T

    thread_a_row = Kernel(grid=lambda self, lab, block: self.row_grid(block),
                          sweep=(32, 64, 128, 256))

    online = Kernel(grid=lambda self, lab, block: self.row_grid(block), sweep=(32, 64, 128, 256))

    @rung(128)
    def mma_sync(self, lab, a, block):
        cuda.attention_forward(lab.portable, a.out, a.lse, a.inp, *self.live_sizes())

    @rung(128, fits=with_heads_of_64)
    def warpgroup(self, lab, a, block):
        grid = (self.NH, blocks(self.T, 64), self.B)
        map = lab.device.tensor_map(a.inp, 64, self.C // self.NH)
        lab.launch("attention_forward_warpgroup", grid, (block,), a.out, a.lse, a.inp, self.T, map)

    @rung(384, fits=on_hopper)
    def wgmma(self, lab, a, block):
        cuda.attention_forward(lab.device, a.out, a.lse, a.inp, *self.live_sizes())


class AttentionBackward(Attention):
    """dquery = dS @ key, dkey = dS^T @ query, dvalue = P^T @ dout, dS = P * (dout @ value^T - D) /
    sqrt(HS)"""

    name = "attention_backward"
    parts = ("dquery_", "dkv_")
    checked = {"dinp": TF32}
    checked_in_bf16 = {"dinp": BF16_TWICE}

    def tensors(self):
        B, T, C = self.B, self.T, self.C
        inp, out, lse = self.forward_pass()
        return {"dinp": self.unwritten(B, T, 3 * C), "dout": self.random(B, T, C), "inp": inp,
                "out": out, "lse": lse, **self.scratch(),
                "sums": self.float32(self.sum_rows().attention, 3 * C)}

    def scratch(self):
        """What the live kernels use, those of every GPU."""
        arch = portable_arch(self.gpu)
        geometry = launch_geometry(self.config, self.precision, arch)
        return attention_scratch(self.config, self.B, self.T, geometry)

    def forward_pass(self):
        """Return inp, out and lse of one or two different sequences, repeated: NumPy is slow for a
        large batch.

        In float32, inp is rounded to bfloat16, which TF32 keeps, so that lse is that of each rung's
        forward pass.
        """
        few = AttentionForward(self.config, self.precision, self.gpu,
                               min(self.B, 2 if self.T <= 1024 else 1), self.T)
        tensors = few.tensors()
        if not self.precision.bf16:
            tensors["inp"] = bf16_to_float32(bf16_bits(tensors["inp"]))
        expected = expected_results(few, tensors)
        out, lse = (expected[name].astype(np.float32) for name in ("out", "lse"))
        repeated = np.arange(self.B) % few.B
        return tensors["inp"][repeated], (bf16_bits(out) if self.precision.bf16
                                          else out)[repeated], lse[repeated]

    def oracle(self, t):
        sizes = self.sizes()
        att, scratch1, scratch2 = np.empty((3, self.B, self.NH, self.T, self.T))
        train_gpt2.attention_forward(np.empty_like(t.dout), scratch1, att, t.inp, *sizes)
        train_gpt2.attention_backward(t.dinp, scratch1, scratch2, t.dout, t.inp, att, *sizes)

    def flops(self):
        return attention_flops(self.B, self.T, self.C, 5)

    def library(self, t):
        out, operands = attend(t.inp, self.NH, self.backend)
        dout = t.dout.view(self.B, self.T, self.NH, -1).transpose(1, 2)
        return lambda: {"dinp": SideBySide(torch.autograd.grad(out, operands, dout,
                                                               retain_graph=True))}

    def two_passes(self, lab, a, name, rows, block):
        """The gradients of queries, then of keys and values, `rows` rows of each a block."""
        count = self.B * self.NH * self.T  # of rows in all heads; a warp each
        lab.launch("attention_backward_row_sums", (blocks(count, 8),), (256,), a.D, a.dout, a.out,
                   count, self.T)
        for of in ("dquery", "dkv"):
            lab.launch(f"attention_backward_{of}_{name}", self.row_grid(rows), (block,), a.dinp,
                       a.dout, a.inp, a.lse, a.D, self.T)

    def backward(self, device, a):
        cuda.attention_backward(device, a.dinp, a, a.sums, a.dout, a.inp, a.out, a.lse, None,
                                None, *self.live_sizes())

    @rung(32, 64, 128, 256)
    def thread_a_row(self, lab, a, block):
        self.two_passes(lab, a, "thread_a_row", block, block)

    @rung(32, 64, 128, 256)
    def recompute(self, lab, a, block):
        self.two_passes(lab, a, "recompute", block // 4, block)

    @rung(128)
    def mma_sync(self, lab, a, block):
        self.backward(lab.portable, a)

    @rung(384, fits=on_hopper)
    def wgmma(self, lab, a, block):
        self.backward(lab.device, a)
