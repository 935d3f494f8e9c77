"""Which rank trains on which rollouts, in which micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridengine.kernels import balance

__all__ = ["MicroBatch", "split_micro_batches"]


@dataclass(frozen=True)
class MicroBatch:
    """Indices of the sequences one rank runs together.

    counted is False for a stand-in: a rank with fewer sequences than others has micro-batches must
    still take part in the collectives of their forward and backward; its loss then weighs nothing.
    """

    indices: list[int]
    counted: bool = True


def split_micro_batches(
    lengths: Sequence[int], world_size: int, max_tokens: int
) -> list[list[MicroBatch]]:
    """For each rank the same number of micro-batches, each of at most max_tokens tokens.

    A sequence longer than max_tokens gets a micro-batch of its own. Deterministic in its arguments,
    so every rank computes the same split.
    """
    ranks = balance(lengths, world_size)
    count = max(1, *(-(-sum(lengths[i] for i in rank) // max_tokens) for rank in ranks))
    while True:
        parts = [_split(rank, lengths, count) for rank in ranks]
        crowded = any(
            len(part) > 1 and sum(lengths[i] for i in part) > max_tokens
            for rank in parts
            for part in rank
        )
        if not crowded:
            break
        count += 1
    shortest = min(range(len(lengths)), key=lambda i: lengths[i])
    return [
        [MicroBatch(part) if part else MicroBatch([shortest], counted=False) for part in rank]
        for rank in parts
    ]


def _split(indices: list[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    bins = balance([lengths[i] for i in indices], count)
    return [[indices[k] for k in part] for part in bins]
