"""
What all layers of the kernel library share: what a layer is, how a version is checked, and how it is timed.

A layer is a class with the tensors that its kernels work on, the NumPy function that computes their expected results,
and its versions, from the simplest to the one in kernels/. To add one, write a class in layers.py (or in a module that
bench.py imports) and a .cu file beside this one; see Layer.
"""

import contextlib
import glob
import math
import os
import re
import sys
from types import SimpleNamespace
from typing import Callable, NamedTuple

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
sys.path[:0] = [ROOT, os.path.join(ROOT, "dev")]

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np
import torch

import llmc.gpu.device
import train_gpt2  # noqa: F401  (for the layers, too)
import train_gpt2_cuda as cuda
from llmc.gpu.compiler import KERNEL_DIRECTORY, compile_kernels, kernel_key
from llmc.errors import UserError
from llmc.files import chunks
from llmc.gpu.geometry import blocks, kernel_files, launch_geometry  # noqa: F401  (for the layers)
from llmc.gpu.matmul import MatmulKernels
from llmc.tensors import bf16_bits, bf16_to_float32, Row
from llmc.debugstate import check_tensor
from train_gpt2 import Config
from profile_gpu import size_of  # noqa: F401

SWEEP = (32, 64, 128, 256, 512, 1024)  # block sizes

# The largest error allowed, as a fraction of the largest expected value: float32 rounds to 6e-8, sums of n numbers in
# any order to about sqrt(n) times that; stored bfloat16 is rounded to 2e-3, the float16 residual stream to 2.5e-4.
# LIBRARY only shows that PyTorch was asked for the same function; if our own versions may have a larger error, so may
# PyTorch.
EXACT, SUMS, BF16, HALF = 1e-6, 5e-6, 4e-3, 5e-4
LIBRARY = {"float32": 1e-4, "bfloat16": 2e-2}

SHAPES = ((1, 1), (3, 97), (2, 1024))  # (B, T) of the checks
# Sizes that are checked beside the model's: rows that are not a multiple of a warp's 16-byte accesses, V % 8 = 3, few
# channels.
AWKWARD = (Config(1024, 1003, 1, 25, 1600, 1024), Config(1024, 131, 1, 3, 240, 256))

# ----------------------------------------------------------------------------------------------------------------------
# layers and versions

LAYERS = {}  # name -> class, in the order of their definition


class Version(NamedTuple):
    name: str
    blocks: tuple  # the block sizes to try
    run: Callable  # run(layer, lab, tensors on the GPU, block)
    fits: Callable  # fits(layer, block): whether the kernel can do this size


def version(*block_sizes, fits=lambda layer, block: True):
    """Mark a method of a Layer as one of its versions: run(self, lab, a, block) launches its kernels on the tensors
    `a`."""

    def mark(run):
        run.version = Version(run.__name__, block_sizes, run, fits)
        return run

    return mark


