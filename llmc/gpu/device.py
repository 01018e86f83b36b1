"""The GPU: opening it, loading and launching kernels by name, streams, TMA's tensor maps, copies.
Nothing here knows a layer."""

import contextlib
import os
import sys
import tempfile
from typing import NamedTuple

import numpy as np

from llmc.errors import UserError, run_main
from llmc.gpu.compiler import INSTEAD, capability, prepare_kernels
from llmc.tensors import bf16_to_float32

# When imported, CuPy makes a directory in $HOME, which may not be writable, for kernels of its own
# that we do not use.
os.environ.setdefault("CUPY_CACHE_IN_MEMORY", "1")
os.environ.setdefault("CUPY_CACHE_DIR", tempfile.gettempdir())

try:
    import cupy as cp
    from cuda.bindings import driver
    MISSING = None
    GPU_ERRORS = (cp.cuda.runtime.CUDARuntimeError, cp.cuda.driver.CUDADriverError)
except ImportError as error:
    MISSING = error
    GPU_ERRORS = ()
    cp = driver = None

# --------------------------------------------------------------------------------------------------
# the GPU at hand


class GPU(NamedTuple):
    """What compilation and launches need to know about a GPU."""

    name: str
    arch: str  # as the compiler calls it, like sm_90a
    sm_count: int  # multiprocessors
    shared: int  # bytes of shared memory that a block can have


def count_gpus():
    """Return how many GPUs CUDA sees, or raise UserError that says what is missing. Takes no memory
    on them."""
    if MISSING is not None:
        reason = next((line.strip() for line in str(MISSING).splitlines() if line.strip(" =-")),
                      repr(MISSING))
        found = f"the Python package {MISSING.name} cannot" if MISSING.name else (
            f"CuPy, or a package beside it, cannot ({reason})")
        raise UserError(f"{found} be imported: pip install -r requirements-gpu.txt; {INSTEAD}")
    try:
        count = cp.cuda.runtime.getDeviceCount()
        reason = "none is visible"
    except cp.cuda.runtime.CUDARuntimeError as error:
        count = 0
        reason = str(error).split(": ")[-1]
    if count == 0 and not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):  # nor in WSL
        raise UserError(f"no NVIDIA GPU: nvidia-smi should list one; {INSTEAD}")
    if count == 0:
        raise UserError(f"no usable NVIDIA GPU ({reason}): nvidia-smi should list one, with a"
                        f" driver of 580 or newer; {INSTEAD}")
    return count


def open_gpu(arch="native", local_rank=0):
    """Return the GPU for process number local_rank of this machine, and make it the current one.
    arch "sm_80": without the instructions that only its own generation has. Raises UserError that
    says what is missing."""
    count = count_gpus()
    if local_rank and count > 1:  # if one GPU is visible, the launcher chose it for this process
        if local_rank >= count:
            processes = os.environ.get("LOCAL_WORLD_SIZE", f"{local_rank + 1} or more")
            raise UserError(f"{processes} processes on this machine, which has {count} GPUs:"
                            f" start one for each GPU: --gpus {count}")
        cp.cuda.Device(local_rank).use()
    properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.runtime.getDevice())
    name = properties["name"].decode()
    major = properties["major"]
    minor = properties["minor"]
    if (major, minor) < (7, 5):
        raise UserError(f"{name} has compute capability {major}.{minor}, expected 7.5 or newer;"
                        f" {INSTEAD}")
    try:
        cp.cuda.runtime.memGetInfo()  # creates the context
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise UserError(f"{name}: {str(error).split(': ')[-1]}: does another process hold its"
                        f" memory? See nvidia-smi; {INSTEAD}") from None
    # instructions of this generation alone: wgmma on Hopper
    suffix = "a" if major >= 9 and arch == "native" else ""
    return GPU(name, f"sm_{major}{minor}{suffix}", properties["multiProcessorCount"],
               properties["sharedMemPerBlockOptin"])


def try_gpu(device, open_on):
    """Return open_on(gpu), or None to run on the CPU. device: "gpu"; "cpu"; or "auto", the CPU if
    there is no GPU or, with a note, if open_on raises UserError."""
    gpu = None
    if device != "cpu":
        try:
            gpu = open_gpu()
            return open_on(gpu)
        except UserError as error:
            if device == "gpu":
                raise UserError(str(error).replace(INSTEAD,
                                                   "with no GPU, leave out --device gpu")) from None
            if gpu:
                print(f"note: this runs on the CPU: {error}", file=sys.stderr)
    return None


