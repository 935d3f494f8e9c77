"""verl's log-probs and entropies: `verl.utils.torch_functional`, its fused heads, vocab-parallel.

Results are float32 for every dtype of the inputs (verl's fallbacks return that of the logits, where
bfloat16 rounds an entropy of 10 to steps of 0.06). Logits of -inf and labels of -100 are defined as
in `token_log_probs`.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridengine.integrations.verl.padding import pad_input, unpad_input
from hybridengine.kernels import (
    linear_token_log_probs,
    sparse_linear_token_log_probs,
    token_entropy,
    token_log_probs,
)
from hybridengine.model import KeptIds

__all__ = [
    "FusedLinearForPPO",
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "linear_cross_entropy",
    "log_probs_from_logits_all_rmpad",
    "log_probs_from_logits_response",
    "log_probs_from_logits_response_rmpad",
    "logprobs_from_logits",
    "logprobs_from_logits_flash_attn",
    "logprobs_from_logits_naive",
    "logprobs_from_logits_v2",
    "vocab_parallel_entropy",
    "vocab_parallel_entropy_with_chunking",
    "vocab_parallel_log_probs_from_logits",
    "vocab_parallel_log_probs_from_logits_response_rmpad",
]

# The entries that sampling kept for each label of the running step (verl/kept.py).
KEPT: ContextVar[KeptIds | None] = ContextVar("KEPT", default=None)
_IGNORED = -100  # label of a row that is not read


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Compute the log-probs of `labels`: logits [..., V], labels as many; float32 [...].

    inplace_backward: write the gradient over the logits, as verl does where flash-attn is
      installed. If something else needs them, autograd raises an error.
    """
    labels = labels.reshape(logits.shape[:-1])  # verl passes [1, T] with logits [T, V]
    return token_log_probs(logits, labels, inplace_backward=inplace_backward)[0]


def logprobs_from_logits_flash_attn(
    logits: Tensor, labels: Tensor, inplace_backward: bool = True
) -> Tensor:
    """`logprobs_from_logits`."""
    return logprobs_from_logits(logits, labels, inplace_backward)


def logprobs_from_logits_naive(logits: Tensor, labels: Tensor) -> Tensor:
    """`logprobs_from_logits` that leaves the logits as they are."""
    return logprobs_from_logits(logits, labels, inplace_backward=False)


def logprobs_from_logits_v2(logits: Tensor, labels: Tensor) -> Tensor:
    """`logprobs_from_logits` that leaves the logits as they are."""
    return logprobs_from_logits(logits, labels, inplace_backward=False)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Compute the entropy of every row: logits [..., V]; float32 [...], differentiable."""
    return token_entropy(logits)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """`entropy_from_logits`, which makes no [T, V] temporary, so that no chunks are needed."""
    return token_entropy(logits)


def log_probs_from_logits_response(
    input_ids: Tensor, logits: Tensor, response_length: int
) -> Tensor:
    """Compute the log-probs of the last `response_length` of input_ids [B, L] from [B, L, V]."""
    return logprobs_from_logits(
        logits[:, -response_length - 1 : -1], input_ids[:, -response_length:]
    )


def log_probs_from_logits_response_rmpad(
    input_ids: Tensor, attention_mask: Tensor, logits_rmpad: Tensor, response_length: int
) -> Tensor:
    """Compute the response's log-probs [B, response_length] from the logits of unpadded tokens.

    input_ids, attention_mask: [B, L]; logits_rmpad: [T, V] with T unmasked tokens. Logits of
    prompt tokens, whose log-probs are not returned, are not read.
    """
    packed, indices, *_ = unpad_input(input_ids.unsqueeze(-1), attention_mask)
    batch_size, seqlen = input_ids.shape
    return log_probs_from_logits_all_rmpad(
        packed.view(1, -1), logits_rmpad, indices, batch_size, seqlen, response_length
    )


def log_probs_from_logits_all_rmpad(
    input_ids_rmpad: Tensor,
    logits_rmpad: Tensor,
    indices: Tensor,
    batch_size: int,
    seqlen: int,
    response_length: int,
) -> Tensor:
    """`log_probs_from_logits_response_rmpad` of input_ids_rmpad [1, T] at `indices` of [B * L]."""
    labels = _response_labels(input_ids_rmpad.flatten(), indices, seqlen, response_length)
    log_probs = logprobs_from_logits(logits_rmpad, labels)
    return _responses(log_probs, indices, batch_size, seqlen, response_length)


def _response_labels(ids: Tensor, indices: Tensor, seqlen: int, response_length: int) -> Tensor:
    """Return the next token of every packed token, _IGNORED where it is not in the response."""
    position = indices % seqlen
    in_response = (position >= seqlen - response_length - 1) & (position < seqlen - 1)
    return torch.where(in_response, ids.roll(-1), _IGNORED)


def _responses(
    log_probs: Tensor, indices: Tensor, batch_size: int, seqlen: int, response_length: int
) -> Tensor:
    """Return packed log-probs [T] as [B, response_length], shifted to the tokens they are of."""
    padded = pad_input(log_probs.unsqueeze(-1), indices, batch_size, seqlen).squeeze(-1)
    return padded[:, -response_length - 1 : -1]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute (log-probs, entropy) from hidden states, without logits in memory.

    Args:
        hidden: [..., H]; weight: [V, H]; labels: [...], T in all.
        reduction: how the log-probs are reduced: none, sum or mean.
        dist_process_group: vocabulary-parallel ranks with weight [V_r, H] each. As in verl, the
            gradient of hidden is this rank's part: the caller sums it over the ranks.

    Returns:
        float32: log-probs [T] or, reduced, 0-d; entropy [T].
    """
    if reduction.lower() not in ("none", "sum", "mean"):
        raise ValueError(f"Invalid reduction: {reduction}; expected none, sum or mean.")
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if dist_process_group is not None and hidden.requires_grad:
        # The operator sums the gradient over the ranks, and so does the caller.
        ranks = dist.get_world_size(dist_process_group)
        hidden = hidden.view_as(hidden)
        hidden.register_hook(lambda gradient: gradient / ranks)
    log_probs, entropy = _head(hidden, weight, labels, temperature, dist_process_group)
    if reduction.lower() != "none":
        log_probs = log_probs.sum() if reduction.lower() == "sum" else log_probs.mean()
    return log_probs, entropy


