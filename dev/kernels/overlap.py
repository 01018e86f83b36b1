"""
Copies that hide behind each other: layernorm forward with its input and its result on the host; needs a GPU.

    python dev/kernels/overlap.py                 # dev/kernels/overlap.md and overlap.png beside it; under a minute

"whole": one copy to the GPU, one kernel, one copy back, one after the other. "split": the sequences of the batch are
divided among streams, and each stream copies a few to the GPU, normalizes them and copies them back, while the others
do the same with theirs. The bus carries data in both directions at once, so one part comes back while the next one is
on its way.

Both are first compared with train_gpt2.py's layernorm in 8192 evenly spread rows of each result; if one is wrong,
nothing is timed, and the exit status is 1. The kernels are the live one, whose blocks have 256 threads, and one of
layernorm_forward.cu, which takes any block size. The mean and the rstd of the rows stay on the GPU.
"""

import argparse
import os
import sys
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import lab  # first: it finds the project's modules, and tells OpenBLAS how to run

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no screen is needed
import matplotlib.pyplot as plt

import llmc.gpu.device
import train_gpt2
import train_gpt2_cuda as cuda
from bench_gpu import describe
from llmc.gpu.compiler import Cache
from llmc.gpu.device import gpu_errors_as_lines, open_gpu, pinned_array
from llmc.errors import UserError, run_main
from llmc.files import replacing
from llmc.gpu.geometry import blocks
from llmc.gpu.precision import Precision
from llmc.debugstate import check_tensor
from train_gpt2 import Config

T, C = 1024, 768
BATCHES = (8, 32, 128, 512)
STREAMS = 4
PARTS = 64  # at most; the first part's copy to the GPU and the last one's copy back are not hidden
TO_GPU, TO_HOST = 1, 2  # cudaMemcpyKind
CHECKED = 8192  # rows of a result that are compared with NumPy's
BLOCKS = (None, 32, 256, 1024)  # None: the live kernel's own


