"""Inputs and the definition in float64 that the tests of linear_distillation_loss share."""

from decimal import Decimal, localcontext

import torch
import torch.nn.functional as F

from hybridengine.kernels import linear_distillation_loss

ROWS = 40
BETAS = (0.0, 0.1, 0.5, 1.0)
SKEWED = (1e-3, 1e-6, 1e-9, 0.5, 1 - 1e-6, 1 - 1e-9)
CAPPED = {
    "student_softcap": 3.0,
    "student_logit_scale": 1.2,
    "teacher_softcap": 5.0,
    "teacher_logit_scale": 0.8,
    "temperature": 0.7,
}
_STUDENT = ("student_hidden", "student_weight", "student_bias")


def problem(rows=ROWS, vocab=101, width=16, dtype=torch.float32):
    """Return tensors by argument name, and the mask."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    tensors = {}
    for name, size in (("student", width), ("teacher", width + 8)):
        tensors[f"{name}_hidden"] = draw(rows, size)
        tensors[f"{name}_weight"] = draw(vocab, size) * (16 / size) ** 0.5
        tensors[f"{name}_bias"] = draw(vocab)
    return tensors, torch.arange(rows) % 3 != 1


def divergence_terms(log_q, log_p, beta):
    """The generalised JSD of arXiv 2306.13649, eq. 1, and its limits as KL divergences."""
    kl = lambda log_a, log_b: log_a.exp() * (log_a - log_b)  # noqa: E731
    if beta in (0.0, 1.0):
        return kl(log_q, log_p) if beta else kl(log_p, log_q)
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    terms = beta * kl(log_p, log_m).where(log_p > -torch.inf, 0)
    return terms + (1 - beta) * kl(log_q, log_m).where(log_q > -torch.inf, 0)


def exact(tensors, mask, beta, temperature=1.0, **options):
    """[mean, divergences, gradients of the student] in float64."""
    leaves = {n: t.double().requires_grad_(n in _STUDENT) for n, t in tensors.items()}
    log_probs = []
    for name in ("student", "teacher"):
        z = F.linear(leaves[f"{name}_hidden"], leaves[f"{name}_weight"], leaves[f"{name}_bias"])
        z = z * options.get(f"{name}_logit_scale", 1.0)
        if (cap := options.get(f"{name}_softcap")) is not None:
            z = cap * torch.tanh(z / cap)
        log_probs.append((z / temperature).log_softmax(-1))
    divergences = divergence_terms(*log_probs, beta).sum(-1) * mask
    loss = divergences.sum() / mask.sum()
    grads = torch.autograd.grad(loss, [leaves[name] for name in _STUDENT])
    return [loss.detach(), divergences.detach(), *grads]


def results(tensors, mask, beta, device="cpu", **options):
    """The same of ours, in the dtype of the inputs."""
    leaves = {n: t.to(device).detach().requires_grad_(n in _STUDENT) for n, t in tensors.items()}
    mask = None if mask is None else mask.to(device)
    loss, divergences = linear_distillation_loss(**leaves, beta=beta, response_mask=mask, **options)
    grads = torch.autograd.grad(loss, [leaves[name] for name in _STUDENT])
    return [t.detach().cpu() for t in (loss, divergences, *grads)]


def skewed_rows(vocab=40, rows=3):
    """Logits of students and teachers, float32: near, far and unlike distributions."""
    generator = torch.Generator().manual_seed(4)
    student, teacher = (torch.randn(rows, vocab, generator=generator) for _ in range(2))
    teacher[0] = student[0] + 0.1 * teacher[0]
    teacher[1] *= 20
    return student, teacher


def decimal_divergence(student, teacher, beta):
    """The divergence of a row and its gradient with respect to `student`, in 60 digits."""
    with localcontext(prec=60):
        log_q, log_p = (decimal_log_probs(row) for row in (student, teacher))
        beta = Decimal(beta)
        pairs = [(q.exp(), p.exp(), q, p) for q, p in zip(log_q, log_p, strict=True)]
        log_m = [(beta * p + (1 - beta) * q).ln() for q, p, _, _ in pairs]
        g = [(1 - beta) * (q - m) for q, m in zip(log_q, log_m, strict=True)]
        of_q = sum(pair[0] * value for pair, value in zip(pairs, g, strict=True))
        of_p = sum(pair[1] * (pair[3] - m) for pair, m in zip(pairs, log_m, strict=True))
        gradient = [pair[0] * (value - of_q) for pair, value in zip(pairs, g, strict=True)]
        return float(beta * of_p + of_q), [float(value) for value in gradient]


def decimal_log_probs(row):
    values = [Decimal(x) for x in row.tolist()]
    log_sum = sum(x.exp() for x in values).ln()
    return [x - log_sum for x in values]
