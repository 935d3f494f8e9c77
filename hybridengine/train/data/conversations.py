"""Conversations of SFT → token ids and a loss mask.

A row is a chat under `messages_key`, or a prompt (text or a chat) and a response, see
`rows.read_chat`. The full chat is rendered and tokenised at once, as `apply_chat_template` does.

The loss mask is 1 for tokens of assistant turns, tool calls included, up to and including the token
that ends the turn, except for turns whose loss flag is 0. The end is the last special token of the
turn, or the token after it where generation stops there (GLM: the role of the next turn). Where the
template writes neither after the last turn, it is the token with which the template would begin the
next turn, if generation stops there, else the tokenizer's EOS.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybridengine.model.attachments import Attachment, AttachmentPreparer, Replacement
from hybridengine.run.config import SFTDataConfig
from hybridengine.run.errors import DataError, shorten, unexpected
from hybridengine.train.data.cache import CachedDataset, identify
from hybridengine.train.data.chats import THOUGHTS, ChatTemplate, prefix_end
from hybridengine.train.data.files import RowLocation, read_chunks, read_files, require_columns
from hybridengine.train.data.rows import RowChat, cut_tokens, read_chat, tool_names

if TYPE_CHECKING:
    Ids = array[int]
else:
    Ids = array  # which takes no parameter before Python 3.12
Span = tuple[int, int]  # first character and the one after the last
_Message = dict[str, Any]

_MARK = "\ue000\ue001\ue000"  # private characters in place of a content
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")
_SWITCH = re.compile(r"(\w+) (?:is (?:not )?(?:un)?defined|\| *default)")


@dataclass(frozen=True)
class SFTSample:
    ids: Ids
    loss_mask: bytes  # 1 for each token that is trained on, else 0; as long as ids
    images: Sequence[Attachment] = field(default_factory=list)  # in the order of their tokens

    @property
    def num_loss_tokens(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True)
class _Rendered:
    where: str
    text: str
    assistant_spans: list[Span]  # of the turns that are trained on
    images: list[Attachment]


class SFTDataset(CachedDataset[SFTSample]):
    """All conversations of one or more files, tokenised once per machine.

    stop_token_ids: tokens at which generation with the model stops.

    The other arguments, the attributes and the errors are those of `PromptDataset`.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: Any,
        data: SFTDataConfig,
        preparer: AttachmentPreparer | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                "SFT needs the character offsets of tokens; use a model with a fast tokenizer"
            )
        template = ChatTemplate(tokenizer, data, (), preparer)
        ends = _TurnEnds(template, tokenizer, stop_token_ids)
        settings = (
            *(data.messages_key, data.prompt_key, data.response_key, data.max_length),
            *(data.tools_key, data.enable_thinking_key, data.filter_overlong_prompts),
            *(data.prompt_dict_keys, data.response_dict_keys, data.truncation),
            sorted(ends.stops),
        )
        self.content, key = identify(files, tokenizer, template, data, "sft", *settings)
        super().__init__(key, lambda: _samples(files, template, ends, data), SFTSample)
        if not self:
            raise DataError(
                f"all {self.dropped} conversations of {files} are longer than data.max_length "
                f"{data.max_length}; raise it"
            )


class _TurnEnds:
    """The tokens that end a turn: special ones, and those at which generation stops.

    stops: text → token of the latter.
    eos: appended where a template writes no end at all.
    """

    def __init__(
        self, template: ChatTemplate, tokenizer: Any, stop_token_ids: Sequence[int]
    ) -> None:
        self.eos = tokenizer.eos_token_id
        self.stops = {tokenizer.decode([token]): token for token in stop_token_ids}
        self.ids = template.special.ids | set(self.stops.values())
        self.texts = (*template.special.texts, *filter(None, self.stops))


def check_conversations(files: str | Sequence[str], data: SFTDataConfig) -> None:
    """Raise DataError for a fault of a file or a row that is detected without a tokenizer."""
    for where, row in read_files(files):
        _chat(where, row, data)


