"""Inputs and compared functions that the tests of the operators on hidden states share."""

import pytest
import torch

from hybridengine.kernels import linear_policy_loss, linear_token_log_probs, token_log_probs
from tests import tolerances

# For gradients of 16-bit inputs relative to their largest entry: the logits' gradient and the
# result are both rounded to 8 bits.
ROUNDED = {"rtol": 2**-7, "atol": 2**-8}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


# RowOptions, budget_bytes and deterministic, as the ops of the linear operators take them.
OP_OPTIONS = (1.0, None, 1.0, 0.0, -100, None, None, False, "", 2**20, False)


def problem(rows, width, vocab, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    hidden, weight, bias = draw(rows, width), draw(vocab, width), draw(vocab)
    token_ids = torch.randint(0, vocab, (rows,), generator=generator)
    return [t.to(dtype) for t in (hidden, weight, bias)], token_ids, draw(2, rows)


def gradients(function, tensors, token_ids, weights, device="cpu", dtype=None, **options):
    leaves = [t.to(device=device, dtype=dtype).requires_grad_() for t in tensors]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    weights = weights.to(device)
    log_probs, entropy = function(*leaves, token_ids.to(device), **options)
    loss = (log_probs * weights[0].to(log_probs)).sum()
    loss = loss + (entropy * weights[1].to(entropy)).sum()
    values = [log_probs.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]
    return [t.cpu() for t in values]


def two_steps(hidden, weight, bias, token_ids, **options):
    return token_log_probs(torch.nn.functional.linear(hidden, weight, bias), token_ids, **options)


def fused(hidden, weight, bias, token_ids, **options):
    return linear_token_log_probs(hidden, weight, token_ids, bias=bias, **options)


def assert_all_close(got, expected, **tolerance):
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g.double(), e.double(), **(tolerance or tolerances.LINEAR))


def loss_inputs(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    arguments = {
        "advantages": torch.randn(rows, generator=generator),
        "old_log_probs": -6 * torch.rand(rows, generator=generator),
        "response_mask": torch.rand(rows, generator=generator) < 0.8,
        "cu_seqlens": torch.tensor([0, rows // 4, rows // 2, rows], dtype=torch.int32),
        "selected": torch.rand(rows, generator=generator) < 0.5,
    }
    arguments["ref_log_probs"] = arguments["old_log_probs"] + 0.3
    arguments["advantages"][::3] = 0  # inactive rows, unless an entropy or KL term has a gradient
    return arguments


def loss_and_gradients(tensors, token_ids, arguments, dtype, device="cpu", **options):
    leaves = [t.to(device=device, dtype=dtype).requires_grad_() for t in tensors]
    arguments = {k: v.to(device) for k, v in arguments.items()}
    loss, log_probs, entropy, metrics = linear_policy_loss(
        leaves[0], leaves[1], token_ids.to(device), bias=leaves[2], **arguments, **options
    )
    values = [loss.detach(), log_probs, entropy, *torch.autograd.grad(3.0 * loss, leaves)]
    return [t.cpu() for t in values], metrics
