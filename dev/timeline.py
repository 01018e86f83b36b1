"""
When the parts of a training step run, and when gradients and weights travel between GPUs at the same time.

    python dev/timeline.py --gpus 4 -e d12 -b 4 -t 1024        # draws timeline.png, prints milliseconds

The flags are those of train_gpt2_cuda.py. Times are the first rank's, from events in the captured step, on random
tokens with learning rate 0: medians of 20 steps. `gradients 3 fcw` and `weights 3` are transfers of layer 3's matrices;
without a number, of the rest: embeddings, biases, layernorms. `add` accumulates the gradients of a micro-batch that is
not the last; `norm` and `adamw` are for some layers, or all. Communication that is not hidden shows in the main stream:
as a forward pass longer than on one GPU, because it waits for weights, or as a gap before `norm` or `adamw`, while the
last gradients travel.
"""

import os
import statistics
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np

import train_gpt2_cuda as cuda
from llmc.gpu.device import cp, describe_gpu, open_gpu
from llmc.errors import run_main
from llmc.gpu.trainer import open_trainer
from llmc.resume import read_start
from llmc.gpu.ranks import check_alike, on_ranks
from plot_log import picture

PICTURE, STEPS = "timeline.png", 20
STREAMS = {"main": "compute", "comm": "between GPUs"}  # name -> its label
COLORS = {"forward": "C0", "backward": "C1", "add": "C5", "norm": "C6", "adamw": "C2",
          "weights": "C4", "gradients": "C3"}


def time_spans(trainer, steps):
    """Return {(name, stream): (begin, end)}: medians in ms since the step's first forward pass began."""
    device, settings, rng = trainer.device, trainer.settings, np.random.default_rng(0)
    found = {}
    for step in range(3 + steps):
        device.spans = [] if trainer.graph is None else device.spans
        shape = settings.own_micro_steps, 2, settings.B, settings.T
        batches = rng.integers(0, trainer.config.V, shape, dtype=np.int32)
        trainer.end_step(trainer.begin_step(batches, 0.0))
        if step >= 3:
            first = next(before for name, _, before, _ in device.spans if name == "forward 0")
            for name, stream, *events in device.spans:
                times = [cp.cuda.get_elapsed_time(first, event) for event in events]
                found.setdefault((name, stream), []).append(times)
    return {span: tuple(map(statistics.median, zip(*times))) for span, times in found.items()}


def draw(spans, title):
    with picture(PICTURE) as axes:
        kinds, length = set(), max(end for _, end in spans.values())
        for (name, stream), (begin, end) in spans.items():
            row, (kind, *number) = list(STREAMS).index(stream), name.split()
            axes.barh(row, end - begin, left=begin, height=0.8, color=COLORS[kind], edgecolor=axes.get_facecolor(),
                      label=None if kind in kinds else kind)
            kinds.add(kind)
            text = " ".join(number)
            if end - begin > 0.012 * len(text) * length:
                axes.text((begin + end) / 2, row, text, ha="center", va="center", fontsize=7)
        axes.set_yticks(range(len(STREAMS)), STREAMS.values())
        axes.set_ylim(len(STREAMS), -0.5)
        axes.legend(loc="lower center", ncol=len(kinds), frameon=False, fontsize=9, columnspacing=1, handlelength=1)
        axes.set_xlabel("ms")
        axes.set_title(title, fontsize=10)


def work(settings, ranks):
    gpu = open_gpu(settings.arch, ranks.local_rank)
    settings = cuda.resolve_auto(settings, gpu.arch)
    settings.sample_every = 0
    config, params, _ = read_start(settings, None, None, cuda.GPT2)
    check_alike(ranks, gpu, settings, config, params)
    trainer = open_trainer(cuda.GPT2, gpu, config, params, settings, ranks)
    trainer.device.spans = []
    trainer.prepare()
    trainer.device.spans = list({span[:2]: span for span in trainer.device.spans}.values())  # the graph's come last
    spans = time_spans(trainer, STEPS)
    trainer.close()
    if ranks.is_first:
        title = f"{describe_gpu(gpu, ranks.size)}, {settings.model}, B={settings.B} a GPU, T={settings.T}"
        print(f"{title}\n{'':<22} {'begin':>9} {'end':>9} {'ms':>9}")
        for (name, _), (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
            print(f"{name:<22} {begin:>9.3f} {end:>9.3f} {end - begin:>9.3f}")
        draw(spans, title)
    return 0


def main():
    return on_ranks(cuda.CudaSettings, "Draw when the parts of a training step run.", work)


if __name__ == "__main__":
    run_main(main)
