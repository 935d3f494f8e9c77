"""Find the turns of the assistant in the text of a rendered chat."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hybridengine.run.errors import DataError
from hybridengine.train.data.chats import THOUGHTS, ChatTemplate, prefix_end
from hybridengine.train.data.tools import tool_names

__all__ = ["Span", "find_spans", "next_role_token"]

Span = tuple[int, int]  # first character and the one after the last
_Message = dict[str, Any]

_MARK = "\ue000\ue001\ue000"  # private characters in place of a content
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")
_SWITCH = re.compile(r"(\w+) (?:is (?:not )?(?:un)?defined|\| *default)")


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
