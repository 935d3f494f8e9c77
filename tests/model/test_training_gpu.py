"""Training on a GPU: log-probs, gradients, a step and offload as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model.cases import SIZES, load, rollouts
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank

# Matrix products of the GPU in another order; float32 is not TF32. bfloat16 has 8 bits: half an ulp
# for each of the about ten roundings of two layers, of logits of order 5.
TOLERANCES = {torch.float32: dict(rtol=1e-4, atol=2e-4), torch.bfloat16: dict(rtol=5e-2, atol=0.25)}
EPS = 1e-2  # well above the gradients: else Adam's first step is their sign, which rounding flips


def train_body(rank: int, world_size: int, path: str, device: str, dtype: torch.dtype) -> dict:
    """Log-probs before and after a step, and gradients by name."""
    from hybridengine.model import Optimizer, on_device, pack_rollouts, packed_log_probs

    model = load(path, world_size, dtype, device=device, param_offload=True)
    optimizer = Optimizer(model, lr=1e-2, eps=EPS, total_steps=5, param_dtype=dtype, offload=True)
    batch = pack_rollouts(rollouts(SIZES), device, shared_prefix=True)
    with on_device(model):
        before, entropy = packed_log_probs(model, batch)
        assert before.device.type == entropy.device.type == device
        before.sum().backward()
        gradients = {n: p.grad.full_tensor().cpu() for n, p in model.named_parameters()}
        assert optimizer.step(0.5).isfinite()
        with torch.no_grad():
            after, _ = packed_log_probs(model, batch)
    return {"before": before.detach().cpu(), "after": after.cpu(), "gradients": gradients}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_that_of_float32_on_the_cpu(tmp_path: Path, device: str) -> None:
    path = save_tiny("qwen2", tmp_path)
    (expected,) = run_ranks(train_body, 1, path, "cpu", torch.float32)
    assert not torch.allclose(expected["before"], expected["after"], atol=0.1)
    for dtype, tolerance in TOLERANCES.items():
        (result,) = run_ranks(train_body, 1, path, device, dtype, device=device)
        for name in ("before", "after"):
            torch.testing.assert_close(result[name], expected[name], **tolerance)
        for name, gradient in expected["gradients"].items():
            scale = gradient.abs().max()
            torch.testing.assert_close(
                result["gradients"][name] / scale, gradient / scale, **tolerance, msg=name
            )
