"""The oracle of policy_loss, checked token by token against the papers' formulas in plain Python.

Gradients are the analytic ones, written out with the papers' stop-gradients, not autograd's.
"""

import math
from itertools import product

import pytest
import torch

from hybridengine.kernels import policy_loss, select_by_covariance, token_kl
from hybridengine.kernels.policy_loss.terms import LossOptions, token_loss

LOW, HIGH, C, TAU_POS, TAU_NEG, COV = 0.2, 0.28, 3.0, 1.0, 1.05, 0.7
BETA = 0.4
OPTIONS = LossOptions(LOW, HIGH, C, TAU_POS, TAU_NEG, COV, BETA)
GRID = list(product([-1.5, -0.4, 0.0, 0.7], [-4.0, -1.3, -0.6, -0.1], [-1.9, -0.55, -0.12]))


def one_token(mode, a, log_p, log_old, **sequence):
    x = torch.tensor([log_p], dtype=torch.float64, requires_grad=True)
    rest = (torch.tensor([v], dtype=torch.float64) for v in (log_old, a))
    sequence = {k: torch.tensor([v]) for k, v in sequence.items()}
    terms = token_loss(mode, (x, *rest), OPTIONS, **sequence)
    gradient = torch.autograd.grad(terms.loss.sum(), x)[0].item()
    return terms.loss.item(), gradient, bool(terms.clipped), bool(terms.clipped_lower)


def clip(r):
    return min(max(r, 1 - LOW), 1 + HIGH)


def clipped_surrogate(a, r, dual):
    """(loss, d loss / d log p) of min(r A, clip(r) A), with the dual clip's bound for A < 0."""
    objective, gradient = (clip(r) * a, 0.0) if clip(r) * a < r * a else (r * a, r * a)
    if dual and a < 0 and objective < C * a:
        objective, gradient = C * a, 0.0
    return -objective, -gradient


@pytest.mark.parametrize("a, log_p, log_old", GRID)
def test_ppo_clip_and_its_two_bounds(a, log_p, log_old):
    r = math.exp(log_p - log_old)
    loss, gradient, clipped, lower = one_token("ppo_clip", a, log_p, log_old)
    assert (loss, gradient) == pytest.approx(clipped_surrogate(a, r, dual=True))
    assert lower == (a < 0 and r > C)
    assert clipped == (clip(r) * a < r * a)


@pytest.mark.parametrize("a, log_p, log_old", GRID)
def test_sequence_ratio_of_gspo(a, log_p, log_old):
    for mean in (-1.0, 0.05, 0.4, 1.3):
        s = math.exp(mean)
        loss, gradient, _, _ = one_token("gspo", a, log_p, log_old, seq_log_ratio=mean)
        assert (loss, gradient) == pytest.approx(clipped_surrogate(a, s, dual=True))
        tau = TAU_POS if a > 0 else TAU_NEG
        gate = 1 / (1 + math.exp(-tau * (s - 1)))
        loss, gradient, _, _ = one_token("seq_sapo", a, log_p, log_old, seq_log_ratio=mean)
        assert loss == pytest.approx(-a * gate * 4 / tau)
        assert gradient == pytest.approx(-a * 4 * gate * (1 - gate) * s)


@pytest.mark.parametrize("a, log_p, log_old", GRID)
def test_stopped_weights(a, log_p, log_old):
    r = math.exp(log_p - log_old)
    loss, gradient, clipped, _ = one_token("cispo", a, log_p, log_old)
    assert (loss, gradient) == pytest.approx((-clip(r) * a * log_p, -clip(r) * a))
    assert clipped == (clip(r) != r)
    assert one_token("reinforce", a, log_p, log_old)[:2] == pytest.approx((-a * log_p, -a))
    x = log_p - log_old
    want = (-a * log_p + 0.5 * BETA * x * x, -a + BETA * x)
    assert one_token("dro", a, log_p, log_old)[:2] == pytest.approx(want)
    p, q = math.exp(log_p), math.exp(log_old)
    allowed = {
        "dppo_tv": p - q <= HIGH if a > 0 else p - q >= -LOW,
        "dppo_kl": (p <= q if a > 0 else p >= q)
        or q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) <= (HIGH if a > 0 else LOW),
    }
    for mode, allow in allowed.items():
        weight = min(r, C) if allow else 0
        loss, gradient, clipped, lower = one_token(mode, a, log_p, log_old)
        assert (loss, gradient) == pytest.approx((-weight * a * log_p, -weight * a))
        assert clipped == (not allow) and lower == (allow and r > C)


