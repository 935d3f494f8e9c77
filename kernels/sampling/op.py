"""sample_tokens: one token per row of logits, with its log-prob and the entries that were kept.

A sampler of separate operations reads and writes [B, V] for the temperature, the sort, the softmax,
the cumulative sum, the scatter, the log-softmax and the noise. Here one pass gives the sums of exp
and the maxima of groups of entries; they bound the smallest logit that top-k, top-p or min-p can
keep, and a second pass reads the groups that reach the bound. The draw takes one random number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _check as check
from .._backend import choose_backend, native, register_backends
from .._library import custom_op
from .._per_token import unit_inner_stride
from .reference import SamplingParameters, reference_sample

OP = "sample_tokens"
_MAX_VOCAB = 2**31 - 1

register_backends(OP, cpu=("cpp", "reference"), cuda=("triton", "reference"))


class SampledTokens(NamedTuple):
    """What `sample_tokens` returns, for B rows."""

    tokens: Tensor  # int64 [B]
    log_probs: Tensor  # float32 [B], of the distribution that the token was drawn from
    num_kept: Tensor  # int32 [B]; 0: nothing was cut
    kept_ids: Tensor | None  # int32 [sum of num_kept], ascending in each row, rows end to end


def sample_tokens(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    return_kept_ids: bool = False,
    backend: str | None = None,
) -> SampledTokens:
    """Sample a token of each row of logits, with temperature, min-p, top-k and top-p in this order.

    The kept entries are those of vLLM's sampler. With z = logit / temperature, rounded as float32
    but for overflow (below a temperature of 1, z is kept in a unit of 2^-17): min-p
    keeps the entries whose probability is at least `min_p` times the largest one. top-k keeps the
    entries that are not below the k-th largest z, so ties at the boundary are all kept. top-p keeps
    an entry if the entries that precede it, in descending order of z, have less than `top_p` of the
    probability that top-k and min-p left; of equal z the lower id comes first (vLLM's order of
    equal z is that of an unstable sort). The first entry is always kept. Where the cumulative
    probability is within 1e-6 of `top_p`, backends may differ by that entry.

    The draw inverts the cumulative distribution of the kept entries in the order of their ids, with
    one number of Philox4x32-10 (Salmon et al., 2011) under key `seeds[b]` and counter
    `positions[b]`. So a row's results depend on its own arguments alone, not on the batch or on the
    number of threads. Backends and instruction sets draw the same token unless the number is within
    rounding, about 1e-6, of the boundary between two tokens.

    Args:
        logits: [B, V], float32, bfloat16 or float16; float64 on the reference backend. -inf removes
            an entry.
        seeds, positions: [B] int64. A pair must not be used for two draws that are to be
            independent: for example the seed of a request and the position of the token in it.
        temperature: number or [B]. Below 1e-5 the token is the largest logit (the lowest id of
            equal ones), nothing is cut and the log-prob is that at temperature 1.
        top_k: number or [B]; 0, -1 or from V on: all.
        top_p: number or [B], above 0, up to 1 (all).
        min_p: number or [B], 0 (all) to 1.
        return_kept_ids: return `kept_ids`, which waits for the device.
        backend: `cpp` (CPU), `triton` (CUDA) or `reference`; None: the best one for the device.

    Returns:
        SampledTokens. A row whose logits are all -inf, or have NaN or +inf, has token 0, log-prob
        NaN and nothing kept.

    Raises:
        ValueError: shapes, dtypes, devices or numbers that do not fit. (On a GPU the values of
            tensors are not checked.)

    Examples:
        >>> logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
        >>> seeds, positions = torch.tensor([7]), torch.tensor([0])
        >>> sampled = sample_tokens(logits, seeds, positions, top_k=2, return_kept_ids=True)
        >>> sampled.num_kept.tolist(), sampled.kept_ids.tolist()
        ([2], [1, 3])
    """
    check.same_device(OP, logits=logits, seeds=seeds, positions=positions)
    sizes: check.Sizes = {}
    check.shape(OP, "logits", logits, "B V", sizes)
    check.floats(OP, logits=logits)
    vocab = logits.shape[1]
    if not 0 < vocab <= _MAX_VOCAB:
        raise ValueError(f"{OP}: logits has shape {list(logits.shape)}; expected 0 < V < 2^31.")
    for name, tensor in (("seeds", seeds), ("positions", positions)):
        check.shape(OP, name, tensor, "B", sizes)
        check.dtype(OP, name, tensor, (torch.int64,))
    numbers = {
        "temperature": _per_row("temperature", temperature, logits, sizes, at_least=0.0),
        "top_k": _per_row("top_k", top_k, logits, sizes, at_least=-1),
        "top_p": _per_row("top_p", top_p, logits, sizes, above=0.0, at_most=1.0),
        "min_p": _per_row("min_p", min_p, logits, sizes, at_least=0.0, at_most=1.0),
    }
    chosen = choose_backend(OP, logits.device, backend, logits.dtype)
    keys = seeds.contiguous(), positions.contiguous()
    # The number of kept ids of all rows is no tensor that could be batched.
    refuse = check.untransformed if return_kept_ids else check.reverse_mode_only
    refuse(OP, logits=logits, **numbers)
    results = _op(logits, *numbers.values(), *keys, return_kept_ids, chosen)
    tokens, log_probs, num_kept, kept_ids = results
    return SampledTokens(tokens, log_probs, num_kept, kept_ids if return_kept_ids else None)


def _per_row(name: str, value: Any, logits: Tensor, sizes: check.Sizes, **bounds: Any) -> Tensor:
    """Return a parameter as [B] on the device of the logits, int32 (top_k) or float32."""
    integral = name == "top_k"
    dtype = torch.int32 if integral else torch.float32
    if not isinstance(value, Tensor):
        # top_k from V on keeps all, also where it does not fit int32.
        value = (
            min(check.integer(OP, name, value, at_least=int(bounds["at_least"])), _MAX_VOCAB)
            if integral
            else check.number(OP, name, value, **bounds)
        )
        return torch.full(logits.shape[:1], value, dtype=dtype, device=logits.device)
    check.same_device(OP, logits=logits, **{name: value})
    check.shape(OP, name, value, "B", sizes)
    check.dtype(OP, name, value, (torch.int32, torch.int64) if integral else check.FLOATS)
    if check.readable(value) and value.numel():
        low, high = (float(x) for x in value.aminmax())
        for bound in (low, high):
            check.number(OP, name, bound, **bounds)
    if integral:
        value = value.clamp(max=_MAX_VOCAB)
    return value.to(dtype).contiguous()


@custom_op(
    f"hybridengine::{OP}",
    mutates_args=(),
    schema="(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor seeds, Tensor positions, bool return_kept_ids, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _op(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *per_row, return_kept_ids, backend = arguments
    logits = unit_inner_stride(logits)
    if backend == "cpp":
        return native().sample_tokens(logits, *per_row, return_kept_ids)
    parameters = SamplingParameters(*per_row)
    if backend == "triton":
        from .triton import triton_sample

        return triton_sample(logits, parameters, return_kept_ids)
    return reference_sample(logits, parameters, return_kept_ids)


@_op.register_fake
def _(logits: Tensor, return_kept_ids: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def per_row(dtype: torch.dtype) -> Tensor:
        return logits.new_empty(logits.shape[0], dtype=dtype)

    count = torch.library.get_ctx().new_dynamic_size() if return_kept_ids else 0
    kept_ids = logits.new_empty(count, dtype=torch.int32)
    return per_row(torch.int64), per_row(torch.float32), per_row(torch.int32), kept_ids
