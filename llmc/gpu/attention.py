"""How attention's kernels are launched, and what the backward pass needs beside its arguments."""

import math

from llmc.gpu.geometry import BLOCK_THREADS, blocks
from llmc.gpu.matmul import Quantized
from llmc.tensors import Row


def attention_scratch(config, B, T, geometry):
    """What attention_backward uses: D, the row sums of dout * out; in one pass, the sums of dquery,
    for whole tiles, and how many tiles each block of keys has added."""
    NH, NKV, HS = config.NH, config.NKV, config.HS
    D = Row((B, NH, T))
    keys = geometry.ATTENTION_BACKWARD_KEYS
    if not keys:
        return {"D": D}

    queries = geometry.ATTENTION_BACKWARD_QUERIES
    return {
        "dquery": Row((B, NH, blocks(T, queries) * queries, HS)),  # first: kernels read 16 bytes
        "added": Row((B, NKV, blocks(T, keys)), "int32"),
        "D": D,
    }


def launch_attention(device, name, arguments, reads, B, T, heads):
    """One block for each tile of rows of each of the `heads`. On Hopper in bfloat16, TMA copies
    `reads` and the first argument, the result, and the kernel is persistent: one block for each
    multiprocessor, which takes one tile after the other. Backward, with fewer than 8 tiles for each
    multiprocessor, a block for each tile is faster."""
    g = device.geometry
    is_forward = name == "attention_forward"
    rows = g.ATTENTION_FORWARD_ROWS if is_forward else g.ATTENTION_BACKWARD_ROWS
    grid = heads, blocks(T, rows), B
    if not g.ATTENTION_READ_ROWS:  # no TMA
        device.launch(name, grid, (g.ATTENTION_THREADS,), *arguments, T)
        return

    tiles = math.prod(grid)
    enough = device.sm_count * (1 if is_forward else 8)
    grid = (device.sm_count if tiles >= enough else tiles,)

    write, *others = arguments
    if isinstance(write, Quantized):
        name += "_fp8"
        arguments = write.plain, *others, *write.scaling
        write = write.plain.reshape(B, T, -1)

    columns = g.ATTENTION_BOX_COLUMNS
    maps = [device.tensor_map(array, g.ATTENTION_READ_ROWS, columns) for array in reads]
    maps.append(device.tensor_map(write, g.ATTENTION_WRITE_ROWS, columns))
    device.launch(name, grid, (g.ATTENTION_THREADS,), *arguments, T, B, *maps)


def attention_backward_in_one_pass(device, dinp, scratch, partials, dout, inp, out, lse, rope, rstd,
                                   B, T, NH, NKV, HS):
    """attention_backward of the pages, with kernels/attention_backward.cu."""
    g = device.geometry
    D, dquery, added = scratch.D, scratch.dquery, scratch.added
    starting = blocks(B * T * NH * g.ATTENTION_BACKWARD_ROW_LANES, BLOCK_THREADS)
    device.launch("attention_backward_start", (starting,), (BLOCK_THREADS,), D, added, dout, out, B,
                  T, added.size)

    # Heads run together, as many as keep all multiprocessors busy: what they share is in L2.
    head_blocks = blocks(T, g.ATTENTION_BACKWARD_KEYS)
    rounds = max(1, B * NKV * head_blocks // (8 * device.sm_count))
    together = blocks(B * NKV, rounds)
    device.launch("attention_backward", (B * NKV * head_blocks,), (g.ATTENTION_BACKWARD_THREADS,),
                  dinp, dquery, added, partials, dout, inp, lse, D, rope, rstd, B, T, together)
