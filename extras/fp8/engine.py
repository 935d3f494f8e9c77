"""Engines that vLLM quantizes as it loads (`quantization="fp8_per_block"`).

vLLM quantizes each rank's own tensors in blocks of 128 x 128, all at once when a layer is loaded,
then lets the matrix product's kernel change them. `block_quantize` computes the same bits, so the
reshard writes quantized weights and scales in place, provided that the kernel left them as they
were. That is found out while vLLM loads: each layer's tensors are compared with `block_quantize` of
what was loaded.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from hybridengine.engine.vllm.post_load import Quantization
from hybridengine.fp8.base import DequantizedWeights
from hybridengine.kernels.block_quantize import block_quantize
from hybridengine.sync.layout import EngineLayout, LayoutError, Quantized, TensorSpec

_SCALE = "_scale_inv"  # appended to the name of a weight
_PROCESS = "process_weights_after_loading"
_VERDICTS = "_hybridengine_quantized"  # of a layer: weight → why it cannot be written, or None


class Fp8(Quantization):
    """Blocks of 128 x 128 in float8_e4m3fn, by `kernels.block_quantize`."""

    vllm_name = "fp8_per_block"
    parameters = DequantizedWeights

    def arguments(self) -> dict[str, Any]:
        # DeepGEMM would quantize again, to scales that are powers of two.
        os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")
        return {"quantization": self.vllm_name}

    def fits(self, vllm_config: Any) -> bool:
        from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

        return isinstance(vllm_config.quant_config, OnlineQuantizationConfig)

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for method, process in _checking_processes():
                stack.enter_context(patch.object(method, _PROCESS, process))
            yield

    def layout(self, model: torch.nn.Module, layout: EngineLayout) -> EngineLayout:
        return quantized_layout(model, layout)


quantization = Fp8()


def check_quantization(wanted: Callable[[], bool]) -> None:
    """As `Fp8.watched` from now on, for the layers for which `wanted()` is true."""
    for method, process in _checking_processes(wanted):
        setattr(method, _PROCESS, process)


def _checking_processes(
    wanted: Callable[[], bool] = lambda: True,
) -> list[tuple[type, Callable[..., None]]]:
    """Return vLLM's classes that quantize in blocks, and their `_PROCESS`, with the check."""
    from vllm.model_executor.layers.quantization.online import fp8

    classes = (fp8.Fp8PerBlockOnlineLinearMethod, fp8.Fp8PerBlockOnlineMoEMethod)
    return [(method, _checking(getattr(method, _PROCESS), wanted)) for method in classes]


def _checking(process: Callable[..., None], wanted: Callable[[], bool]) -> Callable[..., None]:
    @functools.wraps(process)
    def process_and_check(method: Any, layer: torch.nn.Module) -> None:
        done = getattr(layer, "_already_called_process_weights_after_loading", False)
        if done or not wanted():
            process(method, layer)
            return
        names = [name for name, _ in layer.named_parameters(recurse=False)]
        loaded = {n: getattr(layer, n).data for n in names if n.endswith("weight")}
        process(method, layer)
        setattr(layer, _VERDICTS, {n: _difference(layer, n, v) for n, v in loaded.items()})

    return process_and_check


def _difference(layer: torch.nn.Module, name: str, loaded: torch.Tensor) -> str | None:
    """Return how a weight and its scales differ from `block_quantize(loaded)`; None if equal."""
    expected = block_quantize(loaded)
    for suffix, right in zip(("", _SCALE), expected, strict=True):
        tensor = getattr(layer, name + suffix, None)
        if tensor is None:
            return f"it has no {name}{suffix}"
        if (spec := TensorSpec.of(tensor)) != TensorSpec.of(right):
            return f"{name}{suffix} is {spec}, expected {TensorSpec.of(right)}"
        if not torch.equal(tensor.view(torch.uint8), right.view(torch.uint8)):
            return f"{name}{suffix} has other values"
    return None


def quantized_layout(model: torch.nn.Module, layout: EngineLayout) -> EngineLayout:
    """Return the layout of `model` with the tensors that vLLM has quantized.

    layout: of the model without quantization. Raises LayoutError for a tensor that cannot be
    written in place.
    """
    specs, quantized = dict(layout.destinations), dict[str, Quantized]()
    for path, layer in model.named_modules():
        method, verdicts = getattr(layer, "quant_method", None), getattr(layer, _VERDICTS, None)
        if verdicts is None:
            is_wrapper = hasattr(layer, "base_layer")  # of a LoRA slot
            if getattr(method, "uses_meta_device", False) and not is_wrapper:
                raise LayoutError(
                    f"vLLM quantizes {path!r} with {type(method).__name__}; expected "
                    f"quantization={Fp8.vllm_name!r}, blocks of 128 x 128 in FP8"
                )
            continue
        for weight, problem in verdicts.items():
            name = f"{path.replace('.base_layer', '')}.{weight}"
            recorded, spec = layout.destinations.get(name), TensorSpec.of(getattr(layer, weight))
            if problem is None and (recorded is None or recorded.shape != spec.shape):
                problem = f"its shape is {spec.shape}, without quantization {recorded}"
            if problem is None and name in layout.by_loader:
                problem = "vLLM computes it as it loads"
            if problem is not None or recorded is None:
                raise LayoutError(
                    f"the quantized weight {name!r} cannot be written in place: {problem}. vLLM "
                    "has changed it for a kernel of its own: choose another kernel (DeepGEMM on "
                    "Hopper: VLLM_USE_DEEP_GEMM_E8M0=0, on Blackwell: VLLM_USE_DEEP_GEMM=0; for "
                    "experts: moe_backend='triton'), or build the engine without quantization"
                )
            specs[name] = spec
            quantized[name] = Quantized(recorded.dtype, name + _SCALE)
    return replace(layout, destinations=specs, quantized=dict(sorted(quantized.items())))
