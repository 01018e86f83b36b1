"""
The kernel library: every layer of GPT-2, from the naive kernel to the live one, checked and timed; needs a GPU.

    python dev/kernels/bench.py                               # lists the layers and their versions
    python dev/kernels/bench.py layernorm_forward             # checks them, times them, prints a table
    python dev/kernels/bench.py softmax --plot softmax.png    # and draws the time of each block size
    python dev/kernels/bench.py gelu_forward --version live --check_only
    python dev/kernels/bench.py --all                         # all layers, bfloat16 and float32: dev/kernels/RESULTS.md
    python dev/kernels/bench.py softmax --results             # this layer's tables in that file, and no others

Each version is compared with the NumPy function in float64 at every block size, at the model's sizes and at awkward
ones, its outputs NaN before the call. If one element is wrong, its tensor is printed, nothing is timed, and the exit
status is 1. Otherwise each version is timed at -b and -t: the median over CUDA events, with the L2 cache flushed before
each call. At that size NumPy would take minutes, so each version, at its first block size, must agree with the first
version in some 4 million elements of each result. If one does not, no time of any layer is printed, drawn or written,
and the exit status is 1.

GB/s counts what a perfect kernel would move, even if a version moves more. Its peak is the bandwidth of a large copy,
that of TFLOP/s the rate of a large matmul, both measured (with --results: read from the file, so that all its
percentages refer to the same peaks). Row 0 of a table is the library's: PyTorch's, and for matmuls cuBLASLt's.
"""

import argparse
import contextlib
import dataclasses
import os
import re
import subprocess
import sys

import lab  # first: it finds the project's modules
import layers  # noqa: F401  (its classes are the layers)
import attention_layers  # noqa: F401
import matmul_layers  # noqa: F401

import matplotlib

matplotlib.use("Agg")  # no screen is needed
import matplotlib.pyplot as plt
import torch

import llmc.gpu.device
from bench_gpu import MODELS, describe
from lab import AWKWARD, LAYERS, SHAPES, Lab, check_layer, cuda, time_layer
from llmc.gpu.compiler import Cache, compiler_version
from llmc.gpu.device import gpu_errors_as_lines, open_gpu
from llmc.errors import UserError, run_main
from llmc.files import replacing
from llmc.gpu.geometry import check_sizes
from llmc.gpu.precision import Precision
from train_gpt2 import Config
from profile_gpu import measure_copy, measure_matmul
from readme import read_text

RESULTS = os.path.join(lab.HERE, "RESULTS.md")
PICTURE = "kernels.png"

# ----------------------------------------------------------------------------------------------------------------------
# the command line


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("layers", nargs="*", metavar="LAYER", help="what to check and time (none: list them)")
    parser.add_argument("--version", nargs="+", metavar="NAME", help="only these versions")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"),
                        help="of activations (default: bfloat16 where the GPU has it)")
    parser.add_argument("-b", type=int, default=32, metavar="B", help="batch size of the timing")
    parser.add_argument("-t", type=int, default=1024, metavar="T", help="sequence length of the timing")
    parser.add_argument("--model", default="124M", help=f"{', '.join(MODELS)}, or C/NH")
    parser.add_argument("--plot", nargs="?", const=PICTURE, metavar="FILE",
                        help=f"draw the time of each block size (.png; with no FILE: {PICTURE})")
    parser.add_argument("--check_only", action="store_true", help="check, and time nothing")
    parser.add_argument("--all", action="store_true",
                        help=f"all layers, in each dtype, into {os.path.relpath(RESULTS)}")
    parser.add_argument("--results", action="store_true",
                        help="the tables of these layers, in each dtype, into that file")
    args = parser.parse_args(argv)
    defaults = vars(parser.parse_args([]))
    given = {f"-{name}" if len(name) == 1 else f"--{name}" for name in defaults
             if getattr(args, name) != defaults[name]} - {"--layers"}
    refuse_without_effect(args, given, parser.error)
    return args


def refuse_without_effect(args, given, error):
    """Call error(one line) if one of the given options would have no effect or cannot be meant."""
    if min(args.b, args.t) < 1:
        error("-b and -t: expected at least 1")
    if args.plot in LAYERS:
        error(f"--plot {args.plot}: that is a layer, expected the name of a picture: name layers first")
    if args.plot == "":
        error("--plot: expected the name of a picture, or none")
    if args.all and (args.layers or given - {"--all", "--plot"}):
        error("--all takes all layers and versions in each dtype, at the default sizes, and times them; it goes with"
              " --plot alone")
    if not args.layers and not args.all and given:
        error(f"{', '.join(sorted(given))}: of which layer? With none, they are listed, and nothing else is done")
    refused = sorted(given & {"--plot", "-b", "-t"})
    if args.check_only and refused:
        error(f"--check_only with {', '.join(refused)}: it times nothing")
    refused = sorted(given & {"--version", "--check_only", "-b", "-t", "--model"})
    if args.results and refused:
        error(f"--results with {', '.join(refused)}: the file has all versions, timed at the default sizes")


