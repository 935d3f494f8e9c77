"""Router replay in verl's FSDP engine (verl 0.9.1), by the keys of its other engines.

Importing this module in every process of a verl job enables it:

    VERL_USE_EXTERNAL_MODULES=hybridengine.integrations.verl.router_replay

    +actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3     # or R2
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True   # with R3 only

R3 replays the experts of the rollout in the old log-probs and in the update. R2 replays those of
the old log-probs in the update. The reference routes naturally, as with verl's Megatron engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridengine.integrations import router_replay
from hybridengine.integrations._patching import Patches
from hybridengine.integrations.verl.padding import num_padding
from hybridengine.moe.router_replay import RouterReplay, pad_routes
from hybridengine.run.errors import ModelError

_STRATEGIES = ("fsdp", "fsdp2")
_WORKER = "workers.engine_workers.ActorRolloutRefWorker.__init__"
_ENGINES = "workers.engine.fsdp.transformer_impl"
_BUILD = f"{_ENGINES}.FSDPEngine._build_fsdp_module"
_FORWARD = f"{_ENGINES}.FSDPEngineWithLMHead.forward_step"


def _mode(engine_config: Mapping[str, Any]) -> str:
    """Return `router_replay.mode` of a configuration of verl's FSDP engine."""
    mode: str = (engine_config.get("router_replay") or {}).get("mode", "disabled")
    if mode not in ("disabled", "R2", "R3"):
        raise ModelError(f"fsdp_config.router_replay.mode: got {mode}, expected disabled, R2 or R3")
    return mode


def _init_worker(
    self: Any, config: Any, role: str, distillation_config: Any = None, **kwargs: Any
) -> None:
    """Mark the batches of the actor for replay, as verl does where its Megatron engine trains."""
    mode = _mode(config.actor.fsdp_config) if config.actor.strategy in _STRATEGIES else "disabled"
    if mode != "disabled" and (mode == "R3") != config.rollout.enable_rollout_routing_replay:
        raise ModelError(
            "rollout.enable_rollout_routing_replay: router_replay.mode=R3 replays the experts that "
            f"the rollout returns, and R2 needs none; got {mode} and "
            f"{config.rollout.enable_rollout_routing_replay}"
        )
    PATCHES.original(_WORKER)(self, config, role, distillation_config, **kwargs)
    if mode != "disabled":
        self.enable_routing_replay = True


def _build_fsdp_module(self: Any, module: torch.nn.Module) -> torch.nn.Module:
    """Attach to the model before it is sharded, which FSDP1 hides in wrappers."""
    if _mode(self.engine_config) != "disabled":
        if not self.use_remove_padding:
            raise ModelError(
                "model.use_remove_padding: got False, expected True with router_replay.mode"
            )
        self._hybridengine_router_replay = router_replay.attach(module)
    wrapped: torch.nn.Module = PATCHES.original(_BUILD)(self, module)
    return wrapped


def _forward_step(
    self: Any, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool
) -> tuple[Tensor, dict[str, Any]]:
    """Replay the micro-batch's `routed_experts`; in R2 record them where it has none yet."""
    from verl.utils import tensordict_utils

    forward = PATCHES.original(_FORWARD)
    replay: RouterReplay | None = getattr(self, "_hybridengine_router_replay", None)
    is_marked = tensordict_utils.get_non_tensor_data(micro_batch, "enable_routing_replay", False)
    if replay is None or not is_marked:
        result: tuple[Tensor, dict[str, Any]] = forward(
            self, micro_batch, loss_function, forward_only
        )
        return result
    routed, mode = micro_batch.get("routed_experts", None), _mode(self.engine_config)
    offsets = micro_batch["input_ids"].offsets()
    padding = num_padding(self, int(offsets[-1]))
    if routed is None and mode == "R2" and forward_only:
        num_tokens = (int(offsets[-1]) + padding) // self.ulysses_sequence_parallel_size
        with replay.record(num_tokens, _device()) as call:
            loss, output = forward(self, micro_batch, loss_function, forward_only)
        # As bytes, because NCCL has no int16.
        routes = self._gather_and_unpad_packed(call.routes.view(torch.uint8), padding)
        output["model_output"]["routed_experts"] = torch.nested.nested_tensor_from_jagged(
            routes.view(torch.int16), offsets.to(routes.device)
        )
        return loss, output
    if routed is None:
        raise ModelError(
            f"router_replay.mode={mode}: the batch has no routed_experts. In R3 the rollout "
            "returns them, with enable_rollout_routing_replay=True and an engine that has them; "
            "in R2 the pass of the old log-probs records them"
        )
    with replay.replay(_layout(self, routed, offsets, padding)):
        loss, output = forward(self, micro_batch, loss_function, forward_only)
    counts = replay.pop_counts()
    if not forward_only:
        share = counts.differing_tokens / counts.tokens.clamp(min=1)
        output["metrics"]["actor/routing_mismatched_tokens"] = float(share)
    return loss, output


def _device() -> Any:
    from verl.utils.device import get_device_id

    return get_device_id()


def _layout(engine: Any, routed: Tensor, offsets: Tensor, padding: int) -> Tensor:
    """Return the routes of this rank's tokens, [tokens, layers, k], -1 without a record.

    routed: jagged [B, t, layers, k]. verl has rows of zeros for tokens without a record; a token
      has k different experts, so that no record of several experts is one.
    offsets: the offsets of the sequences.
    """
    lengths = [*offsets.diff().tolist(), padding]
    parts = list(routed.unbind())
    routes = pad_routes([*parts, parts[0][:0]], lengths).to(_device())
    routes = routes.masked_fill((routes == 0).flatten(1).all(1)[:, None, None], -1)
    if not engine.use_ulysses_sp:
        return routes
    from verl.utils.ulysses import slice_input_tensor

    local: Tensor = slice_input_tensor(routes, dim=0, padding=False)
    return local


_OURS = {_WORKER: _init_worker, _BUILD: _build_fsdp_module, _FORWARD: _forward_step}
PATCHES = Patches("verl", {"router_replay": _OURS})
PATCHES.patch()
