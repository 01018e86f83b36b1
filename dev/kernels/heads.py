"""
Put what each version of the kernel library measured into its head, from RESULTS.md; needs no GPU.

    python dev/kernels/heads.py            # after bench.py --all: a line in the head of each version, in the .cu files
    python dev/kernels/heads.py --check    # changes nothing; a line for each head that says something else, and exit status 1

A head is a comment that begins with a version's name, `// warp_a_row. ...`, and stands above the version's first kernel; its figures are
its last lines (one for each layer, where layers share the head, or two where one is too long), the best block of each dtype:

    // H200, B=32, T=1024: bfloat16 0.1054 ms, 1910 GB/s at 256 threads; float32 0.1126 ms, 2235 GB/s at 256.
"""

import argparse
import glob
import os
import re
from typing import NamedTuple

import lab  # first: it finds the project's modules
import bench  # noqa: F401  (it knows all layers)

from lab import HERE, LAYERS
from readme import read_text
from train_gpt2 import UserError, replacing, run_main

ROW = re.compile(r"\| (\w+) \| (\d+) \| ([\d.]+) \| ([\d.]+ \S+) \| ")  # version, best block, ms, rate
OWN = re.compile(r"// ((\w+, )?[^,]+, B=\d+, T=\d+: )?(bfloat16|float32) [\d.]+ ms, ")  # the lines that this program writes
WIDTH = 140  # columns


def read_results(path):
    """RESULTS.md -> {(layer, version): its figures, in one line}."""
    lines = read_text(path, "make it with: python dev/kernels/bench.py --all").splitlines()
    gpu, dtype, layer, sizes, figures = None, None, None, None, {}
    for line in lines:
        if ", driver " in line:
            gpu = line.split(",")[0].removeprefix("NVIDIA ")
        elif line.startswith("## "):
            dtype = line[3:]
        elif line.startswith("### "):
            layer = line[4:]
        elif match := re.search(r" (B=\d+, T=\d+)\.$", line):
            sizes = match[1]
        elif match := ROW.match(line):
            version, block, ms, rate = match.groups()
            figures.setdefault((layer, version), [sizes]).append(f"{dtype} {ms} ms, {rate} at {block}")
        elif re.match(r"\| \w+ \| \d", line):
            raise UserError(f"{path}: {line[:60]}...: expected a version, its best block, ms and a rate")
    if not gpu or not figures:
        raise UserError(f"{path}: no GPU's name or no figures in it, expected what bench.py --all writes")
    return {key: f"{gpu}, {sizes}: {'; '.join([f'{first} threads', *more])}." for key, (sizes, first, *more) in figures.items()}


class Head(NamedTuple):
    version: str
    layers: list  # the names of those of which it is a version
    first: int  # its lines
    end: int


def is_text(line):
    return line.startswith("// ") and not line.startswith("// ---")


def names_of(layer):
    """A layer's, and those of the layers whose kernels it launches in its own way."""
    return [vars(cls)["name"] for cls in layer.__mro__ if "name" in vars(cls)]


def heads_of(file, lines):
    """The heads of <file>.cu, the last one first. Layers that have a version of the same name are told apart by the kernels that follow:
    those up to the next head, or where two heads stand above one kernel, that one. A head with no kernel is for all of them."""
    candidates = [layer for layer in LAYERS.values() if file in (layer.file, *layer.uses)]
    versions = {version for layer in candidates for version in layer.versions}
    kernels, stop = [], len(lines)
    for first in reversed(range(len(lines))):
        match = re.match(r"// (\w+)[.:] ", lines[first])
        if not match or match[1] not in versions or first and is_text(lines[first - 1]):
            continue
        end = first + 1
        while end < len(lines) and is_text(lines[end]):
            end += 1
        kernels = list(lab.signatures("\n".join(lines[end:stop]))) or kernels
        having = [layer for layer in candidates if match[1] in layer.versions]
        above = [layer.name for layer in having if any(kernel.startswith(tuple(names_of(layer))) for kernel in kernels)]
        yield Head(match[1], above or [layer.name for layer in having], first, end)
        stop = first


def with_figures(file, text, figures):
    """(the text of <file>.cu with these figures in its heads, [a line for each head that had others])."""
    lines, wrong = text.splitlines(), []
    for head in heads_of(file, lines):
        measured = {layer: figures[layer, head.version] for layer in head.layers if (layer, head.version) in figures}
        own = []
        for layer, line in measured.items():
            line = f"// {f'{layer}, ' if len(head.layers) > 1 else ''}{line}"
            own += [line] if len(line) <= WIDTH else line.replace("; ", ";\n// ").split("\n")
        before = lines[head.first : head.end]
        idea = [line for line in before if not OWN.match(line)]
        if before != idea + own:
            found = " ".join(line[3:] for line in before if OWN.match(line))
            expected = " ".join(line[3:] for line in own)
            wrong.append(f"{file}.cu:{head.first + 1}: {head.version}: {found or 'no figures'} Expected: {expected or 'none'}")
            lines[head.first : head.end] = idea + own
    return "\n".join(lines) + "\n", wrong[::-1]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a head differs from RESULTS.md")
    args = parser.parse_args(argv)
    figures, differ = read_results(os.path.join(HERE, "RESULTS.md")), False
    for path in sorted(glob.glob(os.path.join(HERE, "*.cu"))):
        file = os.path.splitext(os.path.basename(path))[0]
        text, wrong = with_figures(file, lab.read_source(path), figures)
        differ = differ or bool(wrong)
        if args.check:
            print("".join(f"{line}\n" for line in wrong), end="")
        elif wrong:
            with replacing(path) as f:
                f.write(text.encode())
            print(f"wrote {os.path.relpath(path)}: {len(wrong)} heads")
    return 1 if args.check and differ else 0


if __name__ == "__main__":
    run_main(main)
