"""verl's functions under its names: conventions, shapes, and values recorded from verl 0.9.1."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hybridengine.integrations.verl as verl
from hybridengine.integrations import flash_attn
from tests.extras.integrations.verl_values import ADVANTAGES, MODES, POLICY_LOSSES
from tests.tolerances import LINEAR, LOG_PROB, VERL

B, L, V = 6, 5, 37
GROUPS = np.array(["a", "b", "a", "b", "a", "c"], dtype=object)


@pytest.mark.slow
def test_importing_the_adapter_does_not_import_verl():
    code = "import hybridengine.integrations.verl, sys; sys.exit('verl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_replacements_are_exported_once_and_losses_are_not_replaced_by_default():
    patches = verl.patch.__self__
    targets = [r.target for r in patches.replacements]
    assert len(targets) == len(set(targets)) == len({id(r.function) for r in patches.replacements})
    assert {target.rpartition(".")[2] for target in targets} - {"forward"} <= set(verl.__all__)
    assert set(patches.groups) - set(patches.default_groups) == {
        "losses",
        "policy_losses",
        "vocab_parallel",
    }


def _rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(3, 4, V, generator=generator)
    return logits, torch.randint(0, V, (3, 4), generator=generator)


@pytest.mark.parametrize("name", ["", "_flash_attn", "_naive", "_v2"])
def test_log_probs_are_float32_of_any_logits(name):
    logits, labels = _rows()
    exact = torch.log_softmax(logits.double(), -1).gather(-1, labels[..., None])[..., 0]
    log_probs = getattr(verl, f"logprobs_from_logits{name}")
    torch.testing.assert_close(log_probs(logits, labels).double(), exact, **LOG_PROB)
    flat = log_probs(logits.flatten(0, 1), labels.view(1, -1))
    torch.testing.assert_close(flat.double(), exact.flatten(), **LOG_PROB)
    rounded = logits.bfloat16()
    exact = torch.log_softmax(rounded.double(), -1).gather(-1, labels[..., None])[..., 0]
    result = log_probs(rounded, labels)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), exact, **LOG_PROB)


def test_entropy_with_gradient():
    logits, _ = _rows()
    p = torch.softmax(logits.double(), -1)
    exact = -(p * p.log()).sum(-1)
    for entropy_of in (verl.entropy_from_logits, verl.entropy_from_logits_with_chunking):
        x = logits.clone().requires_grad_()
        entropy = entropy_of(x)
        torch.testing.assert_close(entropy.double(), exact, **LOG_PROB)
        entropy.sum().backward()
        torch.testing.assert_close(
            x.grad.double(), -p * (p.log() + exact[..., None]), rtol=1e-5, atol=2e-6
        )


def test_inplace_backward_of_logits_that_another_node_needs_is_an_error():
    logits, labels = _rows()
    x = logits.requires_grad_() * 1
    other = x.square().sum()  # its backward runs after that of the log-probs
    loss = other + verl.logprobs_from_logits(x, labels).sum()
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def _padded():
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0]])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, V, mask.shape, generator=generator) * mask
    logits = torch.randn(*mask.shape, V, generator=generator)
    return ids, mask, logits


def test_response_log_probs_padded_and_packed_agree_and_prompt_logits_are_not_read():
    ids, mask, logits = _padded()
    response = 3
    padded = verl.log_probs_from_logits_response(ids, logits, response)
    packed = logits[mask.bool()]
    is_read = torch.zeros_like(mask).bool()
    is_read[:, -response - 1 : -1] = True
    packed[~is_read[mask.bool()]] = float("nan")
    result = verl.log_probs_from_logits_response_rmpad(ids, mask, packed, response)
    # A token follows its predecessor in the packed batch, so the last of a sequence is left out.
    inside = mask[:, -response:].bool()
    torch.testing.assert_close(result[inside], padded[inside], **LOG_PROB)
    flat, indices, *_ = flash_attn.unpad_input(ids[..., None], mask)
    same = verl.log_probs_from_logits_all_rmpad(flat.view(1, -1), packed, indices, 3, 6, response)
    assert torch.equal(same, result)


def test_linear_cross_entropy_and_fused_linear():
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 3, 8, generator=generator)
    weight = torch.randn(V, 8, generator=generator)
    labels = torch.randint(0, V, (2, 3), generator=generator)
    exact = torch.log_softmax((hidden.double() @ weight.double().T) / 0.7, -1)
    chosen = exact.gather(-1, labels[..., None])[..., 0]
    entropy = -(exact.exp() * exact).sum(-1)
    log_probs, entropies = verl.FusedLinearForPPO(chunk_size=2)(hidden, weight, labels.int(), 0.7)
    torch.testing.assert_close(log_probs.double(), chosen, **LINEAR)
    torch.testing.assert_close(entropies.double(), entropy, **LINEAR)
    for reduction, expected in (
        ("none", chosen.flatten()),
        ("sum", chosen.sum()),
        ("mean", chosen.mean()),
    ):
        result, entropies = verl.linear_cross_entropy(hidden, weight, labels, 0.7, reduction)
        torch.testing.assert_close(result.double(), expected, **LINEAR)
        torch.testing.assert_close(entropies.double(), entropy.flatten(), **LINEAR)
    with pytest.raises(ValueError, match="reduction"):
        verl.linear_cross_entropy(hidden, weight, labels, 1.0, "max")


def _rewards():
    rewards = torch.zeros(B, L)
    rewards[:, 2] = torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 0.25])
    rewards[0, 0] = 0.5
    return rewards


@pytest.mark.parametrize("name", ADVANTAGES)
def test_outcome_advantages(name):
    groups = GROUPS if name != "grpo_passk" else np.array(list("ababab"), dtype=object)
    function = getattr(verl, f"compute_{name}_outcome_advantage")
    mask = torch.ones(B, L)
    advantages, returns = function(
        _rewards(), mask, groups, config={"norm_adv_by_std_in_grpo": True}
    )
    expected = torch.tensor(ADVANTAGES[name])[:, None] * mask
    torch.testing.assert_close(advantages, expected, rtol=2e-5, atol=2e-6)
    assert torch.equal(advantages, returns)
    # Groups are named by anything hashable, also by a tensor's entries.
    numbers = torch.tensor([ord(str(group)) for group in groups])
    same, _ = function(_rewards(), mask, numbers, config={})
    assert torch.equal(same, advantages)


def test_grpo_without_std_and_masked_tokens():
    mask = torch.ones(B, L, dtype=torch.int64)
    mask[1, 2:] = 0
    advantages, _ = verl.compute_grpo_outcome_advantage(
        _rewards(), mask, GROUPS, norm_adv_by_std_in_grpo=False
    )
    assert advantages[1].tolist() == [-1.0, -1.0, 0.0, 0.0, 0.0]
    assert advantages[5].tolist() == [0.25] * L  # alone: mean 0


def test_passk_needs_two_responses():
    with pytest.raises(ValueError, match="at least 2"):
        verl.compute_grpo_passk_outcome_advantage(_rewards(), torch.ones(B, L), GROUPS, config={})


def _batch():
    t = torch.arange(B * L, dtype=torch.float32).view(B, L)
    mask = torch.ones(B, L)
    mask[0, 3:] = mask[2, 1] = mask[3, 4:] = mask[4] = 0
    old = -1.5 - torch.sin(3 * t)
    new = old + 0.6 * torch.cos(5 * t)
    return t, mask, old, new, 2 * torch.sin(7 * t + 1), 1 + 0.5 * torch.cos(t)


def test_token_level_advantages():
    """Sums over the unmasked tokens of each response, recorded from verl 0.9.1."""
    t, mask, *_ = _batch()
    results = {
        "rf++": verl.compute_reinforce_plus_plus_outcome_advantage(
            _rewards(), mask, config=SimpleNamespace(gamma=0.9)
        ),
        "remax": verl.compute_remax_outcome_advantage(_rewards(), torch.sin(t[:, 0]), mask),
        "gae": verl.compute_gae_advantage_return(
            _rewards(), torch.cos(2 * t), mask, torch.tensor(0.95), 0.9
        ),
    }
    expected = {
        "rf++": (
            [2.602665, -3.643376, -1.497487, 5.170877, 0.0, -2.632679],
            [3.21, 0.0, 0.95, 5.42, 0.0, 0.6775],
        ),
        "remax": (
            [3.5, 4.794621, 3.176085, 3.398848, 0.0, 1.411759],
            [3.5, 0.0, 1.0, 6.0, 0.0, 0.75],
        ),
        "gae": (
            [1.864474, -1.836268, -1.316068, 3.580105, 0.0, -2.292242],
            [2.931303, 0.070422, 0.845315, 5.070325, 0.0, 0.730846],
        ),
    }
    for name, pair in expected.items():
        for result, sums in zip(results[name], pair, strict=True):
            assert result[mask == 0].abs().sum() == 0
            torch.testing.assert_close(result.sum(1), torch.tensor(sums), rtol=1e-5, atol=1e-5)


class _Config(SimpleNamespace):
    """The part of verl's ActorConfig that losses read."""

    def get(self, name, default=None):
        return getattr(self, name, default)


