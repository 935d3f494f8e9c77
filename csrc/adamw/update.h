// The arithmetic of AdamW (arXiv 1711.05101, algorithm 2, in the form of torch.optim.AdamW), shared
// by the CPU kernel, in vectors, and the CUDA kernel.
#pragma once

#include <cmath>

#include "adamw/params.h"
#include "common/host_device.h"

namespace hybridengine {

// base^exponent by repeated squaring, for a base in [0, 1): its relative error is at most about
// exponent 2^-53, so where that is large the result is too small to matter beside 1.
HE_HOST_DEVICE double integer_power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

// The scalars of one tensor's update: computed in float64, rounded once.
struct AdamwScalars {
  float grad_factor;
  float decay;        // 1 - lr weight_decay
  float avg_weight;   // 1 - beta1
  float sq_weight;    // 1 - beta2
  float denom_scale;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)
};

HE_HOST_DEVICE AdamwScalars adamw_scalars(const AdamwOptions& options, const float* step) {
  const auto updates = static_cast<int64_t>(*step);
  const double correction1 = 1 - integer_power(options.beta1, updates);
  const double correction2 = 1 - integer_power(options.beta2, updates);
  AdamwScalars s;
  s.grad_factor = options.grad_factor ? *options.grad_factor : 1.0f;
  s.decay = static_cast<float>(1 - options.lr * options.weight_decay);
  s.avg_weight = static_cast<float>(1 - options.beta1);
  s.sq_weight = static_cast<float>(1 - options.beta2);
  s.denom_scale = static_cast<float>(1 / sqrt(correction2));
  s.eps = static_cast<float>(options.eps);
  s.step_size = static_cast<float>(options.lr / correction1);
  return s;
}

// (1 - weight) from + weight to. A constant `to` is reached exactly, also where the weights,
// rounded to float32, do not add up to 1.
template <typename Float>
HE_HOST_DEVICE Float interpolate(Float from, Float to, float weight) {
  return weight < 0.5f ? from + weight * (to - from) : to - (1.0f - weight) * (to - from);
}

// The average of squares with the square of `g`. Where that overflows its weighted part need not,
// and where the average has overflowed, inf - inf would be NaN.
template <typename Math, typename Float>
HE_HOST_DEVICE Float average_square(Float average, Float g, float weight) {
  const Float square = Math::product(g, g);
  return Math::select((average == INFINITY) | (square == INFINITY),
                      (1.0f - weight) * average + Math::product(Math::product(g, weight), g),
                      interpolate<Float>(average, square, weight));
}

// Float: float or a vector of them. Math::product(a, b) is rounded, not fused into a sum, so that
// an element does not depend on the code around it; Math::root is the square root, and
// Math::select(condition, yes, no) chooses.
template <typename Math, typename Float>
HE_HOST_DEVICE void adamw_update(const AdamwScalars& s, Float grad, Float& param, Float& exp_avg,
                                 Float& exp_avg_sq) {
  const Float g = Math::product(grad, s.grad_factor);
  exp_avg = interpolate<Float>(exp_avg, g, s.avg_weight);
  exp_avg_sq = average_square<Math, Float>(exp_avg_sq, g, s.sq_weight);
  const Float denom = Math::root(exp_avg_sq) * s.denom_scale + s.eps;
  param = Math::product(param, s.decay) - s.step_size * (exp_avg / denom);
}

}  // namespace hybridengine
