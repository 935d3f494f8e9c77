"""Tokens that several sequences of a step have in common, computed once, in an exact engine.

The responses to a prompt are sequences of their own to vLLM. They share the full blocks of their
prompt in the key-value cache; what does not fill a block, or is in flight, is computed for each. As
a row of an exact engine has the same bits in any batch, the rows of one of them serve all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hybridengine.engine.exact.steps import override_steps


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
