"""
When the parts of a training step run, and when gradients and weights travel between GPUs at the
same time.

    python dev/timeline.py --gpus 4 -e d12 -b 4 -t 1024        # prints ms, draws timeline.png, timeline-dark.png

The flags are those of train_gpt2_cuda.py. Times are the first rank's, from events in the captured
step, on random tokens with learning rate 0: medians of 20 steps. `gradients 3 fcw` and `weights 3`
are transfers of layer 3's matrices; without a number, of the rest: embeddings, biases, layernorms.
`add` accumulates the gradients of a micro-batch that is not the last. Communication that is not
hidden shows in the main stream: as a forward pass longer than on one GPU, because it waits for
weights, or as a gap before `norm` or `adamw`, while the last gradients travel.
"""

import contextlib
import datetime
import itertools
import statistics

import root  # noqa: F401  (it finds the modules)
import numpy as np

import train_gpt2_cuda as cuda
from llmc.gpu.device import check, cp, describe_gpu, driver, open_gpu
from llmc.errors import run_main
from llmc.gpu.trainer import open_trainer
from llmc.resume import read_start
from llmc.gpu.launcher import on_ranks
from plot_log import head, label_parts, light_and_dark

PICTURE, STEPS = "timeline.png", 20
ROWS = {"main": (2, "compute"), "comm": (0, "transfers between GPUs")}  # stream -> y, label
COLORS = {"forward": "C0", "backward": "C1", "add": "C5", "norm": "C3", "adamw": "C2",
          "weights": "C0",
          "gradients": "C1"}


@contextlib.contextmanager
def note(device, spans, name):
    """In place of Device.span: spans[name, stream, n] = events of the n-th time in a step, also in
    a graph's replay."""
    if name == "forward 0":
        spans.clear()
    stream = device.stream
    events = (cp.cuda.Event(), cp.cuda.Event())
    flag = driver.CUevent_record_flags(stream.is_capturing())  # 1: each replay records the event
    check(driver.cuEventRecordWithFlags(events[0].ptr, stream.ptr, flag))
    yield
    check(driver.cuEventRecordWithFlags(events[1].ptr, stream.ptr, flag))
    of = "comm" if stream is device.comm else "main"
    spans[name, of, sum(span[:2] == (name, of) for span in spans)] = events


def time_spans(trainer, spans, steps):
    """Return {(name, stream, n): (begin, end)}: medians in ms since the step's first forward pass
    began."""
    settings = trainer.settings
    rng = np.random.default_rng(0)
    found = {}
    for step in range(3 + steps):
        batches = rng.integers(0, trainer.config.V,
                               (settings.own_micro_steps, 2, settings.B, settings.T), np.int32)
        trainer.end_step(trainer.begin_step(batches, 0.0))
        first, _ = spans["forward 0", "main", 0]
        for span, events in spans.items() if step >= 3 else ():
            found.setdefault(span,
                             []).append([cp.cuda.get_elapsed_time(first, event)
                                         for event in events])
    return {span: tuple(map(statistics.median, zip(*times))) for span, times in found.items()}


def describe(kind, numbers, ms, length):
    """A picture's label of successive spans of a kind. numbers: of their layers; None: the rest."""
    if kind in ("weights", "gradients"):
        layers = [number for number in numbers if number]
        plural = f"s {layers[0]} to" if layers[1:] and layers[0] != layers[-1] else ""
        return f"{kind}\n" + ", ".join([f"layer{plural} {layers[-1]}"] * bool(layers) + ["rest"]
                                       * (None in numbers))
    return {"adamw": "AdamW"}.get(kind, kind) + f"\n{ms:.1f} ms" * (ms > 0.02 * length)


def draw(spans, machine):
    length = max(end for _, end in spans.values())
    busy = 0.0
    waits = []
    for begin, end in sorted(times for (_, stream, _), times in spans.items()
                             if stream == "main") + [(length, length)]:
        if begin - busy > 0.002 * length:  # more than between two launches
            waits.append((busy, begin))
        busy = max(busy, end)
    title = f"A step of {length:.1f} ms"
    alone = all(stream == "main" for _, stream, _ in spans)
    if not alone:
        title = (f"A GPU waits for transfers {sum(end - begin for begin, end in waits):.1f} ms in"
                 f" a{title[1:]}")
    for axes in light_and_dark(PICTURE, (8, 2.4 if alone else 3.7)):
        axes.set(xlim=(0, length or 1), ylim=(1 if alone else -1.3, 3.2), yticks=[])
        axes.set_xlabel("ms since the step began")
        axes.spines["left"].set_visible(False)
        head(axes, title, machine)
        for stream, (y, text) in list(ROWS.items())[: 1 if alone else 2]:
            axes.text(0, y + 0.47, text, fontsize=10, va="bottom")
            row = sorted((times, name.split()) for (name, of, _), times in spans.items()
                         if of == stream)
            parts = []
            for kind, group in itertools.groupby(row, lambda span: span[1][0]):
                times, names = zip(*group)
                for begin, end in times:
                    axes.barh(y, end - begin, left=begin, color=COLORS[kind], linewidth=0.5,
                              edgecolor=axes.get_facecolor())
                begin, end, ms = times[0][0], max(end
                                                  for _, end in times), sum(end - begin for begin, end in times)
                text = describe(kind, [(*name, None)[1] for name in names], ms, length)
                if len(times) == 1 and ms > 0.1 * length:
                    axes.text((begin + end) / 2, y, text, color=axes.get_facecolor(), ha="center",
                              va="center")
                else:
                    parts.append((begin, end, text, COLORS[kind]))
            label_parts(axes, parts, y + (0.5 if stream == "main" else -0.5), stream == "main")
        label_parts(axes, [(begin, end, f"waits {end - begin:.1f} ms", "C7") for begin, end in waits
                           if end - begin > 0.02 * length], 1.4, False)


def work(settings, ranks):
    gpu = open_gpu(settings.arch, ranks.local_rank)
    settings = cuda.resolve_auto(settings, gpu.arch)
    settings.sample_every = 0
    config, params, _ = read_start(settings, None, None, cuda.GPT2)
    ranks.check_alike(gpu, settings, config, params)
    trainer = open_trainer(cuda.GPT2, gpu, config, params, settings, ranks)
    noted = {}
    trainer.device.span = lambda name: note(trainer.device, noted, name)
    trainer.prepare()
    spans = time_spans(trainer, noted, STEPS)
    trainer.close()
    if ranks.is_first:
        machine = (f"{describe_gpu(gpu, ranks.size)}; {settings.model} in {settings.dtype},"
                   f" B={settings.B} on each GPU, T={settings.T}; {datetime.date.today()}")
        print(f"{machine}\n{'':<22} {'begin':>9} {'end':>9} {'ms':>9}")
        for (name, *_), (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
            print(f"{name:<22} {begin:>9.3f} {end:>9.3f} {end - begin:>9.3f}")
        draw(spans, machine)
    return 0


if __name__ == "__main__":
    run_main(lambda: on_ranks(cuda.CudaSettings, "Draw when the parts of a training step run.",
                              work))
