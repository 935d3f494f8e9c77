// Activations of a vector. Included only by *_cpu.cpp files.
#pragma once

#include "common/simd.h"

namespace hybridengine::HYBRIDENGINE_ISA {

// An activation of x and, where it is wanted, its derivative.
struct Activated {
  VecF value, slope;
};

// exp(-|x|)
HE_SIMD VecF small_exp(VecF x) { return exp(-(VecF)((VecI)x & 0x7FFFFFFF)); }

HE_SIMD VecF logistic(VecF x, VecF small) {
  return select(x < 0.0f, small, splat(1.0f)) / (1.0f + small);
}

HE_SIMD Activated silu(VecF x) {
  const VecF sigmoid = logistic(x, small_exp(x));
  return {x * sigmoid, sigmoid * (1.0f + x * (1.0f - sigmoid))};
}

HE_SIMD Activated sigmoid(VecF x) {
  const VecF value = logistic(x, small_exp(x));
  return {value, value * (1.0f - value)};
}

// max(x, 0) + log(1 + exp(-|x|)), where the rounding of 1 + exp(-|x|) is made up for.
HE_SIMD Activated softplus(VecF x) {
  const VecF small = small_exp(x), sum = 1.0f + small;
  const VecF log_sum = select(sum == 1.0f, small, log(sum) * (small / (sum - 1.0f)));
  return {select(x < 0.0f, splat(0.0f), x) + log_sum, logistic(x, small)};
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
