"""The formulas of terms.py and kl.py in Triton: a block of tokens, with derivatives."""

# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def clamp(x, low, high):
    """Clamp x; NaN stays NaN, as in torch.clamp."""
    x = tl.where(x > high, high, x)
    return tl.where(x < low, low, x)


@triton.jit
def log_ratio(a, b):
    """Return a - b; 0 for two log-probs of -inf: a token impossible under both has ratio 1."""
    return tl.where(a == b, 0.0, a - b)


@triton.jit
def gmpo_log_ratio(x, advantage, low, high):
    up = tl.where(x > high, high, x)
    down = tl.where(x < -low, -low, x)
    return tl.where(advantage > 0, up, tl.where(advantage < 0, down, x))


@triton.jit
def _log_prob_terms(factor, log_prob):
    """Return factor * log_prob and its gradient; 0 for a log-prob of -inf."""
    impossible = log_prob == -float("inf")
    return tl.where(impossible, 0.0, factor * log_prob), tl.where(impossible, 0.0, factor)


@triton.jit
def _clip_terms(ratio, advantage, grad_x, low, high):
    unclipped = -advantage * ratio
    bounded = -advantage * clamp(ratio, 1 - low, 1 + high)
    clipped = bounded > unclipped
    loss = tl.where(clipped, bounded, unclipped)
    return loss, tl.where(clipped, 0.0, unclipped * grad_x), clipped


@triton.jit
def _dual_clip_terms(ratio, advantage, grad_x, low, high, c):
    loss, gradient, clipped = _clip_terms(ratio, advantage, grad_x, low, high)
    bound = -advantage * c
    lower = (advantage < 0) & (loss > bound)
    return tl.where(lower, bound, loss), tl.where(lower, 0.0, gradient), clipped, lower


@triton.jit
def _sapo_terms(ratio, advantage, grad_x, tau_pos, tau_neg):
    tau = tl.where(advantage > 0, tau_pos, tau_neg)
    rest = tl.exp(clamp(tau * (1 - ratio), -float("inf"), 80.0))
    gate = 1 / (1 + rest)
    loss = -advantage * gate * (4.0 / tau)
    return loss, -4.0 * advantage * gate * (rest * gate) * ratio * grad_x


@triton.jit
def _dppo_allows(log_prob, old, advantage, low, high, MODE: tl.constexpr):
    p = tl.exp(log_prob)
    p_old = tl.exp(old)
    if MODE == "dppo_tv":
        up = p - p_old <= high
        down = p - p_old >= -low
    else:
        rest = tl.log((1 - p_old + 1e-8) / (1 - p + 1e-8))
        kl = (1 - p_old) * rest - tl.where(p_old > 0, p_old * log_ratio(log_prob, old), 0.0)
        up = (kl <= high) | (p <= p_old)
        down = (kl <= low) | (p >= p_old)
    return tl.where(advantage > 0, up, down)


