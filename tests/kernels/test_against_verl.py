"""Our operators against verl's own code on random inputs (skipped where verl is not installed).

Losses, KL estimates and group advantages: tests/extras/integrations/test_verl_itself.py.
"""

import pytest
import torch

from hybridengine.kernels import (
    balance,
    gae,
    imbalance,
    pack,
    policy_loss,
    rollout_correction,
    rollout_metrics,
    select_by_covariance,
    value_loss,
    whiten,
)
from tests.tolerances import VERL

omegaconf = pytest.importorskip("omegaconf", reason="the type of verl's configurations")
verl = pytest.importorskip(
    "benchmarks._verl", reason="pip install --no-deps verl==0.9.1", exc_type=ImportError
)
B, L = 12, 37


@pytest.fixture
def padded():
    """[B, L] inputs as verl takes them; one sequence with a single token, one full."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, L + 1, (B,), generator=generator)
    lengths[0], lengths[1] = 1, L
    old = -torch.rand(B, L, generator=generator) * 2 - 0.05
    return {
        "mask": torch.arange(L)[None] < lengths[:, None],
        "old": old,
        "new": old + 0.3 * torch.randn(B, L, generator=generator),
        "advantages": torch.randn(B, 1, generator=generator).expand(B, L).clone(),
        "weights": torch.rand(B, L, generator=generator) + 0.5,
        "rewards": torch.randn(B, generator=generator),
        "ids": torch.tensor([5, 5, 2, 2, 2, 9, 9, 9, 5, 1, 1, 7]),
    }


def flat(padded, *names):
    packed = pack([padded[name] for name in names], padded["mask"])
    return (*packed.values, packed.cu_seqlens)


def close(got, want):
    torch.testing.assert_close(got.float(), want.float(), **VERL)


@pytest.mark.parametrize("mode", ["kl_cov", "clip_cov"])
def test_covariance_losses(padded, mode):
    config = verl.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    object.__setattr__(config.policy_loss, "kl_cov_ratio", 0.05)
    object.__setattr__(config.policy_loss, "clip_cov_ratio", 1.0)  # all in the band: no randomness
    padded["advantages"] = padded["advantages"] * 4
    want, _ = verl.core_algos.get_policy_loss_fn(mode)(
        padded["old"],
        padded["new"],
        padded["advantages"].clone(),
        padded["mask"].float(),
        "token-mean",
        config,
    )
    old, new, advantages, _ = flat(padded, "old", "new", "advantages")
    ratio = (new - old).exp()
    caught = -advantages * ratio.clamp(0.8, 1.2) > -advantages * ratio
    selected = select_by_covariance(
        new, advantages, loss_mode=mode, ratio=0.05 if mode == "kl_cov" else 1.0, excluded=caught
    )
    assert selected.any()
    got, _ = policy_loss(
        new,
        old,
        advantages,
        loss_mode=mode,
        selected=selected,
        cov_kl_coef=config.policy_loss.ppo_kl_coef,
    )
    close(got, want)


def test_gae_and_whitening(padded):
    rewards, values = padded["new"], padded["old"]
    mask = padded["mask"].clone()
    mask[1, 5:9] = False  # an observation span inside a response
    want_advantages, want_returns = verl.core_algos.compute_gae_advantage_return(
        rewards * padded["mask"], values * padded["mask"], mask.float(), 0.99, 0.95
    )
    flat_rewards, flat_values, flat_mask, ends = flat(
        {"r": rewards, "v": values, "m": mask, "mask": padded["mask"]}, "r", "v", "m"
    )
    advantages, returns = gae(
        flat_rewards, flat_values, ends, gamma=0.99, lam=0.95, response_mask=flat_mask
    )
    close(returns[flat_mask], want_returns[mask])
    close(whiten(advantages, flat_mask)[flat_mask], want_advantages[mask])


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_value_loss(padded, agg):
    want, clipfrac = verl.core_algos.compute_value_loss(
        padded["new"], padded["advantages"], padded["old"], padded["mask"].float(), 0.2, agg
    )
    values, returns, old, ends = flat(padded, "new", "advantages", "old")
    got, metrics = value_loss(
        values, old, returns, cliprange_value=0.2, loss_agg_mode=agg, cu_seqlens=ends
    )
    close(got, want)
    close(metrics["vf_clipfrac"], clipfrac)


def weights_by(level, threshold):
    """Our options for verl's `threshold`, a number or "lower_upper"."""
    lower, upper = (0.7, 1.4) if isinstance(threshold, str) else (None, threshold)
    return {"rollout_is": level, "rollout_is_threshold": upper, "rollout_is_lower": lower}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [1.2, "0.7_1.4"])
