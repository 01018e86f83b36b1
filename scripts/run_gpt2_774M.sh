#!/usr/bin/env bash
# GPT-2 774M from random weights, on 150 billion tokens of FineWeb (one and a half epochs), with llm.c's settings.
#
# Needs:   one GPU with 64 GiB of memory (-b 16: 40). An update is 16 batches of 32 x 1024 tokens, accumulated (-d).
#          200 GB of disk for the data, 44 GB for checkpoints of 11 GB (the newest three, and one being written),
#          and 13 GB of host memory while one is written
# Takes:   15 days on an H200, at 117,000 tokens/s; plus validation, HellaSwag and checkpoints
# Reaches: for comparison, OpenAI's GPT-2 774M: validation loss 3.0006, HellaSwag 0.4320
#
# When run again, it resumes from the newest checkpoint. Extra flags, but not -o, go to the trainer, like this:
# scripts/run_gpt2_774M.sh -b 16
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

[ -e data/fineweb_774M/fineweb_train_001000.bin ] || python prepro/fineweb.py --size 100B --shards 1000 \
    --output data/fineweb_774M
[ -e data/hellaswag_val.bin ] || python prepro/hellaswag.py

python train_gpt2_cuda.py -e d36 -i "data/fineweb_774M/fineweb_train_*.bin" --shuffle 1 --spread 0 -o runs/gpt2_774M \
    -b 32 -t 1024 -d 524288 -x 286102 -l 2.5e-4 -u 700 -k cosine -q 0 -c 0.1 --beta2 0.95 --grad_clip 1 \
    -v 250 --hellaswag 1 -s 5000 -g 144 -n 500 -nk 3 -y 1 "$@"

python evaluate.py runs/gpt2_774M --data "data/fineweb_774M/fineweb_val_*.bin" --tokens 10000000 \
    --hellaswag data/hellaswag_val.bin
python generate.py runs/gpt2_774M --prompt "The history of the bicycle" --tokens 200 --top_k 50 --samples 3
