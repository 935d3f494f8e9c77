"""TRL with a vLLM server, whose weights come in slices from all trainer ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridengine.integrations import trl as adapter
from hybridengine.integrations._patching import PatchError
from hybridengine.remote.messages import wait_until
from hybridengine.remote.servers import VllmServer
from tests.extras.integrations.trl_on_ranks import TIMEOUT_S, body, one_rank_body
from tests.extras.remote.stand_in_server import SETTINGS, answer_requests, serve
from tests.ports import free_port
from tests.ranks import Ranks, message_of, run_ranks
from tests.tiny_models import save_tiny

pytest.importorskip("trl", reason="pip install --no-deps trl==1.16.0")
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

Results = list[dict[str, Any]]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return save_tiny("llama", tmp_path / "model")


# What is replaced


def theirs() -> list[Any]:
    from trl.experimental import async_distillation, async_grpo
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    return [
        VLLMGeneration._init_vllm,
        VLLMGeneration.sync_weights,
        VLLMClient.init_communicator,
        async_grpo.AsyncGRPOTrainer._sync_weight_merged,
        async_grpo.weight_transfer.WeightTransferClient.init_weight_transfer,
        async_distillation.AsyncDistillationTrainer._sync_weight_merged,
        async_distillation.weight_transfer.WeightTransferClient.init_weight_transfer,
    ]


def test_groups_are_replaced_and_put_back() -> None:
    before = theirs()
    with adapter.patched():
        changed = [a is not b for a, b in zip(theirs(), before, strict=True)]
        assert changed == [True] * 3 + [False] * 4
        with adapter.patched("async_sync"):
            assert all(a is not b for a, b in zip(theirs(), before, strict=True))
    assert theirs() == before


def test_another_signature_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

    def sync(self: Any, t0: float, more: int) -> None: ...

    monkeypatch.setattr(AsyncGRPOTrainer, "_sync_weight_merged", sync)
    before = theirs()
    with pytest.raises(PatchError, match=r"_sync_weight_merged of trl .* found \(self, t0, more\)"):
        adapter.patch("sync", "async_sync")
    assert theirs() == before


# Whose code sends


def settings_of(backend: str | None) -> dict[str, Any]:
    config = {"backend": backend} if backend else None
    return {"vllm_config": {"weight_transfer_config": config}}


CHOICES = {
    "ours": "True",
    "nccl": "False",
    "nccl on a CPU": "TRL's own sync to it needs GPUs, not cpu: restart it with HYBRIDENGINE_SECRE",
    "none": "with the weight-transfer backend None: restart it with HYBRIDENGINE_SECRET",
    "obstacle": "but FSDP1. Or restart the server with the backend 'nccl'",
    "no routes": "VLLM_SERVER_DEV_MODE=1",
    "gone": "Connection refused",
    "secret": "HYBRIDENGINE_SECRET is not set",
}


@pytest.mark.multirank
def test_the_server_decides_and_errors_reach_all_ranks(two_ranks: Results) -> None:
    first, second = (rank["choices"] for rank in two_ranks)
    assert first.keys() == CHOICES.keys()
    for case, text in CHOICES.items():
        assert text in first[case], case
        assert second[case] == first[case], case


def test_obstacles() -> None:
    from hybridengine.integrations.trl.server import obstacle_of

    plain = SimpleNamespace(fsdp_version=None, is_zero3=False)
    quantized = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)]
    )
    linear = torch.nn.Linear(2, 2)
    assert obstacle_of(linear, plain) == ""
    assert obstacle_of(linear, SimpleNamespace(fsdp_version=2, is_zero3=False)) == ""
    assert "fsdp_version" in obstacle_of(linear, SimpleNamespace(fsdp_version=1, is_zero3=False))
    assert "ZeRO-3" in obstacle_of(linear, SimpleNamespace(fsdp_version=None, is_zero3=True))
    assert "quantized" in obstacle_of(quantized, plain)


def test_a_trainer_that_sends_by_itself_is_told() -> None:
    """OnlineDPOTrainer calls the client itself; it would wait for the server to join."""
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient.__new__(VLLMClient)
    client.base_url = "http://server"
    client.get_server_info = lambda: SETTINGS
    with (
        adapter.patched("sync"),
        pytest.raises(ValueError, match="this trainer sends full tensors over NCCL itself"),
    ):
        client.init_communicator(device="cpu")


# The weights


@pytest.mark.multirank
@pytest.mark.parametrize("case", ["fsdp", "plain", "lora", "async", "distillation"])
def test_a_servers_weights_are_the_trainers(two_ranks: Results, case: str) -> None:
    first, second = (rank[case] for rank in two_ranks)
    assert first["served"] == first["trained"]
    if case in ("async", "distillation"):
        assert (first["version"], second["version"]) == (2, 0)
        return
    for one, other in zip(first["sent"], second["sent"], strict=True):
        if case != "lora":  # base and factors travel, in parts
            assert one + other == first["bytes"]
        if case == "fsdp":  # replicated parameters come from one of the ranks
            assert 0.4 < one / other < 2.5


@pytest.mark.exhaustive
@pytest.mark.multirank
def test_one_process_without_a_launcher(model: str) -> None:
    with serving(model) as url:
        [result] = run_ranks(one_rank_body, 1, model, url)
    assert result["served"] == result["trained"]
    assert result["sent"] == [result["bytes"]] * 2


# A transfer that does not go on


@pytest.mark.multirank
def test_trls_own_sync_leaves_the_other_ranks_in_a_collective(two_ranks: Results) -> None:
    """TRL #7103: `full_tensor()` of all ranks between the sends of rank 0."""
    first, second = (rank["without ours"] for rank in two_ranks)
    assert "RuntimeError: Weight sync to the vLLM server" in first
    assert "full_tensor" in second, "the rank waits for rank 0, which has raised"


