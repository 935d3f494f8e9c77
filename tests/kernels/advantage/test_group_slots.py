"""The CUDA group statistics' arithmetic, compiled for the CPU: right, and the same in any order."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import GROUP_ESTIMATORS, group_advantage
from tests.kernels.batches import GROUPS, random_groups
from tests.kernels.cuda_on_cpu import compile_check
from tests.tolerances import ADVANTAGE


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    source = Path(__file__).parent / "group_slots_check.cpp"
    return compile_check(source, tmp_path_factory.mktemp("group_slots"), "-std=c++17")


def run(library, rewards, ids, lengths, order, estimator, norm_by_std=True):
    if estimator == "grpo" and not norm_by_std:
        estimator = "mean"
    out = torch.empty_like(rewards)
    library.group_advantages(
        *(ctypes.c_void_p(x.data_ptr()) for x in (rewards, ids, lengths, order)),
        ctypes.c_int64(rewards.numel()),
        ctypes.c_int(GROUP_ESTIMATORS.index(estimator)),
        ctypes.c_bool(norm_by_std),
        ctypes.c_double(1e-6),
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@settings(max_examples=30, deadline=None)
@given(
    **GROUPS,
    scale=st.sampled_from([1.0, 1e-20, 1e15]),
)
def test_equals_the_reference_in_any_order(
    library, estimator, rows, groups, seed, binary, norm_by_std, scale
):
    rewards, ids = random_groups(rows, groups, seed, binary)
    rewards = rewards * (1.0 if binary else scale)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (rows,), generator=generator).float()
    orders = (torch.arange(rows), torch.randperm(rows, generator=generator))
    first, second = (
        run(library, rewards, ids, lengths, order, estimator, norm_by_std) for order in orders
    )
    assert torch.equal(first, second)
    exact = group_advantage(
        rewards.double(),
        ids,
        estimator=estimator,
        norm_by_std=norm_by_std,
        lengths=lengths,
        backend="reference",
    )
    size = exact.abs().max().item() or 1.0 if rows else 1.0
    torch.testing.assert_close(
        first.double() / size, exact / size, rtol=ADVANTAGE["rtol"], atol=ADVANTAGE["atol"]
    )


@pytest.mark.parametrize("far", (1e3, -1e7, 3e30))
@pytest.mark.parametrize("count", (2, 3, 9, 1000))
def test_an_outlier_beside_others(library, count, far):
    rewards = torch.randn(count, generator=torch.Generator().manual_seed(count))
    rewards[count // 2] = far
    ids, order = torch.zeros(count, dtype=torch.int64), torch.randperm(count)
    got = run(library, rewards, ids, torch.ones(count), order, "grpo_loo")
    exact = group_advantage(rewards.double(), ids, estimator="grpo_loo", backend="reference")
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_one_group_of_many_equal_offset_and_bad_rewards(library, estimator):
    rows = 30_000
    order, lengths = torch.randperm(rows), torch.ones(rows)
    ids = torch.full((rows,), -7)
    rewards = torch.randn(rows) + 1e4
    got = run(library, rewards, ids, lengths, order, estimator)
    exact = group_advantage(
        rewards.double(), ids, estimator=estimator, lengths=lengths, backend="reference"
    )
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    assert run(library, torch.full_like(rewards, 0.1), ids, lengths, order, estimator).eq(0).all()
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoiled = torch.tensor([1.0, bad, 2.0, 3.0])
        groups, some = torch.tensor([1, 1, 2, 2]), torch.arange(4)
        out = run(library, spoiled, groups, torch.ones(4), some, estimator)
        assert out[:2].isnan().all() and out[2:].isfinite().all()
