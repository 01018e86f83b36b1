"""
Llama 3 training on a GPU: what it has instead of GPT-2's layers, by CUDA kernels of our own.

The chapters are train_llama3.py's, and what both architectures do alike is train_gpt2_cuda.py's:
read these two pages first. RMSNorm adds to the residual stream, as layernorm does there. In
bfloat16 on Hopper, the matmul that makes them rotates queries and keys (RoPE), and SwiGLU and its
gradient are in the matmul before each; elsewhere, these are kernels of their own. Attention's
backward pass rotates gradients back.

    python train_llama3_cuda.py -e l12                                    # random weights
    python export_weights.py --model SmolLM2-135M-Instruct/               # of a Hugging Face folder
    python train_llama3_cuda.py -e llama3_SmolLM2-135M-Instruct.bin -i data/mine -o runs/mine
"""

import llmc  # noqa: F401  (before NumPy: it sets what OpenBLAS reads when NumPy loads it)

import functools
from dataclasses import dataclass

import numpy as np

import train_llama3
from llmc.errors import run_main
from llmc.gpu.attention import attention_scratch
from llmc.gpu.geometry import BLOCK_THREADS, Has, blocks, pack
from llmc.gpu.messages import REST
from llmc.settings import with_default
from llmc.tensors import Row
from train_gpt2_cuda import (GPT2, CudaSettings, attention_backward, attention_forward, column_sums,
                             encoder_backward, encoder_forward, gradient_table, launch_norm, main,
                             one_layer_at_a_time, partial_rows, pass_tables)
from train_llama3 import SIZES, LlamaSettings, parameter_table, random_model, rope_table

# --------------------------------------------------------------------------------------------------
# settings


@dataclass
class LlamaCudaSettings(CudaSettings):
    """GPT-2's, with another model to start from."""

    model: str = with_default(LlamaSettings, "model", LlamaSettings.model)
    recompute: int = with_default(CudaSettings, "recompute", -1,
                                  "what the backward pass recomputes to save memory (0: nothing,"
                                  " 1: SwiGLU, 2: RMSNorms too, -1: nothing in bfloat16, SwiGLU in"
                                  " float32)")


# --------------------------------------------------------------------------------------------------
# layout: the tables of activations

# --recompute -> the rows that hold one layer at a time, and are computed again in the backward pass
RECOMPUTED = {0: (), 1: ("fch_swiglu",), 2: ("fch_swiglu", "ln1", "ln2")}
# linear layer -> the row that it reads
INPUTS = {"qkv": "ln1", "attproj": "atty", "fc": "ln2", "fcproj": "fch_swiglu", "logits": "lnf"}


def activation_table(config, B, T, precision, recompute):
    """name -> Row for what the forward pass saves for the backward pass."""
    L, NH, C, Q, F = config.L, config.NH, config.C, config.Q, config.F
    dtype = precision.dtype
    table = {
        "encoded": Row((B, T, C), precision.residual),
        "ln1": Row((L, B, T, C), dtype, stacked=True),  # not with recompute 2
        "ln1_rstd": Row((L, B, T), stacked=True),
        "qkv": Row((L, B, T, Q + 2 * config.K), dtype, stacked=True),  # queries and keys rotated
        "atty": Row((L, B, T, Q), dtype, stacked=True),
        "lse": Row((L, B, NH, T), stacked=True),
        "residual2": Row((L, B, T, C), precision.residual, stacked=True),
        "ln2": Row((L, B, T, C), dtype, stacked=True),  # not with recompute 2
        "ln2_rstd": Row((L, B, T), stacked=True),
        "fch": Row((L, B, T, 2 * F), dtype, stacked=True),  # up, then gate
        "fch_swiglu": Row((L, B, T, F), dtype, stacked=True),  # not with recompute 1 and 2
        "residual3": Row((L, B, T, C), precision.residual, stacked=True),
        "lnf": Row((B, T, C), dtype),
        "lnf_rstd": Row((B, T)),
        "losses": Row((B, T)),
    }
    return {name: row for name, row in table.items() if name not in RECOMPUTED[recompute]}


