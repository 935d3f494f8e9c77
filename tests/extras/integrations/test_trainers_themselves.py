"""verl, SkyRL, AReaL and NeMo RL themselves, with our weight sync and real vLLM servers."""

from __future__ import annotations

import importlib
from pathlib import Path
from urllib.error import URLError

import pytest

CACHE = Path(__file__).parents[3] / ".cache" / "trainers"


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


@pytest.mark.exhaustive
@pytest.mark.multirank
@pytest.mark.timeout(3600)
def test_verl_syncs_its_colocated_servers() -> None:
    """`main_ppo` with one server at TP 2; `tools.trainers verl` has the other cases."""
    from tools.trainers import verl

    folder = CACHE / "verl"
    folder.mkdir(parents=True, exist_ok=True)
    python, inputs = verl.environment(folder), verl.write_inputs(folder / "test_inputs")
    out = verl.train(python, inputs, folder / "test_colocated", 2, [verl.SYNC])
    assert verl.check_weights(out, inputs, tp_size=2)
    assert verl.moved(out)["gathered_bytes"] == 0
