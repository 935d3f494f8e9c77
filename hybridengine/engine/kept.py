"""The vocabulary entries that top-k and top-p sampling kept, recorded for each token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

__all__ = ["pack_kept"]


def pack_kept(
    token_ids: Sequence[int], kept: Sequence[Sequence[int]], vocab_size: int
) -> dict[str, array[int]]:
    """Return the columns num_kept and kept_ids of a completion.

    kept: the ids that each token was sampled from; none where nothing was cut. Raises RuntimeError
    where they are not those of `token_ids`.

    Examples:
        >>> pack_kept([7, 2], [[3, 7], [0, 1, 2]], vocab_size=3)
        {'num_kept': array('i', [2, 0]), 'kept_ids': array('i', [3, 7])}
    """
    if len(kept) != len(token_ids):
        raise RuntimeError(
            f"the engine recorded the kept vocabulary entries of {len(kept)} tokens for a "
            f"completion of {len(token_ids)}; set algorithm.sampling_replay=off"
        )
    for position, (token, ids) in enumerate(zip(token_ids, kept, strict=True)):
        if len(ids) and token not in ids:
            raise RuntimeError(
                f"token {position} of a completion is {token}, which is not among the {len(ids)} "
                "vocabulary entries that the engine recorded for it; set "
                "algorithm.sampling_replay=off"
            )
    truncated = [ids if len(ids) < vocab_size else () for ids in kept]
    return {
        "num_kept": array("i", map(len, truncated)),
        "kept_ids": array("i", chain.from_iterable(truncated)),
    }
