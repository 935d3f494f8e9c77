"""The soft-cap of logits by itself: a value has the bits that it has in `token_log_probs`."""

from __future__ import annotations

from torch import Tensor

from .._backend import native


def soft_cap_(logits: Tensor, softcap: float | None) -> Tensor:
    """Replace logits by softcap * tanh(logits / softcap) in place, without a gradient.

    On a CPU `token_log_probs` of the result is that of the logits with `softcap`, bit for bit.

    logits: [T, V], float32. softcap: above 0; None: they stay as they are.

    Returns the logits.
    """
    if softcap is None:
        return logits
    extension = native()
    if extension is not None and logits.device.type == "cpu":
        extension.soft_cap_(logits, softcap)
    else:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits
