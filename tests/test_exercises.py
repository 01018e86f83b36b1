"""exercises/: each stub fails, each function of the page passes, a planted fault is named by its first wrong output."""

import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap

import pytest

import train_gpt2
import train_llama3
from conftest import ROOT

FILES = sorted((ROOT / "exercises").glob("[0-9][0-9]_*.py"))
FAULTS = {  # number of an exercise -> what to replace, by what, and what check.py must say of it
    1: ("np.maximum.reduce(x, axis=1, keepdims=True)", "np.float32(0)",
        r"probs\[0, 0, 0\] is nan, expected 0.731059, in test_what"),
    2: ("n *= mean_dn_n", "n *= 0", r"dinp\[.*\] is .*, expected .*, in test_layernorm"),
    3: ("dout.T, inp.reshape(B * T, C)", "dout.T * 2, inp.reshape(B * T, C)", r"dweight\[.*in test_matmul"),
    4: ("np.float32(3.0) *", "np.float32(2.0) *", r"dinp\[.*in test_gelu"),
    5: ("targets[start:stop]] -=", "targets[start:stop] * 0] -=", r"dlogits\[.*in test_softmax_and_cross_entropy"),
    6: ("dwte[tokens[firsts]] += np.add.reduceat(dout.reshape(B * T, C)[order], firsts, axis=0)",
        "dwte[inp] += dout", r"dwte\[.*in test_encoder"),
    7: ("p *= scale", "p *= 2 * scale", r"dinp\[.*in test_attention"),
    8: ("dp *= scale  #", "#", r"dinp\[.*in test_attention"),
    9: ("correction2 / (1.0", "correction2 / (2.0", r"p\[.*in test_adamw"),
    10: ("gelu_backward(scratch.dfch, a.fch", "gelu_backward(scratch.dfch, a.fch_gelu",
         r"d\w+.*\[.*\] is .*, expected .*, in test_small_models"),
    16: ("dn -= n\n", "dn += n\n", r"dinp\[.*in test_rmsnorm"),
    17: ("cos, -sin", "cos, sin", r"back\[.*in test_rope"),
    18: ("np.matmul(np.swapaxes(d, 2, 3), query[b])", "np.matmul(np.swapaxes(d, 2, 3), query[b][:, ::-1])",
         r"dinp\[.*in test_attention_of_groups"),
    19: ("dgate += s", "dgate += 1", r"dinp\[.*in test_swiglu"),
}


def functions_of(path):
    """{name: function of the stub} of an exercise."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return {name: function for name, function in inspect.getmembers(module, inspect.isfunction)
            if function.__module__ == path.stem}


def of_the_page(path, name):
    page = train_llama3 if path.name >= "16" else train_gpt2
    return getattr(page, name, None) or getattr(page.GPT2, name)


def write_solutions(directory, change=lambda number, text: text):
    """The page's functions, pasted in place of the stubs."""
    for path in FILES:
        texts = [textwrap.dedent(inspect.getsource(of_the_page(path, name))) for name in functions_of(path)]
        page = "train_llama3" if path.name >= "16" else "train_gpt2"
        text = "\n\n".join([f"from llmc.tensors import layer, views\nfrom {page} import *", *texts])
        (directory / path.name).write_text(change(int(path.name[:2]), text))


def check(*arguments):
    """(exit status, lines) of check.py."""
    done = subprocess.run([sys.executable, "exercises/check.py", *map(str, arguments)], cwd=ROOT, capture_output=True,
                          text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def test_stubs_are_the_page_s():
    """Their signatures and docstrings, and that they are all: check.py says that they are not written yet."""
    assert len(FILES) == len(FAULTS)
    for path in FILES:
        for name, stub in functions_of(path).items():
            assert inspect.signature(stub) == inspect.signature(of_the_page(path, name)), name
            assert inspect.getdoc(stub) == inspect.getdoc(of_the_page(path, name)), name
    status, lines = check()
    assert status == 1 and len(lines) == len(FILES)
    assert all(re.fullmatch(rf"{path.name}: \w+ is not written yet", line) for path, line in zip(FILES, lines))


def test_the_page_s_functions_pass(tmp_path):
    write_solutions(tmp_path)
    assert check("--directory", tmp_path) == (0, [f"{path.name}: passes" for path in FILES])


def test_a_fault_is_named(tmp_path):
    def change(number, text):
        old, new, _ = FAULTS[number]
        assert text.count(old) == 1, (number, old)
        return text.replace(old, new)

    write_solutions(tmp_path, change)
    status, lines = check("--directory", tmp_path)
    assert status == 1 and len(lines) == len(FILES)
    for line, path, (_, _, message) in zip(lines, FILES, FAULTS.values()):
        assert line.startswith(f"{path.name}: ") and re.search(message, line), line


@pytest.mark.parametrize("text, message", (
    ("def gelu_backward(:", "cannot be imported: SyntaxError"),
    ("def gelu_backward(dinp, inp, dout, N):\n    1 / 0", "line 2: ZeroDivision"),
    ("def gelu_backward(dinp, inp, dout, N):\n    dinp = dout", "dinp is NaN everywhere: is it written")))
def test_errors_of_a_learner_are_a_line(tmp_path, text, message):
    (tmp_path / "04_gelu.py").write_text(text)
    status, lines = check(4, "--directory", tmp_path)
    assert status == 1 and len(lines) == 1 and lines[0].startswith("04_gelu.py") and message in lines[0]
