"""From a row of a file to a chat, and from a chat to text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridengine.data.files import DataError, read_rows

__all__ = ["chat_of", "find_template", "render", "require", "rows_of", "short"]


def rows_of(files: str | Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of all files; DataError where there is none."""
    names, empty = [files] if isinstance(files, str) else files, True
    for name in names:
        for item in read_rows(name):
            empty = False
            yield item
    if empty:
        raise DataError(f"no rows in {', '.join(names)}; the data file is empty")


def require(where: str, row: Mapping[str, Any], *columns: str) -> None:
    for column in columns:
        if column not in row:
            there = ", ".join(row) or "none"
            raise DataError(f"{where} has no column {column!r}; columns there: {there}")


def chat_of(where: str, row: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    chat = row[key]
    if not isinstance(chat, list) or not chat or not all(map(_is_message, chat)):
        raise DataError(
            f"{where}: {key} is {short(chat)}, expected a chat, a list like "
            '[{"role": "user", "content": "…"}]'
        )
    return chat


def _is_message(turn: Any) -> bool:
    return isinstance(turn, Mapping) and "role" in turn and isinstance(turn.get("content"), str)


def find_template(tokenizer: Any, template: str | None) -> str:
    """The chat template: Jinja text, a file with it, or (None) the tokenizer's own."""
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


def render(
    where: str, tokenizer: Any, template: str, chat: Sequence[Mapping[str, Any]], prompt: bool
) -> str:
    """The chat as text; prompt: up to where the assistant begins to speak."""
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            chat, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
    except TemplateError as error:
        raise DataError(f"{where}: the chat template refuses this chat: {error}") from None
    return str(text)


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
