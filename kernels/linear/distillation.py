"""linear_distillation_loss: divergence of student and teacher from the hidden states of both.

With p the teacher's and q the student's distribution over the full vocabulary, and
m = beta p + (1 - beta) q, the divergence of a row is the generalised Jensen-Shannon divergence
(arXiv 2306.13649, eq. 1)

    beta KL(p || m) + (1 - beta) KL(q || m);    beta 0: forward KL(p || q), 1: reverse KL(q || p)

Both logits exist for a chunk of rows at a time. The gradient of the student's logits z replaces
them in the forward: 6 T H V operations for the student and 2 T H V for the teacher.

    beta 0: q - p        else: q (g - sum q g),  g = (1 - beta) (log q - log m)  or  log q - log p
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _check as check
from .._aggregation import global_count
from .._backend import choose_backend, native, register_backends
from .._library import custom_op
from .._per_token import compute_dtype
from ..logprob.options import in_shape
from .arguments import check_active_rows, check_budget
from .attach import attach_gradients, fake_gradients, wanted_gradients
from .chunks import Chunks
from .gradients import LinearGradients
from .reference import reference_logits

register_backends(
    "linear_distillation_loss", cpu=("cpp", "reference"), cuda=("triton", "reference")
)

_SMALLEST = 2.0**-126  # normal float32


class Transform(NamedTuple):
    """z = softcap * tanh(scale * x / softcap) / temperature, or scale * x / temperature."""

    scale: float
    softcap: float  # 0: none
    temperature: float

    def __call__(self, logits: Tensor) -> Tensor:
        z = logits * self.scale
        if self.softcap:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z / self.temperature

    def derivative(self, logits: Tensor) -> float | Tensor:
        """Return dz / dx."""
        factor = self.scale / self.temperature
        if not self.softcap:
            return factor
        return factor * (1 - torch.tanh(logits * (self.scale / self.softcap)).square())


def linear_distillation_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    response_mask: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    num_items_in_batch: float | Tensor | None = None,
    active_rows: Tensor | None = None,
    grad_scale: float = 1.0,
    budget_bytes: int | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the mean divergence between a student and a frozen teacher.

    Args:
        student_hidden: [..., Hs]; student_weight: [V, Hs] of the same dtype.
        teacher_hidden: [..., Ht]; teacher_weight: [V, Ht] of the same dtype; no gradient.
        beta: 0 to 1, as in TRL's GKD and Liger's JSD. 0: forward KL, 1: reverse KL.
        temperature: both distributions are of the logits / temperature; above 0.
        response_mask: [...] bool, or 0 and 1; None: all rows. What masked rows hold does not
            matter. On a CPU nothing of them is computed; on a GPU, where the host would have to
            wait for their number, give `active_rows`, or only the other rows.
        student_bias, teacher_bias: [V] or None. ..._logit_scale, ..._softcap: as in
            `token_log_probs`, before the temperature.
        num_items_in_batch: divisor of the sum, a number or a tensor of one element; None: the
            unmasked rows.
        active_rows: [A] int32 or int64, ascending: all other rows are masked.
        grad_scale: the incoming gradient that the gradients are computed for, as in
            `linear_policy_loss`.
        budget_bytes: memory for both logits and temporaries, as in `linear_token_log_probs`.
        deterministic: as there.
        backend: `cpp`, `triton` or `reference`; None: the best one.

    Returns:
        (loss, divergences [...]), float32. The loss is differentiable with respect to the student's
        hidden, weight and bias, once and in reverse mode; the divergences, 0 where masked, have no
        gradient. There is no factor temperature^2.

    Raises:
        ValueError: a wrong shape, dtype, device or number; different vocabularies.

    Examples:
        >>> hidden, weight = torch.randn(2, 8), torch.randn(5, 8)
        >>> loss, _ = linear_distillation_loss(hidden, weight, hidden, weight)
        >>> loss.item()
        0.0
    """
    op = "linear_distillation_loss"
    student, teacher = (student_hidden, student_weight), (teacher_hidden, teacher_weight)
    biases = (student_bias, teacher_bias)
    _check_models(op, student, teacher, biases)
    beta = check.number(op, "beta", beta, at_least=0, at_most=1)
    temperature = check.number(op, "temperature", temperature, above=0)
    grad_scale = check.number(op, "grad_scale", grad_scale, above=0)
    transforms = [
        Transform(
            check.number(op, f"{name}_logit_scale", scale, above=0),
            0.0 if cap is None else check.number(op, f"{name}_softcap", cap, above=0),
            temperature,
        )
        for name, scale, cap in (
            ("student", student_logit_scale, student_softcap),
            ("teacher", teacher_logit_scale, teacher_softcap),
        )
    ]
    budget_bytes = check_budget(op, student_hidden, budget_bytes)
    shape = student_hidden.shape[:-1]
    mask = _row_mask(op, response_mask, active_rows, shape, student_hidden.device)
    divisor = global_count(op, "num_items_in_batch", num_items_in_batch, mask.device, mask.sum)
    backend = choose_backend(op, student_hidden.device, backend, student_hidden.dtype)
    tensors = (student_hidden.reshape(-1, student_hidden.shape[-1]), student_weight, student_bias)
    frozen = tuple(
        None if t is None else t.detach()
        for t in (teacher_hidden.reshape(-1, teacher_hidden.shape[-1]), teacher_weight, biases[1])
    )
    if backend == "reference":
        losses = _reference(tensors, frozen, mask, transforms, beta)
        return (losses.sum() / divisor).to(losses.dtype), in_shape(losses.detach(), shape)
    wanted = wanted_gradients(op, tensors, "student_")
    detached = (None if t is None else t.detach() for t in tensors)
    losses, *grads = _distillation_op(
        *detached,
        *frozen,
        mask,
        (grad_scale / divisor).float().repeat(mask.numel()),
        [*transforms[0], *transforms[1], beta],
        budget_bytes,
        deterministic,
        active_rows,
        False,
        wanted,
        backend,
    )
    loss = (losses.sum() / divisor).to(losses.dtype)
    if any(wanted):
        loss = attach_gradients(loss, tensors, grads, None, grad_scale)
    return loss, in_shape(losses, shape)


