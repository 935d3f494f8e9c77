"""How a row of logits becomes a distribution: the options that all log-prob operators share."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check as check
from .._backend import native

# RowOptions as the arguments of an operator.
ROW_SCHEMA = (
    "float temperature, Tensor? temperatures, float logit_scale, float softcap, int ignore_index, "
    "Tensor? keep_mask, Tensor? vocab_range, str group"
)


class RowOptions(NamedTuple):
    """z = softcap * tanh(logit_scale * x / softcap) / temperature, over the entries kept."""

    temperature: float
    temperatures: Tensor | None  # [T] float32; then temperature is 1
    logit_scale: float
    softcap: float  # 0: none
    ignore_index: int
    keep_mask: Tensor | None  # [T, V] bool
    vocab_range: Tensor | None  # with a group: int64 [2], see _logprob_parallel.vocab_range
    group: str  # name of the process group, "" for none

    @staticmethod
    def of(scalars: tuple, tensors: tuple[Tensor | None, ...]) -> RowOptions:
        """The inverse of `scalars` and `tensors`."""
        temperature, logit_scale, softcap, ignore_index, group = scalars
        temperatures, keep_mask, vocab_range = tensors
        return RowOptions(
            temperature, temperatures, logit_scale, softcap, ignore_index, keep_mask, vocab_range,
            group,
        )  # fmt: skip

    def scalars(self) -> tuple:
        """What is not a tensor."""
        return self.temperature, self.logit_scale, self.softcap, self.ignore_index, self.group

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What is one."""
        return self.temperatures, self.keep_mask, self.vocab_range

    def rows(self, index) -> RowOptions:
        """The options of some rows: a slice, or an index tensor."""
        temperatures, keep_mask = (
            None if tensor is None else tensor[index]
            for tensor in (self.temperatures, self.keep_mask)
        )
        return self._replace(temperatures=temperatures, keep_mask=keep_mask)

    @property
    def factor(self) -> float | Tensor:
        """z = y * factor."""
        temperature = self.temperature if self.temperatures is None else self.temperatures
        return (self.logit_scale if self.softcap == 0 else 1.0) / temperature

    def native(self):
        """The same for the extension."""
        return native().LogProbOptions(
            self.temperature,
            self.temperatures,
            self.logit_scale,
            self.softcap,
            self.ignore_index,
            self.keep_mask,
            self.vocab_range,
        )


def in_shape(rows: Tensor, shape: torch.Size) -> Tensor:
    """Results [T] as [...]; where that is their shape already, themselves: FSDP2 warns of a module
    that returns a view."""
    return rows if rows.shape == shape else rows.view(shape)


def row_options(
    op: str,
    token_ids: Tensor,
    vocab: int,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    keep_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> RowOptions:
    """The users' arguments of operator `op`, checked.

    token_ids: int64, of the shape of the rows. vocab: size of this rank's slice.
    """
    check.integer(op, "ignore_index", ignore_index)
    sizes: check.Sizes = {"...": (tuple(token_ids.shape), "token_ids"), "V": (vocab, "logits")}
    temperatures = None
    if isinstance(temperature, Tensor):
        temperatures = _per_token(op, temperature, token_ids, ignore_index, sizes)
        temperature = 1.0
    if keep_mask is not None:
        check.shape(op, "keep_mask", keep_mask, "... V", sizes)
        keep_mask = check.mask(op, "keep_mask", keep_mask)
        keep_mask = keep_mask.reshape(token_ids.numel(), vocab)
        if vocab > 1 and keep_mask.stride(1) != 1:
            keep_mask = keep_mask.contiguous()
    check.same_device(op, token_ids=token_ids, temperature=temperatures, keep_mask=keep_mask)
    if group is None:
        vocab_range = None
    else:
        name = group.group_name
        vocab_range = torch.ops.hybridengine.vocab_range(token_ids, vocab, name)
    return RowOptions(
        check.number(op, "temperature", temperature, above=0),
        temperatures,
        check.number(op, "logit_scale", logit_scale, above=0),
        0.0 if softcap is None else check.number(op, "softcap", softcap, above=0),
        ignore_index,
        keep_mask,
        vocab_range,
        "" if group is None else group.group_name,
    )


def _per_token(op: str, temperature: Tensor, token_ids: Tensor, ignore_index: int, sizes) -> Tensor:
    """[T] float32; a value that is no temperature is refused (CPU) or becomes NaN."""
    check.shape(op, "temperature", temperature, "...", sizes)
    check.dtype(op, "temperature", temperature)
    if temperature.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op}: temperature requires a gradient, which is not computed; detach it."
        )
    flat = temperature.detach().float().flatten().contiguous()
    good = (flat > 0) & (flat < torch.inf)
    if not check.readable(flat):
        return torch.where(good, flat, torch.nan)
    wrong = ~good & (token_ids.flatten() != ignore_index)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"{op}: temperature[{row}] is {flat[row].item()}; expected finite numbers above 0."
        )
    return flat
