"""The policy loss over the entries that sampling kept, from hidden states.

All sums in it, also those of score centering, are over kept entries. It computes K logits, where
`linear_policy_loss` with a vocab_mask computes T * V.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import _check as check
from .._per_token import row_index
from ..linear import linear_policy_loss
from ..linear.arguments import check_linear
from ..linear.centering import check_support, importance_options
from ..linear.policy_loss import Results
from ..logprob.options import row_options
from ..policy_loss import RolloutSupport, policy_loss
from ..policy_loss import score_centering as token_scores
from .op import as_mask, check_kept, is_sparse, sparse_linear_token_log_probs


def sparse_linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    kept_ids: Tensor,
    cu_kept: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    score_centering: RolloutSupport | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    deterministic: bool = False,
    active_rows: Tensor | None = None,
    grad_scale: float = 1.0,
    backend: str | None = None,
    **loss_arguments: Any,
) -> Results:
    """Compute the policy loss over the kept entries of each row.

    It equals `linear_policy_loss` with a vocab_mask of the kept entries. That operator computes it
    if more than 1/64 of T * V is kept, unless `deterministic`.

    Args:
        hidden, weight, token_ids, kept_ids, cu_kept, temperature, bias, logit_scale, softcap,
            deterministic, backend: as in `sparse_linear_token_log_probs`.
        score_centering: as in `linear_policy_loss`, over the kept entries. The policy gives
            probability 0 to the others.
        active_rows, grad_scale: as in `linear_policy_loss`; unused where few entries are kept.
        loss_arguments: those of `policy_loss`; importance weights by rollout_log_probs.

    Returns:
        (loss, log_probs [T], entropy [T], metrics): the loss is differentiable.

    Raises:
        ValueError, IndexError: those of the operators named above.
    """
    op = "sparse_linear_policy_loss"
    check.shape(op, "hidden", hidden, "T H", {})
    token_ids, vocab = check_linear(op, hidden, weight, token_ids, bias, None), weight.shape[0]
    head: dict[str, Any] = {"bias": bias, "logit_scale": logit_scale, "softcap": softcap}
    if not (deterministic or is_sparse(hidden, weight, kept_ids)):
        options = row_options(op, token_ids, vocab)
        kept = check_kept(op, hidden, token_ids, kept_ids, cu_kept, options, vocab)
        return linear_policy_loss(
            hidden,
            weight,
            token_ids,
            temperature,
            **head,
            vocab_mask=as_mask(*kept, vocab),
            score_centering=score_centering,
            active_rows=active_rows,
            grad_scale=grad_scale,
            backend=backend,
            **loss_arguments,
        )
    log_probs, entropy, of_kept = sparse_linear_token_log_probs(
        hidden,
        weight,
        token_ids,
        kept_ids,
        cu_kept,
        temperature,
        **head,
        return_kept_log_probs=True,
        deterministic=deterministic,
        backend=backend,
    )
    centering = None
    if score_centering is not None:
        options = row_options(op, token_ids, vocab)
        ids, ends, values = check_support(op, score_centering, token_ids, options, vocab)
        ends = ends.to(hidden.device)
        centering = token_scores(
            _take(of_kept, kept_ids, cu_kept, ids, ends, vocab),
            values,
            ends,
            response_mask=loss_arguments.get("response_mask"),
            **importance_options(op, loss_arguments),
        )
    loss, metrics = policy_loss(
        log_probs, entropy=entropy, score_centering=centering, backend=backend, **loss_arguments
    )
    return loss, log_probs.detach(), entropy.detach(), metrics


def _take(
    of_kept: Tensor, kept_ids: Tensor, cu_kept: Tensor, ids: Tensor, ends: Tensor, vocab: int
) -> Tensor:
    """Return of_kept [K] of the entries `ids` [S] of each row; -inf where one is not kept."""
    keys, wanted = (
        row_index(of_row, of_id.shape[0]) * vocab + of_id
        for of_row, of_id in ((cu_kept, kept_ids), (ends, ids))
    )
    place = torch.searchsorted(keys, wanted)
    is_kept = pad(keys, (0, 1), value=-1)[place] == wanted
    return torch.where(is_kept, pad(of_kept, (0, 1)).index_select(0, place), -torch.inf)
