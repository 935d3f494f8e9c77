"""The rollouts of every step as jsonl: ids as generated, never re-tokenised text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridengine.data import PromptSample
from hybridengine.tracking.atomic import atomic_file

__all__ = ["RolloutWriter"]


class RolloutWriter:
    """Writes `<dir>/<name>.jsonl`, one response a line, a whole file or none."""

    def __init__(self, dir: str | Path) -> None:
        self._dir = Path(dir)

    def write(
        self,
        name: str,
        samples: Sequence[PromptSample],
        responses: Sequence[str],
        response_ids: Sequence[Sequence[int]],
        rewards: Sequence[float],
        log_probs: Sequence[Sequence[float]],
        extras: Mapping[str, Sequence[float]] | None = None,
    ) -> Path:
        """Write N responses, `responses[i]` to `samples[i]`, `name` such as "step_3".

        response_ids[i], log_probs[i]: the tokens as generated and the engine's log-probs of them.
        """
        path = self._dir / f"{name}.jsonl"
        columns = zip(samples, responses, response_ids, rewards, log_probs, strict=True)
        with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for i, (sample, response, ids, reward, token_log_probs) in enumerate(columns):
                row = {
                    "index": sample.index,
                    "prompt": sample.prompt_text,
                    "response": response,
                    "ground_truth": sample.ground_truth,
                    "reward": reward,
                    **{key: values[i] for key, values in (extras or {}).items()},
                    "prompt_ids": list(sample.prompt_ids),
                    "response_ids": list(ids),
                    "log_probs": [float(value) for value in token_log_probs],
                }
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return path
