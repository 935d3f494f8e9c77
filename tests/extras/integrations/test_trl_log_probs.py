"""TRL's functions of log-probs and entropy under their names; TRL itself is not needed."""

import pytest
import torch

from hybridengine.integrations.trl import (
    ChunkedLogProbFunction,
    entropy_from_logits,
    selective_log_softmax,
    selective_log_softmax_and_entropy,
)
from tests import tolerances

V = 37
FIELDS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def exact(logits, temperature=1.0):
    log_p = (logits.double() / temperature).log_softmax(-1)
    return log_p, -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("k", (None, 0, 1, 5))
def test_selected_entries(dtype, k):
    logits = draw(3, 4, V, dtype=dtype).requires_grad_()
    index = torch.randint(0, V, (3, 4) if k is None else (3, 4, k))
    weights = draw(*index.shape)
    log_p, _ = exact(logits, 0.7)
    expected = log_p.gather(-1, index.unsqueeze(-1) if k is None else index).view(index.shape)
    got = selective_log_softmax(logits, index, temperature=0.7)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, **tolerances.LINEAR)
    gradients = [
        torch.autograd.grad((x * weights).sum(), logits, allow_unused=True)[0]
        for x in (got, expected)
    ]
    torch.testing.assert_close(*gradients, **tolerances.LINEAR)


def test_removed_entries_do_not_make_the_others_nan():
    logits = draw(2, V)
    logits[:, 3] = -torch.inf
    got = selective_log_softmax(logits, torch.tensor([[3, 4], [5, 3]]))
    expected = logits.double().log_softmax(-1).gather(-1, torch.tensor([[3, 4], [5, 3]]))
    torch.testing.assert_close(got.double(), expected, **tolerances.LINEAR)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_16_bits_on_a_cpu_are_rounded_as_by_trl(dtype):
    logits, index = draw(4, 9, V, dtype=dtype), torch.randint(0, V, (4, 9))
    log_p = logits.log_softmax(-1)
    assert torch.equal(
        selective_log_softmax(logits, index), log_p.gather(-1, index[..., None])[..., 0]
    )
    assert torch.equal(entropy_from_logits(logits, 5), -(log_p.exp() * log_p).sum(-1))
    both = selective_log_softmax_and_entropy(logits, index, row_mask=index % 2)
    assert all(x.dtype == dtype and not x[index % 2 == 0].any() for x in both)


@pytest.mark.parametrize("shape", [(V,), (5, V), (2, 3, V), (2, 2, 3, V)])
def test_entropy_of_any_number_of_dimensions(shape):
    logits = draw(*shape)
    got = entropy_from_logits(logits, chunk_size=1)
    torch.testing.assert_close(got.double(), exact(logits)[1], **tolerances.LINEAR)


@pytest.mark.parametrize("with_gradient", (False, True))
def test_both_with_masked_rows(with_gradient):
    logits, index = draw(3, 4, V), torch.randint(0, V, (3, 4))
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    logits[1] = torch.nan  # of masked rows nothing is read
    logits.requires_grad_()
    log_probs, entropy = selective_log_softmax_and_entropy(
        logits, index, entropy_requires_grad=with_gradient, temperature=0.7, row_mask=mask
    )
    log_p, expected = exact(logits.detach(), 0.7)
    for got, e in ((log_probs, log_p.gather(-1, index[..., None])[..., 0]), (entropy, expected)):
        torch.testing.assert_close(got[mask == 1].double(), e[mask == 1], **tolerances.LINEAR)
        assert not got[mask == 0].any()
    assert entropy.requires_grad == with_gradient
    log_probs.sum().backward()
    assert logits.grad.isfinite().all()


def test_a_temperature_is_positive():
    for function in (selective_log_softmax, selective_log_softmax_and_entropy):
        with pytest.raises(ValueError, match="temperature must be positive, got 0"):
            function(draw(2, V), torch.zeros(2, dtype=torch.int64), temperature=0)


@pytest.mark.parametrize("softcap", (None, 3.0))
@pytest.mark.parametrize("autocast", (False, True))
def test_the_fused_function(softcap, autocast):
    """In 16 bits under autocast, with 16-bit products but logits that are not rounded."""
    hidden, weight, bias = draw(20, 8).requires_grad_(), draw(V, 8).requires_grad_(), draw(V)
    ids = torch.randint(0, V, (20,))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = ChunkedLogProbFunction.apply(hidden, weight, bias, ids, 0.7, 16, softcap, 1.5)
    rounded = [x.bfloat16().double() if autocast else x.double() for x in (hidden, weight, bias)]
    z = 1.5 * torch.nn.functional.linear(*rounded)
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / 0.7
    log_p = z.log_softmax(-1)
    expected = {
        "log_probs": log_p.gather(-1, ids[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": log_p.exp().square().sum(-1).log(),
        "mean_logits": z.mean(-1),
        "is_top1": z.argmax(-1) == ids,
    }
    close = {"rtol": 1e-2, "atol": 1e-2} if autocast else tolerances.LINEAR
    for value, (name, e) in zip(got, expected.items(), strict=True):
        torch.testing.assert_close(value.to(e.dtype), e, **close, msg=name)
        assert value.requires_grad == (name in ("log_probs", "entropy"))
    gradients = [
        torch.autograd.grad((pair[0] + 0.1 * pair[1]).sum(), (hidden, weight))
        for pair in (got, (expected["log_probs"], expected["entropy"]))
    ]
    for g, e in zip(*gradients, strict=True):
        scale = e.abs().max()
        torch.testing.assert_close(g / scale, e / scale, **close)


def test_only_the_ordered_outputs_are_computed():
    arguments = draw(4, 8), draw(V, 8), None, torch.arange(4), 1.0, 16, None, 1.0
    for names in ((), ("is_top1",), ("mean_logits", "entropy")):
        got = ChunkedLogProbFunction.apply(*arguments, names)
        assert [x is not None for x in got] == [True, *(f in names for f in FIELDS)]
