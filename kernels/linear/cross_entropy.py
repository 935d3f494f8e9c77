"""linear_cross_entropy: cross-entropy from hidden states, with gradients computed in the forward.

With z the logits of a row after soft-cap and temperature, lse = log sum_v exp z_v, e the label
smoothing and s the factor of the z-loss, the loss of a row is

    lse - (1 - e) z[label] - e mean_v z_v + s lse^2

and its gradient p_v (1 + 2 s lse) - (1 - e) [v == label] - e / V. Labels and the number of items
are known before the forward, so the gradient of a chunk of logits is computed while they are in the
buffer: 6 T H V operations for forward and backward together, of the rows that have a label.
docs/operators.md has the derivation. Label smoothing as torch's cross_entropy
(arXiv 1512.00567, section 7), z-loss as PaLM (arXiv 2204.02311, section 5).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check as check
from .._aggregation import global_count
from .._backend import choose_backend, register_backends
from .._library import custom_op
from .._per_token import compute_dtype
from ..logprob.options import RowOptions, in_shape, row_options
from ..logprob.rows import (
    has_unscaled_gradient,
    rows_backward,
    rows_forward,
    rows_unscaled_gradient,
)
from .arguments import (
    check_active_rows,
    check_budget,
    check_linear,
)
from .attach import attach_gradients, fake_gradients, wanted_gradients
from .chunks import Chunks
from .gradients import LogProbGradients, sum_over_ranks
from .reference import reference_logits

register_backends(
    "linear_cross_entropy", cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference")
)

_REDUCTIONS = ("mean", "sum", "none")
_BLOCK_BYTES = 2**22  # of the derivatives of a soft-cap, which need a buffer of their own


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    num_items_in_batch: float | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    active_rows: Tensor | None = None,
    grad_scale: float = 1.0,
    budget_bytes: int | None = None,
    deterministic: bool = False,
    main_grad: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of `labels` from hidden states.

    Args:
        hidden: [..., H]; weight: [V, H] of the same dtype; labels: [...] int32 or int64, those of
            the rows themselves (shift them before).
        temperature, bias, logit_scale, softcap, group, budget_bytes, deterministic: as in
            `linear_token_log_probs`.
        ignore_index: rows with this label are not in the loss; what they hold does not matter. On a
            CPU nothing of them is computed; on a GPU, where the host would have to wait for their
            number, give `active_rows`, or only the other rows.
        label_smoothing: the part of the target that is uniform over the vocabulary, 0 to 1.
        lse_square_scale: factor of the z-loss, lse^2, which is added to the loss.
        reduction: `mean` over the rows with a label (0 if there is none), `sum`, or `none`.
        num_items_in_batch: the divisor of `mean` where the rows are part of a larger batch, a
            number or a tensor of one element (that of the Hugging Face Trainer).
        active_rows: [A] int32 or int64, ascending: no other row has a label.
        grad_scale: the incoming gradient that the gradients are computed for, as in
            `linear_policy_loss`; the backward rescales them if it is another one.
        main_grad: [V, H] float32; the backward adds the weight gradient to it and leaves
            weight.grad None. Not with reduction `none`.
        backend: `cpp`, `cuda`, `triton` or `reference`; None: the best one.

    Returns:
        (loss, z_loss), float32, scalars or [...] with reduction `none`. The loss contains the
        z-loss and is differentiable with respect to hidden, weight and bias, once and in reverse
        mode; z_loss has no gradient. With reduction `none` the backward computes the logits again
        (8 T H V operations).

    Raises:
        IndexError: a label outside [0, V) other than ignore_index; on a GPU its loss is NaN and
            `check_labels` raises.
        ValueError: a wrong shape, dtype, device or number.

    Examples:
        >>> hidden, weight = torch.zeros(2, 8), torch.randn(4, 8)
        >>> loss, _ = linear_cross_entropy(hidden, weight, torch.tensor([0, -100]))
        >>> round(loss.item(), 4)
        1.3863
    """
    op = "linear_cross_entropy"
    labels = check_linear(op, hidden, weight, labels, bias, main_grad, "labels")
    check.choice(op, "reduction", reduction, _REDUCTIONS)
    smoothing = check.number(op, "label_smoothing", label_smoothing, at_least=0, at_most=1)
    lse_square_scale = check.number(op, "lse_square_scale", lse_square_scale, at_least=0)
    grad_scale = check.number(op, "grad_scale", grad_scale, above=0)
    if num_items_in_batch is not None and reduction != "mean":
        raise ValueError(
            f"{op}: num_items_in_batch is given with reduction {reduction!r}; it divides a 'mean'."
        )
    if main_grad is not None and reduction == "none":
        raise ValueError(
            f"{op}: main_grad is given with reduction 'none'; reduce the loss in this call."
        )
    check.integer(op, "ignore_index", ignore_index)
    budget_bytes = check_budget(op, hidden, budget_bytes)
    if active_rows is not None:  # labels of other rows are not read
        active_rows = check_active_rows(op, active_rows, labels)
        inactive = torch.ones_like(labels, dtype=torch.bool)
        inactive.view(-1)[active_rows] = False
        labels = labels.masked_fill(inactive, ignore_index)
    options = row_options(
        op,
        labels,
        weight.shape[0],
        temperature,
        logit_scale,
        softcap,
        ignore_index,
        None,
        group,
        compute_dtype(hidden),
    )
    shape, labels = labels.shape, labels.flatten()
    tensors = (hidden if hidden.dim() == 2 else hidden.flatten(0, -2), weight, bias)
    divisor = global_count(
        op,
        "num_items_in_batch",
        num_items_in_batch if reduction == "mean" else 1,
        labels.device,
        lambda: (labels != ignore_index).sum(dtype=torch.float64),
    )
    backend = choose_backend(op, hidden.device, backend, hidden.dtype)
    if backend == "reference" and not (group or deterministic or main_grad is not None):
        losses = _reference(tensors, labels, options, smoothing, lse_square_scale)
        return _reduced(losses, reduction, divisor, shape)
    incoming = (grad_scale / divisor).to(compute_dtype(hidden)).expand(labels.numel())
    arguments = (
        labels,
        options,
        budget_bytes,
        deterministic,
        incoming,
        smoothing,
        lse_square_scale,
        active_rows,
        main_grad is not None,
    )
    call = _cross_entropy_op
    if reduction == "none":
        losses, *_ = call(*tensors, *arguments, [False] * 3, backend)
        return _reduced(losses, reduction, divisor, shape)
    wanted = wanted_gradients(op, tensors)
    detached = (None if t is None else t.detach() for t in tensors)
    losses, *grads = call(*detached, *arguments, wanted, backend)
    loss, z_loss = _reduced(losses, reduction, divisor, shape)
    if any(wanted):
        loss = attach_gradients(loss, tensors, grads, main_grad, grad_scale)
    return loss, z_loss


