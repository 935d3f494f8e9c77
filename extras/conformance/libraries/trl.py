"""The operations by TRL's own methods, on a stand-in for its trainers that holds the inputs."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import grpo_trainer, rloo_trainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss
from trl.trainer.utils import selective_log_softmax

from hybridengine.conformance.case import NotThere, with_gradient
from hybridengine.conformance.cases.aggregation import PolicyLoss

_LOSS_TYPES = {
    ("ppo", "token-mean"): "dapo",
    ("ppo", "seq-mean-token-mean"): "grpo",
    ("ppo", "seq-mean-token-sum-norm"): "dr_grpo",
    ("gspo", "seq-mean-token-mean"): "grpo",
    ("gspo", "seq-mean-token-sum"): "luspo",
    ("cispo", "token-mean"): "cispo",
    ("sapo", "seq-mean-token-mean"): "sapo",
}


class _Accelerator:
    """One process of `num_processes`; what it gathers is its own."""

    device, process_index, sync_gradients = torch.device("cpu"), 0, True

    def __init__(self, num_processes: int = 1) -> None:
        self.num_processes = num_processes

    def gather(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values


def _trainer(**attributes: Any) -> MagicMock:
    """What the methods read of a trainer; everything else is a mock."""
    trainer = MagicMock()
    defaults: dict[str, Any] = {
        "accelerator": _Accelerator(),
        "_metrics": {"train": defaultdict(list)},
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
    }
    for name, value in (defaults | attributes).items():
        setattr(trainer, name, value)
    trainer.args.sapo_temperature_pos, trainer.args.sapo_temperature_neg = 1.0, 1.05
    return trainer


def _batch(
    trainer_class: Any, rewards: Tensor, mask: Tensor, old: Tensor, **attributes: Any
) -> Any:
    """What _generate_and_score_completions makes of given completions and rewards.

    mask: the completion tokens [B, L] that are trained on; others are the tokens of a tool.
    """
    rows, length = mask.shape
    trainer = _trainer(
        environment_factories=None,
        environments=None,
        tools=[],
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        num_iterations=1,
        multi_objective_aggregation="sum_then_normalize",
        reward_clip_range=None,
        normalize_advantages=False,
        reward_weights=torch.ones(1),
        reward_funcs=[None],
        reward_func_names=["reward"],
        log_completions=False,
        _pending_extra_logs={},
        _pending_metrics={},
        _logs=defaultdict(deque) | {"rewards": defaultdict(deque), "extra": defaultdict(deque)},
        **attributes,
    )
    trainer._tokenizer.pad_token_id = 0
    trainer.args.gradient_accumulation_steps = 1
    trainer.args.steps_per_generation = 1
    trainer.model.is_gradient_checkpointing = False
    trainer._calculate_rewards = lambda *_: rewards.float()[:, None]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (old.float(), None, None)
    prompts, ids, texts = [[1]] * rows, [[7] * length] * rows, [""] * rows
    rollout = attributes.get("rollout", old).float().tolist()
    trainer._generate = lambda _: (
        (prompts, ids, mask.int().tolist(), texts, rollout, {}, None, None)
        if trainer_class is grpo_trainer.GRPOTrainer
        else (prompts, ids, texts)
    )
    inputs = [{"prompt": "p"} for _ in range(rows)]
    return trainer_class._generate_and_score_completions(trainer, inputs)


def group_advantages(
    rewards: Tensor, groups: Tensor, estimator: str, scored: Tensor | None = None
) -> Tensor:
    sizes = groups.unique(return_counts=True)[1]
    if len(sizes.unique()) > 1:
        raise NotThere("all groups have num_generations responses")
    given = rewards if scored is None else rewards.where(scored, torch.nan)
    tokens = torch.ones(len(rewards), 2)
    rloo = estimator == "rloo"
    out = _batch(
        rloo_trainer.RLOOTrainer if rloo else grpo_trainer.GRPOTrainer,
        given,
        tokens,
        -tokens,
        num_generations=int(sizes[0]),
        scale_rewards="none" if estimator == "mean" else "group",
    )
    return out["advantages"]


def policy_loss(**inputs: Any) -> Tensor:
    """GRPOTrainer._compute_loss: ranks are averaged, micro-batches added."""
    batch = PolicyLoss(**inputs)
    mode, accumulation = batch.mode, len(batch.split[0])
    loss_type = _LOSS_TYPES.get((mode, batch.aggregation))
    if loss_type is None:
        raise NotThere(f"no loss type of GRPOTrainer for {mode} with {batch.aggregation}")
    trainer = _trainer(
        accelerator=_Accelerator(len(batch.split)),
        loss_type=loss_type,
        importance_sampling_level="sequence" if mode == "gspo" else "token",
        beta=batch.kl_coef,
        epsilon_low=batch.low,
        epsilon_high=1 + batch.high if mode == "cispo" else batch.high,
        max_completion_length=batch.max_length,
        current_gradient_accumulation_steps=accumulation,
        use_vllm=batch.weights is not None,
    )
    trainer.args.delta = batch.dual_clip
    trainer.args.use_bias_correction_kl = batch.kl_times_ratio
    trainer.args.steps_per_generation = accumulation

    def loss(x: Tensor, part: PolicyLoss) -> Tensor:
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (x, x, None)
        ids = torch.zeros(x.shape).long()
        given = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": part.mask.flip(1).cumsum(1).flip(1).clamp(max=1),
            "tool_mask": part.mask.long(),  # 0 for the tokens of a tool
            "advantages": part.advantages,
            "old_per_token_logps": part.old,
            "num_items_in_batch": batch.mask.sum(),
            "ref_per_token_logps": part.ref,
            "importance_sampling_ratio": part.weights,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return grpo_trainer.GRPOTrainer._compute_loss(trainer, None, given)

    return batch.over_ranks(loss, torch.mean)


def vespo_weights(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    weights = grpo_trainer.GRPOTrainer.get_gamma_weights
    ratio = (log_probs - old).float()
    return weights(advantages.float()[:, None], ratio, mask.float(), None)[:, 0]


def rollout_weights(
    old: Tensor, rollout: Tensor, mask: Tensor, level: str, upper: float, lower: float | None
) -> Tensor:
    ratio = _batch(
        grpo_trainer.GRPOTrainer,
        torch.arange(len(mask)),
        mask,
        old,
        rollout=rollout,
        num_generations=2,
        scale_rewards="group",
        use_vllm=True,
        vllm_importance_sampling_mode=f"{level}_{'truncate' if lower is None else 'mask'}",
        vllm_importance_sampling_clip_min=lower,
        vllm_importance_sampling_clip_max=upper,
    )["importance_sampling_ratio"]
    return ratio.expand_as(mask).where(mask, 0)


def kept_loss(losses: Tensor, old: Tensor, rollout: Tensor, mask: Tensor, bound: float) -> Tensor:
    raise NotThere("it masks by weights of 0, documented as modes `*_mask`")


def log_probs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    return selective_log_softmax(logits.float(), ids, temperature=temperature)


def kept_log_probs(logits: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
    raise NotThere("no log-probs over a part of the vocabulary")


def tied_gradient(weight: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    def total(w: Tensor) -> Tensor:
        return ChunkedLogProbFunction.apply(w[ids], w, None, labels, 1.0, 4)[0]

    return with_gradient(total, weight.float())


def distillation(student: Tensor, teacher: Tensor, mask: Tensor, beta: float) -> Tensor:
    head = torch.eye(student.shape[1])
    states = student.float()[None], teacher.float()[None], head, head, mask[None].int()
    return _chunked_divergence_loss(*states, beta)[0].view(1)
