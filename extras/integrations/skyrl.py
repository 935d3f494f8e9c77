"""SkyRL's weight sync by ours (skyrl 0.4, FSDP): exact slices from the trainers to its servers.

    from hybridengine.integrations import skyrl

    skyrl.patch()                   # in the driver, before SkyRL's entry point is imported

SkyRL's servers are then started with our backend of vLLM's weight-transfer interface, and its
policy workers send with `HybridEngineTrainerTransfer`, where SkyRL gathers every parameter on every
rank. Pausing, sleep and the prefix cache stay SkyRL's. The processes that Ray starts for the job
are patched as they start. HYBRIDENGINE_SECRET must be in the environment of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from hybridengine.run.messages import broadcast_value, run_on_all_ranks
from hybridengine.sync.layout import LayoutError

from ._patching import Patches

__all__ = ["patch", "patched", "unpatch"]

_SYNC = "backends.skyrl_train.weight_sync"
_RAY = "train.utils.utils.initialize_ray"


def get_vllm_receive_backend(weight_sync_backend: str, colocate_all: bool) -> str:
    """Return the backend of vLLM's weight-transfer interface that the servers are started with."""
    return "hybridengine"


def build_trainer_engine(
    *,
    ie_cfg: Any,
    colocate_all: bool,
    rank: int,
    inference_world_size: int,
    source_factory: Callable[[Any, str], Any],
    draft_source_factory: Callable[[Any], Any],
    server_urls: list[str],
    data_parallel_size: int,
    base_model_path: str | None = None,
) -> Any:
    """Return the trainers' half of vLLM's weight transfer for this rank. Collective.

    Raises LayoutError, on every rank, for what cannot be sent; ReshardError if a server does not
    take part.
    """
    import ray
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    from ._servers import TIMEOUT_S, connect_servers

    module = run_on_all_ranks(
        lambda: trained_module(ie_cfg, source_factory, data_parallel_size), LayoutError
    )
    host = broadcast_value(ray.util.get_node_ip_address(), str)
    clients = [HTTPVLLMWeightSyncClient(url, TIMEOUT_S) for url in server_urls]
    return connect_servers(module, clients, host, transfer=_engine_class())


def trained_module(ie_cfg: Any, source_factory: Callable[[Any, str], Any], dp_size: int) -> Any:
    if dp_size > 1:
        raise LayoutError(
            f"data_parallel_size: got {dp_size}, expected 1. Start an engine of its own for each "
            "replica (generator.inference_engine.num_engines)"
        )
    drafting = getattr(ie_cfg, "speculative_config", None) or {"method": "ngram"}
    if (method := drafting.get("method")) != "ngram":
        raise LayoutError(
            f"speculative_config: got method {method!r}, expected 'ngram': the weights of a draft "
            "model are not sent"
        )
    if getattr(ie_cfg, "fp8_weight_sync_mode", None) is not None:
        raise LayoutError(
            "fp8_weight_sync_mode: got a mode, expected null; a server of quantization "
            "fp8_per_block gets its weights quantized (docs/reshard.md)"
        )
    source = source_factory(None, "nccl")
    if type(source).__name__ != "FsdpWeightSource":
        raise LayoutError(
            f"the policy's weight source is a {type(source).__name__}, expected SkyRL's "
            "FsdpWeightSource (trainer.strategy=fsdp)"
        )
    if source.weight_prefix:
        raise LayoutError(
            f"the names of the weights get the prefix {source.weight_prefix!r}: the text part of a "
            "multimodal model (policy.language_model_only) cannot be sent to a multimodal engine"
        )
    return source.model


@cache
def _engine_class() -> Any:
    """Return our trainers' half with what SkyRL's worker reads of a trainer engine."""
    from skyrl.backends.skyrl_train.weight_sync.weight_senders import SkyrlTrainerCapabilities

    from hybridengine.remote.vllm_transfer.trainer import HybridEngineTrainerTransfer

    return type(
        "SkyrlHybridEngineTransfer", (SkyrlTrainerCapabilities, HybridEngineTrainerTransfer), {}
    )


def initialize_ray(cfg: Any) -> None:
    """Start Ray as SkyRL does; every process of the job patches SkyRL as it starts."""
    import ray

    init = ray.init

    def init_with_hook(*args: Any, runtime_env: Any = None, **options: Any) -> Any:
        hook = {"worker_process_setup_hook": f"{__name__}.patch"}
        return init(*args, runtime_env={**(runtime_env or {}), **hook}, **options)

    ray.init = init_with_hook
    try:
        _PATCHES.original(_RAY)(cfg)
    finally:
        ray.init = init


_PATCHES = Patches(
    "skyrl",
    {
        "weight_sync": {
            f"{_SYNC}.get_vllm_receive_backend": get_vllm_receive_backend,
            f"{_SYNC}.weight_senders.build_trainer_engine": build_trainer_engine,
            _RAY: initialize_ray,
        }
    },
)
patch, unpatch, patched = _PATCHES.patch, _PATCHES.unpatch, _PATCHES.patched
