"""What a trainer allocates on the GPU, and whether it fits."""

import bisect
import dataclasses

from llmc.errors import UserError
from llmc.gpu.batch import batch_table
from llmc.gpu.cublaslt import WORKSPACE
from llmc.gpu.decoder import Decoder
from llmc.gpu.device import cp
from llmc.gpu.matmul import ALIGN
from llmc.gpu.shares import Shares
from llmc.tensors import Row, table_bytes

RESERVE = 256 << 20  # bytes kept free: for cuBLASLt's kernels, the graph, small tables and rounding up


def group_bytes(group):
    """Bytes of the largest of the tables that share a buffer."""
    return max(table_bytes(table, ALIGN) for table in group.values())


def memory_plan(architecture, config, settings, device, text=False):
    """What the trainer allocates: [(bytes, what for)]. text: a Decoder, too."""
    B, T, precision, ranks = settings.B, settings.T, settings.precision, settings.gpus
    shares = Shares(architecture.parameter_table(config), ranks)
    state = architecture.Optimizer.table(settings, shares, ranks - 1)
    tables = architecture.tables(config, settings, B, T, device.sm_count, device.geometry)
    operands = []
    if precision.fp8:
        from llmc.gpu.fp8 import operand_table
        operands = operand_table(shares.table, B * T, recomputed_inputs(architecture, settings))
        operands = [(table_bytes(operands, ALIGN), "operands in 8 bits")]
    decoder = Decoder.tables(architecture, config, precision, 1, T, device.geometry) if text else ()
    return [
        (table_bytes(architecture.parameter_table(config, precision.dtype)), "parameters"),
        (table_bytes(architecture.parameter_table(config, precision.grads)), "gradients"),
        *([(Row((shares.received_size(),), precision.grads).bytes(), "gradients of all ranks")] if ranks > 1 else []),
        *((row.bytes(ALIGN), f"{architecture.Optimizer.__name__}'s {name}") for name, row in state.items()),
        *((group_bytes(group), what) for what, group in tables.items()),
        *operands,
        *([(sum(table_bytes(table, ALIGN) for table in decoder), "text")] if text else []),
        (2 * WORKSPACE + 4 * transposed_elements(config, settings), "matmul workspaces"),
        (table_bytes(batch_table(B, T, settings.own_micro_steps)) + (64 << 10), "the batch"),
    ]


def transposed_elements(config, settings):
    """Elements of the scratch of Matmul.cublaslt_transposed, which float32 needs."""
    return 0 if settings.precision.bf16 else settings.B * settings.T * config.C


def recomputed_inputs(architecture, settings):
    """The linear layers with FP8 operands whose input the backward pass recomputes."""
    return [name for name, row in architecture.READS.items() if row in architecture.RECOMPUTED[settings.recompute]]


def check_memory(architecture, config, settings, device, text=False):
    """Return the memory_plan. If it does not fit, raise UserError: memory needed, memory free, what would fit."""

    def needed(**changed):
        plan = memory_plan(architecture, config, dataclasses.replace(settings, **changed), device, text)
        return sum(size for size, _ in plan)

    free = cp.cuda.runtime.memGetInfo()[0] - RESERVE
    if needed() > free:
        batches = [B for B in range(1, min(settings.B, 1 << 16))  # smaller ones that -d allows
                   if settings.total_batch_size % (B * settings.T * settings.gpus) == 0]
        fits = bisect.bisect_left(batches, True, key=lambda B: needed(B=B) > free)
        hint = f"not even -b {min(batches, default=settings.B)} fits: take a smaller -t or model"
        if fits:
            hint = f"the largest batch that fits is -b {batches[fits - 1]}"
        if needed(recompute=2) <= free:
            hint += ", or pass --recompute 2"
        raise UserError(f"-b {settings.B} -t {settings.T} needs {needed() + RESERVE >> 20} MiB of GPU memory,"
                        f" {free + RESERVE >> 20} MiB are free; {hint}")
    return memory_plan(architecture, config, settings, device, text)
