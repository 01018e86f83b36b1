"""The pages of doc/. layernorm.md: its Python blocks run and print what the page says, its CUDA blocks compile, its links lead somewhere.
walkthrough.md: its kernels, bytes and operations are what a training step launches and counts, its times those of README.md's profile."""

import collections
import contextlib
import math
import re
import sys
from types import SimpleNamespace

import train_gpt2  # noqa: F401  (first: it tells OpenBLAS how to run, before NumPy is imported)

import numpy as np
import pytest

import train_gpt2_cuda as cuda
from train_gpt2 import Config, UserError, allocate, parameter_table

from conftest import ROOT, assert_one_line_error, run_program

DIRECTORY = ROOT / "doc" / "layernorm"
sys.path.insert(0, str(DIRECTORY))
sys.path.insert(0, str(ROOT / "dev"))
import run_page
import walkthrough
from run_page import Block, cuda_name, read_blocks, run_blocks

PAGE = (DIRECTORY / "layernorm.md").read_text(encoding="utf-8")
BLOCKS = read_blocks(PAGE)


def test_python_blocks():
    assert sum(block.kind == "python" and block.output is not None for block in BLOCKS) >= 10
    run_blocks(BLOCKS, ["python"])


def test_gpu_blocks():
    try:
        cuda.open_gpu()
    except UserError as error:
        pytest.skip(str(error))
    figures = run_blocks(BLOCKS, ["python", "python gpu"])
    assert re.search(r"^kernels/layernorm.cu +\d+\.\d +\d+ +\d+%$", figures, re.MULTILINE), figures


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_cuda_blocks_compile(tmp_path, arch):
    pytest.importorskip("cuda.core")
    files = {cuda_name(block): block.content for block in BLOCKS if block.kind == "cuda"}
    assert sorted(files) == ["backward.cu", "thread_a_row.cu", "warp_a_row.cu"]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        cubin = cuda.compile_kernels(str(tmp_path / name.removesuffix(".cu")), arch, {"MODEL_C": 768})
        kernels = re.findall(r'extern "C" __global__ void (\w+)', content)
        assert kernels and all(b".text." + kernel.encode() in cubin for kernel in kernels)


def test_links():
    """Files exist, and sections are headings of the page, named as GitHub does."""
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    headings = [re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in PAGE.split("\n") if line.startswith("## ")]
    assert [link[1:] for link in links if link.startswith("#")] == headings
    for link in links:
        assert link.startswith("#") or (DIRECTORY / link).exists(), link


def test_figures_can_be_put_into_the_page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    run_page.put_between_markers("figures", "```\ncopy 1 2 3\n```", path)
    changed = read_blocks(path.read_text())
    assert Block("", changed[-1].line, "copy 1 2 3\n", None) == changed[-1]
    assert [block for block in changed if block.kind] == [block for block in BLOCKS if block.kind]


def test_what_the_page_must_not_say():
    page = "```python\nprint(1 + 1)\n```\n```text\n{}\n```\n"
    assert run_blocks(read_blocks(page.format(2)), ["python"]) == "2\n"
    with pytest.raises(UserError, match=r"the block at line 2 prints '2\\n', expected '3\\n'"):
        run_blocks(read_blocks(page.format(3)), ["python"])
    with pytest.raises(ZeroDivisionError):
        run_blocks(read_blocks("```python\n1 / 0\n```"), ["python"])
    with pytest.raises(UserError, match="line 4: a text block, expected right after"):
        read_blocks("```python\n```\n\n```text\n```")
    with pytest.raises(UserError, match="line 1: the block has no end"):
        read_blocks("```python\n1 / 0\n")


# ----------------------------------------------------------------------------------------------------------------------
# walkthrough.md: a step of GPT-2 124M at B=64, on a GPU that has neither memory nor kernels


