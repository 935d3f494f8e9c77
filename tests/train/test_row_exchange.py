"""Rows on real ranks: every wanted row arrives, in order, whatever the pieces; texts on rank 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.ranks import message_of, run_ranks
from tests.train.rollout_cases import make_rollouts, share

pytestmark = pytest.mark.multirank


def rows_of(rows: list[int], lengths: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Row i holds 100 i, 100 i + 1 and so on."""
    parts = [100 * i + torch.arange(int(lengths[i])) for i in rows]
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).to(dtype)


def exchange_body(rank: int, world_size: int, seed: int) -> None:
    from hybridengine.train.exchange import RowExchange

    generator = torch.Generator().manual_seed(seed)

    def randint(high: int, size: int) -> torch.Tensor:
        return torch.randint(high, (size,), generator=generator)

    count = 17
    sources, lengths = randint(world_size, count), randint(6, count)
    wanted = [randint(count, 4 * d).tolist() for d in range(world_size)]  # rank 0 wants nothing
    wanted[0] = wanted[0] if world_size > 1 else [5, 2, 5, 16]
    exchange = RowExchange(sources, wanted)
    own = (sources == rank).nonzero().flatten().tolist()
    for dtype in (torch.int32, torch.float32, torch.uint8, torch.int16):
        values, want = (rows_of(rows, lengths, dtype) for rows in (own, wanted[rank]))
        assert torch.equal(exchange(values, lengths), want)
        pieces = list(exchange.pieces(values, lengths, max_elements=5))
        assert torch.equal(torch.cat(pieces), want)
        assert len(pieces) > 1
    of_first = RowExchange(torch.zeros_like(sources), wanted)  # other ranks hold the rows as well
    everything = rows_of([*range(count)], lengths, torch.int32)
    assert torch.equal(of_first(everything, lengths), rows_of(wanted[rank], lengths, torch.int32))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_wanted_row_arrives_in_order(world_size: int) -> None:
    run_ranks(exchange_body, world_size, 7)


def files_body(rank: int, world_size: int, folder: Path) -> tuple[bytes, str]:
    from dataclasses import replace

    from hybridengine.train.rollout_files import rollout_file, texts_on_rank0

    rollouts = share(*make_rollouts(101)[:2], rank, world_size)
    with rollout_file(folder / "rollouts.jsonl", rank == 0) as write:
        write(rollouts)
        write(rollouts)
    some = b"".join(texts_on_rank0(rollouts, lambda _, r: f"{r.reward.score} é\n", [1, 6]))
    own = [replace(r, reward=r.reward.add(f"of_rank_{rank}", 0.0, 0.0)) for r in rollouts.own]
    return some, message_of(lambda: rollouts.gather(rollouts.prompts, own, rank))


def test_files_and_texts_come_in_order_from_all_ranks(tmp_path: Path) -> None:
    results = run_ranks(files_body, 3, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    want = [list(r.response.token_ids) for r in make_rollouts(101)[1]]
    assert [row["response_ids"] for row in rows] == [*want, *want]
    assert [text for text, _ in results] == ["1.0 é\n0.0 é\n".encode(), b"", b""]
    for _, message in results:
        assert message.startswith("RewardError: ") and "of_rank_1" in message
