"""The Triton backend against plain attention in float64, for CPU (interpreter) and GPU tests."""

import torch
from hybridengine.kernels import tree_attention

from tests import tolerances
from tests.kernels.attention.cases import plain_attention, results

OPTIONS = {
    "plain": {},
    "window": {"window_size": 7},
    "softcap": {"softcap": 3.0},
    "both": {"window_size": 20, "softcap": 2.0},
}


def ours(case, device="cpu", scale=0.4, **options):
    """[out, dq, dk, dv] of the backend that the device or the test chooses."""
    ends, positions = (x.to(device) for x in (case.forest.subtree_ends, case.forest.position_ids))

    def call(q, k, v):
        return tree_attention(q, k, v, ends, positions, softmax_scale=scale, **options)

    return results(call, case, device=device)


def assert_exact(case, device="cpu", dtype=torch.float32, scale=0.4, **options):
    """Compare with float64, given the same inputs of `dtype`."""

    def plain(q, k, v):
        window, softcap = options.get("window_size"), options.get("softcap")
        return plain_attention(q, k, v, case.forest, scale, window, softcap)

    exact = results(plain, case, torch.float64)
    name = str(dtype).removeprefix("torch.")
    for got, expected in zip(ours(case, device, scale, **options), exact, strict=True):
        assert got.dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(got.double(), expected, **tolerances.ATTENTION)
        else:
            size = expected.abs().max().clamp(min=1e-30)
            tolerance = tolerances.ATTENTION_ROUNDED[name]
            torch.testing.assert_close(got.double() / size, expected / size, **tolerance)
