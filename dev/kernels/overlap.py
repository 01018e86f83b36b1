"""
Copies to and from the host that overlap: layernorm forward whose input and result are in the host's pinned memory.

    python dev/kernels/overlap.py                 # prints the table of overlap.md, draws overlap.png; needs a GPU

Whole: copy the batch to the GPU, normalize it, copy it back. Split: the same in at most 64 parts, on 4 streams in turn.
The bus carries data in both directions at once, so one part comes back while the next one is on its way. Both are first
compared with train_gpt2.py's layernorm in evenly spread rows; if one is wrong, nothing is timed.
"""

import os
import sys
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import lab  # first: it finds the project's modules, and tells OpenBLAS how to run
import numpy as np

import llmc.gpu.device
import train_gpt2
import train_gpt2_cuda as cuda
from llmc.errors import UserError, run_main
from llmc.gpu.device import gpu_errors_as_lines, open_gpu, pinned_array
from llmc.gpu.precision import Precision
from train_gpt2 import Config
from plot_log import picture
from profile_gpu import describe

T, C, BATCHES = 1024, 768, (8, 32, 128, 512)
STREAMS, PARTS = 4, 64  # parts at most; the first one's copy to the GPU and the last one's copy back are not hidden
TO_GPU, TO_HOST = 1, 2  # cudaMemcpyKind


def tensors(B):
    """(host's inp and out, pinned; the GPU's; weight, bias), for up to B sequences, no two of which are alike."""
    cp, rng = llmc.gpu.device.cp, np.random.default_rng(0)
    numbers = rng.standard_normal(8 * T * C + 4099 * B, dtype=np.float32)  # 2^29 of them would take long
    host = [pinned_array(4 * B * T * C).view(np.float32).reshape(B, T, C) for _ in range(2)]
    for b in range(B):
        host[0][b] = numbers[4099 * b : 4099 * b + T * C].reshape(T, C)
    made = {name: cp.empty((B, T, C), np.float32) for name in ("inp", "out")}
    made |= {name: cp.empty((B, T), np.float32) for name in ("mean", "rstd")}
    made |= {name: cp.asarray(rng.standard_normal(C, dtype=np.float32)) for name in ("weight", "bias")}
    return SimpleNamespace(host_inp=host[0], host_out=host[1], **made)


def run(device, streams, t, B, parts, kinds=("in", "kernel", "out"), events=None):
    """Launch all parts; returns the milliseconds until all streams have ended. events: a list for (kind, part, begin,
    end) of each copy and kernel."""
    cp = llmc.gpu.device.cp
    start, ends = cp.cuda.Event(), [cp.cuda.Event() for _ in streams]
    start.record(streams[0])
    for stream in streams:
        stream.wait_event(start)
    rows = -(-B // parts)
    for i, first in enumerate(range(0, B, rows)):
        stream, b = streams[i % len(streams)], slice(first, min(first + rows, B))
        inp, out, size = t.inp[b], t.out[b], t.inp[b].nbytes
        calls = {"in": lambda: copy(inp.data.ptr, t.host_inp[b].ctypes.data, size, TO_GPU, stream),
                 "kernel": lambda: cuda.residual_layernorm_forward(device, None, out, t.mean[b], t.rstd[b], inp, None,
                                                                   t.weight, t.bias, len(inp), T, C),
                 "out": lambda: copy(t.host_out[b].ctypes.data, out.data.ptr, size, TO_HOST, stream)}
        device.stream = stream
        for kind in kinds:
            begin, end = cp.cuda.Event(), cp.cuda.Event()
            begin.record(stream)
            calls[kind]()
            end.record(stream)
            if events is not None:
                events.append((kind, i, start, begin, end))
    for stream, end in zip(streams, ends):
        end.record(stream)
        stream.synchronize()
    device.stream = device.main
    return max(cp.cuda.get_elapsed_time(start, end) for end in ends)


def copy(to, source, size, kind, stream):
    llmc.gpu.device.cp.cuda.runtime.memcpyAsync(to, source, size, kind, stream.ptr)


def check(device, streams, t, B, parts):
    """Raise UserError if the result on the host is not NumPy's in some 8192 rows."""
    t.host_out[:B].fill(np.nan)
    t.out.fill(np.nan)
    run(device, streams, t, B, parts)
    rows = np.arange(B * T)[:: -max(1, B * T // 8192)]
    inp, weight, bias = (x.astype(np.float64) for x in (t.host_inp.reshape(-1, C)[rows], t.weight.get(), t.bias.get()))
    expected, mean, rstd = np.empty_like(inp), np.empty(len(rows)), np.empty(len(rows))
    train_gpt2.layernorm_forward(expected, mean, rstd, inp, weight, bias, 1, len(rows), C)
    if not lab.agrees(f"B={B} in {parts} parts", "out", t.host_out.reshape(-1, C)[rows], expected, lab.SUMS):
        raise UserError(f"B={B} in {parts} parts is wrong")


@gpu_errors_as_lines()
def main():
    bench = lab.Lab(open_gpu(), Config(T, 50257, 1, 12, C, 50304), Precision("float32"))
    cp, device, t = llmc.gpu.device.cp, bench.device, tensors(max(BATCHES))
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]
    cp.cuda.runtime.deviceSynchronize()
    for B in BATCHES:
        for parts in (1, PARTS):
            check(device, streams, t, B, parts)

    def median(*arguments, **options):
        return float(np.median([run(device, streams, t, *arguments, **options) for _ in range(6)][1:]))

    print(f"{describe(bench.matmul)}, T={T}, C={C}\n")
    print("| B | MB each way | kernel alone ms | whole ms | GB/s | split ms | GB/s | times as fast |")
    print("|---|---|---|---|---|---|---|---|")
    for B in BATCHES:
        size, kernel, whole, split = 4 * B * T * C, median(B, 1, kinds=("kernel",)), median(B, 1), median(B, PARTS)
        print(f"| {B} | {size / 1e6:.0f} | {kernel:.3f} | {whole:.2f} | {2 * size / whole / 1e6:.1f} | {split:.2f} |"
              f" {2 * size / split / 1e6:.1f} | {whole / split:.2f} |")
    with picture(os.path.join(HERE, "overlap.png")) as axes:
        lanes = []
        for way, parts in (("whole", 1), ("split", PARTS)):
            events, before = [], {}
            run(device, streams, t, 32, parts, events=events)
            for kind, part, start, *ends in events:  # a copy waits for the bus until the one before it ends
                begin, end = (cp.cuda.get_elapsed_time(start, event) for event in ends)
                begin, before[kind] = min(max(begin, before.get(kind, 0.0)), end), end
                if (lane := f"{way}: {kind}") not in lanes:
                    lanes.append(lane)
                axes.barh(lanes.index(lane), end - begin, left=begin, color=f"C{part % STREAMS}")
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.set_xlabel("ms; a colour is a stream")
        axes.set_title(f"layernorm forward from and to the host, B=32 T={T} C={C} float32", fontsize=10)


if __name__ == "__main__":
    run_main(main)
