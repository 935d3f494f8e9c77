"""Conversations → token ids, and which of them are learnt: what the assistant says, EOS included.

A row is a whole chat under `messages_key`, or a prompt (text or a chat) and a response. The chat is
rendered and tokenised as a whole, as `apply_chat_template` does; a token is a target if it covers
text of an assistant turn, up to the special token that ends the turn. A response whose template
writes no such token gets the tokenizer's EOS.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridengine.config.sft import SFTDataConfig
from hybridengine.data.chats import ChatTemplate, chat_of, chunks, require, rows_of, short
from hybridengine.data.files import DataError, data_files
from hybridengine.data.records import Records, fingerprint

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


class SFTDataset(Records[SFTSample]):
    """All conversations of one or more files, tokenised once per machine.

    Raises DataError, before any training, for every fault of a file, a row or a template.
    """

    def __init__(self, files: str | Sequence[str], tokenizer: Any, data: SFTDataConfig) -> None:
        if not tokenizer.is_fast:
            raise DataError("SFT needs to know where tokens lie: use a model with a fast tokenizer")
        found, template = data_files(files), ChatTemplate(tokenizer, data)
        settings = (
            *(data.messages_key, data.prompt_key, data.response_key, data.max_length),
            *(data.truncation, template.text, sorted(template.options.items())),
        )
        key = fingerprint(tokenizer, found, "sft", *settings)
        super().__init__(key, lambda: _samples(files, tokenizer, template, data))


def _samples(
    files: str | Sequence[str], tokenizer: Any, template: ChatTemplate, data: SFTDataConfig
) -> Iterator[SFTSample]:
    for chunk in chunks(rows_of(files)):
        rows = [_render(where, row, template, data) for where, row in chunk]
        encoded = tokenizer(
            [row.text for row in rows], add_special_tokens=False, return_offsets_mapping=True
        )
        tokens = zip(rows, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        for row, ids, offsets in tokens:
            yield _sample(row, ids, offsets, tokenizer, data)


def _render(
    where: str, row: Mapping[str, Any], template: ChatTemplate, data: SFTDataConfig
) -> _Rendered:
    chat = _chat(where, row, data)
    if chat[0]["role"] == "assistant":
        raise DataError(
            f"{where}: the chat starts with the assistant, and no template says what comes before "
            "that; put a user turn first, or leave the turn out"
        )
    text, spans = template.render(where, chat, False), []
    for turn, message in enumerate(chat):
        if message["role"] != "assistant" or not (data.messages_key or turn == len(chat) - 1):
            continue  # the prompt of a response may hold solved examples
        before = template.render(where, chat[:turn], True)
        with_turn = template.render(where, chat[: turn + 1], False)
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
    if data.messages_key:
        require(where, row, data.messages_key)
        return chat_of(where, row, data.messages_key)
    require(where, row, data.prompt_key, data.response_key)
    prompt, response = row[data.prompt_key], row[data.response_key]
    if isinstance(prompt, str):
        row = {data.prompt_key: [{"role": "user", "content": prompt}]}
    if not isinstance(response, str):
        raise DataError(f"{where}: {data.response_key} is {short(response)}, expected text")
    chat = chat_of(where, row, data.prompt_key)
    return [*chat, {"role": "assistant", "content": response}]


def _sample(
    row: _Rendered,
    ids: list[int],
    offsets: list[tuple[int, int]],
    tokenizer: Any,
    data: SFTDataConfig,
) -> SFTSample:
    special, eos = set(tokenizer.all_special_ids), tokenizer.eos_token_id
    if not ids:
        raise DataError(f"{row.where}: the chat template made an empty conversation")
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