def phase_tables(config, B, T, precision, recompute, device):
    """phase -> table of its scratch. The phases share one buffer, mostly as large as the logits."""
    L, C, F = config.L, config.C, config.F
    dtype = precision.dtype
    recomputed = {name: Row((B, T, F if name == "fch_swiglu" else C), dtype)
                  for name in RECOMPUTED[recompute]}
    rows = partial_rows(B, T, device.sm_count, device.geometry)
    return {
        "forward": {"branch": Row((B, T, C), dtype), **recomputed},
        "classifier": {"logits": Row((B, T, config.Vp), dtype)},  # overwritten with their gradient
        "backward": {
            "dfch": Row((B, T, 2 * F), dtype),
            "dfch_swiglu": Row((B, T, F), dtype),  # where the matmul does not make dfch of it
            "dqkv": Row((B, T, config.Q + 2 * config.K), dtype),
            "datty": Row((B, T, config.Q), dtype),
            **attention_scratch(config, B, T, device.geometry),
            **recomputed,
            # partial sums over rows, until column_sums adds them up
            "lnf_partials": Row((rows.layernorm, C)),
            "ln2_partials": Row((L, rows.layernorm, C), stacked=True),
            "ln1_partials": Row((L, rows.layernorm, C), stacked=True),
            "wte_partials": Row((rows.wte, C)),  # within encoder_backward
        },
    }


# --------------------------------------------------------------------------------------------------
# layers, in network order, under the names of train_llama3.py


def rmsnorm_forward(device, out, rstd, inp, weight, eps, B, T, C):
    """out (B,T,C) = the RMSNorm of inp (B,T,C), which has the residual stream's dtype; rstd (B,T)
    =."""
    residual_rmsnorm_forward(device, None, out, rstd, inp, None, weight, eps, B, T, C)


def residual_rmsnorm_forward(device, residual, out, rstd, inp1, inp2, weight, eps, B, T, C):
    """residual (B,T,C) = inp1 (None: 0) + inp2, out (B,T,C) = its RMSNorm, rstd (B,T) =; without
    residual and inp2, of inp1. residual and inp1 have the stream's dtype. In FP8, out may be a
    Quantized."""
    launch_norm(device, "residual_rmsnorm_forward", residual, out, rstd, inp1, inp2, weight,
                float(eps), B * T)


def rmsnorm_backward(device, dinp, partials, dout, inp, weight, rstd, add_residual, B, T, C):
    """dinp (B,T,C) = or, with add_residual, += (it holds the gradient of the residual stream);
    partials (blocks, C) =, for column_sums: each block's part of dweight; in the speed run, which
    has biases, (blocks, 2C): of dinp's column sums, too. inp has the residual stream's dtype."""
    threads = device.geometry.LAYERNORM_THREADS
    device.launch("rmsnorm_backward", (len(partials),), (threads,), dinp, partials, dout, inp,
                  weight, rstd, int(add_residual), B * T)


def matmul_rope_forward(device, linear, out, inp, rope, B, T, rotated):
    """out (B,T,Q+2K) = the linear layer of inp; out's first `rotated` channels, queries and keys,
    are rotated by the angles of rope (T,HS/2,2), cosines and sines."""
    if linear.fuses and linear.matmul.tile(out.shape[-1], narrow=True):
        linear.forward_rope(out, inp, rope, T)
    else:
        linear.forward(out, inp)
        rope_forward(device, out, rope, B, T, rotated)


def rope_forward(device, qkv, rope, B, T, rotated):
    """Rotate, in place, the first `rotated` channels, queries and keys, of qkv (B,T,Q+2K)."""
    grid = (blocks(B * T * rotated, BLOCK_THREADS * pack(qkv)),)
    device.launch("rope_forward", grid, (BLOCK_THREADS,), qkv, rope, B * T, T)


def matmul_swiglu_forward(device, linear, out, swiglu, inp, N, F):
    """out (N,2F) = the linear layer of inp, swiglu (N,F) = SwiGLU(out)."""
    if linear.fuses:
        linear.forward_swiglu(out, swiglu, inp)
    else:
        linear.forward(out, inp)
        swiglu_forward(device, swiglu, out, N, F)


