"""The reshard as a backend of vLLM's weight-transfer interface.

Of an engine in the same process:

    llm = LLM(..., distributed_executor_backend="external_launcher",
              weight_transfer_config={"backend": "hybridengine"})
    llm.init_weight_transfer_engine({"init_info": {"model": fsdp_model, "llm": llm}})
    llm.start_weight_update()  # these three on every rank after every step
    llm.update_weights({"update_info": {}})
    llm.finish_weight_update("1")

Of a server, `vllm serve MODEL --weight-transfer-config '{"backend": "hybridengine"}'`, whose init
info is that of `StoreInfo`: see `hybridengine.remote.vllm_transfer.server_worker`. The trainers'
half of that, vLLM's own interface too, is `hybridengine.remote.vllm_transfer.trainer`.

vLLM finds the backend by the entry point `vllm.general_plugins`. It passes the worker's model to a
backend, but not the engine, whose prefix cache must be reset and which must not generate from
partially updated weights. Therefore the init info contains the engine as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from vllm import LLM
from vllm.config import get_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader import base_loader
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_worker import Worker

from hybridengine.engine.exact.operators import exact_engine, use_exact_operators
from hybridengine.engine.vllm.environment import own_model_classes
from hybridengine.engine.vllm.post_load import PostLoadProcessing
from hybridengine.engine.vllm.sampling import FusedSampler, fuse_sampler
from hybridengine.engine.vllm.weights import VllmWeights, drop_cached_prefixes
from hybridengine.fp8.engine import check_quantization
from hybridengine.model.lora import adapter_shards
from hybridengine.model.parameters import checkpoint_layout, parameter_shards, unwrap_peft
from hybridengine.remote.vllm_transfer.server_worker import ServerWorker, StoreInfo
from hybridengine.remote.vllm_transfer.trainer import BACKEND, register_trainer
from hybridengine.run.errors import ModelError
from hybridengine.run.failures import CollectiveGuard
from hybridengine.run.messages import run_on_all_ranks
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.resharder import Resharder
from hybridengine.sync.weight_target import WeightState, operation

POST_LOAD = "_hybridengine_post_load"  # attribute of a model that vLLM loaded for this backend
_SAMPLER = "_hybridengine_sampler"  # attribute of the same model; None where the sampler is vLLM's
_STATE = "_hybridengine_weight_state"  # attribute of an `LLMEngine`
_WORKERS_STATE = "hybridengine_weights_state"  # of vLLM's workers; `server_worker` calls it

_EXACT = "hybridengine_exact"  # of vLLM's additional_config; `server_worker` asks for it


def register() -> None:
    """Register both halves of the backend in this process; does nothing the second time."""
    register_trainer()
    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, HybridEngineTransfer)
    process = base_loader.process_weights_after_loading

    def for_this_backend() -> bool:
        transfer = get_current_vllm_config().weight_transfer_config
        return transfer is not None and transfer.backend == BACKEND

    def process_in_place(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if not for_this_backend():
            process(model, *args, **kwargs)
            return
        post_load = PostLoadProcessing()
        post_load.run(process, model, *args, **kwargs)
        setattr(model, POST_LOAD, post_load)

    base_loader.process_weights_after_loading = process_in_place
    check_quantization(for_this_backend)
    set_weight_version = EngineCore.set_weight_version

    def drop_and_set(self: EngineCore, weight_version: str) -> None:
        transfer = self.vllm_config.weight_transfer_config
        if transfer is not None and transfer.backend == BACKEND:
            drop_cached_prefixes(self)  # also where a paused server keeps its requests
            # Where workers record them.
            self.scheduler.return_sampling_mask = True  # type: ignore[attr-defined]
        set_weight_version(self, weight_version)

    EngineCore.set_weight_version = drop_and_set  # type: ignore[method-assign]
    sleep = Worker.sleep

    def sleep_and_note(self: Worker, level: int = 1) -> None:
        if level == 2 and isinstance(self.weight_transfer_engine, HybridEngineTransfer):
            self.weight_transfer_engine.discard_weights()
        sleep(self, level)

    Worker.sleep = sleep_and_note  # type: ignore[method-assign]
    setattr(Worker, _WORKERS_STATE, _weights_state)
    load_model = Worker.load_model

    def load_and_fuse(self: Worker, *args: Any, **kwargs: Any) -> None:
        config = self.vllm_config
        transfer = config.weight_transfer_config
        if transfer is None or transfer.backend != BACKEND:
            load_model(self, *args, **kwargs)
            return
        more = config.additional_config
        exact = isinstance(more, dict) and bool(more.get(_EXACT))
        with own_model_classes(), _exact_worker(config) if exact else nullcontext():
            load_model(self, *args, **kwargs)
        runner = self.model_runner
        if exact:
            use_exact_operators(runner.get_model(), config.model_config.max_model_len)
        fuse_sampler(runner, exact, ranks=True)
        setattr(runner.get_model(), _SAMPLER, FusedSampler.of(runner))

    Worker.load_model = load_and_fuse  # type: ignore[method-assign]


@contextmanager
def _exact_worker(config: Any) -> Iterator[None]:
    """While open, a worker of a server loads its model with exact attention.

    config: of the server. Raises ModelError where its options do not allow it.
    """
    if config.model_config.use_mla:
        raise ModelError("an exact engine caches every head; start it with VLLM_MLA_DISABLE=1")
    with exact_engine() as options:
        given = {
            "enforce_eager": config.model_config.enforce_eager,
            "attention_backend": getattr(config.attention_config.backend, "name", None),
        }
        if missing := {name: x for name, x in options.items() if given[name] != x}:
            raise ModelError(f"an exact engine needs vLLM's options {missing}; start it with them")
        yield


def _weights_state(self: Worker) -> dict[str, Any]:
    """A method of vLLM's workers, which servers call by `/collective_rpc`."""
    transfer = self.weight_transfer_engine
    if not isinstance(transfer, HybridEngineTransfer):
        raise RuntimeError(f"the worker was started without the weight transfer {BACKEND!r}")
    return transfer.weights_state()


