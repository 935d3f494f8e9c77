"""Inputs, options and the plain PyTorch expression that the tests of token_log_probs share."""

import pytest
import torch
import torch.nn.functional as F

from hybridengine.kernels import token_log_probs
from tests import tolerances

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BACKENDS = (None, "reference")


def problem(rows, vocab, dtype, seed, scale=5.0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * scale).to(dtype)
    token_ids = torch.randint(0, vocab, (rows,), generator=generator)
    gradients = torch.randn(2, rows, generator=generator).clamp(-2, 2)
    return logits, token_ids, gradients


def options_for(name, rows, vocab, seed):
    generator = torch.Generator().manual_seed(seed + 1)
    return {
        "plain": {},
        "temperature": {"temperature": 0.7},
        "temperatures": {"temperature": torch.rand(rows, generator=generator) + 0.5},
        "softcap": {"softcap": 8.0, "logit_scale": 0.5, "temperature": 1.3},
        "scale": {"logit_scale": 0.0625},
        "vocab_mask": {"vocab_mask": torch.rand(rows, vocab, generator=generator) < 0.6},
        "everything": {
            "temperature": torch.rand(rows, generator=generator) + 0.5,
            "softcap": 12.0,
            "logit_scale": 2.0,
            "vocab_mask": torch.rand(rows, vocab, generator=generator) < 0.6,
        },
    }[name]


def options_with_labels(name, token_ids, vocab, seed):
    """`options_for`, where the vocab mask keeps every label."""
    options = options_for(name, len(token_ids), vocab, seed)
    if "vocab_mask" in options:
        options["vocab_mask"].scatter_(1, token_ids[:, None], True)
    return options


OPTIONS = ("plain", "temperature", "temperatures", "softcap", "scale", "vocab_mask", "everything")


def plain_pytorch(
    logits, token_ids, temperature=1.0, softcap=None, logit_scale=1.0, vocab_mask=None
):
    """The expression in plain PyTorch: differentiable, in float32, or in float64 for float64."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    x = x * logit_scale
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    x = x / (temperature[:, None].to(x) if torch.is_tensor(temperature) else temperature)
    if vocab_mask is not None:
        x = x.masked_fill(~vocab_mask, -torch.inf)
    log_p = F.log_softmax(x, dim=-1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    return log_p.gather(1, token_ids[:, None]).squeeze(1), entropy


def value_and_gradient(function, logits, token_ids, gradients, **options):
    leaf = logits.detach().clone().requires_grad_()
    log_probs, entropy = function(leaf, token_ids, **options)[:2]
    finite = torch.isfinite(log_probs)  # a removed token has log-prob -inf and no useful gradient
    loss = (log_probs.where(finite, 0.0) * gradients[0].to(log_probs)).sum()
    loss = loss + (entropy * gradients[1].to(entropy)).sum()
    return log_probs.detach(), entropy.detach(), torch.autograd.grad(loss, leaf)[0]


def move(options, device):
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}


def assert_matches_float64(device, rows, vocab, dtype, option, seed):
    logits, token_ids, gradients = problem(rows, vocab, dtype, seed)
    options = options_for(option, rows, vocab, seed)
    expected = value_and_gradient(plain_pytorch, logits.double(), token_ids, gradients, **options)
    got = value_and_gradient(
        token_log_probs,
        logits.to(device),
        token_ids.to(device),
        gradients.to(device),
        **move(options, device),
    )
    for name, e, g in zip(("log_probs", "entropy"), expected, got, strict=False):
        assert g.dtype == torch.float32
        torch.testing.assert_close(
            g.cpu().double(), e, **tolerances.LOG_PROB, equal_nan=True, msg=lambda m, n=name: n + m
        )
    rounding = tolerances.GRAD_ROUNDING[str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(
        got[2].cpu().double(),
        expected[2],
        rtol=tolerances.LOG_PROB_GRAD["rtol"] + rounding,
        atol=tolerances.LOG_PROB_GRAD["atol"] + (2.0**-24 if rounding else 0.0),
        equal_nan=True,
    )
