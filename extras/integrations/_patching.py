"""Replace functions of another package by ours, all or none, and put them back.

A module that ran `from x import f` has its own binding of f, and a registry has another; every
module of the package that has one is rebound, and so are the dicts that its modules hold. `unpatch`
also finds the modules that were imported in between. What is replaced is checked, not a version:
its signature, and what it computes (`_compare`). Ray gives the class of an actor a wrapper of
every method that it inherits; these are replaced with the method that they wrap.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hybridengine.integrations._compare import Probe, difference, unknown_names
from hybridengine.run.errors import UserError


class PatchError(UserError):
    """A package whose functions ours cannot replace; nothing was changed."""


@dataclass(frozen=True)
class Replacement:
    """One function or class of another package, and ours.

    target: dotted path of a module's function or class, or of a method.
    function: accepts every call that the target's signature accepts; an object of its own for every
      replacement, since bindings are found by identity.
    group: the group of the replacement; `Patches.patch` chooses groups.
    """

    target: str
    function: Callable[..., Any]
    group: str


@dataclass(frozen=True)
class _Applied:
    replacement: Replacement
    owner: Any  # module or class
    name: str
    original: Any  # as it is in the owner's namespace: a staticmethod stays one
    is_inherited: bool
    wrappers: Sequence[tuple[type, Any]]  # classes of actors that have one, and theirs


class Patches:
    """The replacements of one package.

    Args:
        package: name of the package as it is imported.
        groups: by group and target within the package, the functions in the order in which they
            are applied.
        default_groups: the groups that `patch()` without arguments replaces; (): all.
        distribution: name of the package as it is installed, where that is another one.
        probes: by target, a call that has to have the results of ours. Run once, at the patch.
        known: by target whose body ours stands for and that cannot be probed, the names that its
            code may use, as words.
    """

    def __init__(
        self,
        package: str,
        groups: Mapping[str, Mapping[str, Any]],
        default_groups: Sequence[str] = (),
        distribution: str = "",
        probes: Mapping[str, Probe] | None = None,
        known: Mapping[str, str] | None = None,
    ) -> None:
        self.package, self.groups = package, tuple(groups)
        self.probes, self.known = probes or {}, known or {}
        self.replacements = tuple(
            Replacement(f"{package}.{target}", function, group)
            for group, functions in groups.items()
            for target, function in functions.items()
        )
        self.default_groups = tuple(default_groups) or self.groups
        self.distribution = distribution or package
        self._applied: list[_Applied] = []

    def patch(self, *groups: str) -> None:
        """Replace the functions of `groups` (default: the default groups); again does nothing.

        Raises a PatchError, and changes nothing, where the package is missing, or a function is
        missing, has another signature, or does not compute what ours does.
        """
        chosen = groups or self.default_groups
        if unknown := [group for group in chosen if group not in self.groups]:
            raise PatchError(
                f"{self.package}: there is no group {unknown[0]!r}; the groups are "
                f"{', '.join(self.groups)}."
            )
        done = [applied.replacement for applied in self._applied]
        wanted = [r for r in self.replacements if r.group in chosen and r not in done]
        if not wanted:
            return
        found = [self._find(replacement) for replacement in wanted]
        for applied in found:
            for owner in (applied.owner, *(subclass for subclass, _ in applied.wrappers)):
                setattr(owner, applied.name, applied.replacement.function)
            self._rebind(applied.original, applied.replacement.function)
        self._applied += found

    def check(self, *groups: str) -> None:
        """Raise the PatchError that `patch` of these groups would raise; change nothing."""
        for replacement in self.replacements:
            if replacement.group in groups:
                self._find(replacement)

    def unpatch(self) -> None:
        """Put back every function that `patch` replaced; again does nothing."""
        for applied in reversed(self._applied):
            if applied.is_inherited:
                delattr(applied.owner, applied.name)
            else:
                setattr(applied.owner, applied.name, applied.original)
            for subclass, wrapper in applied.wrappers:
                setattr(subclass, applied.name, wrapper)
            self._rebind(applied.replacement.function, applied.original)
        self._applied = []

    def original(self, target: str) -> Any:
        """Return what ours stands for at `target` of the patched package, to call it from ours."""
        target = f"{self.package}.{target}"
        return next(a.original for a in self._applied if a.replacement.target == target)

    @contextmanager
    def patched(self, *groups: str) -> Iterator[None]:
        """Patch within a `with` block; what was patched before it stays patched after it."""
        before = tuple(dict.fromkeys(a.replacement.group for a in self._applied))
        self.patch(*groups)
        try:
            yield
        finally:
            self.unpatch()
            if before:
                self.patch(*before)

    def _find(self, replacement: Replacement) -> _Applied:
        owner, name = _owner(replacement.target)
        if owner is None or not hasattr(owner, name):
            raise self._refusal(replacement, "a function of this name", "none")
        namespace = vars(owner)
        original = namespace.get(name, getattr(owner, name))
        theirs, ours = _signature(getattr(owner, name)), _signature(replacement.function)
        if not _accepts(ours, theirs):
            raise self._refusal(replacement, f"a signature whose calls fit {ours}", str(theirs))
        target = replacement.target.removeprefix(f"{self.package}.")
        if target in self.known and (new := unknown_names(original, self.known[target])):
            raise self._refusal(
                replacement, "the code that ours stands for", f"code that uses {', '.join(new)}"
            )
        if target in self.probes:
            unlike = difference(self.probes[target], original, replacement.function)
            if unlike:
                raise self._refusal(replacement, "the results of ours for a small input", unlike)
        wrappers = list(_wrappers(owner, name, original)) if isinstance(owner, type) else []
        return _Applied(replacement, owner, name, original, name not in namespace, wrappers)

    def _refusal(self, replacement: Replacement, expected: str, found: str) -> PatchError:
        try:
            release = f"{self.distribution} {importlib.metadata.version(self.distribution)}"
        except importlib.metadata.PackageNotFoundError:
            release = self.package
        if self.package not in sys.modules:
            return PatchError(
                f"{self.package} cannot be imported; install {self.distribution} to patch it."
            )
        return PatchError(
            f"{replacement.target} of {release}: expected {expected}, found {found}. Nothing was "
            f"replaced. Leave out the group {replacement.group!r}, install a release that was tried"
            " (docs/dropins.md), or see whether another package has replaced the function."
        )

    def _rebind(self, old: Any, new: Any) -> None:
        """Bind `new` wherever a module of the package, or a registry in one, binds `old`."""
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] != self.package or not isinstance(module, ModuleType):
                continue
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)
                elif type(value) is dict and not attribute.startswith("__"):
                    value.update({key: new for key, entry in value.items() if entry is old})


def _owner(target: str) -> tuple[Any, str]:
    """Return the module or class that holds `target`, None if there is none, and the last name."""
    *parents, name = target.split(".")
    for end in range(len(parents), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parents[:end]))
        except ModuleNotFoundError as error:
            if error.name and ".".join(parents[:end]).startswith(error.name):
                continue
            raise
        for part in parents[end:]:
            owner = getattr(owner, part, None)
        return owner, name
    return None, name


def _wrappers(owner: type, name: str, original: Any) -> Iterator[tuple[type, Any]]:
    """Yield Ray's classes of actors under `owner` that wrap its method `name`, and the wrapper."""
    subclasses: list[type] = owner.__subclasses__()
    for subclass in subclasses:
        own = vars(subclass).get(name)
        is_actor = "__ray_actor_class__" in vars(subclass)
        if is_actor and callable(own) and inspect.unwrap(own) is original:
            yield subclass, own
        yield from _wrappers(subclass, name, original)


