"""
The losses of train_gpt2_cuda.py beside those of PyTorch, from the same weights over the same batches of tiny_shakespeare.

    python dev/compare_losses.py -e gpt2_d12.bin            # one epoch, B=4, T=1024, TF32 products; needs a GPU
    python dev/compare_losses.py -e gpt2_d12.bin --tf32 0

PyTorch runs twice, the second time with float32 products whatever --tf32 says, with the model's channels in another order
(which changes nothing but the rounding of every sum), F.scaled_dot_product_attention and fused AdamW. How far the two
come apart at most is what rounding alone does over an epoch. Exit status 0 when our losses are, in each step, no farther than
that from the nearer of the two (and the last printed digit).
"""

import argparse
import os
import re
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import train_gpt2  # noqa: F401  (first: it tells OpenBLAS how to run, before NumPy is imported)

import numpy as np
import torch
from tqdm import tqdm

from export_weights import ADAMW, adamw, to_reference
from test_gpt2 import reorder_channels
from train_gpt2 import DataLoader, UserError, read_model, run_main


def run_ours(args):
    command = [sys.executable, os.path.join(ROOT, "train_gpt2_cuda.py"), "-e", args.e, "-i", args.i, "-b", str(args.b), "-t", str(args.t),
               "-v", "0", "-s", "0", "--final_reports", "0", "--dtype", "float32", "--tf32", str(args.tf32)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return [float(loss) for loss in re.findall(r"^step .*train loss (\S+)", done.stdout, re.MULTILINE)]


def run_pytorch(args, steps, best):
    config, params = read_model(args.e)
    params = reorder_channels(config, params, seed=0) if best else params
    torch.backends.cuda.matmul.allow_tf32 = bool(args.tf32) and not best
    model = to_reference(config, params, flash=best).cuda()
    optimizer = adamw(model, ADAMW, **({"fused": True} if best else {}))
    loader, losses = DataLoader([f"{args.i}_train.bin"], config.V, args.b, args.t), []
    for _ in tqdm(range(steps), desc=f"PyTorch{', reordered' if best else ''}", leave=False):
        x, y = (torch.from_numpy(np.ascontiguousarray(ids)).long().cuda() for ids in loader.next_batch())
        loss = model(x, y)[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("-e", default="gpt2_124M.bin", help="model checkpoint")
    parser.add_argument("-i", default="data/tiny_shakespeare", help="prefix of the token files")
    parser.add_argument("-b", type=int, default=4, help="B")
    parser.add_argument("-t", type=int, default=1024, help="T")
    parser.add_argument("--tf32", type=int, choices=(0, 1), default=1, help="TF32 products")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU, and this comparison needs one")
    ours = np.array(run_ours(args))
    written, best = (np.array(run_pytorch(args, len(ours), best)) for best in (False, True))

    apart, off = np.abs(written - best), np.minimum(np.abs(ours - written), np.abs(ours - best))
    products = "TF32" if args.tf32 else "float32"
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {args.e}, B={args.b} T={args.t}, {products} products")
    print(f"{'step':>4} {'ours':>10} {'PyTorch':>10} {'float32':>12} {'PyTorch apart':>14} {'ours off':>10}")
    for i in [*range(0, len(ours), 8), len(ours) - 1]:
        print(f"{i + 1:>4} {ours[i]:>10.6f} {written[i]:>10.6f} {best[i]:>12.6f} {apart[i]:>14.6f} {off[i]:>10.6f}")
    print(f"largest over {len(ours)} steps: PyTorch apart {apart.max():.6f}, ours off {off.max():.6f}")
    okay = bool(off.max() <= apart.max() + 1e-6)
    print(f"overall okay: {int(okay)}")
    return 0 if okay else 1


if __name__ == "__main__":
    run_main(main)
