"""dev/kernels with no GPU: that all kernels compile, that every launch passes what the kernel takes, and the
frame's own Python."""

import ctypes
import functools
import itertools
import os
import sys
from types import SimpleNamespace

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np
import pytest

from conftest import GPT2_124M, ROOT, Array

sys.path.insert(0, str(ROOT / "dev" / "kernels"))
import bench
import bench_matmul
import lab
import llmc.gpu.device
import llmc.gpu.matmul
import train_gpt2_cuda as cuda
from lab import AWKWARD, LAYERS
from llmc.gpu.compiler import Cache, compile_kernels
from llmc.errors import UserError, run_main
from llmc.gpu.geometry import blocks, kernel_files
from llmc.gpu.precision import Precision
from llmc.tensors import Row, bf16_bits
from train_gpt2 import Config

FILES = sorted({file for layer in LAYERS.values() for file in (layer.file, *layer.uses)})
GPU = llmc.gpu.device.GPU("a GPU", "sm_90a", 132, 227 << 10)


def precision_of(layer, dtype):
    return Precision(dtype, float32_grads=int(layer.float32_grads and dtype == "bfloat16"))


# ----------------------------------------------------------------------------------------------------------------------
# compile


def test_every_file_belongs_to_a_layer():
    here = ROOT / "dev" / "kernels"
    assert {path.stem for path in here.glob("*.cu")} == set(FILES)
    for file in FILES:
        assert lab.signatures((here / f"{file}.cu").read_text()), f"{file}.cu has no kernel that signatures() finds"


@pytest.mark.large
@pytest.mark.parametrize("arch, dtype", (("sm_75", "float32"), ("sm_80", "float32"), ("sm_80", "bfloat16"),
                                         ("sm_90a", "float32"), ("sm_90a", "bfloat16")))
def test_kernels_compile_with_no_gpu(arch, dtype):
    pytest.importorskip("cuda.core")
    config = GPT2_124M if arch == "sm_90a" else AWKWARD[0]
    for file in FILES:
        grads = any(layer.float32_grads for layer in LAYERS.values() if file in (layer.file, *layer.uses))
        precision = Precision(dtype, float32_grads=int(grads and dtype == "bfloat16"))
        constants = lab.constants_of(config, precision, arch)
        cubin = compile_kernels(os.path.join("..", "dev", "kernels", file), arch, constants)
        for kernel in lab.signatures((ROOT / "dev" / "kernels" / f"{file}.cu").read_text()):
            assert b".text." + kernel.encode() + b"\0" in cubin


# ----------------------------------------------------------------------------------------------------------------------
# launches: every version of every layer, on a fake GPU


@functools.cache
def signatures_of(path):
    return lab.signatures(path.read_text())


class FakeLab(lab.Lab):
    """A Lab of the fake GPU, which compares every launch with the kernel's signature."""

    def __init__(self, fake, config, precision):
        super().__init__(GPU, config, precision, Cache(os.devnull))
        self.fake, self.signatures = fake, {}
        live = [ROOT / "kernels" / f"{file.name}.cu" for file in kernel_files(config, precision, GPU.arch).values()]
        for path in (*live, *(ROOT / "dev" / "kernels" / f"{file}.cu" for file in FILES)):
            assert not self.signatures.keys() & signatures_of(path).keys(), f"{path}: another file has such a kernel"
            self.signatures |= signatures_of(path)
        module = fake.cp.RawModule("any")
        for name in self.signatures:
            self.device.functions.setdefault(name, module.get_function(name))

    def launched(self):
        """The names of the launches so far, each of which is checked."""
        for launch in self.fake.launches:
            if launch.name != "cublaslt":
                self.check(*launch[:5])
        return [launch.name for launch in self.fake.launches]

    def check(self, name, grid, block, arguments, shared):
        assert 1 <= np.prod(block) <= 1024 and shared <= GPU.shared and len(grid) <= 3
        assert all(type(n) is int and n >= 1 for n in grid) and grid[0] < 2**31 and max(grid[1:], default=1) < 2**16
        parameters = self.signatures[name]
        assert len(arguments) == len(parameters), f"{name}({', '.join(parameters)}) was called with {len(arguments)}"
        for parameter, argument in zip(parameters, arguments):
            words = (word for word in parameter.split()[:-1] if word not in ("const", "__grid_constant__"))
            found = getattr(argument, "dtype", type(argument))
            assert self.accepts(" ".join(words), argument), f"{name}: {parameter} is given {found}"

    def accepts(self, type_name, argument):
        """Whether a kernel's parameter takes this, as CuPy would pass it: arrays as pointers, numbers by value."""
        if not type_name.endswith("*"):
            numbers = {"int": np.int32, "int64": np.int64, "float": np.float32, "double": np.float64}
            return type(argument) is numbers.get(type_name, np.void)  # else a struct
        if isinstance(argument, np.uint64):
            return argument == 0
        types = {"element": self.precision.dtype, "gradient": self.precision.grads}
        stored = types.get(type_name[:-1], self.precision.residual if "_element" in type_name else type_name[:-1])
        dtypes = {"bfloat16": "u2", "float16": "f2", "float32": "f4", "float": "f4", "int": "i4", "int64": "i8"}
        return isinstance(argument, Array) and (stored not in dtypes or argument.dtype == np.dtype(dtypes[stored]))


