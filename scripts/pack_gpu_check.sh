#!/usr/bin/env bash
# Collects the packages that scripts/gpu_check.py needs beside torch and transformers, as wheels in gpu_wheels/ (or the
# folder that is given), for a machine that reaches no registry. --no-download only checks what is in the folder.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)
folder=$repo/gpu_wheels
download=yes
for argument in "$@"; do
  case $argument in
    --no-download) download=no ;;
    -*) echo "$argument: no such option; there is --no-download" >&2; exit 2 ;;
    *) folder=$argument ;;
  esac
done
limit=$((60 * 1000 * 1000))
packages=(hydra-core omegaconf antlr4-python3-runtime tensordict cloudpickle pyvers rich markdown-it-py mdurl pygments)

if [ $download = yes ]; then
  mkdir -p "$folder"
  # --no-deps: torch, numpy, packaging and PyYAML are on the machine, with transformers. antlr4 has no wheel and is built here.
  python3 -m pip wheel -q --no-deps -c "$repo/constraints.txt" -w "$folder" "${packages[@]}"
fi
total=0
for wheel in "$folder"/*.whl; do
  [ -f "$wheel" ] || { echo "$folder has no wheels" >&2; exit 1; }
  case $wheel in
    *-none-any.whl) ;;
    *) echo "$(basename "$wheel") is built for one system: only pure Python packages can be carried" >&2; exit 1 ;;
  esac
  size=$(stat -c %s "$wheel")
  printf '%10d  %s\n' "$size" "$(basename "$wheel")"
  total=$((total + size))
done
printf '%10d  bytes in all, of %d\n' "$total" "$limit"
[ "$total" -le "$limit" ] || { echo "the wheels are too large to carry" >&2; exit 1; }
