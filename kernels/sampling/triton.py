"""sample_tokens in Triton: the algorithm of csrc/sampling, with bisection in place of selection.

The first kernel reads the logits, one program per tile, and writes the maxima of groups of entries
and the tile's sum of exp. The second one, a program per row, bounds what can be kept, gathers the
candidates from the tiles that reach the bound (the second read), finds the exact boundary among
them by bisection over the bits of their scaled logits, and draws.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import ceil_div, launch, next_power_of_2
from .reference import SamplingParameters

TILE = 4096  # entries of one sum
GROUP = 64  # entries of one maximum
CHUNK = 512  # candidates at a time
FAN = 16  # parts of a step of the bisection
_LOWEST_FLOAT = tl.constexpr(-3.4028234663852886e38)
_LOWEST_KEY = tl.constexpr(-0x7F7FFFFF - 1)  # of _LOWEST_FLOAT
_GREEDY_TEMPERATURE = tl.constexpr(1e-5)
_Z_UNIT = tl.constexpr(2.0**-17)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row_temperature(temperature, row):
    """The temperature, 1 for greedy rows, and whether the row is greedy."""
    value = tl.load(temperature + row)
    is_random = value >= _GREEDY_TEMPERATURE  # False for NaN
    return tl.where(is_random, value, 1.0), is_random == 0


@triton.jit
def _weight(distance, scale):
    """exp(distance / temperature) of distances below 0 in float32; NaN stays."""
    return tl.exp2(tl.maximum(distance * scale, -200.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _key(z):
    """int32 in the order of the floats."""
    return _flipped((z + 0.0).to(tl.int32, bitcast=True))  # -0 and 0 are equal


@triton.jit
def _flipped(bits):
    """Its own inverse: the bits of a float as a key, a key as the bits of a float."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _logit_of(key):
    return _flipped(key).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _uniform(seeds, positions, row):
    """In (0, 1) with 52 random bits."""
    position = tl.load(positions + row)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, c1, _, _ = tl.philox(tl.load(seeds + row), low, high, low * 0, low * 0)
    bits = ((c0.to(tl.uint64) << 32) | c1.to(tl.uint64)) >> 12
    return (bits.to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def summarize_kernel(
    logits,
    temperature,
    group_keys,
    references,
    sums,
    row_stride,
    vocab,
    tiles,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale = _LOG2E / _row_temperature(temperature, row)[0]
    groups = tl.arange(0, TILE // GROUP)
    columns = tile * TILE + groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * row_stride + columns, columns < vocab, -float("inf")).to(tl.float32)
    tops = tl.max(x, 1)
    reference = tl.maximum(tl.max(tops, 0), _LOWEST_FLOAT)
    at = row * tiles + tile
    tl.store(group_keys + at * (TILE // GROUP) + groups, _key(tops))
    tl.store(references + at, reference)
    tl.store(sums + at, tl.sum(tl.sum(_weight(x - reference, scale), 1), 0))


@triton.jit
def _pick(cumulative, weight, ids, target):
    """The first id whose cumulative weight exceeds the target; the last with a weight if none."""
    last = tl.max(tl.where(weight > 0, ids, -1), 0)
    first = tl.min(tl.where((cumulative > target) & (weight > 0), ids, 2147483647), 0)
    return tl.minimum(first, tl.maximum(last, 0))


@triton.jit
def _bisect(
    keys,
    weights,
    count,
    low,
    high,
    goal,
    WEIGHTED: tl.constexpr,
    CHUNK: tl.constexpr,
    FAN: tl.constexpr,
):
    """The largest key in [low, high) with at least `goal` of the weight in keys not below it.

    Without WEIGHTED every entry weighs 1. `low` where no key reaches the goal.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    steps = tl.arange(0, FAN)
    entries = tl.arange(0, CHUNK)
    while high - low > 1:
        step = tl.maximum((high - low + FAN - 1) // FAN, 1)
        pivots = tl.minimum(low + steps * step, high).to(tl.int32)
        reached = tl.zeros([FAN], tl.float64)
        for begin in range(0, count, CHUNK):
            inside = begin + entries < count
            key = tl.load(keys + begin + entries, inside, 0)
            if WEIGHTED:
                weight = tl.load(weights + begin + entries, inside, 0.0)
            else:
                weight = inside.to(tl.float32)
            above = key[:, None] >= pivots[None, :]
            reached += tl.sum(tl.where(above, weight[:, None], 0.0), 0).to(tl.float64)
        passed = (reached >= goal) & (pivots < high)
        best = tl.max(tl.where(passed, steps, 0), 0)
        high = tl.minimum(low + (best + 1) * step, high)
        low = low + best * step
    return low.to(tl.int32)


@triton.jit
def _mass_from(keys, weights, count, low, CHUNK: tl.constexpr):
    """The weight of the keys not below `low`, float64."""
    total = tl.zeros((), tl.float64)
    entries = tl.arange(0, CHUNK)
    for begin in range(0, count, CHUNK):
        inside = begin + entries < count
        key = tl.load(keys + begin + entries, inside, 0)
        weight = tl.load(weights + begin + entries, inside, 0.0)
        total += tl.sum(tl.where(key >= low, weight, 0.0), 0).to(tl.float64)
    return total


@triton.jit
def sample_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    group_keys,
    references,
    sums,
    keys,
    weights,
    ids,
    tokens,
    log_probs,
    num_kept,
    width,
    row_stride,
    vocab,
    tiles,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    FAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    temp, greedy = _row_temperature(temperature, row)
    scale = _LOG2E / temp
    # z is logit / z_temp, in a unit that keeps a finite logit from becoming infinite.
    z_unit = tl.where(temp < 1.0, _Z_UNIT, 1.0)
    z_temp = temp / z_unit
    GROUPS: tl.constexpr = TILE // GROUP
    tile_ids = tl.arange(0, TILES)
    used = tile_ids < tiles
    reference = tl.load(references + row * tiles + tile_ids, used, _LOWEST_FLOAT)
    top = tl.max(reference, 0)
    sum_of_tile = tl.load(sums + row * tiles + tile_ids, used, 0.0).to(tl.float64)
    sum_of_tile *= tl.exp(tl.maximum((reference.to(tl.float64) - top) / temp, -700.0))
    total = tl.sum(sum_of_tile, 0)
    valid = total > 0  # False for NaN
    k, p, least_p = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    cuts_k, cuts_p, cuts_min_p = (k > 0) & (k < vocab), p < 1.0, least_p > 0.0
    token = tl.zeros((), tl.int32)
    kept = tl.zeros((), tl.int32)
    columns = tl.arange(0, TILE)
    u = _uniform(seeds, positions, row)
    if valid:
        if greedy:
            tile = tl.min(tl.where(used & (reference == top), tile_ids, TILES), 0)
            inside = tile * TILE + columns < vocab
            x = tl.load(logits + tile * TILE + columns, inside, -float("inf")).to(tl.float32)
            token = tile * TILE + tl.min(tl.where(x == top, columns, TILE), 0)
        elif cuts_k | cuts_p | cuts_min_p:
            keys += row * width
            weights += row * width
            ids += row * width
            entries = tl.arange(0, CHUNK)
            lowest = tl.full((), _LOWEST_KEY, tl.int32)
            # What can be kept, as a logit; lowered by what rounding of z can make a tie.
            least_z = tl.full((), float("-inf"), tl.float64)
            if cuts_min_p:
                top_z = tl.div_rn(top, z_temp).to(tl.float64)
                least_z = top_z + z_unit * tl.log(tl.minimum(least_p, 1.0).to(tl.float64))
            least = least_z * z_temp
            group_keys += row * tiles * GROUPS
            num_groups = tiles * GROUPS
            if cuts_k:  # the k-th largest maximum of a group
                bound = _bisect(
                    group_keys, weights, num_groups, lowest, _key(top) + 1, k, False, CHUNK, FAN
                )
                least = tl.maximum(least, _logit_of(bound))
            elif cuts_min_p == 0:
                # The entries below have at most half of what top-p removes, even if all are as
                # large as the bound; or the maxima of groups not below it have `top_p` alone.
                removed = (1.0 - p.to(tl.float64)) * total
                least = tl.minimum(top + tl.log(0.5 * removed / vocab) * temp, top)
                for begin in range(0, num_groups, CHUNK):
                    inside = begin + entries < num_groups
                    maximum = _logit_of(tl.load(group_keys + begin + entries, inside, 0))
                    weight = _weight(maximum.to(tl.float32) - top, scale)
                    tl.store(weights + begin + entries, weight, inside)
                tl.debug_barrier()
                enough = p.to(tl.float64) * total * 1.000001
                bound = _bisect(
                    group_keys, weights, num_groups, lowest, _key(top) + 1, enough, True, CHUNK, FAN
                )
                tl.debug_barrier()
                least = tl.maximum(least, _logit_of(bound))
            least = least - tl.abs(least) * 4.76837158203125e-07 - z_temp.to(tl.float64) * 7e-43
            least_logit = tl.maximum(least, _LOWEST_FLOAT).to(tl.float32)
            count = tl.zeros((), tl.int32)
            for i in range(0, tiles):
                if tl.load(references + row * tiles + i) >= least_logit:
                    for begin in range(i * TILE, tl.minimum(i * TILE + TILE, vocab), CHUNK):
                        inside = begin + entries < vocab
                        x = tl.load(logits + begin + entries, inside, -float("inf"))
                        x = x.to(tl.float32)
                        z = tl.div_rn(x, tl.zeros_like(x) + z_temp)
                        found = (x >= least_logit) & (z.to(tl.float64) >= least_z)
                        place = count + tl.cumsum(found.to(tl.int32), 0) - 1
                        tl.store(keys + place, _key(z), found)
                        tl.store(weights + place, _weight(x - top, scale), found)
                        tl.store(ids + place, begin + entries, found)
                        count += tl.sum(found.to(tl.int32), 0)
            tl.debug_barrier()
            low = lowest
            high = _key(tl.div_rn(top, z_temp)) + 1
            if cuts_k & (k < count):
                low = _bisect(keys, weights, count, low, high, k, False, CHUNK, FAN)
            # Of the entries at the boundary, those are kept before which less than `goal` lies.
            goal = tl.full((), float("inf"), tl.float64)
            preceding = tl.zeros((), tl.float64)
            if cuts_p:
                whole = total
                if cuts_k | cuts_min_p:
                    whole = _mass_from(keys, weights, count, low, CHUNK)
                goal = tl.maximum(p.to(tl.float64) * whole, 1e-300)  # at least one is kept
                low = _bisect(keys, weights, count, low, high, goal, True, CHUNK, FAN)
                preceding = _mass_from(keys, weights, count, low + 1, CHUNK)
            total = tl.zeros((), tl.float64)
            for begin in range(0, count, CHUNK):
                inside = begin + entries < count
                key = tl.load(keys + begin + entries, inside, 0)
                weight = tl.load(weights + begin + entries, inside, 0.0)
                entry = tl.load(ids + begin + entries, inside, 0)
                tied = inside & (key == low)
                tied_weight = tl.where(tied, weight, 0.0).to(tl.float64)
                before = preceding + tl.cumsum(tied_weight, 0) - tied_weight
                keep = inside & ((key > low) | (tied & (before < goal)))
                preceding += tl.sum(tied_weight, 0)
                place = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
                tl.debug_barrier()
                tl.store(weights + place, weight, keep)
                tl.store(ids + place, entry, keep)
                kept += tl.sum(keep.to(tl.int32), 0)
                total += tl.sum(tl.where(keep, weight, 0.0), 0).to(tl.float64)
            tl.debug_barrier()
            target, sum_before = u * total, tl.zeros((), tl.float64)
            token = tl.full((), 2147483647, tl.int32)
            last = tl.zeros((), tl.int32)
            for begin in range(0, kept, CHUNK):
                inside = begin + entries < kept
                weight = tl.load(weights + begin + entries, inside, 0.0).to(tl.float64)
                entry = tl.load(ids + begin + entries, inside, 0)
                reached = sum_before + tl.cumsum(weight, 0) > target
                token = tl.minimum(
                    token, tl.min(tl.where(reached & (weight > 0), entry, 2147483647), 0)
                )
                last = tl.maximum(last, tl.max(tl.where(weight > 0, entry, 0), 0))
                sum_before += tl.sum(weight, 0)
            token = tl.minimum(token, last)
        else:
            target = u * total
            tile = _pick(tl.cumsum(sum_of_tile, 0), sum_of_tile, tile_ids, target)
            rest = target - tl.sum(tl.where(tile_ids < tile, sum_of_tile, 0.0), 0)
            inside = tile * TILE + columns < vocab
            x = tl.load(logits + tile * TILE + columns, inside, -float("inf")).to(tl.float32)
            weight = _weight(x - top, scale).to(tl.float64)
            token = tile * TILE + _pick(tl.cumsum(weight, 0), weight, columns, rest)
        distance = (tl.load(logits + token).to(tl.float64) - top) / temp
        tl.store(log_probs + row, (distance - tl.log(total)).to(tl.float32))
    else:
        tl.store(log_probs + row, float("nan"))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(num_kept + row, kept)


def triton_sample(
    logits: Tensor, parameters: SamplingParameters, return_kept_ids: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, log_probs, num_kept and kept_ids, which is empty unless requested."""
    rows, vocab = logits.shape
    tiles = ceil_div(vocab, TILE)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    group_keys = empty(rows, tiles, TILE // GROUP, dtype=torch.int32)
    references, sums = (empty(rows, tiles, dtype=torch.float32) for _ in range(2))
    # Of the candidates, of which a row may have `vocab`, and weights of groups before.
    width = max(vocab, tiles * (TILE // GROUP))
    keys, ids = (empty(rows, width, dtype=torch.int32) for _ in range(2))
    weights = empty(rows, width, dtype=torch.float32)
    tokens, log_probs = empty(rows, dtype=torch.int64), empty(rows, dtype=torch.float32)
    num_kept = empty(rows, dtype=torch.int32)
    if rows:
        summary = (group_keys, references, sums)
        sizes = (logits.stride(0), vocab, tiles, TILE, GROUP)
        launch(summarize_kernel, (rows, tiles), logits, parameters.temperature, *summary, *sizes)
        launch(
            sample_kernel,
            (rows,),
            logits,
            *parameters,
            *summary,
            *(keys, weights, ids, tokens, log_probs, num_kept, width),
            *sizes,
            next_power_of_2(tiles),
            CHUNK,
            FAN,
            num_warps=8,
        )
    kept_ids = ids[:0, 0]
    if return_kept_ids and rows:
        most = int(num_kept.max())
        kept_ids = ids[:, :most][torch.arange(most, device=ids.device) < num_kept.unsqueeze(1)]
    return tokens, log_probs, num_kept, kept_ids
