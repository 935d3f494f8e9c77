"""Agent loops: what happens in a trajectory. Register your own, or name its class by file.

    @register_agent_loop("mine")
    class Mine(AgentLoop):
        async def run(self, trajectory):
            while turn := await trajectory.generate():
                trajectory.messages.append({"role": "user", "content": answer_to(turn.text)})

`rollout.agent.default_agent_loop` is a registered name, file.py:Class or package.module.Class; a
row may select another registered one in `extra_info.agent_name`. A class with `reset` and `step` is
an environment, see `EnvironmentLoop`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridengine.agents.parsers import ToolParser
from hybridengine.agents.toolbox import call
from hybridengine.agents.trajectory import AgentError, Trajectory
from hybridengine.run import import_object, registers
from hybridengine.run.config.rl import MultiTurnConfig
from hybridengine.run.errors import ConfigError

__all__ = [
    "LOOPS",
    "AgentLoop",
    "EnvironmentLoop",
    "LoopContext",
    "find_loop",
    "register_agent_loop",
]

LOOPS: dict[str, type[AgentLoop]] = {}


@dataclass(frozen=True)
class LoopContext:
    """What the loops of a run share."""

    config: MultiTurnConfig
    parse: ToolParser


class AgentLoop(ABC):
    """One instance runs one trajectory; `run` is a coroutine that must not block."""

    def __init__(self, context: LoopContext) -> None:
        self.context = context

    @abstractmethod
    async def run(self, trajectory: Trajectory) -> None:
        """Let the model write turns until the trajectory ends."""


def register_agent_loop(name: str) -> Callable[[type[AgentLoop]], type[AgentLoop]]:
    """Register a loop as `name`; ValueError for a name that is already registered."""
    return registers(LOOPS, "agent loop", name)


def find_loop(name: str) -> Callable[[LoopContext], AgentLoop]:
    """Return what builds the loop `name`; ConfigError where there is none."""
    key = "rollout.agent.default_agent_loop"
    if name in LOOPS:
        return LOOPS[name]
    if "." not in name:
        raise ConfigError(
            f"{key} is {name!r}, expected one of {', '.join(LOOPS)}, file.py:Class or "
            "package.module.Class"
        )
    found = import_object(key, name)
    if inspect.isclass(found) and issubclass(found, AgentLoop):
        return found
    if callable(getattr(found, "reset", None)) and callable(getattr(found, "step", None)):
        return lambda context: EnvironmentLoop(context, found)
    raise ConfigError(
        f"{key}: {name!r} is neither a subclass of AgentLoop nor a class with reset and step"
    )


@register_agent_loop("single_turn_agent")
class SingleTurn(AgentLoop):
    """One turn of the model."""

    async def run(self, trajectory: Trajectory) -> None:
        await trajectory.generate()


@register_agent_loop("tool_agent")
class ToolLoop(AgentLoop):
    """The model calls tools and reads the results, until it answers without a call.

    Ends at `max_assistant_turns`, at `max_user_turns` (rounds of tool results) and where a turn is
    cut. Of the calls of a turn the first `max_parallel_calls` are run.
    """

    async def run(self, trajectory: Trajectory) -> None:
        config, num_turns = self.context.config, 0
        while turn := await trajectory.generate():
            num_turns += 1
            calls = self.context.parse(turn.text)[: config.max_parallel_calls]
            turn.set_calls(calls)
            if not calls or turn.finish_reason == "length":
                return
            if num_turns == config.max_assistant_turns or num_turns - 1 == config.max_user_turns:
                return
            results = await trajectory.run_tools(calls)
            turn.reward += sum(result.reward for result in results)


class EnvironmentLoop(AgentLoop):
    """Alternate turns of the model with observations, in the role of the user.

        class Environment:
            def reset(self, sample): ...  # first observation: text, a chat, or None (no message)
            def step(self, action): ...   # (observation, reward, done)

    Both may be async. There is one instance for each trajectory; `action` is the text of the
    model's turn. The reward belongs to this turn.

    Ends when the environment is done, and at `max_assistant_turns` or `max_user_turns`.
    """

    def __init__(self, context: LoopContext, environment: type) -> None:
        super().__init__(context)
        self._environment = environment()

    async def run(self, trajectory: Trajectory) -> None:
        config, num_turns = self.context.config, 0
        first = await self._call("reset", trajectory.sample)
        if isinstance(first, str):
            trajectory.messages.append({"role": "user", "content": first})
        elif first is not None:
            trajectory.messages[:] = [dict(message) for message in first]
        while turn := await trajectory.generate():
            num_turns += 1
            observation, turn.reward, done = await self._step(turn.text)
            if done or turn.finish_reason == "length":
                return
            if num_turns == config.max_assistant_turns or num_turns - 1 == config.max_user_turns:
                return
            trajectory.messages.append({"role": "user", "content": observation})

    async def _step(self, action: str) -> tuple[str, float, bool]:
        result = await self._call("step", action)
        try:
            observation, reward, done = result
            return str(observation), float(reward), bool(done)
        except (TypeError, ValueError):
            raise AgentError(
                f"{self._name('step')} returned {result!r}, expected (observation, reward, done)"
            ) from None

    async def _call(self, method: str, *args: Any) -> Any:
        limit = self.context.config.tool_timeout_s
        try:
            return await call(getattr(self._environment, method), *args, timeout_s=limit)
        except TimeoutError:
            raise AgentError(
                f"{self._name(method)} gave no result within "
                f"rollout.multi_turn.tool_timeout_s = {limit:g} s"
            ) from None

    def _name(self, method: str) -> str:
        return f"environment {type(self._environment).__name__}.{method}"
