"""Another way to compute steps of an exact engine on a CPU, which leaves their bits as they are."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn


def override_steps(
    model: nn.Module, run: Callable[[Callable[..., Any], Tensor, Tensor], Tensor | None]
) -> None:
    """Let `run(forward, input_ids, positions)` compute the steps of `model`, a model of vLLM.

    It returns the hidden states [T, H], or None for a step that is computed as before. So are steps
    of anything but token ids, and those in which hooks look at modules.

    forward: computes a step as before.
    """
    forward, modules = model.forward, list(model.modules())

    def overridden(
        self: Any,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> Any:
        usual = intermediate_tensors is None and inputs_embeds is None and not others
        if usual and input_ids is not None and not any(map(_is_observed, modules)):
            output = run(forward, input_ids, positions)
            if output is not None:
                return output
        return forward(input_ids, positions, intermediate_tensors, inputs_embeds, **others)

    model.forward = MethodType(overridden, model)


def _is_observed(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
