"""
GPT-2 training on the CPU, in NumPy: forward, backward and AdamW written out by hand.

What it is: the whole training program, and the home of all that both trainers share: settings, tensor layout,
file formats, data loader, tokenizer, sampler, checkpoints. What it is not: it knows no autograd and no PyTorch;
export_weights.py is the PyTorch reference that test_gpt2.py compares this file with.

    python prepro_tinyshakespeare.py          # data/tiny_shakespeare_{train,val}.bin
    python export_weights.py                  # gpt2_124M.bin and gpt2_tokenizer.bin
    OMP_NUM_THREADS=8 python train_gpt2.py    # prints:
        [GPT-2]
        max_seq_len: 1024
        ...
        val loss 5.252026
        step 0: train loss 5.356189 (took 812.345000 ms)

Names, here and everywhere: B batch size, T sequence length, C channels, NH heads, HS = C / NH head size, L layers,
V vocabulary size, Vp the same padded to a multiple of 128, maxT longest sequence, OC output channels; b t h c l are
their indices. `dx` is the gradient of the loss with respect to x. Comments give the shape where a tensor is born.

Layers are functions: outputs first, then saved statistics, inputs, weights, sizes. Each says which outputs it writes
(=) and which it adds to (+=). The CUDA kernels have the same names and arguments: these functions are their
specification.
"""

import argparse
import contextlib
import dataclasses
import functools
import glob
import io
import itertools
import json
import math
import os
import platform
import re
import shlex
import signal
import sys
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar, NamedTuple


def configure_openblas():
    """Two settings that OpenBLAS reads when numpy loads it, each left alone when the user has made it.

    OpenBLAS's threads spin for 26 ms after a product before they sleep; here they would take the cores from the
    element-wise loops that follow. 2^12 cycles is enough to catch the next product of a series.
    OpenBLAS picks its kernels by CPU model, and takes an unknown one (AMD's Zen 4 and 5, for instance) for a Haswell:
    AVX2, half the speed. The SkylakeX kernels are AVX-512, for any CPU that has all the instructions they use.
    """
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "12")
    if "OPENBLAS_CORETYPE" in os.environ or platform.machine() != "x86_64" or not os.path.exists("/proc/cpuinfo"):
        return
    with open("/proc/cpuinfo") as f:
        flags = next((line for line in f if line.startswith("flags")), "").split()
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(flags):
        os.environ["OPENBLAS_CORETYPE"] = "SkylakeX"


configure_openblas()

import numpy as np  # noqa: E402  (after the choice above)

# ----------------------------------------------------------------------------------------------------------------------
# errors: whatever a user can cause ends as one line on stderr and exit status 1


class UserError(Exception):
    """Something that the user can mend. The message is one line: what, found, expected, and the mending command."""


