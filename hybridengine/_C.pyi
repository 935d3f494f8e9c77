"""The native kernels (csrc/). Users call hybridengine.kernels; this is what that calls."""

from collections.abc import Sequence

from torch import Tensor

cpu_isa: str
with_cuda: bool

class LogProbOptions:
    def __init__(
        self,
        temperature: float,
        temperatures: Tensor | None,
        logit_scale: float,
        softcap: float,
        ignore_index: int,
        keep_mask: Tensor | None,
        vocab_start: int,
        vocab_total: int,
    ) -> None: ...

def log_prob_forward(
    logits: Tensor,
    token_ids: Tensor,
    options: LogProbOptions,
    want_sum_p_squared: bool,
    bad_label: Tensor | None,
) -> list[Tensor]: ...
def log_prob_partial(
    logits: Tensor, token_ids: Tensor, options: LogProbOptions, bad_label: Tensor | None
) -> Tensor: ...
def log_prob_backward(
    logits: Tensor,
    token_ids: Tensor,
    options: LogProbOptions,
    row_results: Sequence[Tensor],
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_logits: Tensor,
) -> None: ...
def strided_copy(
    sources: Sequence[Tensor], destinations: Sequence[Tensor], table: Tensor
) -> None: ...
