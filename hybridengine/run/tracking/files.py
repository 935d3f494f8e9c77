"""summary.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridengine.run.storage import atomic_file


def steps_of_summary(path: Path) -> int | None:
    """Return how many steps the run of a summary had taken; None if there is no such file."""
    try:
        steps = json.loads(path.read_bytes())["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary` as JSON; non-finite numbers become null."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in summary.items()
    }
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(clean, indent=2, allow_nan=False) + "\n")
