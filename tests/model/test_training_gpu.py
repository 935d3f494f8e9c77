"""Training on a GPU: log-probs, gradients, a step and offload as on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.model.cases import SIZES, load, rollouts
from tests.ranks import run_ranks
from tests.tensors import whole
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank

# Matrix products of the GPU in another order; float32 is not TF32. bfloat16 has 8 bits: half an ulp
# for each of the about ten roundings of two layers, of logits of order 5.
TOLERANCES = {torch.float32: dict(rtol=1e-4, atol=2e-4), torch.bfloat16: dict(rtol=5e-2, atol=0.25)}
EPS = 1e-2  # well above the gradients: else Adam's first step is their sign, which rounding flips


def train_body(
    rank: int, world_size: int, path: str, device: str, dtypes: Sequence[torch.dtype]
) -> list[dict]:
    """For each dtype log-probs before and after a step, and gradients by name."""
    return [train_step(path, world_size, device, dtype) for dtype in dtypes]


def train_step(path: str, world_size: int, device: str, dtype: torch.dtype) -> dict:
    from hybridengine.model import Optimizer, on_device, pack_rollouts, packed_log_probs

    model = load(path, world_size, dtype, device=device, param_offload=True)
    optimizer = Optimizer(model, lr=1e-2, eps=EPS, total_steps=5, param_dtype=dtype, offload=True)
    batch = pack_rollouts(rollouts(SIZES), device, shared_prefix=True)
    with on_device(model):
        before, entropy = packed_log_probs(model, batch)
        assert before.device.type == entropy.device.type == device
        before.sum().backward()
        # Copies, on the CPU too: the step clips them in place.
        gradients = {n: whole(p.grad).cpu().clone() for n, p in model.named_parameters()}
        assert optimizer.step(0.5).isfinite()
        with torch.no_grad():
            after, _ = packed_log_probs(model, batch)
    return {"before": before.detach().cpu(), "after": after.cpu()} | gradients


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_that_of_float32_on_the_cpu(tmp_path: Path, device: str) -> None:
    path = save_tiny("qwen2", tmp_path)
    ((expected,),) = run_ranks(train_body, 1, path, "cpu", [torch.float32])
    assert not torch.allclose(expected["before"], expected["after"], atol=0.1)
    # One process: each has a CUDA context to make and kernels to load.
    (results,) = run_ranks(train_body, 1, path, device, list(TOLERANCES), device=device)
    wrong = [
        f"{dtype}, {name}: {message}"
        for (dtype, tolerance), result in zip(TOLERANCES.items(), results, strict=True)
        for name, value in expected.items()
        if (message := difference(name, result[name], value, tolerance))
    ]
    assert not wrong, "\n".join(wrong)


def difference(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: dict) -> str:
    """Return how the tensors differ, "" if they are close; gradients by their largest entry."""
    scale = 1.0 if name in ("before", "after") else expected.abs().max()
    try:
        torch.testing.assert_close(got / scale, expected / scale, **tolerance)
    except AssertionError as error:
        return str(error)
    return ""
