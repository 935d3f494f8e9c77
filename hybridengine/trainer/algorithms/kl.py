"""The coefficient of the KL penalty in the reward, fixed or adaptive."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["KLController"]

_MAX_ERROR = 0.2


@dataclass
class KLController:
    """coef is what a token's KL is multiplied by; its only state.

    Adaptive (Ziegler et al. 2019, arXiv 1909.08593, section 2.2): the coefficient moves in
    proportion to the relative distance from the target, which is clipped to 20%, and acts fully
    over `horizon` responses.

    Raises:
        ValueError: a coef that is not finite; adaptive, a target or horizon that is not positive.
    """

    coef: float
    target: float = 0.1
    horizon: float = 10_000.0
    adaptive: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.coef):
            raise ValueError(f"KLController: coef is {self.coef}; expected a finite number")
        for name, value in (("target", self.target), ("horizon", self.horizon)):
            if self.adaptive and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"KLController: {name} is {value}; expected a positive number")

    def update(self, kl: float, responses: int) -> None:
        """Adapt coef to a batch; one without a finite KL changes nothing.

        kl: mean over `responses` responses of their mean KL per token, in nats.
        """
        if self.adaptive and math.isfinite(kl):
            error = min(max(kl / self.target - 1, -_MAX_ERROR), _MAX_ERROR)
            self.coef *= 1 + error * responses / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = state["coef"]
