"""A reward service, against a real HTTP server of this process."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hybridengine.run.config import RewardConfig
from hybridengine.run.config.rl import (
    CustomRewardConfig,
    RewardHttpConfig,
    RewardManagerConfig,
)
from hybridengine.run.errors import RewardError
from hybridengine.train.data import PromptSample
from hybridengine.train.rewards.manager import build_reward_manager

CHAT = ({"role": "user", "content": "hi"},)
SAMPLES = [PromptSample(i, [1], f"prompt {i}", "sums", {"n": i}, {"i": i}, CHAT) for i in range(5)]
RESPONSES = [f"answer {i}" for i in range(5)]


@contextmanager
def server(answer):
    """Serve `answer(request body, number of the request)` -> (status, JSON or bytes)."""
    requests, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                requests.append(body)
                number = len(requests)
            status, content = answer(body, number)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}/score", requests
        finally:
            http.shutdown()


def score(url, manager="naive", timeout_s=30.0, **http):
    http = {"batch_size": 2, "backoff_s": 1e-3, **http}
    config = RewardConfig(
        CustomRewardConfig((url,)),
        timeout_s=timeout_s,
        http=RewardHttpConfig(**http),
        reward_manager=RewardManagerConfig(manager),
    )
    return build_reward_manager(config, 10).score(SAMPLES, RESPONSES, [1] * 5)


def number(body, _):
    return 200, [int(text.split()[1]) for text in body["solution_strs"]]


@pytest.mark.parametrize("manager", ["naive", "batch"])
def test_batches_in_order(manager):
    with server(number) as (url, requests):
        result = score(url, manager)
    assert result.scores == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert list(result.parts) == ["127.0.0.1"]
    assert sorted(len(r["solution_strs"]) for r in requests) == [1, 2, 2]
    first = next(r for r in requests if "answer 0" in r["solution_strs"])
    assert first == {
        "data_sources": ["sums"] * 2,
        "solution_strs": ["answer 0", "answer 1"],
        "ground_truths": [{"n": 0}, {"n": 1}],
        "extra_infos": [{"i": 0}, {"i": 1}],
        "prompts": [list(CHAT)] * 2,
    }


def test_objects_with_further_numbers_and_texts():
    def answer(body, _):
        return 200, {
            "scores": [{"score": 1, "length": 9, "note": "a"} for _ in body["solution_strs"]]
        }

    with server(answer) as (url, _):
        result = score(url)
    assert (result.scores, result.extras) == ([1.0] * 5, {"length": [9.0] * 5})
    assert result.texts == {"note": ["a"] * 5}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_overloaded_service_is_asked_again(status):
    def answer(body, count):
        return (status, {"error": "busy"}) if count <= 2 else number(body, count)

    with server(answer) as (url, requests):
        assert score(url, batch_size=5).scores == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len(requests) == 3


@pytest.mark.parametrize(
    ("answer", "message", "attempts"),
    [
        (
            lambda *_: (500, b"broken\n"),
            r"status 500 .*'broken', in 3 attempts over 0.003 s, to "
            r"the request for responses 0 to 4; prompt 'prompt 0', response 'answer 0'",
            3,
        ),
        (lambda *_: (404, b"no such page"), "status 404 .*'no such page'; prompt 'prompt 0'", 1),
        (lambda *_: (200, [1, 2]), r"its answer .* is '\[1, 2\]' \(returned 2 results", 1),
        (lambda *_: (200, {"rewards": [1] * 5}), 'expected a JSON list, or ."scores": list', 1),
        (lambda *_: (200, b"<html>"), "its answer to 5 responses is '<html>'", 1),
        (lambda *_: (200, [1, 1, 1, "good", 1]), "its result is 'good' .*response 'answer 3'", 1),
        (lambda *_: (200, b"[1, 1, 1, NaN, 1]"), "its result is nan .*response 'answer 3'", 1),
    ],
)
def test_errors_name_the_url_and_the_response(answer, message, attempts):
    with server(answer) as (url, requests):
        with pytest.raises(RewardError, match=f"reward service {url}: .*{message}"):
            score(url, batch_size=5, retries=2)
        assert len(requests) == attempts


def test_a_service_that_does_not_answer():
    ended = threading.Event()

    def answer(body, _):
        ended.wait(30)
        return 200, []

    with server(answer) as (url, _):
        try:
            with pytest.raises(RewardError, match=r"no answer within reward.timeout_s = 0.2 s"):
                score(url, timeout_s=0.2, retries=1)
        finally:
            ended.set()


def test_a_service_that_does_not_run():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/score"
        with pytest.raises(RewardError, match=f"{url}: it cannot be reached: .*refused.*in 2 att"):
            score(url, retries=1)


def test_what_is_not_json_is_named():
    sample = PromptSample(0, [1], "p", "s", b"bytes", {}, CHAT)
    built = build_reward_manager(RewardConfig(CustomRewardConfig(("http://localhost:1/x",))), 10)
    with pytest.raises(RewardError, match=r"a row cannot be written as JSON: .*bytes"):
        built.score([sample], ["a"], [1])


def test_a_url_without_host():
    with pytest.raises(RewardError, match="'http:///score' is a URL without a host"):
        build_reward_manager(RewardConfig(CustomRewardConfig(("http:///score",))), 10)
