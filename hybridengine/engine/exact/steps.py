"""Another way to compute steps of an exact engine on a CPU, which leaves their bits as they are."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybridengine.kernels.graph import Graph


class AdapterSlot(Protocol):
    """The slot of an engine's adapters."""

    request: Any  # that selects the adapters; None: there are none
    rank: int
    scale: float

    def keep_scale(self) -> None: ...


def override_steps(
    model: nn.Module, run: Callable[[Callable[..., Any], Tensor, Tensor], Tensor | None]
) -> None:
    """Let `run(forward, input_ids, positions)` compute the steps of `model`, a model of vLLM.

    It returns the hidden states [T, H], or None for a step that is computed as before. So are steps
    of anything but token ids, and those in which hooks look at modules.

    forward: computes a step as before.
    """
    forward, modules = model.forward, list(model.modules())

    def overridden(
        self: Any,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> Any:
        usual = intermediate_tensors is None and inputs_embeds is None and not others
        is_observed = any(x._forward_hooks or x._forward_pre_hooks for x in modules)
        if usual and input_ids is not None and not is_observed:
            output = run(forward, input_ids, positions)
            if output is not None:
                return output
        return forward(input_ids, positions, intermediate_tensors, inputs_embeds, **others)

    model.forward = MethodType(overridden, model)


log = logging.getLogger(__name__)

_ATTENTION = ("vllm::unified_kv_cache_update", "vllm::unified_attention_with_output")


def use_decode_graphs(model: nn.Module, slot: AdapterSlot | None = None) -> None:
    """Let `model`, as `use_exact_operators` leaves it, replay its decoding steps.

    slot: of its adapters.
    """
    override_steps(model, _DecodeSteps(model, slot).run)


@dataclass
class _Captured:
    graph: Graph
    inputs: list[Tensor]  # the embeddings, positions and so on, which a step overwrites
    operands: list[Tensor]  # whatever else the kernels read, kept so that no other has its address
    state: list[float]  # their addresses, and by what else Python decides; a step has the same one


class _DecodeSteps:
    def __init__(self, model: nn.Module, slot: AdapterSlot | None) -> None:
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        modules = list(model.modules())
        self._owners = [m for m in modules if m._parameters or m._buffers]
        self._adapted: list[Any] = [m for m in modules if hasattr(m, "lora_a_stacked")]
        # Tensors that are attributes: an unpacked weight.
        items = ((m, *item) for m in modules for item in vars(m).items())
        self._attributes = [(m, name) for m, name, x in items if isinstance(x, Tensor)]
        self._layers: list[Any] = [m for m in modules if isinstance(m, AttentionLayerBase)]
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
        captured, (places, operands) = self._captured, batch
        operands += self._weights()
        for cache in (layer.kv_cache for layer in self._layers):
            operands += [cache] if isinstance(cache, Tensor) else cache
        state: list[float] = [torch.get_num_threads(), *(x.data_ptr() for x in operands)]
        if slot := self._slot:
            state += [slot.request is None, slot.rank, slot.scale]
        inputs = [self._embed(input_ids), positions.view(-1, rows)[0], *places]
        if captured and captured.graph.rows >= rows and captured.state == state:
            for captured_input, given in zip(captured.inputs, inputs, strict=True):
                captured_input[:rows].copy_(given)
            return captured.graph.replay(rows).clone()
        self._captured = None
        hidden, positions, *places = inputs = [x.clone() for x in inputs]
        with _places_in(places):
            run = lambda: forward(None, positions, None, hidden)  # noqa: E731
            graph = Graph(run, rows, inner_ops=_ATTENTION)
        if graph.refused:
            log.info("decoding steps are not replayed: %s", graph.refused)
            self._refused = True
            return graph.output
        self._captured = _Captured(graph, inputs, operands, state)
        return graph.output.clone()

    def _weights(self) -> list[Tensor]:
        held = [(*m._parameters.values(), *m._buffers.values()) for m in self._owners]
        held += [(*m.lora_a_stacked, *m.lora_b_stacked) for m in self._adapted]
        held += [(getattr(module, name),) for module, name in self._attributes]
        return [tensor for tensors in held for tensor in tensors if tensor is not None]


# Of metadata of vLLM's Gated DeltaNet: the places of the sequences' states, a tensor of each step.
_PLACES = "non_spec_state_indices_tensor"


def _decode_batch(rows: int) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return places and the other metadata of a batch of one token per sequence; None: another one.

    The other metadata are at the same addresses in each step.
    """
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    metadata, slots = context.attn_metadata, context.slot_mapping
    if not isinstance(metadata, dict) or not isinstance(slots, dict):
        return None
    tensors: list[Tensor] = list({id(slot): slot for slot in slots.values()}.values())
    places = list[Tensor]()
    groups: dict[int, Any] = {id(group): group for group in metadata.values()}
    for group in groups.values():
        if group.num_actual_tokens != rows:
            return None
        if hasattr(group, _PLACES):
            if group.num_decodes != rows:
                return None
            places.append(getattr(group, _PLACES)[:rows])
        elif group.seq_lens.shape[0] != rows or group.repeats:
            return None
        else:
            tensors += [group.query_start_loc, group.seq_lens, group.block_table]
    return places, tensors


@contextmanager
def _places_in(places: list[Tensor]) -> Iterator[None]:
    """While open, the metadata of vLLM's step has these places."""
    from vllm.forward_context import get_forward_context, override_forward_context

    context: Any = get_forward_context()
    groups = {id(x): x for x in context.attn_metadata.values()}
    stateful = {key: group for key, group in groups.items() if hasattr(group, _PLACES)}
    moved = zip(stateful.items(), places, strict=True)
    groups |= {key: replace(group, **{_PLACES: place}) for (key, group), place in moved}
    metadata = {name: groups[id(x)] for name, x in context.attn_metadata.items()}
    with override_forward_context(replace(context, attn_metadata=metadata)):
        yield


def compute_repeats_once(model: nn.Module) -> None:
    """Let `model`, as `use_exact_operators` leaves it on a CPU, compute equal tokens once."""
    embed: Any = model.embed_input_ids  # of all tokens, as its adapters are vLLM's

    def run(forward: Callable[..., Any], input_ids: Tensor, positions: Tensor) -> Tensor | None:
        step = _step(input_ids)
        if step is None:
            return None
        from vllm.forward_context import override_forward_context

        with override_forward_context(step.context):
            hidden = forward(None, positions[step.rows], None, embed(input_ids)[step.rows])
        return hidden[step.row_of]

    override_steps(model, run)


@dataclass
class _Step:
    context: Any  # vLLM's forward context of the rows that are computed
    rows: Tensor  # which tokens of the batch these are
    row_of: Tensor  # of every token of the batch, the row that is computed for it


def _step(input_ids: Tensor) -> _Step | None:
    """Return how to compute the step that vLLM is about to, or None if no tokens are repeated."""
    from vllm.forward_context import get_forward_context

    context: Any = get_forward_context()
    if not context.attn_metadata or not isinstance(context.attn_metadata, dict):
        return None
    batches = {id(batch): batch for batch in context.attn_metadata.values()}
    first = next(iter(batches.values()))
    tokens, sequences = input_ids.shape[0], first.seq_lens.shape[0]
    if first.num_actual_tokens != tokens or sequences == tokens:
        return None
    block_sizes = {
        id(batch): context.no_compile_layers[name].kv_cache.shape[2]
        for name, batch in context.attn_metadata.items()
    }
    starts = first.query_start_loc.tolist()
    tables = [(batch.block_table, block_sizes[key]) for key, batch in batches.items()]
    repeated = find_repeats(input_ids.tolist(), starts, first.seq_lens.tolist(), tables)
    kept = [i for i, j in enumerate(repeated) if i == j]
    if len(kept) == sequences:
        return None
    counts = [end - start for start, end in pairwise(starts)]
    query_start_loc = torch.tensor([0] + [counts[i] for i in kept]).cumsum(0)
    ends = dict(zip(kept, query_start_loc[1:].tolist(), strict=True))
    last = torch.tensor([ends[j] for j in repeated]).repeat_interleave(torch.tensor(counts))
    to_end = torch.tensor(starts[1:]).repeat_interleave(torch.tensor(counts)) - torch.arange(tokens)
    row_of = last - to_end
    rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in kept])
    is_repeat = torch.ones(tokens, dtype=torch.bool).index_fill_(0, rows, False)
    computed = {
        key: replace(
            batch,
            num_actual_tokens=len(rows),
            query_start_loc=query_start_loc.int(),
            seq_lens=batch.seq_lens[kept],
            block_table=batch.block_table[kept],
            slot_mapping=batch.slot_mapping[rows],
            repeats=(row_of[is_repeat], batch.slot_mapping[is_repeat]),
        )
        for key, batch in batches.items()
    }
    metadata = {name: computed[id(batch)] for name, batch in context.attn_metadata.items()}
    slots = {name: batch.slot_mapping for name, batch in metadata.items()}
    once = replace(context, attn_metadata=metadata, slot_mapping=slots, is_padding=None)
    return _Step(once, rows, row_of)


def find_repeats(
    token_ids: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[tuple[Tensor, int]],
) -> list[int]:
    """Return of every sequence an earlier one whose tokens of this step end in its own, or itself.

    Both are then of the same length, and what was computed before is in the same blocks.

    token_ids: of the step, sequence by sequence. starts: where those of each begin, and the end.
    lengths: of the sequences, with the tokens of the step.
    tables: (block table [sequences, blocks], block size) of each group of layers.
    """
    repeated = list(range(len(lengths)))
    of_length = defaultdict[tuple[int, int], list[int]](list)
    for i, length in enumerate(lengths):
        count = starts[i + 1] - starts[i]
        tail = token_ids[starts[i] : starts[i + 1]]
        candidates = of_length[length, tail[-1]]
        for j in candidates:
            if token_ids[max(starts[j], starts[j + 1] - count) : starts[j + 1]] == tail and all(
                torch.equal(table[i, :blocks], table[j, :blocks])
                for table, size in tables
                for blocks in (-(-(length - count) // size),)
            ):
                repeated[i] = j
                break
        else:
            candidates.append(i)
    return repeated
