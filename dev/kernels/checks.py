"""Checks and times a layer of the kernel library: each rung beside NumPy, at awkward sizes, then all in turns."""

import functools
import os
import sys
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
import root  # noqa: F401  (it finds the modules)
import numpy as np

import llmc.gpu.device
from llmc.errors import UserError
from llmc.tensors import bf16_to_float32, Row
from profile_gpu import measure
from llmc.debugstate import check_tensor
from lab import AWKWARD, BF16, HALF, LIBRARY, Mine, SHAPES, calls, precision_of, results_of, upload

# --------------------------------------------------------------------------------------------------
# check


def widen(array):
    """An array as it is stored -> float64; integers stay."""
    array = bf16_to_float32(array) if array.dtype == np.uint16 else array
    return array.astype(np.float64) if array.dtype in (np.float32, np.float16) else array.copy()


def expected_results(layer, tensors):
    """Run the oracle; {name: float64 array} of the layer's outputs."""
    t = SimpleNamespace(**{name: np.full(x.shape, np.nan) if isinstance(x, Row) else widen(x)
                           for name, x in tensors.items()})
    layer.oracle(t)
    return {name: getattr(t, name) for name in layer.checked}


def agrees(where, name, got, expected, fraction):
    """Whether a result is as expected up to this fraction of the largest value (0: the same bits);
    prints a row that names `where` and the tensor if it is not."""
    # what storing it rounds off
    stored = {np.dtype(np.uint16): BF16, np.dtype(np.float16): HALF}.get(got.dtype, 0.0)
    tolerance = (max(fraction, stored if fraction else 0.0)
                 * max(float(np.abs(expected).max()), 1e-30))
    got = widen(got).reshape(expected.shape)
    return (check_tensor(name, got, expected, tolerance, print_row=False)
            or check_tensor(f"{where}: {name}", got, expected, tolerance))


def check_layer(layer, lab, names=None):
    """Compare PyTorch and each rung at each block size with NumPy; print wrong tensors, return
    their number. A learner's kernels run twice, and must have the same bits."""
    tensors = layer.tensors()
    expected = expected_results(layer, tensors)
    fresh = upload(tensors)
    wrong = 0
    for (name, block, call), (*_,
                              again) in zip(*(calls(layer, lab, fresh, names) for _ in range(2))):
        where = f"{layer.name} {name}, block {block}, {layer}"
        results = results_of(where, call)
        for tensor, got in results.items():
            fraction = max(layer.checked[tensor],
                           LIBRARY[layer.precision.dtype] * (name == layer.library_name))
            wrong += not agrees(where, tensor, got, expected[tensor], fraction)
        for tensor, got in results_of(where,
                                      again).items() if isinstance(layer.rungs.get(name),
                                                                   Mine) else ():
            wrong += not agrees(where, f"a second run's {tensor}", got, widen(results[tensor]), 0)
    return wrong


def check_at_all_sizes(layer, open_lab, config, dtype, names):
    """check_layer at the model's sizes, config, and at AWKWARD ones; returns whether nothing is
    wrong."""
    calls = wrong = 0
    for sizes in (config, *AWKWARD):
        bench = open_lab(sizes, precision_of(layer, dtype))
        with bench.streams():
            for B, T in layer.shapes if sizes is config else SHAPES:
                at_size = layer(sizes, bench.precision, bench.gpu, B, T)
                calls += len(at_size.runs(names))
                wrong += check_layer(at_size, bench, names)
    print(f"{layer.name}, {dtype}: {calls} calls checked")
    return wrong == 0


# --------------------------------------------------------------------------------------------------
# time

# bytes, several times any L2 cache; writing them also takes longer than a call from Python
FLUSH = 512 << 20
# elements at either end of a result in which rungs are compared, at the timed size
SAMPLE = 2 << 20


def milliseconds(lab, flush, call):
    """The median time of several calls, the L2 cache flushed before each; slow ones are repeated
    less often."""
    times = functools.partial(measure, lab.device, call, before=lambda device: lab.clear(flush))
    return 1000 * times(max(3, min(20, int(0.5 / max(times(1), 1e-6)))))


def time_layer(layer, lab, names=None):
    """Time PyTorch, and every rung at every block size; return ({name: {block size: ms}}, bytes
    that a perfect kernel moves). NumPy would take minutes at this size, so each rung has to agree
    with the first one, which was checked at others: raises UserError if one does not."""
    fresh = upload(layer.tensors())
    flush = llmc.gpu.device.cp.empty(FLUSH, np.uint8)
    times = {}
    first = {}
    for name, block, call in calls(layer, lab, fresh, names):
        where = f"{layer.name} {name}, block {block}, {layer}"
        for tensor, got in results_of(where, call,
                                      SAMPLE).items() if name != layer.library_name else ():
            allowed = 2 * max(layer.checked[tensor], BF16 * (got.itemsize < 4))
            if not agrees(where, tensor, got, first.setdefault(tensor, widen(got)), allowed):
                raise UserError(f"{where}: differs from the first rung at the size that was to be"
                                " timed")
        times.setdefault(name, {})[block] = milliseconds(lab, flush, call)
    return times, layer.bytes(SimpleNamespace(**fresh))
