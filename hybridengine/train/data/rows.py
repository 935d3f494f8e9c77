"""The chat of a row, in the one form that SFT, RL and chat templates share.

messages      {"role", "content"}; ShareGPT's {"from", "value"} is converted
tool calls    arguments as an object, also where the row has them as JSON text
null          keys that Arrow filled are removed; the nulls of JSON text stay
images        parts of a message, see `data.images`
loss flags    `weight`, `loss_mask`, `trainable`, `train` or `loss` of a turn: 0 or 1
tools         schemas in the column `data.tools_key`, shown to the model by the template
thinking      the column `data.enable_thinking_key`, a variable of the template
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridengine.run.config.common import DatasetConfig
from hybridengine.run.errors import DataError, shorten, unexpected
from hybridengine.train.data.files import RowLocation
from hybridengine.train.data.tools import parse_tools, plain_tool_calls
from hybridengine.vision import EncodedImage
from hybridengine.vision.rows import place_images

__all__ = ["RowChat", "parse_chat", "read_chat"]

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_LOSS_FLAGS = ("weight", "loss_mask", "trainable", "train", "loss")


@dataclass(frozen=True)
class RowChat:
    """What a row gives to a chat template.

    messages: of the chat; images are parts without content.
    images: in the order of their parts.
    tools: the row's own schemas.
    options: the row's own variables of the template.
    is_trained: of each turn, its loss flag; None where it has none.
    """

    where: RowLocation
    messages: list[dict[str, Any]]
    images: list[EncodedImage]
    tools: list[dict[str, Any]]
    options: dict[str, Any]
    is_trained: list[bool | None]


def read_chat(
    where: RowLocation,
    row: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    data: DatasetConfig,
) -> RowChat:
    """Return `messages`, from `parse_chat`, with what else the row gives to a template.

    Raises DataError for images, tool calls, tools and flags that cannot be used.
    """
    flags = [_loss_flag(f"{where}, turn {n}", message) for n, message in enumerate(messages)]
    bare = [
        {name: value for name, value in message.items() if name not in _LOSS_FLAGS}
        for message in messages
    ]
    placed, images = place_images(where, bare, row, data.image_key)
    thinking = row.get(data.enable_thinking_key)
    if thinking is not None and not isinstance(thinking, bool):
        raise unexpected(where, data.enable_thinking_key, thinking, "true or false")
    return RowChat(
        where,
        [plain_tool_calls(where, message) for message in placed],
        images,
        parse_tools(where, row, data.tools_key),
        {} if thinking is None else {"enable_thinking": thinking},
        flags,
    )


def parse_chat(where: str, key: str, chat: Any) -> list[dict[str, Any]]:
    """Return the chat of column `key` as [{"role", "content"}, …], with text or parts as content.

    ShareGPT's [{"from", "value"}, …] is converted. Raises DataError for anything else.
    """
    fault = "" if isinstance(chat, list) and chat else "it is no list of messages"
    messages = [_message(turn) for turn in chat] if not fault else []
    for turn, message in enumerate(messages):
        fault = fault or (_fault(message) and f"turn {turn}: {_fault(message)}")
    if fault:
        form = '[{"role": "user", "content": "…"}]'
        raise unexpected(where, key, chat, f"a chat, a list like {form}; {fault}")
    return messages


def _message(turn: Any) -> Any:
    """Return a turn in OpenAI's form, without the keys that are null."""
    if not isinstance(turn, Mapping):
        return turn
    turn = {name: value for name, value in turn.items() if value is not None or name == "content"}
    if "from" in turn and "role" not in turn:
        given, content = turn.pop("from"), turn.pop("value", None)
        known = _SHAREGPT_ROLES.get(given, given) if isinstance(given, str) else given
        if given == "function_call":
            turn["tool_calls"], content = content, ""
        return {**turn, "role": known, "content": content}
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


def _loss_flag(where: str, message: Mapping[str, Any]) -> bool | None:
    """Return whether a turn is to be trained on, None where it does not say."""
    given = {name: message[name] for name in _LOSS_FLAGS if name in message}
    for name, value in given.items():
        if value not in (0, 1):
            raise DataError(
                f"{where}: {name} is {shorten(repr(value), 80)}, expected 0, 1, false or true: "
                "whether the turn is trained on"
            )
    values = {bool(value) for value in given.values()}
    if len(values) > 1:
        raise DataError(f"{where}: {' and '.join(given)} contradict each other; keep one of them")
    if True in values and message["role"] != "assistant":
        raise DataError(
            f"{where}: {next(iter(given))} asks to train on a turn of the role "
            f"{message['role']!r}; only turns of the assistant are trained on"
        )
    return values.pop() if values else None
