"""The Triton kernels of exact rollouts: accuracy, and the same bits in any batch.

The tests run in Triton's interpreter, on a CPU, and on a GPU. Every function takes the device.
"""

from __future__ import annotations

import itertools

import torch

from hybridengine.kernels import decode_linear, gated_activation, rms_norm, tree_attention
from hybridengine.kernels.decode_linear import join_parts
from hybridengine.kernels.decode_linear_triton import TILES
from hybridengine.kernels.decode_linear_triton import decode_linear as with_tiles
from hybridengine.kernels.layer import layer_norm
from hybridengine.kernels.rotary import RotaryTable
from tests import tolerances
from tests.kernels import layer_cases
from tests.kernels.attention.cases import forest_of, problem
from tests.kernels.attention.paged_cases import Cache, Sequences, packed
from tests.kernels.layer_cases import NORMS, assert_near_float64, operands

DTYPES = (torch.float32, torch.bfloat16)
ATTENTION = {
    "plain": {},
    "window": {"window_size": 37},
    "softcap": {"softcap": 2.0},
    "both": {"window_size": 70, "softcap": 0.5, "softmax_scale": 0.3},
    "sinks": {"window_size": 70, "sinks": True},
}


def on(device, *tensors):
    return [None if t is None else t.to(device) for t in tensors]


def check_linear(device, rows, n, k, dtype, bias=True, spread=0):
    """Against float64; rows alone, in parts, by other tiles; columns.

    spread: factors of 2 to its power or its inverse, so that sums lose bits of small products.
    """
    x, weight, added = operands(rows, n, k, dtype, bias)
    exponents = torch.linspace(-spread, spread, k)[torch.arange(k) * 37 % k].round()
    x, weight, added = on(device, x * exponents.exp2().to(dtype), weight, added)
    out = decode_linear(x, weight, added)
    assert_near_float64(out, x, weight, added)
    assert_near_float64(decode_linear(x, weight, out_dtype=torch.float32), x, weight, None)
    for part in (slice(0, 1), slice(rows // 3, rows), slice(rows - 1, rows), slice(1, 3)):
        assert torch.equal(decode_linear(x[part], weight, added), out[part])
    for tiles, apart in itertools.product(TILES[dtype].values(), (False, True)):
        assert torch.equal(with_tiles(x, weight, added, dtype, tiles, apart=apart), out)
    columns = slice(n // 4, n - n // 3)
    bias_of_columns = None if added is None else added[columns]
    assert torch.equal(decode_linear(x, weight[columns], bias_of_columns), out[:, columns])


def check_slices_of_k(device, rows, n, k, dtype):
    x, weight, bias = on(device, *operands(rows, n, k, dtype))
    joined = decode_linear(x, weight, bias, splits=2)
    pairs = zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)
    parts = [decode_linear(a.clone(), b.clone(), out_dtype=torch.float32) for a, b in pairs]
    assert torch.equal(join_parts(parts, bias, dtype), joined)


def check_norm(device, width, dtype, rows=70):
    for options in NORMS:
        x, weight, out = layer_cases.check_norm(device, rows, width, dtype, options)
        for part in (slice(0, 1), slice(rows // 2, rows), slice(3, 5)):
            assert torch.equal(rms_norm(x[part], weight, 1e-6, **options), out[part])
        inside = torch.cat([out, x, out], 1)[:, width : 2 * width]  # rows of another stride
        assert torch.equal(rms_norm(inside, weight, 1e-6, **options), out)
        assert torch.equal(rms_norm(inside[1:2], weight, 1e-6, **options), out[1:2])


def check_layer_norm(device, width, dtype, rows=70):
    for bias in (False, True):
        *given, out = layer_cases.check_layer_norm(device, rows, width, dtype, bias)
        x, weight, added = (*given, None)[:3]
        for part in (slice(0, 1), slice(rows // 2, rows), slice(3, 5)):
            assert torch.equal(layer_norm(x[part], weight, added, 1e-6), out[part])


def check_activation(device, width, dtype, activation, rows=21):
    gate, up, out = layer_cases.check_activation(device, rows, width, dtype, activation)
    halves = torch.cat([gate, up], 1).chunk(2, 1)
    for part in (slice(0, 1), slice(2, rows), slice(0, rows)):
        got = gated_activation(halves[0][part], halves[1][part], activation)
        assert torch.equal(got, out[part])
    large = torch.tensor([[-1e30, -300.0, -90.0, 0.0, 90.0, 1e30]], device=device).to(dtype)
    large.requires_grad_()
    got = gated_activation(large, torch.ones_like(large), activation)
    got.sum().backward()
    wide = large.detach().double()
    exact = gated_activation(wide, torch.ones_like(wide), activation)
    torch.testing.assert_close(got.detach().double(), exact, rtol=1e-2, atol=1e-30)
    assert bool(large.grad.isfinite().all())


def check_paged(device, dtype, options, heads=(6, 2), dims=(32, 32), block_size=16, scale=1):
    """Prompts in chunks, decoding and mixed batches, against the trainer's pack; and float64."""
    options = dict(options)
    sinks = options.pop("sinks", False)
    case = Sequences.random([n * scale for n in (70, 1, 33, 9)], heads, dims, dtype, sinks=sinks)
    expected = packed(case.to(device), **options)
    got = Cache(case.to(device), block_size).run(seed=1, longest=40 * scale, **options)
    assert torch.equal(got, expected)
    for i in range(len(case.lengths)):
        rows = case.rows(i)
        alone = Sequences([case.lengths[i]], [x[rows] for x in case.qkv], case.sinks).to(device)
        assert torch.equal(packed(alone, **options), expected[rows])
    exact = Sequences(case.lengths, [x.double() for x in case.qkv], case.sinks)
    limit = tolerances.ATTENTION if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(expected.double().cpu(), packed(exact, **options), **limit)


def check_shared_prefixes(device, dtype, options, heads=(6, 2), scale=1):
    """Responses of three levels against each path as a sequence of its own."""
    tree = (41, [7, 3, (14, [28, 5]), (1, [1, (0, [9, 2])])])
    forest = forest_of((3, [2]), _scaled(tree, scale), 5)
    options = dict(options)
    case = problem(forest, *heads, 32, dtype=dtype, sinks=options.pop("sinks", False))
    query, key, value, sinks = on(device, *case.qkv, case.sinks)
    tree = on(device, forest.subtree_ends, forest.position_ids)
    invariant = {"sinks": sinks, "batch_invariant": True, **options}
    shared = tree_attention(query, key, value, *tree, **invariant)
    for path in forest.paths:
        alone = Sequences([len(path)], [x[path] for x in (query, key, value)], sinks)
        assert torch.equal(packed(alone, **options), shared[path])


def _scaled(node, scale):
    if isinstance(node, int):
        return node * scale
    return node[0] * scale, [_scaled(child, scale) for child in node[1]]


def check_rotary(device):
    """Tables that grew in other steps have the same bits."""
    frequencies = (10_000.0 ** -(torch.arange(32) / 32)).to(device)
    cos, sin = RotaryTable(frequencies).rows(torch.arange(5000, device=device))
    table = RotaryTable(frequencies)
    for count in (1, 70, 300, 5000):
        got = table.rows(torch.arange(count, device=device))
        assert torch.equal(got[0], cos[:count]) and torch.equal(got[1], sin[:count])
