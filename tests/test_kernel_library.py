"""dev/kernels with no GPU: that all kernels compile, that every launch passes what the kernel takes, and that the
oracles agree with PyTorch."""

import functools
import importlib.util
import itertools
import sys
from types import SimpleNamespace

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np
import pytest

from conftest import GPT2_124M, ROOT, Array

sys.path.append(str(ROOT / "dev" / "kernels"))
import lab
import llmc.gpu.device
from lab import AWKWARD, LAYERS
from llmc.errors import run_main
from llmc.gpu.compiler import compile_kernels
from llmc.gpu.geometry import kernel_files
from llmc.gpu.precision import Precision
from llmc.tensors import Row
from test_kernels import check_launches
import train_gpt2_cuda as cuda
from train_gpt2 import Config

spec = importlib.util.spec_from_file_location("kernels_bench", ROOT / "dev" / "kernels" / "bench.py")
bench = importlib.util.module_from_spec(spec)  # dev/bench.py is another one
spec.loader.exec_module(bench)

GPU = llmc.gpu.device.GPU("a GPU", "sm_90a", 132, 227 << 10)


@pytest.mark.large
@pytest.mark.parametrize("arch, dtype", (("sm_75", "float32"), ("sm_80", "float32"), ("sm_80", "bfloat16"),
                                         ("sm_90a", "float32"), ("sm_90a", "bfloat16")))
def test_kernels_compile_with_no_gpu(arch, dtype):
    pytest.importorskip("cuda.core")
    config = GPT2_124M if arch == "sm_90a" else AWKWARD[0]
    for grads in (0, 1) if dtype == "bfloat16" else (0,):
        for file in lab.portable_files(config, Precision(dtype, float32_grads=grads), min(arch, "sm_80")):
            cubin = compile_kernels(file.name, arch, file.constants)
            for kernel in file.kernels:
                assert b".text." + kernel.encode() + b"\0" in cubin


# ----------------------------------------------------------------------------------------------------------------------
# launches: every rung of every layer, on a fake GPU


signatures_of = functools.cache(lab.signatures)


def typed(parameter):
    """(type, name) of a parameter, as check_launches wants it."""
    *words, name = parameter.split()
    return " ".join(word for word in words if word not in ("const", "__grid_constant__")), name


class FakeLab(lab.Lab):
    """A Lab of the fake GPU, with the kernels' signatures."""

    def __init__(self, fake, config, precision):
        super().__init__(GPU, config, precision)
        self.torch = False
        self.fake, self.signatures, module = fake, {}, fake.cp.RawModule("any")
        devices = (self.device, GPU.arch, (), ""), (self.portable, "sm_80", lab.FILES, "portable ")
        for device, arch, files, prefix in devices:
            live = kernel_files(cuda.GPT2, config, precision, arch).values()
            for path in (*(ROOT / "kernels" / f"{file.name}.cu" for file in live), *files):
                for name, parameters in signatures_of(path).items():
                    assert prefix + name not in self.signatures, f"{path}: another file has such a kernel"
                    self.signatures[prefix + name] = list(map(typed, parameters))
                    device.functions[name] = module.get_function(prefix + name)
                    device.functions[name].max_dynamic_shared_size_bytes = device.shared.get(name, 0)


@pytest.fixture
def fake_cupy(fake_gpu):
    """A fake GPU with what only this library uses."""
    fake_gpu.cp.full = lambda shape, value, dtype: np.full(shape, value, dtype).view(Array)
    with llmc.gpu.device.cp.cuda.Stream():
        yield fake_gpu


SIZES = [(AWKWARD[1], 3, 97), (AWKWARD[0], 1, 1), (Config(1024, 257, 1, 2, 128, 384), 22, 128)]


@pytest.mark.parametrize("name", LAYERS)
def test_launches_pass_what_the_kernels_take(fake_cupy, name):
    """At several sizes and in both dtypes."""
    ran = set()
    for (config, B, T), dtype in itertools.product(SIZES, ("bfloat16", "float32")):
        fake = FakeLab(fake_cupy, config, lab.precision_of(LAYERS[name], dtype))
        layer = LAYERS[name](config, fake.precision, GPU, B, T)
        arrays = lab.upload(layer.tensors())
        largest = 2 * sum(array.nbytes for array in arrays.values())
        assert layer.flops() or 0 < layer.bytes(SimpleNamespace(**arrays)) <= largest
        for rung, _, call in lab.calls(layer, fake, arrays, None):
            fake_cupy.clear()
            call()
            assert fake_cupy.launches
            launches = [launch for launch in fake_cupy.launches if launch.name != "cublaslt"]
            check_launches(launches, GPU, fake.precision, fake.signatures)
            ran.add(rung)
    assert ran == LAYERS[name].rungs.keys(), "each rung fits some of these sizes in some dtype"


