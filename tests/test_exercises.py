"""exercises/: stubs fail, the page's functions and the kernels of dev/kernels pass, a planted fault is named."""

import inspect
import re
import subprocess
import sys
import textwrap

import pytest

from conftest import GPT2_124M, ROOT
from llmc.gpu.compiler import compile_kernels
from llmc.gpu.geometry import model_constants
from llmc.gpu.precision import Precision
from test_kernel_library import lab

sys.path.append(str(ROOT / "exercises"))
from check import functions_of

FILES = sorted((ROOT / "exercises").glob("[0-9][0-9]_*.py"))
SOLUTIONS = {  # exercise in CUDA -> the file of dev/kernels that has its kernels
    "11_layernorm": "layernorm_forward", "12_bias": "bias_backward", "13_softmax": "softmax", "14_matmul": "matmul",
    "15_attention": "attention"}
CUDA_FAULTS = {  # likewise -> what to replace, by what, and what check.py must say of it
    "11_layernorm": ("c < C; c += 32) sum +=", "c < C - 32; c += 32) sum +=", r"out\[.*, in layernorm_forward my_warp"),
    "12_bias": ("sums[warp][lane] = sum;", "sums[warp][lane] = 0; __syncthreads(); atomicAdd(&sums[0][lane], sum);"
                " __syncthreads(); sum = sums[0][lane];", r"a second run's dbias\[.*, in bias_backward my_fixed"),
    "13_softmax": ("part.sum * expf(part.largest - largest)", "part.sum", r"probs\[.*, in softmax my_online"),
    "14_matmul": ("+ i % 2 * 8 + g, c =", "+ i % 2 * 4 + g, c =", r"out\[.*, in matmul_forward my_tensor_cores"),
    "15_attention": ("total *= factor;", "", r"out\[.*, in attention_forward my_online")}
