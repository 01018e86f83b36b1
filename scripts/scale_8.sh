#!/usr/bin/env bash
# GPT-2 124M and 1558M on 1, 4 and 8 GPUs of one machine: speed, the same bits, and a timeline of one step.
#
# Needs:   8 GPUs with 63 GiB each, requirements-test.txt; no data
# Takes:   twenty minutes
# Reaches: not yet measured
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

python dev/bench.py scale --gpus 1 4 8 "$@"
python -m pytest tests/test_scale_cuda.py -k "same_bits and (fp8 or stochastic)"
python dev/timeline.py --gpus 8 -e d12 -b 4 -t 1024
