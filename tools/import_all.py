"""Import every module of the package and of the benchmarks; exit with 1 if one raises.

    python tools/import_all.py [--all]

A module may need a package of OPTIONAL that is not installed; without --all one of TRAIN too.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

OPTIONAL = {
    *("vllm", "trl", "liger_kernel", "cut_cross_entropy", "flash_attn", "datasets"),
    *("verl", "ray", "tensordict"),  # verl and what it imports
}
TRAIN = {"msgspec", "omegaconf", "pydantic", "pydantic_core", "math_verify"}


def modules() -> list[str]:
    import benchmarks
    import hybridengine

    folders = {"hybridengine.": hybridengine.__path__, "benchmarks.": benchmarks.__path__}
    return [
        module.name
        for prefix, path in folders.items()
        for module in pkgutil.walk_packages(path, prefix, onerror=lambda name: None)
    ]


def missing_packages(error: BaseException | None) -> set[str]:
    """The packages that an error is about, or the one that it replaces."""
    if error is None:
        return set()
    name = getattr(error, "name", None) or ""
    return {name.split(".")[0]} | missing_packages(error.__context__)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="the packages of TRAIN are installed")
    may_lack = OPTIONAL if parser.parse_args().all else OPTIONAL | TRAIN
    problems, lacking, names = list[str](), set[str](), modules()
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            if packages := missing_packages(error) & may_lack:
                lacking |= packages
            else:
                problems.append(f"{name}: {type(error).__name__}: {error}")
    print(f"{len(names)} modules, {len(problems)} problems; not installed: {sorted(lacking)}")
    for problem in problems:
        print(f"import-all: {problem}", file=sys.stderr)
    return 1 if problems or not names else 0


if __name__ == "__main__":
    sys.exit(main())
