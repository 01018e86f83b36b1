"""What several test files share: small models and data on disk, programs run as a user runs them, a
server, a fake GPU. Tests that need a real one ask for the fixture `gpu` or are marked so; elsewhere
they do not run: see the last line."""

import collections
import contextlib
import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

# PyTorch's threads would spin, on the cores that NumPy's need
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "2")  # else as many as there are free cores: other bits
# under nohup it is ignored, and so it would be by programs under test
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np
import pytest

import train_gpt2
import train_llama3
from llmc.api import pages
from llmc.checkpoint import write_model
from llmc.dataloader import write_tokens
from llmc.debugstate import DebugState, fingerprint
from llmc.errors import UserError, run_main
from llmc.gpu import device
from llmc.sampler import Choice, Random
from llmc.tensors import allocate, flat
from llmc.threads import parallel_blocks
from llmc.tokenizer import write_tokenizer
from train_gpt2 import Config
from servers import Server, hub_pages, use_hub  # noqa: F401  (also a fixture)
from fake_gpu import fake_gpu  # noqa: F401  (a fixture)

FAST = ("-b", 2, "-t", 8, "-g", 16, "--lines", "llmc")  # whose losses have more digits
ROOT = Path(__file__).parent.parent
# of each test that needs a GPU, spread over its list: sizes, precisions; --every-case runs all
CASES = 4
GPT2_124M = Config(maxT=1024, V=50257, L=12, NH=12, C=768, Vp=50304)
SMALL = Config(maxT=32, V=257, L=2, NH=3, C=24, Vp=384)
SMALL_HEADS = Config(maxT=64, V=257, L=2, NH=2, C=32, Vp=384)  # which the GPU's kernels take
SMALL_LLAMA = train_llama3.Config(maxT=64, V=131, L=2, NH=4, NKV=2, C=48, Vp=256, F=40, HS=16,
                                  tied=0)
BYTES = [bytes([i]) for i in range(256)] + [b"<|endoftext|>"]  # a vocabulary


@pytest.fixture(scope="session")
def gpu():
    """The GPU at hand. Where there is none, tests that use it are not collected."""
    return device.open_gpu()


def needs_gpu(item):
    return "gpu" in item.fixturenames or item.get_closest_marker("gpu")


