"""A debug state: one batch, and what PyTorch computed from it, for the parity test. In llm.c's
format, with a trailer of this project's (doc/formats.md). The gradients have V rows in version 1,
Vp in version 2."""

import math
import zlib
from dataclasses import dataclass

import numpy as np

from llmc.checkpoint import tensors_in_file
from llmc.dataloader import check_ids
from llmc.errors import UserError
from llmc.files import (HEADER_BYTES, check_size, chunks, export_hint, make_header, open_input,
                        read_header, read_into, replacing)
from llmc.tensors import Tensors, allocate, bf16_bits, unpadded


@dataclass
class DebugState:
    """One batch, what PyTorch computed from it, and (from export_weights.py) the losses of more
    steps on it."""

    x: np.ndarray  # (B, T) int32
    y: np.ndarray  # (B, T) int32
    logits: np.ndarray  # (B, T, V) float32
    loss: float
    grads: Tensors  # the model's table
    optimizer: dict | None = None  # learning_rate, beta1, beta2, eps, weight_decay
    losses: np.ndarray | None = None  # (n,) float32
    crc: int = 0  # fingerprint of the weights it was made from
    # (2, m) float32, Llama 3: losses and norms of the steps of llm.c's test
    history: np.ndarray | None = None


def write_debug_state(path, config, state, version=2):
    """Write a debug state with its trailer; version 1 (V rows) or 2 (Vp rows)."""
    header = make_header(config.STATES[0], version, *state.x.shape)
    history = np.zeros((2, 0), "<f4") if state.history is None else state.history
    header[4] = history.shape[1]
    header[8:11] = (1, len(state.losses), np.uint32(state.crc).view(np.int32))
    with replacing(path) as f:
        for part in (header, state.x.astype("<i4"), state.y.astype("<i4"), state.logits,
                     np.float32(state.loss),
                     *tensors_in_file(config, state.grads, version),
                     history.tobytes(), np.array([*state.optimizer.values()], "<f8"),
                     state.losses.astype("<f4")):
            f.write(part)


def read_debug_state(path, config, params):
    """Read a debug state, version 1 or 2, of this model; raises UserError if it is damaged or
    another model's."""
    hint = export_hint(path)
    with open_input(path, hint) as f:
        header = read_header(f, config.STATES[0], hint)
        version, B, T = (int(x) for x in header[1:4])
        steps, trailer, n, crc = *header[[4, 8, 9]].tolist(), int(header[10:11].view(np.uint32)[0])
        magic, *versions = config.STATES
        if (version not in versions or B < 1 or not 1 <= T <= config.maxT or trailer not in (0, 1)
                or min(steps, n) < 0):
            raise UserError(f"{path}: version {version}, B={B} T={T}, trailer version {trailer}"
                            f" with {n} losses, expected version"
                            f" {' or '.join(map(str, versions))}, T of 1 to {config.maxT}, trailer"
                            f" 0 or 1; {hint}")
        grads = allocate(params.table)
        tensors = list(tensors_in_file(config, grads, version))
        numbers = (2 * B * T + B * T * config.V + 1 + sum(tensor.size for tensor in tensors) + 2
                   * steps)
        size = HEADER_BYTES + 4 * numbers + (40 + 4 * n if trailer else 0)
        check_size(f, size, f"version {version}, B={B} T={T} and this model ({config.describe()})",
                   hint)
        if trailer and crc != fingerprint(config, params):
            raise UserError(f"{path}: belongs to another model: it was made from other weights;"
                            f" {hint}")

        x = np.empty((B, T), np.int32)
        y = np.empty((B, T), np.int32)
        logits, loss, history = (np.empty(shape, np.float32)
                                 for shape in ((B, T, config.V), 1, (2, steps)))
        for part in (x, y, logits, loss, *tensors, *[history] * (steps > 0)):
            read_into(f, part)
        check_ids(path, np.concatenate((x, y)), config.V)
        state = DebugState(x, y, logits, float(loss[0]), grads, history=history)
        if trailer and n:  # without a step, the settings mean nothing
            settings = np.empty(5, np.float64)
            losses = np.empty(n, np.float32)
            read_into(f, settings)
            read_into(f, losses)
            state.optimizer = dict(zip(("learning_rate", "beta1", "beta2", "eps", "weight_decay"),
                                       settings.tolist()))
            state.losses = losses
            state.crc = crc
    return state


def fingerprint(config, params):
    """CRC-32 of the weights in bfloat16, without padding: the same for versions 1, 3 and 5 of one
    model."""
    crc = 0
    for tensor in unpadded(params, config.V):
        for chunk in chunks(tensor):
            crc = zlib.crc32(bf16_bits(chunk), crc)
    return crc


def check_tensor(name, got, expected, tolerance, norm_tolerance=math.inf, print_row=True):
    """Return whether shapes agree, every |got - expected| <= tolerance, and their 2-norm <=
    norm_tolerance. NaN fails. Prints one row, without print_row only if shapes differ. tolerance: a
    number, or an array of the same shape."""
    if np.shape(got) != np.shape(expected):
        print(f"{name:<12} shape {np.shape(got)}, expected {np.shape(expected)}  FAIL")
        return False
    difference = np.abs(np.subtract(got, expected, dtype=np.float64)).reshape(-1)
    tolerance = np.broadcast_to(tolerance, np.shape(got)).reshape(-1)
    worst = int(np.argmax(difference - tolerance))  # argmax finds a NaN first
    largest = difference[worst]
    allowed = tolerance[worst]
    norm = np.linalg.norm(difference)
    okay = bool(largest <= allowed and norm <= norm_tolerance)
    if print_row:
        at = ",".join(map(str, np.unravel_index(worst, np.shape(got))))
        verdict = "ok" if okay else "FAIL"
        norms = "" if norm_tolerance == math.inf else f"  2-norm {norm:.3e} of {norm_tolerance:.3e}"
        print(f"{name:<12} max diff {largest:.3e} at [{at}]  tolerance {allowed:.3e}{norms} "
              f" {verdict}")
    return okay
