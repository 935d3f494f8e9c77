"""vLLM's weights as the reshard sees them: recorded, live, and what vLLM derives from them.

After loading, vLLM may pack, reorder or multiply out weights for its kernels. Such derived tensors
are made again after every update; a weight that vLLM itself no longer reads is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hybridengine.reshard.coverage import describe_differences
from hybridengine.reshard.failures import ReshardError
from hybridengine.reshard.layers import record_engine
from hybridengine.reshard.layout import Checkpoint, EngineLayout, LayoutError, TensorSpec
from hybridengine.reshard.lora import Adapter
from hybridengine.rollout.engine import WeightTarget
from hybridengine.rollout.vllm_lora import LoraSlot

__all__ = ["VllmWeights", "WeightsInPlace", "live_weights", "record_vllm", "replaced"]


def live_weights(model: torch.nn.Module, layout: EngineLayout) -> dict[str, torch.Tensor]:
    """The tensors of `model` that `layout` writes, by name."""
    own = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    own = {name.replace(".base_layer.", "."): tensor for name, tensor in own.items()}  # LoRA slots
    return {name: own[name].data for name in layout.destinations if name in own}


class _Unallocated(TorchFunctionMode):
    """Uninitialised tensors, which is how weights begin, take no memory: they are on meta.

    Everything else stays real, because some models compute with constants as they are built.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        if func in _UNINITIALISED:
            kwargs |= {"device": "meta", "pin_memory": False}
        return func(*args, **kwargs)


_UNINITIALISED = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


