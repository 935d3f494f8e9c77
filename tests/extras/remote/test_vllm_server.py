"""A real vLLM server, of one worker or two tensor-parallel ones, updated by FSDP2 trainer ranks."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import socket
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from hybridengine.engine.interface import InFlightUpdate, Prompt, SamplingSpec
from hybridengine.engine.response import Response
from hybridengine.remote.messages import wait_until
from hybridengine.remote.servers import (
    NoServerError,
    ServerEngine,
    ServerLostError,
    ServerPool,
    ServerReceiver,
    TrainersStore,
    VllmServer,
)
from hybridengine.remote.servers.images import ServerPrompt
from hybridengine.remote.sync.records import EngineInfo, SyncStore
from hybridengine.run.errors import RolloutError
from hybridengine.sync.weight_target import StaleWeightsError
from tests.engine.version_oracle import logits_by_version
from tests.extras.remote.overlapped import run_overlapped, update_inside_items
from tests.extras.remote.server_checks import check_checksum, check_generation, scaled
from tests.extras.remote.vllm_server import (
    BLOCK,
    START_S,
    TIMEOUT_S,
    expected_digests,
    metric,
    serving,
)
from tests.ranks import Ranks, message_of, run_ranks
from tests.tiny_models import VOCAB, save_tiny, tiny_config
from tests.train.in_process import Result, small_job

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(START_S + 300)]
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

STALENESS = 2  # of the run with updates inside responses
FACTORS = {1: 1.25, 2: -0.5, 3: 2.0}  # by version: the parameters are multiplied


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("llama", tmp_path_factory.mktemp("server") / "model")


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.exhaustive)])
def tp_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def slow_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "slow"


@pytest.fixture(scope="module")
def server(model: str, tp_size: int, slow_file: Path) -> Iterator[VllmServer]:
    with serving(model, tp_size, slow_file.parent, exact=True) as server:
        yield server


def sharded(model: str) -> Any:
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for layer in loaded.model.layers:
        fully_shard(layer)
    return fully_shard(loaded)


def trainer_body(
    rank: int, world_size: int, model: str, port: int, versions: Sequence[int]
) -> list[str]:
    """Sync to each of `versions`, of FACTORS; the third fails after the first bucket."""
    from hybridengine.model import parameter_shards
    from hybridengine.remote.sync.between_worlds import TrainersEnd
    from hybridengine.remote.sync.sender import WeightSender

    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    trained = sharded(model)
    sender = WeightSender(
        lambda: parameter_shards(trained),
        dist.PrefixStore("w", store),
        num_engines=1,
        bucket_bytes=64 << 10,
        config=trained.config.to_dict(),
        timeout_s=TIMEOUT_S / 2,
    )
    messages = []
    for version in versions:
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(FACTORS[version])
        if version == 3:
            TrainersEnd.send_parts = _fail  # type: ignore[method-assign]
        messages.append(message_of(lambda version=version: sender.sync(version)))
    return messages


def _fail(*args: Any) -> None:
    raise ValueError("injected")


@pytest.mark.exhaustive
def test_a_server_with_fp8_weights(model: str, tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    place = TrainersStore("127.0.0.1", store.port, "w", TIMEOUT_S / 2)
    with serving(model, 1, tmp_path, fp8=True) as server:
        with Ranks(trainer_body, 2, model, store.port, (1, 2)):
            pool = ServerPool(
                [server], lambda s: s.join(place), max_sequences=8, timeout_s=TIMEOUT_S
            )
            engine = ServerEngine(pool, stop_token_ids=[2], max_sequences=8, vocab_size=VOCAB)
            receiver = ServerReceiver(pool, dist.PrefixStore("w", store))
            check_updates(
                server, engine, receiver, partial(expected_digests, model, 1, quantized=True)
            )
            outputs = engine.generate([[5, 9, 33, 2]], SamplingSpec(max_tokens=4), seed=5)
            assert [len(c.token_ids) for c in outputs[0]] == [4]
        pool.close()


def check_updates(
    server: VllmServer,
    engine: ServerEngine,
    receiver: ServerReceiver,
    expected: Callable[..., dict[str, str]],
) -> None:
    """Take versions 1 and 2, and compare the server's weights with `expected(factor=)`."""
    factor = 1.0
    for version in (1, 2):
        factor *= FACTORS[version]
        step_until(lambda version=version: engine.weight_version == version, receiver)
        digests = server.request("POST", "/weight_checker", {"action": "checksum"})
        assert digests["checksums"] == expected(factor=factor)


