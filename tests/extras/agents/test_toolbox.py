"""Tools that fail in every way: the model gets a text, the failure is counted, nothing hangs."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hybridengine.agents import BaseTool, ToolCall, load_tools
from hybridengine.agents.toolbox import Toolbox
from hybridengine.agents.tools import FunctionTool, Tool
from hybridengine.run.config.rl import MultiTurnConfig
from hybridengine.run.errors import ConfigError

SCHEMA = {"type": "function", "function": {"name": "counter", "description": "Count."}}


class Counter(BaseTool):
    """Counts its calls; the first one's reward is 1."""

    log: list[Any] = []  # noqa: RUF012, of all instances

    async def create(self, instance_id: Any = None, **kwargs: Any) -> Any:
        self.counts = {"mine": 0}
        self.log.append(("create", kwargs))
        return "mine", None  # as verl's, with a response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.counts[instance_id] += parameters.get("by", 1)
        return f"{self.counts[instance_id]}", 1.0, {"metric": 3}

    def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.25 * self.counts[instance_id]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(("release", instance_id))


def box(*tools: Any, kwargs: Any = None, **settings: Any) -> Toolbox:
    found = [Tool(t if isinstance(t, BaseTool) else FunctionTool(t)) for t in tools]
    config = MultiTurnConfig(enable=True, **{"tool_timeout_s": 10.0, **settings})
    by_name = {tool.name: tool for tool in found}
    return Toolbox(by_name, kwargs or {}, config, asyncio.Semaphore(4))


def raising(text: str) -> str:
    """Raise.

    Args:
        text: any
    """
    raise KeyError(text)


def leaving() -> str:
    """Leave."""
    sys.exit(3)


def huge() -> str:
    """Return 10 MB."""
    return "x" * 10_000_000


def binary() -> bytes:
    """Return no text."""
    return b"\xff\x00"


def lone_surrogate() -> str:
    """Return text that no tokenizer takes."""
    return "a\ud800b"


def number() -> dict[str, list[float]]:
    """Return JSON."""
    return {"values": [1.5, 2]}


async def raising_later() -> str:
    """Raise in a coroutine."""
    await asyncio.sleep(0)
    raise ValueError("later")


def run(toolbox: Toolbox, name: str, **arguments: Any) -> Any:
    return asyncio.run(toolbox.run(ToolCall(name, arguments)))


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (raising, {"text": "k"}, "KeyError: 'k'"),
        (raising, {"wrong": 1}, "unexpected keyword argument 'wrong'"),
        (leaving, {}, "it ended with SystemExit: 3"),
        (binary, {}, "it returned bytes, expected text"),
        (raising_later, {}, "ValueError: later"),
    ],
)
def test_a_failing_tool_is_reported_to_the_model(function, arguments, message) -> None:
    toolbox = box(function)
    result = run(toolbox, function.__name__, **arguments)
    assert result.error and message in result.text and result.text.startswith("Error: tool")
    assert (toolbox.num_calls, toolbox.num_errors) == (1, 1)


def test_what_is_no_call_is_reported_too() -> None:
    toolbox = box(huge)
    unknown = run(toolbox, "missing")
    assert unknown.text == "Error: there is no tool 'missing'; tools: huge"
    faulty = asyncio.run(toolbox.run(ToolCall("huge", {}, "the tool call is not valid JSON: …")))
    assert faulty.text == "Error: the tool call is not valid JSON: …"
    assert toolbox.num_errors == 2


@pytest.mark.slow
def test_a_hanging_tool_is_left_alone() -> None:
    release = threading.Event()

    def hanging() -> str:
        """Hang."""
        release.wait(60)
        return "late"

    async def stubborn() -> str:
        """Ignore cancellation."""
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        return "late"

    def quick() -> str:
        """Answer at once."""
        return "quick"

    async def all_three() -> Any:
        toolbox = box(hanging, stubborn, quick, tool_timeout_s=2.0)
        calls = [ToolCall(name, {}) for name in ("hanging", "stubborn", "quick")]
        results = await asyncio.gather(*map(toolbox.run, calls))
        release.set()
        await asyncio.sleep(0.2)  # the late results are dropped
        return toolbox, results

    started = time.monotonic()
    toolbox, (first, second, third) = asyncio.run(all_three())
    assert time.monotonic() - started < 30
    assert first.text == "Error: tool 'hanging' gave no result within 2 s"
    assert second.error and not third.error and third.text == "quick"
    assert toolbox.num_errors == 2


@pytest.mark.parametrize(
    ("side", "want"),
    [
        ("left", "(truncated)..." + "x" * 20),
        ("right", "x" * 20 + "...(truncated)"),
        ("middle", "x" * 10 + "...(truncated)..." + "x" * 10),
    ],
)
def test_a_long_response_is_cut_as_in_verl(side: str, want: str) -> None:
    settings = {"max_tool_response_length": 20, "tool_response_truncate_side": side}
    assert run(box(huge, **settings), "huge").text == want


