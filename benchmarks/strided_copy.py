"""The copies of a reshard on one rank: pack and unpack tables of a 7B model, N=8 t=4.

The baseline is one torch call per slice. What a rank sends and keeps is read once, not by it.
"""

from __future__ import annotations

import math
from functools import partial
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks._bench import OURS, Bench
from hybridengine.kernels.strided_copy import CopyTable, strided_copy
from hybridengine.reshard import build_plan
from hybridengine.sync.blocks import contiguous_strides
from hybridengine.sync.layout import Copy, EngineLayout, TensorSpec
from hybridengine.sync.shards import ShardSpec
from hybridengine.sync.tables import Exchange, ExchangeBuilder

RANKS, TP, RANK = 8, 4, 1
Shape = tuple[int, int]
Tensors = dict[str, Tensor]


class _WithRows(CopyTable):
    """A CopyTable with its rows, for the baseline."""

    def __init__(self, table: torch.Tensor, device: torch.device) -> None:
        super().__init__(table, device)
        self.rows = table


def run(bench: Bench) -> None:
    hidden, inner, vocab = (256, 512, 1000) if bench.quick else (4096, 11008, 32000)
    count = 32 if bench.device.type == "cuda" and not bench.quick else 4  # layers repeat
    shapes, layouts = llama(hidden, inner, vocab, count)
    holders = tuple((rank,) for rank in range(RANKS))
    rows = {n for n in shapes if n.endswith(("o", "down"))}
    sources = {
        n: ShardSpec.along(s, torch.float32, int(n in rows), holders) for n, s in shapes.items()
    }
    plan = build_plan(sources, [layouts[rank * TP // RANKS] for rank in range(RANKS)])
    local = {n: local_shape(spec) for n, spec in sources.items()}
    strides = {n: contiguous_strides(shape) for n, shape in local.items()}
    builder = ExchangeBuilder(plan, RANK, strides, bench.device)
    with mock.patch("hybridengine.sync.tables.CopyTable", _WithRows):
        exchanges = [builder.build(bucket) for bucket in plan.buckets]
    # Random bits would be NaNs; zeros would be one page of memory.
    shards = {n: torch.randn(shape, device=bench.device) for n, shape in local.items()}
    layout = layouts[RANK * TP // RANKS]
    engine = {
        n: torch.randn(spec.shape, device=bench.device).to(spec.dtype)
        for n, spec in layout.destinations.items()
    }
    largest = max(max(sum(e.send_counts), sum(e.receive_counts)) for e in exchanges)
    buffer = torch.randn(largest, device=bench.device).to(torch.bfloat16)
    for kind in ("pack", "unpack"):
        measure(bench, kind, exchanges, shards, engine, buffer)


def measure(
    bench: Bench,
    kind: str,
    exchanges: list[Exchange],
    shards: Tensors,
    engine: Tensors,
    buffer: Tensor,
) -> None:
    """Time all tables of one kind, one after the other, as a sync runs them."""
    ours, eager, bytes_moved, num_rows = [], [], 0, 0
    for exchange in exchanges:
        table: _WithRows = getattr(exchange, kind)
        if not len(table):
            continue
        read = (
            [*buffer[: sum(exchange.receive_counts)].split(exchange.receive_counts)]
            if kind == "unpack"
            else [shards[name] for name, _ in exchange.sources]
        )
        write = [engine[name] for name in exchange.destinations]
        if kind == "pack":
            write = [buffer, *write]
        ours.append(partial(table.copy, read, write))
        eager.append(partial(strided_copy, read, write, table.rows, backend="reference"))
        numel = table.rows[:, 4:8].prod(1)
        _, once = np.unique(table.rows[:, [0, 2]].numpy(), axis=0, return_index=True)
        bytes_moved += int(numel[once].sum()) * read[0].element_size()
        bytes_moved += int(numel.sum()) * write[0].element_size()
        num_rows += len(table)

    def run_all(copies: list[partial]) -> None:
        for copy in copies:
            copy()

    calls = {OURS: partial(run_all, ours), "eager": partial(run_all, eager)}
    shape = f"{num_rows} slices {bytes_moved >> 20} MiB"
    dtype = torch.bfloat16 if kind == "unpack" else torch.float32
    bench.compare("strided_copy", kind, shape, dtype, calls, bytes_moved=bytes_moved, peak="copy")


def local_shape(spec: ShardSpec) -> tuple[int, ...]:
    return tuple(high - low for low, high in spec.box(RANK))


def llama(
    hidden: int, inner: int, vocab: int, count: int, tp: int = TP
) -> tuple[dict[str, tuple[int, ...]], list[EngineLayout]]:
    """Parameter shapes, and the layout of each TP rank of an engine with fused qkv and gate_up."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, hidden), "head": (vocab, hidden)}
    fused: dict[str, list[str]] = {"embed": ["embed"], "head": ["head"]}
    for i in range(count):
        square = dict.fromkeys("qkvo", (hidden, hidden))
        shapes |= {f"{i}.{n}": s for n, s in square.items()}
        shapes |= {f"{i}.gate": (inner, hidden), f"{i}.up": (inner, hidden)}
        shapes |= {f"{i}.down": (hidden, inner), f"{i}.norm": (hidden, 1)}
        fused |= {f"{i}.qkv": [f"{i}.{n}" for n in "qkv"], f"{i}.gate_up": [f"{i}.gate", f"{i}.up"]}
    return shapes, [layout_of(shapes, fused, rank, tp) for rank in range(tp)]


def layout_of(
    shapes: dict[str, tuple[int, ...]], fused: dict[str, list[str]], tp_rank: int, tp: int
) -> EngineLayout:
    copies, destinations = [], {}

    def take(name: str, destination: str, at: int, sizes: Shape, start: int) -> None:
        width = shapes[name][1]
        copies.append(Copy(name, destination, start, at, sizes, (width, 1), (sizes[1], 1)))

    for destination, names in fused.items():
        at = 0
        for name in names:
            rows, width = shapes[name][0] // tp, shapes[name][1]
            take(name, destination, at, (rows, width), tp_rank * rows * width)
            at += rows * width
        shape = (at // shapes[names[0]][1], shapes[names[0]][1])
        destinations[destination] = TensorSpec(shape, (shape[1], 1), torch.bfloat16)
    for name in shapes.keys() - {n for names in fused.values() for n in names}:
        full = shapes[name]
        part = (full[0], full[1] // (1 if name.endswith("norm") else tp))
        start = 0 if part == full else tp_rank * part[1]
        take(name, name, 0, part, start)
        destinations[name] = TensorSpec(part, contiguous_strides(part), torch.bfloat16)
    assert sum(math.prod(s.shape) for s in destinations.values()) == sum(c.numel for c in copies)
    return EngineLayout(destinations, copies)
