"""Parse the chat of a row, and render a chat as text with the chat template."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hybridengine.config import DataConfig, SFTDataConfig
from hybridengine.data.special_tokens import SpecialTokens
from hybridengine.errors import DataError, shorten, unexpected
from hybridengine.model.images import IMAGE_MODEL_TYPES
from hybridengine.vision import EncodedImage, ImagePreparer, Replacement

_RENDER_TIMEOUT_S = 10.0  # for one chat; a template may loop forever
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}


def parse_chat(where: str, row: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the chat in column `key` as [{"role", "content"}, …], with text or parts as content.

    ShareGPT's [{"from", "value"}, …] is converted. Raises DataError for anything else.
    """
    chat = row[key]
    fault = "" if isinstance(chat, list) and chat else "it is no list of messages"
    messages = [_message(turn) for turn in chat] if not fault else []
    for turn, message in enumerate(messages):
        fault = fault or (_fault(message) and f"turn {turn}: {_fault(message)}")
    if fault:
        form = '[{"role": "user", "content": "…"}]'
        raise unexpected(where, key, chat, f"a chat, a list like {form}; {fault}")
    return messages


def _message(turn: Any) -> Any:
    """Return a turn in OpenAI's form, without the keys that parquet filled with null."""
    if not isinstance(turn, Mapping):
        return turn
    turn = {name: value for name, value in turn.items() if value is not None or name == "content"}
    if "from" in turn and "role" not in turn:
        role = turn["from"]
        known = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        return {"role": known, "content": turn.get("value")}
    return turn


def _fault(message: Any) -> str:
    """Return what is wrong with a message, "" for a valid one."""
    if not isinstance(message, Mapping):
        return f"it is {shorten(repr(message), 80)}"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        return f"role is {shorten(repr(role), 80)}"
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, str | list):
        return ""
    return f"content is {shorten(repr(content), 80)}, not text"


class ChatTemplate:
    """The chat template of a run, with its variables.

    data: chat_template is Jinja text, a file with it, or None for the tokenizer's own;
      apply_chat_template_kwargs are further variables of the template; special_tokens is the policy
      of `SpecialTokens`.
    tools: schemas of the tools that the model may call.
    preparer: of the model's images; its processor's own template replaces the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: Any,
        data: DataConfig | SFTDataConfig,
        tools: Sequence[Mapping[str, Any]] = (),
        preparer: ImagePreparer | None = None,
    ) -> None:
        self._tokenizer, self._preparer, self.tools = tokenizer, preparer, list(tools)
        self.special = SpecialTokens(tokenizer, data.special_tokens)
        self.options = dict(data.apply_chat_template_kwargs)
        own = None if preparer is None else preparer.chat_template
        self.text = find_template(tokenizer, data.chat_template or own)

    def of_row(self, tools: Sequence[Mapping[str, Any]], **options: Any) -> ChatTemplate:
        """Return the template with tools and further variables of one row."""
        own = copy.copy(self)
        own.tools, own.options = list(tools), {**self.options, **options}
        return own

    def render(self, where: str, chat: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        """Return the chat as text; prompt: with the generation prompt of the assistant at its end.

        Special tokens that are hidden in the chat are hidden in the text.

        Raises DataError where the template raises, loops, returns no text, or changes what is
        hidden.
        """
        text = self._render(where, chat, self.tools, prompt)
        shown, tools = self.special.reveal(chat), self.special.reveal(self.tools)
        if (shown, tools) != (list(chat), self.tools) and (
            self._render(where, shown, tools, prompt) != self.special.reveal(text)
        ):
            raise DataError(
                f"{where}: the chat template changes a special token in a message, so that it "
                "cannot be told from its own; remove it, or set data.special_tokens=allow"
            )
        return text

    def expand(
        self, where: str, text: str, images: Sequence[EncodedImage]
    ) -> tuple[str, list[Replacement]]:
        """Expand the placeholders of images in a rendered text, as `ImagePreparer.expand`.

        Raises DataError for images of a model that takes none.
        """
        if self._preparer is not None:
            return self._preparer.expand(where, text, images)
        if images:
            raise DataError(
                f"{where} has {len(images)} images, but the model of model.path takes none: it is "
                f"of none of the types {', '.join(IMAGE_MODEL_TYPES)}"
            )
        return text, []

    def _render(
        self, where: str, chat: Sequence[Mapping[str, Any]], tools: Sequence[Any], prompt: bool
    ) -> str:
        from jinja2 import TemplateError

        try:
            with _time_limit(_RENDER_TIMEOUT_S):
                text = self._tokenizer.apply_chat_template(
                    chat,
                    chat_template=self.text,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    tools=tools or None,
                    **self.options,
                )
                text.encode()
        except TemplateError as error:
            raise DataError(f"{where}: the chat template refuses this chat: {error}") from None
        except Exception as error:  # what its expressions raise, and range() above 100,000
            reason = f"{type(error).__name__}: {error}"[:300]
            raise DataError(f"{where}: the chat template fails: {reason}") from None
        return str(text)


def find_template(tokenizer: Any, template: str | None) -> str:
    """Return the Jinja text of `template`, text itself or a file; None: the tokenizer's own."""
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
    """Raise TimeoutError after `seconds` in the main thread; no effect in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no text within {seconds:g} s; does it loop?")

    handler = signal.signal(signal.SIGALRM, stop)
    started = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)  # of the caller's own alarm
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            rest = max(0.001, left - (time.monotonic() - started))
            signal.setitimer(signal.ITIMER_REAL, rest, interval)