@pytest.fixture
def fake_cupy(fake_gpu):
    """A fake GPU with what only this library uses."""
    def memset(address, value, size, stream):
        ctypes.memset(address, value, size)

    fake_gpu.cp.full = lambda shape, value, dtype: np.full(shape, value, dtype).view(Array)
    fake_gpu.cp.cuda.runtime.memsetAsync = memset
    with llmc.gpu.device.cp.cuda.Stream():
        yield fake_gpu


SIZES = [(AWKWARD[1], 3, 97), (AWKWARD[0], 1, 1), (Config(1024, 257, 1, 2, 128, 384), 22, 128)]


@pytest.mark.parametrize("name", LAYERS)
def test_launches_pass_what_the_kernels_take(fake_cupy, name):
    """At several sizes and in both dtypes."""
    ran = set()
    for (config, B, T), dtype in itertools.product(SIZES, ("bfloat16", "float32")):
        fake = FakeLab(fake_cupy, config, precision_of(LAYERS[name], dtype))
        layer = LAYERS[name](config, fake.precision, GPU, B, T)
        arrays = lab.upload(layer.tensors())
        largest = 2 * sum(array.nbytes for array in arrays.values())
        assert layer.flops() or 0 < layer.bytes(SimpleNamespace(**arrays)) <= largest
        for found, block in layer.runs():
            fake_cupy.clear()
            lab.run_version(layer, fake, lab.copies(arrays), found, block)
            assert fake.launched()
            ran.add(found.name)
    assert ran == LAYERS[name].versions.keys(), "each version fits some of these sizes in some dtype"


# ----------------------------------------------------------------------------------------------------------------------
# what the versions are compared with


@pytest.mark.parametrize("name", [name for name, layer in LAYERS.items() if layer.library])
def test_the_oracle_agrees_with_pytorch(fake_cupy, name):
    """On the CPU, in float32: the NumPy function of the layer beside PyTorch's, which is row 0 of the tables."""
    layer = LAYERS[name](AWKWARD[1], precision_of(LAYERS[name], "float32"), GPU, 2, 17)
    tensors = layer.tensors()
    expected, arrays = lab.expected_results(layer, tensors), lab.upload(tensors)
    results = lab.library_call(layer, arrays)()
    assert results and set(results) <= set(layer.checked)
    for tensor, got in results.items():
        largest = np.abs(expected[tensor]).max()
        assert largest > 0 and np.isfinite(expected[tensor]).all()
        assert lab.agrees(name, tensor, got.double().numpy().reshape(expected[tensor].shape), expected[tensor],
                          1e-5 * largest)


