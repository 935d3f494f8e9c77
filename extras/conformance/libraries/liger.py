"""The operations by Liger's chunked losses, which are plain PyTorch and run on a CPU.

Its Triton kernels (fused cross-entropy among them) need a GPU and are not run.
"""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.chunked_loss.grpo_loss import (
    LigerFusedLinearGRPOFunction,
    get_gamma_weights,
    k3_loss_fn,
)
from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDLoss
from torch import Tensor

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


def policy_loss(**inputs: Any) -> Tensor:
    """One process; the losses that are means of rows are averaged over micro-batches, as by TRL."""
    batch = PolicyLoss(**inputs)
    if len(batch.split) > 1:
        raise NotThere("it reads the number of ranks from torch.distributed; not run here")
    loss_type = _LOSS_TYPES.get((batch.mode, batch.aggregation))
    if loss_type is None:
        raise NotThere(f"no loss type for {batch.mode} with {batch.aggregation}")
    accumulation = 1 if loss_type in ("dapo", "cispo") else len(batch.split[0])

    def loss(x: Tensor, part: PolicyLoss) -> Tensor:
        used = part.mask.float()
        value, _ = LigerFusedLinearGRPOFunction.ppo_loss_fn(
            x,
            used,
            part.advantages,
            used,
            ref_per_token_logps=part.ref,
            old_per_token_logps=part.old,
            epsilon_low=part.low,
            epsilon_high=1 + part.high if part.mode == "cispo" else part.high,
            beta=part.kl_coef,
            loss_type=loss_type,
            max_completion_length=part.max_length,
            importance_sampling_level="sequence" if part.mode == "gspo" else "token",
            vllm_is_ratio=part.weights,
            delta=part.dual_clip,
            use_bias_correction_kl=part.kl_times_ratio,
            num_items_in_batch=int(batch.mask.sum()),
        )
        return value / accumulation

    return batch.over_ranks(loss, torch.sum)


def vespo_weights(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return get_gamma_weights(advantages.float(), (log_probs - old).float(), mask.float())[:, 0]


def kl(log_probs: Tensor, ref: Tensor, kind: str) -> Tensor:
    if kind != "k3":
        raise NotThere("k3 is its only estimator")
    return with_gradient(lambda x: k3_loss_fn(ref.float(), x), log_probs.float())


def log_probs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    head = torch.eye(logits.shape[1])
    chunk = logits.float()[None], head, ids[None]
    return LigerFusedLinearPPOBase.chunk_forward(*chunk, temperature=temperature)[0]


def tied_gradient(weight: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    def total(w: Tensor) -> Tensor:
        return LigerFusedLinearPPOBase.chunk_forward(w[ids][None], w, labels[None])

    return with_gradient(total, weight.float())


def distillation(student: Tensor, teacher: Tensor, mask: Tensor, beta: float) -> Tensor:
    head, labels = torch.eye(student.shape[1]), torch.zeros(len(mask)).long().where(mask, -100)
    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False
    )
    return loss(student.float(), head, teacher.float(), head, labels).view(1)


def row_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    raise NotThere("its fused cross-entropy is a Triton kernel; not run without a GPU")


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, num_items: int) -> Tensor:
    raise NotThere("its fused cross-entropy is a Triton kernel; not run without a GPU")
