#!/usr/bin/env bash
# A Llama 3 of 114 million parameters from random weights, on the data and with the settings of run_gpt2.sh 124M.
#
# Needs:   one GPU with 26 GiB of memory (-b 32: 14). An update is 8 batches of 64 x 1024 tokens, accumulated (-d).
#          21 GB of disk for the data, 7 GB for checkpoints of 1.6 GB (the newest three, and one being written)
# Takes:   4.4 hours on an H100, computed from the 654,000 tokens/s of doc/llama3.md
# Reaches: not run to its end yet
#
# When run again, it resumes from the newest checkpoint. Extra flags, but not -o, go to the trainer, like this:
# scripts/run_llama3_114M.sh -b 32
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

[ -e data/fineweb10B/fineweb_train_000103.bin ] || python prepro/fineweb.py
[ -e data/hellaswag_val.bin ] || python prepro/hellaswag.py

python train_llama3_cuda.py -e l12 -i "data/fineweb10B/fineweb_train_*.bin" --shuffle 1 --spread 0 \
    -o runs/llama3_114M -b 64 -t 1024 -d 524288 -x 19560 -l 6e-4 -u 700 -k cosine -q 0 -c 0.1 --beta2 0.95 \
    --grad_clip 1 -v 250 --hellaswag 1 -s 5000 -g 144 -n 1000 -nk 3 -y 1 "$@"

python evaluate.py runs/llama3_114M --data "data/fineweb10B/fineweb_val_*.bin" --tokens 10000000 \
    --hellaswag data/hellaswag_val.bin
python generate.py runs/llama3_114M --prompt "The history of the bicycle" --tokens 200 --top_k 50 --samples 3
