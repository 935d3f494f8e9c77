"""Muon over FSDP2 shards: every matrix is orthogonalized once, on one rank (`optimizer`).

Nothing here imports torch: options are checked before a run starts (`config_checks`).
"""

from __future__ import annotations

from typing import Any

__all__ = ["Muon"]


def __getattr__(name: str) -> Any:
    """Import the optimizer, and with it torch, when it is first used."""
    if name != "Muon":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hybridengine.muon.optimizer import Muon

    return Muon
