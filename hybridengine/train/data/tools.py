"""Tools in conversations: schemas of a row, and the calls of its assistant turns.

Arrow gives every object of a struct column the same keys and fills those that it lacks with null;
such keys are removed. An argument that is null has to be stored as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hybridengine.run.errors import DataError, unexpected
from hybridengine.train.data.json_text import JsonObject, NotJsonError, parse_json


def parse_tools(where: str, row: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the tool schemas in column `key`: a list of objects or of JSON texts, or JSON of it.

    Empty where the row has no such column. Raises DataError for anything else.
    """
    given = row.get(key)
    tools = _parsed(f"{where}: {key}", given)
    if tools is None or tools == "":
        return []
    tools = (
        [_parsed(f"{where}: {key}", tool) for tool in tools] if isinstance(tools, list) else tools
    )
    if not isinstance(tools, list) or not all(map(tool_name, tools)):
        form = '[{"type": "function", "function": {"name": "…", "parameters": {…}}}]'
        raise unexpected(where, key, given, f"a list of tool schemas like {form}, or JSON of it")
    return [_without_null(tool) for tool in tools]


def plain_tool_calls(where: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls have their arguments as an object, as templates take them.

    OpenAI's form has them as JSON text; ShareGPT's is one JSON text of a call or a list.

    Raises DataError for a call without a name.
    """
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    own = f"{where}: tool_calls"
    listed = _parsed(own, calls)
    if isinstance(calls, str) and not isinstance(listed, list):
        listed = [listed]
    given = [_parsed(own, call) for call in listed] if isinstance(listed, list) else []
    if not given or not all(tool_name(call) for call in given):
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


def with_text_arguments(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat whose calls have their arguments as JSON text, as a few templates take them."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in chat
    ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def tool_names(message: Mapping[str, Any]) -> list[str]:
    """Return the names of the functions that a message calls."""
    return [tool_name(call) for call in message.get("tool_calls") or ()]


def tool_name(schema: Any) -> str:
    """Return the name in a tool schema or call, "" where there is none."""
    own = schema.get("function", schema) if isinstance(schema, Mapping) else {}
    name = own.get("name") if isinstance(own, Mapping) else None
    return name if isinstance(name, str) else ""


def check_tools_shown(where: str, tools: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise DataError where the template did not write the names of the row's tools."""
    if missing := [tool_name(tool) for tool in tools if tool_name(tool) not in text]:
        raise DataError(
            f"{where}: the chat template does not write the tool {missing[0]!r}; give a "
            "data.chat_template that knows tools, or set data.tools_key to a column without them"
        )


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
