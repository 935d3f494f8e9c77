"""A logits processor of a vLLM server that makes its decode steps slow, while a file exists."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

STEP_S = 0.4  # a response of 450 tokens takes three minutes


class SlowDecoding(LogitsProcessor):
    def __init__(self, *args: object) -> None:
        self._file = Path(os.environ["SLOW_DECODING_FILE"])

    def apply(self, logits: Tensor) -> Tensor:
        if self._file.exists():
            time.sleep(STEP_S)
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Do nothing."""
