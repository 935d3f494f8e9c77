"""The trainers' half of vLLM's weight-transfer interface: exact slices to engines elsewhere.

    engine = WeightTransferTrainerFactory.trainer_init(  # every trainer rank
        HybridEngineTrainerInitInfo("trainer-0", rank=rank),
        client=HTTPVLLMWeightSyncClient("http://10.0.0.5:8000"),
        source=ModuleSource(fsdp_model),
    )
    engine.send_weights()  # every trainer rank, after every step, while the engines are paused

Every rank sends slices of its own shards to the workers (`WeightSender`); rank 0 alone calls the
engines' control plane, as with vLLM's own backends. Works with vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Self

import torch.distributed as dist
from vllm.distributed.weight_transfer import (
    RayVLLMWeightSyncClient,
    TrainerWeightTransferEngine,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from hybridengine.remote.vllm_transfer.engine_sender import EngineSender, sender_arguments
from hybridengine.run.failures import one_line
from hybridengine.run.messages import check_secret, raise_on_all_ranks, run_on_all_ranks
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.resharder import SyncReport
from hybridengine.sync.weight_target import ReshardError

__all__ = ["HybridEngineTrainerInitInfo", "HybridEngineTrainerTransfer", "register_trainer"]

BACKEND = "hybridengine"
_LOOK_S = 0.5  # between two looks for workers that have ended
CALLS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)


def register_trainer() -> None:
    """Register the trainers' half with vLLM in this process; does nothing the second time."""
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, HybridEngineTrainerTransfer)


@dataclass
class HybridEngineTrainerInitInfo(TrainerInitInfo):
    """Init info of the backend "hybridengine", the same on every trainer rank except for `rank`.

    master_address: of rank 0, as the workers of the engines reach it. The store through which
      trainers and engines meet listens there.
    master_port: of that store; 0: a free one.
    bucket_bytes, timeout_s: as `WeightSender`. A call of an engine may also take `timeout_s`.
    rank: of this process in torch.distributed's default group.

    Raises TypeError for options of vLLM's other backends (`world_size`, `packed`, …).
    """

    backend: ClassVar[str] = BACKEND

    master_address: str
    master_port: int = 0
    bucket_bytes: int | None = None
    timeout_s: float = 300.0

    def __new__(cls, *args: Any, **options: Any) -> Self:
        known = {field.name for field in fields(cls)}
        if unknown := sorted(options.keys() - known):
            raise TypeError(
                f"the backend {BACKEND!r} has no {', '.join(unknown)}; expected "
                f"{', '.join(sorted(known))}. Trainers and workers tell each other how many they "
                "are, and slices always travel packed, in two buckets of bucket_bytes"
            )
        return super().__new__(cls)