def run_main(main):
    """Run `main()`; turn what a user can cause into one line and an exit status, never a traceback."""
    program = os.path.basename(sys.argv[0])
    if sys.stdout is None:  # started with stdout closed
        sys.stdout = open(os.devnull, "w")
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"{program}: error: {error}")
    except MemoryError as error:
        sys.exit(f"{program}: error: out of memory ({error or 'no details'}); try a smaller -b, -t or model")
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # that is `... | head`, which nobody needs to hear about
            print(f"{program}: error: {error.filename or 'standard output'}: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still in the buffer has nowhere to go
        sys.exit(1)


# ----------------------------------------------------------------------------------------------------------------------
# settings: one dataclass makes the command line, the defaults and the help of both trainers


def option(default, *flags, group, help, **argparse_options):
    """A dataclass field that is also a command-line flag; `argparse_options` go to add_argument (choices, metavar)."""
    metadata = {"flags": flags, "group": group, "help": help, **argparse_options}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class Settings:
    """What one training run does. The defaults are llm.c's CPU program of April 2024."""

    model: str = option("gpt2_124M.bin", "-e", group="files", help="model checkpoint to start from")
    data: str = option("data/tiny_shakespeare", "-i", group="files",
                       help="token files: a prefix to _train.bin and _val.bin, or the path or quoted glob of training shards")
    val_data: str = option("", "-j", group="files", help="validation tokens, path or quoted glob (made from -i if not given)")
    tokenizer: str = option("gpt2_tokenizer.bin", group="files", help="tokenizer that prints the samples")
    output: str = option("", "-o", group="files",
                         help="log file when it ends in .log, else a directory for main.log and checkpoints")

    B: int = option(4, "-b", "--batch_size", group="batch", help="sequences in a batch, B")
    T: int = option(64, "-t", "--sequence_length", group="batch", help="tokens in a sequence, T")
    total_batch_size: int = option(0, "-d", group="batch",
                                   help="tokens in an update, a multiple of B*T: averages several batches' gradients (0: B*T)")
    spread: int = option(0, group="batch", choices=(0, 1),
                         help="1: each row of a training batch reads in its own part of the data, so that a batch is varied")
    steps: int = option(41, "-x", group="batch", help="number of updates")

    learning_rate: float = option(1e-4, "-l", group="optimizer", help="peak learning rate")
    warmup_steps: int = option(0, "-u", group="optimizer", help="steps of linear warm-up")
    schedule: str = option("constant", "-k", group="optimizer", choices=("constant", "cosine", "linear", "wsd"),
                           help="learning rate after the warm-up")
    final_fraction: float = option(0.0, "-q", group="optimizer", help="learning rate at the end, as a fraction of the peak")
    beta1: float = option(0.9, group="optimizer", help="AdamW: decay of the first moment")
    beta2: float = option(0.999, group="optimizer", help="AdamW: decay of the second moment")
    eps: float = option(1e-8, group="optimizer", help="AdamW: added to the denominator")
    weight_decay: float = option(0.0, "-c", group="optimizer", help="AdamW: decoupled weight decay")
    decay: str = option("matrices", group="optimizer", help="what weight decay applies to", choices=("matrices", "all"))
    grad_clip: float = option(0.0, group="optimizer", help="largest global gradient norm (0: no clipping)")

    val_every: int = option(10, "-v", group="reports", help="validate every that many steps (0: never)")
    val_batches: int = option(5, "-m", group="reports", help="validation batches, at most")
    sample_every: int = option(20, "-s", group="reports", help="generate text every that many steps (0: never)")
    sample_tokens: int = option(64, "-g", group="reports",
                                help="tokens in a sample, the first (end of text) included; the model sees the last T")
    final_reports: int = option(0, group="reports", choices=(0, 1),
                                help="1: validate and sample after the last update, also when it is no multiple of -v and -s")

    checkpoint_every: int = option(0, "-n", group="checkpoints",
                                   help="save every that many updates, and after the last (0: never)")
    resume: int = option(0, "-y", group="checkpoints", choices=(0, 1),
                         help="1: continue from the newest complete checkpoint in -o")

    AT_LEAST: ClassVar = dict(B=1, T=1, steps=1, total_batch_size=0, warmup_steps=0, val_every=0, val_batches=1, sample_every=0,
                              sample_tokens=1, checkpoint_every=0, weight_decay=0.0, grad_clip=0.0, learning_rate=0.0)

    @property
    def output_dir(self):
        """The run's directory, or None when -o is absent or names a .log file."""
        return self.output if self.output and not self.output.endswith(".log") else None

    @property
    def micro_steps(self):
        """Batches whose gradients are averaged for one update."""
        return max(1, self.total_batch_size // (self.B * self.T))

    def check(self):
        """Raise UserError for a value that no run can have."""
        for name, least in self.AT_LEAST.items():
            value = getattr(self, name)
            if not least <= value < 2**31 and not (isinstance(value, float) and least <= value < math.inf):
                raise UserError(f"{flag_of(self, name)} {value}: expected a number of at least {least}, and below 2^31")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"{flag_of(self, name)} {getattr(self, name)}: expected 0 <= {name} < 1")
        if not np.float32(self.eps * math.sqrt(1.0 - self.beta2)) > 0.0:  # 0/0 where a gradient has always been 0
            raise UserError(f"{flag_of(self, 'eps')} {self.eps}: expected more than 0, in float32 (the default is 1e-8)")
        if not 0.0 <= self.final_fraction <= 1.0:
            raise UserError(f"{flag_of(self, 'final_fraction')} {self.final_fraction}: expected 0 to 1")
        if self.total_batch_size % (self.B * self.T):
            raise UserError(f"-d/--total_batch_size {self.total_batch_size}: expected a multiple of B*T = {self.B * self.T}")
        if (self.checkpoint_every or self.resume) and not self.output_dir:
            found = f"-o {self.output} is a log file" if self.output else "there is no -o"
            raise UserError(f"-n and -y need a directory for checkpoints, but {found}: pass -o DIR")


def flag_of(settings, name):
    """'-b/--batch_size' for the field B: how messages name a setting."""
    field = next(f for f in dataclasses.fields(settings) if f.name == name)
    return "/".join(field_flags(field))


def field_flags(field):
    flags = field.metadata["flags"]
    return flags if any(flag.startswith("--") for flag in flags) else (*flags, f"--{field.name}")


def parse_settings(settings_class, description, argv=None):
    """Make the command line from the dataclass and return its filled-in instance. argparse exits with 2 on a bad flag."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    groups = {}
    for field in dataclasses.fields(settings_class):
        extra = dict(field.metadata)
        extra.pop("flags")
        group = extra.pop("group")
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        if field.type is bool:
            extra["action"] = "store_true"
        else:
            extra["type"] = field.type
            extra.setdefault("metavar", None if "choices" in extra else {int: "N", float: "X", str: "NAME"}[field.type])
        groups[group].add_argument(*field_flags(field), dest=field.name, default=field.default, **extra)
    settings = settings_class(**vars(parser.parse_args(argv)))
    settings.check()
    return settings


def print_changed_settings(settings):
    """One line with the settings that differ from the defaults; none when all are defaults."""
    changed = [f"{f.name}={getattr(settings, f.name)}" for f in dataclasses.fields(settings)
               if getattr(settings, f.name) != f.default]
    if changed:
        print("settings:", " ".join(changed))


# ----------------------------------------------------------------------------------------------------------------------
# layout: a model's tensors are tables; offsets, views, files, memory and tests derive from them


@dataclass(frozen=True)
class Config:
    """The sizes of a model, as in the header of its checkpoint."""

    maxT: int
    V: int
    L: int
    NH: int
    C: int
    Vp: int  # rows of wte: V padded with zero rows (V itself in a file without padding)

    def describe(self):
        return f"maxT={self.maxT} V={self.V} L={self.L} NH={self.NH} C={self.C} Vp={self.Vp}"


def padded(V):
    """V rounded up to the next multiple of 128."""
    return -(-V // 128) * 128


class Row(NamedTuple):
    """One tensor of a table."""

    shape: tuple
    dtype: str = "float32"

    @property
    def stored_as(self):
        """NumPy has no bfloat16: such a tensor is an array of its bits."""
        return np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)


MATRICES = ("wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw")  # what weight decay applies to by default


def parameter_table(config, dtype="float32"):
    """name -> Row for the 16 parameter tensors, in the order of every checkpoint. Linear weights are (out, in)."""
    maxT, L, C, Vp = config.maxT, config.L, config.C, config.Vp
    shapes = {
        "wte": (Vp, C),  # token embedding, and the classifier's weight
        "wpe": (maxT, C),  # position embedding
        "ln1w": (L, C),
        "ln1b": (L, C),
        "qkvw": (L, 3 * C, C),
        "qkvb": (L, 3 * C),
        "attprojw": (L, C, C),
        "attprojb": (L, C),
        "ln2w": (L, C),
        "ln2b": (L, C),
        "fcw": (L, 4 * C, C),
        "fcb": (L, 4 * C),
        "fcprojw": (L, C, 4 * C),
        "fcprojb": (L, C),
        "lnfw": (C,),
        "lnfb": (C,),
    }
    return {name: Row(shape, dtype) for name, shape in shapes.items()}


def activation_table(config, B, T):
    """name -> Row for what a forward pass over (B, T) tokens leaves behind for the backward pass."""
    L, NH, C, V = config.L, config.NH, config.C, config.V
    return {
        "encoded": Row((B, T, C)),
        "ln1": Row((L, B, T, C)),
        "ln1_mean": Row((L, B, T)),
        "ln1_rstd": Row((L, B, T)),
        "qkv": Row((L, B, T, 3 * C)),
        "atty": Row((L, B, T, C)),
        "preatt": Row((L, B, NH, T, T)),
        "att": Row((L, B, NH, T, T)),
        "attproj": Row((L, B, T, C)),
        "residual2": Row((L, B, T, C)),
        "ln2": Row((L, B, T, C)),
        "ln2_mean": Row((L, B, T)),
        "ln2_rstd": Row((L, B, T)),
        "fch": Row((L, B, T, 4 * C)),
        "fch_gelu": Row((L, B, T, 4 * C)),
        "fcproj": Row((L, B, T, C)),
        "residual3": Row((L, B, T, C)),
        "lnf": Row((B, T, C)),
        "lnf_mean": Row((B, T)),
        "lnf_rstd": Row((B, T)),
        "logits": Row((B, T, V)),  # the backward pass overwrites them with their gradient
        "probs": Row((B, T, V)),
        "losses": Row((B, T)),
    }


def scratch_table(config, B, T):
    """name -> Row for the gradients of activations. Each is reused by every layer, from the last to the first."""
    NH, C = config.NH, config.C
    return {
        "dresidual": Row((B, T, C)),  # of the residual stream; lives through the whole backward pass
        "dbranch": Row((B, T, C)),  # of a layernorm's or the attention's output; dies in the next call
        "dqkv": Row((B, T, 3 * C)),  # from attention_backward to the next matmul_backward
        "dfch": Row((B, T, 4 * C)),  # of fch_gelu, then in place of fch
        "dpreatt": Row((B, NH, T, T)),  # within attention_backward
        "datt": Row((B, NH, T, T)),  # within attention_backward
        "dlosses": Row((B, T)),  # 1 / (B*T * micro steps), written before the backward pass
    }


def table_elements(table):
    return sum(math.prod(row.shape) for row in table.values())


def row_bytes(row, align=1):
    """The bytes of one tensor, and what it takes to the next multiple of `align`."""
    return -(-math.prod(row.shape) * row.stored_as.itemsize // align) * align


def table_bytes(table, align=1):
    return sum(row_bytes(row, align) for row in table.values())


class Tensors(SimpleNamespace):
    """Named views of one buffer, in the table's order with no gaps: `params.qkvw[l]` is (3C, C); `table`, `buffer`."""


def views(table, buffer, align=1):
    """Lay a table's tensors over the start of a byte buffer (NumPy's or CuPy's), each at a multiple of `align` bytes from
    there; nothing is allocated."""
    tensors, offset = {}, 0
    for name, row in table.items():
        tensors[name] = buffer[offset : offset + row_bytes(row)].view(row.stored_as).reshape(row.shape)
        offset += row_bytes(row, align)
    return Tensors(table=table, buffer=buffer[:offset], **tensors)


def allocate(table, xp=np):
    """One zeroed buffer for a whole table, in NumPy or CuPy (`xp`), aligned for vector loads; returns its views."""
    size = table_bytes(table)
    buffer = xp.zeros(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64 if xp is np else 0  # CuPy's own allocations are aligned to 512
    return views(table, buffer[start : start + size])


def flat(tensors):
    """The whole buffer of a table with one dtype as one vector: what the optimizer and the files work on."""
    return tensors.buffer.view(next(iter(tensors.table.values())).stored_as)


def count_parameters(config):
    """The number of parameters, padding rows left out: 124439808 for GPT-2 124M."""
    return table_elements(parameter_table(dataclasses.replace(config, Vp=config.V)))


# ----------------------------------------------------------------------------------------------------------------------
# files: the one reader and writer of every format. All integers are little-endian, headers are 256 int32.

MODEL_MAGIC, STATE_MAGIC, TOKENIZER_MAGIC, TOKENS_MAGIC, OPTIMIZER_MAGIC = 20240326, 20240327, 20240328, 20240520, 20240527
KINDS = {
    MODEL_MAGIC: "model checkpoint",
    STATE_MAGIC: "debug state",
    TOKENIZER_MAGIC: "tokenizer",
    TOKENS_MAGIC: "token file",
    OPTIMIZER_MAGIC: "optimizer state",
}
HEADER_BYTES = 1024
TRAILER_VERSION = 1  # of this project's addition to the debug state


def open_input(path, mend):
    """Open a file for reading, or raise UserError that ends in `mend`: how to come by such a file."""
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {mend}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a directory, expected a file; {mend}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {mend}") from None


@contextlib.contextmanager
def replacing(path):
    """Write a file beside its place and rename it there when it is complete and on the disk; never half a file.

    Raises UserError when it cannot be written (no permission, disk full); what stood at `path` before is then still there.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        sync_directory(os.path.dirname(path))
    except OSError as error:
        if error.errno is None:  # not the disk's: the errors of requests are OSErrors too
            raise
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def sync_directory(path):
    """See to it that a rename reaches the disk, where the file system has a way to ask for that."""
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.open(path or ".", os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_directory(path):
    try:
        os.makedirs(path or ".", exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot make this directory ({error.strerror})") from None


def read_header(f, magic, mend):
    """The header as a (256,) int32 array; raises UserError if the file at hand is of another kind."""
    data = f.read(HEADER_BYTES)
    kind = KINDS[magic]
    if len(data) < HEADER_BYTES:
        raise UserError(f"{f.name}: {len(data)} bytes, expected a {kind} with a {HEADER_BYTES}-byte header; {mend}")
    header = np.frombuffer(data, "<i4")
    if header[0] != magic:
        found = KINDS.get(int(header[0]))
        found = f"it is a {found} (magic {header[0]})" if found else f"magic {header[0]}"
        raise UserError(f"{f.name}: {found}, expected a {kind} (magic {magic}); {mend}")
    return header


def make_header(magic, version, *fields):
    header = np.zeros(256, "<i4")
    header[0], header[1] = magic, version
    header[2 : 2 + len(fields)] = fields
    return header


def check_size(f, expected, what, mend):
    """Raise UserError unless the open file has exactly that many bytes: nothing is allocated for a damaged file."""
    found = os.fstat(f.fileno()).st_size
    if found != expected:
        state = "cut short" if found < expected else "too long"
        raise UserError(f"{f.name}: {found} bytes, expected {expected} for {what} ({state}); {mend}")


def read_into(f, array):
    """Fill a contiguous array from the file; its size was checked before."""
    if f.readinto(memoryview(array).cast("B")) != array.nbytes:
        raise UserError(f"{f.name}: ended early: did another program write to it just now?")


def bf16_bits(x):
    """float32 array -> uint16 array of its bfloat16 bits, rounded to nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16).astype(np.uint16)


def bf16_to_float32(bits):
    """uint16 array of bfloat16 bits -> float32 array."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


CHUNK = 1 << 22  # elements that file readers and writers hold at a time


def chunks(array):
    """A flat array in consecutive pieces of at most CHUNK elements."""
    return (array[i : i + CHUNK] for i in range(0, array.size, CHUNK))


# Model checkpoint: header [2] maxT [3] V [4] L [5] NH [6] C [7] Vp, then the 16 tensors of parameter_table.
# Version 1: float32, V rows in wte. Version 3: float32, Vp rows. Version 5: bfloat16, Vp rows.

MODEL_MEND = "make it with: python export_weights.py"


def read_config(f, mend):
    """Version and Config from the header of an open model checkpoint, every field and the file's size checked."""
    header = read_header(f, MODEL_MAGIC, mend)
    version, maxT, V, L, NH, C, Vp = (int(x) for x in header[1:8])
    if version in (2, 4):
        raise UserError(f"{f.name}: version {version}, a mixed bfloat16 layout that llm.c used for three days in May 2024;"
                        f" expected 1, 3 or 5; {mend}")
    if version not in (1, 3, 5):
        raise UserError(f"{f.name}: model version {version}, expected 1, 3 or 5; {mend}")
    if version == 1:
        Vp = V
    for name, value in dict(maxT=maxT, V=V, L=L, NH=NH, C=C, Vp=Vp).items():
        if value < 1:
            raise UserError(f"{f.name}: header field {name} is {value}, expected at least 1; {mend}")
    if C % NH:
        raise UserError(f"{f.name}: C={C} is not divisible by NH={NH}; {mend}")
    if Vp < V:
        raise UserError(f"{f.name}: padded vocabulary Vp={Vp} is smaller than V={V}; {mend}")
    config = Config(maxT, V, L, NH, C, Vp)
    size = HEADER_BYTES + table_elements(parameter_table(config)) * (2 if version == 5 else 4)
    check_size(f, size, f"version {version}, {config.describe()}", mend)
    return version, config


def read_model(path, mend=MODEL_MEND):
    """Read a model checkpoint of version 1, 3 or 5.

    Returns (config, params): params is float32 with wte padded to Vp rows, a multiple of 128, whatever the file has.
    Raises UserError for anything but a whole, finite, well-formed model.
    """
    with open_input(path, mend) as f:
        version, config = read_config(f, mend)
        stored_rows = config.Vp
        config = dataclasses.replace(config, Vp=padded(stored_rows))
        params = allocate(parameter_table(config))
        wte_pad = (config.Vp - stored_rows) * config.C
        values = flat(params)
        parts = [values[: stored_rows * config.C], values[stored_rows * config.C + wte_pad :]]
        for piece in itertools.chain.from_iterable(chunks(part) for part in parts):
            if version == 5:
                bits = np.empty(piece.size, np.uint16)
                read_into(f, bits)
                piece[:] = bf16_to_float32(bits)
            else:
                read_into(f, piece)
    check_finite(path, params, mend)
    params.wte[config.V :] = 0.0  # padding rows never take part, whatever a file holds there
    return config, params


def check_finite(where, params, mend):
    """Raise UserError that names the first tensor with a NaN or an infinity."""
    for name in params.table:
        if not all(np.isfinite(piece).all() for piece in chunks(getattr(params, name).reshape(-1))):
            raise UserError(f"{where}: tensor {name} holds NaN or infinite values; {mend}")


def write_model(path, config, params, version=3):
    """Write a model checkpoint; version 1, 3 (float32) or 5 (bfloat16, rounded to nearest even)."""
    rows = config.V if version == 1 else config.Vp
    values = flat(params)
    fields = (config.maxT, config.V, config.L, config.NH, config.C, 0 if version == 1 else rows)
    with replacing(path) as f:
        f.write(make_header(MODEL_MAGIC, version, *fields))
        for part in (values[: rows * config.C], values[config.Vp * config.C :]):
            for piece in chunks(part):
                f.write(bf16_bits(piece) if version == 5 else piece)


def fingerprint(config, params):
    """CRC-32 of the weights in bfloat16, padding left out: the same for versions 1, 3 and 5 of one model."""
    crc = 0
    values = flat(params)
    for part in (values[: config.V * config.C], values[config.Vp * config.C :]):
        for piece in chunks(part):
            crc = zlib.crc32(bf16_bits(piece), crc)
    return crc


# Debug state: header [2] B [3] T, then x, y int32 (B, T); logits float32 (B, T, V); loss; the 16 gradients, wte's with
# V rows in version 1 and Vp in version 2. What a PyTorch run saw and computed, for the parity test.
# This project's trailer follows: float64 [5] learning rate, beta1, beta2, eps, weight decay; float32 [n] the losses of n
# training steps on that batch. The header says so: [8] trailer version (0: none), [9] n, [10] CRC-32 of the weights.

STATE_MEND = "make it with: python export_weights.py"


@dataclass
class DebugState:
    """One batch, what PyTorch made of it, and (from export_weights.py) how its training went on from there."""

    x: np.ndarray  # (B, T) int32
    y: np.ndarray  # (B, T) int32
    logits: np.ndarray  # (B, T, V) float32
    loss: float
    grads: Tensors  # parameter_table
    optimizer: dict | None = None  # learning_rate, beta1, beta2, eps, weight_decay
    losses: np.ndarray | None = None  # (n,) float32
    crc: int = 0  # fingerprint of the weights it was made from


def write_debug_state(path, config, state, version=2):
    """Write a debug state with its trailer; version 1 (V rows in wte's gradient) or 2 (Vp rows)."""
    header = make_header(STATE_MAGIC, version, *state.x.shape)
    header[8:11] = TRAILER_VERSION, len(state.losses), np.uint32(state.crc).view(np.int32)
    grads, rows = flat(state.grads), config.V if version == 1 else config.Vp
    with replacing(path) as f:
        for part in (header, state.x.astype("<i4"), state.y.astype("<i4"), state.logits, np.float32(state.loss),
                     grads[: rows * config.C], grads[config.Vp * config.C :],
                     np.array(list(state.optimizer.values()), "<f8"), state.losses.astype("<f4")):
            f.write(part)


def read_debug_state(path, config, params):
    """Read a debug state, version 1 or 2, that belongs to this model; raises UserError when it does not."""
    with open_input(path, STATE_MEND) as f:
        header = read_header(f, STATE_MAGIC, STATE_MEND)
        version, B, T = (int(x) for x in header[1:4])
        if version not in (1, 2):
            raise UserError(f"{path}: debug state version {version}, expected 1 or 2; {STATE_MEND}")
        if B < 1 or not 1 <= T <= config.maxT:
            raise UserError(f"{path}: B={B} T={T}, expected B of at least 1, T of 1 to {config.maxT}; {STATE_MEND}")
        trailer, n, crc = int(header[8]), int(header[9]), int(header[10:11].view(np.uint32)[0])
        if trailer not in (0, TRAILER_VERSION) or n < 0:
            raise UserError(f"{path}: trailer version {trailer} with {n} losses, expected version {TRAILER_VERSION}")
        rows = config.V if version == 1 else config.Vp
        stored = table_elements(parameter_table(dataclasses.replace(config, Vp=rows)))
        size = HEADER_BYTES + 4 * (2 * B * T + B * T * config.V + 1 + stored) + (40 + 4 * n if trailer else 0)
        check_size(f, size, f"version {version}, B={B} T={T} and this model ({config.describe()})", STATE_MEND)
        if trailer and crc != fingerprint(config, params):
            raise UserError(f"{path}: belongs to another model: it was made from other weights; {STATE_MEND}")

        x, y = np.empty((B, T), np.int32), np.empty((B, T), np.int32)
        logits, loss = np.empty((B, T, config.V), np.float32), np.empty(1, np.float32)
        grads = allocate(parameter_table(config))
        values = flat(grads)
        for part in (x, y, logits, loss, values[: rows * config.C], values[config.Vp * config.C :]):
            read_into(f, part)
        for ids in (x, y):
            if ids.min() < 0 or ids.max() >= config.V:
                raise UserError(f"{path}: holds a token id outside 0 to {config.V - 1}; {STATE_MEND}")
        state = DebugState(x, y, logits, float(loss[0]), grads)
        if trailer:
            settings, losses = np.empty(5, np.float64), np.empty(n, np.float32)
            read_into(f, settings)
            read_into(f, losses)
            state.optimizer = dict(zip(("learning_rate", "beta1", "beta2", "eps", "weight_decay"), settings.tolist()))
            state.losses, state.crc = losses, crc
    return state


# Tokenizer: header [2] V [3] id of the end-of-text token (version 2), then for each id a length byte and the token's bytes.

TOKENIZER_MEND = "make it with: python export_weights.py"


@dataclass
class Tokenizer:
    """Turns ids into bytes; there is no encoder here, the prepro scripts encode."""

    tokens: list  # id -> bytes
    eot: int

    def printable(self, id):
        """The bytes to print for an id: a single byte only when it is printable ASCII or white space."""
        token = self.tokens[id]
        if len(token) == 1 and not (32 <= token[0] < 127 or token.isspace()):
            return b""
        return token


def read_tokenizer(path):
    """Read a tokenizer file of version 1 or 2; raises UserError for a damaged one."""
    with open_input(path, TOKENIZER_MEND) as f:
        header = read_header(f, TOKENIZER_MAGIC, TOKENIZER_MEND)
        version, V, eot = (int(x) for x in header[1:4])
        if version not in (1, 2):
            raise UserError(f"{path}: tokenizer version {version}, expected 1 or 2; {TOKENIZER_MEND}")
        eot = 50256 if version == 1 else eot
        data = f.read()
    if not 1 <= V <= len(data) or not 0 <= eot < V:
        raise UserError(f"{path}: vocabulary of {V} and end of text {eot} in {len(data)} bytes; {TOKENIZER_MEND}")
    tokens, position = [], 0
    for id in range(V):
        length = data[position] if position < len(data) else 0
        token = data[position + 1 : position + 1 + length]
        if length == 0 or len(token) < length:
            found = "has length zero" if position < len(data) and length == 0 else "is cut short"
            raise UserError(f"{path}: token {id} of {V} {found}; {TOKENIZER_MEND}")
        tokens.append(token)
        position += 1 + length
    if position != len(data):
        raise UserError(f"{path}: {len(data) - position} bytes too many after {V} tokens; {TOKENIZER_MEND}")
    return Tokenizer(tokens, eot)


def write_tokenizer(path, tokens, eot, version=2):
    """Write a tokenizer file; `tokens` is a list of bytes, each 1 to 255 long. Version 1 knows GPT-2's end of text alone."""
    if version == 1 and eot != 50256:
        raise UserError(f"{path}: end of text is token {eot}, which version 1 cannot say (it means 50256): write version 2")
    with replacing(path) as f:
        f.write(make_header(TOKENIZER_MAGIC, version, len(tokens), *([eot] if version == 2 else [])))
        for token in tokens:
            f.write(bytes([len(token)]) + token)


# Token file: raw int32 (April), or a header [2] count and uint16 (HEAD). Readers tell the two apart by the magic.

TOKENS_MEND = "make it with: python prepro_tinyshakespeare.py (or the prepro script of your text)"


def write_tokens(path, pieces, count, format="int32"):
    """Write `count` tokens that arrive as an iterable of integer arrays; format 'int32' or 'uint16'."""
    written = 0
    with replacing(path) as f:
        if format == "uint16":
            f.write(make_header(TOKENS_MAGIC, 1, count))
        for piece in pieces:
            f.write(np.asarray(piece).astype("<i4" if format == "int32" else "<u2"))
            written += len(piece)
        if written != count:
            raise ValueError(f"{path}: {count} tokens announced, {written} given")


def open_tokens(path, V, least=1):
    """Map a token file into memory, as a 1-D integer array on disk.

    Raises UserError when it has fewer than `least` tokens, an id that is not below V, or a size that cannot be.
    """
    with open_input(path, TOKENS_MEND) as f:
        size = os.fstat(f.fileno()).st_size
        start = f.read(HEADER_BYTES)
        magic = int(np.frombuffer(start[:4], "<i4")[0]) if len(start) >= 4 else None
        if magic == TOKENS_MAGIC:
            f.seek(0)
            header = read_header(f, TOKENS_MAGIC, TOKENS_MEND)
            version, count = int(header[1]), int(header[2])
            if version != 1:
                raise UserError(f"{path}: token file version {version}, expected 1; {TOKENS_MEND}")
            if count < 0:
                raise UserError(f"{path}: header says {count} tokens; {TOKENS_MEND}")
            check_size(f, HEADER_BYTES + 2 * count, f"{count} uint16 tokens", TOKENS_MEND)
            dtype, offset = "<u2", HEADER_BYTES
        else:
            if magic in KINDS:
                raise UserError(f"{path}: it is a {KINDS[magic]} (magic {magic}), expected a token file; {TOKENS_MEND}")
            if size % 4:
                raise UserError(f"{path}: {size} bytes, expected a whole number of int32 tokens; {TOKENS_MEND}")
            dtype, offset, count = "<i4", 0, size // 4
    if count < least:
        raise UserError(f"{path}: {count} tokens, expected at least {least} for one batch (B*T+1); take a smaller -b or -t, or more text")
    tokens = np.memmap(path, dtype, "r", offset, (count,))
    for piece in chunks(tokens):
        if piece.min() < 0 or piece.max() >= V:
            bad = int(piece.min() if piece.min() < 0 else piece.max())
            raise UserError(f"{path}: token id {bad}, expected 0 to {V - 1}: the file was made for another vocabulary than the model's")
    return tokens


# Optimizer state: header [2] processes [3] rank [4] master weights 0/1 [5] shuffle 0/1 [10] step, u64 at [20] sampler state,
# at [30] shard index, at [32] sample index; this project adds [40] B [41] T [42] spread. Then m, v, and the master weights if
# any, float32.



class Progress(NamedTuple):
    """Where a run stands, beside its weights and moments."""

    step: int  # updates done
    rng_state: int
    shard: int
    sample: int  # batches taken from the shard
    batch: tuple  # (B, T, spread), which the place in the data depends on; (0, 0, 0) in a file of llm.c's


def write_optimizer_state(path, moments, progress, master=None):
    """Write m and v with Vp rows for wte, where the run stands, and the master weights, if not None."""
    header = make_header(OPTIMIZER_MAGIC, 1, 1, 0, int(master is not None))
    header[10] = progress.step
    for slot, value in ((20, progress.rng_state), (30, progress.shard), (32, progress.sample)):
        header[slot : slot + 2] = np.array([value], "<u8").view("<i4")
    header[40:43] = progress.batch
    with replacing(path) as f:
        f.write(header)
        for tensors in (*moments, *([] if master is None else [master])):
            f.write(flat(tensors))


def read_optimizer_state(path, config, moments, params, mend="train again with: python train_gpt2.py ... -o DIR -n STEPS"):
    """Fill m and v, and params where the file has master weights (they are exact, a bfloat16 model file is not).

    Returns the Progress. Raises UserError for a state of another model.
    """
    with open_input(path, mend) as f:
        header = read_header(f, OPTIMIZER_MAGIC, mend)
        version, processes, rank, master, shuffle = (int(x) for x in header[1:6])
        if version != 1 or processes != 1 or rank != 0 or master not in (0, 1):
            raise UserError(f"{path}: version {version}, {processes} processes, rank {rank}, master weights {master};"
                            " expected version 1 of a run on one device")
        if shuffle:
            raise UserError(f"{path}: from a run that shuffled its data; expected one that reads it in order")
        targets = [*moments, params] if master else moments
        check_size(f, HEADER_BYTES + sum(t.buffer.size for t in targets), f"the optimizer of {config.describe()}", mend)
        for tensors in targets:
            read_into(f, flat(tensors))
    numbers = {slot: int(header[slot : slot + 2].view("<u8")[0]) for slot in (20, 30, 32)}
    progress = Progress(int(header[10]), numbers[20], numbers[30], numbers[32], tuple(header[40:43].tolist()))
    if progress.step < 0 or progress.rng_state == 0:
        raise UserError(f"{path}: step {progress.step} and sampler state {progress.rng_state}; the file is damaged")
    return progress


# ----------------------------------------------------------------------------------------------------------------------
# threads: matrix products run on OpenBLAS's threads; the large element-wise loops share the work by blocks of rows or
# elements. The blocks do not depend on the number of threads, so neither do the results.


def count_threads():
    """OMP_NUM_THREADS if set (OpenBLAS reads it too), else the cores that this process may use."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    if text.isdigit() and int(text) > 0:
        return int(text)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


THREADS = count_threads()
POOL = ThreadPoolExecutor(max(1, THREADS - 1), thread_name_prefix="train_gpt2")  # starts no thread before the first task


def parallel_blocks(work, n, block):
    """Call work(start, stop) for consecutive blocks of range(n), on all threads; NumPy drops the GIL inside its loops."""
    starts = iter(range(0, n, block))  # next() on a range iterator is atomic under the GIL

    def take():
        for start in starts:
            work(start, min(start + block, n))

    helpers = [POOL.submit(take) for _ in range(min(THREADS, -(-n // block)) - 1)]
    take()
    for helper in helpers:
        helper.result()


BLOCK = 128 * 1024  # elements: small enough for the L2 cache, large enough that handing over the GIL is cheap

# ----------------------------------------------------------------------------------------------------------------------
# layers, in network order; each backward cites the forward lines that it inverts, last to first


def encoder_forward(out, inp, wte, wpe, B, T, C):
    """out (B,T,C) = wte[inp] + wpe. inp (B,T) holds token ids, all below V (checked when the file was opened)."""
    np.take(wte, inp, axis=0, out=out, mode="clip")  # the mode that needs no buffered copy of `out`
    out += wpe[:T]


def encoder_backward(dwte, dwpe, dout, inp, B, T, C):
    """dwte += the sum of dout over the places of each token; dwpe = the sum over the batch (0 beyond T)."""
    np.add.reduce(dout, axis=0, out=dwpe[:T])  # out += wpe
    dwpe[T:] = 0.0
    order = np.argsort(inp, axis=None, kind="stable")  # out = wte[inp]: equal tokens side by side, in a fixed order
    tokens = inp.reshape(-1)[order]
    firsts = np.flatnonzero(np.diff(tokens, prepend=-1))
    dwte[tokens[firsts]] += np.add.reduceat(dout.reshape(B * T, C)[order], firsts, axis=0)


def layernorm_forward(out, mean, rstd, inp, weight, bias, B, T, C):
    """out (B,T,C) = (inp - mean) * rstd * weight + bias; mean, rstd (B,T) = those of each row. Variance is biased.

    Layer Normalization, Ba et al. 2016, https://arxiv.org/abs/1607.06450
    """
    np.add.reduce(inp, axis=-1, out=mean)
    np.multiply(mean, np.float32(1.0 / C), out=mean)
    np.subtract(inp, mean[..., None], out=out)
    np.vecdot(out, out, out=rstd)
    rstd *= np.float32(1.0 / C)
    rstd += np.float32(1e-5)
    np.sqrt(rstd, out=rstd)
    np.reciprocal(rstd, out=rstd)
    out *= rstd[..., None]
    out *= weight
    out += bias


def layernorm_backward(dinp, dweight, dbias, dout, inp, weight, mean, rstd, B, T, C):
    """dinp (B,T,C) += ; dweight, dbias (C,) =. 128 rows at a time stay in the cache and keep the column sums accurate."""
    N, rows = B * T, 128
    dinp, dout, inp = dinp.reshape(N, C), dout.reshape(N, C), inp.reshape(N, C)
    mean, rstd = mean.reshape(N, 1), rstd.reshape(N, 1)
    normed, dnormed = np.empty((2, rows, C), dout.dtype)
    dweight.fill(0.0)
    dbias.fill(0.0)
    for i in range(0, N, rows):
        r, d = slice(i, i + rows), dout[i : i + rows]
        n, dn = normed[: len(d)], dnormed[: len(d)]
        np.subtract(inp[r], mean[r], out=n)  # recompute n = (inp - mean) * rstd
        n *= rstd[r]
        dbias += np.add.reduce(d, axis=0)  # out = n * weight + bias
        np.multiply(d, n, out=dn)
        dweight += np.add.reduce(dn, axis=0)
        np.multiply(d, weight, out=dn)
        # n = (inp - mean) * rstd, where mean and rstd depend on inp too:
        #   dinp = rstd * (dn - mean of dn - n * mean of (dn * n))
        along = np.vecdot(dn, n)[:, None] * np.float32(1.0 / C)
        dn -= np.add.reduce(dn, axis=1, keepdims=True) * np.float32(1.0 / C)
        n *= along
        dn -= n
        dn *= rstd[r]
        dinp[r] += dn


SMALL, PART = 2**25, 192  # multiplications of a product; of each of its sums


def multiply(a, b, out):
    """out (M,N) = a (M,K) @ b (K,N). OpenBLAS's AVX-512 kernels add up to 384 numbers one after the other, with 1.4 times the rounding
    error of parts of 192. A small product is done in such parts; with all of them, a step of GPT-2 124M (4 x 64 tokens, AMD EPYC, 2 cores)
    would take 0.75 s instead of 0.66."""
    (M, K), N = a.shape, b.shape[1]
    parts = -(-K // PART) if M * N * K < SMALL else 1
    np.matmul(a[:, : K // parts], b[: K // parts], out=out)
    for i in range(1, parts):
        part = slice(K * i // parts, K * (i + 1) // parts)
        out += np.matmul(a[:, part], b[part])


def matmul_forward(out, inp, weight, bias, B, T, C, OC):
    """out (B,T,OC) = inp (B,T,C) @ weight (OC,C)^T + bias (OC,) (None: no bias)."""
    out = out.reshape(B * T, OC)
    multiply(inp.reshape(B * T, C), weight.T, out)
    if bias is not None:
        out += bias


def matmul_backward(dinp, dweight, dbias, dout, inp, weight, B, T, C, OC):
    """dinp (B,T,C) =, dweight (OC,C) =, dbias (OC,) = (None: no bias); dout (B,T,OC)."""
    dout = dout.reshape(B * T, OC)
    multiply(dout, weight, dinp.reshape(B * T, C))
    multiply(dout.T, inp.reshape(B * T, C), dweight)
    if dbias is not None:
        np.matmul(np.ones(B * T, dout.dtype), dout, out=dbias)  # the column sums: several times faster than np.add.reduce


@functools.lru_cache(maxsize=1)
def causal_mask(T):
    """(T, T) float32, 0 where position t may look at t2 <= t, -inf elsewhere."""
    return np.triu(np.full((T, T), -np.inf, np.float32), 1)


def attention_forward(out, preatt, att, inp, B, T, C, NH):
    """Causal multi-head attention: out (B,T,C) =; preatt (scaled scores), att (their softmax) (B,NH,T,T) =.

    inp (B,T,3C) holds query, key, value side by side, each NH heads of HS. preatt is -inf and att is 0 above the diagonal.
    Attention Is All You Need, Vaswani et al. 2017, https://arxiv.org/abs/1706.03762
    """
    HS = C // NH
    scale, mask = np.float32(1.0 / math.sqrt(HS)), causal_mask(T)
    query, key, value = np.moveaxis(inp.reshape(B, T, 3, NH, HS), (2, 3), (0, 2))  # each (B, NH, T, HS), a view
    heads = np.swapaxes(out.reshape(B, T, NH, HS), 1, 2)

    def batch(start, stop):
        for b in range(start, stop):
            p, a = preatt[b], att[b]
            np.matmul(query[b], np.swapaxes(key[b], 1, 2), out=p)
            p *= scale
            p += mask
            np.subtract(p, np.maximum.reduce(p, axis=-1, keepdims=True), out=a)
            np.exp(a, out=a)
            a *= np.float32(1.0) / np.add.reduce(a, axis=-1, keepdims=True)
            np.matmul(a, value[b], out=heads[b])

    parallel_blocks(batch, B, attention_block(B, T, HS))


def attention_block(B, T, HS):
    """Batch rows for one thread: OpenBLAS takes all threads for a product of more than 64^3, and then can't be shared."""
    return 1 if T * T * HS <= 64**3 else B


def attention_backward(dinp, dpreatt, datt, dout, inp, att, B, T, C, NH):
    """dinp (B,T,3C) =; dpreatt, datt (B,NH,T,T) = (scratch); dout (B,T,C)."""
    HS = C // NH
    scale = np.float32(1.0 / math.sqrt(HS))
    query, key, value = np.moveaxis(inp.reshape(B, T, 3, NH, HS), (2, 3), (0, 2))
    dquery, dkey, dvalue = np.moveaxis(dinp.reshape(B, T, 3, NH, HS), (2, 3), (0, 2))
    dheads = np.swapaxes(dout.reshape(B, T, NH, HS), 1, 2)

    def batch(start, stop):
        for b in range(start, stop):
            a, da, dp = att[b], datt[b], dpreatt[b]
            np.matmul(np.swapaxes(a, 1, 2), dheads[b], out=dvalue[b])  # heads = att @ value
            np.matmul(dheads[b], np.swapaxes(value[b], 1, 2), out=da)
            np.subtract(da, np.vecdot(a, da)[..., None], out=dp)  # att = softmax(preatt)
            dp *= a  # 0 above the diagonal, where att is
            dp *= scale  # preatt = query @ key^T * scale
            np.matmul(dp, key[b], out=dquery[b])
            np.matmul(np.swapaxes(dp, 1, 2), query[b], out=dkey[b])

    parallel_blocks(batch, B, attention_block(B, T, HS))


GELU_SCALE = np.float32(math.sqrt(2.0 / math.pi))
GELU_CUBE = np.float32(0.044715)


def gelu_forward(out, inp, N):
    """out (N,) = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).

    Gaussian Error Linear Units, Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415
    """
    out, inp = out.reshape(N), inp.reshape(N)

    def block(start, stop):
        x, y = inp[start:stop], out[start:stop]
        np.multiply(x, x, out=y)
        y *= GELU_SCALE * GELU_CUBE
        y += GELU_SCALE
        y *= x
        np.tanh(y, out=y)
        y += np.float32(1.0)
        y *= x
        y *= np.float32(0.5)

    parallel_blocks(block, N, BLOCK)


def gelu_backward(dinp, inp, dout, N):
    """dinp (N,) = dout * gelu'(inp); dinp may be dout itself."""
    dinp, inp, dout = dinp.reshape(N), inp.reshape(N), dout.reshape(N)

    def block(start, stop):
        # With u = s (x + c x^3) and t = tanh(u): gelu' = (1 + t)/2 + x/2 (1 - t^2) u' = (1 - (1 - t)/2) * (1 + (1 - t) x u')
        x = inp[start:stop]
        t, xu = np.empty((2, stop - start), x.dtype)
        np.multiply(x, x, out=t)
        np.multiply(t, np.float32(3.0) * GELU_SCALE * GELU_CUBE, out=xu)
        xu += GELU_SCALE
        xu *= x  # x u'
        t *= GELU_SCALE * GELU_CUBE
        t += GELU_SCALE
        t *= x
        np.tanh(t, out=t)
        np.subtract(np.float32(1.0), t, out=t)  # 1 - t
        xu *= t
        xu += np.float32(1.0)
        t *= np.float32(-0.5)
        t += np.float32(1.0)
        t *= xu
        np.multiply(t, dout[start:stop], out=dinp[start:stop])

    parallel_blocks(block, N, BLOCK)


def residual_forward(out, inp1, inp2, N):
    """out (N,) = inp1 + inp2. Its backward pass hands dout on to both unchanged: they share one buffer, dresidual."""
    np.add(inp1.reshape(N), inp2.reshape(N), out=out.reshape(N))


def softmax_forward(probs, logits, B, T, V):
    """probs (B,T,V) = softmax of each row of logits (B,T,V), the row's maximum subtracted first."""
    N = B * T
    probs, logits = probs.reshape(N, V), logits.reshape(N, V)

    def rows(start, stop):
        x, p = logits[start:stop], probs[start:stop]
        np.subtract(x, np.maximum.reduce(x, axis=1, keepdims=True), out=p)
        np.exp(p, out=p)
        p *= np.float32(1.0) / np.add.reduce(p, axis=1, keepdims=True)

    parallel_blocks(rows, N, max(1, BLOCK // V))


def crossentropy_forward(losses, probs, targets, B, T, V):
    """losses (B,T) = -log of the probability of each target (B,T), at most 87.3: that of float32's smallest normal number."""
    np.maximum(np.take_along_axis(probs, targets[..., None], axis=-1)[..., 0], np.finfo(np.float32).tiny, out=losses)
    np.log(losses, out=losses)
    np.negative(losses, out=losses)


def crossentropy_softmax_backward(dlogits, dlosses, probs, targets, B, T, V):
    """dlogits (B,T,V) = (probs - one-hot(targets)) * dlosses (B,T,1): both layers inverted at once."""
    N = B * T
    dlogits, dlosses, probs, targets = dlogits.reshape(N, V), dlosses.reshape(N, 1), probs.reshape(N, V), targets.reshape(N)

    def rows(start, stop):
        d = dlogits[start:stop]
        np.multiply(probs[start:stop], dlosses[start:stop], out=d)
        d[np.arange(stop - start), targets[start:stop]] -= dlosses[start:stop, 0]

    parallel_blocks(rows, N, max(1, BLOCK // V))


def global_norm(grads, N):
    """The Euclidean norm of the flat gradient (N,), as a Python float; block sums are added in double precision."""
    sums = np.zeros(-(-N // BLOCK), np.float64)

    def block(start, stop):
        sums[start // BLOCK] = np.vdot(grads[start:stop], grads[start:stop])

    parallel_blocks(block, N, BLOCK)
    return math.sqrt(sums.sum())


def adamw_update(params, m, v, grads, learning_rate, beta1, beta2, eps, weight_decay, grad_scale, step, N):
    """One AdamW step in place on flat arrays (N,): params, m, v +=; `step` counts from 1 for the bias correction.

    grad_scale multiplies the gradients first (clipping). Decoupled Weight Decay Regularization, Loshchilov and Hutter 2017,
    https://arxiv.org/abs/1711.05101
    """
    # m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps), with the corrections drawn out of the loop over elements:
    correction2 = math.sqrt(1.0 - beta2**step)
    rate = np.float32(learning_rate * correction2 / (1.0 - beta1**step))
    eps = np.float32(eps * correction2)
    keep, scale = np.float32(1.0 - learning_rate * weight_decay), np.float32(grad_scale)
    rest1, beta2, rest2 = np.float32(1.0 - beta1), np.float32(beta2), np.float32(1.0 - beta2)

    def block(start, stop):
        p, mean, square, g = params[start:stop], m[start:stop], v[start:stop], grads[start:stop]
        t = np.empty_like(p)
        if scale != 1.0:
            g = g * scale
        np.subtract(g, mean, out=t)  # m += (1 - beta1) * (g - m)
        t *= rest1
        mean += t
        np.multiply(g, g, out=t)  # v = beta2 * v + (1 - beta2) * g^2
        t *= rest2
        square *= beta2
        square += t
        np.sqrt(square, out=t)  # p -= rate * m / (sqrt(v) + eps)
        t += eps
        np.divide(mean, t, out=t)
        t *= rate
        if weight_decay:
            p *= keep
        p -= t

    parallel_blocks(block, N, BLOCK)


# ----------------------------------------------------------------------------------------------------------------------
# model


class GPT2:
    """A model, its gradients and its optimizer. Every large buffer is allocated once, at the start: `allocate_activations` and, to
    train, `allocate_training`. Smaller batches and shorter sequences use the start of the same buffers."""

    def __init__(self, config, params):
        self.config, self.params = config, params
        self.grads = self.m = self.v = None

    def allocate_activations(self, B, T):
        """Make room for the activations of forward passes over (B, T) tokens, or fewer."""
        self.activations_buffer = allocate(activation_table(self.config, B, T)).buffer

    def allocate_training(self, B, T, micro_steps=1):
        """Make room for a backward pass over (B, T) and for AdamW; a second gradient buffer when gradients accumulate."""
        table = self.params.table
        self.grads, self.m, self.v = allocate(table), allocate(table), allocate(table)
        self.micro_grads = allocate(table) if micro_steps > 1 else None
        self.scratch = allocate(scratch_table(self.config, B, T))

    def trunk(self, inputs):
        """Token ids (B, T) -> acts.lnf (B, T, C): all but the classifier."""
        B, T = inputs.shape
        L, NH, C = self.config.L, self.config.NH, self.config.C
        params, N = self.params, B * T * C
        self.inputs = inputs
        self.acts = acts = views(activation_table(self.config, B, T), self.activations_buffer)

        encoder_forward(acts.encoded, inputs, params.wte, params.wpe, B, T, C)
        for l in range(L):
            p, a = layer(params, l), layer(acts, l)
            residual = acts.encoded if l == 0 else acts.residual3[l - 1]
            layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, B, T, C)
            matmul_forward(a.qkv, a.ln1, p.qkvw, p.qkvb, B, T, C, 3 * C)
            attention_forward(a.atty, a.preatt, a.att, a.qkv, B, T, C, NH)
            matmul_forward(a.attproj, a.atty, p.attprojw, p.attprojb, B, T, C, C)
            residual_forward(a.residual2, residual, a.attproj, N)
            layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, B, T, C)
            matmul_forward(a.fch, a.ln2, p.fcw, p.fcb, B, T, C, 4 * C)
            gelu_forward(a.fch_gelu, a.fch, 4 * N)
            matmul_forward(a.fcproj, a.fch_gelu, p.fcprojw, p.fcprojb, B, T, 4 * C, C)
            residual_forward(a.residual3, a.residual2, a.fcproj, N)
        layernorm_forward(acts.lnf, acts.lnf_mean, acts.lnf_rstd, acts.residual3[L - 1], params.lnfw, params.lnfb, B, T, C)
        return acts

    def forward(self, inputs, targets):
        """inputs, targets (B, T) integer ids -> the mean loss, a float; activations stay in self.acts."""
        B, T = inputs.shape
        C, V = self.config.C, self.config.V
        acts = self.trunk(inputs)
        matmul_forward(acts.logits, acts.lnf, self.params.wte[:V], None, B, T, C, V)  # tied to the embedding
        softmax_forward(acts.probs, acts.logits, B, T, V)
        crossentropy_forward(acts.losses, acts.probs, targets, B, T, V)
        self.targets = targets
        return float(np.mean(acts.losses, dtype=np.float64))

    def next_token_probs(self, tokens):
        """tokens (T,) -> the distribution (V,) of the token that follows; costs one forward pass of length T."""
        T, C, V = tokens.size, self.config.C, self.config.V
        acts = self.trunk(tokens.reshape(1, T))
        logits, probs = acts.logits[:, -1:], acts.probs[:, -1:]
        matmul_forward(logits, acts.lnf[:, -1:], self.params.wte[:V], None, 1, 1, C, V)
        softmax_forward(probs, logits, 1, 1, V)
        return probs[0, 0]

    def backward(self, micro_step=0, micro_steps=1):
        """Gradients of the mean loss of the last forward pass over micro_steps batches: grads = for the first, += after."""
        grads = self.grads if micro_step == 0 else self.micro_grads
        self.backward_into(grads, micro_steps)
        if micro_step > 0:
            total, more = flat(self.grads), flat(self.micro_grads)

            def add(start, stop):
                total[start:stop] += more[start:stop]

            parallel_blocks(add, total.size, BLOCK)

    def backward_into(self, grads, micro_steps):
        """Write every row of `grads` (only V of wte's Vp rows: the others stay 0)."""
        B, T = self.inputs.shape
        L, NH, C, V = self.config.L, self.config.NH, self.config.C, self.config.V
        params, acts, N = self.params, self.acts, B * T * C
        scratch = views(scratch_table(self.config, B, T), self.scratch.buffer)
        dresidual, dbranch = scratch.dresidual, scratch.dbranch

        scratch.dlosses.fill(1.0 / (B * T * micro_steps))
        dlogits = acts.logits
        crossentropy_softmax_backward(dlogits, scratch.dlosses, acts.probs, self.targets, B, T, V)
        matmul_backward(dbranch, grads.wte[:V], None, dlogits, acts.lnf, params.wte[:V], B, T, C, V)
        dresidual.fill(0.0)
        layernorm_backward(dresidual, grads.lnfw, grads.lnfb, dbranch, acts.residual3[L - 1], params.lnfw,
                           acts.lnf_mean, acts.lnf_rstd, B, T, C)
        for l in reversed(range(L)):
            p, a, g = layer(params, l), layer(acts, l), layer(grads, l)
            residual = acts.encoded if l == 0 else acts.residual3[l - 1]
            matmul_backward(scratch.dfch, g.fcprojw, g.fcprojb, dresidual, a.fch_gelu, p.fcprojw, B, T, 4 * C, C)
            gelu_backward(scratch.dfch, a.fch, scratch.dfch, 4 * N)
            matmul_backward(dbranch, g.fcw, g.fcb, scratch.dfch, a.ln2, p.fcw, B, T, C, 4 * C)
            layernorm_backward(dresidual, g.ln2w, g.ln2b, dbranch, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd, B, T, C)
            matmul_backward(dbranch, g.attprojw, g.attprojb, dresidual, a.atty, p.attprojw, B, T, C, C)
            attention_backward(scratch.dqkv, scratch.dpreatt, scratch.datt, dbranch, a.qkv, a.att, B, T, C, NH)
            matmul_backward(dbranch, g.qkvw, g.qkvb, scratch.dqkv, a.ln1, p.qkvw, B, T, C, 3 * C)
            layernorm_backward(dresidual, g.ln1w, g.ln1b, dbranch, residual, p.ln1w, a.ln1_mean, a.ln1_rstd, B, T, C)
        encoder_backward(grads.wte, grads.wpe, dresidual, self.inputs, B, T, C)

    def update(self, settings, learning_rate, step, grad_scale=1.0):
        """One AdamW step over the flat buffers; `step` counts from 1."""
        arrays = [flat(tensors) for tensors in (self.params, self.m, self.v, self.grads)]
        for start, stop, decay in decay_spans(self.params.table, settings):
            adamw_update(*(array[start:stop] for array in arrays), learning_rate, settings.beta1, settings.beta2, settings.eps,
                         decay, grad_scale, step, stop - start)


def layer(tensors, l):
    """Layer l's slice of every tensor that is stacked over layers: layer(params, l).qkvw is (3C, C)."""
    skip = ("wte", "wpe", "lnfw", "lnfb", "encoded", "lnf", "lnf_mean", "lnf_rstd", "logits", "probs", "losses")
    return SimpleNamespace(**{name: getattr(tensors, name)[l] for name in tensors.table if name not in skip})


def decay_spans(table, settings):
    """(start, stop, weight decay) for the fewest consecutive spans of the flat parameter buffer with one decay each."""
    spans, offset = [], 0
    for name, row in table.items():
        size = math.prod(row.shape)
        decay = settings.weight_decay if settings.decay == "all" or name in MATRICES else 0.0
        if spans and spans[-1][2] == decay:
            spans[-1] = (spans[-1][0], offset + size, decay)
        else:
            spans.append((offset, offset + size, decay))
        offset += size
    return spans


def learning_rate_at(settings, step):
    """The learning rate of update `step` (from 0): linear warm-up, then the schedule down to final_fraction of the peak.

    wsd (warm-up, stable, decay) holds the peak, then falls by 1 - sqrt over the last fifth; https://arxiv.org/abs/2405.18392
    """
    peak, warmup, total = settings.learning_rate, settings.warmup_steps, settings.steps
    if step < warmup:
        return peak * (step + 1) / warmup
    low = peak * settings.final_fraction
    done = (step - warmup) / max(1, total - warmup)  # 0 .. 1
    if settings.schedule == "cosine":
        return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * done))
    if settings.schedule == "linear":
        return peak - (peak - low) * done
    if settings.schedule == "wsd":
        turn = 0.8 * total
        return peak if step < turn else low + (peak - low) * (1.0 - math.sqrt((step - turn) / (total - turn)))
    return peak


# ----------------------------------------------------------------------------------------------------------------------
# data


def data_paths(settings):
    """(training shards, validation shards) that -i and -j name; raises UserError when a pattern matches nothing."""
    data = settings.data
    if data.endswith(".bin") or glob.has_magic(data):
        val = settings.val_data or re.sub(r"train(?!.*train)", "val", data)
        if val == data:
            raise UserError(f"-i {data}: there is no 'train' in it to make the validation files' name from: pass -j FILES too")
        train = data
    else:
        train, val = f"{data}_train.bin", settings.val_data or f"{data}_val.bin"
    paths = []
    for flag, pattern in (("-i", train), ("-j", val)):
        paths.append(sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern])
        if not paths[-1]:
            raise UserError(f"{flag} {pattern}: no file matches; {TOKENS_MEND}")
    return paths


class DataLoader:
    """Reads (B, T) batches in order from one or more token files, and starts over when the last one is used up.

    A batch needs B*T+1 tokens (the targets are the inputs, one token on) and moves on by B*T: its rows follow one another.
    With `spread`, row b reads in the b-th of B equal parts of a file instead, and moves on by T.
    """

    def __init__(self, paths, V, B, T, spread=False):
        self.B, self.T, self.spread = B, T, spread
        self.shards = [open_tokens(path, V, B * T + 1) for path in paths]
        self.num_batches = sum(tokens.size // (B * T) for tokens in self.shards)
        self.reset()

    def reset(self):
        self.seek(0, 0)

    def seek(self, shard, sample):
        """Continue after `sample` batches of shard number `shard`; raises UserError when the data has no such place."""
        if shard >= len(self.shards) or sample > self.batches_of(shard):
            raise UserError(f"checkpoint is at batch {sample} of data shard {shard}, which these token files do not have:"
                            " resume with the -i, -b and -t of the first run")
        self.shard, self.sample = shard, sample

    def batches_of(self, shard):
        """Whole batches in a shard, the last target included."""
        return (self.shards[shard].size - 1) // (self.B * self.T)

    def next_batch(self):
        """inputs (B, T) and targets (B, T), int32."""
        if self.sample >= self.batches_of(self.shard):
            self.shard, self.sample = (self.shard + 1) % len(self.shards), 0
        B, T, tokens = self.B, self.T, self.shards[self.shard]
        apart = self.batches_of(self.shard) * T if self.spread else T  # from one row to the next
        first = self.sample * (T if self.spread else B * T)
        rows = np.stack([tokens[first + b * apart : first + b * apart + T + 1] for b in range(B)]).astype(np.int32)
        self.sample += 1
        return rows[:, :-1], rows[:, 1:]


# ----------------------------------------------------------------------------------------------------------------------
# sampler


class Random:
    """xorshift64*, the stream that llm.c samples with. https://en.wikipedia.org/wiki/Xorshift#xorshift*"""

    def __init__(self, state=1337):
        self.state = state

    def u32(self):
        s = self.state
        s ^= s >> 12
        s ^= (s << 25) & 0xFFFFFFFFFFFFFFFF
        s ^= s >> 27
        self.state = s
        return (s * 0x2545F4914F6CDD1D & 0xFFFFFFFFFFFFFFFF) >> 32

    def f32(self):
        """A float in [0, 1) with 24 random bits."""
        return (self.u32() >> 8) / 16777216.0


def sample_multinomial(probs, coin):
    """The first id whose running sum of probs (V,) exceeds coin; the last id when rounding leaves none."""
    return min(int(np.searchsorted(np.cumsum(probs), np.float32(coin), side="right")), probs.size - 1)


def generate(next_token_probs, random, tokenizer, V, length, T):
    """Print `length` - 1 sampled tokens after an end-of-text token, each as soon as it is known.

    next_token_probs: tokens (t,) int32 -> (V,) float32, called with the last T tokens. tokenizer: None prints ids.
    """
    print("generating:\n---", flush=True)
    tokens = np.full(length, tokenizer.eot if tokenizer else V - 1, np.int32)  # both vocabularies end with end of text
    for t in range(1, length):
        tokens[t] = sample_multinomial(next_token_probs(tokens[max(0, t - T) : t]), random.f32())
        text = tokenizer.printable(tokens[t]) if tokenizer else b"%d " % tokens[t]
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    print("\n---", flush=True)


def load_tokenizer(path, V):
    """The tokenizer for a model with V tokens, or None with a warning when there is no such file."""
    if not os.path.lexists(path):
        print(f"warning: {path}: no such file, samples are printed as token ids; {TOKENIZER_MEND}", file=sys.stderr)
        return None
    tokenizer = read_tokenizer(path)
    if len(tokenizer.tokens) != V:
        raise UserError(f"{path}: {len(tokenizer.tokens)} tokens, but the model has V={V}: pass --tokenizer FILE")
    return tokenizer


# ----------------------------------------------------------------------------------------------------------------------
# logs and checkpoints


class Log:
    """A run's log, one event a line, the step first: `s:0 tel:5.2520` (validation), `s:0 trl:5.3562` (training).

    In a run directory (main.log) training lines go on with the learning rate and the gradient norm. A resumed run drops
    what an interrupted one logged beyond its checkpoint.
    """

    def __init__(self, settings, first_step=0):
        self.file, self.detailed = None, settings.output_dir is not None
        if not settings.output:
            return
        path = os.path.join(settings.output, "main.log") if self.detailed else settings.output
        make_directory(os.path.dirname(path))
        try:
            kept = []
            if first_step and os.path.exists(path):
                with open(path) as f:
                    kept = [line for line in f if line.endswith("\n") and int(re.match(r"s:(\d+) ", line)[1]) < first_step]
            with replacing(path) as f:
                f.write("".join(kept).encode())
            self.file = open(path, "a", buffering=1)
        except (TypeError, UnicodeDecodeError):
            raise UserError(f"{path}: is not a training log (lines like 's:0 trl:4.1234'); move it away to go on") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); choose another -o") from None

    def write(self, line):
        if self.file:
            try:
                self.file.write(line + "\n")
            except OSError as error:
                raise UserError(f"{self.file.name}: cannot be written ({error.strerror})") from None

    def validation(self, step, loss):
        self.write(f"s:{step} tel:{loss:.4f}")

    def training(self, step, loss, learning_rate, norm):
        self.write(f"s:{step} trl:{loss:.4f}" + (f" lr:{learning_rate:.6f} norm:{norm:.2f}" if self.detailed else ""))


def checkpoint_paths(directory, step):
    """(model, optimizer state, DONE marker) of one step's checkpoint. The marker is written last: without it, no checkpoint."""
    return [os.path.join(directory, name) for name in
            (f"model_{step:08d}.bin", f"state_{step:08d}_00000.bin", f"DONE_{step:08d}")]


def newest_checkpoint(directory):
    """The step of the newest complete checkpoint in a directory, or None."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    steps = [int(match[1]) for name in names if (match := re.fullmatch(r"DONE_(\d{8})", name))]
    return max(steps, default=None)


def save_checkpoint(directory, config, params, moments, progress, notes=None, version=3, master=None):
    """Write model, optimizer state and marker, each renamed into place; an interruption leaves older checkpoints whole.

    notes: what else the run needs to go on as before, as a dict for JSON. version: 3 for float32 weights, 5 for bfloat16 ones, of
    which `master` are the float32 originals, if there are any. Raises UserError, and leaves nothing of this checkpoint, when
    the weights are not finite or the disk is full.
    """
    check_finite(f"after {progress.step} steps", params, f"the last checkpoint, if any, is kept: {DIVERGED}")
    paths = model, state, done = checkpoint_paths(directory, progress.step)
    try:
        write_model(model, config, params, version)
        write_optimizer_state(state, moments, progress, master)
        with replacing(done) as f:
            if notes:
                f.write(json.dumps(notes, indent=1).encode() + b"\n")
    except UserError:
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise


def find_checkpoint(settings):
    """The step to resume from, or None for a fresh start; raises UserError rather than mix two runs in one directory."""
    directory = settings.output_dir
    step = newest_checkpoint(directory) if directory else None
    if settings.resume and step is None:
        print(f"no complete checkpoint in {directory}: starting at step 0")
    if step is not None and not settings.resume:
        raise UserError(f"{directory}: holds a checkpoint of step {step}: go on from it with -y 1, or choose another -o")
    if step is not None and 0 < settings.steps < step:
        raise UserError(f"{directory}: its checkpoint is of step {step}, beyond -x {settings.steps}: pass a larger -x")
    return step


DIVERGED = "try a lower -l, a warm-up (-u) or --grad_clip 1"


class Interruption:
    """Remembers Ctrl-C and SIGTERM, so that the step at hand is finished first. A second Ctrl-C stops at once."""

    def __init__(self):
        self.signal = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.remember)

    def remember(self, number, frame):
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(LostReader(sys.stdout.fileno(), "w", closefd=False)), line_buffering=True)
        print("\nfinishing this step; once more to stop at once", file=sys.stderr)


class LostReader(io.FileIO):
    """A stdout that may lose its reader: in `python train_gpt2.py | tee log`, Ctrl-C ends tee before we have saved."""

    def write(self, data):
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def resume_command(settings):
    """The command line that goes on with this run."""
    return shlex.join(["python", *sys.argv, *([] if settings.resume else ["-y", "1"])])


# ----------------------------------------------------------------------------------------------------------------------
# check: one way to compare a tensor with its reference, for tests, benchmarks and the ladder of test_gpt2.py


def check_tensor(name, got, expected, tolerance, print_row=True):
    """True when shapes agree and every |got - expected| <= tolerance, which NaN never is. Prints one row."""
    if np.shape(got) != np.shape(expected):
        print(f"{name:<12} shape {np.shape(got)}, expected {np.shape(expected)}  FAIL")
        return False
    difference = np.abs(np.subtract(got, expected, dtype=np.float64)).reshape(-1)
    worst = int(np.argmax(difference)) if difference.size else 0  # argmax finds a NaN first
    largest = float(difference[worst]) if difference.size else 0.0
    okay = largest <= tolerance
    if print_row:
        at = ",".join(map(str, np.unravel_index(worst, np.shape(got))))
        print(f"{name:<12} max diff {largest:.3e} at [{at}]  tolerance {tolerance:.3e}  {'ok' if okay else 'FAIL'}")
    return okay


# ----------------------------------------------------------------------------------------------------------------------
# main


def validate(model, loader, batches, step):
    """Mean loss over the first `batches` batches of the validation data; raises UserError when it is not finite."""
    loader.reset()
    count = min(batches, loader.num_batches)
    loss = sum(model.forward(*loader.next_batch()) for _ in range(count)) / count
    if not math.isfinite(loss):
        raise UserError(f"step {step}: the validation loss is {loss}; the last checkpoint, if any, is kept: {DIVERGED}")
    return loss


def train_step(model, loader, settings, step, want_norm):
    """One update from micro_steps batches; returns (loss, learning rate, gradient norm or None).

    Raises UserError, before the weights change, when the loss is not finite.
    """
    loss = 0.0
    for micro_step in range(settings.micro_steps):
        loss += model.forward(*loader.next_batch()) / settings.micro_steps
        if not math.isfinite(loss):
            raise UserError(f"step {step}: the loss is {loss}; the last checkpoint, if any, is kept: {DIVERGED}")
        model.backward(micro_step, settings.micro_steps)
    learning_rate, norm, scale = learning_rate_at(settings, step), None, 1.0
    if want_norm or settings.grad_clip:
        grads = flat(model.grads)
        norm = global_norm(grads, grads.size)
        if settings.grad_clip and norm > settings.grad_clip:
            scale = settings.grad_clip / norm
    model.update(settings, learning_rate, step + 1, scale)
    return loss, learning_rate, norm


def print_header(config, train_loader, val_loader):
    print("[GPT-2]")
    print(f"max_seq_len: {config.maxT}")
    print(f"vocab_size: {config.V}")
    print(f"num_layers: {config.L}")
    print(f"num_heads: {config.NH}")
    print(f"channels: {config.C}")
    print(f"num_parameters: {count_parameters(config)}")
    print(f"train dataset num_batches: {train_loader.num_batches}")
    print(f"val dataset num_batches: {val_loader.num_batches}")


def go_back(marker):
    """What mends a damaged checkpoint."""
    return f"remove {marker} to go on from the checkpoint before it"


def read_start(settings, first_step):
    """(config, params) that a run begins with: those of -e, or of the checkpoint of step first_step, if not None."""
    if first_step is None:
        config, params = read_model(settings.model)
    else:
        model_path, _, marker = checkpoint_paths(settings.output_dir, first_step)
        config, params = read_model(model_path, mend=go_back(marker))
    if settings.T > config.maxT:
        raise UserError(f"{flag_of(settings, 'T')} {settings.T}: the model's longest sequence is {config.maxT}")
    return config, params


def open_data(settings, V):
    """The loaders of the training and the validation data."""
    train_paths, val_paths = data_paths(settings)
    return DataLoader(train_paths, V, settings.B, settings.T, settings.spread), DataLoader(val_paths, V, settings.B, settings.T)


def restore(settings, config, params, moments, step, loader, random):
    """Read the optimizer's state of a checkpoint; put loader and sampler where they were."""
    _, state, marker = checkpoint_paths(settings.output_dir, step)
    progress = read_optimizer_state(state, config, moments, params, mend=go_back(marker))
    given = (settings.B, settings.T, settings.spread)
    if progress.step != step or progress.batch not in (given, (0, 0, 0)):
        found = "-b {} -t {} --spread {}".format(*progress.batch)
        raise UserError(f"{state}: of step {progress.step} with {found}, expected step {step} with"
                        f" {'-b {} -t {} --spread {}'.format(*given)}: resume with the flags of the first run")
    loader.seek(progress.shard, progress.sample)
    random.state = progress.rng_state
    print(f"resuming at step {step} from {settings.output_dir}")


def main():
    settings = parse_settings(Settings, "Train GPT-2 on the CPU, in NumPy.")
    sys.stdout.reconfigure(line_buffering=True)
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's on overflow: train_step stops at a loss that is not finite
    first_step = find_checkpoint(settings)
    config, params = read_start(settings, first_step)
    tokenizer = load_tokenizer(settings.tokenizer, config.V)
    train_loader, val_loader = open_data(settings, config.V)
    random = Random()

    print_changed_settings(settings)
    print_header(config, train_loader, val_loader)
    model = GPT2(config, params)
    model.allocate_activations(settings.B, settings.T)
    model.allocate_training(settings.B, settings.T, settings.micro_steps)
    print(f"num_activations: {table_elements(activation_table(config, settings.B, settings.T))}")
    if first_step is not None:
        restore(settings, config, params, (model.m, model.v), first_step, train_loader, random)
    return train(model, settings, train_loader, val_loader, tokenizer, random, first_step or 0)


def train(model, settings, train_loader, val_loader, tokenizer, random, first_step):
    """The training loop; returns the exit status. A step is: validate, sample, update, save."""
    config, directory = model.config, settings.output_dir
    log = Log(settings, first_step)
    interruption = Interruption()
    for step in range(first_step, settings.steps + 1):
        last = step == settings.steps
        final = last and settings.final_reports
        if settings.val_every and (step % settings.val_every == 0 or final):
            loss = validate(model, val_loader, settings.val_batches, step)
            print(f"val loss {loss:f}")
            log.validation(step, loss)
        if settings.sample_every and step > 0 and (step % settings.sample_every == 0 or final):
            generate(model.next_token_probs, random, tokenizer, config.V, settings.sample_tokens, settings.T)
        if last:
            break
        start = time.perf_counter()
        loss, learning_rate, norm = train_step(model, train_loader, settings, step, want_norm=log.detailed)
        print(f"step {step}: train loss {loss:f} (took {(time.perf_counter() - start) * 1000:f} ms)")
        log.training(step, loss, learning_rate, norm)

        done = step + 1
        due = settings.checkpoint_every and (done % settings.checkpoint_every == 0 or done == settings.steps)
        stop = interruption.signal  # which may come at any moment: read once
        if directory and (due or stop):
            batch = (settings.B, settings.T, settings.spread)
            progress = Progress(done, random.state, train_loader.shard, train_loader.sample, batch)
            save_checkpoint(directory, config, model.params, (model.m, model.v), progress)
        if stop:
            how = f"go on with: {resume_command(settings)}" if directory else "nothing was saved: there is no -o DIR"
            print(f"stopped after step {step}; {how}", file=sys.stderr)
            return 128 + stop
    return 0


if __name__ == "__main__":
    run_main(main)
