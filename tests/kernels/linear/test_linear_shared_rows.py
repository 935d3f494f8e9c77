"""hidden_index: tokens that are predicted from the same row of hidden states."""

import pytest
import torch

from hybridengine.kernels import RolloutSupport, linear_policy_loss, linear_token_log_probs
from hybridengine.kernels.linear import take_rows
from hybridengine.kernels.linear.chunks import Chunks
from hybridengine.kernels.policy_loss.terms import LOSS_MODES
from tests.kernels.linear.cases import (
    DEVICES,
    ROUNDED,
    assert_all_close,
    fused,
    gradients,
    loss_and_gradients,
    loss_inputs,
    problem,
)

TOKENS, ROWS = 40, 17  # no token is predicted from row 16


def shared_problem(dtype=torch.float32, width=16, vocab=101):
    tensors, _, weights = problem(ROWS, width, vocab, dtype=dtype)
    _, token_ids, weights = problem(TOKENS, width, vocab, seed=1)
    index = torch.randint(0, ROWS - 1, (TOKENS,), generator=torch.Generator().manual_seed(2))
    index[:6], token_ids[:4] = 3, 7  # a row with one token several times, and others
    return tensors, token_ids, weights, index


def as_own_rows(function, index):
    """Return the function of hidden[index], whose gradient autograd adds."""
    return lambda hidden, *rest, **options: function(hidden[index], *rest, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", ({}, {"budget_bytes": 1}, {"softcap": 3.0, "temperature": 0.7}))
def test_log_probs_against_float64(options, device):
    tensors, token_ids, weights, index = shared_problem()
    given = (tensors, token_ids, weights)
    exact = gradients(as_own_rows(fused, index), *given, dtype=torch.float64, **options)
    got = gradients(fused, *given, device, hidden_index=index.to(device), **options)
    assert_all_close(got, exact)
    assert not got[2][ROWS - 1].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("extra", ("plain", "entropy and kl"))
@pytest.mark.parametrize("mode", LOSS_MODES)
def test_policy_loss_against_float64(mode, extra, dtype, device):
    tensors, token_ids, _, index = shared_problem(dtype)
    arguments, options = loss_inputs(TOKENS), {"loss_mode": mode, "temperature": 0.9}
    if extra != "plain":
        options |= {"entropy_coeff": 0.01, "kl_coef": 0.1}
    arguments["hidden_index"] = index
    exact, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float64, **options)
    for budget_bytes in (7 * (101 * 6 + 128), 2**20):
        options["budget_bytes"] = budget_bytes
        got, _ = loss_and_gradients(tensors, token_ids, arguments, dtype, device, **options)
        assert_all_close(got[:3], exact[:3])
        for g, e in zip(got[3:], exact[3:], strict=True):
            size = e.abs().max()
            torch.testing.assert_close(g.double() / size, e / size, **ROUNDED)
        assert dtype != torch.float32 or assert_all_close(got, exact) is None


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("active", (0, 9, TOKENS))
def test_active_rows_are_tokens(active, dtype):
    """Other tokens of their rows add nothing, and rows without one are in no gradient product."""
    tensors, token_ids, _, index = shared_problem(dtype)
    arguments = loss_inputs(TOKENS) | {"hidden_index": index}
    chosen = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3))[:active]
    arguments["active_rows"] = chosen.sort()[0]
    options = {"entropy_coeff": 0.01}
    exact, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float64, **options)
    got, _ = loss_and_gradients(tensors, token_ids, arguments, dtype, **options)
    assert_all_close(got[:3], exact[:3])
    for g, e in zip(got[3:], exact[3:], strict=True):
        size = e.abs().max().clamp(min=1e-30)
        torch.testing.assert_close(g.double() / size, e / size, **ROUNDED)
    without = torch.ones(ROWS, dtype=torch.bool)
    without[index[chosen]] = False
    assert not got[3][without].any()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("softcap", (None, 5.0))
def test_bits_of_results_are_those_of_rows_of_their_own(dtype, softcap):
    tensors, token_ids, _, index = shared_problem(dtype, 64, 301)
    hidden, weight, bias = (t.requires_grad_() for t in tensors)
    given = {"bias": bias, "softcap": softcap, "deterministic": True}
    expected = linear_token_log_probs(hidden[index], weight, token_ids, **given)
    got = linear_token_log_probs(hidden, weight, token_ids, hidden_index=index, **given)
    assert all(map(torch.equal, got, expected))
    given |= loss_inputs(TOKENS) | {"entropy_coeff": 0.1}
    expected = linear_policy_loss(hidden[index], weight, token_ids, **given)
    got = linear_policy_loss(hidden, weight, token_ids, hidden_index=index.int(), **given)
    assert all(map(torch.equal, got[:3], expected[:3]))
    assert all(torch.equal(got[3][name], value) for name, value in expected[3].items())


def test_score_centering_has_rows_of_their_own():
    """Entries are recorded for tokens."""
    (hidden, weight, _), token_ids, _, index = shared_problem()
    hidden.requires_grad_()
    kept = torch.stack([token_ids, (token_ids + 1) % 101], 1).sort(1)[0].flatten()
    log_probs = -torch.rand(2 * TOKENS, generator=torch.Generator().manual_seed(4)) - 1
    support = RolloutSupport(kept, torch.arange(0, 2 * TOKENS + 1, 2), log_probs)
    options = loss_inputs(TOKENS) | {"score_centering": support}
    expected = linear_policy_loss(hidden[index], weight, token_ids, **options)
    got = linear_policy_loss(hidden, weight, token_ids, hidden_index=index, **options)
    assert all(map(torch.equal, got[:3], expected[:3]))
    grads = [torch.autograd.grad(loss, hidden)[0] for loss in (got[0], expected[0])]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