@pytest.mark.parametrize("name", LAYERS)
def test_oracles_write_all_that_is_checked(name):
    layer = LAYERS[name](AWKWARD[1], precision_of(LAYERS[name], "bfloat16"), GPU, 3, 5)
    tensors = layer.tensors()
    for tensor, expected in lab.expected_results(layer, tensors).items():
        assert expected.dtype == np.float64 and np.isfinite(expected).all()
        before = tensors[tensor]
        assert isinstance(before, Row) or not np.array_equal(lab.widen(before), expected)


def oracle_version(spoil):
    """A version of LayernormForward that leaves what the oracle says, and then does `spoil` to it."""

    def run(layer, fake, a, block):
        t = SimpleNamespace(**{name: np.full(x.shape, np.nan) if name in layer.checked else lab.widen(x) for name,
                               x in vars(a).items()})
        layer.oracle(t)
        for name in layer.checked:
            got = getattr(t, name).astype(np.float32)
            getattr(a, name)[...] = bf16_bits(got) if getattr(a, name).dtype == np.uint16 else got
        spoil(a, block)

    return run


def spoiled(spoil):
    return lab.Version("spoiled", (32, 64), oracle_version(spoil), lambda layer, block: True)


def nothing(a, block):
    pass


def one_element(a, block):
    if block == 64:
        a.mean[1, 2] += np.float32(0.125)


def one_nan(a, block):
    a.rstd[0, 3] = np.nan


def half_a_percent(a, block):
    a.out.view(np.uint16)[1, 2, 3:] += np.uint16(3)


@pytest.mark.parametrize("spoil, wrong, words", (
    (nothing, 0, ()), (one_nan, 2, ("rstd", "[0,3]", "nan")), (half_a_percent, 2, ("out", "[1,2,")),
    (one_element, 1, ("layernorm_forward spoiled, block 64, B=2 T=5 C=240 bfloat16: mean", "[1,2]", "max diff 1.2",
                      "FAIL"))))
def test_a_wrong_element_is_named(fake_cupy, monkeypatch, capsys, spoil, wrong, words):
    layer_class = LAYERS["layernorm_forward"]
    monkeypatch.setattr(layer_class, "versions", {"spoiled": spoiled(spoil)})
    fake = FakeLab(fake_cupy, AWKWARD[1], Precision("bfloat16"))
    layer = layer_class(AWKWARD[1], fake.precision, GPU, 2, 5)
    assert lab.check_layer(layer, fake, None, False) == wrong
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == wrong and all(word in printed for word in words)


@pytest.mark.parametrize("spoil", (nothing, one_nan))
def test_at_the_timed_size_versions_agree_or_have_no_times(fake_cupy, monkeypatch, capsys, spoil):
    layer_class = LAYERS["layernorm_forward"]
    versions = spoiled(nothing)._replace(name="first"), spoiled(spoil)._replace(name="second", blocks=(64,))
    monkeypatch.setattr(layer_class, "versions", {found.name: found for found in versions})
    monkeypatch.setattr(lab, "FLUSH", 1000)
    monkeypatch.setattr(lab, "milliseconds", lambda fake, flush, call: call() or 2.0)
    fake = FakeLab(fake_cupy, AWKWARD[1], Precision("float32"))
    timing = lab.time_layer(layer_class(AWKWARD[1], fake.precision, GPU, 2, 5), fake, None, False)
    printed = capsys.readouterr().out
    if spoil is one_nan:
        assert timing is None and len(printed.splitlines()) == 1
        assert "layernorm_forward second, block 64" in printed and "rstd" in printed
    else:
        assert timing.versions == {"first": {32: 2.0, 64: 2.0},
                                   "second": {64: 2.0}} and timing.library is None and not printed
        assert timing.bytes == 2 * 4 * 2 * 5 * 240


