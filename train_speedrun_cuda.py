"""
The speed run on a GPU: its GPT and Muon, by our CUDA kernels and cuBLASLt.

The chapters are train_speedrun.py's; what architectures do alike is on GPT-2's and Llama 3's pages:
read these pages first. Squared ReLU takes GELU's place in its kernels, and so is in the matmuls'
epilogues on Hopper. Its slope is twice the root of its result, so that its input is not stored. The
cap is in the classifier; QK-norm and the rotation are one pass after the qkv matmul, in FP8 its
epilogue, and their gradients the end of attention's. Muon works on all matrices of a name at once,
in bfloat16 or float32.

    python train_speedrun_cuda.py -e s12 -i "data/fineweb_train_*.bin" -b 64 -d 524288 -x 3250 -o
    runs/speedrun
"""

import llmc  # noqa: F401  (before NumPy: it sets what OpenBLAS reads when NumPy loads it)

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import train_gpt2_cuda
import train_speedrun
from llmc.errors import run_main
from llmc.gpu.attention import attention_scratch
from llmc.gpu.cublaslt import CublasLt
from llmc.gpu.geometry import BLOCK_THREADS, ROW_GROUPS, WARP, Has, blocks, pack
from llmc.gpu.messages import REST
from llmc.settings import with_default
from llmc.tensors import Row
from train_gpt2_cuda import (GPT2, AdamW, CudaSettings, attention_backward, attention_forward,
                             column_sums, encoder_backward, encoder_forward, gradient_table,
                             loss_mean, main, one_layer_at_a_time, partial_rows, pass_tables,
                             update_blocks)
from train_llama3_cuda import residual_rmsnorm_forward, rmsnorm_backward, rmsnorm_forward
from train_speedrun import (CAP, EPS, SCALE, SIZES, MuonSettings, SpeedrunSettings,
                            newton_schulz_of, parameter_table, random_model, rope_table)

# --------------------------------------------------------------------------------------------------
# settings


@dataclass
class SpeedrunCudaSettings(MuonSettings, CudaSettings):
    recompute: int = with_default(CudaSettings, "recompute", -1,
                                  "what the backward pass recomputes to save memory (2: RMSNorms;"
                                  " else nothing)")
    FROM_SCRATCH = {**SpeedrunSettings.FROM_SCRATCH, "B": 4}


# --------------------------------------------------------------------------------------------------
# layout: the tables of activations

# --recompute -> the rows that hold one layer at a time, and are computed again in the backward
# pass; 3: in FP8, which keeps all layers' in 8 bits
RECOMPUTED = {0: (), 1: (), 2: ("ln1", "ln2"), 3: ("ln1", "ln2", "fch_relu2")}
# linear layer -> the row that it reads
INPUTS = {"qkv": "ln1", "attproj": "atty", "fc": "ln2", "fcproj": "fch_relu2", "logits": "lnf"}


def activation_table(config, B, T, precision, recompute):
    """name -> Row for what the forward pass saves for the backward pass."""
    L, NH, C = config.L, config.NH, config.C
    dtype = precision.dtype
    table = {
        "embedded": Row((B, T, C), precision.residual),
        "ln0": Row((B, T, C), dtype),
        "ln0_rstd": Row((B, T)),
        "encoded": Row((B, T, C), precision.residual),
        "ln1": Row((L, B, T, C), dtype, stacked=True),
        "ln1_rstd": Row((L, B, T), stacked=True),
        "qkv": Row((L, B, T, 3 * C), dtype, stacked=True),  # as on train_speedrun.py's page
        "qk_rstd": Row((L, B, T, 2 * NH), stacked=True),
        "atty": Row((L, B, T, C), dtype, stacked=True),
        "lse": Row((L, B, NH, T), stacked=True),
        "residual2": Row((L, B, T, C), precision.residual, stacked=True),
        "ln2": Row((L, B, T, C), dtype, stacked=True),
        "ln2_rstd": Row((L, B, T), stacked=True),
        "fch_relu2": Row((L, B, T, 4 * C), dtype, stacked=True),
        "residual3": Row((L, B, T, C), precision.residual, stacked=True),
        "lnf": Row((B, T, C), dtype),
        "lnf_rstd": Row((B, T)),
        "losses": Row((B, T)),
    }
    return {name: row for name, row in table.items() if name not in RECOMPUTED[recompute]}


