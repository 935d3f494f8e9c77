"""Decoding steps of an exact engine on a CPU, replayed as a graph of kernel calls.

A decoding step of a small model spends half of its time in vLLM's modules, between the kernels. As
all computing is by our operators, a step can be captured (`hybridengine.kernels.graph`) and
replayed as long as everything that it reads is where it was; else it is captured anew.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybridengine.engine.exact.steps import override_steps
from hybridengine.engine.vllm.weights import LoraSlot
from hybridengine.kernels.graph import Graph

log = logging.getLogger(__name__)

_ATTENTION = ("vllm::unified_kv_cache_update", "vllm::unified_attention_with_output")


def use_decode_graphs(model: nn.Module, slot: LoraSlot | None = None) -> None:
    """Let `model`, as `use_exact_operators` leaves it, replay its decoding steps.

    slot: of its adapters.
    """
    override_steps(model, _DecodeSteps(model, slot).run)


@dataclass
class _Captured:
    graph: Graph
    hidden: Tensor  # the embeddings, which a step overwrites
    positions: Tensor
    operands: list[Tensor]  # whatever else the kernels read, kept so that no other has its address
    state: list[float]  # their addresses, and by what else Python decides; a step has the same one


class _DecodeSteps:
    def __init__(self, model: nn.Module, slot: LoraSlot | None) -> None:
        from vllm.model_executor.layers.attention import Attention

        modules = list(model.modules())
        self._owners = [m for m in modules if m._parameters or m._buffers]
        self._adapted: list[Any] = [m for m in modules if hasattr(m, "lora_a_stacked")]
        self._layers = [m for m in modules if isinstance(m, Attention)]
        self._slot = slot
        self._embed: Any = model.embed_input_ids
        self._captured: _Captured | None = None
        self._refused = False

    def run(self, forward: Any, input_ids: Tensor, positions: Tensor) -> Tensor | None:
        """Return the hidden states of a step, or None if it must run eagerly."""
        rows = input_ids.shape[0]
        batch = None if self._refused else _decode_batch(rows)
        if batch is None:
            return None
        captured = self._captured
        operands = [*batch, *self._weights(), *(layer.kv_cache for layer in self._layers)]
        state: list[float] = [torch.get_num_threads(), *(x.data_ptr() for x in operands)]
        if slot := self._slot:
            state += [slot.request is None, slot.rank, slot.scale]
        hidden = self._embed(input_ids)
        if captured and captured.graph.rows >= rows and captured.state == state:
            captured.hidden[:rows].copy_(hidden)
            captured.positions[:rows].copy_(positions)
            return captured.graph.replay(rows).clone()
        self._captured = None
        hidden, positions = hidden.contiguous(), positions.clone()
        graph = Graph(lambda: forward(None, positions, None, hidden), rows, inner_ops=_ATTENTION)
        if graph.refused:
            log.info("decoding steps are not replayed: %s", graph.refused)
            self._refused = True
            return graph.output
        self._captured = _Captured(graph, hidden, positions, operands, state)
        return graph.output.clone()

    def _weights(self) -> list[Tensor]:
        held = [(*m._parameters.values(), *m._buffers.values()) for m in self._owners]
        held += [(*m.lora_a_stacked, *m.lora_b_stacked) for m in self._adapted]
        return [tensor for tensors in held for tensor in tensors if tensor is not None]


def _decode_batch(rows: int) -> list[Tensor] | None:
    """Return the metadata of a batch of one token per sequence; None if it is another one."""
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    metadata, slots = context.attn_metadata, context.slot_mapping
    if not isinstance(metadata, dict) or not isinstance(slots, dict):
        return None
    tensors: list[Tensor] = list({id(slot): slot for slot in slots.values()}.values())
    groups: dict[int, Any] = {id(group): group for group in metadata.values()}
    for group in groups.values():
        if group.num_actual_tokens != rows or group.seq_lens.shape[0] != rows or group.repeats:
            return None
        tensors += [group.query_start_loc, group.seq_lens, group.block_table]
    return tensors
