#!/usr/bin/env bash
# nanoGPT's shakespeare_char: a model of 11 million parameters writes Shakespeare, character by
# character; on a CPU, one of 3 million. It is the speed run's: GPT-2's learns this little text by
# heart before it gets as far (1.62). Small batches and weight decay are all that keeps it from that.
#
# Needs:   a GPU, or a CPU with 5 GB of memory; 0.5 GB of disk
# Takes:   6 s on an H200, the first time 11; 12 minutes on two cores of an AMD EPYC
# Reaches: validation loss 1.414, 1.413, 1.417 with three seeds; on a CPU 1.51, 1.54 after ten
#          minutes. nanoGPT: 1.47 in 5,000 steps, with dropout, on a GPU; by its CPU recipe 1.88
#
# When run again, it resumes from the newest checkpoint. Extra flags, such as -x 50 but not -o, go to the trainer.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

trainer=train_speedrun.py size="-e s4 -b 24 -t 128 -x 700"
[[ $(nvidia-smi -L 2> /dev/null) == GPU* ]] && python -m llmc.gpu.device \
    && trainer=train_speedrun_cuda.py size="-e s6 -b 16 -t 256 -x 1000"

[ -e data/tiny_shakespeare.txt ] || python prepro_tinyshakespeare.py
[ -e data/shakespeare_char_train.bin ] || python prepro_text.py data/tiny_shakespeare.txt --vocabulary chars \
    --val_fraction 0.1 --output data/shakespeare_char

python $trainer $size -i data/shakespeare_char --shuffle 1 --spread 1 -c 0.2 -o runs/shakespeare_char \
    -v 100 -m 64 -s 200 -g 200 --final_reports 1 -n 200 -nk 2 -y 1 "$@"

python evaluate.py runs/shakespeare_char --data data/shakespeare_char
python generate.py runs/shakespeare_char --prompt "ROMEO:" --tokens 240 --temperature 0.8
