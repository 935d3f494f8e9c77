"""Our functions against those of verl, and in place of them, where verl is installed."""

import importlib
import sys

import numpy as np
import pytest
import torch

import hybridengine.integrations.verl as verl
from tests.extras.integrations.verl_values import ADVANTAGES, MODES, POLICY_LOSSES
from tests.tolerances import VERL

upstream = pytest.importorskip(
    "benchmarks._verl", reason="pip install --no-deps verl==0.9.1", exc_type=ImportError
)
B, L = 12, 9


def _batch(seed):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(B, L, generator=generator) > 0.3).float()
    mask[:, 0], mask[3] = 1, 0
    return generator, mask, torch.randn(B, L, generator=generator) * mask


@pytest.mark.parametrize("name", ADVANTAGES)
def test_outcome_advantages(name):
    _, mask, rewards = _batch(0)
    groups = [f"prompt {i // 3}" for i in range(B - 1)]
    groups.append(groups[0] if name == "grpo_passk" else "alone")
    groups, options = np.array(groups, dtype=object), {"norm_adv_by_std_in_grpo": False}
    function = f"compute_{name}_outcome_advantage"
    ours, _ = getattr(verl, function)(rewards.clone(), mask, groups, config=options)
    theirs, _ = getattr(upstream.core_algos, function)(
        rewards.clone(), mask, groups, config=options
    )
    torch.testing.assert_close(ours, theirs, **VERL)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighted", [False, True])
def test_policy_losses(name, mode, weighted):
    generator, mask, advantages = _batch(1)
    old = -3 * torch.rand(B, L, generator=generator)
    new = old + 0.5 * torch.randn(B, L, generator=generator)
    weights = 0.5 + torch.rand(B, L, generator=generator) if weighted else None
    config = upstream.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.3
    )
    config.policy_loss.__dict__.update(dro_beta=0.1, clip_cov_ratio=0.05, kl_cov_ratio=0.1)
    results = []
    for functions in (verl, upstream.core_algos):
        log_probs = new.clone().requires_grad_()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            loss, metrics = getattr(functions, f"compute_policy_loss_{name}")(
                old, log_probs, advantages, mask, mode, config, weights
            )
        loss.backward()
        results.append((loss.detach(), log_probs.grad, metrics))
    (loss, gradient, metrics), (their_loss, their_gradient, their_metrics) = results
    torch.testing.assert_close(loss, their_loss, **VERL)
    torch.testing.assert_close(gradient, their_gradient, **VERL)
    assert metrics == pytest.approx(their_metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kl", ["kl", "abs", "mse", "low_var_kl", "k1+", "k3+"])
def test_kl_penalties(kl):
    generator, *_ = _batch(2)
    old = -3 * torch.rand(B, L, generator=generator)
    leaves = [(old + 0.3 * torch.cos(5 * old)).requires_grad_() for _ in range(2)]
    functions = (verl.kl_penalty, upstream.core_algos.kl_penalty)
    ours, theirs = (f(leaf, old, kl) for f, leaf in zip(functions, leaves, strict=True))
    torch.testing.assert_close(ours, theirs, **VERL)
    gradients = [
        torch.autograd.grad(x.sum(), y)[0] for x, y in zip((ours, theirs), leaves, strict=True)
    ]
    torch.testing.assert_close(*gradients, **VERL)


def test_patch_replaces_functions_and_registries_and_unpatch_restores_them():
    core = upstream.core_algos
    theirs = core.compute_grpo_outcome_advantage, core.compute_policy_loss_vanilla
    with verl.patched("advantages", "policy_losses", "losses", "log_probs"):
        assert core.compute_grpo_outcome_advantage is verl.compute_grpo_outcome_advantage
        assert core.get_adv_estimator_fn("grpo") is verl.compute_grpo_outcome_advantage
        assert core.get_policy_loss_fn("vanilla") is verl.compute_policy_loss_vanilla
        assert upstream.torch_functional.logprobs_from_logits is verl.logprobs_from_logits
    assert (core.compute_grpo_outcome_advantage, core.get_policy_loss_fn("vanilla")) == theirs


def test_importing_enabled_patches_the_default_groups(monkeypatch):
    monkeypatch.delitem(sys.modules, "hybridengine.integrations.verl.enabled", raising=False)
    forward = upstream.FusedLinearForPPO.forward
    try:
        importlib.import_module("hybridengine.integrations.verl.enabled")
        assert upstream.seqlen_balancing.karmarkar_karp is verl.karmarkar_karp
        assert upstream.FusedLinearForPPO.forward is verl.FusedLinearForPPO.forward
        assert upstream.core_algos.agg_loss is not verl.agg_loss
    finally:
        verl.unpatch()
    assert upstream.FusedLinearForPPO.forward is forward