class Memory:
    """Of an array of CuPy's, all but its memory."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype, self.data = shape, np.dtype(dtype), SimpleNamespace(ptr=0)
        self.ndim, self.size = len(shape), math.prod(shape)
        self.nbytes = self.size * self.dtype.itemsize

    def __getitem__(self, key):
        rest = (len(range(*key.indices(self.shape[0]))),) if isinstance(key, slice) else ()
        return Memory((*rest, *self.shape[1:]), self.dtype)

    def view(self, dtype):
        return Memory((*self.shape[:-1], self.shape[-1] * self.dtype.itemsize // np.dtype(dtype).itemsize), dtype)

    def reshape(self, *shape):
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        shape = tuple(self.size // -math.prod(shape) if n == -1 else n for n in shape)
        assert math.prod(shape) == self.size
        return Memory(shape, self.dtype)

    def set(self, source):
        assert source.nbytes == self.nbytes


class Stream(contextlib.nullcontext):
    ptr = 0


def memory(shape, dtype):
    return Memory(shape if isinstance(shape, tuple) else (shape,), dtype)


CUPY = SimpleNamespace(
    empty=memory, zeros=memory, asarray=lambda array: Memory(array.shape, array.dtype),
    cuda=SimpleNamespace(Event=SimpleNamespace, runtime=SimpleNamespace(memGetInfo=lambda: (141 << 30, 141 << 30))))
CUBLASLT = SimpleNamespace(Epilogue=SimpleNamespace(DEFAULT=1, BIAS=4), MatmulDescAttribute=SimpleNamespace(BIAS_POINTER=0))


class CountingCublasLt(cuda.CublasLt):
    """Multiplies nothing."""

    def __init__(self, device, products):
        self.device, self.products, self.version, self.plans = device, products, 0, {}

    def describe(self, *arguments):
        return SimpleNamespace(algorithm="any", description=None)

    def run(self, call, algorithm):
        pass


class CountingDevice(cuda.Device):
    """Launches nothing. Once it is its own `profile`, `launched` gets (label, bytes, flops) of each launch."""

    def __init__(self, config, precision, cache):
        self.gpu = SimpleNamespace(name="NVIDIA H200", arch="sm_90a", sm_count=132, shared=227 << 10)
        self.sm_count, self.precision, self.profile, self.launched = self.gpu.sm_count, precision, None, []
        self.stream = self.main = self.side = Stream()
        self.functions = collections.defaultdict(lambda: lambda *arguments, shared_mem: None)
        self.attention = cuda.attention_launches(config, precision, self.gpu.arch)
        self.rows_on_chip = cuda.rows_on_chip(config, precision, self.gpu.arch)
        self.products = cuda.Products(self, cache, "cublaslt")

    def tensor_map(self, array, rows, columns):
        return np.void(bytes(128))

    def record(self, name, bytes=0, flops=0):
        if self.profile:
            self.launched.append((name, bytes, flops))
        return contextlib.nullcontext()


@pytest.fixture
def step(monkeypatch, tmp_path):
    """[(kernel, bytes, operations)] in the order in which a step launches them."""
    for name, value in (("cp", CUPY), ("lt", CUBLASLT), ("set_attribute", lambda *arguments: None), ("CublasLt", CountingCublasLt),
                        ("pinned_array", lambda size: np.zeros(size, np.uint8))):
        monkeypatch.setattr(cuda, name, value, raising=False)
    config, settings = Config(1024, 50257, 12, 12, 768, 50304), cuda.CudaSettings(B=64, T=1024, dtype="bfloat16", recompute=0)
    device = CountingDevice(config, settings.precision, cuda.Cache(str(tmp_path / "cache")))
    model = cuda.GPT2(device, config, allocate(parameter_table(config), CUPY), settings)
    model.stage(model.staged[0], [np.random.default_rng(0).integers(0, config.V, (2, 64, 1024), dtype=np.int32)], 0.0)  # as --profile does
    device.profile = device
    model.step_kernels()
    # What the program leaves uncounted: the batch over the bus and into its place; the losses; struct Control of update.cu in and out, the
    # loss and the learning rate in, the report out.
    inputs = 1 + 64 * 1024
    uncounted = {"batch inputs": 8 * inputs, "batch rest": 2 * model.batch.buffer.nbytes - 8 * inputs, "loss_mean": 4 * 64 * 1024,
                 "prepare_update": 2 * 40 + 4 + 4 + 8}
    assert {name for name, bytes, flops in device.launched if not bytes and not flops} == set(uncounted)
    return [(name, bytes or uncounted.get(name, 0), flops) for name, bytes, flops in device.launched]


WALKTHROUGH = (ROOT / "doc" / "walkthrough.md").read_text(encoding="utf-8")
ROWS = walkthrough.read_rows(WALKTHROUGH.split("\n"))
UNITS = {"bytes": 1, "MB": 1e6, "GB": 1e9, "GFLOP": 1e9, "TFLOP": 1e12}


def assert_says(row, bytes, flops):
    """The row has this number, operations where there are any, in three digits."""
    number, unit = row.cells[-2].split()
    assert unit in (("GFLOP", "TFLOP") if flops else ("bytes", "MB", "GB")), row
    assert float(number) * UNITS[unit] == pytest.approx(flops or bytes, rel=0.005), f"{row.cells}: the program counts {flops or bytes:.4g}"


def test_the_walkthrough_has_the_kernels_of_a_step_in_order_with_what_they_count(step):
    sections, layers = collections.defaultdict(list), []
    for row in ROWS:
        if row.unit == "us":
            sections[next(line for line in WALKTHROUGH.split("\n")[: row.line][::-1] if line.startswith("## "))].append(row)
    for title, rows in sections.items():
        layers += rows * (12 if "twelve times" in title else 1)
    assert [row.name for row in layers] == [name for name, _, _ in step]
    for row, (_, bytes, flops) in zip(layers, step):
        assert_says(row, bytes, flops)
        assert re.search(r"\([\w,+]+\)", row.cells[1]), f"{row.cells}: expected shapes"


def test_the_walkthroughs_sums(step):
    parts = {row.name: row for row in ROWS if row.unit == "ms"}
    assert list(parts) == list(walkthrough.PARTS)
    for part, row in parts.items():
        counts = [(bytes, flops) for name, bytes, flops in step if walkthrough.part_of(name) == part]
        assert_says(row, *map(sum, zip(*counts)))


def test_the_walkthrough_on_our_kernels(step):
    """Operations of a product are the same, whoever does it."""
    counted = {name: flops for name, _, flops in step}
    ours = {"matmul_forward": "qkv", "matmul_forward_gelu": "fc", "matmul_backward_inp": "attproj dinp",
            "matmul_backward_inp_gelu": "fcproj dinp", "matmul_backward_weight": "qkv dweight"}
    rows = [row for row in ROWS if row.unit not in ("us", "ms")]
    assert [row.name for row in rows] == list(ours) == list(cuda.KERNELS["matmul"])
    for row in rows:
        assert_says(row, 0, counted[f"matmul {ours[row.name]}"])


def test_the_profile_in_the_readme_counts_the_same(step):
    """Its rates times its times: neither the code nor the profile has changed without the other."""
    profile = walkthrough.read_profile()
    assert {name: times.calls for name, times in profile.items()} == collections.Counter(name for name, _, _ in step)
    for name, times in profile.items():
        counted = sum(flops or bytes for launched, bytes, flops in step if launched == name)
        assert times.rate == 0 or times.rate * times.ms / 1000 == pytest.approx(counted, rel=0.01), name


def test_the_walkthrough_has_the_rates_and_products_that_were_measured():
    """RESULTS.md's bfloat16 peaks, and what its kernels take for the products of dev/products.md at B=64."""
    results, products = ((ROOT / "dev" / name).read_text(encoding="utf-8") for name in ("kernels/RESULTS.md", "products.md"))
    copy, product = re.search(r"## bfloat16\n\nPeaks, measured: a copy (\d+) GB/s, a large product (\d+) TFLOP/s", results).groups()
    assert f"copies {copy} GB/s, reading and writing together, and does a large matrix product at {product} TFLOP/s" in WALKTHROUGH
    assert f"At the {product} TFLOP/s of a large one" in WALKTHROUGH
    measured = products[products.index("B=64, T=1024, bfloat16") :]
    for kernel, name in (("matmul_forward", "qkv"), ("matmul_forward_gelu", "fc and GELU"), ("matmul_backward_inp", "attproj dinp"),
                         ("matmul_backward_inp_gelu", "fcproj dinp, GELU', column sums"), ("matmul_backward_weight", "qkv dweight")):
        ours = re.search(rf"^\| {re.escape(name)} \| [^|]+ \| \d+ \| ([\d.]+) \|", measured, re.MULTILINE)[1]
        shown = re.search(rf"^\| `{kernel}` \| .* \| (\d+) \|$", WALKTHROUGH, re.MULTILINE)[1]
        assert abs(float(ours) - int(shown)) <= 0.5, kernel