def test_other_values_become_text() -> None:
    assert run(box(number), "number").text == '{"values": [1.5, 2]}'
    assert run(box(lone_surrogate), "lone_surrogate").text == "a?b"


def test_a_tool_with_state_lives_as_long_as_its_trajectory() -> None:
    Counter.log.clear()
    toolbox = box(
        Counter({}, SCHEMA), kwargs={"counter": {"create_kwargs": {"x": 1, "null": None}}}
    )

    async def twice() -> Any:
        first = await toolbox.run(ToolCall("counter", {"by": 2}))
        second = await toolbox.run(ToolCall("counter", {"by": 3}))
        return first, second, await toolbox.close()

    first, second, rewards = asyncio.run(twice())
    assert (first.text, first.reward, second.text) == ("2", 1.0, "5")
    assert rewards == {"counter": 1.25}
    assert Counter.log == [("create", {"create_kwargs": {"x": 1}}), ("release", "mine")]


def test_a_reward_that_fails_is_counted_and_reported() -> None:
    class Failing(Counter):
        def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            raise KeyError("no score")

    Counter.log.clear()
    toolbox = box(Failing({}, SCHEMA))

    async def call_and_close() -> Any:
        await toolbox.run(ToolCall("counter", {"by": 2}))
        return await toolbox.close()

    with pytest.warns(UserWarning, match="calc_reward of tool 'counter' failed.*no score"):
        assert asyncio.run(call_and_close()) == {}
    assert toolbox.num_errors == 1
    assert Counter.log[-1][0] == "release", "it is released all the same"


def test_tools_are_loaded_as_verl_s_files_declare_them(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(
        "from hybridengine.agents import BaseTool\n\n"
        "class Echo(BaseTool):\n    async def execute(self, instance_id, parameters, **kwargs):\n"
        "        return str(parameters), 0.0, {}\n\n"
        'def add(a: int, b: int = 2) -> int:\n    """Add.\n\n    Args:\n        a: first\n'
        '        b: second\n    """\n    return a + b\n\n'
        "def _private() -> int:\n    return 1\n\n"
        "def undocumented(x):\n    return x\n"
    )
    entry = {"class_name": f"{tmp_path}/tools.py:Echo", "config": {"type": "native"}}
    entry["tool_schema"] = {"type": "function", "function": {"name": "echo", "description": "E"}}
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    tools = load_tools(
        MultiTurnConfig(
            tool_config_path=f"{tmp_path}/tools.yaml",
            function_tool_path=(f"{tmp_path}/tools.py:add",),
        )
    )
    assert list(tools) == ["echo", "add"]
    parameters = tools["add"].schema["function"]["parameters"]
    assert parameters["required"] == ["a"]
    assert parameters["properties"]["b"] == {"type": "integer", "description": "second"}
    with pytest.raises(ConfigError, match="undocumented is not a tool"):
        load_tools(MultiTurnConfig(function_tool_path=(f"{tmp_path}/tools.py",)))
    with pytest.raises(ConfigError, match=r"two tools have the name 'add'"):
        load_tools(MultiTurnConfig(function_tool_path=(f"{tmp_path}/tools.py:add",) * 2))
    with pytest.raises(ConfigError, match=r"the file .* does not exist"):
        load_tools(MultiTurnConfig(function_tool_path=("nowhere.py",)))
    (tmp_path / "bad.yaml").write_text("tools: 3")
    with pytest.raises(ConfigError, match="expected a list `tools`"):
        load_tools(MultiTurnConfig(tool_config_path=f"{tmp_path}/bad.yaml"))


def test_a_tool_of_verl_s_own_base_class_can_be_used(tmp_path: Path) -> None:
    pytest.importorskip("verl.tools.base_tool")
    (tmp_path / "verl_tool.py").write_text(
        "from verl.tools.base_tool import BaseTool\nfrom verl.tools.schemas import ToolResponse\n\n"
        "class Upper(BaseTool):\n    async def execute(self, instance_id, parameters, **kwargs):\n"
        "        return ToolResponse(text=parameters['text'].upper()), 0.5, {}\n"
    )
    properties = {"text": {"type": "string", "description": "t"}}
    parameters = {"type": "object", "properties": properties}
    function = {"name": "upper", "description": "U", "parameters": parameters}
    entry = {"class_name": f"{tmp_path}/verl_tool.py:Upper", "config": {"type": "native"}}
    entry["tool_schema"] = {"type": "function", "function": function}
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    tools = load_tools(MultiTurnConfig(tool_config_path=f"{tmp_path}/tools.yaml"))
    toolbox = Toolbox(tools, {}, MultiTurnConfig(), asyncio.Semaphore(1))
    result = run(toolbox, "upper", text="abc")
    assert (result.text, result.reward) == ("ABC", 0.5)
