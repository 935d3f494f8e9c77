"""Losses that read a chunk of logits once, and multiply the rows of its gradient afterwards.

On the CPU, with the 16-bit buffer of a GPU and plain PyTorch in place of the kernel, which
logprob/interpreted_unscaled.py tests.
"""

import sys

import pytest
import torch

from hybridengine.kernels import linear_cross_entropy, linear_policy_loss
from hybridengine.kernels.linear import chunks
from hybridengine.kernels.logprob.reference import reference_backward, reference_forward
from hybridengine.kernels.policy_loss.terms import SEQUENCE_MODES
from tests import tolerances
from tests.kernels.linear.cases import (
    ROUNDED,
    assert_all_close,
    loss_and_gradients,
    loss_inputs,
    problem,
)

MODULES = [
    sys.modules[f"hybridengine.kernels.linear.{name}"]
    for name in ("policy_gradient", "cross_entropy")
]
BUDGETS = (2 * 101 * 6, 17 * (101 * 6 + 128), 2**20)


def unscaled_gradient(logits, out, token_ids, options):
    """As `rows_unscaled_gradient`, with any factors."""
    log_probs, entropy, *_ = reference_forward(logits, token_ids, options, False)
    count = len(token_ids)
    row_scale = -(1.0 + torch.rand(count, generator=torch.Generator().manual_seed(7))) / 2**20
    gradient = reference_backward(logits, token_ids, options, torch.ones(count), None)
    out.copy_(gradient / row_scale[:, None])
    return log_probs, entropy, row_scale


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """As on a GPU; the numbers of rows of the calls that read the logits once."""
    seen = []

    def counting(logits, *arguments):
        seen.append(logits.shape[0])
        return unscaled_gradient(logits, *arguments)

    monkeypatch.setattr(chunks, "keeps_16_bits", lambda like: True)
    for module in MODULES:
        monkeypatch.setattr(module, "rows_unscaled_gradient", counting)
        monkeypatch.setattr(module, "has_unscaled_gradient", lambda hidden, group: not group)
    return seen


def assert_rounded(got, exact):
    for g, e in zip(got, exact, strict=True):
        size = e.abs().max().clamp(min=1e-30)
        torch.testing.assert_close(g.double() / size, e.double() / size, **ROUNDED)


@pytest.mark.parametrize("budget_bytes", BUDGETS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"deterministic": True},
        {"loss_mode": "cispo", "kl_coef": 0.1, "temperature": 0.8},
        {"softcap": 5.0, "logit_scale": 0.5, "loss_agg_mode": "seq-mean-token-mean"},
    ],
)
def test_policy_loss_against_float64(options, budget_bytes, calls):
    tensors, token_ids, _ = problem(40, 16, 101, dtype=torch.bfloat16)
    arguments = loss_inputs(40)
    exact_options = {k: v for k, v in options.items() if k != "deterministic"}
    exact, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float64, **exact_options)
    assert not calls
    got, _ = loss_and_gradients(
        tensors, token_ids, arguments, torch.bfloat16, budget_bytes=budget_bytes, **options
    )
    assert sum(calls) == 40
    assert_all_close(got[:3], exact[:3])
    assert_rounded(got[3:], exact[3:])
    inactive = ~arguments["response_mask"]
    assert not got[3][inactive].any()


@pytest.mark.parametrize("mode", SEQUENCE_MODES)
@pytest.mark.parametrize("count", (None, 13))
def test_modes_by_sequence_wait_for_all_rows(count, mode, calls):
    """In three products where all gradients fit the budget, in four where they do not."""
    tensors, token_ids, _ = problem(40, 16, 101, dtype=torch.bfloat16)
    arguments = loss_inputs(40)
    arguments["rollout_is_weights"] = torch.rand(40, generator=torch.Generator().manual_seed(2)) + 1
    if count is not None:
        arguments["active_rows"] = torch.arange(0, 3 * count, 3)
    options = {"loss_mode": mode, "loss_agg_mode": "seq-mean-token-mean", "kl_coef": 0.1}
    options |= {"seq_clip_ratio_c": 2.0, "grad_scale": 2.0}
    exact, _ = loss_and_gradients(
        tensors, token_ids, arguments, torch.float64, backend="reference", **options
    )
    for budget_bytes, read_once in ((BUDGETS[0], 0), (2**20, count or 40)):
        got, _ = loss_and_gradients(
            tensors, token_ids, arguments, torch.bfloat16, budget_bytes=budget_bytes, **options
        )
        assert sum(calls) == read_once
        assert_all_close(got[:3], exact[:3])
        assert_rounded(got[3:], exact[3:])


