"""Group advantages, GAE and whitening: against float64 references and hand-made cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import GROUP_ESTIMATORS, gae, group_advantage, whiten
from tests.kernels.batches import GROUPS, random_groups
from tests.tolerances import ADVANTAGE


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@settings(max_examples=50, deadline=None)
@given(**GROUPS)
def test_group_advantage_equals_the_reference(estimator, rows, groups, seed, binary, norm_by_std):
    rewards, ids = random_groups(rows, groups, seed, binary)
    lengths = torch.randint(0, 5, (rows,))
    options = {"estimator": estimator, "norm_by_std": norm_by_std, "lengths": lengths}
    ours = group_advantage(rewards, ids, backend="cpp", **options)
    exact = group_advantage(rewards.double(), ids, backend="reference", **options)
    assert ours.dtype == torch.float32 and exact.dtype == torch.float64
    torch.testing.assert_close(ours.double(), exact, **ADVANTAGE)


def test_each_estimator_by_hand():
    rewards, ids = torch.tensor([1.0, 2.0, 6.0, 4.0]), torch.tensor([3, 3, 3, -9])

    def by(estimator, **options):
        return group_advantage(rewards, ids, estimator=estimator, **options).tolist()

    std = 7**0.5
    assert by("grpo") == pytest.approx([-2 / std, -1 / std, 3 / std, 4], rel=1e-5)
    assert by("grpo", norm_by_std=False) == [-2, -1, 3, 4]
    assert by("mean") == [-2, -1, 3, 4]
    assert by("rloo") == [-3, -1.5, 4.5, 4]
    assert by("grpo_passk", norm_by_std=False) == [0, 0, 4, 4]
    assert by("max_mean", norm_by_std=False) == [0, 0, 3, 4]
    loo = by("grpo_loo", norm_by_std=True)
    assert loo == pytest.approx([-3 / 8**0.5, -1.5 / 12.5**0.5, 4.5 / 0.5**0.5, 4], rel=1e-5)
    assert by("grpo_loo", norm_by_std=False) == [-3, -1.5, 4.5, 4]
    lengths = torch.tensor([1, 1, 2, 1])
    assert by("opo", lengths=lengths) == [1 - 3.75, 2 - 3.75, 6 - 3.75, 4]


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_others_that_are_equal_have_no_std(backend):
    rewards = torch.tensor([1.0, 0.3, 0.3, 0.3, 2.0, 5.0])
    ids = torch.tensor([1, 1, 1, 1, 2, 2])
    out = group_advantage(rewards, ids, estimator="grpo_loo", backend=backend)
    std = 0.7 / 3**0.5
    want = [0.7, *[(0.3 - 1.6 / 3) / std] * 3, -3, 3]
    torch.testing.assert_close(out, torch.tensor(want), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("far", (0.0, 1e3, -1e7, 3e30))
@pytest.mark.parametrize("count", (3, 4, 9, 1000))
def test_the_std_of_others_beside_an_outlier(backend, count, far):
    """Against the formula, at both ends of a group and in its middle; no sum may cancel."""
    for at in (0, count // 2, count - 1):
        rewards = torch.randn(count, generator=torch.Generator().manual_seed(count))
        rewards[at] = far
        want = []
        for i in range(count):
            others = torch.cat([rewards[:i], rewards[i + 1 :]]).double()
            deviations = others - others.mean()
            std = (deviations.square().sum() / (count - 2)).sqrt()
            want.append((rewards[i].double() - others.mean()) / (std + 1e-6))
        ids = torch.zeros(count, dtype=torch.int64)
        out = group_advantage(rewards, ids, estimator="grpo_loo", backend=backend)
        torch.testing.assert_close(out, torch.stack(want).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_invalid_responses_are_left_out(estimator, backend):
    """As a call without them, whatever their rewards are; ids at both ends of int64."""
    generator = torch.Generator().manual_seed(0)
    rewards, lengths = torch.randn(20, generator=generator), torch.arange(1, 21)
    valid = torch.rand(20, generator=generator) < 0.6
    ids = torch.tensor([-(2**63), 5, 2**63 - 1])[torch.arange(20) % 3]
    for some in (ids, ids.clamp(max=9)):
        out = group_advantage(
            torch.where(valid, rewards, math.nan),
            some,
            estimator=estimator,
            lengths=lengths,
            valid=valid,
            backend=backend,
        )
        want = group_advantage(
            rewards[valid],
            some[valid],
            estimator=estimator,
            lengths=lengths[valid],
            backend=backend,
        )
        assert torch.equal(out[valid], want) and not out[~valid].any()
    spread = group_advantage(
        rewards,
        ids,
        estimator=estimator,
        lengths=lengths,
        valid=valid.float(),
        response_mask=torch.ones(20, 2),
        backend=backend,
    )
    assert not spread[~valid].any() and spread[valid].any()
    with pytest.raises(ValueError, match="valid has shape"):
        group_advantage(rewards, ids, valid=valid[:3])


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_spread_to_tokens(backend):
    rewards, ids = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0, 0, 0])
    mask = torch.tensor([1, 0, 1, 1, 1, 0], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 2, 2, 5], dtype=torch.int32)  # the last token is past the end
    out = group_advantage(
        rewards, ids, estimator="mean", cu_seqlens=cu_seqlens, response_mask=mask, backend=backend
    )
    assert out.tolist() == [0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_responses_of_70000_tokens_of_one_and_of_none(backend):
    ends = torch.tensor([0, 70_000, 70_001, 70_001, 70_004], dtype=torch.int32)
    mask = torch.ones(70_004, dtype=torch.bool)
    mask[70_001:] = False  # the last response is fully masked
    out = group_advantage(
        torch.tensor([1.0, 3.0, 5.0, 7.0]),
        torch.tensor([4, 4, 4, 4]),
        estimator="mean",
        cu_seqlens=ends,
        response_mask=mask,
        backend=backend,
    )
    assert out[:70_000].eq(-3).all() and out[70_000] == -1 and out[70_001:].eq(0).all()


def test_groups_do_not_depend_on_order_or_on_other_groups():
    rewards, ids = random_groups(300, 12, 0, False)
    order = torch.randperm(300)
    shuffled = group_advantage(rewards[order], ids[order])
    torch.testing.assert_close(shuffled, group_advantage(rewards, ids)[order], rtol=0, atol=0)
    alone = ids == ids[0]
    some = group_advantage(rewards[alone], ids[alone])
    assert torch.equal(some, group_advantage(rewards, ids)[alone])


def test_equal_rewards_give_exactly_zero():
    rewards = torch.full((7,), 0.1)
    for estimator in GROUP_ESTIMATORS:
        out = group_advantage(
            rewards, torch.zeros(7, dtype=torch.int64), estimator=estimator, lengths=torch.ones(7)
        )
        assert out.eq(0).all(), estimator


def test_large_offsets_do_not_cancel():
    rewards = torch.tensor([1e6 + 0.5, 1e6 - 0.5, 1e6 + 1.5, 1e6 - 1.5])
    ids = torch.zeros(4, dtype=torch.int64)
    exact = group_advantage(rewards.double(), ids, backend="reference")
    torch.testing.assert_close(group_advantage(rewards, ids).double(), exact, **ADVANTAGE)


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_reward_is_named(backend, bad):
    rewards = torch.zeros(9)
    rewards[5] = bad
    with pytest.raises(ValueError, match=r"rewards\[5\] is -?(nan|inf)"):
        group_advantage(rewards, torch.arange(9), backend=backend)


def test_integer_and_strided_inputs():
    rewards = torch.randn(20)[::2]
    ids = torch.arange(20, dtype=torch.int32)[::2] // 5
    expected = group_advantage(rewards.contiguous(), ids.long().contiguous())
    assert torch.equal(group_advantage(rewards, ids), expected)
    assert group_advantage(
        torch.tensor([0, 2]), torch.tensor([1, 1]), estimator="mean"
    ).tolist() == [-1, 1]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), max_size=6),
    seed=st.integers(0, 2**16),
    gamma=st.sampled_from([1.0, 0.99, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    with_values=st.booleans(),
    with_mask=st.booleans(),
    tail=st.integers(0, 3),
)
def test_gae_equals_the_reference(lengths, seed, gamma, lam, with_values, with_mask, tail):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths) + tail
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    rewards = torch.randn(tokens, generator=generator)
    values = torch.randn(tokens, generator=generator) if with_values else None
    mask = torch.rand(tokens, generator=generator) < 0.7 if with_mask else None
    if tail:  # tokens of no sequence, as pack(capacity=) leaves them
        mask = torch.ones(tokens, dtype=torch.bool) if mask is None else mask
        mask[sum(lengths) :] = False
    options = {"gamma": gamma, "lam": lam, "response_mask": mask}
    ours = gae(rewards, values, cu_seqlens, backend="cpp", **options)
    doubles = None if values is None else values.double()
    exact = gae(rewards.double(), doubles, cu_seqlens, backend="reference", **options)
    for got, want in zip(ours, exact, strict=True):
        torch.testing.assert_close(got.double(), want, **ADVANTAGE)


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_token_reward_is_named_unless_it_is_masked(backend, bad):
    rewards, ends = torch.zeros(40_000), torch.tensor([0, 3, 9, 40_000], dtype=torch.int32)
    rewards[[5, 30_000]] = bad
    with pytest.raises(ValueError, match=r"gae: rewards\[5\] is -?(nan|inf)"):
        gae(rewards, None, ends, backend=backend)
    mask = rewards == 0
    assert gae(rewards, None, ends, response_mask=mask, backend="cpp")[0].eq(0).all()


def test_gae_on_a_long_sequence_is_the_discounted_sum():
    tokens, decay = 70_000, 0.99
    rewards = torch.randn(tokens)
    _, returns = gae(rewards, None, torch.tensor([0, tokens], dtype=torch.int32), gamma=decay)
    weights = decay ** torch.arange(3000, dtype=torch.float64)
    for t in (0, 1234, tokens - 1):
        window = rewards[t : t + 3000].double()
        assert returns[t].item() == pytest.approx((window * weights[: window.numel()]).sum().item())


def test_whiten_over_the_unmasked():
    values, mask = torch.randn(50) * 3 + 2, torch.rand(50) < 0.5
    unmasked = values[mask].double()
    white = whiten(values, mask)
    expected = (unmasked - unmasked.mean()) / (unmasked.var() + 1e-8).sqrt()
    torch.testing.assert_close(white[mask].double(), expected, **ADVANTAGE)
    assert white[~mask].eq(0).all()
    shifted = whiten(values, mask, shift_mean=False)[mask].double()
    torch.testing.assert_close(shifted, expected + unmasked.mean(), **ADVANTAGE)
    assert whiten(values, torch.zeros(50)).eq(0).all()
    assert whiten(torch.full((3,), 0.1)).eq(0).all()
