"""TRL's functions of log-probs and entropy, by their names in `trl.trainer.utils`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridengine.kernels import linear_token_log_probs, token_entropy, token_log_probs

_IGNORE = -100
_OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_MEAN_ROWS = 512  # of soft-capped logits at a time, for their mean


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """Return the log-probabilities of `index` in the softmax of logits / temperature.

    Args:
        logits: [..., V], any float dtype.
        index: [...], or [..., K]: K entries of every row.
        row_mask: like `index`; rows where it is 0 are not read and give 0.

    Returns:
        Like `index`, differentiable with respect to the logits. The dtype is TRL's: float32 on a
        GPU for an index [...]; else that of the logits, and 16-bit results are rounded as TRL's.
    """
    _check_temperature(temperature)
    single = index.dim() == logits.dim() - 1
    if _rounds(logits) or (not single and (logits.itemsize == 2 or not index.numel())):
        return _rounded_log_probs(logits, index, temperature, row_mask)
    return token_log_probs(logits, _masked(index, row_mask), temperature)[0]


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """Return the entropy in nats of the softmax of every row of logits [..., V], as [...].

    chunk_size is TRL's; the logits are read once, whatever it is. The dtype is that of
    `selective_log_softmax`.
    """
    if _rounds(logits):
        chunks = logits.reshape(-1, logits.shape[-1]).split(chunk_size)
        log_p = (chunk.log_softmax(-1) for chunk in chunks)
        return torch.cat([-(p.exp() * p).sum(-1) for p in log_p]).reshape(logits.shape[:-1])
    return token_entropy(logits)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return both of one pass over the logits: log-probs [...] of index [...], and entropy [...].

    The arguments and dtypes are those of `selective_log_softmax`.
    """
    _check_temperature(temperature)
    if _rounds(logits):
        log_probs = _rounded_log_probs(logits, index, temperature, row_mask)
        entropy = entropy_from_logits(logits if temperature == 1.0 else logits / temperature)
        entropy = entropy if row_mask is None else entropy.masked_fill(row_mask == 0, 0.0)
    else:
        log_probs, entropy = token_log_probs(logits, _masked(index, row_mask), temperature)
    return log_probs, entropy if entropy_requires_grad else entropy.detach()


class ChunkedLogProbFunction(torch.autograd.Function):
    """`apply` as that of TRL's autograd function; the operator has its own derivative."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        return cls.forward(None, *args, **kwargs)

    @staticmethod
    def forward(
        ctx: None,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OPTIONAL_OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """Return log_probs, entropy, log_sum_sq_probs, mean_logits and is_top1 of every row.

        Args:
            hidden: [N, H]; weight: [V, H]; bias: [V] or None; targets: [N].
            chunk_size: TRL's; chunks here fit a budget in bytes.
            outputs: the optional results to compute; the others are None. Log-probs and entropy are
                differentiable.
        """
        device = hidden.device.type
        dtype = hidden.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return hidden_scores(
                hidden.to(dtype),
                weight.to(dtype),
                targets,
                temperature,
                outputs,
                bias=None if bias is None else bias.to(dtype),
                logit_scale=logit_scale,
                softcap=final_logit_softcapping,
            )


def hidden_scores(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float,
    outputs: tuple[str, ...],
    **head: Any,
) -> tuple[Tensor | None, ...]:
    """Return the five results of `ChunkedLogProbFunction`, [N] each or None, from one dtype.

    head: its bias, logit_scale and softcap.
    """
    wants_stats = "is_top1" in outputs or "log_sum_sq_probs" in outputs
    log_probs, entropy, *stats = linear_token_log_probs(
        hidden, weight, ids, temperature, return_stats=wants_stats, **head
    )
    mean = None
    if "mean_logits" in outputs:
        mean = _mean_logits(hidden, weight, **head) / temperature
    return (
        log_probs,
        entropy if "entropy" in outputs else None,
        stats[0].sum_p_squared.log() if "log_sum_sq_probs" in outputs else None,
        mean,
        stats[0].argmax == ids if "is_top1" in outputs else None,
    )


def logits_scores(
    logits: Tensor, ids: Tensor, temperature: float, outputs: tuple[str, ...]
) -> tuple[Tensor | None, ...]:
    """Return the same five results from logits [N, V]."""
    log_probs, entropy, stats = token_log_probs(logits, ids, temperature, return_stats=True)
    with torch.no_grad():
        mean = logits.mean(-1, dtype=torch.float32) if "mean_logits" in outputs else None
        is_top1 = logits.argmax(-1) == ids if "is_top1" in outputs else None
    return (
        log_probs,
        entropy if "entropy" in outputs else None,
        stats.sum_p_squared.log() if "log_sum_sq_probs" in outputs else None,
        None if mean is None else mean / temperature,
        is_top1,
    )


@torch.no_grad()
def _mean_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_scale: float, softcap: float | None
) -> Tensor:
    """Return the mean over the vocabulary of the logits of every row [N], before temperature."""
    if softcap is None:  # the mean is linear: that of all rows of the weight
        mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
        return logit_scale * (mean if bias is None else mean + bias.float().mean())
    means = []
    for rows in hidden.split(_MEAN_ROWS):
        logits = torch.nn.functional.linear(rows, weight, bias).float()
        means.append(softcap * torch.tanh(logits * (logit_scale / softcap)).mean(-1))
    return torch.cat(means)


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def _masked(index: Tensor, row_mask: Tensor | None) -> Tensor:
    return index if row_mask is None else index.masked_fill(row_mask == 0, _IGNORE)


def _rounds(logits: Tensor) -> bool:
    """Tell whether TRL computes in the logits' 16 bits: outside of its GPU kernel it rounds."""
    return logits.dtype in (torch.float16, torch.bfloat16) and not logits.is_cuda


def _rounded_log_probs(
    logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None
) -> Tensor:
    """Return log-probs in the logits' 16 bits, as TRL rounds them."""
    log_p = (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)
    single = index.dim() == logits.dim() - 1
    log_probs = log_p.gather(-1, index.unsqueeze(-1) if single else index)
    log_probs = log_probs.squeeze(-1) if single else log_probs
    return log_probs if row_mask is None else log_probs.masked_fill(row_mask == 0, 0.0)
