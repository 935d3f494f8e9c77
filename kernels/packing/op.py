"""Packing: padded [B, L, ...] batches and ragged lists to flat [T, ...], and back.

Two operators. `pack_layout` finds where every kept token goes (one pass over the mask);
`move_rows` moves the rows of many tensors, of any widths and dtypes, there in one launch and
writes padding and values in the same pass. Unpacking is `move_rows` by the inverse order, so each
is the other's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from .. import _check as check
from .._backend import choose_backend, native, register_backends
from .reference import layout_reference, move_reference

register_backends("pack_layout", cpu=("cpp", "reference"), cuda=("cuda", "reference"))
register_backends("move_rows", cpu=("cpp", "reference"), cuda=("cuda", "reference"))

_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Packed:
    """T tokens of N sequences; sequence n is rows cu_seqlens[n] to cu_seqlens[n + 1].

    With a capacity, T is the capacity; rows past cu_seqlens[-1] belong to no sequence and hold
    the fill value.
    """

    values: tuple[Tensor, ...]  # each [T, ...]
    cu_seqlens: Tensor  # int32 [N + 1]
    position_ids: Tensor  # int64 [T], counts from 0 in every sequence
    max_seqlen: int  # with a capacity: the padded length, an upper bound
    indices: Tensor  # int64 [T], row of the flattened [N * padded_seqlen] batch; -1: no token
    padded_seqlen: int
    num_dropped: Tensor  # int64 [], tokens that did not fit the capacity (always 0 on the CPU)
    inverse: Tensor | None  # int64 [N * padded_seqlen], row of T or -1; None: made when needed

    @property
    def batch_size(self) -> int:
        return self.cu_seqlens.numel() - 1


def pack(
    tensors: Sequence[Tensor],
    mask: Tensor,
    *,
    shifted: Sequence[int] = (),
    fill_values: Sequence[float] | None = None,
    capacity: int | None = None,
    backend: str | None = None,
) -> Packed:
    """Take the tokens that `mask` keeps out of padded tensors, all tensors in one launch.

    Args:
        tensors: each [B, L, ...], any dtype of up to 8 bytes, any strides; differentiable.
        mask: [B, L] bool or integer, non-zero keeps the token, or float, 1 keeps and 0 drops it;
            kept tokens may lie anywhere.
        shifted: numbers of the tensors read one token ahead, as labels are: row t gets the value
            of token t + 1 of its sequence, the last row of each sequence the fill value.
        fill_values: one per tensor, for rows without a token; default 0, for shifted tensors -100.
        capacity: rows of the result; None: as many as tokens are kept. Given, nothing waits for
            the GPU: `max_seqlen` is then L and tokens that do not fit are counted in `num_dropped`
            (on the CPU they are an error).

    Raises:
        ValueError: shapes or devices that do not match the mask, more than 2^31 - 1 tokens, a
            capacity that is too small (CPU), a fill value that its dtype does not hold, a shifted
            tensor that requires a gradient. NotImplementedError: a forward-mode tangent.

    Example:
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
    if mask.size(1) > 1 and mask.stride(1) != 1:
        mask = mask.contiguous()
    cu_seqlens, position_ids, indices, inverse, num_dropped, longest = (
        torch.ops.hybridengine.pack_layout(mask, capacity, backend)
    )
    values = torch.ops.hybridengine.move_rows(
        list(tensors), indices, inverse, position_ids, 2, [indices.size(0)], fills, shifts, backend
    )
    return Packed(
        values=tuple(values),
        cu_seqlens=cu_seqlens,
        position_ids=position_ids,
        max_seqlen=int(longest) if capacity is None else mask.size(1),
        indices=indices,
        padded_seqlen=mask.size(1),
        num_dropped=num_dropped,
        inverse=inverse,
    )


