"""
Write a layer yourself; the project's own tests check it, in the place of the page's function.

    python exercises/check.py              # which exercises pass
    python exercises/check.py 2            # what is wrong first with exercises/02_layernorm.py
    python exercises/check.py --train      # trains a small model on your layers, three minutes, with a sample

README.md beside this file has hints; train_gpt2.py and, from 16 on, train_llama3.py are the solution.
"""

import argparse
import contextlib
import glob
import importlib.util
import inspect
import io
import os
import subprocess
import sys
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:0] = [ROOT, os.path.join(ROOT, "dev"), os.path.join(ROOT, "tests")]

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np

import train_gpt2
import train_llama3
from llmc.errors import UserError, run_main

try:
    import pytest

    import dev.rounding  # noqa: F401  (as test_gpt2.py imports it)
    from rounding import check_tensor as compare  # as the tests do
    MISSING = None
except ImportError as error:
    MISSING = error.name

LAYERS, LLAMA = "tests/test_layers.py::test_", "tests/test_llama.py::test_"
TESTS = {  # exercise -> the tests that its functions must pass
    1: [f"{LAYERS}softmax_and_cross_entropy", f"{LAYERS}what_is_huge_or_impossible_stays_finite"],
    2: [f"{LAYERS}layernorm"], 3: [f"{LAYERS}matmul"],
    4: [f"{LAYERS}gelu", f"{LAYERS}what_is_huge_or_impossible_stays_finite"],
    5: [f"{LAYERS}softmax_and_cross_entropy", f"{LAYERS}what_is_huge_or_impossible_stays_finite"],
    6: [f"{LAYERS}encoder"], 7: [f"{LAYERS}attention"], 8: [f"{LAYERS}attention"],
    9: [f"{LAYERS}adamw_and_norm_follow_the_formulas"],
    10: ["test_gpt2.py::test_small_models_agree_with_pytorch",
         f"{LAYERS}gradients_of_accumulated_batches_are_their_mean"],
    16: [f"{LLAMA}rmsnorm"], 17: [f"{LLAMA}rope"], 18: [f"{LLAMA}attention_of_groups"], 19: [f"{LLAMA}swiglu"],
}  # fmt: skip


class Watch:
    """A plugin of pytest, and a check_tensor, that keep what was wrong first."""

    def __init__(self):
        self.tensor, self.error = None, None

    def check_tensor(self, name, got, expected, tolerance, *more, **options):
        okay = compare(name, got, expected, tolerance, *more, **options)
        if not okay and self.tensor is None:
            got, expected = np.asarray(got), np.asarray(expected)
            self.tensor = f"{name} has the shape {got.shape}, expected {expected.shape}"
            if np.isnan(got).all():
                self.tensor = (f"{name} is NaN everywhere: is it written, by {name}[...] = x, not {name} = x, and set"
                               " before you add to it?")
            elif got.shape == expected.shape:
                excess = np.abs(np.subtract(got, expected, dtype=np.float64)) - tolerance
                at = np.unravel_index(np.argmax(excess), got.shape)  # argmax finds a NaN first
                self.tensor = f"{name}[{', '.join(map(str, at))}] is {got[at]:.6g}, expected {expected[at]:.6g}"
        return okay

    def pytest_exception_interact(self, node, call):
        self.error = self.error or (node.name, call.excinfo.value)


def path_of(number, directory):
    found = glob.glob(os.path.join(directory, f"{number:02}_*.py"))
    if not found:
        raise UserError(f"{directory} has no {number:02}_*.py; exercises are {', '.join(map(str, TESTS))}")
    return found[0]


def functions_of(path):
    """{name: function} of an exercise, as the page has them."""
    spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: function for name, function in inspect.getmembers(module, inspect.isfunction)
            if function.__module__ == module.__name__ and not name.startswith("_")}


@contextlib.contextmanager
def in_place(path):
    """Context manager: the page has an exercise's functions instead of its own."""
    functions, page = functions_of(path), train_llama3 if os.path.basename(path) >= "16" else train_gpt2
    owner = {name: page if hasattr(page, name) else page.GPT2 for name in functions}
    before = {name: getattr(owner[name], name) for name in functions}
    for name, function in functions.items():
        setattr(owner[name], name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(owner[name], name, function)


def wrong(number, directory):
    """Run an exercise's tests on its functions; returns what is wrong first, a line, or None."""
    path, watch = path_of(number, directory), Watch()
    name = os.path.basename(path)
    try:
        functions_of(path)
    except Exception as error:  # whatever a learner's file raises
        return f"{name} cannot be imported: {type(error).__name__}: {error}"
    output = io.StringIO()
    for module in list(sys.modules.values()):  # also tests that an earlier exercise has imported
        if hasattr(module, "check_tensor"):
            module.check_tensor = watch.check_tensor
    with in_place(path), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = pytest.main(["-qx", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "-c", f"{ROOT}/pyproject.toml",
                              *(os.path.join(ROOT, test) for test in TESTS[number])], [watch])
    if status == 0:
        return None
    if not watch.error:
        raise UserError(f"the tests of exercise {number} did not run: {output.getvalue().strip()[-300:]}")
    test, error = watch.error
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if own and isinstance(error, NotImplementedError):
        return f"{name}: {own[-1].name} is not written yet"
    if own:
        return f"{name}, line {own[-1].lineno}: {type(error).__name__}: {error}"
    return f"{name}: {watch.tensor or str(error).splitlines()[0]}, in {test}"


def train(arguments, directory):
    """Train on all exercises' functions that pass, and on the page's for the others."""
    passing = [path_of(number, directory) for number in TESTS if number <= 10 and not wrong(number, directory)]
    print("on your layers:", *map(os.path.basename, passing) if passing else ["none yet"])
    os.chdir(ROOT)
    if not os.path.exists("data/pyprose_train.bin"):
        subprocess.run([sys.executable, "prepro_pystdlib.py", "--prose"], check=True)
    sys.argv[1:] = ["-e", "d4", "-i", "data/pyprose", "-b", "16", "-t", "64", "-x", "600", "-s", "600",
                    "--print_every", "20", *arguments]
    with contextlib.ExitStack() as stack:
        for path in passing:  # the last one imports the others' functions from the page
            stack.enter_context(in_place(path))
        return train_gpt2.main()


def main():
    parser = argparse.ArgumentParser(description="Check exercises with the project's own tests.")
    parser.add_argument("numbers", nargs="*", type=int, metavar="N", help="of exercises (default: all)")
    parser.add_argument("--directory", default=HERE, help="where your files are (default: exercises/)")
    parser.add_argument("--train", nargs=argparse.REMAINDER, help="train on your layers, with train_gpt2.py's flags")
    args = parser.parse_args()
    if MISSING:
        raise UserError(f"the tests need the Python package {MISSING}: pip install -r requirements-test.txt")
    directory, red = os.path.abspath(args.directory), 0
    if args.train is not None:
        return train(args.train, directory)
    for number in args.numbers or TESTS:
        found = wrong(number, directory)
        print(found or f"{os.path.basename(path_of(number, directory))}: passes", flush=True)
        red += found is not None
    return int(red > 0)


if __name__ == "__main__":
    run_main(main)
