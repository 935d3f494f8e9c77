"""The releases of NeMo RL that our functions were compared with."""

from __future__ import annotations

from functools import partial

from ._patching import Patches

__all__ = ["NemoPatches"]

NemoPatches = partial(Patches, "nemo_rl", ">=0.6,<0.8", distribution="nemo-rl")
