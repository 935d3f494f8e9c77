"""`final/`: the trained model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.model import on_device
from hybridengine.run.errors import ModelError
from hybridengine.train.checkpoint.pretrained import save_adapter, save_pretrained


def export_final(
    model: Any,
    tokenizer: Any,
    run_dir: Path,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    has_adapter: bool,
    saved: Path | None,
) -> None:
    """Write the model to `run_dir`/final, and its adapter to final_adapter. Collective.

    dtype: of the weights.
    saved: the last checkpoint, if there is one.

    Raises ModelError if the export fails; the message names the checkpoint.
    """
    final = run_dir / "final"
    try:
        with on_device(model):
            save_pretrained(model, tokenizer, final, dtype, group=group)
            if has_adapter:
                save_adapter(model, tokenizer, run_dir / "final_adapter", group)
    except ModelError as error:
        if saved is None:
            raise
        raise ModelError(
            f"{error}; nothing is lost: `hybridengine export {saved} --out {final}` exports the "
            "last checkpoint"
        ) from error
