"""
Draw what was measured: the pictures of README.md and doc/speed.md, each for light and dark screens.

    python dev/plot_bench.py          # writes doc/overview.png, doc/bench_gpu.png, and both as -dark.png

doc/overview.png: the losses of `make train` on a CPU (doc/logs/make_train_losses.txt, by dev/readme.py train), and
tokens a second beside llm.c (dev/bench_llmc.json) and PyTorch. doc/bench_gpu.png: tokens a second, and where the time
of a step goes. Both have dev/bench_gpu.json, by dev/bench.py gpu --readme.
"""

import argparse
import json
import os

from root import ROOT

from llmc.errors import run_main
from plot_log import draw_losses, head, label_parts, light_and_dark, read_log

DOC = os.path.join(ROOT, "doc")
LOSSES = os.path.join(DOC, "logs", "make_train_losses.txt")  # by dev/readme.py train
MEASURED, BESIDE_LLMC = (os.path.join(ROOT, "dev", f"bench_{of}.json") for of in ("gpu", "llmc"))
GROUPS = {  # part of a bar -> how its kernels' names begin
    "matmuls": ("matmul",),
    "attention": ("attention",),
    "GELU": ("gelu",),
    "layernorm": ("residual_layernorm", "layernorm"),
    "classifier": ("classifier",),
    "AdamW": ("adamw",),
    "the rest": ("",),
}


NAMES = {"ours": "train_gpt2_cuda.py", "reduce-overhead": "PyTorch, torch.compile, reduce-overhead",
         "compile": "PyTorch, torch.compile", "eager": "PyTorch, eager", "numpy": "train_gpt2.py",
         "best": "PyTorch, torch.compile, flash, fused AdamW"}  # of programs that dev/bench.py measures


def times_of(measured):
    """{program: {B: ms a step}}, ours first."""
    return {label: {r["B"]: r["ms"] for r in measured["results"] if r["name"] == name} for name, label in NAMES.items()}


def briefly(machine):
    """GPU and date of a line that begins and ends with them."""
    return f"{machine.split(',')[0]}, {machine.split('; ')[-1]}"


def group_of(kernel):
    return next(group for group, starts in GROUPS.items() if kernel.startswith(starts))