def _check_models(
    op: str,
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
) -> None:
    """Check shapes, dtypes and devices of both heads."""
    named = {
        f"{name}_{part}": tensor
        for name, pair in (("student", student), ("teacher", teacher))
        for part, tensor in zip(("hidden", "weight"), pair, strict=True)
    }
    check.same_device(op, **named, student_bias=biases[0], teacher_bias=biases[1])
    check.reverse_mode_only(op, **named, student_bias=biases[0], teacher_bias=biases[1])
    sizes: check.Sizes = {}
    for name, bias in zip(("student", "teacher"), biases, strict=True):
        hidden, weight = named[f"{name}_hidden"], named[f"{name}_weight"]
        check.floats(op, **{f"{name}_hidden": hidden})
        check.shape(op, f"{name}_hidden", hidden, f"... H_{name}", sizes)
        check.shape(op, f"{name}_weight", weight, f"V H_{name}", sizes)
        check.dtype(op, f"{name}_weight", weight, (hidden.dtype,))
        if bias is not None:
            check.shape(op, f"{name}_bias", bias, "V", sizes)
            check.dtype(op, f"{name}_bias", bias, (hidden.dtype, compute_dtype(hidden)))
    if (student[0].dtype == torch.float64) != (teacher[0].dtype == torch.float64):
        raise ValueError(
            f"{op}: student_hidden has dtype {student[0].dtype}, teacher_hidden "
            f"{teacher[0].dtype}; float64 needs both."
        )


def _row_mask(
    op: str,
    response_mask: Tensor | None,
    active_rows: Tensor | None,
    shape: torch.Size,
    device: torch.device,
) -> Tensor:
    """Return the rows in the loss: bool [T]."""
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    if response_mask is not None:
        check.same_device(op, student_hidden=mask, response_mask=response_mask)
        check.shape(op, "response_mask", response_mask, "...", {"...": (shape, "student_hidden")})
        mask = check.mask(op, "response_mask", response_mask)
    mask = mask.flatten()
    if active_rows is not None:
        index = check_active_rows(op, active_rows, mask)
        mask = mask & torch.zeros_like(mask).index_fill_(0, index, True)
    return mask


def _reference(
    student: tuple, teacher: tuple, mask: Tensor, transforms: list[Transform], beta: float
) -> Tensor:
    """Compute the divergences [T] in plain PyTorch: the specification."""
    log_q, log_p = (
        torch.log_softmax(transform(reference_logits(hidden, weight, bias, ~mask)), dim=1)
        for (hidden, weight, bias), transform in zip((student, teacher), transforms, strict=True)
    )
    return divergence(log_q, log_p, beta).sum(1).masked_fill(~mask, 0)


