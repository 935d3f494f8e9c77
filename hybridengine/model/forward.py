"""Log-probs of response tokens from one packed, padding-free forward pass.

Logits are computed only at positions whose next token has loss mask 1: [R, V], not [T, V]. For
log-probs only a chunk of these rows exists at a time (`hybridengine.model.head`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from hybridengine.errors import ModelError
from hybridengine.model.head import HeadFunction, accepts_head_function, log_prob_head
from hybridengine.model.kept import KeptIds
from hybridengine.model.router_replay import RouterReplay, merge_routes, pad_routes
from hybridengine.model.ulysses import SequenceShard, gather_rows

TokenIds = Sequence[int] | torch.Tensor  # a list, or integers [l] on the CPU


class SavedWork(NamedTuple):
    """What plain packing would compute and shared prefixes do not."""

    tokens: int = 0
    pairs: int = 0  # of a token and a key that it attends to, in a layer without a window


_NOTHING_SAVED = SavedWork()


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of N sequences, and R result rows: the tokens with loss mask 1, in their order.

    Plain packing concatenates the sequences. With `subtree_ends` a common prefix is there once
    (`hybridengine.kernels.pack_forest`): the sequences of cu_seqlens are then trees, and
    logit_positions are neither sorted nor unique, as the last token of a prompt predicts the first
    token of each of its responses.

    With `shard` set, input_ids, position_ids, logit_positions and target_ids are this rank's shard
    of the batch; R is then the number of rows of all ranks.

    A micro-batch is a part of a larger batch, whose rows it selects by `take`.
    is_dummy: the rank only takes part in the collectives of forward and backward.
    active_rows: int64, ascending, the rows that may have a gradient; None: all may.
    """

    input_ids: torch.Tensor  # int64 [T]
    position_ids: torch.Tensor  # int64 [T], of the token in its sequence, from 0
    cu_seqlens: torch.Tensor  # int32 [N + 1]
    max_seqlen: int
    logit_positions: torch.Tensor  # int64 [R], token_index of the row that predicts target_ids
    target_ids: torch.Tensor  # int64 [R]
    row_index: torch.Tensor  # int64 [R], of each row in the batch that this is a part of
    cu_rows: torch.Tensor  # int32 [sequences + 1], the rows of each sequence
    shard: SequenceShard | None = None
    subtree_ends: torch.Tensor | None = None  # int32 [T] of all ranks; None: plain packing
    tree_position_ids: torch.Tensor | None = None  # with subtree_ends: position_ids of all ranks
    saved: SavedWork = _NOTHING_SAVED  # over all ranks that share the batch
    routes: torch.Tensor | None = None  # int16 [T, layers, k], see `RouterReplay.replay`
    kept: KeptIds | None = None  # what target_ids were sampled from; None: the full vocabulary
    is_dummy: bool = False
    active_rows: torch.Tensor | None = None

    @overload
    def take(self, per_row: torch.Tensor) -> torch.Tensor: ...
    @overload
    def take(self, per_row: None) -> None: ...
    def take(self, per_row: torch.Tensor | None) -> torch.Tensor | None:
        """Select the rows of a column of the batch that this is a part of: [all rows] -> [R]."""
        return None if per_row is None else per_row[self.row_index]

    def as_dummy(self) -> PackedBatch:
        """Return it as a dummy, which counts for nothing."""
        return replace(self, is_dummy=True, saved=SavedWork())

    def to(self, device: torch.device | str) -> PackedBatch:
        """Move the tensors; `shard` stays on the CPU."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: x.to(device) for name, x in values.items() if isinstance(x, torch.Tensor)
        }
        return replace(self, **moved)


def pack_rollouts(
    rollouts: Sequence[tuple[TokenIds, TokenIds]],
    device: torch.device | str = "cpu",
    sequence_parallel: dist.ProcessGroup | None = None,
    *,
    shared_prefix: bool = False,
    routes: Sequence[torch.Tensor] | None = None,
) -> PackedBatch:
    """Pack (prompt_ids, response_ids) pairs; the R result rows are in the order of the pairs.

    sequence_parallel: the ranks that share this batch; all of them pass the same pairs.
    shared_prefix: pack common prefixes, such as the prompt of several responses, once.
    routes: for each pair int16 [t, layers, k], of its first t tokens.

    Raises:
        ModelError: a pair without prompt tokens, as nothing predicts its first token.

    Examples:
        >>> batch = pack_rollouts([([5, 6], [7, 8]), ([9], [5])])
        >>> batch.logit_positions.tolist(), batch.target_ids.tolist()
        ([1, 2, 4], [7, 8, 5])
    """
    if empty := [i for i, (prompt, _) in enumerate(rollouts) if not len(prompt)]:
        raise ModelError(f"rollout {empty[0]} has no prompt tokens; a prompt needs at least one")
    from hybridengine.kernels import pack_sequences

    parts = [torch.as_tensor(ids, dtype=torch.int64) for pair in rollouts for ids in pair]
    packed = pack_sequences(parts)
    is_response = torch.arange(len(parts)) % 2 == 1
    cu_seqlens = packed.cu_seqlens[::2].contiguous()
    batch = _pack(
        packed.values[0],
        cu_seqlens,
        is_response.repeat_interleave(packed.cu_seqlens.diff()),
        sequence_parallel,
        shared_prefix,
        None if routes is None else pad_routes(routes, cu_seqlens.diff().tolist()),
    )
    return batch.to(device)


def pack_batch(
    sequences: Sequence[Sequence[int]],
    loss_mask: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    sequence_parallel: dist.ProcessGroup | None = None,
    *,
    shared_prefix: bool = False,
) -> PackedBatch:
    """Pack sequences; tokens with `loss_mask` 1 are predicted.

    loss_mask: for each sequence one 0 or 1 per token; 0 at the first token. It may differ between
    equal prefixes: rows belong to sequences, not to packed tokens.
    shared_prefix: pack common prefixes once; plain packing where there are none.
    """
    from hybridengine.kernels import pack_sequences

    packed = pack_sequences(sequences, loss_mask)
    input_ids, is_target = packed.values
    batch = _pack(input_ids, packed.cu_seqlens, is_target, sequence_parallel, shared_prefix)
    return batch.to(device)


def _pack(
    input_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    is_target: torch.Tensor,
    sequence_parallel: dist.ProcessGroup | None,
    shared_prefix: bool,
    routes: torch.Tensor | None = None,
) -> PackedBatch:
    """Pack sequences that are end to end in `input_ids` [T]; all tensors are on the CPU."""
    lengths = cu_seqlens.diff().long()
    starts = cu_seqlens[:-1].long().repeat_interleave(lengths)
    targets = is_target.nonzero().flatten()
    batch = PackedBatch(
        input_ids=input_ids,
        position_ids=torch.arange(input_ids.shape[0]) - starts,
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths.tolist(), default=0),
        logit_positions=targets - 1,
        target_ids=input_ids[targets],
        row_index=torch.arange(targets.shape[0]),
        cu_rows=functional.pad(is_target.cumsum(0, dtype=torch.int32), (1, 0))[cu_seqlens],
        routes=routes,
    )
    if shared_prefix:
        batch = _share_prefixes(batch)
    return batch if sequence_parallel is None else _split_sequence(batch, sequence_parallel)


def _share_prefixes(batch: PackedBatch) -> PackedBatch:
    """Pack the common prefixes of plainly packed sequences once."""
    from hybridengine.kernels import pack_forest

    forest = pack_forest(batch.input_ids, batch.cu_seqlens)
    tokens = batch.input_ids.shape[0] - forest.input_ids.shape[0]
    if not tokens:
        return batch
    # Keys besides a token's own.
    others = int(batch.position_ids.sum()) - int(forest.position_ids.sum())
    return replace(
        batch,
        input_ids=forest.input_ids,
        position_ids=forest.position_ids,
        cu_seqlens=forest.cu_seqlens,
        max_seqlen=forest.max_seqlen,
        logit_positions=forest.token_index[batch.logit_positions],
        subtree_ends=forest.subtree_ends,
        tree_position_ids=forest.position_ids,
        saved=SavedWork(tokens, tokens + others),
        routes=None if batch.routes is None else merge_routes(batch.routes, forest.token_index),
    )


def _split_sequence(batch: PackedBatch, group: dist.ProcessGroup) -> PackedBatch:
    """Return this rank's shard of `batch`: its tokens, and the rows whose logits it computes.

    Padding to a multiple of the group's size is appended as a sequence, or tree, of its own.
    target_ids come from the full batch, as the target of a rank's last token is on the next rank.
    """
    size, rank = group.size(), group.rank()
    total = batch.input_ids.shape[0]
    padding = -total % size
    length = (total + padding) // size
    local = slice(rank * length, (rank + 1) * length)
    filler = torch.arange(padding)
    position_ids = torch.cat([batch.position_ids, filler])
    rows = (batch.logit_positions // length == rank).nonzero().flatten()
    cu_seqlens, subtree_ends, routes = batch.cu_seqlens, batch.subtree_ends, batch.routes
    if routes is not None:
        routes = torch.cat([routes, routes.new_full((padding, *routes.shape[1:]), -1)])[local]
    if padding:
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor([total + padding])])
    if subtree_ends is not None:
        ends = subtree_ends.new_full((padding,), total + padding)
        subtree_ends = torch.cat([subtree_ends, ends])
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, torch.zeros_like(filler)])[local],
        position_ids=position_ids[local],
        cu_seqlens=cu_seqlens,
        max_seqlen=max(batch.max_seqlen, padding),
        logit_positions=batch.logit_positions[rows] - local.start,
        target_ids=batch.target_ids[rows],
        shard=SequenceShard(group, rows, batch.logit_positions.shape[0]),
        subtree_ends=subtree_ends,
        tree_position_ids=None if subtree_ends is None else position_ids,
        routes=routes,
    )


def _forward(model: nn.Module, batch: PackedBatch, **options: object) -> Any:
    if batch.shard is not None:
        options["sequence_parallel"] = batch.shard.group
    if batch.subtree_ends is not None:
        options["subtree_ends"] = batch.subtree_ends
        options["tree_position_ids"] = batch.tree_position_ids
    replay = RouterReplay.of(model)
    with nullcontext() if replay is None else replay.of_batch(batch.routes):
        return _call(model, batch, options)


def _call(model: nn.Module, batch: PackedBatch, options: dict[str, object]) -> Any:
    return model(
        input_ids=batch.input_ids[None],
        position_ids=batch.position_ids[None],
        cu_seq_lens_q=batch.cu_seqlens,
        cu_seq_lens_k=batch.cu_seqlens,
        max_length_q=batch.max_seqlen,
        max_length_k=batch.max_seqlen,
        use_cache=False,
        **options,
    )


def _logits_to_keep(model: nn.Module, batch: PackedBatch) -> dict[str, object]:
    """Return the keyword that limits logits to `batch.logit_positions`, if the model has it."""
    known = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": batch.logit_positions} if known else {}


def _check_rows(model: nn.Module, batch: PackedBatch, rows: torch.Tensor) -> torch.Tensor:
    """Return `rows` [R, ...] of the head's input or output; ModelError if they are not R."""
    if rows.shape[0] != batch.logit_positions.shape[0]:
        raise ModelError(
            f"{type(model).__name__} passed {rows.shape[0]} positions to its head, expected "
            f"{batch.logit_positions.shape[0]}: its logits_to_keep accepts no index tensor"
        )
    return rows


