"""sparse_linear_token_log_probs: log-probs over the vocabulary entries that sampling kept.

With top-k, top-p or min-p sampling the engine's distribution is the softmax over a few kept entries
of a row, so the policy ratio needs the trainer's log-prob over the same entries (the sampling mask
of the rollout is replayed). With K entries kept in all this takes 2 K H operations and K logits,
where the dense operator with a vocab_mask takes 2 T V H and [T, V]: K / T is typically below 20,
V above 100,000. Backward is 4 K H, and writes the weight gradient once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check as check
from .._backend import native
from .._library import custom_op
from .._per_token import compute_dtype, row_index, segment_reduce
from ..linear import linear_token_log_probs
from ..linear.arguments import check_linear, register_linear_autograd
from ..linear.gradients import sum_over_ranks
from ..logprob import token_log_probs
from ..logprob.options import RowOptions, in_shape, row_options
from ..sampling import SampledTokens
from .products import OP, Products

# With more kept entries than this part of T * V the dense product is faster: in bfloat16 an entry
# costs 46 to 63 times as much here as there (benchmarks/results/sparse_linear_cpu.json).
DENSE_PART = 1 / 64


def sparse_linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    kept_ids: Tensor,
    cu_kept: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    group: dist.ProcessGroup | None = None,
    main_grad: Tensor | None = None,
    return_kept_log_probs: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """Log-probability of `token_ids` and entropy, over the kept vocabulary entries of each row.

    Equal to `linear_token_log_probs` with a vocab_mask of the same entries.

    Args:
        hidden: [T, H]; weight: [V, H] of the same dtype; token_ids: [T] int32 or int64.
        kept_ids: [K] int32 or int64, the kept vocabulary entries of every row, ascending in a row.
        cu_kept: [T + 1] int32 or int64: row t has kept_ids[cu_kept[t]:cu_kept[t + 1]]. A row whose
            token is not kept has log-prob -inf.
        temperature, logit_scale, softcap, ignore_index: as in `token_log_probs`.
        bias: [V] or None.
        group: every rank holds a slice of the vocabulary, weight [V_r, H], in rank order, and the
            same hidden and kept_ids (counted over the whole vocabulary); the gradient of hidden is
            summed over the ranks.
        main_grad: [V, H] float32, contiguous; the weight gradient is added into it and weight.grad
            stays None.
        return_kept_log_probs: return the log-probs of all kept entries, too, for `score_centering`.
        deterministic: compute kept entries alone, however many there are. On a CPU the log-probs
            are then those of `kept_log_probs` from the logits of `decode_linear`, bit for bit.
        backend: `cpp`, `triton` or `reference`; None takes the best one.

    Returns:
        log_probs [T], entropy [T] and on request kept_log_probs [K], which of rows with
        ignore_index have no meaning; float32, differentiable in hidden, weight and bias (once, in
        reverse mode). Sums run in a fixed order, and a row's result does not depend on the other
        rows, except that the dense operator computes all of them (equal up to rounding) where more
        than 1/64 of T * V is kept, without a group, kept_log_probs and `deterministic`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, ids that are not ascending, or a row
            without kept entries. IndexError: an id outside the vocabulary. (On a GPU values are
            not checked: a row without kept entries, or with an id outside, is NaN.)

    Examples:
        >>> hidden, weight = torch.zeros(2, 8), torch.randn(5, 8)
        >>> kept_ids, cu_kept = torch.tensor([0, 3, 4, 2]), torch.tensor([0, 3, 4])
        >>> log_probs, _ = sparse_linear_token_log_probs(
        ...     hidden, weight, torch.tensor([3, 2]), kept_ids, cu_kept
        ... )
        >>> [round(value, 4) for value in log_probs.tolist()]
        [-1.0986, 0.0]
    """
    check.shape(OP, "hidden", hidden, "T H", {})
    token_ids = check_linear(OP, hidden, weight, token_ids, bias, main_grad)
    options = row_options(
        OP,
        token_ids,
        weight.shape[0],
        temperature,
        logit_scale,
        softcap,
        ignore_index,
        None,
        group,
        compute_dtype(hidden),
    )
    kept_ids, cu_kept = check_kept(
        OP, hidden, token_ids, kept_ids, cu_kept, options, weight.shape[0]
    )
    few = is_sparse(hidden, weight, kept_ids)
    if not (few or group or return_kept_log_probs or deterministic):
        return linear_token_log_probs(
            hidden,
            weight,
            token_ids,
            temperature,
            bias=bias,
            logit_scale=logit_scale,
            softcap=softcap,
            ignore_index=ignore_index,
            main_grad=main_grad,
            vocab_mask=as_mask(kept_ids, cu_kept, weight.shape[0]),
            backend=backend,
        )
    log_probs, entropy, _, kept_log_probs = _forward_op(
        hidden, weight, bias, token_ids, options, kept_ids.int(), cu_kept, backend, main_grad
    )
    results = in_shape(log_probs, token_ids.shape), in_shape(entropy, token_ids.shape)
    return (*results, kept_log_probs) if return_kept_log_probs else results


def kept_log_probs(logits: Tensor, sampled: SampledTokens, temperature: Tensor) -> Tensor:
    """Return the log-probs [B] of sampled tokens from all logits, on a CPU and without gradient.

    A row of which something was cut has the bits of `sparse_linear_token_log_probs` over what was
    kept, with the logits of `decode_linear`; any other row those of `token_log_probs`.

    logits: [B, V] float32. sampled: of them, with kept_ids. temperature: float32 [B].
    """
    tokens, is_cut, kept_ids = sampled.tokens, sampled.num_kept > 0, sampled.kept_ids
    if not is_cut.any():
        return token_log_probs(logits, tokens, temperature)[0]
    assert kept_ids is not None
    cu_kept = torch.nn.functional.pad(sampled.num_kept.cumsum(0, dtype=torch.int32), (1, 0))
    entries = logits[row_index(cu_kept, kept_ids.shape[0]), kept_ids.long()]
    options = RowOptions(1.0, temperature, 1.0, 0.0, -100, None, None, False, "").native()
    cut: Tensor = native().sparse_log_probs(entries, kept_ids, cu_kept, tokens, options)[0]
    if is_cut.all():
        return cut
    return cut.where(is_cut, token_log_probs(logits, tokens, temperature)[0])


def check_kept(
    op: str,
    hidden: Tensor,
    token_ids: Tensor,
    kept_ids: Tensor,
    cu_kept: Tensor,
    options: RowOptions,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """Check the kept entries of rows [T, H]; return them and their ends, int64.

    vocab: rows of the weight.
    """
    check.same_device(op, hidden=hidden, kept_ids=kept_ids, cu_kept=cu_kept)
    check.shape(op, "kept_ids", kept_ids, "K", {})
    kept_ids = check.ids(op, "kept_ids", kept_ids)
    check.shape(op, "cu_kept", cu_kept, "N", {"N": (hidden.shape[0] + 1, "hidden, T + 1")})
    cu_kept = check.cu_seqlens(op, cu_kept, kept_ids.shape[0], name="cu_kept")
    if check.readable(kept_ids):
        _check_values(op, kept_ids, cu_kept, token_ids, options, vocab)
    else:  # unchecked ends must not lead out of the entries
        cu_kept = cu_kept.clamp(0, kept_ids.shape[0]).cummax(0).values
    return kept_ids, cu_kept


def _check_values(
    op: str,
    kept_ids: Tensor,
    cu_kept: Tensor,
    token_ids: Tensor,
    options: RowOptions,
    vocab: int,
) -> None:
    """Check the values of the arguments, which must be readable."""
    if int(cu_kept[-1]) != kept_ids.shape[0]:
        raise ValueError(
            f"{op}: cu_kept ends at {int(cu_kept[-1])}, but there are {kept_ids.shape[0]} "
            "kept_ids; expected the same number."
        )
    if options.vocab_range is not None:
        vocab = int(options.vocab_range[1])
    allowed = f"expected 0 <= id < {vocab}"
    _check_ids(op, "kept_ids", kept_ids, (kept_ids < 0) | (kept_ids >= vocab), vocab, allowed)
    outside = ((token_ids < 0) | (token_ids >= vocab)) & (token_ids != options.ignore_index)
    allowed += f" or ignore_index ({options.ignore_index})"
    _check_ids(op, "token_ids", token_ids, outside, vocab, allowed)
    rows = row_index(cu_kept, kept_ids.shape[0])
    falls = (kept_ids[1:] <= kept_ids[:-1]) & (rows[1:] == rows[:-1])
    if falls.any():
        k = int(falls.nonzero()[0]) + 1
        raise ValueError(
            f"{op}: kept_ids[{k}] is {int(kept_ids[k])}, after {int(kept_ids[k - 1])} in row "
            f"{int(rows[k])}; expected ascending ids without repeats in each row."
        )
    empty = (cu_kept.diff() == 0) & (token_ids != options.ignore_index)
    if empty.any():
        raise ValueError(
            f"{op}: row {int(empty.nonzero()[0])} has no kept_ids; expected at least the id of "
            "its token, or ignore_index as its token."
        )


def _check_ids(op: str, name: str, ids: Tensor, outside: Tensor, vocab: int, allowed: str) -> None:
    if outside.any():
        k = int(outside.nonzero()[0])
        raise IndexError(
            f"{op}: {name}[{k}] is {int(ids[k])}, outside the vocabulary of {vocab}; {allowed}."
        )


def is_sparse(hidden: Tensor, weight: Tensor, kept_ids: Tensor) -> bool:
    """Return whether so few entries are kept that products of them alone are faster."""
    return kept_ids.shape[0] <= DENSE_PART * hidden.shape[0] * weight.shape[0]


def as_mask(kept_ids: Tensor, cu_kept: Tensor, vocab: int) -> Tensor:
    """Return bool [T, vocab], True for the kept entries; a row with an id outside has none."""
    rows, num_tokens = row_index(cu_kept, kept_ids.shape[0]), cu_kept.shape[0] - 1
    mask = torch.zeros(num_tokens, vocab, dtype=torch.bool, device=kept_ids.device)
    if check.readable(kept_ids):  # and checked
        mask[rows, kept_ids] = True
        return mask
    mask[rows, kept_ids.clamp(0, vocab - 1)] = True
    outside = ((kept_ids < 0) | (kept_ids >= vocab)).int()
    bad = torch.zeros(num_tokens, dtype=torch.int32, device=kept_ids.device)
    return mask & (bad.index_add_(0, rows, outside) == 0)[:, None]


def _distribution(
    logits: Tensor, products: Products, options: RowOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log p, p and d z / d logit of every entry, float64 [K]."""
    ends, rows = products.ends, products.row_index
    x = logits.double().masked_fill(_is_outside(products, options), torch.nan)
    y = x * options.logit_scale
    slope = torch.full_like(y, options.logit_scale)
    if options.softcap:
        y = options.softcap * torch.tanh(y / options.softcap)
        slope = slope * (1.0 - (y / options.softcap).square())
    factor: float | Tensor = 1.0 / options.temperature
    if options.temperatures is not None:
        factor = options.temperatures.double().reciprocal()[rows]
    z, slope = y * factor, slope * factor
    d = z - segment_reduce(z, ends, "max")[rows]
    log_p = d - segment_reduce(d.exp(), ends, "sum").log()[rows]
    return log_p, log_p.exp(), slope