def test_a_file_is_compiled_once(fake_cupy, monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(lab, "compile_kernels", lambda *arguments: compiled.append(arguments[0]) or b"a cubin")
    for _ in range(2):
        fake = lab.Lab(GPU, AWKWARD[1], Precision("float32"), Cache(str(tmp_path)))
        fake.load("residual")
        fake.load("residual")
    assert len(compiled) == 1 and "residual_forward_pack_a_thread" in fake.device.functions


def test_a_call_that_the_gpu_refuses_is_named(fake_cupy, monkeypatch):
    monkeypatch.setattr(llmc.gpu.device, "GPU_ERRORS", {OSError})

    def run(layer, fake, a, block):
        raise OSError("CUDA_ERROR_ILLEGAL_ADDRESS")

    fake = FakeLab(fake_cupy, AWKWARD[1], Precision("float32"))
    layer = LAYERS["gelu_forward"](AWKWARD[1], fake.precision, GPU, 1, 1)
    with pytest.raises(UserError, match="gelu_forward broken, block 64, B=1 T=1 C=240 float32: CUDA_ERROR_ILLEGAL"):
        lab.run_version(layer, fake, {}, lab.Version("broken", (64,), run, None), 64)


def test_only_what_fits_runs():
    narrow = GPU._replace(shared=48 << 10)
    layer = LAYERS["layernorm_forward"](GPT2_124M, Precision("bfloat16"), narrow, 1, 1)
    assert [block for _, block in layer.runs(["shared_memory"])] == [32, 64, 128, 256, 512]
    assert [block for _, block in layer.runs(["live"])] == [256]
    assert {found.name for found, _ in layer.runs()} == set(layer.versions)


# ----------------------------------------------------------------------------------------------------------------------
# tables, pictures, the command line


def timing_of(name, flops=0, library=0.5):
    layer = LAYERS[name](AWKWARD[1], Precision("float32"), GPU, 2, 5)
    return lab.Timing(layer, 2 * 10**9, flops, library, {"thread_a_row": {32: 4.0, 64: 2.0}, "live": {256: 1.0}})


PEAKS = (4e12, 8e14)  # bytes, operations a second


def test_tables(capsys):
    rows = bench.rows_of(timing_of("layernorm_forward"), PEAKS)
    assert [(name, block, ms, text) for name, block, ms, text, _ in rows] == [
        ("PyTorch", "", 0.5, "4000 GB/s"), ("thread_a_row", 64, 2.0, "1000 GB/s"), ("live", 256, 1.0, "2000 GB/s")]
    assert np.allclose([share for *_, share in rows], (1.0, 0.25, 0.5))
    ((name, _, _, text, share), _) = bench.rows_of(timing_of("layernorm_forward", flops=4 * 10**11, library=None),
                                                   PEAKS)
    assert (name, text) == ("thread_a_row", "200.0 TFLOP/s") and np.isclose(share, 0.25)
    bench.print_timing(timing_of("layernorm_forward"), PEAKS)
    printed = capsys.readouterr().out
    assert "B=2 T=5 C=240 float32" in printed and "25.0%" in printed
    lines = bench.markdown(timing_of("layernorm_forward"), PEAKS)
    assert len({line.count("|") for line in lines}) == 1, "each row has as many cells as the head"
    assert lines[3] == "| thread_a_row | 64 | 2.0000 | 1000 GB/s | 25.0% | 4.0000 | 2.0000 |  |"


def test_results_and_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", str(tmp_path / "RESULTS.md"))
    timings = [timing_of("layernorm_forward"), timing_of("gelu_forward", library=None)]
    bench.write_results("a machine", GPT2_124M, [("bfloat16", PEAKS, timings), ("float32", PEAKS, timings[:1])])
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.count("### layernorm_forward") == 2 and text.count("### gelu_forward") == 1 and "a machine" in text
    assert "a copy 4000 GB/s, a large matmul 800 TFLOP/s" in text
    bench.plot(timings, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["RESULTS.md", "picture.png"]


def test_names_that_are_not_there():
    expected = "no layer layernorm, expected some of: .*layernorm_forward, layernorm_backward"
    with pytest.raises(UserError, match=expected) as error:
        bench.find_layers(["gelu_forward", "layernorm"])
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="softmax has no version live, expected some of: thread_a_row, .*online"):
        bench.find_layers(["softmax"], ["online", "live"])
    assert [layer.name for layer in bench.find_layers(["softmax", "classifier"])] == ["softmax", "classifier"]


def test_models():
    assert bench.find_config("124M", 512) == bench.find_config("124M", 1024) == bench.MODELS["124M"]
    assert bench.find_config("1024/16", 2048) == Config(2048, 50257, 1, 16, 1024, 50304)
    for text, words in (("125M", "expected one of 124M"), ("768/0", "multiple of NH"), ("100/3", "multiple of NH"),
                        ("100/10", "expect")):
        with pytest.raises(UserError, match=words):
            bench.find_config(text, 1024)


@pytest.mark.parametrize("arguments", ("--all softmax", "--all --check_only", "softmax --check_only --plot x.png",
                                       "--version live", "softmax -b 0"))
def test_options_that_have_no_effect_are_refused(arguments):
    with pytest.raises(SystemExit) as error:
        bench.parse_arguments(arguments.split())
    assert error.value.code == 2


# ----------------------------------------------------------------------------------------------------------------------
# results in parts, results that are added to, libraries in the tables, bench.py as a whole, and the matmuls of a step


def test_only_the_total_of_partial_sums_counts(fake_cupy, monkeypatch, capsys):
    def spoil(a, block):
        if block == 64:  # the rows divided differently
            a.sums[-1], a.sums[:-1] = a.sums.sum(axis=0), 0.0
        if block == 128:
            a.sums[1, 3] += np.abs(a.sums).max()

    layer_class = LAYERS["matmul_backward_inp_gelu"]
    found = lab.Version("spoiled", (32, 64, 128), oracle_version(spoil), lambda layer, block: True)
    monkeypatch.setattr(layer_class, "versions", {"spoiled": found})
    fake = FakeLab(fake_cupy, AWKWARD[1], Precision())
    layer = layer_class(AWKWARD[1], fake.precision, GPU, 2, 100)
    assert lab.check_layer(layer, fake, None, False) == 1
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("block 128", "sums", "at [3]"))
    arrays = lab.upload(layer.tensors())
    assert arrays["sums"].shape == (2, 960) and lab.sample(layer, "sums", arrays["sums"]).shape == (960,)
    assert lab.sample(layer, "dinp", arrays["dinp"]).size == 200 * 960


