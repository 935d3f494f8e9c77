"""Conversations of SFT → token ids and a loss mask.

A row is a chat under `messages_key`, or a prompt (text or a chat) and a response; it may have tools
under `tools_key`. The full chat is rendered and tokenised at once, as `apply_chat_template` does.
The loss mask is 1 for tokens of assistant turns, tool calls included, up to and including the
special token that ends the turn. Where the template writes no such token after the last turn, the
tokenizer's EOS is appended.

Images are in the chat, or in the column `data.image_key` (`data.images`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybridengine.config import SFTDataConfig
from hybridengine.data.cache import CachedDataset, identify
from hybridengine.data.chats import ChatTemplate, parse_chat
from hybridengine.data.files import RowLocation, read_chunks, read_files, require_columns
from hybridengine.data.images import image_settings, place_images
from hybridengine.data.tools import check_tools_shown, parse_tools, plain_tool_calls, tool_names
from hybridengine.errors import DataError, shorten, unexpected
from hybridengine.vision import EncodedImage, ImagePreparer, Replacement

if TYPE_CHECKING:
    Ids = array[int]
else:
    Ids = array  # which takes no parameter before Python 3.12


@dataclass(frozen=True)
class SFTSample:
    ids: Ids
    loss_mask: bytes  # 1 for each token that is trained on, else 0; as long as ids
    images: Sequence[EncodedImage] = field(default_factory=list)  # in the order of their tokens

    @property
    def num_loss_tokens(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True)
class _Rendered:
    where: str
    text: str
    assistant_spans: list[tuple[int, int]]  # (start, end) characters of assistant turns
    images: list[EncodedImage]


class SFTDataset(CachedDataset[SFTSample]):
    """All conversations of one or more files, tokenised once per machine.

    The arguments, the attribute `content` and the errors are those of `PromptDataset`.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: Any,
        data: SFTDataConfig,
        preparer: ImagePreparer | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                "SFT needs the character offsets of tokens; use a model with a fast tokenizer"
            )
        template = ChatTemplate(tokenizer, data, (), preparer)
        settings = (
            *(data.messages_key, data.prompt_key, data.response_key, data.max_length),
            *(data.tools_key, data.enable_thinking_key),
            *(data.prompt_dict_keys, data.response_dict_keys),
            *(data.truncation, data.special_tokens, template.text),
            *sorted(template.options.items()),
            *image_settings(files, data, preparer),
        )
        self.content, key = identify(files, tokenizer, "sft", *settings)
        super().__init__(key, lambda: _samples(files, tokenizer, template, data), SFTSample)


def check_conversations(files: str | Sequence[str], data: SFTDataConfig) -> None:
    """Raise DataError for what needs no tokenizer to be seen: faults of files and of their rows."""
    for where, row in read_files(files):
        place_images(where, _chat(where, row, data), row, data.image_key)