def find_layers(names, versions=None):
    """Return the classes of these layers; raises UserError with the known names for an unknown layer or version."""
    for name in names:
        if name not in LAYERS:
            raise UserError(f"there is no layer {name}, expected some of: {', '.join(LAYERS)}")
        for version in versions or ():
            if version not in LAYERS[name].versions:
                expected = ", ".join(LAYERS[name].versions)
                raise UserError(f"{name} has no version {version}, expected some of: {expected}")
    return [LAYERS[name] for name in names]


def find_config(model, T):
    """Return the Config of a model of MODELS, or of C/NH; raises UserError for sizes that the kernels cannot do."""
    config = MODELS.get(model)
    if config is None:
        try:
            C, NH = map(int, model.split("/"))
            config = Config(1024, 50257, 1, NH, C, 50304)
        except ValueError:
            raise UserError(f"--model {model}: expected one of {', '.join(MODELS)}, or C/NH like 768/12") from None
        if min(C, NH) < 1 or C % NH:
            raise UserError(f"--model {model}: expected C as a multiple of NH")
        check_sizes(config)
    return dataclasses.replace(config, maxT=max(T, config.maxT))


def list_layers():
    for name, layer in LAYERS.items():
        print(f"{name}: {about(layer)}\n    {', '.join(layer.versions)}")


def about(layer):
    return layer.__doc__.strip().split("\n")[0]


# ----------------------------------------------------------------------------------------------------------------------
# check and time


class Labs:
    """A Lab for each model and precision on one GPU, and PyTorch to compare with if it sees the GPU."""

    def __init__(self):
        self.gpu, self.cache, self.made = open_gpu(), Cache(), {}
        self.torch = torch.cuda.is_available()
        if not self.torch:
            print("note: PyTorch sees no GPU: there will be no row for it", file=sys.stderr)

    def open(self, layer, config, dtype):
        """Return the Lab for a layer, with its kernels loaded."""
        key = config, Precision(dtype, float32_grads=int(layer.float32_grads and dtype == "bfloat16"))
        if key not in self.made:
            self.made[key] = Lab(self.gpu, *key, self.cache)
        for file in (layer.file, *layer.uses):
            self.made[key].load(file)
        return self.made[key]


def make_layer(layer, bench, B, T):
    return layer(bench.config, bench.precision, bench.gpu, B, T)


def check_all(labs, chosen, versions, config, dtype):
    """Check each layer at all sizes and print what is wrong; returns whether nothing is."""
    wrong = 0
    for layer in chosen:
        count = 0
        for sizes in (config, *AWKWARD):
            bench = labs.open(layer, sizes, dtype)
            with bench.stream:
                for B, T in layer.shapes if sizes is config else SHAPES:
                    at_size = make_layer(layer, bench, B, T)
                    count += len(list(at_size.runs(versions)))
                    wrong += check_layer(at_size, bench, versions, labs.torch and not versions)
        print(f"{layer.name}, {dtype}: {count} calls checked{'' if count else ': no version fits these sizes'}")
    return wrong == 0


def time_all(labs, chosen, versions, config, dtype, B, T):
    """Time each layer: [Timing]; raises UserError if a version is wrong at the timed size."""
    timings = []
    for layer in chosen:
        bench = labs.open(layer, config, dtype)
        with bench.stream:
            timing = time_layer(make_layer(layer, bench, B, T), bench, versions, labs.torch)
        if timing is None:
            raise UserError(f"{layer.name} is wrong at the size that was to be timed")
        llmc.gpu.device.cp.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
        timings.append(timing)
    return timings


def measure_peaks(labs, config, dtype):
    """Measure what the GPU can do at best: (bytes, operations) a second."""
    bench = labs.open(next(iter(LAYERS.values())), config, dtype)
    with bench.stream:
        return measure_copy(bench.device), measure_matmul(bench.matmul)


# ----------------------------------------------------------------------------------------------------------------------
# tables and pictures


def rate(timing, ms, peaks):
    """Return (the rate as text, its fraction of the peak)."""
    copy, matmul = peaks
    if timing.flops:
        return f"{timing.flops / ms / 1e9:.1f} TFLOP/s", timing.flops / ms * 1000 / matmul
    return f"{timing.bytes / ms / 1e6:.0f} GB/s", timing.bytes / ms * 1000 / copy


