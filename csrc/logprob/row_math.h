// Scalar arithmetic of a row, shared by the CPU and the CUDA kernel.
#pragma once

#include <cmath>

#include "common/host_device.h"
#include "logprob/params.h"

namespace hybridengine {

// The sums of a pass over a row, without the token's own entry: as p -> 1, 1 - p stays exact
// because it is the sum over the other entries, not a difference of nearly equal numbers.
struct RowSums {
  float max;   // max of y
  double e;    // sum of e = exp(d), d = (y - max) * factor
  double e_d;  // sum of e * d
  double e_e;  // sum of e * e
};

struct RowResult {
  float log_prob, entropy, log_sum, sum_p_squared;
};

// Writes the results of token r, or in a vocab-parallel forward its partial sums.
HE_HOST_DEVICE void write_row(const LogProbForward& p, int64_t r, const RowSums& sums,
                              float token_y, const RowResult& result) {
  if (p.partial) {
    float* out = p.partial + r * 5;
    out[0] = sums.max;
    out[1] = static_cast<float>(sums.e);
    out[2] = static_cast<float>(sums.e_d);
    out[3] = token_y;
    out[4] = static_cast<float>(sums.e_e);
    return;
  }
  p.log_probs[r] = p.negate ? -result.log_prob : result.log_prob;
  p.entropy[r] = result.entropy;
  float* stats = p.row_stats + r * p.stats_width;
  stats[0] = sums.max;
  stats[1] = result.log_sum;
  if (p.stats_width > 2) stats[2] = result.sum_p_squared;
}

HE_HOST_DEVICE float row_factor(const LogitRows& rows, int64_t row) {
  const float temperature = rows.temperatures ? rows.temperatures[row] : rows.temperature;
  return static_cast<float>((rows.softcap > 0 ? 1.0 : double{rows.logit_scale}) / temperature);
}

// The row's factor in units of log 2, rounded to float32 as the kernels use it.
HE_HOST_DEVICE float exp2_factor(float factor) {
  return static_cast<float>(double{factor} * 1.4426950408889634);
}

// Corrects e and e_d, to first order, for the rounding of exp2_factor. That rounding has the same
// sign in every entry: 30 below the maximum, e has a relative error of 4e-7. The sum of e * d * d
// is estimated by its lower bound e_d^2 / e, so the correction is never too large.
HE_HOST_DEVICE RowSums unbiased(RowSums sums, float factor) {
  const double off = double{factor} * 1.4426950408889634 / exp2_factor(factor) - 1.0;
  const double e_d = sums.e_d;
  if (sums.e > 0) sums.e_d += off * (e_d + e_d * e_d / sums.e);
  sums.e += off * e_d;
  return sums;
}

HE_HOST_DEVICE RowResult finish_row(const RowSums& sums, float token_y, float factor) {
  const double d = (double{token_y} - sums.max) * factor;
  const double e = exp(d);
  const double total = sums.e + e;
  const double log_sum = d == 0 ? log1p(sums.e) : log(total);
  const double e_d = sums.e_d + (e > 0 ? e * d : 0.0);
  RowResult result;
  // The ratio keeps 1 - p exact where d is not 0; below -600 e may be subnormal.
  result.log_prob = static_cast<float>(d > -600 ? 0.0 - log1p(sums.e / e) : d - log_sum);
  result.entropy = static_cast<float>(log_sum - e_d / total);
  result.log_sum = static_cast<float>(log_sum);
  result.sum_p_squared = static_cast<float>((sums.e_e + e * e) / (total * total));
  return result;
}

// The sums relative to `top`, which is at least their maximum. A part of removed entries only
// (-inf) would give 0 * inf; NaN stays.
HE_HOST_DEVICE RowSums raised(const RowSums& sums, float top, float factor) {
  if (sums.max == top) return sums;
  const double shift = (double{sums.max} - top) * factor;
  const double shrink = exp(shift);
  if (!(shrink > 0) && sums.e == sums.e) return {top, 0, 0, 0};
  return {top, sums.e * shrink, (sums.e_d + shift * sums.e) * shrink, sums.e_e * shrink * shrink};
}

HE_HOST_DEVICE int64_t vocab_total(const LogitRows& rows) {
  return rows.vocab_range ? rows.vocab_range[1] : rows.vocab;
}

HE_HOST_DEVICE bool label_is_bad(const LogitRows& rows, int64_t token) {
  const int64_t label = rows.token_ids[token];
  return label != rows.ignore_index && (label < 0 || label >= vocab_total(rows));
}

// The label's column in this slice of the vocabulary; outside [0, vocab) if in another slice.
HE_HOST_DEVICE int64_t local_label(const LogitRows& rows, int64_t token) {
  return rows.token_ids[token] - (rows.vocab_range ? rows.vocab_range[0] : 0);
}

// The row of grad_logits that the gradient of row r is written to; negative: none.
HE_HOST_DEVICE int64_t grad_row(const LogProbBackward& rows, int64_t r) {
  return rows.row_index ? rows.row_index[r] : r;
}

// d(loss)/d(y_j) = p_j * (constant + slope * log p_j) for j other than the token. `token` is the
// gradient of the token's entry, with 1 - p as -expm1(log p), which is exact as p -> 1. Tokens of
// one row add their constants and slopes.
struct RowGradient {
  float constant, slope, token;
  bool zero;
};

HE_HOST_DEVICE RowGradient row_gradient(const LogProbBackward& rows, int64_t t, float factor) {
  const float sign = rows.negate ? -1.0f : 1.0f;
  const float g = rows.grad_log_probs ? sign * rows.grad_log_probs[t] : 0.0f;
  const float h = rows.grad_entropy ? rows.grad_entropy[t] : 0.0f;
  const float log_prob = sign * rows.log_probs[t];
  const float entropy = rows.entropy[t];
  RowGradient gradient;
  gradient.zero = (g == 0 && h == 0) || rows.token_ids[t] == rows.ignore_index;
  gradient.constant = -factor * (g + h * entropy);
  gradient.slope = -factor * h;
  const float p = expf(log_prob);
  const float entropy_part = p > 0 ? p * (log_prob + entropy) : 0.0f;
  gradient.token = factor * (g * -expm1f(log_prob) - h * entropy_part);
  return gradient;
}

}  // namespace hybridengine
