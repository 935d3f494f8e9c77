"""adamw_: AdamW for a list of tensors, marking the elements whose engine value changes.

An inference engine holds bfloat16 (or float16) values of the float32 master weights, and at the
learning rates of reinforcement learning an update changes few of them. The pass that updates the
weights has both values in registers, so it compares them at no cost in memory traffic but a bit per
element; `take_changed` turns the marks of one or several updates into (index, value).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _check as check
from ._backend import choose_backend, native, register_backends
from ._library import custom_op
from .changes import check_engine_dtype, mark_
from .checksum import bit_checksum

register_backends("adamw_", cpu=("cpp", "reference"), cuda=("cuda", "reference"))

_OP = "adamw_"


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    grad_factor: Tensor | None = None,
    changed: Sequence[Tensor] = (),
    engine_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Update `params`, `exp_avgs` and `exp_avg_sqs` in place; add the changes to `changed`.

    AdamW (arXiv 1711.05101, algorithm 2), with bias correction and the weight decay multiplied by
    the learning rate, equal to `torch.optim.AdamW` up to float32 rounding. Memory is read and
    written once. Nothing synchronizes with the host, and the launches can be captured in a CUDA
    graph (with `lr` as it is then).

    Args:
        params: float32 (float64: computed by the reference), contiguous, on one device.
        grads: float32, bfloat16 or float16 (one dtype for all), else like `params`; not written.
        exp_avgs, exp_avg_sqs: like `params`.
        steps: for each parameter the number of this update, counted from 1: one float32 element.
        lr, eps, weight_decay: not negative.
        betas: in [0, 1).
        grad_factor: one float32 element on the same device, by which the gradients are multiplied
            as they are read: the factor of gradient clipping and loss scaling.
        changed: masks of `change_mask`, one for each parameter, or none. An element is marked if
            its value, rounded to `engine_dtype`, has other bits after the update than before.
        engine_dtype: bfloat16 or float16; together with `changed`.
        backend: `cpp`, `cuda` or `reference`; None takes the best one.

    Returns:
        `bit_checksum` of each parameter before and after the update, int64 [len(changed), 2]. On a
        CPU it is computed in the same pass, on GPUs by two more reads.

    Raises:
        ValueError: a wrong dtype, shape, stride or device, a number out of its range, a step below
            1 (on a CPU).

    Examples:
        >>> weight, grad = torch.ones(3), torch.tensor([1.0, 0.0, -1.0])
        >>> mask = change_mask(weight)
        >>> state = [torch.zeros(3)], [torch.zeros(3)], [torch.ones(())]
        >>> options = {"lr": 0.01, "changed": [mask], "engine_dtype": torch.bfloat16}
        >>> checksums = adamw_([weight], [grad], *state, **options)
        >>> take_changed([mask], [weight], dtype=torch.bfloat16)[0][0].tolist()
        [0, 2]
    """
    check.number(_OP, "lr", lr, at_least=0)
    check.number(_OP, "eps", eps, at_least=0)
    check.number(_OP, "weight_decay", weight_decay, at_least=0)
    for i, beta in enumerate(betas):
        check.number(_OP, f"betas[{i}]", beta, at_least=0)
        if beta >= 1:
            raise ValueError(f"{_OP}: betas[{i}] is {beta}; expected a number below 1.")
    if bool(changed) != (engine_dtype is not None):
        raise ValueError(
            f"{_OP}: changed has {len(changed)} masks and engine_dtype is {engine_dtype}; give "
            "both or none."
        )
    if engine_dtype is not None:
        check_engine_dtype(_OP, "engine_dtype", engine_dtype)
    return torch.ops.hybridengine.adamw_(
        list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), list(steps), list(changed),
        lr, *betas, eps, weight_decay, grad_factor, engine_dtype, backend,
    )  # fmt: skip


