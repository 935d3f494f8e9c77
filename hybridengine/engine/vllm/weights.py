"""The weights, LoRA slot and caches of a vLLM model in this process, as a target of the reshard."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from hybridengine.engine.interface import InFlightUpdate
from hybridengine.engine.vllm.environment import own_model_classes
from hybridengine.engine.vllm.post_load import PostLoadProcessing, quantizations
from hybridengine.sync.adapter import Adapter
from hybridengine.sync.checks import config_differences, in_words, plain_values
from hybridengine.sync.layout import CheckpointLayout, EngineLayout, LayoutError
from hybridengine.sync.loader import record_layout_by_layer
from hybridengine.sync.weight_target import ReshardError, WeightTarget

_STEPS_BETWEEN_LOOKS = 8  # a look for new weights is a broadcast to the engine's ranks


class ModelWeights(WeightTarget):
    """The weights of a model that vLLM has loaded in this process.

    model, config: of a worker, its `VllmConfig`.
    checkpoint: of the trained model.
    post_load: ran as vLLM loaded the model.
    runner: of the worker, where it is known.
    """

    dtype: torch.dtype

    def __init__(
        self,
        model: Any,
        config: Any,
        checkpoint: CheckpointLayout,
        post_load: PostLoadProcessing,
        runner: Any = None,
    ) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank

        self._model, self._config, self._runner = model, config, runner
        self._checkpoint, self._post_load = checkpoint, post_load
        self.slot: LoraSlot | None = None
        self._check_config()
        self.tp_rank = get_tensor_model_parallel_rank()
        self.dtype = config.model_config.dtype
        self.optional_parameters = optional_parameters(checkpoint)
        self.model_config = plain_values(config.model_config.hf_config.to_dict())
        self.config_differences = config_differences(checkpoint.config, self.model_config)
        try:
            self.layout = record_engine_layout(config, checkpoint, self.dtype)
        except LayoutError as error:
            raise LayoutError(f"{error}{in_words(self.config_differences)}") from error
        self.layout = post_load.adapt_layout(self._model, self.layout, checkpoint.parameters)

    def check_ready(self) -> None:
        self._check_config()

    def _check_config(self) -> None:
        """Raise LayoutError for quantization and parallelism that are not supported."""
        config, parallel = self._config, self._config.parallel_config
        method = config.model_config.quantization
        if method and not any(known.fits(config) for known in quantizations().values()):
            names = [known.vllm_name for known in quantizations().values()]
            raise LayoutError(
                f"quantization: got {method!r}, expected None or one of {names}. vLLM computes "
                "quantized weights from those that it loads, which a sync does only for these. "
                "Build the engine without quantization, from a config.json without "
                "quantization_config"
            )
        for key in ("pipeline_parallel_size", "data_parallel_size"):
            if (size := getattr(parallel, key)) > 1:
                raise LayoutError(
                    f"{key}: got {size}, expected 1. The reshard supports tensor and expert "
                    "parallel engines; for data parallelism build one engine per group of ranks. "
                    "What a sync into data-parallel ranks that share experts would move: "
                    "hybridengine reshard plan --dp --ep"
                )
        if parallel.enable_eplb or getattr(self._runner, "eplb_state", None) is not None:
            raise LayoutError(
                "enable_eplb: vLLM's expert load balancing moves and copies experts between ranks "
                "while it generates, so a sync would write experts where others are now. Build the "
                "engine with enable_eplb=False"
            )

    def weights(self) -> dict[str, torch.Tensor]:
        return self._post_load.weights(self._model, self.layout)

    def load_full(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self.slot is not None:
            raise LayoutError(
                "some weights of this model go through vLLM's own loader, which does not know them "
                "under LoRA slots; merge the adapters (reshard.lora=merged)"
            )
        self._post_load.restore_plain_weights()
        self._model.load_weights(self._checkpoint.assemble(weights))
        self._post_load.rerun(self._model, self.dtype)

    def adapter_weights(self) -> dict[str, torch.Tensor]:
        return {} if self.slot is None else self.slot.weights()

    def load_adapters(self, adapters: Iterable[tuple[str, Adapter]], version: int) -> None:
        if self.slot is None:
            raise LayoutError("this engine was built without LoRA slots; give it adapter_rank")
        self.slot.fill(adapters, version, self.dtype)

    def finish_update(self) -> None:
        self._post_load.rerun(self._model, self.dtype)


class VllmWeights(ModelWeights):
    """The weights of `llm`, a `vllm.LLM` whose worker is in this process, and its caches.

    checkpoint, post_load: as `ModelWeights`.
    """

    def __init__(
        self, llm: Any, checkpoint: CheckpointLayout, post_load: PostLoadProcessing
    ) -> None:
        self._llm = llm
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        config = llm.llm_engine.vllm_config
        super().__init__(runner.get_model(), config, checkpoint, post_load, runner)

    def check_ready(self) -> None:
        super().check_ready()
        engine = self._llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        scheduled = sum(scheduler.get_request_counts())
        if running := max(engine.get_num_unfinished_requests(), scheduled):
            raise LayoutError(
                f"the engine has {running} unfinished request{'s' * (running > 1)}, whose cached "
                "keys and values belong to the current weights: let them finish, or abort them "
                "(llm.llm_engine.abort_request), before the sync"
            )

    def finish_update(self) -> None:
        super().finish_update()
        self.reset_caches()

    def reset_caches(self) -> None:
        """Drop cached keys and values, a KV connector's too, and cached image embeddings."""
        if not self._llm.reset_prefix_cache(reset_connector=True):
            raise ReshardError(
                "vLLM did not drop its prefix cache: blocks of a request, or of a KV connector, "
                "are still in use. Let all requests finish, or abort them, and sync again"
            )
        self._llm.llm_engine.reset_encoder_cache()


