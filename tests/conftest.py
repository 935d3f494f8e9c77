"""Settings of all tests: a cache of their own, no hub, and no GPU tests where there is no GPU."""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # else a path that is not there is looked for on the network

import torch
from hypothesis import settings

# The first example of a process may take longer than any deadline. `make test` always has the same
# examples: a rare one that fails would be a failure of a change that has nothing to do with it.
# `make test-exhaustive` draws new ones from a seed that it prints.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None, max_examples=300, print_blob=True)
settings.load_profile("same")

# Processes that the tests start inherit it.
_CACHE = tempfile.TemporaryDirectory(prefix="hybridengine-cache-")
os.environ["HYBRIDENGINE_CACHE"] = _CACHE.name
os.environ["HYBRIDENGINE_SECRET"] = "the secret of all processes of the tests"


# A long test at the end leaves other workers idle.
_LONGEST_FIRST = {"train", "checkpoint", "remote"}


def pytest_collection_modifyitems(config, items):
    """Put the folders of the longest tests first.

    Deselect GPU tests without a GPU, unless -m names them; skipped ones would clutter.
    """
    items.sort(key=lambda item: item.path.parent.name not in _LONGEST_FIRST)
    if torch.cuda.is_available() or "gpu" in config.option.markexpr:
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
