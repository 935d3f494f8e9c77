"""Router replay as a user of another FSDP2 trainer attaches it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.extras.moe.moe_models import ARCHITECTURES, tiny_moe
from tests.ranks import run_ranks


def body(rank: int, world_size: int) -> dict[str, Any]:
    """A padded batch, mixed precision, checkpointing; R2 over one optimizer step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from hybridengine.integrations import router_replay

    model: Any = tiny_moe("mixtral", **ARCHITECTURES["mixtral"])
    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    replay = router_replay.attach(model)
    assert router_replay.attach(model) is replay
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    torch.manual_seed(rank)
    ids = torch.randint(3, 100, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def loss() -> torch.Tensor:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return -logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, 3:].mean()

    with torch.no_grad(), replay.record(ids.numel()) as call:
        natural = loss()
    with replay.replay(call.routes.view(2, 9, *replay.shape)):
        first = loss()
    first.backward()
    unchanged = replay.pop_counts()
    optimizer.step()
    with replay.replay(call.routes):
        second = loss()
    with torch.no_grad():
        rerouted = loss()
    return {
        "losses": [float(x.detach()) for x in (natural, first, second, rerouted)],
        "unchanged": float(unchanged.differing_pairs),
        "changed": float(replay.pop_counts().differing_pairs),
        "grads": [
            float(p.grad.full_tensor().norm())
            for n, p in model.named_parameters()
            if n.endswith("gate.weight")
        ],
    }


@pytest.mark.multirank
def test_a_step_of_another_trainer_replays() -> None:
    for result in run_ranks(body, 2):
        natural, first, second, rerouted = result["losses"]
        assert natural == first and second < first
        assert result["unchanged"] == 0 < result["changed"]
        assert second != rerouted
        assert len(result["grads"]) == 2 and all(result["grads"])