def matmul_swiglu_backward_inp(device, linear, dinp, swiglu, dswiglu, dout, inp, N, F):
    """dinp (N,2F) = the gradient with respect to inp, SwiGLU(inp) being the linear layer's input,
    from dout; swiglu (N,F) = SwiGLU(inp), recomputed, if not None. dswiglu (N,F): scratch."""
    if linear.fuses:
        linear.backward_inp_swiglu(dinp, dout, inp)
        if swiglu is not None:
            swiglu_forward(device, swiglu, inp, N, F)
    else:
        linear.backward_inp(dswiglu, dout)
        swiglu_backward(device, dinp, swiglu, inp, dswiglu, N, F)


def swiglu_forward(device, out, inp, N, F):
    """out (N,F) = up * gate * sigmoid(gate); inp (N,2F) holds up, then gate."""
    device.launch("swiglu_forward", (blocks(N * F, BLOCK_THREADS * pack(out)),), (BLOCK_THREADS,),
                  out, inp, N)


def swiglu_backward(device, dinp, out, inp, dout, N, F):
    """dinp (N,2F) =, of up and gate; out (N,F) = SwiGLU(inp), if not None. dout (N,F)."""
    grid = (blocks(N * F, BLOCK_THREADS * pack(dinp)),)
    device.launch("swiglu_backward", grid, (BLOCK_THREADS,), dinp, out, inp, dout, N)


# --------------------------------------------------------------------------------------------------
# model


