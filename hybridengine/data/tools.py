"""Tools in conversations: schemas of a row, and the calls of its assistant turns.

Parquet gives every object of a column the same keys and fills those that it lacks with null; such
keys are removed. An argument that is null has to be stored as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hybridengine.errors import DataError, unexpected


def parse_tools(where: str, row: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the tool schemas in column `key`: a list of objects, or JSON text of one.

    Empty where the row has no such column. Raises DataError for anything else.
    """
    given = row.get(key)
    tools = _parsed(given) if isinstance(given, str) else given
    if tools is None or tools == "":
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        form = '[{"type": "function", "function": {"name": "…", "parameters": {…}}}]'
        raise unexpected(where, key, given, f"a list of tool schemas like {form}, or JSON of it")
    return [_without_null(tool) for tool in tools]


def plain_tool_calls(where: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls have their arguments as an object, as templates take them.

    OpenAI's form has them as JSON text. Raises DataError for a call without a name.
    """
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    if not isinstance(calls, Sequence) or not all(_name(call) for call in calls):
        form = '[{"type": "function", "function": {"name": "…", "arguments": {…}}}]'
        raise unexpected(where, "tool_calls", calls, f"a list like {form}")
    plain = []
    for call in calls:
        call = _without_null(call)
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        parsed = _parsed(arguments) if isinstance(arguments, str) else arguments
        if isinstance(parsed, Mapping):  # any other text is left to the template
            function["arguments"] = dict(parsed)
        plain.append(call)
    return {**message, "tool_calls": plain}


def tool_names(message: Mapping[str, Any]) -> list[str]:
    """Return the names of the functions that a message calls."""
    return [_name(call) for call in message.get("tool_calls") or ()]


def check_tools_shown(where: str, tools: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise DataError where the template did not write the names of the row's tools."""
    if missing := [_name(tool) for tool in tools if _name(tool) not in text]:
        raise DataError(
            f"{where}: the chat template does not write the tool {missing[0]!r}; give a "
            "data.chat_template that knows tools, or set data.tools_key to a column without them"
        )


def _name(schema: Any) -> str:
    """Return the name in a tool schema or call, "" where there is none."""
    own = schema.get("function", schema) if isinstance(schema, Mapping) else {}
    name = own.get("name") if isinstance(own, Mapping) else None
    return name if isinstance(name, str) else ""


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_null(item) for name, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value
