"""What several test files share: small models and data on disk, programs run as a user runs them, a server, a fake GPU.
Tests that need a real one ask for the fixture `gpu` or are marked so; elsewhere they do not run: see the last line."""

import collections
import contextlib
import ctypes
import functools
import hashlib
import http.server
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import unittest.mock
import urllib.parse
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # PyTorch's threads would spin, on the cores that NumPy's need
os.environ.setdefault("OMP_NUM_THREADS", "2")  # else as many as there are free cores: other bits
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and so it would be by programs under test

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np
import pytest

import train_gpt2
import train_gpt2_cuda
import train_llama3
from llmc.api import pages
from llmc.checkpoint import write_model
from llmc.dataloader import write_tokens
from llmc.debugstate import DebugState, fingerprint
from llmc.errors import UserError, run_main
from llmc.gpu import cublaslt, decoder, device, fp8, matmul, memory, plan, precision, trainer
from llmc.gpu.several import nccl, ranks
from llmc.sampler import Choice, Random
from llmc.tensors import allocate, flat
from llmc.threads import parallel_blocks
from llmc.tokenizer import write_tokenizer
from train_gpt2 import Config

ROOT = Path(__file__).parent.parent
CASES = 4  # of each test that needs a GPU, spread over its list: sizes, precisions; --every-case runs all
GPT2_124M = Config(maxT=1024, V=50257, L=12, NH=12, C=768, Vp=50304)
SMALL = Config(maxT=32, V=257, L=2, NH=3, C=24, Vp=384)
SMALL_HEADS = Config(maxT=64, V=257, L=2, NH=2, C=32, Vp=384)  # which the GPU's kernels take
SMALL_LLAMA = train_llama3.Config(maxT=64, V=131, L=2, NH=4, NKV=2, C=48, Vp=256, F=40, HS=16, tied=0)
BYTES = [bytes([i]) for i in range(256)] + [b"<|endoftext|>"]  # a vocabulary


@pytest.fixture(scope="session")
def gpu():
    """The GPU at hand. Where there is none, tests that use it are not collected."""
    return device.open_gpu()


def needs_gpu(item):
    return "gpu" in item.fixturenames or item.get_closest_marker("gpu")


