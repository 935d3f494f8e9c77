// Float vectors of the width of the instruction set that the file is compiled for, by the
// compiler's vector extensions: one source for AVX-512, AVX2, NEON and SSE2. Included only by
// *_cpu.cpp files; everything is in their ISA namespace.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/dtype.h"

namespace hybridengine::HYBRIDENGINE_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float VecF __attribute__((vector_size(kWidth * 4)));
typedef int32_t VecI __attribute__((vector_size(kWidth * 4)));
typedef uint32_t VecU __attribute__((vector_size(kWidth * 4)));
typedef uint16_t VecH __attribute__((vector_size(kWidth * 2)));

#define HE_SIMD static inline __attribute__((always_inline))

// Calls body(T{}) for the type T of `dtype`, one of Types. Objects of avx512_bf16 have bf16 alone:
// other types would be those of avx512 once more.
template <typename... Types, typename Body>
void with_factor([[maybe_unused]] DType dtype, const Body& body) {
#if defined(__AVX512BF16__)
  body(bf16{});
#else
  ((dtype == kDType<Types> && (body(Types{}), true)) || ...);
#endif
}

HE_SIMD VecF splat(float value) { return value - VecF{}; }
HE_SIMD VecF select(VecI mask, VecF yes, VecF no) { return mask ? yes : no; }

// The larger of a and b; b where either is NaN.
HE_SIMD VecF max(VecF a, VecF b) {
#if defined(__AVX512F__)
  return (VecF)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (VecF)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

HE_SIMD VecF load(const float* p) {
  VecF v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

HE_SIMD VecF load(const bf16* p) {
  VecH h;
  std::memcpy(&h, p, sizeof h);
  return (VecF)(__builtin_convertvector(h, VecU) << 16);
}

HE_SIMD VecF load(const f16* p) {
#if defined(__AVX512F__)
  return (VecF)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (VecF)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  VecF v;
  for (int i = 0; i < kWidth; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

// 2 * kWidth elements as two vectors in an order that depends on the type (bfloat16: even and odd
// elements). store_pair restores it.
struct VecPair {
  VecF a, b;
};

template <typename T>
HE_SIMD VecPair load_pair(const T* p) {
  return {load(p), load(p + kWidth)};
}

HE_SIMD VecPair load_pair(const bf16* p) {
  VecU bits;
  std::memcpy(&bits, p, sizeof bits);
  return {(VecF)(bits << 16), (VecF)(bits & 0xFFFF0000u)};
}

HE_SIMD void store(float* p, VecF v) { std::memcpy(p, &v, sizeof v); }

// Rounded to bfloat16 in the upper 16 bits; the lower 16 bits are undefined.
HE_SIMD VecU bf16_rounded(VecF v) {
  const VecU bits = (VecU)v;
  const VecU rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  return v == v ? rounded : VecU{} + 0x7FC00000u;
}

HE_SIMD VecH bf16_bits(VecF v) { return __builtin_convertvector(bf16_rounded(v) >> 16, VecH); }

HE_SIMD void store(bf16* p, VecF v) {
  const VecH h = bf16_bits(v);
  std::memcpy(p, &h, sizeof h);
}

HE_SIMD void store(f16* p, VecF v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, 0));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, 0));
#else
  for (int i = 0; i < kWidth; ++i) p[i] = to_f16(v[i]);
#endif
}

template <typename T>
HE_SIMD void store_pair(T* p, VecPair v) {
  store(p, v.a);
  store(p + kWidth, v.b);
}

HE_SIMD void store_pair(bf16* p, VecPair v) {
  const VecU bits = (bf16_rounded(v.a) >> 16) | (bf16_rounded(v.b) & 0xFFFF0000u);
  std::memcpy(p, &bits, sizeof bits);
}

// The larger of x and `least`; NaN in x stays NaN.
HE_SIMD VecF at_least(float least, VecF x) {
#if defined(__AVX512F__)
  return (VecF)_mm512_max_ps((__m512)splat(least), (__m512)x);
#elif defined(__AVX2__)
  return (VecF)_mm256_max_ps((__m256)splat(least), (__m256)x);
#else
  return least > x ? splat(least) : x;
#endif
}

// The smaller of x and `most`; NaN in x stays NaN.
HE_SIMD VecF at_most(float most, VecF x) {
#if defined(__AVX512F__)
  return (VecF)_mm512_min_ps((__m512)splat(most), (__m512)x);
#elif defined(__AVX2__)
  return (VecF)_mm256_min_ps((__m256)splat(most), (__m256)x);
#else
  return most < x ? splat(most) : x;
#endif
}

HE_SIMD VecF sqrt(VecF x) {
#if defined(__AVX512F__)
  return (VecF)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (VecF)_mm256_sqrt_ps((__m256)x);
#elif defined(__x86_64__)
  return (VecF)_mm_sqrt_ps((__m128)x);
#else
  for (int i = 0; i < kWidth; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// Bit i: whether lane i of a comparison's result is true.
HE_SIMD uint32_t lane_bits(VecI mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask));
#elif defined(__x86_64__)
  return static_cast<uint32_t>(_mm_movemask_ps((__m128)mask));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= (static_cast<uint32_t>(mask[i]) & 1u) << i;
  return bits;
#endif
}