@pytest.mark.parametrize("count", (0, 7, 40))
def test_active_rows(count, calls):
    """Only active rows are written for the products; zero advantages give exact zeros."""
    tensors, token_ids, _ = problem(40, 16, 101, dtype=torch.bfloat16)
    active = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:count].sort()[0]
    arguments = loss_inputs(40) | {"active_rows": active}
    arguments["response_mask"][:] = True
    exact, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float64, backend="reference")
    got, _ = loss_and_gradients(
        tensors, token_ids, arguments, torch.bfloat16, budget_bytes=BUDGETS[1]
    )
    assert sum(calls) == count
    assert_all_close(got[:3], exact[:3])
    assert_rounded(got[3:], exact[3:])
    zero = arguments["advantages"] == 0
    assert not got[3][zero].any()


def test_an_entropy_bonus_takes_two_reads(calls):
    tensors, token_ids, _ = problem(40, 16, 101, dtype=torch.bfloat16)
    arguments, options = loss_inputs(40), {"entropy_coeff": 0.01}
    exact, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float64, **options)
    got, _ = loss_and_gradients(tensors, token_ids, arguments, torch.bfloat16, **options)
    assert not calls
    assert_rounded(got[3:], exact[3:])


def test_without_gradients_nothing_is_written(calls):
    tensors, token_ids, _ = problem(40, 16, 101, dtype=torch.bfloat16)
    with torch.no_grad():
        linear_policy_loss(*tensors[:2], token_ids, **loss_inputs(40))
    assert not calls


def test_nan_in_masked_tokens_does_not_spread():
    tensors, token_ids, _ = problem(40, 16, 101, dtype=torch.bfloat16)
    arguments = loss_inputs(40)
    clean, _ = loss_and_gradients(tensors, token_ids, arguments, torch.bfloat16)
    masked = ~arguments["response_mask"]
    tensors = [t.detach() for t in tensors]
    tensors[0][masked] = torch.nan
    arguments["advantages"][masked] = torch.nan
    got, _ = loss_and_gradients(tensors, token_ids, arguments, torch.bfloat16)
    assert_all_close(got, clean)


def test_main_grad():
    tensors, token_ids, _ = problem(40, 16, 101, dtype=torch.bfloat16)
    arguments = loss_inputs(40)
    exact, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float64)
    weight, main_grad = tensors[1].requires_grad_(), torch.ones(101, 16)
    loss, *_ = linear_policy_loss(
        tensors[0], weight, token_ids, bias=tensors[2], main_grad=main_grad, **arguments
    )
    (3.0 * loss).backward()
    assert weight.grad is None
    assert_rounded([main_grad - 1], [exact[4]])


def test_the_error_compared_with_two_reads(monkeypatch, calls):
    """The factors round the hidden states once more, which only the weight's gradient sees."""
    tensors, token_ids, _ = problem(256, 32, 301, dtype=torch.bfloat16)
    arguments, own = {"advantages": loss_inputs(256)["advantages"]}, {"old_log_probs": None}
    exact, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float64, **own)
    once, _ = loss_and_gradients(tensors, token_ids, arguments, torch.bfloat16, **own)
    assert sum(calls) == 256
    for module in MODULES:
        monkeypatch.setattr(module, "has_unscaled_gradient", lambda hidden, group: False)
    twice, _ = loss_and_gradients(tensors, token_ids, arguments, torch.bfloat16, **own)
    assert sum(calls) == 256
    for index, factor in (
        (3, 1.1),
        (4, 1.35),
    ):  # expected: 1, and (3 / 2) ** 0.5 for three roundings
        errors = [(got[index].double() - exact[index]).norm() for got in (once, twice)]
        assert errors[0] <= factor * errors[1]


@pytest.mark.parametrize("reduction", ("sum", "mean", "none"))
@pytest.mark.parametrize(
    ("options", "reads_once"),
    [
        ({}, True),
        ({"softcap": 3.0, "temperature": 0.8}, True),
        ({"label_smoothing": 0.1}, False),
        ({"lse_square_scale": 0.01}, False),
    ],
)
def test_cross_entropy(options, reads_once, reduction, calls):
    tensors, labels, (incoming, _) = problem(40, 16, 101, dtype=torch.bfloat16)
    labels[::3] = -100
    incoming = incoming if reduction == "none" else torch.tensor(2.0)

    def run(dtype, **more):
        leaves = [t.to(dtype).detach().requires_grad_() for t in tensors]
        loss, z_loss = linear_cross_entropy(
            *leaves[:2], labels, bias=leaves[2], reduction=reduction, **options, **more
        )
        grads = torch.autograd.grad(loss, leaves, incoming.to(loss.dtype))
        return [t.detach() for t in (loss, z_loss, *grads)]

    exact = run(torch.float64)
    for budget_bytes in BUDGETS:
        calls.clear()
        got = run(torch.bfloat16, budget_bytes=budget_bytes)
        assert bool(calls) == reads_once
        assert_all_close(got[:2], exact[:2], **tolerances.LINEAR)
        assert_rounded(got[2:], exact[2:])
