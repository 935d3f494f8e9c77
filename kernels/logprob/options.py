"""The options that all log-prob operators share: how a row of logits becomes a distribution."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check as check
from .._backend import native
from .._per_token import unit_inner_stride


class RowOptions(NamedTuple):
    """z = softcap * tanh(logit_scale * x / softcap) / temperature, over the unmasked entries."""

    temperature: float
    temperatures: Tensor | None  # [T], like the computed logits; temperature is 1 then
    logit_scale: float
    softcap: float  # 0: none
    ignore_index: int
    vocab_mask: Tensor | None  # [T, V] bool
    vocab_range: Tensor | None  # with a group: int64 [2], see vocab_parallel.vocab_range
    negate: bool  # log-probs and their gradients are the negative ones
    group: str  # name of the process group; "": none

    def save(self, ctx: Any, *tensors: Tensor | None) -> None:
        """Save the options and `tensors` for the backward, where `restore` returns them."""
        ctx.options = self._with_tensors(None, None, None)
        ctx.save_for_backward(self.temperatures, self.vocab_mask, self.vocab_range, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def restore(ctx: Any) -> tuple[RowOptions, list[Any]]:
        """Return the options and the tensors that `save` saved."""
        temperatures, vocab_mask, vocab_range, *tensors = ctx.saved_tensors
        return ctx.options._with_tensors(temperatures, vocab_mask, vocab_range), tensors

    def _with_tensors(
        self, temperatures: Tensor | None, vocab_mask: Tensor | None, vocab_range: Tensor | None
    ) -> RowOptions:
        """As `_replace`, which takes several times as long."""
        if self[1] is temperatures and self[5] is vocab_mask and self[6] is vocab_range:
            return self
        temperature, _, logit_scale, softcap, ignore_index, _, _, negate, group = self
        given = temperature, temperatures, logit_scale, softcap, ignore_index
        return RowOptions(*given, vocab_mask, vocab_range, negate, group)

    def select(self, rows: slice | Tensor) -> RowOptions:
        """Return the options of some rows: a slice, or an index tensor."""
        temperatures, vocab_mask = (
            None if tensor is None else tensor[rows]
            for tensor in (self.temperatures, self.vocab_mask)
        )
        return self._with_tensors(temperatures, vocab_mask, self.vocab_range)

    @property
    def factor(self) -> float | Tensor:
        """The factor in z = y * factor."""
        temperature = self.temperature if self.temperatures is None else self.temperatures
        return (self.logit_scale if self.softcap == 0 else 1.0) / temperature

    def native(self) -> Any:
        """Return the same options as a `hybridengine._C.LogProbOptions`."""
        return native().LogProbOptions(*self[:-1])  # it needs no group


def row_options(
    op: str,
    token_ids: Tensor,
    vocab: int,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.float32,
    negate: bool = False,
) -> RowOptions:
    """Check the arguments of operator `op` and return them as RowOptions.

    Args:
        token_ids: int64, in the shape of the rows.
        vocab: size of this rank's slice.
        dtype: the dtype in which the logits are computed.
        negate: of RowOptions.
    """
    check.integer(op, "ignore_index", ignore_index)
    temperatures = None
    if isinstance(temperature, Tensor):
        temperatures = _per_token(op, temperature, token_ids, ignore_index, dtype)
        check.same_device(op, token_ids=token_ids, temperature=temperatures)
        temperature = 1.0
    if vocab_mask is not None:
        check.same_device(op, token_ids=token_ids, vocab_mask=vocab_mask)
        sizes: check.Sizes = {"...": (tuple(token_ids.shape), "token_ids"), "V": (vocab, "logits")}
        check.shape(op, "vocab_mask", vocab_mask, "... V", sizes)
        vocab_mask = check.mask(op, "vocab_mask", vocab_mask)
        vocab_mask = unit_inner_stride(vocab_mask.reshape(token_ids.numel(), vocab))
    name, vocab_range = "", None
    if group is not None:
        name = group.group_name
        vocab_range = torch.ops.hybridengine.vocab_range(token_ids, vocab, name)
    return RowOptions(
        check.number(op, "temperature", temperature, above=0),
        temperatures,
        check.number(op, "logit_scale", logit_scale, above=0),
        0.0 if softcap is None else check.number(op, "softcap", softcap, above=0),
        ignore_index,
        vocab_mask,
        vocab_range,
        negate,
        name,
    )


def _per_token(
    op: str,
    temperature: Tensor,
    token_ids: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return [T] in `dtype`. A wrong value raises an error on a CPU and becomes NaN elsewhere."""
    sizes: check.Sizes = {"...": (tuple(token_ids.shape), "token_ids")}
    check.shape(op, "temperature", temperature, "...", sizes)
    check.dtype(op, "temperature", temperature)
    if temperature.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op}: temperature requires a gradient, which is not computed; detach it."
        )
    flat = temperature.detach().to(dtype).flatten().contiguous()
    good = (flat > 0) & (flat < torch.inf)
    if not (check.readable(flat) and check.readable(token_ids)):
        return torch.where(good, flat, torch.nan)
    wrong = ~good & (token_ids.flatten() != ignore_index)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"{op}: temperature[{row}] is {flat[row].item()}; expected finite numbers above 0."
        )
    return flat


def in_shape(rows: Tensor, shape: torch.Size) -> Tensor:
    """Return results [T] as [...]: FSDP2 warns of views, so only if the shape differs."""
    return rows if rows.shape == shape else rows.view(shape)
