"""vLLM with the operators of a trained model that has `use_exact_operators`.

A token's log-prob is then the same float32 bits as the trained model's, whatever else is in the
batch. Attention is replaced before the engine is built (`attention_backend` of this package), the
other operators in the loaded model; it must run eagerly. On a CPU decoding steps are replayed, and
what sequences have in common is computed once (`steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from hybridengine.engine.exact.steps import AdapterSlot, compute_repeats_once, use_decode_graphs
from hybridengine.kernels import gated_activation
from hybridengine.kernels.decode_linear import inference_linear, join_parts
from hybridengine.kernels.forwards import activation_forward, gated_forward, norm_forward
from hybridengine.kernels.layer import add_scaled_, inference_norm
from hybridengine.kernels.logprob.soft_cap import soft_cap_
from hybridengine.kernels.recognize import find_tables
from hybridengine.kernels.rotary import RotaryTable, rotate, trained_rotary
from hybridengine.model.exact import is_activation, known_activation, norm_options
from hybridengine.model.extensions import exact_forwards
from hybridengine.model.validation import meta_model
from hybridengine.run.errors import ModelError

_ROTARY_KINDS = "", "Llama3", "M", "YaRNScaling"
_BACKEND = "hybridengine.engine.exact.attention_backend.ExactAttentionBackend"


@contextmanager
def exact_engine() -> Iterator[dict[str, Any]]:
    """While open, vLLM builds engines with the trainer's attention (`attention_backend`).

    It takes the place of vLLM's own on a CPU, which vLLM's platform always takes, and has the name
    that vLLM has for others on a GPU. While open, vLLM has no latent attention (MLA), whatever it
    has read of the environment: caches have the keys and values of every head, as the trainer
    computes them.

    Yields the options of `vllm.LLM` that exact engines need. What the attention does not cover
    raises UserError, or vLLM's ValueError, as an engine is built.
    """
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    on_cpu = current_platform.is_cpu()
    backend = AttentionBackendEnum["CPU_ATTN" if on_cpu else "CUSTOM"]
    overridden = backend.get_path() if backend.is_overridden() else None
    register_backend(backend, _BACKEND)
    selector._cached_get_attn_backend.cache_clear()
    try:
        with patch.object(envs, "VLLM_MLA_DISABLE", True, create=True):
            yield {"enforce_eager": True} | ({} if on_cpu else {"attention_backend": "CUSTOM"})
    finally:
        backend.clear_override()
        if overridden is not None:
            register_backend(backend, overridden)
        selector._cached_get_attn_backend.cache_clear()


def use_exact_operators(
    model: nn.Module, max_model_len: int, slot: AdapterSlot | None = None
) -> None:
    """Replace the operators of `model`, as vLLM has loaded it.

    max_model_len: positions that its sequences may have.
    slot: of the adapters, which all its requests have or none.

    Raises:
        ModelError: it has a module for which there is no exact operator.
    """
    from vllm.distributed import get_tensor_model_parallel_world_size
    from vllm.model_executor.layers import activation, layernorm, linear, logits_processor
    from vllm.model_executor.layers import rotary_embedding as rotary
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from hybridengine.engine.exact.attention_backend import ExactAttention

    if slot is not None:
        slot.keep_scale()
        _use_exact_adapters(model, slot)
    rotary_kinds = [getattr(rotary, f"{kind}RotaryEmbedding") for kind in _ROTARY_KINDS]
    dtype = next(model.parameters()).dtype
    trained: dict[str, nn.Module] = {}  # of the same names, where vLLM runs transformers' model
    config: Any = model.config
    text_config = config.get_text_config()
    if type(model).__module__.startswith("vllm.model_executor.models.transformers"):
        trained = dict(meta_model(text_config).get_decoder().named_modules())
    extended = exact_forwards(model, {})
    replaced = "\0"  # the newest module with another forward, which does not call its children
    for name, module in model.named_modules():
        forward: Any = None
        act: Any = getattr(module, "activation_fn", None)
        if name.startswith(f"{replaced}."):
            continue
        if module in extended:
            module.forward = MethodType(extended[module], module)
            continue
        if type(getattr(module, "quant_method", None)) is linear.UnquantizedLinearMethod:
            module.quant_method.apply = _linear
            if isinstance(module, linear.RowParallelLinear) and module.tp_size > 1:
                forward = _row_parallel
        elif isinstance(module, layernorm.RMSNorm | layernorm.GemmaRMSNorm):
            is_gemma = isinstance(module, layernorm.GemmaRMSNorm)
            options: dict[str, Any] = {"offset": 1.0} if is_gemma else {"round_first": True}
            if norm := trained.get(name.removeprefix("model.")):
                options = norm_options(name, norm, module.variance_epsilon)
            # The forward may join the rows of ranks before, and divide them after.
            module._forward_method = partial(_norm, module, options)
        elif isinstance(module, activation.SiluAndMul):
            forward = partial(_gated, "silu")
        elif isinstance(module, activation.GeluAndMul) and module.approximate == "tanh":
            forward = partial(_gated, "gelu_tanh")
        elif type(module).__name__ == "LayerNorm" and module.weight is not None:
            eps = getattr(module, "variance_epsilon", None)  # Cohere's
            forward = norm_forward(eps or module.eps, {"centered": True}, eps is not None)
        elif hasattr(module, "gate_up_proj") and is_activation(act):
            module.forward = MethodType(gated_forward(known_activation(name, act)), module)
        elif is_activation(module):
            forward = activation_forward(known_activation(name, module))
        elif type(module) in rotary_kinds:
            forward = _rotary(module, max_model_len, dtype, model)
        elif trained and type(module).__name__.endswith("RotaryEmbedding"):
            forward = trained_rotary
        elif isinstance(module, logits_processor.LogitsProcessor):
            module._apply_head = partial(_head, module.soft_cap)  # type: ignore[method-assign]
            module.soft_cap = None
        elif _is_parallel_block(module):
            module.forward = MethodType(_parallel_block, module)
        elif isinstance(module, Attention) and isinstance(impl := module.impl, ExactAttention):
            if impl.sliding_window is not None:  # vLLM's Cohere has one more token
                impl.sliding_window = min(impl.sliding_window, text_config.sliding_window)
        elif not isinstance(module, VocabParallelEmbedding) and _computes(module):
            raise ModelError(
                f"rollout.exact: vLLM's {name} ({type(module).__name__}) has no exact operator; "
                "set rollout.exact=off for this model"
            )
        if forward is not None:
            module.forward = MethodType(forward, module)
            replaced = name
    layers = [m for m in model.modules() if isinstance(m, AttentionLayerBase)]
    on_cpu = all(parameter.is_cpu for parameter in model.parameters())
    if on_cpu and get_tensor_model_parallel_world_size() == 1:
        use_decode_graphs(model, slot)
    if on_cpu and all(isinstance(layer, Attention) for layer in layers):  # none with a state
        compute_repeats_once(model)


def _computes(module: nn.Module) -> bool:
    """Return whether the module does arithmetic of its own, and not by modules in it."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    has_parameters = next(module.parameters(recurse=False), None) is not None
    return has_parameters or isinstance(module, CustomOp | AttentionLayerBase)


