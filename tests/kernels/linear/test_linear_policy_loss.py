"""linear_policy_loss against a float64 two-step reference."""

import pytest
import torch
import torch.distributed as dist

from hybridengine.kernels import linear_policy_loss, policy_loss, rollout_correction
from hybridengine.kernels._aggregation import LOSS_AGG_MODES
from hybridengine.kernels.linear import chunks as linear_chunks
from hybridengine.kernels.policy_loss.terms import LOSS_MODES, LossOptions
from tests import tolerances
from tests.kernels.linear.cases import (
    DEVICES,
    OP_OPTIONS,
    assert_all_close,
    fused,
    gradients,
    loss_and_gradients,
    loss_inputs,
    problem,
    two_steps,
)
from tests.ranks import run_ranks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extra", ("plain", "entropy and kl"))
@pytest.mark.parametrize("agg_mode", ("token-mean", "seq-mean-token-mean"))
@pytest.mark.parametrize("mode", LOSS_MODES)
def test_policy_loss_modes_against_float64(mode, agg_mode, extra, device):
    tensors, token_ids, _ = problem(40, 16, 101)
    arguments = loss_inputs(40)
    options = {"loss_mode": mode, "loss_agg_mode": agg_mode, "temperature": 0.9}
    if extra != "plain":
        options |= {"entropy_coeff": 0.01, "kl_coef": 0.1}
    expected, expected_metrics = loss_and_gradients(
        tensors, token_ids, arguments, torch.float64, **options
    )
    got, metrics = loss_and_gradients(
        tensors, token_ids, arguments, torch.float32, device, budget_bytes=11 * 101 * 4, **options
    )
    assert_all_close(got, expected)
    assert_metrics_close(metrics, expected_metrics)


def assert_metrics_close(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name].cpu().double(), value.double(), **tolerances.LINEAR)


BOUNDS = {"rollout_is_threshold": 1.3}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bounds", (None, BOUNDS, BOUNDS | {"rollout_is_lower": 0.7}))
@pytest.mark.parametrize("old", ("given", "own"))
@pytest.mark.parametrize("mode", LOSS_MODES)
def test_weights_and_old_log_probs_formed_inside(mode, old, bounds, device):
    """As the two steps in float64, with rollout_correction in between."""
    tensors, token_ids, _ = problem(40, 16, 101)
    arguments, options = loss_inputs(40), {"loss_mode": mode, "entropy_coeff": 0.01, "kl_coef": 0.1}
    leaves = [t.double().requires_grad_() for t in tensors]
    log_probs, entropy = two_steps(*leaves, token_ids)
    exact = arguments | ({"old_log_probs": log_probs.detach()} if old == "own" else {})
    noise = 0.4 * torch.randn(40, generator=torch.Generator().manual_seed(7))
    rollout = (exact["old_log_probs"] + noise).float()
    rollout[~arguments["response_mask"]] = torch.nan
    if bounds is not None:
        correction = rollout_correction(
            exact["old_log_probs"],
            rollout,
            cu_seqlens=arguments["cu_seqlens"],
            response_mask=arguments["response_mask"],
            **bounds,
        )
        assert correction.metrics["is_clipped_fraction"] > 0.1
        exact["rollout_is_weights"] = correction.weights
    loss, expected_metrics = policy_loss(log_probs, entropy=entropy, **exact, **options)
    expected = [loss.detach(), *torch.autograd.grad(3.0 * loss, leaves)]

    if old == "own":
        del arguments["old_log_probs"]
        options["old_log_probs"] = None
    if bounds is not None:
        options |= bounds
        arguments["rollout_log_probs"] = rollout
    for budget_bytes, grad_scale in ((11 * 101 * 4, 1.0), (2**20, 3.0)):
        got, metrics = loss_and_gradients(
            tensors,
            token_ids,
            arguments,
            torch.float32,
            device,
            budget_bytes=budget_bytes,
            grad_scale=grad_scale,
            **options,
        )
        assert_all_close([got[0], *got[3:]], expected)
        assert_metrics_close(metrics, expected_metrics)


