#!/usr/bin/env bash
# nanoGPT's shakespeare_char: a GPT-2 of 11 million parameters writes Shakespeare, character by character.
#
# Needs:   a GPU, or a CPU with 5 GB of memory; 0.5 GB of disk
# Takes:   12 s on an H200, for the whole script; 75 minutes on two cores of an AMD EPYC
# Reaches: validation loss 1.62; nanoGPT reaches 1.47 in 5,000 steps, with dropout, which we do not have
#
# When run again, it resumes from the newest checkpoint. Extra flags, such as -x 50 but not -o, go to the trainer.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

trainer=train_gpt2.py
[[ $(nvidia-smi -L 2> /dev/null) == GPU* ]] && python -m llmc.gpu.device && trainer=train_gpt2_cuda.py

[ -e data/tiny_shakespeare.txt ] || python prepro_tinyshakespeare.py
[ -e data/shakespeare_char_train.bin ] || python prepro_text.py data/tiny_shakespeare.txt --vocabulary chars \
    --val_fraction 0.1 --output data/shakespeare_char

python $trainer -e d6 -i data/shakespeare_char --shuffle 1 --spread 1 -o runs/shakespeare_char \
    -b 64 -t 256 -x 600 -l 1e-3 -u 100 -k cosine -q 0.1 -c 0.1 --beta2 0.95 --grad_clip 1 \
    -v 100 -m 64 -s 200 -g 200 --final_reports 1 -n 200 -nk 2 -y 1 "$@"

python evaluate.py runs/shakespeare_char --data data/shakespeare_char
python generate.py runs/shakespeare_char --prompt "ROMEO:" --tokens 240 --temperature 0.8
