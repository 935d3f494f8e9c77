// A faster forward of rows without soft-cap and vocab mask, for instruction sets with fused
// multiply-add.
//
// The forward is bound by arithmetic, not by memory: a core with 512-bit vectors executes two
// operations a cycle. An entry takes 13 operations (for 16-bit types including the conversion):
// d = y * factor2 - c is one multiply-add, with c close to the maximum; there is no clamp and no
// running maximum; 2^d is a quintic with leading coefficient 1, which saves a multiplication, and
// its scale is divided out at the end of the row. Two vectors are started while the previous two
// are finished. Narrower vectors take 15 operations: rounding is an addition and a subtraction, and
// d is clamped for the integer arithmetic. Rows that this form cannot compute exactly (removed
// entries; peaked rows whose largest entry may not be the reference) are left to the general form.
#pragma once

#include <cmath>

#include "common/simd.h"
#include "logprob/row_math.h"

namespace hybridengine::HYBRIDENGINE_ISA {

#if defined(__FMA__) || defined(__aarch64__)
constexpr bool kFused = true;
#else
constexpr bool kFused = false;
#endif

constexpr float kPadding = -1e30f;  // fills lanes: adds 0 to the sums, and 0 * d is not NaN

typedef double VecD __attribute__((vector_size(kWidth * 8)));

HE_SIMD VecD widen(VecF v) { return __builtin_convertvector(v, VecD); }

HE_SIMD double sum(VecD v) {
  double lanes[kWidth];
  std::memcpy(lanes, &v, sizeof lanes);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// False where a lane is NaN.
HE_SIMD bool all_at_most(float most, VecF v) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(most), _CMP_LE_OQ) == 0xFFFF;
#else
  const VecI inside = v <= most;
  int32_t all = -1;
  for (int i = 0; i < kWidth; ++i) all &= inside[i];
  return all != 0;
#endif
}

// Two vectors between begin_exp2 and finish_exp2: 2^d = 2^n * 2^r.
struct Begun {
  VecPair d, r;
#if !defined(__AVX512F__)
  VecPair t;  // 1.5 * 2^23 + n: n in the low bits
#endif
};

#if defined(__AVX512F__)
constexpr float kExp2Scale = 532.107849f;
constexpr double kLeastMean = 0;

HE_SIMD Begun begin_exp2(VecPair d) {
  return {d,
          {(VecF)_mm512_reduce_ps((__m512)d.a, 0x09), (VecF)_mm512_reduce_ps((__m512)d.b, 0x09)}};
}

// kExp2Scale * 2^d; minimax on [0, 1) with both ends exact, relative error 9e-8 before rounding.
HE_SIMD VecF scaled_exp2(VecF d, VecF r) {
  VecF p = r + 4.78417921f;
  p = p * r + 29.7015553f;
  p = p * r + 127.790634f;
  p = p * r + 368.831482f;
  p = p * r + kExp2Scale;
  return (VecF)_mm512_scalef_ps((__m512)p, (__m512)d);
}

HE_SIMD VecPair finish_exp2(const Begun& v) {
  return {scaled_exp2(v.d.a, v.r.a), scaled_exp2(v.d.b, v.r.b)};
}
#else
constexpr double kExp2Scale = 753.212167;  // fitted: the mean error of the rounded quintic is 0
// d is clamped so that adding n to the exponent of the polynomial neither underflows nor overflows.
// An entry raised to 2^-134 is negligible if the mean is at least kLeastMean.
constexpr float kLeastD = -134.0f, kMostD = 100.0f;
constexpr double kLeastMean = 1e-33;

HE_SIMD Begun begin_exp2(VecPair d) {
  Begun v;
  v.d = {at_most(kMostD, at_least(kLeastD, d.a)), at_most(kMostD, at_least(kLeastD, d.b))};
  v.t = {v.d.a + 12582912.0f, v.d.b + 12582912.0f};  // 1.5 * 2^23: rounds to an integer
  v.r = {v.d.a - (v.t.a - 12582912.0f), v.d.b - (v.t.b - 12582912.0f)};
  return v;
}

// kExp2Scale * 2^d; minimax on [-1/2, 1/2], relative error 8e-8 before rounding.
HE_SIMD VecF scaled_exp2(VecF r, VecF t) {
  VecF p = r + 7.28773546f;
  p = p * r + 41.8086472f;
  p = p * r + 180.937531f;
  p = p * r + 522.086731f;
  p = p * r + 753.212219f;
  return (VecF)((VecI)p + ((VecI)t << 23));
}

HE_SIMD VecPair finish_exp2(const Begun& v) {
  return {scaled_exp2(v.r.a, v.t.a), scaled_exp2(v.r.b, v.t.b)};
}
#endif

