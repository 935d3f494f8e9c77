"""A decoder of operators whose bits for a token depend on its sequence alone (`rollout.exact`).

The engine has the same operators (`hybridengine.engine.exact`), so that it and the trained model
compute the same log-probs, bit for bit: in any packing, micro-batch or batch of requests, by
prefill or decoding. The modules stay as they are, their forwards are replaced; attention
(`hybridengine.model.attention`) finds them marked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hybridengine.kernels import decode_linear
from hybridengine.kernels.forwards import activation_forward, gated_forward, norm_forward
from hybridengine.kernels.merged_linear import merged_linear
from hybridengine.kernels.recognize import find_activation, find_norm
from hybridengine.kernels.rotary import trained_rotary
from hybridengine.model.extensions import exact_forwards
from hybridengine.model.head import detect_logit_transform
from hybridengine.model.validation import meta_model, takes_images
from hybridengine.run.errors import ModelError

_EXACT = "has_exact_operators"
ROPE_TYPES = ("default", "llama3", "yarn")
_obstacles: dict[tuple[type, str, bool], str | None] = {}  # see `model_obstacle`


def use_exact_operators(
    model: PreTrainedModel, splits: Mapping[str, int], merged_in: torch.dtype | None = None
) -> None:
    """Replace the forwards of linear layers, norms, activations and rotary embeddings of `model`.

    Call it before sharding, with adapters (`apply_lora`) in place; parameters may be on the meta
    device.

    splits: weights that an engine slices along their input → into how many slices
        (`decode_linear`).
    merged_in: the dtype of the weights of an engine into which a sync merges the adapters; None:
        an engine has adapters of its own.

    Raises:
        ModelError: a module with parameters, an activation or a rotary embedding is none of those
            that are known; the message names it.
    """
    if takes_images(model.config):
        raise ModelError("it has a vision tower, for which there are no exact operators")
    head = model.get_output_embeddings()
    if head is not None and type(head) is not nn.Linear:
        raise ModelError(
            f"its head is a {type(head).__name__}, for which there is no exact operator"
        )
    if head is not None:
        scale, softcap = detect_logit_transform(model, head) or (0.0, None)
        on_gpu = softcap is not None and torch.cuda.is_available()
        if on_gpu or math.frexp(scale)[0] != 0.5:  # the engine rounds scaled logits
            raise ModelError("it scales its logits by no power of two, or soft-caps them on a GPU")
    decoder = model.get_decoder()
    extended = exact_forwards(decoder, splits)
    for name, module in decoder.named_modules():
        if module in extended:
            module.forward = MethodType(extended[module], module)
        else:
            parent = decoder.get_submodule(name.rpartition(".")[0])
            is_outside = is_activation(module) and not type(parent).__name__.endswith("MLP")
            if is_outside and "forward" not in vars(parent):
                raise _unknown(name, module, "a place outside of MLPs")
            if not is_outside:
                _replace_forward(name, module, splits, merged_in)
        setattr(module, _EXACT, True)
    setattr(model, _EXACT, True)


def model_obstacle(config: PretrainedConfig, trust_remote_code: bool = False) -> str | None:
    """Return why a model of this configuration cannot have exact operators, None if it can.

    The answer is kept: a run asks several times, and it takes a model on the meta device.
    """
    key = type(config), config.to_json_string(use_diff=False), trust_remote_code
    if key not in _obstacles:
        try:
            use_exact_operators(meta_model(config, trust_remote_code), {})
            _obstacles[key] = None
        except ModelError as error:
            _obstacles[key] = f"{config.model_type}: {error}"
    return _obstacles[key]


def has_exact_operators(model: nn.Module) -> bool:
    """Return whether `use_exact_operators` was called for the model, or for one in it."""
    return getattr(model, _EXACT, False)


def is_exact(module: nn.Module) -> bool:
    """Return whether it was called for the model of this module, which wraps no other."""
    return _EXACT in vars(module)  # getattr takes 3 us where nothing is found


def _replace_forward(
    name: str, module: Any, splits: Mapping[str, int], merged_in: torch.dtype | None
) -> None:
    kind = type(module).__name__
    forward: Callable[..., Any] | None = None
    sliced = name.removesuffix(".base_layer").removesuffix(".lora_A.default")
    parts = next((n for weight, n in splits.items() if weight.endswith(f"{sliced}.weight")), 1)
    if merged_in is not None and hasattr(module, "lora_A"):
        module.merged_in = merged_in

        def merged(self: Any, x: Tensor) -> Tensor:
            if self.disable_adapters:
                return self.base_layer(x)
            base, [scale] = self.base_layer, self.scaling.values()
            left, right = (next(iter(f.values())).weight for f in (self.lora_B, self.lora_A))
            return merged_linear(x, base.weight, left, right, scale, base.bias, splits=parts)

        forward = merged
    elif type(module) is nn.Linear:
        forward = lambda self, x: decode_linear(x, self.weight, self.bias, splits=parts)  # noqa: E731
    elif kind.endswith("RMSNorm") or (kind.endswith("LayerNorm") and list(module.parameters())):
        eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        forward = norm_forward(eps, norm_options(name, module, eps))
    elif is_activation(module) and not list(module.parameters()):
        forward = activation_forward(known_activation(name, module))
    elif kind.endswith("MLP") and (hasattr(module, "gate_proj") or hasattr(module, "gate_up_proj")):
        act = getattr(module, "act_fn", None) or module.activation_fn
        forward = gated_forward(known_activation(name, act))
    elif kind.endswith("RotaryEmbedding"):
        found = getattr(module, "rope_type", None)  # of each type of layers, or of all
        for rope_type in found.values() if isinstance(found, dict) else [found]:
            if rope_type not in ROPE_TYPES:
                raise _unknown(name, module, f"rope_type {rope_type!r}")
        forward = trained_rotary
    elif not isinstance(module, nn.Embedding) and list(module.parameters(recurse=False)):
        raise _unknown(name, module, "parameters of its own")
    if forward is not None:
        module.forward = MethodType(forward, module)


def norm_options(name: str, module: Any, eps: float | None) -> dict[str, Any]:
    """Return the options of `row_norm` that give what the module does."""
    options = find_norm(module, eps)
    if options is None:
        raise _unknown(name, module, "no weight and epsilon of RMSNorm or LayerNorm")
    return options


def is_activation(module: nn.Module) -> bool:
    """Return whether the module is an activation of transformers or torch."""
    return type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation")


def known_activation(name: str, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the activation of `gated_activation` that `function`, of the module `name`, is."""
    activation = find_activation(function)
    if activation is None:
        raise _unknown(name, function, "an activation other than SiLU and GELU")
    return activation


def _unknown(name: str, module: Any, what: str) -> ModelError:
    return ModelError(
        f"its {name} ({type(module).__name__}) has {what}, for which there is no exact operator"
    )