# Not "it has not answered within …": no rank waits for a server whose call has failed.
UPDATE_FAILED = "no engine is left to sync to version 1 (engine 0: engine 0, update_weights: "


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("fails", "MemoryError: of the server"),
        ("update fails", UPDATE_FAILED),
        ("joined, update fails", UPDATE_FAILED),
        ("ends", "Connection refused"),
    ],
)
def test_ours_raises_on_all_ranks(two_ranks: Results, case: str, text: str) -> None:
    for message, version in (rank[case] for rank in two_ranks):
        assert "ReshardError: the weights of server http://127.0.0.1" in message
        assert text in message
        assert "resume the training from its last checkpoint" in message
        assert version == 0


@pytest.mark.multirank
def test_other_transfers_stay_with_trl(two_ranks: Results) -> None:
    first, second = (rank["other transfers"] for rank in two_ranks)
    assert first == ["init", "sync", "sync", "init", "sync", "sync"]
    assert second == ["sync", "sync", "sync", "sync"]


# The servers and ranks of the tests above; the ranks import TRL and vLLM once


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    def fail(request: Any) -> None:
        raise MemoryError("of the server")

    model = save_tiny("llama", tmp_path_factory.mktemp("trl") / "model")
    names = ("hybridengine", "nccl", "none", "no routes", "gone", "fails", "update fails", "ends")
    ports = {name: free_port() for name in names}
    for name in ("hybridengine", "nccl", "none"):
        backend = None if name == "none" else name
        answer_requests(ports[name], {"/server_info": settings_of(backend)})
    answer_requests(ports["no routes"], {"/health": None})
    ours = {"/server_info": settings_of("hybridengine"), "/pause": None}
    joined = ours | {"/init_weight_transfer_engine": None}
    answer_requests(ports["fails"], joined | {"/start_weight_update": fail})
    update = {"/start_weight_update": None, "/update_weights": fail, "/finish_weight_update": None}
    answer_requests(ports["update fails"], joined | update)
    ending = answer_requests(ports["ends"], ours | {"/pause": lambda body: end(ending)})
    with serving(model) as url:
        ports["serving"] = int(url.rpartition(":")[2])
        return run_ranks(body, 2, model, ports)


def end(server: Any) -> None:
    server.shutdown()  # returns when it accepts no more; the next connection is refused
    server.server_close()


@contextmanager
def serving(model: str) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"

    def answers() -> bool | None:
        return message_of(VllmServer(url, 0, TIMEOUT_S).check_health) == "no error" or None

    with Ranks(serve, 1, port, model, 0.0):
        wait_until(answers, 5 * TIMEOUT_S, "the server")
        yield url


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_real_servers_and_trainers(tmp_path: Path) -> None:
    from tools.trainers import trl

    logging.getLogger(__name__).info("%s", trl.run(tmp_path))