class Llama3(GPT2):
    """The architecture; the classifier, buffers and views are GPT-2's."""

    TITLE = train_llama3.Llama3.TITLE
    MAGIC = train_llama3.Llama3.MAGIC
    Config = train_llama3.Config
    Settings = LlamaCudaSettings
    SIZES = SIZES
    INPUTS = INPUTS
    RECOMPUTED = RECOMPUTED

    HAS = Has(norm="rmsnorm", rope=True, activation="swiglu")
    LAYERS = ("encoder", "rmsnorm", "rope", "attention", "swiglu", "matmul", "matmul_swiglu",
              "classifier", "transpose", "column_sums", "update")

    parameter_table = staticmethod(parameter_table)
    random_model = staticmethod(random_model)

    @staticmethod
    def tables(config, settings, B, T, device):
        sizes = config, B, T, settings.precision, one_layer_at_a_time(settings, RECOMPUTED)
        return pass_tables(activation_table(*sizes), phase_tables(*sizes, device),
                           gradient_table(config, B, T, settings.precision))

    @staticmethod
    def rope(config, T):
        """The angles of T positions, (T,HS/2,2) float32: cosines and sines."""
        return np.stack(rope_table(config, T), axis=-1)

    def trunk(self, acts, inputs):
        """Token ids (B, T) on the GPU -> acts.lnf (B, T, C), as GPT-2's."""
        device, params, linear = self.device, self.params, self.linear
        config = self.config
        C, F = self.config.C, self.config.F
        eps = self.config.eps
        B, T = acts.B, acts.T
        branch = acts.branch
        rotated = config.Q + config.K  # channels: queries and keys

        self.linears.pass_begins(acts)
        encoder_forward(device, acts.encoded, inputs, params.wte, None, B, T, C)

        for l in range(config.L):
            p = self.param_layers[l]
            a = acts.layers[l]

            if l == 0:
                residual = acts.encoded
                rmsnorm_forward(device, a.ln1, a.ln1_rstd, residual, p.ln1w, eps, B, T, C)
            else:  # adds fcproj of the layer below, which is still in `branch`
                below = acts.layers[l - 1]
                residual = below.residual3
                residual_rmsnorm_forward(device, residual, a.ln1, a.ln1_rstd, below.residual2,
                                         branch, p.ln1w, eps, B, T, C)

            self.layer_begins(l)
            matmul_rope_forward(device, linear("qkv", l), a.qkv, a.ln1, acts.rope, B, T, rotated)
            attention_forward(device, a.atty, a.lse, a.qkv, B, T, config.NH, config.NKV, config.HS)
            linear("attproj", l).forward(branch, a.atty)

            residual_rmsnorm_forward(device, a.residual2, a.ln2, a.ln2_rstd, residual, branch,
                                     p.ln2w, eps, B, T, C)
            matmul_swiglu_forward(device, linear("fc", l), a.fch, a.fch_swiglu, a.ln2, B * T, F)
            linear("fcproj", l).forward(branch, a.fch_swiglu)

        top = acts.layers[-1]
        residual_rmsnorm_forward(device, top.residual3, acts.lnf, acts.lnf_rstd, top.residual2,
                                 branch, params.lnfw, eps, B, T, C)

    def backward(self, acts, by_token, scale):
        """self.grads = the gradients of the last batch's loss, as GPT-2's."""
        device, params, grads = self.device, self.params, self.grads
        linear, weight_gradient = self.linear, self.weight_gradient
        config = self.config
        C, F = self.config.C, self.config.F
        eps = self.config.eps
        B, T = acts.B, acts.T
        dresidual, dbranch = acts.dresidual, acts.dbranch
        recomputed = RECOMPUTED[self.settings.recompute]
        jobs = []  # of column_sums, for RMSNorms: (partial sums, the gradients)

        self.backward_head(acts, scale)
        if not config.tied:
            grads.wte.fill(0)  # a memset on the main stream
        rmsnorm_backward(device, dresidual, acts.lnf_partials, dbranch, acts.layers[-1].residual3,
                         params.lnfw, acts.lnf_rstd, False, B, T, C)
        jobs.append((acts.lnf_partials, (grads.lnfw,)))

        # Events, as on GPT-2's page. After x_read, both tensors that the side stream has read may
        # be overwritten: dfch and ln2, dresidual and fch_swiglu, dqkv and ln1.
        dfch_read = dqkv_read = None

        for l in reversed(range(config.L)):
            p = self.param_layers[l]
            a = acts.backward_layers[l]
            g = self.grad_layers[l]
            residual = acts.encoded if l == 0 else acts.layers[l - 1].residual3

            device.wait(dfch_read)
            swiglu = a.fch_swiglu if "fch_swiglu" in recomputed else None
            matmul_swiglu_backward_inp(device, linear("fcproj", l), a.dfch, swiglu,
                                       acts.dfch_swiglu, dresidual, a.fch, B * T, F)
            dresidual_read = weight_gradient("fcproj", l, dresidual, a.fch_swiglu)

            if "ln2" in recomputed:
                rmsnorm_forward(device, a.ln2, a.ln2_rstd, a.residual2, p.ln2w, eps, B, T, C)
            dfch_read = weight_gradient("fc", l, a.dfch, a.ln2)
            linear("fc", l).backward_inp(dbranch, a.dfch)

            device.wait(dresidual_read)
            rmsnorm_backward(device, dresidual, a.ln2_partials, dbranch, a.residual2, p.ln2w,
                             a.ln2_rstd, True, B, T, C)
            jobs.append((a.ln2_partials, (g.ln2w,)))

            dresidual_read = weight_gradient("attproj", l, dresidual, a.atty)
            linear("attproj", l).backward_inp(acts.datty, dresidual)

            device.wait(dqkv_read)
            attention_backward(device, a.dqkv, acts, None, acts.datty, a.qkv, a.atty, a.lse,
                               acts.rope, None, B, T, config.NH, config.NKV, config.HS)

            if "ln1" in recomputed:
                rmsnorm_forward(device, a.ln1, a.ln1_rstd, residual, p.ln1w, eps, B, T, C)
            dqkv_read = weight_gradient("qkv", l, a.dqkv, a.ln1)
            linear("qkv", l).backward_inp(dbranch, a.dqkv)

            device.wait(dresidual_read)
            rmsnorm_backward(device, dresidual, a.ln1_partials, dbranch, residual, p.ln1w,
                             a.ln1_rstd, True, B, T, C)
            jobs.append((a.ln1_partials, (g.ln1w,)))

        column_sums(device, jobs)
        encoder_backward(device, grads.wte, None, acts.wte_partials, dresidual, by_token, B, T, C)
        device.wait(dqkv_read)  # the side stream's last launch
        self.gradient_done(REST)


if __name__ == "__main__":
    run_main(functools.partial(main, Llama3))
