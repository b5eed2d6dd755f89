#!/usr/bin/env bash
# The tests that need a GPU, in under eight minutes. Other Python: PYTHON=python3 scripts/gpu_check.sh
set -euo pipefail
cd "$(dirname "$0")/.."

LIMIT_SECONDS=${LIMIT_SECONDS:-480}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
unset PYTHONDONTWRITEBYTECODE

"$PYTHON" - <<'CHECK'
import sys
import torch

if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no GPU on this machine; these tests need one (make test does not)")
for index in range(torch.cuda.device_count()):
    device = torch.cuda.get_device_properties(index)
    print(f"GPU {index}: {device.name}, {device.total_memory / 2**30:.0f} GiB, torch {torch.__version__}")
CHECK

status=0
timeout --signal=INT --kill-after=10 "$LIMIT_SECONDS" "$PYTHON" -m pytest -m gpu -p no:cacheprovider "$@" || status=$?
if [ "$status" -eq 5 ]; then
  echo "no test is marked gpu: nothing was checked" >&2
elif [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
  echo "stopped after $LIMIT_SECONDS seconds" >&2
fi
exit "$status"
