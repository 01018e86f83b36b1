"""
GPT-2 training on a GPU: the loop of train_gpt2.py, with CUDA kernels of our own for the layers.

What it is: the same chapters in the same order, over the same tables of parameters, files, data loader and checkpoints.
CuPy holds the memory and launches; kernels/*.cu do the work, one file a layer, compiled at the first start for the GPU
and the model at hand; matmuls are cuBLASLt's or our own, whichever is faster. What it needs: an NVIDIA driver and pip
packages, no CUDA toolkit.

    python prepro_tinyshakespeare.py
    python export_weights.py
    python train_gpt2_cuda.py                 # B=4, T=1024, one epoch, in bfloat16 where the GPU has it
    python dev/check_gpu.py                   # compares every activation and gradient with train_gpt2.py on one batch
    python dev/profile_gpu.py                 # where the time of a step goes, kernel by kernel
    python train_gpt2_cuda.py --gpus 4        # four processes, a GPU each; or start them with torchrun, mpirun or srun

A step never waits for the host: it is one CUDA graph, from the copy of the batch out of pinned memory to AdamW, and the
host prints a step's loss while the next one runs. Results are bit-identical from run to run and across a resume: every
sum has a fixed order, there are no atomic additions of floats, and the matmuls' algorithms, once searched, are kept in
a cache and recorded in checkpoints. The same holds on 1, 2, 4, 8 and 16 GPUs: llmc/gpu/zero.py says how.

GPT-2's tables, launches and passes are here, and the main program. llmc/gpu/trainer.py has the step: buffers, the
captured graph, AdamW, several GPUs.
"""

import llmc  # noqa: F401  (first: Ctrl-C is quiet from here on, and OpenBLAS is told how to run)

import time

START = time.perf_counter()  # for the time to the first step

import dataclasses
import functools
import math
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import numpy as np

from llmc.alone import ALONE
from llmc.checkpoint import count_parameters
from llmc.gpu.compiler import Cache
from llmc.dataloader import open_data
from llmc.gpu.device import Device, copy_to_gpu, cp, open_gpu, pinned_array, pointer
from llmc.errors import DIVERGED, Interrupted, Interruption, UserError, run_main
from llmc.evaluation import load_hellaswag
from llmc.files import chunks, locked
from llmc.gpu.geometry import (ATTENTION_ROWS, ENCODER_PIECE, MATMUL_ROWS, THREADS, WARP, blocks, check_sizes,
                               decode_files, decode_shared, hopper_matmul, kernel_files, launch_geometry, pack)
from llmc.logger import Log
from llmc.gpu.matmul import ALIGN, Matmul
from llmc.gpu.precision import Precision, describe_precision
from llmc.progress import Console, flops_per_token, peak_flops, print_start, print_table
from llmc.gpu.ranks import check_alike, on_ranks
from llmc.resume import check_steps, find_checkpoint, read_start, stopped
from llmc.sampler import Choice, Random, end_of_text, print_sample
from llmc.gpu.saver import Saver, resume
from llmc.schedulers import learning_rate_at
from llmc.settings import Settings, flag_of, option, print_changed_settings, with_default
from llmc.tensors import Row, allocate, flat, layer, table_bytes, views
from llmc.tokenizer import keep_tokenizer, load_tokenizer
from llmc.gpu.trainer import Evaluator, Trainer, round_weights
from train_gpt2 import cache_table, evaluate, parameter_table, random_model

# ----------------------------------------------------------------------------------------------------------------------
# settings: those of train_gpt2.py, some with other defaults, and what only a GPU has