def draw_rates(axes, ms, T):
    """A bar for each B and program, thousand tokens a second. ms: {program: {B: ms a step}}, ours first."""
    sizes, y = list(dict.fromkeys(B for row in ms.values() for B in row)), 0.0
    top = max(B * T / t for row in ms.values() for B, t in row.items())
    for B in sizes:
        axes.annotate(f"B={B}", (0, y), (-8, 0), "data", "offset points", fontsize=10, ha="right", va="center")
        for index, (program, row) in enumerate(ms.items()):
            if B in row:
                rate = B * T / row[B]
                axes.barh(y, rate, height=0.92, color="C7" if index else "C0")
                axes.text(0.012 * top, y, program, fontsize=9, color=axes.get_facecolor(), va="center")
                axes.text(rate + 0.012 * top, y, f"{rate:.0f}", fontsize=10, va="center")
                y += 1
        y += 0.5
    axes.set(ylim=(y - 0.9, -0.6), xlim=(0, 1.06 * top), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def advantage(ms):
    """By how many percent ours is faster than the fastest other program, at the least and the most."""
    ours, *others = ms.values()
    gains = [100 * (min(row[B] for row in others if B in row) / t - 1) for B, t in ours.items()
             if any(B in row for row in others)]
    return f"{min(gains):.0f} to {max(gains):.0f} percent" if gains else "?"


def draw_run(axes, curves):
    """One run's losses, labelled."""
    (steps, losses), (validated, values) = curves["trl"], curves["tel"]
    draw_losses(axes, {"training": curves})
    axes.get_legend().remove()
    at, half, offset = len(steps) // 4, len(values) // 2, {"textcoords": "offset points", "color": "C1"}
    axes.annotate("training", (steps[at], min(losses[max(0, at - 20) : at + 20])), (-4, -2), color="C0", ha="right",
                  textcoords="offset points", va="top")
    axes.annotate("validation", (validated[half], values[half]), (6, 12), **offset)
    axes.annotate(f"{values[-1]:.2f}", (validated[-1], values[-1]), (6, 0), va="center", **offset)
    axes.set_xlim(0, 1.1 * steps[-1])


def draw_overview(measured, output):
    """README.md's picture. measured: what dev/bench.py gpu --readme wrote."""
    with open(BESIDE_LLMC) as f:
        beside = json.load(f)
    (ours, of_ours), (_, of_best), *_ = times_of(measured).items()
    of_llmc, curves = {int(B): t for B, t in beside["ms"].items()}, read_log(LOSSES)
    ms = {ours: of_ours, "llm.c": of_llmc, "PyTorch, torch.compile": of_best}
    for left, right in light_and_dark(output, (10, 4), ncols=2):
        draw_run(left, curves)
        head(left, f"make train: loss {curves['tel'][1][-1]:.2f} after three minutes", "nats a character; GPT-2"
             " with 3.2 million random parameters\ntwo cores of an AMD EPYC")
        head(right, f"{advantage({name: ms[name] for name in (ours, 'llm.c')})} faster than llm.c", "thousand tokens a"
             f" second, GPT-2 124M in bfloat16, T={measured['T']}\n{briefly(measured['machine'])}; llm.c:"
             f" {briefly(beside['machine'])}")
        draw_rates(right, ms, measured["T"])


def draw(measured, output):
    """doc/speed.md's picture. measured: what dev/bench.py gpu --readme wrote."""
    ms, shares = times_of(measured), {}  # B -> group -> percent
    for r in measured["results"]:
        if r["name"] == "ours":
            total, shares[r["B"]] = sum(r["profile"].values()), dict.fromkeys(GROUPS, 0.0)
            for kernel, t in r["profile"].items():
                shares[r["B"]][group_of(kernel)] += 100 * t / total
    for above, below in light_and_dark(output, (8, 6.6), nrows=2, height_ratios=(3, 2)):
        head(above, f"{advantage(ms)} more tokens a second than PyTorch at its best", "thousand tokens a second,"
             f" GPT-2 124M in bfloat16, T={measured['T']}\n{measured['machine']}")
        draw_rates(above, ms, measured["T"])
        matmuls = [row["matmuls"] for row in shares.values()]
        head(below, f"Matmuls take {min(matmuls):.0f} to {max(matmuls):.0f} percent of the step",
             "percent of train_gpt2_cuda.py's step, each kernel timed alone")
        below.set(xlim=(0, 100), ylim=(len(shares) - 0.5, -1.3), xticks=[], yticks=range(len(shares)))
        below.set_yticklabels([f"B={B}" for B in shares])
        below.tick_params(length=0, pad=8)
        below.figure.get_layout_engine().set(hspace=0.06)
        below.spines[:].set_visible(False)
        for y, row in enumerate(shares.values()):
            parts, begin = [], 0.0
            for index, (group, share) in enumerate(row.items()):
                color = f"C{index}"
                below.barh(y, share, left=begin, height=0.8, color=color)
                if share >= 2.5:
                    below.text(begin + share / 2, y, f"{share:.0f}", color=below.get_facecolor(), ha="center",
                               va="center", fontsize=10)
                if share >= 0.5:
                    parts.append((begin, begin + share, group, color))
                begin += share
            if y == 0:
                label_parts(below, parts, -0.5, True)


def draw_measured():
    """README.md's picture and doc/speed.md's."""
    with open(MEASURED) as f:
        measured = json.load(f)
    for draw_it, output in ((draw, "bench_gpu.png"), (draw_overview, "overview.png")):
        draw_it(measured, os.path.join(DOC, output))
        print(f"wrote {os.path.relpath(os.path.join(DOC, output))}")


def main():
    argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n")[0]).parse_args()
    draw_measured()


if __name__ == "__main__":
    run_main(main)