class FusedLinearForPPO(nn.Module):
    """(log-probs, entropy) of `input_ids` from hidden states, without logits in memory."""

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        self.chunk_size, self.impl_backend = chunk_size, impl_backend  # verl's; not used

    def forward(
        self,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """hidden_states [..., H], vocab_weights [V, H], input_ids [...]: float32 [...] both."""
        return _head(hidden_states, vocab_weights, input_ids.long(), temperature)


def _head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropy of labels [...], over the kept entries where there are some."""
    if (kept := KEPT.get()) is None:
        return linear_token_log_probs(hidden, weight, labels, temperature, group=group)
    ranks = 1 if group is None else dist.get_world_size(group)
    given = hidden.reshape(-1, hidden.shape[-1]), weight, labels.flatten()
    entries = kept.entries(weight.shape[0] * ranks)
    log_probs, entropy = sparse_linear_token_log_probs(*given, *entries, temperature, group=group)
    return log_probs.view(labels.shape), entropy.view(labels.shape)


def vocab_parallel_entropy(vocab_parallel_logits: Tensor) -> Tensor:
    """Compute the entropy [...] where every tensor-parallel rank has logits [..., V_r]."""
    return token_entropy(vocab_parallel_logits, group=_tensor_parallel_group())


def vocab_parallel_entropy_with_chunking(
    vocab_parallel_logits: Tensor, chunk_size: int = 2048
) -> Tensor:
    """`vocab_parallel_entropy`, which makes no [T, V_r] temporary."""
    return token_entropy(vocab_parallel_logits, group=_tensor_parallel_group())


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the log-probs of labels [...] where every rank has logits [..., V_r]."""
    return token_log_probs(logits, labels, group=_tensor_parallel_group())[0]


def vocab_parallel_log_probs_from_logits_response_rmpad(
    input_ids: Tensor, attention_mask: Tensor, logits_rmpad: Tensor, response_length: int
) -> Tensor:
    """`log_probs_from_logits_response_rmpad` where every rank has logits_rmpad [T, V_r]."""
    packed, indices, *_ = unpad_input(input_ids.unsqueeze(-1), attention_mask)
    batch_size, seqlen = input_ids.shape
    labels = _response_labels(packed.flatten(), indices, seqlen, response_length)
    log_probs = vocab_parallel_log_probs_from_logits(logits_rmpad, labels)
    return _responses(log_probs, indices, batch_size, seqlen, response_length)


def _tensor_parallel_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()
