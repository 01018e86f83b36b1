"""
Write a layer yourself; the project's own tests check it, in the place of the page's function.

    python exercises/check.py              # which exercises pass
    python exercises/check.py 2            # what is wrong first with exercises/02_layernorm.py
    python exercises/check.py --train      # trains a small model on your layers, three minutes, with a sample

README.md beside this file has hints, and says where the solutions are. Kernels are checked and
timed where there is a GPU, and compiled elsewhere.
"""

import argparse
import builtins
import contextlib
import functools
import glob
import inspect
import io
import math
import multiprocessing
import os
import re
import subprocess
import sys
import traceback
import types

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:0] = [ROOT, os.path.join(ROOT, "dev"), os.path.join(ROOT, "tests")]

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np

import answers
import fp8_reference
import train_gpt2
import train_llama3
import train_speedrun
from llmc.debugstate import check_tensor as compare
from llmc.errors import UserError, run_main
from llmc.gpu.compiler import compile_kernels
from llmc.gpu.device import open_gpu
from llmc.gpu.geometry import model_constants
from llmc.gpu.precision import Precision

try:
    import pytest

    import torch  # noqa: F401  (for the tests)
    MISSING = None
except ImportError as error:
    MISSING = error.name

FUNCTIONS = {  # exercise -> the functions that it is about
    1: "softmax_forward", 2: "layernorm_forward layernorm_backward", 3: "matmul_backward",
    4: "gelu_backward", 5: "crossentropy_forward crossentropy_softmax_backward",
    6: "encoder_backward", 7: "attention_forward", 8: "attention_backward", 9: "adamw_update",
    10: "backward_into", 16: "rmsnorm_forward rmsnorm_backward", 17: "rope_forward rope_backward",
    18: "attention_backward", 19: "swiglu_forward swiglu_backward",
    20: "relu2_forward relu2_backward", 21: "cap_forward cap_backward",
    22: "qknorm_forward qknorm_backward", 23: "orthogonalize muon_update", 24: "finite_difference",
    25: "attention_decode", 26: "merge learn_merges encode", 27: "round_e4m3",
}  # fmt: skip
# where they are, of those that train_gpt2.py does not have
PAGES = {**dict.fromkeys(range(16, 20), train_llama3),
         **dict.fromkeys(range(20, 24), train_speedrun), 24: answers, 26: answers,
         27: fp8_reference}
LAYERS, LLAMA = "tests/test_layers.py::test_", "tests/test_llama.py::test_"
SPEEDRUN, ANSWERS = "tests/test_speedrun_layers.py::test_", "tests/test_answers.py::test_"
TESTS = {  # exercise -> the tests that its functions must pass
    1: [f"{LAYERS}softmax_and_cross_entropy", f"{LAYERS}what_is_huge_or_impossible_stays_finite"],
    2: [f"{LAYERS}layernorm"], 3: [f"{LAYERS}matmul"],
    4: [f"{LAYERS}gelu", f"{LAYERS}what_is_huge_or_impossible_stays_finite"],
    5: [f"{LAYERS}softmax_and_cross_entropy", f"{LAYERS}what_is_huge_or_impossible_stays_finite"],
    6: [f"{LAYERS}encoder"],
    7: [f"{LAYERS}attention", f"{LAYERS}what_is_huge_or_impossible_stays_finite"],
    8: [f"{LAYERS}attention"],
    9: [f"{LAYERS}adamw_and_norm_follow_the_formulas"],
    10: ["tests/test_parity.py::test_small_models_agree_with_pytorch",
         f"{LAYERS}gradients_of_accumulated_batches_are_their_mean"],
    16: [f"{LLAMA}rmsnorm"], 17: [f"{LLAMA}rope"], 18: [f"{LLAMA}attention_of_groups"],
    19: [f"{LLAMA}swiglu"],
    20: [f"{SPEEDRUN}squared_relu"], 21: [f"{SPEEDRUN}cap"], 22: [f"{SPEEDRUN}qknorm"],
    23: [f"{SPEEDRUN}a_step_of_muon_is_pytorch_s"], 24: [f"{ANSWERS}finite_difference"],
    25: [f"{LAYERS}attention_with_a_cache"], 26: [f"{ANSWERS}byte_pairs"],
    27: ["tests/test_fp8.py::test_the_numbers_and_their_rounding_are_pytorch_s"],
}  # fmt: skip
KERNELS = {  # exercise -> a layer of dev/kernels, and which of its rungs
    11: ("layernorm_forward", ["thread_a_row", "warp_a_row"]),
    12: ("bias_backward", ["fixed_order"]),
    13: ("softmax", ["online"]), 14: ("matmul_forward", ["shared_tiles", "tensor_cores"]),
    15: ("attention_forward", ["online"]), 28: ("attention_backward", ["thread_a_row"])}  # fmt: skip