def test_the_walkthrough_has_the_profiles_times(tmp_path):
    """dev/walkthrough.py on a copy: nothing to do, and where the times are others, it puts the same page there."""
    page = tmp_path / "walkthrough.md"
    page.write_text(WALKTHROUGH, encoding="utf-8")
    done = run_program("dev/walkthrough.py", page)
    assert page.read_text(encoding="utf-8") == WALKTHROUGH, f"run python dev/walkthrough.py, which changes\n{done.stdout}"
    assert "already" in done.stdout
    lines = WALKTHROUGH.split("\n")
    for row in ROWS:
        if row.unit in ("us", "ms"):
            lines[row.line] = f"| {' | '.join([*row.cells[:-1], '1.5'])} |"
    page.write_text("\n".join(lines), encoding="utf-8")
    done = run_program("dev/walkthrough.py", page)
    assert page.read_text(encoding="utf-8") == WALKTHROUGH
    assert len(done.stdout.splitlines()) == sum(row.unit in ("us", "ms") for row in ROWS) > 30


def test_a_kernel_that_the_profile_has_not_is_named(tmp_path):
    page = tmp_path / "walkthrough.md"
    text = WALKTHROUGH.replace("| matmul qkv |", "| matmul kqv |")
    page.write_text(text, encoding="utf-8")
    assert_one_line_error(run_program("dev/walkthrough.py", page, check=False), "walkthrough.md: line ", "matmul kqv", "matmul qkv")
    assert page.read_text(encoding="utf-8") == text
    assert_one_line_error(run_program("dev/walkthrough.py", tmp_path / "none.md", check=False), "none.md")
    page.write_text("| kernel | GB/s |\n|---|---|\n| copy | 4250 |\n")
    assert_one_line_error(run_program("dev/walkthrough.py", page, check=False), "walkthrough.md: no table whose last column is us or ms")
    page.write_text("<!-- profile_gpu begin -->\nnothing\n<!-- profile_gpu end -->\n")
    with pytest.raises(UserError, match="no kernel between"):
        walkthrough.read_profile(page)


def test_the_residual_stream_is_rounded_once_a_half_layer():
    """What walkthrough.md says: encoded, and each layer's residual2 and residual3."""
    config = Config(1024, 50257, 12, 12, 768, 50304)
    table = cuda.activation_table(config, 64, 1024, 0, "bfloat16")
    rounded = sum(row.shape[0] if row.shape[0] == config.L else 1 for row in table.values() if row.dtype == "float16")
    assert rounded == 2 * config.L + 1 and f"2L+1 = {rounded} roundings" in WALKTHROUGH
