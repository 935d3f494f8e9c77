"""The most likely entries of a sampling distribution, which score centering compares with p."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _check as check
from .op import SampledTokens

_GREEDY = 1e-5  # a temperature below it is greedy, and log-probs are those at temperature 1


def likely_log_probs(
    logits: Tensor,
    sampled: SampledTokens,
    log_probs: Tensor,
    temperature: Tensor | None,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probs of the most likely entries of the distributions of `sample_tokens`.

    Args:
        logits: [B, V], as given to `sample_tokens`; sampled: what it returned.
        log_probs: [B, 1], of the sampled tokens.
        temperature: [B], as given to `sample_tokens`; None: of greedy rows.
        count: of entries in a row; V where it is more.

    Returns:
        (ids int32 [B, 1 + count], log-probs [B, 1 + count]): the sampled token, then the entries in
        descending order, -inf from the first one on that sampling cut.

    Raises:
        ValueError: shapes that do not fit, or a count below 1.

    Examples:
        >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
        >>> keys = torch.tensor([7]), torch.tensor([0])
        >>> sampled = sample_tokens(logits, *keys, top_k=2)
        >>> ids, log_probs = likely_log_probs(logits, sampled, sampled.log_probs[:, None], None, 3)
        >>> ids[0, 1:].tolist(), [round(x, 4) for x in log_probs[0, 1:].tolist()]
        ([1, 2, 0], [-0.3133, -1.3133, -inf])
    """
    op = "likely_log_probs"
    sizes: check.Sizes = {}
    check.shape(op, "logits", logits, "B V", sizes)
    check.shape(op, "log_probs", log_probs, "B K", sizes | {"K": (1, "one token of a row")})
    if temperature is not None:
        check.shape(op, "temperature", temperature, "B", sizes)
    count = min(check.integer(op, "count", count, at_least=1), logits.shape[1])
    values, ids = logits.float().topk(count)
    tokens = sampled.tokens.unsqueeze(1)
    values = values - logits.gather(1, tokens).float()
    if temperature is not None:
        values = values / temperature.where(temperature >= _GREEDY, 1).unsqueeze(1)
    kept = sampled.num_kept.where(sampled.num_kept > 0, count).unsqueeze(1)
    is_kept = torch.arange(count, device=logits.device) < kept
    values = (values + log_probs).where(is_kept, -torch.inf)
    return torch.cat([tokens, ids], 1).int(), torch.cat([log_probs, values], 1)


def ragged_likely(
    ids: Sequence[int], log_probs: Sequence[float], num_tokens: int
) -> dict[str, list[int] | list[float]]:
    """Return the most likely entries of `num_tokens` tokens end to end, in ascending order of ids.

    Args:
        ids, log_probs: flat, of every token 1 + K as `likely_log_probs` returns them. The sampled
            one is left out: what is recorded may not depend on what was sampled. So are entries
            of log-prob -inf.

    Returns:
        num_likely: how many entries each token has; likely_ids and likely_log_probs: those of all.

    Raises:
        ValueError: the numbers of ids, log-probs and tokens do not fit.

    Examples:
        >>> ragged_likely([4, 9, 2], [-3.0, -1.0, -float("inf")], num_tokens=1)
        {'num_likely': [1], 'likely_ids': [9], 'likely_log_probs': [-1.0]}
    """
    if num_tokens < 0 or len(ids) != len(log_probs) or (len(ids) % num_tokens if num_tokens else 1):
        raise ValueError(
            f"ragged_likely: {len(ids)} ids and {len(log_probs)} log_probs for num_tokens "
            f"{num_tokens}; expected the same number of both for every token."
        )
    order = torch.tensor(ids, dtype=torch.int32).view(num_tokens, -1)[:, 1:].sort(1)
    values = torch.tensor(log_probs).view(num_tokens, -1)[:, 1:].gather(1, order.indices)
    is_possible = values > -torch.inf
    return {
        "num_likely": is_possible.sum(1).tolist(),
        "likely_ids": order.values[is_possible].tolist(),
        "likely_log_probs": values[is_possible].tolist(),
    }
