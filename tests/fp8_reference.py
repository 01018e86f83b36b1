"""The specification of kernels/fp8.cu in NumPy: rounding to 8 bits, and scales."""

import numpy as np

# the largest numbers of E4M3, which inputs and weights are in, and of E5M2, of gradients
LARGEST, LARGEST_E5M2 = 448.0, 57344.0
SMALLEST = 2.0**-9  # of E4M3
HIGHEST = np.float32(224.0)  # what a scale brings the largest number to, at most


def round_e4m3(x):
    """x as float32, rounded to the nearest number of E4M3, ties to even, saturating; NaN stays
    NaN."""
    x = np.clip(np.asarray(x, np.float32), -LARGEST, LARGEST)
    exponent = np.maximum(np.frexp(x)[1] - 1, -6)  # of the leading bit
    step = np.ldexp(np.float32(1.0), exponent - 3)
    return np.rint(x / step) * step


def round_e5m2(x):
    """The same of E5M2."""
    x = np.clip(np.asarray(x, np.float32), -LARGEST_E5M2, LARGEST_E5M2)
    exponent = np.maximum(np.frexp(x)[1] - 1, -14)
    step = np.ldexp(np.float32(1.0), exponent - 2)
    return np.rint(x / step) * step


def decode_e4m3(bits):
    """(...) uint8 -> (...) float32: 1 bit of sign, 4 of exponent, 3 of mantissa."""
    exponent = (bits >> 3 & 15).astype(np.int32)
    mantissa = (bits & 7).astype(np.float32)
    size = np.where(exponent == 0, mantissa * SMALLEST, np.ldexp(8.0 + mantissa, exponent - 10))
    return np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -size, size)).astype(np.float32)


def next_scales(history, scales):
    """history (FP8_HISTORY,n): the largest numbers of updates -> the scales (n,) of the next one.
    Without a history, a scale stays as it is."""
    most = history.max(axis=0)
    with np.errstate(divide="ignore", over="ignore"):
        highest = np.minimum(HIGHEST / most, np.float32(2.0**100))
    powers = (highest.view(np.int32) & 0x7F800000).view(np.float32)  # without the mantissa
    return np.where(most > 0, powers, scales)
