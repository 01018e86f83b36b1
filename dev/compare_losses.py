"""
The losses of train_gpt2_cuda.py beside PyTorch's, from the same weights over the same batches; without a GPU, those of
train_gpt2.py. If matplotlib is installed, losses.png shows them.

    python dev/compare_losses.py -e d2 -i data/pyprose -x 100           # on a CPU: a minute
    python dev/compare_losses.py -e gpt2_d12.bin                        # bfloat16, one epoch, B=4, T=1024
    python dev/compare_losses.py -e gpt2_d12.bin --dtype float32        # TF32 matmuls; --tf32 0: float32 ones
    python dev/compare_losses.py -e d12 -i "data/corpus/corpus_train_*.bin" -b 64 -d 524288 -x 1500 -l 6e-4 -u 50 \\
        -k cosine -c 0.1 --grad_clip 1 --run runs/long --updates 500 --fast 1     # a run's first losses

The flags are those of the trainer, and three more. PyTorch runs twice. If ours is bfloat16, it runs in float32
and in bfloat16 under autocast; with --fast 1, for long runs, both are compiled and float32 has TF32 matmuls. If ours is
float32, both runs have matmuls like ours, TF32 or float32, but the second uses other kernels: one sequence of the batch
at a time, so that cuBLAS chooses for other shapes, F.scaled_dot_product_attention, fused AdamW, and the channels of the
model permuted, which changes nothing but the rounding of every sum.

The gap between the two runs is the effect of rounding alone. Our error is the difference from the nearer of the two.
The exit status is 0 if the largest error and the root mean square over the steps are no larger than the gap's (plus the
last printed digit), and in bfloat16 the mean of our last ten losses is within 0.02 of that of PyTorch in float32.
"""

import contextlib
import dataclasses
import os
import re
import sys
from dataclasses import dataclass
from typing import ClassVar

from root import ROOT, output_of
import numpy as np
import torch
from tqdm import tqdm

from llmc.dataloader import open_data
from llmc.errors import UserError, import_package, run_main
from llmc.files import open_input
from llmc.resume import read_start
from llmc.schedulers import learning_rate_at
from llmc.settings import Settings, field_flags, option, parse_settings
from llmc.tensors import views
from llmc.tokenizer import load_tokenizer
from reference import to_reference
from train_gpt2 import GPT2
from train_gpt2_cuda import CudaSettings

TRAINED, PROGRAM, DEVICE = ((CudaSettings, "train_gpt2_cuda.py", "cuda") if torch.cuda.is_available() else
                            (Settings, "train_gpt2.py", "cpu"))
SCORES = 16 << 20  # attention scores, B*T*T, that PyTorch may keep at a time, where it stores them


@dataclass
class Comparison(TRAINED):
    """The settings of a training run, and what to compare."""

    run: str = option("", group="comparison", help="the directory of our run with these flags, if it was made")
    updates: int = option(0, group="comparison", help="compare so many updates (0: all)")
    fast: int = option(0, group="comparison", choices=(0, 1),
                       help="1: compile PyTorch, and let its float32 run use TF32 matmuls (bfloat16 only)")

    AT_LEAST: ClassVar = {**TRAINED.AT_LEAST, "updates": 0}


def reorder_channels(config, params, seed):
    """Permute the C channels of the residual stream: the same function, but rounded differently."""
    order = np.random.default_rng(seed).permutation(config.C)
    reordered = views(params.table, params.buffer.copy())
    for name in params.table:
        tensor = getattr(params, name)
        if name in ("attprojw", "fcprojw"):  # these write to the residual stream
            getattr(reordered, name)[:] = tensor[:, order]
        elif name not in ("qkvb", "fcb"):  # the others read from it, or lie along it
            getattr(reordered, name)[:] = tensor[..., order]
    return reordered


def run_ours(settings):
    """Return our losses: read from --run, or those of a run started here."""
    if settings.run:
        with open_input(os.path.join(settings.run, "main.csv"), "expected the directory of a run, made with -o") as f:
            losses = np.atleast_1d(np.genfromtxt(f, delimiter=",", names=True)["train_loss"])
        if not np.isfinite(losses).any():
            raise UserError(f"{settings.run}: no training loss in it yet")
        return losses[np.isfinite(losses)].tolist()
    command = [sys.executable, os.path.join(ROOT, PROGRAM), *flags_of(settings)]
    return [float(loss) for loss in re.findall(r"^step .*train loss (\S+)", output_of(command), re.MULTILINE)]


def flags_of(settings):
    """The flags of our run, which prints a line a step. All are given, because the defaults of -e dN are others."""
    flags = ["-v", "0", "-s", "0", "--final_reports", "0", "--print_every", "1", "--lines", "llmc"]
    for field in dataclasses.fields(TRAINED):
        flag, value = field_flags(field)[0], getattr(settings, field.name)
        if flag not in flags and value is not False and value != "":
            flags += [flag, *([] if value is True else [str(value)])]
    return flags


