"""Captured kernel calls have the bits of the calls themselves, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hybridengine.kernels import gated_activation, paged_attention, token_log_probs, write_kv_cache
from hybridengine.kernels.decode_linear import inference_linear
from hybridengine.kernels.graph import Graph
from hybridengine.kernels.layer import inference_norm
from hybridengine.kernels.rotary import rotate

HEADS, DIM, HIDDEN, ROWS, BLOCK = 3, 16, 48, 6, 16
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class Step:
    """The operands of a small decoder whose rows are tokens of `ROWS` sequences."""

    hidden: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    starts: Tensor
    lengths: Tensor
    caches: list[Tensor]
    weights: list[Tensor]
    cos: Tensor
    sin: Tensor
    scale: Tensor

    @classmethod
    def make(cls, dtype: torch.dtype, layers: int) -> Step:
        draw = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(dtype)

        sizes = [(3, 1), (1, 1), (4, 1), (1, 2)]
        shapes = [(rows * HIDDEN, columns * HIDDEN) for rows, columns in sizes]
        positions = torch.arange(ROWS) * 3
        return cls(
            normal(ROWS, HIDDEN),
            positions,
            torch.arange(ROWS) * BLOCK + positions,
            torch.arange(ROWS).int()[:, None],
            torch.arange(ROWS + 1).int(),
            (positions + 1).int(),
            [torch.zeros(ROWS, HEADS, BLOCK, 2 * DIM, dtype=dtype) for _ in range(layers)],
            [normal(*shape) * 0.1 for _ in range(layers) for shape in shapes],
            normal(BLOCK, DIM // 2),
            normal(BLOCK, DIM // 2),
            normal(HIDDEN),
        )

    def draw_again(self, seed: int) -> None:
        """Give all rows other hidden states, positions and keys."""
        draw = torch.Generator().manual_seed(seed)
        self.hidden.copy_(torch.randn(self.hidden.shape, generator=draw))
        self.positions.copy_(torch.randint(0, BLOCK, (ROWS,), generator=draw))
        self.slots.copy_(torch.arange(ROWS) * BLOCK + self.positions)
        self.lengths.copy_(self.positions + 1)
        for cache in self.caches:
            cache.copy_(torch.randn(cache.shape, generator=draw))

    def run(self, rows: int = ROWS) -> Tensor:
        """Decode by the kernels, called from Python."""
        hidden, residual, scale = self.hidden[:rows], None, self.scale
        for layer, cache in enumerate(self.caches):
            to_qkv, to_out, to_gates, to_down = self.weights[4 * layer : 4 * layer + 4]
            if residual is None:
                residual, normed = hidden, inference_norm(hidden, None, scale, 1e-5)
            else:
                normed = inference_norm(hidden, residual, scale, 1e-5)
            qkv = inference_linear(normed, to_qkv, max_rows=None)
            query, key, value = (part.view(rows, HEADS, DIM) for part in qkv.chunk(3, -1))
            query, key = (inference_norm(x, None, scale[:DIM], 1e-5) for x in (query, key))
            for heads in (query, key):
                rotate(heads, self.positions[:rows], self.cos, self.sin)
            write_kv_cache(key, value, cache, self.slots[:rows])
            sequences = (self.tables[:rows], self.starts[: rows + 1], self.lengths[:rows])
            attended = paged_attention(query, cache, *sequences).view(rows, -1)
            hidden = inference_linear(attended, to_out, max_rows=None)
            gates = inference_linear(
                inference_norm(hidden, residual, scale, 1e-5), to_gates, max_rows=None
            )
            gated = gated_activation(*gates.chunk(2, -1))
            hidden = inference_linear(gated, to_down, max_rows=None)
        return hidden


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replay_has_the_bits_of_the_calls(dtype: torch.dtype) -> None:
    step = Step.make(dtype, layers=2)
    graph = Graph(step.run, ROWS)
    assert graph.refused == ""
    for seed, rows in enumerate((ROWS, 1, 4, ROWS)):
        step.draw_again(seed)
        expected = step.run(rows)
        written = [cache.clone() for cache in step.caches]
        step.draw_again(seed)
        assert torch.equal(graph.replay(rows), expected)
        assert all(torch.equal(*pair) for pair in zip(written, step.caches, strict=True))


def test_tensors_between_the_kernels_share_memory() -> None:
    few, many = (Graph(Step.make(torch.float32, layers).run, ROWS) for layers in (2, 12))
    assert 0 < many.bytes == few.bytes


def test_memory_of_a_graph_is_not_given_to_others() -> None:
    step = Step.make(torch.float32, 2)
    graph = Graph(step.run, ROWS)
    expected = graph.output.clone()
    others = [torch.full((ROWS, size * HIDDEN), 7.0) for size in (1, 2, 3, 4) for _ in range(50)]
    assert torch.equal(graph.output, expected)
    graph.replay(ROWS)
    assert all(bool((other == 7.0).all()) for other in others)
    output = graph.output
    expected = output.clone()
    del graph
    assert torch.equal(output, expected)


CANNOT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch computes aten::mul.Tensor": lambda x, w: inference_linear(x, w, max_rows=None) * 2,
    "torch computes aten::add_.Tensor": lambda x, w: inference_linear(x, w, max_rows=None).add_(1),
    "torch computes aten::clone": lambda x, w: inference_linear(x, w.t().contiguous()),
    "3 rows, no multiple of 2": lambda x, w: inference_linear(x.view(-1)[:144].view(3, 48), w),
}


@pytest.mark.parametrize("reason", CANNOT)
def test_what_a_graph_would_leave_out_is_refused(reason: str) -> None:
    x, weight = torch.ones(4, HIDDEN), torch.ones(HIDDEN, HIDDEN)
    rows = 2 if "multiple" in reason else 4
    graph = Graph(lambda: CANNOT[reason](x, weight), rows)
    assert reason in graph.refused
    with pytest.raises(ValueError, match="cannot be replayed"):
        graph.replay(1)


def test_other_kernels_are_refused() -> None:
    logits, ids = torch.randn(4, 9), torch.arange(4)
    graph = Graph(lambda: token_log_probs(logits, ids)[0], 4)
    assert "cannot be captured" in graph.refused


def test_values_are_checked_in_a_replay() -> None:
    step = Step.make(torch.float32, 1)
    graph = Graph(step.run, ROWS)
    with pytest.raises(ValueError, match=f"replay of 7 rows; expected 1 to {ROWS}"):
        graph.replay(ROWS + 1)
    step.positions[0] = BLOCK
    with pytest.raises(ValueError, match=rf"positions\[0\] is {BLOCK}; expected 0 to {BLOCK - 1}"):
        graph.replay(1)
    step.positions[0], step.slots[1] = 0, ROWS * BLOCK
    with pytest.raises(ValueError, match=r"slot_mapping\[1\] is 96; expected less than 96"):
        graph.replay(2)
    step.slots[1], step.tables[2] = BLOCK, ROWS
    with pytest.raises(ValueError, match=r"block_table\[2, 0\] is 6; expected a block"):
        graph.replay(3)


def test_an_error_in_the_function_ends_the_capture() -> None:
    def fail() -> Tensor:
        raise KeyError("inside")

    with pytest.raises(KeyError):
        Graph(fail, 2)
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    assert Graph(lambda: inference_linear(x, weight, max_rows=None), 2).refused == ""