def test_grad_scale_keeps_small_gradients_of_float16():
    """1 / N is below float16's range; multiplied by the loss scale it is not."""
    tensors, token_ids, _ = problem(40, 16, 101, dtype=torch.float16)
    counts = {"global_num_tokens": 2.0**24, "old_log_probs": None}
    arguments = {"advantages": loss_inputs(40)["advantages"]}
    scale = 2.0**20 / 3.0  # loss_and_gradients multiplies the loss by 3
    exact, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float64, **counts)
    leaves = [t.requires_grad_() for t in tensors]
    errors = []
    for grad_scale in (1.0, 3.0 * scale):
        loss, *_ = linear_policy_loss(
            *leaves[:2], token_ids, bias=leaves[2], grad_scale=grad_scale, **arguments, **counts
        )
        grads = torch.autograd.grad(3.0 * scale * loss, leaves)
        relative = [
            ((g.double() / scale - e).norm() / e.norm()).item()
            for g, e in zip(grads, exact[3:], strict=True)
        ]
        errors.append(max(relative))
    assert errors[1] < 2.0**-9 < 0.1 < errors[0]


def test_policy_loss_gradients_add_up_over_micro_batches():
    tensors, token_ids, _ = problem(40, 16, 101)
    arguments = {k: v for k, v in loss_inputs(40).items() if k != "cu_seqlens"}
    total = {"global_num_tokens": float(arguments["response_mask"].sum())}
    full, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float32, **total)
    parts = []
    for rows in (slice(0, 7), slice(7, 40)):
        split = {k: v[rows] for k, v in arguments.items()}
        parts.append(
            loss_and_gradients(
                [tensors[0][rows], *tensors[1:]], token_ids[rows], split, torch.float32, **total
            )[0]
        )
    joined = [parts[0][0] + parts[1][0]]
    joined += [torch.cat([a, b]) for a, b in zip(parts[0][1:4], parts[1][1:4], strict=True)]
    joined += [a + b for a, b in zip(parts[0][4:], parts[1][4:], strict=True)]
    assert_all_close(joined, full)


@pytest.mark.parametrize("options", ({}, {"loss_mode": "gspo"}, {"backend": "reference"}))
def test_policy_loss_adds_to_main_grad(options):
    tensors, token_ids, _ = problem(40, 16, 101)
    arguments = loss_inputs(40)
    expected, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float32, **options)
    hidden, weight, bias = (t.detach().clone().requires_grad_() for t in tensors)
    main_grad = torch.ones(101, 16)
    loss, *_ = linear_policy_loss(
        hidden, weight, token_ids, bias=bias, main_grad=main_grad, **arguments, **options
    )
    assert torch.equal(main_grad, torch.ones(101, 16))  # the backward adds, not the forward
    (3.0 * loss).backward()
    assert weight.grad is None
    torch.testing.assert_close(main_grad - 1, expected[4], **tolerances.LINEAR)
    torch.testing.assert_close(hidden.grad, expected[3], **tolerances.LINEAR)


def test_two_step_form_gives_the_same_loss():
    tensors, token_ids, _ = problem(40, 16, 101)
    arguments = loss_inputs(40)
    loss, log_probs, _, _ = linear_policy_loss(
        tensors[0], tensors[1], token_ids, bias=tensors[2], **arguments
    )
    arguments = {k: v for k, v in arguments.items() if k not in ("advantages", "old_log_probs")}
    inputs = loss_inputs(40)
    again, _ = policy_loss(log_probs, inputs["old_log_probs"], inputs["advantages"], **arguments)
    assert torch.equal(loss, again)


SUPPORT = (torch.tensor([3, 7, 1]), torch.tensor([0, 2, 2, 2, 3, 3, 3]), -torch.ones(3))


