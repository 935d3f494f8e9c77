"""A server with the routes of vLLM that a run uses, whose engine is plain generate: starts at once.

It has a real `WeightReceiver` and real weights, so that its log-probs tell the version of them.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist

from tests.engines import build_engine

SETTINGS = {
    "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 64},
    "weight_transfer_config": {"backend": "hybridengine"},
}

__all__ = ["SETTINGS", "answer_requests", "digest_of", "serve", "serve_model"]


def answer_requests(port: int, routes: dict[str, Any]) -> ThreadingHTTPServer:
    """Answer requests in threads. routes: path → JSON value, status, or function of the body.

    A path with its query goes before one without. A function may return a status, or raise, which
    is status 500.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def log_message(self, *args: object) -> None: ...

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            answer = routes.get(self.path, routes.get(self.path.partition("?")[0], 404))
            try:
                answer = answer(body) if callable(answer) else answer
            except Exception as error:
                answer = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
            status, value = answer if isinstance(answer, tuple) else (200, answer)
            if isinstance(answer, int):
                status, value = answer, None
            data = b"" if value is None else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: object) -> None:
            """The client has gone."""

    server = Server(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


def serve(rank: int, world_size: int, port: int, model: str, delay_s: float) -> None:
    """A process that serves `model` until it is killed; `delay_s` is added to every generation."""
    serve_model(port, model, delay_s)
    while True:
        time.sleep(1)


def serve_model(port: int, model: str, delay_s: float) -> None:
    """As vLLM's `/pause`, `/update_weights`, … with one engine."""

    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.remote.servers.client import WEIGHTS_STATE
    from hybridengine.remote.sync.receiver import WeightReceiver
    from hybridengine.sync.weight_target import EngineState

    engine = build_engine("hf", model, stop_token_ids=[2])
    engine.target.weight_version = -1
    lock, receivers, labels = threading.Lock(), list[WeightReceiver](), ["default"]
    generated: list[str] = []  # label of the weights, of each request
    failing: list[str] = []  # messages of the next updates' errors
    missing: list[int] = []  # version whose weights are not kept
    flipping: list[int] = []  # version of which a bit changes before it generates

    def join(body: Any) -> None:
        info = body["init_info"]
        store = dist.TCPStore(info["host"], info["port"], is_master=False, wait_for_workers=False)
        place = dist.PrefixStore(info["prefix"], store)
        receiver = WeightReceiver(engine, place, index=info["index"], timeout_s=info["timeout_s"])
        receivers[:] = [receiver]

    def update(body: Any) -> None:
        if failing:
            raise MemoryError(failing.pop())
        with lock:
            before = {name: t.clone() for name, t in engine.target.weights().items()}
            assert receivers[0].receive().version == body["update_info"]["version"]
            if missing and engine.target.weight_version == missing[0]:
                for name, weight in engine.target.weights().items():
                    weight.data.copy_(before[name])

    def weights_state(body: Any) -> dict[str, Any]:
        assert body == {"method": WEIGHTS_STATE}
        with lock:
            state = EngineState.of(engine.target)
        return {"results": [{"version": state.version, "checksum": state.checksum}]}

    def finish(body: Any) -> None:
        labels[:] = [body["weight_version"]]

    def generate(body: Any) -> dict[str, Any]:
        time.sleep(delay_s)
        sampling = body["sampling_params"]
        names = "n", "temperature", "top_p", "top_k", "min_p", "max_tokens"
        spec = SamplingSpec(**{name: sampling[name] for name in names})
        with lock:
            if flipping == [engine.target.weight_version]:
                flipping.clear()
                weight = next(iter(engine.target.weights().values()))
                weight.data.view(torch.int32).view(-1)[7] ^= 1
            [completions] = engine.generate([body["token_ids"]], spec, sampling["seed"])
        generated.append(labels[0])
        return {"choices": [as_choice(i, c, labels[0]) for i, c in enumerate(completions)]}

    answer_requests(
        port,
        {
            "/health": None,
            "/server_info": {"vllm_config": SETTINGS},
            "/init_weight_transfer_engine": join,
            "/pause": None,
            "/start_weight_update": None,
            "/update_weights": update,
            "/fail_next_update": failing.append,
            "/miss_update": missing.append,
            "/collective_rpc": weights_state,
            "/flip_bit": flipping.append,
            "/finish_weight_update": finish,
            "/resume": None,
            "/shutdown_weight_transfer_engine": lambda body: receivers.clear(),
            "/inference/v1/generate": generate,
            "/generated": lambda body: generated,
            "/v1/models": {"data": [{"id": model}]},
            "/weight_checker": lambda body: {
                name: digest_of(weight) for name, weight in engine.target.weights().items()
            },
        },
    )


def digest_of(weight: torch.Tensor) -> str:
    data = weight.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def as_choice(index: int, completion: Any, label: str) -> dict[str, Any]:
    ids = completion.token_ids
    pairs = zip(ids, completion.log_probs, strict=True)
    return {
        "index": index,
        "token_ids": ids,
        "finish_reason": completion.finish_reason,
        "weight_versions": [{"version": label, "start": 0, "end": len(ids)}],
        "logprobs": {"content": [{"token_id": t, "logprob": x} for t, x in pairs]},
    }