def describe_gpu(gpu, count=1):
    """The GPU as a run's header names it; count: GPUs of the run."""
    driver = cp.cuda.runtime.driverGetVersion()
    name = f"{count} x {gpu.name}" if count > 1 else gpu.name
    return f"{name}, {gpu.arch}, CUDA {driver // 1000}.{driver % 1000 // 10}"


@contextlib.contextmanager
def gpu_errors_as_lines():
    """Context manager for a program's main(): turns errors of CUDA and its libraries into
    UserError."""
    try:
        yield
    except GPU_ERRORS as error:
        raise UserError(f"the GPU or one of CUDA's libraries failed ({str(error).splitlines()[0]}):"
                        " if for want of memory, or as it could not be initialized, another"
                        " process may hold the GPU's memory: see nvidia-smi") from None


# --------------------------------------------------------------------------------------------------
# launching


class TensorMap(NamedTuple):
    """What TMA needs to copy boxes of an array: an argument of kernels."""

    array: object
    opaque: object


class Device:
    """Kernels by name, and three streams: the main stream, a side stream for work that may overlap
    with it, and one for messages between GPUs."""

    def __init__(self, gpu, files, geometry):
        """Compile and load `files`, a list of KernelFile. geometry: the numbers that launches need,
        as attributes."""
        self.gpu = gpu
        self.sm_count = gpu.sm_count
        self.geometry = geometry
        self.main, self.side, self.comm = (cp.cuda.Stream(non_blocking=True) for _ in range(3))
        self.stream = self.main  # where launches go
        # observer(name, arguments) returns a context manager for each launch, all on one stream
        self.observer = None
        # of launches, by name: dev/timeline.py notes when they begin and end
        self.span = contextlib.nullcontext
        self.functions = {}
        self.shared = {}
        self.maps = {}
        self.uploads = {}
        paths, self.compiled = prepare_kernels(gpu.arch, files)
        self.cached = len(files) - self.compiled
        for file, path in zip(files, paths):
            try:
                module = cp.RawModule(path=path)
                self.functions |= {name: module.get_function(name) for name in file.kernels}
            except cp.cuda.driver.CUDADriverError as error:
                raise UserError(f"{path}: the driver cannot load it ({error})") from None
            self.shared |= file.shared
        for name, size in self.shared.items():
            self.functions[name].max_dynamic_shared_size_bytes = size

    def launch(self, name, grid, block, *arguments, shared=None, early=False):
        """Launch a kernel on the current stream. Python ints are passed as int, floats as float,
        arrays as pointers, None as a null pointer. shared: bytes of dynamic shared memory, if not
        those of its KernelFile. early: it may begin before the previous kernel ends, whose results
        it waits for itself (programmatic dependent launch, from sm_90 on)."""
        shared = self.shared.get(name, 0) if shared is None else shared
        with self.observe(name, arguments):
            converted = tuple(map(convert, arguments))
            if early and capability(self.gpu.arch) >= 90 and not self.observer:
                launch_early(self.functions[name], grid, block, converted, shared, self.stream)
            else:
                self.functions[name](grid, block, converted, shared_mem=shared, stream=self.stream)

    def resident_clusters(self, name, grid, block):
        """How many clusters of a kernel's blocks the GPU has room for at the same time."""
        kernel = driver.CUfunction(int(self.functions[name].kernel.ptr))
        config = launch_config(grid, block, self.shared[name])
        return check(driver.cuOccupancyMaxActiveClusters(kernel, config))[0]

    def observe(self, name, arguments):
        """The observer's context manager for a launch; without an observer, an empty one."""
        return self.observer(name, arguments) if self.observer else contextlib.nullcontext()

    @contextlib.contextmanager
    def beside(self, stream):
        """Context manager: launches inside it are on this stream, and overlap with what the main
        stream does from here on. Yields an event for `wait`."""
        if self.observer:
            yield None
            return
        before = cp.cuda.Event(disable_timing=True)
        after = cp.cuda.Event(disable_timing=True)
        before.record(self.main)
        stream.wait_event(before)
        self.stream = stream
        try:
            yield after
        finally:
            self.stream = self.main
        after.record(stream)

    def wait(self, event):
        """Make the current stream wait for another stream's event, unless it is None."""
        if event is not None:
            self.stream.wait_event(event)

    def synchronize(self):
        """Wait for everything launched so far."""
        for stream in (self.main, self.side, self.comm):
            stream.synchronize()

    def upload(self, array):
        """Return a copy of a small host array on the GPU, made once and kept: a graph's replays
        read it, too."""
        key = array.tobytes()
        if key not in self.uploads:
            self.uploads[key] = cp.asarray(array.view(np.uint8))
        return self.uploads[key]

    def tensor_map(self, array, rows, columns, batches=1):
        """Return a TensorMap for boxes of (batches, rows, columns) of an array (B,T,C) or (T,C) of
        bytes or floats. A row of a box is 32, 64 or 128 bytes, in 16-byte units that are permuted
        ("swizzled"): those of a column lie in different banks of shared memory."""
        key = array.data.ptr, array.shape, array.dtype, rows, columns, batches
        if key not in self.maps:
            self.maps[key] = TensorMap(array, encode_tensor_map(array, rows, columns, batches))
        return self.maps[key]


