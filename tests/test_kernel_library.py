"""dev/kernels with no GPU: that all kernels compile, and that every launch passes what the kernel
takes; exercises/: stubs fail, the page's functions and the kernels of dev/kernels pass, a planted
fault is named."""

import functools
import inspect
import itertools
import re
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import GPT2_124M, ROOT, assert_one_line_error, on_stream, run_program
from fake_gpu import Array

sys.path += [str(ROOT / "dev" / "kernels"), str(ROOT / "exercises")]
import attention_layers  # noqa: F401  (these classes are the layers)
import check
import lab
import layers  # noqa: F401
import matmul_layers  # noqa: F401
from lab import AWKWARD, LAYERS
from llmc.gpu.compiler import compile_kernels
from llmc.gpu.geometry import kernel_files, model_constants
from llmc.gpu.precision import Precision
from profile_gpu import HOLD_FILE
from test_compile import check_launches, compile_file, signatures
import train_gpt2_cuda as cuda
from train_gpt2 import Config


@pytest.mark.large
@pytest.mark.parametrize("arch, dtype",
                         (("sm_75", "float32"), ("sm_80", "float32"), ("sm_80", "bfloat16"),
                          ("sm_90a", "float32"), ("sm_90a", "bfloat16")))
def test_kernels_compile_with_no_gpu(arch, dtype):
    config = GPT2_124M if arch == "sm_90a" else AWKWARD[0]
    for grads in (0, 1) if dtype == "bfloat16" else (0,):
        for file in (HOLD_FILE,
                     *lab.portable_files(config, Precision(dtype, 1, grads), min(arch, "sm_80"))):
            compile_file(file, arch)


# --------------------------------------------------------------------------------------------------
# launches: every rung of every layer, on a fake GPU


class FakeLab(lab.Lab):
    def __init__(self, fake, config, precision):
        super().__init__(fake.gpu, config, precision)
        self.torch = False
        self.signatures = {}
        module = fake.cp.RawModule("any")
        for device, arch, files, prefix in (
                (self.device, "sm_90a", (), ""), (self.portable, "sm_80", lab.FILES, "portable ")):
            live = kernel_files(cuda.GPT2, config, precision, arch).values()
            for path in (*(ROOT / "kernels" / f"{file.name}.cu" for file in live), *files):
                for name, parameters in signatures(str(path).removesuffix(".cu")).items():
                    assert (prefix + name
                            not in self.signatures), f"{path}: another file has such a kernel"
                    self.signatures[prefix + name] = parameters
                    device.functions[name] = module.get_function(prefix + name)
                    device.functions[name].max_dynamic_shared_size_bytes = device.shared.get(name, 0)


SIZES = [(AWKWARD[1], 3, 97), (AWKWARD[0], 1, 1), (Config(1024, 257, 1, 2, 128, 384), 22, 128)]


@pytest.mark.parametrize("name", LAYERS)
def test_launches_pass_what_the_kernels_take(fake_gpu, name):
    fake_gpu.cp.full = lambda shape, value, dtype: np.full(shape, value, dtype).view(Array)
    ran = set()
    on_stream(SimpleNamespace(stream=fake_gpu.cp.cuda.Stream()))
    for (config, B, T), dtype in itertools.product(SIZES, ("bfloat16", "float32")):
        fake = FakeLab(fake_gpu, config, lab.precision_of(LAYERS[name], dtype))
        layer = LAYERS[name](config, fake.precision, fake_gpu.gpu, B, T)
        arrays = lab.upload(layer.tensors())
        largest = 2 * sum(array.nbytes for array in arrays.values())
        assert layer.flops() or 0 < layer.bytes(SimpleNamespace(**arrays)) <= largest
        for rung, _, call in lab.calls(layer, fake, arrays, None):
            fake_gpu.launches.clear()
            call()
            assert fake_gpu.launches
            check_launches(fake_gpu.launches, fake_gpu.gpu, fake.precision, fake.signatures)
            ran.add(rung)
    assert ran == LAYERS[name].rungs.keys(), "each rung fits some of these sizes in some dtype"


# --------------------------------------------------------------------------------------------------
# exercises