def _is_outside(products: Products, options: RowOptions) -> Tensor:
    """Return whether entries are outside of the vocabulary, bool [K]."""
    vocab = products.weight.shape[0] if options.vocab_range is None else options.vocab_range[1]
    return (products.ids < 0) | (products.ids >= vocab)


def _is_token(products: Products, token_ids: Tensor) -> Tensor:
    """Return 1 for the entries that are their row's token, float64 [K]."""
    return (products.ids == token_ids[products.row_index]).double()


@custom_op(f"hybridengine::{OP}", mutates_args=())
def _forward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    options: RowOptions,
    ids: Tensor,
    ends: Tensor,
    backend: str | None,
    main_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_probs [T], entropy [T], logits [K] (summed over the ranks of a group), log-probs [K]."""
    products = Products.choose(hidden, weight, ids, ends, options.vocab_range, backend)
    logits = sum_over_ranks(products.logits(bias), options.group)
    log_probs, entropy, kept_log_probs = forward_rows(logits, products, options, token_ids)
    return log_probs, entropy, logits, kept_log_probs


def forward_rows(
    logits: Tensor, products: Products, options: RowOptions, token_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log_probs [T], entropy [T] and the log-probs of all entries [K]."""
    ends = products.ends
    if products.backend == "triton":
        from . import triton_rows

        vocab = products.weight.shape[0]
        return triton_rows.forward(logits, products.ids, ends, token_ids, options, vocab)
    log_p, p, _ = _distribution(logits, products, options)
    if products.backend == "cpp":
        logits = logits.masked_fill(_is_outside(products, options), torch.nan)
        entries = logits, products.ids, ends, token_ids
        plain = options._replace(vocab_range=None).native()
        log_probs, entropy = native().sparse_log_probs(*entries, plain)
        return log_probs, entropy, log_p.to(logits.dtype)
    token = _is_token(products, token_ids)
    log_probs = segment_reduce(log_p.where(token != 0, 0.0), ends, "sum")
    log_probs = log_probs.where(segment_reduce(token, ends, "sum") != 0, -torch.inf)
    entropy = -segment_reduce(p * log_p.masked_fill(p == 0, 0.0), ends, "sum")
    empty, ignored = ends.diff() == 0, token_ids == options.ignore_index
    log_probs, entropy = (
        x.masked_fill(empty, torch.nan).masked_fill(ignored, 0.0).to(logits.dtype)
        for x in (log_probs, entropy)
    )
    return log_probs, entropy, log_p.to(logits.dtype)


