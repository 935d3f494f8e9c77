"""Environments with `reset` and `step` as agent loops.

    class Environment:
        def reset(self, sample): ...      # first observation: text, a chat, or None (no message)
        def step(self, action): ...       # (observation, reward, done)

Both may be async. There is one instance for each trajectory; `action` is the text of the model's
turn. The reward belongs to this turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridengine.agent.calls import call
from hybridengine.agent.loops import AgentLoop, LoopContext
from hybridengine.agent.trajectory import AgentError, Trajectory

__all__ = ["environment_loop"]


def environment_loop(environment: type) -> Callable[[LoopContext], AgentLoop]:
    """Return what builds a loop that steps `environment`."""
    return lambda context: _EnvironmentLoop(context, environment)


class _EnvironmentLoop(AgentLoop):
    """Alternate turns of the model with observations, in the role of the user.

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