def rows_of(timing, peaks):
    """Return [(version, best block size, ms, rate, fraction of the peak)], the libraries first."""
    of_libraries = timing.layer.library_version, timing.layer.library_name
    best = {name: min(times.values()) for name, times in timing.versions.items()}
    blocks = {name: min(times, key=times.get) for name, times in timing.versions.items() if name not in of_libraries}
    if timing.library:
        best[timing.layer.library_name] = timing.library
    names = [name for name in of_libraries if name in best] + list(blocks)
    return [(name, blocks.get(name, ""), best[name], *rate(timing, best[name], peaks)) for name in names]


def print_timing(timing, peaks):
    layer = timing.layer
    print(f"\n{layer.name}: {about(layer)}\n{layer.describe()}")
    print(f"{'version':<28} {'block':>5} {'ms':>9} {'rate':>15} {'of peak':>8}")
    for name, block, ms, text, share in rows_of(timing, peaks):
        print(f"{name:<28} {block:>5} {ms:>9.4f} {text:>15} {share:>8.1%}")


def own_versions(timing):
    """Return {version: {block size: ms}} without the library's, which chooses its own block size."""
    return {name: times for name, times in timing.versions.items() if name != timing.layer.library_version}


def markdown(timing, peaks):
    """Return the lines of a layer's table in RESULTS.md: a row for each version, with the ms of each block size."""
    own = own_versions(timing)
    sizes = sorted({block for times in own.values() for block in times})
    lines = [f"| version | best block | ms | rate | of peak | {' | '.join(f'ms at {block}' for block in sizes)} |",
             "|---" * (5 + len(sizes)) + "|"]
    for name, block, ms, text, share in rows_of(timing, peaks):
        times = own.get(name, {})
        cells = (f"{times[size]:.4f}" if size in times else "" for size in sizes)
        lines.append(f"| {name} | {block} | {ms:.4f} | {text} | {share:.1%} | {' | '.join(cells)} |")
    return lines


def part_of_results(timing, peaks):
    """Return the lines of a layer in RESULTS.md: title, formula, table."""
    layer = timing.layer
    return [f"### {layer.name}", "", f"{about(layer)}. B={layer.B}, T={layer.T}.", "", *markdown(timing, peaks)]


# ----------------------------------------------------------------------------------------------------------------------
# RESULTS.md: a head whose last line is the machine, then a section for each dtype: its peaks, and a part for each layer

PEAKS_LINE = "Peaks, measured: a copy {:.0f} GB/s, a large matmul {:.0f} TFLOP/s."
PEAKS_FOUND = re.compile(r"Peaks, measured: a copy (\d+) GB/s, a large matmul (\d+) TFLOP/s\.")


def write_results(machine, config, groups):
    """Write the whole file; groups: [(dtype, peaks, [Timing])]."""
    lines = ["# What the kernels of this library measure", "",
             "`python dev/kernels/bench.py --all` writes this file, after every version has agreed with the NumPy"
             " function at every block size. Medians over CUDA events, the L2 cache flushed before each call; rates"
             " count what a perfect kernel would move or"
             f" compute. C={config.C}, NH={config.NH}, V={config.V}, Vp={config.Vp}.", "", machine]
    for dtype, (copy, matmul), timings in groups:
        lines += ["", f"## {dtype}", "", PEAKS_LINE.format(copy / 1e9, matmul / 1e12)]
        for timing in timings:
            lines += ["", *part_of_results(timing, (copy, matmul))]
    write_text("\n".join(lines))


def write_text(text):
    with replacing(RESULTS) as f:
        f.write((text + "\n").encode())