def _signature(function: Any) -> inspect.Signature | None:
    """Return the names, kinds and defaults of the parameters; None where they cannot be read."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    empty = inspect.Parameter.empty
    parameters = signature.parameters.values()
    # Ray adds a parameter of its own to the methods of actors.
    bare = [p.replace(annotation=empty) for p in parameters if p.name != "_ray_trace_ctx"]
    return inspect.Signature(bare)


def _accepts(ours: inspect.Signature | None, theirs: inspect.Signature | None) -> bool:
    """Tell whether every call that fits `theirs` fits `ours` and binds the same names."""
    if ours is None or theirs is None:
        return ours is theirs
    mine, expected = list(ours.parameters.values()), list(theirs.parameters.values())
    by_name = ours.parameters
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for index, parameter in enumerate(expected):
        own = by_name.get(parameter.name)
        if own is None or own.kind != parameter.kind or not _equal(own.default, parameter.default):
            return False
        if parameter.kind in positional and mine.index(own) != index:
            return False
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(
        p.default is not inspect.Parameter.empty or p.kind in variadic
        for p in mine
        if p.name not in theirs.parameters
    )


def _equal(ours: Any, theirs: Any) -> bool:
    return ours is theirs or (type(ours) is type(theirs) and bool(ours == theirs))
