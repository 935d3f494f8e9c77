"""What a run continues: an earlier part of it, which may have been finished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hybridengine.run.all_ranks import broadcast_value
from hybridengine.run.config import JobConfig
from hybridengine.run.tracking.files import steps_of_summary
from hybridengine.train.checkpoint import SavedCheckpoint, changed_settings


def was_finished(
    config: JobConfig, resumed: SavedCheckpoint | None, steps: int, is_main: bool
) -> bool:
    """Return, and print, whether an earlier run in the run's folder took the last step. Collective.

    resumed: the checkpoint of the earlier part, if there is one.
    steps: of the whole run.
    is_main: whether this rank prints.
    """
    run_dir, first = Path(config.trainer.default_local_dir), resumed.step if resumed else 0
    is_own = resumed is not None and resumed.path.resolve().parent == run_dir.resolve()
    of_summary = steps_of_summary(run_dir / "summary.json")  # an earlier part may have ended
    complete = (run_dir / "final").is_dir() and of_summary == first
    finished = broadcast_value(is_own and complete and first >= steps, bool)
    if finished and is_main:
        print(
            f"nothing was trained: the run in {run_dir} finished its {first} steps "
            "before; raise trainer.total_training_steps (or total_epochs) to train longer, or "
            "start anew with trainer.resume_mode=disable or another trainer.default_local_dir"
        )
        assert resumed is not None
        for change in changed_settings(resumed, config):
            print(f"  changed since, without effect: {change}")
    return finished


def print_resumed(
    write: Callable[[str], None], resumed: SavedCheckpoint, config: JobConfig, is_main: bool
) -> None:
    """Print from where the run resumes, and the settings that have changed since."""
    write(f"resumed after step {resumed.step} from {resumed.path}")
    if is_main:
        for change in changed_settings(resumed, config):
            write(f"  changed since: {change}")
