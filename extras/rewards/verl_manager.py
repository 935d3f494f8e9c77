"""Use a reward manager written for verl: a class with `__call__(self, data, return_dict)`.

The manager runs in the rank, as in verl, and calls the reward function itself, in this process.
`VerlData` has what verl's own managers (naive, batch, dapo, prime) read of a DataProto.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridengine.rewards.functions import import_reward_function
from hybridengine.rewards.local import given_function, is_given
from hybridengine.run.config import RewardConfig
from hybridengine.run.errors import ConfigError, RewardError
from hybridengine.train.data import PromptSample
from hybridengine.train.rewards.function import to_text
from hybridengine.train.rewards.manager import (
    ResponseTokens,
    RewardManager,
    RewardPart,
    RewardResult,
    caller_name,
)


class VerlData:
    """N prompts with their responses, as verl's DataProto holds them.

    batch: `prompts` [N, P], padded on the left, `responses` [N, R], padded on the right,
      `response_mask` [N, R], 1 for the model's tokens and 0 for those of tools and users,
      `input_ids`, `attention_mask` and `position_ids` [N, P + R]; int64.
    non_tensor_batch: object arrays [N], `data_source`, `reward_model`, `extra_info`, `raw_prompt`,
      `index`.
    An item has rows without the first dimension, and the objects themselves.
    """

    def __init__(self, batch: dict[str, Any], non_tensor_batch: dict[str, Any]) -> None:
        self.batch, self.non_tensor_batch = batch, non_tensor_batch
        self.meta_info: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.batch["responses"])

    def __getitem__(self, index: Any) -> VerlData:
        return VerlData(
            {name: column[index] for name, column in self.batch.items()},
            {name: column[index] for name, column in self.non_tensor_batch.items()},
        )

    def __iter__(self) -> Iterator[VerlData]:
        return (self[i] for i in range(len(self)))

    @staticmethod
    def build(
        samples: Sequence[PromptSample], tokens: Sequence[ResponseTokens], pad: int
    ) -> VerlData:
        """Pad prompts and responses; rows of the data files are copied, managers write to them."""
        prompts = _padded([s.prompt_ids for s in samples], pad, left=True)
        responses = _padded([t.ids for t in tokens], pad, left=False)
        prompt_mask = _padded([[1] * len(s.prompt_ids) for s in samples], 0, left=True)
        ones = [[1] * len(t.ids) for t in tokens]
        sampled = [
            own if t.sampled is None else t.sampled for own, t in zip(ones, tokens, strict=True)
        ]
        attention_mask = torch.cat([prompt_mask, _padded(ones, 0, left=False)], 1)
        columns: dict[str, list[Any]] = {
            "data_source": [s.data_source for s in samples],
            "reward_model": [{"style": "rule", "ground_truth": s.ground_truth} for s in samples],
            "extra_info": [copy.deepcopy(dict(s.extra_info)) for s in samples],
            "raw_prompt": [copy.deepcopy(list(s.chat)) for s in samples],
            "index": [s.index for s in samples],
        }
        return VerlData(
            {
                "prompts": prompts,
                "responses": responses,
                "response_mask": _padded(sampled, 0, left=False),
                "input_ids": torch.cat([prompts, responses], 1),
                "attention_mask": attention_mask,
                "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            },
            {name: _objects(values) for name, values in columns.items()},
        )


class VerlRewardManager(RewardManager):
    """Calls a manager of verl once per batch.

    The score of a response is the sum of its token rewards. Numbers and texts of
    `reward_extra_info` are further results; its `score`, which a manager may have changed since, is
    `raw_score`.
    """

    def __init__(
        self, manager: type, reward: RewardConfig, max_response_length: int, tokenizer: Any
    ) -> None:
        super().__init__([], reward, max_response_length)
        self._name, self._tokenizer = manager.__name__, tokenizer
        buffer = reward.overlong_buffer
        known = {
            "tokenizer": tokenizer,
            "num_examine": 0,  # a run prints samples itself
            "compute_score": _compute_score(reward),
            "reward_fn_key": "data_source",
            "max_resp_len": max_response_length,
            "overlong_buffer_cfg": SimpleNamespace(
                enable=buffer.enable, len=buffer.len, penalty_factor=buffer.penalty_factor, log=True
            ),
        }
        parameters = inspect.signature(manager).parameters.values()
        named = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD}
        missing = [n for n, p in named.items() if p.default is p.empty and n not in known]
        if missing:
            raise ConfigError(
                f"reward.reward_manager.name: {self._name} requires {missing[0]!r}; a manager of "
                f"verl is built with those of {', '.join(known)} that it takes"
            )
        self._manager = manager(**{n: value for n, value in known.items() if n in named})

    def score_tokens(
        self,
        samples: Sequence[PromptSample],
        responses: Sequence[str],
        tokens: Sequence[ResponseTokens],
    ) -> RewardResult:
        if not samples:
            return RewardResult([], {})
        pad = getattr(self._tokenizer, "pad_token_id", None) or 0
        data = VerlData.build(samples, tokens, pad)
        try:
            returned = self._manager(data, return_dict=True)
        except Exception as error:
            raise RewardError(
                f"reward manager {self._name} raised {type(error).__name__}: {error}"
            ) from error
        is_dict = isinstance(returned, Mapping)
        rewards = returned.get("reward_tensor") if is_dict else returned
        shape = data.batch["responses"].shape
        if not isinstance(rewards, Tensor) or rewards.shape != shape:
            given = getattr(rewards, "shape", None) or type(rewards).__name__
            raise RewardError(
                f"reward manager {self._name} returned {given} as reward_tensor, expected a "
                f"tensor of shape {tuple(shape)}, like data.batch['responses']"
            )
        scores = rewards.double().sum(1).tolist()
        extra_info = returned.get("reward_extra_info") or {} if is_dict else {}
        extras, texts = _split(extra_info, len(samples))
        return RewardResult(scores, extras, {self._name: RewardPart(1.0, scores)}, texts)


def _compute_score(reward: RewardConfig) -> Any:
    """Return the run's reward function in this process; None, verl's own default, if none is set.

    Raises ConfigError for several functions, and for a service.
    """
    paths = reward.custom_reward_function.path
    if not paths:
        return None
    if len(paths) > 1 or caller_name(paths[0]) != "processes":
        raise ConfigError(
            f"reward.custom_reward_function.path is {list(paths)}, but a manager of verl "
            "(reward.reward_manager.name) calls one function; give one Python file"
        )
    [(path, name)] = reward.functions
    if is_given(path):
        return given_function(path)
    return import_reward_function(path, name, ())[0]


def _padded(rows: Sequence[Sequence[int]], pad: int, *, left: bool) -> Tensor:
    """Return int64 [N, longest], at least one column."""
    width = max(1, *map(len, rows)) if rows else 1
    fills = [[pad] * (width - len(row)) for row in rows]
    return torch.tensor(
        [[*f, *row] if left else [*row, *f] for f, row in zip(fills, rows, strict=True)]
    )


def _objects(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _split(
    extra_info: Mapping[str, Sequence[Any]], size: int
) -> tuple[dict[str, list[float]], dict[str, list[str | None]]]:
    """Return the columns that hold a number for every response, and those of texts."""
    numbers: dict[str, list[float]] = {}
    texts: dict[str, list[str | None]] = {}
    for name, values in extra_info.items():
        try:
            if name != "pred" and not any(isinstance(v, str) for v in values):
                numbers["raw_score" if name == "score" else name] = [float(v) for v in values]
            elif len(values) == size:
                texts[name] = [None if v is None else to_text(v) for v in values]
        except (TypeError, ValueError):  # other objects
            continue
    return numbers, texts
