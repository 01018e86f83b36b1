#!/usr/bin/env bash
# GPT-2 1558M from random weights, on 33.6 billion tokens of FineWeb-Edu, with llm.c's settings.
#
# Needs:   one GPU with 70 GiB of memory (-b 4: 41). An update is 64 batches of 16 x 1024 tokens, accumulated (-d).
#          68 GB of disk for the data, 65 GB for checkpoints of 22 GB (the newest two, and one being written),
#          and 25 GB of host memory while one is written
# Takes:   6.8 days on an H200, at 56,800 tokens/s; plus validation, HellaSwag and checkpoints
# Reaches: for comparison, OpenAI's GPT-2 1558M: validation loss 2.8313, HellaSwag 0.4889
#
# When run again, it resumes from the newest checkpoint. Extra flags, but not -o, go to the trainer, like this:
# scripts/run_gpt2_1558M.sh -b 4
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

[ -e data/edu_fineweb100B/edu_fineweb_train_000336.bin ] || python prepro/fineweb.py --edu --size 100B --shards 336
[ -e data/hellaswag_val.bin ] || python prepro/hellaswag.py

python train_gpt2_cuda.py -e d48 -i "data/edu_fineweb100B/edu_fineweb_train_*.bin" --shuffle 1 --spread 0 \
    -o runs/gpt2_1558M -b 16 -t 1024 -d 1048576 -x 32000 -l 6e-4 -u 700 -k cosine -q 0.1 -c 0.1 --beta2 0.95 \
    --grad_clip 1 -sl 7 -sg 7 -v 250 --hellaswag 1 -s 5000 -g 384 -n 200 -nk 2 -y 1 "$@"

python evaluate.py runs/gpt2_1558M --data "data/edu_fineweb100B/edu_fineweb_val_*.bin" --tokens 10000000 \
    --hellaswag data/hellaswag_val.bin
python generate.py runs/gpt2_1558M --prompt "The history of the bicycle" --tokens 200 --top_k 50 --samples 3
