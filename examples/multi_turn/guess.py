"""A text environment: guess a number, with the answers `higher` and `lower`.

The row holds the number in extra_info.interaction_kwargs. Rewards belong to turns: 1 for the
number, 0.1 for a guess that the answers so far leave open.
"""

from __future__ import annotations

import re
from typing import Any

LARGEST = 64


class GuessNumber:
    """One game; `reset` and `step` are called by the agent loop."""

    def reset(self, sample: Any) -> None:
        """Take the number of the row; the row's prompt explains the game."""
        self.number = int(sample.extra_info["interaction_kwargs"]["number"])
        self.low, self.high = 1, LARGEST

    def step(self, action: str) -> tuple[str, float, bool]:
        """Answer a guess: (observation, reward, done)."""
        found = re.search(r"\d+", action)
        if found is None:
            return "write a number", 0.0, False
        guess = int(found[0])
        if guess == self.number:
            return "correct", 1.0, True
        is_open = self.low <= guess <= self.high
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return "higher" if guess < self.number else "lower", 0.1 * is_open, False
