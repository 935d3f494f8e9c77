"""Tool calls of each family's format, broken ones too, and vLLM's parsers on the same texts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybridengine.agents import ToolCall, find_parser
from hybridengine.agents.parsers import PARSERS
from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.run.errors import ConfigError
from tests.extras.agents.families import byte_tokenizer

BAR, LOW = "\uff5c", "\u2581"
ADD = ToolCall("add", {"a": 1, "b": "}</x>"})
TWO = [ADD, ToolCall("sub", {})]


def deepseek(calls: list[ToolCall]) -> str:
    def token(*words: str) -> str:
        return f"<{BAR}{LOW.join(words)}{BAR}>"

    parts = [
        f"{token('tool', 'call', 'begin')}function{token('tool', 'sep')}{call.name}\n```json\n"
        f"{json.dumps(call.arguments)}\n```{token('tool', 'call', 'end')}"
        for call in calls
    ]
    return token("tool", "calls", "begin") + "\n".join(parts) + token("tool", "calls", "end")


def objects(calls: list[ToolCall], key: str = "arguments") -> list[str]:
    return [json.dumps({"name": call.name, key: call.arguments}) for call in calls]


def write(name: str, calls: list[ToolCall]) -> str:
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects(calls))
    if name == "llama3_json":
        return "; ".join(objects(calls, "parameters"))
    if name == "mistral":
        return f"[TOOL_CALLS][{', '.join(objects(calls))}]"
    return deepseek(calls)


@pytest.mark.parametrize("name", PARSERS)
def test_calls_of_each_format(name: str) -> None:
    parse = find_parser(name, None)
    prose = "" if name == "llama3_json" else "I add. "
    assert parse(prose + write(name, [ADD])) == [ADD]
    assert parse(write(name, TWO)) == TWO
    assert parse("The answer is {4}.") == []
    assert parse("") == []
    assert parse(f"<think>{write(name, [ADD])}</think>\n") == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": {</tool_call>', "not valid JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "must be a JSON object with name"),
        ("hermes", '<tool_call>{"name": "a", "arguments": 3}</tool_call>', "must be a JSON object"),
        ("hermes", '<tool_call>{"name": "a", "arguments": "{"}</tool_call>', "not valid JSON"),
        ("llama3_json", '{"name": "a", "parameters": {', "not valid JSON"),
        ("mistral", "[TOOL_CALLS] oops", "not valid JSON"),
        ("mistral", "[TOOL_CALLS] 5", "must be a JSON object with name"),
        ("deepseek_v3", deepseek([ADD]).replace('{"a"', '{"a'), "not valid JSON"),
    ],
)
def test_broken_calls_say_what_is_wrong(name: str, text: str, fault: str) -> None:
    [call] = find_parser(name, None)(text)
    assert fault in call.fault


def test_variants_that_models_write() -> None:
    hermes, mistral = find_parser("hermes", None), find_parser("mistral", None)
    assert hermes('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}') == [
        ToolCall("add", {"a": 1})
    ]
    assert mistral('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub{}') == [
        ToolCall("add", {"a": 1}),
        ToolCall("sub", {}),
    ]
    llama = find_parser("llama3_json", None)
    assert llama('<|python_tag|>{"name": "add", "parameters": {"a": 1}}') == [
        ToolCall("add", {"a": 1})
    ]


@pytest.mark.skipif(not vllm_available(), reason="needs vLLM")
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "deepseek_v3"])
def test_vllm_s_parsers_find_the_same(name: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers.abstract_tool_parser import ToolParserManager

    class Vocabulary:  # vLLM's look up special tokens
        def get_vocab(self) -> Any:
            words = [
                "<|python_tag|>",
                *(f"<{BAR}tool{LOW}calls{LOW}{x}{BAR}>" for x in ("begin", "end")),
                *(f"<{BAR}tool{LOW}call{LOW}{x}{BAR}>" for x in ("begin", "end")),
            ]
            return {word: i for i, word in enumerate(words)}

    parser = ToolParserManager.get_tool_parser(name)(Vocabulary())
    for calls in ([ADD], TWO, []):
        text = write(name, calls) if calls else "no call at all"
        found = parser.extract_tool_calls(text, ChatCompletionRequest(messages=[], model=""))
        theirs = [
            ToolCall(c.function.name, json.loads(c.function.arguments)) for c in found.tool_calls
        ]
        assert theirs == calls == find_parser(name, None)(text)


def test_other_formats_are_vllm_s() -> None:
    if vllm_available():
        parse = find_parser("pythonic", byte_tokenizer())
        assert parse("[add(a=1)]") == [ToolCall("add", {"a": 1})]
    with pytest.raises(ConfigError, match=r"rollout.multi_turn.format is 'nothing'"):
        find_parser("nothing", byte_tokenizer())
