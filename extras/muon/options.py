"""The options of Muon, in `actor.optim.override_optimizer_config`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from hybridengine.run.errors import ModelError


@dataclass(frozen=True, config={"extra": "forbid"})
class Options:
    """Options of Muon beside the learning rate and weight decay, in `override_optimizer_config`.

    momentum: decay rate of the momentum.
    nesterov: orthogonalize the gradient moved towards the momentum, not the momentum.
    adjust_lr_fn: `match_rms_adamw`: a matrix's learning rate is lr * 0.2 * sqrt(max(rows, columns))
      (Moonshot), so that AdamW's learning rate suits; `original`: lr * sqrt(max(1, rows / columns))
      (Keller Jordan). A parameter's rows are its outputs, as in nn.Linear.
    ns_dtype: the dtype of Newton-Schulz and of what travels.
    split: regular expression, searched in parameter names → the rows of each matrix that the
      parameter consists of: those of a head in a projection, of gate and up in a fused weight.
    adamw: regular expressions, searched in parameter names; AdamW updates these, too.
    adamw_lr_ratio: AdamW's learning rate is this multiple of lr.
    """

    momentum: float = 0.95
    nesterov: bool = True
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    split: Mapping[str, int] = field(default_factory=dict)
    adamw: tuple[str, ...] = ()
    adamw_lr_ratio: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}, expected 0 <= momentum < 1")
        if not self.adamw_lr_ratio > 0:
            raise ValueError(f"adamw_lr_ratio is {self.adamw_lr_ratio}, expected a value above 0")
        if wrong := [rows for rows in self.split.values() if rows < 2]:
            raise ValueError(f"split: {wrong[0]} rows are no matrix, expected 2 or more")
        for option in ("split", "adamw"):
            for pattern in getattr(self, option):
                try:
                    re.compile(pattern)
                except re.error as error:
                    message = f"{option}: {pattern!r} is no regular expression: {error}"
                    raise ValueError(message) from None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Read the options; ModelError names one that is unknown or has a wrong value."""
        try:
            return TypeAdapter(cls).validate_python(dict(given))
        except ValidationError as error:
            reasons = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg']}".removeprefix(": ")
                for e in error.errors()
            )
            raise ModelError(
                f"optim.override_optimizer_config of muon: {reasons}; its keys are "
                f"{', '.join(cls.__dataclass_fields__)}"
            ) from None
