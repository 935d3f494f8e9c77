"""Keep vLLM's weights writable in place through its processing after loading.

After loading (`process_weights_after_loading`), vLLM may pack, reorder or multiply out weights for
its kernels. Packed weights are kept in plain form as well. A reordered weight is written in its new
order. Tensors derived from weights are derived again after every update. A weight that vLLM no
longer reads, or has computed, is refused by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hybridengine.kernels.decode_linear import inference_linear
from hybridengine.kernels.pages import prefer_huge_pages
from hybridengine.model.shared_weights import LayeredWeights
from hybridengine.run import plugins
from hybridengine.sync.layout import Copy, EngineLayout, LayoutError, Shape, TensorSpec
from hybridengine.sync.loader import engine_tensors
from hybridengine.sync.reordering import (
    find_reordering,
    reordered_layout,
    undo_reordering,
)
from hybridengine.sync.weight_target import bit_checksums

_State = tuple[TensorSpec, int]  # of a tensor as it was loaded: spec, checksum of the content


class Quantization(ABC):
    """How vLLM quantizes weights as it loads; registered in the group `hybridengine.quantizations`.

    A sync writes what vLLM would have made of the trained values.

    vllm_name: vLLM's name of the scheme.
    parameters: makes the full parameters of shapes in a dtype out of an engine's weights; called
        with layout, weights, shapes and dtype.
    """

    vllm_name: str
    parameters: Callable[..., LayeredWeights]

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM` with which it quantizes."""

    @abstractmethod
    def fits(self, vllm_config: Any) -> bool:
        """Return whether an engine of this `VllmConfig` may be one of the scheme."""

    @abstractmethod
    def watched(self) -> AbstractContextManager[object]:
        """While open, layers that vLLM loads note whether they can be written in place."""

    @abstractmethod
    def layout(self, model: torch.nn.Module, layout: EngineLayout) -> EngineLayout:
        """Return the layout of `model` with the tensors that vLLM has quantized.

        layout: of the model without quantization. Raises LayoutError for a tensor that cannot be
        written in place.
        """


def quantizations() -> dict[str, Quantization]:
    """Return the registered ones, by `rollout.quantization`."""
    return {name: entry.load() for name, entry in plugins("quantizations").items()}


@contextmanager
def writable_weights() -> Iterator[PostLoadProcessing]:
    """While open, models that vLLM loads keep weights that can be written in place."""
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
    from vllm.model_executor.model_loader import base_loader
    from vllm.platforms.cpu import CpuPlatform

    post_load = PostLoadProcessing()
    run = partial(post_load.run, base_loader.process_weights_after_loading)
    with ExitStack() as stack:
        stack.enter_context(patch.object(base_loader, "process_weights_after_loading", run))
        create = _on_huge_pages(base_loader.BaseModelLoader.create_model)
        stack.enter_context(patch.object(base_loader.BaseModelLoader, "create_model", create))
        choose = staticmethod(_without_copies(CpuPlatform.get_attn_backend_cls))
        stack.enter_context(patch.object(CpuPlatform, "get_attn_backend_cls", choose))
        rotate = of_all_heads(RotaryEmbedding.forward_cpu)
        stack.enter_context(patch.object(RotaryEmbedding, "forward_cpu", rotate))
        for quantization in quantizations().values():
            stack.enter_context(quantization.watched())
        yield post_load