def _samples(
    files: str | Sequence[str], template: ChatTemplate, ends: _TurnEnds, data: SFTDataConfig
) -> Iterator[SFTSample | None]:
    """Yield a sample for each row, None for one that is dropped."""
    for chunk in read_chunks(files):
        rows = [_render(_chat(where, row, data), template, ends, data) for where, row in chunk]
        texts = [row.text for row in rows]
        encoded = template.special.encode(texts, return_offsets_mapping=True)
        tokens = zip(rows, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        for row, ids, offsets in tokens:
            yield _sample(row, ids, offsets, ends, data)


def _render(
    row: RowChat, template: ChatTemplate, ends: _TurnEnds, data: SFTDataConfig
) -> _Rendered:
    where, last = row.where, len(row.messages) - 1
    if row.messages[0]["role"] == "assistant":
        raise DataError(
            f"{where}: the chat starts with the assistant, and chat templates render no prompt "
            "before the first turn; put a user turn first, or leave the turn out"
        )
    turns = [turn for turn, message in enumerate(row.messages) if message["role"] == "assistant"]
    if not data.messages_key:
        turns = [last]  # solved examples in a prompt are not trained on
    turns = [turn for turn in turns if row.is_trained[turn] is not False]
    if not turns:
        raise DataError(
            f"{where}: no turn has the role assistant and is to be trained on, so there is nothing "
            "to train on; remove the row"
        )
    own, chat, text = template.show(row, False)
    spans = find_spans(where, own, chat, text, turns)
    if turns[-1] == last and not text.rstrip().endswith(ends.texts):
        end = next_role_token(where, own, chat, text, list(ends.stops))
        text, spans[-1] = text + end, (spans[-1][0], len(text + end))
    text, replaced = template.expand(where, text, row.images)
    return _Rendered(where, text, [_moved(span, replaced) for span in spans], row.images)


def _moved(span: Span, replaced: Sequence[Replacement]) -> Span:
    """Return where characters of a text are once its placeholders are replaced."""
    before = [[r for r in replaced if r.end <= position] for position in span]
    start, end = (
        position + sum(r.length - (r.end - r.start) for r in earlier)
        for position, earlier in zip(span, before, strict=True)
    )
    return start, end


def _chat(where: RowLocation, row: Mapping[str, Any], data: SFTDataConfig) -> RowChat:
    """Check the columns of a row and return its chat."""
    if data.messages_key:
        require_columns(where, row, data.messages_key)
        return read_chat(where, row, data.messages_key, row[data.messages_key], data)
    chats = [name for name, value in row.items() if name != data.prompt_key and _is_chat(value)]
    if chats and not {data.prompt_key, data.response_key} <= row.keys():
        raise DataError(
            f"{where} has no columns {data.prompt_key!r} and {data.response_key!r}, and a chat in "
            f"{chats[0]!r}; set data.messages_key={chats[0]}"
        )
    require_columns(where, row, data.prompt_key, data.response_key)
    prompt = _inside(where, row, data.prompt_key, data.prompt_dict_keys)
    response = _inside(where, row, data.response_key, data.response_dict_keys)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(response, str):
        raise unexpected(where, data.response_key, response, "text")
    if isinstance(prompt, list) and prompt:
        prompt = [*prompt, {"role": "assistant", "content": response}]
    return read_chat(where, row, data.prompt_key, prompt, data)


def _is_chat(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and bool({"role", "from"} & first.keys())


def _inside(where: str, row: Mapping[str, Any], column: str, names: Sequence[str] | None) -> Any:
    """Return the value of a column, or what `names` lead to inside it."""
    value, at = row[column], column
    for name in names or ():
        if not isinstance(value, Mapping):
            raise DataError(f"{where}: {at} has no {name!r}, it has {shorten(repr(value), 80)}")
        if name not in value:
            raise DataError(f"{where}: {at} has no {name!r}, it has only {', '.join(value)}")
        value, at = value[name], f"{at}.{name}"
    return value


def _sample(
    row: _Rendered, ids: list[int], offsets: list[Span], ends: _TurnEnds, data: SFTDataConfig
) -> SFTSample | None:
    if not ids:
        raise DataError(f"{row.where}: the chat template made an empty conversation")
    loss_mask = _loss_mask(row, ids, offsets, ends)
    if loss_mask[-1] and ids[-1] not in ends.ids and ends.eos is not None:
        ids, loss_mask = [*ids, ends.eos], loss_mask + b"\1"
    if len(ids) > data.max_length:
        if data.filter_overlong_prompts:
            return None
        ids, loss_mask = (
            cut_tokens(row.where, "the conversation", part, "max_length", data, row.images)
            for part in (ids, loss_mask)
        )
    loss_mask[0] = 0  # no token precedes it
    if not any(loss_mask):
        raise DataError(f"{row.where}: no token of a response is left within data.max_length")
    return SFTSample(array("i", ids), bytes(loss_mask), row.images)


def _loss_mask(row: _Rendered, ids: list[int], offsets: list[Span], ends: _TurnEnds) -> bytearray:
    """Return 1 for each token of the spans, through the token that ends the turn."""
    loss_mask = bytearray(len(ids))
    for start, end in row.assistant_spans:
        inside = [i for i, (a, b) in enumerate(offsets) if a < end and b > start]
        own = _trailing_ends(row.text[:end], inside, ids, offsets, ends)
        if own:  # what the template writes after the end, such as a line break, is not generated
            stop = next((i for i in own if ids[i] in ends.stops.values()), own[-1])
            inside = [i for i in inside if i <= stop]
        elif inside:  # the turn may end with the role of the next one
            after = next((i for i in range(inside[-1] + 1, len(ids)) if ids[i] in ends.ids), None)
            if (
                after is not None
                and ids[after] in ends.stops.values()
                and not row.text[end : offsets[after][0]].strip()
            ):
                inside += range(inside[-1] + 1, after + 1)
        for i in inside:
            loss_mask[i] = 1
    return loss_mask


def _trailing_ends(
    text: str, inside: list[int], ids: list[int], offsets: list[Span], ends: _TurnEnds
) -> list[int]:
    """Return which tokens at the end of a turn end it: no other text is after or between them."""
    found, end = list[int](), len(text)
    for i in reversed(inside):
        if ids[i] in ends.ids:
            if text[offsets[i][1] : end].strip():
                break
            found.append(i)
            end = offsets[i][0]
    return found[::-1]


def find_spans(
    where: str, template: ChatTemplate, chat: list[_Message], text: str, turns: Sequence[int]
) -> list[Span]:
    """Return where the given turns of the assistant are in `text`, the rendered chat.

    A turn starts after the generation prompt, and ends where the chat up to it does. Templates of
    thinking models write an empty thought into the generation prompt or into the last turns, but
    not into earlier ones: without it, the turn is found too.

    Raises DataError for a turn that the template changes once others follow, or does not write.
    """
    spans = list[Span]()
    for turn in turns:
        span = _span(where, template, chat, text, turn)
        if span is None:
            advice = _advice(where, template, chat, turns)
            raise DataError(
                f"{where}: the chat template changes turn {turn} when other turns are there, so "
                f"its tokens cannot be located; {advice}give one row per assistant turn, or "
                "another data.chat_template"
            )
        if missing := _unwritten(chat[turn], text[slice(*span)]):
            advice = _advice(where, template, chat, turns)
            raise DataError(
                f"{where}: the chat template does not write {missing} in turn {turn}; {advice}give "
                "a data.chat_template that does, or remove it"
            )
        spans.append(span)
    return spans


def next_role_token(
    where: str, template: ChatTemplate, chat: list[_Message], text: str, stops: Sequence[str]
) -> str:
    """Return which of `stops` the template writes after the last turn once another one follows.

    "" where the template ends the turn itself, or generation does not stop at what follows.
    """
    calls = chat[-1].get("tool_calls")
    following: _Message = {"role": "user", "content": "next"}
    if calls:
        name, number = tool_names(chat[-1])[0], calls[0].get("id", "")
        following = {"role": "tool", "name": name, "tool_call_id": number, "content": "next"}
    with suppress(DataError):  # a template may refuse the turn that is made up
        longer = template.render(where, [*chat, following], False)
        if longer.startswith(text):
            after = longer[len(text) :].lstrip()
            return next((stop for stop in stops if stop and after.startswith(stop)), "")
    return ""


def _span(
    where: str, template: ChatTemplate, chat: list[_Message], text: str, turn: int
) -> Span | None:
    prompt = template.render(where, chat[:turn], True)
    up_to_turn = template.render(where, chat[: turn + 1], False)
    if not text.startswith(up_to_turn):
        up_to_turn = _without_second_end(up_to_turn, template.special.texts)
    start = prefix_end(text, prompt)
    if start is not None and text.startswith(up_to_turn) and len(up_to_turn) >= start:
        return start, len(up_to_turn)
    # Where the content begins, in the full chat and in the chat up to this turn.
    marked = {name: value for name, value in chat[turn].items() if name not in THOUGHTS}
    marked["content"] = _MARK
    start = _start(text, template.render(where, [*chat[:turn], marked, *chat[turn + 1 :]], False))
    own = _start(up_to_turn, template.render(where, [*chat[:turn], marked], False))
    if start is None or own is None or not text.startswith(up_to_turn[own:], start):
        return None
    if not _plain(prompt).startswith(_plain(text[:start])):  # the template rewrites the history
        return None
    return start, start + len(up_to_turn) - own


def _without_second_end(text: str, special: Sequence[str]) -> str:
    """Remove the token that ends the chat after the one that ends its last turn (Phi-3)."""
    last = next((token for token in special if text.endswith(token)), "")
    rest = text.removesuffix(last)
    return rest if last and rest.rstrip().endswith(tuple(special)) else text


def _start(text: str, marked: str) -> int | None:
    """Return where the mark is, if the text before it is that of `text`."""
    start = marked.find(_MARK)
    return start if start >= 0 and marked[:start] == text[:start] else None


def _plain(text: str) -> str:
    """Return a text without empty thoughts and white space."""
    return "".join(_EMPTY_THOUGHT.sub("", text).split())


def _unwritten(message: _Message, text: str) -> str:
    """Return what of a message is not in the text of its turn, "" for nothing."""
    written = _plain(text)
    for name in ("content", *THOUGHTS):
        value = message.get(name)
        if isinstance(value, str) and _plain(value) not in written:
            return f"the {name}"
    missing = [name for name in tool_names(message) if name not in text]
    return f"the call of {missing[0]!r}" if missing else ""


def _advice(where: str, template: ChatTemplate, chat: list[_Message], turns: Sequence[int]) -> str:
    """Return which variable of the template would let it keep all turns, "" for none."""
    for name in sorted(set(_SWITCH.findall(template.text))):
        for value in (True, False):
            with suppress(DataError):
                other = template.of_row(template.tools, {name: value})
                text = other.render(where, chat, False)
                spans = [_span(where, other, chat, text, turn) for turn in turns]
                if all(
                    span is not None and not _unwritten(chat[turn], text[slice(*span)])
                    for turn, span in zip(turns, spans, strict=True)
                ):
                    key = f"data.apply_chat_template_kwargs.{name}={str(value).lower()}"
                    return f"set {key}, "
    return ""
