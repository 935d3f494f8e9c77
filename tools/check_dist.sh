#!/usr/bin/env bash
# Build sdist and wheel into dist/, then install the package in the four ways there are into an empty environment
# (torch and the build tools only) and run a kernel each time: the wheel, the sdist, `pip install .`, `pip install -e .`.
# HYBRIDENGINE_CUDA=OFF makes it a CPU wheel where torch has CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
dist=$PWD/dist
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

rm -rf "$dist"
"$python" -m build --no-isolation --outdir "$dist" . # the wheel is built from the sdist
git clone -q . "$scratch/checkout"                   # what is committed, and no build of this checkout

torch=$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))')
"$python" -m venv "$scratch/venv"
pip() { "$scratch/venv/bin/python" -m pip --quiet --quiet "$@"; }
pip install "torch==$torch" "setuptools>=77" wheel ninja "cmake>=3.25,<4"

cd "$scratch" # so that nothing of this checkout is imported
for way in "$dist"/*.whl "$dist"/*.tar.gz ./checkout "-e ./checkout"; do
  pip uninstall --yes hybridengine
  # shellcheck disable=SC2086
  pip install --no-build-isolation $way
  echo -n "pip install ${way/"$dist/"/}: "
  venv/bin/python - <<'PY'
import torch

import hybridengine
from hybridengine import _C  # noqa: F401
from hybridengine.kernels import token_log_probs

log_probs, entropy = token_log_probs(torch.zeros(2, 4), torch.tensor([0, 3]))
assert torch.allclose(log_probs, torch.full((2,), 0.25).log()), log_probs
print(f"hybridengine {hybridengine.__version__} works")
PY
done
