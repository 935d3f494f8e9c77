"""Every architecture of the catalogue at TP 1, 2 and 4; writes docs/architectures.md.

Not collected by `make test`: it takes minutes. `make test-architectures` names this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.architectures.catalogue import CATALOGUE
from tests.architectures.sweep import Outcome, sweep_body
from tests.architectures.table import is_exact, render
from tests.ranks import run_ranks

WORLDS = {1: 2, 2: 4, 4: 4}  # TP size → ranks
TIMEOUT_S = 60.0 * len(CATALOGUE)  # of a world
pytestmark = [pytest.mark.multirank, pytest.mark.timeout(TIMEOUT_S * len(WORLDS))]

DOCUMENT = Path(__file__).parents[2] / "docs" / "architectures.md"

# What stops these lies outside the package; the table shows each one's reason.
NOT_LOADABLE = {
    "bamba": "vLLM model and loader",
    "dbrx": "vLLM model and loader",
    "deepseek_v32": "vLLM model and loader",
    "deepseek_v4": "vLLM config",
    "glm_moe_dsa": "vLLM model and loader",
    "internlm2": "transformers config",
    "kimi_linear": "vLLM model and loader",
    "minimax": "vLLM model and loader",
    "minimax_m3_vl": "vLLM model and loader",
    "mpt": "vLLM config",
    "olmo_hybrid": "vLLM model and loader",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, dict[str, list[Outcome]]]:
    """TP size → architecture → outcome per rank: one world of ranks per TP size."""
    found = {}
    for tp_size, world_size in WORLDS.items():
        folder = str(tmp_path_factory.mktemp(f"tp{tp_size}"))
        per_rank = run_ranks(
            sweep_body, world_size, tp_size, folder, list(CATALOGUE), timeout_s=TIMEOUT_S
        )
        found[tp_size] = {o[0].architecture: list(o) for o in zip(*per_rank, strict=True)}
    DOCUMENT.write_text(render(found))
    return found


@pytest.mark.parametrize("tp_size", WORLDS)
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_engine_tensor_equals_vllms_own_loader(
    results: Mapping[int, Mapping[str, list[Outcome]]], name: str, tp_size: int
) -> None:
    outcomes = results[tp_size][name]
    if name in NOT_LOADABLE:
        assert outcomes[0].stage == NOT_LOADABLE[name], outcomes[0]
        return
    assert is_exact(outcomes), [(o.stage, o.error, o.unequal) for o in outcomes]
    assert all(o.received == o.lower_bound for o in outcomes)
