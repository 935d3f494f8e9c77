"""Functions of the user that are called at the events of a run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.run.errors import CallbackError

MetricsCallback = Callable[[int, Mapping[str, float]], object]
SaveCallback = Callable[[int, Path], object]


@dataclass(frozen=True)
class Callbacks:
    """Called on every rank, with the step and what the event is about.

    on_step_end: with all metrics of the step.
    on_validation: with those of the validation.
    on_save: with the folder of the checkpoint, which is complete; a run waits for it.
    """

    on_step_end: MetricsCallback | None = None
    on_validation: MetricsCallback | None = None
    on_save: SaveCallback | None = None

    def call(self, event: str, step: int, argument: Any) -> None:
        """Call the function of `event`, if any. Raises CallbackError, from the function's error."""
        function = getattr(self, event)
        if function is None:
            return
        try:
            function(step, argument)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise CallbackError(
                f"the callback {event} raised {type(error).__name__} after step {step}: {error} "
                f"(at {frame.filename}:{frame.lineno})"
            ) from error
