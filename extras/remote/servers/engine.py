"""A rollout engine whose generation runs on vLLM servers; this process holds no weights."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hybridengine.engine.interface import (
    InFlightUpdate,
    Prompt,
    Request,
    RequestStream,
    RolloutEngine,
    SamplingSpec,
    derive_seed,
)
from hybridengine.engine.response import Response
from hybridengine.remote.servers.client import VllmServer
from hybridengine.remote.servers.images import ServerPrompt
from hybridengine.remote.servers.pool import ServerPool
from hybridengine.vision import ImagePreparer

_STEP_S = 0.05  # between two looks for new weights, while requests run


class ServerEngine(RolloutEngine):
    """Generates on the servers of `pool`; requests of a lost one are repeated on another.

    stop_token_ids: tokens that end a response (kept as its last token).
    max_sequences: of all servers together, at a time.
    vocab_size: of the model.
    preparer: of the images that prompts may have; None: they have none.
    Generation raises NoServerError if no server has the weights.
    """

    tp_size, tp_rank = 1, 0
    replica, replicas = 0, 1
    dtype = torch.bfloat16  # of no tensor of this process

    def __init__(
        self,
        pool: ServerPool,
        *,
        stop_token_ids: Sequence[int],
        max_sequences: int,
        vocab_size: int,
        preparer: ImagePreparer | None = None,
    ) -> None:
        self.pool, self._stop_token_ids = pool, list(stop_token_ids)
        self._vocab_size = vocab_size
        self._preparer, self.takes_images = preparer, preparer is not None
        self._threads = ThreadPoolExecutor(max_sequences, "server-request")

    @property
    def weight_version(self) -> int | None:
        return self.pool.version

    @property
    def in_flight(self) -> InFlightUpdate | None:
        return self.pool.in_flight

    @in_flight.setter
    def in_flight(self, update: InFlightUpdate | None) -> None:
        self.pool.in_flight = update

    @property
    def wants_weights(self) -> bool:  # type: ignore[override]
        return self.pool.wants_weights

    def _generate(
        self, prompts: Sequence[Prompt], spec: SamplingSpec, seed: int
    ) -> list[list[Response]]:
        numbers = (i * self.replicas + self.replica for i in range(len(prompts)))
        seeds = [derive_seed(seed, number) for number in numbers]
        futures = [
            self._submit(prompt, spec, prompt_seed)
            for prompt, prompt_seed in zip(prompts, seeds, strict=True)
        ]
        running = set(futures)
        try:
            while running:
                self.take_update()
                done, running = wait(running, _STEP_S, FIRST_EXCEPTION)
                for future in done:
                    future.result()
            return [future.result() for future in futures]
        finally:
            for future in futures:  # if one failed
                future.cancel()

    def _submit(self, prompt: Prompt, spec: SamplingSpec, seed: int) -> Future[list[Response]]:
        sampling, served = self._sampling(spec, seed), ServerPrompt.of(prompt, self._preparer)
        vocab_size = self._vocab_size if spec.records else None

        def complete(server: VllmServer, versions: Mapping[str, int]) -> list[Response]:
            if prompt.images and self._preparer is not None:
                server.check_images(self._preparer.options)
            return server.complete(served, sampling, versions, vocab_size)

        return self._threads.submit(partial(self.pool.call, complete, spec.n))

    def _sampling(self, spec: SamplingSpec, seed: int) -> dict[str, Any]:
        """Return vLLM's `SamplingParams`."""
        return {
            "n": spec.n,
            "temperature": spec.temperature,
            "top_p": spec.top_p,
            "top_k": spec.top_k,
            "min_p": spec.min_p,
            "max_tokens": spec.max_tokens,
            "seed": seed,
            "logprobs": 0,
            "stop_token_ids": self._stop_token_ids,
            "stop": list(spec.stop),
            "include_stop_str_in_output": True,
            "detokenize": bool(spec.stop),
        }

    @contextmanager
    def _stream(self, spec: SamplingSpec, seed: int) -> Iterator[RequestStream]:
        stream = _ServerStream(self, replace(spec, n=1))
        try:
            yield stream
        finally:
            stream.cancel()

    def shutdown(self) -> None:
        self.pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _ServerStream(RequestStream):
    """Requests that run in threads; a step waits a little for the next to finish."""

    def __init__(self, engine: ServerEngine, spec: SamplingSpec) -> None:
        super().__init__()
        self._engine, self._spec = engine, spec
        self._futures: dict[int, Future[list[Response]]] = {}
        self._done = queue.SimpleQueue[int]()

    def _add(self, request: Request) -> None:
        self._engine.check_images(request.images)
        spec = replace(self._spec, max_tokens=request.max_tokens)
        prompt = Prompt(request.prompt_ids, request.images)
        future = self._engine._submit(prompt, spec, request.seed)
        self._futures[request.id] = future
        future.add_done_callback(lambda _: self._done.put(request.id))

    def _step(self) -> list[tuple[int, Response]]:
        self._engine.take_update()
        finished = []
        try:
            finished.append(self._done.get(timeout=_STEP_S))
            while True:
                finished.append(self._done.get_nowait())
        except queue.Empty:
            return [(number, self._futures.pop(number).result()[0]) for number in finished]

    def cancel(self) -> None:
        for future in self._futures.values():
            future.cancel()
