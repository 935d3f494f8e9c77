"""The chat of a row, in the one form that SFT, RL and chat templates share.

messages      {"role", "content"}; ShareGPT's {"from", "value"} is converted
tool calls    arguments as an object, also where the row has them as JSON text
null          keys that Arrow filled are removed; the nulls of JSON text stay
images        parts of a message, see `ModelExtension.place_attachments`
loss flags    `weight`, `loss_mask`, `trainable`, `train` or `loss` of a turn: 0 or 1
tools         schemas in the column `data.tools_key`, shown to the model by the template
thinking      the column `data.enable_thinking_key`, a variable of the template
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hybridengine.model.attachments import Attachment
from hybridengine.run import load_plugin
from hybridengine.run.config.common import DatasetConfig
from hybridengine.run.errors import DataError, shorten, unexpected
from hybridengine.train.data.files import JsonObject, NotJsonError, RowLocation, parse_json

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
_IMAGE_COLUMN = "image"  # TRL's, of rows with one image each
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
    images: list[Attachment]
    tools: list[dict[str, Any]]
    options: dict[str, Any]
    is_trained: list[bool | None]


def read_chat(
    where: RowLocation, row: Mapping[str, Any], key: str, chat: Any, data: DatasetConfig
) -> RowChat:
    """Return `chat`, that of column `key`, with what else the row gives to a template.

    It is [{"role", "content"}, …], with text or parts as content, or ShareGPT's
    [{"from", "value"}, …].

    Raises DataError for any other chat, and for images, tool calls, tools and flags that cannot be
    used.
    """
    messages = [_message(turn) for turn in chat] if isinstance(chat, list) else []
    faults = (f"turn {n}: {x}" for n, message in enumerate(messages) if (x := _fault(message)))
    if fault := next(faults, "" if messages else "it is no list of messages"):
        form = '[{"role": "user", "content": "…"}]'
        raise unexpected(where, key, chat, f"a chat, a list like {form}; {fault}")
    flags = [_take_loss_flag(f"{where}, turn {n}", message) for n, message in enumerate(messages)]
    images: list[Attachment] = []
    columns = image_columns(data)
    if any(row.get(name) is not None for name in columns) or any(
        isinstance(message.get("content"), list) for message in messages
    ):
        plug = load_plugin("models", "images", "data.image_key")
        messages, images = plug.place_attachments(where, where.folder, messages, row, columns)
    thinking = row.get(data.enable_thinking_key)
    if thinking is not None and not isinstance(thinking, bool):
        raise unexpected(where, data.enable_thinking_key, thinking, "true or false")
    return RowChat(
        where,
        [_plain_tool_calls(where, message) for message in messages],
        images,
        _tools(where, row, data.tools_key),
        {} if thinking is None else {"enable_thinking": thinking},
        flags,
    )


def image_columns(data: DatasetConfig) -> tuple[str, str]:
    """Return the names of columns that may have the images of a row."""
    return data.image_key, _IMAGE_COLUMN


def cut_tokens(
    where: str, what: str, tokens: Any, key: str, data: DatasetConfig, images: Sequence[Attachment]
) -> Any:
    """Return the tokens of `what` that fit into the limit `key` of `data`, which they exceed.

    Raises DataError where they are not to be cut (data.truncation), or contain images.
    """
    limit: int = getattr(data, key)
    fault = f"{where}: {what} is {len(tokens)} tokens, more than data.{key} {limit}"
    drop = "set data.filter_overlong_prompts=true to drop such rows"
    if images:
        raise DataError(
            f"{fault}, and one with images is not cut; raise it, {drop}, or shrink images by "
            "data.mm_processor_kwargs"
        )
    if data.truncation == "error":
        raise DataError(f"{fault}; raise it, set data.truncation to left or right, or {drop}")
    return tokens[-limit:] if data.truncation == "left" else tokens[:limit]


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


def _take_loss_flag(where: str, message: dict[str, Any]) -> bool | None:
    """Remove the loss flags of a turn; return whether to train on it, None where it has none."""
    given = {name: message.pop(name) for name in _LOSS_FLAGS if name in message}
    if not given:
        return None
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
    return values.pop()


def _tools(where: str, row: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the tool schemas in column `key`: a list of objects or of JSON texts, or JSON of it.

    Empty where the row has no such column.
    """
    given, own = row.get(key), f"{where}: {key}"
    if (tools := _parsed(own, given)) in (None, ""):
        return []
    tools = [_parsed(own, tool) for tool in tools] if isinstance(tools, list) else [None]
    if not all(map(tool_name, tools)):
        form = '[{"type": "function", "function": {"name": "…", "parameters": {…}}}]'
        raise unexpected(where, key, given, f"a list of tool schemas like {form}, or JSON of it")
    return [_without_null(tool) for tool in tools]


def _plain_tool_calls(where: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls have their arguments as an object, as templates take them.

    OpenAI's form has them as JSON text; ShareGPT's is one JSON text of a call or a list.
    """
    calls = message.pop("tool_calls", None)
    if not calls:
        return message
    own = f"{where}: tool_calls"
    listed = _parsed(own, calls)
    listed = [listed] if isinstance(calls, str) and not isinstance(listed, list) else listed
    given = [_parsed(own, call) for call in listed] if isinstance(listed, list) else []
    if not given or not all(map(tool_name, given)):
        form = '[{"type": "function", "function": {"name": "…", "arguments": {…}}}]'
        raise unexpected(where, "tool_calls", calls, f"a list like {form}")
    return {**message, "tool_calls": [_plain_call(own, call) for call in given]}


def _plain_call(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    call: dict[str, Any] = _without_null(given)
    function = call.get("function", call)
    parsed = _parsed(where, function.get("arguments", {}))
    if isinstance(parsed, Mapping):  # any other text is left to the template
        function["arguments"] = dict(parsed)
    return call if "function" in call else {"type": "function", "function": call}


def tool_names(message: Mapping[str, Any]) -> list[str]:
    """Return the names of the functions that a message calls."""
    return [tool_name(call) for call in message.get("tool_calls") or ()]


def tool_name(schema: Any) -> str:
    """Return the name in a tool schema or call, "" where there is none."""
    own = schema.get("function", schema) if isinstance(schema, Mapping) else {}
    name = own.get("name") if isinstance(own, Mapping) else None
    return name if isinstance(name, str) else ""


def _parsed(where: str, value: Any) -> Any:
    """Return the value of JSON text, anything else as it is."""
    if isinstance(value, str):
        with suppress(NotJsonError):
            return parse_json(where, value)
    return value


def _without_null(value: Any) -> Any:
    """Return a copy without the keys that Arrow filled with null."""
    if isinstance(value, JsonObject):
        return JsonObject((name, _without_null(item)) for name, item in value.items())
    if isinstance(value, Mapping):
        return {name: _without_null(item) for name, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value