@pytest.mark.parametrize("a, log_p, log_old", GRID)
def test_smooth_gate_of_sapo(a, log_p, log_old):
    r, tau = math.exp(log_p - log_old), TAU_POS if a > 0 else TAU_NEG
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    loss, gradient, _, _ = one_token("sapo", a, log_p, log_old)
    assert loss == pytest.approx(-a * gate * 4 / tau)
    assert gradient == pytest.approx(-a * 4 * gate * (1 - gate) * r)  # eq. 7: weight 4 g (1 - g)


@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("a, log_p, log_old", GRID)
def test_covariance_modes(a, log_p, log_old, selected):
    x = log_p - log_old
    r = math.exp(x)
    want = (0, 0) if selected else clipped_surrogate(a, r, dual=False)
    assert one_token("clip_cov", a, log_p, log_old, selected=selected)[:2] == pytest.approx(want)
    penalty = COV * selected
    want = (-a * r + penalty * abs(x), -a * r + penalty * math.copysign(1, x))
    assert one_token("kl_cov", a, log_p, log_old, selected=selected)[:2] == pytest.approx(want)


@pytest.mark.parametrize("a", [1.3, -0.8])
def test_geometric_mean_of_gmpo(a):
    """The sequence at once: -A exp(mean of clipped log-ratios), and its true gradient."""
    old = torch.tensor([-1.0, -0.5, -2.0, -1.1], dtype=torch.float64)
    x = torch.tensor([0.1, 0.9, -0.15, -0.7], dtype=torch.float64)
    log_probs = (old + x).requires_grad_()
    loss, _ = policy_loss(
        log_probs,
        old,
        torch.full_like(x, a),
        loss_mode="gmpo",
        loss_agg_mode="seq-mean-token-mean",
        clip_ratio_low=0.4,
        clip_ratio_high=0.4,
        cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
        backend="reference",
    )
    bounded = [min(v, 0.4) if a > 0 else max(v, -0.4) for v in x.tolist()]
    ratio = math.exp(sum(bounded) / 4)
    assert loss.item() == pytest.approx(-a * ratio)
    want = [-a * ratio / 4 if b == v else 0 for b, v in zip(bounded, x.tolist(), strict=True)]
    assert torch.autograd.grad(loss, log_probs)[0].tolist() == pytest.approx(want)


def test_gspo_sequence_gradient_is_that_of_the_sequence_objective():
    """For one advantage per sequence, gspo's token form has the gradient of -A s(theta)."""
    old = -torch.rand(6, dtype=torch.float64)
    log_probs = (old + 0.02 * torch.randn(6, dtype=torch.float64)).requires_grad_()
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    advantages = torch.tensor([1.0, 1, -2, -2, -2, -2], dtype=torch.float64)
    loss, _ = policy_loss(
        log_probs,
        old,
        advantages,
        loss_mode="gspo",
        loss_agg_mode="seq-mean-token-mean",
        cu_seqlens=ends,
        backend="reference",
    )
    x = log_probs - old
    direct = -(x[:2].mean().exp() * 1.0 + x[2:].mean().exp() * -2.0) / 2
    torch.testing.assert_close(loss, direct)
    got, want = (torch.autograd.grad(v, log_probs, retain_graph=True)[0] for v in (loss, direct))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("difference", [-25.0, -1.2, -1e-4, 0.0, 1e-4, 0.8, 3.0, 30.0])
