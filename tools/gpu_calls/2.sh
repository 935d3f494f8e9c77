#!/bin/bash
# The second of two calls on a GPU machine, 300 s: timings, with the GPU to itself (docs/gpu.md).
# As 1.sh; OUT gets 2.json, 2.log and a trace of a micro-batch. What 1.sh unpacked is used again,
# also where the archives are no longer there. What 300 s leave out is at the end.
set -o pipefail
cd "$(dirname "$0")/../.." || exit
: "${BUILD:=build}" "${OUT:=build/gpu-out}" "${LIMIT_S:=300}" "${PYTHON:=python3}"
mkdir -p "$OUT"
"$PYTHON" tools/gpu_report.py --limit-s "$LIMIT_S" --results "$OUT/2.json" \
  --pack "$BUILD/gpu-pack.tar.xz" --vllm "$BUILD/gpu-vllm.tar.xz" "$@" \
  build=120 micro_batch=80 step=100 rows=110 profile=90 \
  2>&1 | tee "$OUT/2.log"
