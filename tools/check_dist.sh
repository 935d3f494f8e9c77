#!/usr/bin/env bash
# Build sdist and wheel into dist/, then install the package in every way there is into empty environments and run a
# kernel each time: the wheel beside the oldest and the newest torch that is supported, without a compiler; the wheel, the
# sdist, `pip install .` and `pip install -e .` beside the torch of this checkout.
# HYBRIDENGINE_CUDA=OFF makes it a CPU wheel where a GPU and nvcc are found; ON one with CUDA kernels where only nvcc is.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
dist=$PWD/dist
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

rm -rf "$dist"
"$python" -m build --outdir "$dist" . # the wheel is built from the sdist
git clone -q . "$scratch/checkout"    # what is committed, and no build of this checkout
cd "$scratch"                         # so that nothing of this checkout is imported

environment() { # environment TORCH: an empty one with this torch alone
  rm -rf venv
  "$python" -m venv venv
  pip install "torch==$1"
}
pip() { venv/bin/python -m pip --quiet --quiet "$@"; }
run_a_kernel() {
  venv/bin/python - <<'PY'
import torch

import hybridengine
from hybridengine import _C  # noqa: F401
from hybridengine.kernels import token_log_probs

log_probs, entropy = token_log_probs(torch.zeros(2, 4), torch.tensor([0, 3]))
assert torch.allclose(log_probs, torch.full((2,), 0.25).log()), log_probs
print(f"hybridengine {hybridengine.__version__} works with torch {torch.__version__}")
PY
}

for torch in ${TORCHES:-2.11.0 2.15.0}; do
  environment "$torch"
  CXX=false pip install "$dist"/*.whl
  echo -n "a wheel without a compiler: "
  run_a_kernel
done

environment "$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))')"
for way in "$dist"/*.whl "$dist"/*.tar.gz ./checkout "-e ./checkout"; do
  pip uninstall --yes hybridengine
  # shellcheck disable=SC2086
  pip install $way
  echo -n "pip install ${way/"$dist/"/}: "
  run_a_kernel
done
