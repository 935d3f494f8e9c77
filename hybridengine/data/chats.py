"""From a row of a file to a chat, and from a chat to text."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from hybridengine.config.schema import DataConfig
from hybridengine.config.sft import SFTDataConfig
from hybridengine.data.files import DataError, data_files, read_rows

__all__ = ["ChatTemplate", "chat_of", "chunks", "require", "rows_of", "short"]

T = TypeVar("T")

_RENDER_S = 10.0  # for one chat; a template can loop for years
_CHUNK = 256  # rows that are tokenised at once
_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}


def rows_of(files: str | Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of all files; DataError where there is none."""
    found, empty = data_files(files), True
    for file in found:
        for item in read_rows(file):
            empty = False
            yield item
    if empty:
        names = ", ".join(map(str, found))
        raise DataError(f"no rows in {names}; the data file is empty")


def chunks(rows: Iterator[T]) -> Iterator[list[T]]:
    """The rows in lists of those to tokenise at once."""
    while chunk := list(islice(rows, _CHUNK)):
        yield chunk


def require(where: str, row: Mapping[str, Any], *columns: str) -> None:
    for column in columns:
        if column not in row:
            there = ", ".join(row) or "none"
            raise DataError(f"{where} has no column {column!r}; columns there: {there}")


def chat_of(where: str, row: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The chat in column `key`: [{"role", "content"}, …], or ShareGPT's [{"from", "value"}, …]."""
    chat = row[key]
    fault = "" if isinstance(chat, list) and chat else "it is no list of messages"
    messages = [_message(turn) for turn in chat] if not fault else []
    for turn, message in enumerate(messages):
        fault = fault or (_fault(message) and f"turn {turn}: {_fault(message)}")
    if fault:
        raise DataError(
            f"{where}: {key} is {short(chat)}, expected a chat, a list like "
            f'[{{"role": "user", "content": "…"}}]; {fault}'
        )
    return messages


def _message(turn: Any) -> Any:
    """In OpenAI's form; keys that parquet filled with null are left out."""
    if not isinstance(turn, Mapping):
        return turn
    turn = {name: value for name, value in turn.items() if value is not None or name == "content"}
    if "from" in turn and "role" not in turn:
        role = turn["from"]
        known = _SHAREGPT.get(role, role) if isinstance(role, str) else role
        return {"role": known, "content": turn.get("value")}
    return turn


def _fault(message: Any) -> str:
    if not isinstance(message, Mapping):
        return f"it is {short(message)}"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        return f"role is {short(role)}"
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list):
        return "content is a list of parts, and only text is supported"
    return "" if isinstance(content, str) else f"content is {short(content)}, not text"


class ChatTemplate:
    """The chat template of a run and what is passed to it.

    data: chat_template is Jinja text, a file with it, or None for the tokenizer's own;
    apply_chat_template_kwargs are further variables of the template.
    """

    def __init__(self, tokenizer: Any, data: DataConfig | SFTDataConfig) -> None:
        self._tokenizer = tokenizer
        self.options = dict(data.apply_chat_template_kwargs)
        self.text = _find(tokenizer, data.chat_template)

    def render(self, where: str, chat: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        """The chat as text; prompt: up to where the assistant begins to speak.

        Raises DataError where the template raises, loops or gives no text.
        """
        from jinja2 import TemplateError

        try:
            with _time_limit(_RENDER_S):
                text = self._tokenizer.apply_chat_template(
                    chat,
                    chat_template=self.text,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **self.options,
                )
                text.encode()
        except TemplateError as error:
            raise DataError(f"{where}: the chat template refuses this chat: {error}") from None
        except Exception as error:  # what its expressions raise, and range() above 100,000
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"{where}: the chat template fails: {short(reason, 300)}") from None
        return str(text)


def _find(tokenizer: Any, template: str | None) -> str:
    if template is None:
        if not tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template; set data.chat_template")
        own = tokenizer.chat_template
        if isinstance(own, Mapping):  # several, by name
            if "default" not in own:
                raise DataError(
                    f"the tokenizer has the chat templates {', '.join(own)} and none is called "
                    "default; set data.chat_template"
                )
            own = own["default"]
        return str(own)
    if "{" in template or "\n" in template:
        return template
    file = Path(template).expanduser()
    if not file.is_file():
        raise DataError(
            f"data.chat_template {template!r} is neither a Jinja text nor a file that exists"
        )
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template {template!r} cannot be read: {error}") from None


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in Python code that runs longer; for the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no text within {seconds:g} s; does it loop?")

    handler = signal.signal(signal.SIGALRM, stop)
    started = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)  # of an alarm that was set
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            rest = max(0.001, left - (time.monotonic() - started))
            signal.setitimer(signal.ITIMER_REAL, rest, interval)


def short(value: Any, most: int = 80) -> str:
    text = value if isinstance(value, str) and most > 80 else repr(value)
    return text if len(text) <= most else text[: most - 3] + "…"
