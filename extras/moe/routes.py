"""The experts that vLLM's routers selected, carried with the tokens that they led to.

vLLM's second model runner returns them (`enable_return_routed_experts`). The first one, which runs
on CPUs, does not: there `RouteRecorder` does, in the place of vLLM's own connector. In both
`CompletionOutput.routed_experts` is the result, a row per computed token of prompt and response.

A row belongs to the KV slot that was computed with it, so a prompt whose keys and values are found
in the prefix cache finds its rows there as well. Rows that are computed again, after a preemption,
are not read: tokens were sampled with the first ones.

An engine computes a row for each token of prompt and response but the last one. In the columns
`num_routed` and `routed_experts` a sampled token has the rows that were computed for it: the first
one those of the prompt, each other one that of the token before it. So the rows of a response, end
to end, are those of its sequence from the first token on, also after turns of tools.
"""

from __future__ import annotations

import base64
import zlib
from array import array
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from hybridengine.engine.interface import ColumnRecorder

__all__ = ["RouteRecorder", "RouteRecording", "decode_routes", "pack_routes"]


class RouteRecording(ColumnRecorder):
    """Records routes, where `SamplingSpec.record_routes` is set."""

    def arguments(self) -> dict[str, Any]:
        if torch.cuda.is_available():
            return {"enable_return_routed_experts": True}
        # vLLM would trace the routers into compiled graphs, which then call no recorder.
        return {"enforce_eager": True}

    def attach(self, llm: Any, runner: Any) -> None:
        if not torch.cuda.is_available():
            RouteRecorder(llm, runner)

    def columns(self, output: Any, prompt_length: int) -> dict[str, array[int]]:
        return pack_routes(output.routed_experts, prompt_length, len(output.token_ids))


def pack_routes(rows: np.ndarray, prompt_length: int, num_tokens: int) -> dict[str, array[int]]:
    """Return the columns num_routed and routed_experts of a completion.

    rows: [at least prompt_length + num_tokens - 1, layers, k], expert ids. Raises RuntimeError
    where there are fewer.

    Example:
        >>> columns = pack_routes(np.arange(8).reshape(4, 1, 2), prompt_length=2, num_tokens=3)
        >>> columns["num_routed"].tolist()
        [4, 2, 2]
    """
    needed = prompt_length + num_tokens - 1
    if len(rows) < needed:
        raise RuntimeError(
            f"the engine recorded the experts of {len(rows)} tokens for a prompt of "
            f"{prompt_length} and a completion of {num_tokens}, expected {needed}; set "
            "actor.router_replay=off"
        )
    size = int(np.prod(rows.shape[1:]))
    ids = array("h")
    ids.frombytes(np.ascontiguousarray(rows[:needed], np.int16).tobytes())
    counts = [prompt_length * size] + [size] * (num_tokens - 1)
    return {"num_routed": array("i", counts), "routed_experts": ids}


def decode_routes(text: str, layers: int, top_k: int) -> np.ndarray:
    """Return int16 [tokens, layers, top_k] of the entry routed_experts of a rollout file.

    tokens: those of prompt and response but the last.
    """
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i2").reshape(-1, layers, top_k)


@dataclass
class _Request:
    num_rows: int = 0  # rows of the first tokens that are known
    pending: list[np.ndarray] = field(default_factory=list)  # not yet taken by the scheduler


class RouteRecorder:
    """Records the routes of an engine on the first model runner, for good.

    llm: a `vllm.LLM` whose scheduler is in this process; it takes the rows of each step, as from a
      connector.
    runner: its `GPUModelRunner`.
    """

    def __init__(self, llm: Any, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self._runner, config = runner, runner.model_config
        shape = config.get_total_num_hidden_layers(), config.get_num_experts_per_tok()
        self._step = np.zeros((runner.max_num_tokens, *shape), np.int16)
        layers = [x for x in runner.get_model().modules() if isinstance(x, MoERunner)]
        for layer in layers:
            if layer._quant_method.is_monolithic or not isinstance(layer.router, BaseRouter):
                raise RuntimeError(
                    f"vLLM's router {type(layer.router).__name__} returns no experts on this "
                    "machine; set actor.router_replay=off"
                )
            layer.router.set_capture_fn(partial(self._capture, layer.layer_id))
        groups = runner.kv_cache_config.kv_cache_groups
        full = [i for i, x in enumerate(groups) if isinstance(x.kv_cache_spec, FullAttentionSpec)]
        if not layers or not full:
            raise RuntimeError(
                "vLLM's model has no mixture of experts, or no layer of full attention, by whose "
                "cache cached prompts find their experts; set actor.router_replay=off"
            )
        self._group = full[0]
        num_slots = runner.kv_cache_config.num_blocks * groups[full[0]].kv_cache_spec.block_size
        self._slots = np.zeros((num_slots, *shape), np.int16)  # id + 1; 0: no record
        self._requests: dict[str, _Request] = {}
        execute = runner.execute_model
        runner.execute_model = partial(self._execute, execute)
        llm.llm_engine.engine_core.engine_core.scheduler.aux_output_connector = self

    def _capture(self, layer: int, topk_ids: torch.Tensor) -> None:
        self._step[: len(topk_ids), layer] = topk_ids.numpy()

    def _execute(self, execute: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = execute(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            self._take_step(scheduler_output.num_scheduled_tokens)
        return result

    def _take_step(self, num_scheduled: dict[str, int]) -> None:
        batch, end = self._runner.input_batch, 0
        table = batch.block_table[self._group]
        for i, name in enumerate(batch.req_ids):
            begin, end = end, end + num_scheduled[name]
            start = int(batch.num_computed_tokens_cpu[i])
            positions = np.arange(start + end - begin)
            blocks = table.block_table.np[i, positions // table.block_size].astype(np.int64)
            slots = blocks * table.block_size + positions % table.block_size
            self._slots[slots[start:]] = self._step[begin:end] + 1
            request = self._requests.setdefault(name, _Request())
            if request.num_rows < len(positions):
                request.pending.append(self._slots[slots[request.num_rows :]] - 1)
                request.num_rows = len(positions)

    # What vLLM's scheduler calls of a connector.

    def build_connector_meta(self, scheduler_output: Any, requests: Any) -> None:
        return None

    def take_output(self, request: Any, output: Any) -> np.ndarray | None:
        """Return the rows of a request that are not taken yet."""
        state = self._requests[request.request_id]
        rows, state.pending = state.pending, []
        return np.concatenate(rows) if rows else None

    def request_finished(self, request: Any) -> None:
        """Forget a request that is finished; one that is preempted goes on."""
        if request.is_finished():
            self._requests.pop(request.request_id, None)

    def reset(self) -> None:
        """Keep all rows when the prefix cache is reset: running requests have theirs."""