def step_until(done: Callable[[], bool], receiver: ServerReceiver) -> None:
    def is_done() -> bool | None:
        if receiver.pending():
            receiver.receive()
        return done() or None

    wait_until(is_done, TIMEOUT_S, "an update")


def test_a_run_generates_on_a_server(
    server: VllmServer, tp_size: int, slow_file: Path, tmp_path: Path
) -> None:
    pairs = dict(o.split("=", 1) for o in small_job(tmp_path))
    pairs |= {
        "rollout.name": "auto",
        "rollout.servers": f"[{server.url}]",
        "rollout.max_num_seqs": "8",
        "rollout.dtype": "auto",
        "rollout.exact": "on",
        "trainer.total_training_steps": "2",
    }
    in_flight = {
        "data.max_response_length": "200",
        "actor.ppo_max_token_len_per_gpu": "1024",
        "rollout.in_flight_update": "keep_kv",
        "trainer.mode": "async",
        "trainer.staleness": str(STALENESS),
        "trainer.total_training_steps": "3",
        "trainer.default_local_dir": str(tmp_path / "in_flight"),
    }
    truncated = {
        "rollout.top_p": "0.8",
        "rollout.min_p": "0.02",
        "trainer.default_local_dir": str(tmp_path / "truncated"),
    }
    jobs = [[f"{k}={v}" for k, v in (pairs | x).items()] for x in ({}, truncated, in_flight)]
    before = partial(update_inside_responses, server.url, slow_file)
    run, cut, spanning = run_overlapped(tmp_path, jobs, num_ranks=2, before=before)
    check_versions(spanning)
    assert not run.refused
    keys = ("weight_version", "weights_checksum")
    named = [{tuple(r[key] for key in keys) for r in run.rollouts[f"step_{k}"]} for k in (1, 2)]
    [(first, of_first)], [(second, of_second)] = named
    assert (first, second) == (0, 1) and of_first != of_second
    assert not cut.refused
    # On policy: the server's log-probs are the trainer's.
    rows = [row for result in (run, cut) for row in result.rows if "actor/pg_loss" in row]
    assert [row["training/rollout_probs_diff_max"] for row in rows] == [0.0] * 4
    assert all(1 <= row["num_kept/min"] < row["num_kept/max"] < VOCAB for row in rows[2:])


def check_versions(run: Result) -> None:
    """Check that all tokens have versions; of responses that take longer some have several."""
    assert not run.refused
    metrics = [r for r in run.rows if "actor/pg_loss" in r]
    for step, row in enumerate(metrics, 1):
        spans = 0
        for response in run.rollouts[f"step_{step}"]:
            num_tokens = len(response["log_probs"])
            runs = response.get("weight_versions", [[response["weight_version"], num_tokens]])
            versions = [version for version, _ in runs]
            assert versions == sorted(set(versions)) and sum(n for _, n in runs) == num_tokens
            assert step - 1 - STALENESS <= versions[0] and versions[-1] < step
            spans += len(runs) > 1
        assert row["fully_async/partial/total_partial_num"] == spans
    assert sum(row["fully_async/partial/total_partial_num"] for row in metrics) > 0


def update_inside_responses(url: str, slow: Path) -> None:
    """On a rank: see `update_inside_items`."""
    num_before = 0.0

    def begin() -> None:
        nonlocal num_before
        num_before = metric(url, "generation_tokens_total")
        slow.touch()

    def has_begun() -> bool:
        return metric(url, "generation_tokens_total") >= num_before + 8

    update_inside_items(begin, has_begun, slow.unlink)


class EndlessResponses(ServerEngine):
    """Responses have max_tokens, whatever is sampled."""

    def _sampling(self, *args: Any) -> dict[str, Any]:
        return super()._sampling(*args) | {"ignore_eos": True}