def divergence(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """Return the terms of every entry, [T, V]; 0 log 0 is 0."""
    removed = log_q.isinf() & log_p.isinf()  # -inf in both has no gradient
    ratio = log_p.masked_fill(removed, 0) - log_q.masked_fill(removed, 0)
    if beta == 0:
        return _weighted(log_p, ratio)
    if beta == 1:
        return _weighted(log_q, -ratio)
    if beta < 0.5:
        of_q, of_p = _log_ratios_to_mixture(ratio, beta)
    else:
        of_p, of_q = _log_ratios_to_mixture(-ratio, 1 - beta)
    return beta * _weighted(log_p, of_p) + (1 - beta) * _weighted(log_q, of_q)


def _log_ratios_to_mixture(d: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Return log a - log m and log b - log m for m = (1 - weight) a + weight b, d = log b - log a.

    log m - log a = log(1 + weight (e^d - 1)), whose digits do not depend on the weight, at most
    1/2; where d is large, log m - log b takes its place.
    """
    is_near = d <= -math.log(weight)
    near, far = d.masked_fill(~is_near, 0), d.masked_fill(is_near, 0)
    from_a = torch.log1p(weight * torch.expm1(near))
    from_b = torch.log(weight + (1 - weight) * torch.exp(-far))
    return -from_a.where(is_near, d + from_b), (d - from_a).where(is_near, -from_b)


def _weighted(log_a: Tensor, values: Tensor) -> Tensor:
    """Return a * values; 0 where a is 0."""
    a = log_a.exp()
    return a * values.masked_fill(a == 0, 0)


@custom_op("hybridengine::linear_distillation", mutates_args=())
def _distillation_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    mask: Tensor,
    incoming: Tensor,
    numbers: list[float],
    budget_bytes: int,
    deterministic: bool,
    active_rows: Tensor | None,
    wide_weight_grad: bool,
    wanted: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute divergences [T] and the student's gradients.

    incoming: [T], the gradients of the divergences.
    numbers: both transforms, then beta.
    """
    if active_rows is None and check.readable(mask) and not mask.all():
        active_rows = mask.nonzero().squeeze(1)
    count = mask.numel() if active_rows is None else active_rows.numel()
    teacher = Chunks(
        teacher_hidden, teacher_weight, teacher_bias, budget_bytes // 2, deterministic, 0
    )
    student = Chunks(
        hidden, weight, bias, budget_bytes // 2, deterministic, count if any(wanted) else 0
    )
    student.rows = min(student.rows, teacher.rows)
    grads = LinearGradients(student, wanted, inactive=~mask, wide_weight=wide_weight_grad)
    losses, incoming = torch.zeros_like(incoming), incoming.masked_fill(~mask, 0)
    for rows in student.parts(active_rows):
        logits, teacher_logits = grads.logits(rows), teacher.logits(rows)
        out = grads.buffer(logits, logits.shape[0]) if any(wanted) else None
        part = torch.empty_like(losses[rows])
        of_rows = incoming[rows].contiguous()
        transforms = (Transform(*numbers[:3]), Transform(*numbers[3:6]))
        _epilogue(logits, teacher_logits, out, part, of_rows, transforms, numbers[6], backend)
        losses[rows] = part.masked_fill(~mask[rows], 0)
        if out is not None:
            grads.add(out, rows)
    return losses, *grads.finish()


def _epilogue(
    student: Tensor,
    teacher: Tensor,
    out: Tensor | None,
    losses: Tensor,
    incoming: Tensor,
    transforms: tuple[Transform, Transform],
    beta: float,
    backend: str,
) -> None:
    """Write the divergences of rows of logits [n, V], and the gradient of the student's to `out`.

    The logits are overwritten.
    """
    beta = max(beta, _SMALLEST) if beta else beta
    if backend == "triton":
        from . import distillation_triton

        distillation_triton.distillation(student, teacher, out, losses, incoming, transforms, beta)
    else:
        native().distillation(
            student,
            teacher,
            tuple(transforms[0]),
            tuple(transforms[1]),
            beta,
            losses,
            None if out is None else incoming,
            out,
        )


@_distillation_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wide_weight_grad: bool,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    losses = hidden.new_empty(hidden.shape[0], dtype=compute_dtype(hidden))
    return losses, *fake_gradients(hidden, weight, bias, wide_weight_grad, wanted)