def test_each_check_adds_to_fresh_data(fake_cupy, monkeypatch, capsys):
    def run(layer, fake, a, block):
        if block == 128:
            a.dwte[...] = 0
        lab.train_gpt2.encoder_backward(a.dwte, a.dwpe, a.dout, a.inp, layer.B, layer.T, layer.C)

    layer_class = LAYERS["encoder_backward"]
    monkeypatch.setattr(layer_class, "versions", {"adds": lab.Version("adds", (32, 64, 128), run, lambda layer,
                                                                      block: True)})
    fake = FakeLab(fake_cupy, AWKWARD[1], Precision())
    assert lab.check_layer(layer_class(AWKWARD[1], fake.precision, GPU, 3, 97), fake, None, False) == 1
    assert "block 128" in capsys.readouterr().out, "what was there before is not added"


def test_pytorch_rounds_to_tf32_where_our_matmuls_do():
    settings = lab.torch.backends.cuda.matmul
    before = settings.allow_tf32
    for precision, allowed in ((Precision(), True), (Precision(tf32=0), False)):
        with pytest.raises(KeyError), lab.torch_as(precision):
            assert settings.allow_tf32 is allowed
            raise KeyError
        assert settings.allow_tf32 is before


def test_cublaslt_is_row_0_of_the_matmuls(tmp_path):
    times = {"mma_sync": {256: 4.0}, "live": {384: 1.0}, "cublaslt": {384: 2.0}}
    timing = timing_of("matmul_forward_gelu", flops=8 * 10**11)._replace(versions=times)
    assert [row[:3] for row in bench.rows_of(timing, PEAKS)] == [
        ("cublaslt", "", 2.0), ("PyTorch", "", 0.5), ("mma_sync", 256, 4.0), ("live", 384, 1.0)]
    assert bench.markdown(timing, PEAKS)[2:] == [
        "| cublaslt |  | 2.0000 | 400.0 TFLOP/s | 50.0% |  |  |",
        "| PyTorch |  | 0.5000 | 1600.0 TFLOP/s | 200.0% |  |  |",
        "| mma_sync | 256 | 4.0000 | 200.0 TFLOP/s | 25.0% | 4.0000 |  |",
        "| live | 384 | 1.0000 | 800.0 TFLOP/s | 100.0% |  | 1.0000 |"]
    assert all(layer.library_version == "cublaslt" for name, layer in LAYERS.items() if name.startswith("matmul"))
    assert all(layer.library_version in (None, *layer.versions) for layer in LAYERS.values())
    for versions in (times, {"cublaslt": times["cublaslt"]}):
        bench.plot([timing._replace(versions=versions)], str(tmp_path / "picture.png"))