def connect(
    model: torch.nn.Module, llm: LLM, bucket_bytes: int | None, timeout_s: float | None
) -> Resharder:
    """Plan the syncs of an FSDP2 model into `llm`, as `hybridengine.integrations.vllm.connect`."""
    executor = getattr(llm.llm_engine, "model_executor", None)
    worker = getattr(getattr(executor, "driver_worker", None), "worker", None)
    if worker is None:
        raise LayoutError(
            "the LLM does not run in this process: set VLLM_ENABLE_V1_MULTIPROCESSING=0 before "
            'vLLM is imported and build it with distributed_executor_backend="external_launcher"'
        )
    post_load = getattr(worker.model_runner.get_model(), POST_LOAD, None)
    if post_load is None:
        raise LayoutError(
            "the LLM was loaded without this backend, so vLLM may have packed its weights away: "
            f'build it with weight_transfer_config={{"backend": "{BACKEND}"}}'
        )
    source: Any = unwrap_peft(model)
    if not isinstance(source, PreTrainedModel):
        raise TypeError(
            f"model: got a {type(source).__name__}, expected a transformers model, alone or "
            "inside PEFT's wrapper: the names in its checkpoint come from transformers"
        )
    guard = CollectiveGuard(dist.get_rank(), dist.get_world_size(), timeout_s=timeout_s)
    with operation(guard, "connecting to the LLM"), guard.collective("reading its layout"):
        target = run_on_all_ranks(
            lambda: _LlmWeights(llm, checkpoint_layout(source), post_load), LayoutError
        )
    return Resharder(
        lambda: parameter_shards(source),
        target,
        bucket_bytes,
        lambda: adapter_shards(source),
        timeout_s=timeout_s,
    )


