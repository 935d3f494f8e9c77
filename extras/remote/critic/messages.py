"""Messages between the ranks of the policy and those of the critic.

A step, from the side of the policy's ranks:

    begin    → numbers of all responses, prompts, tokens: each to the ranks that need them
    values   ← a value per response token
    update   → returns and masks; then both sides train at the same time
    finish   ← metrics of the critic's update

Tokens and what is computed of them go from rank to rank by `RowExchange`; no rank has those of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from torch import Tensor

from hybridengine.model import SkippedUpdate
from hybridengine.run.config import RLConfig
from hybridengine.train.exchange import RowLocations
from hybridengine.train.outcomes import Outcomes
from hybridengine.vision import EncodedImage

COLUMNS = ("token_ids", "log_probs", "sampled", "context_ids")  # what a critic's batch needs


class Setup(Struct):
    """What the critic is built from. num_updates: its optimizer steps in the whole run."""

    config: RLConfig
    num_updates: int


class Ready(Struct):
    """The critic is built."""

    optimizer_state: Mapping[str, Any]


class TrainStep(Struct, tag=True):
    """A step begins.

    prompts: the token ids of each group.
    images: of the prompt of each group.
    image_sizes: see `Rollouts.image_sizes`.
    actor: which of the policy's ranks hold which responses.
    """

    step: int
    outcomes: Outcomes
    prompts: Sequence[Sequence[int]]
    images: Sequence[Sequence[EncodedImage]]
    image_sizes: Tensor
    actor: RowLocations


class SaveTensors(Struct, tag=True):
    """Write the critic's tensors into this folder of a checkpoint."""

    folder: Path


class LoadTensors(Struct, tag=True):
    """Load the critic's tensors from this folder of a checkpoint."""

    folder: Path
    optimizer_state: Mapping[str, Any]


class End(Struct, tag=True):
    how: Literal["finished", "stopped"]


Command = TrainStep | SaveTensors | LoadTensors | End


class StepReport(Struct):
    """What the critic reports after its update.

    seconds: by phase, without waiting.
    skipped: updates of this step.
    num_bytes: of its tensors in a checkpoint.
    signal: number of a stop signal to its first rank.
    """

    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    skipped: Sequence[SkippedUpdate]
    optimizer_state: Mapping[str, Any]
    num_bytes: int
    signal: int


def saved_key(folder: Path) -> str:
    """Return the key of the link's store under which the critic announces a checkpoint's files."""
    return f"critic_saved/{folder.name}"