def check(answer):
    """What a function of the driver returns, less its status, which must be success."""
    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise cp.cuda.driver.CUDADriverError(int(answer[0]))
    return answer[1:]


def encode_tensor_map(array, rows, columns, batches):
    B, T, C = array.shape if array.ndim == 3 else (1, *array.shape)
    row = array.strides[-2]  # bytes
    dtype = {1: "UINT8", 2: "BFLOAT16", 4: "FLOAT32"}[array.itemsize]
    kind = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype}")
    swizzle = getattr(driver.CUtensorMapSwizzle,
                      f"CU_TENSOR_MAP_SWIZZLE_{columns * array.itemsize}B")
    sizes = [driver.cuuint64_t(n) for n in (C, T, B)]
    strides = [driver.cuuint64_t(n) for n in (row, row * T)]
    box = [driver.cuuint32_t(n) for n in (columns, rows, batches)]
    steps = [driver.cuuint32_t(1)] * 3
    made, = check(driver.cuTensorMapEncodeTiled(
        kind, 3, array.data.ptr, sizes, strides, box, steps,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
    return np.void(np.array([int(word) for word in made.opaque], np.uint64).tobytes())


def convert(argument):
    """A kernel's argument as CuPy wants it."""
    if argument is None:
        return np.uint64(0)
    if isinstance(argument, TensorMap):
        return argument.opaque
    if type(argument) in (int, bool):  # not a subclass: np.float64 is a float, too
        return np.int32(argument)
    return np.float32(argument) if type(argument) is float else argument


def launch_config(grid, block, shared):
    """What the driver's calls want to know of a launch."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = (*block, 1, 1)[:3]
    config.sharedMemBytes = shared
    return config


def launch_early(function, grid, block, arguments, shared, stream):
    """Launch a kernel by programmatic dependent launch, which CuPy does not offer."""
    values = [np.asarray(x.data.ptr if isinstance(x, cp.ndarray) else x) for x in arguments]
    addresses = np.array([value.ctypes.data for value in values], np.uint64)
    config = launch_config(grid, block, shared)
    config.hStream = stream.ptr
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs = [attribute]
    config.numAttrs = 1
    check(driver.cuLaunchKernelEx(config, function.kernel.ptr, addresses.ctypes.data, 0))


def to_float32(array):
    """Copy an array from the GPU to the host; bfloat16 bits and float16 become float32."""
    array = array.get()
    if array.dtype == np.uint16:
        return bf16_to_float32(array)
    return array.astype(np.float32, copy=False)


def copy_to_gpu(target, source):
    """Copy a host array into `target`, an array of the same size on the GPU; returns `target`."""
    target.view(np.uint8).reshape(-1).set(source.view(np.uint8).reshape(-1))
    return target


def pinned_array(size):
    """Allocate `size` bytes of host memory that the GPU reads and writes over the bus, at the same
    address."""
    return np.frombuffer(cp.cuda.alloc_pinned_memory(size), np.uint8, size)


def pointer(array):
    """The address of a pinned array, as a kernel's argument."""
    return np.uint64(array.ctypes.data)


# python -m llmc.gpu.device, for make and scripts/: the GPU's name, or why there is none
if __name__ == "__main__":
    run_main(lambda: print(open_gpu().name))
