"""Gated DeltaNet's gates against float64, and its updates against calls for all tokens at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridengine.kernels import causal_conv1d, linear_recurrence
from hybridengine.kernels.delta_net import (
    causal_conv1d_update,
    delta_gates,
    linear_recurrence_update,
)
from hybridengine.kernels.graph import Graph

SEQUENCES, TOKENS, SLOTS = 5, 6, (7, 0, 3, 8, 2)
KEY_HEADS, HEADS, KEY_DIM, DIM, WIDTH = 2, 4, 24, 40, 4
KEYS, CHANNELS = KEY_HEADS * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + HEADS * DIM
DTYPES = (torch.float32, torch.bfloat16)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", (1, 16, 37))
def test_gates_against_float64(dtype, heads):
    both, of_heads = draw(50, 2 * heads, dtype=dtype) * 4, draw(2, heads, seed=1, dtype=dtype)
    given = [*both.chunk(2, 1), of_heads[0].float(), of_heads[1]]
    exact = [x.double().requires_grad_() for x in given]
    a, b, log_rate, bias = exact
    expected = -log_rate.exp() * F.softplus(a + bias), b.sigmoid()
    inputs = [x.requires_grad_() for x in given]
    gates = delta_gates(*inputs)
    weights = [draw(50, heads, seed=seed) for seed in (2, 3)]
    grads, right = (
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(out, weights, strict=True)), of)
        for out, of in ((gates, inputs), (expected, exact))
    )
    for got, true in zip(gates, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), true, rtol=1e-5, atol=1e-6)
    for x, got, true in zip(inputs, grads, right, strict=True):
        assert got.dtype == x.dtype
        tolerance = 1e-4 if x.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(got.double(), true, rtol=tolerance, atol=tolerance)


def test_gates_of_a_token_depend_on_it_alone():
    both, of_heads = draw(50, 2 * 37), draw(2, 37, seed=1)
    together = delta_gates(*both.chunk(2, 1), *of_heads)
    for rows in (slice(0, 1), slice(7, 50)):
        alone = delta_gates(*both[rows].contiguous().chunk(2, 1), *of_heads)
        assert all(torch.equal(x, y[rows]) for x, y in zip(alone, together, strict=True))


class Layer:
    """Convolution, gates and recurrence from cached rows and states."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.x = draw(SEQUENCES, TOKENS, CHANNELS, dtype=dtype)
        self.gates = draw(SEQUENCES, TOKENS, 2 * HEADS, seed=1, dtype=dtype)
        self.weight = draw(CHANNELS, WIDTH, seed=2, dtype=dtype)
        self.of_heads = draw(HEADS, seed=3), draw(HEADS, seed=4, dtype=dtype)
        self.rows = draw(9, WIDTH * CHANNELS, seed=5, dtype=dtype)  # others' memory in between
        self.states = draw(9, 1 + HEADS * KEY_DIM * DIM, seed=6)

    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rows[:, CHANNELS:].unflatten(1, (WIDTH - 1, CHANNELS))
        return rows, self.states[:, 1:].unflatten(1, (HEADS, KEY_DIM, DIM))

    def operands(self, x: torch.Tensor, gates: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = x.split([KEYS, KEYS, HEADS * DIM], 1)
        heads = [part.unflatten(1, (KEY_HEADS, KEY_DIM)) for part in (q, k)]
        a, b = gates.chunk(2, 1)
        return [*heads, v.unflatten(1, (HEADS, DIM)), *delta_gates(a, b, *self.of_heads)]

    def at_once(self) -> torch.Tensor:
        """All tokens of all sequences: [sequences, tokens, heads, dim]."""
        ends = torch.arange(SEQUENCES + 1) * TOKENS
        rows, states = (x[list(SLOTS)] for x in self.cache())
        x, gates = self.x.flatten(0, 1), self.gates.flatten(0, 1)
        options = {"cu_seqlens": ends, "initial_state": rows, "activation": "silu"}
        x = causal_conv1d(x, self.weight, **options)
        options = {"cu_seqlens": ends, "initial_state": states, "l2_norm": True}
        return linear_recurrence(*self.operands(x, gates), **options)[0].unflatten(0, (-1, TOKENS))

    def token(self, x: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        rows, states = self.cache()
        x = causal_conv1d_update(x, self.weight, rows, slots)
        return linear_recurrence_update(*self.operands(x, gates), states, slots)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", (1, 3))
def test_updates_have_the_bits_of_one_call(dtype, threads):
    layer, slots = Layer(dtype), torch.tensor(SLOTS, dtype=torch.int32)
    expected, before = layer.at_once(), (layer.rows.clone(), layer.states.clone())
    count = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for t in range(TOKENS):
            out = layer.token(layer.x[:, t], layer.gates[:, t], slots)
            assert torch.equal(out, expected[:, t])
    finally:
        torch.set_num_threads(count)
    assert torch.equal(layer.cache()[0][list(SLOTS)], layer.x[:, 1 - WIDTH :])
    others = [slot for slot in range(9) if slot not in SLOTS]
    for now, then in zip((layer.rows, layer.states), before, strict=True):
        assert torch.equal(now[others], then[others])
        assert torch.equal(now[:, 0], then[:, 0])


def test_captured_updates_serve_fewer_sequences():
    layer, slots = Layer(torch.float32), torch.tensor(SLOTS, dtype=torch.int32)
    expected = layer.at_once()
    x, gates = layer.x[:, 0].clone(), layer.gates[:, 0].clone()
    graph = Graph(lambda: layer.token(x, gates, slots), SEQUENCES)
    assert graph.refused == "" and torch.equal(graph.output, expected[:, 0])
    kept = [4, 1, 2]
    for t in range(1, TOKENS):
        x[:3], gates[:3] = layer.x[kept, t], layer.gates[kept, t]
        slots[:3] = torch.tensor(SLOTS)[kept]
        assert torch.equal(graph.replay(3), expected[kept, t])
    slots[1] = 9
    with pytest.raises(ValueError, match=r"slots\[1\] is 9; expected 0 to 8"):
        graph.replay(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.full((SEQUENCES,), 9, dtype=torch.int32)}, r"slots\[0\] is 9"),
        ({"slots": torch.arange(SEQUENCES)}, "slots"),
        ({"weight": draw(CHANNELS, 5)}, "width of weight is 5"),
        ({"rows": draw(9, CHANNELS, WIDTH - 1).transpose(1, 2)}, "cache is .* contiguous rows"),
        ({"states": draw(9, HEADS, DIM, KEY_DIM)}, "states is .* contiguous rows"),
    ],
)
def test_wrong_arguments(change, message):
    layer = Layer(torch.float32)
    rows, states = layer.cache()
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    given = {"weight": layer.weight, "rows": rows, "states": states, "slots": slots} | change
    with pytest.raises(ValueError, match=message):
        causal_conv1d_update(layer.x[:, 0], given["weight"], given["rows"], given["slots"])
        operands = layer.operands(layer.x[:, 0], layer.gates[:, 0])
        linear_recurrence_update(*operands, given["states"], given["slots"])
