"""vespo_weights against the formula in plain Python (test_against_trl.py has TRL's own)."""

import math
from itertools import pairwise

import pytest
import torch

from hybridengine.kernels import vespo_weights
from tests.kernels.batches import batch


@pytest.mark.parametrize("weighted", [False, True])
def test_against_the_formula(weighted):
    inputs = batch([4, 0, 7, 1], spread=0.5, dtype=torch.float64)
    log_probs, old, advantages, mask = (
        inputs[name] for name in ("log_probs", "old_log_probs", "advantages", "response_mask")
    )
    weights = inputs["rollout_is_weights"] if weighted else None
    spoiled = log_probs.masked_fill(~mask, math.nan)
    phi = vespo_weights(
        spoiled,
        old,
        advantages,
        cu_seqlens=inputs["cu_seqlens"],
        response_mask=mask,
        rollout_is_weights=weights,
        k_pos=1.5,
        lambda_neg=2.5,
    )
    for a, b in pairwise(inputs["cu_seqlens"].tolist()):
        rows = [t for t in range(a, b) if mask[t]]
        w = math.exp(sum((log_probs[t] - old[t]).item() for t in rows))
        if weighted:
            w *= math.prod(weights[t].item() for t in rows)
        for t in rows:
            k, rate = (1.5, 3.0) if advantages[t] >= 0 else (3.0, 2.5)
            assert phi[t].item() == pytest.approx(math.exp(rate) * w**k * math.exp(-rate * w))
    assert not phi[~mask].any() and not phi.requires_grad


def test_extreme_ratios_stay_finite():
    log_probs = torch.tensor([[-1.0, -1.0], [-400.0, -math.inf], [0.0, 0.0]])
    old = torch.tensor([[-1.0, -1.0], [-1.0, -math.inf], [-400.0, -400.0]])
    phi = vespo_weights(log_probs, old, torch.ones(3, 2))
    assert phi.isfinite().all() and phi[0].tolist() == [1.0, 1.0] and (phi[2] == 0).all()
    with pytest.raises(ValueError, match="lambda_pos is 0"):
        vespo_weights(log_probs, old, torch.ones(3, 2), lambda_pos=0)
    with pytest.raises(ValueError, match="log_probs is \\[T\\]; give cu_seqlens"):
        vespo_weights(log_probs[0], old[0], torch.ones(2))
