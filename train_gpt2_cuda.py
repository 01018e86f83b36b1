"""
GPT-2 training on a GPU: the loop of train_gpt2.py, with CUDA kernels of our own for the layers.

Chapters, tables of parameters, files, data loader and checkpoints are train_gpt2.py's. CuPy holds
the memory and launches; kernels/*.cu do the work, one file a layer, compiled at the first start for
the GPU and the model at hand; matmuls are our own or cuBLASLt's, by a rule. It needs an NVIDIA
driver and pip packages, no CUDA toolkit.

    python prepro_tinyshakespeare.py
    python export_weights.py
    python train_gpt2_cuda.py             # B=4, T=1024, one epoch, in bfloat16 where the GPU has it
    python train_gpt2_cuda.py --gpus 4    # a process for each GPU; torchrun, mpirun, srun work, too

A step is one CUDA graph, from the copy of the batch out of pinned memory to AdamW. The host prints
a step's loss while the next one runs. Results are bit-identical from run to run, across a resume,
and on 1, 2 and 4 GPUs: every sum has a fixed order, and no floats are added by atomic operations.

This page has settings, tables of tensors, launches, the optimizer, the model and main. What
surrounds a step (buffers, batches, reports) is in llmc/gpu/trainer.py, what happens between steps
in llmc/loop.py, text in llmc/gpu/decoder.py, 8-bit matmuls in llmc/gpu/fp8.py, messages between
GPUs in llmc/gpu/several/. Llama 3 and the speed run (QK-norm, squared ReLU, Muon) are subclasses:
train_llama3_cuda.py, train_speedrun_cuda.py."""

import llmc  # noqa: F401  (before NumPy: it sets what OpenBLAS reads when NumPy loads it)

import dataclasses
import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

import train_gpt2
from llmc.errors import UserError, run_main
from llmc.files import locked
from llmc.gpu.attention import (attention_backward_in_one_pass, attention_scratch,
                                launch_attention)
from llmc.gpu.batch import sorted_tokens
from llmc.gpu.device import copy_to_gpu, cp, describe_gpu, open_gpu, pointer
from llmc.gpu.geometry import (ATTENTION_ROWS, BLOCK_THREADS, ENCODER_PIECE, MATMUL_ROWS,
                               ROW_GROUPS, WARP, Has, blocks, hopper_matmul, pack)
from llmc.gpu.launcher import on_ranks
from llmc.gpu.matmul import ALIGN, Quantized
from llmc.gpu.messages import REST
from llmc.gpu.precision import Precision, describe_precision, has_bfloat16, peak_rate, resolve_dtype
from llmc.gpu.saver import TrainerSaver
from llmc.gpu.shares import CHUNKS
from llmc.gpu.trainer import open_trainer
from llmc.loop import Loop
from llmc.outliers import RECENT
from llmc.schedulers import learning_rate_at
from llmc.settings import Settings, option, with_default
from llmc.tensors import Row, layer, views
from train_gpt2 import SIZES, parameter_table, random_model

# --------------------------------------------------------------------------------------------------
# settings: those of train_gpt2.py, some with other defaults, and what only a GPU has


@dataclass
class CudaSettings(Settings):
    """What one training run on a GPU does. The defaults are those of llm.c's CUDA program of April
    2024, but for the dtype and the learning rate."""

    T: int = with_default(Settings, "T", 1024)
    steps: int = with_default(Settings, "steps", 0, "number of updates (0: one epoch)")
    val_every: int = with_default(Settings, "val_every", 20)
    val_batches: int = with_default(Settings, "val_batches", 20)
    final_reports: int = with_default(Settings, "final_reports", 1)

    dtype: str = option("auto", group="gpu", choices=("auto", "bfloat16", "fp8", "float32"),
                        help="dtype of parameters, activations and gradients; with bfloat16, the"
                             " residual stream is float16 (auto: bfloat16 if the GPU has it, sm_80"
                             " and newer; fp8: bfloat16 with matmuls of 8-bit operands, on Hopper)")
    master_weights: int = option(1, "-w", group="gpu", choices=(0, 1),
                                 help="bfloat16: 1: AdamW works on a float32 copy of the weights")
    stochastic_rounding: int = option(0, group="gpu", metavar="SEED",
                                      help="bfloat16: round new weights stochastically, with this"
                                           " seed (0: to nearest, except layernorms)")
    float32_grads: int = option(0, group="gpu", choices=(0, 1),
                                help="bfloat16: 1: gradients of weights are float32 (sums of"
                                     " several always are)")
    tf32: int = option(1, group="gpu", choices=(0, 1),
                       help="float32: 1: matmuls round their operands to TF32")
    recompute: int = option(-1, group="gpu", choices=(-1, 0, 1, 2),
                            help="what the backward pass recomputes to save memory (0: nothing, 1:"
                                 " GELU, 2: layernorms too, -1: nothing in bfloat16, GELU in"
                                 " float32)")
    matmul: str = option("auto", group="gpu", choices=("auto", "cublaslt", "kernels"),
                         help="matmuls by cuBLASLt or, in bfloat16 on sm_90a, by our kernels (auto:"
                              " there by shape, elsewhere cublaslt)")
    arch: str = option("native", group="gpu", choices=("native", "sm_80"),
                       help="sm_80: kernels without the instructions of newer GPUs")
    graph: int = option(1, group="gpu", choices=(0, 1),
                        help="1: a step is one CUDA graph; 0: single launches, with the same"
                             " results")
    gpus: int = option(1, group="gpu", help="number of GPUs of this machine to train on, with a"
                                            " process each; or start the processes with torchrun,"
                                            " mpirun or srun")

    AT_LEAST: ClassVar = {**Settings.AT_LEAST, "stochastic_rounding": 0, "gpus": 1}
    FROM_SCRATCH: ClassVar = {**Settings.FROM_SCRATCH, "B": 4}

    @property
    def own_micro_steps(self):
        """Micro-batches of an update on each GPU."""
        return self.micro_steps // self.gpus

    @property
    def precision(self):
        fp8 = self.dtype == "fp8"
        return Precision("bfloat16" if fp8 else self.dtype, self.tf32, self.float32_grads, fp8)

    @property
    def master(self):
        """Whether there are float32 weights beside the model's."""
        return self.precision.bf16 and bool(self.master_weights)


