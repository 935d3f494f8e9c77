"""The prompts of a run: verl's row schema, the tokenizer's chat template, token ids.

A row is `data_source`, `prompt` (a chat: list of {role, content}), `reward_model.ground_truth` and,
if there, `extra_info`. Other columns are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.config.schema import DataConfig
from hybridengine.data.files import DataError, read_rows

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


@dataclass(frozen=True)
class _Row:
    where: str
    chat: list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


class PromptDataset(Sequence[PromptSample]):
    """All prompts of one or more files, tokenised once.

    Attributes:
        dropped: how many rows `filter_overlong_prompts` removed.

    Raises DataError, before any training, for every fault of a file, a row or a template.
    """

    def __init__(self, files: str | Sequence[str], tokenizer: Any, data: DataConfig) -> None:
        names = [files] if isinstance(files, str) else list(files)
        rows = [_read_row(*item, data) for name in names for item in read_rows(name)]
        if not rows:
            raise DataError(f"no rows in {', '.join(names)}; the data file is empty")
        samples = _tokenize(rows, tokenizer, data)
        self._samples = [s for s in samples if s is not None]
        self.dropped = len(samples) - len(self._samples)
        if not self._samples:
            raise DataError(
                f"all {self.dropped} prompts of {', '.join(names)} are longer than "
                f"data.max_prompt_length {data.max_prompt_length}; raise it"
            )

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._samples[index]

    def batches(self, size: int | None) -> Iterator[list[PromptSample]]:
        """The samples in file order, `size` at a time (None: all); the last may be short."""
        step = size or len(self)
        for start in range(0, len(self), step):
            yield self._samples[start : start + step]


def _read_row(where: str, row: Mapping[str, Any], data: DataConfig) -> _Row:
    for column in (data.prompt_key, data.reward_fn_key, "reward_model"):
        if column not in row:
            there = ", ".join(row) or "none"
            raise DataError(f"{where} has no column {column!r}; columns there: {there}")
    reward_model = row["reward_model"]
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise DataError(
            f"{where}: reward_model is {_short(reward_model)}, expected an object with ground_truth"
        )
    chat = row[data.prompt_key]
    if not isinstance(chat, list) or not chat or not all(_is_message(turn) for turn in chat):
        raise DataError(
            f"{where}: {data.prompt_key} is {_short(chat)}, expected a chat, a list like "
            '[{"role": "user", "content": "…"}]'
        )
    extra_info = row.get("extra_info") or {}
    if not isinstance(extra_info, Mapping):
        raise DataError(f"{where}: extra_info is {_short(extra_info)}, expected an object")
    source = str(row[data.reward_fn_key])
    return _Row(where, chat, source, reward_model["ground_truth"], extra_info)


def _is_message(turn: Any) -> bool:
    return isinstance(turn, Mapping) and "role" in turn and isinstance(turn.get("content"), str)


def _tokenize(rows: list[_Row], tokenizer: Any, data: DataConfig) -> list[PromptSample | None]:
    """One sample per row; None where `filter_overlong_prompts` drops it."""
    template = _chat_template(tokenizer, data.chat_template)
    texts = [_render(tokenizer, row, template) for row in rows]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template wrote them
    samples: list[PromptSample | None] = []
    for index, (row, text, prompt_ids) in enumerate(zip(rows, texts, ids, strict=True)):
        limit = data.max_prompt_length
        if len(prompt_ids) > limit:
            if data.filter_overlong_prompts:
                samples.append(None)
                continue
            if data.truncation == "error":
                raise DataError(
                    f"{row.where}: the prompt is {len(prompt_ids)} tokens, more than "
                    f"data.max_prompt_length {limit}; raise it, set data.truncation to left or "
                    "right, or data.filter_overlong_prompts=true"
                )
            prompt_ids = prompt_ids[-limit:] if data.truncation == "left" else prompt_ids[:limit]
            text = tokenizer.decode(prompt_ids)
        if not prompt_ids:
            raise DataError(f"{row.where}: the chat template made an empty prompt")
        samples.append(
            PromptSample(
                index,
                prompt_ids,
                text,
                row.data_source,
                row.ground_truth,
                row.extra_info,
                row.chat,
            )
        )
    return samples


def _chat_template(tokenizer: Any, template: str | None) -> str:
    if template is None:
        if not tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template; set data.chat_template")
        return str(tokenizer.chat_template)
    if "{" in template or "\n" in template:
        return template
    file = Path(template).expanduser()
    if not file.is_file():
        raise DataError(
            f"data.chat_template {template!r} is neither a Jinja text nor a file that exists"
        )
    return file.read_text(encoding="utf-8")


def _render(tokenizer: Any, row: _Row, template: str) -> str:
    from jinja2 import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(
                row.chat, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        )
    except TemplateError as error:
        raise DataError(f"{row.where}: the chat template refuses this prompt: {error}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
