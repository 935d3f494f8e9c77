"""Mixtures of experts for `rollout.exact`: the engine runs the trained model's block.

The block of router, experts and shared experts is transformers' own on both sides, so that its
formula (scores, groups, scaling, what is added in which order) is written once, by transformers. In
the engine it stands on the meta device and reads vLLM's tensors as they are; vLLM's own router and
kernels are not called. While a block runs, operators whose bits depend on the batch are replaced:

- the router's product is `decode_linear`, and its logits are float32; its parameters (no buffers)
  that vLLM has in float32 are rounded to the type of the computation, as a trained model's are;
- the experts with the highest scores are selected, of equal ones those with the lowest indices;
- sigmoids are `gated_activation`s;
- experts are `grouped_experts` with `ExactExperts`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridengine.kernels import decode_linear, gated_activation
from hybridengine.model.exact import known_activation
from hybridengine.model.validation import meta_model
from hybridengine.moe.exact_attention import engine_attention, of_rows, trained_attention
from hybridengine.moe.experts import ExactExperts, HeldExperts, grouped_experts
from hybridengine.moe.routers import SIGMOID, TOP_K, layer_index, router_blocks
from hybridengine.run.errors import ModelError

__all__ = ["exact_forwards"]

_Forwards = dict[Any, Callable[..., Any]]
_TRANSFORMERS_GATE = "transformers.integrations.moe"
_ELEMENTWISE = ("getitem", "chunk", "clamp", "mul", "rmul", "add", "radd", "sub", "rsub", "neg")


def exact_forwards(model: nn.Module, splits: Mapping[str, int]) -> _Forwards:
    """Return the forwards with exact operators of modules of `model`, transformers' or vLLM's.

    splits: weights of the trained model that an engine slices → into how many slices.

    Raises:
        ModelError: its experts have no exact operators.
    """
    runners = {
        name.rpartition(".")[0]: module
        for name, module in model.named_modules()
        if hasattr(module, "routed_experts")
    }
    if runners:
        return _engine_forwards(model, runners)
    forwards = trained_attention(model)
    for name, block, router in router_blocks(model):
        experts = f"{name}.experts"
        parts = [n for weight, n in splits.items() if f"{experts}." in weight]
        exact = ExactExperts(splits=max(parts, default=1))
        forwards |= _block_forwards(name, block, router, exact)
    return forwards


def _block_forwards(name: str, block: Any, router: Any, given: ExactExperts) -> _Forwards:
    """Return the forwards of modules of a block of transformers; given: but for the activation."""
    experts: Any = block.experts
    fault: str | None = None
    if torch.cuda.is_available():
        fault = "runs on a GPU"
    elif router is None or not hasattr(experts, "is_transposed"):
        fault = "selects or multiplies its experts without transformers' interface"
    elif not experts.has_gate:
        fault = "has experts without a gate"
    elif getattr(block, "jitter_noise", 0):
        fault = f"has router_jitter_noise {block.jitter_noise}"
    if fault is not None:
        raise ModelError(
            f"its {name} ({type(block).__name__}) {fault}, for which there is no exact operator"
        )
    activation = None  # the experts' own gate
    if type(experts)._apply_gate.__module__ == _TRANSFORMERS_GATE:
        activation = known_activation(f"{name}.experts", experts.act_fn)
    else:
        _check_gate(f"{name}.experts", experts)
    exact = given._replace(activation=activation)

    def run_experts(self: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return grouped_experts(self, x, top_k_index, top_k_weights, exact)

    return {block: _run_block, router: type(router).forward, experts: run_experts}


def _check_gate(name: str, experts: Any) -> None:
    """Raise ModelError if the gate of `experts` is more than operators of single elements."""
    x = torch.zeros(1, 4)
    with _GateOperators() as probe:
        experts._apply_gate(x)
    if probe.unknown:
        raise ModelError(
            f"its {name} ({type(experts).__name__}) has a gate that calls {probe.unknown[0]}, for "
            "which there is no exact operator"
        )


class _GateOperators(TorchFunctionMode):
    """Notes the operators whose bits for an element may depend on its place."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.__name__.strip("_")
        if func not in SIGMOID and name not in _ELEMENTWISE:
            self.unknown.append(name)
        return func(*args, **(kwargs or {}))


def _run_block(self: Any, *args: Any, **kwargs: Any) -> Any:
    with _ExactOperators():
        return type(self).forward(self, *args, **kwargs)


class _ExactOperators(TorchFunctionMode):
    """Replaces operators of a block that runs."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is nn.functional.linear:
            return decode_linear(*args, **given, out_dtype=torch.float32)
        if func in TOP_K:
            return _top_k(*args, **given)
        if func in SIGMOID:
            gate = args[0]
            return gated_activation(gate, torch.ones_like(gate), "sigmoid")
        return func(*args, **given)


def _top_k(scores: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return torch's top k in descending order; of equal scores those with the lowest indices."""
    values, indices = scores.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def _engine_forwards(model: Any, runners: Mapping[str, Any]) -> _Forwards:
    """Return the forwards of modules of a vLLM model, whose blocks have these `MoERunner`s."""
    if type(model).__module__.startswith("vllm.model_executor.models.transformers"):
        raise ModelError(
            "its experts are transformers' in vLLM, too, for which there is no exact operator"
        )
    config = copy.deepcopy(model.config.get_text_config())
    rope = getattr(config, "rope_parameters", None) or {}
    if str(rope.get("rope_type")).startswith("deepseek_"):  # vLLM's name of it
        rope["rope_type"] = "yarn"
    whole = meta_model(config)
    trained = {
        layer_index(name): (name, block, router) for name, block, router in router_blocks(whole)
    }
    forwards = engine_attention(model, whole)
    for name, runner in runners.items():
        block = model.get_submodule(name)
        _check(name, runner)
        found = trained.get(layer_index(name))
        if found is None:
            raise ModelError(f"its {name} is no mixture of experts in transformers")
        forwards[runner] = _read_weights(block, runner, *found)
        forwards |= {m: type(m).forward for m in runner.routed_experts.modules()}
        forwards |= {m: type(m).forward for m in block.children() if m is _router_of(block)}
        forwards[block] = _engine_block(found[1])
    return forwards


