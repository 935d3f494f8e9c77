"""Run by test_exact_triton.py in Triton's interpreter."""

import sys

import pytest
import torch

from hybridengine.kernels import layer_triton, tree_attention
from tests.kernels import exact_cases as cases
from tests.kernels.interpreter import round_to_nearest, widen_dot

DTYPES = pytest.mark.parametrize("dtype", cases.DTYPES, ids=("float32", "bfloat16"))
ATTENTION = pytest.mark.parametrize(  # on a GPU each with each
    "dtype, options",
    [
        pytest.param(cases.DTYPES[i % 2], options, id=name)
        for i, (name, options) in enumerate(cases.ATTENTION.items())
    ],
)


@pytest.fixture(autouse=True)
def triton_on_cpu_tensors(monkeypatch):
    widen_dot(monkeypatch)
    round_to_nearest(monkeypatch)
    for name in ("decode_linear", "layer", "paged_attention", "attention.op"):
        module = sys.modules[f"hybridengine.kernels.{name}"]
        monkeypatch.setattr(
            module,
            "choose_backend",
            lambda op, device, requested=None, dtype=None: (
                "reference" if dtype is not None and dtype.itemsize == 8 else "triton"
            ),
        )
    monkeypatch.setattr(
        sys.modules["hybridengine.kernels.layer"], "kernels_for", lambda x: layer_triton
    )


@DTYPES
@pytest.mark.parametrize("n, k, bias", [(40, 96, True), (70, 33, False), (33, 600, True)])
def test_linear(dtype, n, k, bias):
    cases.check_linear("cpu", 70, n, k, dtype, bias)


@DTYPES
def test_slices_of_k(dtype):
    cases.check_slices_of_k("cpu", 5, 33, 64, dtype)


@DTYPES
@pytest.mark.parametrize("width", (1, 5, 64, 576))
def test_norm(dtype, width):
    cases.check_norm("cpu", width, dtype, 20 if width == 576 else 150)


@DTYPES
@pytest.mark.parametrize("width", (5, 64, 576))
def test_layer_norm(dtype, width):
    cases.check_layer_norm("cpu", width, dtype, 20 if width == 576 else 150)


@DTYPES
@pytest.mark.parametrize("activation", ("silu", "gelu", "gelu_tanh", "sigmoid", "softplus"))
def test_activation(dtype, activation):
    cases.check_activation("cpu", 70, dtype, activation, 5)


@ATTENTION
def test_paged_attention(dtype, options):
    cases.check_paged("cpu", dtype, options, heads=(4, 2))


@pytest.mark.parametrize(
    ("heads", "dims", "block_size"), [((5, 1), (24, 40), 48), ((2, 2), (80, 16), 32)]
)
def test_head_sizes(heads, dims, block_size):
    cases.check_paged("cpu", cases.DTYPES[1], {}, heads, dims, block_size)


@pytest.mark.parametrize("dtype, name", zip(cases.DTYPES, ("sinks", "both"), strict=True))
def test_shared_prefixes(dtype, name):
    cases.check_shared_prefixes("cpu", dtype, cases.ATTENTION[name], heads=(4, 2))


def test_positions_that_are_no_depths_end():
    """A result that means nothing, but no endless loop."""
    query = torch.randn(40, 2, 16)
    ends, positions = torch.full((40,), 40), torch.arange(40) + 70
    out = tree_attention(query, query, query, ends, positions, batch_invariant=True)
    assert out.shape == query.shape
