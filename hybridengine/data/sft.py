"""Conversations → token ids, and which of them are learnt: what the assistant says, EOS included.

A row is a whole chat under `messages_key`, or a prompt (text or a chat) and a response. The chat is
rendered and tokenised as a whole, as `apply_chat_template` does; a token is a target if it covers
text of an assistant turn, up to the special token that ends the turn. A response whose template
writes no such token gets the tokenizer's EOS.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridengine.config.sft import SFTDataConfig
from hybridengine.data.files import DataError, read_rows
from hybridengine.data.prompts import _chat_template, _is_message, _short

__all__ = ["SFTDataset", "SFTSample"]


@dataclass(frozen=True)
class SFTSample:
    ids: array[int]
    is_target: bytes  # 1 where the token is learnt, 0 elsewhere; as long as ids

    @property
    def num_targets(self) -> int:
        return sum(self.is_target)


@dataclass(frozen=True)
class _Rendered:
    where: str
    text: str
    spans: list[tuple[int, int]]  # of characters that the assistant says


class SFTDataset(Sequence[SFTSample]):
    """All conversations of one or more files, tokenised once.

    Raises DataError, before any training, for every fault of a file, a row or a template.
    """

    def __init__(self, files: str | Sequence[str], tokenizer: Any, data: SFTDataConfig) -> None:
        names = [files] if isinstance(files, str) else list(files)
        template = _chat_template(tokenizer, data.chat_template)
        rows = [
            _render(where, row, tokenizer, template, data)
            for name in names
            for where, row in read_rows(name)
        ]
        if not rows:
            raise DataError(f"no rows in {', '.join(names)}; the data file is empty")
        if not tokenizer.is_fast:
            raise DataError("SFT needs to know where tokens lie: use a model with a fast tokenizer")
        encoded = tokenizer(
            [row.text for row in rows], add_special_tokens=False, return_offsets_mapping=True
        )
        special = set(tokenizer.all_special_ids)
        self._samples = [
            _sample(row, ids, offsets, special, tokenizer.eos_token_id, data)
            for row, ids, offsets in zip(
                rows, encoded["input_ids"], encoded["offset_mapping"], strict=True
            )
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._samples[index]


def _render(
    where: str, row: Mapping[str, Any], tokenizer: Any, template: str, data: SFTDataConfig
) -> _Rendered:
    def render(chat: list[dict[str, Any]], prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                tokenizer.apply_chat_template(
                    chat, chat_template=template, tokenize=False, add_generation_prompt=prompt
                )
            )
        except TemplateError as error:
            raise DataError(f"{where}: the chat template refuses this chat: {error}") from None

    chat = _chat(where, row, data)
    text, spans = render(chat, False), []
    for turn, message in enumerate(chat):
        if message["role"] != "assistant" or not (data.messages_key or turn == len(chat) - 1):
            continue  # the prompt of a response may hold solved examples
        before, with_turn = render(chat[:turn], True), render(chat[: turn + 1], False)
        if not (with_turn.startswith(before) and text.startswith(with_turn)):
            raise DataError(
                f"{where}: the chat template changes turn {turn} when other turns are there, so "
                "its place in the whole is unclear; give one row per assistant turn, or another "
                "data.chat_template"
            )
        spans.append((len(before), len(with_turn)))
    if not spans:
        raise DataError(f"{where}: no turn has the role assistant, so there is nothing to learn")
    return _Rendered(where, text, spans)


def _chat(where: str, row: Mapping[str, Any], data: SFTDataConfig) -> list[dict[str, Any]]:
    keys = (data.messages_key,) if data.messages_key else (data.prompt_key, data.response_key)
    for key in keys:
        if key not in row:
            there = ", ".join(row) or "none"
            raise DataError(f"{where} has no column {key!r}; columns there: {there}")
    chat = row[keys[0]]
    if not data.messages_key and isinstance(chat, str):
        chat = [{"role": "user", "content": chat}]
    if not isinstance(chat, list) or not chat or not all(_is_message(turn) for turn in chat):
        raise DataError(
            f"{where}: {keys[0]} is {_short(chat)}, expected a chat, a list like "
            '[{"role": "user", "content": "…"}]'
        )
    if data.messages_key:
        return chat
    response = row[data.response_key]
    if not isinstance(response, str):
        raise DataError(f"{where}: {data.response_key} is {_short(response)}, expected text")
    return [*chat, {"role": "assistant", "content": response}]


def _sample(
    row: _Rendered,
    ids: list[int],
    offsets: list[tuple[int, int]],
    special: set[int],
    eos: int | None,
    data: SFTDataConfig,
) -> SFTSample:
    targets = bytearray(len(ids))
    for start, end in row.spans:
        inside = [i for i, (a, b) in enumerate(offsets) if a < end and b > start]
        ends = [i for i in inside if ids[i] in special]
        # What follows the end of a turn, such as a line break, the model never has to say.
        if ends and not row.text[offsets[ends[-1]][1] : end].strip():
            inside = [i for i in inside if i <= ends[-1]]
        for i in inside:
            targets[i] = 1
    if targets[-1] and ids[-1] not in special and eos is not None:
        ids, targets = [*ids, eos], targets + b"\1"
    if len(ids) > data.max_length:
        if data.truncation == "error":
            raise DataError(
                f"{row.where}: the conversation is {len(ids)} tokens, more than data.max_length "
                f"{data.max_length}; raise it, or set data.truncation to left or right"
            )
        left = data.truncation == "left"
        kept = slice(-data.max_length, None) if left else slice(data.max_length)
        ids, targets = ids[kept], targets[kept]
    targets[0] = 0  # nothing precedes it
    if not any(targets):
        raise DataError(f"{row.where}: no token of a response is left to learn within max_length")
    return SFTSample(array("i", ids), bytes(targets))
