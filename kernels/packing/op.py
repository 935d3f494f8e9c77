"""pack and unpack: between padded [B, L, ...] batches and packed tokens [T, ...].

Two operators. `pack_layout` computes where every unmasked token goes, in one pass over the mask.
`move_rows` moves the rows of many tensors, of any widths and dtypes, in one launch, and writes the
fill value in the same pass. Unpacking is `move_rows` by the inverse order, so each is the gradient
of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _check as check
from .._backend import choose_backend, native, register_backends
from .._library import custom_op
from .._per_token import unit_inner_stride
from .packed import Packed, inverse_order
from .reference import layout_reference, move_reference

register_backends("pack_layout", cpu=("cpp", "reference"), cuda=("cuda", "reference"))
register_backends("move_rows", cpu=("cpp", "reference"), cuda=("cuda", "reference"))


def pack(
    tensors: Sequence[Tensor],
    mask: Tensor,
    *,
    shifted: Sequence[int] = (),
    fill_values: Sequence[float] | None = None,
    capacity: int | None = None,
    backend: str | None = None,
) -> Packed:
    """Copy the unmasked tokens out of padded tensors, all tensors in one launch.

    Args:
        tensors: each [B, L, ...], any dtype of up to 8 bytes, any strides; differentiable.
        mask: [B, L] bool or integer, non-zero for tokens, or float of 0 and 1; tokens may be
            anywhere in a row.
        shifted: indices of tensors read one token ahead, as labels are: row t gets the value of
            token t + 1 of its sequence, the last row of each sequence the fill value.
        fill_values: one per tensor, for rows without a token; default 0, for shifted tensors -100.
        capacity: rows of the result; None: the number of tokens. With a capacity nothing waits for
            the GPU: `max_seqlen` is then L, and tokens that do not fit are counted in
            `num_dropped` (on the CPU they are an error).

    Raises:
        ValueError: shapes or devices that do not match the mask, more than 2^31 - 1 tokens, a
            capacity that is too small (CPU), a fill value that its dtype cannot hold, a shifted
            tensor that requires a gradient.
        NotImplementedError: a forward-mode tangent.

    Examples:
        >>> ids = torch.tensor([[1, 2, 0], [3, 4, 5]])
        >>> packed = pack([ids, ids], ids > 0, shifted=[1])
        >>> packed.values[0].tolist(), packed.values[1].tolist(), packed.cu_seqlens.tolist()
        ([1, 2, 3, 4, 5], [2, -100, 4, 5, -100], [0, 2, 5])
    """
    tensors, shifted = list(tensors), list(shifted)
    mask = _check_padded(tensors, mask, shifted)
    shifts = [int(i in shifted) for i in range(len(tensors))]
    fills = list(fill_values) if fill_values is not None else [-100.0 * shift for shift in shifts]
    if len(fills) != len(tensors):
        raise ValueError(
            f"pack: {len(fills)} fill_values for {len(tensors)} tensors; expected one each."
        )
    fills = [_fill("pack", f"fill_values[{i}]", fill, tensors[i]) for i, fill in enumerate(fills)]
    if capacity is not None:
        check.integer("pack", "capacity", capacity, at_least=0)
    mask = unit_inner_stride(mask)
    cu_seqlens, position_ids, indices, inverse, num_dropped, max_seqlen = _pack_layout(
        mask, capacity, backend
    )
    values = _move_rows(
        list(tensors), indices, inverse, position_ids, 2, [indices.size(0)], fills, shifts, backend
    )
    return Packed(
        values=tuple(values),
        cu_seqlens=cu_seqlens,
        position_ids=position_ids,
        max_seqlen=int(max_seqlen) if capacity is None else mask.size(1),
        indices=indices,
        padded_seqlen=mask.size(1),
        num_dropped=num_dropped,
        inverse=inverse,
    )


def unpack(
    tensors: Tensor | Sequence[Tensor],
    packed: Packed,
    *,
    padding_value: float = 0.0,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Copy packed tensors [T, ...] back into [B, L, ...], values and padding in one pass.

    Args:
        tensors: one tensor or several, with the rows of `packed`; differentiable.
        packed: the result of `pack` or `pack_sequences`; L is its `padded_seqlen`.
        padding_value: the value of entries without a token.

    Returns:
        A tensor for a tensor, a tuple for several.

    Raises:
        ValueError: a tensor with another number of rows than `packed` or on another device, or a
            padding value that its dtype cannot hold.
    """
    several = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    named = {f"tensors[{i}]": tensor for i, tensor in enumerate(several)}
    check.same_device("unpack", **{"packed.indices": packed.indices}, **named)
    check.untransformed("unpack", **named)
    num_rows = packed.indices.size(0)
    for i, tensor in enumerate(several):
        if tensor.dim() == 0 or tensor.size(0) != num_rows:
            raise ValueError(
                f"unpack: tensors[{i}] has shape {list(tensor.shape)}; expected {num_rows} rows, "
                "as many as packed.indices"
            )
        _fill("unpack", "padding_value", padding_value, tensor)
    shape = [packed.batch_size, packed.padded_seqlen]
    inverse = packed.inverse
    if inverse is None:
        inverse = inverse_order(packed.indices, shape[0] * shape[1])
    values = move_rows(
        several, inverse, packed.indices, 1, shape, fill=float(padding_value), backend=backend
    )
    return values[0] if isinstance(tensors, Tensor) else tuple(values)


