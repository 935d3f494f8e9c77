"""What users run today from hidden states: (hidden, weight, token_ids) -> (log_probs[, entropy]).

A peer that cannot run here is left out, with a row that says why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import peers

FromHidden = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
LIGER_SEQUENCES = 8  # Liger takes [B, L] sequences of equal length, and one advantage each


def eager(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, ...]:
    return peers.eager(F.linear(hidden, weight), token_ids)


def trl() -> FromHidden:
    """The function behind TRL's chunked log-probs; its tiles are torch operations on a CPU."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as size

    return lambda hidden, weight, ids: ChunkedLogProbFunction.apply(
        hidden, weight, None, ids, 1.0, size, None, 1.0, ("entropy",)
    )[:2]


def verl_fused() -> FromHidden:
    from benchmarks._verl import FusedLinearForPPO

    fused = FusedLinearForPPO()
    return lambda hidden, weight, ids: tuple(
        found[0] for found in fused(hidden[None], weight, ids[None])
    )


def cut_cross_entropy(impl: str) -> FromHidden:
    """No entropy. Its Triton kernels drop gradients below a threshold unless told not to."""
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, ids: (
        -function(hidden, weight, ids, impl=impl, reduction="none", filter_eps=None),
    )


def cut_cross_entropy_triton() -> FromHidden:
    if not torch.cuda.is_available():
        raise RuntimeError("its Triton kernels need a GPU")
    return cut_cross_entropy("cce")


def liger_grpo() -> Callable[..., Tensor]:
    """Liger's fused linear GRPO loss: the only peer that forms gradients in the forward too."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, loss_type="bnpo", epsilon_low=0.9, epsilon_high=0.9
    )

    def call(hidden, weight, token_ids, advantages, old_log_probs) -> Tensor:
        hidden = hidden.view(LIGER_SEQUENCES, -1, hidden.shape[1])
        ids, old = (t.view(LIGER_SEQUENCES, -1) for t in (token_ids, old_log_probs))
        ones = torch.ones_like(ids)
        return loss(
            hidden, weight, ids, ones, advantages[:LIGER_SEQUENCES], old_per_token_logps=old
        )[0]

    return call


def found(
    **makers: Callable[[], Callable],
) -> tuple[dict[str, Callable], dict[str, str]]:
    """(those that can run here, why the others cannot)."""
    functions, missing = {}, {}
    for name, make in makers.items():
        try:
            functions[name] = make()
        except (ImportError, RuntimeError) as error:
            missing[name] = str(error)
    return functions, missing


def log_probs() -> tuple[dict[str, FromHidden], dict[str, str]]:
    return found(
        eager=lambda: eager,
        compile=lambda: torch.compile(eager),
        trl=trl,
        verl=verl_fused,
        cut_cross_entropy=lambda: cut_cross_entropy("torch_compile"),
        cut_cross_entropy_triton=cut_cross_entropy_triton,
    )
