"""token_log_probs with ids [..., K] and token_entropy against log_softmax and gather in float64."""

import math

import pytest
import torch

from hybridengine.kernels import token_entropy, token_log_probs
from tests import tolerances
from tests.kernels.logprob.cases import DEVICES, OPTIONS, options_for, plain_pytorch, problem

ROWS, VOCAB, K = 12, 53, 5


def exact(logits, ids, **options):
    """(log_probs [T, K], entropy) in float64, column by column."""
    temperature = options.get("temperature")
    if torch.is_tensor(temperature):
        options["temperature"] = temperature.double()
    columns = [plain_pytorch(logits.double(), column, **options) for column in ids.unbind(1)]
    return torch.stack([log_probs for log_probs, _ in columns], 1), columns[0][1]


def scalar(results):
    """A number with a gradient that is different for every entry; removed ones have none."""
    log_probs, entropy = results
    weights = torch.arange(1.0, log_probs.numel() + 1).view(log_probs.shape).sin().to(log_probs)
    return (weights * log_probs.masked_fill(log_probs.isneginf(), 0)).sum() + 0.3 * entropy.sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", OPTIONS)
def test_against_float64(name, dtype, device):
    logits, _, _ = problem(ROWS, VOCAB, dtype, 0)
    ids = torch.stack([torch.randperm(VOCAB)[:K] for _ in range(ROWS)])
    ids[0, 1] = ids[0, 0]  # twice the same
    options = options_for(name, ROWS, VOCAB, 0)
    leaf = logits.double().requires_grad_()
    want = exact(leaf, ids, **options)
    want_grad = torch.autograd.grad(scalar(want), leaf)[0]
    leaf = logits.to(device).requires_grad_()
    moved = {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}
    got = token_log_probs(leaf, ids.to(device), **moved)
    grad = torch.autograd.grad(scalar([t.cpu() for t in got]), leaf)[0].cpu()
    for result, expected in zip(got, want, strict=True):
        torch.testing.assert_close(result.cpu().double(), expected, **tolerances.LOG_PROB)
    # In 16 bits two gradients are rounded and added: those of the row and of the K entries.
    rounding = 4 * tolerances.GRAD_ROUNDING[str(dtype).removeprefix("torch.")]
    tolerance = {**tolerances.LOG_PROB_GRAD}
    tolerance["atol"] += rounding * want_grad.abs().max().item()
    torch.testing.assert_close(grad.double(), want_grad, **tolerance)


def test_ignored_entries_and_leading_dimensions():
    logits, _, _ = problem(6, VOCAB, torch.float32, 1)
    ids = torch.arange(6 * K).view(6, K) % VOCAB
    ids[0, 0], ids[1, 1:], ids[2] = -100, -100, -100
    logits[2] = math.nan
    leaf = logits.view(2, 3, VOCAB).requires_grad_()
    log_probs, entropy, stats = token_log_probs(leaf, ids.view(2, 3, K), return_stats=True)
    log_probs.sum().backward()
    want, _ = exact(logits.nan_to_num(), ids.clamp(min=0))
    torch.testing.assert_close(
        log_probs.view(6, K).double(), want.masked_fill(ids == -100, 0), **tolerances.LOG_PROB
    )
    assert entropy.shape == stats.lse.shape == (2, 3)
    assert not leaf.grad.view(6, VOCAB)[2].any() and leaf.grad.isfinite().all()


def test_removed_entries():
    """-inf for an entry of -inf, whatever the others are; such an entry has no gradient."""
    logits = torch.tensor([[0.0, -math.inf, 1.0], [-math.inf, 0.0, -math.inf]], requires_grad=True)
    log_probs, _ = token_log_probs(logits, torch.tensor([[0, 1], [0, 2]]))
    assert log_probs.isneginf().tolist() == [[False, True], [True, True]]
    grad = torch.autograd.grad(log_probs[0, 0], logits)[0]
    assert grad.isfinite().all() and grad[0, 0] > 0 and grad[0, 1] == 0 and not grad[1].any()


def test_errors():
    logits = torch.zeros(2, 3)
    with pytest.raises(IndexError, match=r"token_ids\[1, 0\] is 3, outside the vocabulary of 3"):
        token_log_probs(logits, torch.tensor([[0, 1], [3, 0]]))
    with pytest.raises(ValueError, match="K > 0"):
        token_log_probs(logits, torch.zeros(2, 0).long())
    with pytest.raises(ValueError, match="token_ids has shape"):
        token_log_probs(logits, torch.zeros(3, 2).long())


@pytest.mark.parametrize("name", OPTIONS)
def test_entropy_without_labels(name):
    logits, ids, _ = problem(ROWS, VOCAB, torch.float32, 2)
    options = options_for(name, ROWS, VOCAB, 2)
    row_mask = torch.arange(ROWS) % 3 != 0
    leaf = logits.masked_fill(~row_mask[:, None], math.nan).requires_grad_()
    entropy = token_entropy(leaf, row_mask=row_mask, **options)
    grad = torch.autograd.grad(entropy.sum(), leaf)[0]
    exact_leaf = logits.double().requires_grad_()
    want = exact(exact_leaf, ids[:, None], **options)[1][row_mask]
    want_grad = torch.autograd.grad(want.sum(), exact_leaf)[0]
    torch.testing.assert_close(entropy[row_mask].double(), want, **tolerances.LOG_PROB)
    torch.testing.assert_close(grad.double(), want_grad, **tolerances.LOG_PROB_GRAD)
    assert not entropy[~row_mask].any()