@custom_op("hybridengine::adamw_", mutates_args={"params", "exp_avgs", "exp_avg_sqs", "changed"})
def _adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    changed: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_factor: Tensor | None,
    engine_dtype: torch.dtype | None,
    backend: str | None,
) -> Tensor:
    if not params:
        return torch.zeros(0, 2, dtype=torch.int64)
    lists = params, grads, exp_avgs, exp_avg_sqs, steps, changed
    numbers = lr, beta1, beta2, eps, weight_decay
    checksums = torch.zeros(len(changed), 2, dtype=torch.int64, device=params[0].device)
    chosen = choose_backend(_OP, params[0].device, backend, params[0].dtype)
    in_same_pass = chosen == "cpp"
    if not in_same_pass:
        _read_checksums(params[: len(changed)], checksums[:, 0])
    if chosen == "reference":
        _update_by_reference(*lists, engine_dtype, numbers, grad_factor)
    else:
        native().adamw(*lists, checksums.view(-1), engine_dtype, *numbers, grad_factor)
    if not in_same_pass:
        _read_checksums(params[: len(changed)], checksums[:, 1])
    return checksums


def _read_checksums(params: list[Tensor], out: Tensor) -> None:
    """Write `bit_checksum` of every parameter to `out`, int64 [P]; a GPU is not waited for."""
    for i, param in enumerate(params):
        out[i] = bit_checksum(param)


def _update_by_reference(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    changed: list[Tensor],
    engine_dtype: torch.dtype | None,
    numbers: tuple[float, float, float, float, float],
    grad_factor: Tensor | None,
) -> None:
    _check_lists(params, grads, exp_avgs, exp_avg_sqs, steps, changed)
    for i, param in enumerate(params):
        before = param.clone() if changed else None
        state = exp_avgs[i], exp_avg_sqs[i], steps[i]
        _reference(param, grads[i], *state, *numbers, grad_factor)
        if before is not None and engine_dtype is not None:
            mark_(changed[i], bits_differ(before, param, engine_dtype))


@_adamw.register_fake
def _(params: list[Tensor], *lists: list[Tensor], **_: object) -> Tensor:
    device = params[0].device if params else None
    return torch.empty(len(lists[4]), 2, dtype=torch.int64, device=device)


def bits_differ(old: Tensor, new: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bool, in the tensors' shape: whether their values in `dtype` have other bits."""
    return old.to(dtype).view(torch.int16) != new.to(dtype).view(torch.int16)


def _check_lists(params: list[Tensor], *others: list[Tensor]) -> None:
    """Raise ValueError as the kernels do."""
    names = ("grads", "exp_avgs", "exp_avg_sqs", "steps", "changed")
    for name, tensors in zip(names, others, strict=True):
        if len(tensors) != len(params) and (tensors or name != "changed"):
            raise ValueError(
                f"{_OP}: there are {len(tensors)} {name} and {len(params)} params; expected one "
                "each."
            )
    for i, param in enumerate(params):
        for name, tensors in zip(("params", *names[:3]), (params, *others[:3]), strict=True):
            if tensors[i].shape != param.shape:
                raise ValueError(
                    f"{_OP}: {name}[{i}] has shape {list(tensors[i].shape)}, params[{i}] "
                    f"{list(param.shape)}; expected the same."
                )
            if not tensors[i].is_contiguous():
                raise ValueError(
                    f"{_OP}: {name}[{i}] has strides {tensors[i].stride()}; expected a contiguous "
                    "tensor."
                )
        if check.readable(others[3][i]) and others[3][i] < 1:
            raise ValueError(
                f"{_OP}: steps[{i}] is {float(others[3][i])}; updates are counted from 1."
            )


def _reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_factor: Tensor | None,
) -> None:
    """Update one parameter in plain PyTorch: the specification."""
    grad = grad.to(param.dtype)
    if grad_factor is not None:
        grad = grad * grad_factor
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    correction1, correction2 = (1 - beta ** step.double() for beta in (beta1, beta2))
    denom = exp_avg_sq.sqrt() / correction2.sqrt() + eps
    param.mul_(1 - lr * weight_decay).sub_(lr / correction1 * (exp_avg / denom))
