"""float64 inputs are computed with float64 constants: against formulas written out here."""

import math

import pytest
import torch

from hybridengine import kernels as he

EXACT = {"rtol": 1e-13, "atol": 1e-15}
ROWS, WIDTH, VOCAB = 6, 5, 11
CU_SEQLENS = torch.tensor([0, 4, 6], dtype=torch.int32)


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


LOG_PROBS = 0.3 * draw(ROWS) - 2
OLD = 0.3 * draw(ROWS, seed=1) - 2
ADVANTAGES = draw(ROWS, seed=2)
NUMBERS = {
    "clip_ratio_low": 0.1,
    "clip_ratio_high": 0.3,
    "clip_ratio_c": 1.7,
    "tau_pos": 1.1,
    "tau_neg": 1.05,
    "cov_kl_coef": 0.7,
    "dro_beta": 0.3,
}


def clipped(ratio, advantage, c=None):
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.9), 1.3))
    return loss if c is None or advantage >= 0 else min(loss, -advantage * c)


def sapo(ratio, advantage):
    tau = 1.1 if advantage > 0 else 1.05
    return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def sequence_means(values):
    first, second = sum(values[:4]) / 4, sum(values[4:]) / 2
    return [first] * 4 + [second] * 2


def gmpo_clip(x, advantage):
    """Clip x where the advantage's sign would move it further."""
    bounded = min(max(x, -0.1), 0.3)
    sign = 1 if advantage > 0 else -1
    return x if sign * x <= sign * bounded else bounded


def expected_losses(mode):
    """The loss of every token, in Python's floats."""
    log_probs, old, advantages = LOG_PROBS.tolist(), OLD.tolist(), ADVANTAGES.tolist()
    x = [a - b for a, b in zip(log_probs, old, strict=True)]
    ratio = [math.exp(value) for value in x]
    seq_ratio = [math.exp(value) for value in sequence_means(x)]
    pairs = list(zip(ratio, advantages, strict=True))
    seq_pairs = list(zip(seq_ratio, advantages, strict=True))
    if mode == "ppo_clip":
        return [clipped(r, a, 1.7) for r, a in pairs]
    if mode == "gspo":
        return [clipped(r, a, 1.7) for r, a in seq_pairs]
    if mode == "sapo":
        return [sapo(r, a) for r, a in pairs]
    if mode == "seq_sapo":
        return [sapo(r, a) for r, a in seq_pairs]
    if mode == "gmpo":
        means = sequence_means([gmpo_clip(v, a) for v, a in zip(x, advantages, strict=True)])
        return [-a * math.exp(m) for a, m in zip(sequence_means(advantages), means, strict=True)]
    if mode == "cispo":
        return [-min(max(r, 0.9), 1.3) * a * p for (r, a), p in zip(pairs, log_probs, strict=True)]
    if mode == "reinforce":
        return [-a * p for a, p in zip(advantages, log_probs, strict=True)]
    assert mode == "dro"
    return [-a * p + 0.15 * v * v for a, p, v in zip(advantages, log_probs, x, strict=True)]


MODES = ("ppo_clip", "gspo", "sapo", "seq_sapo", "gmpo", "cispo", "reinforce", "dro")


@pytest.mark.parametrize("mode", MODES)
def test_policy_loss(mode):
    losses = expected_losses(mode)
    loss, _ = he.policy_loss(
        LOG_PROBS, OLD, ADVANTAGES, loss_mode=mode, cu_seqlens=CU_SEQLENS, **NUMBERS
    )
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss.item(), sum(losses) / ROWS, **EXACT)


def test_policy_loss_with_kl_and_entropy():
    ref, entropy = OLD + 0.1, OLD.abs()
    loss, _ = he.policy_loss(
        LOG_PROBS,
        OLD,
        ADVANTAGES,
        ref_log_probs=ref,
        kl_coef=0.1,
        entropy=entropy,
        entropy_coeff=0.7,
        **NUMBERS,
    )
    d = (ref - LOG_PROBS).tolist()
    kl = sum(math.expm1(value) - value for value in d)
    total = sum(expected_losses("ppo_clip")) + 0.1 * kl - 0.7 * sum(entropy.tolist())
    torch.testing.assert_close(loss.item(), total / ROWS, **EXACT)


def test_vespo_weights():
    weights = he.vespo_weights(
        LOG_PROBS,
        OLD,
        ADVANTAGES,
        cu_seqlens=CU_SEQLENS,
        k_pos=2.1,
        lambda_pos=3.3,
        k_neg=2.7,
        lambda_neg=1.9,
    )
    x = (LOG_PROBS - OLD).tolist()
    sums = [m * n for m, n in zip(sequence_means(x), [4] * 4 + [2] * 2, strict=True)]
    expected = []
    for log_w, advantage in zip(sums, ADVANTAGES.tolist(), strict=True):
        k, rate = (2.1, 3.3) if advantage >= 0 else (2.7, 1.9)
        expected.append(math.exp(rate + k * log_w - rate * math.exp(log_w)))
    torch.testing.assert_close(weights.tolist(), expected, **EXACT)


HIDDEN, WEIGHT, BIAS = draw(ROWS, WIDTH, seed=3), draw(VOCAB, WIDTH, seed=4), draw(VOCAB, seed=5)
IDS = torch.tensor([0, 10, 3, 3, 7, 1])
# Not float32 numbers; given as float32 they are what float32 holds.
TEMPERATURES = torch.tensor([0.7, 1.1, 0.3, 1.3, 0.9, 2.1], dtype=torch.float64)


