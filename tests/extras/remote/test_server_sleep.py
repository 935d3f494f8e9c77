"""What a server's worker does with its weights when vLLM puts it to sleep."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.ranks import run_ranks

pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
pytestmark = pytest.mark.multirank


def sleep_body(rank: int, world_size: int) -> list[object]:
    from vllm.v1.worker.gpu_worker import Worker

    seen: list[object] = []
    Worker.sleep = lambda self, level=1: seen.append(level)  # needs a GPU

    from hybridengine.remote.vllm_transfer.server_worker import ServerWorker
    from hybridengine.remote.vllm_transfer.transfer import HybridEngineTransfer, register

    register()
    server = ServerWorker.__new__(ServerWorker)
    server.weights = SimpleNamespace(discarded=False)
    transfer = HybridEngineTransfer.__new__(HybridEngineTransfer)
    worker = SimpleNamespace(weight_transfer_engine=transfer)
    Worker.sleep(worker, level=2)  # before trainers have called: nothing to note
    transfer.server = server
    for level in (1, 2):
        Worker.sleep(worker, level)
        seen.append(server.weights.discarded)
    Worker.sleep(SimpleNamespace(weight_transfer_engine=None), level=2)
    return seen


def test_level_2_discards_the_weights():
    assert run_ranks(sleep_body, 1) == [[2, 1, False, 2, True, 2]]
