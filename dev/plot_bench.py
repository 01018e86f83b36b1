"""
Draw what dev/bench_gpu.py --readme measured: ms a step against B, and where the time of a step goes.

    python dev/plot_bench.py                       # dev/bench_gpu.json -> dev/bench_gpu.png
"""

import argparse
import json
import os
import sys

import matplotlib

matplotlib.use("Agg")  # no screen is needed
import matplotlib.pyplot as plt

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)
from train_gpt2 import UserError, open_input, replacing, run_main

GROUPS = {  # what a bar is divided into: the beginnings of kernels' names
    "products": ("matmul",),
    "attention": ("attention",),
    "GELU": ("gelu",),
    "layernorms": ("residual_layernorm", "layernorm"),
    "classifier": ("classifier",),
    "AdamW": ("adamw",),
    "the rest": ("",),
}


def group_of(kernel):
    return next(group for group, starts in GROUPS.items() if kernel.startswith(starts))


def read_results(path):
    with open_input(path, "make it with: python dev/bench_gpu.py --readme") as f:
        try:
            found = json.load(f)
            return found["machine"], found["results"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: expected the JSON of dev/bench_gpu.py; make it with: python dev/bench_gpu.py --readme") from None


def draw(machine, results, output):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    labels = {"ours": "train_gpt2_cuda.py", "eager": "PyTorch, eager", "compile": "torch.compile",
              "reduce-overhead": "torch.compile, reduce-overhead"}
    for index, (name, label) in enumerate(labels.items()):
        points = sorted((r["B"], r["ms"]) for r in results if r["name"] == name)
        if points:
            left.plot(*zip(*points), color=f"C{index}", marker="o", linewidth=2.5 if name == "ours" else 1.5, label=label)
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
    figure.suptitle(machine, fontsize=8)
    with replacing(output) as f:
        figure.savefig(f, format="png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("results", nargs="?", default=os.path.join(ROOT, "dev", "bench_gpu.json"),
                        help="what dev/bench_gpu.py --readme wrote")
    parser.add_argument("-o", "--output", default=os.path.join(ROOT, "dev", "bench_gpu.png"), help="picture to write")
    args = parser.parse_args()
    draw(*read_results(args.results), args.output)
    print(f"wrote {os.path.relpath(args.output)}")


if __name__ == "__main__":
    run_main(main)