ALL = sorted([*TESTS, *KERNELS])
SECONDS = 120  # for an exercise in Python
# which a file leaves as they are
WATCHED = builtins, math, np, np.linalg, train_gpt2, *dict.fromkeys(PAGES.values())
GPT2_124M = 1024, 50257, *train_gpt2.SIZES["d12"], 50304


class Watch:
    """A plugin of pytest, and a check_tensor for all modules, that keep what was wrong first, and
    count what passed."""

    def __init__(self, if_unwritten):
        """if_unwritten: what to say of a tensor that is NaN everywhere."""
        self.if_unwritten = if_unwritten
        self.tensor = None
        self.error = None
        self.passed = 0
        self.others = set()
        # also tests that an earlier exercise has imported
        for module in list(sys.modules.values()):
            if "check_tensor" in vars(module):  # hasattr would import what transformers has
                module.check_tensor = self.check_tensor

    def check_tensor(self, name, got, expected, tolerance, *more, **options):
        okay = compare(name, got, expected, tolerance, *more, **options)
        if not okay and self.tensor is None:
            got = np.asarray(got)
            expected = np.asarray(expected)
            self.tensor = f"{name} has the shape {got.shape}, expected {expected.shape}"
            if np.isnan(got).all():
                self.tensor = f"{name} is NaN everywhere: {self.if_unwritten.format(name)}"
            elif got.shape == expected.shape:
                excess = np.abs(np.subtract(got, expected, dtype=np.float64)) - tolerance
                at = np.unravel_index(np.argmax(excess), got.shape)  # argmax finds a NaN first
                self.tensor = (f"{name}[{', '.join(map(str, at))}] is {got[at]:.6g}, expected"
                               f" {expected[at]:.6g}")
        return okay

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            self.passed += 1
        elif not report.passed or hasattr(report, "wasxfail"):
            self.others.add(report.nodeid.rpartition("::")[2])

    def pytest_exception_interact(self, node, call):
        self.error = self.error or (node.name, call.excinfo.value)


def path_of(number, directory):
    name = f"{number:02}_*.{'cu' if number in KERNELS else 'py'}"
    found = glob.glob(os.path.join(directory, name))
    if not found:
        raise UserError(f"{directory} has no {name}; exercises are {', '.join(map(str, ALL))}")
    return found[0]


def owner_of(path, name):
    """The page, or its class, which has the function of this name that an exercise is about."""
    page = PAGES.get(int(os.path.basename(path)[:2]), train_gpt2)
    return page if hasattr(page, name) else train_gpt2.GPT2


def functions_of(path):
    """{name: (owner, function)} of an exercise. Raises UserError for a file that cannot be run,
    lacks one of its functions, has it from elsewhere, or changes what others need."""
    file = os.path.basename(path)
    before = [dict(vars(module)) for module in WATCHED]
    module = types.ModuleType(file.removesuffix(".py"))
    module.__file__ = path
    try:
        with open(path, "rb") as f:
            exec(compile(f.read(), path, "exec"), vars(module))
    except BaseException as error:  # whatever a learner's file raises
        line = str(error).partition("\n")[0]
        raise UserError(f"{file} cannot be imported: {type(error).__name__}: {line}") from None
    check_watched(file, before)

    functions = {}
    for name in FUNCTIONS[int(file[:2])].split():
        function = getattr(module, name, None)
        if function is None:
            raise UserError(f"{file}: the function {name} is missing")
        if not inspect.isfunction(function) or function.__code__.co_filename != os.fspath(path):
            raise UserError(f"{file}: {name} is not a function that this file defines")
        functions[name] = owner_of(path, name), function
    return functions


