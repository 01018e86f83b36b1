"""A fake GPU: CuPy, the driver and cuBLASLt's bindings over NumPy arrays. Nothing is computed, every
launch is recorded."""

import ctypes
import functools
import os
import signal
import unittest.mock
from types import SimpleNamespace
from typing import NamedTuple

# PyTorch's threads would spin, on the cores that NumPy's need
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "2")  # else as many as there are free cores: other bits
# under nohup it is ignored, and so it would be by programs under test
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np
import pytest

import train_gpt2_cuda
from llmc.gpu import cublaslt, decoder, device, fp8, matmul, memory, plan, precision, trainer
from llmc.gpu.several import nccl, ranks
from servers import Server, hub_pages, use_hub  # noqa: F401  (also a fixture)


class Array(np.ndarray):
    """What the trainer uses of CuPy's arrays."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])

    def get(self):
        return np.array(self)

    def set(self, source):
        self[...] = source


class Launch(NamedTuple):
    name: str  # of the kernel, or cublaslt
    grid: tuple
    block: tuple
    arguments: tuple  # of a kernel, as CuPy gets them; of cuBLASLt, the addresses of b, a and out
    shared: int
    stream: int  # ptr of the stream


class FakeStream:
    """Knows which stream captures it, and whether it has joined that one again when the capture
    ends."""

    def __init__(self, fake, non_blocking=False):
        self.fake = fake
        self.ptr = len(fake.streams)
        self.capture = None  # the stream that captures what this one does
        fake.streams.append(self)
        self.launched = 0
        self.seen = {}  # seen: stream -> its launches that are done before the next one here

    def __enter__(self):
        self.fake.current.append(self)
        return self

    def __exit__(self, *_):
        self.fake.current.pop()

    def record(self):
        event = FakeEvent()
        event.record(self)
        return event

    def wait_event(self, event):
        assert event.recorded, "waits for an event that was never recorded"
        self.capture = self.capture or event.capture  # so a stream joins a capture
        assert self.capture is event.capture, "waits for an event from before the capture"
        for stream, launched in event.seen.items():
            self.seen[stream] = max(launched, self.seen.get(stream, 0))

    def synchronize(self):
        pass

    def begin_capture(self):
        self.captured = len(self.fake.launches)
        self.capture = self

    def end_capture(self):
        for stream in self.fake.streams:
            if stream.capture is self:
                assert (stream is self
                        or stream.launched == self.seen[stream]), "a fork that is not joined"
                stream.capture = None
        launches = self.fake.launches[self.captured :]
        del self.fake.launches[self.captured :]
        return SimpleNamespace(upload=lambda stream: None,
                               launch=lambda stream: self.fake.launches.extend(launches))


class FakeEvent:
    recorded, ptr = False, 0
    __init__ = synchronize = lambda *_, **options: None

    def record(self, stream):
        self.recorded = True
        self.capture = stream.capture
        self.seen = {**stream.seen, stream: stream.launched}


class FakeFunction:
    def __init__(self, fake, name):
        self.fake = fake
        self.name = name
        self.max_dynamic_shared_size_bytes = 48 << 10

    def __call__(self, grid, block, arguments, shared_mem=0, stream=None):
        assert shared_mem <= max(48 << 10, self.max_dynamic_shared_size_bytes), self.name
        stream = stream or self.fake.current[-1]
        stream.launched += 1
        self.fake.launches.append(Launch(self.name, grid, block, arguments, shared_mem, stream.ptr))
        if compute := self.fake.compute.get(self.name):
            compute(*(None if isinstance(a, np.uint64) and a == 0 else a for a in arguments))


class FakeGPU:
    """`cp`, `driver` and `cublaslt` take the modules' place; `compute`: what kernels do, of those
    that do anything."""

    def __init__(self):
        self.gpu = device.GPU("a fake GPU", "sm_90a", 132, 227 << 10)
        self.free = 100 << 30
        self.launches = []
        self.streams = []
        self.current = []
        self.compute = {}
        self.cp, self.cublaslt = self.make_cupy(type("CudaError", (RuntimeError,),
                                                     {})), FakeCublasLt(self)
        names = unittest.mock.sentinel  # each stands for itself
        self.driver = SimpleNamespace(CUtensorMapDataType=names, CUtensorMapSwizzle=names,
                                      CUtensorMapInterleave=names,
            CUtensorMapL2promotion=names, CUtensorMapFloatOOBfill=names, CUresult=names,
                                      cuuint64_t=int, cuuint32_t=int,
            cuTensorMapEncodeTiled=lambda *_: (names.CUDA_SUCCESS,
                                               SimpleNamespace(opaque=range(16))))

    def make_cupy(self, error):
        def zeros(shape, dtype):
            return np.zeros(shape, dtype).view(Array)

        def properties(device):
            major, minor = divmod(int(self.gpu.arch[3:].rstrip("a")), 10)
            return dict(name=self.gpu.name.encode(), major=major, minor=minor,
                        multiProcessorCount=self.gpu.sm_count,
                        sharedMemPerBlockOptin=self.gpu.shared)

        runtime = SimpleNamespace(CUDARuntimeError=error, memcpyDeviceToDevice=3,
                                  memcpy2DAsync=lambda *_: None,
            memsetAsync=lambda address, value, size, stream: ctypes.memset(address, value, size),
            memGetInfo=lambda: (self.free, 141
                                << 30), driverGetVersion=lambda: 13000, getDeviceCount=lambda: 1,
            getDevice=lambda: 0, getDeviceProperties=properties, eventQuery=lambda ptr: 0)
        return SimpleNamespace(zeros=zeros, empty=zeros,
                               asarray=lambda array: np.array(array).view(Array),
            RawModule=lambda path: SimpleNamespace(get_function=functools.partial(FakeFunction, self)),
            cuda=SimpleNamespace(
                Stream=functools.partial(FakeStream, self), Event=FakeEvent,
                get_elapsed_time=lambda start, end: 1.0,
                alloc_pinned_memory=bytearray, driver=SimpleNamespace(CUDADriverError=error), runtime=runtime))


class FakeCublasLt:
    """cuBLASLt's functions: one algorithm for every matmul."""

    def __init__(self, fake):
        self.fake = fake
        self.layouts = {}

    def cublasLtMatrixLayoutCreate(self, handle, dtype, rows, columns, stride):
        handle._obj.value = len(self.layouts) + 1
        self.layouts[handle._obj.value] = rows, columns
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments):
        ctypes.c_int32.from_address(arguments[-1]).value = 1
        return 0

    def cublasLtMatmul(self, handle, description, scale, b, b_layout, a, a_layout, beta, c,
                       c_layout, out, out_layout, algorithm, workspace, size, stream):
        b_shape, a_shape, out_shape = (self.layouts[layout.value]
                                       for layout in (b_layout, a_layout, out_layout))
        assert out_shape[0] in b_shape and out_shape[1] in a_shape
        self.fake.streams[stream].launched += 1
        self.fake.launches.append(Launch("cublaslt", (), (), (b, a, out), 0, stream))
        return 0

    def __getattr__(self, name):
        return lambda *_: 130000 if name == "cublasLtGetVersion" else 0


def install(fake, change):
    """Let the modules of the GPU use this FakeGPU; change(module, name, value) sets one. Kernels
    are not compiled."""
    for module in (decoder, device, fp8, matmul, memory, nccl, plan, precision, ranks, trainer,
                   train_gpt2_cuda):
        change(module, "cp", fake.cp)
    change(device, "driver", fake.driver)
    change(device, "MISSING", None)
    change(device.Device, "resident_clusters", lambda *_: 16)
    change(device, "launch_early", lambda function, *arguments: function(*arguments))
    change(device, "prepare_kernels", lambda arch, files: ([file.name for file in files], 0))
    change(cublaslt, "load_library", lambda: fake.cublaslt)


@pytest.fixture
def fake_gpu(monkeypatch):
    """A FakeGPU, in the place of all modules'."""
    install(fake := FakeGPU(), monkeypatch.setattr)
    return fake
