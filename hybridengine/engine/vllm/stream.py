"""Requests to vLLM's engine that come and finish at different times (continuous batching)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridengine.engine.engine import Request, RequestStream
from hybridengine.engine.response import Response
from hybridengine.engine.vllm.seeds import seeded
from hybridengine.vision import EncodedImage

__all__ = ["VllmStream"]


class VllmStream(RequestStream):
    """Adds requests to `engine`, vLLM's `LLMEngine`, between its steps.

    sampling: `SamplingParams` of all requests but for seed and length.
    prompt: makes a prompt of token ids and images.
    convert: makes the completions of a `RequestOutput`.
    """

    def __init__(
        self,
        engine: Any,
        sampling: Any,
        lora_request: Any,
        prompt: Callable[[Sequence[int], Sequence[EncodedImage]], Any],
        convert: Callable[[Any], list[Response]],
    ) -> None:
        from vllm.sampling_params import RequestOutputKind

        super().__init__()
        self._engine, self._sampling, self._convert = engine, sampling, convert
        self._lora_request, self._prompt = lora_request, prompt
        self._sampling.output_kind = RequestOutputKind.FINAL_ONLY
        self._internal: dict[str, str] = {}  # our id → vLLM's, of the requests that run

    def _add(self, request: Request) -> None:
        [sampling] = seeded(self._sampling, [request.seed])
        sampling.max_tokens = request.max_tokens
        name, prompt = str(request.id), self._prompt(request.prompt_ids, request.images)
        self._internal[name] = self._engine.add_request(
            name, prompt, sampling, lora_request=self._lora_request
        )

    def _step(self) -> list[tuple[int, Response]]:
        if not self.num_running:
            return []
        finished = [output for output in self._engine.step() if output.finished]
        for output in finished:
            del self._internal[output.request_id]
        return [(int(output.request_id), self._convert(output)[0]) for output in finished]

    def abort(self) -> None:
        """Remove requests that have not finished, so that they are not part of later batches."""
        if self._internal:
            self._engine.abort_request(list(self._internal.values()), internal=True)
            self._internal.clear()
