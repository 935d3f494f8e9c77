"""What users run today, as functions of (logits, token_ids) -> (log_probs, entropy).

A peer that is not installed is left out, with one line saying so.
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


def verl() -> LogProbs:
    from benchmarks._verl import torch_functional as functions

    return lambda logits, ids: (
        functions.logprobs_from_logits(logits, ids, inplace_backward=False),
        functions.entropy_from_logits(logits),
    )


def trl() -> LogProbs:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    return lambda logits, ids: (selective_log_softmax(logits, ids), entropy_from_logits(logits))


def from_logits() -> dict[str, LogProbs]:
    """Every peer for the log-probs of given logits."""
    return {"eager": eager, "compile": torch.compile(eager), **installed(trl=trl, verl=verl)}


def installed(**makers: Callable) -> dict[str, Callable]:
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except ImportError as error:
            print(f"# peer {name} left out: {error}")
    return found
