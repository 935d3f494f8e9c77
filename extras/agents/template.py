"""Tokenise new messages: the text that a chat template adds after the existing tokens.

The sampled tokens of a turn stay as they were sampled. The full chat is rendered with the new
messages; the text after that of the existing tokens is encoded and appended. Where the rendering no
longer begins with the text of the existing tokens (the template removes the thinking of earlier
turns, say), a new sequence begins, see `Extension`.

Rendered and sampled text are compared without white space, which templates strip and the tokens
keep. A turn of the model is written in the chat in the first of these forms in which the template
renders a chat with tool results, and continues a turn that has a thought:

    raw          the sampled text as content, so that the rendering has to contain it
    thought      the sampled thought in a key of its own, the rest as content, for templates that
                 open the thought in the generation prompt and do not find its end in a content
    structured   content and tool_calls, for templates that refuse results without a call; here the
                 renderings before and after the new messages are compared
    as user      raw, with tool results in the role of the user, for templates without tools

Other trainers render the new messages after a dummy conversation: they miss the white space between
turns, what depends on the position, and a rewritten history (cf. TRL #5224).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridengine.model.attachments import Attachment
from hybridengine.run.errors import DataError, shorten
from hybridengine.train.data.chats import THOUGHTS, ChatTemplate, prefix_end

__all__ = ["Extension", "ModelTurn", "Segment", "TurnTemplate", "images_of"]

Message = Mapping[str, Any]  # a part of type image has its `Attachment` under "image"
_WHERE = "a trajectory"  # in messages


@dataclass
class Segment:
    """A run of tokens and its text as the template renders it.

    images: those in it; the text has one placeholder for each, the tokens all of its own.
    """

    text: str
    ids: list[int]
    images: Sequence[Attachment] = ()


@dataclass(frozen=True)
class Extension:
    """What new messages do to a sequence: keep its first segments, then append `added`.

    kept: number of segments that stay; fewer than there are where the history is rewritten.
    """

    kept: int
    added: Segment


@dataclass
class ModelTurn:
    """A sampled turn in the chat.

    text: sampled, without the token that ended it; content, tool_calls: parsed from it.
    """

    text: str
    content: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self, form: str, thought: ThoughtFormat | None = None) -> dict[str, Any]:
        if form == "structured" and self.tool_calls:
            return {"role": "assistant", "content": self.content, "tool_calls": self.tool_calls}
        has_thought = thought is not None and thought.closing in self.text
        if form in ("thought", "structured") and thought is not None and has_thought:
            before, _, content = self.text.partition(thought.closing)
            own = before.strip().removeprefix(thought.opening).strip()
            return {"role": "assistant", "content": content.lstrip(), thought.key: own}
        return {"role": "assistant", "content": self.text}


@dataclass(frozen=True)
class ThoughtFormat:
    """How a template writes the thought of a turn.

    key: of the message, that the template reads it from.
    opening: written by the model before it; "" where the generation prompt ends with it.
    closing: written by the model between it and the content.
    """

    key: str
    opening: str
    closing: str


Entry = Message | ModelTurn  # of a chat
_FORMS = ("raw", "structured", "as user")
_QUESTION: Message = {"role": "user", "content": "probe"}


class TurnTemplate:
    """A chat template and tokenizer for chats that grow.

    chats: its `special` hides special tokens in the messages of others than the model, so that the
      result of a tool cannot end its turn.
    stop_token_ids: tokens that end a turn.
    """

    def __init__(self, chats: ChatTemplate, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        self.chats, self._tokenizer, self._special = chats, tokenizer, chats.special
        self._stop_texts = {token: self.decode([token]) for token in stop_token_ids}
        self.form, self._thought = "raw", None
        self._thought = self._find_thought()
        self.form = next(filter(self._renders, _FORMS), "raw")
        if self._thought is not None:
            continues = filter(self._continues, filter(self._renders, ("raw", "thought")))
            self.form = next(continues, self.form)

    def of_row(
        self, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> TurnTemplate:
        """Return the template with the tools and variables of a row, those of the run without."""
        if not tools and not options:
            return self
        own, hidden = copy.copy(self), self._special.hide("a tool", list(tools))
        own.chats = self.chats.of_row(hidden or self.chats.tools, options)
        own._thought = own._find_thought()
        return own

    def render(self, chat: Sequence[Entry], prompt: bool, form: str | None = None) -> str:
        return self.chats.render(_WHERE, self.messages(chat, form), prompt)

    def _renders(self, form: str) -> bool:
        """Whether the template renders two tool results in this form, and leaves none out."""
        turns, results = _probe_turns("called0", "called1")
        chat: list[Entry] = [_QUESTION, turns[0], results[0], turns[1], results[1]]
        try:
            text = self.render(chat, True, form)
        except DataError:
            return False
        return all(str(result["content"]) in text for result in results)

    def _find_thought(self) -> ThoughtFormat | None:
        """Find out how the template writes thoughts; None: it reads none."""
        for key in filter(self.chats.reads, THOUGHTS):
            turn = {"role": "assistant", "content": "probeanswer", key: "probethought"}
            try:
                prompt = self.render([_QUESTION], True)
                text = self.render([_QUESTION, turn], False)
            except DataError:
                continue
            start, content = text.find("probethought"), text.find("probeanswer")
            closing = text[start + len("probethought") : content].strip()
            if 0 <= start < content and closing:
                pairs = enumerate(zip(prompt, text, strict=False))
                same = next((i for i, (own, other) in pairs if own != other), len(prompt))
                return ThoughtFormat(key, text[same:start].strip(), closing)
        return None

    def _continues(self, form: str) -> bool:
        """Whether the rendering with a tool result begins with a turn that has a thought."""
        thought = self._thought
        assert thought is not None
        sampled = f"{thought.opening}\nprobethought\n{thought.closing}\n\ncalled0"
        turns, results = _probe_turns(sampled)
        try:
            before = self.render([_QUESTION], True) + sampled
            text = self.render([_QUESTION, *turns, *results], True, form)
        except DataError:
            return False
        return prefix_end(text, before) is not None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text with special tokens."""
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of text in which the template has written the special tokens."""
        return list(self._special.encode([text])["input_ids"][0])

    def begin(self, chat: Sequence[Message]) -> Segment:
        """Return the prompt of a chat."""
        text, images = self.render(chat, True), images_of(chat)
        ids = self.encode(self._expanded(text, images))
        return Segment(self._special.reveal(text), ids, images)

    def _expanded(self, text: str, images: Sequence[Attachment]) -> str:
        return self.chats.expand(_WHERE, text, images)[0]

    def sampled_text(self, ids: Sequence[int]) -> str:
        """Return the text of a sampled turn without the token that ended it."""
        return self.decode(ids[:-1] if self._is_ended(ids) else ids)

    def extend(self, segments: Sequence[Segment], chat: Sequence[Entry]) -> Extension:
        """Return how to continue a sequence with the messages after its last sampled turn.

        segments: of the sequence, the last one sampled, with `sampled_text`, which is replaced by
          the template's rendering of that turn.
        chat: all of it, new messages at the end.
        Raises DataError where the template refuses the chat, or leaves out new messages.
        """
        rendered_chat = self.render(chat, True)
        text = self._special.reveal(rendered_chat)  # of the same length
        last = max(i for i, entry in enumerate(chat) if isinstance(entry, ModelTurn))
        messages, first = self.messages(chat), len(self.messages(chat[: last + 1]))
        dropped = self.chats.left_out(_WHERE, messages, True, first)
        if dropped is not None:
            raise DataError(
                f"the chat template leaves out messages of role {messages[dropped]['role']!r}; set "
                "data.chat_template to one that renders them"
            )
        before = [segment.text for segment in segments[:-1]]
        sampled: str | None = segments[-1].text
        if self.form == "structured":
            rendered = self._through_stop(self.render(chat[: last + 1], False))
            if not self._is_ended(segments[-1].ids):  # the template then ends the turn
                rendered = self._before_stop(rendered)
            rendered = self._special.reveal(rendered)
            start = prefix_end(rendered, "".join(before))
            sampled = None if start is None else rendered[start:]
        ends = _ends(text, [*before, sampled])
        ids, after = segments[-1].ids, rendered_chat[ends[-1] :]
        is_sampled_end = self.form != "structured" and self._is_ended(ids)
        if len(ends) > len(segments) and is_sampled_end:
            rest = self._without_stop(after)
            if rest is None:  # the template adds text to the turn, before its end
                ends.pop()
            else:
                after = rest
        kept = len(ends) - 1
        if kept == len(segments):
            segments[-1].text = text[ends[-2] : len(text) - len(after)]
        else:
            after, ids = rendered_chat[ends[-1] :], segments[kept - 1].ids if kept else []
        # Images are in their order: those that the kept segments lack follow them.
        images = images_of(chat)[sum(len(segment.images) for segment in segments[:kept]) :]
        encoded = self._encode_after(ids, self._expanded(after, images))
        return Extension(kept, Segment(self._special.reveal(after), encoded, images))

    def messages(self, chat: Sequence[Entry], form: str | None = None) -> list[Message]:
        """Return a chat as templates take it, with special tokens hidden in others' messages.

        As user, results of one turn become one message.
        """
        form = form or self.form
        messages: list[dict[str, Any]] = []
        joins = False  # whether the last message holds tool results
        for entry in chat:
            if isinstance(entry, ModelTurn):
                messages.append(entry.message(form, self._thought))
                joins = False
                continue
            entry, joined = self._special.hide("a message", entry), joins
            joins = form == "as user" and entry["role"] == "tool"
            if joins:
                before = messages.pop()["content"] if joined else None
                content = entry["content"] if before is None else _joined(before, entry["content"])
                entry = {"role": "user", "content": content}
            messages.append(dict(entry))
        return list(messages)

    def _encode_after(self, ids: Sequence[int], text: str) -> list[int]:
        """Encode text that follows `ids`; some tokenizers treat the beginning of text specially."""
        if self._is_ended(ids):
            encoded = self.encode(self._stop_texts[ids[-1]] + text)
            if encoded and encoded[0] == ids[-1]:
                return encoded[1:]
        return self.encode(text)

    def _is_ended(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[-1] in self._stop_texts

    def _without_stop(self, text: str) -> str | None:
        """Remove the end of the model's turn, which was sampled: maybe another token for it.

        None where other text comes before it; a template may also write no end at all.
        """
        stripped, stops = text.lstrip(), list(filter(None, self._stop_texts.values()))
        for stop in stops:
            if stripped.startswith(stop):
                return stripped[len(stop) :]
        return None if any(stop in stripped for stop in stops) else text

    def _through_stop(self, text: str) -> str:
        """Cut what follows the last stop token of a rendered turn, such as a line break."""
        ends = [text.rfind(stop) + len(stop) for stop in self._stop_texts.values() if stop in text]
        return text[: max(ends)] if ends else text.rstrip()

    def _before_stop(self, text: str) -> str:
        stops = [stop for stop in self._stop_texts.values() if stop and text.endswith(stop)]
        return text.removesuffix(max(stops, key=len)) if stops else text


def _probe_turns(*texts: str) -> tuple[list[ModelTurn], list[Message]]:
    """Return turns of the model with these texts, each with a call, and the results of these."""
    calls = [
        {
            "id": f"probecall{k}"[-9:],
            "type": "function",
            "function": {"name": "probe", "arguments": {"number": k}},
        }
        for k in range(len(texts))
    ]
    results: list[Message] = [
        {"role": "tool", "name": "probe", "tool_call_id": call["id"], "content": f"probed{k}"}
        for k, call in enumerate(calls)
    ]
    turns = zip(texts, calls, strict=True)
    return [ModelTurn(text, "", [call]) for text, call in turns], results


def _joined(before: Any, after: Any) -> Any:
    """Return the contents of two messages as one, on lines of their own."""
    if isinstance(before, str) and isinstance(after, str):
        return f"{before}\n{after}"
    parts = [[{"type": "text", "text": c}] if isinstance(c, str) else c for c in (before, after)]
    return [*parts[0], {"type": "text", "text": "\n"}, *parts[1]]


def images_of(chat: Sequence[Entry]) -> list[Attachment]:
    """Return the images in the messages of a chat, in their order.

    Raises DataError for a part of type image with anything else than an `Attachment`.
    """
    contents = [entry.get("content") for entry in chat if isinstance(entry, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    images = [part.get("image") for part in parts if part.get("type") == "image"]
    for image in images:
        if not isinstance(image, Attachment):
            raise DataError(
                f"a message has the image {shorten(repr(image), 80)}, expected an "
                "EncodedImage.of_bytes or EncodedImage.of_file (hybridengine.vision)"
            )
    return images


def _ends(text: str, parts: Sequence[str | None]) -> list[int]:
    """Return where each part ends in `text`, from 0 on, up to the first one that is not there."""
    ends = [0]
    for part in parts:
        end = None if part is None else prefix_end(text[ends[-1] :], part)
        if end is None:
            break
        ends.append(ends[-1] + end)
    return ends
