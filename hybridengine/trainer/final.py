"""The last checkpoint of a run and `final/`, the trained model as a Hugging Face folder.

The checkpoint is written first, so that a failed export loses no training. A run that asked for no
checkpoints removes it after the export. A run whose last updates were all skipped has failed: it
keeps its checkpoint and exports no model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridengine.checkpoint import CheckpointError, find_checkpoints
from hybridengine.checkpoint.pretrained import save_adapter, save_pretrained
from hybridengine.errors import ModelError
from hybridengine.model import on_device
from hybridengine.runtime.all_ranks import broadcast_value
from hybridengine.storage import remove_folder

if TYPE_CHECKING:
    from hybridengine.trainer.base import Trainer


def write_final(run: Trainer[Any]) -> None:
    """Save the last checkpoint, then export the model; collective.

    Raises:
        ModelError: the last updates were all skipped, or the export failed; the message names the
            checkpoint.
        CheckpointError: the model is exported, but a checkpoint that was asked for failed.
    """
    saved: Path | None = None
    failure = run.updates.failure(run.optimizers)
    wants_checkpoints = run.config.trainer.save_freq > 0
    is_first = broadcast_value(not find_checkpoints(run.dir), bool)
    try:
        saved = _save_last(run)
    except CheckpointError as error:
        if failure is not None:
            raise ModelError(f"{failure}; {error}") from error
        run.report.print(f"warning: {error}; the model is exported without a checkpoint")
        _export(run, saved)
        if wants_checkpoints:
            raise
    else:
        if failure is not None:
            raise ModelError(
                f"{failure}; the state is in {saved}, final/ was not written: `hybridengine export "
                f"{saved} --out {run.dir / 'final'}` exports these weights"
            )
        _export(run, saved)
        if is_first and not wants_checkpoints and run.session.is_main:
            remove_folder(saved)


def _save_last(run: Trainer[Any]) -> Path:
    """Bring the state after the last step to the disk; return its checkpoint."""
    saved = run.wait_for_save(run.steps_done)
    if broadcast_value(saved.is_dir(), bool):
        return saved
    run.start_save(run.steps_done, None)
    return run.wait_for_save(run.steps_done)


def _export(run: Trainer[Any], saved: Path | None) -> None:
    final, group = run.dir / "final", run.checkpoints.group
    try:
        with run.clock.inside("export"), run.session.writing("export"), on_device(run.model):
            save_pretrained(run.model, run.tokenizer, final, run.save_dtype, group=group)
            if run.config.model.lora_rank:
                save_adapter(run.model, run.dir / "final_adapter", group)
    except ModelError as error:
        if saved is None:
            raise
        raise ModelError(
            f"{error}; nothing is lost: `hybridengine export {saved} --out {final}` exports the "
            "last checkpoint"
        ) from error
