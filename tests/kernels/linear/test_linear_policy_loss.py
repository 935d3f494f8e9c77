"""linear_policy_loss against a float64 two-step reference."""

import pytest
import torch
import torch.distributed as dist
from hybridengine.kernels import linear_policy_loss, policy_loss, rollout_correction
from hybridengine.kernels._aggregation import LOSS_AGG_MODES
from hybridengine.kernels.linear import chunks as linear_chunks
from hybridengine.kernels.linear.chunks import Chunks
from hybridengine.kernels.policy_loss.terms import LOSS_MODES, LossOptions

from tests import tolerances
from tests.kernels.linear.cases import (
    DEVICES,
    ROUNDED,
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
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        torch.testing.assert_close(
            metrics[name].cpu().double(), value.double(), **tolerances.LINEAR
        )


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
            exact["old_log_probs"], rollout, cu_seqlens=arguments["cu_seqlens"],
            response_mask=arguments["response_mask"], **bounds,
        )  # fmt: skip
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
            tensors, token_ids, arguments, torch.float32, device, budget_bytes=budget_bytes,
            grad_scale=grad_scale, **options,
        )  # fmt: skip
        assert_all_close([got[0], *got[3:]], expected)
        assert metrics.keys() == expected_metrics.keys()
        for name, value in expected_metrics.items():
            torch.testing.assert_close(
                metrics[name].cpu().double(), value.double(), **tolerances.LINEAR
            )


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


def test_inactive_rows_are_left_out_of_the_gradient_products(monkeypatch):
    tensors, token_ids, _ = problem(40, 16, 101)
    arguments = loss_inputs(40)
    seen = []
    original = Chunks.weight_grad

    def counting(self, total, grad_logits, hidden, add):
        seen.append(grad_logits.shape[0])
        original(self, total, grad_logits, hidden, add)

    monkeypatch.setattr(Chunks, "weight_grad", counting)
    _, metrics = loss_and_gradients(tensors, token_ids, arguments, torch.float32)
    maybe_active = arguments["response_mask"] & (arguments["advantages"] != 0)
    assert sum(seen) <= maybe_active.sum()
    assert metrics["pg_clipfrac"] > 0  # clipped rows are inactive, too
    assert sum(seen) < maybe_active.sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ("ppo_clip", "gspo"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("rows", (0, 1, 29, 40))
def test_active_rows_that_the_caller_gives(rows, dtype, mode, device):
    """Loss and log-probs are those of all tokens, gradients those of the given ones."""
    tensors, token_ids, _ = problem(40, 16, 101, dtype=dtype)
    arguments = loss_inputs(40) | {"cu_seqlens": torch.arange(41, dtype=torch.int32)}
    active = torch.randperm(40, generator=torch.Generator().manual_seed(rows))[:rows].sort()[0]
    others = torch.ones(40, dtype=torch.bool).index_fill(0, active, False)
    exact, _ = loss_and_gradients(
        tensors, token_ids, arguments, torch.float64, loss_mode=mode, entropy_coeff=0.01
    )
    arguments["active_rows"] = active
    for budget_bytes in (7 * (101 * 6 + 128), 2**20):
        got, _ = loss_and_gradients(
            tensors, token_ids, arguments, dtype, device, loss_mode=mode, entropy_coeff=0.01,
            budget_bytes=budget_bytes,
        )  # fmt: skip
        assert_all_close(got[:3], exact[:3])
        assert not got[3][others].any()
        reference, _ = loss_and_gradients(
            tensors, token_ids, arguments, torch.float64, loss_mode=mode, entropy_coeff=0.01,
            backend="reference",
        )  # fmt: skip
        for g, e in zip(got[3:], reference[3:], strict=True):
            size = e.abs().max().clamp(min=1e-30)
            torch.testing.assert_close(g.double() / size, e / size, **ROUNDED)
        torch.testing.assert_close(reference[3][active], exact[3][active])


@pytest.mark.parametrize(
    ("active_rows", "message"),
    [
        (torch.tensor([3, 1]), "ascending row numbers from 0 to 39, each once"),
        (torch.tensor([1, 1]), "ascending row numbers"),
        (torch.tensor([-1, 1]), "ascending row numbers"),
        (torch.tensor([40]), "ascending row numbers"),
        (torch.arange(41), "active_rows has 41 entries; expected at most 40, the tokens"),
        (torch.ones(40), "active_rows has dtype float32"),
        (torch.ones(40, 1, dtype=torch.int64), "active_rows has shape"),
    ],
)
def test_wrong_active_rows_are_named(active_rows, message):
    tensors, token_ids, _ = problem(40, 16, 101)
    with pytest.raises(ValueError, match=message):
        linear_policy_loss(*tensors[:2], token_ids, active_rows=active_rows, **loss_inputs(40))


@pytest.mark.gpu
@pytest.mark.parametrize("active", (None, 100))
@pytest.mark.parametrize("budget_bytes", (None, 130 * 1003 * 20))
def test_a_cuda_graph_replays_the_loss(budget_bytes, active):
    """Without waiting for the device, in one product and in several."""
    tensors, token_ids, _ = problem(700, 64, 1003, dtype=torch.bfloat16)
    hidden, weight = (t.cuda().requires_grad_() for t in tensors[:2])
    token_ids = token_ids.cuda()
    arguments = {k: v.cuda() for k, v in loss_inputs(700).items() if k != "cu_seqlens"}
    if active is not None:
        arguments["active_rows"] = torch.arange(0, 7 * active, 7, device="cuda")

    def step():
        loss, *_ = linear_policy_loss(
            hidden, weight, token_ids, budget_bytes=budget_bytes, **arguments
        )
        return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for share in (0.0, 0.3, 1.0):
        arguments["response_mask"].copy_(torch.rand(700, device="cuda") < share)
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_policy_loss_of_16_bit_inputs_over_many_chunks_with_inactive_rows(device):
    """Active rows of several chunks share a gradient product; the error is that of rounding."""
    tensors, token_ids, _ = problem(200, 16, 101, dtype=torch.bfloat16)
    arguments = loss_inputs(200)
    exact, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float64)
    for budget_bytes in (2 * 101 * 6, 37 * (101 * 6 + 128), 2**20):
        got, _ = loss_and_gradients(
            tensors, token_ids, arguments, torch.bfloat16, device, budget_bytes=budget_bytes
        )
        assert_all_close(got[:3], exact[:3])
        for g, e in zip(got[3:], exact[3:], strict=True):
            torch.testing.assert_close(g.double() / e.abs().max(), e / e.abs().max(), **ROUNDED)