@_forward_op.register_fake
def _(hidden: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    rows, dtype = hidden.shape[0], compute_dtype(hidden)
    return tuple(hidden.new_empty(n, dtype=dtype) for n in (rows, rows, *ids.shape, *ids.shape))


@custom_op(f"hybridengine::{OP}_backward", mutates_args=("main_grad",))
def _backward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    options: RowOptions,
    ids: Tensor,
    ends: Tensor,
    backend: str | None,
    main_grad: Tensor | None,
    logits: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_kept: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias; those not `wanted` are empty."""
    products = Products.choose(hidden, weight, ids, ends, options.vocab_range, backend)
    incoming = grad_log_probs, grad_entropy, grad_kept
    grad = backward_rows(logits, products, options, token_ids, entropy, *incoming)
    of_hidden, of_weight, of_bias = (hidden.new_empty(0) for _ in range(3))
    if wanted[0]:
        of_hidden = sum_over_ranks(products.hidden_grad(grad), options.group)
    if wanted[1]:
        of_weight = products.weight_grad(grad, main_grad)
    if bias is not None and wanted[2]:
        of_bias = products.bias_grad(grad).to(bias.dtype)
    return of_hidden, of_weight, of_bias


def backward_rows(
    logits: Tensor,
    products: Products,
    options: RowOptions,
    token_ids: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_kept: Tensor | None,
) -> Tensor:
    """Compute the gradient of the logits, [K]."""
    if products.backend == "triton":
        from . import triton_rows

        arguments = (logits, products.ids, products.ends, token_ids, options)
        grads = (grad_log_probs, grad_entropy, grad_kept)
        return triton_rows.backward(*arguments, products.weight.shape[0], entropy, *grads)
    rows, ends = products.row_index, products.ends
    log_p, p, slope = _distribution(logits, products, options)
    active, grad = torch.zeros_like(token_ids, dtype=torch.bool), torch.zeros_like(p)
    if grad_log_probs is not None:
        grad += grad_log_probs.double()[rows] * (_is_token(products, token_ids) - p)
        active |= grad_log_probs != 0
    if grad_entropy is not None:
        shifted = log_p.masked_fill(p == 0, 0.0) + entropy.double()[rows]
        grad -= grad_entropy.double()[rows] * p * shifted
        active |= grad_entropy != 0
    if grad_kept is not None:
        kept = grad_kept.double()
        grad += kept - p * segment_reduce(kept, ends, "sum")[rows]
        active |= segment_reduce(kept.abs(), ends, "sum") != 0
    active &= token_ids != options.ignore_index
    return (grad * slope).where(active[rows], 0.0).to(logits.dtype)


register_linear_autograd(
    OP,
    (_forward_op, _backward_op),
    from_results=lambda results: (results[2], results[1]),
    more_grads=1,
)