def packed_logits(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Return float32 logits [R, V] at `batch.logit_positions`."""
    keep = _logits_to_keep(model, batch)
    logits = _forward(model, batch, **keep).logits[0]
    return _check_rows(model, batch, logits if keep else logits[batch.logit_positions])


def packed_head(
    model: nn.Module, batch: PackedBatch, head_function: HeadFunction
) -> tuple[Any, ...]:
    """Return what `head_function` computes of the hidden states [R, H] at `batch.logit_positions`.

    With `batch.shard` these are this rank's rows. The model must be one of which
    `accepts_head_function` is true.
    """
    keep = _logits_to_keep(model, batch)

    def at_positions(hidden: torch.Tensor, *head: Any) -> tuple[Any, ...]:
        rows = hidden if keep else hidden[batch.logit_positions]
        return head_function(_check_rows(model, batch, rows), *head)

    return _forward(model, batch, head_function=at_positions, **keep)


def packed_log_probs(
    model: nn.Module, batch: PackedBatch, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob of every target token and entropy of its distribution, float32 [R] each.

    Both are of softmax(logits / temperature), over the entries of `batch.kept` where it is given,
    differentiable, and of the full batch on every rank of a sequence-parallel group. With
    `accepts_head_function` the full logits never exist.
    """
    from hybridengine.kernels import token_log_probs

    kept = batch.kept
    if kept is not None and batch.shard is not None:
        kept = kept.take(batch.shard.rows)
    if accepts_head_function(model):
        head = log_prob_head(batch.target_ids, temperature, kept)
        log_probs, entropy = packed_head(model, batch, head)
    else:
        logits = packed_logits(model, batch)  # no other reader: the gradient may overwrite them
        mask = None if kept is None else kept.vocab_mask(logits.shape[1])
        log_probs, entropy = token_log_probs(
            logits, batch.target_ids, temperature, vocab_mask=mask, inplace_backward=True
        )
    if batch.shard is not None:
        log_probs, entropy = gather_rows(log_probs, entropy, shard=batch.shard)
    return log_probs, entropy


def packed_policy_loss(
    model: nn.Module, batch: PackedBatch, temperature: float = 1.0, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return (loss, log-probs [R], entropy [R], metrics) of `linear_policy_loss`.

    Its gradients are computed in the forward, with one matrix product less than by way of
    `packed_log_probs`; only the loss is differentiable. The model must be one of which
    `accepts_head_function` is true, and the batch must not be sharded.

    arguments: the keyword arguments of `linear_policy_loss`; per-token tensors are [R].
    """
    from hybridengine.kernels import linear_policy_loss

    def head(rows, weight, bias, logit_scale, softcap):  # type: ignore[no-untyped-def]
        return linear_policy_loss(
            rows,
            weight,
            batch.target_ids,
            temperature,
            bias=bias,
            logit_scale=logit_scale,
            softcap=softcap,
            active_rows=batch.active_rows,
            **arguments,
        )

    loss, log_probs, entropy, metrics = packed_head(model, batch, head)
    return loss, log_probs, entropy, metrics


def packed_cross_entropy(
    model: nn.Module, batch: PackedBatch, num_items: float, grad_scale: float = 1.0
) -> torch.Tensor:
    """Return the sum of -log p of the target tokens / num_items, over this rank's rows.

    Its gradients are computed in the forward where `accepts_head_function(model)`. grad_scale: as
    in `linear_cross_entropy`.
    """
    from hybridengine.kernels import linear_cross_entropy, token_log_probs

    if not accepts_head_function(model):
        logits = packed_logits(model, batch)
        log_probs, _ = token_log_probs(logits, batch.target_ids, inplace_backward=True)
        return -log_probs.sum() / num_items

    def head(rows, weight, bias, logit_scale, softcap):  # type: ignore[no-untyped-def]
        return linear_cross_entropy(
            rows, weight, batch.target_ids, bias=bias, logit_scale=logit_scale, softcap=softcap,
            num_items_in_batch=num_items, grad_scale=grad_scale,
        )  # fmt: skip

    loss, _ = packed_head(model, batch, head)
    return loss


def packed_distillation_loss(
    student: nn.Module,
    teacher: nn.Module,
    batch: PackedBatch,
    *,
    response_mask: torch.Tensor,
    num_items: torch.Tensor,
    **arguments: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss of this rank's rows, divergences [R] of the full batch).

    The student runs inside the module call of the teacher, so that the weights of both heads are
    gathered for `linear_distillation_loss`; no logits or hidden states are copied. Where one of the
    vocabularies is padded to more entries than the other, both are those of the smaller one.

    response_mask: bool [R], of the full batch. arguments: of `linear_distillation_loss`.
    """
    from hybridengine.kernels import linear_distillation_loss

    mask = response_mask
    if batch.shard is not None:
        mask = mask[batch.shard.rows.to(mask.device)]
    results: tuple[torch.Tensor, torch.Tensor] | None = None

    def teacher_head(*teacher_arguments: Any) -> tuple[torch.Tensor]:
        nonlocal results
        hidden, weight, bias, logit_scale, softcap = teacher_arguments

        def student_head(*student_arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            rows, own_weight, own_bias, own_scale, own_softcap = student_arguments
            vocab = min(weight.shape[0], own_weight.shape[0])
            first = lambda x: x if x is None or len(x) == vocab else x[:vocab]  # noqa: E731
            return linear_distillation_loss(
                rows, first(own_weight), hidden, first(weight), student_bias=first(own_bias),
                teacher_bias=first(bias), student_logit_scale=own_scale,
                student_softcap=own_softcap, teacher_logit_scale=logit_scale,
                teacher_softcap=softcap, response_mask=mask, num_items_in_batch=num_items,
                **arguments,
            )  # fmt: skip

        with torch.enable_grad():
            results = packed_head(student, batch, student_head)
        return (hidden.new_zeros(()),)  # not the loss: FSDP2 would prepare the teacher's backward

    with torch.no_grad():
        packed_head(teacher, batch, teacher_head)
    assert results is not None
    loss, divergences = results
    if batch.shard is not None:
        (divergences,) = gather_rows(divergences, shard=batch.shard)
    return loss, divergences


def packed_values(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Return the values at `batch.logit_positions`, float32 [R], of a model with a value head."""
    values = packed_logits(model, batch)[:, 0]
    return values if batch.shard is None else gather_rows(values, shard=batch.shard)[0]