def pack_sequences(*fields: Sequence, device: torch.device | str | None = None) -> Packed:
    """Concatenate ragged sequences.

    Args:
        fields: one or more lists of N sequences each. A sequence is a list of numbers (integers
            become int64, floats float32) or a tensor [l, ...]; sequence n has the same length in
            every field. Differentiable where the sequences are tensors.
        device: where the result lies; default: where the tensors are, the CPU for lists.

    Raises:
        ValueError: fields of different lengths (the message names the sequence) or devices, or more
            than 2^31 - 1 tokens.

    Example:
        >>> packed = pack_sequences([[5, 6, 7], [8]])
        >>> packed.values[0].tolist(), packed.position_ids.tolist(), packed.max_seqlen
        ([5, 6, 7, 8], [0, 1, 2, 0], 3)
    """
    lengths = _ragged_lengths(fields)
    values = tuple(_concatenate(field, device) for field in fields)
    check.same_device("pack_sequences", **{f"fields[{i}]": v for i, v in enumerate(values)})
    where = values[0].device
    lengths_N = torch.tensor(lengths, dtype=torch.int64)
    starts_N = lengths_N.cumsum(0) - lengths_N
    sequence_T = torch.repeat_interleave(lengths_N)
    position_ids = torch.arange(sum(lengths)) - starts_N[sequence_T]
    max_seqlen = max(lengths, default=0)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = lengths_N.cumsum(0)
    return Packed(
        values=values,
        cu_seqlens=cu_seqlens.to(where),
        position_ids=position_ids.to(where),
        max_seqlen=max_seqlen,
        indices=(sequence_T * max_seqlen + position_ids).to(where),
        padded_seqlen=max_seqlen,
        num_dropped=torch.zeros((), dtype=torch.int64, device=where),
        inverse=None,
    )


