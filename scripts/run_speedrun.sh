#!/usr/bin/env bash
# The speed runs' GPT (162M parameters) with Muon, on 1.7 billion tokens of FineWeb: modded-nanogpt's third track, whose
# program reaches a validation loss of 3.28 so.
#
# It has not been made to its end. Computed: 24 GiB of GPU memory (-b 128: 44, -b 32: 14); on disk, 4 GB of data, 7 GB of
# checkpoints; with -b 128, 44 minutes on one H100, 34 with --dtype fp8, from the speed of a few updates.
#
# When run again, it resumes from the newest checkpoint. Extra flags, but not -o, go to the trainer: -b 128, --gpus 4.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

data=data/fineweb10B/fineweb
[ -e "${data}_train_000018.bin" ] || python prepro/fineweb.py --size 10B --shards 18

python train_speedrun_cuda.py -e s12 -i "${data}_train_*.bin" --shuffle 1 --spread 0 -o runs/speedrun -t 1024 -b 64 \
    -d 524288 -x 3250 -v 250 -m 20 -n 500 -nk 2 -y 1 "$@"

python evaluate.py runs/speedrun --data "${data}_val_*.bin" --tokens 10000000
python generate.py runs/speedrun --prompt "The history of the bicycle" --tokens 200 --top_k 50 --samples 3
