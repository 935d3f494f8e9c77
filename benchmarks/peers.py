"""What users run today, as functions of (logits, token_ids) -> (log_probs, entropy).

A peer that is not installed is left out, with one line saying so. `verl_algorithm` is verl's
CPU path (row-wise log-sum-exp, softmax entropy) written again, since verl itself does not import
without ray.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

# A backward that is timed alone runs many times over one forward.
torch._functorch.config.donated_buffer = False

LogProbs = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def exact(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """What errors are measured against."""
    log_p = F.log_softmax(logits.double(), dim=-1)
    return log_p.gather(1, token_ids[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def eager(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    log_p = F.log_softmax(logits.float(), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, token_ids[:, None]).squeeze(1), entropy


def verl_algorithm(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    if logits.dtype in (torch.float32, torch.float64):
        lse = torch.stack([row.logsumexp(-1) for row in logits])
        log_probs = logits.gather(1, token_ids[:, None]).squeeze(1) - lse
    else:
        rows = [
            F.log_softmax(row, dim=-1).gather(0, label[None])
            for row, label in zip(logits, token_ids, strict=True)
        ]
        log_probs = torch.cat(rows)
    entropy = torch.logsumexp(logits, dim=-1) - (torch.softmax(logits, dim=-1) * logits).sum(-1)
    return log_probs, entropy


def trl() -> LogProbs:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    return lambda logits, ids: (selective_log_softmax(logits, ids), entropy_from_logits(logits))


def from_logits() -> dict[str, LogProbs]:
    """Every peer for the log-probs of given logits."""
    peers = {"eager": eager, "compile": torch.compile(eager), "verl_algorithm": verl_algorithm}
    try:
        peers["trl"] = trl()
    except ImportError as error:
        print(f"# peer trl left out: {error}")
    return peers