def unpack(
    tensors: Tensor | Sequence[Tensor],
    packed: Packed,
    *,
    padding_value: float = 0.0,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Put packed tensors [T, ...] back into [B, L, ...], values and padding in one pass.

    Args:
        tensors: one tensor or several, with the rows of `packed`; differentiable.
        packed: what `pack` or `pack_sequences` returned (L is its `padded_seqlen`).
        padding_value: what the places without a token hold.

    Returns:
        A tensor for a tensor, a tuple for several.

    Raises:
        ValueError: a tensor with another number of rows than `packed` or on another device, or a
            padding value that its dtype does not hold.
    """
    single = isinstance(tensors, Tensor)
    several = [tensors] if single else list(tensors)
    named = {f"tensors[{i}]": tensor for i, tensor in enumerate(several)}
    check.same_device("unpack", **{"packed.indices": packed.indices}, **named)
    check.no_forward_ad("unpack", **named)
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
    values = torch.ops.hybridengine.move_rows(
        several,
        inverse,
        packed.indices,
        None,
        1,
        shape,
        [float(padding_value)] * len(several),
        [0] * len(several),
        backend,
    )
    return values[0] if single else tuple(values)


def inverse_order(indices: Tensor, num_rows: int) -> Tensor:
    """int64 [num_rows]: the place in `indices` of every row, -1 for rows it does not name."""
    inverse = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=indices.device)
    places = torch.arange(indices.size(0), device=indices.device)
    inverse[torch.where(indices < 0, num_rows, indices)] = places  # -1 lands in the extra row
    return inverse[:num_rows]


def _check_padded(tensors: list[Tensor], mask: Tensor, shifted: list[int]) -> Tensor:
    """The mask as the operator takes it, after checking that the tensors fit it."""
    if mask.dim() != 2:
        raise ValueError(f"pack: mask has shape {list(mask.shape)}; expected [B, L]")
    named = {f"tensors[{i}]": tensor for i, tensor in enumerate(tensors)}
    check.same_device("pack", mask=mask, **named)
    check.no_forward_ad("pack", **named)
    for name, tensor in named.items():
        if tensor.shape[:2] != mask.shape:
            raise ValueError(
                f"pack: {name} has shape {list(tensor.shape)}; expected it to begin with "
                f"{list(mask.shape)} like the mask"
            )
    for i in shifted:
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
    """`value` as a float, after checking that the dtype of `tensor` holds it."""
    value = float(value)
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


def _ragged_lengths(fields: Sequence[Sequence]) -> list[int]:
    if not fields:
        raise ValueError("pack_sequences: no field given; expected at least one list of sequences")
    lengths = [len(sequence) for sequence in fields[0]]
    for f, field in enumerate(fields):
        if len(field) != len(lengths):
            raise ValueError(
                f"pack_sequences: field {f} has {len(field)} sequences, field 0 {len(lengths)}"
            )
        for n, sequence in enumerate(field):
            if len(sequence) != lengths[n]:
                raise ValueError(
                    f"pack_sequences: sequence {n} has length {len(sequence)} in field {f} and "
                    f"{lengths[n]} in field 0"
                )
    if sum(lengths) > _MAX_TOKENS:
        raise ValueError(
            f"pack_sequences: {sum(lengths)} tokens do not fit cu_seqlens, which is int32; "
            "pack fewer sequences at once"
        )
    return lengths


def _concatenate(field: Sequence, device: torch.device | str | None) -> Tensor:
    tensors = [sequence for sequence in field if isinstance(sequence, Tensor)]
    if tensors:
        if len(tensors) != len(field):
            raise ValueError("pack_sequences: a field mixes tensors and lists; use one kind")
        return torch.cat(tensors).to(device=device)
    flat = torch.tensor(list(chain.from_iterable(field)), device=device)
    return flat if flat.numel() else flat.to(torch.int64)


@torch.library.custom_op("hybridengine::pack_layout", mutates_args=())
def _pack_layout(
    mask: Tensor, capacity: int | None, backend: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(cu_seqlens, position_ids, indices, inverse, num_dropped, max_seqlen on the CPU)."""
    if choose_backend("pack_layout", mask.device, backend) == "reference":
        return layout_reference(mask, capacity)
    *tensors, longest = native().pack_layout(mask, -1 if capacity is None else capacity)
    return *tensors, torch.tensor(longest)


@_pack_layout.register_fake
def _(mask, capacity, backend):
    rows = torch.library.get_ctx().new_dynamic_size() if capacity is None else capacity
    longs = {"dtype": torch.int64, "device": mask.device}
    return (
        torch.empty(mask.size(0) + 1, dtype=torch.int32, device=mask.device),
        torch.empty(rows, **longs),
        torch.empty(rows, **longs),
        torch.empty(mask.numel(), **longs),
        torch.empty((), **longs),
        torch.empty((), dtype=torch.int64),
    )


@torch.library.custom_op("hybridengine::move_rows", mutates_args=())
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
    """out.flatten()[t] = source.flatten()[index[t]] per tensor, its fill where index[t] is -1.

    leading: how many leading dimensions of every source count rows; out_shape: those of the
    results. inverse: the place of every source row in `index` or -1, for the gradient.
    """
    if choose_backend("move_rows", index.device, backend) == "reference":
        return [
            move_reference(source, index, position_ids, leading, out_shape, fill, shift)
            for source, fill, shift in zip(sources, fills, shifts, strict=True)
        ]
    return native().move_rows(
        sources, index, position_ids, leading, list(out_shape), list(fills), list(shifts)
    )


@_move_rows.register_fake
def _(sources, index, inverse, position_ids, leading, out_shape, fills, shifts, backend):
    return [source.new_empty([*out_shape, *source.shape[leading:]]) for source in sources]


def _setup_move(ctx, inputs, output):
    sources, index, inverse, _, leading, out_shape, _, _, backend = inputs
    ctx.set_materialize_grads(False)  # tensors that nobody differentiates are not moved back
    ctx.save_for_backward(index, inverse)
    ctx.shape, ctx.leading_out = list(sources[0].shape[:leading]), len(out_shape)
    ctx.backend = backend


def _backward_move(ctx, grads):
    index, inverse = ctx.saved_tensors
    wanted = [i for i, grad in enumerate(grads) if grad is not None]
    result = [None] * len(grads)
    if wanted:
        moved = torch.ops.hybridengine.move_rows(
            [grads[i] for i in wanted],
            inverse,
            index,
            None,
            ctx.leading_out,
            ctx.shape,
            [0.0] * len(wanted),
            [0] * len(wanted),
            ctx.backend,
        )
        for i, grad in zip(wanted, moved, strict=True):
            result[i] = grad
    return result, None, None, None, None, None, None, None, None


_move_rows.register_autograd(_backward_move, setup_context=_setup_move)