FILES = sorted((ROOT / "exercises").glob("[0-9][0-9]_*.py"))
# exercise in CUDA -> the file of dev/kernels that has its kernels; a fault, as in FAULTS
SOLUTIONS = {
    "11_layernorm": ("layernorm_forward", "c < C; c += 32) sum +=", "c < C - 32; c += 32) sum +=",
                     r"out\[.*, in layernorm_forward my_warp"),
    "12_bias": ("bias_backward", "sums[warp][lane] = sum;",
                "sums[warp][lane] = 0; __syncthreads(); atomicAdd(&sums[0]"
                "[lane], sum); __syncthreads(); sum = sums[0][lane];",
                r"a second run's dbias\[.*, in bias_backward my_fixed"),
    "13_softmax": ("softmax", "part.sum * expf(part.largest - largest)", "part.sum",
                   r"probs\[.*, in softmax my_online"),
    "14_matmul": ("matmul", "+ i % 2 * 8 + g, c =", "+ i % 2 * 4 + g, c =",
                  r"out\[.*, in matmul_forward my_tensor_cores"),
    "15_attention": ("attention", "total *= factor;", "",
                     r"out\[.*, in attention_forward my_online"),
    "28_attention_backward": ("attention", "(row_product(d, value) - D[head + t])",
                              "row_product(d, value)",
                              r"dinp\[.*, in attention_backward my_thread_a_row")}
KERNEL_NUMBERS = [int(name[:2]) for name in SOLUTIONS]
FAULTS = {  # number of an exercise -> what to replace, by what, and what check.py must say of it
    4: ("np.float32(3.0) *", "np.float32(2.0) *", r"dinp\[.*in test_gelu"),
    18: ("np.matmul(np.swapaxes(d, 2, 3), query[b])",
         "np.matmul(np.swapaxes(d, 2, 3), query[b][:, ::-1])",
         r"dinp\[.*in test_attention_of_groups"),
    20: ("np.float32(2.0)", "np.float32(1.0)", r"dinp\[.*in test_squared_relu"),
    21: ("inverse * np.sqrt(inverse)", "inverse", r"dlogits\[.*in test_cap"),
    22: ("d -= out", "d -= 0 * out", r"dqkv\[.*in test_qknorm"),
    23: ("* grad + np.float32(momentum) * m", "* 0 + m", r"param\[.*in test_a_step_of_muon"),
    24: ("x[index] = keep\n", "x[index] = keep - h\n", r"the gradient\[.*in test_finite"),
    25: ("1 + position", "1", r"out\[.*in test_attention_with_a_cache"),
    26: ("i += 2", "i += 1", r".*in test_byte_pairs"),
    27: ("np.rint(x / step)", "np.floor(x / step + 0.5)", r"the result\[.*in test_the_numbers"),
}


def write_kernels(directory, wrong=False):
    """The library's files, in place of the stubs, each with its fault or as it is."""
    for name, (solution, old, new, _) in SOLUTIONS.items():
        text = (ROOT / "dev" / "kernels" / f"{solution}.cu").read_text()
        assert old in text
        (directory / f"{name}.cu").write_text(new.join(text.rsplit(old, 1)) if wrong else text)


def check_here(*flags, **environment):
    """(exit status, lines) of check.py."""
    done = run_program("exercises/check.py", *flags, check=False, timeout=600, **environment)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("numbers", ((1, 11, 17), pytest.param((), marks=pytest.mark.large)),
                         ids=("some", "all"))
def test_stubs_are_the_page_s(numbers):
    for path in FILES:
        for name, (owner, stub) in check.functions_of(path).items():
            assert inspect.signature(stub) == inspect.signature(getattr(owner, name)), name
            assert inspect.getdoc(stub) == inspect.getdoc(getattr(owner, name)), name
    for name, (solution, *_) in SOLUTIONS.items():
        stubs, kernels = map(lab.signatures,
                             (ROOT / f"exercises/{name}.cu", ROOT / f"dev/kernels/{solution}.cu"))
        assert stubs and stubs.items() <= kernels.items()
    status, lines = check_here(*numbers)
    paths = [p for p in sorted((ROOT / "exercises").glob("[0-9][0-9]_*")) if not numbers
             or int(p.name[:2]) in numbers]
    assert status == 1 and len(lines) == len(paths)
    for path, line in zip(paths, lines):
        assert (re.fullmatch(rf"{path.name}(: \w+ is not written yet|(, line \d+: not written"
                             r" yet)+)", line))


