"""A frozen base in memory that somebody else owns: the weights of the rollout engine.

Such parameters are not sharded, and FSDP2 leaves them alone (`ignored_params`): nothing is
gathered, copied or cast. Their bits are those of FSDP2's unsharded parameters if their dtype is
that of the computation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from hybridengine.errors import ModelError
from hybridengine.model.parameters import unwrapped_name


def base_parameters(
    model: nn.Module, memory: Mapping[str, torch.Tensor]
) -> dict[str, nn.Parameter]:
    """Return the parameters of `model` that are frozen in `memory`, by its names.

    Raises ModelError for names that the model does not have, or that it trains.
    """
    named = {unwrapped_name(name): p for name, p in model.named_parameters()}
    trained = [n for n in memory if n not in named or named[n].requires_grad]
    if trained:
        raise ModelError(f"{trained[0]!r} is no frozen parameter of the model")
    return {name: named[name] for name in memory}


def place_base(
    model: nn.Module, base: Mapping[str, nn.Parameter], memory: Mapping[str, torch.Tensor]
) -> None:
    """Replace the meta parameters `base` of `model`, wherever it uses them, by `memory`."""
    placed = {
        id(parameter): nn.Parameter(memory[name], requires_grad=False)
        for name, parameter in base.items()
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in placed:
                module._parameters[name] = placed[id(parameter)]


@torch.no_grad()
def fill_base(memory: Mapping[str, torch.Tensor], weights: nn.Module | None) -> None:
    """Write the parameters of `weights`, the full model on rank 0, on every rank; collective."""
    base = {} if weights is None else base_parameters(weights, memory)
    for name, tensor in memory.items():
        if base:
            tensor.copy_(base[name])
        dist.broadcast(tensor, 0)