def _reduced(
    losses: Tensor, reduction: str, divisor: Tensor, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """Reduce losses and z-losses [2, T]."""
    if reduction == "none":
        loss, z_loss = losses.unbind()
        return in_shape(loss, shape), in_shape(z_loss.detach(), shape)
    loss, z_loss = (losses.sum(1) / divisor).unbind()
    return loss, z_loss.detach()


def _reference(
    tensors: tuple[Tensor, Tensor, Tensor | None],
    labels: Tensor,
    options: RowOptions,
    smoothing: float,
    lse_square_scale: float,
) -> Tensor:
    """Compute losses and z-losses [2, T] in plain PyTorch: the specification."""
    ignored = labels == options.ignore_index
    z = _capped(reference_logits(*tensors, ignored), options) * _per_row(options.factor)
    loss = torch.nn.functional.cross_entropy(
        z, labels, ignore_index=options.ignore_index, reduction="none", label_smoothing=smoothing
    )
    lse = z.logsumexp(1)
    z_loss = (lse_square_scale * lse * lse).masked_fill(ignored, 0)  # the square may overflow
    return torch.stack([loss + z_loss, z_loss])


@custom_op("hybridengine::linear_cross_entropy", mutates_args=())
def _cross_entropy_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    options: RowOptions,
    budget_bytes: int,
    deterministic: bool,
    incoming: Tensor,
    smoothing: float,
    lse_square_scale: float,
    active_rows: Tensor | None,
    wide_weight_grad: bool,
    wanted: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute losses and z-losses [2, T], and the gradients of hidden, weight and bias.

    incoming: [T], the gradients of the losses. Gradients that are not `wanted` are empty.
    """
    ignored = labels == options.ignore_index
    if active_rows is None and check.readable(hidden) and ignored.any():
        active_rows = (~ignored).nonzero().squeeze(1)
    count = labels.numel() if active_rows is None else active_rows.numel()
    chunks = Chunks(
        hidden,
        weight,
        bias,
        budget_bytes,
        deterministic,
        count if any(wanted) else 0,
        options.group,
    )
    results = hidden.new_zeros(2, labels.numel(), dtype=compute_dtype(hidden))
    losses, z_losses = results.unbind()
    row_scale = torch.empty_like(losses)

    of_log_probs = -incoming.masked_fill(ignored, 0)

    def factors(rows: slice | Tensor) -> Tensor:
        return of_log_probs[rows] * row_scale[rows]

    plain = not smoothing and not lse_square_scale
    unscaled = plain and any(wanted) and has_unscaled_gradient(hidden, options.group)
    grads = LogProbGradients(
        chunks,
        labels,
        options,
        backend,
        wanted,
        inactive=ignored,
        wide_weight=wide_weight_grad,
        factors=factors if unscaled else None,
    )
    for rows in chunks.parts(active_rows):
        logits, part = grads.logits(rows), options.select(rows)
        if unscaled:
            out = grads.buffer(logits, logits.shape[0])
            log_probs, _, row_scale[rows] = rows_unscaled_gradient(logits, out, labels[rows], part)
            losses[rows] = -log_probs
            grads.add(out, rows)
            continue
        of_rows = rows_forward(logits, labels[rows], part, False, backend)
        if plain:
            losses[rows] = 0 - of_rows[0]
            if any(wanted):
                grads.add_chunk(logits, rows, of_rows, of_log_probs[rows], None)
            continue
        target = _Target(logits, labels[rows], part, smoothing, lse_square_scale)
        losses[rows], z_losses[rows] = target.losses(of_rows)
        if any(wanted):
            out = grads.buffer(logits, logits.shape[0])
            target.write_gradient(logits, out, of_rows, incoming[rows], backend)
            grads.add(out, rows)
    return results, *grads.finish()


@_cross_entropy_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wide_weight_grad: bool,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    results = hidden.new_empty(2, hidden.shape[0], dtype=compute_dtype(hidden))
    return results, *fake_gradients(hidden, weight, bias, wide_weight_grad, wanted)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    options, budget_bytes, deterministic, _, *settings, active_rows, _, _, ctx.backend = inputs[4:]
    ctx.settings = (budget_bytes, deterministic, *settings)
    options.save(ctx, *inputs[:4], active_rows)


@check.differentiable_once("linear_cross_entropy")
def _backward(ctx: Any, grad_results: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """Compute the chunks again, with the gradients of the losses."""
    wanted = list(ctx.needs_input_grad[:3])
    if not any(wanted) or grad_results is None:
        return ()
    options, (*tensors, labels, active_rows) = RowOptions.restore(ctx)
    budget_bytes, deterministic, *settings = ctx.settings
    *_, hidden, weight, bias = _cross_entropy_op(
        *tensors,
        labels,
        options,
        budget_bytes,
        deterministic,
        grad_results[0].contiguous(),
        *settings,
        active_rows,
        False,
        wanted,
        ctx.backend,
    )
    grads = zip((hidden, weight, bias), wanted, strict=True)
    return tuple(g if want else None for g, want in grads)


_cross_entropy_op.register_autograd(_backward, setup_context=_setup_context)


class _Target:
    """Label smoothing and z-loss of a chunk of rows, on top of the row kernels' log-probs.

    Their gradients are those of log-probs, except for the label's own entry and, with label
    smoothing, a constant in every row: one addition to the chunk.
    """

    def __init__(
        self,
        logits: Tensor,
        labels: Tensor,
        options: RowOptions,
        smoothing: float,
        lse_square_scale: float,
    ) -> None:
        self.labels, self.options = labels, options
        self.smoothing, self.lse_square_scale = smoothing, lse_square_scale
        self.ignored = labels == options.ignore_index
        first: int | Tensor = 0
        self.vocab: int | Tensor = logits.shape[1]  # of all ranks
        if options.vocab_range is not None:
            first, self.vocab = options.vocab_range.unbind()
        here = (labels >= first) & (labels < first + logits.shape[1])
        self.is_own = (here & ~self.ignored)[:, None]  # the label is in this slice
        self.column = torch.where(here, labels - first, 0)[:, None]  # of the label
        self.mean = self._mean(logits) if smoothing else None

    def _mean(self, logits: Tensor) -> Tensor:
        """Return the mean of z over the vocabulary, float64 [rows]."""
        total = logits.new_zeros(logits.shape[0], dtype=torch.float64)
        for rows in self._blocks(logits):
            total[rows] = _capped(logits[rows], self.options).sum(1, dtype=torch.float64)
        return sum_over_ranks(total, self.options.group) * self.options.factor / self.vocab

    def _blocks(self, logits: Tensor) -> list[slice]:
        """Return blocks of rows whose capped logits are small, or one block without soft-cap."""
        count, step = logits.shape[0], max(1, logits.shape[0])
        if self.options.softcap:
            step = max(1, _BLOCK_BYTES // max(1, logits.shape[1] * logits.element_size()))
        return [slice(begin, begin + step) for begin in range(0, count, step)]

    def _lse(self, results: tuple[Tensor, ...]) -> Tensor:
        row_max, log_sum = results[2].unbind(1)
        return row_max * self.options.factor + log_sum

    def losses(self, results: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return losses and z-losses, given the results of `rows_forward`."""
        loss, lse = -results[0], self._lse(results)
        if self.mean is not None:
            loss = (1 - self.smoothing) * loss + self.smoothing * (lse - self.mean).to(loss.dtype)
        z_loss = self.lse_square_scale * lse * lse  # the square may overflow
        loss, z_loss = (x.masked_fill(self.ignored, 0) for x in (loss + z_loss, z_loss))
        return loss, z_loss

    def write_gradient(
        self,
        logits: Tensor,
        out: Tensor,
        results: tuple[Tensor, ...],
        incoming: Tensor,
        backend: str,
    ) -> None:
        """Write the gradient of the logits, for the gradient `incoming` of the losses, to `out`.

        The logits are overwritten.
        """
        incoming = incoming.masked_fill(self.ignored, 0)
        z_part = 2 * self.lse_square_scale * self._lse(results)
        of_log_probs = -incoming * (1 + z_part)
        at_label = (incoming * (z_part + self.smoothing))[:, None]
        uniform = (incoming * self.smoothing / self.vocab)[:, None]
        # The part of the smoothed target nearly cancels p where p is nearly uniform: subtract it
        # before p is rounded to the dtype of `out`. The logits are not needed any more.
        for rows in self._blocks(logits) if self.smoothing else [slice(None)]:
            block, options, column = logits[rows], self.options.select(rows), self.column[rows]
            if block.shape[1]:  # not an empty slice of the vocabulary; before it is overwritten
                at_label[rows] *= _logit_grad(block.gather(1, column), options)
            logit_grad = _logit_grad(block, options) if self.smoothing else None
            rows_backward(
                block,
                block,
                self.labels[rows],
                options,
                [r[rows] for r in results],
                of_log_probs[rows],
                None,
                backend,
            )
            if logit_grad is not None:  # 0 in ignored rows, which may hold NaN
                change = (uniform[rows] * logit_grad).masked_fill(self.ignored[rows, None], 0)
                block.sub_(change)
            if block.shape[1]:
                change = torch.where(self.is_own[rows], at_label[rows], 0)
                block.scatter_add_(1, column, change)
            if out.dtype != logits.dtype:
                out[rows].copy_(block)


def _capped(logits: Tensor, options: RowOptions) -> Tensor:
    """Return y of `RowOptions`; without a soft-cap its factor includes the scale."""
    if options.softcap == 0:
        return logits
    return options.softcap * torch.tanh(logits * (options.logit_scale / options.softcap))


def _per_row(factor: float | Tensor) -> float | Tensor:
    return factor[:, None] if isinstance(factor, Tensor) else factor


def _logit_grad(logits: Tensor, options: RowOptions) -> float | Tensor:
    """Return dz / dx: a factor, or with a soft-cap [rows, ...] as `logits`."""
    factor = _per_row(options.factor)
    if options.softcap == 0:
        return factor
    capped = _capped(logits, options) / options.softcap
    return factor * options.logit_scale * (1 - capped.square())
