"""A reward service: a URL that scores batches of responses.

The body of a POST request is a JSON object of lists, one entry for each response: those of verl's
batch manager (data_sources, solution_strs, ground_truths, extra_infos) and `prompts`, the chats.
The answer is a JSON list, or {"scores": list}, with a number or {"score": number, …} for each.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hybridengine.rewards.calls import to_results, to_rows
from hybridengine.rewards.workers import cores_of_rank
from hybridengine.run.config import RewardConfig
from hybridengine.run.errors import RewardError, shorten
from hybridengine.train.rewards.function import (
    LIST_ARGUMENTS,
    CallError,
    FunctionSource,
    Results,
    RewardFunction,
)

_Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class _ServiceSource(FunctionSource):
    url: str = ""

    def __str__(self) -> str:
        return self.url


class RewardService:
    """The services at URLs, called with `reward.http`'s settings, several requests at once."""

    def __init__(self, reward: RewardConfig) -> None:
        self._http, self._timeout_s = reward.http, reward.timeout_s
        self._num_requests = reward.num_workers or cores_of_rank()

    def load(
        self,
        path: str | Path,
        name: str = "compute_score",
        arguments: Sequence[str] = LIST_ARGUMENTS,
    ) -> RewardFunction:
        """Return the service at the URL `path`, which gets LIST_ARGUMENTS in any case.

        name: of its score, instead of compute_score its host.
        Raises RewardError for a URL without a host.
        """
        host = urllib.parse.urlsplit(str(path)).hostname
        if not host:
            raise RewardError(
                f"reward.custom_reward_function.path {path!r} is a URL without a host; expected "
                "one like http://localhost:8000/score"
            )
        own = host if name == "compute_score" else name
        source = _ServiceSource(Path(), own, 1, own, url=str(path))
        return RewardFunction(source, 0, self, LIST_ARGUMENTS)

    def call(self, function: RewardFunction, columns: _Columns, size: int) -> list[Results]:
        """Score `size` responses; raise CallError for a request without valid scores."""
        score = partial(self._score, str(function.source), columns)
        threads = ThreadPoolExecutor(self._num_requests, "reward-service")
        try:
            starts = range(0, size, self._http.batch_size)
            batches = threads.map(score, starts)
            return [row for batch in batches for row in batch]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _score(self, url: str, columns: _Columns, start: int) -> list[Results]:
        """Score the batch whose first response is number `start`."""
        rows = slice(start, start + self._http.batch_size)
        batch = {name: column[rows] for name, column in columns.items()}
        size = len(batch["solution_strs"])
        try:
            body = json.dumps(batch).encode()
        except (TypeError, ValueError) as error:
            raise _error(url, f"a row cannot be written as JSON: {error}", start) from None
        answer = self._post(url, body, start, size)
        try:
            results = json.loads(answer)
            if isinstance(results, Mapping):
                results = results.get("scores")
            results = to_rows(results, size)
        except ValueError as error:
            text = shorten(answer.decode(errors="replace"), 300)
            raise _error(
                url,
                f"its answer to {size} responses is {text!r} ({error}); expected a JSON list, or "
                '{"scores": list}, of numbers or objects with "score"',
                start,
            ) from None
        scores = []
        for i, result in enumerate(results):
            try:
                scores.append(to_results(result))
            except ValueError as error:
                raise _error(url, str(error), start + i) from None
        return scores

    def _post(self, url: str, body: bytes, start: int, size: int) -> bytes:
        """Return the answer to a POST request, repeated where that may help."""
        waits = [self._http.backoff_s * 2**i for i in range(self._http.retries)]
        reason = ""
        for wait in [0.0, *waits]:
            time.sleep(wait)
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                    return bytes(answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    text = shorten(error.read().decode(errors="replace").strip(), 300)
                reason = f"it answered with status {error.code} ({error.reason}): {text!r}"
                if error.code != 429 and error.code < 500:
                    raise _error(url, reason, start) from None
            except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
                cause = getattr(error, "reason", error)
                reason = f"it cannot be reached: {cause or type(cause).__name__}"
                if isinstance(cause, TimeoutError):
                    reason = f"no answer within reward.timeout_s = {self._timeout_s:g} s"
        raise _error(
            url,
            f"{reason}, in {len(waits) + 1} attempts over {sum(waits):g} s, to the request for "
            f"responses {start} to {start + size - 1}",
            start,
        )


def _error(url: str, what: str, index: int) -> CallError:
    return CallError(f"reward service {url}: {what}", index)
