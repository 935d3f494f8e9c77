"""Log-probs over kept vocabulary entries: selected by row, against a softmax over the entries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.model import KeptIds, pack_rollouts, packed_log_probs
from tests.model import cases
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, save_tiny


def of_lists(rows: list[list[int]]) -> KeptIds:
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return KeptIds(torch.tensor([i for row in rows for i in row], dtype=torch.int32), ends)


def lists_of(kept: KeptIds) -> list[list[int]]:
    return [part.tolist() for part in kept.ids.split(kept.cu_kept.diff().tolist())]


ROWS = st.lists(st.lists(st.integers(0, 8), max_size=5, unique=True).map(sorted), min_size=1)


@given(ROWS, st.data())
def test_rows_are_selected_in_any_order_with_repeats(rows: list[list[int]], data) -> None:
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12))
    taken = of_lists(rows).take(torch.tensor(index, dtype=torch.int64))
    assert lists_of(taken) == [rows[i] for i in index]
    assert taken.ids.dtype == torch.int32 and taken.cu_kept.dtype == torch.int64


@given(ROWS)
def test_a_row_without_entries_has_the_full_vocabulary(rows: list[list[int]]) -> None:
    wanted = [row or list(range(9)) for row in rows]
    kept = of_lists(rows)
    assert lists_of(kept.filled(9)) == wanted
    assert [row.nonzero().flatten().tolist() for row in kept.vocab_mask(9)] == wanted


def kept_of(targets: list[int]) -> KeptIds:
    """For every token a few other entries, and the full vocabulary for one of seven."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for r, target in enumerate(targets):
        others = torch.randperm(VOCAB, generator=generator)[: r % 7].tolist()
        rows.append([] if r % 7 == 6 else sorted({target, *others}))
    return of_lists(rows)


def body(rank: int, world_size: int, path: str, sp_size: int) -> None:
    import torch.distributed as dist

    pairs = cases.rollouts(cases.SIZES)
    single = cases.single_process_model(path)
    logits, targets = cases.one_by_one(single, pairs)
    kept = kept_of(targets.tolist())
    log_softmax = logits.masked_fill(~kept.vocab_mask(VOCAB), -torch.inf).log_softmax(-1)
    log_probs = log_softmax.gather(1, targets[:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax.nan_to_num(neginf=0.0)).sum(-1)
    cases.weighted(log_probs, entropy).backward()
    wanted = {n: p.grad for n, p in single.named_parameters()}
    group = dist.group.WORLD if sp_size > 1 else None
    batch = pack_rollouts(pairs, sequence_parallel=group, parts={"kept": kept})
    for fused in (True, False):
        model = cases.load(path, world_size, use_fused_kernels=fused)
        results = packed_log_probs(model, batch)
        torch.testing.assert_close(results, (log_probs.detach(), entropy.detach()), **cases.LOGITS)
        (cases.weighted(*results) * sp_size).backward()  # FSDP2 averages
        cases.assert_close_by_scale(cases.full_tensors(model, lambda p: p.grad), wanted)


@pytest.mark.multirank
@pytest.mark.parametrize(("kind", "sp_size"), [("gemma2", 1), ("qwen2", 2), ("llama", 4)])
def test_log_probs_over_kept_entries(tmp_path: Path, kind: str, sp_size: int) -> None:
    """Soft-capped logits, an untied head; one process, and the rows split over ranks."""
    run_ranks(body, sp_size, save_tiny(kind, tmp_path), sp_size)