def _check(name: str, runner: Any) -> None:
    layer, parallel = runner.routed_experts, runner.moe_config.moe_parallel_config
    faults = {
        "experts that its ranks do not have in their order, as many each": parallel.use_ep
        and (
            runner.moe_config.num_experts % parallel.ep_size != 0
            or layer.expert_placement_strategy != "linear"
            or parallel.enable_eplb
        ),
        "data-parallel ranks that share experts": parallel.dp_size > 1,
        "sequence parallelism": parallel.is_sequence_parallel,
        "an input or output transform": runner.routed_input_transform is not None,
        "weights that vLLM packs for a kernel of its own": not hasattr(layer, "plain_parameters"),
        "router weights on the input": layer.apply_router_weight_on_input,
    }
    if found := [fault for fault, is_found in faults.items() if is_found]:
        raise ModelError(f"its {name} has {found[0]} in vLLM, for which there is no exact operator")


def _held(runner: Any) -> HeldExperts | None:
    """Return the experts that this rank has whole; None: a slice of all."""
    parallel = runner.moe_config.moe_parallel_config
    if not parallel.use_ep:
        return None
    size = runner.moe_config.num_experts // parallel.ep_size
    first = parallel.ep_rank * size
    return HeldExperts(range(first, first + size), _all_gather)


def _router_of(block: Any) -> Any:
    return next(m for m in (getattr(block, n, None) for n in ("gate", "router")) if m is not None)


def _read_weights(
    block: Any, runner: Any, name: str, trained: Any, router: Any
) -> Callable[..., Any]:
    """Let the modules of a block of transformers, on the meta device, read those of vLLM's.

    Returns the forward of `runner` that its experts call, so that hooks see them.
    """
    layer = runner.routed_experts
    for weight, parameter in layer.plain_parameters.items():
        layer.register_parameter(weight, parameter)
    layer.pack = lambda _: None
    experts = trained.experts
    experts.gate_up_proj, experts.down_proj = layer.w13_weight, layer.w2_weight
    experts.is_transposed = False
    if experts.has_bias:
        experts.gate_up_proj_bias, experts.down_proj_bias = layer.w13_bias, layer.w2_bias
    held = {"e_score_correction_bias": getattr(runner.router, "e_score_correction_bias", None)}
    held |= dict(_router_of(block).named_parameters()) | dict(_router_of(block).named_buffers())
    cast = [key for key, p in router._parameters.items() if p is not None]
    for key, tensor in [*router.named_parameters(), *router.named_buffers()]:
        source = held.get(key)
        if source is None or source.shape != tensor.shape:
            raise ModelError(f"its {name} has no {key} of shape {list(tensor.shape)} in vLLM")
        setattr(router, key, source)
    gather = None if runner.moe_config.tp_size == 1 else _all_gather
    forwards = _block_forwards(
        name, trained, router, ExactExperts(gather=gather, held=_held(runner))
    )
    for key, child in trained.named_children():
        if child not in forwards:
            forwards[child] = _delegate(name, key, child, getattr(block, key, None))
    forwards[router] = _rounded(forwards[router], cast, layer.w13_weight.dtype)
    run_experts = MethodType(forwards[trained.experts], trained.experts)
    forwards[trained.experts] = lambda self, *given: runner(*given)
    for module, forward in forwards.items():
        module.forward = MethodType(forward, module)
    return lambda self, *given: run_experts(*given)


def _rounded(
    forward: Callable[..., Any], cast: Iterable[str], dtype: torch.dtype
) -> Callable[..., Any]:
    """Return `forward` of a router in which its parameters `cast` are rounded to `dtype`."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = {key: self._parameters[key] for key in cast}
        self._parameters.update({key: p.to(dtype) for key, p in held.items()})
        try:
            return forward(self, *args, **kwargs)
        finally:
            self._parameters.update(held)

    return run


def _delegate(name: str, key: str, child: Any, own: Any) -> Callable[..., Any]:
    """Return a forward of a shared expert or its gate by vLLM's layers."""
    if own is not None and isinstance(child, nn.Linear):
        return lambda self, x: of_rows(own, x)
    if own is not None and hasattr(own, "gate_up_proj") and hasattr(child, "gate_proj"):
        run = lambda x: own.down_proj(own.act_fn(own.gate_up_proj(x)[0]))  # noqa: E731
        return lambda self, x: of_rows(run, x)
    raise ModelError(
        f"its {name}.{key} ({type(child).__name__}) has no counterpart in vLLM that is known"
    )


def _engine_block(trained: Any) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """hidden_states: [T, H]."""
        out: Any = trained(hidden_states[None])
        return (out[0] if isinstance(out, tuple) else out).view(hidden_states.shape)

    return forward


def _all_gather(part: Tensor) -> Tensor:
    from vllm.distributed import tensor_model_parallel_all_gather

    gathered: Tensor = tensor_model_parallel_all_gather(part.unsqueeze(0), dim=0)
    return gathered