class Work:
    """The tensors for up to B sequences, in pinned host memory and on the GPU, and the ways to normalize them."""

    def __init__(self, device, B):
        self.device, cp = device, llmc.gpu.device.cp
        rng = np.random.default_rng(0)
        # Each sequence starts at its own position in these numbers, so no two are alike. 2^29 random numbers would take
        # long.
        numbers = rng.standard_normal(8 * T * C + 4099 * B, dtype=np.float32)
        self.host_inp, self.host_out = (pinned_array(4 * B * T * C).view(np.float32).reshape(B, T, C) for _ in range(2))
        for b in range(B):
            self.host_inp[b] = numbers[4099 * b : 4099 * b + T * C].reshape(T, C)
        self.host_weight, self.host_bias = rng.standard_normal((2, C), dtype=np.float32)
        self.streams = [cp.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]
        self.inp, self.out = (cp.empty((B, T, C), np.float32) for _ in range(2))
        self.mean, self.rstd = (cp.empty((B, T), np.float32) for _ in range(2))
        self.weight, self.bias = cp.asarray(self.host_weight), cp.asarray(self.host_bias)
        cp.cuda.runtime.deviceSynchronize()

    def copy_in(self, b, stream):
        """Copy sequences b (a slice) of the batch to the GPU."""
        copy(self.inp[b].data.ptr, self.host_inp[b].ctypes.data, self.inp[b].nbytes, TO_GPU, stream)

    def copy_out(self, b, stream):
        copy(self.host_out[b].ctypes.data, self.out[b].data.ptr, self.out[b].nbytes, TO_HOST, stream)

    def normalize(self, b, block, stream):
        """Normalize sequences b on the GPU, by the live kernel (block None) or the one for any block size."""
        out, mean, rstd, inp = self.out[b], self.mean[b], self.rstd[b], self.inp[b]
        with stream:
            if block is None:
                cuda.residual_layernorm_forward(self.device.device, None, out, mean, rstd, inp, None, self.weight,
                                                self.bias, len(inp), T, C)
            else:
                grid = (blocks(len(inp) * T, block // 32),)
                self.device.launch("layernorm_forward_warp_a_row", grid, (block,), out, mean, rstd, inp, self.weight,
                                   self.bias, len(inp) * T)

    def whole(self, B, block, record):
        """Do all B sequences at once, on one stream. record(kind, part, stream, call) makes each call."""
        self.part(slice(0, B), 0, block, self.streams[0], record)

    def split(self, B, block, record):
        """Do a few sequences at a time, on each stream in turn."""
        rows = blocks(B, PARTS)
        for i, b in enumerate(range(0, B, rows)):
            self.part(slice(b, min(b + rows, B)), i, block, self.streams[i % STREAMS], record)

    def part(self, b, i, block, stream, record):
        record("copy to the GPU", i, stream, lambda: self.copy_in(b, stream))
        record("layernorm", i, stream, lambda: self.normalize(b, block, stream))
        record("copy back", i, stream, lambda: self.copy_out(b, stream))

    def milliseconds(self, call):
        """Time a call, in ms, from when all streams may begin until all have ended."""
        cp = llmc.gpu.device.cp
        start, ends = cp.cuda.Event(), [cp.cuda.Event() for _ in self.streams]
        start.record(self.streams[0])
        for stream in self.streams:
            stream.wait_event(start)
        call()
        for stream, end in zip(self.streams, ends):
            end.record(stream)
        for end in ends:
            end.synchronize()
        return max(cp.cuda.get_elapsed_time(start, end) for end in ends)

    def median(self, call, repeats=5):
        return float(np.median([self.milliseconds(call) for _ in range(repeats + 1)][1:]))

    def time(self, way, B, block):
        return self.median(lambda: way(B, block, just_call))

    def timeline(self, way, B, block):
        """Return [(kind, part, begin, end)] in ms, from events around each copy and each kernel."""
        cp, events = llmc.gpu.device.cp, []

        def record(kind, part, stream, call):
            begin, end = cp.cuda.Event(), cp.cuda.Event()
            begin.record(stream)
            call()
            end.record(stream)
            events.append((kind, part, begin, end))

        first = cp.cuda.Event()
        first.record(self.streams[0])
        self.milliseconds(lambda: way(B, block, record))
        times = [(kind, part, *(cp.cuda.get_elapsed_time(first, event) for event in (begin, end))) for kind, part,
                 begin, end in events]
        zero = min(begin for _, _, begin, _ in times)
        return [(kind, part, begin - zero, end - zero) for kind, part, begin, end in times]

    def check(self, way, B, block, rows, expected):
        """Return whether this way writes the expected rows of the result on the host; print the difference if not."""
        self.host_out[:B].fill(np.nan)
        self.out[:B].fill(np.nan)
        llmc.gpu.device.cp.cuda.runtime.deviceSynchronize()
        self.milliseconds(lambda: way(B, block, just_call))
        got = self.host_out.reshape(-1, C)[rows]
        tolerance = lab.SUMS * float(np.abs(expected).max())
        name = f"{way.__name__}, {kernel_name(block)}, B={B}"
        return check_tensor(name, got, expected, tolerance,
                            print_row=False) or check_tensor(name, got, expected, tolerance)

    def expected(self, B):
        """Return the indices of some rows, with the last one, and train_gpt2.py's layernorm of them in float64."""
        rows = np.arange(B * T)[:: -max(1, B * T // CHECKED)]
        inp, weight, bias = (x.astype(np.float64) for x in (self.host_inp.reshape(-1, C)[rows], self.host_weight,
                                                            self.host_bias))
        out, mean, rstd = np.empty_like(inp), np.empty(len(rows)), np.empty(len(rows))
        train_gpt2.layernorm_forward(out, mean, rstd, inp, weight, bias, 1, len(rows), C)
        return rows, out

    def bus(self):
        """Measure the bytes a second to the GPU, back, and both ways at once: the upper bounds for the copies."""
        B = min(128, len(self.host_inp))
        size = self.inp[:B].nbytes

        def there():
            self.copy_in(slice(0, B), self.streams[0])

        def back():
            self.copy_out(slice(0, B), self.streams[1])

        rates = [size / self.median(there) * 1e3, size / self.median(back) * 1e3,
                 2 * size / self.median(lambda: (there(), back())) * 1e3]
        return SimpleNamespace(to_gpu=rates[0], to_host=rates[1], both=rates[2])


def just_call(kind, part, stream, call):
    """The `record` of Work.whole and Work.split that records nothing."""
    call()


def copy(to, source, size, kind, stream):
    llmc.gpu.device.cp.cuda.runtime.memcpyAsync(to, source, size, kind, stream.ptr)


def kernel_name(block):
    return "kernels/layernorm.cu, 256" if block is None else f"warp a row, {block}"


def bounds(bus, size):
    """Return the ms for `size` bytes in and as many out, whole and split, if only the bus took time."""
    return 1e3 * size / bus.to_gpu + 1e3 * size / bus.to_host, 1e3 * 2 * size / bus.both


def report(machine, bus, rows, picture):
    """Return the text of overlap.md. rows: (B, block, ms of the kernel alone, whole, split)."""
    whole, split = bounds(bus, 1.0)
    rates = [f"{rate / 1e9:.1f}" for rate in (bus.to_gpu, bus.to_host, bus.both)]
    lines = [f"""\
# Copies that hide behind each other

Layernorm forward of (B,T,C) float32 whose input and result are in the host's pinned memory: whole copies, one after the
other, against the batch split into at most {PARTS} parts on {STREAMS} streams. Written by `python
dev/kernels/overlap.py`.

{machine}, T={T}, C={C}.
Medians of times by CUDA events. GB/s count input and result.

The bus alone: {rates[0]} GB/s to the GPU, {rates[1]} back, {rates[2]} with copies both ways at once. The bound,
the time to copy both ways at once and nothing else, is {whole / split:.2f} times as fast as whole copies.

| B | MB each way | kernel, block | kernel alone ms | whole ms | GB/s | split ms | GB/s | times as fast | of the bound |
|---|---|---|---|---|---|---|---|---|---|"""]
    for B, block, kernel, whole, split in rows:
        size = 4 * B * T * C
        times = [cell for ms in (whole, split) for cell in (f"{ms:.2f}", f"{2 * size / ms / 1e6:.1f}")]
        shares = f"{whole / split:.2f}", f"{bounds(bus, size)[1] / split:.0%}"
        cells = str(B), f"{size / 1e6:.0f}", kernel_name(block), f"{kernel:.3f}", *times, *shares
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"""
![The two timelines]({os.path.basename(picture)})

The block size matters to the kernel alone; the whole is bound by the bus. Of n parts, the first one's copy in and the
last one's copy out overlap with nothing: they add 1/n to the bound, and B=8 has only 8 parts. (Timed alone, the kernel
finds the smallest batch in the cache.)
""")
    return "\n".join(lines)


def draw(machine, B, timelines, path):
    """Draw timelines, {title: what Work.timeline returned}. A copy is drawn as beginning when the previous one in its
    direction ends, because until then it waits for the bus."""
    figure, axes = plt.subplots(len(timelines), 1, figsize=(11, 4.5), layout="constrained", sharex=True)
    for axis, (title, times) in zip(axes, timelines.items()):
        kinds = list(dict.fromkeys(kind for kind, *_ in times))
        for lane, kind in enumerate(kinds):
            before = 0.0
            for part, begin, end in sorted((part, begin, end) for name, part, begin, end in times if name == kind):
                begin = min(max(begin, before), end)
                axis.broken_barh([(begin, end - begin)], (lane - 0.4, 0.8), color=f"C{part % STREAMS}", linewidth=0.5)
                before = max(before, end)
        axis.set_yticks(range(len(kinds)), kinds)
        axis.invert_yaxis()
        axis.set_title(f"{title}: {max(end for *_, end in times):.2f} ms", loc="left", fontsize=10)
        axis.grid(axis="x", alpha=0.3)
    axes[-1].set_xlabel("ms; a colour is a stream")
    figure.suptitle(f"layernorm forward from and to the host, B={B} T={T} C={C} float32, {machine}", fontsize=8)
    with replacing(path) as f:
        figure.savefig(f, format="png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def check_all(work, batches):
    """Return whether both ways are right at every size; print what is not."""
    okay = True
    for B in batches:
        rows, expected = work.expected(B)
        for block in BLOCKS:
            okay &= all([work.check(way, B, block, rows, expected) for way in (work.whole, work.split)])
    return okay


def time_all(work, batches):
    """Return [(B, block, ms of the kernel alone, whole, split)]."""
    rows = []
    for B in batches:
        for block in BLOCKS:
            alone = work.median(lambda: work.normalize(slice(0, B), block, work.streams[0]))
            rows.append((B, block, alone, work.time(work.whole, B, block), work.time(work.split, B, block)))
    return rows


@gpu_errors_as_lines()
def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("-b", type=int, nargs="+", default=BATCHES, metavar="B", help="batch sizes")
    parser.add_argument("-o", "--output", default=os.path.join(HERE, "overlap.md"),
                        help="table to write; its picture ends in .png")
    args = parser.parse_args()
    largest, picture = max(args.b), os.path.splitext(args.output)[0] + ".png"
    if min(args.b) < 1:
        raise UserError(f"-b {min(args.b)}: expected at least 1")
    if picture == args.output:
        raise UserError(f"-o {args.output}: the picture will have this name: pass one that ends in .md")
    gpu = open_gpu()
    need, free = 2 * 4 * largest * T * C, llmc.gpu.device.cp.cuda.runtime.memGetInfo()[0]
    if need > 0.9 * free:
        raise UserError(f"-b {largest} needs {need >> 20} MiB of GPU memory, {free >> 20} MiB are free: pass smaller"
                        " ones, like -b 8 32")
    device = lab.Lab(gpu, Config(T, 50257, 1, 12, C, 50304), Precision("float32"), Cache())
    device.load("layernorm_forward")
    try:
        work = Work(device, largest)
    except llmc.gpu.device.cp.cuda.runtime.CUDARuntimeError as error:
        raise UserError(f"-b {largest}: no {need >> 20} MiB of pinned memory ({error}): pass smaller ones, like"
                        " -b 8 32") from None
    if not check_all(work, args.b):
        return 1
    print("Whole and split agree with train_gpt2.layernorm_forward at every batch size and block size.")
    machine, bus, rows = describe(device.matmul), work.bus(), time_all(work, args.b)
    text = report(machine, bus, rows, picture)
    print(text, end="")
    with replacing(args.output) as f:
        f.write(text.encode())
    B = min(args.b, key=lambda B: abs(B - 32))  # enough parts to see how it works, and few enough to see each
    draw(machine, B, {"whole copies": work.timeline(work.whole, B, None),
                      f"split over {STREAMS} streams": work.timeline(work.split, B, None)}, picture)
    print(f"wrote {os.path.relpath(args.output)} and {os.path.relpath(picture)}")
    return 0


if __name__ == "__main__":
    run_main(main)
