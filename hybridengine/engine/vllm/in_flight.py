"""New weights between vLLM's decode steps, and the keys and values that older ones have cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

from hybridengine.engine.interface import InFlightUpdate
from hybridengine.sync.weight_target import ReshardError

__all__ = ["drop_cached_prefixes", "refresh_caches", "updates_between_steps"]

_STEPS_BETWEEN_LOOKS = 8  # a look for new weights is a broadcast to the engine's ranks


@contextmanager
def updates_between_steps(engine: Any, in_flight: InFlightUpdate) -> Iterator[None]:
    """While open, `engine`, vLLM's `LLMEngine`, takes weights that are due instead of a step."""
    step, numbers = engine.step, count(1)

    def update_or_step() -> list[Any]:
        if next(numbers) % _STEPS_BETWEEN_LOOKS or not in_flight.is_due():
            return step()
        outputs = _finish_scheduled_steps(engine, step)
        in_flight.update()
        return outputs

    with patch.object(engine, "step", update_or_step):
        yield


def _finish_scheduled_steps(engine: Any, step: Callable[[], list[Any]]) -> list[Any]:
    """Finish the steps that vLLM has scheduled ahead, without further ones; return their outputs.

    There are such steps with asynchronous scheduling: the next one starts before the outputs of
    the last one are read.
    """
    from vllm.v1.core.sched.interface import PauseState

    core = engine.engine_core.engine_core
    outputs: list[Any] = []
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    try:
        while core.batch_queue:
            outputs += step()
    finally:
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
    return outputs


def refresh_caches(llm: Any, keep_kv: bool) -> None:
    """Let no request find keys and values of older weights in vLLM's prefix cache.

    keep_kv: running requests keep theirs; else vLLM preempts them, and computes all their tokens
    again with the new weights before the next one.
    """
    core = llm.llm_engine.engine_core.engine_core
    if not keep_kv:
        core.scheduler.reset_prefix_cache(reset_running_requests=True)
    drop_cached_prefixes(core)


def drop_cached_prefixes(core: Any) -> None:
    """Let no later request find keys and values of now in the caches of `core`, an `EngineCore`.

    Running requests keep their own. What they add to them depends on those, and is cached so that
    nobody else finds it. No step may be scheduled. Raises ReshardError where a KV connector fails.
    """
    for request in core.scheduler.requests.values():
        if request.num_computed_tokens:
            request.cache_salt = request.request_id
            request.block_hashes.clear()
            request.update_block_hashes()
    caches = core.scheduler.kv_cache_manager
    cached = {b.block_id for b in caches.block_pool.blocks if b.block_hash is not None}
    caches.evict_blocks(cached)  # from the prefix cache, not from the requests that hold them
    if not core.scheduler.reset_connector_cache():
        raise ReshardError(
            "the KV connector of vLLM did not drop keys and values of older weights; build the "
            "engine without kv_transfer_config (rollout.engine_kwargs.vllm; of a server: "
            "--kv-transfer-config), or set rollout.in_flight_update to off"
        )
    core.reset_encoder_cache()