@pytest.mark.parametrize("keep_kv", [True, False])
def test_an_update_inside_responses(
    server: VllmServer, slow_file: Path, model: str, keep_kv: bool
) -> None:
    from transformers import AutoModelForCausalLM

    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    place = TrainersStore("127.0.0.1", store.port, "w", TIMEOUT_S / 2)
    prompts, size = [[3 + k % 40 for k in range(62)], [7, 8, 9]], 450
    with Ranks(trainer_body, 2, model, store.port, (1, 2)) as trainers:
        pool = ServerPool([server], lambda s: s.join(place), max_sequences=8, timeout_s=TIMEOUT_S)
        engine = EndlessResponses(pool, stop_token_ids=[], max_sequences=8, vocab_size=VOCAB)
        receiver = ServerReceiver(pool, dist.PrefixStore("w", store))
        step_until(lambda: engine.weight_version == 1, receiver)
        wait_until(lambda: receiver.pending() or None, TIMEOUT_S, "a sync")
        num_before = metric(server.url, "generation_tokens_total")

        def is_due() -> bool:
            if not slow_file.exists() or metric(server.url, "num_requests_running") < 4:
                return False
            if metric(server.url, "generation_tokens_total") < num_before + 20:
                return False
            slow_file.unlink()
            return True

        slow_file.touch()
        engine.in_flight = InFlightUpdate(is_due, receiver.receive, keep_kv)
        spec = SamplingSpec(n=2, temperature=0.7, max_tokens=size)
        groups = engine.generate(prompts, spec, seed=3)
        assert trainers.results()[0] == ["no error"] * 2
        load = partial(AutoModelForCausalLM.from_pretrained, model, dtype=torch.float64)
        models = {1: scaled(load(), FACTORS[1]), 2: scaled(load(), FACTORS[1] * FACTORS[2])}
        check = partial(largest_error, models, temperature=0.7)
        for prompt, group in zip(prompts, groups, strict=True):
            for c in group:
                (first, num_older), (second, num_newer) = c.versions
                assert (first, second, num_older + num_newer) == (1, 2, size)
                assert check(prompt, c, keep_kv) < 1e-4
                assert check(prompt, c, not keep_kv) > 1e-2, "the two differ"
        # Two later requests that begin with a response. The first one caches the blocks that it
        # filled before the update; the second one reads one more, filled after the update.
        ids = [*prompts[0], *groups[0][0].token_ids]
        full = (len(prompts[0]) + groups[0][0].versions[0][1] - 1) // BLOCK
        for num_blocks in (full, full + 1):
            prompt = ids[: num_blocks * BLOCK + 1]
            [[c]] = engine.generate([prompt], SamplingSpec(temperature=0.7, max_tokens=1), seed=1)
            assert c.versions == [(2, 1)] and check(prompt, c, keep_kv=False) < 1e-4
    pool.close()


def largest_error(
    models: Any, prompt: list[int], c: Response, keep_kv: bool, temperature: float
) -> float:
    """Largest |log-prob - that of the oracle| of a token."""
    logits = logits_by_version(models, prompt, c.token_ids, c.versions, keep_kv) / temperature
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
    return float((wanted - torch.tensor(c.log_probs)).abs().max())


def vllms_trainer_body(rank: int, world_size: int, model: str, url: str) -> int:
    """Send versions 1 and 2 through vLLM's own interface for trainers; return the bytes."""
    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient,
        ModuleSource,
        WeightTransferTrainerFactory,
    )

    from hybridengine.integrations.vllm import HybridEngineTrainerInitInfo

    trained = sharded(model)
    engine = WeightTransferTrainerFactory.trainer_init(
        HybridEngineTrainerInitInfo("127.0.0.1", rank=rank, timeout_s=TIMEOUT_S),
        client=HTTPVLLMWeightSyncClient(url, TIMEOUT_S),
        source=ModuleSource(trained),
    )
    for version in (1, 2):
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(FACTORS[version])
        engine.send_weights()
    return engine.report.bytes_sent


def test_what_a_server_listens_on_and_answers(server: VllmServer, tmp_path: Path) -> None:
    """One address, the one of --host. HTTP to garbage; valid requests need no key."""
    port = int(server.url.rpartition(":")[2])

    def listens_on(*processes: psutil.Process) -> set[Any]:
        connections = [c for process in processes for c in process.net_connections()]
        return {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}

    children = psutil.Process().children(recursive=True)
    first, *_ = (p for p in children if port in {address.port for address in listens_on(p)})
    listening = listens_on(first, *first.children(recursive=True))
    assert {address.ip for address in listening} == {"127.0.0.1"}

    class Bomb:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "made"),)

    def answer_of(address: Any, garbage: bytes) -> bytes:
        with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
            connection.sendall(garbage)
            connection.settimeout(TIMEOUT_S if address.port == port else 1)
            try:
                return connection.recv(4096)
            except (TimeoutError, ConnectionError):
                return b""

    calls = [*itertools.product(listening, (bytes(64), b"\xff" * 64, pickle.dumps(Bomb())))]
    with ThreadPoolExecutor(len(calls)) as threads:
        answers = [*threads.map(answer_of, *zip(*calls, strict=True))]
    for (address, garbage), answer in zip(calls, answers, strict=True):
        is_http = answer.startswith(b"HTTP/1.1 400 Bad Request")
        assert is_http if address.port == port else answer == b"", (address, garbage, answer)
    for route in ("/health", "/server_info?config_format=json", "/is_paused", "/metrics"):
        with urllib.request.urlopen(f"{server.url}{route}", timeout=TIMEOUT_S) as response:
            assert response.status == 200, route
    assert server.request("POST", "/pause?mode=wait") is not None
    assert server.request("GET", "/is_paused") == {"is_paused": True}
    server.request("POST", "/resume")
    assert not (tmp_path / "made").exists()


