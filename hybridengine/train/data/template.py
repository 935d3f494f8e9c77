"""The text of the chat template, and the special tokens that it writes.

A message may contain the text of a special token, such as <|im_end|>. `SpecialTokens.hide` replaces
it by private characters of the same length before the template is rendered. `encode` reads the
rendered text with a copy of the tokenizer in which the two are exchanged: special tokens of the
template are special tokens, those of messages are text like any other, with the same neighbours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hybridengine.model.attachments import AttachmentPreparer
from hybridengine.run.config.common import DatasetConfig
from hybridengine.run.errors import DataError, shorten

_PRIVATE = 0xF0000  # added to each character of a hidden special token


class SpecialTokens:
    """The special tokens of a tokenizer.

    policy: how special tokens in data are treated: as "text", as special tokens ("allow"), or as
      an "error".

    Attributes:
        ids, texts: of all special tokens, those that the tokenizer has names for and any other.
    """

    def __init__(self, tokenizer: Any, policy: str) -> None:
        self._tokenizer, self.policy = tokenizer, policy
        special = set(tokenizer.all_special_ids)  # named ones: BOS, EOS, …
        added = tokenizer.added_tokens_decoder.items()
        self._ids = {
            token.content: number for number, token in added if token.special or number in special
        }
        self.ids = special | set(self._ids.values())
        self.texts = texts = sorted(self._ids, key=len, reverse=True)  # the longest match first
        self._shown = _any_of(texts)
        self._hidden = _any_of([_moved(text, _PRIVATE) for text in texts])

    def hide(self, where: str, value: Any) -> Any:
        """Return `value`, a chat or tool schemas, with the special tokens in its texts hidden.

        Raises DataError where the policy is "error".
        """
        return value if self.policy == "allow" else _map(value, partial(self._hide, where))

    def _hide(self, where: str, text: str) -> str:
        hidden = self._hidden.search(text)
        found = hidden or self._shown.search(text)
        if found and (hidden or self.policy == "error"):
            raise DataError(
                f"{where}: {shorten(repr(text), 80)} contains {found[0]!r}, a special token of "
                "the tokenizer (or its private form); remove it, or set data.special_tokens to "
                "text or allow"
            )
        return self._shown.sub(lambda match: _moved(match[0], _PRIVATE), text)

    def reveal(self, value: Any) -> Any:
        """Undo `hide`."""
        return _map(value, partial(self._hidden.sub, lambda match: _moved(match[0], -_PRIVATE)))

    def encode(self, texts: Sequence[str], **options: Any) -> Any:
        """Return the tokenizer's encoding of rendered texts, with what is hidden as text.

        options: of the tokenizer. Raises DataError where the tokenizer cannot encode a special
        token as text.
        """
        encoded = self._tokenizer(list(texts), add_special_tokens=False, **options)
        for i, text in enumerate(texts):
            if self._hidden.search(text):
                ids, offsets = self._encode_hidden(text)
                encoded["input_ids"][i] = ids
                if "offset_mapping" in encoded:
                    encoded["offset_mapping"][i] = offsets
        return encoded

    def _encode_hidden(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        exchanged, expected, end = "", list[int](), 0
        for match in self._shown.finditer(text):
            exchanged += self.reveal(text[end : match.start()]) + _moved(match[0], _PRIVATE)
            expected.append(self._ids[match[0]])
            end = match.end()
        exchanged += self.reveal(text[end:])
        backend, numbers = self._exchanged
        encoding = backend.encode(exchanged, add_special_tokens=False)
        ids = [numbers.get(number, number) for number in encoding.ids]
        unknown, special = self._tokenizer.unk_token_id, set(self._ids.values())
        if [i for i in ids if i in special and i != unknown] != [
            i for i in expected if i != unknown
        ]:
            raise DataError(self._cannot(text))
        return ids, list(encoding.offsets)

    @cached_property
    def _exchanged(self) -> tuple[Any, dict[int, int]]:
        """The tokenizer with special tokens in their private form, and its added tokens' ids."""
        from tokenizers import Tokenizer

        if not self._tokenizer.is_fast:
            raise DataError(self._cannot(""))
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        for token in state["added_tokens"]:
            if token["content"] in self._ids:
                token["content"] = _moved(token["content"], _PRIVATE)
        backend = Tokenizer.from_str(json.dumps(state))
        backend.no_truncation()
        backend.no_padding()
        numbers: dict[int, int] = {}
        for token in state["added_tokens"]:
            number = backend.token_to_id(token["content"])
            assert number is not None
            numbers[number] = token["id"]
        return backend, numbers

    def _cannot(self, text: str) -> str:
        found = self._hidden.search(text)
        what = self.reveal(found[0]) if found else "special tokens"
        return (
            f"the tokenizer cannot encode {what!r} in a message as text; remove it from the data, "
            "or set data.special_tokens=allow"
        )


def _map(value: Any, change: Callable[[str], str]) -> Any:
    """Return a chat or tool schemas with every text changed."""
    if isinstance(value, Mapping):
        return {_map(name, change): _map(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _moved(text: str, distance: int) -> str:
    return "".join(chr(ord(character) + distance) for character in text)


def set_trained_template(
    tokenizer: Any, data: DatasetConfig, preparer: AttachmentPreparer | None
) -> None:
    """Replace the tokenizer's chat template by that of `ChatTemplate`, with its variables.

    A tokenizer without a template stays as it is if there is no other one.
    """
    own = None if preparer is None else preparer.chat_template
    named = tokenizer.chat_template
    if not (data.chat_template or own or named):
        return
    text = find_template(tokenizer, data.chat_template or own)
    text = with_defaults(text, data.apply_chat_template_kwargs)
    tokenizer.chat_template = {**named, "default": text} if isinstance(named, Mapping) else text


def with_defaults(template: str, variables: Mapping[str, Any]) -> str:
    """Return a Jinja template that has values for variables which are not given to it.

    transformers and vLLM remove the line break after a block, so the rest stays as it is.
    """
    blocks = (
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in sorted(variables.items())
        if name.isidentifier()
    )
    prelude = "".join(blocks)
    return template if template.startswith(prelude) else f"{prelude}\n{template}"


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