def check_watched(file, before):
    """Raise UserError if one of the WATCHED modules is not as it was, [dict] of their names."""
    for module, names in zip(WATCHED, before):
        for name, value in names.items():
            if getattr(module, name, None) is not value:
                raise UserError(f"{file} changes {module.__name__}.{name}, which the tests need")


@contextlib.contextmanager
def in_place(functions):
    """Context manager: the page has these functions, as of functions_of, instead of its own."""
    before = {name: getattr(owner, name) for name, (owner, _) in functions.items()}
    for name, (owner, function) in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, (owner, _) in functions.items():
            setattr(owner, name, before[name])


def disable_the_page_s(path):
    """Make the page's functions of an exercise raise, by whatever name one calls them."""
    def disabled(*arguments, **options):
        raise NameError("this is the page's own function: write yours")

    for name in FUNCTIONS[int(os.path.basename(path)[:2])].split():
        getattr(owner_of(path, name), name).__code__ = disabled.__code__


def wrong(number, directory):
    """Run an exercise's tests on its functions, in a process of their own, which they may end;
    returns what is wrong first, a line, or None."""
    name = os.path.basename(path_of(number, directory))
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process
    child = process(target=lambda: writer.send(wrong_here(number, directory)))
    child.start()
    writer.close()
    try:
        if not reader.poll(SECONDS):
            return f"{name} takes more than {SECONDS} s: is there a loop that does not end?"
        return reader.recv()
    except EOFError:
        return f"{name} ends the process that checks it"
    finally:
        child.kill()  # it may have threads that do not end
        child.join()


def wrong_here(number, directory):
    """The same in this process, which then cannot check another."""
    path = path_of(number, directory)
    output = io.StringIO()
    name = os.path.basename(path)
    before = [dict(vars(module)) for module in WATCHED]
    watch = Watch("is it written, by {0}[...] = x, not {0} = x, and set before you add to it?")
    disable_the_page_s(path)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            with in_place(functions_of(path)):
                status = pytest.main([
                    "-qx", "-p", "no:cacheprovider",
                    f"--rootdir={ROOT}", "-c", f"{ROOT}/pyproject.toml",
                    *(os.path.join(ROOT, test) for test in TESTS[number])], [watch])
            check_watched(name, before)
        except UserError as error:
            return str(error)
    if status == 0 and watch.passed and not watch.others:
        return None
    if not watch.error:
        what = (f"{min(watch.others)} did not pass, but was skipped" if watch.others
                else "its tests did not run")
        return f"{name}: {what}" + (f": {output.getvalue().strip()[-300:]}" if status else "")
    test, error = watch.error
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if own and isinstance(error, NotImplementedError):
        return f"{name}: {own[-1].name} is not written yet"
    if own:
        return f"{name}, line {own[-1].lineno}: {type(error).__name__}: {error}"
    return f"{name}: {watch.tensor or str(error).splitlines()[0]}, in {test}"


def judge_kernels(number, directory):
    """Compile an exercise's kernels and, on a GPU, check and time those that are written; returns
    (whether they are wrong, what to say, a line)."""
    sys.path.append(os.path.join(ROOT, "dev", "kernels"))
    import checks
    import lab
    path = path_of(number, directory)
    of, rungs = KERNELS[number]
    name = os.path.basename(path)
    constants = model_constants(train_gpt2.Config(*GPT2_124M), Precision("bfloat16"))
    with open(path, "rb") as f:
        text = f.read().decode(errors="replace")
    if "\ufffd" in text:
        raise UserError(f"{name} is not text")
    unwritten = {rung: text[: found.start(1)].count("\n") + 1 for rung in rungs
                 if (found := re.search(rf"\b{of}_(?:\w+_)?{rung}\([^{{]*{{\s*(// not written yet)",
                                        text))}
    lines = ", ".join(f"line {line}: not written yet" for line in unwritten.values())
    if len(unwritten) == len(rungs):
        return True, f"{name}, {lines}"
    try:
        compile_kernels(path.removesuffix(".cu"), "sm_80", constants)
        wrong, said = run_kernels(lab, checks, of, [rung for rung in rungs if rung not in unwritten], path)
    except UserError as error:
        return True, f"{name}: {error}".replace(f"{name}: {path}", name)
    return wrong or bool(lines), f"{name}: {said}{'; ' * bool(lines)}{lines}"


