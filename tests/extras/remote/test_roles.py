"""How ranks of several roles find each other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from hybridengine.remote.roles import Role, RoleLink, Roles
from hybridengine.run.messages import SECRET, SignedStore


def test_the_limit_of_a_connection_begins_when_all_have_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SECRET, "x" * 32)
    roles = Roles(1, trainers_per_node=1, engines_per_node=1, tp_size=1)
    store = SignedStore(dist.HashStore(), "link")
    trainer, engine = (RoleLink(roles, roles.role_of(rank), store, 0.2) for rank in range(2))
    members = [Role.name_of("trainer", 0), Role.name_of("engine 0", 0)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trainer.group, "rollouts", members)
        trainer.announce()
        with pytest.raises(TimeoutError):
            waiting.result(timeout=1)  # five times the limit: the engine still imports
        engine.announce()
        late = r"after 0\.2 s \(trainer\.timeout_s\) .* engine 0, rank 0 to connect to trainer"
        with pytest.raises(dist.DistError, match=late):
            waiting.result(timeout=120)