def _config(**info):
    policy_loss = SimpleNamespace(
        clip_cov_ratio=0.2,
        clip_cov_lb=0.1,
        clip_cov_ub=5.0,
        kl_cov_ratio=0.1,
        ppo_kl_coef=0.7,
        dro_beta=0.1,
    )
    ratios = dict(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.3, clip_ratio_c=1.5)
    taus = dict(tau_pos=1.0, tau_neg=1.05)
    return _Config(**ratios, **taus, policy_loss=policy_loss, global_batch_info=info)


METRICS = ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses(name):
    _, mask, old, new, advantages, weights = _batch()
    config = _config(dp_size=2, batch_num_tokens=40, global_batch_size=9, loss_scale_factor=None)
    mode = "seq-mean-token-mean" if name in ("gspo", "sapo") else "token-mean"
    log_probs = new.requires_grad_()
    with torch.random.fork_rng():
        torch.manual_seed(3)  # clip_cov draws
        loss, metrics = getattr(verl, f"compute_policy_loss_{name}")(
            old, log_probs, advantages, mask, mode, config, weights
        )
    loss.backward()
    expected, norm, means = POLICY_LOSSES[name]
    if isinstance(means, tuple):
        means = dict(zip(METRICS, means, strict=False))
    assert loss.item() == pytest.approx(expected, rel=2e-5, abs=2e-6)
    assert log_probs.grad.norm().item() == pytest.approx(norm, rel=2e-5)
    assert metrics == pytest.approx({f"actor/{k}": v for k, v in means.items()}, abs=2e-6)
    assert all(type(value) is float for value in metrics.values())


