#!/usr/bin/env bash
# On a GPU machine, with the python3 that is there and nothing to download: build the extension in
# place, run the GPU tests of the kernels, time them. Needs torch, cmake, ninja, nvcc and pybind11;
# pytest is used if it is there. Results: runs/gpu-report/benchmarks.json.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=runs/gpu-report
mkdir -p "$out"

cmake -G Ninja -S . -B build/gpu-report -DHYBRIDENGINE_PYTHON="$(command -v "$python")" \
  -DHYBRIDENGINE_OUTPUT_DIR="$PWD/hybridengine" >"$out/build.log" 2>&1 &&
  cmake --build build/gpu-report >>"$out/build.log" 2>&1 ||
  { tail -n 40 "$out/build.log" >&2; exit 1; }
ln -sfn ../kernels hybridengine/kernels # where an installed package has it

failed=0
if "$python" -c 'import pytest, hypothesis' 2>/dev/null; then
  "$python" -m pytest -q -m gpu tests/kernels || failed=$?
else
  echo "pytest or hypothesis is not installed: the GPU tests were not run" >&2
fi
"$python" -m benchmarks --json "$out/benchmarks.json" || failed=$?
exit "$failed"
