"""transformers looks for a package `kernels`, and finds that folder from a clone of this one."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
from hybridengine.kernels import token_log_probs
import kernels, transformers.modeling_utils, transformers.utils
assert kernels.__name__ == "kernels" and not hasattr(kernels, "pack"), vars(kernels)
transformers.utils.is_kernels_available()  # imports what it finds
assert not [name for name in __import__("sys").modules if name.startswith("kernels.")]
logits = torch.zeros(2, 4, requires_grad=True)
token_log_probs(logits, torch.tensor([1, 2]))[0].sum().backward()
try:
    import kernels.strided_copy
except RuntimeError as error:
    print(error)
"""


def test_operators_are_registered_once_however_the_folder_is_imported():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[2],
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "is registered already, and now again by the module kernels.strided_copy" in done.stdout