class Layer:
    """A layer at one size. A subclass with a `name` is a layer of the library:

    - its docstring: the formula; the first line is printed;
    - file: its kernels are in dev/kernels/<file>.cu; uses: other files with kernels that it launches;
    - checked: {tensor: the error allowed, as a fraction of its largest value} for all that the layer writes; partial:
      those of them with a row of partial sums per block: only the sum of the rows is the same for all versions, and
      compared;
    - tensors(): {name: data, or the Row of an output}, in the order of the kernels' arguments;
    - oracle(t): does to float64 NumPy arrays what the kernels do;
    - bytes(a) or flops(): what a perfect kernel would move, or compute;
    - library(t), if PyTorch has the layer: given its tensors, a call that returns {tensor: result}; its row is called
      library_name;
    - versions: methods marked with @version, the simplest first. They may differ only in speed. library_version: the
      one that calls a library without PyTorch, if any; it is row 0 of the tables, and PyTorch's row comes after it.
    """

    shapes = SHAPES  # of the checks at the model's sizes; AWKWARD sizes are always checked at SHAPES
    uses = ()
    partial = ()
    float32_grads = False  # True: gradients of weights are float32 in bfloat16 runs, too
    library, library_name, library_version = None, "PyTorch", None

    def __init_subclass__(cls):
        if "name" in vars(cls):
            cls.versions = {name: run.version for name, run in vars(cls).items() if hasattr(run, "version")}
            LAYERS[cls.name] = cls

    def __init__(self, config, precision, gpu, B, T):
        self.config, self.precision, self.gpu = config, precision, gpu
        self.B, self.T, self.N = B, T, B * T
        self.C, self.NH, self.V, self.Vp = config.C, config.NH, config.V, config.Vp
        self.pack, self.geometry = precision.pack, launch_geometry(config, precision, gpu.arch)
        self.rng = np.random.default_rng((B, T, config.C))

    def describe(self):
        return f"B={self.B} T={self.T} C={self.C} {self.precision.dtype}"

    def flops(self):
        """Operations to count; 0: the layer is bound by bytes."""
        return 0

    # -- tensors, as they are stored; dtype None: that of activations and weights

    def random(self, *shape, spread=1.0, mean=0.0, dtype=None):
        """Normal numbers; they repeat after 2^24, which is enough for timing."""
        count = math.prod(shape)
        numbers = self.rng.standard_normal(min(count, 1 << 24),
                                           dtype=np.float32) * np.float32(spread) + np.float32(mean)
        dtype = dtype or self.precision.dtype
        return np.resize(bf16_bits(numbers) if dtype == "bfloat16" else numbers.astype(dtype), shape)

    def unwritten(self, *shape, dtype=None):
        """An output: NaN before each call."""
        return Row(shape, dtype or self.precision.dtype)

    def tokens(self):
        """(B,T) int32, all below V, the first and last of the vocabulary among them."""
        tokens = self.rng.integers(0, self.V, (self.B, self.T), dtype=np.int32)
        tokens.flat[0], tokens.flat[-1] = self.V - 1, 0
        return tokens

    def sum_rows(self):
        """Return how many rows of partial sums the live kernels leave."""
        return cuda.partial_rows(self.B, self.T, self.gpu.sm_count, self.geometry)

    # -- versions

    def runs(self, names=None):
        """Yield (version, block size) for all that fit this size; only of the named versions, if any are."""
        for found in self.versions.values():
            if not names or found.name in names:
                yield from ((found, block) for block in found.blocks if found.fits(self, block))


def widen(array):
    """Convert an array as it is stored to float64; integers stay."""
    if array.dtype == np.uint16:
        array = bf16_to_float32(array)
    return array.astype(np.float64) if array.dtype in (np.float32, np.float16) else array.copy()


def expected_results(layer, tensors):
    """Run the oracle and return {name: float64 array} of what the layer writes."""
    t = SimpleNamespace(**{name: np.full(x.shape, np.nan) if isinstance(x, Row) else widen(x) for name,
                           x in tensors.items()})
    layer.oracle(t)
    return {name: together(layer, name, getattr(t, name)) for name in layer.checked}


def together(layer, name, array):
    """Return a result on the host as it is compared: partial sums are added up."""
    return array.sum(axis=0, dtype=np.float64) if name in layer.partial else array


def allowed_error(layer, name, array, expected):
    """Return the largest error that a result may have; `array` is the result as it is stored."""
    fraction = layer.checked[name]
    if array.dtype in (np.uint16, np.float16):
        fraction = max(fraction, BF16 if array.dtype == np.uint16 else HALF)
    return fraction * max(float(np.abs(expected).max()), 1e-30)


# ----------------------------------------------------------------------------------------------------------------------
# the GPU

EXTERN = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\(([^)]*)\)')


def signatures(source):
    """The text of a .cu file -> {kernel: [its parameters]}."""
    text = re.sub(r"//[^\n]*", "", source)
    return {name: [" ".join(parameter.split()) for parameter in parameters.split(",")] for name,
            parameters in EXTERN.findall(text)}


def read_source(path):
    with open(path) as f:
        return f.read()


def portable(arch):
    """Return the architecture of the live kernels that this library includes: the portable ones, at most sm_80's."""
    return arch if arch == "sm_75" else "sm_80"


def constants_of(config, precision, arch):
    """Return the constants that this library is compiled with: all of the live files, some of which it includes."""
    files = kernel_files(config, precision, portable(arch)).values()
    return {name: value for live in files for name, value in live.constants.items()}


class PortableDevice:
    """Stands in for a Device in live launchers and MatmulKernels, and launches this library's kernels <name>_mma."""

    def __init__(self, lab):
        self.lab, self.device, self.sm_count = lab, self, lab.sm_count  # for MatmulKernels, it is the Matmul, too
        run = lab.config, lab.precision, portable(lab.gpu.arch)
        self.geometry, files = launch_geometry(*run), kernel_files(*run).values()
        self.shared = {name: size for file in files for name, size in file.shared.items()}
        self.stream_workspace, self.side = lab.matmul.stream_workspace, lab.device.side
        self.kernels = MatmulKernels(self)

    @property
    def stream(self):
        return self.lab.stream

    def launch(self, name, *arguments):
        self.lab.launch(f"{name}_mma", *arguments, shared=self.shared.get(name, 0))


