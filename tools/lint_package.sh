#!/usr/bin/env bash
# import-linter and mypy over the package as it is installed: with kernels/ and extras/ inside.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
"$bin/python" -m tools.package_links build/lint
cd build/lint
"$bin/lint-imports" --no-cache ../../pyproject.toml
exec "$bin/mypy" --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p hybridengine
