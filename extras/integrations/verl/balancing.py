"""verl's partitions of sequences: `verl.utils.seqlen_balancing`.

`rearrange_micro_batches`, `prepare_dynamic_batch` and `get_group_balanced_partitions` stay verl's:
they call these.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridengine.kernels import balance

__all__ = ["get_seqlen_balanced_partitions", "karmarkar_karp"]


def karmarkar_karp(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Split sequences into k_partitions of nearly equal sums; lists of ascending positions.

    equal_size: every partition has as many sequences; their number is a multiple of k_partitions.
    """
    if equal_size:
        assert len(seqlen_list) % k_partitions == 0, f"{len(seqlen_list)} % {k_partitions} != 0"
    return balance(seqlen_list, k_partitions, equal_count=equal_size)


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """`karmarkar_karp` of at least k_partitions sequences, so that no partition is empty."""
    assert len(seqlen_list) >= k_partitions, (
        f"number of items:[{len(seqlen_list)}] < k_partitions:[{k_partitions}]"
    )
    return karmarkar_karp(seqlen_list, k_partitions, equal_size)
