"""Where the contents of tensors come from, noted while a program runs over meta tensors.

`CopyRecorder` follows every storage: what `copy_`, `clone`, a cast, `cat` or `stack` brought into
it, as copies from named tensors; what `fill_` set; or that something was computed, and from what.
Views need no following: they share their storage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridengine.sharding.copies import Copy, compose
from hybridengine.sharding.geometry import NotABlock, contiguous_strides

__all__ = ["Contents", "CopyRecorder"]

_aten = torch.ops.aten
_Region = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, sizes, strides, in elements
_CLONES = {_aten.clone, _aten._to_copy, _aten._pin_memory}
_FILLS = dict.fromkeys((_aten.zeros, _aten.zeros_like, _aten.new_zeros), 0.0)
_FILLS |= dict.fromkeys((_aten.ones, _aten.ones_like, _aten.new_ones), 1.0)
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided}
_EMPTY |= {_aten.new_empty, _aten.new_empty_strided}
_SCALAR_READS = {_aten._local_scalar_dense, _aten.item}


@dataclass
class Contents:
    """What one storage holds.

    copies: from named tensors, in the order they were made. fills: (region, value), overwritten by
    copies. computed: why some of it is neither, or None. origins: names of all tensors it
    depends on. rounded: a dtype it went through that holds less than what was copied. renewed: a
    fill has replaced everything that was there before.
    """

    copies: list[Copy] = field(default_factory=list)
    fills: list[tuple[_Region, float]] = field(default_factory=list)
    computed: str | None = None
    origins: set[str] = field(default_factory=set)
    rounded: torch.dtype | None = None
    renewed: bool = False


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _meets(region: _Region, copies: list[Copy]) -> bool:
    """Whether a region holds elements, or possibly holds elements, that copies wrote."""
    offset, sizes, strides = region
    read = Copy("", "", offset, 0, sizes, strides, contiguous_strides(sizes))
    try:
        return bool(compose(read, copies))
    except NotABlock:
        return True


def _region(tensor: torch.Tensor) -> _Region:
    return tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


class CopyRecorder(TorchDispatchMode):
    """While active, follows what is written into every tensor made from `sources`.

    sources: name → meta tensor, contiguous, whose contents are the unknowns.
    destinations: name → meta tensor; what is copied into one carries its name.
    """

    def __init__(
        self,
        sources: Mapping[str, torch.Tensor],
        destinations: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._sources = {_key(t): name for name, t in sources.items()}
        self._names = {_key(t): name for name, t in (destinations or {}).items()}
        self._contents: dict[int, Contents] = {}
        self._alive: list[object] = list(sources.values())  # a freed storage's key comes back
        self._scalars: dict[float, torch.Tensor] = {}  # stand-in of an element read → its tensor

    def contents(self, storage: torch.UntypedStorage) -> Contents | None:
        """What was written into `storage`; None where nothing was."""
        return self._contents.get(storage._cdata)

    def reads(self, tensor: torch.Tensor, name: str) -> Contents:
        """The contents of `tensor` as those of a contiguous tensor called `name`."""
        whole = Contents()
        shape = tuple(tensor.shape)
        self._transfer(tensor, whole, (0, shape, contiguous_strides(shape)), name, tensor.dtype)
        return whole

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs, op = kwargs or {}, func.overloadpacket
        if op in _SCALAR_READS and self._origins(args[:1]):
            stand_in = math.pi * (1 + len(self._scalars))  # no constant of a loader
            self._scalars[stand_in] = args[0]
            return stand_in
        known = {_key(t) for t in _tensors((args, kwargs))}
        if func is _aten.copy_.default and args[1].is_meta:
            result = args[0]  # nothing to copy; and a small destination may be real
        elif op is _aten._to_copy and args[0].is_meta:
            result = func(*args, **kwargs | {"device": "meta"})
        else:
            result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._note_write(func, args, kwargs)
            return result
        fresh = [t for t in _tensors(result) if _key(t) not in known]
        if fresh:
            self._note_creation(func, fresh, args, kwargs)
        return result

    def _note_creation(self, func, fresh, args, kwargs) -> None:  # type: ignore[no-untyped-def]
        self._alive += fresh
        made, op, dim = fresh[0], func.overloadpacket, args[1] if len(args) > 1 else 0
        if op in _CLONES:
            self._note_copy(made, args[0])
        elif op is _aten.cat:
            for place, part in zip(
                made.split([p.shape[dim] for p in args[0]], dim), args[0], strict=True
            ):
                self._note_copy(place, part)
        elif op is _aten.stack:
            for place, part in zip(made.unbind(dim), args[0], strict=True):
                self._note_copy(place, part)
        elif op in _FILLS:
            self._note_fill(made, _FILLS[op])
        elif op not in _EMPTY:
            for tensor in fresh:
                self._note_computed(tensor, _name(func), (args, kwargs))

    def _note_write(self, func, args, kwargs) -> None:  # type: ignore[no-untyped-def]
        written = args[0] if args else None
        if not isinstance(written, torch.Tensor):
            return
        if func is _aten.copy_.default:
            self._note_copy(written, args[1].expand(written.shape))
        elif func is _aten.fill_.Scalar:
            self._note_fill(written, float(args[1]))
        elif func is _aten.zero_.default:
            self._note_fill(written, 0.0)
        elif self._origins((args, kwargs)) or _key(written) in self._contents:
            self._note_computed(written, _name(func), (args, kwargs))

    def _note_fill(self, written: torch.Tensor, value: float) -> None:
        if value in self._scalars:
            self._note_copy(written, self._scalars[value].reshape(()).expand(written.shape))
        elif value not in (0.0, 1.0) and self._scalars:
            read = list(self._scalars.values())
            self._note_computed(written, "Python from an element", read)
        else:
            if written.untyped_storage().nbytes() == written.nbytes:
                self._contents[_key(written)] = Contents(renewed=True)
            contents = self._contents.setdefault(_key(written), Contents())
            if _meets(_region(written), contents.copies):
                contents.computed = contents.computed or "constants are written over copies"
            contents.fills.append((_region(written), value))

    def _note_computed(self, written: torch.Tensor, how: str, arguments: object) -> None:
        contents = self._contents.setdefault(_key(written), Contents())
        held = [self._contents.get(_key(t)) for t in _tensors(arguments)]
        before = [c.computed for c in held if c is not None and c.computed]
        contents.computed = f"{before[0]}, {how}" if before else f"computed by {how}"
        contents.origins |= self._origins(arguments)

    def _note_copy(self, written: torch.Tensor, read: torch.Tensor) -> None:
        contents = self._contents.setdefault(_key(written), Contents())
        name = self._names.get(_key(written), "")
        self._transfer(read, contents, _region(written), name, written.dtype)

    def _transfer(
        self,
        read: torch.Tensor,
        into: Contents,
        region: _Region,
        destination: str,
        dtype: torch.dtype,
    ) -> None:
        """Add to `into` what reaches `region` when `read` is copied there."""
        offset, sizes, strides = region
        source = self._sources.get(_key(read), "")
        copy = Copy(
            source, destination, read.storage_offset(), offset, sizes, tuple(read.stride()), strides
        )
        held = self._contents.get(_key(read))
        if not _holds(dtype, read.dtype):
            into.rounded = dtype
        if held is None:
            if source:
                into.copies.append(copy)
                into.origins.add(source)
            return
        into.origins |= held.origins | ({source} if source else set())
        reason = held.computed
        if not reason and held.rounded not in (None, dtype):
            reason = f"rounded to {held.rounded} on the way"
        if not reason and source and not held.renewed:
            reason = "written over in part by the loader"
        if reason:
            into.computed = into.computed or reason
            return
        try:
            arrived = compose(copy, held.copies)
        except NotABlock as error:
            into.computed = into.computed or f"reordered: {error}"
            return
        if sum(c.numel for c in arrived) < copy.numel:
            values = {value for _, value in held.fills}
            if len(values) != 1:
                into.computed = into.computed or "not wholly made of the checkpoint"
                return
            into.fills.append((region, values.pop()))
        into.copies += arrived

    def _origins(self, arguments: object) -> set[str]:
        origins: set[str] = set()
        for tensor in _tensors(arguments):
            if (name := self._sources.get(_key(tensor))) is not None:
                origins.add(name)
            if (held := self._contents.get(_key(tensor))) is not None:
                origins |= held.origins
        return origins


def _tensors(arguments: object) -> Iterable[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _name(func) -> str:  # type: ignore[no-untyped-def]
    return str(func.overloadpacket).removeprefix("aten.")


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether every value of `other` has a place in `dtype`."""
    try:
        return torch.promote_types(dtype, other) == dtype
    except RuntimeError:  # float8 has no promotion
        return dtype == other