@pytest.mark.parametrize("numbers, wrong", (
    ((4, 18, 24), True), pytest.param(tuple(FAULTS), True, marks=pytest.mark.large),
    pytest.param(tuple(check.TESTS), False, marks=pytest.mark.large)))
def test_the_page_s_functions_pass_and_a_fault_is_named(tmp_path, numbers, wrong):
    files = [path for path in FILES if int(path.name[:2]) in numbers]
    faults = [FAULTS[number] if wrong else ("", "", "") for number in numbers]
    for path, (old, new, _) in zip(files, faults, strict=True):
        page = check.PAGES.get(int(path.name[:2]), check.train_gpt2).__name__
        functions = [textwrap.dedent(inspect.getsource(getattr(owner, name)))
                     for name, (owner, _) in check.functions_of(path).items()]
        text = "\n\n".join([f"from llmc.tensors import layer, views\nfrom {page} import *",
                            *functions])
        assert not wrong or text.count(old) == 1, (path, old)
        (tmp_path / path.name).write_text(text.replace(old, new) if wrong else text)
    status, lines = check_here(*numbers, "--directory", tmp_path)
    assert status == wrong
    for line, path, (_, _, message) in zip(lines, files, faults, strict=True):
        assert re.match(f"{path.name}: .*{message}" if wrong else f"{path.name}: passes$",
                        line), line


def test_exercises_compile_where_there_is_no_gpu(tmp_path):
    pytest.importorskip("cuda.core")
    for name in SOLUTIONS:
        assert compile_kernels(f"{ROOT}/exercises/{name}", "sm_90a",
                               model_constants(GPT2_124M, Precision("bfloat16")))
    write_kernels(tmp_path)
    lines = [f"{name}.cu: compiles; whether it is right needs a GPU" for name in SOLUTIONS]
    without_gpu = functools.partial(check_here, CUDA_VISIBLE_DEVICES="-1")
    assert without_gpu(*KERNEL_NUMBERS, "--directory", tmp_path) == (0, lines)
    stub = (ROOT / "exercises" / "11_layernorm.cu").read_text()
    (tmp_path / "11_layernorm.cu").write_text(stub.replace("// not written yet", "//", 1))
    (tmp_path / "12_bias.cu").write_text("")
    (tmp_path
     / "13_softmax.cu").write_text("// one\n// two\n__device__ int broken() { return 1 + ; }\n")
    status, (half, nothing, fault) = without_gpu(11, 12, 13, "--directory", tmp_path)
    assert status == 1 and re.search(r": compiles; .* a GPU; line \d+: not written yet$", half)
    assert nothing.startswith("12_bias.cu: its kernels are none, expected one of"
                              " bias_backward_atomics")
    assert re.match(r"13_softmax.cu does not compile for sm_80: .*13_softmax.cu\(3\): error:"
                    r" expected an exp", fault)


@pytest.mark.gpu
def test_exercises_on_a_gpu(tmp_path):
    """Those of the library pass, and are timed; a stub's outputs are named, and a fault's."""
    on_gpu = functools.partial(check_here, *KERNEL_NUMBERS, "--directory", tmp_path)
    write_kernels(tmp_path)
    status, lines = on_gpu()
    assert status == 0 and all(re.search(r"\.cu: passes; yours: \d+% of the speed of", line)
                               for line in lines), lines
    for name in SOLUTIONS:
        stub = (ROOT / "exercises" / f"{name}.cu").read_text().replace("// not written yet", "//")
        (tmp_path / f"{name}.cu").write_text(stub)
    status, lines = on_gpu()
    assert status == 1 and all("is NaN everywhere: is it written?, in" in line
                               for line in lines), lines
    write_kernels(tmp_path, wrong=True)
    status, lines = on_gpu()
    for line, (name, (*_, message)) in zip(lines, SOLUTIONS.items(), strict=True):
        assert line.startswith(f"{name}.cu: ") and re.search(message, line), line