def test_rollout_weights(padded, level, threshold):
    log_ratio = padded["new"] - padded["old"]
    want, _ = verl.rollout_corr_helper.compute_rollout_correction_weights(
        log_ratio, padded["mask"].float(), level, threshold
    )
    new, old, want, ends = flat(padded | {"want": want}, "new", "old", "want")
    got = rollout_correction(new, old, cu_seqlens=ends, **weights_by(level, threshold))
    close(got.weights, want)
    assert got.metrics["is_weight_mean"].item() == pytest.approx(want.mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    "criterion, theirs, ours",
    [
        ("token_k1", "0.8_1.25", (0.8, 1.25)),
        ("token_k3", "0.02", 0.02),
        ("seq_sum_k1", "0.5_2.0", (0.5, 2.0)),
        ("seq_mean_k2", "0.04", 0.04),
        ("seq_max_k3", "0.2", 0.2),
    ],
)
def test_rejection(padded, criterion, theirs, ours):
    log_ratio = padded["new"] - padded["old"]
    want, _ = verl.rollout_corr_helper.compute_rollout_rejection_mask(
        log_ratio, padded["mask"].float(), criterion, theirs
    )
    new, old, want, ends = flat(padded | {"want": want}, "new", "old", "want")
    got = rollout_correction(
        new, old, cu_seqlens=ends, rollout_is=None, rejection={criterion: ours}
    )
    assert torch.equal(got.response_mask, want.bool()) and got.weights is None
    assert 0 < want.sum() < want.numel()


def test_off_policy_metrics(padded):
    want = verl.rollout_corr_helper.compute_offpolicy_metrics(
        padded["new"], padded["old"], padded["mask"].float()
    )
    new, old, ends = flat(padded, "new", "old")
    metrics = rollout_correction(new, old, cu_seqlens=ends).metrics
    for name in ("kl", "k3_kl", "chi2_token"):
        assert metrics[name].item() == pytest.approx(want[name], rel=1e-4)


@pytest.mark.parametrize("level", ["token", "sequence", None])
@pytest.mark.parametrize("threshold", [1.4, "0.7_1.4"])
def test_further_rollout_metrics(padded, level, threshold):
    helper, mask = verl.rollout_corr_helper, padded["mask"].float()
    want = helper.compute_offpolicy_metrics(padded["new"], padded["old"], mask)
    if level is not None:
        log_ratio = padded["new"] - padded["old"]
        _, of_weights = helper.compute_rollout_correction_weights(log_ratio, mask, level, threshold)
        want |= of_weights
    new, old, ends = flat(padded, "new", "old")
    got = rollout_metrics(new, old, cu_seqlens=ends, **weights_by(level, threshold))
    known = {"kl", "k3_kl", "chi2_token", "rollout_is_oob_ratio"}  # of rollout_correction
    assert got.keys() == want.keys() - known
    for name, value in got.items():
        assert value.item() == pytest.approx(want[name], rel=1e-4, abs=1e-6), name


def test_groups_stay_together_as_evenly():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 500, (48,), generator=generator).tolist()
    ids = [i // 4 for i in range(48)]
    bins = balance(lengths, 3, group_ids=ids, equal_count=True)
    assert all(len(items) == 16 for items in bins)
    theirs = verl.seqlen_balancing.get_group_balanced_partitions(lengths, ids, 3)
    # verl balances an estimate of the work, which is nearly proportional to these short lengths.
    assert imbalance(lengths, bins).largest <= imbalance(lengths, theirs).largest


@pytest.mark.parametrize("equal_count", [False, True])
def test_balance_is_at_least_as_even(equal_count):
    generator = torch.Generator().manual_seed(0)
    for trial in range(300):
        bins = trial % 7 + 2
        count = bins * (trial % 9 + 1)
        lengths = torch.empty(count).log_normal_(5, 1, generator=generator).long().tolist()
        theirs = verl.seqlen_balancing.karmarkar_karp(lengths, bins, equal_count)
        ours = balance(lengths, bins, equal_count=equal_count)
        assert imbalance(lengths, ours).largest <= imbalance(lengths, theirs).largest
