#!/usr/bin/env bash
# Sets up SGLang's server for the CPU in a virtual environment of its own (3 GB):
#
#     scripts/install_sglang_cpu.sh FOLDER
#
# rollout=sglang is then told rollout.engine.servers.python=FOLDER/bin/python. PYTHON names another interpreter than python3,
# PIP another installer than pip, as PIP="uv pip".
set -euo pipefail
folder=${1:?usage: install_sglang_cpu.sh FOLDER}
"${PYTHON:-python3}" -m venv "$folder"
VIRTUAL_ENV=$(realpath "$folder")  # where uv installs
export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
installer=${PIP:-python -m pip}

# The last version that serves without sgl_kernel, which exists for GPUs only. Its own list of requirements is of GPUs.
$installer install --quiet \
  torch==2.13.0 transformers==5.12.1 xgrammar==0.2.1 compressed-tensors aiohttp fastapi uvicorn uvloop orjson msgspec \
  pyzmq psutil pybase64 pydantic python-multipart requests setproctitle tqdm pillow prometheus-client interegular \
  partial_json_parser einops scipy sentencepiece openai==2.6.1 openai-harmony==0.0.4 IPython dill gguf soundfile==0.13.1 \
  "mistral_common>=1.11.5" "llguidance>=0.7.11,<0.8"
$installer install --quiet --no-deps sglang==0.5.15 torchvision==0.28.0

"$(dirname "$0")/repair_torchvision.sh" python
# The processors of Qwen's models of images import this module, which reads operators of sgl_kernel when it is imported.
models=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/sglang/srt/models
sed -i 's/^if _is_cpu:$/if _is_cpu and hasattr(torch.ops.sgl_kernel, "fused_sigmoid_mul_cpu"):/' "$models/qwen3_5.py"
python -c "import sglang.launch_server, sglang.srt.multimodal.processors.qwen_vl"
