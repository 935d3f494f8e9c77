"""vLLM's weights as the reshard sees them: recorded, live, and what vLLM derives from them.

After loading, vLLM may pack, reorder or multiply out weights for its kernels. A reordered weight is
written in its new order. Derived tensors are made again after every update. A weight that vLLM
itself no longer reads, or has computed, is refused by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from hybridengine.reshard.execute.failures import ReshardError
from hybridengine.reshard.plan.coverage import describe_differences
from hybridengine.reshard.record.loader import engine_tensors
from hybridengine.reshard.record.reordering import (
    find_reordering,
    reordered_layout,
    undo_reordering,
)
from hybridengine.rollout.vllm.lora import LoraSlot
from hybridengine.rollout.vllm.record import record_vllm, unused_parameters
from hybridengine.sharding.adapter import Adapter
from hybridengine.sharding.checksums import sums_of_bits
from hybridengine.sharding.copies import Copy
from hybridengine.sharding.layout import Checkpoint, EngineLayout, LayoutError, TensorSpec
from hybridengine.sharding.weight_target import WeightTarget

__all__ = ["VllmWeights", "WeightsInPlace", "live_tensors", "replaced"]


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of `model` by the names that they have without LoRA slots."""
    own = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    return {name.replace(".base_layer.", "."): tensor.data for name, tensor in own.items()}


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
        self.unused = unused_parameters(checkpoint)
        self.differences = describe_differences(
            checkpoint.config, config.model_config.hf_config.to_dict()
        )
        try:
            self.layout = record_vllm(config, checkpoint, self.dtype)
        except LayoutError as error:
            raise LayoutError(f"{error}{self.differences}") from error
        self.layout = in_place.follow(self._model, self.layout, checkpoint.parameters)

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
    What the content of every other tensor went through is found out and followed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._experts: list[tuple[Any, torch.nn.Module, dict[str, torch.nn.Parameter]]] = []
        self._attention: list[tuple[Any, str, torch.nn.Parameter]] = []
        # By model (a draft model has the same names): tensor → how it was reordered, or why it
        # cannot be written in place.
        self._reorderings: dict[int, dict[str, list[Copy]]] = defaultdict(dict)
        self._problems: dict[int, dict[str, str]] = defaultdict(dict)

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

        loaded = {name: _Loaded.of(tensor) for name, tensor in engine_tensors(model).items()}
        with (
            replaced(utils, "dispatch_cpu_unquantized_gemm", use_live_weight),
            replaced(cpu_moe.CPUUnquantizedExperts, "process_weights_after_loading", keep_and_pack),
        ):
            process(model, *args, **kwargs)
            self._find_changes(model, loaded)
        self._attention += _attention_parameters(model)

    def _find_changes(self, model: torch.nn.Module, loaded: Mapping[str, _Loaded]) -> None:
        """Compare all tensors with what was loaded, and ask the layers that changed theirs how."""
        changed: dict[str, list[str]] = defaultdict(list)
        for name, tensor in self._tensors(model).items():
            before = loaded.get(name)
            if before is not None and _Loaded.of(tensor) != before:
                changed[name.rpartition(".")[0]].append(name)
        for path, names in changed.items():
            layer = model.get_submodule(path)
            try:
                found = self._reordering(model, layer, {n: loaded[n] for n in names})
                self._reorderings[id(model)] |= found
            except LayoutError as error:
                self._problems[id(model)] |= dict.fromkeys(names, str(error))

    def _reordering(
        self, model: torch.nn.Module, layer: torch.nn.Module, loaded: Mapping[str, _Loaded]
    ) -> dict[str, list[Copy]]:
        """How vLLM has reordered tensors of a layer. Raises LayoutError if it did anything else."""
        tensors = {name: tensor for name, tensor in self._tensors(model).items() if name in loaded}
        for name, tensor in tensors.items():
            if TensorSpec.of(tensor) != loaded[name].spec:
                raise LayoutError(f"{name}: {loaded[name].spec} became {TensorSpec.of(tensor)}")
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
            if _Loaded.of(undo_reordering(tensors[name], copies)) != loaded[name]:
                raise LayoutError(f"{name}: processing it again does something else")
        return reorderings

    def follow(
        self, model: torch.nn.Module, layout: EngineLayout, shapes: Mapping[str, tuple[int, ...]]
    ) -> EngineLayout:
        """The layout with its tensors as vLLM has reordered them after loading.

        shapes: of the trained parameters. Raises LayoutError for a tensor that vLLM has replaced or
        computed instead.
        """
        problems = self._problems[id(model)]
        for name in sorted(layout.destinations.keys() & problems.keys()):
            raise LayoutError(
                f"vLLM changed the weight {name!r} after loading, for a kernel of its own, by more "
                f"than a regular permutation ({problems[name]}), so it cannot be written in "
                "place. Choose another kernel (for experts: moe_backend='triton')."
            )
        return reordered_layout(layout, self._reorderings[id(model)], shapes)

    def _tensors(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """All tensors of the model by name; the plain ones of packed layers."""
        prefixes = {id(module): name for name, module in model.named_modules()}
        plain = {
            f"{prefixes[id(layer)]}.{name}": parameter.data
            for _, layer, parameters in self._experts
            if id(layer) in prefixes
            for name, parameter in parameters.items()
        }
        return live_tensors(model) | plain

    def weights(self, model: torch.nn.Module, layout: EngineLayout) -> dict[str, torch.Tensor]:
        """The tensors that `layout` writes, by name; the plain ones of packed layers."""
        own = self._tensors(model)
        return {name: own[name] for name in layout.destinations if name in own}

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
        for backend, attribute, parameter in self._attention:
            setattr(backend, attribute, parameter)
        for module in model.modules():
            if is_deferred_attention_layer(module):  # MLA multiplies out its key-value projection
                module.process_weights_after_loading(dtype)


class _Loaded(NamedTuple):
    """A tensor as it was loaded: its spec and a checksum of its content."""

    spec: TensorSpec
    checksum: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Loaded:
        (checksum,) = sums_of_bits([tensor.data])
        return cls(TensorSpec.of(tensor), checksum)


def _attention_parameters(model: torch.nn.Module) -> list[tuple[Any, str, torch.nn.Parameter]]:
    """(attention backend, attribute, parameter) where a backend reads a parameter of the model.

    Some replace it by a cast copy when they first run (sinks in float16 on a CPU), which a sync
    does not reach: it is put back, and they cast it again.
    """
    own = {id(parameter) for parameter in model.parameters()}
    return [
        (backend, attribute, value)
        for module in model.modules()
        if (backend := getattr(module, "impl", None)) is not None
        for attribute, value in getattr(backend, "__dict__", {}).items()
        if isinstance(value, torch.nn.Parameter) and id(value) in own
    ]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
