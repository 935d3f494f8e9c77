"""Check a Python block that cannot run here: its names, and its calls of what it imports."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.docs.blocks import Block

__all__ = ["faults_of", "trains"]


@dataclass(frozen=True)
class Instance:
    """An object of a class, which is not there."""

    type: type


def trains(block: Block) -> bool:
    """Return whether a block is Python that makes a `Trainer`, which takes minutes."""
    if block.language != "python":
        return False
    calls = (n.func for n in ast.walk(ast.parse(block.text)) if isinstance(n, ast.Call))
    return any(isinstance(f, ast.Name) and f.id == "Trainer" for f in calls)


def faults_of(block: Block, before: list[Block]) -> list[str]:
    """Return what is wrong in `block`; before: the blocks of its page that a reader has run."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
    tree = compile(block.text, str(block), "exec", flags)
    earlier = [compile(b.text, str(b), "exec", flags) for b in before]
    known = set().union(*map(_bound, (tree, *earlier)))
    stated = set(re.findall(r"\w+", block.needs))
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - known - stated
    undefined = sorted(used - set(dir(builtins)))
    objects: dict[str, Any] = {}
    wrong = [fault for part in (*earlier, tree) for fault in _call_faults(part, objects)]
    return [f"{name} is neither defined nor stated after `# needs`" for name in undefined] + wrong


def _bound(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _call_faults(tree: ast.AST, objects: dict[str, Any]) -> Iterator[str]:
    """Yield wrong imports, attributes and arguments; adds the page's names to `objects`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from _import(node, objects)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            objects[node.targets[0].id] = _value(node.value, objects)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = _value(node.value, objects)
            if owner is not None and not _has(owner, node.attr):
                yield f"{ast.unparse(node)} does not exist"
        elif isinstance(node, ast.Call) and (function := _value(node.func, objects)) is not None:
            yield from _argument_faults(node, function)


def _import(node: ast.ImportFrom, objects: dict[str, Any]) -> Iterator[str]:
    """Import ours; another package is only looked up, as importing it may take long."""
    name = node.module or ""
    if not name.startswith("hybridengine"):
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            yield f"there is no module {name}"
        return
    module = importlib.import_module(name)
    for alias in node.names:
        if not hasattr(module, alias.name) and not importlib.util.find_spec(f"{name}.{alias.name}"):
            yield f"{name} has no {alias.name}"
            continue
        if not hasattr(module, alias.name):
            importlib.import_module(f"{name}.{alias.name}")
        objects[alias.asname or alias.name] = getattr(module, alias.name)


def _value(node: ast.AST, objects: dict[str, Any]) -> Any:
    """Return the object or Instance that an expression is, None where that is not known."""
    if isinstance(node, ast.Name):
        return objects.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, objects)
        owner = owner.type if isinstance(owner, Instance) else owner
        return None if owner is None else inspect.getattr_static(owner, node.attr, None)
    if isinstance(node, ast.Call):
        function = _value(node.func, objects)
        return Instance(function) if inspect.isclass(function) else None
    return None


def _has(owner: Any, name: str) -> bool:
    if not isinstance(owner, Instance):
        return hasattr(owner, name)
    return hasattr(owner.type, name) or any(
        f"self.{name}" in inspect.getsource(base) for base in owner.type.__mro__[:-1]
    )


def _argument_faults(call: ast.Call, function: Any) -> Iterator[str]:
    if not inspect.isclass(function) and not inspect.isfunction(function):
        return
    first = [None] if isinstance(call.func, ast.Attribute) and "self" in _names(function) else []
    given = {k.arg: None for k in call.keywords if k.arg}
    try:
        inspect.signature(function).bind(*first, *call.args, **given)
    except TypeError as error:
        yield f"{ast.unparse(call.func)}(...): {error}"


def _names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)