// The largest integer no larger than x, |x| < 2^22.
HE_SIMD VecF floor(VecF x) {
#if defined(__AVX512F__)
  return (VecF)_mm512_roundscale_ps((__m512)x, 0x09);
#elif defined(__AVX2__)
  return (VecF)_mm256_floor_ps((__m256)x);
#else
  const VecF rounded = (x + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  return rounded > x ? rounded - 1.0f : rounded;
#endif
}

// 2^r on [0, 1), minimax of degree 6 with 2^0 exactly 1: relative error 2e-9 before rounding,
// 2^-24 after.
HE_SIMD VecF exp2_fraction(VecF r) {
  VecF p = splat(2.161291914e-4f);
  p = p * r + 1.246784534e-3f;
  p = p * r + 9.675451674e-3f;
  p = p * r + 5.548528057e-2f;
  p = p * r + 2.402293056e-1f;
  p = p * r + 6.931470444e-1f;
  return p * r + 1.0f;
}

// 2^x for -150 <= x < 128 (NaN stays NaN), 0 at -150.
HE_SIMD VecF exp2(VecF x) {
#if defined(__AVX512F__)
  const VecF p = exp2_fraction((VecF)_mm512_reduce_ps((__m512)x, 0x09));  // x - floor(x)
  return (VecF)_mm512_scalef_ps((__m512)p, (__m512)x);                    // times 2^floor(x)
#else
  const VecF integral = floor(x);
  const VecF p = exp2_fraction(x - integral);
  // 2^n as two factors, so that subnormal results are right as well.
  const VecI exponent = (VecI)(integral + 12582912.0f) - 0x4B400000;
  const VecI half = exponent >> 1;
  return p * (VecF)((half + 127) << 23) * (VecF)((exponent - half + 127) << 23);
#endif
}

// The same for -150 <= x < 63 with one factor less; undefined for NaN.
HE_SIMD VecF exp2_below_63(VecF x) {
#if defined(__AVX512F__)
  return exp2(x);
#else
  const VecF integral = floor(x);
  const VecI p = (VecI)exp2_fraction(x - integral);
  // 2^(x + 64) is in the normal range; its low bits are those of floor(x) + 64.
  return (VecF)(p + ((VecI)(integral + 12582976.0f) << 23)) * 0x1p-64f;
#endif
}

HE_SIMD VecF exp(VecF x) { return exp2(at_least(-150.0f, x * 1.44269504f)); }

// Natural logarithm of normal x > 0 (relative error about 1e-7); NaN for negative x and for NaN.
HE_SIMD VecF log(VecF x) {
  const VecI exponent = ((VecI)x - 0x3F3504F3) >> 23;  // x = m 2^exponent, sqrt(1/2) <= m < sqrt(2)
  const VecF r = (VecF)((VecI)x - (exponent << 23)) - 1.0f;
  const VecF e = __builtin_convertvector(exponent, VecF);
  VecF p = splat(7.0376836292e-2f);  // Cephes logf
  p = p * r - 1.1514610310e-1f;
  p = p * r + 1.1676998740e-1f;
  p = p * r - 1.2420140846e-1f;
  p = p * r + 1.4249322787e-1f;
  p = p * r - 1.6668057665e-1f;
  p = p * r + 2.0000714765e-1f;
  p = p * r - 2.4999993993e-1f;
  p = p * r + 3.3333331174e-1f;
  const VecF square = r * r;
  const VecF small = square * r * p - 2.12194440e-4f * e - 0.5f * square;
  const VecF value = (r + small) + 0.693359375f * e;
  return x > 0.0f ? value : splat(__builtin_nanf(""));
}

HE_SIMD VecF tanh(VecF x) {
  const VecF magnitude = (VecF)((VecI)x & 0x7FFFFFFF);
  const VecF square = x * x;
  VecF p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const VecF near_zero = p * square * x + x;
  const VecF capped = magnitude > 9.1f ? splat(9.1f) : magnitude;  // tanh is 1 from there on
  const VecF saturated = 1.0f - 2.0f / (exp(2.0f * capped) + 1.0f);
  const VecF signed_saturated = (VecF)((VecI)saturated | ((VecI)x & (int32_t)0x80000000));
  return magnitude < 0.625f ? near_zero : signed_saturated;
}

// The sum of the lanes in float64, in a fixed order.
HE_SIMD double sum(VecF v) {
  double lanes[kWidth];
  for (int i = 0; i < kWidth; ++i) lanes[i] = v[i];
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

HE_SIMD float largest(VecF v) {
  float result = v[0];
  for (int i = 1; i < kWidth; ++i) result = v[i] > result ? v[i] : result;
  return result;
}

// The last `count` < kWidth elements of a row, the other lanes filled with `fill`.
template <typename T>
HE_SIMD VecF load_part(const T* p, int64_t count, float fill) {
  VecF v = splat(fill);
  for (int64_t i = 0; i < count; ++i) v[i] = to_float(p[i]);
  return v;
}

template <typename T>
HE_SIMD void store_part(T* p, VecF v, int64_t count) {
  T lanes[kWidth];
  store(lanes, v);
  std::memcpy(p, lanes, count * sizeof(T));
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
