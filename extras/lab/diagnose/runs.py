"""The metrics and the settings that a run has left in its folder."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridengine.run.errors import ConfigError

__all__ = ["LoggedRun"]

_OF_ONE_RUN = ("seed", "trainer.default_local_dir", "trainer.rollout_data_dir")


@dataclass(frozen=True)
class LoggedRun:
    """A run's folder with metrics.jsonl, and config.yaml where it is there."""

    folder: Path

    @cached_property
    def rows(self) -> list[dict[str, float]]:
        """The rows of metrics.jsonl, those of one step joined; without values that are null."""
        file = self.folder / "metrics.jsonl"
        if not file.is_file():
            raise ConfigError(
                f"{file} does not exist; give the folder of a run whose trainer.logger has jsonl"
            )
        steps = dict[int, dict[str, float]]()
        for line in file.read_text().splitlines():
            try:
                row = json.loads(line)
                values = {name: x for name, x in row.items() if x is not None}
                steps.setdefault(row["step"], {}).update(values)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # a line that a crash has left incomplete
        if not steps:
            raise ConfigError(f"{file} has no metrics: no step of the run is finished")
        return [steps[step] for step in sorted(steps)]

    def series(self, metric: str) -> dict[int, float]:
        """Return the finite values of a metric by step."""
        found = ((int(row["step"]), row.get(metric, math.nan)) for row in self.rows)
        return {step: value for step, value in found if math.isfinite(value)}

    @cached_property
    def _all_settings(self) -> dict[str, Any]:
        file = self.folder / "config.yaml"
        if not file.is_file():
            return {"folder": str(self.folder)}
        from omegaconf import OmegaConf

        return _flat(OmegaConf.to_container(OmegaConf.load(file)))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by their dotted keys, those of one run, such as its seed, left out."""
        return {k: value for k, value in self._all_settings.items() if k not in _OF_ONE_RUN}

    @property
    def rollouts(self) -> Path:
        """The folder of its rollout files."""
        return Path(self._all_settings.get("trainer.rollout_data_dir") or self.folder / "rollouts")

    @property
    def name(self) -> str:
        return str(self.settings.get("trainer.experiment_name") or self.folder.name)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    parts = (_flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in tree.items())
    return {key: value for part in parts for key, value in part.items()}
