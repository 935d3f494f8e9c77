"""The prompts of a run: verl's row schema, the tokenizer's chat template, token ids.

A row is `data_source`, `prompt` (a chat: list of {role, content}), `reward_model.ground_truth` and,
if there, `extra_info`. Other columns are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridengine.config.schema import DataConfig
from hybridengine.data.chats import ChatTemplate, chat_of, chunks, require, rows_of, short
from hybridengine.data.files import DataError, data_files
from hybridengine.data.records import Records, fingerprint

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


class PromptDataset(Records[PromptSample]):
    """All prompts of one or more files, tokenised once per machine.

    Attributes:
        dropped: how many rows `filter_overlong_prompts` removed.

    Raises DataError, before any training, for every fault of a file, a row or a template.
    """

    def __init__(self, files: str | Sequence[str], tokenizer: Any, data: DataConfig) -> None:
        found, template = data_files(files), ChatTemplate(tokenizer, data)
        settings = (
            *(data.prompt_key, data.reward_fn_key, data.max_prompt_length, data.truncation),
            *(data.filter_overlong_prompts, template.text, sorted(template.options.items())),
        )
        key = fingerprint(tokenizer, found, "prompts", *settings)
        super().__init__(key, lambda: _samples(files, tokenizer, template, data))
        if not self:
            raise DataError(
                f"all {self.dropped} prompts of {files} are longer than "
                f"data.max_prompt_length {data.max_prompt_length}; raise it"
            )


def _samples(
    files: str | Sequence[str], tokenizer: Any, template: ChatTemplate, data: DataConfig
) -> Iterator[PromptSample | None]:
    """One sample per row; None for one that is dropped."""
    index = 0
    for rows in chunks(rows_of(files)):
        chats = [_chat(where, row, data) for where, row in rows]
        texts = [
            template.render(where, chat, True) for (where, _), chat in zip(rows, chats, strict=True)
        ]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template wrote them
        for (where, row), chat, text, ids in zip(rows, chats, texts, encoded, strict=True):
            yield _sample(index, where, row, chat, text, ids, tokenizer, data)
            index += 1


def _sample(
    index: int,
    where: str,
    row: Mapping[str, Any],
    chat: Sequence[Mapping[str, Any]],
    text: str,
    ids: list[int],
    tokenizer: Any,
    data: DataConfig,
) -> PromptSample | None:
    if len(ids) > data.max_prompt_length:
        if data.filter_overlong_prompts:
            return None
        ids = _truncated(where, ids, data)
        text = tokenizer.decode(ids)
    if not ids:
        raise DataError(f"{where}: the chat template made an empty prompt")
    source, truth = str(row[data.reward_fn_key]), row["reward_model"]["ground_truth"]
    return PromptSample(index, ids, text, source, truth, row.get("extra_info") or {}, chat)


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
