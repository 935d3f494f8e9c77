"""The divergence of rows of student and teacher logits in Triton, and its gradient.

One program per row: an online softmax of both rows, the divergence, and the gradient, which needs
a sum of the row (except for beta 0, where both are one pass). csrc/distillation has the same
formulas for a CPU.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .._launch import launch
from ..logprob.triton import _tanh

BLOCK = 2048


@triton.jit
def _load_z(logits, columns, vocab, HAS_CAP: tl.constexpr):
    """z of the columns; -inf outside the row.

    logits: (address of the row, factor of x or of softcap * tanh(cap_scale * x), cap_scale,
    softcap).
    """
    row, factor, cap_scale, softcap = logits
    inside = columns < vocab
    x = tl.load(row + columns, mask=inside, other=-float("inf")).to(tl.float32)
    if HAS_CAP:
        x = tl.where(inside, softcap * _tanh(cap_scale * x), -float("inf"))
    return x * factor


@triton.jit
def _log_sum_exp(logits, vocab, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Return the maximum of z, and log sum exp of z minus it."""
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float64)
    for begin in range(0, vocab, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        z = _load_z(logits, columns, vocab, HAS_CAP)
        new_top = tl.maximum(top, tl.max(z, 0))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(z - shift), 0)
        top = new_top
    return top, tl.log(total).to(tl.float32)


@triton.jit
def _load_log_probs(logits, sums, columns, vocab, HAS_CAP: tl.constexpr):
    """Return z of the columns and their log-probs; sums: the results of `_log_sum_exp`."""
    top, log_sum = sums
    z = _load_z(logits, columns, vocab, HAS_CAP)
    return z, z - top - log_sum


@triton.jit
def _exp_minus_one(x, exp_x):
    """e^-x - 1 for x >= 0, given e^-x: by its series near 0, where the difference loses digits."""
    series = x * (1.0 / 720) - 1.0 / 120
    series = series * x + 1.0 / 24
    series = series * x - 1.0 / 6
    series = series * x + 0.5
    series = series * x - 1.0
    return tl.where(x < 0.35, series * x, exp_x - 1.0)


@triton.jit
def _entry(log_q, log_p, beta, rest, FORM: tl.constexpr):
    """Return what an entry adds to the divergence and to the sum s, a, and q.

    The gradient is a - s q. FORM: 0 forward KL, 1 reverse KL; between them, 2: q has the larger
    weight in m, 3: p has it. csrc/distillation explains the terms of 2 and 3.
    """
    q, p, log_ratio = tl.exp(log_q), tl.exp(log_p), log_p - log_q
    if FORM == 0:
        return tl.where(p > 0, p * log_ratio, 0.0), q * 0.0, q - p, q
    elif FORM == 1:
        loss = tl.where(q > 0, -q * log_ratio, 0.0)
        return loss, loss, loss, q
    else:
        d = log_ratio if FORM == 2 else -log_ratio
        weight = beta if FORM == 2 else rest
        major_weight = rest if FORM == 2 else beta
        small = tl.exp(-tl.abs(d))
        change = _exp_minus_one(tl.abs(d), small)
        y = weight * tl.where(d > 0, -change / small, change)
        is_near = y <= 1.0
        sum_m = tl.where(is_near, 1.0 + y, weight + major_weight * small)
        log_m = tl.log(sum_m) + tl.where(is_near, y - (sum_m - 1.0), 0.0)
        of_major = tl.where(is_near, -log_m, -d - log_m)  # log major - log m
        of_minor = tl.where(is_near, d - log_m, -log_m)
        of_q = tl.where(q > 0, rest * q * (of_major if FORM == 2 else of_minor), 0.0)
        of_p = tl.where(p > 0, beta * p * (of_minor if FORM == 2 else of_major), 0.0)
        return of_p + of_q, of_q, of_q, q


