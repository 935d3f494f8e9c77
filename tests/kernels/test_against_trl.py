"""Our operators against TRL's own trainers on random inputs (skipped where TRL is not installed).

TRL has its losses and advantages inside trainer methods. They run here unchanged, on a mock
of the trainer that returns the log-probs, completions and rewards of a test.
"""

from collections import defaultdict, deque
from itertools import pairwise
from unittest.mock import MagicMock

import pytest
import torch

from hybridengine.kernels import (
    group_advantage,
    pack,
    policy_loss,
    rollout_correction,
    token_entropy,
    token_log_probs,
    vespo_weights,
    whiten,
)
from tests.tolerances import TRL, TRL_EPSILON

grpo = pytest.importorskip(
    "trl.trainer.grpo_trainer", reason="pip install --no-deps trl==1.16.0", exc_type=ImportError
)
rloo = pytest.importorskip("trl.trainer.rloo_trainer", exc_type=ImportError)
B, L, GROUP = 12, 23, 4
LOW, HIGH = 0.2, 0.28


@pytest.fixture
def padded():
    generator = torch.Generator().manual_seed(0)

    def normal(scale):
        return torch.randn(B, L, generator=generator) * scale

    lengths = torch.randint(1, L + 1, (B,), generator=generator)
    lengths[0], lengths[1] = 1, L
    old = -torch.rand(B, L, generator=generator) * 2 - 0.05
    return {
        "lengths": lengths,
        "mask": torch.arange(L)[None] < lengths[:, None],
        "old": old,
        "new": old + normal(0.3),
        "ref": old + normal(0.3),
        "entropy": torch.rand(B, L, generator=generator),
        "weights": torch.rand(B, L, generator=generator) + 0.5,
        "advantages": torch.randn(B, generator=generator),
        "rewards": torch.randn(B, 2, generator=generator),
    }


def flat(padded, *names):
    tensors = [
        padded[n] if padded[n].dim() == 2 else padded[n][:, None].expand(B, L) for n in names
    ]
    packed = pack(tensors, padded["mask"])
    return (*packed.values, packed.cu_seqlens)


class SameRank:
    """A one-process accelerator."""

    device, num_processes, process_index, sync_gradients = torch.device("cpu"), 1, 0, True

    @staticmethod
    def gather(values):
        return values

    @staticmethod
    def reduce(values, reduction):
        return values


def trainer(**attributes):
    """What the methods read of a trainer; everything else is a mock."""
    stand_in = MagicMock()
    defaults = {
        "accelerator": SameRank,
        "_metrics": {"train": defaultdict(list)},
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": L,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
    }
    for name, value in (defaults | attributes).items():
        setattr(stand_in, name, value)
    stand_in.args.delta = attributes.get("delta")
    stand_in.args.use_bias_correction_kl = attributes.get("use_bias_correction_kl", False)
    stand_in.args.vespo_k_pos, stand_in.args.vespo_lambda_pos = 2.0, 3.0
    stand_in.args.vespo_k_neg, stand_in.args.vespo_lambda_neg = 3.0, 2.0
    # The method of the trainer, not a mock of it.
    stand_in.get_gamma_weights = grpo.GRPOTrainer.get_gamma_weights
    stand_in.args.steps_per_generation = 1
    stand_in.args.sapo_temperature_pos, stand_in.args.sapo_temperature_neg = 1.0, 1.05
    return stand_in


def their_loss(padded, **attributes):
    """(loss, gradient, metrics) of GRPOTrainer._compute_loss."""
    new = padded["new"].clone().requires_grad_()
    stand_in = trainer(**attributes)
    stand_in._get_per_token_logps_and_entropies = lambda *a, **k: (new, padded["entropy"], None)
    ids = torch.zeros(B, L, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": padded["mask"].long(),
        "advantages": padded["advantages"],
        "old_per_token_logps": padded["old"],
        "ref_per_token_logps": padded["ref"],
        "importance_sampling_ratio": padded["weights"],
        "num_items_in_batch": padded["mask"].sum(),
    }
    loss = grpo.GRPOTrainer._compute_loss(stand_in, None, inputs)
    return loss.detach(), torch.autograd.grad(loss, new)[0], stand_in._metrics["train"]


def our_loss(padded, **options):
    new = padded["new"].clone().requires_grad_()
    log_probs, old, advantages, ends = flat(padded | {"new": new}, "new", "old", "advantages")
    settings = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": float("inf")}
    loss, metrics = policy_loss(log_probs, old, advantages, cu_seqlens=ends, **(settings | options))
    return loss.detach(), torch.autograd.grad(loss, new)[0], metrics


