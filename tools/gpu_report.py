"""Build for this GPU, run the GPU tests and the benchmarks, write benchmarks/results/<device>.json.

Uses the python3 that runs it, and no network: cmake and ninja build the extension in place, and the
repository root is added to the import path. Baselines that are not installed are skipped, with a
message.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"


def run(*command: str, environment: dict[str, str]) -> int:
    print("$ " + " ".join(command), flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print("gpu-report: torch finds no CUDA device.", file=sys.stderr)
        return 1
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}a-real" if major >= 9 else f"{major}{minor}-real"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    configured = run(
        *("cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD)),
        *(f"-DHYBRIDENGINE_PYTHON={sys.executable}", "-DHYBRIDENGINE_CUDA=ON"),
        f"-DHYBRIDENGINE_CUDA_ARCHITECTURES={architecture}",
        environment=environment,
    )
    if configured or run("cmake", "--build", str(BUILD), environment=environment):
        return 1
    link = ROOT / "hybridengine" / "kernels"
    made_link = not link.exists()
    if made_link:
        # An installation does this by package_dir; removed at the end.
        link.symlink_to("../kernels")
    try:
        tests = run(
            *(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/kernels"),
            environment=environment,
        )
        device = re.sub(r"\W+", "-", torch.cuda.get_device_name()).strip("-").lower()
        results = ROOT / "benchmarks" / "results" / f"{device}.json"
        measured = run(
            *(sys.executable, "-m", "benchmarks", "--device", "cuda", "--json", str(results)),
            environment=environment,
        )
    finally:
        if made_link:
            link.unlink()
    print(f"GPU tests: {'passed' if tests == 0 else 'FAILED'}; benchmarks: {results}")
    return 1 if tests or measured else 0


if __name__ == "__main__":
    sys.exit(main())
