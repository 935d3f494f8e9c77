"""What is called of weight transfer: copies, changes, checksums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hybridengine._C as C
from tools.fuzz.draw import DTYPES, FLOAT_DTYPES, SHORT_DTYPES, Draw


def masks(d: Draw) -> tuple[list[Tensor], list[int]]:
    numels = [d.pick((0, 1, 31, 32, 33, 100, 16384, 16385)) for _ in range(d.size(3))]
    made = [d.ints(-(2**31), 2**31, -(-n // 32), dtype=torch.int32) for n in numels]
    return [m * d.bools(len(m)) for m in made], numels


def count_changed(d: Draw) -> list:
    return list(masks(d))


def take_changed(d: Draw) -> list:
    given, numels = masks(d)
    dtype = d.pick(SHORT_DTYPES)
    sources = [d.floats(n, dtype=dtype) for n in numels]
    ends = C.count_changed(given, numels).cumsum(0)
    return [given, sources, ends, int(ends[-1]) if len(ends) else 0]


def mark_changed(d: Draw) -> list:
    numel = d.pick((0, 1, 31, 32, 33, 100, 3000))
    sent = d.floats(numel, dtype=d.pick(SHORT_DTYPES))
    current = sent.to(d.pick((*FLOAT_DTYPES, torch.float64)))
    return [current, sent, d.ints(0, 2, -(-numel // 32), dtype=torch.int32)]


def slices(d: Draw, lengths: tuple[list[int], list[int]]) -> Tensor:
    """Return a table [P, 16] of slices of tensors of these numbers of elements.

    Those of the destinations, the second ones, do not overlap. Some of the sources, the first ones,
    lie side by side.
    """
    table: list[list[int]] = []
    for number in range(d.size(5)):
        sizes = [1, 1, d.pick((1, 2, 3)), d.pick((0, 1, 2, 5))]
        before = table[-1] if table and d.chance(0.3) else None
        if before:
            sizes[2] = before[6]
        row: list[int] = []
        strides: list[int] = []
        starts: list[int] = []
        for of_side in lengths:
            index = d.random.randrange(len(of_side)) if of_side else 0
            step = d.pick((1, 1, 2))
            side = [0, 0, step * sizes[3] + d.pick((0, 1)), step]
            reach = (sizes[2] - 1) * side[2] + (sizes[3] - 1) * side[3]
            room = (of_side[index] if of_side else 0) - reach - 1
            written = of_side is lengths[1]
            start = 32 * number if written else d.random.randint(0, max(room, 0))
            if before and not written:
                beside = before[2] + before[7]
                reach = (sizes[2] - 1) * before[10] + (sizes[3] - 1) * before[11]
                if beside + reach < of_side[before[0]]:
                    index, side, start = before[0], before[8:12], beside
            row.append(index)
            starts.append(start)
            strides += side
        table.append([*row, *starts, *sizes, *strides])
    return torch.tensor(table, dtype=torch.int64).reshape(-1, 16)


def tensors(d: Draw, dtype: torch.dtype, sizes: tuple[int, ...] = (40, 64, 100)) -> list[Tensor]:
    return [d.floats(d.pick(sizes)).to(dtype) for _ in range(d.pick((1, 1, 2)))]


WRITTEN = (160,)  # elements of a destination


def strided_copy(d: Draw) -> list:
    dtype = d.pick(DTYPES)
    is_float = dtype in (*FLOAT_DTYPES, torch.float64)
    sources = tensors(d, dtype)
    destinations = tensors(d, d.pick(FLOAT_DTYPES) if is_float else dtype, WRITTEN)
    lengths = [len(t) for t in sources], [len(t) for t in destinations]
    return [sources, destinations, slices(d, lengths)]


def copy_table(d: Draw) -> list:
    sources, destinations, table = strided_copy(d)
    blocks = d.maybe(lambda: d.ints(0, 4, len(table)))
    return [table, blocks, sources, destinations]


def block_absmax(d: Draw) -> list:
    sources = tensors(d, d.pick(FLOAT_DTYPES))
    table = slices(d, ([len(t) for t in sources], [64]))
    blocks, dtype = d.ints(0, 4, len(table)), d.pick(FLOAT_DTYPES)
    return [table, blocks, sources, d.ints(0, 9, 4, dtype=torch.int32), dtype]


def block_quantize(d: Draw) -> list:
    sources = tensors(d, d.pick(FLOAT_DTYPES))
    destinations = tensors(d, torch.float8_e4m3fn, WRITTEN)
    table = slices(d, ([len(t) for t in sources], [len(t) for t in destinations]))
    blocks, dtype = d.ints(0, 4, len(table)), d.pick(FLOAT_DTYPES)
    return [table, blocks, sources, destinations, d.floats(4), dtype]


def bit_checksum(d: Draw) -> list:
    return [d.ints(0, 256, d.pick((d.size(70), 1000)), dtype=torch.uint8)]


def encode_gaps(d: Draw) -> list:
    gaps = d.ints(1, d.pick((3, 300, 70000, 2**25)), d.size(60))
    start = d.pick((0, 5))
    return [start + gaps.cumsum(0), start]


def decode_gaps(d: Draw) -> list:
    positions, start = encode_gaps(d)
    gaps, width = C.encode_gaps(positions, start)
    end = int(positions[-1]) + 1 if len(positions) else start
    return [gaps, width, start, end, len(positions)]


def change_map(d: Draw) -> list:
    count, dtype = d.pick((1, 2)), d.pick(SHORT_DTYPES)
    table = slices(d, ([64] * count, [64]))
    table = table[(table[:, 4:8] > 0).all(1)].contiguous()
    chosen = [d.ints(0, 64, d.size(30)).unique() for _ in range(count)]
    indices = [x.to(d.pick((torch.int32, torch.int64))) for x in chosen]
    return [table, "cpu", indices, [d.floats(len(x), dtype=dtype) for x in indices]]


def change_scatter(d: Draw) -> list:
    table, device, indices, values = change_map(d)
    order = table[:, 1].argsort(stable=True)
    destination = d.floats(*WRITTEN, dtype=values[0].dtype)
    return [table[order], device, indices, values, [destination]]


def _change_table(table: Any, device: Any) -> Any:
    return C.ChangeTable(table, torch.device(device))


FUNCTIONS = (
    count_changed,
    take_changed,
    mark_changed,
    strided_copy,
    bit_checksum,
    encode_gaps,
    decode_gaps,
)
# What draws the arguments, what makes the class of the first two, and the method.
METHODS = (
    (copy_table, C.CopyTable, "copy"),
    (block_absmax, C.CopyTable, "absmax"),
    (block_quantize, C.CopyTable, "quantize"),
    (change_map, _change_table, "map"),
    (change_scatter, _change_table, "scatter"),
)
