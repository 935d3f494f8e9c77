"""token_log_probs: log-probability and entropy of every token, from logits, in one pass.

With x the logits of a row, y = softcap * tanh(logit_scale * x / softcap) (logit_scale * x without
a soft-cap), z = y / temperature and p = softmax(z):

    log_prob = log p[token]      entropy = -sum_v p[v] log p[v]
    d loss / d z[v] = p[v] * (-(g + h * entropy) - h * log p[v])  +  g * [v == token]

with g, h the gradients of log_prob and entropy. Forward is one read of the logits; backward one
read and one write. Only [T] float32 vectors are saved beside the logits. A row is reduced in a
fixed order by itself: results do not depend on other rows, on the split of the batch or on the
number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._backend import choose_backend, native, register_backends
from ._logprob_parallel import gathered_reference, merge_partials

register_backends("token_log_probs", cpu=("cpp", "reference"), cuda=("cuda", "reference"))

_label_flags: dict[torch.device, Tensor] = {}


class RowStats(NamedTuple):
    """Further outputs per row, [T] float32, without gradient."""

    lse: Tensor  # log sum exp z
    max_logit: Tensor  # max y, before the temperature
    sum_p_squared: Tensor


class _Options(NamedTuple):
    """The op's arguments between the tensors and the backend, as torch.library wants them."""

    temperature: float
    temperatures: Tensor | None
    logit_scale: float
    softcap: float
    ignore_index: int
    keep_mask: Tensor | None
    group: str

    def native(self, logits: Tensor):
        rank, size = _rank_and_size(self.group)
        vocab = logits.shape[1]
        return native().LogProbOptions(
            self.temperature,
            self.temperatures,
            self.logit_scale,
            self.softcap,
            self.ignore_index,
            self.keep_mask,
            vocab_start=rank * vocab,
            vocab_total=size * vocab,
        )


def token_log_probs(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    keep_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    return_stats: bool = False,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """Log-probability of `token_ids` and entropy of the distribution, per row of `logits`.

    Args:
        logits: [T, V] (or [..., V]) float32, bfloat16 or float16; float64 takes the reference.
        token_ids: [T] (or [...]) int64.
        temperature: a number, or a [T] tensor; above 0.
        logit_scale: multiplies the logits first; above 0.
        softcap: y = softcap * tanh(logit_scale * x / softcap); None for none.
        ignore_index: rows with this label are not read: outputs and gradients are 0 there.
        keep_mask: [T, V] bool; False removes an entry from the distribution (top-k/top-p replay).
        group: every rank holds a vocabulary slice [T, V / size], in rank order; the ranks exchange
            one [T, 5] message forward and nothing backward.
        return_stats: also return a `RowStats`.
        inplace_backward: write the gradient over `logits`; nothing else may read them afterwards.
        backend: `cpp`, `cuda` or `reference`; None takes the best one.

    Returns:
        log_probs [T] and entropy [T], float32 whatever the type of the logits, both
        differentiable in `logits`. A token that is masked out or has logit -inf gets -inf. A row
        with NaN or +inf, or with nothing but -inf, gives NaN.

    Raises:
        IndexError: a label outside [0, V) other than ignore_index. On a CUDA device, where
            checking would synchronise, such a row gives NaN and `check_labels` raises.
        ValueError: wrong shapes, dtypes, temperature, scale or soft-cap.

    Source: online softmax, Milakov & Gimelshein, arXiv 1805.02867.

    Example:
        >>> log_probs, entropy = token_log_probs(torch.zeros(1, 4), torch.tensor([2]))
        >>> round(log_probs.item(), 4), round(entropy.item(), 4)
        (-1.3863, 1.3863)
    """
    if logits.shape[:-1] != token_ids.shape:
        raise ValueError(
            f"token_log_probs: token_ids has shape {tuple(token_ids.shape)} for logits of shape "
            f"{tuple(logits.shape)}; expected {tuple(logits.shape[:-1])}."
        )
    shape = token_ids.shape
    options = _Options(
        *_check_temperature(temperature, shape),
        _positive("logit_scale", logit_scale),
        0.0 if softcap is None else _positive("softcap", softcap),
        ignore_index,
        None if keep_mask is None else keep_mask.flatten(0, -2),
        "" if group is None else group.group_name,
    )
    flat = logits if logits.dim() == 2 else logits.flatten(0, -2)
    log_probs, entropy, row_max, log_sum, squares = torch.ops.hybridengine.token_log_probs(
        flat, token_ids.flatten(), *options, return_stats, inplace_backward, backend
    )
    outputs = (log_probs.view(shape), entropy.view(shape))
    if not return_stats:
        return outputs
    factor = logit_scale if softcap is None else 1.0
    max_logit = (row_max * factor).detach().view(shape)
    lse = max_logit / temperature + log_sum.detach().view(shape)
    return *outputs, RowStats(lse, max_logit, squares.detach().view(shape))


def check_labels(device: torch.device | str = "cuda") -> None:
    """Raise IndexError if any label on `device` was out of range since the last call.

    Synchronises, so call it where the loop waits for the device anyway.
    """
    flag = _label_flags.get(torch.device(device))
    if flag is not None and flag.item():
        flag.zero_()
        raise IndexError(
            f"token_log_probs: a label on {device} was outside the vocabulary; "
            "the log-probs of its row are NaN."
        )


def _check_temperature(temperature: float | Tensor, shape: torch.Size):
    if not isinstance(temperature, Tensor):
        return _positive("temperature", temperature), None
    if temperature.shape != shape:
        raise ValueError(
            f"token_log_probs: temperature has shape {tuple(temperature.shape)}; expected a number "
            f"or one value per token, {tuple(shape)}."
        )
    return 1.0, temperature.detach().float().flatten().contiguous()


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"token_log_probs: {name} is {value}; expected a number above 0.")
    return float(value)


