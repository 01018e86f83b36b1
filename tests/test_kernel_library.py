"""dev/kernels with no GPU: that all kernels compile, and that every launch passes what the kernel takes."""

import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import GPT2_124M, ROOT, Array

sys.path.append(str(ROOT / "dev" / "kernels"))
import lab
from lab import AWKWARD, LAYERS
from llmc.gpu.geometry import kernel_files
from llmc.gpu.precision import Precision
from profile_gpu import HOLD_FILE
from test_kernels import check_launches, compile_file, signatures
import train_gpt2_cuda as cuda
from train_gpt2 import Config


@pytest.mark.large
@pytest.mark.parametrize("arch, dtype", (("sm_75", "float32"), ("sm_80", "float32"), ("sm_80", "bfloat16"),
                                         ("sm_90a", "float32"), ("sm_90a", "bfloat16")))
def test_kernels_compile_with_no_gpu(arch, dtype):
    config = GPT2_124M if arch == "sm_90a" else AWKWARD[0]
    for grads in (0, 1) if dtype == "bfloat16" else (0,):
        for file in (HOLD_FILE, *lab.portable_files(config, Precision(dtype, 1, grads), min(arch, "sm_80"))):
            compile_file(file, arch)


# ----------------------------------------------------------------------------------------------------------------------
# launches: every rung of every layer, on a fake GPU


class FakeLab(lab.Lab):
    def __init__(self, fake, config, precision):
        super().__init__(fake.gpu, config, precision)
        self.torch, self.signatures, module = False, {}, fake.cp.RawModule("any")
        for device, arch, files, prefix in (
                (self.device, "sm_90a", (), ""), (self.portable, "sm_80", lab.FILES, "portable ")):
            live = kernel_files(cuda.GPT2, config, precision, arch).values()
            for path in (*(ROOT / "kernels" / f"{file.name}.cu" for file in live), *files):
                for name, parameters in signatures(str(path).removesuffix(".cu")).items():
                    assert prefix + name not in self.signatures, f"{path}: another file has such a kernel"
                    self.signatures[prefix + name] = parameters
                    device.functions[name] = module.get_function(prefix + name)
                    device.functions[name].max_dynamic_shared_size_bytes = device.shared.get(name, 0)


@pytest.fixture
def fake_cupy(fake_gpu):
    fake_gpu.cp.full = lambda shape, value, dtype: np.full(shape, value, dtype).view(Array)
    with fake_gpu.cp.cuda.Stream():
        yield fake_gpu


SIZES = [(AWKWARD[1], 3, 97), (AWKWARD[0], 1, 1), (Config(1024, 257, 1, 2, 128, 384), 22, 128)]


@pytest.mark.parametrize("name", LAYERS)
def test_launches_pass_what_the_kernels_take(fake_cupy, name):
    ran = set()
    for (config, B, T), dtype in itertools.product(SIZES, ("bfloat16", "float32")):
        fake = FakeLab(fake_cupy, config, lab.precision_of(LAYERS[name], dtype))
        layer = LAYERS[name](config, fake.precision, fake_cupy.gpu, B, T)
        arrays = lab.upload(layer.tensors())
        largest = 2 * sum(array.nbytes for array in arrays.values())
        assert layer.flops() or 0 < layer.bytes(SimpleNamespace(**arrays)) <= largest
        for rung, _, call in lab.calls(layer, fake, arrays, None):
            fake_cupy.launches.clear()
            call()
            assert fake_cupy.launches
            check_launches(fake_cupy.launches, fake_cupy.gpu, fake.precision, fake.signatures)
            ran.add(rung)
    assert ran == LAYERS[name].rungs.keys(), "each rung fits some of these sizes in some dtype"