def record_vllm(vllm_config: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> EngineLayout:
    """Build the engine's model once more, without its weights, and record its loader there."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}  # else "Duplicate layer name"
    device = config.device_config.device  # as vLLM's own loader; _Unallocated goes before it
    with set_default_torch_dtype(dtype), torch.device(device), _Unallocated():
        model = initialize_model(vllm_config=config)
        return record_engine(model, model.load_weights, checkpoint, dtype)


class VllmWeights(WeightTarget):
    """The weights of one worker of vLLM, in this process.

    llm: a `vllm.LLM` whose worker is in this process. checkpoint: what the trained model's
    checkpoint is made of. in_place: what was open, or ran, as vLLM loaded its model.
    """

    def __init__(self, llm: Any, checkpoint: Checkpoint, in_place: WeightsInPlace) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank

        self._llm = llm
        self._runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._model = self._runner.get_model()
        self._checkpoint, self._in_place = checkpoint, in_place
        self._slot: LoraSlot | None = None
        config = llm.llm_engine.vllm_config
        self._check_parallelism()
        self.tp_rank = get_tensor_model_parallel_rank()
        self.dtype = config.model_config.dtype
        self.unused = checkpoint.buffers
        self.differences = describe_differences(
            checkpoint.config, config.model_config.hf_config.to_dict()
        )
        try:
            self.layout = record_vllm(config, checkpoint, self.dtype)
        except LayoutError as error:
            raise LayoutError(f"{error}{self.differences}") from error
        in_place.check(self._model, self.layout)

    def check_ready(self) -> None:
        self._check_parallelism()
        engine = self._llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        scheduled = sum(scheduler.get_request_counts())
        if running := max(engine.get_num_unfinished_requests(), scheduled):
            raise LayoutError(
                f"the engine has {running} unfinished request{'s' * (running > 1)}, whose cached "
                "keys and values belong to the current weights: let them finish, or abort them "
                "(llm.llm_engine.abort_request), before the sync"
            )

    def _check_parallelism(self) -> None:
        """Raise LayoutError for an engine whose ranks hold other weights than the plan assumes."""
        parallel = self._llm.llm_engine.vllm_config.parallel_config
        for key in ("pipeline_parallel_size", "data_parallel_size"):
            if (size := getattr(parallel, key)) > 1:
                raise LayoutError(
                    f"{key}: got {size}, expected 1. The reshard knows tensor and expert parallel "
                    "engines; for data parallelism build one engine per group of ranks"
                )
        if parallel.enable_eplb or getattr(self._runner, "eplb_state", None) is not None:
            raise LayoutError(
                "enable_eplb: vLLM's expert load balancing moves and copies experts between ranks "
                "while it generates, so a sync would write experts where others are now. Build the "
                "engine with enable_eplb=False"
            )

    def weights(self) -> dict[str, torch.Tensor]:
        return self._in_place.weights(self._model, self.layout)

    def load_whole(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._slot is not None:
            raise LayoutError(
                "some weights of this model go through vLLM's own loader, which does not know them "
                "under LoRA slots; merge the adapters (reshard.lora=merged)"
            )
        self._in_place.unpack()
        self._model.load_weights(self._checkpoint.assemble(weights))
        self._in_place.derive(self._model, self.dtype)

    def load_adapters(self, adapters: Iterable[tuple[str, Adapter]], version: int) -> None:
        if self._slot is None:
            raise LayoutError("this engine was built without LoRA slots; give it lora_rank")
        self._slot.fill(adapters, version, self.dtype)

    def _forget_cached_prefixes(self) -> None:
        self._in_place.derive(self._model, self.dtype)
        self._reset_caches()

    def _reset_caches(self) -> None:
        """Drop cached keys and values, here and in a connector, and cached image embeddings."""
        if not self._llm.reset_prefix_cache(reset_connector=True):
            raise ReshardError(
                "vLLM did not drop its prefix cache: blocks of a request, or of a KV connector, "
                "are still in use. Let all requests finish, or abort them, and sync again"
            )
        self._llm.llm_engine.reset_encoder_cache()


class WeightsInPlace(ExitStack):
    """Open while vLLM loads a model; keeps its weights writable in place, then follows them.

    The CPU linears stay on their `weight` (vLLM otherwise packs it away). The CPU expert kernels
    know packed weights only: the plain ones are kept beside them and packed again by `derive`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._experts: list[tuple[Any, torch.nn.Module, dict[str, torch.nn.Parameter]]] = []
        self._before: dict[str, torch.Tensor] = {}

    def __enter__(self) -> WeightsInPlace:
        from vllm.model_executor.model_loader import base_loader

        process = partial(self.process, base_loader.process_weights_after_loading)
        self.enter_context(replaced(base_loader, "process_weights_after_loading", process))
        return self

    def process(self, process: Callable, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Run what vLLM does to `model` after loading, with its weights kept."""
        from vllm.model_executor.layers import utils
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        self._pack = cpu_moe.CPUUnquantizedExperts.process_weights_after_loading

        def use_live_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
            layer.cpu_linear = torch.nn.functional.linear

        def keep_and_pack(experts: Any, layer: torch.nn.Module) -> None:
            self._experts.append((experts, layer, dict(layer.named_parameters(recurse=False))))
            self._pack(experts, layer)

        self._before |= {name: p.data for name, p in model.named_parameters()}
        with (
            replaced(utils, "dispatch_cpu_unquantized_gemm", use_live_weight),
            replaced(cpu_moe.CPUUnquantizedExperts, "process_weights_after_loading", keep_and_pack),
        ):
            process(model, *args, **kwargs)

    def check(self, model: torch.nn.Module, layout: EngineLayout) -> None:
        """Raise LayoutError for a weight that vLLM replaced after loading by something else."""
        for name, now in self.weights(model, layout).items():
            before = self._before.get(name)
            if before is not None and now.data_ptr() != before.data_ptr():
                raise LayoutError(
                    f"vLLM replaced the weight {name!r} after loading ({TensorSpec.of(before)} by "
                    f"{TensorSpec.of(now)}) for a kernel of its own, so it cannot be written in "
                    "place. Choose another kernel (for experts: moe_backend='triton')."
                )
        self._before.clear()

    def weights(self, model: torch.nn.Module, layout: EngineLayout) -> dict[str, torch.Tensor]:
        """The tensors that `layout` writes, by name; the plain ones of packed layers."""
        prefixes = {id(module): name for name, module in model.named_modules()}
        plain = {
            f"{prefixes[id(layer)]}.{name}": parameter.data
            for _, layer, parameters in self._experts
            for name, parameter in parameters.items()
        }
        live = live_weights(model, layout)
        return live | {name: plain[name] for name in plain.keys() & live.keys()}

    def unpack(self) -> None:
        """Put the plain weights of packed layers back, for vLLM's loader."""
        for _, layer, plain in self._experts:
            for name, parameter in plain.items():
                layer.register_parameter(name, parameter)

    def derive(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """Make again what vLLM makes of its weights after loading."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        self.unpack()
        for experts, layer, _ in self._experts:
            self._pack(experts, layer)
        for module in model.modules():
            if is_deferred_attention_layer(module):  # MLA multiplies out its key-value projection
                module.process_weights_after_loading(dtype)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
