"""Run by test_attention_triton.py in Triton's interpreter."""

import sys

import pytest
import torch

from hybridengine.kernels import tree_attention
from hybridengine.kernels.attention import triton as backend
from hybridengine.kernels.attention.triton_tables import BEGIN, LAST, PREVIOUS, block_tables
from hybridengine.kernels.attention.triton_tiles import Tiles
from tests.kernels.attention.cases import forest_of, problem, random_forest
from tests.kernels.attention.triton_cases import OPTIONS, assert_exact, ours
from tests.kernels.interpreter import widen_dot

QUERY_TILES, KEY_TILES = Tiles(32, 16, 4, 2), Tiles(16, 32, 4, 2)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several blocks of a few tokens, on CPU tensors."""
    widen_dot(monkeypatch)
    monkeypatch.setattr(
        backend, "choose_tiles", lambda name, *_: KEY_TILES if name == "key_grad" else QUERY_TILES
    )
    op = sys.modules["hybridengine.kernels.attention.op"]
    monkeypatch.setattr(op, "choose_backend", lambda *_: "triton")


@pytest.mark.parametrize(
    ("option", "tokens", "longest", "seed"),
    [
        *((option, *forest) for option in OPTIONS for forest in ((60, 20, 2), (75, 60, 3))),
        ("plain", 1, 3, 0),
        ("plain", 40, 3, 1),
    ],
)
def test_random_forests(option, tokens, longest, seed):
    case = problem(random_forest(tokens, seed, longest), 2, 1, 16, sinks=seed != 2)
    assert_exact(case, **OPTIONS[option])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("dim", "dim_v"), [(24, 16), (16, 40), (16, 264)])
def test_head_sizes_and_dtypes(dim, dim_v, dtype):
    case = problem(forest_of((30, [9, (8, [4, 20])]), 5), 2, 1, dim, dim_v, dtype, sinks=True)
    assert_exact(case, dtype=dtype, softcap=2.0)


def test_sinks_at_their_limits():
    """-inf is none, bit for bit; a large one takes all the weight; NaN spoils its own head."""
    case = problem(forest_of((20, [9, 18]), 5), 4, 2, 16)
    without = ours(case)
    case.sinks = torch.tensor([-torch.inf, 1e4, torch.nan, torch.inf])
    out, grad_query, grad_key, _, grad_sinks = ours(case)
    assert torch.equal(out[:, 0], without[0][:, 0])
    assert torch.equal(grad_query[:, 0], without[1][:, 0])
    assert not out[:, 1].any() and not grad_query[:, 1].any()
    assert out[:, 2].isnan().all() and grad_query[:, 2].isnan().all()
    assert grad_key[:, 0].isfinite().all(), "heads 0 and 1 have the first key-value head"
    assert grad_sinks[:2].tolist() == [0.0, 0.0] and grad_sinks[2].isnan()


@pytest.mark.parametrize("heads_per_program", (1, 2, 4))
def test_query_heads_of_a_group_in_several_programs(heads_per_program, monkeypatch):
    monkeypatch.setattr(backend, "heads_per_program_of", lambda *_: heads_per_program)
    assert_exact(problem(forest_of((20, [9, 18])), 8, 2, 16))


@pytest.mark.parametrize("scale", (-0.3, 0.0))
def test_scales_that_are_not_positive(scale):
    assert_exact(problem(forest_of((20, [9, 18])), 2, 1, 16), scale=scale)


def test_any_strides():
    case = problem(forest_of((20, [9, 18])), 2, 2, 16)
    packed = torch.stack(case.qkv, 2)  # [T, H, 3, D]
    case.qkv = [packed[:, :, 0], packed[:, :, 1], packed[:, :, 2].mT.contiguous().mT]
    case.grad = case.grad[:, :, :1].expand(-1, -1, 16)
    assert_exact(case)


def test_no_tokens():
    empty = torch.zeros(0, 2, 16, requires_grad=True)
    sinks = torch.ones(2, requires_grad=True)
    out = tree_attention(empty, empty, empty, torch.zeros(0, dtype=torch.int32), sinks=sinks)
    out.sum().backward()
    assert out.shape == empty.shape and empty.grad.shape == empty.shape
    assert sinks.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", (None, 9))
def test_tables_lead_to_every_visible_block_and_no_other(seed, window):
    """Without a window exactly the visible blocks; with one, blocks may be visited needlessly."""
    block, queries = QUERY_TILES.block_n, QUERY_TILES.block_m
    forest = random_forest(400, seed, longest=60)
    ends, positions = forest.subtree_ends.long(), forest.position_ids
    token = torch.arange(ends.shape[0])
    visible = (token <= token[:, None]) & (token[:, None] < ends)
    near = positions[:, None] - positions < (window or ends.shape[0])
    tables = block_tables(forest.subtree_ends, positions.int(), window, block, queries)
    for start in range(0, ends.shape[0], queries):
        key = start // block
        begin = int(tables[BEGIN.value, key]) if window else 0
        visited, other = set(), int(tables[LAST.value, key])
        while other >= begin:
            visited.add(other)
            other = int(tables[PREVIOUS.value, other])
        rows = visible[start : start + queries, :start]
        seen = set((rows.any(0).nonzero()[:, 0] // block).tolist())
        needed = rows & near[start : start + queries, :start]
        needed = set((needed.any(0).nonzero()[:, 0] // block).tolist())
        assert needed <= visited <= seen
        assert window or visited == seen
