"""The operations by OpenRLHF's own functions (openrlhf.models, its experience maker)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridengine.conformance.case import NotThere, with_gradient
from hybridengine.conformance.cases.aggregation import PolicyLoss as Inputs
from hybridengine.conformance.cases.aggregation import Split

from .services import empty_services

# Services that the functions here do not use.
with empty_services(
    ("deepspeed", "flash_attn", "optimum", "pylatexenc", "ray", "ring_flash_attn", "torchdata")
):
    from openrlhf.models import loss as losses
    from openrlhf.models import utils
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

maker: Any = RemoteExperienceMaker  # its methods here read nothing of an object
_BY_TOKEN = {"token-mean": True, "seq-mean-token-mean": False}


def _counts(mask: Tensor, num_ranks: int) -> dict[str, int]:
    """Return the normalizers of an optimizer step, as its trainers count them."""
    num_seqs = int(mask.any(1).sum())
    return {
        "dp_size": num_ranks,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": num_seqs,
    }


def policy_loss(**inputs: Any) -> Tensor:
    """DeepSpeed averages ranks; its factor of micro-batches is in the counts, so they add up."""
    batch = Inputs(**inputs)
    by_token = _BY_TOKEN.get(batch.aggregation)
    if by_token is None or batch.mode not in ("ppo", "gspo") or (by_token and batch.mode == "gspo"):
        raise NotThere(f"no {batch.mode} with {batch.aggregation}")
    if batch.weights is not None:
        raise NotThere("its weights of rollouts are computed inside of the loss")
    if batch.kl_times_ratio:
        raise NotThere("its KL term has another gradient than k3 times the ratio")
    clip = batch.low, batch.high, batch.dual_clip
    compute = losses.PolicyLoss(*clip, token_level_loss=by_token, policy_loss_type=batch.mode)
    counts: dict[str, Any] = _counts(batch.mask, len(batch.split))

    def loss(x: Tensor, part: Inputs) -> Tensor:
        used, advantages = part.mask.float(), part.advantages[:, None].expand_as(x)
        value: Tensor = compute(x, part.old, advantages, used, **counts)[0]
        if part.ref is not None:
            terms = utils.compute_approx_kl(x, part.ref, kl_estimator="k3")
            kl = losses.aggregate_loss(terms, used, token_level_loss=by_token, **counts)
            value = value + part.kl_coef * kl
        return value

    return batch.over_ranks(loss, torch.mean)


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float, split: Split
) -> Tensor:
    compute, counts = losses.ValueLoss(clip), _counts(mask, 1)

    def part(x: Tensor, rows: list[int]) -> Tensor:
        tokens = x[rows], old[rows].float(), returns[rows].float(), mask[rows].float()
        value: Tensor = compute(*tokens, **counts)
        return value

    def total(x: Tensor) -> Tensor:
        return torch.stack([part(x, list(rows)) for rank in split for rows in rank]).sum()

    return with_gradient(total, values.float())


def returns(
    rewards: Tensor, values: Tensor | None, mask: Tensor, gamma: float, lam: float
) -> Tensor:
    if values is None:
        found: Tensor = maker.get_cumulative_returns(None, rewards.float(), mask.float(), gamma)
    else:
        tokens = values.float(), rewards.float(), mask.float()
        found = maker.get_advantages_and_returns(None, *tokens, gamma, lam)[1]
    return found.where(mask, 0)


def kl(log_probs: Tensor, ref: Tensor, kind: str) -> Tensor:
    if kind not in ("k1", "k2", "k3"):
        raise NotThere(f"no estimator {kind}")

    def values(x: Tensor) -> Tensor:
        return utils.compute_approx_kl(x, ref.float(), kl_estimator=kind)

    return with_gradient(values, log_probs.float())


def rejection(**_: Any) -> Tensor:
    raise NotThere("its rejections are computed inside of the loss")


kept_loss = rejection


def log_probs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    found: Tensor = utils.log_probs_from_logits(logits.float(), ids, temperature)
    return found
