#!/usr/bin/env bash
# GPT-2 124M from random weights, on one epoch of FineWeb's 10 billion tokens, with llm.c's settings.
#
# Needs:   one GPU with 28 GiB of memory (-b 32: 16). An update is 8 batches of 64 x 1024 tokens, accumulated (-d).
#          21 GB of disk for the data, 7 GB for checkpoints of 1.7 GB (the newest three, and one being written)
# Takes:   4.4 hours on an H200, computed from 646,000 tokens/s; plus validation, HellaSwag and checkpoints
# Reaches: not run to its end yet; llm.c's curve: validation loss 6.17 at step 250, 4.32 at 1000, 3.55 at 5000, 3.39 at
#          10000, 3.27 at 19560 (OpenAI's GPT-2 124M: 3.4250, and HellaSwag 0.2945)
#
# When run again, it resumes from the newest checkpoint. Extra flags, but not -o, go to the trainer, like this:
# scripts/run_gpt2_124M.sh -b 32
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

[ -e data/fineweb10B/fineweb_train_000103.bin ] || python prepro/fineweb.py
[ -e data/hellaswag_val.bin ] || python prepro/hellaswag.py

python train_gpt2_cuda.py -e d12 -i "data/fineweb10B/fineweb_train_*.bin" --shuffle 1 --spread 0 -o runs/gpt2_124M \
    -b 64 -t 1024 -d 524288 -x 19560 -l 6e-4 -u 700 -k cosine -q 0 -c 0.1 --beta2 0.95 --grad_clip 1 \
    -v 250 --hellaswag 1 -s 5000 -g 144 -n 1000 -nk 3 -y 1 "$@"

python evaluate.py runs/gpt2_124M --data "data/fineweb10B/fineweb_val_*.bin" --tokens 10000000 \
    --hellaswag data/hellaswag_val.bin
python generate.py runs/gpt2_124M --prompt "The history of the bicycle" --tokens 200 --top_k 50 --samples 3
