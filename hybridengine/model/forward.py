"""Log-probs of response tokens from one packed, padding-free forward pass.

Logits are computed only at positions whose next token has loss mask 1: [R, V], not [T, V]. For
log-probs only a chunk of these rows exists at a time (`hybridengine.model.head`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from hybridengine.kernels import (
    RolloutSupport,
    linear_cross_entropy,
    linear_policy_loss,
    linear_token_log_probs,
    sparse_linear_token_log_probs,
    token_log_probs,
)
from hybridengine.kernels.linear import shares_rows, take_rows
from hybridengine.kernels.sparse_linear import sparse_linear_policy_loss
from hybridengine.model.attention import sequence_ends_given
from hybridengine.model.exact import has_exact_operators
from hybridengine.model.extensions import hooks_of
from hybridengine.model.head import HeadFunction, KeptIds, accepts_head_function
from hybridengine.model.packed import PackedBatch, SequenceShard
from hybridengine.run.errors import ModelError


def _forward(model: nn.Module, batch: PackedBatch, **options: object) -> Any:
    position_ids = batch.position_ids[None]
    arguments: dict[str, object] = {"position_ids": position_ids}
    if batch.shard is not None:
        arguments["sequence_parallel"] = batch.shard.group
    if batch.subtree_ends is not None:
        arguments["subtree_ends"] = batch.subtree_ends
        arguments["tree_position_ids"] = batch.tree_position_ids
    with ExitStack() as stack:
        stack.enter_context(sequence_ends_given())
        for part in batch.parts.values():
            arguments.update(part.arguments(position_ids))
            stack.enter_context(part.context(model))
        for hook in hooks_of(model):
            stack.enter_context(hook.forward(batch))
        return model(
            input_ids=batch.input_ids[None],
            cu_seq_lens_q=batch.cu_seqlens,
            cu_seq_lens_k=batch.cu_seqlens,
            max_length_q=batch.max_seqlen,
            max_length_k=batch.max_seqlen,
            use_cache=False,
            **arguments,
            **options,
        )


def _at_positions(
    model: nn.Module, positions: torch.Tensor
) -> tuple[dict[str, object], Callable[[torch.Tensor], torch.Tensor]]:
    """Return the keyword that limits logits to `positions`, if the model has it.

    Returns also what selects their rows [R, ...] of the head's input or output; it raises
    ModelError if they are not R.
    """
    code = inspect.unwrap(model.forward).__code__  # its signature takes 21 us
    known = "logits_to_keep" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    def select(rows: torch.Tensor) -> torch.Tensor:
        if known and rows.shape[0] != positions.shape[0]:
            raise ModelError(
                f"{type(model).__name__} passed {rows.shape[0]} positions to its head, expected "
                f"{positions.shape[0]}: its logits_to_keep accepts no index tensor"
            )
        return rows if known else rows[positions]

    return {"logits_to_keep": positions} if known else {}, select


def packed_logits(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Return float32 logits [R, V] at `batch.logit_positions`."""
    keep, select = _at_positions(model, batch.logit_positions)
    return select(_forward(model, batch, **keep).logits[0])


def packed_head(
    model: nn.Module, batch: PackedBatch, head_function: HeadFunction, takes_index: bool = False
) -> tuple[Any, ...]:
    """Return what `head_function` computes of the hidden states [R, H] at `batch.logit_positions`.

    With `batch.shard` these are this rank's rows. The model must be one of which
    `accepts_head_function` is true.
    takes_index: the function takes `hidden_index`: the row of [D, H], which has each hidden state
      once where the losses share rows, for each of the R.
    """
    distinct = batch.distinct_positions if shares_rows(batch.logit_positions.device) else None
    positions, index = distinct or (batch.logit_positions, None)
    keep, select = _at_positions(model, positions)

    def at_positions(hidden: torch.Tensor, weight: torch.Tensor, **transform: Any) -> Any:
        rows = select(hidden)
        if takes_index:
            transform["hidden_index"] = index
        elif index is not None:
            rows = take_rows(rows, index)
        return head_function(rows, weight, **transform)

    return _forward(model, batch, head_function=at_positions, **keep)


