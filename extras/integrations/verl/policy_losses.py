"""verl's policy losses: `verl.trainer.ppo.core_algos.compute_policy_loss_*`.

Every function takes verl's arguments, tensors [B, L], and returns (loss, metrics), metrics as
floats under verl's names. `config` is verl's ActorConfig or any object with its attributes and
`get`; its `global_batch_info` has the denominators of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridengine.integrations.verl.losses import (
    BatchSizes,
    agg_loss,
    aggregation_arguments,
    local_mean,
)
from hybridengine.kernels import policy_loss, select_by_covariance, token_kl
from hybridengine.kernels.policy_loss.terms import MAX_LOG_RATIO

__all__ = [
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
]

Loss = tuple[Tensor, dict[str, Any]]
PolicyLoss = Callable[..., Loss]
Tensors = tuple[Tensor, Tensor, Tensor, Tensor]  # old and new log-probs, advantages, mask

_CLIPPED = ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")


def _policy_loss(
    tensors: Tensors,
    mode: str,
    aggregation: dict[str, Any],
    metrics: tuple[str, ...],
    clamped_kl: bool,
    **options: Any,
) -> Loss:
    """Compute (policy_loss(mode), verl's metrics, which are means over this call).

    clamped_kl: whether log-ratios in ppo_kl are clamped to 20.
    """
    old_log_prob, log_prob, advantages, mask = tensors
    loss, sums = policy_loss(
        log_prob,
        old_log_prob,
        advantages,
        response_mask=mask,
        loss_mode=mode,
        **aggregation,
        **options,
    )
    values = {
        name: local_mean(sums[name], mask, aggregation["global_num_tokens"])
        for name in ("pg_clipfrac", "pg_clipfrac_lower")
    }
    values["ppo_kl"] = _masked_kl(mode, old_log_prob, log_prob, mask, clamped_kl)
    if not metrics:
        return loss, {}
    floats = torch.stack([values[name].float() for name in metrics]).tolist()
    return loss, {f"actor/{name}": value for name, value in zip(metrics, floats, strict=True)}


@torch.no_grad()
def _masked_kl(
    mode: str, old_log_prob: Tensor, log_prob: Tensor, mask: Tensor, clamped: bool
) -> Tensor:
    """Return the mean over unmasked tokens of old_log_prob - log_prob, of kl_cov its magnitude."""
    mask = mask.bool()
    kl = token_kl("abs" if mode == "kl_cov" else "k1", old_log_prob, log_prob)
    if clamped:
        kl = kl.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(mask, kl, 0).sum() / mask.sum().clamp(min=1)


def _loss(
    name: str,
    mode: str,
    doc: str,
    options: Callable[[Any], dict[str, Any]],
    select: Callable[..., Tensor] | None = None,
    *,
    default: str = "token-mean",
    metrics: tuple[str, ...] = _CLIPPED,
    clamped_kl: bool = True,
) -> PolicyLoss:
    """Make the policy loss `name` with verl's signature.

    options: config -> further arguments of `kernels.policy_loss`.
    select: (the four tensors, config) -> the tokens that clip_cov and kl_cov treat apart.
    default: the default of loss_agg_mode.
    """

    def compute(tensors: Tensors, loss_agg_mode: str, config: Any, weights: Tensor | None) -> Loss:
        arguments = {"rollout_is_weights": weights, **options(config)}
        if select is not None:
            arguments["selected"] = select(*tensors, config)
        if mode == "sapo":  # verl aggregates it by sequences whatever loss_agg_mode is
            loss_agg_mode = "seq-mean-token-mean"
        sizes = BatchSizes(**config.global_batch_info)
        aggregation = aggregation_arguments(tensors[3], loss_agg_mode, sizes)
        value, results = _policy_loss(tensors, mode, aggregation, metrics, clamped_kl, **arguments)
        return value * sizes.dp_size, results

    return _with_signature(name, doc, compute, default)


def _with_signature(
    name: str, doc: str, compute: Callable[..., Loss], default: str = "token-mean"
) -> PolicyLoss:
    """Give `compute`(the four tensors, loss_agg_mode, config, weights) verl's signature."""

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = default,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> Loss:
        assert config is not None
        tensors = (old_log_prob, log_prob, advantages, response_mask)
        return compute(tensors, loss_agg_mode, config, rollout_is_weights)

    loss.__name__ = loss.__qualname__ = name
    loss.__doc__ = doc
    return loss


def _clip_ratios(config: Any) -> dict[str, Any]:
    return {
        "clip_ratio_low": _given(config.clip_ratio_low, config.clip_ratio),
        "clip_ratio_high": _given(config.clip_ratio_high, config.clip_ratio),
    }


def _dual_clip(default: float) -> Callable[[Any], dict[str, Any]]:
    """Return the options of a loss with dual clip, whose bound is `default` unless configured."""
    return lambda config: {
        **_clip_ratios(config),
        "clip_ratio_c": config.get("clip_ratio_c", default),
    }


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


@torch.no_grad()
def _draw_by_covariance(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> Tensor:
    """Draw the tokens of clip_cov with torch's global generator: those that verl draws."""
    options, mask, count = config.policy_loss, response_mask.bool(), response_mask.sum()
    ratio, ratios = (log_prob - old_log_prob).exp(), _clip_ratios(config)
    bounded = ratio.clamp(1 - ratios["clip_ratio_low"], 1 + ratios["clip_ratio_high"])
    clipped = -advantages * bounded > -advantages * ratio

    def centred(values: Tensor) -> Tensor:
        return values - torch.where(mask, values, 0).sum() / count.clamp(min=1)

    covariance = centred(advantages) * centred(log_prob)
    lower, upper = _given(options.clip_cov_lb, 1.0), _given(options.clip_cov_ub, 5.0)
    eligible = (covariance > lower) & (covariance < upper) & mask & ~clipped
    positions = eligible.flatten().nonzero().squeeze(1)
    number = max(int(_given(options.clip_cov_ratio, 2e-4) * count.item()), 1)
    if positions.numel():
        positions = positions[torch.randperm(positions.numel())[:number].to(positions.device)]
    selected = torch.zeros_like(mask)
    selected.view(-1)[positions] = True
    return selected


def _largest_covariance(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> Tensor:
    return select_by_covariance(
        log_prob,
        advantages,
        loss_mode="kl_cov",
        response_mask=response_mask,
        ratio=_given(config.policy_loss.kl_cov_ratio, 2e-4),
    )


compute_policy_loss_vanilla = _loss(
    "compute_policy_loss_vanilla",
    "ppo_clip",
    "PPO with two clip ratios and dual clip.",
    _dual_clip(3.0),
)
compute_policy_loss_dppo_tv, compute_policy_loss_dppo_kl = (
    _loss(f"compute_policy_loss_{mode}", mode, doc, _dual_clip(20.0))
    for mode, doc in (
        ("dppo_tv", "DPPO; the clip ratios bound the total variation."),
        ("dppo_kl", "DPPO; the clip ratios bound the binary KL."),
    )
)
compute_policy_loss_gspo = _loss(
    "compute_policy_loss_gspo",
    "gspo",
    "GSPO: the ratio of a sequence at each of its tokens.",
    _clip_ratios,
    default="seq-mean-token-mean",
    clamped_kl=False,
)
compute_policy_loss_cispo = _loss(
    "compute_policy_loss_cispo",
    "cispo",
    "CISPO: -A log p times the clipped ratio, a constant.",
    _clip_ratios,
)
compute_policy_loss_sapo = _loss(
    "compute_policy_loss_sapo",
    "sapo",
    "SAPO; loss_agg_mode is not used.",
    lambda config: {"tau_pos": float(config.tau_pos), "tau_neg": float(config.tau_neg)},
    default="seq-mean-token-mean",
)
compute_policy_loss_gpg = _loss(
    "compute_policy_loss_gpg", "reinforce", "GPG: -A log p.", lambda config: {}, metrics=()
)
compute_policy_loss_clip_cov = _loss(
    "compute_policy_loss_clip_cov",
    "clip_cov",
    "Clip-Cov: PPO without tokens drawn from those with a large covariance.",
    _clip_ratios,
    _draw_by_covariance,
    metrics=("pg_clipfrac", "ppo_kl"),
    clamped_kl=False,
)
compute_policy_loss_kl_cov = _loss(
    "compute_policy_loss_kl_cov",
    "kl_cov",
    "KL-Cov: -r A, with a KL penalty for the tokens of the largest covariance.",
    lambda config: {"cov_kl_coef": _given(config.policy_loss.ppo_kl_coef, 1.0)},
    _largest_covariance,
    metrics=("ppo_kl",),
    clamped_kl=False,
)
_reinforce = _loss(
    "_reinforce", "reinforce", "", lambda config: {}, metrics=("ppo_kl",), clamped_kl=False
)


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """REINFORCE: -w A log p. rollout_log_prob is used for the metric only."""
    tensors = (rollout_log_prob, log_prob, advantages, response_mask)
    return _reinforce(*tensors, loss_agg_mode, config, rollout_is_weights)


def _geo_mean(tensors: Tensors, _: str, config: Any, weights: Tensor | None) -> Loss:
    log_prob, response_mask = tensors[1], tensors[3]
    sizes = BatchSizes(global_batch_size=log_prob.shape[0])
    aggregation = aggregation_arguments(response_mask, "seq-mean-token-mean", sizes)
    options = {"rollout_is_weights": weights, **_clip_ratios(config)}
    return _policy_loss(tensors, "gmpo", aggregation, _CLIPPED, clamped_kl=False, **options)


def _dro(tensors: Tensors, loss_agg_mode: str, config: Any, weights: Tensor | None) -> Loss:
    old_log_prob, log_prob, advantages, response_mask = tensors
    beta = config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ValueError("policy_loss.dro_beta must be a positive value when using DRO")
    losses = beta * token_kl("k2", log_prob, old_log_prob) - log_prob * advantages
    if weights is not None:
        losses = losses * weights
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    kl = _masked_kl("dro", old_log_prob, log_prob, response_mask, clamped=False)
    return loss, {"actor/ppo_kl": kl.item()}


compute_policy_loss_geo_mean = _with_signature(
    "compute_policy_loss_geo_mean",
    "GMPO; as in verl the mean over the B sequences of this call, whatever loss_agg_mode is.",
    _geo_mean,
)
compute_policy_loss_dro = _with_signature(
    "compute_policy_loss_dro",
    "DRO: -(A log p - beta x^2 / 2), x the log-ratio and beta `config.policy_loss.dro_beta`.",
    _dro,
)