class Results:
    """RESULTS.md as it is, to replace some of its tables."""

    def __init__(self, gpu_name, dtypes):
        """Read the file; raises UserError if it is of another GPU, or a dtype's section or peaks are missing."""
        instead = "write the file as a whole: python dev/kernels/bench.py --all"
        name = f"--results: {os.path.relpath(RESULTS)}"
        head, *sections = re.split(r"^(?=## )", read_text(RESULTS, instead), flags=re.MULTILINE)
        self.head, self.sections = head.rstrip("\n"), {}
        machine = self.head.split("\n")[-1].split(",")[0]
        if machine != gpu_name:
            raise UserError(f"{name} is of another GPU ({machine}), this is {gpu_name}: {instead}")
        for section in sections:
            begin, *tables = (part.rstrip("\n") for part in re.split(r"^(?=### )", section, flags=re.MULTILINE))
            self.sections[begin.split("\n")[0][len("## ") :]] = [begin, *tables]
        for dtype in dtypes:
            if dtype not in self.sections or not PEAKS_FOUND.search(self.sections[dtype][0]):
                raise UserError(f"{name} has no section {dtype} with its peaks: {instead}")

    def peaks(self, dtype):
        """Return the peaks that all percentages of this section refer to."""
        copy, matmul = PEAKS_FOUND.search(self.sections[dtype][0]).groups()
        return int(copy) * 1e9, int(matmul) * 1e12

    def put(self, dtype, timing):
        """Replace a layer's table, or insert it before the first one of a later layer."""
        section, text = self.sections[dtype], "\n".join(part_of_results(timing, self.peaks(dtype)))
        names, order = [part.split("\n")[0][len("### ") :] for part in section[1:]], list(LAYERS)
        if timing.layer.name in names:
            section[1 + names.index(timing.layer.name)] = text
            return
        later = [i for i, name in enumerate(names) if name in LAYERS
                 and order.index(name) > order.index(timing.layer.name)]
        section.insert(1 + min(later, default=len(names)), text)

    def write(self):
        write_text("\n\n".join([self.head, *(part for section in self.sections.values() for part in section)]))


def machine_text(bench):
    """Return GPU, driver and versions in one line."""
    driver = "unknown"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    return f"{describe(bench.matmul)}, driver {driver}, {compiler_version()}, PyTorch {torch.__version__}"


def plot(timings, path):
    """Draw time against block size: a plot for each layer, a line for each version."""
    columns = min(3, len(timings))
    figure, axes = plt.subplots(-(-len(timings) // columns), columns, squeeze=False, layout="constrained",
                                figsize=(6 * columns, 4.5 * -(-len(timings) // columns)))
    for axis in axes.flat[len(timings) :]:
        axis.remove()
    for axis, timing in zip(axes.flat, timings):
        own, of_library = own_versions(timing), timing.versions.get(timing.layer.library_version)
        if of_library:
            axis.axhline(min(of_library.values()), color="black", linestyle=":", label=timing.layer.library_version)
        if timing.library:
            axis.axhline(timing.library, color="black", linestyle="--", label=timing.layer.library_name)
        for name, times in own.items():
            axis.plot(list(times), list(times.values()), marker="o", label=name)
        ticks = sorted({block for times in own.values() for block in times})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, map(str, ticks))
        axis.set_yscale("log")
        axis.set_title(f"{timing.layer.name}, {timing.layer.describe()}", fontsize=10)
        axis.set_xlabel("threads in a block")
        axis.set_ylabel("ms")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    with replacing(path) as f:
        figure.savefig(f, format="png", dpi=110, metadata={"Software": None})
    plt.close(figure)
    print(f"wrote {os.path.relpath(path)}")


# ----------------------------------------------------------------------------------------------------------------------
# main


@gpu_errors_as_lines()
def main(argv=None):
    args = parse_arguments(argv)
    chosen = find_layers(args.layers or LAYERS, args.version)
    if not args.layers and not args.all:
        return list_layers()
    config = find_config(args.model, args.t)
    if args.plot and not os.path.isdir(os.path.dirname(os.path.abspath(args.plot))):
        raise UserError(f"--plot {args.plot}: there is no such directory")
    labs = Labs()
    settled = cuda.resolve_auto(cuda.CudaSettings(dtype=args.dtype or "auto"), labs.gpu.arch).dtype
    dtypes = list(dict.fromkeys((settled, "float32") if (args.all or args.results) and not args.dtype else (settled,)))
    results = Results(labs.gpu.name, dtypes) if args.results else None  # now, not after all the work
    if not all([check_all(labs, chosen, args.version, config, dtype) for dtype in dtypes]):
        return 1
    if args.check_only:
        return 0
    groups = [(dtype, results.peaks(dtype) if results else measure_peaks(labs, config, dtype),
               time_all(labs, chosen, args.version, config, dtype, args.b, args.t)) for dtype in dtypes]
    for dtype, peaks, timings in groups:
        print(f"\n{labs.gpu.name}: a copy {peaks[0] / 1e9:.0f} GB/s, a large matmul {peaks[1] / 1e12:.0f} TFLOP/s in"
              f" {dtype}")
        for timing in timings:
            print_timing(timing, peaks)
    if args.all:
        write_results(machine_text(labs.open(chosen[0], config, dtypes[0])), config, groups)
    if results:
        for dtype, _, timings in groups:
            for timing in timings:
                results.put(dtype, timing)
        results.write()
    if args.all or results:
        print(f"wrote {os.path.relpath(RESULTS)}")
    if args.plot:
        plot([timing for _, _, timings in groups for timing in timings], args.plot)
    return 0


if __name__ == "__main__":
    run_main(main)
