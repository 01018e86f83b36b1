"""The specification of kernels/fp8.cu in NumPy: rounding to 8 bits, and scales."""

import numpy as np

LARGEST = 448.0
SMALLEST = 2.0**-9  # numbers of E4M3
ROOM = np.float32([2.0, 2.0, 8.0])  # times what each needs at most; gradients grow suddenly


def round_e4m3(x):
    """x as float32, rounded to the nearest number of E4M3, ties to even, saturating; NaN stays
    NaN."""
    x = np.clip(np.asarray(x, np.float32), -LARGEST, LARGEST)
    exponent = np.maximum(np.frexp(x)[1] - 1, -6)  # of the leading bit
    step = np.ldexp(np.float32(1.0), exponent - 3)
    return np.rint(x / step) * step


def decode_e4m3(bits):
    """(...) uint8 -> (...) float32: 1 bit of sign, 4 of exponent, 3 of mantissa."""
    exponent = (bits >> 3 & 15).astype(np.int32)
    mantissa = (bits & 7).astype(np.float32)
    size = np.where(exponent == 0, mantissa * SMALLEST, np.ldexp(8.0 + mantissa, exponent - 10))
    return np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -size, size)).astype(np.float32)


def next_scales(history, scales):
    """history (FP8_HISTORY,n): the largest numbers of updates -> the scales (n,) of the next one,
    with ROOM to grow. Without a history, a scale stays as it is."""
    most = history.max(axis=0)
    with np.errstate(divide="ignore", over="ignore"):
        highest = np.minimum(LARGEST / np.resize(ROOM, most.shape) / most, np.float32(2.0**100))
    powers = (highest.view(np.int32) & 0x7F800000).view(np.float32)  # without the mantissa
    return np.where(most > 0, powers, scales)
