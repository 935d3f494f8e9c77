"""Log-probs of response tokens from one packed, padding-free forward pass.

Logits are computed only where the next token is a response token: [R, V], never [T, V], and for
log-probs only a chunk of rows at a time (`hybridengine.model.head`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridengine.errors import ModelError
from hybridengine.model.head import LogProbsOf, gives_log_probs
from hybridengine.model.ulysses import SequencePart, gather_rows, split_sequence

__all__ = ["PackedBatch", "pack_rollouts", "pack_targets", "packed_log_probs", "packed_logits"]


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of N sequences end to end; R of them are response tokens, in order.

    With `part` set, input_ids, position_ids, logit_positions and target_ids are one rank's part.
    """

    input_ids: torch.Tensor  # int64 [T]
    position_ids: torch.Tensor  # int64 [T], counts from 0 in every sequence
    cu_seqlens: torch.Tensor  # int32 [N + 1]
    max_seqlen: int
    logit_positions: torch.Tensor  # int64 [R], row whose next token is target_ids
    target_ids: torch.Tensor  # int64 [R]
    part: SequencePart | None = None


def pack_rollouts(
    rollouts: Sequence[tuple[Sequence[int], Sequence[int]]],
    device: torch.device | str = "cpu",
    sequence_parallel: dist.ProcessGroup | None = None,
) -> PackedBatch:
    """Pack (prompt_ids, response_ids) pairs; results of R rows follow the order of the pairs.

    sequence_parallel: the ranks that share this batch, each called with the same pairs.

    Raises:
        ModelError: a pair without prompt tokens, since its first token has no probability.

    Example:
        >>> batch = pack_rollouts([([5, 6], [7, 8]), ([9], [5])])
        >>> batch.logit_positions.tolist(), batch.target_ids.tolist()
        ([1, 2, 4], [7, 8, 5])
    """
    if empty := [i for i, (prompt, _) in enumerate(rollouts) if not len(prompt)]:
        raise ModelError(f"rollout {empty[0]} has no prompt tokens; a prompt needs at least one")
    return pack_targets(
        [[*prompt, *response] for prompt, response in rollouts],
        [[0] * len(prompt) + [1] * len(response) for prompt, response in rollouts],
        device,
        sequence_parallel,
    )


def pack_targets(
    sequences: Sequence[Sequence[int]],
    is_target: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    sequence_parallel: dist.ProcessGroup | None = None,
) -> PackedBatch:
    """Pack sequences of which the tokens where `is_target` is 1 are to be predicted.

    is_target: as long as its sequence; 0 at the first token, which nothing precedes.
    """
    from hybridengine.kernels import pack_sequences

    packed = pack_sequences(sequences, is_target)
    input_ids, is_response = packed.values
    responses = is_response.nonzero().flatten()
    batch = PackedBatch(
        input_ids=input_ids.to(device),
        position_ids=packed.position_ids.to(device),
        cu_seqlens=packed.cu_seqlens.to(device),
        max_seqlen=packed.max_seqlen,
        logit_positions=(responses - 1).to(device),
        target_ids=input_ids[responses].to(device),
    )
    return batch if sequence_parallel is None else split_sequence(batch, sequence_parallel)


def _run(model: nn.Module, batch: PackedBatch, **options: object) -> Any:
    if batch.part is not None:
        options["sequence_parallel"] = batch.part.group
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


def _kept(model: nn.Module, batch: PackedBatch) -> dict[str, object]:
    """Only some logits, where the model can be told so."""
    known = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": batch.logit_positions} if known else {}


def packed_logits(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Logits [R, V], float32, at `batch.logit_positions` (of this rank's part)."""
    kept = _kept(model, batch)
    logits = _run(model, batch, **kept).logits[0]
    if not kept:
        logits = logits[batch.logit_positions]
    if logits.shape[0] != batch.logit_positions.shape[0]:
        raise ModelError(
            f"{type(model).__name__} gave logits of {logits.shape[0]} positions where "
            f"{batch.logit_positions.shape[0]} were asked for: its logits_to_keep takes no index"
        )
    return logits


def packed_log_probs(
    model: nn.Module, batch: PackedBatch, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of every response token and entropy of its distribution: float32 [R] each.

    Both are of softmax(logits / temperature) and differentiable in the model's parameters. Where
    the model `gives_log_probs`, its logits never exist as a whole.
    """
    from hybridengine.kernels import token_log_probs

    if gives_log_probs(model):
        kept = _kept(model, batch)
        positions = None if kept else batch.logit_positions
        asked = LogProbsOf(batch.target_ids, temperature, positions)
        rows = _run(model, batch, log_probs_of=asked, **kept)
    else:
        logits = packed_logits(model, batch)  # read by nobody else: the gradient takes their memory
        rows = token_log_probs(logits, batch.target_ids, temperature, inplace_backward=True)
    return rows if batch.part is None else gather_rows(*rows, part=batch.part)
