"""Tensor-parallel groups: strided, inside nodes where they fit."""

from __future__ import annotations

import pytest

from hybridengine.sync.shards import tp_groups


def test_tp_groups_are_strided_and_checked() -> None:
    assert tp_groups(4, 2) == [[0, 2], [1, 3]]
    assert tp_groups(8, 4) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    with pytest.raises(ValueError, match="tensor_model_parallel_size: got 3, expected a divisor"):
        tp_groups(4, 3)


def test_groups_inside_nodes() -> None:
    assert tp_groups(8, 2, 4) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert tp_groups(8, 8, 4) == [list(range(8))], "a group larger than a node has to cross"
