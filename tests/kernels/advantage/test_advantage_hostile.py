"""group_advantage, gae and whiten on hostile arguments: refused by name, or defined."""

import math

import pytest
import torch

from hybridengine.kernels import GROUP_ESTIMATORS, gae, group_advantage, whiten
from hybridengine.kernels._backend import native
from tests.tolerances import ADVANTAGE

NAN, INF = math.nan, math.inf
BACKENDS = ["cpp", "reference"]
R = torch.tensor([1.0, 0.0, 2.0, 5.0])
IDS = torch.tensor([0, 0, 1, 1])
ENDS = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32)
MASK = torch.ones(4, dtype=torch.bool)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"estimator": "grp"}, r"estimator is 'grp'.*Did you mean 'grpo'"),
        ({"estimator": "opo"}, "estimator 'opo' needs lengths"),
        ({"lengths": -R}, "lengths has an entry that is not a length"),
        ({"lengths": R * NAN}, "lengths has an entry that is not a length"),
        ({"cu_seqlens": ENDS}, "cu_seqlens needs response_mask"),
        ({"response_mask": MASK}, r"response_mask has shape \[4\]; expected \[N, L\]"),
        ({"response_mask": MASK[:3, None]}, r"response_mask has shape \[3, 1\]"),
        ({"response_mask": MASK, "cu_seqlens": ints(0, 2, 4)}, "cu_seqlens has 3 entries"),
    ],
)
def test_a_bad_argument_of_group_advantage_is_named(backend, arguments, message):
    with pytest.raises(ValueError, match=f"group_advantage: {message}"):
        group_advantage(**{"rewards": R, "group_ids": IDS, "backend": backend, **arguments})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"values": IDS}, "values has dtype int64"),
        ({"cu_seqlens": None}, r"rewards is \[T\]; give cu_seqlens"),
        ({"rewards": R.view(2, 2), "values": None}, "cu_seqlens is given and rewards has shape"),
    ],
)
def test_a_bad_argument_of_gae_is_named(backend, arguments, message):
    given = {"rewards": R, "values": R, "cu_seqlens": ENDS, "backend": backend, **arguments}
    with pytest.raises(ValueError, match=f"gae: {message}"):
        gae(**given)


@pytest.mark.parametrize("index", [1, 5, 6, 7])
def test_the_bindings_compare_devices_themselves(index):
    group = [R, IDS, 0, True, 1e-6, R, ENDS, MASK, 4]
    native().group_advantage(*group)
    group[index] = group[index].to("meta")
    with pytest.raises(ValueError, match="is on meta, rewards on cpu"):
        native().group_advantage(*group)
    scan = [R, R, ENDS, MASK, 1.0, 1.0]
    native().gae(*scan)
    scan[index % 3 + 1] = scan[index % 3 + 1].to("meta")
    with pytest.raises(ValueError, match="is on meta, rewards on cpu"):
        native().gae(*scan)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_any_ids_and_any_masks(backend, estimator):
    options = {"estimator": estimator, "lengths": torch.tensor([1, 0, 4, 2]), "backend": backend}
    want = group_advantage(R, IDS, **options)
    far = torch.tensor([-(2**63), 2**63 - 1])
    assert torch.equal(group_advantage(R, far[IDS], **options), want)
    assert torch.equal(group_advantage(R, (IDS - 7).int(), **options), want)
    rows = torch.tensor([[1, 1, 0]] * 4)
    for mask in (rows, rows.bool(), rows.double(), rows.to(torch.uint8)):
        spread = group_advantage(R, IDS, response_mask=mask, **options)
        assert torch.equal(spread, want[:, None] * rows)
        packed = group_advantage(
            R, IDS, cu_seqlens=torch.arange(0, 13, 3), response_mask=mask.flatten(), **options
        )
        assert torch.equal(packed, spread.flatten())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_groups_of_one_and_no_rows(backend, estimator):
    options = {"estimator": estimator, "backend": backend}
    alone = group_advantage(R, torch.arange(4), lengths=R, **options)
    torch.testing.assert_close(alone, R, **ADVANTAGE)
    for mask in (None, torch.ones(0, 5), torch.ones(0, 0)):
        none = group_advantage(R[:0], IDS[:0], lengths=R[:0], response_mask=mask, **options)
        assert none.shape == ((0,) if mask is None else mask.shape)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_float64_rewards_stay_float64(estimator):
    rewards = torch.tensor([1 + 1e-12, 1, 3, 4], dtype=torch.float64)
    out = group_advantage(rewards, IDS, estimator=estimator, norm_by_std=False, lengths=R)
    assert out.dtype == torch.float64
    if estimator == "mean":
        assert out[0].item() == pytest.approx(5e-13, rel=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float16, torch.float32])
def test_rewards_of_any_dtype_are_computed_in_float32(backend, dtype):
    rewards = R.to(dtype)
    options = {"gamma": 0.9, "lam": 0.8, "backend": backend}
    got = gae(rewards, R.bfloat16(), ints(0, 4), **options)
    want = gae(R, R, ints(0, 4), **options)
    grouped = group_advantage(rewards, IDS, backend=backend)
    for ours, exact in zip((*got, grouped), (*want, group_advantage(R, IDS)), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, exact, **ADVANTAGE)


def test_gae_in_float64_is_exact_to_float64():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 50, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 50, generator=generator) < 0.8
    got = gae(rewards, values, gamma=0.99, lam=0.95, response_mask=mask.int())
    assert got[0].dtype == torch.float64 and got[0].shape == (3, 50)
    flat = [t.flatten() for t in (rewards, values)]
    ends = torch.arange(0, 151, 50)
    again = gae(*flat, ends, gamma=0.99, lam=0.95, response_mask=mask.flatten())
    for ours, packed in zip(got, again, strict=True):
        assert torch.equal(ours.flatten(), packed)
    row, unmasked = rewards[0], mask[0]
    weight = 0.99 ** torch.arange(int(unmasked.sum()), dtype=torch.float64)
    _, returns = gae(row, None, ints(0, 50), gamma=0.99, response_mask=unmasked)
    first = returns[unmasked][0].item()
    assert first == pytest.approx((row[unmasked] * weight).sum().item(), rel=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ends", [ints(0), ints(0, 0), ints(0, 0, 0)])
def test_gae_of_nothing(backend, ends):
    for values in (None, R[:0]):
        assert [x.shape for x in gae(R[:0], values, ends, backend=backend)] == [(0,), (0,)]
    masked = gae(R, R * NAN, ends, response_mask=~MASK, backend=backend)
    assert all(x.eq(0).all() for x in masked)


def test_whiten_of_masked_and_strided_values():
    values = torch.randn(4, 6).t()[::2]
    mask = torch.rand(3, 4) < 0.6
    spoiled = values.masked_fill(~mask, NAN)
    want = whiten(values.contiguous(), mask)
    for given in (mask, mask.int(), mask.double()):
        assert torch.equal(whiten(spoiled, given), want)
    assert whiten(values.double(), mask).dtype == torch.float64
    assert whiten(values[:0]).shape == (0, 4) and whiten(values, mask & False).eq(0).all()
    single = torch.zeros_like(mask)
    single[1, 2] = True
    assert whiten(values, single).eq(0).all()
