"""score_centering and its option in policy_loss: the definition of arXiv 2609.20807, in float64."""

import math

import pytest
import torch

from hybridengine.kernels import (
    LOSS_AGG_MODES,
    LOSS_MODES,
    policy_loss,
    score_centering,
    token_policy_loss,
)
from hybridengine.kernels.policy_loss.terms import SEQUENCE_MODES
from tests.kernels.batches import batch, impossible_tokens, to_float64
from tests.tolerances import POLICY_LOSS

BOUNDS = [
    {},
    {"rollout_is": "token", "rollout_is_threshold": None},
    {"rollout_is": "token"},
    {"rollout_is": "token", "rollout_is_threshold": 1.2},
    {"rollout_is": "token", "rollout_is_threshold": 1.3, "rollout_is_lower": 0.8},
]


def weight(ratio, rollout_is=None, rollout_is_threshold=2.0, rollout_is_lower=None):
    if rollout_is is None:
        return torch.ones_like(ratio)
    upper = math.inf if rollout_is_threshold is None else rollout_is_threshold
    if rollout_is_lower is None:
        return ratio.clamp(max=upper)
    return ratio.where((ratio >= rollout_is_lower) & (ratio <= upper), 0.0)


def distributions(rows, vocab, seed=0, spread=0.5):
    """Float64 logits of the trained policy, and log-probs of an engine that differs."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(rows, vocab, generator=generator, dtype=torch.float64)  # noqa: E731
    logits = 2 * draw()
    return logits, (logits + spread * draw()).log_softmax(1)


def recorded(log_q, keep):
    """(row, id) of the entries of bool `keep`, and their ends."""
    rows, ids = keep.nonzero().unbind(1)
    return rows, ids, torch.cat([torch.zeros(1), keep.sum(1).cumsum(0)]).int()


@pytest.mark.parametrize("bounds", BOUNDS)
def test_gradient_of_a_constant_advantage_vanishes_over_the_engines_distribution(bounds):
    """Every token of the support as a sample, with its probability q as the weight."""
    logits, log_q = distributions(7, 12)
    keep = log_q >= log_q.topk(5).values[:, -1:]
    log_q = log_q.masked_fill(~keep, -torch.inf).log_softmax(1)
    leaf = logits.clone().requires_grad_()
    log_p = leaf.masked_fill(~keep, -torch.inf).log_softmax(1)
    rows, ids, ends = recorded(log_q, keep)
    p, q = log_p[rows, ids], log_q[rows, ids]

    drift = {}
    for centered in (False, True):
        scores = None
        if centered:
            scores = score_centering(p, q, ends, **bounds)[rows]
        rollout_is = {k: v for k, v in bounds.items() if k != "rollout_is"}
        loss, _ = policy_loss(
            p,
            None,
            q.exp() * 1.7,
            loss_mode="reinforce",
            loss_agg_mode="token-sum",
            rollout_log_probs=q if bounds else None,
            score_centering=scores,
            **rollout_is,
        )
        drift[centered] = torch.autograd.grad(loss, leaf, retain_graph=True)[0].norm().item()
    assert drift[True] < 1e-14
    untruncated = bounds.get("rollout_is_threshold", 2.0) is None
    assert (drift[False] < 1e-14) == untruncated


@pytest.mark.parametrize("bounds", BOUNDS)
def test_gradient_with_a_modelled_tail(bounds):
    """The recorded entries have the engine's q; the others have the trained p, rescaled."""
    logits, log_q = distributions(9, 20, seed=1)
    keep = log_q >= log_q.topk(6).values[:, -1:]
    keep[4] = False  # a row without recorded entries
    leaf = logits.clone().requires_grad_()
    log_p = leaf.log_softmax(1)
    rows, ids, ends = recorded(log_q, keep)
    scores = score_centering(log_p[rows, ids], log_q[rows, ids], ends, **bounds)
    upstream = torch.linspace(-1, 2, 9, dtype=torch.float64)
    got = torch.autograd.grad(scores @ upstream, leaf, retain_graph=True)[0]

    p, q = log_p.detach().exp(), log_q.exp()
    tail = (1 - (q * keep).sum(1)) / (1 - (p * keep).sum(1))
    model = torch.where(keep, q, tail[:, None] * p)
    torch.testing.assert_close(model.sum(1), torch.ones(9, dtype=torch.float64))
    mass = model * weight(p / model, **bounds)
    expected = upstream[:, None] * (mass - mass.sum(1, keepdim=True) * p)
    expected[4] = 0
    torch.testing.assert_close(got, expected)
    rounded = log_p[rows, ids].detach().float(), log_q[rows, ids].float()
    float32 = score_centering(*rounded, ends, **bounds)
    exact = score_centering(*(x.double() for x in rounded), ends, **bounds)
    assert float32.dtype == torch.float32
    torch.testing.assert_close(float32.double(), exact, rtol=1e-5, atol=1e-6)