@triton.jit
def _write(out, columns, vocab, grad, z, factor, grad_factor, softcap, HAS_CAP: tl.constexpr):
    """Store grad, the gradient of z, times dz / dx; grad_factor: dz / dx without a soft-cap."""
    if HAS_CAP:
        tanh_x = z / (factor * softcap)
        grad = grad * (1.0 - tanh_x * tanh_x)
    # A masked row has the factor 0, and its logits may be NaN.
    grad = tl.where(grad_factor == 0, 0.0, grad * grad_factor)
    tl.store(out + columns, grad.to(out.dtype.element_ty), mask=columns < vocab)


@triton.jit
def distillation_kernel(
    student,
    teacher,
    out,
    losses,
    incoming,
    student_stride,
    teacher_stride,
    out_stride,
    vocab,
    factor,
    grad_factor,
    cap_scale,
    softcap,
    teacher_factor,
    teacher_cap_scale,
    teacher_softcap,
    beta,
    rest,
    FORM: tl.constexpr,
    HAS_CAP: tl.constexpr,
    TEACHER_HAS_CAP: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    of_q = (student + row * student_stride, factor, cap_scale, softcap)
    of_p = (teacher + row * teacher_stride, teacher_factor, teacher_cap_scale, teacher_softcap)
    sums_q = _log_sum_exp(of_q, vocab, HAS_CAP, BLOCK)
    sums_p = _log_sum_exp(of_p, vocab, TEACHER_HAS_CAP, BLOCK)
    weight = grad_factor
    if GRADIENT:
        out += row * out_stride
        weight = grad_factor * tl.load(incoming + row)
    total = tl.zeros((), tl.float64)
    share = tl.zeros((), tl.float64)
    for begin in range(0, vocab, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        z, log_q = _load_log_probs(of_q, sums_q, columns, vocab, HAS_CAP)
        _, log_p = _load_log_probs(of_p, sums_p, columns, vocab, TEACHER_HAS_CAP)
        loss, own, grad, _ = _entry(log_q, log_p, beta, rest, FORM)
        total += tl.sum(loss, 0)
        share += tl.sum(own, 0)
        if GRADIENT and FORM == 0:
            _write(out, columns, vocab, grad, z, factor, weight, softcap, HAS_CAP)
    tl.store(losses + row, total.to(tl.float32))
    if GRADIENT and FORM != 0:
        of_row = share.to(tl.float32)
        for begin in range(0, vocab, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            z, log_q = _load_log_probs(of_q, sums_q, columns, vocab, HAS_CAP)
            _, log_p = _load_log_probs(of_p, sums_p, columns, vocab, TEACHER_HAS_CAP)
            _, _, grad, q = _entry(log_q, log_p, beta, rest, FORM)
            grad -= of_row * q
            _write(out, columns, vocab, grad, z, factor, weight, softcap, HAS_CAP)


def distillation(
    student: Tensor,
    teacher: Tensor,
    out: Tensor | None,
    losses: Tensor,
    incoming: Tensor,
    transforms: tuple,
    beta: float,
) -> None:
    """Write the divergence of every row to `losses`, its gradient to `out`, which may be `student`.

    student, teacher: [n, V] logits.
    transforms: (scale, softcap or 0, temperature) of each.
    """
    if not student.numel():
        return
    numbers = []
    for scale, softcap, temperature in transforms:
        factor = (1.0 if softcap else scale) / temperature
        numbers.append((factor, scale / temperature, scale / softcap if softcap else 0.0, softcap))
    (factor, grad_factor, cap_scale, softcap), (teacher_factor, _, *teacher_cap) = numbers
    target = student if out is None else out
    form = {0.0: 0, 1.0: 1}.get(beta, 2 if beta < 0.5 else 3)
    launch(
        distillation_kernel,
        (student.shape[0],),
        student,
        teacher,
        target,
        losses,
        incoming,
        student.stride(0),
        teacher.stride(0),
        target.stride(0),
        student.shape[1],
        factor,
        grad_factor,
        cap_scale,
        softcap,
        teacher_factor,
        *teacher_cap,
        beta,
        1 - beta,
        form,
        softcap != 0,
        transforms[1][1] != 0,
        out is not None,
        BLOCK,
        num_warps=8,
    )
