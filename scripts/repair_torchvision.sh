#!/usr/bin/env bash
# Makes torchvision importable in a virtual environment with torch for the CPU:
#
#     scripts/repair_torchvision.sh FOLDER/bin/python
#
# Its wheel is of CUDA: its library does not load, and then the import fails on the two operators that it goes on to
# describe. Their signatures are enough: processors of images and video use functions in Python alone.
set -euo pipefail
python=${1:?usage: repair_torchvision.sh PYTHON}
if ! "$python" -c "import torchvision" 2> /dev/null; then
  file=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torchvision/extension.py
  cat "$file" - > "$file.new" << 'EXTENSION'

for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
EXTENSION
  mv "$file.new" "$file"  # a new file: uv shares the old one with other environments
fi
"$python" -c "import torchvision"
