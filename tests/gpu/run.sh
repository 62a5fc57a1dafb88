#!/usr/bin/env bash
# Checks the GPU sampler on a real GPU in under five minutes: what is there, what calls cost, and whether bytes are right.
#
#   bash tests/gpu/run.sh [FOLDER]      FOLDER (default: gpu-report) gets report.json and recording.jsonl
#
# Needs a driver, Python 3.10 or later with nvidia-ml-py, and PyTorch with CUDA for the copies (without it they are left out, and
# said so). Nothing is installed where these are there already. Copy recording.jsonl to tests/golden/gpu/<product>.jsonl.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-gpu-report}
python=${PYTHON:-python3}
if [ -x .venv/bin/python ] && .venv/bin/python -c 'import torch' 2>/dev/null; then python=.venv/bin/python; fi
if ! "$python" -c 'import pynvml, rich' 2>/dev/null; then
    "$python" -m venv --system-site-packages "$out/.venv"
    python=$out/.venv/bin/python
    "$python" -m pip install -q nvidia-ml-py rich
fi
mkdir -p "$out"
PYTHONPATH=sidecar:tests timeout 290 "$python" -m gpu.check "$out"