def make_optimizer(model, settings, fused):
    decays, rest = ([p for p in model.parameters() if (p.dim() > 1 or settings.decay == "all") == decays]
                    for decays in (True, False))
    return torch.optim.AdamW([{"params": decays, "weight_decay": settings.weight_decay},
                              {"params": rest, "weight_decay": 0.0}], lr=settings.learning_rate,
                             betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=fused or None)


def run_pytorch(settings, updates, name, tf32=False, autocast=False, others=False, fast=False):
    """Return the loss of each update. others: use other kernels, and another order of sums. fast: compile."""
    config, params, _ = read_start(settings, None, load_tokenizer(settings), GPT2)
    params = reorder_channels(config, params, seed=0) if others else params
    fused = others or autocast or fast
    rows = 1 if others else settings.B if autocast else 32 if fast else max(1, SCORES // settings.T**2)  # at a time
    torch.backends.cuda.matmul.allow_tf32 = tf32
    model = to_reference(config, params, flash=fused).to(DEVICE)
    optimizer = make_optimizer(model, settings, fused)
    if fast:
        model = torch.compile(model)
    loader, losses = open_data(dataclasses.replace(settings, val_every=0), config.V)[0], []  # no validation
    for update in tqdm(range(updates), desc=f"PyTorch, {name}", leave=False, disable=None):
        optimizer.zero_grad(set_to_none=True)
        mean = 0.0
        for _ in range(settings.micro_steps):
            batch = [torch.from_numpy(np.ascontiguousarray(ids)).long().to(DEVICE).split(rows)
                     for ids in loader.next_batch()]
            for x, y in zip(*batch):
                with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                    loss = model(x, y)[1] * (len(x) / settings.B / settings.micro_steps)
                loss.backward()
                mean += loss.item()
        if settings.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(settings, update)
        optimizer.step()
        losses.append(mean)
    return losses


def largest_and_typical(differences):
    """(largest, root mean square) of the differences of two curves, step by step."""
    return np.array([np.max(differences), np.sqrt(np.mean(np.square(differences)))])


def main():
    settings = parse_settings(Comparison, "Compare our losses with PyTorch's.")
    if DEVICE == "cpu":
        settings.dtype, settings.tf32 = "float32", 0
    settings.dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
    if settings.fast and settings.dtype != "bfloat16":
        raise UserError("--fast 1: this compares float32 runs: pass --fast 0")
    ours = np.array(run_ours(settings))
    settings.fit_to_text(-(-len(ours) // 10))
    settings.steps = settings.steps or len(ours)
    ours = ours[: settings.updates or len(ours)]
    if settings.dtype == "bfloat16":
        fast = bool(settings.fast)
        rivals = {"TF32" if fast else "float32": dict(tf32=fast, fast=fast), "autocast": dict(autocast=True, fast=fast)}
        described = "bfloat16"
    else:
        rivals = {"PyTorch": dict(tf32=bool(settings.tf32)), "others": dict(tf32=bool(settings.tf32), others=True)}
        described = f"{'TF32' if settings.tf32 else 'float32'} matmuls"
    curves = [np.array(run_pytorch(settings, len(ours), name, **options)) for name, options in rivals.items()]
    one, two = curves[0], curves[-1]

    gap, error = np.abs(one - two), np.minimum(np.abs(ours - one), np.abs(ours - two))
    okay = bool((largest_and_typical(error) <= largest_and_typical(gap) + 1e-6).all())
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    shape = f"B={settings.B} T={settings.T}" + f" -d {settings.total_batch_size}" * (settings.micro_steps > 1)
    print(f"{device}, PyTorch {torch.__version__}, {settings.model}, {shape}, {described}")
    columns = [*curves, gap, error]
    print(" ".join([f"{'step':>4} {'ours':>10}", *(f"{name:>10}" for name in (*rivals, "gap", "our error"))]))
    for i in [*range(0, len(ours), 3 * max(8, len(ours) // 10)), len(ours) - 1]:
        print(" ".join([f"{i + 1:>4} {ours[i]:>10.6f}", *(f"{column[i]:>10.6f}" for column in columns)]))
    with contextlib.suppress(UserError):
        plot = import_package("matplotlib.pyplot", "losses.png")
        plot.plot(np.transpose([ours, *curves]), label=["ours", *rivals])
        plot.legend()
        plot.savefig("losses.png")
    for what, allowed, found in zip(("largest", "root mean square"), largest_and_typical(gap),
                                    largest_and_typical(error)):
        print(f"{what} over {len(ours)} steps: gap {allowed:.6f}, our error {found:.6f}")
    final = {name: float(np.mean(losses[-10:])) for name, losses in zip(("ours", *rivals), (ours, *curves))}
    if settings.dtype == "bfloat16":
        print("mean of the last ten: " + ", ".join(f"{name} {mean:.4f}" for name, mean in final.items()))
        okay &= abs(final["ours"] - final[next(iter(rivals))]) <= 0.02
    print(f"overall okay: {int(okay)}")
    return 0 if okay else 1


if __name__ == "__main__":
    run_main(main)
