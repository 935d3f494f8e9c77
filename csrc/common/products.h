// Products of up to kGroup rows: the inner loops of attention and of grouped_linear. Included only
// by *_cpu.cpp files.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/simd.h"

namespace hybridengine::HYBRIDENGINE_ISA {

// Two neighbours along the sum of a product, each a bfloat16.
struct Pair {
  uint32_t bits;
};

// What products of T multiply in one step: a number, or a pair where the instruction exists.
#if defined(__AVX512BF16__)
template <typename T>
using StepOf = std::conditional_t<std::is_same_v<T, bf16>, Pair, float>;
#else
template <typename T>
using StepOf = float;
#endif

// Numbers in a step.
template <typename Step>
constexpr int64_t kStep =
    sizeof(Step) / (std::is_same_v<Step, Pair> ? sizeof(bf16) : sizeof(float));

HE_SIMD VecF multiply_add(float left, VecF right, VecF sum) { return sum + splat(left) * right; }

// Rounds after each of the two products (the odd one first); subnormal numbers count as zero.
#if defined(__AVX512BF16__)
HE_SIMD VecF multiply_add(Pair left, VecU right, VecF sum) {
  const __m512i both = _mm512_set1_epi32(static_cast<int32_t>(left.bits));
  return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)both, (__m512bh)right);
}
#endif

// Two numbers, which multiply those of a Pair one after the other where it is no step.
struct WidePair {
  float even, odd;
};

HE_SIMD VecF multiply_add(WidePair left, VecU right, VecF sum) {
  sum = multiply_add(left.even, (VecF)(right << 16), sum);
  return multiply_add(left.odd, (VecF)(right & 0xFFFF0000u), sum);
}

HE_SIMD VecF load_steps(const float* p) { return load(p); }

HE_SIMD VecU load_steps(const Pair* p) {
  VecU v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

constexpr int kGroup = 6;  // rows of a register tile
// Vectors of a tile.
#if defined(__AVX512F__)
template <int kRows>
constexpr int kPanel = 4;  // 24 of 32 registers are sums
#else
template <int kRows>
constexpr int kPanel = kRows <= 3 ? 4 : 2;  // 12 of 16
#endif

enum class Layout { rows, columns };  // element (m, k) is a[m * lda + k] or a[k * lda + m]

// What a product does at each of its steps besides multiplying.
struct NoPrefetch {
  void operator()() const {}
};

// Prefetches memory to the second cache at a steady pace: a processor drops prefetches that come
// faster than the memory answers.
class PrefetchStream {
 public:
  // The next steps prefetch `bytes` from `data` on. There should be as many as since the last call.
  void begin(const void* data, int64_t bytes) {
    const int64_t steps = std::max<int64_t>(steps_, 64);
    pace_ = (bytes + steps - 1) / steps, steps_ = 0;
    line_ = static_cast<const char*>(data), end_ = line_;
  }

  void operator()() {
    ++steps_;
    for (end_ += pace_; line_ < end_; line_ += 64) __builtin_prefetch(line_, 0, 2);
  }

 private:
  const char *line_ = nullptr, *end_ = nullptr;
  int64_t pace_ = 0, steps_ = 0;
};

template <int kRows, int kVectors, Layout layout, typename Left, typename Right, typename Ahead>
void multiply_tile(int64_t steps, const Left* a, int64_t lda, const Right* b, int64_t ldb, float* c,
                   int64_t ldc, bool accumulate, Ahead& ahead) {
  VecF sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n)
      sums[m][n] = accumulate ? load(c + m * ldc + n * kWidth) : VecF{};
  for (int64_t k = 0; k < steps; ++k, b += ldb) {
    decltype(load_steps(b)) right[kVectors];
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) right[n] = load_steps(b + n * kWidth);
    ahead();
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const Left left = layout == Layout::rows ? a[m * lda + k] : a[k * lda + m];
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) sums[m][n] = multiply_add(left, right[n], sums[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) store(c + m * ldc + n * kWidth, sums[m][n]);
}

template <int kRows, Layout layout, typename Left, typename Right, typename Ahead>
void multiply_panels(int64_t vectors, int64_t steps, const Left* a, int64_t lda, const Right* b,
                     int64_t ldb, float* c, int64_t ldc, bool accumulate, Ahead& ahead) {
  constexpr int most = kPanel<kRows>;
  int64_t n = 0;
  for (; n + most <= vectors; n += most)
    multiply_tile<kRows, most, layout>(steps, a, lda, b + n * kWidth, ldb, c + n * kWidth, ldc,
                                       accumulate, ahead);
  if constexpr (most == 4) {
    if (vectors - n >= 2) {
      multiply_tile<kRows, 2, layout>(steps, a, lda, b + n * kWidth, ldb, c + n * kWidth, ldc,
                                      accumulate, ahead);
      n += 2;
    }
  }
  if (n < vectors)
    multiply_tile<kRows, 1, layout>(steps, a, lda, b + n * kWidth, ldb, c + n * kWidth, ldc,
                                    accumulate, ahead);
}

// c[m, n] (+)= sum_k a(m, k) b[k, n] for rows <= kGroup and n < vectors * kWidth, each sum in
// ascending order of its steps k.
template <Layout layout, typename Left, typename Right, typename Ahead = const NoPrefetch>
void multiply(int64_t rows, int64_t vectors, int64_t steps, const Left* a, int64_t lda,
              const Right* b, int64_t ldb, float* c, int64_t ldc, bool accumulate,
              Ahead&& ahead = {}) {
  const auto run = [&](auto panels) {
    panels(vectors, steps, a, lda, b, ldb, c, ldc, accumulate, ahead);
  };
  switch (rows) {
    case 6:
      return run(multiply_panels<6, layout, Left, Right, std::remove_reference_t<Ahead>>);
    case 5:
      return run(multiply_panels<5, layout, Left, Right, std::remove_reference_t<Ahead>>);
    case 4:
      return run(multiply_panels<4, layout, Left, Right, std::remove_reference_t<Ahead>>);
    case 3:
      return run(multiply_panels<3, layout, Left, Right, std::remove_reference_t<Ahead>>);
    case 2:
      return run(multiply_panels<2, layout, Left, Right, std::remove_reference_t<Ahead>>);
    default:
      return run(multiply_panels<1, layout, Left, Right, std::remove_reference_t<Ahead>>);
  }
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
