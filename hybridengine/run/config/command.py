"""The shortest command line that means a configuration."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from omegaconf import OmegaConf

from hybridengine.run.config.common import JobConfig
from hybridengine.run.config.loading import REQUIRED, keys_of
from hybridengine.run.errors import ConfigNote

__all__ = ["overrides_of"]


def overrides_of(config: JobConfig, load: Callable[[list[str]], JobConfig]) -> list[str]:
    """Return the `key=value` that `config` is loaded from: required keys and what is no default.

    load: reads the configuration that a list of overrides means.
    """
    values = {key: attrgetter(key)(config) for key, _ in keys_of(type(config))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigNote)
        default = load([f"{key}={_as_text(values[key])}" for key in REQUIRED])
    return [
        f"{key}={_as_text(value)}"
        for key, value in values.items()
        if value != attrgetter(key)(default) or key in REQUIRED
    ]


def _as_text(value: Any) -> str:
    """Return the value as it is written behind `key=`: a plain text if it is read back as such."""
    if isinstance(value, str) and "\n" not in value:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"key={value}"]))
        if read == {"key": value}:
            return value
    return json.dumps(value)