def _rank_and_size(group: str) -> tuple[int, int]:
    if not group:
        return 0, 1
    resolved = dist.distributed_c10d._resolve_process_group(group)
    return resolved.rank(), resolved.size()


def _label_flag(device: torch.device) -> Tensor | None:
    if device.type == "cpu":
        return None  # checked before anything is computed
    if device not in _label_flags:
        _label_flags[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return _label_flags[device]


def _backend_for(logits: Tensor, requested: str | None) -> str:
    if logits.dtype == torch.float64:
        return choose_backend("token_log_probs", logits.device, requested or "reference")
    return choose_backend("token_log_probs", logits.device, requested)


def _inner_contiguous(logits: Tensor) -> Tensor:
    return logits if logits.shape[1] <= 1 or logits.stride(1) == 1 else logits.contiguous()


@torch.library.custom_op("hybridengine::token_log_probs", mutates_args=())
def _token_log_probs(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    keep_mask: Tensor | None,
    group: str,
    want_squares: bool,
    inplace_backward: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    options = _Options(
        temperature, temperatures, logit_scale, softcap, ignore_index, keep_mask, group
    )
    if _backend_for(logits, backend) == "reference":
        with torch.no_grad():
            return _reference_forward(logits, token_ids, options, want_squares)
    logits, flag = _inner_contiguous(logits), _label_flag(logits.device)
    native_options = options.native(logits)
    if not group:
        return tuple(
            native().log_prob_forward(logits, token_ids, native_options, want_squares, flag)
        )
    partial = native().log_prob_partial(logits, token_ids, native_options, flag)
    factor = (logit_scale if softcap == 0 else 1.0) / (
        temperature if temperatures is None else temperatures
    )
    return merge_partials(partial, factor, group, token_ids == ignore_index, want_squares)


@_token_log_probs.register_fake
def _(logits, token_ids, temperature, temperatures, logit_scale, softcap, ignore_index, keep_mask,
      group, want_squares, inplace_backward, backend):  # fmt: skip
    rows = logits.shape[0]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    vectors = [logits.new_empty(rows, dtype=dtype) for _ in range(4)]
    return *vectors, logits.new_empty(rows if want_squares else 0, dtype=dtype)


def _setup_context(ctx, inputs, output):
    logits, token_ids, *options = inputs
    temperature, temperatures, logit_scale, softcap, ignore_index, keep_mask, group = options[:7]
    ctx.save_for_backward(logits, token_ids, temperatures, keep_mask, *output[:4])
    ctx.scalars = (temperature, logit_scale, softcap, ignore_index, group)
    ctx.inplace, ctx.backend = inputs[-2], inputs[-1]
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_log_probs, grad_entropy, *_):
    nothing = (None,) * 11
    if not ctx.needs_input_grad[0] or (grad_log_probs is None and grad_entropy is None):
        return None, *nothing
    logits, token_ids, temperatures, keep_mask, *row_results = ctx.saved_tensors
    temperature, logit_scale, softcap, ignore_index, group = ctx.scalars
    arguments = (
        token_ids, temperature, temperatures, logit_scale, softcap, ignore_index, keep_mask, group,
        row_results, grad_log_probs, grad_entropy, ctx.backend,
    )  # fmt: skip
    # A compiled graph may not write over a tensor that its forward half saved.
    if ctx.inplace and logits.stride(-1) == 1 and not torch.compiler.is_compiling():
        _write_gradient(logits, logits.detach(), *arguments)
        return logits.detach(), *nothing
    return torch.ops.hybridengine.token_log_probs_backward(logits, *arguments), *nothing


@torch.library.custom_op("hybridengine::token_log_probs_backward", mutates_args=())
def _token_log_probs_backward(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    keep_mask: Tensor | None,
    group: str,
    row_results: list[Tensor],
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    backend: str | None,
) -> Tensor:
    grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_gradient(
        logits, grad_logits, token_ids, temperature, temperatures, logit_scale, softcap,
        ignore_index, keep_mask, group, row_results, grad_log_probs, grad_entropy, backend,
    )  # fmt: skip
    return grad_logits


@_token_log_probs_backward.register_fake
def _(logits, *_):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _write_gradient(
    logits, out, token_ids, temperature, temperatures, logit_scale, softcap, ignore_index,
    keep_mask, group, row_results, grad_log_probs, grad_entropy, backend,
) -> None:  # fmt: skip
    options = _Options(
        temperature, temperatures, logit_scale, softcap, ignore_index, keep_mask, group
    )
    if _backend_for(logits, backend) == "reference":
        out.copy_(_reference_backward(logits, token_ids, options, grad_log_probs, grad_entropy))
        return
    native().log_prob_backward(
        _inner_contiguous(logits),
        token_ids,
        options.native(logits),
        row_results,
        None if grad_log_probs is None else grad_log_probs.float().contiguous(),
        None if grad_entropy is None else grad_entropy.float().contiguous(),
        out,
    )


torch.library.register_autograd(
    "hybridengine::token_log_probs", _backward, setup_context=_setup_context
)


def reference_token_log_probs(
    logits: Tensor, token_ids: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The specification, in plain differentiable PyTorch, in float64 for float64 logits.

    -> log_probs, entropy, row_max, log_sum, sum_p_squared, each [T].
    """
    y, log_p = _reference_rows(logits, token_ids, options)
    p = log_p.exp()
    vocab = logits.shape[1]
    log_probs = log_p.gather(1, token_ids.clamp(0, vocab - 1)[:, None]).squeeze(1)
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
    row_max = y.amax(-1)
    log_sum = -log_p.amax(-1)
    ignored = token_ids == options.ignore_index
    bad = ~ignored & ((token_ids < 0) | (token_ids >= vocab))
    if logits.device.type == "cpu" and bad.any():
        row = int(bad.nonzero()[0])
        raise IndexError(
            f"token_log_probs: token_ids[{row}] is {int(token_ids[row])}, outside the vocabulary "
            f"of {vocab}; expected 0 <= id < {vocab} or ignore_index ({options.ignore_index})."
        )
    if options.softcap == 0:
        row_max = row_max / options.logit_scale  # as the kernels keep it: the raw logit
    outputs = (log_probs, entropy, row_max, log_sum, p.square().sum(-1))
    return tuple(v.masked_fill(bad, torch.nan).masked_fill(ignored, 0.0) for v in outputs)


def _reference_rows(logits, token_ids, options) -> tuple[Tensor, Tensor]:
    """y and log p, [T, V], with ignored rows replaced by zeros."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    x = x.masked_fill((token_ids == options.ignore_index)[:, None], 0.0) * options.logit_scale
    y = x if options.softcap == 0 else options.softcap * torch.tanh(x / options.softcap)
    if options.keep_mask is not None:
        y = y.masked_fill(~options.keep_mask, -torch.inf)
    temperature = options.temperature
    if options.temperatures is not None:
        temperature = options.temperatures[:, None].to(y.dtype)
    return y, torch.log_softmax(y / temperature, dim=-1)


def _reference_forward(logits, token_ids, options, want_squares):
    if options.group:
        logits, options = gathered_reference(logits, options)
    outputs = reference_token_log_probs(logits, token_ids, options)
    return *outputs[:4], outputs[4] if want_squares else outputs[4][:0].clone()


def _reference_backward(logits, token_ids, options, grad_log_probs, grad_entropy) -> Tensor:
    """The module's gradient formula; the tests hold it against autograd of the forward."""
    rank, vocab = _rank_and_size(options.group)[0], logits.shape[1]
    if options.group:
        logits, options = gathered_reference(logits, options)
    y, log_p = _reference_rows(logits, token_ids, options)
    p = log_p.exp()
    gradient = torch.zeros_like(p)
    if grad_log_probs is not None:
        label = token_ids.clamp(0, logits.shape[1] - 1)[:, None]
        gradient += grad_log_probs[:, None] * (torch.zeros_like(p).scatter_(1, label, 1.0) - p)
    if grad_entropy is not None:
        finite = log_p.masked_fill(p == 0, 0.0)
        gradient -= grad_entropy[:, None] * p * (finite - (p * finite).sum(-1, keepdim=True))
    gradient *= options.logit_scale
    if options.softcap:
        gradient *= 1.0 - (y / options.softcap).square()
    if options.temperatures is not None:
        gradient /= options.temperatures[:, None]
    else:
        gradient /= options.temperature
    if options.keep_mask is not None:
        gradient = gradient.masked_fill(~options.keep_mask, 0.0)
    # A row nobody asks a gradient of gets exact zeros, even where its logits are NaN.
    asked = sum(grad != 0 for grad in (grad_log_probs, grad_entropy) if grad is not None) > 0
    gradient = gradient.where((asked & (token_ids != options.ignore_index))[:, None], 0.0)
    return gradient[:, rank * vocab : (rank + 1) * vocab]