def resolve_auto(settings, arch):
    """A copy of the settings, resolved for this GPU; raises UserError for what it lacks."""
    settings = dataclasses.replace(settings)
    if settings.arch != "native" and not has_bfloat16(arch):
        raise UserError(f"--arch {settings.arch}: this GPU is {arch}")
    settings.dtype = resolve_dtype(settings.dtype, arch)
    if settings.precision.fp8 and settings.matmul == "cublaslt":
        raise UserError("--matmul cublaslt: the matmuls of --dtype fp8 are our kernels: leave the"
                        " flag out")
    if settings.matmul == "kernels" and not hopper_matmul(settings.precision, arch):
        raise UserError("--matmul kernels: our kernels multiply in bfloat16 on sm_90a, this run is"
                        f" {settings.dtype} on {arch}: leave the flag out")
    if not has_bfloat16(arch):
        settings.tf32 = 0
    if settings.recompute == -1:
        settings.recompute = 0 if settings.precision.bf16 else 1
    return settings


# --------------------------------------------------------------------------------------------------
# layout: the tables of activations

# --recompute -> the rows that hold one layer at a time, and are computed again in the backward pass
RECOMPUTED = {0: (), 1: ("fch_gelu",), 2: ("fch_gelu", "ln1", "ln2")}
# linear layer -> the row that it reads
INPUTS = {"qkv": "ln1", "attproj": "atty", "fc": "ln2", "fcproj": "fch_gelu", "logits": "lnf"}