class Lab:
    """A Device with the live kernels of train_gpt2_cuda.py and, beside them, those of this library."""

    def __init__(self, gpu, config, precision, cache):
        self.device, self.matmul = cuda.open_device(gpu, config, precision, cache)
        self.matmul.allocate()
        self.gpu, self.sm_count, self.stream = gpu, gpu.sm_count, self.device.stream
        self.config, self.precision, self.cache, self.loaded = config, precision, cache, set()
        self.portable = PortableDevice(self)

    def load(self, file):
        """Compile the kernels of dev/kernels/<file>.cu, if need be."""
        if file in self.loaded:
            return
        name, arch = os.path.join("..", "dev", "kernels", file), self.gpu.arch
        path, constants = os.path.join(HERE, f"{file}.cu"), constants_of(self.config, self.precision, arch)
        # a file of this library may include any of these
        included = sorted(glob.glob(os.path.join(HERE, "*.cuh")) + glob.glob(os.path.join(KERNEL_DIRECTORY, "*.cu")))
        key = "\n".join([kernel_key(name, arch, constants), *map(read_source, included)])
        found = self.cache.find(key, ".cubin")
        cubin = found[0] if found else self.cache.keep(key, ".cubin", compile_kernels(name, arch, constants))
        module = llmc.gpu.device.cp.RawModule(path=cubin)
        self.device.functions |= {kernel: module.get_function(kernel) for kernel in signatures(read_source(path))}
        self.loaded.add(file)

    def launch(self, name, grid, block, *arguments, shared=0):
        """Launch as a Device does, with `shared` bytes of dynamic shared memory."""
        if shared > 48 << 10:  # more than a block gets without asking
            self.device.functions[name].max_dynamic_shared_size_bytes = shared
        self.device.shared[name] = shared
        self.device.launch(name, grid, block, *arguments)

    def clear(self, array):
        """Set an array to 0, as a part of a version."""
        llmc.gpu.device.cp.cuda.runtime.memsetAsync(array.data.ptr, 0, array.nbytes, self.stream.ptr)


def upload(tensors):
    """Return {name: array on the GPU}; outputs are NaN."""
    xp, arrays = llmc.gpu.device.cp, {}
    for name, x in tensors.items():
        if isinstance(x, Row):
            arrays[name] = xp.full(x.shape, 0xFFFF if x.dtype == "bfloat16" else np.nan, x.stored_as)
        else:
            arrays[name] = xp.asarray(x)
    return arrays


def run_version(layer, lab, arrays, found, block):
    """Call a version once; raises UserError if the GPU refuses it."""
    try:
        found.run(layer, lab, SimpleNamespace(**arrays), block)
        lab.stream.synchronize()
    except tuple(llmc.gpu.device.GPU_ERRORS) as error:
        raise UserError(f"{layer.name} {found.name}, block {block}, {layer.describe()}: {error}") from None


@contextlib.contextmanager
def torch_as(precision):
    """Let PyTorch's matmuls round float32 operands to TF32 if this precision does."""
    settings = torch.backends.cuda.matmul
    before, settings.allow_tf32 = settings.allow_tf32, bool(precision.tf32)
    try:
        yield
    finally:
        settings.allow_tf32 = before


@contextlib.contextmanager
def torch_beside(lab):
    """Run PyTorch on the stream of the kernels, in their precision."""
    with torch_as(lab.precision), torch.cuda.stream(torch.cuda.ExternalStream(lab.stream.ptr)):
        yield


def as_torch(array):
    """View a CuPy or NumPy array as a PyTorch tensor; uint16 is bfloat16's bits."""
    if array.dtype == np.uint16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def library_call(layer, arrays):
    """Return PyTorch's call for this layer on these arrays, or None if it has none."""
    return layer.library(SimpleNamespace(**{name: as_torch(array) for name,
                                            array in arrays.items()})) if layer.library else None


# ----------------------------------------------------------------------------------------------------------------------
# check


def agrees(where, name, got, expected, tolerance):
    """Return whether a result is as expected; print a row that names `where` and the tensor if it is not."""
    okay = check_tensor(name, got, expected, tolerance, print_row=False)
    return okay or check_tensor(f"{where}: {name}", got, expected, tolerance)