def optional_parameters(checkpoint: CheckpointLayout) -> frozenset[str]:
    """Return what vLLM's loader may skip.

    These are persistent buffers and, of a vision tower whose features are taken before its last
    layer (`vision_feature_layer`), the rest, which gets no gradient.
    """
    if "vision_feature_layer" not in checkpoint.config:
        return checkpoint.buffers
    return checkpoint.buffers | {n for n in checkpoint.parameters if "vision_tower." in n}


def slot_options(rank: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for one slot for adapters of up to `rank`; {} for rank 0.

    shapes: of the trained parameters. Raises LayoutError for a rank or a model without slots.
    """
    from vllm.config.lora import MaxLoRARanks

    if not rank:
        return {}
    fits = [size for size in get_args(MaxLoRARanks) if size >= rank]
    if not fits:
        raise LayoutError(
            f"lora_rank: vLLM's slots hold at most rank {max(get_args(MaxLoRARanks))}, got {rank}; "
            "merge the adapters instead (reshard.lora=merged)"
        )
    if any(".experts." in name for name in shapes) and not torch.cuda.is_available():
        raise LayoutError(
            "vLLM has no CPU kernel for experts in an engine with LoRA slots; merge the adapters "
            "instead (reshard.lora=merged)"
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(fits)}


class LoraSlot:
    """The one LoRA slot of a vLLM model runner, filled from memory.

    vLLM itself loads adapters from folders only, and keeps serving the old one under a known id.
    Here each version is a new adapter, so neither the slot nor cached prefixes of an older one are
    used.

    Attributes:
        request: that selects the adapters; None before the first `fill`.
        rank: of the adapters in it.
        scale: which its factors are still to be multiplied by; 1.0 unless `keep_scale` was called.
    """

    def __init__(self, runner: Any) -> None:
        self._manager = runner.lora_manager._adapter_manager
        mapper = getattr(runner.model, "hf_to_vllm_mapper", None)
        self._mapper = mapper and mapper.get_rename_mapper()
        self.request: Any = None
        self.rank, self.scale, self._keeps_scale = 0, 1.0, False

    def keep_scale(self) -> None:
        """Leave the scale of adapters, which is the same for all, out of their factors."""
        self._keeps_scale = True

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the memory of the slot: the factors that vLLM multiplies by, by layer."""
        stacks = {
            f"{name}.{factor}": getattr(module, f"{factor}_stacked", ())
            for name, module in self._manager.modules.items()
            for factor in ("lora_a", "lora_b")
        }
        return {
            f"{name}.{part}": tensor
            for name, stack in stacks.items()
            for part, tensor in enumerate(stack if isinstance(stack, tuple) else (stack,))
        }

    def fill(
        self, adapters: Iterable[tuple[str, Adapter]], version: int, dtype: torch.dtype
    ) -> None:
        """Write full adapters, by parameter name, into the slot; `request` then selects them.

        Raises LayoutError for a parameter that vLLM has no slot for.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights
        from vllm.lora.request import LoRARequest
        from vllm.lora.utils import parse_fine_tuned_lora_name

        packed = {part for parts in self._manager.packed_modules.values() for part in parts}
        layers, scales = {}, set[float]()
        for name, adapter in adapters:
            of_peft = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"
            module, _ = parse_fine_tuned_lora_name(of_peft, self._mapper)
            if module not in packed and module not in self._manager.modules:
                raise LayoutError(
                    f"vLLM has no LoRA slot for {name!r}; remove it from target_modules, or merge "
                    "the adapters (reshard.lora=merged)"
                )
            scale = 1.0 if self._keeps_scale else adapter.scale
            left = (adapter.left.float() * scale).to(dtype)
            right = adapter.right.to(dtype, copy=True)
            rank = right.shape[0]
            layers[module] = LoRALayerWeights(module, rank, rank, right, left, scaling=1.0)
            scales.add(adapter.scale)
        number = version + 1  # vLLM counts from 1
        self._manager.remove_all_adapters()
        self.rank = max(layer.rank for layer in layers.values())
        if self._keeps_scale:
            (self.scale,) = scales
        self._manager.add_adapter(LoRAModel(number, self.rank, layers))
        self._manager.activate_adapter(number)
        self.request = LoRARequest(f"version-{version}", number, "held in memory")


def record_engine_layout(
    vllm_config: Any, checkpoint: CheckpointLayout, dtype: torch.dtype
) -> EngineLayout:
    """Return the layout of vLLM's model on the current TP rank, as if it were not quantized.

    The model is built once more without weights, and its loader recorded there.
    """
    from vllm import envs
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    layers = vllm_config.compilation_config.static_forward_context.values()  # of the loaded model
    no_mla = envs.VLLM_MLA_DISABLE or any(isinstance(layer, Attention) for layer in layers)
    config = copy.copy(vllm_config)
    config.quant_config = None
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}  # else "Duplicate layer name"
    device = config.device_config.device  # as vLLM's loader; _UninitializedOnMeta takes precedence
    with (
        set_default_torch_dtype(dtype),
        torch.device(device),
        _UninitializedOnMeta(),
        own_model_classes(),
        patch.object(envs, "VLLM_MLA_DISABLE", no_mla, create=True),  # as in `exact_engine`
    ):
        model = initialize_model(vllm_config=config)
        return record_layout_by_layer(model, model.load_weights, checkpoint, dtype)


class _UninitializedOnMeta(TorchFunctionMode):
    """Create uninitialised tensors, as which weights begin, on the meta device.

    All others stay real, because some models compute with constants while they are built.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _UNINITIALIZED:
            kwargs |= {"device": "meta", "pin_memory": False}
        return func(*args, **kwargs)


_UNINITIALIZED = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


@contextmanager
def updates_between_steps(engine: Any, in_flight: InFlightUpdate) -> Iterator[None]:
    """While open, `engine`, vLLM's `LLMEngine`, takes weights that are due instead of a step."""
    step, numbers = engine.step, count(1)

    def update_or_step() -> list[Any]:
        if next(numbers) % _STEPS_BETWEEN_LOOKS or not in_flight.is_due():
            return step()
        outputs = _finish_scheduled_steps(engine, step)
        in_flight.update()
        return outputs

    with patch.object(engine, "step", update_or_step):
        yield


def _finish_scheduled_steps(engine: Any, step: Callable[[], list[Any]]) -> list[Any]:
    """Finish the steps that vLLM has scheduled ahead, without further ones; return their outputs.

    There are such steps with asynchronous scheduling: the next one starts before the outputs of
    the last one are read.
    """
    from vllm.v1.core.sched.interface import PauseState

    core = engine.engine_core.engine_core
    outputs: list[Any] = []
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    try:
        while core.batch_queue:
            outputs += step()
    finally:
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
    return outputs


def refresh_caches(llm: Any, keep_kv: bool) -> None:
    """Let no request find keys and values of older weights in vLLM's prefix cache.

    keep_kv: running requests keep theirs; else vLLM preempts them, and computes all their tokens
    again with the new weights before the next one.
    """
    core = llm.llm_engine.engine_core.engine_core
    if not keep_kv:
        core.scheduler.reset_prefix_cache(reset_running_requests=True)
    drop_cached_prefixes(core)


def drop_cached_prefixes(core: Any) -> None:
    """Let no later request find keys and values of now in the caches of `core`, an `EngineCore`.

    Running requests keep their own. What they add to them depends on those, and is cached so that
    nobody else finds it. No step may be scheduled. Raises ReshardError where a KV connector fails.
    """
    for request in core.scheduler.requests.values():
        if request.num_computed_tokens:
            request.cache_salt = request.request_id
            request.block_hashes.clear()
            request.update_block_hashes()
    caches = core.scheduler.kv_cache_manager
    cached = {b.block_id for b in caches.block_pool.blocks if b.block_hash is not None}
    caches.evict_blocks(cached)  # from the prefix cache, not from the requests that hold them
    if not core.scheduler.reset_connector_cache():
        raise ReshardError(
            "the KV connector of vLLM did not drop keys and values of older weights; build the "
            "engine without kv_transfer_config (rollout.engine_kwargs.vllm; of a server: "
            "--kv-transfer-config), or set rollout.in_flight_update to off"
        )
    core.reset_encoder_cache()