@dataclass
class CudaSettings(Settings):
    """What one training run on a GPU does. The defaults are those of llm.c's CUDA program of April 2024, but for the
    dtype and the learning rate."""

    T: int = with_default(Settings, "T", 1024)
    steps: int = with_default(Settings, "steps", 0, "number of updates (0: one epoch)")
    val_every: int = with_default(Settings, "val_every", 20)
    val_batches: int = with_default(Settings, "val_batches", 20)
    final_reports: int = with_default(Settings, "final_reports", 1)

    dtype: str = option("auto", group="gpu", choices=("auto", "bfloat16", "float32"),
                        help="dtype of parameters, activations and gradients; with bfloat16, the residual stream is"
                        " float16 (auto: bfloat16 if the GPU has it, sm_80 and newer)")
    master_weights: int = option(1, "-w", group="gpu", choices=(0, 1),
                                 help="bfloat16: 1: AdamW works on a float32 copy of the weights")
    stochastic_rounding: int = option(0, group="gpu", metavar="SEED",
                                      help="bfloat16: round new weights stochastically, with this seed (0: to nearest,"
                                      " except layernorms)")
    float32_grads: int = option(0, group="gpu", choices=(0, 1),
                                help="bfloat16: 1: gradients of weights are float32 (accumulated ones always are)")
    tf32: int = option(1, group="gpu", choices=(0, 1), help="float32: 1: matmuls round their operands to TF32")
    recompute: int = option(-1, group="gpu", choices=(-1, 0, 1, 2),
                            help="what the backward pass recomputes to save memory (0: nothing, 1: GELU, 2: layernorms"
                            " too, -1: nothing in bfloat16, GELU in float32)")
    matmul: str = option("auto", group="gpu", choices=("auto", "cublaslt", "kernels"),
                         help="matmuls by cuBLASLt or by our kernels (auto: in bfloat16 on sm_90 the faster one for"
                         " each shape, elsewhere cublaslt)")
    arch: str = option("native", group="gpu", choices=("native", "sm_80"),
                       help="sm_80: kernels without the instructions of newer GPUs")
    graph: int = option(1, group="gpu", choices=(0, 1),
                        help="1: a step is one CUDA graph; 0: single launches, with the same results")
    gpus: int = option(1, group="gpu", help="number of GPUs of this machine to train on, with a process each; or start"
                       " the processes with torchrun, mpirun or srun")

    AT_LEAST: ClassVar = {**Settings.AT_LEAST, "steps": 0, "stochastic_rounding": 0, "gpus": 1}

    @property
    def micro_steps(self):
        """Micro-batches of an update, on all GPUs together; their gradients are averaged."""
        return max(self.gpus, self.total_batch_size // (self.B * self.T))

    def check(self):
        super().check()
        if self.total_batch_size % (self.B * self.T * self.gpus):
            raise UserError(f"-d/--total_batch_size {self.total_batch_size}: expected a multiple of B*T*GPUs ="
                            f" {self.B} * {self.T} * {self.gpus} = {self.B * self.T * self.gpus}")

    @property
    def own_micro_steps(self):
        """Micro-batches of an update on each GPU."""
        return self.micro_steps // self.gpus

    @property
    def precision(self):
        return Precision(self.dtype, self.tf32, self.float32_grads)

    @property
    def master(self):
        """Whether there are float32 weights beside the model's."""
        return self.dtype == "bfloat16" and bool(self.master_weights)


def settle(settings, arch):
    """A copy of the settings with what depends on the GPU filled in; raises UserError for a dtype that it lacks and for
    flags that would have no effect."""
    settings = dataclasses.replace(settings)
    has_bfloat16 = int(arch[3:].rstrip("a")) >= 80
    if settings.arch != "native" and not has_bfloat16:
        raise UserError(f"--arch {settings.arch}: this GPU is {arch}")
    if settings.dtype == "auto":
        settings.dtype = "bfloat16" if has_bfloat16 else "float32"
    if settings.dtype == "bfloat16" and not has_bfloat16:
        raise UserError(f"--dtype bfloat16: this GPU is {arch}, expected sm_80 or newer: pass --dtype float32")
    if settings.dtype == "bfloat16" and not settings.tf32:
        raise UserError("--tf32 0: this run is in bfloat16, whose matmuls know no TF32: pass --dtype float32, too")
    if not has_bfloat16:
        settings.tf32 = 0  # which came with the same tensor cores
    if settings.dtype == "float32":
        for name, default in (("master_weights", 1), ("stochastic_rounding", 0), ("float32_grads", 0)):
            if getattr(settings, name) != default:
                raise UserError(f"{flag_of(settings, name)} {getattr(settings, name)}: this run is in float32, and the"
                                " flag is for bfloat16: pass --dtype bfloat16")
    if settings.recompute == -1:
        settings.recompute = 0 if settings.dtype == "bfloat16" else 1
    return settings


# ----------------------------------------------------------------------------------------------------------------------
# layout: the tables of activations

RECOMPUTED = {0: (), 1: ("fch_gelu",), 2: ("fch_gelu", "ln1", "ln2")}  # rows that hold one layer at a time


def activation_table(config, B, T, precision, recompute):
    """name -> Row for what the forward pass saves for the backward pass."""
    L, NH, C, dtype = config.L, config.NH, config.C, precision.dtype
    table = {
        "encoded": Row((B, T, C), precision.residual),
        "ln1": Row((L, B, T, C), dtype, stacked=True),  # not with recompute 2
        "ln1_mean": Row((L, B, T), stacked=True),
        "ln1_rstd": Row((L, B, T), stacked=True),
        "qkv": Row((L, B, T, 3 * C), dtype, stacked=True),
        "atty": Row((L, B, T, C), dtype, stacked=True),
        "lse": Row((L, B, NH, T), stacked=True),  # log of the sum of exp of each row's scores, instead of preatt, att
        "residual2": Row((L, B, T, C), precision.residual, stacked=True),
        "ln2": Row((L, B, T, C), dtype, stacked=True),  # not with recompute 2
        "ln2_mean": Row((L, B, T), stacked=True),
        "ln2_rstd": Row((L, B, T), stacked=True),
        "fch": Row((L, B, T, 4 * C), dtype, stacked=True),
        "fch_gelu": Row((L, B, T, 4 * C), dtype, stacked=True),  # not with recompute 1 and 2
        "residual3": Row((L, B, T, C), precision.residual, stacked=True),
        "lnf": Row((B, T, C), dtype),
        "lnf_mean": Row((B, T)),
        "lnf_rstd": Row((B, T)),
        "losses": Row((B, T)),
    }
    return {name: row for name, row in table.items() if name not in RECOMPUTED[recompute]}


def phase_tables(config, B, T, precision, recompute, sm_count, geometry):
    """phase -> table of what lives in that phase alone. The three share their memory, whose size is mostly that of the
    logits: each phase overwrites what the one before left there."""
    L, NH, C, Vp, dtype = config.L, config.NH, config.C, config.Vp, precision.dtype
    recomputed = {"fch_gelu": Row((B, T, 4 * C), dtype), "ln1": Row((B, T, C), dtype), "ln2": Row((B, T, C), dtype)}
    recomputed = {name: recomputed[name] for name in recomputed if name in RECOMPUTED[recompute]}
    rows = partial_rows(B, T, sm_count, geometry)
    return {
        "forward": {
            "branch": Row((B, T, C), dtype),  # attproj or fcproj, until a layernorm adds it to the residual stream
            **recomputed,
        },
        "classifier": {"logits": Row((B, T, Vp), dtype)},  # overwritten with their gradient
        "backward": {
            "dfch": Row((B, T, 4 * C), dtype),  # of fch_gelu, then in place of fch
            "dqkv": Row((B, T, 3 * C), dtype),
            "D": Row((B, NH, T)),  # within attention_backward
            **recomputed,
            # partial sums over rows, one row for each block of a kernel, until column_sums adds them up
            "lnf_partials": Row((rows.layernorm, 3 * C)),
            "gelu_partials": Row((L, rows.gelu, 4 * C), stacked=True),
            "ln2_partials": Row((L, rows.layernorm, 3 * C), stacked=True),
            "attention_partials": Row((L, rows.attention, 3 * C), stacked=True),
            "ln1_partials": Row((L, rows.layernorm, 3 * C), stacked=True),
            "wte_partials": Row((rows.wte, C)),  # within encoder_backward, a row for each piece
        },
    }


def partial_rows(B, T, sm_count, geometry):
    """How many rows of partial sums each kernel leaves."""
    return SimpleNamespace(
        layernorm=min(geometry.LAYERNORM_BLOCKS * sm_count, blocks(B * T, geometry.LAYERNORM_ROWS)),
        gelu=blocks(B * T, MATMUL_ROWS),
        attention=B * blocks(T, ATTENTION_ROWS),
        wte=blocks(2 * B * T, ENCODER_PIECE),  # most where tokens have ENCODER_PIECE + 1 positions: two pieces each
    )


def gradient_table(config, B, T, precision):
    """name -> Row for the gradients of activations that live across phases."""
    table = {
        "dresidual": Row((B, T, config.C), precision.dtype),  # of the residual stream, all through the backward pass
        "dbranch": Row((B, T, config.C), precision.dtype),  # of a layernorm's or the attention's output
    }
    if not precision.bf16:
        table["transposed"] = Row((config.C, B * T))  # an operand of a weight gradient, within that matmul
    return table


# ----------------------------------------------------------------------------------------------------------------------
# layers, in network order. A layer that train_gpt2.py has, too, keeps its name and the order of its arguments here,
# after the Device or, for matmuls, the Matmul, which picks the fastest implementation.


def encoder_forward(device, out, inp, wte, wpe, B, T, C):
    """out (B,T,C) = wte[inp] + wpe. inp (B,T) int32."""
    threads = device.geometry.ENCODER_THREADS
    device.launch("encoder_forward", encoder_grid(device, B * T), (threads,), out, inp, wte, wpe, B * T, T)


def encoder_backward(device, dwte, dwpe, partials, dout, order, piece_begins, piece_tokens, B, T, C):
    """dwte += the sum of dout over the positions of each token; dwpe = the sum over the batch. order, piece_begins,
    piece_tokens: see sort_tokens of llmc/gpu/batch.py. partials (rows, C) float32: scratch."""
    threads = device.geometry.ENCODER_THREADS
    grid = (blocks(dwpe.size, threads * pack(dout)),)
    device.launch("encoder_backward_wpe", grid, (threads,), dwpe, dout, B, T, dwpe.shape[0])
    rows, spans = encoder_grid(device, B * T)
    grid = min(rows, 6 * device.sm_count), spans  # persistent blocks: see encoder.cu
    device.launch("encoder_backward_wte", grid, (threads,), dwte, partials, dout, order, piece_begins, piece_tokens,
                  B * T)
    grid = min(len(partials), 2 * device.sm_count), blocks(C, WARP * pack(dout))
    device.launch("encoder_backward_wte_cut", grid, (threads,), dwte, partials, piece_tokens, B * T)


def encoder_grid(device, N):
    """The grid that has a warp for each of N rows and each of the equal spans of its C channels."""
    return blocks(N, device.geometry.ENCODER_THREADS // WARP), device.geometry.ENCODER_SPANS


def layernorm_forward(device, out, mean, rstd, inp, weight, bias, B, T, C):
    """out (B,T,C) = layernorm of inp (B,T,C), which has the residual stream's dtype; mean, rstd (B,T) =."""
    residual_layernorm_forward(device, None, out, mean, rstd, inp, None, weight, bias, B, T, C)


def residual_layernorm_forward(device, residual, out, mean, rstd, inp1, inp2, weight, bias, B, T, C):
    """residual (B,T,C) = inp1 + inp2, out (B,T,C) = its layernorm, mean, rstd (B,T) =. residual and inp1 have the
    residual stream's dtype."""
    g = device.geometry
    grid = (blocks(B * T, g.LAYERNORM_ROWS),)
    device.launch("residual_layernorm_forward", grid, (g.LAYERNORM_THREADS,), residual, out, mean, rstd, inp1, inp2,
                  weight, bias, B * T)


def layernorm_backward(device, dinp, partials, dout, inp, weight, mean, rstd, add_residual, B, T, C):
    """dinp (B,T,C) = or, with add_residual, += (it holds the gradient of the residual stream); partials (blocks, 3C) =,
    for column_sums: each block's part of dweight, of dbias and of the column sums of the new dinp. inp has the residual
    stream's dtype."""
    grid, threads = (partials.shape[0],), (device.geometry.LAYERNORM_THREADS,)
    device.launch("layernorm_backward", grid, threads, dinp, partials, dout, inp, weight, mean, rstd, int(add_residual),
                  B * T)


def matmul_forward(matmul, out, inp, weight, bias, N, C, OC):
    """out (N,OC) = inp (N,C) @ weight (OC,C)^T + bias (OC,) (None: no bias)."""
    out, inp = out.reshape(N, OC), inp.reshape(N, C)
    matmul.run(f"forward {N} {C} {OC}", {
        "kernels": lambda: matmul.kernels.forward(out, inp, weight, bias),
        "cublaslt": lambda: matmul.cublaslt.multiply(out, inp, weight.T, bias),
        "kernels narrow": lambda: matmul.kernels.forward(out, inp, weight, bias, narrow=True),
    })


def matmul_gelu_forward(matmul, out, gelu, inp, weight, bias, N, C, OC):
    """out (N,OC) = inp (N,C) @ weight (OC,C)^T + bias (OC,), gelu (N,OC) = GELU(out)."""
    out, gelu, inp = out.reshape(N, OC), gelu.reshape(N, OC), inp.reshape(N, C)

    def one_after_the_other():
        matmul.cublaslt.multiply(out, inp, weight.T, bias)
        gelu_forward(matmul.device, gelu, out, N, OC)

    matmul.run(f"forward_gelu {N} {C} {OC}", {
        "kernels": lambda: matmul.kernels.gelu_forward(out, gelu, inp, weight, bias),
        "cublaslt": one_after_the_other,
    })


def matmul_backward_inp(matmul, dinp, dout, weight, N, C, OC, scale=1.0):
    """dinp (N,C) = scale * dout (N,OC) @ weight (OC,C)."""
    dinp, dout = dinp.reshape(N, C), dout.reshape(N, OC)
    matmul.run(f"backward_inp {N} {C} {OC}", {
        "kernels": lambda: matmul.kernels.backward_inp(dinp, dout, weight, scale),
        "cublaslt": lambda: matmul.cublaslt.multiply_in_chains(dinp, dout, weight, scale),
        "kernels narrow": lambda: matmul.kernels.backward_inp(dinp, dout, weight, scale, narrow=True),
    })


def matmul_gelu_backward_inp(matmul, dinp, partials, gelu, dout, weight, inp, N, C, OC):
    """dinp (N,C) = dout (N,OC) @ weight (OC,C) * GELU'(inp); partials (blocks, C) =, for column_sums: of dinp; gelu
    (N,C) = GELU(inp), recomputed, if not None."""
    dinp, dout, inp = dinp.reshape(N, C), dout.reshape(N, OC), inp.reshape(N, C)

    def fused():
        matmul.kernels.gelu_backward_inp(dinp, partials, dout, weight, inp)
        if gelu is not None:
            gelu_forward(matmul.device, gelu, inp, N, C)

    def one_after_the_other():
        matmul.cublaslt.multiply_in_chains(dinp, dout, weight)
        gelu_backward(matmul.device, dinp, partials, gelu, inp, dinp, N, C)

    matmul.run(f"backward_inp_gelu {N} {C} {OC}", {"kernels": fused, "cublaslt": one_after_the_other})


def matmul_backward_weight(matmul, dweight, dout, inp, transposed, N, C, OC, scale=1.0):
    """dweight (OC,C) = scale * dout (N,OC)^T @ inp (N,C). In float32, the smaller operand may be transposed first,
    to `transposed` (scratch; None in bfloat16): see transpose.cu."""
    dout, inp = dout.reshape(N, OC), inp.reshape(N, C)
    ways = {}
    if matmul.kernels:
        ways = matmul.kernels.backward_weight_ways(dweight, dout, inp, scale)
    ways["direct"] = lambda: matmul.cublaslt.multiply(dweight, dout.T, inp, scale=scale)

    def transposed_first():
        a, b, rows = dout.T, inp, transposed[: min(C, OC)]
        if C <= OC:
            transpose(matmul.device, rows, inp, N, C)
            b = rows.T
        else:
            transpose(matmul.device, rows, dout, N, OC)
            a = rows
        matmul.cublaslt.multiply(dweight, a, b, scale=scale)

    if transposed is not None:
        ways["transposed"] = transposed_first
    matmul.run(f"backward_weight {N} {C} {OC}", ways, to=f" to {matmul.precision.grads}")


def transpose(device, out, inp, rows, columns):
    """out (columns, rows) = inp (rows, columns)^T."""
    side, threads = device.geometry.TRANSPOSE_SIDE, device.geometry.TRANSPOSE_THREADS
    device.launch("transpose", (blocks(columns, side), blocks(rows, side)), (threads,), out, inp, rows, columns)


def attention_forward(device, out, lse, inp, B, T, C, NH):
    """Causal attention: out (B,T,C) =, lse (B,NH,T) =; inp (B,T,3C)."""
    launch_attention(device, "attention_forward", (out, lse, inp), (inp,), out, B, T, C, NH)


def attention_backward(device, dinp, D, partials, dout, inp, out, lse, B, T, C, NH):
    """dinp (B,T,3C) =; partials (B * tiles, 3C) =, for column_sums: of dinp; D (B,NH,T): scratch; dout, out (B,T,C)."""
    launch_attention(device, "attention_backward_dquery", (dinp, D, partials, dout, inp, out, lse), (inp, dout, out),
                     dinp, B, T, C, NH)
    launch_attention(device, "attention_backward_dkv", (dinp, partials, dout, inp, lse, D), (inp, dout),
                     dinp, B, T, C, NH)


def launch_attention(device, name, arguments, reads, write, B, T, C, NH):
    """One block for each tile of rows of each head. On Hopper in bfloat16, TMA copies `reads` and `write`, and the
    kernel is persistent: one block for each multiprocessor, which takes one tile after the other. In the
    backward pass, few tiles take less time with one block for each."""
    g, forward, extra = device.geometry, name == "attention_forward", ()
    grid = NH, blocks(T, g.ATTENTION_FORWARD_ROWS if forward else g.ATTENTION_BACKWARD_ROWS), B
    if hasattr(g, "ATTENTION_READ_ROWS"):
        tiles, least = math.prod(grid), device.sm_count * (1 if forward else 8)
        grid = (device.sm_count if tiles >= least else tiles,)
        boxes = [(array, g.ATTENTION_READ_ROWS) for array in reads] + [(write, g.ATTENTION_WRITE_ROWS)]
        extra = B, *(device.tensor_map(array, rows, C // NH) for array, rows in boxes)
    device.launch(name, grid, (g.ATTENTION_THREADS,), *arguments, T, *extra)


def gelu_forward(device, out, inp, N, C):
    """out (N,C) = GELU(inp)."""
    device.launch("gelu_forward", (blocks(N * C, THREADS * pack(out)),), (THREADS,), out, inp, N)


def gelu_backward(device, dinp, partials, out, inp, dout, N, C):
    """dinp (N,C) = dout * gelu'(inp), dinp may be dout; partials (blocks, C) =, for column_sums: of dinp; out (N,C) =
    GELU(inp), if not None."""
    threads, row_groups = device.geometry.GELU_COLUMN_THREADS, device.geometry.GELU_ROW_GROUPS
    grid = blocks(C, threads * pack(dinp)), partials.shape[0]
    device.launch("gelu_backward", grid, (threads, row_groups), dinp, partials, out, inp, dout, N)


JOB = np.dtype([("partials", "u8"), ("out", "u8", 3), ("width", "i4"), ("rows", "i4"), ("columns", "i4"),
                ("padding", "i4")])  # struct Job of column_sums.cu


def column_sums(device, partials):
    """For each (sums (rows, columns), (out, ...)) of `partials`: out = the sums over their rows; one out, or three for
    the thirds of the columns, which may be None. One launch for all."""
    jobs = np.zeros(len(partials), JOB)
    for job, (sums, outs) in zip(jobs, partials):
        job["rows"], job["columns"] = sums.shape
        job["partials"], job["width"] = sums.data.ptr, sums.shape[1] // len(outs)
        job["out"][: len(outs)] = [0 if out is None else out.data.ptr for out in outs]
    grid = blocks(int(jobs["columns"].max()), device.geometry.COLUMN_SUMS_COLUMNS), len(jobs)
    device.launch("column_sums", grid, (device.geometry.COLUMN_SUMS_THREADS,), device.upload(jobs))


def classifier(device, losses, logits, targets, dloss, write_gradient, B, T):
    """losses (B,T) = cross entropy of the logits (B,T,Vp), which with write_gradient become their gradient times dloss;
    targets (B,T) int32."""
    rows = device.geometry.CLASSIFIER_ROWS_ON_CHIP
    grid = min(rows * device.sm_count, B * T) if rows else B * T
    device.launch("classifier", (grid,), (device.geometry.CLASSIFIER_THREADS,), losses, logits, targets, float(dloss),
                  int(write_gradient), B * T)


def loss_mean(device, loss, losses, scale, N):
    """loss (1,) = the sum of losses (N,) times scale."""
    device.launch("loss_mean", (1,), (device.geometry.UPDATE_LOSS_THREADS,), loss, losses, scale, N)


# ----------------------------------------------------------------------------------------------------------------------
# model


class GPT2:
    """The architecture: what a forward and a backward pass compute, on buffers that a Trainer allocates. Smaller
    batches and shorter sequences use the start of the same buffers."""

    parameter_table = staticmethod(parameter_table)

    @staticmethod
    def tables(config, settings, B, T, sm_count, geometry):
        """What a pass over (B, T) tokens needs beside the parameters: {what for: {phase: table}}; the tables of one
        entry share their memory."""
        precision, recompute = settings.precision, settings.recompute
        phases = phase_tables(config, B, T, precision, recompute, sm_count, geometry)
        return {
            "activations": {"activations": activation_table(config, B, T, precision, recompute)},
            "logits, and in other phases scratch": phases,
            "gradients between layers": {"gradients": gradient_table(config, B, T, precision)},
        }

    def __init__(self, config, settings, matmul, params, grads, buffers):
        """params, grads (None: there is no backward pass): Tensors on the GPU; buffers: bytes for each entry of
        `tables`."""
        self.config, self.settings = config, settings
        self.device, self.matmul = matmul.device, matmul
        self.params, self.grads, self.buffers = params, grads, buffers
        self.param_layers = [layer(params, l) for l in range(config.L)]
        self.grad_layers = [layer(grads, l) for l in range(config.L)] if grads else None
        self.shapes = {}

    def activations(self, B, T):
        """Views of all buffers for batches of (B, T), made once: rows by name, and each layer's rows as the forward
        pass (`layers`) and the backward pass (`backward_layers`) see them."""
        if (B, T) in self.shapes:
            return self.shapes[B, T]
        phases = {}
        tables = self.tables(self.config, self.settings, B, T, self.device.sm_count, self.device.geometry)
        for what, group in tables.items():
            phases |= {phase: views(table, self.buffers[what], ALIGN) for phase, table in group.items()}
        acts = SimpleNamespace(B=B, T=T)
        for tensors in phases.values():
            vars(acts).update({name: getattr(tensors, name) for name in tensors.table})
        acts.layers, acts.backward_layers = [], []
        for l in range(self.config.L):
            for phase, layers in (("forward", acts.layers), ("backward", acts.backward_layers)):
                kept, within = layer(phases["activations"], l), layer(phases[phase], l)
                # a recomputed tensor has one buffer for all layers, in each phase its own
                recomputed = {name: getattr(phases[phase], name) for name in RECOMPUTED[self.settings.recompute]}
                layers.append(SimpleNamespace(**vars(kept), **vars(within), **recomputed))
        self.shapes[B, T] = acts
        return acts

    def trunk(self, acts, inputs, layer_begins=None):
        """Token ids (B, T) on the GPU -> acts.lnf (B, T, C): all but the classifier. layer_begins(l): called before the
        first launch that reads layer l's matrices."""
        device, matmul, params, branch = self.device, self.matmul, self.params, acts.branch
        B, T, L, C, NH = acts.B, acts.T, self.config.L, self.config.C, self.config.NH
        N = B * T

        encoder_forward(device, acts.encoded, inputs, params.wte, params.wpe, B, T, C)
        for l in range(L):
            p, a = self.param_layers[l], acts.layers[l]
            if layer_begins:
                layer_begins(l)
            if l == 0:
                residual = acts.encoded
                layernorm_forward(device, a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, B, T, C)
            else:  # adds fcproj of the layer below, which is still in `branch`
                below = acts.layers[l - 1]
                residual = below.residual3
                residual_layernorm_forward(device, residual, a.ln1, a.ln1_mean, a.ln1_rstd, below.residual2, branch,
                                           p.ln1w, p.ln1b, B, T, C)
            matmul_forward(matmul, a.qkv, a.ln1, p.qkvw, p.qkvb, N, C, 3 * C)
            attention_forward(device, a.atty, a.lse, a.qkv, B, T, C, NH)
            matmul_forward(matmul, branch, a.atty, p.attprojw, p.attprojb, N, C, C)
            residual_layernorm_forward(device, a.residual2, a.ln2, a.ln2_mean, a.ln2_rstd, residual, branch,
                                       p.ln2w, p.ln2b, B, T, C)
            matmul_gelu_forward(matmul, a.fch, a.fch_gelu, a.ln2, p.fcw, p.fcb, N, C, 4 * C)
            matmul_forward(matmul, branch, a.fch_gelu, p.fcprojw, p.fcprojb, N, 4 * C, C)
        top = acts.layers[-1]
        residual_layernorm_forward(device, top.residual3, acts.lnf, acts.lnf_mean, acts.lnf_rstd, top.residual2, branch,
                                   params.lnfw, params.lnfb, B, T, C)

    def classify(self, acts, targets, loss, scale, train):
        """loss (1,) = the sum of acts.losses times scale; with `train`, the logits are overwritten with their gradient.
        Returns an event for the loss, which the side stream adds up."""
        N, C, Vp = acts.B * acts.T, self.config.C, self.config.Vp
        matmul_forward(self.matmul, acts.logits, acts.lnf, self.params.wte, None, N, C, Vp)
        classifier(self.device, acts.losses, acts.logits, targets, nearest_power_of_2(scale), train, acts.B, acts.T)
        with self.device.on_side_stream() as loss_done:
            loss_mean(self.device, loss, acts.losses, scale, N)
        return loss_done

    def backward(self, acts, order, piece_begins, piece_tokens, scale, weight_done=None):
        """self.grads = the gradients of the last batch's loss; `classify` left dlogits in place of the logits. order,
        piece_begins, piece_tokens: see sort_tokens; scale: the one that `classify` was given. weight_done(name, l,
        event): called after the launch of the matmul that computes layer l's gradient of matrix `name`, which is
        complete at the event; from the last layer to the first, within a layer from the table's last matrix to its
        first."""
        device, matmul, params, grads, config = self.device, self.matmul, self.params, self.grads, self.config
        B, T, C, Vp, NH = acts.B, acts.T, config.C, config.Vp, config.NH
        N, recomputed = B * T, RECOMPUTED[self.settings.recompute]
        dresidual, dbranch, transposed = acts.dresidual, acts.dbranch, getattr(acts, "transposed", None)
        partials = []  # (partial sums, the gradients that column_sums makes of them): of biases and layernorms

        def weight_gradient(name, l, dout, inp, OC, C):
            """On the side stream; returns an event, after which dout and inp may be overwritten."""
            with device.on_side_stream() as done:
                matmul_backward_weight(matmul, getattr(grads, name)[l], dout, inp, transposed, N, C, OC)
            if weight_done:
                weight_done(name, l, done)
            return done

        # logits = lnf @ wte^T. dlogits carry nearest_power_of_2(scale); the matmuls that read them multiply by
        # `factor`, both on the main stream, because what follows overwrites dlogits.
        dlogits, factor = acts.logits, scale / nearest_power_of_2(scale)
        matmul_backward_inp(matmul, dbranch, dlogits, params.wte, N, C, Vp, scale=factor)
        matmul_backward_weight(matmul, grads.wte, dlogits, acts.lnf, transposed, N, C, Vp, scale=factor)
        layernorm_backward(device, dresidual, acts.lnf_partials, dbranch, acts.layers[-1].residual3, params.lnfw,
                           acts.lnf_mean, acts.lnf_rstd, False, B, T, C)
        # dresidual is the gradient of fcproj's output, too: its column sums are the gradient of fcprojb
        partials.append((acts.lnf_partials, (grads.lnfw, grads.lnfb, self.grad_layers[-1].fcprojb)))
        # Events after which what a weight gradient has read may be overwritten: dfch_read: dfch, a recomputed ln2;
        # dresidual_read: dresidual, a recomputed fch_gelu; dqkv_read: dqkv, a recomputed ln1.
        dfch_read = dqkv_read = None
        for l in reversed(range(config.L)):
            p, a, g = self.param_layers[l], acts.backward_layers[l], self.grad_layers[l]
            residual = acts.encoded if l == 0 else acts.layers[l - 1].residual3
            fcprojb_below = self.grad_layers[l - 1].fcprojb if l > 0 else None

            device.wait(dfch_read)
            gelu = a.fch_gelu if "fch_gelu" in recomputed else None
            matmul_gelu_backward_inp(matmul, acts.dfch, a.gelu_partials, gelu, dresidual, p.fcprojw, a.fch, N, 4 * C, C)
            partials.append((a.gelu_partials, (g.fcb,)))
            dresidual_read = weight_gradient("fcprojw", l, dresidual, a.fch_gelu, C, 4 * C)
            if "ln2" in recomputed:
                layernorm_forward(device, a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, B, T, C)
            dfch_read = weight_gradient("fcw", l, acts.dfch, a.ln2, 4 * C, C)
            matmul_backward_inp(matmul, dbranch, acts.dfch, p.fcw, N, C, 4 * C)
            device.wait(dresidual_read)
            layernorm_backward(device, dresidual, a.ln2_partials, dbranch, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd,
                               True, B, T, C)
            partials.append((a.ln2_partials, (g.ln2w, g.ln2b, g.attprojb)))
            dresidual_read = weight_gradient("attprojw", l, dresidual, a.atty, C, C)
            matmul_backward_inp(matmul, dbranch, dresidual, p.attprojw, N, C, C)
            device.wait(dqkv_read)
            attention_backward(device, acts.dqkv, acts.D, a.attention_partials, dbranch, a.qkv, a.atty, a.lse,
                               B, T, C, NH)
            partials.append((a.attention_partials, (g.qkvb,)))
            if "ln1" in recomputed:
                layernorm_forward(device, a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, B, T, C)
            dqkv_read = weight_gradient("qkvw", l, acts.dqkv, a.ln1, 3 * C, C)
            matmul_backward_inp(matmul, dbranch, acts.dqkv, p.qkvw, N, C, 3 * C)
            device.wait(dresidual_read)
            layernorm_backward(device, dresidual, a.ln1_partials, dbranch, residual, p.ln1w, a.ln1_mean, a.ln1_rstd,
                               True, B, T, C)
            partials.append((a.ln1_partials, (g.ln1w, g.ln1b, fcprojb_below)))
        column_sums(device, partials)
        encoder_backward(device, grads.wte, grads.wpe, acts.wte_partials, dresidual, order, piece_begins, piece_tokens,
                         B, T, C)
        device.wait(dqkv_read)  # the last work of the side stream: all of it is done


def nearest_power_of_2(x):
    """x rounded to a power of 2: what dlogits carry instead of the scale x. A target's dlogit is about -x: rounded to
    bfloat16, it would have the same error in every row (0.2 percent for 1/51)."""
    return 2.0 ** round(math.log2(x))


# ----------------------------------------------------------------------------------------------------------------------
# text: forward passes over T new positions of each of B sequences, with a KV cache

CONTROL = np.dtype([("position", "i4"), ("step", "i4"), ("arrived", "i4"), ("top_k", "i4"), ("temperature", "f4"),
                    ("top_p", "f4")])  # struct Control of decode.cuh
PROMPT_ROWS = 64  # tokens of prompts in one pass


def decode_table(config, B, T, dtype, geometry):
    """name -> Row for what passes over B sequences of up to T positions need beside the cache."""
    N, C, NH, g = max(B, PROMPT_ROWS), config.C, config.NH, geometry
    return {
        "residual": Row((2, N, C)),  # one is made from the other and `branches`
        "branches": Row((4 * g.DECODE_PIECES, N, C)),  # of attproj, fcproj: pieces of each C of the inner dimension
        "zeros": Row((C,), dtype),  # in place of a bias
        "normed": Row((N, C), dtype),
        "query": Row((N, C), dtype),
        "atty": Row((N, C), dtype),
        "parts": Row((N, NH, blocks(T, g.DECODE_SPLIT), C // NH + 2)),  # of attention, for each split of the positions
        "fch_gelu": Row((N, 4 * C), dtype),
        "logits": Row((B, config.Vp)),
        "tiles": Row((B, config.Vp // g.DECODE_ROWS, 3)),  # struct Tile of decode.cuh
        "tokens": Row((N,), "int32"),
        "randoms": Row((B,), "uint64"),
        "control": Row((CONTROL.itemsize,), "uint8"),
        "arrived": Row((N, NH), "int32"),  # blocks of attention
    }


class Normed(NamedTuple):
    """A matmul's input: the layernorm of the new residual stream, inp + branch_bias + parts of branches (.,N,C).
    Kernels take the fields as arguments, in this order."""

    residual: object
    inp: object
    branches: object
    branch_bias: object
    normed: object  # made by decode_layernorm; None: the matmul does it
    weight: object
    bias: object


def decode_embed(device, residual, branches, tokens, wte, wpe, control, B, T, C):
    """residual (B,T,C) = wte[tokens] + wpe, branches (4,B,T,C) = 0. tokens (B,T) int32; the first position is
    control's, here and below."""
    device.launch("decode_embed", (B * T,), (THREADS,), residual, branches, tokens, wte, wpe, control, T, early=True)


def decode_layernorm(device, x, count, N, pieces=1):
    """x.residual (N,C) = x.inp (N,C) + x.branch_bias (C,) + `count` parts of x.branches (.,N,C), each the sum of
    `pieces`; x.normed (N,C) = its layernorm. Returns the Normed for the matmul that follows, which does all this itself
    where N is small."""
    if N <= device.geometry.DECODE_FEW:
        return x._replace(normed=None)
    device.launch("decode_layernorm" + "_many" * (pieces > 1), (N,), (WARP * device.geometry.DECODE_WARPS,), x.normed,
                  x.residual, x.inp, x.branches, x.branch_bias, x.weight, x.bias, count, early=True)
    return x


def decode_qkv(device, query, keys, values, x, weight, bias, control, B, T, C):
    """query (B,T,C) = and, in keys and values (B,NH,maxT,HS), their positions =: x @ weight (3C,C)^T + bias."""
    if decode_is_many(device, B * T):
        arguments = query, keys, values, x.normed, weight, bias, control, keys.shape[2], T
        return decode_many(device, "qkv", arguments, B * T, 3 * C)
    arguments = query, keys, values, *x, weight, bias, control, keys.shape[2], T
    decode_matmul(device, "decode_qkv", arguments, B * T, 3 * C, normalizes=x.normed is None)


def decode_attention(device, atty, parts, arrived, query, keys, values, control, B, T, C, NH):
    """atty (B,T,C) = attention of query (B,T,C) to all positions so far. arrived: 0 before and after."""
    splits = min(parts.shape[2], blocks(2 * device.sm_count, B * T * NH))
    name = "decode_attention" + "_many" * (B * T > 32)  # H200, 12 heads: at 32 rows, both take as long
    device.launch(name, (NH, splits, B * T), (WARP * device.geometry.DECODE_WARPS,), atty, parts, arrived, query, keys,
                  values, control, keys.shape[2], T, early=True)


def decode_project(device, branches, inp, weight, B, T, C, IC):
    """branches (IC/C,B,T,C) = inp (B,T,IC) @ weight (C,IC)^T, the parts of the sum that each C of IC makes; for many
    rows (IC/C,pieces,B,T,C)."""
    if decode_is_many(device, B * T):
        name = "attproj" if IC == C else "fcproj"
        pieces = IC // C * device.geometry.DECODE_PIECES
        return decode_many(device, name, (branches, inp, weight), B * T, C, pieces)
    decode_matmul(device, "decode_project", (branches, inp, weight), B * T, C, parts=IC // C)


def decode_fc(device, fch_gelu, x, weight, bias, B, T, C):
    """fch_gelu (B,T,4C) = GELU(x @ weight (4C,C)^T + bias)."""
    if decode_is_many(device, B * T):
        return decode_many(device, "fc", (fch_gelu, x.normed, weight, bias), B * T, 4 * C)
    decode_matmul(device, "decode_fc", (fch_gelu, *x, weight, bias), B * T, 4 * C, normalizes=x.normed is None)


def decode_logits(device, logits, tiles, x, wte, control, B, Vp):
    """logits (B,Vp) = x @ wte (Vp,C)^T; tiles (B,Vp/DECODE_ROWS,3) =, for decode_sample."""
    g = device.geometry
    if not decode_is_many(device, B) or not g.DECODE_LOGITS_STAGES:
        arguments = logits, tiles, *x, wte, control
        return decode_matmul(device, "decode_logits", arguments, B, Vp, normalizes=x.normed is None)
    grid = min(device.sm_count, Vp // g.DECODE_LOGITS_COLUMNS), blocks(B, 16 * g.DECODE_LOGITS_TILES)
    device.launch("decode_logits_many", grid, (WARP * g.DECODE_WARPS,), logits, tiles, x.normed, wte, control, B,
                  shared=g.DECODE_LOGITS_SHARED, early=True)


def decode_matmul(device, name, arguments, N, OC, parts=1, normalizes=False):
    """Launch a matmul of N rows with a weight (OC, parts * C). normalizes: it does the layernorm, too."""
    g = device.geometry
    shared = {stages: decode_shared(g, stages, N, normalizes) for stages in range(1, g.DECODE_STAGES + 1)}
    resident = {stages: min(g.DECODE_BLOCKS, g.DECODE_SHARED // size) for stages, size in shared.items()}
    tiles, groups = OC // g.DECODE_ROWS, blocks(N, g.DECODE_X_ROWS)
    grid = min(tiles, max(1, device.sm_count * resident[1] // (groups * parts)))
    if groups > 1:
        grid = blocks(tiles, blocks(tiles, grid))  # equally many tiles each: fewer blocks, which read x less often
    stages = max(n for n in shared if n == 1 or n <= blocks(tiles, grid) and resident[n] == resident[1])
    device.launch(name, (groups, grid, parts), (WARP * g.DECODE_WARPS,), *arguments, N, stages, shared=shared[stages],
                  early=True)


def decode_is_many(device, N):
    """Whether N rows of x are so many that the matmuls have other kernels."""
    return N > device.geometry.DECODE_X_ROWS


def decode_many(device, name, arguments, N, OC, pieces=1):
    """Launch the matmul `name` for many rows: N, with a weight (OC,.); pieces: of the whole inner dimension."""
    g = device.geometry
    tiles, columns, shared = (getattr(g, f"DECODE_{name.upper()}_{what}") for what in ("TILES", "COLUMNS", "SHARED"))
    device.launch(f"decode_{name}_many", (blocks(N, 16 * tiles), blocks(OC, columns), pieces),
                  (WARP * g.DECODE_WARPS,), *arguments, N, shared=shared, early=True)


def decode_sample(device, tokens, randoms, control, drawn, logprobs, logits, tiles, B):
    """tokens (B,) = the next ones, drawn with randoms (B,) and control's Choice; they also go, with their
    log-probabilities, to the host: the step's row of drawn and logprobs (ring,B). control: position and step += 1."""
    device.launch("decode_sample", (B,), (device.geometry.DECODE_SAMPLE_THREADS,), tokens, randoms, control,
                  pointer(drawn), pointer(logprobs), logits, tiles, len(drawn), early=True)


class Decoder:
    """GPT-2 for text on the GPU, as train_gpt2.py's in NumPy. A step, from a token to the next one, is one CUDA graph;
    the host reads its tokens while the next steps run."""

    AHEAD = 3  # steps in flight while the host waits for one

    def __init__(self, device, config, params, precision, B, T):
        """Allocate for B sequences of at most T positions. params: on the GPU; device: with decode_files' kernels."""
        self.device, self.config, self.params, self.B, self.T = device, config, params, B, T
        for name, function in device.functions.items():
            if name.startswith("decode"):  # the same for all: otherwise two kernels cannot share a multiprocessor
                function.preferred_shared_memory_carveout = 100
        with device.stream:
            self.cache, self.acts = (views(table, cp.zeros(table_bytes(table, ALIGN), np.uint8), ALIGN)
                                     for table in self.tables(config, precision, B, T, device.geometry))
        self.layers = [(layer(params, l), layer(self.cache, l)) for l in range(config.L)]
        ring = self.AHEAD + 1
        self.drawn = pinned_array(4 * ring * B).view(np.int32).reshape(ring, B)
        self.logprobs = pinned_array(4 * ring * B).view(np.float32).reshape(ring, B)
        self.done = [cp.cuda.Event(disable_timing=True) for _ in range(ring)]
        self.graph = None

    @staticmethod
    def tables(config, precision, B, T, geometry):
        """What is allocated: the KV cache, and what the passes need."""
        return cache_table(config, B, T, precision.dtype), decode_table(config, B, T, precision.dtype, geometry)

    def draw(self, prompt, count, randoms, choice, want_logprobs=True):
        """llmc/sampler.py's draw, on the GPU; the log-probabilities come in any case."""
        first, end = prompt.shape[1], prompt.shape[1] + count
        tokens = np.empty((self.B, end), np.int32)
        tokens[:, :first] = prompt
        self.set(step=0, top_k=min(choice.top_k, self.config.V), temperature=choice.temperature, top_p=choice.top_p)
        with self.device.stream:
            copy_to_gpu(self.acts.randoms, np.array([random.state for random in randoms], np.uint64))
        begin, begun = 0, first  # where the window begins; tokens drawn, or in flight
        for t in range(first, end):
            while begun < end and begun <= t + self.AHEAD and (begun == t or begun - begin <= self.T):
                if begun - begin > self.T:
                    begin = begun - max(1, self.T // 2)
                    self.read(tokens[:, begin:begun])
                elif begun == first:
                    self.read(tokens[:1, :first])
                self.step((begun - first) % len(self.done))
                begun += 1
            turn = (t - first) % len(self.done)
            self.done[turn].synchronize()
            tokens[:, t] = self.drawn[turn]
            for random in randoms:
                random.u32()  # as the GPU did
            yield tokens[:, t], self.logprobs[turn].copy()

    def set(self, **values):
        """Set fields of `control`."""
        control = np.zeros(1, CONTROL)
        with self.device.stream:
            for name, value in values.items():
                control[name] = value
                kind, at = CONTROL.fields[name]
                copy_to_gpu(self.acts.control[at : at + kind.itemsize], control[name])

    def read(self, tokens):
        """Prefill: all sequences continue from tokens (B, P), or (1, P) where they have the same ones. The last token
        is left for the next step."""
        B, last = len(tokens), tokens.shape[1] - 1
        each = max(1, PROMPT_ROWS // B)
        for begin in range(0, last, each):
            piece = np.ascontiguousarray(tokens[:, begin : min(begin + each, last)])
            self.set(position=begin)
            with self.device.stream:
                copy_to_gpu(self.acts.tokens[: piece.size], piece)
            self.trunk(*piece.shape)
        if B < self.B and last:
            for tensor in (self.cache.keys, self.cache.values):
                share_first(tensor, self.device.stream)
        self.set(position=last)
        with self.device.stream:
            copy_to_gpu(self.acts.tokens[: self.B], np.ascontiguousarray(np.broadcast_to(tokens[:, -1], self.B)))

    def step(self, turn):
        """Launch the step that draws each sequence's next token, for the host in row `turn`."""
        stream = self.device.stream
        if self.graph:
            self.graph.launch(stream)
        else:
            self.launch_step()
        self.done[turn].record(stream)
        if not self.graph:  # after the first step, which has loaded all kernels
            stream.begin_capture()
            self.launch_step()
            self.graph = stream.end_capture()

    def launch_step(self):
        device, params, acts = self.device, self.params, self.acts
        x = self.trunk(self.B, 1)
        decode_logits(device, acts.logits, acts.tiles, x, params.wte, acts.control, self.B, self.config.Vp)
        decode_sample(device, acts.tokens, acts.randoms, acts.control, self.drawn, self.logprobs, acts.logits,
                      acts.tiles, self.B)

    def trunk(self, B, T):
        """acts.tokens (B, T) -> the Normed for the classifier."""
        device, params, acts, C, NH = self.device, self.params, self.acts, self.config.C, self.config.NH
        inp, residual = acts.residual
        pieces = 1  # of each part of `branches`: of decode_embed's; later, of decode_project's

        def normed(weight, bias, branch_bias, count):
            nonlocal inp, residual
            x = Normed(residual, inp, acts.branches, branch_bias, acts.normed, weight, bias)
            inp, residual = residual, inp
            return decode_layernorm(device, x, count, B * T, pieces)

        decode_embed(device, inp, acts.branches, acts.tokens, params.wte, params.wpe, acts.control, B, T, C)
        fcprojb_below = acts.zeros
        for p, cache in self.layers:
            x = normed(p.ln1w, p.ln1b, fcprojb_below, 4)
            decode_qkv(device, acts.query, cache.keys, cache.values, x, p.qkvw, p.qkvb, acts.control, B, T, C)
            decode_attention(device, acts.atty, acts.parts, acts.arrived, acts.query, cache.keys, cache.values,
                             acts.control, B, T, C, NH)
            decode_project(device, acts.branches, acts.atty, p.attprojw, B, T, C, C)
            pieces = device.geometry.DECODE_PIECES if decode_is_many(device, B * T) else 1
            x = normed(p.ln2w, p.ln2b, p.attprojb, 1)
            decode_fc(device, acts.fch_gelu, x, p.fcw, p.fcb, B, T, C)
            decode_project(device, acts.branches, acts.fch_gelu, p.fcprojw, B, T, C, 4 * C)
            fcprojb_below = p.fcprojb
        return normed(params.lnfw, params.lnfb, fcprojb_below, 4)


GPT2.Decoder = Decoder  # what a Trainer samples with


def share_first(tensor, stream):
    """tensor (L,B,...) [:, 1:] = tensor[:, :1]."""
    row, pitch = tensor[0, 0].nbytes, tensor[0].nbytes
    for b in range(1, tensor.shape[1]):
        cp.cuda.runtime.memcpy2DAsync(tensor[0, b].data.ptr, pitch, tensor.data.ptr, pitch, row, len(tensor),
                                      cp.cuda.runtime.memcpyDeviceToDevice, stream.ptr)


# ----------------------------------------------------------------------------------------------------------------------
# a GPT-2 with its kernels on this GPU: to train, to evaluate, for text

STATIC_SHARED = 9 << 10  # bytes of shared memory that attention's kernels declare themselves, at most


def open_device(gpu, config, precision, cache, matmul="auto", text=False):
    """(Device with this model's kernels, Matmul). matmul "auto": only Hopper's own kernels are worth timing beside
    cuBLASLt. text: with a Decoder's kernels, too. Raises UserError for a model that the kernels, or this GPU, have no
    room for."""
    check_sizes(config)
    if matmul == "auto" and not hopper_matmul(precision, gpu.arch):
        matmul = "cublaslt"
    files = kernel_files(config, precision, gpu.arch, matmul)
    needed = max(files["attention"].shared.values()) + STATIC_SHARED
    if needed > gpu.shared:
        raise UserError(f"heads of {config.C // config.NH} channels need {needed} bytes of shared memory in a block,"
                        f" {gpu.name} has {gpu.shared}: train this model with: python train_gpt2.py")
    geometry = launch_geometry(config, precision, gpu.arch, gpu.shared if text else None)
    files = [*files.values(), *(decode_files(config, precision, geometry) if text else ())]
    device = Device(gpu, cache, files, geometry)
    return device, Matmul(device, cache, precision, ("kernels", "cublaslt") if matmul == "auto" else (matmul,))


def open_trainer(gpu, config, params, settings, ranks=ALONE):
    """A Trainer of this model on this GPU; `settings` are settled. The first rank draws the samples."""
    text = settings.sample_every > 0 and ranks.is_first
    cache = Cache(speaks=ranks.local_rank == 0)
    device, matmul = open_device(gpu, config, settings.precision, cache, settings.matmul, text)
    print(f"kernels: {device.compiled} compiled, {device.cached} from the cache")
    return Trainer(GPT2, config, settings, matmul, params, ranks)


def open_evaluator(gpu, config, params):
    """An Evaluator of this GPT-2 on this GPU."""
    settings = settle(CudaSettings(dtype="float32"), gpu.arch)
    device, matmul = open_device(gpu, config, settings.precision, Cache(), settings.matmul)
    return Evaluator(GPT2, config, settings, matmul, params)


def open_decoder(gpu, config, params, B, T, dtype="auto"):
    """A Decoder on this GPU for a model on the host. Raises UserError for a model that the kernels, or this GPU, have
    no room for, MemoryError when there is too little memory."""
    check_sizes(config)
    precision = settle(CudaSettings(dtype=dtype), gpu.arch).precision._replace(tf32=0)
    geometry = launch_geometry(config, precision, gpu.arch, gpu.shared)
    update = kernel_files(config, precision, gpu.arch, "cublaslt")["update"]
    device = Device(gpu, Cache(), [update, *decode_files(config, precision, geometry)], geometry)
    with device.stream:
        exact = allocate(params.table, cp)
        copy_to_gpu(exact.buffer, params.buffer)
        on_gpu = exact
        if precision.bf16:
            on_gpu = allocate(parameter_table(config, precision.dtype), cp)
            round_weights(device, flat(on_gpu), flat(exact))
    return Decoder(device, config, on_gpu, precision, B, T)


# ----------------------------------------------------------------------------------------------------------------------
# main


def describe(settings, config, params, gpu, train_loader, val_loader, model_path):
    """The table that a run with --lines llmc begins with: groups of (name, value)."""
    rounded = settings.precision.bf16 and not is_bfloat16(params)
    run = [
        ("training data", settings.data),
        ("output", settings.output or "none"),
        ("batch size B", settings.B),
        ("sequence length T", settings.T),
        ("tokens in an update", settings.update_tokens),
        ("learning rate", f"{settings.learning_rate:e}"),
        ("updates", settings.steps),
        ("validate every", settings.val_every),
        ("validation batches", min(settings.val_batches, val_loader.whole_batches) if val_loader else 0),
        ("sample every", settings.sample_every),
        ("tokens in a sample", settings.sample_tokens),
    ]
    device = [
        ("device", describe_gpu(gpu, settings.gpus)),
        ("precision", describe_precision(settings)),
    ]
    model = [
        ("model", f"{model_path}{', rounded from float32 to bfloat16' if rounded else ''}"),
        ("max_seq_len", config.maxT),
        ("vocab_size", config.V),
        ("padded_vocab_size", config.Vp),
        ("num_layers", config.L),
        ("num_heads", config.NH),
        ("channels", config.C),
        ("num_parameters", count_parameters(config, params)),
    ]
    return run, device, model, [("train batches", train_loader.num_batches),
                                ("val batches", val_loader.num_batches if val_loader else 0)]


def describe_gpu(gpu, count=1):
    driver = cp.cuda.runtime.driverGetVersion()
    return f"{f'{count} x ' if count > 1 else ''}{gpu.name}, {gpu.arch}, CUDA {driver // 1000}.{driver % 1000 // 10}"


def is_bfloat16(params):
    """Whether rounding to bfloat16 changes no weight."""
    return not any((piece.view(np.uint32) & 0xFFFF).any() for piece in chunks(flat(params)))


def resolve_steps(settings, train_loader, first_step):
    """-x 0 means one epoch; raises UserError when a checkpoint is beyond the last step."""
    if settings.steps == 0:
        settings.steps = max(1, train_loader.batches_per_epoch // settings.micro_steps)
    check_steps(settings, first_step)


def main():
    return on_ranks(CudaSettings, "Train GPT-2 on GPUs, with CuPy and CUDA kernels.", run_locked)


def run_locked(settings, ranks):
    with locked(settings.output if ranks.is_first else "", settings.output_dir):
        return run(settings, ranks)


def run(settings, ranks):
    """From the settings to the end of the training; returns the exit status."""
    first_step = ranks.gather(find_checkpoint(settings) if ranks.is_first else None)[0]
    gpu = open_gpu(settings.arch, ranks.local_rank)
    tokenizer = load_tokenizer(settings)
    given, settings = settings, settle(settings, gpu.arch)
    loading = time.perf_counter()
    config, params, start = read_start(settings, first_step, tokenizer, parameter_table, random_model)
    loading = time.perf_counter() - loading
    train_loader, val_loader = open_data(settings, config.V, ranks.rank, ranks.size)
    examples = load_hellaswag(settings, config)
    check_alike(ranks, gpu, settings, config, params, train_loader, val_loader)
    if ranks.is_first:
        keep_tokenizer(settings, tokenizer, first_step)
    random = Random()

    print_changed_settings(given)
    resolve_steps(settings, train_loader, first_step)
    parameters = count_parameters(config, params)
    if settings.lines == "llmc":
        if settings.verbose:
            print_table([list(vars(settings).items())])
        print_table(describe(settings, config, params, gpu, train_loader, val_loader, start))
    else:
        print_start(settings, config, parameters, start, train_loader, val_loader,
                    f"{describe_gpu(gpu, ranks.size)}, {describe_precision(settings)}")
    trainer = open_trainer(gpu, config, params, settings, ranks)
    del params  # the host's copy, a model's size on each rank
    if first_step is not None:
        resume(trainer, first_step, train_loader, random)
    trainer.prepare()
    if ranks.is_first and not trainer.matmul.repeats():
        print("note: some matmul algorithms that the checkpoint records do not run here: what follows agrees up to"
              " rounding", file=sys.stderr)
    print(f"matmuls: {trainer.matmul.searched} shapes searched for the fastest algorithm, the others known")
    peak = peak_flops(gpu.name, settings.precision.matmul)
    peak = peak and ranks.size * peak
    with Console(settings, first_step or 0, flops_per_token(parameters, config, settings.T), peak) as console:
        status = train(trainer, train_loader, val_loader, examples, tokenizer, random, first_step or 0, loading,
                       console)
    trainer.close()
    return status


def sample(trainer, tokenizer, random, interruption):
    """Print a sample that the first rank draws; the others advance `random` as it does."""
    count = trainer.settings.sample_tokens - 1
    if trainer.ranks.is_first:
        begin = np.array([[end_of_text(tokenizer, trainer.config.V)]], np.int32)
        print_sample(interruption.watching(trainer.decoder.draw(begin, count, [random], Choice())), tokenizer)
    else:
        for _ in interruption.watching(range(count)):
            random.u32()


def train(trainer, train_loader, val_loader, examples, tokenizer, random, first_step, loading, console):
    """The training loop; returns the exit status. A step is: validate, sample, update, save; its line is printed while
    the next one runs, unless something else is due in between."""
    settings, ranks, directory = trainer.settings, trainer.ranks, trainer.settings.output_dir
    log = Log(settings if ranks.is_first else dataclasses.replace(settings, output=""), first_step)
    interruption = Interruption(ranks.largest, speaks=ranks.is_first)
    in_turns = functools.partial(ranks.starmap, check=interruption.check)
    console.start(interruption)
    running, times = None, []  # (step, number of begin_step) of the update whose line is still to be printed

    def finish():
        nonlocal running
        if running is None:
            return
        (step, number), running = running, None
        loss, norm, ms, outlier = trainer.end_step(number)
        if not math.isfinite(loss):
            raise UserError(f"step {step + 1}: the loss is {loss}; the last checkpoint, if any, is kept: {DIVERGED}")
        console.training(step, loss, ms / 1000, f"step {step + 1:4d}/{settings.steps}: train loss {loss:f} ({ms:f} ms,"
                         f" {settings.update_tokens / ms * 1000:.0f} tok/s)")
        if not times and (settings.verbose or settings.lines == "llmc"):
            seconds = time.perf_counter() - START - loading
            console.print(f"first step finished {seconds:.2f} s after the start, not counting {loading:.2f} s of"
                          " reading the model")
        times.append(ms)
        log.training(step, loss, learning_rate_at(settings, step), norm, ms / 1000)
        if outlier:
            console.skip(step + 1, outlier)

    def stop_after(done, signal):
        return stopped(settings, done, signal, ranks.has_launcher) if ranks.is_first else 128 + signal

    with Saver(trainer, train_loader, random, interruption) as saver:
        for step in range(first_step, settings.steps + 1):
            saver.check()
            last = step == settings.steps
            final = last and settings.final_reports
            validation = settings.val_every and (step % settings.val_every == 0 or final)
            sampling = settings.sample_every and step > 0 and (step % settings.sample_every == 0 or final)
            if validation or sampling or last:
                finish()
                trainer.complete_weights()
            before = random.state
            try:
                if validation:
                    evaluate(trainer.forward, trainer.losses, settings, val_loader, examples, step, console, log,
                             in_turns)
                if sampling:
                    console.wait_for(None)
                    sample(trainer, tokenizer, random, interruption)
            except Interrupted:  # the resumed run validates and samples at this step again
                random.state = before
                saver.wait()
                if directory and step not in (first_step, saver.saved):
                    saver.save(step)
                    saver.wait()
                return stop_after(step or None, interruption.signal)
            if last:
                break
            batches = [train_loader.next_batch() for _ in range(trainer.settings.own_micro_steps)]
            begun = step, trainer.begin_step(batches, learning_rate_at(settings, step))
            finish()
            running = begun

            done = step + 1
            due = done == settings.steps or settings.checkpoint_every and done % settings.checkpoint_every == 0
            stop = interruption.agreed()
            if stop or (directory and due):
                finish()
            if directory and (due or stop):
                console.wait_for("saving")
                saver.save(done)
            if stop:
                saver.wait()
                return stop_after(done, stop)
    console.end(f"total average iteration time: {sum(times) / len(times):f} ms" if times else None)
    return 0


if __name__ == "__main__":
    run_main(main)
