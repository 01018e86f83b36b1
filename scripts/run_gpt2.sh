#!/usr/bin/env bash
# GPT-2 from random weights on FineWeb, with llm.c's settings: scripts/run_gpt2.sh SIZE, with one of these sizes.
#
#             tokens                       GPU memory           an update         disk: data, checkpoints   on one H200
#     124M    10.3 billion, one epoch      28 GiB (-b 32: 16)     524,288 tokens   21 GB,  7 GB             4.4 hours
#     350M    31.5 billion                 63 GiB (-b 32: 35)     524,288          64 GB, 20 GB             37 hours
#     774M    150 billion, 1.5 epochs      64 GiB (-b 16: 40)     524,288         200 GB, 44 GB             16 days
#     1558M   33.6 billion of FineWeb-Edu  70 GiB (-b 4: 41)    1,048,576          68 GB, 65 GB             6.9 days
#
# None of these runs has been made to its end. The times are computed from the speed of a few steps, without validation,
# HellaSwag and checkpoints. A checkpoint also needs host memory while it is written: 13 GB at 774M, 25 GB at 1558M.
# To compare with: llm.c's curve for 124M has validation loss 6.17 at step 250, 4.32 at 1000, 3.55 at 5000, 3.39 at
# 10000, 3.27 at 19560. OpenAI's models have 3.4250, 3.0831, 3.0006, 2.8313, and HellaSwag 0.2945, 0.3752, 0.4320,
# 0.4889.
#
# When run again, it resumes from the newest checkpoint. Extra flags, but not -o, go to the trainer, like this:
# scripts/run_gpt2.sh 124M -b 32
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

size=${1-}
common=(-q 0 -v 250 -s 5000 -g 144 -n 1000 -nk 3)
case $size in
124M)
    data=data/fineweb10B/fineweb last=000103 get=(--size 10B)
    flags=(-e d12 -b 64 -d 524288 -x 19560 -l 6e-4) ;;
350M)
    data=data/fineweb_350M/fineweb last=000315 get=(--size 100B --shards 315 --output data/fineweb_350M)
    flags=(-e d24 -b 64 -d 524288 -x 60000 -l 3e-4) ;;
774M)
    data=data/fineweb_774M/fineweb last=001000 get=(--size 100B --shards 1000 --output data/fineweb_774M)
    flags=(-e d36 -b 32 -d 524288 -x 286102 -l 2.5e-4 -n 500) ;;
1558M)
    data=data/edu_fineweb100B/edu_fineweb last=000336 get=(--edu --size 100B --shards 336)
    flags=(-e d48 -b 16 -d 1048576 -x 32000 -l 6e-4 -q 0.1 -sl 7 -sg 7 -g 384 -n 200 -nk 2) ;;
*)
    echo "run_gpt2.sh: error: size '$size': expected 124M, 350M, 774M or 1558M" >&2
    exit 1 ;;
esac
shift

[ -e "${data}_train_$last.bin" ] || python prepro/fineweb.py "${get[@]}"
[ -e data/hellaswag_val.bin ] || python prepro/hellaswag.py

python train_gpt2_cuda.py -i "${data}_train_*.bin" --shuffle 1 --spread 0 -o "runs/gpt2_$size" -t 1024 -u 700 \
    -k cosine -c 0.1 --beta2 0.95 --grad_clip 1 --hellaswag 1 -y 1 "${common[@]}" "${flags[@]}" "$@"

python evaluate.py "runs/gpt2_$size" --data "${data}_val_*.bin" --tokens 10000000 --hellaswag data/hellaswag_val.bin
python generate.py "runs/gpt2_$size" --prompt "The history of the bicycle" --tokens 200 --top_k 50 --samples 3
