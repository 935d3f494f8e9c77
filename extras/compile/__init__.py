"""`model.compile`: the forward of each decoder layer by torch.compile, one graph."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from hybridengine.run.errors import ModelError

__all__ = ["check_compiler", "compile_layers"]

# Integers that differ in every micro-batch; torch.compile expects others to stay as they are.
_LENGTHS = ("L['kwargs']['max_length_q']", "L['kwargs']['max_length_k']")

# Graphs of one layer class: with and without gradients, kinds of attention, shared prefixes,
# adapters, and models of the same class. torch's own limit is 8, and an error beyond it.
_MAX_GRAPHS = 64


def check_compiler() -> None:
    """Raise ModelError if there is no compiler for the code that torch.compile generates."""
    on_gpu = torch.cuda.is_available()  # Triton's choice there, Inductor's on a CPU
    variable, names = ("CC", ["gcc", "clang"]) if on_gpu else ("CXX", ["g++"])
    candidates = [chosen] if (chosen := os.environ.get(variable)) else names
    if not any(map(shutil.which, candidates)):
        raise ModelError(
            f"model.compile is true, but this machine has no compiler {' or '.join(candidates)}, "
            f"which torch.compile needs; install one, set {variable}, or set model.compile=false"
        )


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Replace the forward of each layer by its compiled form, one graph, in place.

    What wraps a layer stays outside of it, and eager: FSDP2's hooks and transformers' gradient
    checkpointing, which is then a second call of the compiled forward. So FSDP2 must not shard a
    module inside of a layer on its own. Layers of one class have one code object, and their weights
    are inputs of the graph, so all of them share its compilation; it holds for every number of
    tokens and sequences. Attention is an operator that is not traced further.

    Raises:
        ModelError: there is no compiler. A compiled forward raises it for a layer that is not one
            graph, such as one with data-dependent control flow.
    """
    check_compiler()
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_GRAPHS)
    known = torch.compiler.config.dynamic_sources.split(",")
    torch.compiler.config.dynamic_sources = ",".join(dict.fromkeys([*known, *_LENGTHS]))
    for layer in layers:
        layer.forward = _compiled(layer.forward, type(layer).__name__)


def _compiled(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    compiled = torch.compile(forward, fullgraph=True)

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in tree_iter((args, kwargs)):
            if isinstance(value, Tensor) and value.ndim:  # tokens or sequences: [1, T, ...] or [T]
                torch._dynamo.maybe_mark_dynamic(value, min(value.ndim - 1, 1))
        try:
            return compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(
                f"model.compile is true, but {name} does not compile to one graph "
                f"({type(error).__name__}: {reason}); set model.compile=false"
            ) from error

    return call
