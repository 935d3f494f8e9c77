"""A worker of a vLLM server as the receiving end of a weight sync from trainers elsewhere.

Init info, the same for all workers of a server: the store through which trainers and servers meet.

    {"host": "trainer-0", "port": 29500, "prefix": "…", "index": 0, "timeout_s": 480}

Each worker then runs a `WeightReceiver`. Whoever drives the server pauses it, calls
`update_weights`, which takes part in one sync, sets the weight version, which drops cached
prefixes (`in_flight.drop_cached_prefixes`), and resumes it (`hybridengine.remote.servers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from transformers import AutoConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from hybridengine.engine.vllm.options import check_plugins
from hybridengine.engine.vllm.post_load import PostLoadProcessing
from hybridengine.engine.vllm.sampling import FusedSampler, request_generators
from hybridengine.engine.vllm.weights import ModelWeights
from hybridengine.model.parameters import checkpoint_layout_from_config
from hybridengine.model.stored import inner_names, trained_config
from hybridengine.remote.sync.receiver import WeightReceiver
from hybridengine.run.errors import ConfigError
from hybridengine.sync.checks import config_differences, plain_values
from hybridengine.sync.layout import CheckpointLayout, LayoutError
from hybridengine.sync.weight_target import EngineState, ReshardError

_CONNECT_TIMEOUT = timedelta(seconds=30)


@dataclass
class StoreInfo(WeightTransferInitInfo):
    """host, port: of a `TCPStore`. prefix: of the trainers' keys in it. index: number of this
    server among the engines. timeout_s: as `WeightReceiver`. samples: whether the trainers train on
    what this server samples, which must then be of the model's own distribution. records_kept:
    whether it returns the vocabulary entries that truncated sampling kept."""

    host: str
    port: int
    prefix: str
    index: int
    timeout_s: float = 300.0
    samples: bool = False
    records_kept: bool = False


def _weights_sleep() -> bool:
    """Return whether vLLM's allocator has freed the memory of this process's weights."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    allocations = allocator.pointer_to_data.values() if allocator is not None else ()
    return any(data.tag == "weights" and data.is_asleep for data in allocations)


class _WorkerWeights(ModelWeights):
    """The weights of a worker, which its server may have put to sleep."""

    def check_ready(self) -> None:
        super().check_ready()
        if _weights_sleep():
            raise LayoutError(
                "the server sleeps, so its weights have no memory: wake them up before the sync "
                "(POST /wake_up?tags=weights)"
            )


def _with_stored_names(checkpoint: CheckpointLayout, inner: Mapping[str, str]) -> CheckpointLayout:
    """Return the layout with the names of tensors that vLLM reads; inner: of `inner_names`."""

    def stored(name: str) -> str:
        for pattern, own in inner.items():
            if name.startswith(own):
                return pattern.removeprefix("^") + name.removeprefix(own)
        return name

    return replace(
        checkpoint,
        tensors={stored(name): shape for name, shape in checkpoint.tensors.items()},
        copies={stored(name): copies for name, copies in checkpoint.copies.items()},
    )


class ServerWorker:
    """Receives weights into the model of one worker of a server, for as long as this runs.

    model, config: of the worker. With --language-model-only, the trained model may be the language
      model of a checkpoint of `WRAPPERS`.
    post_load: ran as vLLM loaded the model.
    sampler: ours; None where the worker has the sampler of vLLM's second model runner (GPUs).
    """

    def __init__(
        self, model: Any, config: Any, post_load: PostLoadProcessing, sampler: FusedSampler | None
    ) -> None:
        source, trust = config.model_config.model, config.model_config.trust_remote_code
        trained = AutoConfig.from_pretrained(source, trust_remote_code=trust)
        images, inner = config.model_config.multimodal_config, dict[str, str]()
        if images is not None and images.language_model_only:
            text = trained_config(trained)
            if inner := inner_names(source, text):
                trained = text
        checkpoint = _with_stored_names(checkpoint_layout_from_config(trained, trust), inner)
        self.weights = _WorkerWeights(model, config, checkpoint, post_load)
        if inner:
            served = plain_values(config.model_config.hf_text_config.to_dict())
            self.weights.model_config = served
            self.weights.config_differences = config_differences(checkpoint.config, served)
        self._receiver: WeightReceiver | None = None
        self._sampler, self._recording = sampler, ExitStack()
        self._compute_logits = model.compute_logits
        model.compute_logits = self._compute_from_complete_weights
        request_generators().__enter__()  # for the rest of the server's life

    @property
    def has_joined(self) -> bool:
        return self._receiver is not None

    def join(self, info: StoreInfo) -> None:
        """Become an engine of the trainers at a store; collective over the server's workers.

        Raises ConfigError where packages installed here change the distribution that is sampled, or
        where its sampler cannot record what it kept.
        """
        self.leave()
        if info.samples:
            check_plugins("uninstall these packages where the server runs")
        if info.records_kept:
            if self._sampler is None:
                raise ConfigError(
                    "this server has the sampler of vLLM's second model runner (GPUs), which would "
                    "return the full vocabulary of requests without truncation, too; set "
                    "algorithm.sampling_replay=off, or generate without rollout.servers"
                )
            self._recording.enter_context(self._sampler.recording())
        store = dist.TCPStore(
            info.host, info.port, is_master=False, timeout=_CONNECT_TIMEOUT, wait_for_workers=False
        )
        self._receiver = WeightReceiver(
            self.weights,
            dist.PrefixStore(info.prefix, store),
            index=info.index,
            timeout_s=info.timeout_s,
        )

    def receive(self, version: int | None) -> None:
        """Take part in the next sync. Raises ReshardError if it is to another version."""
        assert self._receiver is not None
        report = self._receiver.receive()
        if version not in (None, report.version):
            raise ReshardError(
                f"update_weights was called for version {version}, but the trainers synced to "
                f"version {report.version}; call it again for the next sync"
            )

    def weights_state(self) -> dict[str, Any]:
        """Return the version of the weights and a checksum of their bits as they are now."""
        state = EngineState.of(self.weights)
        return {"version": state.version, "checksum": state.checksum}

    def discard_weights(self) -> None:
        """Refuse to generate until the next sync, which then writes frozen weights too."""
        self.weights.discarded = True

    def leave(self) -> None:
        """End the connections to trainers; the weights stay as they are."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None
        self._recording.close()

    def _compute_from_complete_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Compute logits; where the weights are partially updated, raise, which ends the server.

        Only a client that resumes a server after a failed update gets that far.
        """
        self.weights.check_complete()
        return self._compute_logits(*args, **kwargs)
