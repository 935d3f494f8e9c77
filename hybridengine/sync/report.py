"""What a weight sync moved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SyncReport:
    """What one sync moved on this rank: bytes from and to other ranks, including adapters.

    milliseconds: time from the call until the devices of all ranks had finished.
    delta: whether only what changed was moved.
    changed: the share of the model's elements whose bits changed, over all ranks; None where it was
      not determined.
    dense_bytes: received and sent by a dense sync.
    """

    version: int
    bytes_received: int
    bytes_sent: int
    milliseconds: float
    delta: bool = False
    changed: float | None = None
    dense_bytes: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of this sync, `reshard/...`; `changed` and `bytes_vs_dense` where known."""
        known = {} if self.changed is None else {"reshard/changed": self.changed}
        if self.dense_bytes:
            moved = self.bytes_received + self.bytes_sent
            known["reshard/bytes_vs_dense"] = moved / self.dense_bytes
        return known | {
            "reshard/bytes_received": self.bytes_received,
            "reshard/bytes_sent": self.bytes_sent,
            "reshard/ms": self.milliseconds,
            "reshard/delta": int(self.delta),
        }