def _on_huge_pages(create: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """Return vLLM's function that creates a model without values, with weights on huge pages."""

    def created(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = create(*args, **kwargs)
        for weight in model.parameters():
            prefer_huge_pages(weight.untyped_storage())
        return model

    return created


def _without_copies(choose: Callable[..., str]) -> Callable[..., str]:
    """Return vLLM's choice of attention on a CPU, but without copies of MLA's weights for AMX."""

    def chosen(selected: Any, attn_selector_config: Any, **options: Any) -> str:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if attn_selector_config.use_mla:
            selected = AttentionBackendEnum.CPU_MLA
        return choose(selected, attn_selector_config=attn_selector_config, **options)

    return chosen


def of_all_heads(
    rotate: Callable[..., tuple[Tensor, Any]],
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return vLLM's rotary embedding on a CPU, also where heads are a dimension (MLA, LFM2).

    Its operator takes the last dimension for all heads. A layer that is built keeps this one.
    """

    def rotated(
        layer: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if positions.ndim > 1:
            return rotate(layer, positions, query, key)
        flat = rotate(layer, positions, query.flatten(1), None if key is None else key.flatten(1))
        return flat[0].view_as(query), None if key is None else flat[1].view_as(key)

    return rotated


class PostLoadProcessing:
    """vLLM's processing of models after loading, run so that their weights stay writable.

    CPU linears read their `weight` as it is, by `inference_linear` (vLLM packs it away). The CPU
    kernels of experts and of Gated DeltaNet's convolutions read packed weights only: the plain ones
    are kept as well and packed again by `rerun`. For every other tensor whose content changed, the
    permutation is detected; `adapt_layout` applies it.
    """

    def __init__(self) -> None:
        # Layers that read packed weights only, with `plain_parameters`; `pack(layer)` packs them.
        self._packed: list[Any] = []
        self._attention: list[tuple[Any, str, torch.nn.Parameter]] = []
        # By id of the model (a draft model has the same names): tensor → its permutation, or why it
        # cannot be written in place.
        self._reorderings: dict[int, dict[str, list[Copy]]] = defaultdict(dict)
        self._problems: dict[int, dict[str, str]] = defaultdict(dict)

    def run(
        self, process: Callable[..., None], model: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        """Call `process(model, *args, **kwargs)`, vLLM's own function, with the weights kept."""
        from vllm.model_executor.layers import utils
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        experts_class = cpu_moe.CPUUnquantizedExperts
        pack_experts = experts_class.process_weights_after_loading
        pack_convolution = partial(_pack_convolution, utils.dispatch_cpu_unquantized_gemm)
        convolutions = _delta_net_convolutions(model)

        def keep_and_pack(pack: Callable[[Any], object], layer: Any) -> None:
            layer.plain_parameters, layer.pack = dict(layer.named_parameters(recurse=False)), pack
            self._packed.append(layer)
            pack(layer)

        def use_plain_weight(layer: Any, remove_weight: bool) -> None:
            if layer in convolutions:
                keep_and_pack(pack_convolution, layer)
            else:
                layer.cpu_linear = inference_linear

        def keep_and_pack_experts(experts: Any, layer: torch.nn.Module) -> None:
            keep_and_pack(partial(pack_experts, experts), layer)

        loaded = {name: _state(tensor) for name, tensor in engine_tensors(model).items()}
        with (
            patch.object(utils, "dispatch_cpu_unquantized_gemm", use_plain_weight),
            patch.object(experts_class, "process_weights_after_loading", keep_and_pack_experts),
        ):
            process(model, *args, **kwargs)
            self._find_changes(model, loaded)
        # vLLM's attention uses AMX. Its own linears would have asked the kernel's permission.
        torch.cpu._init_amx()
        self._attention += _attention_parameters(model)

    def adapt_layout(
        self, model: torch.nn.Module, layout: EngineLayout, shapes: Mapping[str, Shape]
    ) -> EngineLayout:
        """Return the layout of `model`'s tensors as vLLM has reordered or quantized them.

        shapes: of the trained parameters. Raises LayoutError for a tensor that vLLM has replaced or
        computed instead.
        """
        problems = self._problems[id(model)]
        for name in sorted(layout.destinations.keys() & problems.keys()):
            raise LayoutError(
                f"vLLM changed the weight {name!r} after loading, for a kernel of its own, by more "
                f"than a regular permutation ({problems[name]}), so it cannot be written in "
                "place. Choose another kernel (for experts: moe_backend='triton'; for MLA on a "
                "CPU with AMX: attention_backend='CPU_MLA')."
            )
        layout = reordered_layout(layout, self._reorderings[id(model)], shapes)
        for quantization in quantizations().values():
            layout = quantization.layout(model, layout)
        return layout

    def weights(self, model: torch.nn.Module, layout: EngineLayout) -> dict[str, Tensor]:
        """Return the tensors that `layout` writes by name; the plain ones of packed layers."""
        tensors = self._tensors(model)
        names = (*layout.destinations, *layout.scales)
        return {name: tensors[name] for name in names if name in tensors}

    def restore_plain_weights(self) -> None:
        """Make the plain weights of packed layers their parameters again, for vLLM's loader."""
        for layer in self._packed:
            for name, parameter in layer.plain_parameters.items():
                layer.register_parameter(name, parameter)

    def rerun(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """Derive again what vLLM derived from the weights after loading."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        self.restore_plain_weights()
        for layer in self._packed:
            layer.pack(layer)
        for backend, attribute, parameter in self._attention:
            setattr(backend, attribute, parameter)
        module: Any
        for module in model.modules():
            if is_deferred_attention_layer(module):  # MLA multiplies out its key-value projection
                module.process_weights_after_loading(dtype)

    def _find_changes(self, model: torch.nn.Module, loaded: Mapping[str, _State]) -> None:
        """Detect how each tensor differs from what was loaded, layer by layer."""
        changed: dict[str, list[str]] = defaultdict(list)
        for name, tensor in self._tensors(model).items():
            before = loaded.get(name)
            if before is not None and _state(tensor) != before:
                changed[name.rpartition(".")[0]].append(name)
        for path, names in changed.items():
            layer = model.get_submodule(path)
            try:
                reordering = self._reordering(model, layer, {n: loaded[n] for n in names})
                self._reorderings[id(model)] |= reordering
            except LayoutError as error:
                self._problems[id(model)] |= dict.fromkeys(names, str(error))

    def _reordering(
        self, model: torch.nn.Module, layer: torch.nn.Module, loaded: Mapping[str, _State]
    ) -> dict[str, list[Copy]]:
        """Return how vLLM has permuted tensors of a layer.

        Raises LayoutError if it did anything else.
        """
        tensors = {name: tensor for name, tensor in self._tensors(model).items() if name in loaded}
        for name, tensor in tensors.items():
            if (spec := TensorSpec.of(tensor)) != loaded[name][0]:
                raise LayoutError(f"{name}: {loaded[name][0]} became {spec}")
        method = getattr(layer, "quant_method", None)
        if method is None:
            raise LayoutError(f"{next(iter(loaded))}: no layer's quantization method did it")

        def process_again() -> None:
            method.process_weights_after_loading(layer)
            for name, tensor in self._tensors(model).items():
                if name in tensors and tensor.data_ptr() != tensors[name].data_ptr():
                    raise LayoutError(f"{name}: processing it allocates it anew every time")

        try:
            reorderings = find_reordering(tensors, process_again)
        except Exception as error:
            for name, tensor in tensors.items():
                getattr(layer, name.rpartition(".")[2]).data = tensor
            if isinstance(error, LayoutError):
                raise
            raise LayoutError(f"it cannot be processed again: {error}") from error
        for name, copies in reorderings.items():
            if _state(undo_reordering(tensors[name], copies)) != loaded[name]:
                raise LayoutError(f"{name}: processing it again does something else")
        return reorderings

    def _tensors(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Return all parameters and buffers by name; the plain ones of packed layers.

        LoRA slots wrap a layer as `base_layer`; the names are those without slots.
        """
        registered = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        plain = {
            f"{prefix}.{name}": parameter
            for prefix, layer in model.named_modules()
            for name, parameter in getattr(layer, "plain_parameters", {}).items()
        }
        tensors = registered | plain
        return {name.replace(".base_layer.", "."): tensor.data for name, tensor in tensors.items()}


def _state(tensor: Tensor) -> _State:
    (checksum,) = bit_checksums([tensor.data])
    return TensorSpec.of(tensor), checksum


def _delta_net_convolutions(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the layers whose weight the CPU's Gated DeltaNet takes as vLLM packs it.

    vLLM packs other convolutions of their shape, too, and then fails to read them.
    """
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    return {m.conv1d for m in model.modules() if isinstance(m, QwenGatedDeltaNetAttention)}


def _pack_convolution(dispatch: Callable[[Any, bool], None], layer: Any) -> None:
    """Let vLLM's `dispatch` pack the weight of `layer` where the CPU has a kernel for that."""
    layer.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)  # it sets its data
    dispatch(layer, True)


def _attention_parameters(model: torch.nn.Module) -> list[tuple[Any, str, torch.nn.Parameter]]:
    """Return (attention backend, attribute, parameter) for backends that read model parameters.

    Some replace the parameter by a cast copy when they first run (sinks in float16 on a CPU), which
    a sync does not write. `rerun` puts the parameter back, and the backend casts it again.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    return [
        (backend, attribute, value)
        for module in model.modules()
        if (backend := getattr(module, "impl", None)) is not None
        for attribute, value in getattr(backend, "__dict__", {}).items()
        if isinstance(value, torch.nn.Parameter) and id(value) in parameters
    ]