def activation_table(config, B, T, precision, recompute):
    """name -> Row for what the forward pass saves for the backward pass."""
    L, NH, C = config.L, config.NH, config.C
    dtype = precision.dtype
    table = {
        "encoded": Row((B, T, C), precision.residual),
        "ln1": Row((L, B, T, C), dtype, stacked=True),  # not with recompute 2
        "ln1_mean": Row((L, B, T), stacked=True),
        "ln1_rstd": Row((L, B, T), stacked=True),
        "qkv": Row((L, B, T, 3 * C), dtype, stacked=True),
        "atty": Row((L, B, T, C), dtype, stacked=True),
        # log of the sum of exp of each row's scores, instead of preatt, att
        "lse": Row((L, B, NH, T), stacked=True),
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


def phase_tables(config, B, T, precision, recompute, device):
    """phase -> table of its scratch. The phases share one buffer, mostly as large as the logits."""
    L, C = config.L, config.C
    dtype = precision.dtype
    recomputed = {name: Row((B, T, 4 * C if name == "fch_gelu" else C), dtype)
                  for name in RECOMPUTED[recompute]}
    rows = partial_rows(B, T, device.sm_count, device.geometry)
    return {
        "forward": {
            # attproj or fcproj, until a layernorm adds it to the residual stream
            "branch": Row((B, T, C), dtype),
            **recomputed,
        },
        "classifier": {"logits": Row((B, T, config.Vp), dtype)},  # overwritten with their gradient
        "backward": {
            "dfch": Row((B, T, 4 * C), dtype),  # of fch_gelu; then of fch, in place
            "dqkv": Row((B, T, 3 * C), dtype),
            **attention_scratch(config, B, T, device.geometry),
            **recomputed,
            # partial sums over rows of (B,T), until column_sums adds them up
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
    norm_blocks = geometry.LAYERNORM_BLOCKS * sm_count
    return SimpleNamespace(
        layernorm=min(norm_blocks, blocks(B * T, geometry.LAYERNORM_ROWS)),
        gelu=blocks(B * T, MATMUL_ROWS),
        attention=B * blocks(T, ATTENTION_ROWS),
        # at most: each token occurs ENCODER_PIECE + 1 times, which makes two pieces
        wte=blocks(2 * B * T, ENCODER_PIECE),
    )


def gradient_table(config, B, T, precision):
    """name -> Row for the gradients of activations that live across phases."""
    shape = B, T, config.C
    return {
        "dresidual": Row(shape, precision.dtype),  # of the residual stream, all through the pass
        "dbranch": Row(shape, precision.dtype),  # of a layernorm's or the attention's output
    }


def one_layer_at_a_time(settings, recomputed):
    """The key of RECOMPUTED that the tables follow. In FP8, all layers' inputs of matmuls are kept
    in 8 bits, and in bfloat16 one layer's at a time."""
    return max(recomputed) if settings.precision.fp8 else settings.recompute


def pass_tables(activations, phases, gradients):
    """{what for: {phase: table}}; the tables of one entry share their memory."""
    return {
        "activations": {"activations": activations},
        "logits, and in other phases scratch": phases,
        "gradients between layers": {"gradients": gradients},
    }


# --------------------------------------------------------------------------------------------------
# layers, in network order, with train_gpt2.py's names; C, HS and so on are compiled into the
# kernels. `x =` says that x is written, `x +=` that it is added to. Matmuls are Linear's:
# llmc/gpu/matmul.py.


def encoder_forward(device, out, inp, wte, wpe, B, T, C):
    """out (B,T,C) = wte[inp] + wpe, or without a wpe. inp (B,T) int32."""
    threads = device.geometry.ENCODER_THREADS
    device.launch("encoder_forward", encoder_grid(device, B * T), (threads,), out, inp, wte, wpe,
                  B * T, T)


def encoder_backward(device, dwte, dwpe, partials, dout, by_token, B, T, C):
    """dwte += the sum of dout over the positions of each token; dwpe, if not None, = the sum over
    the batch. by_token: the SortedTokens of a batch. partials (pieces, C) float32: scratch."""
    threads = device.geometry.ENCODER_THREADS
    if dwpe is not None:
        grid = (blocks(dwpe.size, threads * pack(dout)),)
        device.launch("encoder_backward_wpe", grid, (threads,), dwpe, dout, B, T, dwpe.shape[0])

    rows, spans = encoder_grid(device, B * T)
    grid = min(rows, 6 * device.sm_count), spans  # persistent blocks: see encoder.cu
    device.launch("encoder_backward_wte", grid, (threads,), dwte, partials, dout, *by_token, B * T)

    grid = min(len(partials), 2 * device.sm_count), blocks(C, WARP * pack(dout))
    device.launch("encoder_backward_wte_cut", grid, (threads,), dwte, partials,
                  by_token.piece_tokens, B * T)


def encoder_grid(device, N):
    """The grid that has a warp for each of N rows and each of the equal spans of its C channels."""
    return blocks(N, device.geometry.ENCODER_THREADS // WARP), device.geometry.ENCODER_SPANS


def layernorm_forward(device, out, mean, rstd, inp, weight, bias, B, T, C):
    """out (B,T,C) = layernorm of inp (B,T,C), which has the residual stream's dtype; mean, rstd
    (B,T) =."""
    residual_layernorm_forward(device, None, out, mean, rstd, inp, None, weight, bias, B, T, C)


def residual_layernorm_forward(device, residual, out, mean, rstd, inp1, inp2, weight, bias, B, T,
                               C):
    """residual (B,T,C) = inp1 + inp2, out (B,T,C) = its layernorm, mean, rstd (B,T) =. residual and
    inp1 have the residual stream's dtype. In FP8, out may be a Quantized."""
    launch_norm(device, "residual_layernorm_forward", residual, out, mean, rstd, inp1, inp2, weight,
                bias, B * T)


def launch_norm(device, name, residual, out, *arguments):
    """A normalization's forward pass, in 8 bits if out is a Quantized. The last argument is N."""
    g, N = device.geometry, arguments[-1]
    rows = g.LAYERNORM_ROWS
    outs = [out]
    if isinstance(out, Quantized):
        name += "_fp8"
        rows = g.NORM_TILE_ROWS
        outs = [out.plain, out.transposed, *out.scaling]
    device.launch(name, (blocks(N, rows),), (g.LAYERNORM_THREADS,), residual, *outs, *arguments)


def layernorm_backward(device, dinp, partials, dout, inp, weight, mean, rstd, add_residual, B, T,
                       C):
    """dinp (B,T,C) = or, with add_residual, += the gradient. partials (blocks, 3C) float32 = each
    block's part of dweight, of dbias and of the new dinp's column sums, for column_sums to add up.
    inp has the residual stream's dtype."""
    threads = device.geometry.LAYERNORM_THREADS
    device.launch("layernorm_backward", (len(partials),), (threads,), dinp, partials, dout, inp,
                  weight, mean, rstd, int(add_residual), B * T)


def matmul_gelu_forward(device, linear, out, gelu, inp, N, OC):
    """out (N,OC) = the linear layer of inp, gelu (N,OC) = GELU(out). With squared ReLU in the place
    of GELU, out may be gelu: its backward pass does not read out."""
    if linear.fuses_gelu:
        linear.forward_gelu(out, gelu, inp)
    else:
        linear.forward(out, inp)
        gelu_forward(device, gelu, out, N, OC)


def matmul_gelu_backward_inp(device, linear, dinp, partials, gelu, dout, inp, N, C):
    """dinp (N,C) = the linear layer's gradient with respect to its input GELU(inp), times
    GELU'(inp); partials (blocks, C) float32 = each block's part of dinp's column sums; gelu (N,C) =
    GELU(inp), recomputed, if not None. With squared ReLU, inp is its result, not its input."""
    if linear.fuses_gelu:
        linear.backward_inp_gelu(dinp, partials, dout, inp)
        if gelu is not None:
            gelu_forward(device, gelu, inp, N, C)
    else:
        linear.backward_inp(dinp, dout)
        gelu_backward(device, dinp, partials, gelu, inp, dinp, N, C)


def attention_forward(device, out, lse, inp, B, T, NH, NKV, HS):
    """Causal attention: out (B,T,Q) =, lse (B,NH,T) =; inp (B,T,Q+2K): query, key, value,
    Q = NH * HS, K = NKV * HS."""
    launch_attention(device, "attention_forward", (out, lse, inp), (inp,), B, T, NH)


def attention_backward(device, dinp, scratch, partials, dout, inp, out, lse, rope, rstd, B, T, NH,
                       NKV, HS):
    """dinp (B,T,Q+2K) or a Quantized =; partials (B * tiles, Q+2K) float32 = each tile's part of
    dinp's column sums; dout, out (B,T,Q). scratch has the arrays of attention_scratch. Where a
    model rotates queries and keys, rope (T,HS/2,2) rotates their gradients back; where it has
    QK-norm, rstd (B,T,NH+NKV) then undoes that. Each may be None, and partials."""
    if device.geometry.ATTENTION_BACKWARD_KEYS:
        attention_backward_in_one_pass(device, dinp, scratch, partials, dout, inp, out, lse, rope,
                                       rstd, B, T, NH, NKV, HS)
        return

    D = scratch.D
    of_dquery = dinp, D, partials, dout, inp, out, lse, rope, rstd
    launch_attention(device, "attention_backward_dquery", of_dquery, (inp, dout, out), B, T, NH)

    of_dkv = dinp, partials, dout, inp, lse, D, rope, rstd
    launch_attention(device, "attention_backward_dkv", of_dkv, (inp, dout), B, T, NKV)


def gelu_forward(device, out, inp, N, C):
    """out (N,C) = GELU(inp)."""
    device.launch("gelu_forward", (blocks(N * C, BLOCK_THREADS * pack(out)),), (BLOCK_THREADS,),
                  out, inp, N)


def gelu_backward(device, dinp, partials, out, inp, dout, N, C):
    """dinp (N,C) = dout * gelu'(inp), dinp may be dout; partials (blocks, C) float32 = each block's
    part of dinp's column sums; out (N,C) = GELU(inp), if not None."""
    grid = blocks(C, WARP * pack(dinp)), partials.shape[0]
    device.launch("gelu_backward", grid, (WARP, ROW_GROUPS), dinp, partials, out, inp, dout, N)


JOB = np.dtype([("partials", "u8"), ("out", "u8", 3), ("width", "i4"), ("rows", "i4"),
                ("columns", "i4"), ("padding", "i4")])  # struct Job of column_sums.cu


def column_sums(device, jobs):
    """For each (partials (rows, columns), outs) of `jobs`: outs = the sums over the rows: one to
    three, for equal parts of the columns (None: not wanted). One launch for all."""
    table = np.zeros(len(jobs), JOB)
    for job, (partials, outs) in zip(table, jobs):
        job["partials"] = partials.data.ptr
        job["rows"], job["columns"] = partials.shape
        job["width"] = partials.shape[1] // len(outs)
        job["out"][: len(outs)] = [0 if out is None else out.data.ptr for out in outs]

    g = device.geometry
    grid = blocks(int(table["columns"].max()), g.COLUMN_SUMS_COLUMNS), len(jobs)
    device.launch("column_sums", grid, (g.COLUMN_SUMS_THREADS,), device.upload(table))


def classifier(device, losses, logits, targets, weights, dloss, write_gradient, B, T):
    """losses (B,T) = cross entropy of the logits (B,T,Vp), which with write_gradient become their
    gradient times dloss * weights; targets (B,T) int32, weights (B,T) float32."""
    rows = device.geometry.CLASSIFIER_ROWS_ON_CHIP
    grid = min(rows * device.sm_count, B * T) if rows else B * T
    device.launch("classifier", (grid,), (device.geometry.CLASSIFIER_THREADS,), losses, logits,
                  targets, weights, float(dloss), int(write_gradient), B * T)


def loss_mean(device, loss, losses, weights, scale, N):
    """loss (1,) = the sum of weights * losses, both (N,), times scale."""
    device.launch("loss_mean", (1,), (device.geometry.UPDATE_LOSS_THREADS,), loss, losses, weights,
                  scale, N)


# --------------------------------------------------------------------------------------------------
# optimizer: launches of kernels/update.cu. A chunk is up to 8192 adjacent parameters that are
# treated alike; CHUNKS of shares.py says where they are in each buffer, and their rate and weight
# decay.

STEP_CONTROL = np.dtype([("step", "i8"), ("steps_begun", "i8"), ("rate", "f4"), ("eps", "f4"),
                         ("learning_rate", "f4"), ("grad_scale", "f4"), ("halted", "i4"),
                         ("skipped", "i4")])  # struct Control of update.cuh


def copy_batch(device, batch, pinned, control, begin, end):
    """Copy words begin .. end - 1 from the current half of the pinned memory to batch (bytes,), by
    a kernel, because a memcpy in a graph always has the same source."""
    device.launch("copy_batch", (blocks(end - begin, BLOCK_THREADS),), (BLOCK_THREADS,), batch,
                  pointer(pinned), control, batch.nbytes // 4, begin, end)


def add_gradients(device, sums, gradients, chunks, rank_count, first):
    """sums (elements of the chunks,) = (+= if not first) the gradients of one micro-batch of each
    rank, added in the order of ranks. gradients: as AdamW has them."""
    device.launch("add_gradients", (chunks.size // CHUNKS.itemsize,),
                  (device.geometry.UPDATE_THREADS,), sums, gradients, chunks, rank_count,
                  int(first))


def global_norm(device, partials, sums, gradients, chunks, rank_count):
    """partials (chunks of all ranks,): at each chunk's index = the sum of squares of its gradients:
    the sums, if not None, plus each rank's last micro-batch, in the order of ranks."""
    device.launch("global_norm", (chunks.size // CHUNKS.itemsize,),
                  (device.geometry.UPDATE_THREADS,), partials, sums, gradients, chunks, rank_count)


def prepare_update(device, control, reports, scalars, rate_and_scale, recent, settings):
    """control = the step's number; Adam's rate and eps; the gradients' factor; whether to skip. The
    host's next report = loss, norm, z-scores. scalars: losses (micro_steps,), then global_norm's
    partials; rate_and_scale (2,): see batch_table; recent (2,) RECENT: losses, norms."""
    s = settings
    losses, partials = scalars, scalars[s.micro_steps :]
    device.launch("prepare_update", (1,), (device.geometry.UPDATE_THREADS,),
                  control, pointer(reports), losses, partials, rate_and_scale,
                  np.float64(s.beta1), np.float64(s.beta2), np.float64(s.eps), s.grad_clip,
                  s.micro_steps, scalars.size - s.micro_steps, recent,
                  s.skip_loss_zscore, s.skip_norm_zscore)


def adamw_update(device, params, master, m, v, sums, gradients, chunks, rank_count, control, beta1,
                 beta2, seed):
    """One AdamW step for the chunks' elements of params (parameters,), and of this rank's master
    (may be None), m, v. The gradients are global_norm's."""
    device.launch("adamw_update", (update_blocks(device, chunks),),
                  (device.geometry.UPDATE_THREADS,), params, master, m, v, sums, gradients,
                  chunks, rank_count, control, beta2, 1.0 - beta1, 1.0 - beta2, seed)


def update_blocks(device, chunks):
    """Blocks of a kernel whose threads update UPDATE_ADAMW_NUMBERS parameters each."""
    g = device.geometry
    of_chunk = g.UPDATE_CHUNK // (g.UPDATE_THREADS * g.UPDATE_ADAMW_NUMBERS)
    return chunks.size // CHUNKS.itemsize * of_chunk


class AdamW:
    """The optimizer: its state, as a table, and its part of the step. One GPU updates all
    parameters."""

    STATE = train_gpt2.AdamW.STATE  # order in a state file; then `master`
    REPORT = np.dtype([("loss", "f4"), ("norm", "f4"), ("loss_z", "f4"), ("norm_z", "f4")])

    @staticmethod
    def table(settings, shares, rank):
        """name -> Row of the state of a rank's share."""
        size = shares.share_size(rank)
        table = {"m": Row((size,)), "v": Row((size,))}
        if settings.master:
            table["master"] = Row((size,))  # float32 weights beside the model's
        if settings.own_micro_steps > 1:
            table["sums"] = Row((size,))  # of gradients, the last micro-batch's aside
        return table

    def __init__(self, matmul, settings, params, gradients, state, shares, messages):
        """params, gradients: flat; gradients: each rank's, of what this rank updates: on one GPU
        GPT2.grads, on several those received; state: {name: array} of `table`, zeros; shares: how
        the ranks divide the parameters."""
        self.device, self.settings, self.messages = matmul.device, settings, messages
        self.params, self.gradients = params, gradients
        self.m, self.v = state["m"], state["v"]
        self.master = state.get("master")
        self.sums = state.get("sums")

        self.chunks, ends, count = shares.chunks(messages.rank)
        first, outside, _ = (end * CHUNKS.itemsize for end in ends)
        chunks = cp.asarray(self.chunks.view(np.uint8))
        self.groups = {
            "all": chunks,
            "first layer": chunks[:first],
            "outside the layers": chunks[first:outside],
            "other layers": chunks[outside:],
        }

        # Losses of the update's micro-batches, then norm partials of all chunks. Each is nonzero on
        # one rank alone, so that the sum over the ranks is exact; on one GPU, there is none.
        self.own_scalars = cp.zeros(settings.micro_steps + count * settings.needs_norm, np.float32)
        self.scalars = self.own_scalars if messages.rank_count == 1 else self.own_scalars.copy()
        self.control = cp.zeros(STEP_CONTROL.itemsize, np.uint8)
        self.recent = cp.zeros(2 * RECENT.itemsize, np.uint8)

    def set_step(self, step, recent):
        """Continue after `step` updates. recent: (2,) RECENT."""
        copy_to_gpu(self.control[:8], np.array([step], np.int64).view(np.uint8))  # its first field
        copy_to_gpu(self.recent, recent)

    def loss_place(self, i):
        """Where the loss of this rank's micro-batch i goes: at its number among the update's."""
        number = i * self.messages.rank_count + self.messages.rank
        return self.own_scalars[number : number + 1]

    def accumulate(self, i):
        """sums += the gradients of micro-batch i, once they have arrived: those sent may then be
        overwritten by the next backward pass."""
        self.messages.wait_for_gradients()
        with self.device.span(f"add {i}"):
            add_gradients(self.device, self.sums, self.gradients, self.groups["all"],
                          self.messages.rank_count, i == 0)

    def global_norm(self):
        """scalars = all losses, and all partial sums of the norm. On several GPUs, those of the
        "other layers" were launched during the backward pass: see ZeroMessages.gradient_done."""
        self.messages.wait_for_gradients()
        for group in self.messages.norm_groups:
            self.norm_of(group)
        self.messages.add_up(self.scalars, self.own_scalars)

    def prepare_update(self, rate_and_scale, reports):
        prepare_update(self.device, self.control, reports, self.scalars, rate_and_scale,
                       self.recent, self.settings)

    def update(self):
        for group in self.messages.update_groups:
            self.update_of(group)
        self.messages.wait_for_weights()

    def norm_of(self, group):
        chunks = self.groups[group]
        partials = self.own_scalars[self.settings.micro_steps :]
        if self.settings.needs_norm and chunks.size:
            with self.device.span(f"norm {group}"):
                global_norm(self.device, partials, self.sums, self.gradients, chunks,
                            self.messages.rank_count)

    def update_of(self, group):
        """Update a group of chunks; its new weights go to the other GPUs."""
        s = self.settings
        chunks = self.groups[group]
        if chunks.size:
            with self.device.span(f"adamw {group}"):
                adamw_update(self.device, self.params, self.master, self.m, self.v, self.sums,
                             self.gradients, chunks, self.messages.rank_count, self.control,
                             s.beta1, s.beta2, s.stochastic_rounding)
        self.messages.group_updated(group)


# --------------------------------------------------------------------------------------------------
# model


class GPT2:
    """The architecture: what a forward and a backward pass compute, on buffers that a Trainer
    allocates. Smaller batches and shorter sequences use the start of the same buffers."""

    TITLE = train_gpt2.GPT2.TITLE
    MAGIC = train_gpt2.GPT2.MAGIC
    Config = train_gpt2.Config
    Settings = CudaSettings
    Optimizer = AdamW
    SIZES = SIZES
    INPUTS = INPUTS
    RECOMPUTED = RECOMPUTED

    # what the compiler, FP8 and text need to know
    HAS = Has(norm="layernorm", activation="gelu")
    LAYERS = ("encoder", "layernorm", "attention", "gelu", "matmul", "classifier", "transpose",
              "column_sums", "update")
    CONSTANTS = {}  # -D name=value, beside a model's sizes

    parameter_table = staticmethod(parameter_table)
    random_model = staticmethod(random_model)
    resolve_auto = staticmethod(resolve_auto)

    @staticmethod
    def rope(config, T):
        """The angles that rotate queries and keys at T positions, (T,HS/2,2) float32: None, there
        are none."""

    @staticmethod
    def tables(config, settings, B, T, device):
        """What a pass over (B, T) tokens needs beside the parameters: pass_tables."""
        sizes = config, B, T, settings.precision, one_layer_at_a_time(settings, RECOMPUTED)
        return pass_tables(activation_table(*sizes), phase_tables(*sizes, device),
                           gradient_table(config, B, T, settings.precision))

    def __init__(self, config, settings, linears, messages, params, grads, buffers):
        """linears: a Linears; messages: a Messages, which does what other GPUs need; params, grads
        (None: there is no backward pass): Tensors on the GPU; buffers: bytes for each entry of
        `tables`."""
        self.config, self.settings = config, settings
        self.device = linears.matmul.device
        self.linears, self.messages = linears, messages
        self.params, self.grads, self.buffers = params, grads, buffers
        self.param_layers = [layer(params, l) for l in range(config.L)]
        self.grad_layers = [layer(grads, l) for l in range(config.L)] if grads else None
        self.shapes = {}

    def head_of(self, tensors):
        """The classifier's weight, or its gradient: of its own, or tied to the embedding."""
        return getattr(tensors, "lm_head", tensors.wte)

    # -- hooks, for several GPUs

    def layer_begins(self, l):
        """Before layer l's matrices are read. On one GPU, this does nothing: they are here."""
        self.messages.layer_begins(l)

    def gradient_done(self, name, l=None, event=None):
        """The gradient of layer l's matrix `name`, or of all of REST, is complete after the event.
        On one GPU, this does nothing: nobody waits for it."""
        self.messages.gradient_done(name, l, event)

    # -- tensors

    def linear(self, name, l=0):
        """Layer l's "qkv", "attproj", "fc" or "fcproj", or the classifier, "logits"."""
        if name == "logits":
            weight = self.head_of(self.params)
            bias = getattr(self.params, "lm_headb", None)
            dweight = self.grads and self.head_of(self.grads)
        else:
            p = self.param_layers[l]
            weight = getattr(p, f"{name}w")
            bias = getattr(p, f"{name}b", None)
            dweight = self.grads and getattr(self.grad_layers[l], f"{name}w")
        return self.linears.linear(name, l, weight, bias, dweight)

    def activations(self, B, T):
        """Views of all buffers for batches of (B, T), made once: rows by name, and each layer's
        rows as the forward pass (`layers`) and the backward pass (`backward_layers`) see them."""
        if (B, T) not in self.shapes:
            self.shapes[B, T] = self.make_activations(B, T)
        return self.shapes[B, T]

    def training_activations(self, B, T):
        """Those of an update. In FP8, inputs of matmuls are Quantized, which an evaluation of the
        same shape does not want."""
        return self.linears.place(self.make_activations(B, T))

    def make_activations(self, B, T):
        """A namespace of all rows by name, with lists of the layers' rows: these alone tell a row
        of the forward pass from the backward pass's of the same name."""
        phases = {}
        for what, group in self.tables(self.config, self.settings, B, T, self.device).items():
            for phase, table in group.items():
                phases[phase] = views(table, self.buffers[what], ALIGN)

        acts = SimpleNamespace(B=B, T=T)
        for tensors in phases.values():
            vars(acts).update({name: getattr(tensors, name) for name in tensors.table})

        # for a shorter text: its first rows
        angles = self.rope(self.config, max(T, self.settings.T))
        acts.rope = None if angles is None else self.device.upload(angles)

        def layers_of(phase):
            """Each layer's rows: those that are kept and, instead of some, the phase's recomputed
            ones."""
            kept, own = phases["activations"], phases[phase]
            return [SimpleNamespace(**vars(layer(kept, l)) | vars(layer(own, l)))
                    for l in range(self.config.L)]

        acts.layers = layers_of("forward")
        acts.backward_layers = layers_of("backward")
        return acts

    # -- forward and backward

    def trunk(self, acts, inputs):
        """Token ids (B, T) on the GPU -> acts.lnf (B, T, C): all but the classifier."""
        device, params, linear = self.device, self.params, self.linear
        L, C, NH = self.config.L, self.config.C, self.config.NH
        B, T = acts.B, acts.T
        branch = acts.branch

        self.linears.pass_begins(acts)
        encoder_forward(device, acts.encoded, inputs, params.wte, params.wpe, B, T, C)

        for l in range(L):
            p, a = self.param_layers[l], acts.layers[l]

            if l == 0:
                residual = acts.encoded
                layernorm_forward(device, a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b,
                                  B, T, C)
            else:  # adds fcproj of the layer below, which is still in `branch`
                below = acts.layers[l - 1]
                residual = below.residual3
                residual_layernorm_forward(device, residual, a.ln1, a.ln1_mean, a.ln1_rstd,
                                           below.residual2, branch, p.ln1w, p.ln1b, B, T, C)

            self.layer_begins(l)
            linear("qkv", l).forward(a.qkv, a.ln1)
            attention_forward(device, a.atty, a.lse, a.qkv, B, T, NH, NH, C // NH)
            linear("attproj", l).forward(branch, a.atty)

            residual_layernorm_forward(device, a.residual2, a.ln2, a.ln2_mean, a.ln2_rstd, residual,
                                       branch, p.ln2w, p.ln2b, B, T, C)
            matmul_gelu_forward(device, linear("fc", l), a.fch, a.fch_gelu, a.ln2, B * T, 4 * C)
            linear("fcproj", l).forward(branch, a.fch_gelu)

        top = acts.layers[-1]
        residual_layernorm_forward(device, top.residual3, acts.lnf, acts.lnf_mean, acts.lnf_rstd,
                                   top.residual2, branch, params.lnfw, params.lnfb, B, T, C)

    def classify(self, acts, targets, weights, loss, scale, train):
        """loss (1,) = scale * the sum of weights * acts.losses; with `train`, the logits become
        their gradient. Returns an event for the loss, which the side stream sums."""
        self.linear("logits").forward(acts.logits, acts.lnf)
        dloss = self.linears.dlogits_scale(scale)
        classifier(self.device, acts.losses, acts.logits, targets, weights, dloss, train, acts.B,
                   acts.T)
        with self.device.beside(self.device.side) as loss_done:
            loss_mean(self.device, loss, acts.losses, weights, scale, acts.B * acts.T)
        return loss_done

    def backward(self, acts, by_token, scale):
        """self.grads = the gradients of the last batch's loss; `classify` left dlogits in place of
        the logits. by_token: the batch's SortedTokens; scale: the one that `classify` was given."""
        device, params, grads = self.device, self.params, self.grads
        linear, weight_gradient = self.linear, self.weight_gradient
        L, C, NH = self.config.L, self.config.C, self.config.NH
        B, T = acts.B, acts.T
        dresidual, dbranch = acts.dresidual, acts.dbranch
        recomputed = RECOMPUTED[self.settings.recompute]
        jobs = []  # of column_sums, for biases and layernorms: (partial sums, the gradients)

        self.backward_head(acts, scale)
        layernorm_backward(device, dresidual, acts.lnf_partials, dbranch, acts.layers[-1].residual3,
                           params.lnfw, acts.lnf_mean, acts.lnf_rstd, False, B, T, C)
        # the last third of the partials sums the new dresidual, the dout of the linear layer below:
        # its column sums are that layer's dbias
        jobs.append((acts.lnf_partials, (grads.lnfw, grads.lnfb, self.grad_layers[-1].fcprojb)))

        # The side stream reads two tensors for each gradient of a weight: a gradient, and an
        # activation that may have been recomputed. After the event x_read, both may be
        # overwritten: dfch and ln2, dresidual and fch_gelu, dqkv and ln1.
        dfch_read = dqkv_read = None

        for l in reversed(range(L)):
            p, a, g = self.param_layers[l], acts.backward_layers[l], self.grad_layers[l]
            residual = acts.encoded if l == 0 else acts.layers[l - 1].residual3
            fcprojb_below = self.grad_layers[l - 1].fcprojb if l > 0 else None

            device.wait(dfch_read)
            gelu = a.fch_gelu if "fch_gelu" in recomputed else None
            matmul_gelu_backward_inp(device, linear("fcproj", l), a.dfch, a.gelu_partials, gelu,
                                     dresidual, a.fch, B * T, 4 * C)
            jobs.append((a.gelu_partials, (g.fcb,)))
            dresidual_read = weight_gradient("fcproj", l, dresidual, a.fch_gelu)

            if "ln2" in recomputed:
                layernorm_forward(device, a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w,
                                  p.ln2b, B, T, C)
            dfch_read = weight_gradient("fc", l, a.dfch, a.ln2)
            linear("fc", l).backward_inp(dbranch, a.dfch)

            device.wait(dresidual_read)
            layernorm_backward(device, dresidual, a.ln2_partials, dbranch, a.residual2, p.ln2w,
                               a.ln2_mean, a.ln2_rstd, True, B, T, C)
            jobs.append((a.ln2_partials, (g.ln2w, g.ln2b, g.attprojb)))

            dresidual_read = weight_gradient("attproj", l, dresidual, a.atty)
            linear("attproj", l).backward_inp(dbranch, dresidual)

            device.wait(dqkv_read)
            attention_backward(device, a.dqkv, acts, a.attention_partials, dbranch, a.qkv, a.atty,
                               a.lse, None, None, B, T, NH, NH, C // NH)
            jobs.append((a.attention_partials, (g.qkvb,)))

            if "ln1" in recomputed:
                layernorm_forward(device, a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b,
                                  B, T, C)
            dqkv_read = weight_gradient("qkv", l, a.dqkv, a.ln1)
            linear("qkv", l).backward_inp(dbranch, a.dqkv)

            device.wait(dresidual_read)
            layernorm_backward(device, dresidual, a.ln1_partials, dbranch, residual, p.ln1w,
                               a.ln1_mean, a.ln1_rstd, True, B, T, C)
            jobs.append((a.ln1_partials, (g.ln1w, g.ln1b, fcprojb_below)))

        column_sums(device, jobs)
        encoder_backward(device, grads.wte, grads.wpe, acts.wte_partials, dresidual, by_token,
                         B, T, C)
        device.wait(dqkv_read)  # the side stream's last launch, also after the loss
        self.gradient_done(REST)

    def backward_head(self, acts, scale):
        """dbranch =; dwte, to which encoder_backward adds, or dlm_head =. In FP8, dlogits have
        another scale. All on the main stream, because dfch will overwrite dlogits."""
        head = self.linear("logits")
        factor = scale / self.linears.dlogits_scale(scale)
        head.backward_inp(acts.dbranch, acts.logits, factor)
        head.backward_weight(acts.logits, acts.lnf, factor)
        if "lm_head" in self.params.table:
            self.gradient_done("lm_head")

    def weight_gradient(self, name, l, dout, inp):
        """On the side stream; returns an event, after which dout and inp may be overwritten."""
        linear = self.linear(name, l)
        dout = linear.operand(dout)  # of 8 bits: made on the main stream, which needs it, too
        with self.device.beside(self.device.side) as done:
            linear.backward_weight(dout, inp)
        self.gradient_done(f"{name}w", l, done)
        return done

    # -- the step; `trainer` holds the buffers

    def micro_step(self, trainer, i, batch_copied=None):
        """Forward and backward of micro-batch i; writes its loss and self.grads. batch_copied: an
        event after which all but the inputs is on the GPU."""
        batch, acts, optimizer = trainer.batch, trainer.acts, trainer.optimizer
        scale = 1.0 / (self.settings.B * self.settings.T * self.settings.micro_steps)
        with self.device.span(f"forward {i}"):
            self.trunk(acts, batch.inputs[i])
            self.device.wait(batch_copied)
            self.classify(acts, batch.targets[i], batch.weights[i], optimizer.loss_place(i), scale,
                          train=True)

        if i > 0:  # after the forward pass, during which gradients travel between GPUs
            optimizer.accumulate(i - 1)

        with self.device.span(f"backward {i}"):
            self.backward(acts, sorted_tokens(batch, i), scale)

    def train_step(self, trainer):
        """Launch a whole step, from the batch in pinned memory to new weights."""
        device, batch = self.device, trainer.batch
        self.messages.step_begins()
        self.linears.step_begins()

        # what follows the inputs in batch_table is copied while the forward pass runs
        copy = functools.partial(copy_batch, device, batch.buffer, trainer.pinned,
                                 trainer.optimizer.control)
        end_of_inputs = batch.rate_and_scale.size + batch.inputs.size
        copy(0, end_of_inputs)
        with device.beside(device.side) as batch_copied:
            copy(end_of_inputs, batch.buffer.nbytes // 4)

        for i in range(self.settings.own_micro_steps):
            self.micro_step(trainer, i, batch_copied)
        self.update(trainer)

        self.messages.step_ends()

    def update(self, trainer):
        """From the gradients to new weights, and the report."""
        optimizer = trainer.optimizer
        optimizer.global_norm()
        optimizer.prepare_update(trainer.batch.rate_and_scale, trainer.reports)
        optimizer.update()
        self.linears.update_ends(self.messages)

    def capture(self, trainer):
        """The step as a CUDA graph, which reads what changes from memory: the batch, pinned;
        counters, on the GPU."""
        stream = self.device.stream
        stream.begin_capture()
        self.train_step(trainer)
        graph = stream.end_capture()
        graph.upload(stream)
        return graph


# --------------------------------------------------------------------------------------------------
# main


def main(architecture=GPT2):
    description = f"Train {architecture.TITLE} on GPUs, with CuPy and CUDA kernels."
    return on_ranks(architecture.Settings, description, functools.partial(run, architecture))


def run(architecture, settings, ranks):
    """From the settings to the end of the training; returns the exit status."""
    gpu = open_gpu(settings.arch, ranks.local_rank)
    resolve = functools.partial(architecture.resolve_auto, arch=gpu.arch)
    resolve(settings)  # only to fail early: Loop repeats it
    with (locked(settings.output_dir if ranks.is_first else None),
          Loop(settings, architecture, ranks, resolve) as loop):
        settings = loop.settings
        ranks.check_alike(gpu, settings, loop.config, loop.params, loop.train_loader,
                          loop.val_loader)
        peak = peak_rate(gpu, ranks.size, settings, loop.config, loop.parameters)
        loop.console.header(f"{describe_gpu(gpu, ranks.size)}, {describe_precision(settings)}",
                            peak)

        trainer = open_trainer(architecture, gpu, loop.config, loop.params, settings, ranks)
        loop.console.memory([(block.bytes, what) for what, block in trainer.plan.items()],
                            trainer.largest_batch)
        loop.start(trainer, TrainerSaver(trainer))
        loop.train_loader.read_ahead(1)
        trainer.prepare(loop.train_loader.ahead[0][0])  # changes no weight

        for step in loop:  # between updates, it validates, samples, saves and stops
            batches = [loop.train_loader.next_batch() for _ in range(settings.own_micro_steps)]
            number = trainer.begin_step(batches, learning_rate_at(settings, step))
            loop.report_later(step, functools.partial(trainer.end_step, number))
    trainer.close()
    return loop.status


if __name__ == "__main__":
    run_main(main)
