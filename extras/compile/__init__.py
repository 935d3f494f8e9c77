"""How the kernels of a decoder are made and launched, where that is not one by one by torch.

`model.compile`: the forward of each decoder layer by torch.compile, one graph.
`model.cuda_graphs`: the passes of the decoder as CUDA graphs (`hybridengine.compile.decoder`).
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from hybridengine.compile.decoder import GraphedDecoder
from hybridengine.compile.graphs import CudaGraphs
from hybridengine.run.config.common import JobConfig, TrainedModelConfig
from hybridengine.run.errors import ConfigError, ModelError

__all__ = ["apply", "check", "check_compiler", "compile_layers"]

# Integers that differ in every micro-batch; torch.compile expects others to stay as they are.
_LENGTHS = ("L['kwargs']['max_length_q']", "L['kwargs']['max_length_k']")

# Graphs of one layer class: with and without gradients, kinds of attention, shared prefixes,
# adapters, and models of the same class. torch's own limit is 8, and an error beyond it.
_MAX_GRAPHS = 64


_graphs = functools.cache(CudaGraphs)  # one memory pool for all models of a process


def check(config: JobConfig) -> None:
    """Raise an error of the user for what the machine or other keys of the job do not support."""
    group, sharding = f"{config.policy_group}.fsdp_config", config.sharding
    if config.model.compile:
        check_compiler()
        if size := sharding.wrap_policy.min_num_params:
            raise ConfigError(
                f"model.compile is true and {group}.wrap_policy.min_num_params is {size}, but a "
                "compiled layer is one FSDP group; leave it 0, a group per layer"
            )
    if config.model.cuda_graphs:
        for key, value, accepted in (
            ("fsdp_size", 1 if config.world_size == 1 else sharding.fsdp_size, 1),
            ("param_offload", sharding.param_offload, False),
            ("offload_policy", sharding.offload_policy, False),
        ):
            if value != accepted:
                raise ConfigError(
                    f"model.cuda_graphs is true and {group}.{key} is {value}, but captured passes "
                    f"read weights where they were; set it to {accepted}, or leave the graphs"
                )
        _check_gpu()


def apply(options: TrainedModelConfig, model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Change how `model` computes, in place, by the keys of `options`; layers: its decoder's."""
    if options.compile:
        compile_layers(layers)
    if options.cuda_graphs:
        _check_gpu()
        GraphedDecoder(model, _graphs())


def _check_gpu() -> None:
    if not torch.cuda.is_available():
        raise ModelError(
            "model.cuda_graphs is true, but this machine has no GPU to capture graphs on; "
            "set model.cuda_graphs=false"
        )


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