def run_kernels(lab, checks, of, rungs, path):
    """On a GPU, check and time a file's kernels; returns (whether one is wrong, what to say).
    Raises UserError if one is missing, or the GPU refuses it."""
    import attention_layers  # noqa: F401  (these classes are the layers)
    import layers  # noqa: F401
    import matmul_layers  # noqa: F401
    layer = lab.with_mine(lab.LAYERS[of], path)
    mine = [f"my_{rung}" for rung in rungs]
    output = io.StringIO()
    for rung in rungs:
        if f"my_{rung}" not in layer.rungs:
            raise UserError(f"{path}: the kernel {of}_{rung} is missing")
    try:
        gpu = open_gpu()
    except UserError:
        return False, "compiles; whether it is right needs a GPU"
    precision = lab.precision_of(layer, "float32" if gpu.arch == "sm_75" else "bfloat16")
    watch = Watch("is it written?")
    config = train_gpt2.Config(*GPT2_124M)
    open_lab = functools.cache(functools.partial(lab.Lab, gpu, mine=path))
    with contextlib.redirect_stdout(output):
        right = checks.check_at_all_sizes(layer, open_lab, config, precision.dtype, mine)
    if not right:
        return True, f"{watch.tensor}, in {output.getvalue().partition(':')[0]}"
    bench = open_lab(config, precision)
    at_size = layer(config, precision, gpu, 32, 1024)
    live = [rung.name for rung, _ in at_size.runs() if not rung.name.startswith("my_")][-1]
    with bench.streams():
        times, _ = checks.time_layer(at_size, bench, [*mine, live])
    ms = {rung: min(of_blocks.values()) for rung, of_blocks in times.items()}
    share = ms[live] / min(ms[rung] for rung in mine)
    times = ", ".join(f"{rung} {time:.3f} ms" for rung, time in ms.items())
    return False, f"passes; yours: {share:.0%} of the speed of the last rung, {live} ({times})"


def train(arguments, directory):
    """Train on all exercises' functions that pass, and on the page's for the others."""
    passing = [path_of(number, directory) for number in TESTS if number <= 10
               and not wrong(number, directory)]
    print("on your layers:", *map(os.path.basename, passing) if passing else ["none yet"])
    os.chdir(ROOT)
    if not os.path.exists("data/pyprose_train.bin"):
        subprocess.run([sys.executable, "prepro/pystdlib.py", "--prose"], check=True)
    sys.argv[1:] = ["-e", "d4", "-i", "data/pyprose", "-b", "16", "-t", "64", "-x", "600", "-s",
                    "600",
                    "--print_every", "20", *arguments]
    with contextlib.ExitStack() as stack:
        for path in passing:  # the last one imports the others' functions from the page
            stack.enter_context(in_place(functions_of(path)))
        return train_gpt2.main()


def main():
    parser = argparse.ArgumentParser(description="Check exercises with the project's own tests.")
    parser.add_argument("numbers", nargs="*", type=int, metavar="N",
                        help="of exercises (default: all)")
    parser.add_argument("--directory", default=HERE,
                        help="where your files are (default: exercises/)")
    parser.add_argument("--train", nargs=argparse.REMAINDER,
                        help="train on your layers, with train_gpt2.py's flags")
    args = parser.parse_args()
    if MISSING:
        raise UserError(f"the tests need the Python package {MISSING}: pip install -r"
                        " requirements.txt pytest")
    directory = os.path.abspath(args.directory)
    red = 0
    if not os.path.isdir(directory):
        raise UserError(f"--directory {args.directory}: no such directory")
    if args.train is not None:
        return train(args.train, directory)
    for number in args.numbers or ALL:
        try:
            if number in KERNELS:
                is_wrong, line = judge_kernels(number, directory)
            else:
                line = wrong(number, directory)
                is_wrong = bool(line)
                line = line or f"{os.path.basename(path_of(number, directory))}: passes"
        except (UserError, OSError) as error:  # of a file that is missing, or cannot be read
            is_wrong = True
            line = str(error)
        print(line, flush=True)
        red += is_wrong
    return int(red > 0)


if __name__ == "__main__":
    run_main(main)