def test_kl_estimators(difference):
    d = difference
    log_probs = torch.tensor([d - 1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0], dtype=torch.float64)
    n = min(max(-d, -20), 20)
    k3 = math.expm1(n) - n
    want = {
        "k1": (d, 1),
        "abs": (abs(d), (d > 0) - (d < 0)),
        "k2": (d * d / 2, d),
        "k3": (min(k3, 10), 0 if k3 > 10 or abs(d) > 20 else 1 - math.exp(-d)),
    }
    want |= {"kl": want["k1"], "mse": want["k2"], "low_var_kl": want["k3"]}
    for kl_type, (value, gradient) in want.items():
        for name, expected in ((kl_type, gradient), (kl_type + "+", d)):
            out = token_kl(name, log_probs, ref)
            assert out.item() == pytest.approx(value, abs=1e-14), name
            got = torch.autograd.grad(out.sum(), log_probs)[0].item()
            assert got == pytest.approx(expected, abs=1e-12), name


@pytest.mark.parametrize("difference", [-60.0, -1.2, 0.8, 90.0])
def test_clamps_of_k3(difference):
    d = difference
    log_probs = torch.tensor([d - 1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0], dtype=torch.float64)
    for low, high in ((1.0, 0.2), (None, None), (5.0, None)):
        out = token_kl("k3", log_probs, ref, kl_input_clamp=low, kl_output_clamp=high)
        bound = 80.0 if low is None else low
        n = min(max(-d, -bound), bound)
        value = math.expm1(n) - n
        high = math.inf if high is None else high
        assert out.item() == pytest.approx(min(value, high))
        want = 0 if abs(d) > bound or value > high else 1 - math.exp(-d)
        assert torch.autograd.grad(out.sum(), log_probs)[0].item() == pytest.approx(want)


@pytest.mark.parametrize("loss_mode", ["ppo_clip", "gspo"])
def test_kl_times_the_ratio_as_in_trl(loss_mode):
    """use_bias_correction_kl: k3 * coef_1, whose gradient goes through both."""
    old = -torch.rand(6, dtype=torch.float64)
    ref = -torch.rand(6, dtype=torch.float64)
    log_probs = (old + 0.3 * torch.randn(6, dtype=torch.float64)).requires_grad_()
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    loss, metrics = policy_loss(
        log_probs,
        old,
        torch.zeros(6).double(),
        loss_mode=loss_mode,
        cu_seqlens=ends,
        loss_agg_mode="seq-mean-token-mean",
        ref_log_probs=ref,
        kl_coef=0.5,
        kl_times_ratio=True,
        kl_input_clamp=None,
        kl_output_clamp=None,
        backend="reference",
    )
    log_ratio = log_probs - old
    if loss_mode == "gspo":
        log_ratio = torch.cat([log_ratio[:2].mean().expand(2), log_ratio[2:].mean().expand(4)])
    kl = ((ref - log_probs).exp() - (ref - log_probs) - 1) * log_ratio.exp()
    direct = (kl[:2].mean() + kl[2:].mean()) / 2
    torch.testing.assert_close(loss, 0.5 * direct)
    torch.testing.assert_close(metrics["kl_loss"], direct.detach())
    got, want = (torch.autograd.grad(v, log_probs)[0] for v in (loss, 0.5 * direct))
    torch.testing.assert_close(got, want)


def test_covariance_selection():
    generator = torch.Generator().manual_seed(0)
    log_probs, advantages = (torch.randn(1000, generator=generator) * 3 for _ in range(2))
    mask = torch.rand(1000, generator=generator) < 0.8
    a, b = advantages[mask], log_probs[mask]
    covariance = torch.full((1000,), -torch.inf)
    covariance[mask] = (a - a.mean()) * (b - b.mean())
    options = {"response_mask": mask, "ratio": 0.01}
    chosen = select_by_covariance(log_probs, advantages, loss_mode="kl_cov", **options)
    count = int(mask.sum() * 0.01)
    assert set(chosen.nonzero().flatten().tolist()) == set(covariance.topk(count).indices.tolist())
    chosen = select_by_covariance(
        log_probs, advantages, loss_mode="clip_cov", generator=generator, **options
    )
    assert chosen.sum() == count and ((covariance > 1) & (covariance < 5))[chosen].all()
    nothing = torch.zeros(1000, dtype=torch.bool)
    for loss_mode in ("clip_cov", "kl_cov"):
        empty = select_by_covariance(
            log_probs, advantages, loss_mode=loss_mode, response_mask=nothing
        )
        assert not empty.any()