@pytest.fixture
def fake_labs(fake_cupy, monkeypatch):
    """bench.py's GPU: on it, every call takes 2 ms."""
    class FakeLabs:
        gpu, torch = GPU, False

        def open(self, layer, config, dtype):
            return FakeLab(fake_cupy, config, precision_of(layer, dtype))

    monkeypatch.setattr(bench, "Labs", FakeLabs)
    monkeypatch.setattr(bench, "measure_peaks", lambda labs, config, dtype: PEAKS)
    fake_cupy.cp.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    monkeypatch.setattr(lab, "FLUSH", 1000)
    monkeypatch.setattr(lab, "milliseconds", lambda fake, flush, call: call() or 2.0)


@pytest.mark.parametrize("wrong_at", (None, (3, 97), (1, 16)))
def test_with_a_wrong_element_there_are_no_times(fake_labs, monkeypatch, capsys, tmp_path, wrong_at):
    """Found by the checks, or at the size that is timed."""
    def last_element(a, block):
        if a.out.shape[:2] == wrong_at:
            a.rstd[-1, -1] += np.float32(0.1)

    found = (spoiled(spoil)._replace(name=name, blocks=(64,)) for name,
             spoil in (("right", nothing), ("wrong", last_element)))
    monkeypatch.setattr(LAYERS["layernorm_forward"], "versions", {version.name: version for version in found})
    monkeypatch.setattr(bench, "AWKWARD", AWKWARD[1:])
    arguments = ["layernorm_forward", "-b", "1", "-t", "16", "--plot", str(tmp_path / "picture.png")]
    if wrong_at == (3, 97):
        monkeypatch.setattr(bench, "time_all", lambda *arguments: pytest.fail("something was timed"))
    with pytest.raises(SystemExit) as end:
        run_main(lambda: bench.main(arguments))
    printed = capsys.readouterr().out
    if wrong_at is None:
        assert end.value.code == 0 and "2.0000" in printed and (tmp_path / "picture.png").exists()
        return
    assert end.value.code == 1 if wrong_at == (3, 97) else "layernorm_forward is wrong at the size" in end.value.code
    assert "layernorm_forward wrong, block 64" in printed and "rstd" in printed and "FAIL" in printed
    assert "layernorm_forward right" not in printed and "2.0000" not in printed and "GB/s" not in printed
    assert not (tmp_path / "picture.png").exists()


BY_HAND = """# What some kernels measure

a GPU, CUDA 13.0, driver 1

## bfloat16

Peaks, measured: a copy 1000 GB/s, a large matmul 10 TFLOP/s.

### layernorm_forward

kept

| a | table |

### gelu_forward

replaced

### a_layer_of_old

kept

## float32

Peaks, measured: a copy 2000 GB/s, a large matmul 20 TFLOP/s.

### attention_forward

kept
"""


@pytest.fixture
def by_hand(fake_labs, monkeypatch, tmp_path):
    path = tmp_path / "RESULTS.md"
    path.write_text(BY_HAND)
    monkeypatch.setattr(bench, "RESULTS", str(path))
    monkeypatch.setattr(bench, "check_all", lambda *arguments: True)
    monkeypatch.setattr(bench, "time_all", lambda labs, chosen, *rest: [timing_of(layer.name) for layer in chosen])
    return path


