"""The prompts of a run: verl's row schema, the tokenizer's chat template, token ids.

A row is `data_source`, `prompt` (a chat: list of {role, content}), `reward_model.ground_truth` and,
if there, `extra_info`. Other columns are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridengine.config.schema import DataConfig
from hybridengine.data.chats import chat_of, find_template, render, require, rows_of, short
from hybridengine.data.files import DataError

__all__ = ["DataError", "PromptDataset", "PromptSample"]


@dataclass(frozen=True)
class PromptSample:
    index: int  # position in the files, before any filtering
    prompt_ids: list[int]
    prompt_text: str  # what the model sees, template included
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    chat: Sequence[Mapping[str, Any]] = ()  # as in the file


class PromptDataset(list[PromptSample]):
    """All prompts of one or more files, tokenised once.

    Attributes:
        dropped: how many rows `filter_overlong_prompts` removed.

    Raises DataError, before any training, for every fault of a file, a row or a template.
    """

    def __init__(self, files: str | Sequence[str], tokenizer: Any, data: DataConfig) -> None:
        super().__init__()
        template = find_template(tokenizer, data.chat_template)
        rows = [(where, row, _chat(where, row, data)) for where, row in rows_of(files)]
        texts = [render(where, tokenizer, template, chat, True) for where, _, chat in rows]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template wrote them
        for index, ((where, row, chat), text, ids) in enumerate(
            zip(rows, texts, encoded, strict=True)
        ):
            if len(ids) > data.max_prompt_length:
                if data.filter_overlong_prompts:
                    continue
                ids = _truncated(where, ids, data)
                text = tokenizer.decode(ids)
            if not ids:
                raise DataError(f"{where}: the chat template made an empty prompt")
            source, truth = str(row[data.reward_fn_key]), row["reward_model"]["ground_truth"]
            extra = row.get("extra_info") or {}
            self.append(PromptSample(index, ids, text, source, truth, extra, chat))
        self.dropped = len(rows) - len(self)
        if not self:
            raise DataError(
                f"all {self.dropped} prompts of {files} are longer than "
                f"data.max_prompt_length {data.max_prompt_length}; raise it"
            )


def _chat(where: str, row: Mapping[str, Any], data: DataConfig) -> list[dict[str, Any]]:
    """The prompt of a row that has all that a row needs."""
    require(where, row, data.prompt_key, data.reward_fn_key, "reward_model")
    reward_model, extra_info = row["reward_model"], row.get("extra_info") or {}
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise DataError(
            f"{where}: reward_model is {short(reward_model)}, expected an object with ground_truth"
        )
    if not isinstance(extra_info, Mapping):
        raise DataError(f"{where}: extra_info is {short(extra_info)}, expected an object")
    return chat_of(where, row, data.prompt_key)


def _truncated(where: str, ids: list[int], data: DataConfig) -> list[int]:
    limit = data.max_prompt_length
    if data.truncation == "error":
        raise DataError(
            f"{where}: the prompt is {len(ids)} tokens, more than data.max_prompt_length {limit}; "
            "raise it, set data.truncation to left or right, or data.filter_overlong_prompts=true"
        )
    return ids[-limit:] if data.truncation == "left" else ids[:limit]
