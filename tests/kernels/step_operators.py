"""Cases of whiten and rollout_correction for their Triton kernels, against float64."""

import itertools
import math

import torch

from hybridengine.kernels import REJECTION_CRITERIA, rollout_correction, whiten
from tests.kernels.batches import batch, impossible_tokens
from tests.tolerances import ADVANTAGE, POLICY_LOSS

# dtype, number of values, mean of the values, whether masked, shift_mean.
WHITENINGS = [
    (torch.float32, 0, 0.0, True, True),
    (torch.float32, 1, 3.0, False, True),
    (torch.float32, 2048, 0.0, False, True),
    (torch.float32, 5003, 1e4, True, True),
    (torch.float16, 5003, 2.0, True, False),
    (torch.float32, 9000, -5.0, True, False),
]

BOUNDS = {"k1": (0.7, 1.5), "k2": 0.05, "k3": 0.05}
_ALL = {criterion: BOUNDS[criterion[-2:]] for criterion in REJECTION_CRITERIA}
_ONE_EACH = [{name: bound} for name, bound in _ALL.items()]
# Level, lower bound of the weights, rejection, the count: how global_num_tokens is given.
CORRECTIONS = [
    *itertools.product(
        (None, "token", "sequence", "sequence_mean"), (None, 0.6), (None, _ALL), (None,)
    ),
    *((None, None, rejection, 40) for rejection in _ONE_EACH),
    ("token", None, None, torch.tensor(40.0)),
    ("sequence", 0.6, {"seq_max_k2": math.inf}, torch.tensor(40)),
]


def check_whitening(device, dtype, size, mean, masked, shift_mean):
    generator = torch.Generator().manual_seed(size)
    values = (torch.randn(size, generator=generator) * 3 + mean).to(dtype)
    mask = torch.rand(size, generator=generator) < 0.6 if masked else None
    expected = whiten(values.double(), mask, shift_mean=shift_mean)
    spoiled = values if mask is None else values.masked_fill(~mask, math.nan)
    on_device = None if mask is None else mask.to(device)
    got = whiten(spoiled.to(device), on_device, shift_mean=shift_mean, backend="triton")
    assert got.dtype == dtype
    rounding = 0.0 if dtype == torch.float32 else 2.0**-10
    tolerance = {"rtol": ADVANTAGE["rtol"] + rounding, "atol": ADVANTAGE["atol"] + rounding}
    torch.testing.assert_close(got.cpu().double(), expected, **tolerance)
    nothing = None if mask is None else mask.to(device) & False
    if nothing is not None:
        assert not whiten(spoiled.to(device), nothing, backend="triton").any()


def check_joined_moments(device):
    """Values whitened by the moments of more ranks than one block of the join holds."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(600, 7, generator=generator).double() + 100
    moments = torch.ops.hybridengine.whiten_moments
    rows = torch.stack([moments(part, None, "reference") for part in parts])
    values = parts.float().flatten()[:100]
    got = torch.ops.hybridengine.whiten_apply(
        values.to(device), None, rows.to(device), True, 1e-8, "triton"
    )
    expected = (values.double() - parts.mean()) / (parts.var() + 1e-8).sqrt()
    torch.testing.assert_close(got.cpu().double(), expected, **ADVANTAGE)


def check_correction(device, level, lower, rejection, count):
    options = {"rollout_is": level, "rollout_is_threshold": 1.4, "rollout_is_lower": lower}
    options["rejection"] = rejection
    usual = batch([5, 0, 70, 1, 33, 1030, 16])
    hostile = (impossible_tokens(batch([9, 30]), "new"), batch([]), batch([0, 0]))
    mixed = batch([9, 300])
    mixed["log_probs"] = mixed["old_log_probs"].clone()
    for name, first in (("log_probs", 1), ("ref_log_probs", 4)):  # as many of both kinds
        mixed[name][mixed["response_mask"].nonzero()[first::7].flatten()[:6]] = -math.inf
    hostile = (*hostile, mixed)
    for inputs in (usual, *hostile) if count is None else (batch([5, 0, 70, 1]),):
        mask, ends = inputs["response_mask"], inputs["cu_seqlens"]
        old, rollout = inputs["old_log_probs"], inputs["ref_log_probs"]
        if inputs is not usual and old.numel():
            old = inputs["log_probs"]  # some are -inf
            rollout = rollout.masked_fill(~mask, math.nan)  # masked: does not matter
        expected = rollout_correction(
            old.double(),
            rollout.double(),
            cu_seqlens=ends,
            response_mask=mask,
            global_num_tokens=count,
            **options,
        )
        on_device = count.to(device) if isinstance(count, torch.Tensor) else count
        got = rollout_correction(
            old.to(device),
            rollout.to(device),
            cu_seqlens=ends.to(device),
            response_mask=mask.to(device),
            global_num_tokens=on_device,
            backend="triton",
            **options,
        )
        assert (got.weights is None) == (level is None)
        if got.weights is not None:
            torch.testing.assert_close(got.weights.cpu().double(), expected.weights, **POLICY_LOSS)
        assert torch.equal(got.response_mask.cpu(), expected.response_mask)
        assert got.metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            found = got.metrics[name].cpu()
            torch.testing.assert_close(found, value, msg=name, equal_nan=True, **POLICY_LOSS)