_product = partial(inference_linear, max_rows=None)


def _linear(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return _product(x, layer.weight, bias)


def _head(softcap: float | None, lm_head: Any, hidden: Tensor, bias: Tensor | None) -> Tensor:
    return soft_cap_(_product(hidden, lm_head.weight, bias, torch.float32), softcap)


def _joined_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Join float32 sums of the ranks in their order; then the bias, and one rounding."""
    from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_gather

    if x.shape[-1] > weight.shape[1]:  # not divided over the ranks
        x = x.split(weight.shape[1], -1)[get_tensor_model_parallel_rank()]
    part = _product(x, weight, None, torch.float32)
    parts = tensor_model_parallel_all_gather(part.unsqueeze(0), dim=0)
    return join_parts(parts.unbind(0), bias, x.dtype)


def _row_parallel(self: Any, x: Tensor) -> Any:
    out = _joined_product(x, self.weight, None if self.skip_bias_add else self.bias)
    return (out, self.bias if self.skip_bias_add else None) if self.return_bias else out


def _use_exact_adapters(model: nn.Module, slot: AdapterSlot) -> None:
    """Replace what the layers with adapters add to the layers in them."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA

    for module in model.modules():
        if isinstance(module, RowParallelLinearWithLoRA) and module.tp_size > 1:
            module.forward = partial(_adapted_row_parallel, module, slot)  # type: ignore[method-assign]
        elif isinstance(module, BaseLinearLayerWithLoRA):
            module.apply = partial(_adapted, module, slot)  # type: ignore[method-assign]


def _adapted(module: Any, slot: AdapterSlot, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product and its adapters, in PEFT's order; the input is not divided over ranks."""
    out: Tensor = module.base_layer.quant_method.apply(module.base_layer, x, bias)
    return _add_adapters(module, slot, x, out, _product)


def _adapted_row_parallel(module: Any, slot: AdapterSlot, x: Tensor) -> Any:
    base = module.base_layer
    result = base(x)
    out, *bias = result if isinstance(result, tuple) else (result,)
    out = _add_adapters(module, slot, x, out, _joined_product)
    return (out, *bias) if base.return_bias else out


def _add_adapters(
    module: Any, slot: AdapterSlot, x: Tensor, out: Tensor, product: Callable[..., Tensor]
) -> Tensor:
    """Add B(A(x)) * scale to out, and return it; `product` is that with A."""
    if slot.request is None:
        return out
    rows, x = out.view(-1, out.shape[-1]), x.flatten(0, -2)
    parts = rows.split([b.shape[2] for b in module.lora_b_stacked], 1)
    for part, a, b in zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True):
        update = _product(product(x, a[0, 0, : slot.rank]), b[0, 0, :, : slot.rank])
        add_scaled_(part, update, slot.scale)
    return out


def _norm(
    module: Any, options: Mapping[str, Any], x: Tensor, residual: Tensor | None = None
) -> Any:
    out = inference_norm(x, residual, module.weight, module.variance_epsilon, **options)
    return out if residual is None else (out, residual)


def _is_parallel_block(layer: Any) -> bool:
    """Return whether a layer itself adds the results of its attention and its MLP over ranks."""
    parts = (("self_attn", "o_proj"), ("mlp", "down_proj"))
    last = [getattr(getattr(layer, part, None), name, None) for part, name in parts]
    return not any(getattr(getattr(x, "base_layer", x), "reduce_results", True) for x in last)


def _parallel_block(self: Any, positions: Tensor, x: Tensor, residual: Tensor | None) -> Any:
    """Attention and MLP of the same rows, added in transformers' order."""
    normed, _ = self.input_layernorm(x)
    out = self.self_attn(positions=positions, hidden_states=normed)
    for update in (x, self.mlp(normed)):
        add_scaled_(out, update, 1.0)
    return out, x


def _gated(activation: Any, self: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gated_activation(gate, up, activation)


def _rotary(module: Any, max_model_len: int, dtype: torch.dtype, model: Any) -> Any:
    """Return a forward that rotates as transformers does."""
    scale, is_yarn = getattr(module, "mscale", 1.0), type(module).__name__.startswith("YaRN")
    if scale != 1.0 and not is_yarn:
        raise ModelError("rollout.exact: M-RoPE with YaRN; set rollout.exact=off for this model")
    device = module.cos_sin_cache.device
    with torch.device("cpu"):  # as transformers does
        frequencies = module._compute_inv_freq(module.scaling_factor if is_yarn else module.base)
    table = RotaryTable(frequencies.to(device), scale)
    positions = torch.arange(max_model_len, device=device)
    cos, sin = table.rows(positions)
    neighbours = not module.is_neox_style
    if not neighbours:
        cos, sin = cos.to(dtype), sin.to(dtype)
    elif dtype != torch.float32:
        tables = find_tables(meta_model(model.config.get_text_config()).get_decoder(), cos, sin)
        if tables is None:
            raise ModelError("rollout.exact: its rotary embedding is unknown; set it to off")
        cos, sin = tables

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        heads = x.view(x.shape[0], -1, module.head_size)
        return rotate(heads, positions, cos, sin, neighbours).view(x.shape)

    def forward(
        self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        positions = positions.view(-1, query.shape[0])[0]  # M-RoPE: text has one for all sections
        return rotated(query, positions), None if key is None else rotated(key, positions)

    return forward


def use_plain_head(model: nn.Module) -> None:
    """Make the float32 head of `model`, loaded by vLLM on a CPU, read its weight as it is."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    for module in model.modules():
        if isinstance(module, LogitsProcessor) and module.head_dtype == torch.float32:
            module._apply_head = partial(_apply_head, module._apply_head)  # type: ignore[method-assign]


def _apply_head(original: Any, lm_head: Any, hidden: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits [T, V], float32; `original` handles heads that are not a plain matrix."""
    weight: Tensor = lm_head.weight
    is_matrix = hidden.dim() == 2 and weight.shape[1:] == hidden.shape[1:]
    if not is_matrix or weight.dtype != hidden.dtype:
        return original(lm_head, hidden, bias)
    return inference_linear(hidden, weight, bias, torch.float32)
