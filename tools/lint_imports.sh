#!/usr/bin/env bash
# import-linter over the package as it is installed: with kernels/ and extras/ inside.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
"$bin/python" -m tools.package_links build/lint
cd build/lint
exec "$bin/lint-imports" --no-cache ../../pyproject.toml
