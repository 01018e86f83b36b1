#!/usr/bin/env bash
# GPT-2 350M from random weights, on 31.5 billion tokens of FineWeb, with llm.c's settings.
#
# Needs:   one GPU with 63 GiB of memory (-b 32: 35). An update is 8 batches of 64 x 1024 tokens, accumulated (-d).
#          64 GB of disk for the data, 20 GB for checkpoints of 5 GB (the newest three, and one being written)
# Takes:   35 hours on an H200, at 250,000 tokens/s; plus validation, HellaSwag and checkpoints
# Reaches: for comparison, OpenAI's GPT-2 350M: validation loss 3.0831, HellaSwag 0.3752
#
# When run again, it resumes from the newest checkpoint. Extra flags, but not -o, go to the trainer, like this:
# scripts/run_gpt2_350M.sh -b 32
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

[ -e data/fineweb_350M/fineweb_train_000315.bin ] || python prepro/fineweb.py --size 100B --shards 315 \
    --output data/fineweb_350M
[ -e data/hellaswag_val.bin ] || python prepro/hellaswag.py

python train_gpt2_cuda.py -e d24 -i "data/fineweb_350M/fineweb_train_*.bin" --shuffle 1 --spread 0 -o runs/gpt2_350M \
    -b 64 -t 1024 -d 524288 -x 60000 -l 3e-4 -u 700 -k cosine -q 0 -c 0.1 --beta2 0.95 --grad_clip 1 \
    -v 250 --hellaswag 1 -s 5000 -g 144 -n 1000 -nk 3 -y 1 "$@"

python evaluate.py runs/gpt2_350M --data "data/fineweb_350M/fineweb_val_*.bin" --tokens 10000000 \
    --hellaswag data/hellaswag_val.bin
python generate.py runs/gpt2_350M --prompt "The history of the bicycle" --tokens 200 --top_k 50 --samples 3
