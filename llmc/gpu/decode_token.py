"""A pass over one token of one sequence, in bfloat16 on Hopper, as one kernel:
kernels/decode/token.cu."""

from types import SimpleNamespace

import numpy as np

from llmc.gpu.compiler import KernelFile
from llmc.gpu.device import cp
from llmc.gpu.geometry import WARP, blocks

CLUSTER = 8  # blocks
TOGETHER = 4  # words of sums
WEIGHTS = ("wte", "wpe", "ln0w", "lnfw", "lnfb", "lm_head", "lm_headb", "ln1w", "ln1b", "qkvw",
           "qkvb", "attprojb", "ln2w", "ln2b", "fcw", "fcb", "fcprojb")  # struct Weights


def token_file(architecture, config, precision, gpu, constants):
    """The KernelFile, or None where the kernel does not fit, or another way is as fast: then
    decode_layers does a step. constants: of the files of kernels/decode/.

    CLUSTERS of blocks on a GPU; HEADS, and a SLICE of F, of a cluster; a block has WARPS that
    compute, and as many SLOTS for 8 rows of C weights as there is room for, of which FLIGHT are
    being filled."""
    clusters = (gpu.sm_count // CLUSTER) - 1  # of an H200: 15 of 16
    heads = next((n for n in (1, 2, 4) if blocks(config.NH, n) <= clusters), None)
    fits = (gpu.arch == "sm_90a" and precision.bf16 and heads and config.HS in (64, 128)
            and config.C % 64 == 0 and config.C <= 2048 and config.Vp % 16 == 0)
    if not fits:
        return None
    slice = 64 * blocks(config.F, 64 * clusters)
    warps = 8
    gates = 2 if architecture.HAS.activation == "swiglu" else 1
    rows = max(3 * heads * config.HS, slice) // CLUSTER  # that are sent to each block
    if 4 * rows > WARP * warps:
        return None
    columns = heads * config.HS
    sums = 2 * 4 * warps * max(64, rows, gates * slice // CLUSTER)
    declared = sums + 8 * columns * (CLUSTER + warps + 1) + 2 * config.C + 2 * slice + 2048
    slot = 16 * config.C
    slots = (gpu.shared - declared) // slot
    if declared > 48 << 10 or slots < 4:
        return None
    numbers = {"TOKEN_CLUSTERS": clusters, "TOKEN_LAYERS": config.L, "TOKEN_WARPS": warps,
               "TOKEN_HEADS": heads, "TOKEN_SLICE": slice, "TOKEN_SLOTS": slots,
               "TOKEN_FLIGHT": max(1, min(slots, round((48 << 10) / slot))),
               "TOKEN_TOGETHER": TOGETHER}
    # more than half of a multiprocessor's, so that it has one block
    shared = max(slots * slot, 140 << 10)
    return KernelFile("decode/token", ("decode_token",), constants | numbers,
                      {"decode_token": shared})


class TokenPass:
    """A Decoder's decode_token: from its token to the logits, which decode_sample reads."""

    def __init__(self, decoder, params, constants):
        """params: Tensors on the GPU, of all layers; constants: of the KernelFile."""
        config, acts, self.device = decoder.config, decoder.acts, decoder.device
        self.grid = (CLUSTER * constants["TOKEN_CLUSTERS"],)
        self.block = (WARP * (constants["TOKEN_WARPS"] + 1),)
        tensors = {"lm_head": params.wte} | vars(params)
        addresses = [tensors[name].data.ptr if name in tensors else 0 for name in WEIGHTS]
        weights = np.void(np.array(addresses, np.uint64).tobytes())
        maps = [self.device.tensor_map(tensors[name], config.C // CLUSTER, 64)
                for name in ("attprojw", "fcprojw")]
        with self.device.stream:
            self.sums = cp.zeros((2, 2 * config.L, config.C // TOGETHER, 16), np.uint64)
        self.arguments = (acts.logits, acts.tiles, self.sums, acts.keys, acts.values, acts.tokens,
                          weights, *maps, decoder.rope, acts.control, decoder.T)

    def reset(self):
        """Before a text's first step."""
        with self.device.stream:
            self.sums.fill(0)

    def launch(self):
        self.device.launch("decode_token", self.grid, self.block, *self.arguments, early=True)


def open_token(decoder, params, file):
    """The Decoder's TokenPass, or None without a KernelFile, or where not all blocks, which wait
    for each other, are resident at the same time."""
    if not file:
        return None
    token = TokenPass(decoder, params, file.constants)
    resident = decoder.device.resident_clusters("decode_token", token.grid, token.block)
    return token if resident * CLUSTER >= token.grid[0] else None
