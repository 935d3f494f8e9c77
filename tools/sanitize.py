"""Run the fuzzer and tests with an extension that is built with sanitizers.

    python -m tools.sanitize address              # 10^6 calls of the fuzzer (a tenth of them again
                                                  # without AVX), then tests/kernels
    python -m tools.sanitize address --calls 2000 --tests tests/kernels/test_checksum.py
    python -m tools.sanitize thread               # kernels that use threads

The extension is built into build/<sanitizer>; only the Python processes of this tool find it there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
CALLS = {"address": 1_000_000, "thread": 20_000}
# Kernels are compiled for several: of how many calls one is repeated on a narrower set.
INSTRUCTION_SETS = {"address": {"": 1, "portable": 10}, "thread": {"": 1}}
LIBRARIES = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    # A large size is an error of the caller: it must raise, not end the process.
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:handle_segv=2:allocator_may_return_null=1:"
    "max_allocation_size_mb=4096:detect_odr_violation=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # torch and libgomp are not built with the sanitizer, which does not see how they synchronize.
    "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
}
# What is left out of the tests under the address sanitizer, as options of pytest, by the reason.
LEFT_OUT: dict[str, Sequence[str]] = {
    "compilers, Triton's interpreter and vLLM, in part in processes of their own": (
        "--ignore-glob=*triton*",
        "--ignore-glob=*_on_cpu.py",
        "-k",
        "not triton and not compile and not vllm",
    ),
    "ranks and other instruction sets are processes of their own, too": (
        "--ignore=tests/kernels/test_packed_ops_ranks.py",
        "--ignore=tests/kernels/test_instruction_sets.py",
    ),
    "large results are not of the memory pool": (
        "--deselect=tests/kernels/test_memory_pool.py"
        "::test_memory_is_used_again_after_its_tensor_is_freed",
        "--deselect=tests/kernels/packing/test_packing.py::test_large_results_are_ordinary_tensors",
    ),
    "the extension is not in the package": (
        "--deselect=tests/kernels/test_backend.py::test_the_stub_matches_the_extension",
    ),
    "more memory than ASAN_OPTIONS allows": (
        "--deselect=tests/kernels/logprob/test_logprob_hostile.py"
        "::test_offsets_beyond_two_to_the_31_elements",
        "--deselect=tests/kernels/test_changes.py::test_more_than_2_to_the_31_elements",
    ),
    "at -O1 products are not fused with sums": (
        "--deselect=tests/kernels/logprob/test_logprob_hostile.py"
        "::test_rows_with_a_large_logit_offset_are_as_exact_as_others",
    ),
    "this tool runs the fuzzer itself": (
        "--deselect=tests/kernels/test_bindings.py::test_random_calls_return_or_raise",
    ),
}

_SITE = """\
import importlib.util
import sys


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "hybridengine._C":
            return importlib.util.spec_from_file_location(name, {extension!r})


sys.meta_path.insert(0, _Finder)
"""


def build(sanitizer: str) -> Path:
    """Build the extension; return the folder that leads Python to it."""
    folder = ROOT / "build" / sanitizer
    settings = {
        "SANITIZE": sanitizer,
        "CUDA": "OFF",
        "PYTHON": sys.executable,
        "OUTPUT_DIR": str(folder),
    }
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(folder)]
    configure += [f"-DHYBRIDENGINE_{name}={value}" for name, value in settings.items()]
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    for command in (configure, ["cmake", "--build", str(folder), "-j", jobs]):
        done = subprocess.run(command, env=environment, text=True, capture_output=True)
        if done.returncode:
            raise SystemExit(done.stdout[-4000:] + done.stderr)
    site = folder / "site"
    site.mkdir(exist_ok=True)
    extension = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    (site / "sitecustomize.py").write_text(_SITE.format(extension=str(extension)))
    return site


def environment_of(sanitizer: str, site: Path) -> dict[str, str]:
    """Return the environment of a Python process with the sanitizer."""
    compiler = os.environ.get("CXX", "g++")
    # libstdc++, which Python does not load: the sanitizer looks for its functions at the start.
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={library}"], check=True, text=True, capture_output=True
        ).stdout.strip()
        for library in (LIBRARIES[sanitizer], "libstdc++.so.6")
    ]
    return {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": " ".join(libraries),
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "PYTHONMALLOC": "malloc",  # every object by itself
        "OMP_WAIT_POLICY": "passive",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sanitizer", choices=sorted(CALLS))
    parser.add_argument("--calls", type=int, help="of the fuzzer")
    parser.add_argument("--seed", type=int, default=1, help="of the fuzzer")
    parser.add_argument("--tests", nargs="*", default=["tests/kernels"], help="for address")
    options = parser.parse_args()
    name = options.sanitizer
    environment = environment_of(name, build(name))
    python = [sys.executable]
    if name == "thread":  # it fails where addresses are drawn from too large a range
        python = ["setarch", "-R", *python]
    calls = CALLS[name] if options.calls is None else options.calls
    commands = list[tuple[str, list[str]]]()
    for isa, share in INSTRUCTION_SETS[name].items() if calls else ():
        number = str(-(-calls // share))
        fuzz = ["-m", "tools.fuzz", "--calls", number, "--seed", str(options.seed)]
        commands.append((isa, [*python, *fuzz, *(["--right"] if name == "thread" else [])]))
    if name == "address" and options.tests:
        tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive and not gpu"]
        left_out = [option for group in LEFT_OUT.values() for option in group]
        commands.append(("", [*python, *tests, *left_out, *options.tests]))
    for isa, command in commands:
        limited = environment | ({"HYBRIDENGINE_ISA": isa} if isa else {})
        if code := subprocess.run(command, env=limited, cwd=ROOT).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
