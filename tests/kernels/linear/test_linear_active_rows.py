"""linear_policy_loss where not every token has a gradient: masks, active rows, single rows."""

import pytest
import torch

from hybridengine.kernels import linear_policy_loss
from hybridengine.kernels.linear.chunks import Chunks
from tests.kernels.cuda_graph import capture
from tests.kernels.linear.cases import (
    DEVICES,
    ROUNDED,
    assert_all_close,
    loss_and_gradients,
    loss_inputs,
    problem,
)


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
            tensors,
            token_ids,
            arguments,
            dtype,
            device,
            loss_mode=mode,
            entropy_coeff=0.01,
            budget_bytes=budget_bytes,
        )
        assert_all_close(got[:3], exact[:3])
        assert not got[3][others].any()
        reference, _ = loss_and_gradients(
            tensors,
            token_ids,
            arguments,
            torch.float64,
            loss_mode=mode,
            entropy_coeff=0.01,
            backend="reference",
        )
        for g, e in zip(got[3:], reference[3:], strict=True):
            size = e.abs().max().clamp(min=1e-30)
            torch.testing.assert_close(g.double() / size, e / size, **ROUNDED)
        torch.testing.assert_close(reference[3][active], exact[3][active])


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

    graph, captured = capture(step)
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
            [tensors[0][rows], *tensors[1:]],
            token_ids[rows],
            some,
            dtype,
            budget_bytes=10**6,
            **options,
        )
        for w, p in zip(full[1:4], part[1:4], strict=True):
            assert torch.equal(w[rows], p)
    again, _ = loss_and_gradients(
        tensors, token_ids, arguments | {"cu_seqlens": ends}, dtype, **options
    )
    assert all(torch.equal(a, w) for a, w in zip(again, full, strict=True))


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
