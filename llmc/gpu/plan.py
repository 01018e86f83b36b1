"""What a run allocates on the GPU: one plan, made from the settings. It is what is printed, checked
against the free memory, and allocated (memory.py)."""

import bisect
import dataclasses

from llmc.errors import UserError
from llmc.gpu.batch import batch_table
from llmc.gpu.device import cp
from llmc.gpu.matmul import workspace_table
from llmc.gpu.memory import Block
from llmc.gpu.shares import Shares
from llmc.tensors import Row

# bytes kept free for cuBLASLt's kernels, NCCL's buffers, the graph, small tables, rounding up
RESERVE = 256 << 20
MOST_ROWS = 1 << 12  # the largest batch that check_memory tries


def shares_of(architecture, config, settings):
    """How the ranks divide the parameters."""
    table = architecture.parameter_table(config, settings.precision.dtype)
    return Shares(table, settings.gpus, settings.weight_decay, settings.decay == "all")


def state_name(architecture, name):
    """What the plan calls a tensor of the optimizer's state."""
    return f"{architecture.Optimizer.__name__}'s {name}"


def memory_plan(architecture, config, settings, device, text=0, rank=0):
    """{what: Block} of all that a trainer allocates, but for tables of a few MB. text: with a
    Decoder of so many sequences."""
    B, T, precision = settings.B, settings.T, settings.precision
    parameters = architecture.parameter_table(config, precision.dtype)
    gradients = architecture.parameter_table(config, precision.grads)
    shares = shares_of(architecture, config, settings)

    plan = {  # without gaps between tensors: the optimizer sees flat vectors
        "parameters": Block({"parameters": parameters}, align=1, travels=True),
        "gradients": Block({"gradients": gradients}, align=1, travels=True),
    }
    if settings.gpus > 1:
        received = {"received": Row((shares.received_size(),), precision.grads)}
        plan["gradients of all ranks"] = Block({"received": received}, align=1, travels=True)

    for name, row in architecture.Optimizer.table(settings, shares, rank).items():
        plan[state_name(architecture, name)] = Block({name: {name: row}})

    for what, tables in architecture.tables(config, settings, B, T, device).items():
        plan[what] = Block(tables, scratch=True)

    if precision.fp8:
        from llmc.gpu.fp8 import operand_table, recomputed_inputs  # here: few runs need it
        operands = operand_table(parameters, B * T, recomputed_inputs(architecture, settings))
        plan["operands in 8 bits"] = Block({"operands": operands}, scratch=True)
    if text:
        from llmc.gpu.decoder import Decoder  # here, too
        plan["text"] = Block({"text": Decoder.table(architecture, config, precision, text, T,
                                                    device.geometry)})

    transposed = 0 if precision.bf16 else B * T * config.C
    plan["matmul workspaces"] = Block({"workspaces": workspace_table(transposed)}, scratch=True)
    plan["the batch"] = Block({"batch": batch_table(B, T, settings.own_micro_steps)}, align=1)
    return plan


def check_memory(architecture, config, settings, device, text=0, rank=0):
    """(the memory_plan, the largest batch that fits into the GPU's free memory). If the plan does
    not fit, raise UserError: memory needed, memory free, what would fit."""

    def needed(**changed):
        changed_settings = dataclasses.replace(settings, **changed)
        plan = memory_plan(architecture, config, changed_settings, device, text, rank)
        return sum(block.bytes for block in plan.values())

    free = cp.cuda.runtime.memGetInfo()[0] - RESERVE
    batches = [B for B in range(1, MOST_ROWS + 1)  # those that -d allows
               if settings.total_batch_size % (B * settings.T * settings.gpus) == 0]
    fits = bisect.bisect_left(batches, True, key=lambda B: needed(B=B) > free)
    largest = batches[fits - 1] if fits else None
    if needed() <= free:
        plan = memory_plan(architecture, config, settings, device, text, rank)
        return plan, max(settings.B, largest or 0)

    hint = f"not even -b {min(batches, default=settings.B)} fits: take a smaller -t or model"
    if largest:
        hint = f"the largest batch that fits is -b {largest}"
    if needed(recompute=2) <= free:
        hint += ", or pass --recompute 2"
    raise UserError(f"-b {settings.B} -t {settings.T} needs {needed() + RESERVE >> 20} MiB of GPU"
                    f" memory, {free + RESERVE >> 20} MiB are free; {hint}")
