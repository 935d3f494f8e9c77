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

// Two numbers, which multiply those of a Pair one after the other where it is no step.
struct WidePair {
  float even, odd;
};

// Factors of a step, which are multiplied one after the other.
template <typename Left>
constexpr int kFactors = std::is_same_v<Left, WidePair> ? 2 : 1;

// A factor of a step of the left side in every lane.
template <int factor>
HE_SIMD VecF left_factor(float x) {
  return splat(x);
}

template <int factor>
HE_SIMD VecF left_factor(WidePair x) {
  return splat(factor == 0 ? x.even : x.odd);
}

template <int factor>
HE_SIMD VecU left_factor(Pair x) {
  return VecU{} + x.bits;
}

// What it multiplies, of kWidth steps of the right side.
template <typename Left, int factor>
HE_SIMD VecF right_factor(const float* p) {
  return load(p);
}

template <typename Left, int factor>
HE_SIMD auto right_factor(const Pair* p) {
  VecU pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  if constexpr (std::is_same_v<Left, Pair>) {
    return pairs;
  } else {
    return (VecF)(factor == 0 ? pairs << 16 : pairs & 0xFFFF0000u);
  }
}

HE_SIMD VecF multiply_add(VecF left, VecF right, VecF sum) { return sum + left * right; }

// Rounds after each of the two products (the odd one first); subnormal numbers count as zero.
#if defined(__AVX512BF16__)
HE_SIMD VecF multiply_add(VecU left, VecU right, VecF sum) {
  return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
}
#endif

// Hides where a vector comes from, so that it is not read again for each use.
template <typename Vector>
HE_SIMD Vector in_register(Vector v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#endif
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
// Whether steps of all rows, not of all vectors, are in registers while the others go by. The sums,
// the fewer of both and one more fill 16 registers.
template <int kRows, int kVectors>
constexpr bool kHoldsLeft = kWidth < 16 && kRows < kVectors;

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
  Ahead stream = ahead;  // in registers
  const auto add = [&](auto factor, int64_t k) __attribute__((always_inline)) {
    const auto left = [&](int m) __attribute__((always_inline)) {
      return left_factor<factor>(layout == Layout::rows ? a[m * lda + k] : a[k * lda + m]);
    };
    const auto right = [&](int n) __attribute__((always_inline)) {
      return right_factor<Left, factor>(b + n * kWidth);
    };
    if constexpr (kHoldsLeft<kRows, kVectors>) {
      decltype(left(0)) x[kRows];
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) x[m] = left(m);
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) {
        const auto y = right(n);
#pragma GCC unroll 8
        for (int m = 0; m < kRows; ++m) sums[m][n] = multiply_add(x[m], y, sums[m][n]);
      }
    } else {
      decltype(right(0)) y[kVectors];
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) y[n] = in_register(right(n));
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const auto x = left(m);
#pragma GCC unroll 8
        for (int n = 0; n < kVectors; ++n) sums[m][n] = multiply_add(x, y[n], sums[m][n]);
      }
    }
  };
  for (int64_t k = 0; k < steps; ++k, b += ldb) {
    stream();
    add(std::integral_constant<int, 0>{}, k);
    if constexpr (kFactors<Left> == 2) add(std::integral_constant<int, 1>{}, k);
  }
  ahead = stream;
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) store(c + m * ldc + n * kWidth, sums[m][n]);
}

template <int kRows, Layout layout, typename Left, typename Right, typename Ahead>
void multiply_panels(int64_t vectors, int64_t steps, const Left* a, int64_t lda, const Right* b,
                     int64_t ldb, float* c, int64_t ldc, bool accumulate, Ahead& ahead) {
  // Two factors leave fewer registers for sums.
  constexpr int most = kFactors<Left> == 2 && kRows > 2 && kWidth < 16 ? 2 : kPanel<kRows>;
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
template <Layout layout, typename Left, typename Right, typename Ahead = NoPrefetch>
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
