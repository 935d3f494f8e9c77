"""Random numbers of each request of its own, from `SamplingParams.seed`.

A request without a seed draws one from NumPy's global state in vLLM's second model runner, in
which the ranks of a replica may differ. With seeds a sample depends on its request alone: neither
on other code that draws numbers, nor on what else is in the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

__all__ = ["request_generators", "seeded"]


def seeded(sampling: Any, seeds: Sequence[int]) -> list[Any]:
    """Return a copy of `SamplingParams` for each seed. vLLM adds a sample's index to its seed."""
    copies = [copy.copy(sampling) for _ in seeds]
    for params, seed in zip(copies, seeds, strict=True):
        params.seed = seed
    return copies


def request_generators() -> AbstractContextManager:
    """While open, vLLM's first model runner can make generators for requests on a CPU."""
    if torch.cuda.is_available():
        return nullcontext()
    return patch.object(torch, "Generator", _CpuGenerator)


class _CpuGenerator(torch.Generator):
    """A generator with what vLLM calls to take back a draw.

    It takes back the number that it drew while the prompt was still incomplete. Generators of a CPU
    have no offset; here the first number can be taken back. After a preemption, when others were
    drawn before, the number stays used.
    """

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        once = torch._C.Generator().manual_seed(self.initial_seed())
        torch.randint(0, 2**31, (1,), generator=once)
        if torch.equal(once.get_state(), self.get_state()):
            self.manual_seed(self.initial_seed())
        return self
