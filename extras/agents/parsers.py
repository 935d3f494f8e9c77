"""Find the tool calls in what a model wrote, by the format of its family.

    hermes        <tool_call>{"name": …, "arguments": {…}}</tool_call>            Qwen 2.5/3, Hermes
    llama3_json   {"name": …, "parameters": {…}}, after <|python_tag|> or alone   Llama 3.1, 3.2
    mistral       [TOOL_CALLS][{"name": …, "arguments": {…}}]                     Mistral, Mixtral
    deepseek_v3   a name and a JSON block between special tokens                  DeepSeek V3, R1

Any other name is that of a vLLM tool parser, where vLLM is installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridengine.run.errors import ConfigError

__all__ = ["PARSERS", "ToolCall", "ToolParser", "find_parser"]


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote; fault: why it cannot be run, "" for a valid one."""

    name: str
    arguments: dict[str, Any]
    fault: str = ""


ToolParser = Callable[[str], list[ToolCall]]  # of a turn's text, special tokens included

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_DEEPSEEK = re.compile(  # \uff5c is the bar of its special tokens, \u2581 their underscore
    r"<\uff5ctool\u2581call\u2581begin\uff5c>[^<]*<\uff5ctool\u2581sep\uff5c>(?P<name>[^\n]*)\n"
    r"```json\n(?P<arguments>.*?)\n```\s*<\uff5ctool\u2581call\u2581end\uff5c>",
    re.DOTALL,
)
_THINKING = re.compile(r"\A.*</think>", re.DOTALL)  # calls considered there are not calls
_MISTRAL_CALL = re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


def _hermes(text: str) -> list[ToolCall]:
    return [_from_json(body) for body in _HERMES.findall(_answer(text))]


def _llama3_json(text: str) -> list[ToolCall]:
    """Read JSON objects separated by semicolons; an answer in prose has none."""
    body = _answer(text).replace("<|python_tag|>", "").strip()
    calls, decoder = list[ToolCall](), json.JSONDecoder()
    while body.startswith("{"):
        try:
            value, end = decoder.raw_decode(body)
        except json.JSONDecodeError:
            return [*calls, _from_json(body)] if '"name"' in body else calls
        if "name" not in value:
            return calls
        calls.append(_from_value(value))
        body = body[end:].lstrip("; \n")
    return calls


def _mistral(text: str) -> list[ToolCall]:
    """Read the list of the older tokenizers, or the name[ARGS]{…} of the newer ones."""
    _, *bodies = _answer(text).split("[TOOL_CALLS]")
    calls = list[ToolCall]()
    for body in bodies:
        if named := _MISTRAL_CALL.match(body):
            calls.append(_from_json(body[named.end() :], named["name"]))
            continue
        try:
            values, _ = json.JSONDecoder().raw_decode(body.lstrip())
        except json.JSONDecodeError as error:
            calls.append(ToolCall("", {}, f"the tool call is not valid JSON: {error}"))
            continue
        calls += [
            _from_value(value) for value in (values if isinstance(values, list) else [values])
        ]
    return calls


def _deepseek_v3(text: str) -> list[ToolCall]:
    return [
        _from_json(match["arguments"], match["name"].strip())
        for match in _DEEPSEEK.finditer(_answer(text))
    ]


def _answer(text: str) -> str:
    return _THINKING.sub("", text)


def _from_json(body: str, name: str | None = None) -> ToolCall:
    """Parse a call, or where `name` is given its arguments alone."""
    try:
        value, _ = json.JSONDecoder().raw_decode(body.strip())
    except json.JSONDecodeError as error:
        return ToolCall(name or "", {}, f"the tool call is not valid JSON: {error}")
    return _from_value(value if name is None else {"name": name, "arguments": value})


def _from_value(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, "a tool call must be a JSON object with name and arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            return ToolCall(value["name"], {}, f"the arguments are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], {}, "the arguments must be a JSON object")
    return ToolCall(value["name"], arguments)


PARSERS: dict[str, ToolParser] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "deepseek_v3": _deepseek_v3,
}


def find_parser(name: str, tokenizer: Any) -> ToolParser:
    """Return the parser `name`: one of PARSERS, or vLLM's of that name.

    Raises ConfigError where there is none, or the tokenizer lacks the tokens of vLLM's.
    """
    if name in PARSERS:
        return PARSERS[name]
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers.abstract_tool_parser import ToolParserManager

        parser_class = ToolParserManager.get_tool_parser(name)
    except (ImportError, KeyError) as error:
        where = "is not installed" if isinstance(error, ImportError) else "has none of that name"
        raise ConfigError(
            f"rollout.multi_turn.format is {name!r}, which is none of {', '.join(PARSERS)}, and "
            f"vLLM, whose tool parsers can be named too, {where}"
        ) from None
    try:
        parser_class(tokenizer)
    except Exception as error:
        raise ConfigError(
            f"rollout.multi_turn.format is {name!r}, whose parser in vLLM does not fit the "
            f"tokenizer: {error}"
        ) from None
    request = ChatCompletionRequest.model_validate({"messages": [], "model": ""})

    def parse(text: str) -> list[ToolCall]:
        found = parser_class(tokenizer).extract_tool_calls(text, request)
        functions = [call.function for call in found.tool_calls]
        return [_from_json(function.arguments, function.name) for function in functions]

    return parse
