"""Follow where the contents of tensors come from while a program runs over meta tensors.

`CopyRecorder` follows every storage: what `copy_`, `clone`, a cast, `cat` or `stack` brought into
it, as copies from named tensors; what `fill_` set; or that it was computed, and from what. Views
need no handling: they share their storage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridengine.sync.blocks import NotABlock, contiguous_strides
from hybridengine.sync.layout import Copy, Region, compose

_aten = torch.ops.aten
_CLONES = {_aten.clone, _aten._to_copy, _aten._pin_memory}
_FILLS = dict.fromkeys((_aten.zeros, _aten.zeros_like, _aten.new_zeros), 0.0)
_FILLS |= dict.fromkeys((_aten.ones, _aten.ones_like, _aten.new_ones), 1.0)
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided}
_EMPTY |= {_aten.new_empty, _aten.new_empty_strided}
_SCALAR_READS = {_aten._local_scalar_dense, _aten.item}


@dataclass
class StorageContents:
    """What one storage holds.

    copies: the copies from named tensors, in the order in which they were made.
    constants: (region, value), overwritten by copies.
    computed: why some of it is neither, or None.
    sources: names of all tensors it depends on.
    rounded_to: a dtype on the way that cannot represent all copied values.
    overwritten: whether a constant has replaced the storage's original contents.
    """

    copies: list[Copy] = field(default_factory=list)
    constants: list[tuple[Region, float]] = field(default_factory=list)
    computed: str | None = None
    sources: set[str] = field(default_factory=set)
    rounded_to: torch.dtype | None = None
    overwritten: bool = False


class CopyRecorder(TorchDispatchMode):
    """While active, record what is written into every tensor made from `sources`.

    sources: name → contiguous meta tensor, whose contents are the unknowns.
    destinations: name → meta tensor; copies into one carry its name.
    """

    def __init__(
        self,
        sources: Mapping[str, torch.Tensor],
        destinations: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._source_names = {_key(t): name for name, t in sources.items()}
        self._destination_names = {_key(t): name for name, t in (destinations or {}).items()}
        self._contents: dict[int, StorageContents] = {}
        # A freed storage's key could be reused, so all storages are kept.
        self._keep_alive: list[object] = list(sources.values())
        self._scalars: dict[float, torch.Tensor] = {}  # placeholder number → the element it is of

    def written_to(self, storage: torch.UntypedStorage) -> StorageContents | None:
        """Return what was written into `storage`; None if nothing was."""
        return self._contents.get(storage._cdata)

    def contents_of(self, tensor: torch.Tensor, name: str) -> StorageContents:
        """Return the contents of `tensor` as those of a contiguous tensor called `name`."""
        contents = StorageContents()
        shape = tuple(tensor.shape)
        self._transfer(tensor, contents, (0, shape, contiguous_strides(shape)), name, tensor.dtype)
        return contents

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, op = kwargs or {}, func.overloadpacket
        if op in _SCALAR_READS and self._sources_of(args[:1]):
            placeholder = math.pi * (1 + len(self._scalars))  # a constant that no loader uses
            self._scalars[placeholder] = args[0]
            return placeholder
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
        created = [t for t in _tensors(result) if _key(t) not in known]
        if created:
            self._note_creation(func, created, args, kwargs)
        return result

    def _note_creation(
        self, func: OpOverload, created: list[torch.Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> None:
        self._keep_alive += created
        tensor, op, dim = created[0], func.overloadpacket, args[1] if len(args) > 1 else 0
        if op in _CLONES:
            self._note_copy(tensor, args[0])
        elif op is _aten.cat:
            parts = tensor.split([p.shape[dim] for p in args[0]], dim)
            for part, source in zip(parts, args[0], strict=True):
                self._note_copy(part, source)
        elif op is _aten.stack:
            for part, source in zip(tensor.unbind(dim), args[0], strict=True):
                self._note_copy(part, source)
        elif op in _FILLS:
            self._note_fill(tensor, _FILLS[op])
        elif op not in _EMPTY:
            for tensor in created:
                self._note_computed(tensor, _op_name(func), (args, kwargs))

    def _note_write(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
        written = args[0] if args else None
        if not isinstance(written, torch.Tensor):
            return
        if func is _aten.copy_.default:
            self._note_copy(written, args[1].expand(written.shape))
        elif func is _aten.fill_.Scalar:
            self._note_fill(written, float(args[1]))
        elif func is _aten.zero_.default:
            self._note_fill(written, 0.0)
        elif self._sources_of((args, kwargs)) or _key(written) in self._contents:
            self._note_computed(written, _op_name(func), (args, kwargs))

    def _note_fill(self, written: torch.Tensor, value: float) -> None:
        if value in self._scalars:
            self._note_copy(written, self._scalars[value].reshape(()).expand(written.shape))
        elif value not in (0.0, 1.0) and self._scalars:
            elements = list(self._scalars.values())
            self._note_computed(written, "Python from an element", elements)
        else:
            if written.untyped_storage().nbytes() == written.nbytes:
                self._contents[_key(written)] = StorageContents(overwritten=True)
            contents = self._contents.setdefault(_key(written), StorageContents())
            if _overlaps(_region(written), contents.copies):
                contents.computed = contents.computed or "constants are written over copies"
            contents.constants.append((_region(written), value))

    def _note_computed(self, written: torch.Tensor, how: str, arguments: object) -> None:
        contents = self._contents.setdefault(_key(written), StorageContents())
        read = [self._contents.get(_key(t)) for t in _tensors(arguments)]
        earlier = [c.computed for c in read if c is not None and c.computed]
        contents.computed = f"{earlier[0]}, {how}" if earlier else f"computed by {how}"
        contents.sources |= self._sources_of(arguments)

    def _note_copy(self, written: torch.Tensor, read: torch.Tensor) -> None:
        contents = self._contents.setdefault(_key(written), StorageContents())
        name = self._destination_names.get(_key(written), "")
        self._transfer(read, contents, _region(written), name, written.dtype)

    def _transfer(
        self,
        read: torch.Tensor,
        into: StorageContents,
        region: Region,
        destination: str,
        dtype: torch.dtype,
    ) -> None:
        """Add to `into` what `region` contains after `read` has been copied there."""
        offset, sizes, strides = region
        source = self._source_names.get(_key(read), "")
        read_offset, _, read_strides = _region(read)
        copy = Copy(source, destination, read_offset, offset, sizes, read_strides, strides)
        contents = self._contents.get(_key(read))
        if not _represents(dtype, read.dtype):
            into.rounded_to = dtype
        if contents is None:
            if source:
                into.copies.append(copy)
                into.sources.add(source)
            return
        into.sources |= contents.sources | ({source} if source else set())
        reason, composed = contents.computed, []
        if not reason and contents.rounded_to not in (None, dtype):
            reason = f"rounded to {contents.rounded_to} on the way"
        if not reason and source and not contents.overwritten:
            reason = "partly overwritten by the loader"
        if not reason:
            try:
                composed = compose(copy, contents.copies)
            except NotABlock as error:
                reason = f"reordered: {error}"
        values = {value for _, value in contents.constants}
        constant = not reason and sum(c.numel for c in composed) < copy.numel
        if constant and len(values) != 1:
            reason = "only partly made of the checkpoint"
        if reason:
            into.computed = into.computed or reason
            return
        if constant:
            into.constants.append((region, values.pop()))
        into.copies += composed

    def _sources_of(self, arguments: object) -> set[str]:
        """Return the names of all sources that the tensors in `arguments` depend on."""
        sources: set[str] = set()
        for tensor in _tensors(arguments):
            if (name := self._source_names.get(_key(tensor))) is not None:
                sources.add(name)
            if (contents := self._contents.get(_key(tensor))) is not None:
                sources |= contents.sources
        return sources


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _region(tensor: torch.Tensor) -> Region:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def _overlaps(region: Region, copies: list[Copy]) -> bool:
    """Whether a region contains, or may contain, elements that copies wrote."""
    offset, sizes, strides = region
    read = Copy("", "", offset, 0, sizes, strides, contiguous_strides(sizes))
    try:
        return bool(compose(read, copies))
    except NotABlock:
        return True


def _tensors(arguments: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _op_name(func: OpOverload) -> str:
    return str(func.overloadpacket).removeprefix("aten.")


def _represents(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether `dtype` can represent every value of `other`."""
    try:
        return torch.promote_types(dtype, other) == dtype
    except RuntimeError:  # float8 has no promotion
        return dtype == other
