"""Print the facts about this Python that the build needs, as CMake `set` lines.

Exits with an error message if pybind11 or Python's headers are missing. torch is not needed: the
extension uses its tensors through DLPack (csrc/common/tensor.h).
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


def folder_of(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def reason_for_cuda() -> str:
    """Return why the CUDA kernels are of use here, "" if they are not.

    pip builds in an environment of its own, without the torch that will be used.
    """
    if cuda := cuda_of_torch():
        return f"torch has CUDA {cuda}"
    return "an NVIDIA GPU is here" if has_nvidia_gpu() else ""


def has_nvidia_gpu() -> bool:
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    listed = subprocess.run([program, "-L"], text=True, capture_output=True)
    return "GPU" in listed.stdout


def cuda_of_torch() -> str:
    """Return the CUDA version of the torch here, "" for a CPU build and without torch."""
    folder = folder_of("torch")
    if folder is None:
        return ""
    # Read torch/version.py as text: importing torch takes seconds on every configure.
    version = (folder / "version.py").read_text()
    cuda = re.search(r"^cuda[^=]*= '([^']+)'", version, re.MULTILINE)
    return cuda[1] if cuda else ""


def main() -> None:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        sys.exit(
            f"Python's C headers are missing ({include}/Python.h): install them "
            f"(for example the package python{sys.version_info[0]}.{sys.version_info[1]}-dev)."
        )
    pybind11 = folder_of("pybind11")
    if pybind11 is None:
        sys.exit(f"pybind11 is not installed for {sys.executable}: run `pip install pybind11`.")
    facts = {
        "PYTHON_INCLUDE_DIR": str(include),
        "PYTHON_EXTENSION_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
        "PYBIND11_INCLUDE_DIR": str(pybind11 / "include"),
        "REASON_FOR_CUDA": reason_for_cuda(),
    }
    for name, value in facts.items():
        print(f'set({name} "{value}")')


if __name__ == "__main__":
    main()