def test_dro_needs_a_positive_beta():
    _, mask, old, new, advantages, _ = _batch()
    config = _config()
    config.policy_loss.dro_beta = 0
    with pytest.raises(ValueError, match="dro_beta"):
        verl.compute_policy_loss_dro(old, new, advantages, mask, config=config)


def _weights(mode, mask, tokens, sequences, factor):
    lengths = mask.sum(1, keepdim=True)
    return (
        mask
        / {
            "token-mean": tokens,
            "token-sum": 1,
            "seq-mean-token-sum": sequences,
            "seq-mean-token-mean": sequences * lengths.clamp(min=1),
            "seq-mean-token-sum-norm": sequences * factor,
        }[mode]
    )


@pytest.mark.parametrize("mode", MODES)
def test_agg_loss_and_value_loss(mode):
    _, mask, old, new, advantages, _ = _batch()
    local = _weights(mode, mask, mask.sum(), 5, L)
    result = verl.agg_loss(advantages, mask.bool(), mode)
    torch.testing.assert_close(result, (advantages * local).sum(), **VERL)
    masked = torch.where(mask.bool(), advantages, float("nan"))
    torch.testing.assert_close(verl.agg_loss(masked, mask, mode), result)
    info = {"dp_size": 4, "batch_num_tokens": 90, "global_batch_size": 20, "loss_scale_factor": 7}
    full = 4 * _weights(mode, mask, 90, 20, 7)
    result = verl.agg_loss(advantages, mask, mode, **info)
    torch.testing.assert_close(result, (advantages * full).sum(), **VERL)
    clipped = torch.minimum(torch.maximum(new, old - 0.3), old + 0.3)
    errors = (new - advantages).square(), (clipped - advantages).square()
    loss, fraction = verl.compute_value_loss(new, advantages, old, mask, 0.3, mode, **info)
    torch.testing.assert_close(loss, 0.5 * (torch.maximum(*errors) * full).sum(), **VERL)
    is_clipped = (errors[1] > errors[0]) & mask.bool()
    torch.testing.assert_close(fraction, is_clipped.sum() / mask.sum(), **VERL)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_agg_loss_needs_global_denominators_for_several_ranks(mode):
    with pytest.raises(ValueError, match="required when dp_size > 1"):
        verl.agg_loss(torch.zeros(2, 2), torch.ones(2, 2), mode, dp_size=2)
    with pytest.raises(ValueError, match="loss_agg_mode"):
        verl.agg_loss(torch.zeros(2, 2), torch.ones(2, 2), "mean")


