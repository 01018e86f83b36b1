#!/usr/bin/env bash
# A GPT-2 of 11 million parameters on the source code of Python's own standard library, bytes as tokens: no download.
#
# Needs:   a GPU, or a CPU with 5 GB of memory; 0.5 GB of disk
# Takes:   11 s on an H200, for the whole script; 2.6 hours on two cores of an AMD EPYC
# Reaches: validation loss 0.95
#
# When run again, it resumes from the newest checkpoint. Extra flags, but not -o, go to the trainer, like this:
# scripts/run_pystdlib.sh -x 50
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

trainer=train_gpt2.py
[[ $(nvidia-smi -L 2> /dev/null) == GPU* ]] && python -m llmc.gpu.device && trainer=train_gpt2_cuda.py

[ -e data/pystdlib_train.bin ] || python prepro/pystdlib.py

python $trainer -e d6 -i data/pystdlib --shuffle 1 --spread 1 -o runs/pystdlib \
    -b 64 -t 256 -x 1250 -l 1e-3 -u 100 -k cosine -q 0.1 -c 0.1 --beta2 0.95 --grad_clip 1 \
    -v 250 -m 64 -s 500 -g 200 --final_reports 1 -n 500 -nk 2 -y 1 "$@"

python evaluate.py runs/pystdlib --data data/pystdlib
python generate.py runs/pystdlib --prompt "def main(" --tokens 240 --temperature 0.8
