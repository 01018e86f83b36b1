"""The files of kernels/ that a run compiles, and their launch geometry, as data: a layer's numbers
go to the compiler as -D constants of its .cu file, and its launches read the same numbers."""

from types import SimpleNamespace
from typing import NamedTuple

from llmc.gpu.compiler import KernelFile, capability
from llmc.errors import UserError
from llmc.gpu.shares import UPDATE_CHUNK


def blocks(n, block):
    """How many blocks of size `block` cover n."""
    return -(-n // block)


def pack(array):
    """Elements in 16 bytes, which a thread works on."""
    return 16 // array.itemsize


WARP, WARPGROUP = 32, 128  # threads
BLOCK_THREADS = 256  # per block, for kernels that take any number
MATMUL_ROWS = 128  # of an output tile of a matmul, which writes one row of column sums
# positions of one token that a warp adds up; if a token has more, each piece writes a row of sums
ENCODER_PIECE = 32
CLASSIFIER_ROW = 8 * 1024 * 32  # bytes of a row of logits that a multiprocessor can hold, on Hopper
FP8_HISTORY = 16  # updates whose amax a scale follows from
ROW_GROUPS = 8  # of a block that adds up columns: common.cuh's BlockRows
ATTENTION_ROWS = 64  # of the attention's gradient, for which one row of column sums is written


def kernels(*names, **shared):
    """{kernel: the constant that says how many bytes of dynamic shared memory its blocks have, or
    None}."""
    return dict.fromkeys(names) | shared


class Has(NamedTuple):
    """What an architecture has, where architectures differ. Its page declares it."""

    norm: str = "layernorm"  # or "rmsnorm"
    rope: bool = False  # queries and keys are rotated
    qknorm: bool = False  # and normalized
    activation: str = "gelu"  # or "relu2", in the same kernels, or "swiglu"
    capped: bool = False  # the logits are; their linear layer has a bias


# layer -> its kernels, which are in kernels/<layer>.cu; those of "hopper/<layer>" need Hopper
KERNELS = {
    "encoder": kernels("encoder_forward", "encoder_backward_wte", "encoder_backward_wte_cut",
                       "encoder_backward_wpe"),
    "layernorm": kernels("residual_layernorm_forward", layernorm_backward="LAYERNORM_SHARED"),
    "rmsnorm": kernels("residual_rmsnorm_forward", rmsnorm_backward="LAYERNORM_SHARED"),
    "rope": kernels("rope_forward"),
    "qknorm": kernels("qknorm_forward"),
    "attention": kernels(attention_forward="ATTENTION_FORWARD_SHARED"),
    # in bfloat16, but for Hopper's attention
    "attention_backward": kernels("attention_backward_start",
                                  attention_backward="ATTENTION_BACKWARD_SHARED"),
    "gelu": kernels("gelu_forward", "gelu_backward"),
    "swiglu": kernels("swiglu_forward", "swiglu_backward"),
    "hopper/matmul": kernels(matmul_forward="MATMUL_SHARED",
                             matmul_forward_narrow="MATMUL_SHARED",
                             matmul_forward_gelu="MATMUL_SHARED",
                             matmul_backward_inp="MATMUL_SHARED",
                             matmul_backward_inp_gelu="MATMUL_SHARED",
                             matmul_backward_weight="MATMUL_SHARED"),
    "hopper/matmul_swiglu": kernels(matmul_forward_swiglu="MATMUL_SHARED",
                                    matmul_backward_inp_swiglu="MATMUL_SHARED",
                                    matmul_forward_rope="MATMUL_SHARED",
                                    matmul_forward_rope_narrow="MATMUL_SHARED"),
    "hopper/matmul_fp8": kernels(matmul_fp8="MATMUL_SHARED",
                                 matmul_fp8_narrow="MATMUL_SHARED",
                                 matmul_fp8_inp="MATMUL_SHARED",
                                 matmul_fp8_inp_narrow="MATMUL_SHARED",
                                 matmul_fp8_weight="MATMUL_SHARED",
                                 matmul_fp8_weight_across="MATMUL_SHARED",
                                 matmul_fp8_classifier_inp="MATMUL_SHARED",
                                 matmul_fp8_gelu="MATMUL_FP8_GELU_SHARED",
                                 matmul_fp8_gelu_backward="MATMUL_FP8_GELU_SHARED"),
    "fp8": kernels("quantize", "prepare_scales"),
    "norm_fp8": kernels(residual_layernorm_forward_fp8="NORM_SHARED",
                        residual_rmsnorm_forward_fp8="NORM_SHARED"),
    "classifier": kernels(classifier="CLASSIFIER_SHARED"),
    # in bfloat16, instead of `classifier` and `logits_bias`
    "hopper/classifier_capped": kernels(classifier_capped="CAPPED_SHARED"),
    "logits_bias": kernels("logits_bias_backward"),
    "transpose": kernels("transpose"),
    "column_sums": kernels("column_sums"),
    "update": kernels("copy_batch", "loss_mean", "add_gradients", "global_norm", "prepare_update",
                      "adamw_update", "round_weights"),
    "muon": kernels("muon_momentum", "muon_squares", "muon_normalize", "muon_update"),
}
# of attention.cu in float32 and of hopper/attention.cu, instead of attention_backward.cu
ATTENTION_TWO_PASSES = kernels(attention_backward_dquery="ATTENTION_DQUERY_SHARED",
                               attention_backward_dkv="ATTENTION_DKV_SHARED")
# of hopper/attention.cu and hopper/matmul_fp8.cu, beside the others
ATTENTION_FP8 = kernels(attention_backward_dquery_fp8="ATTENTION_DQUERY_SHARED",
                        attention_backward_dkv_fp8="ATTENTION_DKV_SHARED")
QKNORM_FP8 = kernels(matmul_fp8_qknorm="MATMUL_FP8_GELU_SHARED")

UPDATE = {"UPDATE_THREADS": 256, "UPDATE_LOSS_THREADS": 1024, "UPDATE_ADAMW_NUMBERS": 4,
          "UPDATE_CHUNK": UPDATE_CHUNK}


def check_sizes(config, fp8=False, qknorm=False):
    """Raise UserError for a model that the kernels do not support; qknorm: those that normalize
    queries and keys."""
    C, HS, F, Vp = config.C, config.HS, config.F, config.Vp
    if fp8 and (C % 16 or F % 16):
        raise UserError(f"C={C}, F={F}: --dtype fp8 expects multiples of 16: pass --dtype bfloat16")
    if fp8 and (Vp % 16 or Vp > CLASSIFIER_ROW // 2):
        raise UserError(f"{Vp} rows of the classifier's weight: --dtype fp8 expects a multiple of"
                        f" 16, up to {CLASSIFIER_ROW // 2}: pass --dtype bfloat16")
    if qknorm and HS & HS - 1:
        raise UserError(f"heads of {HS} channels: on a GPU, QK-norm expects 16, 32, 64 or 128;"
                        f" train this model on the CPU: python {type(config).__module__}.py")
    if HS % 16 or HS > 128 or C > 8192 or C % 8 or F % 8:
        raise UserError(f"C={C} with NH={config.NH} heads of {HS} channels, F={F}: the GPU kernels"
                        " expect C and F to be multiples of 8, C up to 8192, heads of 16, 32, ..."
                        f" 128; train this model on the CPU: python {type(config).__module__}.py")


def hopper_attention(config, precision, arch):
    """Whether attention uses Hopper's own tensor core instructions, not those of every GPU from
    sm_80 on."""
    return arch == "sm_90a" and config.HS in (64, 128) and precision.bf16


def hopper_matmul(precision, arch):
    """Whether we have kernels for matmuls: they use Hopper's own tensor core instructions."""
    return arch == "sm_90a" and precision.bf16


def kernel_files(architecture, config, precision, arch, matmul="auto"):
    """{layer: KernelFile} of a run. matmul: as Matmul's library."""
    geometry = layer_geometry(config, precision, arch)
    has_matmuls = hopper_matmul(precision, arch) and matmul != "cublaslt"
    layers = [layer for layer in architecture.LAYERS if has_matmuls or layer in KERNELS]
    if precision.fp8:
        layers += ["fp8", "norm_fp8", "matmul_fp8"]
    one_pass = geometry["attention"]["ATTENTION_BACKWARD_KEYS"] > 0
    if "attention" in layers and one_pass:
        layers.append("attention_backward")
    if architecture.HAS.capped and geometry["classifier_capped"]["CAPPED_CLUSTER"]:
        layers = [layer for layer in layers if layer not in ("classifier", "logits_bias")]
        layers.append("classifier_capped")

    files = {}
    constants = model_constants(config, precision) | architecture.CONSTANTS
    for layer in layers:
        name = layer if layer in KERNELS else f"hopper/{layer}"
        shared = KERNELS[name]
        if layer == "attention" and not one_pass:
            shared = shared | ATTENTION_TWO_PASSES
        if layer == "attention" and hopper_attention(config, precision, arch):
            name = "hopper/attention"
            if precision.fp8:
                shared = shared | ATTENTION_FP8
        if layer == "matmul_fp8" and architecture.HAS.qknorm:
            shared = shared | QKNORM_FP8

        numbers = geometry.get(layer, {})
        sizes = {kernel: numbers[constant] for kernel, constant in shared.items() if constant}
        files[layer] = KernelFile(name, tuple(shared), constants | numbers, sizes)
    return files


def model_constants(config, precision):
    """The -D constants of every file."""
    sizes = "C", "NH", "NKV", "HS", "F", "V", "Vp"
    return {
        **{f"MODEL_{name.upper()}": getattr(config, name) for name in sizes},
        "BFLOAT16": int(precision.bf16),
        "FLOAT32_GRADS": int(precision.grads == "float32"),
        "TF32": precision.tf32,
        "ROW_GROUPS": ROW_GROUPS,
        "MODEL_BIASES": 0,
        "MODEL_RELU2": 0,
    }


def launch_geometry(config, precision, arch):
    """All of layer_geometry's numbers as attributes, for the launches."""
    layers = layer_geometry(config, precision, arch).values()
    return SimpleNamespace(**{name: value for numbers in layers for name, value in numbers.items()})


def layer_geometry(config, precision, arch):
    """{layer: {constant: int}}, of layers that have constants."""
    C = config.C
    matmul = matmul_geometry() if hopper_matmul(precision, arch) else {}
    norm = layernorm_geometry(config, precision, arch)
    # rows that a block transposes in shared memory; up to C=6144, two or more blocks fit
    norm_rows = 32 if C <= 3072 else 16
    # columns of a tile of dweight, whose inner dimension is long; 192 does not divide C=1600
    long_columns = 160 if C % 192 and C % 160 == 0 else 192
    attention = attention_geometry(config, precision, arch)
    span = WARP * (32 if precision.bf16 else 16)  # channels of a warp
    return {
        "encoder": {"ENCODER_THREADS": 256, "ENCODER_SPANS": blocks(C, span)},
        "layernorm": norm,
        "rmsnorm": norm,
        "norm_fp8": norm | {"NORM_TILE_ROWS": norm_rows, "NORM_SHARED": norm_rows * C + 128},
        "attention": attention,
        "attention_backward": attention,
        "matmul": matmul,
        "matmul_swiglu": matmul,
        "matmul_fp8": matmul | {"MATMUL_FP8_LONG_BN": long_columns},
        "fp8": {"FP8_SIDE": 64, "FP8_THREADS": 128, "FP8_HISTORY": FP8_HISTORY},
        "classifier": classifier_geometry(config, precision, arch),
        "classifier_capped": capped_geometry(config, precision, arch),
        "transpose": {"TRANSPOSE_SIDE": 64, "TRANSPOSE_THREADS": 256},
        "column_sums": {"COLUMN_SUMS_THREADS": 512, "COLUMN_SUMS_COLUMNS": WARP},
        "update": UPDATE,
        "muon": UPDATE,
    }


def layernorm_geometry(config, precision, arch):
    """ROW_WARPS: warps that share a row of C elements. ROWS: rows that a block works on at once.
    BLOCKS: blocks on a multiprocessor in the backward pass. AHEAD: that pass copies the next row of
    dout, inp and dinp to shared memory while it works on the current one, on GPUs with room for two
    such blocks; not in float32, too large for some GPUs."""
    C = config.C
    number = capability(arch)
    row_warps = 1 if C <= 768 else 2 if C <= 1536 else 4 if C <= 3072 else 8
    rows = BLOCK_THREADS // WARP // row_warps
    ahead = precision.bf16 and number not in (86, 89) and number < 120
    return {
        "LAYERNORM_THREADS": BLOCK_THREADS,
        "LAYERNORM_ROW_WARPS": row_warps,
        "LAYERNORM_ROWS": rows,
        "LAYERNORM_BLOCKS": 2 if precision.bf16 else 1,
        "LAYERNORM_AHEAD": int(ahead),
        # two rows of three tensors of bfloat16
        "LAYERNORM_SHARED": rows * 2 * 3 * 2 * C if ahead else 0,
    }


def attention_geometry(config, precision, arch):
    """FORWARD_ROWS, BACKWARD_ROWS: resident rows of a block. PASSING: rows of the tiles that stream
    by. SHARED: bytes of a block's tiles, and of what it keeps beside them. BACKWARD_KEYS: those of
    a block of attention_backward.cu, 0 where the gradient takes two passes."""
    HS = config.HS
    if hopper_attention(config, precision, arch):
        return attention_hopper_geometry(HS) | {"ATTENTION_FP8": int(precision.fp8)}

    is_small = HS <= 64
    # channels of a row of a tile: mma.cuh
    padded = HS + 8 if precision.bf16 else blocks(HS, 32) * 32
    row = 4 * padded * (2 if precision.bf16 else 4)  # bytes for two pairs of tiles
    passing = 64 if precision.bf16 or is_small and arch != "sm_75" else 32  # sm_75 has 64 KB
    # whether registers allow two tiles of 16 rows for each warp
    two_tiles = is_small and (precision.bf16 or precision.tf32)
    numbers = {
        "ATTENTION_THREADS": 128,
        "ATTENTION_READ_ROWS": 0,  # no TMA
        "ATTENTION_FP8": 0,
        "ATTENTION_FORWARD_ROWS": 128 if two_tiles else 64,
        "ATTENTION_PASSING": passing,
        "ATTENTION_FORWARD_SHARED": passing * row,
    }
    if precision.bf16:
        return numbers | attention_one_pass_geometry(HS, arch)
    return numbers | {
        "ATTENTION_BACKWARD_KEYS": 0,
        "ATTENTION_BACKWARD_ROWS": ATTENTION_ROWS,
        "ATTENTION_DQUERY_SHARED": passing * row,
        "ATTENTION_DKV_SHARED": passing * (row + 4 * 4),  # and lse and D, double-buffered
    }


def attention_one_pass_geometry(HS, arch):
    """KEYS of a block, of which a warp has 16 * M; M blocks are on a multiprocessor. QUERIES of a
    tile. ANNOUNCED: tiles after which a block says how far it is. ROW_LANES: lanes that share a
    row's dot product, 16 bytes each at a time."""
    keys = 128
    M = 2 if HS <= 64 else 1  # as registers allow
    # so that two blocks fit into 164 KB
    queries = 32 if HS > 64 or capability(arch) in (80, 87) else 64
    # of bfloat16: keys, two pairs of tiles, two tiles of dS, all padded
    elements = (keys + 4 * queries) * (HS + 8) + 2 * keys * (queries + 8)
    return {
        "ATTENTION_BACKWARD_KEYS": keys,
        "ATTENTION_BACKWARD_M": M,
        "ATTENTION_BACKWARD_QUERIES": queries,
        "ATTENTION_BACKWARD_ANNOUNCED": 64 // queries,
        "ATTENTION_BACKWARD_ROW_LANES": (HS // 8) & -(HS // 8),  # a power of two
        "ATTENTION_BACKWARD_THREADS": WARP * keys // (16 * M),
        # and lse and D, double-buffered
        "ATTENTION_BACKWARD_SHARED": 2 * elements + 4 * 4 * queries,
    }


def attention_hopper_geometry(HS):
    """TMA reads boxes of READ_ROWS rows and half of a head of 128, or all of a head of 64, and
    writes boxes of a warp's 16 rows. A stage is a pair of tiles, key and value or, in dkv, query
    and dout: of FORWARD_KEYS rows in the forward pass, else of READ_ROWS."""
    groups = 2  # warpgroups that compute; one more loads
    rows = groups * ATTENTION_ROWS
    row = 2 * HS  # bytes

    read_rows = 4096 // HS
    stages = 8 if HS == 64 else 5
    backward_shared = (4 * rows + 2 * stages * read_rows) * row + 1024

    forward_keys = 8192 // HS
    forward_stages = 4
    forward_shared = (2 * rows + 2 * forward_stages * forward_keys) * row + 1024
    return {
        "ATTENTION_GROUPS": groups,
        "ATTENTION_THREADS": (1 + groups) * WARPGROUP,
        "ATTENTION_FORWARD_ROWS": rows,
        "ATTENTION_BACKWARD_KEYS": 0,
        "ATTENTION_BACKWARD_ROWS": rows,
        "ATTENTION_READ_ROWS": read_rows,
        "ATTENTION_WRITE_ROWS": 16,
        "ATTENTION_BOX_COLUMNS": 64,
        "ATTENTION_FORWARD_KEYS": forward_keys,
        "ATTENTION_FORWARD_STAGES": forward_stages,
        "ATTENTION_DQUERY_STAGES": stages,
        "ATTENTION_DKV_STAGES": stages,
        "ATTENTION_FORWARD_SHARED": forward_shared,
        "ATTENTION_DQUERY_SHARED": backward_shared,
        "ATTENTION_DKV_SHARED": backward_shared,
    }


def matmul_geometry():
    """BM, BN: rows and columns of an output tile; those of the forward pass may also be NARROW_BN
    columns wide. BK: a step along the inner dimension, 128 bytes. STRIP: columns that TMA writes at
    once."""
    BM = MATMUL_ROWS
    BN = 192
    BK = 64
    gelu_BN = 128
    stages = 4
    strip = 64
    return {
        "MATMUL_BM": BM,
        "MATMUL_BN": BN,
        "MATMUL_NARROW_BN": 160,
        "MATMUL_BK": BK,
        "MATMUL_STAGES": stages,
        "MATMUL_STRIP": strip,
        "MATMUL_NARROW_STRIP": 32,
        "MATMUL_THREADS": 3 * WARPGROUP,  # one group loads, two compute
        "MATMUL_GELU_THREADS": 4 * WARPGROUP,  # and one does GELU; in FP8, three compute
        "MATMUL_FP8_GELU_BN": gelu_BN,
        "MATMUL_FP8_GELU_SHARED": 2 * (stages * (BM + gelu_BN) * BK + 6 * BM * strip),
        "MATMUL_SHARED": 2 * (stages * (BM + BN) * BK + 4 * BM * strip),
    }


def classifier_geometry(config, precision, arch):
    """ROWS_ON_CHIP: rows of logits on a multiprocessor, one for each of its blocks; 0 if not used.
    SHARED: bytes of a row in shared memory. The last one of up to 8 parts may be in registers, 32
    bytes of a thread."""
    row = config.Vp * (2 if precision.bf16 else 4)  # bytes
    part = CLASSIFIER_ROW // 8
    rows = 0 if arch != "sm_90a" or row > CLASSIFIER_ROW else 2 if row <= 110 << 10 else 1
    threads = 1024 // rows if rows else 256 if precision.bf16 else 1024
    return {
        "CLASSIFIER_ROWS_ON_CHIP": rows,
        "CLASSIFIER_SHARED": min(row, 7 * part) if rows else 0,
        "CLASSIFIER_THREADS": threads,
        "CLASSIFIER_FP8": int(precision.fp8),
    }


def capped_geometry(config, precision, arch):
    """CLUSTER: blocks that share a row, 0 if not used. COLUMNS of each, and WARPS, each for 1024
    columns. STAGES: rows that a multiprocessor, which has one block, holds at once: 220 KB. SMS:
    multiprocessors for each cluster, as not all of an H100's 132 fit into clusters of 4."""
    if not hopper_matmul(precision, arch) or config.Vp > CLASSIFIER_ROW // 2:
        return {"CAPPED_CLUSTER": 0, "CAPPED_SMS": 2}

    cluster = 2 if config.Vp <= CLASSIFIER_ROW // 4 else 4
    columns = blocks(config.Vp, 16 * cluster) * 16
    stages = min(8, (220 << 10) // (2 * columns))
    return {
        "CAPPED_CLUSTER": cluster,
        "CAPPED_COLUMNS": columns,
        "CAPPED_WARPS": blocks(columns, 1024),
        "CAPPED_SMS": 2 if cluster == 2 else 5,
        "CAPPED_STAGES": stages,
        "CAPPED_SHARED": 2 * stages * columns,
        "CLASSIFIER_FP8": int(precision.fp8),
    }
