"""Routes of a batch's responses, for router replay, and how far the trainer's own ones differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridengine.model.validation import check_model
from hybridengine.moe.router_replay import RouterReplay, route_shape
from hybridengine.run.config import RLConfig

__all__ = ["config_route_shape", "pop_metrics", "response_routes"]


def config_route_shape(config: RLConfig) -> tuple[int, int] | None:
    """Return (layers, experts per token) of the policy where its routers replay, else None.

    Raises ModelError for a policy whose routers cannot.
    """
    if config.actor.router_replay == "off":
        return None
    model = config.model
    config_of_model = check_model(model.path, model.trust_remote_code, model.config_overrides)
    return route_shape(config_of_model, model.trust_remote_code)


def response_routes(
    columns: Mapping[str, Tensor], lengths: Sequence[int], shape: tuple[int, int] | None
) -> list[Tensor] | None:
    """Return int16 [t, *shape] of the first t tokens of each response's sequence, on the CPU.

    columns: `token_columns` end to end.
    lengths: of the responses, in tokens. None where routes are not replayed, or no response has
      them.
    """
    if shape is None or "routed_experts" not in columns:
        return None
    counts = [int(part.sum()) for part in columns["num_routed"].cpu().split(list(lengths))]
    parts = columns["routed_experts"].cpu().split(counts)
    return [part.view(-1, *shape) for part in parts]


def pop_metrics(model: nn.Module) -> dict[str, float]:
    """Return how far the routers' own choices differ from those that they replayed. Collective.

    Over all forward passes of `model` on all ranks since the last call.
    """
    replay = RouterReplay.of(model)
    if replay is None:
        return {}
    counts = torch.stack(list(replay.pop_counts()))
    dist.all_reduce(counts)
    total, tokens, differing_tokens, pairs, differing_pairs = counts.tolist()
    if not total:
        return {}
    return {
        "routing/replayed_tokens": tokens / total,
        "routing/mismatched_tokens": differing_tokens / max(tokens, 1),
        "routing/mismatched_routes": differing_pairs / max(pairs, 1),
    }
