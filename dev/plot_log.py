"""
Draw the training and validation losses of one or more runs.

    python dev/plot_log.py run1.log run2/main.log -o losses.png

Reads both forms of the log: `s:0 trl:5.3562` and `s:0 trl:5.3562 lr:0.000100 norm:12.34`; `tel` is validation.
"""

import argparse
import os
import re
import sys

import matplotlib

matplotlib.use("Agg")  # no screen is needed
import matplotlib.pyplot as plt

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from llmc.errors import UserError, run_main
from llmc.files import open_input, replacing
from llmc.logger import last_run

EVENT = re.compile(r"s:(\d{1,10}) (trl|tel|eval):(\S+)")


def read_log(path):
    """{'trl': (steps, losses), 'tel': ...} of the last run in one log; a step that was logged again after a restart
    counts once, the last time."""
    with open_input(path, "make it with: python train_gpt2.py -o run.log") as f:
        lines = f.read().decode(errors="replace").splitlines()
    curves, first = {}, last_run(lines)
    for number, line in enumerate(lines[first:], first + 1):
        match = EVENT.match(line)
        try:
            curves.setdefault(match[2], {})[int(match[1])] = float(match[3])
        except (TypeError, ValueError):
            raise UserError(f"{path}:{number}: {line[:60]!r}, expected a line like 's:0 trl:4.1234'") from None
    if not curves:
        raise UserError(f"{path}: no line in it yet, nothing to draw")
    return {name: (list(points), list(points.values())) for name, points in curves.items()}


def draw(logs, output):
    """logs: {label: curves}. Validation is drawn with dots, in the colour of its training curve."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for index, (label, curves) in enumerate(logs.items()):
        color = f"C{index}"
        if "trl" in curves:
            axes.plot(*curves["trl"], color=color, linewidth=1, alpha=0.7, label=f"{label}, training")
        if "tel" in curves:
            axes.plot(*curves["tel"], color=color, marker="o", markersize=4, linewidth=2, label=f"{label}, validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.grid(alpha=0.3)
    for text in axes.legend().get_texts():
        text.set_parse_math(False)  # a $ in a name is a $
    extension = os.path.splitext(output)[1].lstrip(".").lower()
    if extension not in figure.canvas.get_supported_filetypes():
        raise UserError(f"-o {output}: expected a name that ends in .png, .svg or .pdf")
    with replacing(output) as f:
        figure.savefig(f, format=extension, dpi=150)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("logs", nargs="+", metavar="LOG", help="log file, or a run's directory")
    parser.add_argument("-o", "--output", default="losses.png",
                        help="picture to write (.png, .svg, .pdf; default: losses.png)")
    args = parser.parse_args()
    paths = [os.path.join(path, "main.log") if os.path.isdir(path) else path for path in args.logs]
    draw({os.fsencode(path).decode(errors="replace"): read_log(path) for path in paths}, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    run_main(main)