def test_the_gradient_of_taken_rows_is_rounded_once(dtype, device):
    """Sums of 16-bit numbers would stop at 256 in bfloat16, and at 2048 in float16."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 3, (3, 1500), generator=generator)
    hidden = torch.randn(4, 8, generator=generator).to(device, dtype).requires_grad_()
    factors = torch.rand(3, 1500, 8, generator=generator).to(dtype)
    taken = take_rows(hidden, index.to(device))
    assert torch.equal(taken, hidden[index.to(device)])
    (grad,) = torch.autograd.grad(taken, hidden, factors.to(device))
    exact = torch.zeros(4, 8, dtype=torch.float64)
    exact.index_add_(0, index.flatten(), factors.flatten(0, 1).double())
    torch.testing.assert_close(
        grad.cpu().double(), exact, rtol=max(torch.finfo(dtype).eps, 1e-5), atol=0
    )


@pytest.mark.parametrize("own", ("temperature", "vocab_mask"))
def test_rows_of_their_own_against_float64(own):
    """Temperatures or masks per token: 300 tokens of a row lose no digits of its gradient."""
    tensors, _, _ = problem(2, 16, 101, dtype=torch.bfloat16)
    _, token_ids, weights = problem(600, 16, 101, seed=1)
    options = {"temperature": torch.linspace(0.5, 2.0, 600)}
    if own == "vocab_mask":
        mask = torch.rand(600, 101, generator=torch.Generator().manual_seed(2)) < 0.7
        options = {"vocab_mask": mask.scatter(1, token_ids[:, None], True)}
    index = torch.arange(600) % 2
    given = (tensors, token_ids, weights.abs())
    exact = gradients(as_own_rows(fused, index), *given, dtype=torch.float64, **options)
    got = gradients(fused, *given, hidden_index=index, **options)
    size = exact[2].abs().max()
    torch.testing.assert_close(got[2].double() / size, exact[2] / size, **ROUNDED)


@pytest.mark.parametrize("temperature", (1.0, torch.full((TOKENS,), 0.7)), ids=("shared", "own"))
@pytest.mark.parametrize("row", (-1, ROWS))
def test_a_compiled_graph_refuses_rows_outside(row, temperature):
    (hidden, weight, _), token_ids, _, index = shared_problem()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(index):
        given = hidden, weight, token_ids, temperature
        return linear_token_log_probs(*given, hidden_index=index)

    compiled(index)
    index[5] = row
    with pytest.raises(IndexError, match=rf"^linear_token_log_probs: hidden_index has {row};"):
        compiled(index)


def test_stats_and_kept_logits():
    (hidden, weight, bias), token_ids, _, index = shared_problem()
    hidden.requires_grad_()
    for options in ({}, {"budget_bytes": 1}):
        options |= {"bias": bias, "return_stats": True}
        expected = linear_token_log_probs(hidden[index], weight, token_ids, **options)
        got = linear_token_log_probs(hidden, weight, token_ids, hidden_index=index, **options)
        assert torch.equal(got[2].argmax, expected[2].argmax)
        assert_all_close([*got[:2], got[2][1]], [*expected[:2], expected[2][1]])


@pytest.mark.parametrize("gap", (5.0, 12.0, 20.0))
def test_a_certain_token_keeps_its_gradient(gap):
    """1 - p is no difference: it is as exact as with one token, also beside other tokens."""
    hidden = torch.zeros(1, 16)
    hidden[0, 0] = 1.0
    weight = torch.randn(101, 16, generator=torch.Generator().manual_seed(0))
    weight[7, 0] = gap
    index = torch.zeros(3, dtype=torch.int64)
    for labels, factors in (([7, 7, 7], [1.0, 2.0, -1.0]), ([7, 7, 8], [1.0, 1.0, 0.0])):
        grads = []
        for dtype in (torch.float64, torch.float32):
            bias = torch.zeros(101, dtype=dtype, requires_grad=True)
            log_probs, _ = linear_token_log_probs(
                hidden.to(dtype),
                weight.to(dtype),
                torch.tensor(labels),
                bias=bias,
                hidden_index=index,
            )
            (log_probs * torch.tensor(factors)).sum().backward()
            grads.append(bias.grad)
        assert grads[0][7] > 0
        torch.testing.assert_close(grads[1].double(), grads[0], rtol=1e-4, atol=0)


def test_each_row_is_multiplied_once(monkeypatch):
    tensors, token_ids, _, index = shared_problem(torch.bfloat16, 64, 301)
    arguments, seen = loss_inputs(TOKENS) | {"hidden_index": index}, []
    for name, place in (("logits", 0), ("hidden_grad", 0), ("weight_grad", 1)):
        original = getattr(Chunks, name)

        def counting(self, *given, original=original, place=place, **add):
            rows = given[place]
            seen.append(rows.stop - rows.start if isinstance(rows, slice) else len(rows))
            return original(self, *given, **add)

        monkeypatch.setattr(Chunks, name, counting)
    loss_and_gradients(tensors, token_ids, arguments, torch.bfloat16, entropy_coeff=0.1)
    assert max(seen) <= ROWS < TOKENS
