"""Waits for what other processes write to a store."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hybridengine.remote.messages import wait_until


def test_a_wait_has_a_limit() -> None:
    assert wait_until(lambda: 3, 0.0, "nothing") == 3
    with pytest.raises(dist.DistError, match="waiting for work"):
        wait_until(lambda: None, 0.0, "work")