def test_results_replaces_the_tables_of_named_layers(by_hand, capsys):
    assert bench.main(["softmax", "gelu_forward", "--results"]) == 0

    def part(name, copy):
        return "\n".join(bench.part_of_results(timing_of(name), (copy * 1e9, 1e13))) + "\n"

    expected = BY_HAND.replace("### gelu_forward\n\nreplaced\n", part("gelu_forward", 1000))
    expected = expected.replace("kept\n\n## float32", "kept\n\n" + part("softmax", 1000) + "\n## float32")
    expected = expected.replace("### attention_f", part("gelu_forward",
                                                        2000) + "\n" + part("softmax", 2000) + "\n### attention_f")
    assert by_hand.read_text() == expected
    assert all(expected.count(f"2000 GB/s | {share}.0%") == 2 for share in (200, 100)), "of the section's peaks"
    assert bench.main(["gelu_forward", "softmax", "--results", "--dtype", "float32"]) == 0
    assert by_hand.read_text() == expected, "the same times leave the same file"
    assert "wrote" in capsys.readouterr().out


@pytest.mark.parametrize("text, words", (
    (BY_HAND.replace("a GPU,", "another GPU,"), "is of another GPU (another GPU), this is a GPU"),
    (BY_HAND.replace("## float32", "## float16"), "has no section float32"),
    (BY_HAND.replace("a copy 2000", "a copy"), "has no section float32"),
    ("", "is of another GPU ()"), ("\udcff", "no text in UTF-8"), (None, "no such file")))
def test_results_are_not_mixed(by_hand, monkeypatch, text, words):
    monkeypatch.setattr(bench, "check_all", lambda *arguments: pytest.fail("first the work, then the refusal"))
    if text is None:
        by_hand.unlink()
    else:
        by_hand.write_text(text, errors="surrogateescape")
    with pytest.raises(UserError) as error:
        bench.main(["gelu_forward", "--results"])
    assert words in str(error.value) and "bench.py --all" in str(error.value) and "\n" not in str(error.value)
    assert text is None or by_hand.read_text(errors="surrogateescape") == text


def test_the_results_of_this_library_can_be_replaced_in_parts(monkeypatch):
    text, written = (ROOT / "dev" / "kernels" / "RESULTS.md").read_text(), []
    monkeypatch.setattr(bench, "write_text", lambda text: written.append(text + "\n"))
    gpu_name = text.split("\n")[4].split(",")[0]
    bench.Results(gpu_name, ("bfloat16", "float32")).write()
    assert written == [text]


@pytest.mark.parametrize("arguments, words", (
    *((option, f"{option.split()[0]}: of which layer?") for option in (
        "--plot", "--plot x.png", "--check_only", "-b 4", "-t 64", "--dtype float32", "--model 355M", "--results",
        "--version live")),
    *((f"softmax --results {option}", f"--results with {option.split()[0]}") for option in (
        "--version online", "--check_only", "-b 4", "-t 64", "--model 355M")),
    ("-b 4 -t 64", "-b, -t: of which layer?"), ("--all --results", "--all takes all"),
    ("softmax --check_only -t 64", "it times nothing"), ("--all --plot softmax", "that is a layer")))
def test_what_an_option_would_not_do_is_said_in_one_line(capsys, arguments, words):
    with pytest.raises(SystemExit) as error:
        bench.parse_arguments(arguments.split())
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert error.value.code == 2 and "error: " in last and words in last


def test_a_picture_needs_no_name():
    assert bench.parse_arguments(["softmax", "--plot"]).plot == "kernels.png"
    assert bench.parse_arguments(["softmax", "--plot", "x.png"]).plot == "x.png"
    assert bench.parse_arguments(["--all", "--plot"]).plot == "kernels.png"


@pytest.mark.parametrize("C, OC", ((768, 3072), (3072, 768), (1600, 1600), (768, 50304), (192, 32000), (384, 16384),
                                   (512, 11008)))
