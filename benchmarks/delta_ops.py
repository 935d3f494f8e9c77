"""The operators of a delta sync: checksums, marks of changes, mapping, writing and coding them.

Bytes are the least that an operator reads and writes, compared with the rate of a read. SHARE of
the elements changes, anywhere. `eager` is the plain PyTorch of each operator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from benchmarks._bench import OURS, Bench
from hybridengine.kernels import bit_checksum, change_mask, mark_changed_
from hybridengine.kernels.delta import ChangeTable, decode_gaps, encode_gaps

SHARE = 0.01


def run(bench: Bench) -> None:
    numel = 2**14 if bench.quick else 2**28 if bench.device.type == "cuda" else 2**26
    generator = torch.Generator(bench.device).manual_seed(0)
    before = torch.randn(numel, generator=generator, device=bench.device).bfloat16().float()
    changed = torch.rand(numel, generator=generator, device=bench.device) < SHARE
    after = torch.where(changed, before + before.abs() / 64 + 1, before)
    checksum(bench, before)
    mark(bench, "unchanged", [before], before.bfloat16())
    mark(bench, f"{SHARE:.0%} changed", [after, before], before.bfloat16())
    positions = changed.nonzero()[:, 0]
    follow(bench, numel, positions.int(), after[positions].bfloat16())
    code(bench, numel, positions)


def checksum(bench: Bench, values: Tensor) -> None:
    _compare(
        bench,
        "bit_checksum",
        "forward",
        f"{values.nbytes >> 20} MiB",
        values.dtype,
        lambda backend: bit_checksum(values, backend=backend),
        values.nbytes,
    )


def mark(bench: Bench, how: str, states: list[Tensor], sent: Tensor) -> None:
    """Compare with each state in turn."""
    mask, turns = change_mask(sent), cycle(states)
    _compare(
        bench,
        "mark_changed_",
        "forward",
        f"{sent.numel()} {how}",
        states[0].dtype,
        lambda backend: mark_changed_(next(turns), sent, mask, backend=backend),
        states[0].nbytes + sent.nbytes,
    )


def follow(bench: Bench, numel: int, indices: Tensor, values: Tensor) -> None:
    """Map and write the changes of a matrix, of which the left half of the columns is sent."""
    width = 2**7
    height = numel // width
    row = [0, 0, 0, 0, 1, 1, height, width // 2, 0, 0, width, 1, 0, 0, width // 2, 1]
    table = ChangeTable(torch.tensor([row]), bench.device)
    target = torch.zeros(numel // 2, dtype=values.dtype, device=bench.device)
    kept = int((indices % width < width // 2).sum())
    shape, read = f"{len(indices)} of {numel}", indices.nbytes + values.nbytes
    for name, call, written in (
        ("map", lambda: table.map([indices], [values]), (8 + values.itemsize) * kept),
        ("scatter", lambda: table.scatter([indices], [values], [target]), values.itemsize * kept),
    ):
        bench.compare(
            "change_table",
            name,
            shape,
            values.dtype,
            {OURS: call},
            bytes_moved=read + written,
            peak="read",
        )


def code(bench: Bench, numel: int, positions: Tensor) -> None:
    gaps, width = encode_gaps(positions)
    count, shape = len(positions), f"{len(positions)} of {numel}"
    moved = positions.nbytes + gaps.nbytes
    encode = partial(encode_gaps, positions, 0)
    decode = partial(decode_gaps, gaps, width, 0, numel, count)
    for name, call in (("encode", encode), ("decode", decode)):
        of_backend = lambda backend, call=call: call(backend=backend)  # noqa: E731
        _compare(bench, "gaps", name, shape, positions.dtype, of_backend, moved)


def _compare(
    bench: Bench,
    op: str,
    pass_: str,
    shape: str,
    dtype: torch.dtype,
    call: Callable[[str | None], object],
    moved: int,
) -> None:
    """Time a call with our backend and with the reference."""
    calls = {OURS: partial(call, None), "eager": partial(call, "reference")}
    bench.compare(op, pass_, shape, dtype, calls, bytes_moved=moved, peak="read")
