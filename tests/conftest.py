"""What every test shares: GPU tests are left out where there is no GPU."""

import os
import tempfile

import torch

# Tokenised data of tests is for them alone; processes that they start inherit it.
_CACHE = tempfile.TemporaryDirectory(prefix="hybridengine-cache-")
os.environ["HYBRIDENGINE_CACHE"] = _CACHE.name


def pytest_collection_modifyitems(config, items):
    """Deselected, not skipped: a skip would read like a test that nearly ran."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