def exact_rows(temperatures, softcap=None):
    """Logits z, log-probs and entropies of the rows."""
    z = HIDDEN @ WEIGHT.T + BIAS
    if softcap is not None:
        z = softcap * torch.tanh(1.3 * z / softcap)
    z = z / temperatures.double()[:, None]
    log_p = z - (z - z.amax(1, True)).exp().sum(1, True).log() - z.amax(1, True)
    return z, log_p, -(log_p.exp() * log_p).sum(1)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_per_token_temperatures(dtype):
    temperatures = TEMPERATURES.to(dtype)
    _, log_p, entropy = exact_rows(temperatures)
    expected = log_p[torch.arange(ROWS), IDS], entropy
    for results in (
        he.token_log_probs(HIDDEN @ WEIGHT.T + BIAS, IDS, temperatures),
        he.linear_token_log_probs(HIDDEN, WEIGHT, IDS, temperatures, bias=BIAS),
        he.sparse_linear_token_log_probs(
            HIDDEN,
            WEIGHT,
            IDS,
            torch.arange(VOCAB).repeat(ROWS),
            torch.arange(0, ROWS * VOCAB + 1, VOCAB),
            temperatures,
            bias=BIAS,
        ),
        he.linear_policy_loss(
            HIDDEN, WEIGHT, IDS, temperatures, bias=BIAS, old_log_probs=None, advantages=ADVANTAGES
        )[1:3],
    ):
        for got, want in zip(results, expected, strict=True):
            # Sums of terms up to 16, and differences of these.
            torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("temperature", (0.7, TEMPERATURES, TEMPERATURES.float()))
def test_linear_cross_entropy(temperature, deterministic):
    """Also by the chunks of the deterministic form; soft-cap, smoothing and z-loss."""
    vector = temperature
    if isinstance(temperature, float):
        vector = torch.full((ROWS,), temperature, dtype=torch.float64)
    z, log_p, _ = exact_rows(vector, softcap=2.1)
    lse = (z - log_p)[:, 0]
    z_loss = 0.3 * lse.square()
    expected = lse - 0.9 * z[torch.arange(ROWS), IDS] - 0.1 * z.mean(1) + z_loss
    losses, z_losses = he.linear_cross_entropy(
        HIDDEN,
        WEIGHT,
        IDS,
        temperature,
        bias=BIAS,
        logit_scale=1.3,
        softcap=2.1,
        label_smoothing=0.1,
        lse_square_scale=0.3,
        reduction="none",
        deterministic=deterministic,
    )
    torch.testing.assert_close(losses, expected, **EXACT)
    torch.testing.assert_close(z_losses, z_loss, **EXACT)


def test_linear_distillation_loss():
    teacher = draw(ROWS, WIDTH, seed=6)
    _, divergences = he.linear_distillation_loss(
        HIDDEN,
        WEIGHT,
        teacher,
        WEIGHT,
        beta=0.3,
        temperature=0.7,
        student_softcap=2.1,
        teacher_logit_scale=1.3,
    )
    q = torch.softmax(2.1 * torch.tanh(HIDDEN @ WEIGHT.T / 2.1) / 0.7, 1)
    p = torch.softmax(1.3 * (teacher @ WEIGHT.T) / 0.7, 1)
    m = 0.3 * p + 0.7 * q
    expected = (0.3 * p * (p / m).log() + 0.7 * q * (q / m).log()).sum(1)
    torch.testing.assert_close(divergences, expected, **EXACT)


def test_value_loss_and_tree_attention():
    values, returns = draw(ROWS, seed=7), draw(ROWS, seed=8)
    loss, _ = he.value_loss(values, OLD, returns, cliprange_value=0.3)
    bounded = torch.minimum(torch.maximum(values, OLD - 0.3), OLD + 0.3)
    expected = torch.maximum((values - returns).square(), (bounded - returns).square()).mean() / 2
    torch.testing.assert_close(loss, expected, **EXACT)
    q, k, v = (draw(3, 1, 4, seed=seed) for seed in (9, 10, 11))
    out = he.tree_attention(q, k, v, torch.tensor([3, 3, 3]), softmax_scale=0.3, softcap=1.1)
    scores = 1.1 * torch.tanh(0.3 * q[:, 0] @ k[:, 0].T / 1.1)
    scores = scores.masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(out[:, 0], scores.softmax(1) @ v[:, 0], **EXACT)
    sinks = torch.tensor([0.7 + 2.0**-40])
    out = he.tree_attention(
        *(q, k, v, torch.tensor([3, 3, 3])), sinks=sinks, softmax_scale=0.3, softcap=1.1
    )
    weights = torch.cat([scores, sinks.expand(3, 1)], 1).softmax(1)[:, :3]
    torch.testing.assert_close(out[:, 0], weights @ v[:, 0], **EXACT)


def test_whiten():
    centred = ADVANTAGES - ADVANTAGES.mean()
    variance = centred.square().sum() / (ROWS - 1)
    expected = centred / (variance + 0.3).sqrt()
    torch.testing.assert_close(he.whiten(ADVANTAGES, epsilon=0.3), expected, **EXACT)
