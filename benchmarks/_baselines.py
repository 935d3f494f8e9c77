"""The baselines for log-probs: what users run today, from logits and from hidden states.

`from_logits` and `from_hidden` return (functions by name, why the others cannot run here).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks import _cute
from benchmarks.isa import is_limited

# A backward that is timed alone runs many times over one forward.
torch._functorch.config.donated_buffer = False

LogProbs = Callable[..., tuple[Tensor, ...]]  # of (logits, ids) or (hidden, weight, ids)
Available = tuple[dict[str, Callable], dict[str, str]]
CHUNK_ROWS = 512  # of the logits of a baseline that computes them by chunks
LIGER_SEQUENCES = 8  # Liger takes [B, L] sequences of equal length, and one advantage each


def available(**makers: Callable[[], Callable]) -> Available:
    """Call every maker: (the functions that can run here by name, why the others cannot)."""
    functions, missing = {}, {}
    for name, make in makers.items():
        try:
            functions[name] = make()
        except (ImportError, RuntimeError) as error:
            missing[name] = str(error)
        except Exception as error:  # of a package that has changed, or that another one broke
            missing[name] = f"{type(error).__name__}: {error}"
    return functions, missing


def print_missing(missing: dict[str, str]) -> None:
    for name, reason in missing.items():
        print(f"# baseline {name} left out: {reason}", flush=True)


def exact(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropy in float64, the reference for errors."""
    log_p = F.log_softmax(logits.double(), dim=-1)
    return log_p.gather(1, token_ids[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def eager(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    log_p = F.log_softmax(logits.float(), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, token_ids[:, None]).squeeze(1), entropy


def eager_from_hidden(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    return eager(F.linear(hidden, weight), token_ids)


def from_logits() -> Available:
    """The baselines (logits [T, V], token_ids [T]) -> (log_probs[, entropy])."""
    on_gpu = {"quack": _cute.log_probs, "flash_attn": _flash_attn}
    on_gpu = on_gpu if torch.cuda.is_available() else {}
    return available(
        eager=lambda: eager, compile=lambda: compiled(eager), trl=_trl, verl=_verl, **on_gpu
    )


def from_hidden() -> Available:
    """The baselines (hidden [T, H], weight [V, H], token_ids [T]) -> (log_probs[, entropy])."""
    on_gpu = {
        "liger": _liger,
        "verl_kernel": _verl_kernel,
        "quack": _cute.log_probs_from_hidden,
    }
    on_gpu = on_gpu if torch.cuda.is_available() else {}
    return available(
        eager=lambda: eager_from_hidden,
        compile=lambda: compiled(eager_from_hidden),
        trl=_trl_chunked,
        verl=_verl_fused,
        cut_cross_entropy=lambda: _cut_cross_entropy("torch_compile"),
        cut_cross_entropy_triton=_cut_cross_entropy_triton,
        **on_gpu,
    )


def forward_from_hidden() -> Available:
    """More of them, without gradients."""
    on_gpu = {"quack_fused": _cute.fused_log_probs_from_hidden}
    return available(**(on_gpu if torch.cuda.is_available() else {}))


def loss_from_hidden() -> Available:
    """The baselines (hidden, weight, token_ids, advantages, old_log_probs) -> loss.

    On a GPU also the mean cross-entropy, which has the same products and no policy loss.
    """
    cross_entropies = {
        "liger_cross_entropy": _cute.liger_cross_entropy_from_hidden,
        "quack_cross_entropy": _cute.cross_entropy_from_hidden,
    }
    on_gpu = cross_entropies if torch.cuda.is_available() else {}
    return available(liger=_liger_grpo, **on_gpu)


def cross_entropy_from_hidden() -> Available:
    """The baselines (hidden [T, H], weight [V, H], labels [T]) -> mean cross-entropy."""
    on_gpu = {
        "quack": _cute.cross_entropy_from_hidden,
        "liger_cute": _cute.liger_cross_entropy_from_hidden,
    }
    return available(
        eager=lambda: eager_cross_entropy,
        eager_chunked=lambda: eager_chunked_cross_entropy,
        compile=lambda: compiled(eager_cross_entropy),
        cut_cross_entropy=lambda: _cut_cross_entropy_mean("torch_compile"),
        cut_cross_entropy_triton=lambda: _cut_cross_entropy_mean("cce"),
        liger=_liger_fused_cross_entropy,
        **(on_gpu if torch.cuda.is_available() else {}),
    )


def eager_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As Hugging Face models compute it: logits in the inputs' dtype, the loss in float32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def eager_chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same by chunks, whose logits the backward computes again."""
    parts = [
        checkpoint(
            lambda h, ids: F.cross_entropy(F.linear(h, weight).float(), ids, reduction="sum"),
            *part,
            use_reentrant=False,
        )
        for part in zip(hidden.split(CHUNK_ROWS), labels.split(CHUNK_ROWS), strict=True)
    ]
    return torch.stack(parts).sum() / len(labels)


def flash_attention_3() -> Callable[..., Any]:
    """The forward of FlashAttention 3 over packed sequences or pages, as vLLM brings it."""
    module = importlib.import_module("vllm.vllm_flash_attn")
    if not module.FA3_AVAILABLE:
        raise RuntimeError("vLLM has no FlashAttention 3 here")
    return partial(module.flash_attn_varlen_func, fa_version=3)


def flash_attn_padding() -> Any | None:
    """flash_attn.bert_padding, or None with a note where it is not installed."""
    return _optional("flash_attn.bert_padding", "flash_attn")


def verl_algorithms() -> Any | None:
    """verl's own algorithms (benchmarks._verl), or None with a note where it is not installed."""
    return _optional("benchmarks._verl", "verl")


def _optional(module: str, package: str) -> Any | None:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        print_missing({package: str(error)})
        return None


def require_compile() -> None:
    if is_limited():
        raise RuntimeError("the bfloat16 code of torch.compile crashes under --isa")


def compiled(function: Callable) -> Callable:
    require_compile()
    return torch.compile(function)


def _verl() -> LogProbs:
    from benchmarks._verl import torch_functional as functions

    return lambda logits, ids: (
        functions.logprobs_from_logits(logits, ids, inplace_backward=False),
        functions.entropy_from_logits(logits),
    )


def _trl() -> LogProbs:
    """One pass of a Triton kernel on a GPU, two functions on a CPU."""
    from trl.trainer.utils import selective_log_softmax_and_entropy

    return selective_log_softmax_and_entropy


def _flash_attn() -> LogProbs:
    """Log-probs only."""
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    return lambda logits, ids: (-cross_entropy_loss(logits, ids)[0],)


def _trl_chunked() -> LogProbs:
    """The function behind TRL's chunked log-probs; its tiles are torch operations on a CPU."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as size

    return lambda hidden, weight, ids: ChunkedLogProbFunction.apply(
        hidden, weight, None, ids, 1.0, size, None, 1.0, ("entropy",)
    )[:2]


def _verl_fused() -> LogProbs:
    from benchmarks._verl import FusedLinearForPPO

    fused = FusedLinearForPPO()
    return lambda hidden, weight, ids: tuple(
        result[0] for result in fused(hidden[None], weight, ids[None])
    )


def _verl_kernel() -> LogProbs:
    from benchmarks._verl import linear_cross_entropy

    return lambda hidden, weight, ids: linear_cross_entropy(hidden, weight, ids, 1.0, "none", None)


def _liger() -> LogProbs:
    """On Hopper its CuTe DSL kernels (extra `cutedsl`), which round logits to float16."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Function

    def call(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        nll, entropy = Function.apply(hidden, weight, ids, 1.0, -100, 1, True)
        return -nll, entropy

    return call


def _cut_cross_entropy(impl: str) -> LogProbs:
    """Log-probs only. `filter_eps=None`: else its kernels drop small gradients."""
    if impl == "torch_compile":
        require_compile()
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, ids: (
        -function(hidden, weight, ids, impl=impl, reduction="none", filter_eps=None),
    )


def _cut_cross_entropy_triton() -> LogProbs:
    if not torch.cuda.is_available():
        raise RuntimeError("its Triton kernels need a GPU")
    return _cut_cross_entropy("cce")


def _liger_grpo() -> Callable[..., Tensor]:
    """Liger's fused linear GRPO loss, the only baseline that computes gradients in the forward."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, loss_type="bnpo", epsilon_low=0.9, epsilon_high=0.9
    )

    def call(
        hidden: Tensor, weight: Tensor, token_ids: Tensor, advantages: Tensor, old: Tensor
    ) -> Tensor:
        hidden = hidden.view(LIGER_SEQUENCES, -1, hidden.shape[1])
        ids, old = (t.view(LIGER_SEQUENCES, -1) for t in (token_ids, old))
        ones = torch.ones_like(ids)
        return loss(
            hidden, weight, ids, ones, advantages[:LIGER_SEQUENCES], old_per_token_logps=old
        )[0]

    return call


def _liger_fused_cross_entropy() -> Callable[..., Tensor]:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    if not torch.cuda.is_available():
        raise RuntimeError("its Triton kernels need a GPU")
    return lambda *arguments: LigerFusedLinearCrossEntropyFunction.apply(*arguments)[0]


def _cut_cross_entropy_mean(impl: str) -> Callable[..., Tensor]:
    if impl == "torch_compile":
        require_compile()
    elif not torch.cuda.is_available():
        raise RuntimeError("its Triton kernels need a GPU")
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, labels: function(
        hidden, weight, labels, impl=impl, reduction="mean", filter_eps=None
    )
