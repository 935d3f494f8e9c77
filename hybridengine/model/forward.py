"""Log-probs of response tokens from one packed, padding-free forward pass.

Logits are computed only at positions whose next token has loss mask 1: [R, V], not [T, V]. For
log-probs only a chunk of these rows exists at a time (`hybridengine.model.head`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridengine.errors import ModelError
from hybridengine.model.head import LogProbTargets, has_fused_log_probs
from hybridengine.model.ulysses import SequenceShard, gather_rows


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of N concatenated sequences; R of them, in order, have loss mask 1.

    With `shard` set, input_ids, position_ids, logit_positions and target_ids are this rank's shard
    of the batch.
    """

    input_ids: torch.Tensor  # int64 [T]
    position_ids: torch.Tensor  # int64 [T], starts at 0 in every sequence
    cu_seqlens: torch.Tensor  # int32 [N + 1]
    max_seqlen: int
    logit_positions: torch.Tensor  # int64 [R], token_index of the row that predicts target_ids
    target_ids: torch.Tensor  # int64 [R]
    shard: SequenceShard | None = None


def pack_rollouts(
    rollouts: Sequence[tuple[Sequence[int], Sequence[int]]],
    device: torch.device | str = "cpu",
    sequence_parallel: dist.ProcessGroup | None = None,
) -> PackedBatch:
    """Pack (prompt_ids, response_ids) pairs; the R result rows are in the order of the pairs.

    sequence_parallel: the ranks that share this batch; all of them pass the same pairs.

    Raises:
        ModelError: a pair without prompt tokens, as nothing predicts its first token.

    Example:
        >>> batch = pack_rollouts([([5, 6], [7, 8]), ([9], [5])])
        >>> batch.logit_positions.tolist(), batch.target_ids.tolist()
        ([1, 2, 4], [7, 8, 5])
    """
    if empty := [i for i, (prompt, _) in enumerate(rollouts) if not len(prompt)]:
        raise ModelError(f"rollout {empty[0]} has no prompt tokens; a prompt needs at least one")
    return pack_batch(
        [[*prompt, *response] for prompt, response in rollouts],
        [[0] * len(prompt) + [1] * len(response) for prompt, response in rollouts],
        device,
        sequence_parallel,
    )


def pack_batch(
    sequences: Sequence[Sequence[int]],
    loss_mask: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    sequence_parallel: dist.ProcessGroup | None = None,
) -> PackedBatch:
    """Pack sequences; tokens with `loss_mask` 1 are predicted.

    loss_mask: for each sequence one 0 or 1 per token; 0 at the first token.
    """
    from hybridengine.kernels import pack_sequences

    packed = pack_sequences(sequences, loss_mask)
    input_ids, packed_mask = packed.values
    targets = packed_mask.nonzero().flatten()
    batch = PackedBatch(
        input_ids=input_ids.to(device),
        position_ids=packed.position_ids.to(device),
        cu_seqlens=packed.cu_seqlens.to(device),
        max_seqlen=packed.max_seqlen,
        logit_positions=(targets - 1).to(device),
        target_ids=input_ids[targets].to(device),
    )
    return batch if sequence_parallel is None else _split_sequence(batch, sequence_parallel)


def _split_sequence(batch: PackedBatch, group: dist.ProcessGroup) -> PackedBatch:
    """Return this rank's shard of `batch`: its tokens, and the rows whose logits it computes.

    Padding to a multiple of the group's size is appended as a sequence of its own. target_ids come
    from the full batch, as the target of a rank's last token is on the next rank.
    """
    size, rank = group.size(), group.rank()
    total = batch.input_ids.shape[0]
    padding = -total % size
    length = (total + padding) // size
    local = slice(rank * length, (rank + 1) * length)
    filler = torch.arange(padding, device=batch.input_ids.device)
    start, stop = torch.searchsorted(
        batch.logit_positions.cpu(), torch.tensor([local.start, local.stop])
    ).tolist()
    cu_seqlens = batch.cu_seqlens
    if padding:
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor([total + padding])])
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, torch.zeros_like(filler)])[local],
        position_ids=torch.cat([batch.position_ids, filler])[local],
        cu_seqlens=cu_seqlens,
        max_seqlen=max(batch.max_seqlen, padding),
        logit_positions=batch.logit_positions[start:stop] - local.start,
        target_ids=batch.target_ids[start:stop],
        shard=SequenceShard(group, start, stop, batch.logit_positions.shape[0]),
    )


def _forward(model: nn.Module, batch: PackedBatch, **options: object) -> Any:
    if batch.shard is not None:
        options["sequence_parallel"] = batch.shard.group
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


def packed_logits(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Return float32 logits [R, V] at `batch.logit_positions`."""
    keep = _logits_to_keep(model, batch)
    logits = _forward(model, batch, **keep).logits[0]
    if not keep:
        logits = logits[batch.logit_positions]
    if logits.shape[0] != batch.logit_positions.shape[0]:
        raise ModelError(
            f"{type(model).__name__} returned logits of {logits.shape[0]} positions, expected "
            f"{batch.logit_positions.shape[0]}: its logits_to_keep accepts no index tensor"
        )
    return logits


def packed_log_probs(
    model: nn.Module, batch: PackedBatch, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob of every target token and entropy of its distribution, float32 [R] each.

    Both are of softmax(logits / temperature), differentiable, and of the full batch on every rank
    of a sequence-parallel group. With `has_fused_log_probs` the full logits never exist.
    """
    from hybridengine.kernels import token_log_probs

    if has_fused_log_probs(model):
        keep = _logits_to_keep(model, batch)
        positions = None if keep else batch.logit_positions
        targets = LogProbTargets(batch.target_ids, temperature, positions)
        log_probs, entropy = _forward(model, batch, log_prob_targets=targets, **keep)
    else:
        logits = packed_logits(model, batch)  # no other reader: the gradient may overwrite them
        log_probs, entropy = token_log_probs(
            logits, batch.target_ids, temperature, inplace_backward=True
        )
    if batch.shard is not None:
        log_probs, entropy = gather_rows(log_probs, entropy, shard=batch.shard)
    return log_probs, entropy


def packed_values(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Return the values at `batch.logit_positions`, float32 [R], of a model with a value head."""
    values = packed_logits(model, batch)[:, 0]
    return values if batch.shard is None else gather_rows(values, shard=batch.shard)[0]
