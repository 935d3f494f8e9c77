"""sample_tokens in plain PyTorch: the specification, with probabilities in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GREEDY_TEMPERATURE = 1e-5  # vLLM's; a temperature below it selects the largest logit
_UNIT = 2.0**-17  # z is in this unit below a temperature of 1, so that finite logits stay finite
_MASK = 0xFFFFFFFF


class SamplingParameters(NamedTuple):
    """[B] each, see `sample_tokens`; top_k is int32, temperature, top_p and min_p are float32."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor


def philox_uniform(seed: int, position: int) -> float:
    """Return a number in (0, 1) with 52 random bits, Philox4x32-10 of (seed, position)."""
    key, counter = _words(seed), [*_words(position), 0, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (b >> 32) ^ counter[1] ^ key[0],
            b & _MASK,
            (a >> 32) ^ counter[3] ^ key[1],
            a & _MASK,
        ]
        key = [(key[0] + 0x9E3779B9) & _MASK, (key[1] + 0xBB67AE85) & _MASK]
    return (((counter[0] << 32 | counter[1]) >> 12) + 0.5) * 2.0**-52


def _words(value: int) -> list[int]:
    return [value & _MASK, (value >> 32) & _MASK]


def kept_entries(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Return bool [B, V]: the entries of each row that sampling keeps."""
    vocab = logits.shape[1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scale = temperature.to(logits.dtype).unsqueeze(1)
    unit = torch.where(scale < 1.0, _UNIT, 1.0)
    z, ids = (logits / (scale / unit)).sort(dim=1, descending=True, stable=True)
    least = z[:, :1].double() + unit.double() * min_p.double().log().unsqueeze(1)
    kept = (z > -torch.inf) & (z.double() >= least)
    k = top_k.where(top_k > 0, vocab).clamp(max=vocab).long().unsqueeze(1)
    kept &= z >= z.gather(1, k - 1)
    sorted_logits = logits.gather(1, ids)
    weights = _weights(sorted_logits, sorted_logits[:, :1], temperature).where(kept, 0.0)
    preceding = weights.cumsum(1).roll(1, 1)
    preceding[:, 0] = -1.0  # the first entry is always kept
    total = weights.sum(1, keepdim=True)
    p = top_p.double().unsqueeze(1)
    kept &= (preceding < p * total) | (p >= 1.0)
    return torch.zeros_like(kept).scatter_(1, ids, kept)


def _weights(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Return exp((logit - largest) / temperature) in float64."""
    return ((logits.double() - largest.double()) / temperature.double().unsqueeze(1)).exp()


def reference_sample(
    logits: Tensor, parameters: SamplingParameters, return_kept_ids: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, log_probs, num_kept and kept_ids, which is empty unless requested."""
    temperature, top_k, top_p, min_p, seeds, positions = parameters
    vocab = logits.shape[1]
    greedy = ~(temperature >= GREEDY_TEMPERATURE)
    temperature = temperature.masked_fill(greedy, 1.0)
    cut = ~greedy & (((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0))
    largest = logits.amax(1, keepdim=True)  # NaN where the row has one
    kept = kept_entries(logits, temperature, top_k, top_p, min_p) | ~cut.unsqueeze(1)
    weights = _weights(logits, largest, temperature).where(kept, 0.0)
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1:].contiguous()
    pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
    uniform = [philox_uniform(seed, position) for seed, position in pairs]
    target = torch.tensor(uniform, dtype=torch.float64, device=logits.device).unsqueeze(1) * total
    last = torch.searchsorted(cumulative, total)  # also where the target is rounded to the total
    tokens = torch.searchsorted(cumulative, target, right=True).minimum(last)
    tokens = tokens.where(~greedy.unsqueeze(1), (logits == largest).int().argmax(1, keepdim=True))
    tokens = tokens.masked_fill(~largest.isfinite(), 0)
    distance = (logits.gather(1, tokens).double() - largest.double()).squeeze(1) / temperature
    log_probs = (distance - total.squeeze(1).log()).float()
    valid = largest.squeeze(1).isfinite()
    kept &= (cut & valid).unsqueeze(1)
    kept_ids = kept.nonzero()[:, 1].int() if return_kept_ids else seeds.new_empty(0).int()
    return (
        tokens.squeeze(1),
        log_probs.masked_fill(~valid, torch.nan),
        kept.sum(1, dtype=torch.int32),
        kept_ids,
    )
