"""Call the tools of one trajectory. Whatever a tool does, the model gets a text.

`call` runs a user's function or coroutine function with a time-out, without blocking the engine.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from hybridengine.agents.parsers import ToolCall
from hybridengine.agents.tools import Tool
from hybridengine.model.attachments import Attachment
from hybridengine.run.config.rl import MultiTurnConfig
from hybridengine.run.errors import shorten
from hybridengine.vision.decoding import decode_image
from hybridengine.vision.rows import find_images

__all__ = ["ToolResult", "Toolbox", "call"]


@dataclass(frozen=True)
class ToolResult:
    """The answer of a tool call.

    text: what the model reads.
    images: that it reads before the text.
    reward: of the call, which its turn adds up.
    error: whether the call failed; `text` then says why.
    """

    text: str
    reward: float = 0.0
    error: bool = False
    images: Sequence[Attachment] = ()

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The content of its message: text, or parts where it has images."""
        if not self.images:
            return self.text
        parts = [{"type": "image", "image": image} for image in self.images]
        return [*parts, {"type": "text", "text": self.text}] if self.text else parts


@dataclass
class Toolbox:
    """The tools of one trajectory. It creates an instance of a tool at its first call.

    kwargs: `extra_info.tools_kwargs` of the row: by tool, create_kwargs and so on.
    slots: limits the calls of all trajectories that run at once.
    """

    tools: Mapping[str, Tool]
    kwargs: Mapping[str, Any]
    config: MultiTurnConfig
    slots: asyncio.Semaphore
    num_calls: int = 0
    num_errors: int = 0
    seconds: float = 0.0
    _instances: dict[str, Any] = field(default_factory=dict)

    async def run(self, wanted: ToolCall) -> ToolResult:
        """Run a call; a tool that is unknown, raises, hangs or returns no text gives an error."""
        started = time.monotonic()
        self.num_calls += 1
        try:
            result = await self._run(wanted)
        except TimeoutError:
            limit = self.config.tool_timeout_s
            result = self._error(f"tool {wanted.name!r} gave no result within {limit:g} s")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            result = self._error(f"tool {wanted.name!r} failed: {shorten(reason, 500)}")
        self.num_errors += result.error
        self.seconds += time.monotonic() - started
        return replace(result, text=self._shorten(result.text))

    async def _run(self, wanted: ToolCall) -> ToolResult:
        if wanted.fault:
            return self._error(wanted.fault)
        tool = self.tools.get(wanted.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return self._error(f"there is no tool {wanted.name!r}; tools: {known}")
        if tool.function is not None:
            return _result(wanted.name, await self._call(tool.function, **wanted.arguments))
        if tool.name not in self._instances:
            created = await self._call(
                tool.implementation.create, create_kwargs=self._options(tool, "create_kwargs")
            )
            self._instances[tool.name] = created[0] if isinstance(created, tuple) else created
        return _result(
            wanted.name,
            await self._call(
                tool.implementation.execute,
                self._instances[tool.name],
                wanted.arguments,
                **self._options(tool, "execute_kwargs"),
            ),
        )

    async def close(self) -> dict[str, float]:
        """Release all instances; return calc_reward of each tool that was called.

        One that fails is counted and left out, with a warning that says why.
        """
        rewards: dict[str, float] = {}
        for name, instance in self._instances.items():
            tool = self.tools[name]
            for method in ("calc_reward", "release"):
                options = self._options(tool, f"{method}_kwargs")
                try:
                    function = getattr(tool.implementation, method)
                    value = await self._call(function, instance, **options)
                    if method == "calc_reward":
                        rewards[name] = float(value or 0.0)
                except Exception as error:
                    self.num_errors += 1
                    reason = shorten(repr(error), 500)
                    warnings.warn(f"{method} of tool {name!r} failed: {reason}", stacklevel=2)
        self._instances.clear()
        return rewards

    async def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        async with self.slots:
            return await call(function, *args, timeout_s=self.config.tool_timeout_s, **kwargs)

    def _options(self, tool: Tool, name: str) -> dict[str, Any]:
        """Return the row's options of a method, without the keys that parquet filled with null."""
        given = (self.kwargs.get(tool.name) or {}).get(name) or {}
        return {key: value for key, value in given.items() if value is not None}

    def _error(self, text: str) -> ToolResult:
        return ToolResult(f"Error: {text}", error=True)

    def _shorten(self, text: str) -> str:
        """Cut a text above `max_tool_response_length` characters at the configured side."""
        limit, side = self.config.max_tool_response_length, self.config.tool_response_truncate_side
        if len(text) <= limit:
            return text
        if side == "left":
            return "(truncated)..." + text[-limit:]
        if side == "right":
            return text[:limit] + "...(truncated)"
        half = max(1, limit // 2)
        return text[:half] + "...(truncated)..." + text[-half:]


def _result(name: str, value: Any) -> ToolResult:
    """Convert what a tool returned: a response, or (response, reward, metrics) as in verl.

    A response is text, a JSON value, an image of Pillow, a list of parts as chats have them, or
    verl's ToolResponse.

    Raises TypeError for a response that is none of these, and DataError for an image that cannot
    be read.
    """
    reward = 0.0
    if isinstance(value, tuple) and 1 <= len(value) <= 3:
        value, reward = value[0], float((value[1] if len(value) > 1 else None) or 0.0)
    if _is_pillow(value):
        value = [{"type": "image", "image": value}]
    elif hasattr(value, "text"):  # verl's ToolResponse
        if getattr(value, "video", None):
            raise TypeError("it returned a video, and only text and images are supported")
        given, text = getattr(value, "image", None) or [], value.text or ""
        shown = [
            {"type": "image", "image": x} for x in (given if isinstance(given, list) else [given])
        ]
        value = [*shown, {"type": "text", "text": text}] if shown else text
    images: Sequence[Attachment] = ()
    if isinstance(value, list) and any(_is_image(part) for part in value):
        parts = [
            {**part, "image": _png(part["image"])} if _is_pillow(part.get("image")) else part
            for part in value
        ]
        content, images = find_images(f"tool {name!r}", parts, Path.cwd())
        value = "".join(part.get("text", "") for part in content)
    for image in images:
        decode_image(image)  # an error of this call, not of the run
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            raise TypeError(f"it returned {type(value).__name__}, expected text") from None
    # Half of a surrogate pair, which no tokenizer takes.
    return ToolResult(value.encode("utf-8", "replace").decode(), reward, images=images)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _is_pillow(value: Any) -> bool:
    return hasattr(value, "mode") and hasattr(value, "save")


def _png(image: Any) -> bytes:
    content = BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


async def call(function: Callable[..., Any], *args: Any, timeout_s: float, **kwargs: Any) -> Any:
    """Return `await function(...)`, or `function(...)` of a function that is not async.

    The latter runs in a thread of its own. A call that takes longer than `timeout_s` is left alone:
    a coroutine is cancelled, a thread runs on and its result is dropped.

    Raises what the function raises, RuntimeError for sys.exit in it, TimeoutError.
    """
    if inspect.iscoroutinefunction(function):
        task = asyncio.ensure_future(_guard(function(*args, **kwargs)))
    else:
        task = asyncio.ensure_future(_in_thread(lambda: function(*args, **kwargs)))
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    if not done:
        task.cancel()  # and not awaited: a coroutine may ignore it
        raise TimeoutError(f"no result within {timeout_s:g} s")
    result = task.result()
    if inspect.isawaitable(result):  # of a plain function that returns a coroutine
        return await call(_guard, result, timeout_s=timeout_s)
    return result


async def _guard(coroutine: Any) -> Any:
    try:
        return await coroutine
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from None


async def _in_thread(function: Callable[[], Any]) -> Any:
    # Not a pool: its threads would be used up by calls that never return, and joined at exit.
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def resolve(outcome: tuple[Any, BaseException | None]) -> None:
        if not finished.done():
            finished.set_result(outcome)

    def run() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = (function(), None)
        except BaseException as error:
            outcome = (None, error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(resolve, outcome)

    threading.Thread(target=run, daemon=True, name="tool").start()
    result, error = await finished
    if isinstance(error, Exception):
        raise error
    if error is not None:
        raise RuntimeError(f"it ended with {type(error).__name__}: {error}")
    return result
