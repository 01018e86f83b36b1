"""
Attention in the kernel library, forward and backward. See lab.py for what a layer is; the kernels are in attention.cu, and the last
two versions are live: mma_sync on all GPUs but Hopper's, wgmma on those.

The library's row is cuDNN's attention through PyTorch in bfloat16, and PyTorch's own in float32, where cuDNN has none; FlashAttention-2
stands beside it in dev/bench_attention.py.
"""

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab import SUMS, Layer, bf16_bits, blocks, cuda, expected_results, np, torch, train_gpt2, version

# Tensor cores round float32 operands to TF32; in bfloat16, what one product hands to the next is rounded, too. As in tests/test_kernels.py.
TF32, BF16_TWICE = 2e-3, 1e-2

LIBRARY = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # the first that can
TILES = {64: 8, 256: 16, 1024: 32}  # threads of a block -> rows and columns of its tile


def attend(qkv, NH):
    """PyTorch's attention of qkv (B,T,3C), and its three operands, each (B,NH,T,HS) and a view."""
    B, T, C3 = qkv.shape
    operands = [part.view(B, T, NH, C3 // 3 // NH).transpose(1, 2).requires_grad_() for part in qkv.detach().split(C3 // 3, dim=2)]
    with sdpa_kernel(LIBRARY, set_priority=True):
        return F.scaled_dot_product_attention(*operands, is_causal=True), operands


class SideBySide:
    """The gradients of query, key and value as the one of qkv; put together when somebody looks, so that no time counts it."""

    def __init__(self, grads):
        self.grads = grads

    def double(self):
        return torch.cat([grad.transpose(1, 2).flatten(2) for grad in self.grads], dim=2).double()


class Attention(Layer):
    """What both directions share."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if self.precision.bf16:
            self.library_name = "cuDNN"

    def uses_wgmma(self, block):
        """Whether the live kernels are Hopper's; elsewhere they are those of mma_sync."""
        return cuda.use_hopper(self.gpu.arch, self.config, self.precision)

    def tile_launch(self, lab, name, columns, block, *arguments):
        """A product over all heads whose result has T rows and so many columns, by tiles of one thread for each element."""
        tile = TILES[block]
        lab.launch(name, (blocks(columns, tile), blocks(self.T, tile), self.B * self.NH), (tile, tile), *arguments, self.T,
                   shared=2 * tile * (tile + 1) * 4)

    def row_launch(self, lab, name, *arguments):
        """A warp for each row of each head."""
        rows = self.B * self.NH * self.T
        lab.launch(name, (blocks(rows, 8),), (256,), *arguments, rows, self.T)

    def mma_launch(self, lab, name, *arguments):
        """A live kernel of other GPUs than Hopper's, as train_gpt2_cuda.py launches it there."""
        arch = self.gpu.arch if self.gpu.arch == "sm_75" else "sm_80"
        launch = cuda.attention_launches(self.config, self.precision, arch)[name]
        grid = self.NH, blocks(self.T, launch.rows), self.B
        lab.launch(f"{name}_mma", grid, (launch.threads,), *arguments, self.T, shared=launch.shared)

    def scratch(self):
        """For what is stored of the (T,T) matrices."""
        return self.unwritten(self.B, self.NH, self.T, self.T, dtype="float32")


class AttentionForward(Attention):
    """out = softmax(query @ key^T / sqrt(HS), causal) @ value, with lse, the log of the sum of exp, of each row"""

    name, file = "attention_forward", "attention"
    checked = {"out": TF32, "lse": TF32}

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if self.precision.bf16:
            self.checked = {"out": BF16_TWICE, "lse": 4 * SUMS}  # products of bfloat16 operands are exact

    def tensors(self):
        B, T, C = self.B, self.T, self.C
        return {"out": self.unwritten(B, T, C), "lse": self.unwritten(B, self.NH, T, dtype="float32"),
                "inp": self.random(B, T, 3 * C, spread=1.5), "att": self.scratch()}

    def oracle(self, t):
        preatt, att = np.empty((2, self.B, self.NH, self.T, self.T))
        train_gpt2.attention_forward(t.out, preatt, att, t.inp, self.B, self.T, self.C, self.NH)
        largest = preatt.max(axis=-1, keepdims=True)
        t.lse[:] = largest[..., 0] + np.log(np.exp(preatt - largest).sum(axis=-1))

    def flops(self):
        return cuda.attention_flops(self.B, self.T, self.C, 2)

    def library(self, t):
        return lambda: {"out": attend(t.inp, self.NH)[0].detach().transpose(1, 2)}

    @version(32, 64, 128, 256)
    def thread_a_row(self, lab, a, block):
        lab.launch("attention_forward_thread_a_row", (blocks(self.T, block), self.NH, self.B), (block,), a.out, a.lse, a.inp, self.T)

    @version(*TILES)
    def products_apart(self, lab, a, block):
        self.tile_launch(lab, "attention_forward_scores", self.T, block, a.att, a.inp)
        self.row_launch(lab, "attention_forward_softmax", a.att, a.lse)
        self.tile_launch(lab, "attention_forward_values", self.C // self.NH, block, a.out, a.att, a.inp)

    @version(32, 64, 128, 256)
    def online(self, lab, a, block):
        lab.launch("attention_forward_online", (blocks(self.T, block), self.NH, self.B), (block,), a.out, a.lse, a.inp, self.T)

    @version(128)
    def mma_sync(self, lab, a, block):
        self.mma_launch(lab, "attention_forward", a.out, a.lse, a.inp)

    @version(384, fits=Attention.uses_wgmma)
    def wgmma(self, lab, a, block):
        cuda.attention_forward(lab, a.out, a.lse, a.inp, self.config, self.B, self.T)


class AttentionBackward(Attention):
    """dquery = dS @ key, dkey = dS^T @ query, dvalue = P^T @ dout, where dS = P * (dout @ value^T - D) / sqrt(HS), D = sum(dout * out)"""

    name, file = "attention_backward", "attention"
    checked = {"dinp": TF32}

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if self.precision.bf16:
            self.checked = {"dinp": BF16_TWICE}

    def tensors(self):
        B, T, C, NH = self.B, self.T, self.C, self.NH
        inp, out, lse = self.forward_pass()
        sums = cuda.sum_rows(self.config, B, T, self.gpu.sm_count, self.pack).attention
        return {"dinp": self.unwritten(B, T, 3 * C), "dout": self.random(B, T, C), "inp": inp, "out": out, "lse": lse,
                "D": self.unwritten(B, NH, T, dtype="float32"), "att": self.scratch(), "datt": self.scratch(),
                "sums": self.unwritten(sums, 3 * C, dtype="float32")}

    def forward_pass(self):
        """inp, out and lse of at most two different sequences, over and over: NumPy would take long for a large batch. In float32, inp has
        as few digits as bfloat16: to TF32, it is the same, so that lse is that of each version's own forward pass."""
        few = AttentionForward(self.config, self.precision, self.gpu, min(self.B, 2), self.T)
        tensors = few.tensors()
        if not self.precision.bf16:
            tensors["inp"] = train_gpt2.bf16_to_float32(bf16_bits(tensors["inp"]))
        expected = expected_results(few, tensors)
        out, lse = (expected[name].astype(np.float32) for name in ("out", "lse"))
        repeated = np.arange(self.B) % few.B
        return tensors["inp"][repeated], (bf16_bits(out) if self.precision.bf16 else out)[repeated], lse[repeated]

    def oracle(self, t):
        sizes = self.B, self.T, self.C, self.NH
        att, scratch1, scratch2 = np.empty((3, self.B, self.NH, self.T, self.T))
        train_gpt2.attention_forward(np.empty_like(t.dout), scratch1, att, t.inp, *sizes)
        train_gpt2.attention_backward(t.dinp, scratch1, scratch2, t.dout, t.inp, att, *sizes)

    def flops(self):
        return cuda.attention_flops(self.B, self.T, self.C, 5)

    def library(self, t):
        out, operands = attend(t.inp, self.NH)
        dout = t.dout.view(self.B, self.T, self.NH, -1).transpose(1, 2)
        return lambda: {"dinp": SideBySide(torch.autograd.grad(out, operands, dout, retain_graph=True))}

    def row_sums(self, lab, a):
        self.row_launch(lab, "attention_backward_row_sums", a.D, a.dout, a.out)

    @version(32, 64, 128, 256)
    def thread_a_row(self, lab, a, block):
        self.row_sums(lab, a)
        for name in ("attention_backward_dquery_thread_a_row", "attention_backward_dkv_thread_a_row"):
            lab.launch(name, (blocks(self.T, block), self.NH, self.B), (block,), a.dinp, a.dout, a.inp, a.lse, a.D, self.T)

    @version(*TILES)
    def matrices(self, lab, a, block):
        HS = self.C // self.NH
        self.row_sums(lab, a)
        self.tile_launch(lab, "attention_backward_probabilities", self.T, block, a.att, a.inp, a.lse)
        self.tile_launch(lab, "attention_backward_dvalue_product", HS, block, a.dinp, a.att, a.dout)
        self.tile_launch(lab, "attention_backward_dscores", self.T, block, a.datt, a.att, a.dout, a.inp, a.D)
        self.tile_launch(lab, "attention_backward_dquery_product", HS, block, a.dinp, a.datt, a.inp)
        self.tile_launch(lab, "attention_backward_dkey_product", HS, block, a.dinp, a.datt, a.inp)

    @version(32, 64, 128, 256)
    def recompute(self, lab, a, block):
        grid = blocks(self.T, block // 4), self.NH, self.B
        self.row_sums(lab, a)
        for name in ("attention_backward_dquery_recompute", "attention_backward_dkv_recompute"):
            lab.launch(name, grid, (block,), a.dinp, a.dout, a.inp, a.lse, a.D, self.T)

    @version(128)
    def mma_sync(self, lab, a, block):
        self.mma_launch(lab, "attention_backward_dquery", a.dinp, a.D, a.sums, a.dout, a.inp, a.out, a.lse)
        self.mma_launch(lab, "attention_backward_dkv", a.dinp, a.sums, a.dout, a.inp, a.lse, a.D)

    @version(384, fits=Attention.uses_wgmma)
    def wgmma(self, lab, a, block):
        cuda.attention_backward(lab, a.dinp, a.D, a.sums, a.dout, a.inp, a.out, a.lse, self.config, self.B, self.T)
