"""What is called of packing, balancing and memory."""

from __future__ import annotations

import math

import torch

from tools.fuzz.draw import DTYPES, Draw


def balance(d: Draw) -> list:
    return [d.ints(0, 100, d.size(40)).tolist(), d.pick((1, 2, 3, 8)), d.chance(0.5)]


def balance_by_tokens(d: Draw) -> list:
    return [d.ints(0, 100, d.size(40)).tolist(), d.pick((99, 100, 1000)), d.size(4), d.pick((1, 4))]


def empty_from_pool(d: Draw) -> list:
    return [d.pick(([3, 4], [0], [], [1 << 20, 5], [2, 1 << 21])), d.pick(DTYPES)]


def move_rows(d: Draw) -> list:
    leading, count, rows = d.pick((1, 2)), d.size(3), d.size(50)
    lead = [d.size(9) for _ in range(leading)]
    dtypes = [d.pick(DTYPES[:10]) for _ in range(count)]
    tails = [d.pick(([], [1], [3], [17], [2, 5])) for _ in range(count)]
    sources = [
        d.rows(d.floats(*lead, *tail).to(dtype)) for tail, dtype in zip(tails, dtypes, strict=True)
    ]
    index = d.ints(-1, math.prod(lead), rows)
    positions = d.maybe(lambda: d.ints(0, 3, rows))
    shifts = [0 if positions is None else d.pick((0, 1)) for _ in range(count)]
    return [sources, index, positions, leading, [rows], [d.pick((0.0, 1.0))] * count, shifts]


def pack_forest(d: Draw) -> list:
    tokens = d.ints(0, 3, d.size(100))
    return [tokens, d.ends(d.size(8) or 1, len(tokens), torch.int64)]


def pack_layout(d: Draw) -> list:
    mask = d.rows(d.bools(d.size(9), d.size(40)))
    dtypes = (torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64)
    return [mask.to(d.pick(dtypes)), d.pick((-1, int(mask.sum()), mask.numel() + 3))]


FUNCTIONS = (
    balance,
    balance_by_tokens,
    empty_from_pool,
    move_rows,
    pack_forest,
    pack_layout,
)
