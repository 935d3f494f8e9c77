"""Print the facts about this Python and its torch that the build needs, as CMake `set` lines.

Exits with an error message if torch or Python's headers are missing.
"""

import importlib.util
import re
import sys
import sysconfig
from pathlib import Path


def main() -> None:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        sys.exit(
            f"Python's C headers are missing ({include}/Python.h): install them "
            f"(for example the package python{sys.version_info[0]}.{sys.version_info[1]}-dev)."
        )
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(
            f"torch is not installed for {sys.executable}: run `pip install torch==2.13.0` first, "
            "and build with `pip install --no-build-isolation .`"
        )
    # Read torch/version.py as text: importing torch takes seconds on every configure.
    torch_dir = Path(spec.origin).parent
    version_text = (torch_dir / "version.py").read_text()
    version = re.search(r"__version__ = '([^']+)'", version_text)
    cuda = re.search(r"^cuda[^=]*= '([^']+)'", version_text, re.MULTILINE)
    if version is None:
        sys.exit(
            f"torch's version cannot be read from {torch_dir}/version.py: install torch again with "
            "`pip install --force-reinstall torch==2.13.0`."
        )
    major, minor = (int(part) for part in version[1].split(".")[:2])
    if not (2, 11) <= (major, minor) <= (2, 13):
        sys.exit(
            f"torch {version[1]} is installed, 2.11 to 2.13 is supported: run `pip install "
            "torch==2.13.0`."
        )
    facts = {
        "TORCH_VERSION": version[1],
        "TORCH_CUDA": cuda[1] if cuda else "",
        "TORCH_CXX_STANDARD": "20" if (major, minor) >= (2, 13) else "17",
        "TORCH_INCLUDE_DIRS": f"{torch_dir}/include;{torch_dir}/include/torch/csrc/api/include",
        "TORCH_LIBRARY_DIR": f"{torch_dir}/lib",
        "PYTHON_INCLUDE_DIR": str(include),
        "PYTHON_EXTENSION_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
    }
    for name, value in facts.items():
        print(f'set({name} "{value}")')


if __name__ == "__main__":
    main()
