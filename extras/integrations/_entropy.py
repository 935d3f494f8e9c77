"""The entropy alone, of hosts that compute it apart from the log-probs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.kernels import token_log_probs


def entropy_of_logits(logits: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Compute the entropy [...] of logits [..., V], float32; differentiable.

    group: its ranks hold slices of the vocabulary.
    """
    first = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return token_log_probs(logits, first, group=group)[1]
