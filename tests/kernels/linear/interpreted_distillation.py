"""Run by test_linear_distillation.py with TRITON_INTERPRET=1 set before any import."""

import pytest
import torch

from hybridengine.kernels.linear import distillation, distillation_triton
from tests import tolerances
from tests.kernels.linear.distillation_cases import BETAS, SKEWED, decimal_divergence, skewed_rows


@pytest.mark.parametrize("in_place", (True, False))
@pytest.mark.parametrize("capped", (True, False))
@pytest.mark.parametrize("beta", BETAS)
def test_rows(beta, capped, in_place):
    """Rows of more than one block against the reference's formula in float64."""
    generator = torch.Generator().manual_seed(0)
    logits = [3 * torch.randn(3, 2500, generator=generator) for _ in range(2)]
    logits[0][:, ::9] = logits[1][:, ::9] = -60.0 if capped else -torch.inf
    transforms = [
        distillation.Transform(scale, cap if capped else 0.0, 0.8)
        for scale, cap in ((1.2, 20.0), (0.9, 30.0))
    ]
    incoming, losses = torch.tensor([1.0, 0.5, 0.0]), torch.empty(3)
    exact = [x.double().requires_grad_() for x in logits]
    log_q, log_p = (torch.log_softmax(t(x), 1) for t, x in zip(transforms, exact, strict=True))
    expected = distillation.divergence(log_q, log_p, beta).sum(1)
    (gradient,) = torch.autograd.grad(expected, exact[0], incoming.double())
    out = logits[0] if in_place else torch.empty_like(logits[0])
    arguments = (*logits, out, losses, incoming, tuple(transforms), beta)
    distillation_triton.distillation(*arguments)
    torch.testing.assert_close(losses.double(), expected.detach(), **tolerances.LOG_PROB)
    torch.testing.assert_close(out.double(), gradient, **tolerances.LOG_PROB_GRAD)


@pytest.mark.parametrize("beta", BETAS)
def test_a_row_without_incoming_gradient_has_none_whatever_it_holds(beta):
    student, teacher = torch.randn(2, 2, 2500).unbind()
    student[1] = teacher[1] = torch.nan
    losses, out, incoming = torch.empty(2), torch.empty_like(student), torch.tensor([1.0, 0.0])
    transforms = (distillation.Transform(1.0, 0.0, 1.0),) * 2
    distillation_triton.distillation(student, teacher, out, losses, incoming, transforms, beta)
    assert not out[1].any() and out[0].isfinite().all() and out[0].any()


@pytest.mark.parametrize("beta", SKEWED)
def test_no_digit_is_lost_where_beta_is_near_0_or_1(beta):
    student, teacher = skewed_rows()
    transforms = (distillation.Transform(1.0, 0.0, 1.0),) * 2
    losses, out, incoming = torch.empty(3), torch.empty_like(student), torch.ones(3)
    distillation_triton.distillation(student, teacher, out, losses, incoming, transforms, beta)
    for row in range(3):
        loss, gradient = decimal_divergence(student[row], teacher[row], beta)
        exact = torch.tensor(gradient, dtype=torch.float64)
        assert abs(losses[row].item() - loss) <= 1e-5 * loss
        assert (out[row] - exact).abs().max() <= 1e-5 * exact.abs().max()
