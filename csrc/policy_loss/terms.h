// The loss of one token and its gradient by log_prob, for every loss mode, and the KL penalties.
// kernels/policy_loss/terms.py is the specification, with the formulas and their sources.
//
// One source for CPU and CUDA: `Ops` supplies a number type F, its mask type M and the operations
// that have no operator (ScalarOps below on CUDA; vectors in the CPU kernel).
#pragma once

#include <cmath>
#include <cstdint>

#include "common/host_device.h"

namespace hybridengine {

// In the order of LOSS_MODES in kernels/policy_loss/terms.py, then that of value_loss.
enum class LossMode : int32_t {
  ppo_clip,
  gspo,
  gmpo,
  cispo,
  sapo,
  dppo_tv,
  dppo_kl,
  clip_cov,
  kl_cov,
  reinforce,
  dro,
  seq_sapo,
  value
};

// Whether the ratio of a token is that of its sequence.
HE_HOST_DEVICE constexpr bool has_sequence_ratio(LossMode mode) {
  return mode == LossMode::gspo || mode == LossMode::seq_sapo;
}

// In the order of KL_TYPES in kernels/policy_loss/terms.py.
enum class KlType : int32_t { k1, abs, k2, k3 };

struct TokenLossOptions {
  float clip_ratio_low, clip_ratio_high, clip_ratio_c;
  float tau_pos, tau_neg;  // sapo, seq_sapo
  float cov_kl_coef;       // kl_cov
  float dro_beta;          // dro
};

struct KlOptions {
  KlType type;
  bool straight_through;  // the gradient is that of k2
  bool times_ratio;
  float input_clamp, output_clamp;  // k3
};

struct ScalarOps {
  using F = float;
  using M = bool;
  static HE_HOST_DEVICE F set(float x) { return x; }
  static HE_HOST_DEVICE F select(M mask, F yes, F no) { return mask ? yes : no; }
  static HE_HOST_DEVICE F clamp(F x, float low, float high) {  // NaN stays NaN
    x = x > high ? high : x;
    return x < low ? low : x;
  }
  static HE_HOST_DEVICE F exp(F x) { return expf(x); }
  static HE_HOST_DEVICE F log(F x) { return logf(x); }
};

template <class Ops>
struct Token {
  typename Ops::F log_prob, old_log_prob, advantage;
  typename Ops::F seq_log_ratio;  // gspo, seq_sapo, gmpo: mean log-ratio of the sequence
  typename Ops::F seq_advantage;  // gmpo
  typename Ops::M selected;       // clip_cov, kl_cov
};

template <class Ops>
struct TokenTerms {
  typename Ops::F loss, gradient;
  typename Ops::M clipped, clipped_lower;
  typename Ops::F log_ratio, ratio;  // log_ratio: not clamped
  typename Ops::F grad_log_ratio;    // d log(ratio) / d log_prob, or 0 where that is clamped
};

template <class Ops>
struct KlTerms {
  typename Ops::F value, gradient;
};

// a - b; 0 for two log-probs of -inf: a token impossible under both policies has ratio 1.
template <class Ops>
HE_HOST_DEVICE typename Ops::F log_ratio(typename Ops::F a, typename Ops::F b) {
  return Ops::select(a == b, Ops::set(0), a - b);
}

template <class Ops>
HE_HOST_DEVICE typename Ops::F clamped_log_ratio(const Token<Ops>& t) {
  return Ops::clamp(log_ratio<Ops>(t.log_prob, t.old_log_prob), -20.0f, 20.0f);
}

// The log-ratio that gmpo averages: clipped where moving further would raise the objective.
template <class Ops>
HE_HOST_DEVICE typename Ops::F gmpo_log_ratio(const Token<Ops>& t, const TokenLossOptions& o) {
  const auto x = clamped_log_ratio(t);
  const auto zero = Ops::set(0), high = Ops::set(o.clip_ratio_high),
             low = Ops::set(-o.clip_ratio_low);
  const auto up = Ops::select(x > high, high, x);
  const auto down = Ops::select(x < low, low, x);
  return Ops::select(t.advantage > zero, up, Ops::select(t.advantage < zero, down, x));
}

// max(-A r, -A clip(r)); the gradient goes only through the first.
template <class Ops>
HE_HOST_DEVICE void clip_terms(TokenTerms<Ops>& terms, typename Ops::F advantage,
                               typename Ops::F grad_x, const TokenLossOptions& o) {
  const auto unclipped = -advantage * terms.ratio;
  const auto bounded =
      -advantage * Ops::clamp(terms.ratio, 1 - o.clip_ratio_low, 1 + o.clip_ratio_high);
  terms.clipped = bounded > unclipped;
  terms.loss = Ops::select(terms.clipped, bounded, unclipped);
  terms.gradient = Ops::select(terms.clipped, Ops::set(0), unclipped * grad_x);
}

// Dual clip: for a negative advantage the loss is at most -A c.
template <class Ops>
HE_HOST_DEVICE void dual_clip_terms(TokenTerms<Ops>& terms, typename Ops::F advantage,
                                    typename Ops::F grad_x, const TokenLossOptions& o) {
  const auto zero = Ops::set(0), bound = -advantage * o.clip_ratio_c;
  clip_terms<Ops>(terms, advantage, grad_x, o);
  terms.clipped_lower = (advantage < zero) & (terms.loss > bound);
  terms.loss = Ops::select(terms.clipped_lower, bound, terms.loss);
  terms.gradient = Ops::select(terms.clipped_lower, zero, terms.gradient);
}

// -A sigmoid(tau (r - 1)) 4 / tau.
template <class Ops>
HE_HOST_DEVICE void sapo_terms(TokenTerms<Ops>& terms, typename Ops::F advantage,
                               typename Ops::F grad_x, const TokenLossOptions& o) {
  using F = typename Ops::F;
  const F one = Ops::set(1);
  const F tau = Ops::select(advantage > Ops::set(0), Ops::set(o.tau_pos), Ops::set(o.tau_neg));
  // exp stays finite for a large tau; the gate is 0 in float32 long before.
  const F rest = Ops::exp(Ops::clamp(tau * (one - terms.ratio), -INFINITY, 80.0f));
  const F gate = one / (one + rest);  // 1 - gate is rest * gate, without cancellation
  terms.loss = -advantage * gate * (4.0f / tau);
  terms.gradient = -4.0f * advantage * gate * (rest * gate) * terms.ratio * grad_x;
}

// value_loss: half the larger squared error of v and of v clipped around the old value. `log_prob`
// is v, `advantage` the return; the ratio, whose mean is a metric, is v.
template <class Ops>
HE_HOST_DEVICE TokenTerms<Ops> value_terms(const Token<Ops>& t, const TokenLossOptions& o) {
  using F = typename Ops::F;
  const F v = t.log_prob, zero = Ops::set(0), clip = Ops::set(o.clip_ratio_low);
  const F low = t.old_log_prob - clip, high = t.old_log_prob + clip;
  const F bounded = Ops::select(v >= low, v, low);
  const F error = v - t.advantage;
  const F clipped_error = Ops::select(bounded <= high, bounded, high) - t.advantage;
  const auto clipped = clipped_error * clipped_error > error * error;
  const F larger = Ops::select(clipped, clipped_error, error);
  // NaN where the clipped error is not finite, as a maximum is differentiated.
  const F gradient = Ops::select(clipped, zero, error + zero * clipped_error);
  return {0.5f * larger * larger, gradient, clipped, zero > zero, zero, v, zero};
}

// Whether the divergence has not passed its threshold on the side the advantage pushes to.
template <LossMode mode, class Ops>
HE_HOST_DEVICE typename Ops::M dppo_allows(const Token<Ops>& t, const TokenLossOptions& o) {
  const auto p = Ops::exp(t.log_prob), p_old = Ops::exp(t.old_log_prob), one = Ops::set(1);
  const auto high = Ops::set(o.clip_ratio_high), low = Ops::set(o.clip_ratio_low);
  const auto positive = t.advantage > Ops::set(0);
  if constexpr (mode == LossMode::dppo_tv) {
    return (positive & (p - p_old <= high)) | ((!positive) & (p - p_old >= -low));
  } else {
    const auto rest = (one - p_old + 1e-8f) / (one - p + 1e-8f);
    const auto zero = Ops::set(0), x = log_ratio<Ops>(t.log_prob, t.old_log_prob);
    const auto kl = (one - p_old) * Ops::log(rest) - Ops::select(p_old > zero, p_old * x, zero);
    return (positive & ((kl <= high) | (p <= p_old))) |
           ((!positive) & ((kl <= low) | (p >= p_old)));
  }
}

template <LossMode mode, class Ops>
HE_HOST_DEVICE TokenTerms<Ops> token_loss(const Token<Ops>& t, const TokenLossOptions& o) {
  using F = typename Ops::F;
  if constexpr (mode == LossMode::value) return value_terms(t, o);
  const F zero = Ops::set(0), one = Ops::set(1), advantage = t.advantage;
  TokenTerms<Ops> terms;
  terms.log_ratio = log_ratio<Ops>(t.log_prob, t.old_log_prob);
  terms.clipped = terms.clipped_lower = zero > zero;
  const F x = clamped_log_ratio(t);
  // d x / d log_prob: 0 where clamped, and for two log-probs of -inf, whose difference is NaN.
  const F grad_x = Ops::select(x == t.log_prob - t.old_log_prob, one, zero);
  const auto impossible = t.log_prob == Ops::set(-INFINITY);
  terms.grad_log_ratio = grad_x;
  if constexpr (has_sequence_ratio(mode)) {
    terms.ratio = Ops::exp(Ops::clamp(t.seq_log_ratio, -20.0f, 10.0f));
    const F unclipped = Ops::select(t.seq_log_ratio <= Ops::set(10), one, zero);
    terms.grad_log_ratio = Ops::select(impossible, zero, unclipped);
    if constexpr (mode == LossMode::seq_sapo)
      sapo_terms<Ops>(terms, advantage, terms.grad_log_ratio, o);
    else if (o.clip_ratio_c < INFINITY)
      dual_clip_terms<Ops>(terms, advantage, terms.grad_log_ratio, o);
    else
      clip_terms<Ops>(terms, advantage, terms.grad_log_ratio, o);
    return terms;
  } else if constexpr (mode == LossMode::gmpo) {
    terms.ratio = Ops::exp(t.seq_log_ratio);
    terms.loss = -t.seq_advantage * terms.ratio;
    const auto unclipped = gmpo_log_ratio(t, o) == x;
    terms.gradient = Ops::select(unclipped, terms.loss * grad_x, zero);
    const auto outside = (x > Ops::set(o.clip_ratio_high)) | (x < Ops::set(-o.clip_ratio_low));
    terms.clipped = outside & (advantage > zero);
    terms.clipped_lower = outside & (advantage < zero);
    return terms;
  }
  terms.ratio = Ops::exp(x);
  if constexpr (mode == LossMode::ppo_clip) {
    dual_clip_terms<Ops>(terms, advantage, grad_x, o);
  } else if constexpr (mode == LossMode::clip_cov) {
    clip_terms<Ops>(terms, advantage, grad_x, o);
    terms.clipped = t.selected;
    terms.loss = Ops::select(t.selected, zero, terms.loss);
    terms.gradient = Ops::select(t.selected, zero, terms.gradient);
  } else if constexpr (mode == LossMode::kl_cov) {
    const F coef = Ops::select(t.selected, Ops::set(o.cov_kl_coef), zero);
    const F sign = Ops::select(x > zero, one, Ops::select(x < zero, -one, zero));
    terms.clipped = t.selected;
    terms.loss = -advantage * terms.ratio + coef * sign * x;
    terms.gradient = (-advantage * terms.ratio + coef * sign) * grad_x;
  } else if constexpr (mode == LossMode::sapo) {
    sapo_terms<Ops>(terms, advantage, grad_x, o);
  } else {  // -weight * A * log_prob with a constant weight
    F weight = one;
    if constexpr (mode == LossMode::cispo) {
      weight = Ops::clamp(terms.ratio, 1 - o.clip_ratio_low, 1 + o.clip_ratio_high);
      terms.clipped = terms.ratio != weight;
    } else if constexpr (mode == LossMode::dppo_tv || mode == LossMode::dppo_kl) {
      const auto allowed = dppo_allows<mode, Ops>(t, o);
      const F bound = Ops::set(o.clip_ratio_c);
      terms.clipped = !allowed;
      terms.clipped_lower = allowed & (terms.ratio > bound);
      weight = Ops::select(terms.ratio > bound, bound, terms.ratio);
      weight = Ops::select(allowed, weight, zero);
    }
    terms.gradient = Ops::select(impossible, zero, -weight * advantage);
    terms.loss = Ops::select(impossible, zero, terms.gradient * t.log_prob);
    if constexpr (mode == LossMode::dro) {
      terms.loss += 0.5f * o.dro_beta * x * x;
      terms.gradient += o.dro_beta * x * grad_x;
    }
  }
  return terms;
}

template <class Ops>
HE_HOST_DEVICE KlTerms<Ops> token_kl(const KlOptions& o, typename Ops::F log_prob,
                                     typename Ops::F ref_log_prob) {
  using F = typename Ops::F;
  const F zero = Ops::set(0), one = Ops::set(1), d = log_ratio<Ops>(log_prob, ref_log_prob);
  KlTerms<Ops> kl;
  if (o.type == KlType::k1) {
    kl = {d, Ops::select(d == log_prob - ref_log_prob, one, zero)};
  } else if (o.type == KlType::abs) {
    kl.gradient = Ops::select(d > zero, one, Ops::select(d < zero, -one, zero));
    kl.value = kl.gradient * d;
  } else if (o.type == KlType::k2) {
    kl = {0.5f * d * d, d};
  } else {
    const F n = Ops::clamp(-d, -o.input_clamp, o.input_clamp);
    // exp(n) - 1 - n cancels for small n: use its series there.
    const F series =
        n * n *
        (0.5f +
         n * (1 / 6.0f +
              n * (1 / 24.0f +
                   n * (1 / 120.0f + n * (1 / 720.0f + n * (1 / 5040.0f + n * (1 / 40320.0f)))))));
    const auto small = (n < Ops::set(0.5f)) & (n > Ops::set(-0.5f));
    const F value = Ops::select(small, series, Ops::exp(n) - one - n),
            bound = Ops::set(o.output_clamp);
    const auto at_bound = (value > bound) | (n != -d);
    kl.gradient = Ops::select(at_bound, zero, -(value + n));
    kl.value = Ops::select(value > bound, bound, value);
  }
  if (o.straight_through) kl.gradient = d;
  return kl;
}

// kl times the ratio; `mean_kl` is that over the sequence if the ratio is the sequence's, else kl.
template <class Ops>
HE_HOST_DEVICE KlTerms<Ops> times_ratio(const KlTerms<Ops>& kl, typename Ops::F mean_kl,
                                        const TokenTerms<Ops>& terms) {
  return {kl.value * terms.ratio, terms.ratio * (kl.gradient + mean_kl * terms.grad_log_ratio)};
}

}  // namespace hybridengine