@pytest.mark.parametrize("support", ((None, None, None), SUPPORT))
@pytest.mark.parametrize("active_rows", (None, torch.tensor([0, 2, 5])))
@pytest.mark.parametrize("wide_weight_grad", (False, True))
def test_policy_gradient_op_contract(wide_weight_grad, active_rows, support):
    (hidden, weight, bias), token_ids, vectors = problem(6, 8, 20, dtype=torch.bfloat16)
    mask, weights = torch.ones(6, dtype=torch.bool), torch.full((6,), 1 / 6)
    numbers = [*map(float, LossOptions()), 0.0, 0.01, 1.0]
    torch.library.opcheck(
        torch.ops.hybridengine.linear_policy_gradient.default,
        (
            hidden,
            weight,
            bias,
            token_ids,
            *OP_OPTIONS,
            vectors[0],
            None,
            mask,
            None,
            None,
            None,
            vectors[1],
            weights,
            None,
            [0, LOSS_AGG_MODES.index("token-sum"), 0, False, False, False, True, True],
            numbers,
            [2.0, 0.5],
            *support,
            None,
            active_rows,
            wide_weight_grad,
            [True, True, True],
            "cpp",
        ),
    )


# Bounds of the ranks' vocabulary slices: as torch.chunk and DTensor split; with empty slices.
SPLITS = {2: ([0, 31, 61], [0, 61, 61]), 3: ([0, 21, 42, 61], [0, 40, 61, 61])}


def _vocabulary_parallel(rank, size):
    linear_chunks.GROUP_ROWS = 5  # several chunks
    return [_results_of_slice(slice(*bounds[rank : rank + 2])) for bounds in SPLITS[size]]


def _results_of_slice(part):
    tensors, token_ids, weights = problem(23, 8, 61)
    token_ids[4] = -100
    mine = [tensors[0], tensors[1][part], tensors[2][part]]
    group = dist.group.WORLD
    vocab_mask = torch.rand(23, 61, generator=torch.Generator().manual_seed(1)) < 0.7
    from_logits = gradients(
        two_steps,
        mine,
        token_ids,
        weights,
        group=group,
        temperature=0.7,
        vocab_mask=vocab_mask[:, part].contiguous(),
    )
    linear = gradients(fused, mine, token_ids, weights, group=group)
    reference = gradients(two_steps, mine, token_ids, weights, group=group, backend="reference")
    loss, _ = loss_and_gradients(mine, token_ids, loss_inputs(23), torch.float32, group=group)
    with pytest.raises(IndexError, match="outside the vocabulary of 61"):
        gradients(two_steps, mine, token_ids + 61, weights, group=group)
    return from_logits, linear, reference, loss


@pytest.mark.multirank
@pytest.mark.parametrize("size", (2, 3))
def test_vocabulary_parallel_equals_one_rank(size):
    tensors, token_ids, weights = problem(23, 8, 61)
    token_ids[4] = -100
    vocab_mask = torch.rand(23, 61, generator=torch.Generator().manual_seed(1)) < 0.7
    results = run_ranks(_vocabulary_parallel, size)
    options = {"temperature": 0.7, "vocab_mask": vocab_mask}
    masked = gradients(two_steps, tensors, token_ids, weights, dtype=torch.float64, **options)
    plain = gradients(two_steps, tensors, token_ids, weights, dtype=torch.float64)
    loss, _ = loss_and_gradients(tensors, token_ids, loss_inputs(23), torch.float64)
    of_slices = [
        (values, slice(*bounds[rank : rank + 2]))
        for rank, by_split in enumerate(results)
        for values, bounds in zip(by_split, SPLITS[size], strict=True)
    ]
    for (from_logits, linear, reference, loss_values), part in of_slices:
        for values, expected in ((from_logits, masked), (linear, plain), (reference, plain)):
            assert_all_close(values[:2], expected[:2])
            assert_all_close(values[3:], [e[part] for e in expected[3:]])
        assert_all_close(linear[2:3], plain[2:3])  # summed over the ranks
        assert_all_close(loss_values[:4], loss[:4])
        assert_all_close(loss_values[4:], [e[part] for e in loss[4:]])
    for by_split in zip(*results, strict=True):  # of one split, by rank: the same bits everywhere
        first, *others = (linear[:2] for _, linear, _, _ in by_split)
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