template <typename T>
struct PlainBlock {
  VecF factor2, c;
  VecPair e{}, e_d{};  // sums of kExp2Scale * 2^d and of that times d

  Begun begin(VecPair y) const { return begin_exp2({y.a * factor2 - c, y.b * factor2 - c}); }
  void finish(const Begun& v) {
    const VecPair value = finish_exp2(v);
    e.a += value.a;
    e.b += value.b;
    e_d.a += value.a * v.d.a;
    e_d.b += value.b * v.d.b;
  }
  void add(const T* x, int64_t count) {
    PlainBlock sums = *this;  // a local copy stays in registers
    int64_t i = 0;
    if constexpr (kWidth < 16) {  // 16 registers do not hold two pairs at a time
      for (; i + 2 * kWidth <= count; i += 2 * kWidth) sums.finish(begin(load_pair(x + i)));
    } else if (count >= 2 * kWidth) {
      Begun next = begin(load_pair(x));
      for (i = 2 * kWidth; i + 2 * kWidth <= count; i += 2 * kWidth) {
        const Begun now = next;
        next = begin(load_pair(x + i));
        sums.finish(now);
      }
      sums.finish(next);
    }
    for (; i < count; i += kWidth) {
      const int64_t rest = count - i;
      const VecF y = rest >= kWidth ? load(x + i) : load_part(x + i, rest, kPadding);
      sums.finish(begin({y, splat(kPadding)}));
    }
    *this = sums;
  }
  // False also where e_d is infinite or NaN: 0 * e_d is NaN then.
  bool at_most(float most) const {
    return all_at_most(most, max(e.a, e.b) + 0.0f * (e_d.a + e_d.b));
  }
};

// Adds x[0, vocab) without `token` (-1: none) to `sums`, relative to a reference that becomes
// sums.max. The reference is at least the token's logit; the exponential of no entry exceeds that
// of the reference by more than a factor of block_size / (2 kWidth). Returns false if the row needs
// the general form.
template <typename T, typename RangeMax>
bool reduce_plain(const T* x, int64_t vocab, int64_t token, int64_t block_size, float factor,
                  const RangeMax& range_max, RowSums& sums) {
  const float factor2 = exp2_factor(factor);
  float reference = range_max(0, block_size < vocab ? block_size : vocab);
  if (token >= 0) reference = std::fmax(reference, to_float(x[token]));
  float c = reference * factor2;
  // A lane of a block sums this many entries, each at most 1 if the reference is the maximum.
  const float most = static_cast<float>(kExp2Scale * (block_size / (2 * kWidth)));
  VecD e{}, e_d{};
  const auto block_of = [&](int64_t begin, int64_t end) {
    PlainBlock<T> block{splat(factor2), splat(c)};
    if (token >= begin && token < end) {
      block.add(x + begin, token - begin);
      block.add(x + token + 1, end - token - 1);
    } else {
      block.add(x + begin, end - begin);
    }
    return block;
  };
  for (int64_t begin = 0; begin < vocab; begin += block_size) {
    const int64_t end = begin + block_size < vocab ? begin + block_size : vocab;
    PlainBlock<T> block = block_of(begin, end);
    if (!block.at_most(most)) {
      const float top = range_max(begin, end);
      if (!(top > reference)) return false;
      reference = top;
      const float raised = reference * factor2;
      const double shift = double{c} - raised, shrink = std::exp2(shift);
      e_d = (e_d + shift * e) * shrink;
      e *= shrink;
      c = raised;
      block = block_of(begin, end);
      if (!block.at_most(most)) return false;
    }
    e += widen(block.e.a) + widen(block.e.b);
    e_d += widen(block.e_d.a) + widen(block.e_d.b);
  }
  // c is rounded: correct for its difference from the reference.
  const double residual = double{reference} * factor2 - c;
  const double scale = std::exp2(-residual) / kExp2Scale;
  sums.max = reference;
  sums.e = sum(e) * scale;
  sums.e_d = (sum(e_d) * scale - residual * sums.e) * 0.6931471805599453;
  sums = unbiased(sums, factor);
  return sums.e >= kLeastMean * vocab;
}

// Whether the sums are as exact as those relative to the true maximum. They are if the token makes
// up most of the row, or if no entry does. An entry that dominates a peaked row is exactly 1
// relative to the maximum, but rounded here; that rounding exceeds the sum of all others at a gap
// of 30.
inline bool is_exact(const RowSums& others, const RowResult& result) {
  return std::isfinite(result.entropy) && (others.e <= 0.5 || result.entropy >= 0.5f);
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