FAULTS = {  # number of an exercise -> what to replace, by what, and what check.py must say of it
    1: ("np.maximum.reduce(x, axis=1, keepdims=True)", "np.float32(0)",
        r"probs\[0, 0, 0\] is nan, expected 0.731059, in test_what"),
    2: ("n *= mean_dn_n", "n *= 0", r"dinp\[.*\] is .*, expected .*, in test_layernorm"),
    3: ("dout.T, inp.reshape(B * T, C)", "dout.T * 2, inp.reshape(B * T, C)", r"dweight\[.*in test_matmul"),
    4: ("np.float32(3.0) *", "np.float32(2.0) *", r"dinp\[.*in test_gelu"),
    5: ("targets[start:stop]] -=", "targets[start:stop] * 0] -=", r"dlogits\[.*in test_softmax_and_cross_entropy"),
    6: ("dwte[tokens[firsts]] += np.add.reduceat(dout.reshape(B * T, C)[order], firsts, axis=0)",
        "dwte[inp] += dout", r"dwte\[.*in test_encoder"),
    7: ("p *= scale", "p *= 2 * scale", r"preatt\[.*in test_attention"),
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


def write_kernels(directory, faults=None):
    """The library's files, in place of the stubs, with faults if there are any."""
    for name, solution in SOLUTIONS.items():
        text = (ROOT / "dev" / "kernels" / f"{solution}.cu").read_text()
        if faults:
            old, new, _ = faults[name]
            assert old in text
            text = new.join(text.rsplit(old, 1))
        (directory / f"{name}.cu").write_text(text)


def check(*arguments):
    """(exit status, lines) of check.py."""
    done = subprocess.run([sys.executable, "exercises/check.py", *map(str, arguments)], cwd=ROOT, capture_output=True,
                          text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("numbers", ((1, 11, 17), pytest.param((), marks=pytest.mark.large)), ids=("some", "all"))
def test_stubs_are_the_page_s(numbers):
    for path in FILES:
        for name, (owner, stub) in functions_of(path).items():
            assert inspect.signature(stub) == inspect.signature(getattr(owner, name)), name
            assert inspect.getdoc(stub) == inspect.getdoc(getattr(owner, name)), name
    for name, solution in SOLUTIONS.items():
        stubs, kernels = map(lab.signatures, (ROOT / f"exercises/{name}.cu", ROOT / f"dev/kernels/{solution}.cu"))
        assert stubs and stubs.items() <= kernels.items()
    status, lines = check(*numbers)
    paths = [p for p in sorted((ROOT / "exercises").glob("[01]*")) if not numbers or int(p.name[:2]) in numbers]
    assert status == 1 and len(lines) == len(paths)
    for path, line in zip(paths, lines):
        assert re.fullmatch(rf"{path.name}(: \w+ is not written yet|(, line \d+: not written yet)+)", line)


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_stubs_compile(arch):
    pytest.importorskip("cuda.core")
    for name in SOLUTIONS:
        assert compile_kernels(str(ROOT / "exercises" / name), arch, model_constants(GPT2_124M, Precision("bfloat16")))


@pytest.mark.parametrize("wrong", (False, True))
@pytest.mark.parametrize("numbers", ((4, 18), pytest.param((*FAULTS,), marks=pytest.mark.large)), ids=("some", "all"))
def test_the_page_s_functions_pass_and_a_fault_is_named(tmp_path, numbers, wrong):
    files = [path for path in FILES if int(path.name[:2]) in numbers]
    for path, (old, new, _) in zip(files, map(FAULTS.get, numbers), strict=True):
        page = "train_llama3" if path.name >= "16" else "train_gpt2"
        functions = [textwrap.dedent(inspect.getsource(getattr(owner, name)))
                     for name, (owner, _) in functions_of(path).items()]
        text = "\n\n".join([f"from llmc.tensors import layer, views\nfrom {page} import *", *functions])
        assert text.count(old) == 1, (path, old)
        (tmp_path / path.name).write_text(text.replace(old, new) if wrong else text)
    status, lines = check(*numbers, "--directory", tmp_path)
    assert status == wrong
    for line, path, (_, _, message) in zip(lines, files, map(FAULTS.get, numbers), strict=True):
        assert re.match(f"{path.name}: .*{message}" if wrong else f"{path.name}: passes$", line), line


def test_kernels_compile_where_there_is_no_gpu(tmp_path, monkeypatch):
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    write_kernels(tmp_path)
    lines = [f"{name}.cu: compiles; whether it is right needs a GPU" for name in SOLUTIONS]
    assert check(*range(11, 16), "--directory", tmp_path) == (0, lines)
    stub = (ROOT / "exercises" / "11_layernorm.cu").read_text()
    (tmp_path / "11_layernorm.cu").write_text(stub.replace("// not written yet", "//", 1))
    (tmp_path / "12_bias.cu").write_text("")
    (tmp_path / "13_softmax.cu").write_text("extern C")
    status, (half, nothing, fault) = check(11, 12, 13, "--directory", tmp_path)
    assert status == 1 and re.search(r": compiles; .* a GPU; line \d+: not written yet$", half)
    assert nothing.startswith("12_bias.cu: its kernels are none, expected one of bias_backward_atomics")
    assert fault.startswith("13_softmax.cu does not compile for sm_80: ")


@pytest.mark.gpu
def test_kernels_on_a_gpu(tmp_path):
    """Those of the library pass, and are timed; a stub's outputs are named, and a fault's."""
    write_kernels(tmp_path)
    status, lines = check(*range(11, 16), "--directory", tmp_path)
    assert status == 0 and all(re.search(r"\.cu: passes; yours: \d+% of the speed of", line) for line in lines), lines
    for name in SOLUTIONS:
        stub = (ROOT / "exercises" / f"{name}.cu").read_text().replace("// not written yet", "//")
        (tmp_path / f"{name}.cu").write_text(stub)
    status, lines = check(*range(11, 16), "--directory", tmp_path)
    assert status == 1 and all("is NaN everywhere: is it written?, in" in line for line in lines), lines
    write_kernels(tmp_path, CUDA_FAULTS)
    status, lines = check(*range(11, 16), "--directory", tmp_path)
    for line, (name, (_, _, message)) in zip(lines, CUDA_FAULTS.items(), strict=True):
        assert line.startswith(f"{name}.cu: ") and re.search(message, line), line


def test_errors_of_a_learner_are_a_line(tmp_path):
    errors = {  # exercise -> its text, and what check.py says
        "02_layernorm": ("def layernorm_backward(:", "cannot be imported: SyntaxError"),
        "03_matmul": ("def matmul_backwards(dinp):\n    dinp[...] = 0", "has no function with the name of one on the"),
        "04_gelu": ("def one():\n    return 1\n\ndef gelu_backward(dinp, inp, dout, N):\n    dinp[...] = one()",
                    "dinp[0] is 1, exp"),
        "05_crossentropy": ("import os\nos._exit(0)", "ends the process that"),
        "06_encoder": ("import pytest\n\ndef encoder_backward(*_):\n    pytest.skip()", "not pass, but was skipped"),
        "09_adamw": ("def adamw_update(*arguments):\n    1 / 0", "line 2: ZeroDivision"),
        "19_swiglu": ("def swiglu_backward(dinp, *rest):\n    dinp = rest", "dinp is NaN everywhere: is it written")}
    for name, (text, _) in errors.items():
        (tmp_path / f"{name}.py").write_text(text)
    status, lines = check(*(int(name[:2]) for name in errors), "--directory", tmp_path)
    assert status == 1
    for line, (name, (_, message)) in zip(lines, errors.items(), strict=True):
        assert line.startswith(name) and message in line
