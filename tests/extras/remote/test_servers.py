"""Servers over HTTP: what each answer means, which server gets a request, and what is lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hybridengine.engine.interface import InFlightUpdate, Prompt, Request, SamplingSpec
from hybridengine.engine.response import Response
from hybridengine.remote.servers import (
    NoServerError,
    ServerEngine,
    ServerLostError,
    ServerPool,
    TrainersStore,
    VllmServer,
    client,
    pool,
)
from hybridengine.remote.servers.client import address_for, prepare_network
from hybridengine.remote.servers.images import ServerPrompt
from hybridengine.run.errors import RolloutError
from hybridengine.sync.weight_target import StaleWeightsError
from tests.extras.remote.stand_in_server import SETTINGS, answer_requests, as_choice
from tests.ports import free_port

SPEC = SamplingSpec(n=2, max_tokens=3, stop=("END",))
STORE = TrainersStore("127.0.0.1", 1234, "keys", 5.0)


class StandIn:
    """A server that answers with the prompt; a test replaces routes."""

    def __init__(self, port: int = 0) -> None:
        self.label, self.bodies, self.updates = "default", list[Any](), list[str]()
        self.routes: dict[str, Any] = {
            "/health": None,
            "/server_info": {"vllm_config": SETTINGS},
            "/init_weight_transfer_engine": self.note("join"),
            "/pause": self.note("pause"),
            "/start_weight_update": self.note("start"),
            "/update_weights": self.note("update"),
            "/finish_weight_update": self.finish,
            "/resume": self.note("resume"),
            "/shutdown_weight_transfer_engine": self.note("leave"),
            "/inference/v1/generate": self.generate,
        }
        self.http = answer_requests(port, self.routes)
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def note(self, what: str) -> Any:
        def answer(body: Any) -> None:
            self.updates.append(what)

        return answer

    def finish(self, body: Any) -> None:
        self.label = body["weight_version"]

    def generate(self, body: Any) -> dict[str, Any]:
        self.bodies.append(body)
        ids = body["token_ids"]
        choices = [
            as_choice(i, Response([*ids, i], [-0.1 - i] * (len(ids) + 1), "stop"), self.label)
            for i in range(body["sampling_params"]["n"])
        ]
        return {"choices": choices[::-1]}

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StandIn]]:
    monkeypatch.setattr(pool, "CHECK_S", 0.05)
    servers = [StandIn(), StandIn()]
    yield servers
    for server in servers:
        server.close()


@contextmanager
def engine_of(*stand_ins: StandIn, timeout_s: float = 60.0) -> Iterator[ServerEngine]:
    servers = [VllmServer(s.url, i, timeout_s) for i, s in enumerate(stand_ins)]

    def join(server: VllmServer) -> None:
        server.check_settings(64)
        server.join(STORE)

    chosen = ServerPool(servers, join, max_sequences=4, timeout_s=timeout_s)
    engine = ServerEngine(chosen, stop_token_ids=[2], max_sequences=8, vocab_size=9)
    try:
        yield engine
    finally:
        engine.shutdown()


def test_token_ids_in_and_token_ids_out(stand_ins: list[StandIn]) -> None:
    lost: list[int] = []
    with engine_of(*stand_ins) as engine:
        with pytest.raises(StaleWeightsError):
            engine.generate([[5]], SPEC, 1)
        engine.pool.update(3, {0, 1}, lambda index, reason: lost.append(index))
        assert engine.weight_version == 3 and not lost and not engine.wants_weights
        engine.replica, engine.replicas = 1, 2
        prompts = [[5, 6], [7], [8, 9, 10]]
        completions = engine.generate(prompts, SPEC, seed=11)
        with engine.stream(SPEC, seed=1) as stream:
            stream.add(Request(4, [9], max_tokens=2, seed=77))
            while not (finished := stream.step()):
                pass
            assert finished == [(4, Response([9, 0], [-0.1, -0.1], "stop", versions=[(3, 2)]))]
            assert stream.num_running == 0
    assert [c.token_ids for part in completions for c in part] == [
        [*prompt, i] for prompt in prompts for i in (0, 1)
    ]
    assert completions[1][1] == Response([7, 1], [-1.1, -1.1], "stop", versions=[(3, 2)])
    for stand_in in stand_ins:
        assert stand_in.updates == ["join", "pause", "start", "update", "resume", "leave"]
        assert stand_in.label.endswith("/3")
    bodies = [body for stand_in in stand_ins for body in stand_in.bodies]
    sampled = {tuple(body["token_ids"]): body["sampling_params"] for body in bodies}
    first = sampled[5, 6]
    seeds = {params.pop("seed") for params in sampled.values()}
    assert len(seeds) == 4 and 77 in seeds
    assert first == {
        "n": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 3,
        "logprobs": 0,
        "stop_token_ids": [2],
        "stop": ["END"],
        "include_stop_str_in_output": True,
        "detokenize": True,
    }
    assert sampled[9,]["max_tokens"] == 2


def spoil(choice: dict[str, Any], how: str) -> None:
    if how == "aborted":
        choice["finish_reason"] = "abort"
    elif how == "older":
        choice["weight_versions"][0]["version"] = "default"
    elif how == "unlabelled":
        choice["weight_versions"] = None
    elif how == "fewer":
        choice["logprobs"]["content"].pop()
    elif how == "nan":
        choice["logprobs"]["content"][0]["logprob"] = float("nan")
    elif how == "renamed":
        del choice["token_ids"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("aborted", "ended a request with 'abort'"),
        ("older", "generated with the weights default, which are not of this run"),
        ("unlabelled", "returned versions of 0 tokens for 2, not one each"),
        ("fewer", "returned 1 log-probs for 2 tokens"),
        ("nan", "log-prob that is not finite"),
        ("renamed", "not as expected .KeyError"),
        ("missing", "returned 1 completions, not 2"),
        ("dead", "status 503: EngineDeadError"),
    ],
)
def test_a_wrong_answer_costs_a_server_and_no_response(
    stand_ins: list[StandIn], how: str, message: str
) -> None:
    bad, good = stand_ins

    def generate(body: Any) -> Any:
        answer = bad.generate(body)
        if how == "dead":
            return 503, {"error": {"message": "EngineDeadError"}}
        if how == "missing":
            answer["choices"].pop()
        spoil(answer["choices"][0], how)
        return answer

    bad.routes["/inference/v1/generate"] = generate
    with engine_of(bad, good) as engine:
        engine.pool.update(0, {0, 1}, print)
        with pytest.warns(RuntimeWarning, match=f"{bad.url}.*{message}"):
            completions = engine.generate([[k] for k in range(6)], SPEC, 1)
        assert [[c.token_ids for c in part] for part in completions] == [
            [[k, 0], [k, 1]] for k in range(6)
        ]
        assert engine.weight_version == 0, "the other one has the weights"


def test_what_a_request_is_at_fault_for_is_an_error(stand_ins: list[StandIn]) -> None:
    stand_ins[0].routes["/inference/v1/generate"] = 400, {"error": {"message": "too long"}}
    with engine_of(stand_ins[0]) as engine:
        engine.pool.update(0, {0}, print)
        with pytest.raises(RolloutError, match=rf"{stand_ins[0].url}.*status 400: too long"):
            engine.generate([[1], [2]], SPEC, 1)


def test_settings_are_checked_before_the_first_request(stand_ins: list[StandIn]) -> None:
    first, second = stand_ins
    config = {**SETTINGS, "model_config": {"logprobs_mode": "raw_logprobs", "max_model_len": 64}}
    second.routes["/server_info"] = {"vllm_config": config}
    message = rf"{second.url} has .* --logprobs-mode raw_logprobs; start it with VLLM_SERVER_DEV"
    with pytest.raises(RolloutError, match=message), engine_of(first, second):
        pass
    del second.routes["/server_info"]  # without VLLM_SERVER_DEV_MODE=1
    with pytest.raises(RolloutError, match=r"does not know it; start it with VLLM_SERVER_DEV_MODE"):
        VllmServer(second.url, 0, 60.0).check_settings(64)
    with pytest.raises(RolloutError, match=r"--max-model-len 64, less than .* 65 tokens"):
        VllmServer(first.url, 0, 60.0).check_settings(65)
    for limit in (None, 31, 64):
        VllmServer(first.url, 0, 60.0).check_settings(32, limit)
    with pytest.raises(RolloutError, match=r"LongRoPE .* above 32 tokens .* --max-model-len 32,"):
        VllmServer(first.url, 0, 60.0).check_settings(32, 32)
    whole = {**SETTINGS["model_config"], "multimodal_config": {"language_model_only": False}}
    first.routes["/server_info"] = {"vllm_config": {**SETTINGS, "model_config": whole}}
    VllmServer(first.url, 0, 60.0).check_settings(32)
    with pytest.raises(RolloutError, match=r"trained alone; start it with --language-model-only"):
        VllmServer(first.url, 0, 60.0).check_settings(32, is_inner=True)
    whole["multimodal_config"]["language_model_only"] = True
    first.routes["/server_info"] = {"vllm_config": {**SETTINGS, "model_config": whole}}
    VllmServer(first.url, 0, 60.0).check_settings(32, is_inner=True)
    settings = {"additional_config": {}, "model_config": {"dtype": "torch.bfloat16"}}
    first.routes["/server_info"] = {"vllm_config": settings}
    message = r"--additional-config .*: true}' and --dtype float32;"
    with pytest.raises(RolloutError, match=message):
        VllmServer(first.url, 0, 60.0).check_exact("float32")
    settings = {**settings, "additional_config": {"hybridengine_exact": True}}
    first.routes["/server_info"] = {"vllm_config": settings}
    VllmServer(first.url, 0, 60.0).check_exact("bfloat16")
    first.routes["/server_info"] = {"vllm_config": SETTINGS}
    first.routes["/init_weight_transfer_engine"] = 500, {"error": {"message": "another model"}}
    with pytest.raises(RolloutError, match=rf"{first.url}.*another model"), engine_of(first):
        pass


def test_a_wait_for_servers_is_reported(
    stand_ins: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, seen = list[str](), threading.Event()
    late = stand_ins[1]
    fault = f"server {late.url}, GET /health: status 503"

    def note(text: str) -> None:
        notes.append(text)
        if fault in text:  # the first notes may come before the first answer
            seen.set()

    monkeypatch.setattr(pool, "REPORT_S", 0.01)
    monkeypatch.setattr(pool, "print_note", note)
    late.routes["/health"] = lambda body: None if seen.is_set() else 503
    with engine_of(*stand_ins):
        pass
    told = next(text for text in notes if fault in text)
    assert "waiting for" in told and "of 2 servers" in told and "at most 60 s" in told


@pytest.mark.parametrize(
    ("option", "changed"),
    [
        ("--logits-processors", {"model_config": {"logits_processors": ["package.Bias"]}}),
        ("--speculative-config", {"speculative_config": {"method": "eagle"}}),
        ("--kv-cache-dtype", {"cache_config": {"cache_dtype": "fp8"}}),
        ("--watermark-config", {"watermark_config": {"method": "any"}}),
    ],
)
def test_a_server_that_samples_from_another_distribution(
    stand_ins: list[StandIn], option: str, changed: dict[str, Any]
) -> None:
    model = {**SETTINGS["model_config"], **changed.get("model_config", {})}
    config = {**SETTINGS, "cache_config": {"cache_dtype": "auto"}}
    config["speculative_config"] = {"method": "ngram"}  # which samples from the same one
    server = VllmServer(stand_ins[0].url, 0, 60.0)
    stand_ins[0].routes["/server_info"] = {"vllm_config": config}
    server.check_settings(64)
    stand_ins[0].routes["/server_info"] = {
        "vllm_config": {**config, **changed, "model_config": model}
    }
    with pytest.raises(RolloutError, match=rf"{server.url} has {option}, which would sample"):
        server.check_settings(64)


def test_a_server_that_drafts_has_no_min_p(stand_ins: list[StandIn]) -> None:
    config = {**SETTINGS, "speculative_config": {"method": "ngram"}}
    stand_ins[0].routes["/server_info"] = {"vllm_config": config}
    server = VllmServer(stand_ins[0].url, 0, 60.0)
    with pytest.raises(RolloutError, match="has --speculative-config, which would sample"):
        server.check_settings(64, has_min_p=True)


WRONG_MASKS = {
    "entries of 3 tokens for a .* of 2;": [[], [3, 4], [0, 1, 7]],
    "token 1 of a completion is .* not among the 2 ": [[], [7, 8]],
    "the id -1, outside of the vocabulary of 9": [[], [-1, 0, 1]],
    "the id 9, outside of the vocabulary of 9": [[], [0, 1, 9]],
    "sampling_mask: .* greater than maximum": [[], [0, 1, 2**31]],
    "kept ids of a token that do not ascend": [[], [1, 0]],
    "ids of a token that do not ascend": [[], [0, 1, 1]],
    "not as expected": [[], [0, 1, 7.5]],
    "not as expected .*KeyError": None,
}


@pytest.mark.parametrize("message", WRONG_MASKS)
def test_what_sampling_kept_and_a_server_that_says_otherwise(
    message: str, stand_ins: list[StandIn]
) -> None:
    bad, good = stand_ins
    spec = SamplingSpec(n=2, max_tokens=3, top_k=5, record_kept=True)

    def answers(server: StandIn, masks: Any) -> Any:
        def generate(body: Any) -> Any:
            answer = server.generate(body)
            for choice in answer["choices"]:
                if masks is not None:
                    choice["sampling_mask"] = masks or [[], [choice["index"], 7]]
            return answer

        return generate

    bad.routes["/inference/v1/generate"] = answers(bad, WRONG_MASKS[message])
    good.routes["/inference/v1/generate"] = answers(good, [])
    with engine_of(bad, good) as engine:
        engine.pool.update(0, {0, 1}, print)
        with pytest.warns(RuntimeWarning, match=f"{bad.url}.*{message}"):
            groups = engine.generate([[k] for k in range(6)], spec, 1)
    for group in groups:
        for i, response in enumerate(group):
            columns = {name: list(values) for name, values in response.columns.items()}
            assert columns == {"num_kept": [0, 2], "kept_ids": [i, 7]}


def test_every_wait_ends_with_the_name_of_the_server(stand_ins: list[StandIn]) -> None:
    slow, asked, release = stand_ins[0], threading.Event(), threading.Event()
    slow.routes["/pause"] = lambda body: release.wait(20)
    slow.routes["/inference/v1/generate"] = lambda body: asked.set() or release.wait(60)
    server = VllmServer(slow.url, 0, timeout_s=0.2)
    with pytest.raises(ServerLostError, match=rf"{slow.url}, POST /pause: no answer within 0.2 s"):
        server.update(1, "x")
    patient = VllmServer(slow.url, 0, timeout_s=60)
    threading.Thread(target=lambda: asked.wait(60) and patient.abort()).start()
    with pytest.raises(ServerLostError, match=slow.url) as caught:
        patient.complete(ServerPrompt(Prompt([1])), {"n": 1}, {})
    assert "no answer within" not in str(caught.value)
    release.set()
    slow.close()
    with pytest.raises(RolloutError, match=rf"within 0.3 s .*{slow.url}.*--enforce-eager"):
        ServerPool([server], lambda s: None, max_sequences=1, timeout_s=0.3)


def test_a_server_that_fails_an_update_is_reported(stand_ins: list[StandIn]) -> None:
    bad, good = stand_ins
    bad.routes["/update_weights"] = 500, {"error": {"message": "Worker failed: rank 1 has ended"}}
    told: dict[int, str] = {}
    with engine_of(bad, good) as engine:
        with pytest.warns(RuntimeWarning, match="Worker failed: rank 1 has ended"):
            engine.pool.update(4, {0, 1}, told.__setitem__)
        assert list(told) == [0] and "Worker failed" in told[0]
        assert "resume" not in bad.updates and engine.weight_version == 4
        engine.generate([[1]], SPEC, 1)
        assert not bad.bodies and len(good.bodies) == 1


@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_an_update_inside_a_response(
    stand_ins: list[StandIn], keep_kv: bool, streams: bool
) -> None:
    """One server has room for one of two requests; both begin before the update."""
    one, updated = stand_ins[0], threading.Event()
    one.routes["/resume"] = lambda body: updated.set()
    one.routes["/pause"] = 500, {"error": {"message": "requests would not be kept"}}
    one.routes[f"/pause?mode=keep{'&clear_cache=false' * keep_kv}"] = None
    running = list[str]()  # label as each request began

    def generate(body: Any) -> Any:
        began = one.label
        running.append(began)
        assert updated.wait(60)
        answer = one.generate(body)
        span = {"version": began, "start": 0, "end": 1}
        answer["choices"][0]["weight_versions"] = [span, {**span, "version": one.label, "end": 2}]
        answer["choices"][0]["weight_versions"][1]["start"] = 1
        return answer

    def update() -> None:
        engine.pool.update(4, {0}, print)

    def is_due() -> bool:
        return bool(running) and next(due, False)

    due = iter([True])
    with engine_of(one) as engine:
        engine.in_flight = InFlightUpdate(is_due, update, keep_kv)
        engine.pool.update(3, {0}, print)
        engine.pool.max_sequences = 1
        updated.clear()
        one.routes["/inference/v1/generate"] = generate
        spec = SamplingSpec(max_tokens=2)
        if streams:
            finished = dict[int, Response]()
            with engine.stream(spec, seed=1) as stream:
                for k in range(2):
                    stream.add(Request(k, [k], max_tokens=2, seed=k))
                while stream.num_running:
                    finished |= dict(stream.step())
            completions = [finished[k] for k in range(2)]
        else:
            completions = [part[0] for part in engine.generate([[0], [1]], spec, 1)]
        assert engine.weight_version == 4 and next(due, None) is None
    assert sorted(c.versions for c in completions) == [[(3, 1), (4, 1)], [(4, 1), (4, 1)]]
    assert [label.rpartition("/")[2] for label in running] == ["3", "4"]


def test_a_server_that_is_back_waits_for_weights(stand_ins: list[StandIn]) -> None:
    stand_ins[0].close()
    first = stand_ins[0] = StandIn(free_port())
    with engine_of(first) as engine:
        engine.pool.update(0, {0}, print)
        with pytest.warns(RuntimeWarning, match=first.url):
            first.close()
            with pytest.raises(NoServerError):
                engine.generate([[1]], SPEC, 1)
        assert engine.weight_version is None and not engine.wants_weights
        stand_ins[0] = back = StandIn(first.port)
        deadline = time.monotonic() + 60
        while not engine.wants_weights:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(StaleWeightsError):
            engine.generate([[1]], SPEC, 1)
        engine.pool.update(0, {0}, print)
        assert engine.generate([[1]], SPEC, 1)[0][0].token_ids == [1, 0]
        assert back.updates[:2] == ["join", "pause"] and not engine.wants_weights


def test_addresses_that_other_machines_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    local = ("127.0.0.1", 29500)
    assert address_for("127.0.0.1", local) == local
    assert address_for("localhost", ("10.1.2.3", 1)) == ("10.1.2.3", 1)
    assert address_for("0.0.0.0", ("10.1.2.3", 1)) == ("10.1.2.3", 1)  # TRL's default, this host
    with pytest.raises(RolloutError, match=r"the host 'no\.such\.host\.invalid' is unknown"):
        address_for("no.such.host.invalid", local)
    own = "10.9.8.7"
    monkeypatch.setattr(client, "own_address_towards", lambda host: own)
    assert address_for("192.0.2.1", local) == (own, 29500)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # to be restored
        monkeypatch.delenv(name)
    prepare_network(["http://127.0.0.1:8000", "http://no.such.host.invalid:8000"])
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setattr(client, "own_address_towards", lambda host: "127.0.0.1")
    prepare_network(["http://127.0.0.1:1", "http://192.0.2.1:8000"])
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