def _samples(
    files: str | Sequence[str], tokenizer: Any, template: ChatTemplate, data: SFTDataConfig
) -> Iterator[SFTSample]:
    for chunk in read_chunks(files):
        rows = [_render(where, row, template, data) for where, row in chunk]
        texts = [row.text for row in rows]
        encoded = template.special.encode(texts, return_offsets_mapping=True)
        tokens = zip(rows, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        for row, ids, offsets in tokens:
            yield _sample(row, ids, offsets, tokenizer, data)


def _render(
    where: RowLocation, row: Mapping[str, Any], template: ChatTemplate, data: SFTDataConfig
) -> _Rendered:
    given, images = place_images(where, _chat(where, row, data), row, data.image_key)
    chat = [plain_tool_calls(where, message) for message in given]
    tools, thinking = parse_tools(where, row, data.tools_key), row.get(data.enable_thinking_key)
    chat, tools = (template.special.hide(where, value) for value in (chat, tools))
    if thinking is not None and not isinstance(thinking, bool):
        raise unexpected(where, data.enable_thinking_key, thinking, "true or false")
    options = {} if thinking is None else {"enable_thinking": thinking}
    template = template.of_row(tools, **options)
    if chat[0]["role"] == "assistant":
        raise DataError(
            f"{where}: the chat starts with the assistant, and chat templates render no prompt "
            "before the first turn; put a user turn first, or leave the turn out"
        )
    text, spans = template.render(where, chat, False), list[tuple[int, int]]()
    check_tools_shown(where, tools, text)
    for turn, message in enumerate(chat):
        if message["role"] != "assistant" or not (data.messages_key or turn == len(chat) - 1):
            continue  # solved examples in a prompt are not trained on
        span = _span_of_turn(where, text, template, chat, turn)
        if span is None:
            raise DataError(
                f"{where}: the chat template changes turn {turn} when other turns are there, so "
                "its tokens cannot be located; give one row per assistant turn, or another "
                "data.chat_template"
            )
        missing = [n for n in tool_names(message) if n not in text[slice(*span)]]
        if missing:
            raise DataError(
                f"{where}: the chat template does not write the call of {missing[0]!r} in turn "
                f"{turn}; give a data.chat_template that knows tool calls"
            )
        spans.append(span)
    if not spans:
        raise DataError(f"{where}: no turn has the role assistant, so there is nothing to train on")
    text, replaced = template.expand(where, text, images)
    return _Rendered(where, text, [_moved(span, replaced) for span in spans], images)


def _moved(span: tuple[int, int], replaced: Sequence[Replacement]) -> tuple[int, int]:
    """Return where characters of a text are once its placeholders are replaced."""
    before = [[r for r in replaced if r.end <= position] for position in span]
    start, end = (
        position + sum(r.length - (r.end - r.start) for r in earlier)
        for position, earlier in zip(span, before, strict=True)
    )
    return start, end


def _span_of_turn(
    where: str, text: str, template: ChatTemplate, chat: list[dict[str, Any]], turn: int
) -> tuple[int, int] | None:
    """Return where the assistant's turn is in `text`, the full chat; None where it is changed.

    A turn starts after the generation prompt, and ends where the chat up to it does. Templates of
    thinking models also write an empty thought, into the generation prompt or into the last turn,
    but not into earlier turns: without it, the turn is found too.
    """
    for variant in (template, template.of_row(template.tools, enable_thinking=True)):
        prompt = variant.render(where, chat[:turn], True)
        if text.startswith(prompt):
            break
    else:
        return None
    start, up_to_turn = len(prompt), template.render(where, chat[: turn + 1], False)
    if not up_to_turn.startswith(prompt):
        return None
    if text.startswith(up_to_turn):
        return start, len(up_to_turn)
    own = up_to_turn[start:]
    thought = next((k for k in range(1, len(own)) if text.startswith(own[k:], start)), len(own))
    content, names = (chat[turn].get("content") or "").strip(), tool_names(chat[turn])
    written = [*([content] if content else []), *names]
    if not written or not all(part in own[thought:] for part in written):
        return None
    if any(own[:thought].count(part) for part in (chat[turn].get("reasoning_content"),) if part):
        return None  # a thought of the data, which the template removes once other turns follow
    return start, start + len(own) - thought


def _chat(where: str, row: Mapping[str, Any], data: SFTDataConfig) -> list[dict[str, Any]]:
    if data.messages_key:
        require_columns(where, row, data.messages_key)
        return parse_chat(where, row, data.messages_key)
    require_columns(where, row, data.prompt_key, data.response_key)
    prompt = _inside(where, row, data.prompt_key, data.prompt_dict_keys)
    response = _inside(where, row, data.response_key, data.response_dict_keys)
    is_text = isinstance(prompt, str)
    row = {data.prompt_key: [{"role": "user", "content": prompt}] if is_text else prompt}
    if not isinstance(response, str):
        raise unexpected(where, data.response_key, response, "text")
    chat = parse_chat(where, row, data.prompt_key)
    return [*chat, {"role": "assistant", "content": response}]


def _inside(where: str, row: Mapping[str, Any], column: str, names: Sequence[str] | None) -> Any:
    """Return the value of a column, or what `names` lead to inside it."""
    value = row[column]
    for depth, name in enumerate(names or ()):
        if not isinstance(value, Mapping) or name not in value:
            at = ".".join((column, *(names or ())[:depth]))
            has = (
                f"only {', '.join(value)}"
                if isinstance(value, Mapping)
                else shorten(repr(value), 80)
            )
            raise DataError(f"{where}: {at} has no {name!r}, it has {has}")
        value = value[name]
    return value


def _sample(
    row: _Rendered,
    ids: list[int],
    offsets: list[tuple[int, int]],
    tokenizer: Any,
    data: SFTDataConfig,
) -> SFTSample:
    if not ids:
        raise DataError(f"{row.where}: the chat template made an empty conversation")
    special, eos = set(tokenizer.all_special_ids), tokenizer.eos_token_id
    loss_mask = _loss_mask(row, ids, offsets, special)
    if loss_mask[-1] and ids[-1] not in special and eos is not None:
        ids, loss_mask = [*ids, eos], loss_mask + b"\1"
    if len(ids) > data.max_length:
        if row.images:
            raise DataError(
                f"{row.where}: the conversation is {len(ids)} tokens, more than data.max_length "
                f"{data.max_length}, and one with images is not cut; raise it, or shrink images by "
                "data.mm_processor_kwargs"
            )
        if data.truncation == "error":
            raise DataError(
                f"{row.where}: the conversation is {len(ids)} tokens, more than data.max_length "
                f"{data.max_length}; raise it, or set data.truncation to left or right"
            )
        left = data.truncation == "left"
        keep = slice(-data.max_length, None) if left else slice(data.max_length)
        ids, loss_mask = ids[keep], loss_mask[keep]
    loss_mask[0] = 0  # no token precedes it
    if not any(loss_mask):
        raise DataError(f"{row.where}: no token of a response is left within data.max_length")
    return SFTSample(array("i", ids), bytes(loss_mask), row.images)


def _loss_mask(
    row: _Rendered, ids: list[int], offsets: list[tuple[int, int]], special: set[int]
) -> bytearray:
    """Return 1 for each token of an assistant turn, through the special token that ends it."""
    loss_mask = bytearray(len(ids))
    for start, end in row.assistant_spans:
        inside = [i for i, (a, b) in enumerate(offsets) if a < end and b > start]
        ends = [i for i in inside if ids[i] in special]
        # What the template writes after the end of a turn, such as a line break, is not generated.
        if ends and not row.text[offsets[ends[-1]][1] : end].strip():
            inside = [i for i in inside if i <= ends[-1]]
        for i in inside:
            loss_mask[i] = 1
    return loss_mask
