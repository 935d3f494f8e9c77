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
    """The results of the backend that the device or the test chooses."""
    ends, positions = (x.to(device) for x in (case.forest.subtree_ends, case.forest.position_ids))

    def call(q, k, v, **sinks):
        return tree_attention(q, k, v, ends, positions, softmax_scale=scale, **sinks, **options)

    return results(call, case, device=device)


def assert_exact(case, device="cpu", dtype=torch.float32, scale=0.4, **options):
    """Compare with float64, given the same inputs of `dtype`."""

    def plain(q, k, v, **sinks):
        window, softcap = options.get("window_size"), options.get("softcap")
        return plain_attention(q, k, v, case.forest, scale, window, softcap, **sinks)

    exact = results(plain, case, torch.float64)
    got = ours(case, device, scale, **options)
    assert all(x.dtype == dtype for x in got)
    if dtype == torch.float32:
        for a, b in zip(got, exact, strict=True):
            torch.testing.assert_close(a.double(), b, **tolerances.ATTENTION)
        return
    name = str(dtype).removeprefix("torch.")
    rounded, of_delta = tolerances.ATTENTION_ROUNDED[name], tolerances.ATTENTION_DELTA[name]
    q, k, v = (x.double() for x in case.qkv)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    of_delta = of_delta * torch.einsum("qhd,khd->hqk", case.grad.double(), v).abs().max()
    of_scores = of_delta * scale
    # The errors of delta are independent: those of a sink's gradient add up as their root.
    of_sinks = of_delta * len(q) ** 0.5
    extra = [0.0, of_scores * k.abs().max(), of_scores * q.abs().max(), 0.0, of_sinks]
    for a, b, more in zip(got, exact, extra[: len(got)], strict=True):
        atol = float(rounded * b.abs().max() + more)
        torch.testing.assert_close(a.double(), b, rtol=0.0, atol=atol)