def test_an_engine_without_error_has_no_correction():
    logits, _ = distributions(5, 16)
    log_p = logits.log_softmax(1)
    keep = log_p >= log_p.topk(4).values[:, -1:]
    rows, ids, ends = recorded(log_p, keep)
    p = log_p[rows, ids].requires_grad_()
    for bounds in BOUNDS:
        grad = torch.autograd.grad(score_centering(p, p.detach(), ends, **bounds).sum(), p)[0]
        assert grad.abs().max() < 1e-15


def test_impossible_and_masked_entries():
    """An entry that the trained policy cannot produce has no gradient; masked ones may be NaN."""
    nan, inf = math.nan, math.inf
    p = torch.tensor([math.log(0.6), -inf, math.log(0.4), nan, nan], requires_grad=True)
    q = torch.tensor([math.log(0.5), math.log(0.3), math.log(0.2), nan, nan])
    ends, mask = torch.tensor([0, 3, 5, 5]), torch.tensor([1, 0, 1])
    scores = score_centering(p, q, ends, response_mask=mask)
    scores.sum().backward()
    assert scores.isfinite().all() and scores[1:].tolist() == [0, 0]
    assert p.grad[[1, 3, 4]].tolist() == [0, 0, 0]
    by_logits = p.grad[[0, 2]] - torch.tensor([0.6, 0.4]) * p.grad.sum()
    torch.testing.assert_close(by_logits, torch.tensor([0.08, -0.08]))


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_mode", [mode for mode in LOSS_MODES if mode not in SEQUENCE_MODES])
def test_option_of_policy_loss(loss_mode, loss_agg_mode, backend):
    """It adds the aggregate of advantages * C, with the gradients of both, in every backend."""
    inputs = batch([5, 0, 70, 1, 33, 1030, 16])
    options = {"loss_mode": loss_mode, "loss_agg_mode": loss_agg_mode, "loss_scale_factor": 50.0}
    centering = torch.randn(
        inputs["log_probs"].shape, generator=torch.Generator().manual_seed(3)
    ).masked_fill(~inputs["response_mask"], math.nan)

    def run(inputs, centering, backend):
        inputs = dict(inputs)
        leaves = [inputs.pop("log_probs").clone().requires_grad_()]
        if centering is not None:
            leaves.append(centering.to(leaves[0].dtype).requires_grad_())
        loss, metrics = policy_loss(
            leaves[0],
            **inputs,
            **options,
            kl_coef=0.1,
            entropy_coeff=0.01,
            score_centering=None if centering is None else leaves[1],
            backend=backend,
        )
        return loss, metrics, torch.autograd.grad(2 * loss, leaves)

    exact = to_float64(inputs)
    base, metrics, grads = run(exact, None, "reference")
    weights = exact | {"advantages": torch.ones_like(exact["advantages"])}
    weights = {k: weights[k] for k in ("log_probs", "advantages", "response_mask", "cu_seqlens")}
    ones = torch.ones_like(exact["log_probs"], requires_grad=True)
    count, _ = policy_loss(
        weights.pop("log_probs"),
        None,
        **weights,
        **options | {"loss_mode": "reinforce"},
        score_centering=ones,
        backend="reference",
    )
    per_token = torch.autograd.grad(count, ones)[0]  # the weight of each token
    term = (per_token * exact["advantages"] * centering.double().nan_to_num()).sum()

    loss, got, found = run(inputs, centering, backend)
    torch.testing.assert_close(loss.double(), base + term, **POLICY_LOSS)
    torch.testing.assert_close(got.pop("score_centering").double(), term, **POLICY_LOSS)
    assert got.keys() == metrics.keys()
    torch.testing.assert_close(found[0].double(), grads[0], **POLICY_LOSS)
    torch.testing.assert_close(
        found[1].double(), 2 * per_token * exact["advantages"], **POLICY_LOSS
    )


def test_losses_of_the_tokens_are_centered():
    inputs = impossible_tokens(batch([5, 0, 70, 1]), "both")
    centering = torch.linspace(-1, 1, inputs["log_probs"].numel()).requires_grad_()
    arguments = {k: inputs[k] for k in ("log_probs", "old_log_probs", "advantages")}
    mask = inputs["response_mask"]
    plain = token_policy_loss(*arguments.values(), response_mask=mask)
    losses = token_policy_loss(*arguments.values(), response_mask=mask, score_centering=centering)
    added = torch.where(mask, inputs["advantages"] * centering, 0)
    torch.testing.assert_close(losses.loss, plain.loss + added)
    losses.loss.sum().backward()
    torch.testing.assert_close(centering.grad, torch.where(mask, inputs["advantages"], 0.0))


def test_arguments_that_do_not_fit():
    p, ends = torch.zeros(3), torch.tensor([0, 2, 3])
    with pytest.raises(ValueError, match="score_centering: rollout_log_probs has shape"):
        score_centering(p, p[:2], ends)
    with pytest.raises(ValueError, match="score_centering: cu_kept ends at 3"):
        score_centering(p[:2], p[:2], ends)
    with pytest.raises(ValueError, match="score_centering: rollout_is is 'sequence'"):
        score_centering(p, p, ends, rollout_is="sequence")
    for mode in SEQUENCE_MODES:
        with pytest.raises(ValueError, match="score_centering is given with loss_mode"):
            policy_loss(p[None], None, p[None], loss_mode=mode, score_centering=p[None])