@pytest.mark.parametrize("name", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
@pytest.mark.parametrize("plus", ["", "+"])
def test_kl_penalty(name, plus):
    log_probs = torch.tensor([-1.0, -3.0, -0.5], requires_grad=True)
    reference = torch.tensor([-2.0, -1.0, -0.5])
    x = log_probs.detach() - reference
    value, slope = {
        "k1": (x, torch.ones(3)),
        "abs": (x.abs(), x.sign()),
        "k2": (x.square() / 2, x),
        "k3": (torch.exp(-x) - 1 + x, 1 - torch.exp(-x)),
    }[{"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name, name)]
    result = verl.kl_penalty(log_probs, reference, name + plus)
    result.sum().backward()
    torch.testing.assert_close(result, value, **VERL)
    torch.testing.assert_close(log_probs.grad, x if plus else slope, **VERL)


def test_kl_penalty_unknown():
    with pytest.raises(NotImplementedError, match="full"):
        verl.kl_penalty(torch.zeros(2), torch.zeros(2), "full")


@pytest.mark.parametrize("equal_size", [False, True])
def test_partitions(equal_size):
    lengths = [37, 5, 90, 12, 44, 8, 61, 20, 33, 71, 2, 15]
    partitions = verl.get_seqlen_balanced_partitions(lengths, 4, equal_size)
    assert sorted(i for partition in partitions for i in partition) == list(range(12))
    assert all(partition == sorted(partition) and partition for partition in partitions)
    sums = [sum(lengths[i] for i in partition) for partition in partitions]
    assert max(sums) - min(sums) <= 10
    if equal_size:
        assert {len(partition) for partition in partitions} == {3}
        with pytest.raises(AssertionError, match="11 % 4"):
            verl.karmarkar_karp(lengths[:11], 4, True)
    with pytest.raises(AssertionError, match="number of items"):
        verl.get_seqlen_balanced_partitions([1, 2], 3, False)


def test_unpadding_takes_every_call():
    ids, mask, _ = _padded()
    packed, indices, cu_seqlens, longest, used = verl.unpad_input(ids[..., None], mask)
    assert (longest, cu_seqlens.tolist(), used.tolist()) == (6, [0, 4, 10, 12], [4, 6, 2])
    padded = verl.pad_input(hidden_states=packed, indices=indices, batch=3, seqlen=6)
    assert torch.equal(padded[..., 0], ids)
    assert torch.equal(verl.index_first_axis(ids.flatten()[:, None], indices), packed)
