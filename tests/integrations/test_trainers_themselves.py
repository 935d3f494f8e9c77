"""SkyRL, AReaL and NeMo RL themselves, with our weight sync and real vLLM servers."""

from __future__ import annotations

import importlib
from pathlib import Path
from urllib.error import URLError

import pytest

CACHE = Path(__file__).parents[2] / ".cache" / "trainers"


@pytest.mark.exhaustive
@pytest.mark.multirank
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("part", ["skyrl", "areal", "nemo"])
def test_every_weight_is_that_of_vllms_loader(part: str) -> None:
    folder = CACHE / part
    folder.mkdir(parents=True, exist_ok=True)
    try:
        results = importlib.import_module(f"tools.trainers.{part}").run(folder)
    except URLError as error:
        pytest.skip(f"the package's source cannot be downloaded: {error}")
    assert results["syncs"] == 3
