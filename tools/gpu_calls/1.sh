#!/bin/bash
# The first of two calls on a GPU machine, 380 s: correctness (docs/gpu.md).
#
#     OUT=folder tools/gpu_calls/1.sh [arguments of tools/gpu_report.py]
#
# BUILD (default: build) has gpu-pack.tar.xz and gpu-vllm.tar.xz: `make gpu-pack` after each change
# of csrc, kernels or tests, `python3 tools/gpu_rehearsal.py vllm` after one of tools/gpu_vllm.py.
# OUT (default: build/gpu-out) gets 1.json, with the rows of every part as they arise, and 1.log. A
# part that fails or is over its seconds leaves the next ones. A `+` runs it beside those.
set -o pipefail
cd "$(dirname "$0")/../.." || exit
: "${BUILD:=build}" "${OUT:=build/gpu-out}" "${LIMIT_S:=380}" "${PYTHON:=python3}"
mkdir -p "$OUT"
"$PYTHON" tools/gpu_report.py --limit-s "$LIMIT_S" --results "$OUT/1.json" \
  --pack "$BUILD/gpu-pack.tar.xz" --vllm "$BUILD/gpu-vllm.tar.xz" "$@" \
  build=120 tests=200+ probe=50 vllm_start=130 vllm=110 sanitize=60 \
  2>&1 | tee "$OUT/1.log"