def close(got, want, tolerance=TRL):
    torch.testing.assert_close(got, want.float(), **tolerance)


SEQUENCE = {"importance_sampling_level": "sequence"}
LOSSES = {
    "grpo": ({}, {"loss_agg_mode": "seq-mean-token-mean"}),
    "bnpo": ({}, {"loss_agg_mode": "token-mean"}),
    "dr_grpo": ({}, {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": L}),
    "dapo": ({}, {"loss_agg_mode": "token-mean"}),
    "dapo, two-sided clip": ({"delta": 1.5}, {"clip_ratio_c": 1.5}),
    "grpo, gspo": (SEQUENCE, {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean"}),
    "luspo": (SEQUENCE, {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-sum"}),
    "grpo, bias-corrected KL": (
        {"use_bias_correction_kl": True},
        {"loss_agg_mode": "seq-mean-token-mean", "kl_times_ratio": True},
    ),
    "grpo, gspo, bias-corrected KL": (
        SEQUENCE | {"use_bias_correction_kl": True},
        {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean", "kl_times_ratio": True},
    ),
    "grpo, two-sided clip of gspo": (
        SEQUENCE | {"delta": 1.3},
        {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean", "seq_clip_ratio_c": 1.3},
    ),
    "sapo, of sequences": (
        SEQUENCE,
        {"loss_mode": "seq_sapo", "loss_agg_mode": "seq-mean-token-mean"},
    ),
    "sapo": ({}, {"loss_mode": "sapo", "loss_agg_mode": "seq-mean-token-mean"}),
    # TRL's bound for cispo is of the ratio itself, and there is none from below.
    "cispo": (
        {"epsilon_high": 1.2},
        {"loss_mode": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.2},
    ),
    "cispo, small bound": (
        {"epsilon_high": 0.9},
        {"loss_mode": "cispo", "clip_ratio_low": None, "clip_ratio_high": -0.1},
    ),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(padded, name, beta, weighted):
    theirs, ours = LOSSES[name]
    if "importance_sampling_level" in theirs:
        # With a weight per token, our gspo has verl's token form of the gradient.
        padded["weights"] = padded["weights"][:, :1].expand(B, L)
    want = their_loss(padded, loss_type=name.split(",")[0], beta=beta, use_vllm=weighted, **theirs)
    ref, weights, _ = flat(padded, "ref", "weights")
    got = our_loss(
        padded,
        ref_log_probs=ref if beta else None,
        kl_coef=beta,
        kl_input_clamp=None,
        kl_output_clamp=None,
        rollout_is_weights=weights if weighted else None,
        **ours,
    )
    close(got[0], want[0])
    close(got[1], want[1])
    if beta:
        per_token = our_loss(
            padded, ref_log_probs=ref, kl_coef=beta, **ours | {"loss_agg_mode": "token-mean"}
        )[2]["kl_loss"]
        assert per_token.item() == pytest.approx(want[2]["kl"][0], rel=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_vespo(padded, weighted):
    weights = torch.where(padded["mask"], padded["weights"], 1)
    padded["weights"] = weights if weighted else torch.ones_like(weights)
    want = their_loss(padded, loss_type="vespo", use_vllm=weighted)
    arguments = padded["new"], padded["old"], padded["advantages"][:, None].expand(B, L)
    phi = vespo_weights(
        *arguments,
        response_mask=padded["mask"],
        rollout_is_weights=padded["weights"] if weighted else None,
    )
    weights, _ = flat(padded | {"phi": phi}, "phi")
    got = our_loss(padded, loss_mode="reinforce", rollout_is_weights=weights)
    close(got[0], want[0])
    close(got[1], want[1])
    mean = want[2]["vespo/phi_seq_mean"][0]
    assert phi[:, 0].mean().item() == pytest.approx(mean, rel=1e-5)
    assert not phi[~padded["mask"]].any()


def test_selected_log_probs(padded):
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits = torch.randn(B, L, 31, generator=torch.Generator().manual_seed(1)) * 3
    index = logits.topk(4).indices
    log_probs, entropy = token_log_probs(logits, index)
    close(log_probs, selective_log_softmax(logits, index))
    close(entropy, entropy_from_logits(logits))
    close(token_entropy(logits), entropy_from_logits(logits))


def test_clip_fraction_and_entropy_bonus(padded):
    bonus = {"_entropy_bonus_enabled": True, "entropy_coef": 0.01}
    want, _, theirs = their_loss(padded, loss_type="bnpo", **bonus)
    entropy, _ = flat(padded, "entropy")
    got, _, ours = our_loss(padded, entropy=entropy, entropy_coeff=0.01)
    close(got, want)
    assert ours["entropy"].item() == pytest.approx(theirs["entropy"][0], rel=1e-5)
    assert ours["pg_clipfrac"].item() == pytest.approx(theirs["clip_ratio/region_mean"][0])


def their_batch(padded, trainer_class, **attributes):
    """The inputs that _generate_and_score_completions makes from given completions and rewards."""
    lengths = padded["lengths"].tolist()
    completions = [[7] * n for n in lengths]
    sampling = [row[:n].tolist() for row, n in zip(padded["new"], lengths, strict=True)]
    settings = {
        "environment_factories": None,
        "environments": None,
        "tools": [],
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "num_generations": GROUP,
        "num_iterations": 1,
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group",
        "reward_clip_range": None,
        "normalize_advantages": False,
        "reward_weights": torch.ones(2),
        "reward_funcs": [None, None],
        "reward_func_names": ["a", "b"],
        "log_completions": False,
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": 1.3,
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_logs": defaultdict(deque) | {"rewards": defaultdict(deque), "extra": defaultdict(deque)},
    }
    stand_in = trainer(**(settings | attributes))
    stand_in._tokenizer.pad_token_id = 0
    stand_in.args.gradient_accumulation_steps = 1
    stand_in.model.is_gradient_checkpointing = False
    stand_in._calculate_rewards = lambda *a: padded["rewards"]
    stand_in._get_per_token_logps_and_entropies = lambda *a, **k: (padded["old"], None, None)
    texts, prompts = [""] * B, [[1]] * B
    stand_in._generate = lambda p: (
        (prompts, completions, None, texts, sampling, {}, None, None)
        if trainer_class is grpo.GRPOTrainer
        else (prompts, completions, texts)
    )
    inputs = [{"prompt": "p"} for _ in range(B)]
    return trainer_class._generate_and_score_completions(stand_in, inputs)


@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_group_advantages(padded, scale_rewards):
    want = their_batch(padded, grpo.GRPOTrainer, scale_rewards=scale_rewards)["advantages"]
    got = group_advantage(
        padded["rewards"].sum(1),
        torch.arange(B) // GROUP,
        norm_by_std=scale_rewards == "group",
        epsilon=1e-4,
    )
    close(got, want)


def test_every_reward_normalised_by_itself(padded):
    aggregation = {"multi_objective_aggregation": "normalize_then_sum"}
    want = their_batch(padded, grpo.GRPOTrainer, **aggregation)["advantages"]
    groups = torch.arange(B) // GROUP
    parts = [group_advantage(r.contiguous(), groups, epsilon=1e-4) for r in padded["rewards"].T]
    close(whiten(sum(parts)), want, TRL_EPSILON)


def test_leave_one_out(padded):
    want = their_batch(padded, rloo.RLOOTrainer)["advantages"]
    got = group_advantage(padded["rewards"].sum(1), torch.arange(B) // GROUP, estimator="rloo")
    close(got, want)


@pytest.mark.parametrize("lower", [None, 0.8])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rollout_weights(padded, level, lower):
    mode = f"{level}_{'truncate' if lower is None else 'mask'}"
    options = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_min": lower}
    want = their_batch(padded, grpo.GRPOTrainer, use_vllm=True, **options)
    ratio = want["importance_sampling_ratio"].expand(B, L)
    old, new, ratio, ends = flat(padded | {"ratio": ratio}, "old", "new", "ratio")
    got = rollout_correction(
        old,
        new,
        cu_seqlens=ends,
        rollout_is=level,
        rollout_is_threshold=1.3,
        rollout_is_lower=lower,
    )
    close(got.weights, ratio)
    assert 0 < got.metrics["is_clipped_fraction"] < 1


def test_off_policy_sequences_are_rejected(padded):
    negative = -torch.ones(B, 1)
    want = grpo.GRPOTrainer.get_off_policy_mask(
        negative, padded["new"], padded["old"], padded["mask"].long(), 0.02
    )
    new, old, ends = flat(padded, "new", "old")
    bounds = (1e-30, torch.tensor(0.02).exp().item())
    got = rollout_correction(
        new, old, cu_seqlens=ends, rollout_is=None, rejection={"seq_mean_k1": bounds}
    )
    accepted = torch.stack([got.response_mask[a:b].all() for a, b in pairwise(ends)])
    assert torch.equal(accepted, want[:, 0].bool()) and 0 < accepted.sum() < B
