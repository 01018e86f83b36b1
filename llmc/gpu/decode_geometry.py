"""The kernels of text generation: which files there are, and the numbers that they are compiled
with."""

import math
from types import SimpleNamespace

from llmc.errors import UserError
from llmc.gpu.compiler import KernelFile
from llmc.gpu.geometry import WARP, blocks, model_constants

DECODE = {  # file -> its kernels
    "decode/layers": ("decode_embed", "decode_layernorm"),
    "decode/matmul": ("decode_qkv", "decode_project", "decode_fc", "decode_logits"),
    "decode/attention": ("decode_attention",),
    "decode/sample": ("decode_sample",),
}


def decode_files(architecture, config, precision, geometry, shared):
    """The KernelFiles of text generation, but token_file's. geometry: gets their numbers, too;
    shared: see decode_geometry."""
    numbers = decode_geometry(architecture, config, precision, shared)
    vars(geometry).update(numbers)
    constants = model_constants(config, precision) | architecture.CONSTANTS | numbers
    sizes = {"decode/matmul": dict.fromkeys(DECODE["decode/matmul"], geometry.DECODE_SHARED)}
    return [KernelFile(name, kernels, constants, sizes.get(name, {}))
            for name, kernels in DECODE.items()]


def decode_geometry(architecture, config, precision, shared):
    """{constant: number} of kernels/decode/; raises UserError if `shared`, the bytes of shared
    memory that a block can have, is too small.

    A matmul has tiles of ROWS rows of the weight, up to STAGES of them at a time, and of X_ROWS
    rows of the other operand, x; and BLOCKS on a multiprocessor. FEW: up to this many rows of x, it
    does the layernorm itself. ROW_BYTES: of a row in shared memory. ATT_PARTS, FC_PARTS: into which
    attproj's and fcproj's sums are cut, WIDTH elements each. In attention, ROW_LANES lanes read a
    head's row, 16 bytes each; a block works on SPLIT positions at a time, 8 for each group of
    lanes. SHARED: bytes that a block may use. RMS, ROPE, SWIGLU: whether the model has them."""
    has = architecture.HAS
    size = 2 if precision.bf16 else 4
    row = config.C * size  # bytes
    warps = 8
    lanes = 1 << (blocks(config.HS * size, 16) - 1).bit_length()
    att_parts, att_width = inner_parts(config.NH * config.HS, config.C, size)
    fc_parts, fc_width = inner_parts(config.F, config.C, size)
    geometry = SimpleNamespace(
        DECODE_RMS=int(has.norm == "rmsnorm"),
        DECODE_EPS=getattr(config, "eps", 1e-5),
        DECODE_ROPE=int(has.rope),
        DECODE_SWIGLU=int(has.activation == "swiglu"),
        DECODE_ATT_PARTS=att_parts,
        DECODE_ATT_WIDTH=att_width,
        DECODE_FC_PARTS=fc_parts,
        DECODE_FC_WIDTH=fc_width,
        DECODE_WARPS=warps,
        DECODE_X_ROWS=16,
        DECODE_ROW_BYTES=64 * (blocks(row, 64) | 1),  # odd: no bank conflicts
        DECODE_FEW=4 if precision.bf16 else 1,
        DECODE_BLOCKS=2,
        DECODE_STAGES=4,
        DECODE_ROW_LANES=lanes,
        DECODE_SPLIT=8 * warps * WARP // lanes,
        DECODE_SAMPLE_THREADS=1024,
        DECODE_SHARED=shared - 2048,  # less what kernels declare and the driver keeps
    )
    for geometry.DECODE_ROWS in (16, 8):
        sizes = (decode_shared(geometry, 1, geometry.DECODE_FEW, True),
                 decode_shared(geometry, 1, geometry.DECODE_X_ROWS, False))
        if max(sizes) <= geometry.DECODE_SHARED and config.C % geometry.DECODE_ROWS == 0:
            return vars(geometry)
    raise UserError(f"text from a model with C={config.C} needs more shared memory than the"
                    f" {shared} bytes that a block of this GPU can have: train with -s 0, generate"
                    " with --device cpu")


def inner_parts(IC, C, size):
    """(parts, width): a sum over IC elements of `size` bytes is cut into so many parts of `width`
    elements, C at most; the last one may be shorter. Where C allows it, they begin at multiples of
    64 bytes."""
    parts = blocks(IC, C)
    unit = math.gcd(C, 64 // size)
    return parts, unit * blocks(IC, parts * unit)


def decode_shared(geometry, stages, N, normalizes):
    """Bytes of shared memory of a matmul's block: tiles of the weight, its warps' sums for N rows
    of x, and these rows, if it normalizes them."""
    g = geometry
    sums = min(stages, 2) * 4 * g.DECODE_WARPS * min(N, g.DECODE_X_ROWS) * g.DECODE_ROWS
    return stages * g.DECODE_ROWS * g.DECODE_ROW_BYTES + sums + normalizes * N * g.DECODE_ROW_BYTES


CLUSTER = 8  # blocks


def token_file(architecture, config, precision, gpu, constants):
    """The KernelFile, or None where the kernel does not fit. constants: of the files of
    kernels/decode/.

    CLUSTERS of blocks on a GPU; HEADS, and a SLICE of F, of a cluster; a block has WARPS that
    compute, and as many SLOTS for 8 rows of C weights as there is room for, of which FLIGHT are
    being filled."""
    # one fewer than there could be: a GPC that lacks some multiprocessors has one cluster less
    clusters = gpu.sm_count // CLUSTER - 1  # of an H200: 15
    heads = next((n for n in (1, 2) if blocks(config.NH, n) <= clusters), None)
    fits = (gpu.arch == "sm_90a" and precision.bf16 and heads and config.HS in (64, 128)
            and config.C % 64 == 0 and config.C <= 2048 and config.Vp % 16 == 0)
    if not fits:
        return None
    columns = heads * config.HS
    fc_slice = 64 * blocks(config.F, 64 * clusters)
    sent = max(3 * columns, fc_slice) // CLUSTER  # rows, to each block, two by a thread
    warps = next((n for n in (6, 8) if sent // 2 * CLUSTER <= WARP * n), None)
    if not warps:
        return None
    gates = 2 if architecture.HAS.activation == "swiglu" else 1
    products = max(64, sent, gates * fc_slice // CLUSTER)
    # struct Shared, and what else is declared
    declared = (8 * columns * (CLUSTER + warps + 1) + 2 * (config.C + fc_slice)
                + 8 * warps * products + 256)
    slot = 16 * config.C
    slots = (gpu.shared - declared) // (slot + 16)  # with two mbarriers; 6 or more
    numbers = {"TOKEN_CLUSTERS": clusters, "TOKEN_LAYERS": config.L, "TOKEN_WARPS": warps,
               "TOKEN_HEADS": heads, "TOKEN_SLICE": fc_slice, "TOKEN_SLOTS": slots,
               "TOKEN_FLIGHT": max(1, min(slots, round((48 << 10) / slot)))}
    # more than half of a multiprocessor's shared memory, so that it has one block
    return KernelFile("decode/token", ("decode_token",), constants | numbers,
                      {"decode_token": slots * slot})