def test_parts_of_a_weight_gradient_have_room(fake_cupy, C, OC):
    """For the sums of each tile that is done in parts, and for how many are."""
    kernels = FakeLab(fake_cupy, SIZES[2][0], Precision("bfloat16")).matmul.kernels
    dweight, dout = np.broadcast_to(np.float32(0), (OC, C)), np.broadcast_to(np.float32(0), (4096, C))
    ways = kernels.backward_weight_ways(dweight, None, dout, 1.0)
    assert "kernels 1" in ways and (OC > 4000 or "kernels 4 narrow" in ways)
    for way in ways:
        g = kernels.geometry
        tiles = blocks(OC, g.MATMUL_BM) * blocks(C, g.MATMUL_NARROW_BN if "narrow" in way else g.MATMUL_BN)
        size = 4 * tiles * g.MATMUL_BM * g.MATMUL_BN
        assert way.split()[1] == "1" or tiles <= kernels.done.shape[1] and size <= llmc.gpu.matmul.WORKSPACE


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_the_matmuls_of_a_step_are_given_what_they_take(fake_cupy, monkeypatch, dtype):
    """Our kernels, and cuBLASLt with those of gelu.cu."""
    config, N = SIZES[2][0], 150
    fake = FakeLab(fake_cupy, config, Precision(dtype))
    device, _ = cuda.open_device(GPU, config, fake.precision, fake.cache, "kernels")
    sides = bench_matmul.both_sides(device, fake.cache, fake.precision)
    monkeypatch.setattr(llmc.gpu.device, "measure", lambda device, call, repeats: call() or 3e-6)
    monkeypatch.setattr(bench_matmul, "agree",
                        lambda where, ours, theirs, tolerance: ours.keys() == theirs.keys() and tolerance < 0.02)
    for shape in bench_matmul.matmuls_of(config):
        operands = bench_matmul.Operands(device, fake.precision, shape, N)
        rows, columns, _ = shape.sizes(N)
        shapes = {name: array.shape for name, array in operands.results.items()}
        assert shapes == {name: (2, columns) if name == "sums" else (rows, columns) for name in shapes}
        arrays = [array for array in operands.arguments if isinstance(array, Array)]
        assert all(array.flags.c_contiguous for array in arrays)
        assert len({array.data.ptr for array in arrays}) == len(arrays)
        fake_cupy.clear()
        assert bench_matmul.time_matmul(sides, shape, N) == ((3e-6, 3e-6), True)
        names = set(fake.launched())
        assert "cublaslt" in names and any(name.startswith("matmul_") for name in names)


def test_wrong_matmuls_are_named(capsys):
    right = {"out": np.ones((2, 3)), "sums": np.ones(3)}
    assert bench_matmul.agree("fc", right, right, 1e-2) and not capsys.readouterr().out
    for wrong in (np.nan, 1.1):
        assert not bench_matmul.agree("fc", {**right, "sums": np.array([1, wrong, 1])}, right, 1e-2)
        printed = capsys.readouterr().out
        assert all(word in printed for word in ("fc: sums", "[1]", "FAIL"))


@pytest.mark.parametrize("OC, parts", ((384, 4), (100, 1), (104, 2), (102, 1)))
def test_long_chains_are_added_up_in_parts(monkeypatch, OC, parts):
    """Each position of the inner dimension once, and the first part writes what the others add to."""
    class InNumPy(llmc.gpu.matmul.CublasLt):
        def __init__(self, precision):
            self.precision, self.lengths = precision, []

        def multiply(self, out, a, b, accumulate, scale):
            out[...] = (out if accumulate else 0) + scale * (a @ b)
            self.lengths.append(len(b))

    monkeypatch.setattr(llmc.gpu.matmul, "LONGEST_CHAIN", 100)
    rng = np.random.default_rng(0)
    dout, weight = (rng.standard_normal(shape, np.float32) for shape in ((6, OC), (OC, 5)))
    for precision in (Precision(), Precision(tf32=0), Precision("bfloat16")):
        cublaslt, dinp = InNumPy(precision), np.full((6, 5), np.nan, np.float32)
        cublaslt.multiply_in_chains(dinp, dout, weight, scale=0.5)
        assert cublaslt.lengths == ([OC // parts] * parts if precision.matmul == "tf32" else [OC])
        assert np.allclose(dinp, 0.5 * dout @ weight, rtol=0, atol=1e-4)