def phase_tables(config, B, T, precision, recompute, device):
    """phase -> table of its scratch. The phases share one buffer, mostly as large as the logits."""
    L, C = config.L, config.C
    dtype = precision.dtype
    rows = partial_rows(B, T, device.sm_count, device.geometry)
    classifier_rows = max(1, device.sm_count // device.geometry.CAPPED_SMS)
    recomputed = {name: Row((B, T, 4 * C if name == "fch_relu2" else C), dtype)
                  for name in RECOMPUTED[recompute]}
    return {
        "forward": {"branch": Row((B, T, C), dtype), **recomputed},
        "classifier": {
            "logits": Row((B, T, config.Vp), dtype),  # overwritten with their gradient
            "headb_partials": Row((classifier_rows, config.Vp)),
        },
        "backward": {
            "dfch": Row((B, T, 4 * C), dtype),
            "dqkv": Row((B, T, 3 * C), dtype),
            **attention_scratch(config, B, T, device.geometry),
            **recomputed,
            # partial sums over rows, until column_sums adds them up
            "lnf_partials": Row((rows.layernorm, 2 * C)),
            "relu2_partials": Row((L, rows.gelu, 4 * C), stacked=True),
            "ln2_partials": Row((L, rows.layernorm, 2 * C), stacked=True),
            "attention_partials": Row((L, rows.attention, 3 * C), stacked=True),
            "ln1_partials": Row((L, rows.layernorm, 2 * C), stacked=True),
            "ln0_partials": Row((rows.layernorm, 2 * C)),
            "wte_partials": Row((rows.wte, C)),  # within encoder_backward
        },
    }


# --------------------------------------------------------------------------------------------------
# layers that GPT-2's and Llama 3's pages lack

# with MODEL_RELU2, GPT-2's kernels have squared ReLU in the place of GELU
matmul_relu2_forward = train_gpt2_cuda.matmul_gelu_forward
matmul_relu2_backward_inp = train_gpt2_cuda.matmul_gelu_backward_inp


def matmul_qknorm_forward(device, linear, qkv, rstd, inp, rope, B, T, NH, HS):
    """qkv (B,T,3C) = inp (B,T,C) @ weight^T + bias, then qknorm_forward and rope_forward of
    train_speedrun.py; rstd (B,T,2NH) =. rope (T,HS/2,2): cosines and sines."""
    scale = SCALE * math.sqrt(HS)
    if linear.fuses_qknorm:
        linear.forward_qknorm(qkv, rstd, inp, rope, scale, EPS, T)
        return
    linear.forward(qkv, inp)
    grid = (blocks(B * T * 2 * NH * HS, BLOCK_THREADS * pack(qkv)),)
    device.launch("qknorm_forward", grid, (BLOCK_THREADS,), qkv, rstd, rope, scale, EPS, B * T, T)


def classifier(device, losses, logits, partials, targets, weights, dloss, factor, write_gradient,
               N):
    """GPT-2's, of capped logits; with write_gradient, partials (n,Vp) =, for column_sums: of
    dlogits * factor."""
    g = device.geometry
    if g.CAPPED_CLUSTER:
        device.launch("classifier_capped", (len(partials) * g.CAPPED_CLUSTER,),
                      (WARP * g.CAPPED_WARPS,), losses, logits, partials, float(factor), targets,
                      weights, float(dloss), int(write_gradient), N)
        return

    train_gpt2_cuda.classifier(device, losses, logits, targets, weights, dloss, write_gradient, 1,
                               N)
    if write_gradient:
        grid = blocks(logits.shape[-1], WARP * pack(logits)), len(partials)
        device.launch("logits_bias_backward", grid, (WARP, ROW_GROUPS), partials, logits,
                      float(factor), N)


# --------------------------------------------------------------------------------------------------
# optimizer


class Stack(NamedTuple):
    """The matrices of a name, which lie one after the other in the flat buffers, from element
    `begin` on."""

    begin: int
    count: int
    rows: int
    columns: int

    @property
    def size(self):
        return self.rows * self.columns

    def parts_of(self, shares, rank):
        """The Parts of them that a rank has, which are adjacent in its share."""
        end = self.begin + self.count * self.size
        return [part for part in shares.parts_of(rank) if self.begin <= part.begin < end]


class Muon(AdamW):
    """Muon for the layers' matrices; AdamW, the base class, for the rest. Of several GPUs, each has
    a share of momentum and float32 weights, and orthogonalizes some matrices, which are sent to it
    whole."""

    MOMENTUM = train_speedrun.Muon.MOMENTUM
    BLOCKS = 32  # for a matrix, in muon_squares

    @staticmethod
    def stacks(table):
        begin = 0
        found = []
        for row in table.values():
            if row.matrices:
                L, OC, C = row.shape
                found.append(Stack(begin, L * row.matrices, OC // row.matrices, C))
            begin += row.size
        return found

    @classmethod
    def table(cls, settings, shares, rank):
        dtype = settings.precision.dtype
        stacks = cls.stacks(shares.table)
        share = max(sum(part.size for part in stack.parts_of(shares, rank)) for stack in stacks)

        # how many matrices of each stack a rank works on, at most
        own = [(blocks(stack.count, shares.rank_count), stack) for stack in stacks]
        matrices = max(n * stack.size for n, stack in own)
        squares = max(n * min(stack.rows, stack.columns)**2 for n, stack in own)

        table = AdamW.table(settings, shares, rank)
        table["u"] = Row((share,), dtype)  # Nesterov's momentum; on several GPUs, then the step
        if shares.rank_count > 1:
            table["x"] = Row((matrices,), dtype)  # Nesterov's momentum of whole matrices
        # a Newton-Schulz step reads one of x and y, writes the other
        table["y"] = Row((matrices,), dtype)
        table["squares"] = Row((2, squares), dtype)
        table["partials"] = Row((cls.BLOCKS * max(n for n, _ in own),))
        return table

    def __init__(self, matmul, settings, params, gradients, state, shares, messages):
        super().__init__(matmul, settings, params, gradients, state, shares, messages)
        self.u = state["u"]
        self.x = state.get("x")
        self.y = state["y"]
        self.squares = state["squares"]
        self.partials = state["partials"]
        self.cublaslt = matmul.cublaslt or CublasLt(self.device, settings.precision,
                                                    matmul.stream_workspace)
        self.newton_schulz = newton_schulz_of(settings)

        self.of_stacks = []  # (stack, its chunks, the number of its first element in this share)
        begins = self.chunks["flat"]
        for stack in self.stacks(shares.table):
            of_stack = (begins >= stack.begin) & (begins < stack.begin + stack.count * stack.size)
            chunks = self.device.upload(self.chunks[of_stack].view(np.uint8))
            local = np.int64(stack.parts_of(shares, messages.rank)[0].local)
            self.of_stacks.append((stack, chunks, local))

    def update(self):
        self.update_of("outside the layers")
        self.update_matrices()
        self.messages.wait_for_weights()

    def update_matrices(self):
        settings = self.settings
        for stack, chunks, local in self.of_stacks:
            grid = (update_blocks(self.device, chunks),)
            with self.device.span(f"muon {stack.rows} x {stack.columns}"):
                self.launch("muon_momentum", grid, self.m, self.u, self.sums, self.gradients,
                            chunks, self.messages.rank_count, self.control, self.MOMENTUM, local)

                matrices = self.messages.to_matrices(stack, self.u, self.x)
                matrices = self.orthogonalize(stack, matrices)
                u = self.messages.to_share(stack, matrices, self.u)

                scale = math.sqrt(max(1.0, stack.rows / stack.columns))
                self.launch("muon_update", grid, self.params, self.master, u, chunks, self.control,
                            scale, settings.weight_decay, settings.stochastic_rounding, local)
        self.messages.group_updated("matrices")

    def orthogonalize(self, stack, x):
        """train_speedrun.py's, of each matrix of x (n, rows, columns); returns x or self.y."""
        if not len(x):
            return x  # more GPUs than matrices
        n = len(x)
        side = min(stack.rows, stack.columns)
        is_tall = stack.rows > stack.columns
        y = self.y[: x.size].reshape(x.shape)
        square, polynomial = (array[: n * side**2].reshape(n, side, side) for array in self.squares)

        grid = self.BLOCKS, n
        self.launch("muon_squares", grid, self.partials, x, stack.size)
        self.launch("muon_normalize", grid, x, self.partials, stack.size)

        # count: cuBLASLt's algorithm is that for all matrices, on any number of GPUs
        multiply = functools.partial(self.cublaslt.multiply, count=stack.count)
        steps, (a, b, c) = self.newton_schulz
        for _ in range(steps):
            transposed = x.swapaxes(1, 2)
            multiply(square, *((transposed, x) if is_tall else (x, transposed)))
            multiply(polynomial, square, square, scale=c, addend=square, factor=b)
            multiply(y, *((x, polynomial) if is_tall else (polynomial, x)), addend=x, factor=a)
            x, y = y, x
        return x

    def launch(self, name, grid, *arguments):
        self.device.launch(name, grid, (self.device.geometry.UPDATE_THREADS,), *arguments)


# --------------------------------------------------------------------------------------------------
# model


class Speedrun(GPT2):
    """The architecture; loss, buffers and views are GPT-2's."""

    TITLE = train_speedrun.Speedrun.TITLE
    MAGIC = train_speedrun.Speedrun.MAGIC
    Config = train_speedrun.Config
    Settings = SpeedrunCudaSettings
    Optimizer = Muon
    SIZES = SIZES
    INPUTS = INPUTS
    RECOMPUTED = RECOMPUTED

    HAS = Has(norm="rmsnorm", rope=True, qknorm=True, activation="relu2", capped=True)
    LAYERS = ("encoder", "rmsnorm", "qknorm", "attention", "gelu", "matmul", "classifier",
              "logits_bias", "transpose", "column_sums", "update", "muon")
    CONSTANTS = {"MODEL_RELU2": 1, "MODEL_BIASES": 1, "MODEL_CAP": f"{CAP}f",
                 "MODEL_QK_SCALE": f"{SCALE}f", "MODEL_HALF_ROPE": 1}

    parameter_table = staticmethod(parameter_table)
    random_model = staticmethod(random_model)

    @staticmethod
    def tables(config, settings, B, T, device):
        sizes = config, B, T, settings.precision, one_layer_at_a_time(settings, RECOMPUTED)
        return pass_tables(activation_table(*sizes), phase_tables(*sizes, device),
                           gradient_table(config, B, T, settings.precision))

    @staticmethod
    def rope(config, T):
        """As Llama 3's, with the speed run's angles."""
        return np.stack(rope_table(config, T), axis=-1)

    def trunk(self, acts, inputs):
        """Token ids (B, T) on the GPU -> acts.lnf (B, T, C), as GPT-2's."""
        device, params, linear = self.device, self.params, self.linear
        C, NH, HS = self.config.C, self.config.NH, self.config.HS
        B, T = acts.B, acts.T
        branch = acts.branch

        self.linears.pass_begins(acts)
        encoder_forward(device, acts.embedded, inputs, params.wte, None, B, T, C)
        rmsnorm_forward(device, acts.ln0, acts.ln0_rstd, acts.embedded, params.ln0w, EPS, B, T, C)

        # a norm reads the sum of two tensors, which it makes the new stream; first, that is ln0
        residual = acts.encoded
        below = None
        addend = acts.ln0
        for l in range(self.config.L):
            p = self.param_layers[l]
            a = acts.layers[l]
            residual_rmsnorm_forward(device, residual, a.ln1, a.ln1_rstd, below, addend, p.ln1w,
                                     EPS, B, T, C)

            self.layer_begins(l)
            matmul_qknorm_forward(device, linear("qkv", l), a.qkv, a.qk_rstd, a.ln1, acts.rope, B,
                                  T, NH, HS)
            attention_forward(device, a.atty, a.lse, a.qkv, B, T, NH, NH, HS)
            linear("attproj", l).forward(branch, a.atty)

            residual_rmsnorm_forward(device, a.residual2, a.ln2, a.ln2_rstd, residual, branch,
                                     p.ln2w, EPS, B, T, C)
            matmul_relu2_forward(device, linear("fc", l), a.fch_relu2, a.fch_relu2, a.ln2, B * T,
                                4 * C)
            linear("fcproj", l).forward(branch, a.fch_relu2)
            residual = a.residual3
            below = a.residual2
            addend = branch

        residual_rmsnorm_forward(device, residual, acts.lnf, acts.lnf_rstd, below, addend,
                                 params.lnfw, EPS, B, T, C)

    def classify(self, acts, targets, weights, loss, scale, train):
        """GPT-2's; with `train`, the partial sums of the classifier's bias gradient, too."""
        N = acts.B * acts.T
        dloss = self.linears.dlogits_scale(scale)
        self.linear("logits").forward(acts.logits, acts.lnf)
        classifier(self.device, acts.losses, acts.logits, acts.headb_partials, targets, weights,
                   dloss, scale / dloss, train, N)
        with self.device.beside(self.device.side) as loss_done:
            loss_mean(self.device, loss, acts.losses, weights, scale, N)
        return loss_done

    def backward(self, acts, by_token, scale):
        """self.grads = the gradients of the last batch's loss, as GPT-2's."""
        device, params, grads = self.device, self.params, self.grads
        linear, weight_gradient = self.linear, self.weight_gradient
        C, NH, HS = self.config.C, self.config.NH, self.config.HS
        B, T = acts.B, acts.T
        dresidual, dbranch = acts.dresidual, acts.dbranch
        recomputed = RECOMPUTED[self.settings.recompute]
        jobs = []  # of column_sums, for biases and RMSNorms: (partial sums, the gradients)

        self.backward_head(acts, scale)
        # now: what follows may overwrite these
        column_sums(device, [(acts.headb_partials, (grads.lm_headb,))])
        rmsnorm_backward(device, dresidual, acts.lnf_partials, dbranch, acts.layers[-1].residual3,
                         params.lnfw, acts.lnf_rstd, False, B, T, C)
        # the second of the partials, dresidual's column sums, are dfcprojb here, and dattprojb
        # after ln2's backward pass
        jobs.append((acts.lnf_partials, (grads.lnfw, self.grad_layers[-1].fcprojb)))

        dfch_read = dqkv_read = None  # events, as on GPT-2's page
        for l in reversed(range(self.config.L)):
            p = self.param_layers[l]
            a = acts.backward_layers[l]
            g = self.grad_layers[l]
            residual = acts.encoded if l == 0 else acts.layers[l - 1].residual3
            fcprojb_below = self.grad_layers[l - 1].fcprojb if l > 0 else None

            device.wait(dfch_read)
            matmul_relu2_backward_inp(device, linear("fcproj", l), a.dfch, a.relu2_partials, None,
                                     dresidual, a.fch_relu2, B * T, 4 * C)
            jobs.append((a.relu2_partials, (g.fcb,)))
            dresidual_read = weight_gradient("fcproj", l, dresidual, a.fch_relu2)

            if "ln2" in recomputed:
                rmsnorm_forward(device, a.ln2, a.ln2_rstd, a.residual2, p.ln2w, EPS, B, T, C)
            dfch_read = weight_gradient("fc", l, a.dfch, a.ln2)
            linear("fc", l).backward_inp(dbranch, a.dfch)

            device.wait(dresidual_read)
            rmsnorm_backward(device, dresidual, a.ln2_partials, dbranch, a.residual2, p.ln2w,
                             a.ln2_rstd, True, B, T, C)
            jobs.append((a.ln2_partials, (g.ln2w, g.attprojb)))

            dresidual_read = weight_gradient("attproj", l, dresidual, a.atty)
            linear("attproj", l).backward_inp(dbranch, dresidual)

            device.wait(dqkv_read)
            attention_backward(device, a.dqkv, acts, a.attention_partials, dbranch, a.qkv, a.atty,
                               a.lse, acts.rope, a.qk_rstd, B, T, NH, NH, HS)
            jobs.append((a.attention_partials, (g.qkvb,)))

            if "ln1" in recomputed:
                rmsnorm_forward(device, a.ln1, a.ln1_rstd, residual, p.ln1w, EPS, B, T, C)
            dqkv_read = weight_gradient("qkv", l, a.dqkv, a.ln1)
            linear("qkv", l).backward_inp(dbranch, a.dqkv)

            device.wait(dresidual_read)
            rmsnorm_backward(device, dresidual, a.ln1_partials, dbranch, residual, p.ln1w,
                             a.ln1_rstd, True, B, T, C)
            jobs.append((a.ln1_partials, (g.ln1w, fcprojb_below)))

        rmsnorm_backward(device, dbranch, acts.ln0_partials, dresidual, acts.embedded, params.ln0w,
                         acts.ln0_rstd, False, B, T, C)
        jobs.append((acts.ln0_partials, (grads.ln0w, None)))
        column_sums(device, jobs)
        grads.wte.fill(0)  # a memset on the main stream
        encoder_backward(device, grads.wte, None, acts.wte_partials, dbranch, by_token, B, T, C)
        device.wait(dqkv_read)  # the side stream's last launch
        self.gradient_done(REST)


if __name__ == "__main__":
    run_main(functools.partial(main, Speedrun))
