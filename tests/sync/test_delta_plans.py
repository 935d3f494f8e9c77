"""Deltas of random plans on all ranks of a world, in one process; and messages of a delta."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import Changed
from hybridengine.remote.sync.changes import Part, group_size
from hybridengine.remote.sync.delta import (
    CorruptDeltaError,
    DeltaGroup,
    Versions,
    decode,
    encode,
    joined,
)
from hybridengine.sync.planner import build_plan
from hybridengine.sync.tables import ExchangeBuilder
from tests.sync.random_plans import Case, PlannedRanks, assert_written, random_cases, values_of


def delta_all(
    world: PlannedRanks, plan, sources, before: dict[str, torch.Tensor], groups: list
) -> None:
    """Apply to the engines of all ranks what differs between `before` and the ranks' shards."""
    for built in zip(*groups, strict=True):
        sent = []
        for rank, group in enumerate(built):
            changes = changes_of(world, rank, group, sources, before)
            headers, messages = group.encode(changes, Versions(1, 2))
            parts = messages.split([header.num_bytes for header in headers])
            sent.append(list(zip(headers, parts, strict=True)))
            group.write_local(changes, world.engines[rank])
        for rank, group in enumerate(built):
            headers, parts = zip(*(messages[rank] for messages in sent), strict=True)
            group.write(headers, parts, Versions(1, 2), world.engines[rank])


def changes_of(world, rank, group, sources, before) -> dict[Part, Changed]:
    changes = {}
    for part in group.parts:
        shard = world.shards[rank][part.name]
        old = shard_before(before, part, sources, rank)
        spec = sources[part.name]
        if part.box is not None and (number := spec.shard_of(rank)) is not None:
            pairs = list(zip(part.box, spec.box(number), strict=True))
            inside = tuple(slice(r.start - h.start, r.stop - h.start) for r, h in pairs)
            shard, old = shard[inside].contiguous(), old[inside].contiguous()
        now, old = shard.flatten(), old.flatten()
        chosen = (now != old).nonzero()[:, 0]
        changes[part] = Changed(chosen, now[chosen])
    return changes


def shard_before(before, part: Part, sources, rank: int) -> torch.Tensor:
    spec = sources[part.name]
    if (shard := spec.shard_of(rank)) is None:
        return before[part.name][:0]
    return before[part.name][tuple(slice(*r) for r in spec.box(shard))].contiguous()


@settings(deadline=None, max_examples=50)
@given(random_cases(), st.floats(0, 1), st.sampled_from([4096, 1 << 20]), st.sampled_from([1, 4]))
def test_random_plans_and_changes(case: Case, share: float, bucket_bytes: int, size: int) -> None:
    """Any strides, permutations, repetitions and overlaps, on every rank of a world."""
    sources, layouts, nodes = case
    layouts = [layout_of_16_bits(layout) for layout in layouts]
    plan = build_plan(sources, layouts, bucket_bytes, nodes)
    numbers = {n: t.to(torch.int16) for n, t in values_of(sources).items()}
    generator = torch.Generator().manual_seed(int(share * 1e6))
    changed = {n: torch.rand(t.shape, generator=generator) < share for n, t in numbers.items()}
    before = {n: t.view(torch.bfloat16) for n, t in numbers.items()}  # all bit patterns differ
    after = {
        n: (t | (changed[n] * 0x4000).short()).view(torch.bfloat16) for n, t in numbers.items()
    }
    world = PlannedRanks(plan, sources, layouts, after, ExchangeBuilder)
    for layout, engine in zip(layouts, world.engines, strict=True):
        for name in engine:
            engine[name] = engine[name].bfloat16()
        for c in layout.copies:
            read = before[c.source].as_strided(c.sizes, c.source_strides, c.source_offset)
            engine[c.destination].as_strided(c.sizes, c.destination_strides).copy_(read)
    groups = [
        [DeltaGroup(builder, b) for b in joined(plan.buckets, size)] for builder in world.builders
    ]
    delta_all(world, plan, sources, before, groups)
    assert_written(layouts, after, world.engines)


def layout_of_16_bits(layout):
    for name, spec in layout.destinations.items():
        layout.destinations[name] = replace(spec, dtype=torch.bfloat16)
    return layout


def test_messages_that_do_not_fit_their_header() -> None:
    positions = torch.tensor([10, 12, 400])
    numbers = torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    versions = Versions(3, 4)
    cuts, starts = [0, 2, 2, 3], [10, 13, 20, 401]
    headers, messages = encode(positions, numbers, cuts, starts, versions)
    assert [h.num_changes for h in headers] == [2, 0, 1] and headers[0][:2] == versions
    assert [h.num_bytes for h in headers] == [8, 0, 8] and len(messages) == 16
    parts, counts = messages.split([h.num_bytes for h in headers]), [3, 7, 381]
    places, decoded = decode(headers, parts, torch.bfloat16, counts, versions)
    for low, high, start, place, value in zip(
        cuts, cuts[1:], starts, places, decoded, strict=False
    ):
        assert torch.equal(place + start, positions[low:high])
        assert torch.equal(value, numbers[low:high])
    for count, change in ((380, {}), (381, {"num_changes": 0}), (381, {"gap_width": 3})):
        wrong = [*headers[:2], headers[2]._replace(**change)]
        with pytest.raises(CorruptDeltaError, match="from rank 2 was not applied"):
            decode(wrong, parts, torch.bfloat16, [*counts[:2], count], versions)
    with pytest.raises(CorruptDeltaError, match="from version 3 to 4, expected 2 to 4"):
        decode(headers, parts, torch.bfloat16, counts, Versions(2, 4))


def test_messages_of_a_group_take_about_two_buckets() -> None:
    for share in (0.0, 1e-4, 0.01, 0.03, 0.1, 1 / 3):
        size = group_size(share)
        assert size * share * 1.5 <= 2
