// Softmax in base 2 with an integral maximum: 2^(s - m) is formed as 2^(s - floor(s)) times
// 2^(floor(s) - m), so that another m changes nothing but the exponent. Included only by *_cpu.cpp
// files.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/simd.h"

namespace hybridengine::HYBRIDENGINE_ISA {

constexpr float kLog2E = 1.44269504f;
constexpr float kNoMaximum = -1e30f;  // of a row that has seen no key
constexpr float kMasked = -2e30f;     // the score of a key that is not visible

// Scores in base 2 are this times q . k, or cap * tanh(this times q . k) with the cap in base 2.
inline float score_factor(float softmax_scale, float softcap) {
  return softcap > 0 ? softmax_scale / softcap : softmax_scale * kLog2E;
}

template <bool kCapped>
HE_SIMD VecF score_of(VecF product, float factor, float cap) {
  const VecF x = product * factor;
  return kCapped ? cap * tanh(x) : x;
}

// p 2^e for 1 <= p <= 2 and integral e <= 0; 0 below the normal range.
HE_SIMD VecF scale_down(VecF p, VecF e) {
#if defined(__AVX512F__)
  return (VecF)_mm512_scalef_ps((__m512)p, (__m512)e);
#else
  const VecI exponent = (VecI)(e + 12582912.0f) << 23;  // its low bits are those of e
  return select(e < -126.0f, VecF{}, (VecF)((VecI)p + exponent));
#endif
}

// 2^(score - maximum).
HE_SIMD VecF weight_of(VecF score, VecF maximum) {
  const VecF integral = floor(score);
  return scale_down(exp2_fraction(score - integral), integral - maximum);
}

// What ends the softmax of a row, whose weights 2^(score - maximum) add up to `total`.
struct RowEnd {
  RowEnd(float maximum, float total, const float* sinks, int64_t head)
      : lse(maximum * 0.69314718055994531 + std::log(double{total})), factor(1.0f / total) {
    if (!sinks) return;
    const double above = sinks[head] - lse;
    lse = std::max(lse, double{sinks[head]}) + std::log1p(std::exp(-std::abs(above)));
    factor = static_cast<float>(1.0 / (total * (1.0 + std::exp(above))));
  }

  double lse;    // ln of the sum of exp(score), and of exp(sink) if the head has one
  float factor;  // what the sum of weight * value is multiplied by
};

}  // namespace hybridengine::HYBRIDENGINE_ISA