def test_errors_of_a_learner_are_a_line(tmp_path):
    """One after the other, also of files that are none."""
    errors = {  # exercise -> its text, and what check.py says
        "01_softmax": ("import train_gpt2\n\npage_s = train_gpt2.softmax_forward\n\n\n"
                       "def softmax_forward(*arguments):\n    page_s(*arguments)",
                       "line 7: NameError: this is the page's own function: write yours"),
        "02_layernorm": ("def layernorm_backward(:", "cannot be imported: SyntaxError"),
        "04_gelu": ("def one():\n    return 1\n\ndef gelu_backward(dinp, inp, dout, N):\n   "
                    " dinp[...] = one()",
                    "dinp[0] is 1, exp"),
        "05_crossentropy": ("import os\nos._exit(0)", "ends the process that"),
        "06_encoder": (None, f"{tmp_path} has no 06_*.py; exercises are 1, 2, "),
        "09_adamw": ("def adamw_update(*arguments):\n    1 / 0", "line 2: ZeroDivision"),
        "11_layernorm": (b"\xff\xfe//", "11_layernorm.cu is not text"),
        "19_swiglu": ("def swiglu_forward(*rest):\n    1\n\n\ndef swiglu_backward(*rest):\n    1",
                      "out is NaN everywhere: is it written")}
    for name, (text, _) in errors.items():
        if text:
            kind = ".cu" if isinstance(text, bytes) else ".py"
            (tmp_path / f"{name}{kind}").write_bytes(text if kind == ".cu" else text.encode())
    status, lines = check_here(*(int(name[:2]) for name in errors), "--directory", tmp_path)
    assert status == 1
    for line, (name, (text, message)) in zip(lines, errors.items(), strict=True):
        assert (line.startswith(name) or not text) and message in line, line
    done = run_program("exercises/check.py", "--directory", "none", check=False)
    assert_one_line_error(done, "--directory none: no such directory")


STUB = "def gelu_backward(dinp, inp, dout, N):\n    pass\n"
NOT_ITS_OWN = "04_gelu.py: gelu_backward is not a function that this file defines"
SLEEP = "import threading, time\nthreading.Thread(target=time.sleep, args=[99]).start()\n1 / 0"


@pytest.mark.parametrize("text, message", (
    ("", "the function gelu_backward is missing"),
    (STUB.replace("back", "beck"), "the function gelu_backward is missing"),
    ("from train_gpt2 import gelu_backward", NOT_ITS_OWN),
    ("from train_gpt2 import *", NOT_ITS_OWN),
    ("class gelu_backward:\n    pass", NOT_ITS_OWN), ("gelu_backward = abs", NOT_ITS_OWN),
    (f"import functools\n{STUB}gelu_backward = functools.partial(gelu_backward)", NOT_ITS_OWN),
    (f"{STUB}import train_gpt2\ntrain_gpt2.gelu_backward()", "the page's own function: write"),
    (f"{STUB}import numpy as np\nnp.abs = lambda x: 0", "changes numpy.abs, which the tests need"),
    (f"{STUB}    import numpy as np\n    np.abs = lambda x: 0", "changes numpy.abs"),
    (f"{STUB}import numpy as np\nnp.linalg.norm = len", "changes numpy.linalg.norm"),
    (f"{STUB}import train_gpt2\ntrain_gpt2.GELU_SCALE = 0", "changes train_gpt2.GELU_SCALE"),
    (f"{STUB}import builtins\nbuiltins.abs = len", "changes builtins.abs"),
    ("\0", "cannot be imported: "), ("\xff", "cannot be imported: SyntaxError"),
    ("1 / 0", "imported: ZeroDivisionError"), ("exit(0)", "imported: SystemExit: 0"),
    ("raise ValueError('a\\nb')", "imported: ValueError: a"), (SLEEP, "ZeroDivisionError"),
    ("while True:\n    pass", "takes more than 1 s: is there a loop that does not end?"),
), ids=str)
def test_what_is_no_solution(tmp_path, monkeypatch, text, message):
    """Is found, by most before a test calls it; and its process ends."""
    monkeypatch.setattr(check, "SECONDS", 1)
    page = check.train_gpt2
    monkeypatch.setattr(check.pytest, "main", lambda *_: page.gelu_backward(*[None] * 4))
    (tmp_path / "04_gelu.py").write_bytes(text.encode("latin-1"))
    line = check.wrong(4, str(tmp_path))
    assert line.startswith("04_gelu.py") and message in line and "\n" not in line


def test_every_function_of_an_exercise_is_asked_for():
    for path in FILES:
        names = re.findall(r"^def (\w+)", path.read_text(), re.MULTILINE)
        assert names == list(check.functions_of(path))
