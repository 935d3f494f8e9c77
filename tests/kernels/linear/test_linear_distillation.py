"""linear_distillation_loss against its definition in float64, by KL divergences of torch."""

import pytest
import torch
import torch.nn.functional as F

from hybridengine.kernels import linear_distillation_loss
from hybridengine.kernels.linear.chunks import Chunks
from tests import tolerances
from tests.kernels.interpreter import run_interpreted
from tests.kernels.linear.cases import DEVICES, ROUNDED, assert_all_close
from tests.kernels.linear.distillation_cases import (
    BETAS,
    CAPPED,
    ROWS,
    SKEWED,
    decimal_divergence,
    exact,
    problem,
    results,
    skewed_rows,
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", (None, "reference"))
@pytest.mark.parametrize("options", ({}, CAPPED))
@pytest.mark.parametrize("beta", BETAS)
def test_against_float64(beta, options, backend, device):
    tensors, mask = problem()
    expected = exact(tensors, mask, beta, **options)
    for budget_bytes in (40 * 101 * 4, 2**20):
        got = results(
            tensors, mask, beta, device, backend=backend, budget_bytes=budget_bytes, **options
        )
        assert_all_close(got, expected)


@pytest.mark.slow
def test_in_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("linear/interpreted_distillation.py")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("beta", BETAS)
def test_16_bit_inputs_over_many_chunks(beta, device):
    tensors, mask = problem(rows=200, dtype=torch.bfloat16)
    expected = exact(tensors, mask, beta, **CAPPED)
    for budget_bytes in (40 * 101 * 6, 2**20):
        got = results(tensors, mask, beta, device, budget_bytes=budget_bytes, **CAPPED)
        assert_all_close(got[:2], expected[:2])
        for g, e in zip(got[2:], expected[2:], strict=True):
            torch.testing.assert_close(g.double() / e.abs().max(), e / e.abs().max(), **ROUNDED)


@pytest.mark.parametrize("beta", BETAS)
def test_the_error_is_at_most_twice_that_of_torch(beta):
    tensors, mask = problem(rows=100, vocab=5003, width=64)
    expected = exact(tensors, mask, beta)
    ours, theirs = (results(tensors, mask, beta, backend=b) for b in (None, "reference"))
    for got, plain, e in zip(ours, theirs, expected, strict=True):
        error, allowed = ((x.double() - e).abs().max() / e.abs().max() for x in (got, plain))
        assert error <= max(tolerances.ERROR_FACTOR * allowed, 8 * tolerances.ROUNDING)


@pytest.mark.parametrize("backend", (None, "reference"))
@pytest.mark.parametrize("beta", BETAS)
def test_removed_entries_and_a_student_that_equals_its_teacher(beta, backend):
    """A logit of -inf in both distributions removes the entry; equal ones have divergence 0."""
    tensors, mask = problem()
    for name in ("student_bias", "teacher_bias"):
        tensors[name][::7] = -torch.inf
    kept = torch.arange(101) % 7 != 0
    smaller = {k: v if k.endswith("hidden") else v[kept] for k, v in tensors.items()}
    expected = exact(smaller, mask, beta)
    got = results(tensors, mask, beta, backend=backend)
    assert_all_close(got[:3], expected[:3])
    for g, e in zip(got[3:], expected[3:], strict=True):
        assert_all_close([g[kept]], [e])
        assert not g[~kept].any()
    same = {k: tensors[k.replace("teacher", "student")] for k in tensors}
    for value in results(same, mask, beta, backend=backend):
        assert value.abs().max() < 1e-6


@pytest.mark.parametrize("beta", (0.0, 0.5))
def test_an_entry_that_only_the_student_lacks(beta):
    """The forward KL is infinite then, as by its definition; the JSD is not."""
    tensors, mask = problem()
    tensors["student_bias"][5] = -torch.inf
    loss, divergences, *grads = results(tensors, mask, beta)
    assert torch.equal(divergences.isinf(), mask & (beta == 0))
    if beta:
        assert_all_close([loss], exact(tensors, mask, beta)[:1])
        assert all(g.isfinite().all() for g in grads)


def test_no_product_has_masked_rows(monkeypatch):
    tensors, mask = problem()
    seen, original = [], Chunks.logits

    def logits(self, rows, offset=0):
        seen.append(rows.tolist())
        return original(self, rows, offset)

    monkeypatch.setattr(Chunks, "logits", logits)
    results(tensors, mask, 0.5)
    assert seen == 2 * [mask.nonzero().flatten().tolist()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", (None, "reference"))
def test_what_masked_rows_hold_does_not_matter(backend, device):
    tensors, mask = problem()
    clean = results(tensors, mask, 0.5, device, backend=backend)
    for name in ("student_hidden", "teacher_hidden"):
        tensors[name][~mask] = torch.nan
    got = results(tensors, mask, 0.5, device, backend=backend)
    assert_all_close(got, clean)
    active = mask.nonzero().squeeze(1).to(device)
    given = results(tensors, None, 0.5, device, backend=backend, active_rows=active)
    assert_all_close(given, clean)
    nothing = results(tensors, torch.zeros_like(mask), 0.5, device, backend=backend)
    assert not any(value.any() for value in nothing)


def test_micro_batches_add_up_and_deterministic_rows_do_not_depend_on_others():
    tensors, mask = problem(rows=300)
    options = {"num_items_in_batch": 250, "deterministic": True}
    full = results(tensors, mask, 0.3, **options)
    for rows in (slice(0, 101), slice(101, 300)):
        some = {k: v[rows] if k.endswith("hidden") else v for k, v in tensors.items()}
        part = results(some, mask[rows], 0.3, budget_bytes=10**6, **options)
        assert torch.equal(part[1], full[1][rows]) and torch.equal(part[2], full[2][rows])
    again = results(tensors, mask, 0.3, **options)
    assert all(torch.equal(a, b) for a, b in zip(full, again, strict=True))
    assert_all_close(full[:1], [exact(tensors, mask, 0.3)[0] * mask.sum() / 250])


def test_only_gradients_that_are_needed_and_padded_batches():
    tensors, _ = problem()
    expected = results(tensors, None, 0.5)
    hidden = tensors["student_hidden"].view(4, ROWS // 4, -1).requires_grad_()
    given = tensors | {
        "student_hidden": hidden,
        "teacher_hidden": tensors["teacher_hidden"].view(4, ROWS // 4, -1),
    }
    loss, divergences = linear_distillation_loss(**given)
    assert divergences.shape == (4, ROWS // 4) and not divergences.requires_grad
    (3.0 * loss).backward()
    torch.testing.assert_close(hidden.grad.flatten(0, 1), 3.0 * expected[2], **tolerances.LINEAR)
    assert all(tensors[name].grad is None for name in tensors)


def test_the_definition_is_that_of_trl():
    """TRL's GKD: F.kl_div of log-probs, and a mixture by logsumexp (trl.experimental.gkd)."""
    tensors, mask = problem()
    for beta in (0.0, 0.3, 1.0):
        log_q, log_p = (
            F.linear(
                tensors[f"{n}_hidden"], tensors[f"{n}_weight"], tensors[f"{n}_bias"]
            ).log_softmax(-1)
            for n in ("student", "teacher")
        )
        kl = lambda a, b: F.kl_div(b, a, reduction="none", log_target=True)  # noqa: E731
        if beta == 0:
            terms = kl(log_p, log_q)
        elif beta == 1:
            terms = kl(log_q, log_p)
        else:
            weight = torch.tensor(beta)
            mixture = torch.logsumexp(
                torch.stack([log_q + torch.log1p(-weight), log_p + weight.log()]), dim=0
            )
            terms = weight * kl(log_p, mixture) + (1 - weight) * kl(log_q, mixture)
        got = results(tensors, mask, beta)[1][mask]
        torch.testing.assert_close(got, terms.sum(-1)[mask], **tolerances.LINEAR)


@pytest.mark.parametrize(
    ("dtype", "of_loss", "of_gradient"),
    # float32: that of log-probs. The gradient of the reference is that of autograd, which adds
    # terms that cancel: 1e-16 relative to them, 1e-7 to what is left of a factor of 1e-9.
    [(torch.float32, 1e-5, 1e-5), (torch.float64, 1e-12, 1e-6)],
)
@pytest.mark.parametrize("beta", SKEWED)
def test_no_digit_is_lost_where_beta_is_near_0_or_1(beta, dtype, of_loss, of_gradient):
    student, teacher = skewed_rows()
    vocab = student.shape[1]
    hidden = student.to(dtype).requires_grad_()
    eye = torch.eye(vocab, dtype=dtype)
    loss, divergences = linear_distillation_loss(
        hidden, eye, teacher.to(dtype), eye, beta=beta, num_items_in_batch=1
    )
    (gradients,) = torch.autograd.grad(loss, hidden)
    for row in range(len(student)):
        loss, gradient = decimal_divergence(student[row], teacher[row], beta)
        exact = torch.tensor(gradient, dtype=torch.float64)
        assert abs(divergences[row].item() - loss) <= of_loss * loss
        assert (gradients[row] - exact).abs().max() <= of_gradient * exact.abs().max()


@pytest.mark.parametrize("backend", (None, "reference"))
def test_a_beta_below_the_smallest_float32(backend):
    student, teacher = skewed_rows()
    teacher[:, 3] = -torch.inf
    eye = torch.eye(student.shape[1])
    loss, _ = linear_distillation_loss(
        student, eye, student.clone(), eye, teacher_bias=teacher[0], beta=1e-300, backend=backend
    )
    assert 0 <= loss.item() <= 1e-30