def test_a_learner_s_kernel_runs_beside_the_ladder(fake_cupy):
    """Launched like the rung whose name it has, which the library's kernel keeps."""
    layer = lab.with_mine(LAYERS["layernorm_forward"], ROOT / "exercises" / "11_layernorm.cu")
    fake = FakeLab(fake_cupy, AWKWARD[1], Precision("bfloat16"))
    fake.mine = {"layernorm_forward_warp_a_row": fake_cupy.cp.RawModule("any").get_function("mine")}
    at_size = layer(AWKWARD[1], fake.precision, GPU, 3, 97)
    launches = {}
    for name in ("my_warp_a_row", "warp_a_row"):
        fake_cupy.clear()
        next(call for *_, call in lab.calls(at_size, fake, lab.upload(at_size.tensors()), [name]))()
        ((launches[name], *_),) = fake_cupy.launches
    assert launches == {"my_warp_a_row": "mine", "warp_a_row": "portable layernorm_forward_warp_a_row"}
    assert list(layer.rungs)[-2:] == ["my_thread_a_row", "my_warp_a_row"] and "live" in layer.rungs


# ----------------------------------------------------------------------------------------------------------------------
# the oracles, and what becomes of a wrong element


@pytest.mark.parametrize("name", [name for name, layer in LAYERS.items() if layer.library])
def test_the_oracle_agrees_with_pytorch(name):
    """On the CPU, in float32: the NumPy function of the layer beside PyTorch's."""
    layer = LAYERS[name](AWKWARD[1], lab.precision_of(LAYERS[name], "float32"), GPU, 2, 17)
    tensors = layer.tensors()
    arrays = {name: np.full(x.shape, np.nan, x.stored_as) if isinstance(x, Row) else x for name, x in tensors.items()}
    expected, results = lab.expected_results(layer, tensors), lab.library_call(layer, arrays)()
    assert results and set(results) <= set(layer.checked)
    for tensor, got in results.items():
        assert np.isfinite(expected[tensor]).all() and np.abs(expected[tensor]).max() > 0
        assert lab.agrees(name, tensor, got.double().numpy(), expected[tensor], 1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_oracles_write_all_that_is_checked(name):
    layer = LAYERS[name](AWKWARD[1], lab.precision_of(LAYERS[name], "bfloat16"), GPU, 3, 5)
    tensors = layer.tensors()
    for tensor, expected in lab.expected_results(layer, tensors).items():
        assert expected.dtype == np.float64 and np.isfinite(expected).all()
        assert isinstance(tensors[tensor], Row) or not np.array_equal(lab.widen(tensors[tensor]), expected)


@pytest.mark.parametrize("wrong_at", (None, (3, 97), (1, 16)))
def test_with_a_wrong_element_there_are_no_times(fake_cupy, monkeypatch, capsys, wrong_at):
    """Found by the checks, or at the size that is timed."""
    def run(layer, fake, a, block):
        tensors = {name: np.full(x.shape, np.nan) if name in layer.checked else lab.widen(x)
                   for name, x in vars(a).items()}
        layer.oracle(SimpleNamespace(**tensors))
        for name in layer.checked:
            getattr(a, name)[...] = tensors[name]
        if block == 64 and a.out.shape[:2] == wrong_at:
            a.rstd[-1, -1] += np.float32(0.1)

    rungs = {"right": lab.Rung(run, (32,)), "wrong": lab.Rung(run, (64,))}
    for name, rung in rungs.items():
        rung.name = name
    monkeypatch.setattr(LAYERS["layernorm_forward"], "rungs", rungs)
    monkeypatch.setattr(lab, "AWKWARD", AWKWARD[1:])
    monkeypatch.setattr(lab, "Lab", lambda gpu, *model, mine: FakeLab(fake_cupy, *model))
    for name, value in dict(open_gpu=lambda: GPU, measure_copy=lambda device: 4e12, measure_matmul=lambda matmul: 8e14,
                            describe=lambda matmul: "a GPU").items():
        monkeypatch.setattr(bench, name, value)
    fake_cupy.cp.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    monkeypatch.setattr(lab, "FLUSH", 1000)
    monkeypatch.setattr(lab, "milliseconds", lambda fake, flush, call: 2.0)
    with pytest.raises(SystemExit) as end:
        run_main(lambda: bench.main(["layernorm_forward", "-b", "1", "-t", "16", "--dtype", "float32"]))
    printed, said = capsys.readouterr()
    if wrong_at is None:
        assert end.value.code == 0 and "| layernorm_forward | right | 32 | 2.0000 | 0 GB/s |" in printed
        return
    assert end.value.code == 1 and (wrong_at == (3, 97) or "differs from the first rung" in said)
    assert "layernorm_forward wrong, block 64" in printed and "rstd" in printed and "2.0000" not in printed
