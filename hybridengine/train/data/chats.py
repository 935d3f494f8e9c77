"""Render chats as text with the chat template."""

from __future__ import annotations

import copy
import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from hybridengine.model.attachments import Attachment, AttachmentPreparer, Replacement
from hybridengine.model.extensions import image_model_types
from hybridengine.run.config.common import DatasetConfig
from hybridengine.run.errors import DataError
from hybridengine.run.rank import run_start
from hybridengine.run.storage import memory_limit
from hybridengine.train.data.rows import RowChat, tool_name, tool_names
from hybridengine.train.data.template import SpecialTokens, find_template

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a message, by template
# Keys that hold what a model says; those of a data set (a language, a time) are left alone.
_SAID = re.compile(r"thought|think|reason|function_call", re.IGNORECASE)
RENDER_TIMEOUT_S = 10.0  # for one chat; a template may loop forever
_RENDER_MIB = 512  # for one chat; a template may make a text of any length
_MARK = "9405178263{:05}"
_PART_AS_OBJECT = re.compile(r"""'text': ["']9405178263\d{5}""")  # of a template that expects text
_TextEnd = tuple[int, int, bool]  # turn, part, and whether it is the end of the text or its start
_DATE_FORMATS = re.compile(r"""strftime_now\s*\(\s*(["'])(.*?)\1\s*\)""")


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
        data: DatasetConfig,
        tools: Sequence[Mapping[str, Any]] = (),
        preparer: AttachmentPreparer | None = None,
    ) -> None:
        self._tokenizer, self.preparer, self.tools = tokenizer, preparer, list(tools)
        self.special = SpecialTokens(tokenizer, data.special_tokens)
        self.options = dict(data.apply_chat_template_kwargs)
        own = None if preparer is None else preparer.chat_template
        self.text = find_template(tokenizer, data.chat_template or own)
        self._start = run_start()

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What its renderings depend on, besides the tokenizer and the rows."""
        formats = [match[2] for match in _DATE_FORMATS.finditer(self.text)]
        dates = list(map(self._start.strftime, formats))
        if len(re.findall(r"strftime_now\s*\(", self.text)) > len(formats):
            dates.append(self._start.isoformat())  # in a format that the template computes
        images = None if self.preparer is None else self.preparer.settings
        options, tools = sorted(self.options.items()), list(map(str, self.tools))
        return self.text, options, tools, self.special.policy, dates, images

    def of_row(
        self, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ChatTemplate:
        """Return the template with tools and further variables of one row."""
        own = copy.copy(self)
        own.tools, own.options = list(tools), {**self.options, **options}
        return own

    def show(self, row: RowChat, prompt: bool) -> tuple[ChatTemplate, list[dict[str, Any]], str]:
        """Render the chat of a row.

        prompt: with the generation prompt of the assistant at its end.

        Returns the template with the row's tools and variables, the messages with special tokens
        hidden, and the text. Raises DataError where the template leaves something out.
        """
        where = row.where
        chat, tools = (self.special.hide(where, own) for own in (row.messages, row.tools))
        known = [tool_name(tool) for tool in self.tools]
        others = [name for name in map(tool_name, row.tools) if known and name not in known]
        if others:
            raise DataError(
                f"{where}: the row has the tool {others[0]!r}, and the tools of the run are "
                f"{', '.join(known)}; a row may select some of them"
            )
        own = self.of_row(tools or self.tools, row.options)
        text = own.render(where, chat, prompt)
        if missing := [tool_name(tool) for tool in tools if tool_name(tool) not in text]:
            raise DataError(
                f"{where}: the chat template does not write the tool {missing[0]!r}; give a "
                "data.chat_template that knows tools, or set data.tools_key to a column without "
                "them"
            )
        if not text:
            return own, chat, text
        for turn in range(len(chat)):
            own._check_keys(where, chat, turn, text, prompt)
        dropped = own.left_out(where, chat, prompt)
        if dropped is not None:
            raise DataError(
                f"{where}: the chat template leaves out turn {dropped}, of the role "
                f"{chat[dropped]['role']!r}, or a part of it; remove it, or set data.chat_template "
                "to one that writes it"
            )
        for turn, message in enumerate(chat):
            if missing := [name for name in tool_names(message) if name not in text]:
                raise DataError(
                    f"{where}: the chat template does not write the call of {missing[0]!r} in turn "
                    f"{turn}; give a data.chat_template that knows tool calls, or remove it"
                )
        return own, chat, text

    def reads(self, key: str) -> bool:
        """Whether the template names a key of messages, as .key, ["key"] or get("key")."""
        name = re.escape(key)
        return re.search(rf"""\.{name}\b|[\[(]\s*(["']){name}\1""", self.text) is not None

    def _check_keys(
        self, where: str, chat: Sequence[Mapping[str, Any]], turn: int, text: str, prompt: bool
    ) -> None:
        """Raise DataError for a thought or a call that `text`, the rendered chat, leaves out.

        A template may write a key that it names into some turns only, such as the last one.
        """
        message = chat[turn]
        for key, value in message.items():
            if not _SAID.search(key) or self.reads(key):
                continue
            known = [name for name in THOUGHTS if self.reads(name)]
            if value in map(message.get, known):  # some have a thought under several keys
                continue
            rest = {name: other for name, other in message.items() if name != key}
            without = [*chat[:turn], rest, *chat[turn + 1 :]]
            if (
                value
                and isinstance(value, str | list | Mapping)
                and self._attempt(where, without, prompt) == text
            ):
                advice = f"rename it to {known[0]} if it is a thought" if known else ""
                raise DataError(
                    f"{where}: turn {turn} has {key!r}, which the chat template does not read, so "
                    f"that it would be left out; {advice or 'write it into the content'}, remove "
                    "it, or set data.chat_template"
                )

    def left_out(
        self, where: str, chat: Sequence[Mapping[str, Any]], prompt: bool, first: int = 0
    ) -> int | None:
        """Return the first turn whose content the template leaves out in part, None for none.

        first: the turn to begin with.

        All contents are marked at both ends, with digits, which templates do not escape. A template
        that refuses the marked chat counts as one that writes all of it.
        """
        places = [place for place in _text_ends(chat) if place[0] >= first]
        marked = self._attempt(where, _marked(chat, places), prompt) if places else ""
        is_refused, marked = not marked, _PART_AS_OBJECT.sub("", marked)
        missing = (place[0] for n, place in enumerate(places) if _MARK.format(n) not in marked)
        return None if is_refused else next(missing, None)

    def _attempt(self, where: str, chat: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        """Render a chat that differs from the given one; "" where the template refuses it."""
        with suppress(DataError):
            return self._render(where, chat, self.tools, prompt)
        return ""

    def render(self, where: str, chat: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        """Return the chat as text; prompt: with the generation prompt of the assistant at its end.

        Special tokens that are hidden in the chat are hidden in the text.

        Raises DataError where the template raises, loops, takes too much memory, returns no text,
        or changes what is hidden.
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
        self, where: str, text: str, images: Sequence[Attachment]
    ) -> tuple[str, list[Replacement]]:
        """Expand the placeholders of images in a rendered text, as `AttachmentPreparer.expand`.

        Raises DataError for images of a model that takes none.
        """
        if self.preparer is not None:
            return self.preparer.expand(where, text, images)
        if images:
            raise DataError(
                f"{where} has {len(images)} images, but the model of model.path takes none: it is "
                f"of none of the types {', '.join(image_model_types())}, or its language model "
                "is trained alone (model.keep_vision_tower is false)"
            )
        return text, []

    def _render(
        self, where: str, chat: Sequence[Mapping[str, Any]], tools: Sequence[Any], prompt: bool
    ) -> str:
        """Render a chat; where the template takes no calls with objects, with their JSON text."""
        try:
            return self._render_once(where, chat, tools, prompt)
        except DataError:
            if any(message.get("tool_calls") for message in chat):
                with suppress(DataError):
                    return self._render_once(where, _with_text_arguments(chat), tools, prompt)
            raise

    def _render_once(
        self, where: str, chat: Sequence[Mapping[str, Any]], tools: Sequence[Any], prompt: bool
    ) -> str:
        from jinja2 import TemplateError

        try:
            with _limits():
                text = self._tokenizer.apply_chat_template(
                    chat,
                    chat_template=self.text,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    tools=tools or None,
                    **{"strftime_now": self._start.strftime, **self.options},
                )
                text.encode()
        except TemplateError as error:
            raise DataError(f"{where}: the chat template refuses this chat: {error}") from None
        except MemoryError:
            raise DataError(
                f"{where}: the chat template takes more than {_RENDER_MIB} MiB of memory for "
                "this chat; does it repeat a text?"
            ) from None
        except Exception as error:  # what its expressions raise, and range() above 100,000
            reason = f"{type(error).__name__}: {error}"[:300]
            raise DataError(f"{where}: the chat template fails: {reason}") from None
        return str(text)


def _with_text_arguments(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat whose calls have their arguments as JSON text, as a few templates take them."""
    copied = copy.deepcopy([dict(message) for message in chat])
    for function in (call["function"] for m in copied for call in m.get("tool_calls") or ()):
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return copied


def _text_ends(chat: Sequence[Mapping[str, Any]]) -> Iterator[_TextEnd]:
    """Yield both ends of each text in the contents of a chat.

    Of an assistant's text with a thought only its end: templates may leave out earlier thoughts.
    """
    for turn, message in enumerate(chat):
        content = message.get("content")
        parts = [part.get("text") for part in content] if isinstance(content, list) else [content]
        for i, text in enumerate(parts):
            if isinstance(text, str) and text.strip():
                if message["role"] != "assistant" or "</think>" not in text:
                    yield turn, i, False
                yield turn, i, True


def _marked(chat: Sequence[Mapping[str, Any]], places: Sequence[_TextEnd]) -> list[dict[str, Any]]:
    """Return a chat with a mark of its own at each place."""
    marked = [dict(message) for message in chat]
    for number, (turn, part, is_end) in enumerate(places):
        mark, content = _MARK.format(number), marked[turn]["content"]
        texts = content if isinstance(content, list) else [{"text": content}]
        text = f"{texts[part]['text']}{mark}" if is_end else f"{mark}{texts[part]['text']}"
        own = [*texts[:part], {**texts[part], "text": text}, *texts[part + 1 :]]
        marked[turn]["content"] = own if isinstance(content, list) else text
    return marked


def prefix_end(text: str, prefix: str) -> int | None:
    """Return where `prefix` ends in `text`, None if it is none; white space does not count.

    Examples:
        >>> prefix_end("a b\\n c", " ab ")
        3
    """
    if text.startswith(prefix):
        return len(prefix)
    position = 0
    for character in prefix:
        if character.isspace():
            continue
        while position < len(text) and text[position].isspace():
            position += 1
        if position == len(text) or text[position] != character:
            return None
        position += 1
    return position


@contextmanager
def _limits() -> Iterator[None]:
    """Limit time and memory of a rendering in the main thread; no effect in other threads.

    Raises TimeoutError after `RENDER_TIMEOUT_S`, and MemoryError for `_RENDER_MIB` more than
    the process has.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no text within {RENDER_TIMEOUT_S:g} s; does it loop?")

    with memory_limit(_RENDER_MIB << 20):
        handler = signal.signal(signal.SIGALRM, stop)
        started = time.monotonic()
        # left: of the caller's own alarm
        left, interval = signal.setitimer(signal.ITIMER_REAL, RENDER_TIMEOUT_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if left:
                rest = max(0.001, left - (time.monotonic() - started))
                signal.setitimer(signal.ITIMER_REAL, rest, interval)
