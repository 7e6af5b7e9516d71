#!/usr/bin/env bash
# Collects the packages that scripts/gpu_check.py needs beside torch and transformers, as wheels in gpu_wheels/ (or the
# folder that is given), for a machine that reaches no registry: Python 3.10 or later on x86-64 with CUDA's torch.
# --no-download only checks what is in the folder; --check PYTHON runs gpu_check.py --cpu with it, in a new environment of
# this Python that has torch and transformers of such a machine and nothing else.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)
folder=$repo/gpu_wheels
download=yes
python=
while [ $# -gt 0 ]; do
  case $1 in
    --no-download) download=no ;;
    --check) python=${2:?--check needs a Python, such as python3.12}; shift ;;
    -*) echo "$1: no such option; there are --no-download and --check" >&2; exit 2 ;;
    *) folder=$1 ;;
  esac
  shift
done
machine=(torch==2.11.* transformers==5.17.*)
limit=$((60 * 1000 * 1000))
packages=(hydra-core omegaconf antlr4-python3-runtime tensordict cloudpickle pyvers rich markdown-it-py mdurl pygments
  liger-kernel)

if [ $download = yes ]; then
  mkdir -p "$folder"
  # --no-deps: torch, numpy, packaging and PyYAML are on the machine, with transformers. antlr4 has no wheel and is built here.
  python3 -m pip wheel -q --no-deps -c "$repo/constraints.txt" -w "$folder" "${packages[@]}"
  # Its wheel with compiled kernels is of the stable ABI, so one is right for every later Python.
  python3 -m pip download -q --no-deps -c "$repo/constraints.txt" --python-version 3.12 --implementation cp --abi abi3 \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --only-binary :all: -d "$folder" torchao
fi
total=0
for wheel in "$folder"/*.whl; do
  [ -f "$wheel" ] || { echo "$folder has no wheels" >&2; exit 1; }
  case $wheel in
    *-none-any.whl | *-abi3-*x86_64.whl) ;;
    *) echo "$(basename "$wheel") is built for one Python: only wheels for all of them can be carried" >&2; exit 1 ;;
  esac
  size=$(stat -c %s "$wheel")
  printf '%10d  %s\n' "$size" "$(basename "$wheel")"
  total=$((total + size))
done
printf '%10d  bytes in all, of %d\n' "$total" "$limit"
[ "$total" -le "$limit" ] || { echo "the wheels are too large to carry" >&2; exit 1; }

if [ -n "$python" ]; then
  there=$(mktemp -d)
  trap 'rm -rf "$there"' EXIT
  "$python" -m venv "$there/venv"
  "$there/venv/bin/pip" install -q "${machine[@]}"
  folder=$(realpath "$folder")
  cd "$there"  # an empty folder: python imports what lies in the current one
  "$there/venv/bin/python" "$repo/scripts/gpu_check.py" --cpu --wheels "$folder" --out "$there/out"
fi
