"""
Is the verdict of test_gpt2.py ever wrong? Runs it on drawn models, weights and batches: none may
fail.

    python dev/verdict.py                          # 200 draws on train_gpt2.py, twenty minutes on two cores
    python dev/verdict.py --backend cuda-bf16 -n 30 --seed 1000
    python dev/verdict.py --model llama3           # the same of Llama 3; or speedrun
    python dev/verdict.py --model d12 -n 10        # of GPT-2 124M, B=4, T=64, with new weights: two minutes each

A line per draw: sizes, standard deviation of the weights, the largest error as a fraction of its
tolerance, its tensor; at the end, quantiles. A draw that fails prints its rows; exit status 1.
"""

import argparse
import contextlib
import functools
import io

import root  # noqa: F401  (it finds the modules)
import numpy as np
from tqdm import tqdm

from llmc.checkpoint import padded
from llmc.errors import UserError, run_main
from llmc.tensors import allocate
from test_gpt2 import ADAMW_CHECK, SMOOTH, Yardstick, judge_update, require
from backends import BACKENDS, precision_of, replay, starting_weights
import train_llama3
from train_gpt2 import GPT2, random_model
from train_speedrun import Speedrun


def drawn(rng, config, table, B, T):
    """(config, params, x, y, std of the weights); norms and biases are far from 1 and 0, too."""
    params = allocate(table)
    std = float(np.exp(rng.uniform(np.log(0.02), np.log(0.3))))
    for name, row in params.table.items():
        getattr(params, name)[...] = rng.normal(row.ones, std, row.shape)
        if row.vocabulary:
            getattr(params, name)[config.V :] = 0.0
    return config, params, *rng.integers(0, config.V, (2, B, T), dtype=np.int32), std


def draw(seed, HS_multiple=4, page=GPT2):
    """Draw a GPT-2, or a speed run's GPT, and a batch: what `drawn` returns."""
    rng = np.random.default_rng(seed)
    while True:
        HS = HS_multiple * int(rng.integers(1, 17))
        NH = int(rng.integers(1, 9))
        L = int(rng.integers(1, 13))
        B = int(rng.integers(1, 8))
        T = int(2 ** rng.uniform(0, 7.5))
        V = int(50 * 2 ** rng.uniform(0, 5))
        if (16 <= HS * NH <= 512 and 8 * (page is Speedrun) <= HS <= 128
                and L * B * T * (HS * NH) ** 2 < 5e7):
            break
    config = page.Config(max(T, 8), V, L, NH, HS * NH, padded(V))
    return drawn(rng, config, page.parameter_table(config), B, T)


def draw_llama(seed, HS_multiple=2):
    """Draw the same of a Llama 3, with grouped queries, tied or not, RoPE scaled or not."""
    multiple = max(4, HS_multiple // 2)  # of C and F
    rng = np.random.default_rng(seed)
    while True:
        HS = HS_multiple * int(rng.integers(1, 1 + 64 // HS_multiple))
        NKV, G, L = *map(int, rng.integers(1, 5, 2)), int(rng.integers(1, 13))
        B = int(rng.integers(1, 8))
        T = int(2 ** rng.uniform(0, 7.5))
        V = int(50 * 2 ** rng.uniform(0, 5))
        C = multiple * int(rng.integers(4, 129))
        F = multiple * int(rng.integers(2, 257))
        if HS * NKV * G <= 512 and L * B * T * C * (C + F) < 1e8:
            break
    config = train_llama3.Config(max(T, 8), V, L, NKV * G, NKV, C, padded(V), F, HS,
                                 tied=int(rng.integers(2)),
                                 theta=float(10 ** rng.uniform(2, 6)),
                                 factor=8 * int(rng.integers(2)), original=int(rng.integers(8, 64)))
    return drawn(rng, config, train_llama3.parameter_table(config), B, T)


def draw_d12(seed, HS_multiple=None):
    """Draw the same for GPT-2 124M as training begins, B=4, T=64."""
    config, params = random_model("d12", 50257, seed)
    return config, params, *np.random.default_rng(seed).integers(0, config.V, (2, 4, 64),
                                                                 dtype=np.int32), 0.02


DRAWS = {"gpt2": draw, "llama3": draw_llama, "speedrun": functools.partial(draw, page=Speedrun),
         "d12": draw_d12}


def judge(backend, config, params, x, y, std):
    """Return (sizes, largest error as a fraction of its tolerance, its tensor, printed rows,
    whether all are green)."""
    params = starting_weights(params, precision_of(backend))
    yardstick = Yardstick(config, params, x, y, precision_of(backend))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        rows = replay(BACKENDS[backend](config, params, x, y, SMOOTH))
        okay = yardstick.judge(rows)
        okay &= judge_update(BACKENDS[backend](config, params, x, y, ADAMW_CHECK))
    sizes = (f"L{config.L} C{config.C} NH{config.NH}/{config.NKV} V{config.V} B{x.shape[0]}"
             f" T{x.shape[1]} std {std:.3f}")
    return sizes, *yardstick.worst(rows), printed.getvalue(), okay


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="numpy",
                        help="the trainer under test")
    parser.add_argument("--model", choices=tuple(DRAWS), default="gpt2", help="what to draw")
    parser.add_argument("-n", type=int, default=200, help="number of draws")
    parser.add_argument("--seed", type=int, default=0,
                        help="seed of the first draw; the next ones count up from it")
    args = parser.parse_args()
    if args.n < 1 or args.seed < 0:
        raise UserError(f"-n {args.n} --seed {args.seed}: expected at least 1 draw, and a seed of"
                        " at least 0")
    require(args.backend, Speedrun if args.model == "speedrun" else GPT2)
    parts = []
    red = 0
    for seed in tqdm(range(args.seed, args.seed + args.n), desc=args.backend, disable=None):
        # of HS; on a GPU, half of it of F
        multiple = {"numpy": (), "cuda-fp8": (32,)}.get(args.backend, (16,))
        sizes, part, name, printed, okay = judge(args.backend, *DRAWS[args.model](seed, *multiple))
        parts.append(part)
        red += not okay
        print(f"seed {seed}: {sizes}: {part:.2f} of what is allowed, in {name} "
              f" {'ok' if okay else 'FAIL'}")
        if not okay:
            print(printed)
    median, most, largest = np.quantile(parts, (0.5, 0.99, 1.0))
    print(f"{args.backend}: {args.n} draws, {red} red; largest error as a part of what is allowed:"
          f" median {median:.2f}, 99 percent {most:.2f}, largest {largest:.2f}")
    return int(red > 0)


if __name__ == "__main__":
    run_main(main)
