"""Prompts of RL: rows in verl's schema → token ids by the chat template.

A row has `data_source`, `prompt` (a chat: list of {role, content}), `reward_model.ground_truth` and
optionally `extra_info`. `tools_kwargs`, `interaction_kwargs` and `agent_name`, of multi-turn
rollouts, may be columns of their own or keys of `extra_info`. Other columns are ignored.

A row with neither `data_source` nor `reward_model` is one of TRL: `prompt`, and any other columns,
which are the sample's `extra_info`.

The chat, its images and its tools are read as in SFT (`rows.read_chat`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hybridengine.model.attachments import Attachment, AttachmentPreparer
from hybridengine.run.config import DataConfig
from hybridengine.run.errors import DataError, unexpected
from hybridengine.train.data.cache import CachedDataset, identify
from hybridengine.train.data.chats import ChatTemplate
from hybridengine.train.data.files import RowLocation, read_chunks, read_files, require_columns
from hybridengine.train.data.rows import RowChat, cut_tokens, image_columns, read_chat

_TURN_COLUMNS = ("tools_kwargs", "interaction_kwargs", "agent_name")  # moved to extra_info


@dataclass(frozen=True)
class PromptSample:
    index: int  # position in the files, before any filtering
    prompt_ids: list[int]  # each image as the model's tokens for it
    prompt_text: str  # the rendered chat template, with one placeholder for each image
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    chat: Sequence[Mapping[str, Any]] = ()  # as templates take it; images are parts without content
    images: Sequence[Attachment] = field(default_factory=list)  # in the order of their places
    tools: Sequence[Mapping[str, Any]] = field(default_factory=list)  # the row's own schemas
    template_options: Mapping[str, Any] = field(default_factory=dict)  # the row's own variables


class PromptDataset(CachedDataset[PromptSample]):
    """All prompts of one or more files, tokenised once per machine.

    tools: schemas of the tools that the template shows to the model.
    preparer: of the model's images; None: the model takes no images.

    Attributes:
        dropped: the number of rows that `filter_overlong_prompts` removed.
        content: hash of the files' contents.

    Raises DataError for any fault of a file, a row or the template.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: Any,
        data: DataConfig,
        tools: Sequence[Mapping[str, Any]] = (),
        preparer: AttachmentPreparer | None = None,
    ) -> None:
        template = ChatTemplate(tokenizer, data, tools, preparer)
        settings = (
            *(data.prompt_key, data.reward_fn_key, data.max_prompt_length, data.truncation),
            *(data.filter_overlong_prompts, data.tools_key, data.enable_thinking_key),
        )
        self.content, key = identify(files, tokenizer, template, data, "prompts", *settings)
        super().__init__(key, lambda: _samples(files, tokenizer, template, data), PromptSample)
        if not self:
            raise DataError(
                f"all {self.dropped} prompts of {files} are longer than "
                f"data.max_prompt_length {data.max_prompt_length}; raise it"
            )


def check_prompts(files: str | Sequence[str], data: DataConfig) -> None:
    """Raise DataError for a fault of a file or a row that is detected without a tokenizer."""
    for where, row in read_files(files):
        _chat(where, _verl_row(row, data), data)


def _samples(
    files: str | Sequence[str], tokenizer: Any, template: ChatTemplate, data: DataConfig
) -> Iterator[PromptSample | None]:
    """Yield a sample for each row, None for one that is dropped."""
    numbers = count()
    for chunk in read_chunks(files):
        rows = [(where, _verl_row(row, data)) for where, row in chunk]
        chats = [_chat(where, row, data) for where, row in rows]
        texts = [template.show(chat, True)[2] for chat in chats]
        pairs = zip(chats, texts, strict=True)
        expanded = [template.expand(chat.where, text, chat.images)[0] for chat, text in pairs]
        # The template has already written the special tokens.
        encoded = template.special.encode(expanded)["input_ids"]
        for (where, row), chat, text, ids in zip(rows, chats, texts, encoded, strict=True):
            index = next(numbers)
            if len(ids) > data.max_prompt_length:
                if data.filter_overlong_prompts:
                    yield None
                    continue
                ids = cut_tokens(where, "the prompt", ids, "max_prompt_length", data, chat.images)
                text = tokenizer.decode(ids)
            if not ids:
                raise DataError(f"{where}: the chat template made an empty prompt")
            yield PromptSample(
                index,
                ids,
                template.special.reveal(text),
                str(row[data.reward_fn_key]),
                row["reward_model"]["ground_truth"],
                _extra_info(row),
                chat.messages,
                chat.images,
                chat.tools,
                chat.options,
            )


def _verl_row(row: dict[str, Any], data: DataConfig) -> dict[str, Any]:
    """Return a row of TRL in verl's schema, any other as it is."""
    if data.reward_fn_key in row or "reward_model" in row or data.prompt_key not in row:
        return row
    own = [name for name in (data.prompt_key, *image_columns(data)) if name in row]
    columns = {name: value for name, value in row.items() if name not in own}
    return {
        **{name: row[name] for name in own},
        data.reward_fn_key: "data",  # names the validation metrics
        "reward_model": {"ground_truth": columns.pop("ground_truth", None)},
        "extra_info": columns,
    }


def _chat(where: RowLocation, row: Mapping[str, Any], data: DataConfig) -> RowChat:
    """Check the columns of a row and return its prompt."""
    require_columns(where, row, data.prompt_key, data.reward_fn_key, "reward_model")
    reward_model, extra_info = row["reward_model"], row.get("extra_info") or {}
    if row[data.reward_fn_key] is None:
        raise unexpected(where, data.reward_fn_key, None, "text that names the data source")
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise unexpected(where, "reward_model", reward_model, "an object with ground_truth")
    if not isinstance(extra_info, Mapping):
        raise unexpected(where, "extra_info", extra_info, "an object")
    tools_kwargs = _extra_info(row).get("tools_kwargs") or {}
    if not isinstance(tools_kwargs, Mapping):
        expected = "an object with the names of tools"
        raise unexpected(where, "tools_kwargs", tools_kwargs, expected)
    chat = read_chat(where, row, data.prompt_key, row[data.prompt_key], data)
    if chat.messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: {data.prompt_key} ends with a turn of the assistant, after which the model "
            "would begin another one; remove the turn, or train on it by `hybridengine sft`"
        )
    return chat


def _extra_info(row: Mapping[str, Any]) -> Mapping[str, Any]:
    own = {name: row[name] for name in _TURN_COLUMNS if row.get(name) is not None}
    given = row.get("extra_info") or {}
    return {**own, **given} if own else given
