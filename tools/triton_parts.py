"""What the part `rows` of a GPU report launches, for tools/triton_cache.py.

Ours of the same benchmarks, each called once. Sizes that no compiled form depends on are small:
tokens, and the hidden width of an output head. `micro_batch` launches what `linear` does.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import attention, decode_linear, linear, linear_recurrence, sampling
from benchmarks._bench import OURS, Bench
from benchmarks._results import Results

SMALL: tuple[tuple[Any, str, Any], ...] = (
    (attention, "PLAIN", ((320, 160),)),
    (decode_linear, "COPIES_BYTES", 1),
    (linear, "HEADS", tuple((64, 64, vocab) for *_, vocab in linear.HEADS)),
    (linear, "shapes", lambda _: [(64, 64, 128_256, torch.bfloat16)]),
    (linear, "largest_errors", lambda *_: {}),
    (linear_recurrence, "UNIFORM", (16,) * 8),
    (linear_recurrence, "LONG_TAIL", (12, 10, 8, 7, 6, 5, 5, 4, 4, 3)),
    (linear_recurrence, "GROUP", (16,) * 9),
)


class Once(Bench):
    """Call ours in place of timing it."""

    impl = OURS

    def __init__(self, device: torch.device) -> None:
        self.device, self.quick, self.gpu, self.results = device, False, None, Results()

    def compare(
        self,
        op: str,
        pass_: str,
        shape: str,
        dtype: torch.dtype,
        implementations: Mapping[str, Callable[[], object]],
        **_: Any,
    ) -> None:
        for name, call in implementations.items():
            if name.startswith(OURS):
                call()

    def leave_out(self, *_: Any, **__: Any) -> None:
        pass


def calls(device: torch.device) -> Iterator[str]:
    """Run each benchmark that launches Triton kernels; yield its name. A failure is printed."""
    bench = Once(device)
    with ExitStack() as small:
        for module, name, value in SMALL:
            small.enter_context(patch.object(module, name, value))
        for module in (attention, linear, sampling, decode_linear, linear_recurrence):
            try:
                module.run(bench)
            except Exception:  # the others are compiled
                print(f"triton-parts: {module.__name__}: {traceback.format_exc()}")
            yield module.__name__
