"""The images of a row, and their places in its chat.

A chat with images has them in one of three forms:

    <image> in messages, and a column of images: verl's, and ShareGPT's
    parts without an image, {"type": "image"}, and a column of images: TRL's
    parts with an image: OpenAI's {"type": "image_url", …}, or {"type": "image", "image": …}

A column without any place in the chat, TRL's shortest form, is put before the first user message.
`place_images` returns one form: parts of text, parts {"type": "image"}, and the images in order.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hybridengine.model.attachments import Attachment
from hybridengine.run.errors import DataError, shorten, unexpected
from hybridengine.vision.encoded import EncodedImage

__all__ = ["find_images", "place_images"]

_MARKER = "<image>"
_IMAGE_TYPES = ("image", "image_url", "input_image")
_TEXT_TYPES = ("text", "input_text")
_SOURCES = ("bytes", "image", "image_url", "url", "path", "base64")  # the first one that is given
_FORMS = (
    'bytes, a path, a data: URL, or an object of one of them, such as {"bytes": …}, {"path": …}, '
    '{"image": …}'
)
_Message = dict[str, Any]


def place_images(
    where: str,
    folder: Path,
    chat: Sequence[Mapping[str, Any]],
    row: Mapping[str, Any],
    columns: Sequence[str],
) -> tuple[list[_Message], list[Attachment]]:
    """Return the chat with its images as parts without content, and the images in their order.

    folder: that paths are relative to.
    columns: names of the columns that may have the images; the first one that is there has them.
    A message without images has text as content.

    Raises DataError for images that cannot be read, or that have no place, and places without one.
    """
    key = next((name for name in columns if row.get(name) is not None), columns[0])
    given = row.get(key)
    column = given if isinstance(given, list) else [given] if given is not None else []
    messages = [_with_parts(where, message, given is not None) for message in chat]
    parts = list(chain.from_iterable(m.get("content") or () for m in messages))
    places = [part for part in parts if part["type"] == "image" and "source" not in part]
    if column and not places:
        first = next((m for m in messages if m["role"] == "user"), messages[0])
        places = [{"type": "image"} for _ in column]
        first["content"] = [*places, *(first.get("content") or ())]
    if len(places) != len(column):
        raise DataError(
            f"{where}: the chat has places for {len(places)} images ({_MARKER} in a message, or a "
            f"part of type image), and column {key!r} has {len(column)}; give one for each place"
        )
    for place, source in zip(places, column, strict=True):
        place["source"] = source
    images = list(_take_sources(where, messages, folder))
    return [_plain(message) for message in messages], images


def find_images(where: str, content: Any, folder: Path) -> tuple[Any, list[Attachment]]:
    """As `place_images`, for the content of one message whose parts have the images, if any."""
    message = _with_parts(where, {"role": "tool", "content": content}, False)
    images = list(_take_sources(where, [message], folder))
    return _plain(message)["content"], images


def _take_sources(where: str, messages: Sequence[_Message], folder: Path) -> Iterator[Attachment]:
    """Yield the images of all parts, and leave the parts without them."""
    number = 0
    for message in messages:
        for part in message.get("content") or ():
            if part["type"] != "image":
                continue
            if message["role"] == "assistant":
                raise DataError(
                    f"{where}: a turn of the assistant has an image, which no model here writes; "
                    "put it into a turn of the user, or of a tool"
                )
            if "source" not in part:
                raise DataError(f"{where}: a part of type image has no image; give {_FORMS}")
            yield _encoded(f"{where}, image {number}", part.pop("source"), folder)
            number += 1


def _with_parts(where: str, message: Mapping[str, Any], has_column: bool) -> _Message:
    """Return a message whose content, if it has any, is a list of parts of text and of images."""
    content = message.get("content")
    if content is None:
        return dict(message)
    if not isinstance(content, str):
        return {**message, "content": [_part(where, part) for part in content]}
    parts: list[_Message] = []
    for text in content.split(_MARKER) if has_column else [content]:
        parts += [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
    return {**message, "content": parts[1:]}


def _part(where: str, part: Any) -> _Message:
    """Return one part of a content, {"type": "text", "text": …} or {"type": "image", …}."""
    given = {n: v for n, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
    kind = given.pop("type", None)
    if kind in _TEXT_TYPES and isinstance(given.get("text"), str):
        return {"type": "text", "text": given["text"]}
    if kind not in _IMAGE_TYPES:
        expected = "a part of type text, image or image_url; video and audio are not supported"
        raise unexpected(where, "a part of a message", part, expected)
    given.pop("text", None)
    given.pop("detail", None)  # OpenAI's; the model's processor decides
    return {"type": "image", **({"source": given} if given else {})}


def _plain(message: _Message) -> _Message:
    """Return a message without images with text as content."""
    content = message.get("content")
    if content is None or any(part["type"] == "image" for part in content):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _encoded(where: str, source: Any, folder: Path) -> Attachment:
    """Return an image in any of the forms of data files."""
    if isinstance(source, bytes):
        return EncodedImage.of_bytes(where, source)
    if isinstance(source, str):
        return _of_text(where, source, folder)
    if isinstance(source, Mapping):
        given = {name: value for name, value in source.items() if value is not None}
        name = next((name for name in _SOURCES if name in given), None)
        # Hugging Face datasets store the name of the file beside the bytes.
        others = given.keys() - {name, "type", "detail", "path" if name == "bytes" else name}
        if others:
            raise DataError(
                f"{where} has {sorted(others)[0]!r}, which is not supported for one image; set "
                "data.mm_processor_kwargs for all"
            )
        if name == "base64":
            return EncodedImage.of_bytes(where, _from_base64(where, given[name]))
        if name is not None:
            return _encoded(where, given[name], folder)
    raise DataError(f"{where} is {shorten(repr(source), 80)}, expected {_FORMS}")


def _of_text(where: str, text: str, folder: Path) -> Attachment:
    scheme = urlsplit(text).scheme if ":" in text[:16] else ""
    if scheme == "data":
        head, _, content = text.partition(",")
        if not head.endswith(";base64"):
            raise DataError(f"{where}: a data: URL begins with {head[:40]!r}, expected …;base64")
        return EncodedImage.of_bytes(where, _from_base64(where, content))
    if scheme in ("http", "https", "ftp", "s3", "gs", "hf"):
        raise DataError(
            f"{where} is {shorten(repr(text), 80)}, and nothing is downloaded; download the images "
            "first, and give their paths, relative to the folder of the data file"
        )
    path = Path(unquote(urlsplit(text).path) if scheme == "file" else text).expanduser()
    return EncodedImage.of_file(where, folder / path)


def _from_base64(where: str, text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise DataError(f"{where} is not base64: {error}") from None
