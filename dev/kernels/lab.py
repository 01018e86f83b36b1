"""
The workbench of the kernel library: what a layer and its rungs are, how a rung is checked, how it
is timed.

A layer is a class with the tensors that its kernels work on, the NumPy function that computes the
expected results, and its rungs, from the naive kernel to the one in kernels/. README.md has the
steps to add one.
"""

import contextlib
import glob
import math
import os
import re
import sys
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
import root  # noqa: F401  (it finds the modules)
import numpy as np
import torch

import llmc.gpu.device
import train_gpt2
import train_gpt2_cuda as cuda
from llmc.errors import UserError
from llmc.gpu.compiler import KernelFile
from llmc.gpu.device import Device
from llmc.gpu.geometry import blocks, kernel_files, launch_geometry, model_constants
from llmc.gpu.precision import Precision
from llmc.tensors import bf16_bits, Row
from profile_gpu import open_device, size_of
from train_gpt2 import Config

FILES = sorted(glob.glob(os.path.join(HERE, "*.cu")))
SWEEP = (32, 64, 128, 256, 512, 1024)  # block sizes

# The largest error allowed, as a fraction of the largest expected value: float32 rounds to 6e-8,
# sums of n numbers in any order to about sqrt(n) times that; TF32 operands to 5e-4, stored bfloat16
# to 2e-3, the float16 residual stream to 2.5e-4. LIBRARY only shows that PyTorch was asked for the
# same function.
EXACT, SUMS, TF32, BF16, HALF = 1e-6, 5e-6, 2e-3, 4e-3, 5e-4
LIBRARY = {"float32": 1e-4, "bfloat16": 2e-2}

SHAPES = ((1, 1), (3, 97), (2, 1024))  # (B, T) of the checks
# Checked beside the model's sizes: rows that are not a multiple of a warp's 16-byte accesses, V % 8
# = 3, few channels.
AWKWARD = (Config(1024, 1003, 1, 25, 1600, 1024), Config(1024, 131, 1, 3, 240, 256))

# --------------------------------------------------------------------------------------------------
# layers and rungs

LAYERS = {}  # name -> class, in the order of their definition


class Rung:
    """One version of a layer. run(layer, lab, a, block) launches its kernels on the tensors `a`,
    with each of the block sizes `blocks` that fits(layer, block)."""

    def __init__(self, run, blocks, fits=lambda layer, block: True):
        self.run = run
        self.blocks = blocks
        self.fits = fits

    def __set_name__(self, layer, name):
        self.name = name


def rung(*blocks, **options):
    """Decorator: make a method run(self, lab, a, block) of a Layer a Rung."""
    return lambda run: Rung(run, blocks, **options)


class Kernel(Rung):
    """A rung of one kernel, <layer>_<rung>(*layer.arguments). share(layer, block): how much of
    layer.work a block does; or grid(layer, lab, block). sweep: its block sizes. shared(layer,
    block): bytes of dynamic shared memory. adds_to: results that are set to 0 first."""

    def __init__(self, share=None, grid=None, sweep=SWEEP,
                 shared=lambda layer, block: 0, adds_to=()):
        super().__init__(self.launch, sweep,
                         lambda layer, block: shared(layer, block) <= layer.gpu.shared)
        self.grid = grid or (lambda layer, lab, block: (blocks(layer.work, share(layer, block)),))
        self.shared = shared
        self.adds_to = adds_to

    def launch(self, layer, lab, a, block):
        lab.clear(*(getattr(a, name) for name in self.adds_to))
        lab.launch(f"{layer.name}_{self.name}", self.grid(layer, lab, block), (block,),
                   *layer.arguments(a), shared=self.shared(layer, block))


