"""
Draw what was measured: README.md's picture, and that of doc/speed.md.

    python dev/plot_bench.py          # writes doc/overview.png and doc/bench_gpu.png

doc/overview.png: the losses of `make train` on a CPU (doc/logs/make_train_losses.txt, by dev/readme.py train), and
tokens a second beside llm.c and PyTorch (dev/bench_llmc.json, one sitting on one GPU). doc/bench_gpu.png: ms a step
against B, and where the time of a step goes (dev/bench_gpu.json, by dev/bench.py gpu --readme).
"""

import argparse
import json
import os
import sys

import matplotlib

matplotlib.use("Agg")  # no screen is needed
import matplotlib.pyplot as plt

from plot_log import draw_losses, read_log

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)
from llmc.errors import UserError, run_main
from llmc.files import open_input, replacing

LOSSES = os.path.join(ROOT, "doc", "logs", "make_train_losses.txt")
BESIDE_LLMC = os.path.join(ROOT, "dev", "bench_llmc.json")
GROUPS = {  # part of a bar -> how its kernels' names begin
    "matmuls": ("matmul",),
    "attention": ("attention",),
    "GELU": ("gelu",),
    "layernorms": ("residual_layernorm", "layernorm"),
    "classifier": ("classifier",),
    "AdamW": ("adamw",),
    "the rest": ("",),
}


def group_of(kernel):
    return next(group for group, starts in GROUPS.items() if kernel.startswith(starts))


def draw_overview(beside):
    """README.md's picture. beside: {"machine": text, "ms": {program: {B: ms a step}}}."""
    ms, curves = beside["ms"], read_log(LOSSES)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    draw_losses(left, {"training": curves})
    left.set_ylabel("loss, nats a character")
    left.set_title("make train: 3.2 million parameters, three minutes on two CPU cores", fontsize=9)

    width = 0.8 / len(ms)
    for index, (program, row) in enumerate(ms.items()):
        rates = [int(B) * 1024 / t for B, t in row.items()]  # thousands of tokens a second
        bars = right.bar([i + (index - (len(ms) - 1) / 2) * width for i in range(len(row))], rates, width,
                         label=program)
        right.bar_label(bars, fmt="%.0f", fontsize=8)
    right.set_xticks(range(len(row)), [f"B={B}" for B in row])
    right.set_ylabel("thousand tokens a second")
    right.set_ylim(top=1.8 * max(rates))  # room for the legend
    right.set_title(f"training GPT-2 124M in bfloat16, T=1024\n{beside['machine']}", fontsize=9)
    right.legend(fontsize=8, loc="upper left")
    return figure


def draw(measured):
    """doc/speed.md's picture. measured: what dev/bench.py gpu --readme wrote."""
    results = measured["results"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    labels = {"ours": "train_gpt2_cuda.py", "eager": "PyTorch, eager", "compile": "torch.compile",
              "reduce-overhead": "torch.compile, reduce-overhead"}
    for index, (name, label) in enumerate(labels.items()):
        points = sorted((r["B"], r["ms"]) for r in results if r["name"] == name)
        if points:
            left.plot(*zip(*points), color=f"C{index}", marker="o", linewidth=2.5 if name == "ours" else 1.5,
                      label=label)
    left.set_xlabel("B, sequences of 1024 tokens")
    left.set_ylabel("ms a step")
    left.set_title("GPT-2 124M, bfloat16")
    left.set_ylim(bottom=0)
    left.grid(alpha=0.3)
    left.legend()

    ours = sorted((r for r in results if r["name"] == "ours"), key=lambda r: r["B"])
    bottoms = [0.0] * len(ours)
    for index, group in enumerate(GROUPS):
        shares = []
        for r in ours:
            total = sum(r["profile"].values())
            shares.append(100 * sum(ms for kernel, ms in r["profile"].items() if group_of(kernel) == group) / total)
        right.bar([f"B={r['B']}\n{r['ms']:.1f} ms" for r in ours], shares, bottom=bottoms, color=f"C{index}",
                  label=group if any(shares) else None)
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares)]
    right.set_ylabel("percent of the step, launch by launch")
    right.set_title("where the time goes")
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    figure.suptitle(measured["machine"], fontsize=8)
    return figure


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n")[0])
    parser.add_argument("results", nargs="?", default=os.path.join(ROOT, "dev", "bench_gpu.json"),
                        help="what dev/bench.py gpu --readme wrote")
    parser.add_argument("-o", "--output", default=os.path.join(ROOT, "doc", "bench_gpu.png"), help="their picture")
    parser.add_argument("--overview", default=os.path.join(ROOT, "doc", "overview.png"), help="README.md's picture")
    args = parser.parse_args()
    for path, picture in ((args.results, draw), (BESIDE_LLMC, draw_overview)):
        try:
            with open_input(path, "make it with: python dev/bench.py gpu --readme") as f:
                found = json.load(f)
            figure, output = picture(found), args.output if picture is draw else args.overview
        except (ArithmeticError, AttributeError, LookupError, RecursionError, StopIteration, TypeError,
                ValueError) as error:
            raise UserError(f"{path}: not the JSON that was expected ({error!r:.100})") from None
        with replacing(output) as f:
            figure.savefig(f, format="png", dpi=110, metadata={"Software": None})
        print(f"wrote {os.path.relpath(output)}")


if __name__ == "__main__":
    run_main(main)
