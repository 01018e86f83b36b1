"""
Draw the training and validation losses of one or more runs.

    python dev/plot_log.py runs/mine -o losses.png
    python dev/plot_log.py runs/small runs/large april.log --dark

Reads both forms of the log: `s:0 trl:5.3562` and `s:0 trl:5.3562 lr:0.000100 norm:12.34`; `tel` is
validation. Of several runs, each has a color: a thin line for training losses, their running mean
over it, dots for validation. The high losses of the first steps are cut off.
"""

import argparse
import contextlib
import io
import os
import re

import root  # noqa: F401  (it finds the modules)
import numpy as np

from llmc.errors import UserError, import_package, run_main
from llmc.files import open_input, replacing

# page, ink, faint,
LIGHT = "#ffffff #1f2328 #818b98 #0969da #d4590a #1a7f37 #8250df #bf3989 #b08800 #0f7f8c #59636e"
# then C0 to C7
DARK = "#0d1117 #f0f6fc #818b98 #4493f8 #f0883e #3fb950 #ab7df8 #db61a2 #d4a72c #39b8c6 #9198a1"
EVENT = re.compile(r"s:(\d{1,10}) (trl|tel|eval):(\S+)")


def read_log(path):
    """Return {'trl': (steps, losses), 'tel': ...} of a log, or in that of a run's directory; raises
    UserError for any other file. Of a step that was logged again after a restart, the last loss
    counts."""
    path = (os.path.join(path, "main.log") if os.path.isdir(path)
            else re.sub(r"(^|/)main\.csv$", r"\1main.log", path))
    with open_input(path, "make it with: python train_gpt2.py -o run.log") as f:
        data = f.read()
    # without one that was cut off
    lines = data[: data.rfind(b"\n") + 1].decode(errors="replace").splitlines()
    curves = {}
    for number, line in enumerate(lines, 1):
        match = EVENT.match(line)
        try:
            curves.setdefault(match[2], {})[int(match[1])] = float(match[3])
        except (TypeError, ValueError):
            raise UserError(f"{path}:{number}: {line[:60]!r}, expected a line like 's:0 trl:4.1234'") from None
    if not curves:
        raise UserError(f"{path}: no line in it yet, nothing to draw")
    return {name: (list(points), list(points.values())) for name, points in curves.items()}


def run_names(paths):
    """Name runs after their directories or logs; if two would have the same name, all by their
    paths."""
    paths = [os.fsencode(path).decode(errors="replace") for path in paths]
    names = [os.path.basename(os.path.abspath(path).removesuffix(os.sep
                                                                 + "main.log").removesuffix(".log"))
             for path in paths]
    return names if len(set(names)) == len(names) else paths


def running_mean(losses, width):
    """The mean of each loss and `width` losses on either side; the first and last `width` have
    none."""
    sums = np.concatenate([[0.0], np.cumsum(losses, dtype=np.float64)])
    return (sums[2 * width + 1 :] - sums[: len(losses) - 2 * width]) / (2 * width + 1)