class HybridEngineTrainerTransfer(TrainerWeightTransferEngine[HybridEngineTrainerInitInfo]):
    """Sends the weights of a source to the engines of a client. On every trainer rank.

    client: of one engine (a server, an `LLM`), or a list with one for each engine; used on rank 0.
      A Ray client with several handles is one engine per handle.
    source: see `sender_arguments`.

    Attributes:
        version: of the last `send_weights`, from 1; the engines' weight version is its text.
        report: of the last `send_weights`.
    """

    init_info_cls = HybridEngineTrainerInitInfo

    def __init__(self, init_info: HybridEngineTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank, self.version = init_info.rank, 0
        self.report: SyncReport | None = None
        self._info = init_info
        self._clients = clients_of(client) if self.is_sender else []
        self.sender: EngineSender | None = EngineSender(
            init_info.master_address,
            port=init_info.master_port,
            bucket_bytes=init_info.bucket_bytes,
            timeout_s=init_info.timeout_s,
        )
        self.sender.set_model(sender_arguments(source), len(self._clients))
        join = self.sender.join_info
        self._raise_on_all_ranks(self._call("init_weight_transfer_engine", self._engines, join))

    @classmethod
    def trainer_init(
        cls, init_info: HybridEngineTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Meet the engines; the first `send_weights` plans. Collective.

        Raises RuntimeError without a default process group. Raises on every rank: LayoutError for
        an init info, a client or a source that cannot be used; ReshardError if an engine cannot be
        reached or does not take part.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                f"the backend {BACKEND!r} needs the trainers' process group; call "
                "torch.distributed.init_process_group first (for one trainer: with world_size=1)"
            )
        run_on_all_ranks(lambda: _check(init_info, client, source), LayoutError)
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Send the current weights to all engines and set their weight version. Collective.

        Raises ReshardError, on every rank, if an engine does not have them; the others do, and the
        next call sends to all again. Raises RankFailedError if a trainer rank is lost.
        """
        if self.sender is None:
            raise RuntimeError("the trainer engine was shut down; call trainer_init again")
        self.version += 1
        if failed := self._call("start_weight_update", self._engines):
            self._call("finish_weight_update", self._engines - failed.keys())
        self._raise_on_all_ranks(failed)
        update = self._begin("update_weights", self._engines, lambda _: {"version": self.version})
        try:
            self.report = self.sender.send(self.version, absent=update.failed.get)
        except Exception as error:
            for failure in update.failed.copy().values():  # often the cause
                error.add_note(failure)
            raise
        failed = update.wait(self._info.timeout_s, self.sender.ended)
        updated = self._engines - failed.keys()
        failed |= self._call("finish_weight_update", updated, lambda _: str(self.version))
        self._raise_on_all_ranks(failed)

    def shutdown(self) -> None:
        """End the connections to the engines, whose weights stay as they are."""
        if self.sender is not None:
            self.sender.close()
        self.sender = None

    # The engines

    @property
    def _engines(self) -> set[int]:
        """Numbers of the engines on rank 0, which calls them; empty on other ranks."""
        return set(range(len(self._clients)))

    def _call(
        self, name: str, engines: set[int], argument: Callable[[int], Any] | None = None
    ) -> dict[int, str]:
        assert self.sender is not None
        return self._begin(name, engines, argument).wait(self._info.timeout_s, self.sender.ended)

    def _begin(
        self, name: str, engines: set[int], argument: Callable[[int], Any] | None = None
    ) -> _Calls:
        calls = {}
        for index in engines:
            call = getattr(self._clients[index], name)
            calls[index] = partial(call, argument(index)) if argument else call
        return _Calls(name, calls)

    @staticmethod
    def _raise_on_all_ranks(failed: Mapping[int, str]) -> None:
        raise_on_all_ranks("; ".join(failed.values()) or None, ReshardError)


class _Calls:
    """The same call of several engines at a time, each in a thread.

    The threads do not keep the process from ending: a call may last as long as its client lets it.
    failed: engine → why its call failed.
    """

    def __init__(self, name: str, calls: Mapping[int, Callable[[], object]]) -> None:
        self._name, self.failed = name, dict[int, str]()
        self._threads = {
            index: threading.Thread(target=self._run, args=(index, call), daemon=True)
            for index, call in calls.items()
        }
        for thread in self._threads.values():
            thread.start()

    def wait(self, timeout_s: float, ended: Callable[[int], str]) -> dict[int, str]:
        """Wait until all calls have returned, at most `timeout_s` seconds. Return `failed`.

        ended: returns which workers of an engine have ended. Its call is not waited for then: a
          server may notice it late, or never.
        """
        deadline = time.monotonic() + timeout_s
        for index, thread in self._threads.items():
            thread.join(min(_LOOK_S, timeout_s))
            while thread.is_alive() and time.monotonic() < deadline and not ended(index):
                thread.join(_LOOK_S)
            is_late = thread.is_alive()
            lost = ended(index) if is_late or index in self.failed else ""
            if is_late:
                reason = lost or f"it has not returned within {timeout_s:g} s"
                self.failed[index] = f"engine {index}, {self._name}: {reason}"
            elif lost:
                self.failed[index] += f" ({lost})"
        return dict(sorted(self.failed.copy().items()))

    def _run(self, index: int, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            self.failed[index] = f"engine {index}, {self._name}: {one_line(error)}"


def _check(init_info: Any, client: Any, source: Any) -> None:
    """Raise an error for arguments that cannot be used on this rank."""
    if not isinstance(init_info, HybridEngineTrainerInitInfo):
        raise TypeError(
            f"init_info: got a {type(init_info).__name__}, expected HybridEngineTrainerInitInfo"
        )
    if init_info.rank != dist.get_rank():
        raise ValueError(
            f"init_info.rank: got {init_info.rank}, but this process has rank {dist.get_rank()} in "
            "torch.distributed's default group, which must be that of the trainers"
        )
    check_secret("the workers of the engines verify by it what the trainers tell them")
    sender_arguments(source)
    if not init_info.is_sender:
        return
    for each in (clients := clients_of(client)):
        if missing := [name for name in CALLS if not callable(getattr(each, name, None))]:
            raise TypeError(
                f"client: a {type(each).__name__} has no {', '.join(missing)}; expected a "
                "VLLMWeightSyncClient, such as HTTPVLLMWeightSyncClient(url), or a list of them"
            )
    if not clients:
        raise ValueError("client: got none, expected one for each engine")


def clients_of(client: Any) -> list[Any]:
    """Return one client per engine."""
    if type(client) is RayVLLMWeightSyncClient:  # calls each of its engines with the same init info
        return [RayVLLMWeightSyncClient(handle) for handle in client.handles]
    if isinstance(client, list | tuple):
        return [each for one in client for each in clients_of(one)]
    return [client]
