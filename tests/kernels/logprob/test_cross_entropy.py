"""cross_entropy against PyTorch's in float64, with smoothing and z-loss."""

import math

import pytest
import torch
import torch.nn.functional as F

from hybridengine.integrations.flash_attn import cross_entropy_loss
from tests import tolerances
from tests.kernels.logprob.cases import DEVICES, problem

ROWS, VOCAB, SCALE = 9, 37, 0.7


def exact(logits, labels, smoothing, z_loss):
    z = logits * SCALE
    losses = F.cross_entropy(z, labels, reduction="none", label_smoothing=smoothing)
    z_losses = (z_loss * z.logsumexp(-1).square()).masked_fill(labels == -100, 0)
    return losses + z_losses, z_losses


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("smoothing, z_loss", ((0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-2)))
def test_against_float64(smoothing, z_loss, dtype, device):
    logits, labels, weights = problem(ROWS, VOCAB, dtype, 0)
    labels[3] = -100
    leaf = logits.double().requires_grad_()
    want = exact(leaf, labels, smoothing, z_loss)
    want_grad = torch.autograd.grad((weights[0] * want[0]).sum(), leaf)[0]
    spoiled = logits.clone()
    spoiled[3] = math.nan
    leaf = spoiled.to(device).requires_grad_()
    got = cross_entropy_loss(
        leaf,
        labels.to(device),
        label_smoothing=smoothing,
        logit_scale=SCALE,
        lse_square_scale=z_loss,
    )
    grad = torch.autograd.grad((weights[0].to(device) * got[0]).sum(), leaf)[0].cpu()
    for one, expected in zip(got, want, strict=True):
        torch.testing.assert_close(one.cpu().double(), expected, **tolerances.LOG_PROB)
    assert not got[1].requires_grad
    # In 16 bits the gradients of up to three terms are rounded and added.
    rounding = 4 * tolerances.GRAD_ROUNDING[str(dtype).removeprefix("torch.")]
    atol = tolerances.LOG_PROB_GRAD["atol"] + rounding * want_grad.abs().max().item()
    torch.testing.assert_close(
        grad.double(), want_grad, rtol=tolerances.LOG_PROB_GRAD["rtol"], atol=atol
    )
