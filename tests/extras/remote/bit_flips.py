"""A plugin of a vLLM server by which a test changes one bit of a worker's weights."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["allow_bit_flips"]


def allow_bit_flips() -> None:
    """Give workers a method, which `/collective_rpc` calls."""
    from vllm.v1.worker.gpu_worker import Worker

    def flip_bit(self: Any) -> None:
        weight = next(iter(self.model_runner.get_model().parameters()))
        weight.data.view(torch.int32).view(-1)[5] ^= 1

    Worker.flip_bit = flip_bit  # type: ignore[attr-defined]
