"""Which mode a configuration runs in, and what is said where it is not installed."""

from __future__ import annotations

import pytest

from hybridengine.run.config import load_config
from hybridengine.run.errors import ConfigError
from hybridengine.train.modes import Mode, mode_of

NEEDED = ("model.path=m", "data.train_files=f")
OTHERS = {
    "trainer.mode": ("trainer.mode=async", "rollout.n_gpus_per_node=1"),
    "rollout.servers": ("rollout.servers=[http://127.0.0.1:8000]",),
    "critic.n_gpus_per_node": ("critic.n_gpus_per_node=1", "algorithm.adv_estimator=gae"),
}


def test_the_core_runs_where_every_rank_trains_and_generates() -> None:
    assert type(mode_of(load_config(None, [*NEEDED]))) is Mode


@pytest.mark.parametrize("key", OTHERS)
def test_ranks_of_other_roles_are_a_mode_of_their_own(key: str) -> None:
    assert type(mode_of(load_config(None, [*NEEDED, *OTHERS[key]]))) is not Mode


@pytest.mark.parametrize("key", OTHERS)
def test_a_mode_that_is_not_installed_is_named(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridengine.run.plugins", lambda group: {})
    with pytest.raises(ConfigError, match=rf"^{key} needs `\w+`.*hybridengine\.modes"):
        mode_of(load_config(None, [*NEEDED, *OTHERS[key]]))