def check_layer(layer, lab, names, with_library):
    """Compare every version at every block size with the NumPy function; print wrong tensors, return their number."""
    tensors = layer.tensors()
    expected, fresh, wrong = expected_results(layer, tensors), upload(tensors), 0
    for found, block in layer.runs(names):
        arrays = copies(fresh)
        run_version(layer, lab, arrays, found, block)
        for name in layer.checked:
            got = together(layer, name, arrays[name].get())
            where = f"{layer.name} {found.name}, block {block}, {layer.describe()}"
            wrong += not agrees(where, name, widen(got), expected[name],
                                allowed_error(layer, name, got, expected[name]))
    if with_library:
        arrays = copies(fresh)
        with torch_beside(lab):
            call = library_call(layer, arrays)
            results = {name: result.double().cpu().numpy() for name, result in call().items()} if call else {}
        for name, got in results.items():
            tolerance = max(LIBRARY[layer.precision.dtype], layer.checked[name]) * float(np.abs(expected[name]).max())
            got = got.reshape(expected[name].shape)
            wrong += not agrees(f"{layer.name} {layer.library_name}, {layer.describe()}", name, got, expected[name],
                                tolerance)
    return wrong


def copies(arrays):
    return {name: array.copy() for name, array in arrays.items()}


def sample(layer, name, array):
    """Copy some 4 million elements of a result to the host, the first and the last among them."""
    if name in layer.partial:
        return together(layer, name, array.get())
    pieces = list(chunks(array.reshape(-1)))
    chosen = sorted({round(i * (len(pieces) - 1) / 3) for i in range(4)})
    return np.concatenate([pieces[i].get() for i in chosen])


# ----------------------------------------------------------------------------------------------------------------------
# time

FLUSH = 512 << 20  # bytes, several times any L2 cache; writing them also takes longer than a call from Python


def milliseconds(lab, flush, call):
    """Return the median time of several calls, the L2 cache flushed before each; what is slow is called less often."""
    cp, times, repeats = llmc.gpu.device.cp, [], 20
    while len(times) < repeats + 2:
        start, end = cp.cuda.Event(), cp.cuda.Event()
        lab.clear(flush)
        start.record(lab.stream)
        call()
        end.record(lab.stream)
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, end))
        if len(times) == 2:
            repeats = max(3, min(20, int(500 / max(times[1], 1e-3))))
    return float(np.median(times[2:]))


class Timing(NamedTuple):
    layer: Layer
    bytes: int
    flops: int
    library: float  # milliseconds; None: PyTorch has no such layer
    versions: dict  # {version: {block size: milliseconds}}


def time_version(layer, lab, fresh, found, first, flush):
    """Return ({block size: ms}, {tensor: sample of the result}, how many differ from the first version's)."""
    sizes, arrays, wrong = [block for _, block in layer.runs([found.name])], copies(fresh), 0
    run_version(layer, lab, arrays, found, sizes[0])
    results = {name: sample(layer, name, arrays[name]) for name in layer.checked}
    for name, got in results.items() if first else ():
        where = f"{layer.name} {found.name}, block {sizes[0]}, {layer.describe()}, beside the first version"
        wrong += not agrees(where, name, widen(got), first[name], 2 * allowed_error(layer, name, got, first[name]))
    a, times = SimpleNamespace(**arrays), {}
    for block in sizes:
        times[block] = milliseconds(lab, flush, lambda size=block: found.run(layer, lab, a, size))
    return times, {name: widen(result) for name, result in results.items()}, wrong


def time_layer(layer, lab, names, with_library):
    """Time every version at every block size; return a Timing, or None if a version was wrong.

    NumPy would take minutes at sizes worth timing, so each version has to agree with the first one, which has been
    checked at others.
    """
    fresh, flush = upload(layer.tensors()), llmc.gpu.device.cp.empty(FLUSH, np.uint8)
    times, first, wrong = {}, None, 0
    for found in dict.fromkeys(found for found, _ in layer.runs(names)):
        times[found.name], results, count = time_version(layer, lab, fresh, found, first, flush)
        first, wrong = first or results, wrong + count
    if wrong:
        return None
    library = None
    if with_library:
        with torch_beside(lab):
            call = library_call(layer, fresh)
            library = milliseconds(lab, flush, call) if call else None
    flops = layer.flops()
    return Timing(layer, layer.bytes(SimpleNamespace(**fresh)) if not flops else 0, flops, library, times)