@pytest.fixture(autouse=True)
def around_a_test(request, monkeypatch, tmp_path_factory):
    """Fake GPUs leave nothing in the user's cache, where real ones find their kernels. After a
    test, the streams that on_stream has entered are left, and CuPy's unused memory is free, which
    other processes of a test run need."""
    if not needs_gpu(request.node):
        monkeypatch.setenv("TRAIN_GPT2_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    with contextlib.ExitStack() as on_stream.entered:
        yield
    if needs_gpu(request.node):
        device.cp.get_default_memory_pool().free_all_blocks()


def on_stream(device):
    """The rest of a test is on this device's stream. (Not by CuPy's Stream.use: after the next
    `with` block of another stream, one would be on the default stream, which waits for none of
    ours.)"""
    on_stream.entered.enter_context(device.stream)


def pytest_addoption(parser):
    parser.addoption("--every-case", action="store_true",
                     help=f"on a GPU: every case of a test, not {CASES} of them")


@pytest.hookimpl(trylast=True)  # of those that -k and -m have left
def pytest_collection_modifyitems(config, items):
    def leave_out(group):
        items[:] = [item for item in items if item not in group]
        config.hook.pytest_deselected(items=group)

    if not config.getoption("--every-case") and not config.option.keyword:
        cases = collections.defaultdict(list)
        for item in filter(needs_gpu, items):
            cases[item.nodeid.split("[")[0] if item.path.name != "test_parity.py"
                  else item].append(item)
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
        terminalreporter.write_line("GPU: tests that need one did not run"
                                    f" ({re.split('[:;] ', str(error))[0]})")


def page_of(config):
    """The class of the page, for CPUs, whose Config this is."""
    return next(page for page in pages() if page.Config is type(config))


def random_params(config, seed=0, spread=0.1, ones=0.0):
    """Weights N(0, spread), of norms N(ones, spread), padding 0. The spread is large: gradients are
    not tiny."""
    params = allocate(page_of(config).parameter_table(config))
    rng = np.random.default_rng(seed)
    flat(params)[:] = rng.standard_normal(flat(params).size, dtype=np.float32) * np.float32(spread)
    for name, row in params.table.items():
        getattr(params, name)[...] += np.float32(ones * row.ones)
        if row.vocabulary:
            getattr(params, name)[config.V :] = 0.0
    return params


def make_state(params):
    """A DebugState for SMALL, of random numbers."""
    rng = np.random.default_rng(1)
    batch = *rng.integers(0, SMALL.V, (2, 2, 5),
                          dtype=np.int32), rng.standard_normal((2, 5, SMALL.V), dtype=np.float32)
    optimizer = dict(learning_rate=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    return DebugState(*batch, 5.5, random_params(SMALL, 7), optimizer,
                      np.linspace(5, 1, 10, dtype=np.float32), fingerprint(SMALL, params))


def optimizer_of(m, v):
    """As AdamW, with this state."""
    return SimpleNamespace(STATE=train_gpt2.AdamW.STATE, m=m, v=v)


def make_model(B, T, micro_steps=0, config=SMALL, params=None):
    """A model of either kind with its activations and, with micro_steps, all that training
    needs."""
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
    """What a layer does in blocks has three or four, the last one smaller; so few numbers would be
    one."""
    for page in (train_gpt2, train_llama3):
        monkeypatch.setattr(page, "parallel_blocks",
                            lambda work, n, block=0: parallel_blocks(work, n, n // 3 or 1))


def draw_slowly(T, prompt, count, choice=Choice()):
    """The ids that follow a prompt, each from a forward pass over all before; beyond T, the window
    moves by half."""
    model = make_model(1, T)
    tokens = list(prompt)
    begin = 0
    random = Random()
    for _ in range(count):
        begin = len(tokens) - T // 2 if len(tokens) - begin > T else begin
        context = np.array([tokens[begin:]], np.int32)
        model.forward(context, context)
        tokens.append(choice.draw(model.acts.logits[0, -1], random.f32()))
    return tokens[len(prompt) :]


@pytest.fixture
def train(run_here):
    """train(flag, ...): what a short run of the trainer prints, in this process."""
    return lambda *flags: run_here(train_gpt2, *FAST, *flags).stdout


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
        write_tokens(f"data/tiny_shakespeare_{split}.bin",
                     [rng.integers(0, SMALL.V, count, dtype=np.int32)], count)
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
        real = getattr(of, name)
        calls = itertools.count()
        monkeypatch.setattr(of, name, lambda *arguments, **options: (
            next(calls) == number and work(), real(*arguments, **options))[1])

    return change


@pytest.fixture
def vocabulary_here(monkeypatch):
    """tiktoken has GPT-2's vocabulary with no network, in all processes; or a skipped test."""
    for directory in (os.environ.get("TIKTOKEN_CACHE_DIR", ""),
                      os.path.join(tempfile.gettempdir(), "data-gym-cache")):
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
    """Run `python PROGRAM ...` from the project's root; returns the finished process, its output as
    text."""
    program, *arguments = map(str, command)
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run([sys.executable, str(ROOT / program), *arguments], capture_output=True,
                          timeout=timeout, env={**os.environ, "PYTHONPATH": path, **environment})
    done.stdout, done.stderr = (done.stdout.decode(errors="replace"),
                                done.stderr.decode(errors="replace"))
    assert (not check or done.returncode
            == 0), f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done


def assert_one_line_error(done, *words):
    """Exit status 1, and one line on stderr with all these words, after a note at most that a GPU
    is not used."""
    lines = [line for line in done.stderr.strip().splitlines()
             if not line.startswith("note: this runs on the CPU: ")]
    assert done.returncode == 1, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert (len(lines) == 1 and "error: " in lines[-1]
            and "Traceback" not in done.stderr), done.stderr
    for word in words:
        assert str(word) in lines[-1], f"{word!r} is not in {lines[-1]!r}"


@pytest.fixture
def run_here(capfdbinary):
    """run_here(module, flag, ...): as run_program, in this process, which has the module's imports
    already; `fails` are the words of the error that it ends with. What the program changes of the
    process is put back."""
    def run(module, *flags, check=True, fails=()):
        capfdbinary.readouterr()
        handlers = {number: signal.getsignal(number)
                    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
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
        assert (fails or not check
                or status == 0), f"{flags} exited with {status}:\n{output}\n{errors}"
        return done

    return run


# --------------------------------------------------------------------------------------------------
# a fake GPU: CuPy, the driver and cuBLASLt's bindings over NumPy arrays. Nothing is computed, every
# launch is recorded.
