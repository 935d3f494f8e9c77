"""Run by test_policy_loss_triton.py with TRITON_INTERPRET=1 set before any import."""

import sys

import pytest
import torch

from hybridengine.kernels import LOSS_AGG_MODES, LOSS_MODES, value_loss
from hybridengine.kernels.policy_loss.terms import KL_ALIASES
from hybridengine.kernels.policy_loss.triton import policy_loss_triton
from tests.kernels import batches
from tests.tolerances import POLICY_LOSS


class Native:
    """Takes the place of the extension, with the Triton kernels."""

    policy_loss = staticmethod(policy_loss_triton)


@pytest.fixture(autouse=True)
def triton_for_cpp(monkeypatch):
    monkeypatch.setattr(
        sys.modules["hybridengine.kernels.policy_loss.op"], "native", lambda: Native
    )


# In the kernels only weights by length are another branch; the C++ tests pair each with each.
@pytest.mark.parametrize(
    ("loss_mode", "loss_agg_mode"),
    [
        (mode, aggregation)
        for mode in LOSS_MODES
        for aggregation in LOSS_AGG_MODES
        if mode in ("ppo_clip", "gspo") or aggregation == "seq-mean-token-mean"
    ],
)
def test_every_mode_and_aggregation(loss_mode, loss_agg_mode):
    inputs = batches.batch([5, 0, 70, 1, 33, 530, 16])  # more than a block of tokens
    options = {"loss_mode": loss_mode, "loss_agg_mode": loss_agg_mode}
    exact = batches.run(batches.to_float64(inputs), backend="reference", **options)
    batches.assert_same(batches.run(inputs, backend="cpp", **options), exact)


@pytest.mark.parametrize("kl_type", sorted({*batches.KL} - {*KL_ALIASES}))
def test_every_kl(kl_type):
    inputs = batches.batch([40, 30], spread=2.0)
    exact = batches.run(batches.to_float64(inputs), backend="reference", kl_type=kl_type)
    batches.assert_same(batches.run(inputs, backend="cpp", kl_type=kl_type), exact)


@pytest.mark.parametrize("options", batches.FURTHER_OPTIONS)
def test_further_options(options):
    inputs = batches.impossible_tokens(batches.batch([5, 0, 70, 1, 33], spread=1.0), "both")
    options = {"loss_agg_mode": "seq-mean-token-mean"} | options
    exact = batches.run(batches.to_float64(inputs), backend="reference", **options)
    batches.assert_same(batches.run(inputs, backend="cpp", **options), exact)


def test_losses_of_the_tokens():
    inputs = batches.batch([5, 0, 70, 1, 530, 16])
    for loss_mode in ("ppo_clip", "gspo"):
        exact = batches.run_tokens(
            batches.to_float64(inputs), loss_mode=loss_mode, backend="reference"
        )
        got = batches.run_tokens(inputs, loss_mode=loss_mode, backend="cpp")
        for one, want in zip(got, exact, strict=True):
            batches.assert_close(one, want, POLICY_LOSS)


def test_masked_and_empty():
    inputs = batches.batch([20, 7])
    inputs["log_probs"] = inputs["log_probs"].masked_fill(~inputs["response_mask"], torch.nan)
    for loss_mode in LOSS_MODES:
        batches.assert_same(
            batches.run(inputs, backend="cpp", loss_mode=loss_mode, loss_agg_mode="token-sum"),
            batches.run(
                batches.to_float64(inputs),
                backend="reference",
                loss_mode=loss_mode,
                loss_agg_mode="token-sum",
            ),
        )
        loss, *_ = batches.run(batches.batch([]), backend="cpp", loss_mode=loss_mode)
        assert loss == 0


@pytest.mark.parametrize("side", ["both", "new", "old"])
def test_tokens_of_zero_probability(side):
    inputs = batches.impossible_tokens(batches.batch([20, 30, 7]), side)
    for loss_mode in LOSS_MODES:
        options = {"loss_mode": loss_mode, "loss_agg_mode": "seq-mean-token-mean"}
        exact = batches.run(batches.to_float64(inputs), backend="reference", **options)
        batches.assert_same(batches.run(inputs, backend="cpp", **options), exact)
    kl = {"kl_type": "k1" if side == "both" else "k3"}
    batches.assert_same(
        batches.run(inputs, backend="cpp", **kl),
        batches.run(batches.to_float64(inputs), backend="reference", **kl),
    )


def test_large_taus_stay_finite():
    inputs = batches.batch([40], spread=2.0)
    options = {"loss_mode": "sapo", "tau_pos": 500.0, "tau_neg": 1000.0}
    batches.assert_same(
        batches.run(inputs, backend="cpp", **options),
        batches.run(batches.to_float64(inputs), **options),
    )


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
def test_value_loss(loss_agg_mode):
    inputs = batches.batch([5, 0, 530, 33], spread=2.0)
    names = ("log_probs", "old_log_probs", "advantages")
    options = {"loss_agg_mode": loss_agg_mode, "loss_scale_factor": 9.0, "cliprange_value": 0.3}
    options |= {name: inputs[name] for name in ("response_mask", "cu_seqlens")}
    results = []
    for dtype, backend in ((torch.float32, "cpp"), (torch.float64, "reference")):
        values, old, returns = (inputs[name].to(dtype) for name in names)
        values.requires_grad_()
        loss, metrics = value_loss(values, old, returns, backend=backend, **options)
        results.append((loss, torch.autograd.grad(loss, values)[0], *metrics.values()))
    for got, want in zip(*results, strict=True):
        batches.assert_close(got, want, POLICY_LOSS)