def gather_rows(*rows: torch.Tensor, shard: SequenceShard) -> tuple[torch.Tensor, ...]:
    """Gather per-row results [R_local] of all ranks to [R] each, on every rank.

    Differentiable: every rank computes the same loss, and receives the gradient of its own rows.
    """
    full = rows[0].new_zeros(len(rows), shard.num_rows)
    index = shard.rows.to(full.device)
    full[:, index] = torch.stack(rows).detach()
    dist.all_reduce(full, group=shard.group)  # exact: one rank's value plus zeros
    gathered = tuple(row.clone() for row in full)
    for out, row in zip(gathered, rows, strict=True):
        out[index] = row  # the same values, with their gradient
    return gathered


def packed_log_probs(
    model: nn.Module, batch: PackedBatch, temperature: float = 1.0
) -> tuple[torch.Tensor, ...]:
    """Return log-prob of every target token and entropy of its distribution, float32 [R] each.

    Both are of softmax(logits / temperature), over the entries of the part "kept" (`KeptIds`) where
    the batch has it, differentiable, and of the full batch on every rank of a sequence-parallel
    group. With `accepts_head_function` the full logits never exist.
    """
    kept = cast("KeptIds | None", batch.parts.get("kept"))

    def head(rows: torch.Tensor, weight: torch.Tensor, **transform: Any) -> tuple[Any, ...]:
        given = rows, weight, batch.target_ids
        transform |= {"temperature": temperature, "deterministic": has_exact_operators(model)}
        if kept is None:
            return linear_token_log_probs(*given, **transform)
        return sparse_linear_token_log_probs(*given, *kept.entries(weight.shape[0]), **transform)

    if accepts_head_function(model):
        results = packed_head(model, batch, head, takes_index=kept is None)
    else:
        logits = packed_logits(model, batch)  # no other reader: the gradient may overwrite them
        mask = None if kept is None else kept.vocab_mask(logits.shape[1])
        results = token_log_probs(
            logits, batch.target_ids, temperature, vocab_mask=mask, inplace_backward=True
        )
    return results if batch.shard is None else gather_rows(*results, shard=batch.shard)


def packed_policy_loss(
    model: nn.Module, batch: PackedBatch, temperature: float = 1.0, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return (loss, log-probs [R], entropy [R], metrics) of `linear_policy_loss`.

    Its gradients are computed in the forward, with one matrix product less than by way of
    `packed_log_probs`; only the loss is differentiable. With the part "kept" it is
    `sparse_linear_policy_loss`, over these entries. The model must be one of which
    `accepts_head_function` is true, and the batch must not be sharded. With the part "likely" the
    score is centered.

    arguments: the keyword arguments of `linear_policy_loss`; per-token tensors are [R].
    """
    arguments |= {"active_rows": batch.active_rows, "deterministic": has_exact_operators(model)}
    arguments["temperature"] = temperature
    kept, likely = (cast("KeptIds | None", batch.parts.get(x)) for x in ("kept", "likely"))
    if likely is not None and likely.log_probs is not None:
        arguments["score_centering"] = RolloutSupport(likely.ids, likely.cu_kept, likely.log_probs)

    def head(rows: torch.Tensor, weight: torch.Tensor, **transform: Any) -> tuple[Any, ...]:
        given, options = (rows, weight, batch.target_ids), transform | arguments
        if kept is None:
            return linear_policy_loss(*given, **options)
        return sparse_linear_policy_loss(*given, *kept.entries(weight.shape[0]), **options)

    loss, log_probs, entropy, metrics = packed_head(model, batch, head, takes_index=kept is None)
    return loss, log_probs, entropy, metrics


def packed_cross_entropy(
    model: nn.Module, batch: PackedBatch, num_items: float, grad_scale: float = 1.0
) -> torch.Tensor:
    """Return the sum of -log p of the target tokens / num_items, over this rank's rows.

    Its gradients are computed in the forward where `accepts_head_function(model)`. grad_scale: as
    in `linear_cross_entropy`.
    """
    if not accepts_head_function(model):
        logits = packed_logits(model, batch)
        log_probs, _ = token_log_probs(logits, batch.target_ids, inplace_backward=True)
        return -log_probs.sum() / num_items

    def head(rows: torch.Tensor, weight: torch.Tensor, **transform: Any) -> tuple[Any, ...]:
        scales: dict[str, Any] = {"num_items_in_batch": num_items, "grad_scale": grad_scale}
        return linear_cross_entropy(rows, weight, batch.target_ids, **scales, **transform)

    loss, _ = packed_head(model, batch, head)
    return loss


def packed_values(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Return the values at `batch.logit_positions`, float32 [R], of a model with a value head."""
    values = packed_logits(model, batch)[:, 0]
    return values if batch.shard is None else gather_rows(values, shard=batch.shard)[0]
