"""The process group of one process alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from hybridengine.api.session import script_session

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize("given", [None, "lo0"])
def test_it_listens_on_the_loopback_interface(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(NAMES[1], given)
    with script_session(tmp_path) as session:
        assert session.world_size == 1 and dist.is_initialized()
        assert [os.environ[name] for name in NAMES] == ["lo", given or "lo"]
    assert [os.environ.get(name) for name in NAMES] == [None, given]
    assert not dist.is_initialized()