def _state_of(llm: LLM) -> WeightState:
    """Return the state of the weights of `llm`, one object for all connections."""
    engine: Any = llm.llm_engine
    if (state := getattr(engine, _STATE, None)) is None:
        state, sleep = WeightState(), engine.sleep

        def recording_sleep(level: int = 1, *args: Any, **kwargs: Any) -> None:
            state.discarded = state.discarded or level == 2
            sleep(level, *args, **kwargs)

        engine.sleep = recording_sleep
        setattr(engine, _STATE, state)
    return state


class _LlmWeights(VllmWeights):
    """The weights of an `LLM` that accepts no request while they are partially updated.

    Frozen weights travel again after another connection's sync, and after `llm.sleep(level=2)`.
    """

    def __init__(self, llm: LLM, *args: Any) -> None:
        super().__init__(llm, *args)
        self.state = _state_of(llm)

    def check_ready(self) -> None:
        super().check_ready()
        if "weights" in self._llm.llm_engine.model_executor.sleeping_tags:
            raise LayoutError(
                "the engine sleeps, so its weights have no memory: call "
                "llm.wake_up(tags=['weights']) before the sync"
            )

    @contextmanager
    def weight_update(self, *args: Any) -> Iterator[None]:
        engine = self._llm.llm_engine
        engine.add_request = lambda *args, **kwargs: self.check_complete()
        with super().weight_update(*args):
            yield
        del engine.add_request


@dataclass
class _InitInfo(WeightTransferInitInfo):
    model: Any  # the FSDP2 model on this rank
    llm: Any  # the engine on this rank
    bucket_bytes: int | None = None
    timeout_s: float | None = None


@dataclass
class _UpdateInfo(WeightTransferUpdateInfo):
    version: int | None = None  # None: the last one + 1
    verify: bool = False


class HybridEngineTransfer(WeightTransferEngine[WeightTransferInitInfo, _UpdateInfo]):
    """One `update_weights` is one complete sync; start and finish have nothing to do."""

    init_info_cls, update_info_cls = WeightTransferInitInfo, _UpdateInfo
    supports_draft_weight_update = False
    _resharder: Resharder | None = None
    server: ServerWorker | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> WeightTransferInitInfo:
        kind = _InitInfo if "model" in init_dict else StoreInfo
        try:
            return kind(**init_dict)
        except TypeError as error:
            raise ValueError(f"init_info of the backend {BACKEND!r}: {error}") from error

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        if isinstance(init_info, _InitInfo):
            self._resharder = connect(**vars(init_info))
            return
        assert isinstance(init_info, StoreInfo)
        if self.server is None:
            own = (getattr(self.model, name) for name in (POST_LOAD, _SAMPLER))
            self.server = ServerWorker(self.model, self.vllm_config, *own)
        self.server.join(init_info)

    def start_weight_update(self) -> None:
        if self._resharder is None and not (self.server and self.server.has_joined):
            raise RuntimeError(
                "call init_weight_transfer_engine first, with the model and the LLM, or with the "
                "store of the trainers"
            )

    def receive_weights(self, update_info: _UpdateInfo) -> None:
        if self._resharder is not None:
            self._resharder.sync(update_info.version, verify=update_info.verify)
        elif self.server is not None:
            if update_info.verify:
                raise ValueError(
                    "update_info: verify is for an engine on the trainers' ranks; trainers "
                    "elsewhere choose it themselves (WeightSender.sync(version, verify=True))"
                )
            self.server.receive(update_info.version)

    def finish_weight_update(self) -> None:
        """Do nothing: a sync sets the weight version itself."""

    def weights_state(self) -> dict[str, Any]:
        """Return version and checksum of a server's weights (`ServerWorker.weights_state`)."""
        if self.server is None:
            raise RuntimeError("the worker has not joined trainers: init_weight_transfer_engine")
        return self.server.weights_state()

    def discard_weights(self) -> None:
        """Note that the worker goes to sleep and keeps no copy of its weights."""
        if self.server is not None:
            self.server.discard_weights()

    def shutdown(self) -> None:
        self._resharder = None
        if self.server is not None:
            self.server.leave()