def draw_losses(axes, logs):
    """Draw logs, {name: curves from read_log}."""
    low = []
    high = []
    entries = []  # entries: of the legend
    for index, (name, curves) in enumerate(logs.items()):
        color = f"C{index}"
        of_validation = "C1" if len(logs) == 1 else f"C{index}"
        prefix = "" if len(logs) == 1 else f"{name}: "
        if "trl" in curves:
            steps, losses = map(np.array, curves["trl"])
            side = len(steps) // 50  # of the running mean: 2 percent of the steps
            mean = running_mean(losses, side)
            axes.plot(steps, losses, color=color, linewidth=0.7, alpha=0.3)
            line, = axes.plot(steps[side : len(steps) - side], mean, color=color, linewidth=1.6)
            entries.append((line, f"{prefix}training"
                            + (f", mean of {2 * side + 1} steps" if side else "")))
            settled = mean[len(mean) // 10 :]  # past the first steps
            high.append(np.max(settled) + 0.15 * np.ptp(settled))
            low.append(np.min(losses))
        for kind, what in (("tel", "validation"), ("eval", "HellaSwag")):
            if kind in curves:
                steps, losses = curves[kind]
                best = int((np.argmin if kind == "tel" else np.argmax)(losses))
                points, = axes.plot(steps, losses, color=of_validation, marker="o" if kind == "tel"
                                    else "s", markersize=5, markeredgecolor=axes.get_facecolor(),
                                    linestyle="none" if "trl" in curves else "-")
                entries.append((points,
                                f"{prefix}{what}, best {losses[best]:.4f} at step {steps[best]}"))
                low.append(min(losses))
                high.append(max(loss for step, loss in zip(steps, losses)
                                if 10 * step >= steps[-1]))
    if high and np.isfinite([*low, *high]).all() and max(high) > min(low):
        margin = 0.03 * (max(high) - min(low))
        axes.set_ylim(min(low) - margin, max(high) + margin)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    # which legend() would not find itself for a name that begins with "_"
    add_legend(axes, *zip(*entries))


def add_legend(axes, *entries):
    for text in axes.legend(*entries, frameon=False, labelcolor="linecolor").get_texts():
        text.set_parse_math(False)  # a $ in a name is a $


@contextlib.contextmanager
def picture(output, dark=False, size=(8, 5), **layout):
    """Yield axes to draw in, then write the picture; raises UserError for an unknown type of file.
    layout: of several axes, for plt.subplots."""
    plt = import_package("matplotlib.pyplot", "a picture")
    plt.switch_backend("agg")  # no screen is needed
    page, ink, faint, *cycle = (DARK if dark else LIGHT).split()
    with plt.style.context(["default", {
            "figure.facecolor": page, "axes.facecolor": page, "savefig.facecolor": page,
            "text.color": ink, "axes.labelcolor": ink, "axes.titlecolor": ink,
            "axes.edgecolor": faint,
            "xtick.color": faint, "ytick.color": faint, "xtick.labelcolor": ink,
            "ytick.labelcolor": ink,
            "grid.color": faint, "grid.alpha": 0.35, "axes.axisbelow": True,
            "axes.prop_cycle": plt.cycler(color=cycle),
            "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
            "axes.titleweight": "bold", "axes.titlesize": 11.5}]):
        figure, axes = plt.subplots(figsize=size, layout="constrained", **layout)
        yield axes
        extension = os.path.splitext(output)[1].lstrip(".").lower()
        # which needs LaTeX
        if extension not in figure.canvas.get_supported_filetypes() or extension == "pgf":
            raise UserError(f"-o {output}: expected a name that ends in .png, .svg or .pdf")
        drawn = io.BytesIO()
        figure.savefig(drawn, format=extension, dpi=200)
        with replacing(output) as f:
            if extension == "png":  # with 128 colors, a third of the size
                Image = import_package("PIL.Image", "a picture")
                Image.open(drawn).convert("RGB").quantize(128).save(f, "png", optimize=True)
            else:
                f.write(drawn.getbuffer())
        plt.close(figure)


def light_and_dark(output, size, **layout):
    """Yield the axes of a page's picture twice: for light screens, then, with another name, for
    dark ones."""
    for path, dark in ((output, False), ("-dark".join(os.path.splitext(output)), True)):
        with picture(path, dark, size, **layout) as axes:
            yield axes


def head(axes, title, below):
    """A title, the finding, and below it, smaller, the quantity and its conditions."""
    axes.set_title(title, pad=24 + 12 * below.count("\n"))
    axes.annotate(below, (0, 1), (0, 8), "axes fraction", "offset points", fontsize=9, va="bottom")


def label_parts(axes, parts, y, up):
    """Label the parts of a bar, [(begin, end, text, color)], on one side of it, each with a line
    along the part; a text that would overlap the one before is farther away."""
    axes.figure.draw_without_rendering()  # settles the scale
    left, right = axes.get_xlim()
    ends = []  # ends: of each row's last text
    for begin, end, text, color in parts:
        style = {"fontsize": 9.5, "color": color, "va": "baseline" if up else "top", "ha": "center",
                 "linespacing": 1.1}
        label = axes.text(left, y, text, **style)
        middle = (begin + end) / 2
        side = 0.51 * label.get_window_extent().transformed(axes.transData.inverted()).width
        label.remove()
        x = min(max(middle, left + side), right - side)
        row = next((row for row, last in enumerate(ends) if x - side >= last), len(ends))
        ends[row : row + 1] = [x + side]
        away = 6 + 16 * row if up else -4 - 16 * row
        axes.plot((begin, end), (y, y), color=color, linewidth=1.5, solid_capstyle="butt",
                  clip_on=False)
        axes.annotate(text, (middle, y), (x, away), textcoords=("data", "offset points"), **style)
        if row:
            axes.annotate("", (middle, y), (middle, away), textcoords=("data", "offset points"),
                          arrowprops={"arrowstyle": "-", "color": color, "shrinkA": 0,
                                      "shrinkB": 0})


def draw(logs, output, dark=False):
    with picture(output, dark) as axes:
        draw_losses(axes, logs)
        axes.set_ylabel("loss, nats a token")
        if len(logs) == 1:
            axes.set_title(*logs, parse_math=False)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("logs", nargs="+", metavar="LOG", help="a run's directory, or a log file")
    parser.add_argument("-o", "--output", default="losses.png",
                        help="picture to write (.png, .svg, .pdf; default: losses.png)")
    parser.add_argument("--dark", action="store_true", help="on black")
    args = parser.parse_args()
    logs = [read_log(path) for path in args.logs]
    draw(dict(zip(run_names(args.logs), logs)), args.output, args.dark)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    run_main(main)
