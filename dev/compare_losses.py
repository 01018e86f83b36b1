"""
The losses of train_gpt2_cuda.py beside PyTorch's, from the same weights over the same batches of tiny_shakespeare.

    python dev/compare_losses.py -e gpt2_d12.bin                        # bfloat16, one epoch, B=4, T=1024; needs a GPU
    python dev/compare_losses.py -e gpt2_d12.bin -b 32 -t 256 -x 500    # longer
    python dev/compare_losses.py -e gpt2_d12.bin --dtype float32        # TF32 matmuls; --tf32 0: float32 ones
    python dev/compare_losses.py -e gpt2_d12.bin --matmul kernels       # ours without cuBLASLt

PyTorch runs twice. Against bfloat16: in float32, and in bfloat16 under autocast. Against float32: both times with
matmuls like ours, TF32 or float32, the second time by other kernels: one sequence of the batch after the other, so that
cuBLAS has other shapes to choose for, F.scaled_dot_product_attention, fused AdamW, and the model's channels in another
order, which changes nothing but the rounding of every sum. The gap between the two runs is what rounding alone does.
Our error is the difference from the nearer of the two. Exit status 0 when it is, at most and on average (the root of
the mean square over the steps), no larger than the gap (and the last printed digit), and in bfloat16 the mean of our
last ten losses within 0.02 of that of float32.
"""

import argparse
import os
import re
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np
import torch
from tqdm import tqdm

from export_weights import ADAMW, adamw, to_reference
from llmc.checkpoint import read_model
from llmc.dataloader import DataLoader
from llmc.errors import UserError, run_main
from llmc.tensors import views
from train_gpt2 import parameter_table


def reorder_channels(config, params, seed):
    """The same model with the C channels of the residual stream in another order: the same function, rounded
    differently."""
    order = np.random.default_rng(seed).permutation(config.C)
    reordered = views(params.table, params.buffer.copy())
    for name in params.table:
        tensor = getattr(params, name)
        if name in ("attprojw", "fcprojw"):  # these write to the residual stream
            getattr(reordered, name)[:] = tensor[:, order]
        elif name not in ("qkvb", "fcb"):  # the others read from it, or lie along it
            getattr(reordered, name)[:] = tensor[..., order]
    return reordered


def run_ours(args):
    command = [sys.executable, os.path.join(ROOT, "train_gpt2_cuda.py"), "-e", args.e, "-i", args.i, "-b", str(args.b),
               "-t", str(args.t), "-x", str(args.x), "-v", "0", "-s", "0", "--final_reports", "0", "--lines", "llmc",
               "--dtype", args.dtype, "--tf32", str(args.tf32), "--matmul", args.matmul]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return [float(loss) for loss in re.findall(r"^step .*train loss (\S+)", done.stdout, re.MULTILINE)]


def run_pytorch(args, steps, name, tf32=False, autocast=False, others=False, device="cuda"):
    """The loss of each step. others: by other kernels, and sums in another order."""
    config, params = read_model(args.e, parameter_table)
    params = reorder_channels(config, params, seed=0) if others else params
    rows = 1 if others else args.b  # of the batch, at a time
    torch.backends.cuda.matmul.allow_tf32 = tf32
    model = to_reference(config, params, flash=others or autocast).to(device)
    optimizer = adamw(model, ADAMW, **({"fused": True} if others or autocast else {}))
    loader, losses = DataLoader([f"{args.i}_train.bin"], config.V, args.b, args.t), []
    for _ in tqdm(range(steps), desc=f"PyTorch, {name}", leave=False):
        batch = [torch.from_numpy(np.ascontiguousarray(ids)).long().to(device).split(rows)
                 for ids in loader.next_batch()]
        optimizer.zero_grad(set_to_none=True)
        mean = 0.0
        for x, y in zip(*batch):
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = model(x, y)[1] * (rows / args.b)
            loss.backward()
            mean += loss.item()
        optimizer.step()
        losses.append(mean)
    return losses


def largest_and_typical(differences):
    """(largest, root mean square) of the differences of two curves, step by step."""
    return float(np.max(differences)), float(np.sqrt(np.mean(np.square(differences))))


def within_band(ours, one, two):
    """(the gap between one and two, our error from the nearer of them, whether that is no larger); curves are
    (steps,)."""
    gap, error = np.abs(one - two), np.minimum(np.abs(ours - one), np.abs(ours - two))
    allowed, found = largest_and_typical(gap), largest_and_typical(error)
    return gap, error, all(f <= a + 1e-6 for f, a in zip(found, allowed))


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("-e", default="gpt2_124M.bin", help="model checkpoint")
    parser.add_argument("-i", default="data/tiny_shakespeare", help="prefix of the token files")
    parser.add_argument("-b", type=int, default=4, help="B")
    parser.add_argument("-t", type=int, default=1024, help="T")
    parser.add_argument("-x", type=int, default=0, help="steps (0: one epoch)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="ours")
    parser.add_argument("--tf32", type=int, choices=(0, 1), default=1, help="TF32 matmuls in float32")
    parser.add_argument("--matmul", choices=("auto", "cublaslt", "kernels"), default="auto",
                        help="our matmuls: see train_gpt2_cuda.py")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU, and this comparison needs one")
    ours = np.array(run_ours(args))
    if args.dtype == "bfloat16":
        rivals = {"float32": {}, "autocast": dict(autocast=True)}
        described = "bfloat16"
    else:
        rivals = {"PyTorch": dict(tf32=bool(args.tf32)), "others": dict(tf32=bool(args.tf32), others=True)}
        described = f"{'TF32' if args.tf32 else 'float32'} matmuls"
    one, two = (np.array(run_pytorch(args, len(ours), name, **options)) for name, options in rivals.items())

    gap, error, okay = within_band(ours, one, two)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {args.e}, B={args.b} T={args.t}, {described}")
    print(f"{'step':>4} {'ours':>10} {list(rivals)[0]:>10} {list(rivals)[1]:>10} {'gap':>10} {'our error':>10}")
    for i in [*range(0, len(ours), max(8, len(ours) // 10)), len(ours) - 1]:
        print(f"{i + 1:>4} {ours[i]:>10.6f} {one[i]:>10.6f} {two[i]:>10.6f} {gap[i]:>10.6f} {error[i]:>10.6f}")
    for what, allowed, found in zip(("largest", "root mean square"), largest_and_typical(gap),
                                    largest_and_typical(error)):
        print(f"{what} over {len(ours)} steps: gap {allowed:.6f}, our error {found:.6f}")
    if args.dtype == "bfloat16":
        final = [float(np.mean(losses[-10:])) for losses in (ours, one, two)]
        print(f"mean of the last ten: ours {final[0]:.4f}, float32 {final[1]:.4f}, autocast {final[2]:.4f}")
        okay &= abs(final[0] - final[1]) <= 0.02
    print(f"overall okay: {int(okay)}")
    return 0 if okay else 1


if __name__ == "__main__":
    run_main(main)
