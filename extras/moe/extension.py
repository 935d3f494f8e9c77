"""What mixtures of experts add to the core: registered as `experts` in `hybridengine.models`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from hybridengine.model.extensions import MixtureExtension, PartReader
from hybridengine.model.validation import config_of, meta_model
from hybridengine.moe.adapters import adapter_of
from hybridengine.moe.exact import exact_forwards
from hybridengine.moe.expert_parallel import EXPERT_DIM, distribute_experts
from hybridengine.moe.experts import EXPERTS, check_targets, use_grouped_adapters
from hybridengine.moe.router_balance import balance_routers, prepare_routers
from hybridengine.moe.router_replay import RouterReplay, SequenceRoutes, route_shape
from hybridengine.run.config import JobConfig, RLConfig

__all__ = ["Mixtures", "config_route_shape", "extension"]


class Mixtures(MixtureExtension):
    """Experts by `grouped_linear`, their adapters and their division; routers."""

    implementation = EXPERTS
    mesh_dims = ("efsdp", EXPERT_DIM)
    exact_model_types = (  # tests/extras/moe/test_moe_exact.py
        *("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe"),
        *("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
    )
    distribute = staticmethod(distribute_experts)
    check_targets = staticmethod(check_targets)
    use_grouped_adapters = staticmethod(use_grouped_adapters)
    adapter_of = staticmethod(adapter_of)

    def check(self, config: JobConfig, model: PretrainedConfig, engine: str, exact: bool) -> None:
        """Check that the model's routers are ones that the settings of routers are for."""
        policy = config.policy
        losses = policy.router_aux_loss_coef, policy.router_z_loss_coef
        rate, freezes = policy.router_bias_update_rate, policy.freeze_moe_router
        if any(losses) or rate or freezes:
            built = meta_model(model, config.model.trust_remote_code)
            balance_routers(built, *losses, rate)
            if freezes:
                prepare_routers(built, freeze=True)
        config_route_shape(config)

    def exact_forwards(self, model: nn.Module, splits: Mapping[str, int]) -> Mapping[Any, Any]:
        return exact_forwards(model, splits)

    def exactness_obstacle(self, config: JobConfig, model: PretrainedConfig) -> str | None:
        if isinstance(config, RLConfig) and config.actor.router_replay == "rollout":
            return (
                "actor.router_replay is rollout, and an exact engine records no routes: those of "
                "the trainer are equal"
            )
        return None

    def changes(self, config: JobConfig) -> Iterable[Callable[[Any], object]]:
        policy, updates = config.policy, bool(config.policy.router_bias_update_rate)
        if config.model.lora_rank or not (policy.freeze_moe_router or updates):
            return ()
        return (partial(prepare_routers, freeze=policy.freeze_moe_router, updates_bias=updates),)

    def attach(self, model: Any, config: JobConfig, *, is_trained: bool) -> None:
        policy = config.policy
        if is_trained:
            losses = policy.router_aux_loss_coef, policy.router_z_loss_coef
            balance_routers(model, *losses, policy.router_bias_update_rate)
        mode = config.actor.router_replay if isinstance(config, RLConfig) else "off"
        if mode == "rollout" or (mode == "old" and is_trained):
            RouterReplay(model, records=mode == "old")

    def part_readers(self, config: JobConfig) -> Mapping[str, PartReader]:
        shape = config_route_shape(config)
        return {} if shape is None else {"routes": partial(read_routes, shape)}


def config_route_shape(config: JobConfig) -> tuple[int, int] | None:
    """Return (layers, experts per token) of the policy where its routers replay, else None.

    Raises ModelError for a policy whose routers cannot.
    """
    if not isinstance(config, RLConfig) or config.actor.router_replay == "off":
        return None
    return route_shape(config_of(config.model), config.model.trust_remote_code)


def read_routes(
    shape: tuple[int, int], columns: Mapping[str, Tensor], lengths: Sequence[int]
) -> SequenceRoutes | None:
    """Return the routes of responses; None where they have none.

    shape: (layers, experts per token). columns: `token_columns` end to end.
    lengths: of the responses, in tokens.
    """
    if "routed_experts" not in columns:
        return None
    counts = [int(part.sum()) for part in columns["num_routed"].cpu().split(list(lengths))]
    parts = columns["routed_experts"].cpu().split(counts)
    return SequenceRoutes([part.view(-1, *shape) for part in parts])


extension = Mixtures()