# Shares of a Kernel's block: an element or a row for each thread; 16 bytes for each; a row for each
# warp; one row.
THREAD, PACK, WARP, BLOCK = (lambda layer, block: block, lambda layer, block: block * layer.pack,
                             lambda layer, block: block // 32, lambda layer, block: 1)


class Mine(Rung):
    """A rung with a learner's kernel of the same name."""

    def __init__(self, rung):
        super().__init__(self.launch, rung.blocks, rung.fits)
        self.name = f"my_{rung.name}"
        self.original = rung

    def launch(self, layer, lab, a, block):
        with lab.mine_in_place():
            self.original.run(layer, lab, a, block)


def launcher(call):
    """A rung of the live kernel: call(layer, Device, a). Its block size is its own; in the tables
    it is 256."""
    return Rung(lambda layer, lab, a, block: call(layer, lab.device, a), (256,))


class Layer:
    """A layer at one size. A subclass with a `name` is a layer of the library:

    - its docstring: the formula; the first line is printed;
    - tensors(): {name: data, or the Row of an output}, as the GPU stores them;
    - checked: {tensor: the error allowed, as a fraction of its largest value} for the layer's
    outputs;
    - oracle(t): does to float64 NumPy arrays what the kernels do; by default the function of
    train_gpt2.py of the same
      name, on the tensors of `signature` (if not given: all) and sizes();
    - moved: the tensors that a perfect kernel would read or write; or flops(), its operations;
    - library(t): given PyTorch tensors, a function that returns {tensor: result}, for a row called
    library_name;
    - arguments(a) and work: a Kernel's arguments and number of rows, by default the same tensors
    and N;
    - Rungs, the simplest first.
    """

    # of the checks at the model's sizes; AWKWARD sizes are always checked at SHAPES
    shapes = SHAPES
    moved = signature = ()
    parts = ("",)  # between the layer's name and the rung's: the kernels of a rung
    float32_grads = False  # True: gradients of weights are float32 in bfloat16 runs, too
    library, library_name = None, "PyTorch"

    def __init_subclass__(cls):
        if "name" in vars(cls):
            cls.rungs = {name: rung for name, rung in vars(cls).items() if isinstance(rung, Rung)}
            LAYERS[cls.name] = cls

    def __init__(self, config, precision, gpu, B, T):
        self.config = config
        self.precision = precision
        self.gpu = gpu
        self.B = B
        self.T = T
        self.C = config.C
        self.NH = config.NH
        self.V = config.V
        self.Vp = config.Vp
        self.N = B * T
        self.work = B * T
        self.pack = 8 if precision.bf16 else 4
        self.rng = np.random.default_rng((B, T, config.C))

    def __str__(self):
        return f"B={self.B} T={self.T} C={self.C} {self.precision.dtype}"

    def sizes(self):
        return self.B, self.T, self.C

    def given(self, a):
        return [getattr(a, name) for name in self.signature or vars(a)]

    def arguments(self, a):
        return *self.given(a), self.N

    def oracle(self, t):
        getattr(train_gpt2, self.name)(*self.given(t), *self.sizes())

    def flops(self):
        """0: the layer is bound by bytes."""
        return 0

    def bytes(self, a):
        return size_of(*(getattr(a, name) for name in self.moved))

    def random(self, *shape, spread=1.0, mean=0.0, dtype=None):
        """Normal numbers, by default in the dtype of activations; they repeat after 2^24, which
        will do for timing."""
        count = math.prod(shape)
        dtype = dtype or self.precision.dtype
        numbers = self.rng.standard_normal(min(count, 1 << 24), dtype=np.float32)
        numbers = numbers * np.float32(spread) + np.float32(mean)
        return np.resize(bf16_bits(numbers) if dtype == "bfloat16" else numbers.astype(dtype),
                         shape)

    def unwritten(self, *shape, dtype=None):
        """An output: NaN before each call."""
        return Row(shape, dtype or self.precision.dtype)

    def float32(self, *shape):
        return self.unwritten(*shape, dtype="float32")

    def tokens(self):
        """(B,T) int32, all below V, the first and last of the vocabulary among them."""
        tokens = self.rng.integers(0, self.V, (self.B, self.T), dtype=np.int32)
        tokens.flat[0] = self.V - 1
        tokens.flat[-1] = 0
        return tokens

    def sum_rows(self):
        """How many rows of partial sums the live kernels leave."""
        geometry = launch_geometry(self.config, self.precision, self.gpu.arch)
        return cuda.partial_rows(self.B, self.T, self.gpu.sm_count, geometry)

    def runs(self, names=None):
        """[(rung, block size)] of all that fit this size; only of the named rungs, if any are."""
        return [(found, block) for found in self.rungs.values() if not names or found.name in names
                for block in found.blocks if found.fits(self, block)]


# --------------------------------------------------------------------------------------------------
# the GPU

EXTERN = re.compile(r'extern "C" __global__'
                    r' void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\(([^)]*)\)')


def signatures(path):
    """{kernel: [its parameters]} of a .cu file."""
    with open(path) as f:
        text = re.sub(r"//[^\n]*", "", f.read())
    return {name: [" ".join(parameter.split()) for parameter in parameters.split(",")]
            for name, parameters in EXTERN.findall(text)}


def kernel_file(path, constants):
    """The KernelFile of any .cu file."""
    return KernelFile(os.path.abspath(path).removesuffix(".cu"), tuple(signatures(path)), constants)


def with_mine(layer, path):
    """The layer, with a rung more for each kernel of a learner's file that has the name of one of
    its rungs', and is launched like that one: layernorm_forward_warp_a_row becomes my_warp_a_row.
    Raises UserError if there is none."""
    library = {kernel for file in FILES for kernel in signatures(file)}
    found = signatures(path)
    named = {kernel: rung for name, rung in layer.rungs.items() for part in layer.parts
             if (kernel := f"{layer.name}_{part}{name}") in library}
    rungs = {f"my_{rung.name}": Mine(rung) for kernel, rung in named.items() if kernel in found}
    if not rungs:
        raise UserError(f"{path}: its kernels are {', '.join(found) or 'none'}, expected one of"
                        f" {', '.join(named)}: a kernel is launched like the rung whose name it has")
    mine = type(layer.__name__, (layer,), {})
    mine.rungs = layer.rungs | rungs
    return mine


def portable_arch(gpu):
    """A GPU's, without the instructions that only its generation has."""
    return gpu.arch.rstrip("a")


def portable_files(config, precision, arch):
    """KernelFiles: of the live attention for arch and later, and all of this
    library."""
    live = kernel_files(cuda.GPT2, config, precision, arch)
    constants = model_constants(config, precision)
    attention = [live[name] for name in ("attention", "attention_backward") if name in live]
    return [*attention, *(kernel_file(path, constants) for path in FILES)]


class Lab:
    """The live kernels of train_gpt2_cuda.py for one model and precision and, beside them, those of
    this library."""

    def __init__(self, gpu, config, precision, mine=None):
        """mine: a learner's .cu file, for the rungs of `with_mine`."""
        self.gpu = gpu
        self.config = config
        self.precision = precision
        self.sm_count = gpu.sm_count
        self.torch = torch.cuda.is_available()  # whether PyTorch sees the GPU, too
        self.device, self.matmul = open_device(cuda.GPT2, gpu, config, precision, "auto")
        arch = portable_arch(gpu)
        self.portable = Device(gpu, portable_files(config, precision, arch),
                               launch_geometry(config, precision, arch))
        self.portable.gpu = gpu._replace(arch=arch)
        files = [kernel_file(mine, model_constants(config, precision))] if mine else None
        self.mine = Device(gpu, files, None).functions if mine else {}
        self.stream = self.portable.stream = self.device.stream
        with self.stream:
            self.matmul.allocate()

    def launch(self, name, grid, block, *arguments, shared=0):
        """Launch as a Device does, with `shared` bytes of dynamic shared memory."""
        if shared > 48 << 10:  # more than a block gets without asking
            self.portable.functions[name].max_dynamic_shared_size_bytes = shared
        self.portable.launch(name, grid, block, *arguments, shared=shared)

    @contextlib.contextmanager
    def mine_in_place(self):
        """Context manager: a learner's kernels run in the place of those with their names."""
        before = self.portable.functions
        self.portable.functions = before | self.mine
        yield
        self.portable.functions = before

    def clear(self, *arrays):
        """Set arrays to 0, as a part of a rung."""
        for array in arrays:
            llmc.gpu.device.cp.cuda.runtime.memsetAsync(array.data.ptr, 0, array.nbytes,
                                                        self.stream.ptr)

    @contextlib.contextmanager
    def streams(self):
        """CuPy and, if it sees the GPU, PyTorch run on the stream of the kernels."""
        with self.stream, torch.cuda.stream(torch.cuda.ExternalStream(self.stream.ptr) if self.torch
                                            else None):
            yield


def precision_of(layer, dtype):
    return Precision(dtype, float32_grads=int(layer.float32_grads and dtype == "bfloat16"))


def upload(tensors):
    """{name: array on the GPU}; outputs are NaN."""
    xp = llmc.gpu.device.cp
    return {name: xp.full(x.shape, 0xFFFF if x.dtype == "bfloat16" else np.nan, x.stored_as)
            if isinstance(x, Row) else xp.asarray(x) for name, x in tensors.items()}


def library_call(layer, arrays):
    """PyTorch's call for this layer on these CuPy or NumPy arrays, or None if it has none."""
    def tensor(array):  # uint16 is bfloat16's bits
        bf16 = array.dtype == np.uint16
        return (torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16) if bf16
                else torch.from_dlpack(array))

    # round operands where ours do
    torch.backends.cuda.matmul.allow_tf32 = bool(layer.precision.tf32)
    return layer.library and layer.library(SimpleNamespace(**{name: tensor(x)
                                                              for name, x in arrays.items()}))


def calls(layer, lab, fresh, names):
    """Yield (name, block size, call) of PyTorch, with no block size, and of each rung. A call works
    on a copy of the arrays `fresh` and returns {tensor: result}."""
    if lab.torch and (call := library_call(layer,
                                           {name: array.copy() for name, array in fresh.items()})):
        yield layer.library_name, "", call
    for found, block in layer.runs(names):
        def call(found=found, block=block,
                 a=SimpleNamespace(**{name: x.copy() for name, x in fresh.items()})):
            found.run(layer, lab, a, block)
            return {name: getattr(a, name) for name in layer.checked}

        yield found.name, block, call


def results_of(where, call, ends=None):
    """{tensor: result on the host} of a call, or `ends` elements at either end; raises UserError if
    the GPU refuses."""
    def host(array):
        if not hasattr(array, "get"):  # PyTorch's
            return array.double().cpu().numpy()
        flat = array.reshape(-1)
        return np.concatenate([flat[:ends].get(), flat[-ends:].get()]) if ends else array.get()

    try:
        return {tensor: host(array) for tensor, array in call().items()}
    except llmc.gpu.device.GPU_ERRORS as error:
        raise UserError(f"{where}: {error}") from None