@pytest.fixture(autouse=True)
def around_a_test(request, monkeypatch, tmp_path_factory):
    """Fake GPUs leave nothing in the user's cache, where real ones find their kernels. After a test, the streams that
    on_stream has entered are left, and CuPy's unused memory is free, which other processes of a test run need."""
    if not needs_gpu(request.node):
        monkeypatch.setenv("TRAIN_GPT2_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    with contextlib.ExitStack() as on_stream.entered:
        yield
    if needs_gpu(request.node):
        device.cp.get_default_memory_pool().free_all_blocks()


def on_stream(device):
    """The rest of a test is on this device's stream. (Not by CuPy's Stream.use: after the next `with` block of another
    stream, one would be on the default stream, which waits for none of ours.)"""
    on_stream.entered.enter_context(device.stream)


def pytest_addoption(parser):
    parser.addoption("--every-case", action="store_true", help=f"on a GPU: every case of a test, not {CASES} of them")


@pytest.hookimpl(trylast=True)  # of those that -k and -m have left
def pytest_collection_modifyitems(config, items):
    def leave_out(group):
        items[:] = [item for item in items if item not in group]
        config.hook.pytest_deselected(items=group)

    if not config.getoption("--every-case") and not config.option.keyword:
        cases = collections.defaultdict(list)
        for item in filter(needs_gpu, items):
            cases[item.nodeid.split("[")[0] if item.path.name != "test_parity.py" else item].append(item)
        needed = {item for group in cases.values() for item in group[:: -(-len(group) // CASES)]}
        leave_out({*filter(needs_gpu, items)} - needed)
    try:
        if needing := {*filter(needs_gpu, items)}:
            device.open_gpu()
    except UserError:
        leave_out(needing)


def pytest_terminal_summary(terminalreporter):
    try:
        device.open_gpu()
    except UserError as error:
        terminalreporter.write_line(f"GPU: tests that need one did not run ({re.split('[:;] ', str(error))[0]})")


def page_of(config):
    """The class of the page, for CPUs, whose Config this is."""
    return next(page for page in pages() if page.Config is type(config))


def random_params(config, seed=0, spread=0.1, ones=0.0):
    """Weights N(0, spread), of norms N(ones, spread), padding 0. The spread is large: gradients are not tiny."""
    params, rng = allocate(page_of(config).parameter_table(config)), np.random.default_rng(seed)
    flat(params)[:] = rng.standard_normal(flat(params).size, dtype=np.float32) * np.float32(spread)
    for name, row in params.table.items():
        getattr(params, name)[...] += np.float32(ones * row.ones)
        if row.vocabulary:
            getattr(params, name)[config.V :] = 0.0
    return params


def make_state(params):
    """A DebugState for SMALL, of random numbers."""
    rng = np.random.default_rng(1)
    batch = *rng.integers(0, SMALL.V, (2, 2, 5), dtype=np.int32), rng.standard_normal((2, 5, SMALL.V), dtype=np.float32)
    optimizer = dict(learning_rate=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    return DebugState(*batch, 5.5, random_params(SMALL, 7), optimizer,
                      np.linspace(5, 1, 10, dtype=np.float32), fingerprint(SMALL, params))


def optimizer_of(m, v):
    """As AdamW, with this state."""
    return SimpleNamespace(STATE=train_gpt2.AdamW.STATE, m=m, v=v)


def make_model(B, T, micro_steps=0, config=SMALL, params=None):
    """A model of either kind with its activations and, with micro_steps, all that training needs."""
    model = page_of(config)(config, params or random_params(config))
    model.allocate_activations(B, T)
    if micro_steps:
        model.allocate_training(B, T, micro_steps)
    return model


def trainer_of(architecture):
    """The trainer of an architecture's page on the CPU, as run_here takes it."""
    file = sys.modules[architecture.__module__].__file__
    return SimpleNamespace(__file__=file, main=functools.partial(train_gpt2.main, architecture))


@pytest.fixture
def in_blocks(monkeypatch):
    """What a layer does in blocks has three or four, the last one smaller; so few numbers would be one."""
    for page in (train_gpt2, train_llama3):
        monkeypatch.setattr(page, "parallel_blocks", lambda work, n, block=0: parallel_blocks(work, n, n // 3 or 1))


def draw_slowly(T, prompt, count, choice=Choice()):
    """The ids that follow a prompt, each from a forward pass over all before; beyond T, the window moves by half."""
    model, tokens, begin, random = make_model(1, T), list(prompt), 0, Random()
    for _ in range(count):
        begin = len(tokens) - T // 2 if len(tokens) - begin > T else begin
        context = np.array([tokens[begin:]], np.int32)
        model.forward(context, context)
        tokens.append(choice.draw(model.acts.logits[0, -1], random.f32()))
    return tokens[len(prompt) :]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty directory, the current one of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def workplace(here):
    """The same with a small model, tokenizer and token files."""
    write_model("gpt2_124M.bin", SMALL, random_params(SMALL))
    write_tokenizer("gpt2_tokenizer.bin", BYTES, 256)
    os.mkdir("data")
    rng = np.random.default_rng(3)
    for split, count in (("train", 4000), ("val", 600)):
        write_tokens(f"data/tiny_shakespeare_{split}.bin", [rng.integers(0, SMALL.V, count, dtype=np.int32)], count)
    return here


@pytest.fixture
def heads(workplace):
    """The same with a model that the GPU's kernels take."""
    write_model("gpt2_124M.bin", SMALL_HEADS, random_params(SMALL_HEADS))
    return workplace


@pytest.fixture
def at_call(monkeypatch):
    """at_call(of, name, number, work): call `number` of of.name, from 0 on, begins with work()."""
    def change(of, name, number, work):
        real, calls = getattr(of, name), itertools.count()
        monkeypatch.setattr(of, name, lambda *arguments, **options: (
            next(calls) == number and work(), real(*arguments, **options))[1])

    return change


@pytest.fixture
def vocabulary_here(monkeypatch):
    """tiktoken has GPT-2's vocabulary with no network, in all processes; or a skipped test."""
    for directory in (os.environ.get("TIKTOKEN_CACHE_DIR", ""), os.path.join(tempfile.gettempdir(), "data-gym-cache")):
        if os.path.exists(os.path.join(directory, "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")):
            return monkeypatch.setenv("TIKTOKEN_CACHE_DIR", directory)
    pytest.skip("GPT-2's vocabulary is neither in TIKTOKEN_CACHE_DIR nor in tiktoken's own cache")


@pytest.fixture(scope="session")
def tiny_shakespeare():
    """The path of the text, or a skipped test."""
    if (path := ROOT / "data" / "tiny_shakespeare.txt").exists():
        return path
    pytest.skip("tiny_shakespeare.txt is not in data/: run python prepro_tinyshakespeare.py once")


def remove_after(directory, step):
    """As if the run had been killed before its later checkpoints."""
    for name in os.listdir(directory):
        if (found := re.search(r"_(\d{8})", name)) and int(found[1]) > step:
            os.unlink(os.path.join(directory, name))


def run_program(*command, check=True, timeout=120, **environment):
    """Run `python PROGRAM ...` from the project's root; returns the finished process, its output as text."""
    program, *arguments = map(str, command)
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run([sys.executable, str(ROOT / program), *arguments], capture_output=True, timeout=timeout,
                          env={**os.environ, "PYTHONPATH": path, **environment})
    done.stdout, done.stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    assert not check or done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done


def assert_one_line_error(done, *words):
    """Exit status 1, and one line on stderr with all these words, after a note at most that a GPU is not used."""
    lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("note: this runs on the CPU: ")]
    assert done.returncode == 1, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert len(lines) == 1 and "error: " in lines[-1] and "Traceback" not in done.stderr, done.stderr
    for word in words:
        assert str(word) in lines[-1], f"{word!r} is not in {lines[-1]!r}"


@pytest.fixture
def run_here(capfdbinary):
    """run_here(module, flag, ...): as run_program, in this process, which has the module's imports already; `fails` are
    the words of the error that it ends with. What the program changes of the process is put back."""
    def run(module, *flags, check=True, fails=()):
        capfdbinary.readouterr()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        state = sys.argv, sys.stdout, sys.stderr
        try:
            sys.argv = [module.__file__, *map(str, flags)]
            with pytest.raises(SystemExit) as exit:
                run_main(module.main)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            sys.argv, sys.stdout, sys.stderr = state
        status = exit.value.code or 0
        sys.stdout.flush()
        output, errors = (text.decode(errors="replace") for text in capfdbinary.readouterr())
        done = SimpleNamespace(returncode=status, stdout=output, stderr=errors)
        if fails:
            assert_one_line_error(done, *fails)
        assert fails or not check or status == 0, f"{flags} exited with {status}:\n{output}\n{errors}"
        return done

    return run


class Server(http.server.ThreadingHTTPServer):
    """Within its `with` block. pages: path -> (status, headers, body); `seen` has the (method, path, first byte) of
    each request; of the next files of a hub, `cuts` break after `after` bytes."""

    def __init__(self, pages):
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.pages, self.seen, self.cuts, self.after = pages, [], 0, 0

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Answer(http.server.BaseHTTPRequestHandler):
    log_message = staticmethod(unittest.mock.Mock())

    def answer(self):
        path, server, most = urllib.parse.unquote(self.path.split("?")[0]), self.server, None
        if self.command == "POST":
            self.rfile.read(int(self.headers["Content-Length"]))
        status, headers, body = server.pages.get(path, (404, {}, b"nothing here"))
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if first := int(begin[1]) if begin else 0:
            status, headers = 206, {**headers, "Content-Range": f"bytes {first}-{len(body) - 1}/{len(body)}"}
        server.seen.append((self.command, path, first))
        self.send_response(status)
        for name, value in {"Content-Length": len(body) - first, **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            if server.cuts and "/resolve/" in path:
                server.cuts, most = server.cuts - 1, server.after
            self.wfile.write(body[first:][:most])

    do_GET = do_HEAD = do_POST = answer


def hub_pages(repository, files, hashes=None):
    """What a hub answers about a repository with these files, {name: bytes}. hashes: {name: SHA-256} that are wrong."""
    commit, pages = "0123456789abcdef" * 2 + "01234567", {}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()} | (hashes or {})
    api = f"/api/{repository}" if repository.startswith("datasets/") else f"/api/models/{repository}"
    readme = {"type": "file", "path": "README.md", "size": 3, "oid": "0"}

    def add(path, value):
        pages[path] = 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

    for revision in ("main", commit):
        add(f"{api}/revision/{revision}", {"id": repository, "sha": commit})
        for folder in set(map(os.path.dirname, files)):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0",
                     "lfs": {"oid": hashes[name], "size": len(data), "pointerSize": 134}}
                    for name, data in files.items() if os.path.dirname(name) == folder]
            add(f"{api}/tree/{revision}/{folder}".rstrip("/"), [*tree, readme])
        for name, data in files.items():
            headers = {"ETag": f'"{hashes[name]}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            pages[f"/{repository}/resolve/{revision}/{name}"] = 200, headers, data
    return pages


@pytest.fixture
def use_hub(monkeypatch):
    """use_hub(url, home): huggingface_hub asks this server, and keeps its files in `home`; url None: it is offline."""
    def use(url, home):
        import huggingface_hub.constants

        values = dict(ENDPOINT=url, HUGGINGFACE_CO_URL_TEMPLATE=f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
                      HF_HUB_CACHE=str(home), HF_HUB_OFFLINE=url is None, HF_HUB_DISABLE_XET=True,
                      HF_HUB_DISABLE_TELEMETRY=True)
        for name, value in values.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)

    return use


# ----------------------------------------------------------------------------------------------------------------------
# a fake GPU: CuPy, the driver and cuBLASLt's bindings over NumPy arrays. Nothing is computed, every launch is recorded.


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
    """Knows which stream captures it, and whether it has joined that one again when the capture ends."""

    def __init__(self, fake, non_blocking=False):
        self.fake, self.ptr, self.capture = fake, len(fake.streams), None  # the stream that captures what this one does
        fake.streams.append(self)
        self.launched, self.seen = 0, {}  # seen: stream -> its launches that are done before the next one here

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
        self.captured, self.capture = len(self.fake.launches), self

    def end_capture(self):
        for stream in self.fake.streams:
            if stream.capture is self:
                assert stream is self or stream.launched == self.seen[stream], "a fork that is not joined"
                stream.capture = None
        launches = self.fake.launches[self.captured :]
        del self.fake.launches[self.captured :]
        return SimpleNamespace(upload=lambda stream: None, launch=lambda stream: self.fake.launches.extend(launches))


class FakeEvent:
    recorded, ptr = False, 0
    __init__ = synchronize = lambda *_, **options: None

    def record(self, stream):
        self.recorded, self.capture = True, stream.capture
        self.seen = {**stream.seen, stream: stream.launched}


class FakeFunction:
    def __init__(self, fake, name):
        self.fake, self.name, self.max_dynamic_shared_size_bytes = fake, name, 48 << 10

    def __call__(self, grid, block, arguments, shared_mem=0, stream=None):
        assert shared_mem <= max(48 << 10, self.max_dynamic_shared_size_bytes), self.name
        stream = stream or self.fake.current[-1]
        stream.launched += 1
        self.fake.launches.append(Launch(self.name, grid, block, arguments, shared_mem, stream.ptr))
        if compute := self.fake.compute.get(self.name):
            compute(*(None if isinstance(a, np.uint64) and a == 0 else a for a in arguments))


class FakeGPU:
    """`cp`, `driver` and `cublaslt` take the modules' place; `compute`: what kernels do, of those that do anything."""

    def __init__(self):
        self.gpu, self.free = device.GPU("a fake GPU", "sm_90a", 132, 227 << 10), 100 << 30
        self.launches, self.streams, self.current, self.compute = [], [], [], {}
        self.cp, self.cublaslt = self.make_cupy(type("CudaError", (RuntimeError,), {})), FakeCublasLt(self)
        names = unittest.mock.sentinel  # each stands for itself
        self.driver = SimpleNamespace(CUtensorMapDataType=names, CUtensorMapSwizzle=names, CUtensorMapInterleave=names,
            CUtensorMapL2promotion=names, CUtensorMapFloatOOBfill=names, CUresult=names, cuuint64_t=int, cuuint32_t=int,
            cuTensorMapEncodeTiled=lambda *_: (names.CUDA_SUCCESS, SimpleNamespace(opaque=range(16))))

    def make_cupy(self, error):
        def zeros(shape, dtype):
            return np.zeros(shape, dtype).view(Array)

        def properties(device):
            major, minor = divmod(int(self.gpu.arch[3:].rstrip("a")), 10)
            return dict(name=self.gpu.name.encode(), major=major, minor=minor, multiProcessorCount=self.gpu.sm_count,
                        sharedMemPerBlockOptin=self.gpu.shared)

        runtime = SimpleNamespace(CUDARuntimeError=error, memcpyDeviceToDevice=3, memcpy2DAsync=lambda *_: None,
            memsetAsync=lambda address, value, size, stream: ctypes.memset(address, value, size),
            memGetInfo=lambda: (self.free, 141 << 30), driverGetVersion=lambda: 13000, getDeviceCount=lambda: 1,
            getDevice=lambda: 0, getDeviceProperties=properties, eventQuery=lambda ptr: 0)
        return SimpleNamespace(zeros=zeros, empty=zeros, asarray=lambda array: np.array(array).view(Array),
            RawModule=lambda path: SimpleNamespace(get_function=functools.partial(FakeFunction, self)),
            cuda=SimpleNamespace(
                Stream=functools.partial(FakeStream, self), Event=FakeEvent, get_elapsed_time=lambda start, end: 1.0,
                alloc_pinned_memory=bytearray, driver=SimpleNamespace(CUDADriverError=error), runtime=runtime))


class FakeCublasLt:
    """cuBLASLt's functions: one algorithm for every matmul."""

    def __init__(self, fake):
        self.fake, self.layouts = fake, {}

    def cublasLtMatrixLayoutCreate(self, handle, dtype, rows, columns, stride):
        handle._obj.value = len(self.layouts) + 1
        self.layouts[handle._obj.value] = rows, columns
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments):
        ctypes.c_int32.from_address(arguments[-1]).value = 1
        return 0

    def cublasLtMatmul(self, handle, description, scale, b, b_layout, a, a_layout, beta, c, c_layout, out, out_layout,
                       algorithm, workspace, size, stream):
        b_shape, a_shape, out_shape = (self.layouts[layout.value] for layout in (b_layout, a_layout, out_layout))
        assert out_shape[0] in b_shape and out_shape[1] in a_shape
        self.fake.streams[stream].launched += 1
        self.fake.launches.append(Launch("cublaslt", (), (), (b, a, out), 0, stream))
        return 0

    def __getattr__(self, name):
        return lambda *_: 130000 if name == "cublasLtGetVersion" else 0


def install(fake, change):
    """Let the modules of the GPU use this FakeGPU; change(module, name, value) sets one. Kernels are not compiled."""
    for module in (decoder, device, fp8, matmul, memory, nccl, plan, precision, ranks, trainer, train_gpt2_cuda):
        change(module, "cp", fake.cp)
    change(device, "driver", fake.driver)
    change(device, "MISSING", None)
    change(device, "launch_early", lambda function, *arguments: function(*arguments))
    change(device, "prepare_kernels", lambda arch, files: ([file.name for file in files], 0))
    change(cublaslt, "load_library", lambda: fake.cublaslt)


@pytest.fixture
def fake_gpu(monkeypatch):
    """A FakeGPU, in the place of all modules'."""
    install(fake := FakeGPU(), monkeypatch.setattr)
    return fake
