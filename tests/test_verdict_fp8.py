"""The verdict of test_gpt2.py on faults in 8 bits."""

import itertools

import pytest

from llmc.gpu.fp8 import Fp8
from llmc.gpu.trainer import Trainer
from rounding import ROUNDOFFS, NoisyGPT2
from test_gpt2 import SMOOTH
from backends import BACKENDS, replay
from test_parity import need
from test_verdict import first_wrong, gpu_case, instead
from test_verdict import GPU_CONFIG


def in_fp8_matmul(number, change):
    """A fault in the operands of a run's matmul `number` of those in 8 bits."""
    def plant(right):
        numbers = itertools.count()

        def wrong(run, a, b, *fp8):
            return right(run, *(change(a, b) if any(fp8) and next(numbers) == number else (a, b)),
                         *fp8)
        return wrong
    return plant


NOISY_FAULTS = {  # what is wrong: the fault in NoisyGPT2.product
    # Scales are powers of 2. Matmuls: qkv, fc, fcproj of two layers, whose last has a small part of
    # the stream; the classifier; then dinp and dweight in turn, the classifier's first, whose
    # dweight is lost in the embedding's.
    **{f"a stale scale in matmul {i}": in_fp8_matmul(i, lambda a, b: (2 * a, b))
       for i in range(7 + 14)
       if i not in (5, 8)},
    **{f"other rows' input in dweight, matmul {i}": in_fp8_matmul(i, lambda a, b: (a.roll(1, 1), b))
       for i in range(7 + 3, 7 + 14, 2)},
    "a weight's two copies exchanged": in_fp8_matmul(0, lambda a, b: (a, b.T.reshape(b.shape))),
}


OFTEN = "matmul 0", "matmul 6", "matmul 7", "matmul 12", "copies exchanged"  # the last words


@pytest.mark.parametrize("fault", [None, *(
    fault if fault.endswith(OFTEN) else pytest.param(fault, marks=pytest.mark.large)
    for fault in NOISY_FAULTS)])
def test_a_fault_in_fp8_matmuls_is_red(fault, monkeypatch):
    params, x, y, yardstick = gpu_case("fp8")
    if fault:
        monkeypatch.setattr(NoisyGPT2, "product", NOISY_FAULTS[fault](NoisyGPT2.product))
    rows = NoisyGPT2(GPU_CONFIG, params, ROUNDOFFS["fp8"], seed=99).run(x, y, SMOOTH, steps=1)
    assert yardstick.judge({**rows, "means": rows["losses"].mean((1, 2))}) == (fault is None)


def quantizing(statement):
    """Fp8.quantize begins with this. What no graph writes stays as the batch that prepares a
    trainer has left it."""
    return instead("    *_, N, C", f"    {statement}\n    *_, N, C")


# what is wrong: (method of Fp8, the fault, the first red row); NOISY_FAULTS has others
FP8_FAULTS = {
    # half of it, in qkv of the first layer
    "a stale scale in a forward pass": ("multiply", instead(
        "float(scale)",
        "float(scale) * (1 + (a_scale.data.ptr == self.scale('qkv', 0, 'inp').data.ptr))"),
                                        "dlnfb"),
    "an earlier batch's transposed dout": ("quantize", quantizing(
        "if role == 'dout' and self.device.stream.is_capturing(): transposed = None"), "dfcprojw"),
    # but cleared: a run before has left it
    "a weight's transposed copy not written": ("quantize", quantizing(
        "if role == 'weight': transposed = transposed.data.memset_async(0, transposed.nbytes)"),
                                               "dlnfb"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("outlier", (False, True))
def test_fp8_is_right(outlier):
    need("cuda-fp8")
    params, x, y, yardstick = gpu_case("fp8", outlier)
    assert yardstick.judge(replay(BACKENDS["cuda-fp8"](GPU_CONFIG, params, x, y, SMOOTH)))


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FP8_FAULTS)
def test_a_fault_in_fp8_is_red(fault, monkeypatch, capsys):
    need("cuda-fp8")
    name, plant, row = FP8_FAULTS[fault]
    prepare = Trainer.prepare
    # with another batch
    monkeypatch.setattr(Trainer, "prepare", lambda trainer, batch: prepare(trainer))
    monkeypatch.setattr(Fp8, name, plant(getattr(Fp8, name)))
    params, x, y, yardstick = gpu_case("fp8")
    assert (first_wrong(capsys, yardstick, BACKENDS["cuda-fp8"](GPU_CONFIG, params, x, y, SMOOTH))
            == row)