def move_rows(
    sources: Sequence[Tensor | None],
    index: Tensor,
    inverse: Tensor,
    leading: int,
    out_shape: Sequence[int],
    *,
    fill: float = 0.0,
    backend: str | None = None,
) -> list[Tensor]:
    """Copy rows of several tensors by an index, in one launch; differentiable.

    Args:
        sources: tensors whose first `leading` dimensions are their n rows, any dtype of up to 8
            bytes.
        index: int64, as many as `out_shape` has rows: the row of the sources that a row of the
            results is, -1 for none. No row is taken twice.
        inverse: int64 [n], the row of the results that a row of the sources becomes, or -1
            (`inverse_order(index, n)`); the gradient moves rows by it.
        out_shape: the leading dimensions of the results.
        fill: the value of rows without a source.

    Neither index is checked: they are for callers that made them.

    Examples:
        >>> index = torch.tensor([2, -1, 0])
        >>> move_rows([torch.arange(3)], index, inverse_order(index, 3), 1, [3], fill=-1)
        [tensor([ 2, -1,  0])]
    """
    fills, shifts = [fill] * len(sources), [0] * len(sources)
    return _move_rows(sources, index, inverse, None, leading, out_shape, fills, shifts, backend)


def _check_padded(tensors: list[Tensor], mask: Tensor, shifted: list[int]) -> Tensor:
    """Check that the tensors fit the mask; return the mask in a dtype that the operator takes."""
    if mask.dim() != 2:
        raise ValueError(f"pack: mask has shape {list(mask.shape)}; expected [B, L]")
    named = {f"tensors[{i}]": tensor for i, tensor in enumerate(tensors)}
    check.same_device("pack", mask=mask, **named)
    check.untransformed("pack", mask=mask, **named)
    for name, tensor in named.items():
        if tensor.shape[:2] != mask.shape:
            raise ValueError(
                f"pack: {name} has shape {list(tensor.shape)}; expected it to begin with "
                f"{list(mask.shape)} like the mask"
            )
    for i in shifted:
        check.integer("pack", "an index in shifted", i)
        if not 0 <= i < len(tensors):
            raise ValueError(f"pack: shifted names tensor {i}, but there are {len(tensors)}")
        if tensors[i].requires_grad:
            raise ValueError(
                f"pack: tensors[{i}] is shifted and requires a gradient; shifting is for labels"
            )
    if mask.dtype in (torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64):
        return mask
    return check.mask("pack", "mask", mask)


def _fill(op: str, name: str, value: float, tensor: Tensor) -> float:
    """Check that the dtype of `tensor` holds `value`; return it as a float."""
    value = check.real(op, name, value)
    if tensor.is_floating_point() or tensor.is_complex():
        return value
    if tensor.dtype == torch.bool:
        least, most = 0, 1
    else:
        least, most = torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max
    if not least <= value <= most or value != int(value):
        raise ValueError(
            f"{op}: {name} is {value}, which {tensor.dtype} does not hold; expected an integer "
            f"of {least} to {most}."
        )
    return value


@custom_op("hybridengine::pack_layout", mutates_args=())
def _pack_layout(
    mask: Tensor, capacity: int | None, backend: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute (cu_seqlens, position_ids, indices, inverse, num_dropped, max_seqlen on the CPU)."""
    if choose_backend("pack_layout", mask.device, backend) == "reference":
        return layout_reference(mask, capacity)
    *tensors, max_seqlen = native().pack_layout(mask, -1 if capacity is None else capacity)
    return *tensors, torch.scalar_tensor(max_seqlen, dtype=torch.int64)


@_pack_layout.register_fake
def _(mask: Tensor, capacity: int | None) -> tuple[Tensor, ...]:
    rows = torch.library.get_ctx().new_dynamic_size() if capacity is None else capacity

    def longs(*shape: Any) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=mask.device)

    cu_seqlens = torch.empty(mask.size(0) + 1, dtype=torch.int32, device=mask.device)
    max_seqlen = torch.empty((), dtype=torch.int64)
    return cu_seqlens, longs(rows), longs(rows), longs(mask.numel()), longs(), max_seqlen


@custom_op("hybridengine::move_rows", mutates_args=())
def _move_rows(
    sources: list[Tensor],
    index: Tensor,
    inverse: Tensor,
    position_ids: Tensor | None,
    leading: int,
    out_shape: Sequence[int],
    fills: Sequence[float],
    shifts: Sequence[int],
    backend: str | None,
) -> list[Tensor]:
    """Compute out.flatten()[t] = source.flatten()[index[t]] per tensor, its fill for index -1.

    leading: the number of leading dimensions of a source that are its rows; out_shape: the leading
      dimensions of the results.
    inverse: position of every source row in `index` or -1, for the gradient.
    """
    if choose_backend("move_rows", index.device, backend) == "reference":
        return [
            move_reference(source, index, position_ids, leading, out_shape, fill, shift)
            for source, fill, shift in zip(sources, fills, shifts, strict=True)
        ]
    return native().move_rows(sources, index, position_ids, leading, out_shape, fills, shifts)


@_move_rows.register_fake
def _(sources: list[Tensor], leading: int, out_shape: Sequence[int]) -> list[Tensor]:
    return [source.new_empty([*out_shape, *source.shape[leading:]]) for source in sources]


def _setup_move(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    sources, index, inverse, _, leading, out_shape, _, _, backend = inputs
    ctx.set_materialize_grads(False)  # no zeros for results without a gradient
    ctx.save_for_backward(index, inverse)
    ctx.shape, ctx.leading_out = list(sources[0].shape[:leading]), len(out_shape)
    ctx.backend = backend


def _backward_move(ctx: Any, grads: list[Tensor | None]) -> tuple:
    index, inverse = ctx.saved_tensors
    given = [grad for grad in grads if grad is not None]
    if not given:
        return ()
    moved = iter(move_rows(given, inverse, index, ctx.leading_out, ctx.shape, backend=ctx.backend))
    return ([None if grad is None else next(moved) for grad in grads],)


_move_rows.register_autograd(_backward_move, setup_context=_setup_move)
