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
from torch._subclasses.fake_tensor import is_fake

from ._backend import choose_backend, native, register_backends
from ._logprob_parallel import merge_partials, rank_and_size
from ._logprob_reference import reference_backward, reference_forward

register_backends("token_log_probs", cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference"))

_label_flags: dict[torch.device, Tensor] = {}


class RowStats(NamedTuple):
    """Further outputs per row, [T] float32, without gradient."""

    lse: Tensor  # log sum exp z
    max_logit: Tensor  # max y, before the temperature
    sum_p_squared: Tensor


# RowOptions as the arguments of an operator.
ROW_SCHEMA = (
    "float temperature, Tensor? temperatures, float logit_scale, float softcap, int ignore_index, "
    "Tensor? keep_mask, str group"
)


class RowOptions(NamedTuple):
    """How a row of logits becomes a distribution: the options that all log-prob ops share."""

    temperature: float
    temperatures: Tensor | None
    logit_scale: float
    softcap: float
    ignore_index: int
    keep_mask: Tensor | None
    group: str

    @staticmethod
    def of(scalars: tuple, temperatures: Tensor | None, keep_mask: Tensor | None) -> RowOptions:
        """The inverse of `scalars`, given the two tensors."""
        temperature, logit_scale, softcap, ignore_index, group = scalars
        return RowOptions(
            temperature, temperatures, logit_scale, softcap, ignore_index, keep_mask, group
        )

    def scalars(self) -> tuple:
        """What is not a tensor."""
        return self.temperature, self.logit_scale, self.softcap, self.ignore_index, self.group

    def rows(self, index) -> RowOptions:
        """The options of some rows: a slice, or an index tensor."""
        temperatures, keep_mask = (
            None if tensor is None else tensor[index]
            for tensor in (self.temperatures, self.keep_mask)
        )
        return self._replace(temperatures=temperatures, keep_mask=keep_mask)

    @property
    def factor(self) -> float | Tensor:
        """z = y * factor."""
        temperature = self.temperature if self.temperatures is None else self.temperatures
        return (self.logit_scale if self.softcap == 0 else 1.0) / temperature

    def native(self, logits: Tensor):
        rank, size = rank_and_size(self.group)
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
        backend: `cpp`, `cuda`, `triton` or `reference`; None takes the best one.

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
    options = row_options(
        "token_log_probs", shape, temperature, logit_scale, softcap, ignore_index, keep_mask, group
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


def row_options(
    op: str, shape, temperature, logit_scale, softcap, ignore_index, keep_mask, group
) -> RowOptions:
    """The users' arguments, checked; `op` is who complains."""

    def positive(name: str, value: float) -> float:
        if not value > 0:
            raise ValueError(f"{op}: {name} is {value}; expected a number above 0.")
        return float(value)

    temperatures = None
    if isinstance(temperature, Tensor):
        if temperature.shape != shape:
            raise ValueError(
                f"{op}: temperature has shape {tuple(temperature.shape)}; expected a number or "
                f"one value per token, {tuple(shape)}."
            )
        temperatures = temperature.detach().float().flatten().contiguous()
    return RowOptions(
        1.0 if temperatures is not None else positive("temperature", temperature),
        temperatures,
        positive("logit_scale", logit_scale),
        0.0 if softcap is None else positive("softcap", softcap),
        ignore_index,
        None if keep_mask is None else keep_mask.flatten(0, -2),
        "" if group is None else group.group_name,
    )


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


def rows_forward(
    logits: Tensor, token_ids: Tensor, options: RowOptions, want_squares: bool, backend: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """log_probs, entropy, row_max, log_sum, sum_p_squared, without autograd."""
    backend = _backend_for(logits, backend)
    if backend == "reference":
        with torch.no_grad():
            return reference_forward(logits, token_ids, options, want_squares)
    logits, flag = _inner_contiguous(logits), _label_flag(logits.device)
    parallel = options.group != ""
    if backend == "triton":
        from . import logprob_triton

        rank, size = rank_and_size(options.group)
        vocab = logits.shape[1]
        found = logprob_triton.forward(
            logits, token_ids, options, rank * vocab, size * vocab, want_squares, flag, parallel
        )
    elif parallel:
        found = [native().log_prob_partial(logits, token_ids, options.native(logits), flag)]
    else:
        found = native().log_prob_forward(
            logits, token_ids, options.native(logits), want_squares, flag
        )
    if not parallel:
        return tuple(found)
    ignored = token_ids == options.ignore_index
    return merge_partials(found[0], options.factor, options.group, ignored, want_squares)


def rows_backward(
    logits: Tensor,
    out: Tensor,
    token_ids: Tensor,
    options: RowOptions,
    row_results: list[Tensor],
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    backend: str | None,
    places: Tensor | None = None,
) -> None:
    """Write the gradient of the logits into `out`: `logits` itself, one that looks like it, or a
    16-bit one beside float32 logits. With `places` ([T] int32) into these rows of `out`, nowhere
    where it is -1; not by the reference."""
    backend = _backend_for(logits, backend)
    if backend == "reference":
        out.copy_(reference_backward(logits, token_ids, options, grad_log_probs, grad_entropy))
        return
    gradients = [
        None if grad is None else grad.float().contiguous()
        for grad in (grad_log_probs, grad_entropy)
    ]
    logits = _inner_contiguous(logits)
    if backend == "triton":
        from . import logprob_triton

        start = rank_and_size(options.group)[0] * logits.shape[1]
        logprob_triton.backward(
            logits, out, token_ids, options, start, list(row_results), *gradients, places
        )
    else:
        native().log_prob_backward(
            logits, token_ids, options.native(logits), row_results, *gradients, out, places
        )


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
    options = RowOptions(
        temperature, temperatures, logit_scale, softcap, ignore_index, keep_mask, group
    )
    return rows_forward(logits, token_ids, options, want_squares, backend)


@_token_log_probs.register_fake
def _(logits, token_ids, temperature, temperatures, logit_scale, softcap, ignore_index, keep_mask,
      group, want_squares, inplace_backward, backend):  # fmt: skip
    rows = logits.shape[0]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    vectors = [logits.new_empty(rows, dtype=dtype) for _ in range(4)]
    return *vectors, logits.new_empty(rows if want_squares else 0, dtype=dtype)


def _setup_context(ctx, inputs, output):
    logits, token_ids, *options = inputs
    options = RowOptions(*options[:7])
    ctx.save_for_backward(logits, token_ids, options.temperatures, options.keep_mask, *output[:4])
    ctx.scalars = options.scalars()
    ctx.inplace, ctx.backend = inputs[-2], inputs[-1]
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_log_probs, grad_entropy, *_):
    nothing = (None,) * 11
    if not ctx.needs_input_grad[0] or (grad_log_probs is None and grad_entropy is None):
        return None, *nothing
    logits, token_ids, temperatures, keep_mask, *row_results = ctx.saved_tensors
    options = RowOptions.of(ctx.scalars, temperatures, keep_mask)
    rest = (row_results, grad_log_probs, grad_entropy, ctx.backend)
    # A compiled graph may not write over a tensor that its forward half saved. While it is traced
    # (torch 2.11 does not say so here) the logits are a tensor without memory.
    tracing = torch.compiler.is_compiling() or is_fake(logits)
    if ctx.inplace and logits.stride(-1) == 1 and not tracing:
        logits = logits.detach()
        rows_backward(logits, logits, token_ids, options, *rest)
        return logits, *nothing
    gradient = torch.ops.hybridengine.token_log_probs_backward(logits, token_ids, *options, *rest)
    return gradient, *nothing


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
    options = RowOptions(
        temperature, temperatures, logit_scale, softcap, ignore_index, keep_mask, group
    )
    rows_backward(
        logits, grad_logits, token_ids, options, row_results, grad_log_probs, grad_entropy, backend
    )
    return grad_logits


@_token_log_probs_backward.register_fake
def _(logits, *_):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


torch.library.register_autograd(
    "hybridengine::token_log_probs", _backward, setup_context=_setup_context
)
