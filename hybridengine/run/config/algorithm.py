"""Keys of losses, KL terms and advantages. `hybridengine.run.config.common` has the rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import StrictBool

from hybridengine.run.config.common import (
    InputPath,
    NonNegativeFloat,
    Numbers,
    PositiveFloat,
    PositiveInt,
    Switch,
    Texts,
    UnitFloat,
)

LossMode = Literal[
    "vanilla",
    "gspo",
    "geo_mean",
    "cispo",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "gpg",
    "clip_cov",
    "kl_cov",
]
LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
KLType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: LossMode = "vanilla"  # see docs/algorithms.md


@dataclass(frozen=True)
class KLScheduleConfig:
    """How the coefficient of a KL term changes during a run."""

    type: Literal["fixed", "adaptive", "linear"] = "fixed"  # towards target_kl; to final_kl_coef
    horizon: PositiveFloat = 10_000.0  # adaptive: responses over which it adapts
    target_kl: PositiveFloat = 0.1  # adaptive: target, in nats per token
    final_kl_coef: NonNegativeFloat = 0.0  # linear: the coefficient from step num_steps on
    num_steps: PositiveInt | None = None  # linear: the last step of the change; null: of the run


@dataclass(frozen=True)
class KLControlConfig(KLScheduleConfig):
    kl_coef: NonNegativeFloat = 0.001  # coefficient of the KL penalty in the reward


@dataclass(frozen=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: replace groups whose responses all have the same score."""

    enable: StrictBool = False  # sample batches until enough groups differ in metric
    metric: str = "score"  # score, or another result of the reward, such as acc
    max_num_gen_batches: PositiveInt = 10  # at most; then keep groups without signal


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance weights and rejection against the gap between engine and trainer."""

    rollout_is: Literal["token", "sequence"] | None = "token"  # level of the weights; null: off
    rollout_is_threshold: float | str = 2.0  # truncation; "0.5_5": weights outside are 0
    rollout_rs: str | None = None  # criteria such as "seq_mean_k3", separated by commas
    rollout_rs_threshold: float | str | None = None  # one per criterion; k1: "lower_upper"
    rollout_is_batch_normalize: StrictBool = False  # divide the weights by their mean
    bypass_mode: StrictBool = False  # the engine's log-probs are the old ones: no forward for them
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"  # of bypass_mode

    @property
    def applies_weights(self) -> bool:
        """Whether the loss has importance weights: a clipped ratio to the engine needs none."""
        clips = self.bypass_mode and self.loss_type == "ppo_clip"
        return self.rollout_is is not None and not clips

    @property
    def is_bounds(self) -> tuple[float | None, float]:
        """Return (lower or None, upper) of the importance weights."""
        *lower, upper = _numbers(self.rollout_is_threshold)
        if upper < 1:  # YAML reads 0.5_5 without quotes as 0.55
            raise ValueError(f"rollout_is_threshold {upper} is below 1; quote a pair")
        return (lower[0] if lower else None), upper

    @property
    def rejection(self) -> dict[str, float | tuple[float, float]]:
        """Return, by criterion, the bound or (lower, upper)."""
        criteria = [c.strip() for c in (self.rollout_rs or "").split(",") if c.strip()]
        given = self.rollout_rs_threshold
        bounds = [] if given is None else [_numbers(part) for part in str(given).split(",")]
        paired = zip(criteria, bounds, strict=True)
        return {c: b[0] if len(b) == 1 else (b[0], b[1]) for c, b in paired}


def _numbers(text: float | str) -> list[float]:
    """Parse "0.5_5" as [0.5, 5.0]; raise ValueError for other than one or two numbers."""
    numbers = [float(part) for part in str(text).split("_")]
    if len(numbers) > 2:
        raise ValueError(f"{text!r} is not one number or lower_upper")
    return numbers


@dataclass(frozen=True)
class DistillConfig:
    """On-policy distillation (arXiv 2306.13649): a teacher's distribution in place of a reward."""

    teacher_path: InputPath | None = None  # causal LM of the same vocabulary; null: off
    beta: UnitFloat = 0.5  # of the generalised JSD; 0: forward KL, 1: reverse KL
    temperature: PositiveFloat = 1.0  # of both distributions in the loss


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = "grpo"  # advantage estimator, or a registered one of your own
    norm_adv_by_std_in_grpo: StrictBool = True  # false: Dr.GRPO
    gdpo_reward_keys: Texts = ()  # declared rewards that gdpo normalises; none: all
    gdpo_reward_weights: Numbers | None = None  # weights of those; null: reward.weights
    gamma: UnitFloat = 1.0  # discount per token
    lam: UnitFloat = 1.0  # lambda of GAE
    use_kl_in_reward: StrictBool = False  # subtract a KL penalty per token
    kl_penalty: KLType = "kl"  # KL estimator of the penalty
    kl_ctrl: KLControlConfig = KLControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    sampling_replay: Switch = "auto"  # log-probs over what top_p, top_k kept; auto: where they cut
    mask_truncated_completions: StrictBool = False  # do not train on cut responses
    distill: DistillConfig = DistillConfig()
