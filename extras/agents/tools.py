"""The tools of a run: plain functions, and classes with verl's create/execute/calc_reward/release.

A function with type hints and a docstring is a tool; its schema is transformers' `get_json_schema`:

    def calculator(expression: str) -> str:
        \"\"\"Evaluate an arithmetic expression.

        Args:
            expression: such as 12 * (3 + 4)
        \"\"\"

A class keeps state for one trajectory. It is declared in a YAML file of verl's schema:

    tools:
      - class_name: package.module.Class        # or file.py:Class
        config: {type: native}
        tool_schema: {type: function, function: {name: …, description: …, parameters: {…}}}

All methods and functions may be async.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridengine.run import import_file, import_object
from hybridengine.run.config.rl import MultiTurnConfig
from hybridengine.run.errors import ConfigError

__all__ = ["BaseTool", "FunctionTool", "Tool", "load_tools"]

Schema = dict[str, Any]  # a tool in OpenAI's form


class BaseTool:
    """A tool with state, one instance for each trajectory that calls it; verl's interface.

    config, tool_schema: of the tool config. Override what the tool needs.
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: Schema | None) -> None:
        self.config, self.tool_schema = config, tool_schema or self.get_openai_tool_schema()

    def get_openai_tool_schema(self) -> Schema:
        raise NotImplementedError("give tool_schema in the tool config, or override this method")

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Start an instance; return its id, or (id, response).

        kwargs: create_kwargs, of `extra_info.tools_kwargs.<name>` of the row.
        """
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Return a response (text or a JSON value), or (response, reward of this turn, metrics)."""
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return a number about the trajectory, for the reward function (rollout_reward_scores)."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the instance."""


class FunctionTool(BaseTool):
    """A function as a tool, without state."""

    def __init__(self, function: Any) -> None:
        self.function = getattr(function, "fn", function)  # as verl's decorator wraps it
        super().__init__({}, None)

    def get_openai_tool_schema(self) -> Schema:
        from transformers.utils import get_json_schema

        return get_json_schema(self.function)


class Tool:
    """A tool under its name, with its schema as templates take it."""

    def __init__(self, tool: Any) -> None:
        schema = tool.tool_schema
        if not isinstance(schema, Mapping):  # a pydantic model of verl's
            schema = schema.model_dump(exclude_unset=True, exclude_none=True)
        self.implementation, self.schema = tool, dict(schema)
        self.name = str(self.schema["function"]["name"])

    @property
    def function(self) -> Any:
        """The function of a tool without state, else None."""
        is_function = isinstance(self.implementation, FunctionTool)
        return self.implementation.function if is_function else None


def load_tools(config: MultiTurnConfig) -> dict[str, Tool]:
    """Load the tools of `tool_config_path` and `function_tool_path`, by name.

    Raises ConfigError for a file, class, function or schema that cannot be used, and where two
    tools have one name.
    """
    tools: dict[str, Tool] = {}
    loaded = [
        *(_load_classes(config.tool_config_path) if config.tool_config_path else ()),
        *(tool for path in config.function_tool_path for tool in _load_functions(path)),
    ]
    for tool in loaded:
        if tools.setdefault(tool.name, tool) is not tool:
            raise ConfigError(f"rollout.multi_turn: two tools have the name {tool.name!r}")
    return tools


def _load_functions(path: str) -> list[Tool]:
    key = "rollout.multi_turn.function_tool_path"
    file, _, name = path.rpartition(":")
    if not file or not file.endswith(".py"):
        file, name = path, ""
    if name:
        return [_build(key, path, FunctionTool, import_object(key, path))]
    if not Path(file).expanduser().is_file():
        raise ConfigError(f"{key}: the file {file!r} does not exist")
    module = import_file(Path(file).expanduser().resolve())
    functions = [
        value
        for attribute, value in vars(module).items()
        if not attribute.startswith("_") and _is_tool_of(module, value)
    ]
    if not functions:
        raise ConfigError(f"{key} {path!r} has no public function; give file.py:function")
    return [_build(key, path, FunctionTool, function) for function in functions]


def _is_tool_of(module: Any, value: Any) -> bool:
    function = getattr(value, "fn", value)
    return inspect.isfunction(function) and function.__module__ == module.__name__


def _load_classes(path: str) -> list[Tool]:
    import yaml

    key = "rollout.multi_turn.tool_config_path"
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{key} {path!r} cannot be read: {error}") from None
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, Sequence) or not all(isinstance(e, Mapping) for e in entries):
        raise ConfigError(f"{key} {path!r}: expected a list `tools` of objects with class_name")
    tools = []
    for entry in entries:
        config = dict(entry.get("config") or {})
        if config.get("type", "native") != "native":
            raise ConfigError(f"{key} {path!r}: type is {config['type']!r}, expected native")
        tool_class = import_object(key, str(entry.get("class_name")))
        schema = _as_verl(tool_class, entry.get("tool_schema"))
        tools.append(_build(key, path, tool_class, config=config, tool_schema=schema))
    return tools


def _as_verl(tool_class: Any, schema: Any) -> Any:
    """Return `schema` as subclasses of verl's own BaseTool take it."""
    bases = getattr(tool_class, "__mro__", ())
    if schema is None or not any(base.__module__.startswith("verl.") for base in bases):
        return schema
    from verl.tools.schemas import OpenAIFunctionToolSchema

    return OpenAIFunctionToolSchema.model_validate(schema)


def _build(key: str, path: str, make: Any, *args: Any, **kwargs: Any) -> Tool:
    try:
        return Tool(make(*args, **kwargs))
    except Exception as error:  # of the user's class, or of the schema of a function
        what = getattr(args[0] if args else make, "__name__", "?")
        raise ConfigError(
            f"{key} {path!r}: {what} is not a tool: {type(error).__name__}: {error}; a function "
            "needs a type hint and a line under Args: for each argument, a class a tool_schema "
            "with function.name"
        ) from None