@triton.jit
def token_loss(
    log_prob,
    old,
    advantage,
    seq_log_ratio,
    seq_advantage,
    selected,
    options,
    MODE: tl.constexpr,
):
    """Return (loss, gradient, clipped, clipped_lower, ratio, gradient of the log-ratio)."""
    low, high, c = options.clip_ratio_low, options.clip_ratio_high, options.clip_ratio_c
    tau_pos, tau_neg = options.tau_pos, options.tau_neg
    cov_kl_coef, dro_beta = options.cov_kl_coef, options.dro_beta
    x = clamp(log_ratio(log_prob, old), -20.0, 20.0)
    # d x / d log_prob: 0 where clamped, and for two log-probs of -inf, whose difference is NaN.
    grad_x = tl.where(x == log_prob - old, 1.0, 0.0)
    clipped = (x != x) & (x == x)  # False
    lower = clipped
    ratio = tl.exp(x)
    if MODE == "ppo_clip":
        loss, gradient, clipped, lower = _dual_clip_terms(ratio, advantage, grad_x, low, high, c)
    elif MODE == "gspo" or MODE == "seq_sapo":
        ratio = tl.exp(clamp(seq_log_ratio, -20.0, 10.0))
        grad_x = tl.where((seq_log_ratio <= 10.0) & (log_prob != -float("inf")), 1.0, 0.0)
        if MODE == "gspo":
            loss, gradient, clipped, lower = _dual_clip_terms(
                ratio, advantage, grad_x, low, high, c
            )
        else:
            loss, gradient = _sapo_terms(ratio, advantage, grad_x, tau_pos, tau_neg)
    elif MODE == "gmpo":
        ratio = tl.exp(seq_log_ratio)
        loss = -seq_advantage * ratio
        unclipped = gmpo_log_ratio(x, advantage, low, high) == x
        gradient = tl.where(unclipped, loss * grad_x, 0.0)
        outside = (x > high) | (x < -low)
        clipped = outside & (advantage > 0)
        lower = outside & (advantage < 0)
    elif MODE == "cispo":
        weight = clamp(ratio, 1 - low, 1 + high)
        clipped = ratio != weight
        loss, gradient = _log_prob_terms(-weight * advantage, log_prob)
    elif MODE == "sapo":
        loss, gradient = _sapo_terms(ratio, advantage, grad_x, tau_pos, tau_neg)
    elif MODE == "clip_cov":
        loss, gradient, _ = _clip_terms(ratio, advantage, grad_x, low, high)
        clipped = selected
        loss = tl.where(selected, 0.0, loss)
        gradient = tl.where(selected, 0.0, gradient)
    elif MODE == "kl_cov":
        coef = tl.where(selected, cov_kl_coef, 0.0)
        sign = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))
        clipped = selected
        loss = -advantage * ratio + coef * sign * x
        gradient = (-advantage * ratio + coef * sign) * grad_x
    elif MODE == "value":
        bounded = tl.where(log_prob >= old - low, log_prob, old - low)
        bounded = tl.where(bounded <= old + low, bounded, old + low)
        error = log_prob - advantage
        clipped_error = bounded - advantage
        clipped = clipped_error * clipped_error > error * error
        larger = tl.where(clipped, clipped_error, error)
        loss = 0.5 * larger * larger
        gradient = tl.where(clipped, 0.0, error + 0.0 * clipped_error)
        ratio = log_prob
    elif MODE == "reinforce":
        loss, gradient = _log_prob_terms(-advantage, log_prob)
    elif MODE == "dro":
        loss, gradient = _log_prob_terms(-advantage, log_prob)
        loss += 0.5 * dro_beta * x * x
        gradient += dro_beta * x * grad_x
    else:
        allowed = _dppo_allows(log_prob, old, advantage, low, high, MODE)
        clipped = allowed == 0
        lower = allowed & (ratio > c)
        weight = tl.where(allowed, tl.where(ratio > c, c, ratio), 0.0)
        loss, gradient = _log_prob_terms(-weight * advantage, log_prob)
    return loss, gradient, clipped, lower, ratio, grad_x


@triton.jit
def token_kl(log_prob, ref, input_clamp, output_clamp, KL: tl.constexpr, STRAIGHT: tl.constexpr):
    """Return (value, gradient)."""
    d = log_ratio(log_prob, ref)
    if KL == 0:
        value = d
        gradient = tl.where(d == log_prob - ref, 1.0, 0.0)
    elif KL == 1:
        gradient = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0))
        value = gradient * d
    elif KL == 2:
        value = 0.5 * d * d
        gradient = d
    else:
        n = clamp(-d, -input_clamp, input_clamp)
        s = 1 / 120.0 + n * (1 / 720.0 + n * (1 / 5040.0 + n * (1 / 40320.0)))
        series = n * n * (0.5 + n * (1 / 6.0 + n * (1 / 24.0 + n * s)))
        value = tl.where((n < 0.5) & (n > -0.5), series, tl.exp(n) - 1 - n)
        gradient = tl.where((value > output_clamp) | (n != -d), 0.0, -(value + n))
        value = tl.where(value > output_clamp, output_clamp, value)
    if STRAIGHT:
        gradient = d
    return value, gradient
