#!/usr/bin/env bash
# Build the sdist and the wheel into dist/, the wheel from the sdist alone, then install the sdist
# into an empty environment and run a kernel there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

rm -rf dist
"$python" -m pip install -qq build
"$python" -m build --no-isolation --outdir dist .
"$python" -m venv "$scratch/venv"
torch=$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))')
"$scratch/venv/bin/python" -m pip install -qq "torch==$torch" "setuptools>=77" wheel ninja "cmake>=3.25,<4"
"$scratch/venv/bin/python" -m pip install -qq --no-build-isolation dist/*.tar.gz
cd "$scratch" # so that nothing of the checkout is imported
venv/bin/python - <<'PY'
import torch

import hybridengine
from hybridengine import _C  # noqa: F401
from hybridengine.kernels import token_log_probs

log_probs, entropy = token_log_probs(torch.zeros(2, 4), torch.tensor([0, 3]))
assert torch.allclose(log_probs, torch.full((2,), 0.25).log()), log_probs
print(f"hybridengine {hybridengine.__version__} from {hybridengine.__file__}: works")
PY