def test_packages_of_the_server_that_add_logits_processors(
    server: VllmServer, slow_file: Path, tp_size: int
) -> None:
    """The trainers cannot see them; the worker of the server can."""
    if tp_size > 1:
        pytest.skip("vLLM reads one answer of several failed workers: the server is lost then")
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    metadata = slow_file.parent / "biases-1.dist-info"
    metadata.mkdir()
    (metadata / "entry_points.txt").write_text("[vllm.logits_processors]\nthree = nowhere:Three\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: biases\nVersion: 1\n")
    try:
        with pytest.raises(RolloutError, match=rf"{server.url}.*'three' of biases.*uninstall"):
            server.join(TrainersStore("127.0.0.1", store.port, "w", TIMEOUT_S))
    finally:
        shutil.rmtree(metadata)


def test_vllms_own_trainer_interface(server: VllmServer, model: str, tp_size: int) -> None:
    server.request("POST", "/pause?mode=wait")
    sent = run_ranks(vllms_trainer_body, 2, model, server.url)
    server.request("POST", "/resume")
    assert min(sent) > 0.3 * sum(sent), "each rank sends its own shards"
    digests = server.request("POST", "/weight_checker", {"action": "checksum"})
    assert digests["checksums"] == expected_digests(model, tp_size, FACTORS[1] * FACTORS[2])
    sampling = {"n": 1, "max_tokens": 2, "logprobs": 0, "ignore_eos": True}
    [completion] = server.complete(ServerPrompt(Prompt([5, 9])), sampling, {"2": 2})
    assert completion.versions == [(2, 2)]


def test_slices_arrive_bit_for_bit_and_a_failed_update_ends_generation(
    server: VllmServer, model: str, tp_size: int
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    place = TrainersStore("127.0.0.1", store.port, "w", TIMEOUT_S / 2)
    with Ranks(trainer_body, 2, model, store.port, (1, 2, 3)) as trainers:
        pool = ServerPool([server], lambda s: s.join(place), max_sequences=8, timeout_s=TIMEOUT_S)
        engine = ServerEngine(pool, stop_token_ids=[2], max_sequences=8, vocab_size=VOCAB)
        receiver = ServerReceiver(pool, dist.PrefixStore("w", store))
        check_updates(server, engine, receiver, partial(expected_digests, model, tp_size))
        record = SyncStore(dist.PrefixStore("w", store)).get("engine/0", EngineInfo)
        assert record.model_config["rms_norm_eps"] == tiny_config("llama").rms_norm_eps
        check_generation(engine, model, FACTORS[1] * FACTORS[2])
        check_checksum(server, engine)
        engine.in_flight = InFlightUpdate(receiver.pending, receiver.receive, keep_kv=True)
        with (
            pytest.warns(RuntimeWarning, match="the trainers gave up the sync.*injected"),
            pytest.raises((NoServerError, StaleWeightsError)),
        ):
            while True:
                engine.generate([[5, 9]], SamplingSpec(n=8, max_tokens=400), seed=1)
        assert [m.partition(":")[0] for m in trainers.results()[0]] == [
            "no error",
            "no error",
            "ReshardError",
        ]
    # The server stays paused, and its requests are gone with their connections. Resumed by somebody
    # it ends, instead of using these weights; also where it has joined again, but has
    # no weights of theirs yet.
    wait_until(lambda: engine.wants_weights or None, TIMEOUT_S, "the server to be back")
    assert server.request("GET", "/is_paused") == {"is_paused": True}
    server.request("POST", "/resume")
    with pytest.raises(ServerLostError):
        server.complete(ServerPrompt(Prompt([5])), {"n": 1, "max_tokens": 1, "logprobs": 0}, {})
    has_ended = lambda: "ServerLostError" in message_of(server.check_health) or None  # noqa: E731
    wait_until(has_ended, TIMEOUT_S, "the server to end")
    pool.close()