@pytest.mark.parametrize("mode", ("ppo_clip", "gspo"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_deterministic_policy_loss_rows_do_not_depend_on_other_rows(dtype, mode):
    tensors, token_ids, _ = problem(300, 64, 501, dtype=dtype)
    arguments = {k: v for k, v in loss_inputs(300).items() if k not in ("cu_seqlens", "selected")}
    arguments["response_mask"][:] = True
    counts = {"global_num_tokens": 300.0, "global_num_seqs": 3.0, "loss_mode": mode}
    ends = torch.tensor([0, 100, 200, 300], dtype=torch.int32)
    options = counts | {"deterministic": True}
    full, _ = loss_and_gradients(
        tensors, token_ids, arguments | {"cu_seqlens": ends}, dtype, **options
    )
    for begin, end in ((0, 100), (100, 300)):
        rows = slice(begin, end)
        some = {k: v[rows] for k, v in arguments.items()}
        some["cu_seqlens"] = ends[(ends >= begin) & (ends <= end)] - begin
        part, _ = loss_and_gradients(
            [tensors[0][rows], *tensors[1:]], token_ids[rows], some, dtype, budget_bytes=10**6,
            **options,
        )  # fmt: skip
        for w, p in zip(full[1:4], part[1:4], strict=True):
            assert torch.equal(w[rows], p)
    again, _ = loss_and_gradients(
        tensors, token_ids, arguments | {"cu_seqlens": ends}, dtype, **options
    )
    assert all(torch.equal(a, w) for a, w in zip(again, full, strict=True))


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


def test_policy_loss_without_unmasked_tokens():
    tensors, token_ids, _ = problem(8, 16, 101)
    arguments = loss_inputs(8) | {"response_mask": torch.zeros(8, dtype=torch.bool)}
    got, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float32)
    assert all(not value.any() for value in got)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", ({}, {"loss_mode": "gspo"}, {"backend": "reference"}))
@pytest.mark.parametrize("extra", ({}, {"entropy_coeff": 0.01}))
def test_nan_in_masked_tokens_does_not_spread(extra, options, device):
    tensors, token_ids, _ = problem(40, 16, 101)
    arguments = loss_inputs(40)
    clean, _ = loss_and_gradients(
        tensors, token_ids, arguments, torch.float32, device, **options, **extra
    )
    masked = ~arguments["response_mask"]
    tensors = [t.detach() for t in tensors]
    tensors[0][masked] = torch.nan
    for name in ("advantages", "old_log_probs", "ref_log_probs"):
        arguments[name][masked] = torch.nan
    token_ids[masked] = 10**9
    got, _ = loss_and_gradients(
        tensors, token_ids, arguments, torch.float32, device, **options, **extra
    )
    assert_all_close(got, clean)


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


@pytest.mark.parametrize("active_rows", (None, torch.tensor([0, 2, 5])))
@pytest.mark.parametrize("wide_weight_grad", (False, True))
def test_policy_gradient_op_contract(wide_weight_grad, active_rows):
    (hidden, weight, bias), token_ids, vectors = problem(6, 8, 20, dtype=torch.bfloat16)
    mask, weights = torch.ones(6, dtype=torch.bool), torch.full((6,), 1 / 6)
    numbers = [*map(float, LossOptions()), 0.0, 0.01, 1.0]
    torch.library.opcheck(
        torch.ops.hybridengine.linear_policy_gradient.default,
        (hidden, weight, bias, token_ids, 1.0, None, 1.0, 0.0, -100, None, None, "", 2**20, False,
         vectors[0], None, mask, None, None, None, vectors[1], weights, None,
         [0, LOSS_AGG_MODES.index("token-sum"), 0, False, False, False, True, True], numbers,
         [2.0, 0.5], active_rows, wide_weight_grad, [True, True, True], "cpp"),
    )  # fmt: skip


# Bounds of the ranks' vocabulary slices: as torch.chunk and DTensor split; with empty slices.
SPLITS = {2: ([0, 31, 61], [0, 61, 61]), 3: ([0, 21, 42, 61], [0, 40, 61, 61])}


def _vocabulary_parallel(rank, size):
    linear_chunks._GROUP_ROWS = 5  # several chunks
    return [_results_of_slice(slice(*bounds[rank : rank + 2])) for bounds in SPLITS[size]]


def _results_of_slice(part):
    tensors, token_ids, weights = problem(23, 8, 61)
    token_ids[4] = -100
    mine = [tensors[0], tensors[1][part], tensors[2][part]]
    group = dist.group.WORLD
    vocab_mask = torch.rand(23, 61, generator=torch.Generator().manual_seed(1)) < 0.7
    from_logits = gradients(
        two_steps, mine, token_ids, weights, group=group, temperature=0.7,
        vocab_mask=vocab_mask[:, part].contiguous(),
    )  # fmt: skip
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
