// The forward of a row without options, for instruction sets with fused multiply-add.
//
// Arithmetic bounds it, not memory: a core with 512-bit vectors does two operations a cycle. So an
// entry takes 13 of them (16-bit types: 13 with the conversion): d = y * factor2 - c in one, with
// c near the largest; no clamp and no maximum; 2^d from a quintic with leading coefficient 1, an
// addition in place of a multiply-add, its scale divided out at the end of the row. Two vectors
// are begun while the two before them are finished. What this cannot do (removed entries, rows
// with one dominant entry that may not be the reference) it refuses, and the caller takes the
// general way.
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

constexpr float kExp2Scale = 532.107849f;
constexpr float kFarBelow = -1e30f;  // 2^d is 0 there, and 0 * d is no NaN

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

// Two vectors on their way to 2^d.
struct Begun {
  VecPair d, r;  // r = d - floor(d)
};

HE_SIMD VecF clamped(VecF d) {
#if defined(__AVX512F__)
  return d;
#else
  const VecF low = at_least(-200.0f, d);  // the integer arithmetic of 2^floor(d) ends somewhere
  return low > 150.0f ? splat(150.0f) : low;
#endif
}

HE_SIMD VecF fraction(VecF d) {
#if defined(__AVX512F__)
  return (VecF)_mm512_reduce_ps((__m512)d, 0x09);
#else
  const VecF x = clamped(d);
  const VecF whole = (x + 12582912.0f) - 12582912.0f;
  return x - (whole > x ? whole - 1.0f : whole);
#endif
}

// kExp2Scale * 2^d; minimax on [0, 1) with both ends exact, relative error 9e-8 before rounding.
HE_SIMD VecF scaled_exp2(VecF d, VecF r) {
  VecF p = r + 4.78417921f;
  p = p * r + 29.7015553f;
  p = p * r + 127.790634f;
  p = p * r + 368.831482f;
  p = p * r + kExp2Scale;
#if defined(__AVX512F__)
  return (VecF)_mm512_scalef_ps((__m512)p, (__m512)d);
#else
  const VecI exponent = __builtin_convertvector(clamped(d) - r, VecI);
  const VecI half = exponent >> 1;
  return p * (VecF)((half + 127) << 23) * (VecF)((exponent - half + 127) << 23);
#endif
}

template <typename T>
struct PlainBlock {
  VecF factor2, c;
  VecPair e{}, e_d{};  // sums of kExp2Scale * 2^d and of that times d

  Begun begin(VecPair y) const {
    const VecPair d{y.a * factor2 - c, y.b * factor2 - c};
    return {d, {fraction(d.a), fraction(d.b)}};
  }
  void finish(const Begun& v) {
    const VecF a = scaled_exp2(v.d.a, v.r.a), b = scaled_exp2(v.d.b, v.r.b);
    e.a += a;
    e.b += b;
    e_d.a += a * v.d.a;
    e_d.b += b * v.d.b;
  }
  void add(const T* x, int64_t count) {
    int64_t i = 0;
    if (count >= 2 * kWidth) {
      Begun next = begin(load_pair(x));
      for (i = 2 * kWidth; i + 2 * kWidth <= count; i += 2 * kWidth) {
        const Begun now = next;
        next = begin(load_pair(x + i));
        finish(now);
      }
      finish(next);
    }
    for (; i < count; i += kWidth) {
      const int64_t rest = count - i;
      const VecF y = rest >= kWidth ? load(x + i) : load_part(x + i, rest, kFarBelow);
      finish(begin({y, splat(kFarBelow)}));
    }
  }
  // An infinite or NaN e_d makes 0 * e_d NaN.
  bool at_most(float most) const {
    return all_at_most(most, max(e.a, e.b) + 0.0f * (e_d.a + e_d.b));
  }
};

// Adds x[0, vocab) without `token` (-1: none) into `sums`, relative to a reference that becomes
// sums.max: no less than the token's logit, and nothing is larger than it by a factor above
// block / (2 kWidth). False: not done.
template <typename T, typename RangeMax>
bool reduce_plain(const T* x, int64_t vocab, int64_t token, int64_t block_size, float factor,
                  const RangeMax& range_max, RowSums& sums) {
  const float factor2 = exp2_factor(factor);
  float reference = range_max(0, block_size < vocab ? block_size : vocab);
  if (token >= 0) reference = std::fmax(reference, to_float(x[token]));
  float c = reference * factor2;
  // A lane of a block adds up this many entries, each at most 1 if the reference is the maximum.
  const float most = kExp2Scale * static_cast<float>(block_size / (2 * kWidth));
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
  // From c, which is rounded, to the reference.
  const double residual = double{reference} * factor2 - c;
  const double scale = std::exp2(-residual) / kExp2Scale;
  sums.max = reference;
  sums.e = sum(e) * scale;
  sums.e_d = (sum(e_d) * scale - residual * sums.e) * 0.6931471805599453;
  sums = unbiased(sums, factor);
  return true;
}

// Whether the sums are as exact as those about the true maximum: they are where the token makes up
// most of the row, and where no single entry does. An entry that does is 1 there, and here 1 to a
// rounding, which is more than all the others where it leads by 30.
inline bool good_enough(const RowSums& others, const RowResult& result) {
  return std::isfinite(result.entropy) && (others.e <= 0.5 || result.entropy >= 0.5f);
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
