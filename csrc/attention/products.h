// Products of up to kGroup rows, the inner loops of attention. Included only by *_cpu.cpp files.
#pragma once

#include "common/simd.h"

namespace hybridengine::HYBRIDENGINE_ISA {

constexpr int kGroup = 6;  // rows of a register tile
#if defined(__AVX512F__)
constexpr int kPanel = 4;  // its vectors: 24 of 32 registers are sums
#else
constexpr int kPanel = 2;  // 12 of 16
#endif

enum class Layout { rows, columns };  // element (m, k) is a[m * lda + k] or a[k * lda + m]

template <int kRows, int kVectors, Layout layout>
void multiply_tile(int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb,
                   float* c, int64_t ldc, bool accumulate) {
  VecF sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n)
      sums[m][n] = accumulate ? load(c + m * ldc + n * kWidth) : VecF{};
  for (int64_t k = 0; k < depth; ++k, b += ldb) {
    VecF right[kVectors];
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) right[n] = load(b + n * kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const VecF left = splat(layout == Layout::rows ? a[m * lda + k] : a[k * lda + m]);
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) sums[m][n] += left * right[n];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) store(c + m * ldc + n * kWidth, sums[m][n]);
}

template <int kRows, Layout layout>
void multiply_panels(int64_t vectors, int64_t depth, const float* a, int64_t lda, const float* b,
                     int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  int64_t n = 0;
  for (; n + kPanel <= vectors; n += kPanel)
    multiply_tile<kRows, kPanel, layout>(depth, a, lda, b + n * kWidth, ldb, c + n * kWidth, ldc,
                                         accumulate);
  if constexpr (kPanel == 4) {
    if (vectors - n >= 2) {
      multiply_tile<kRows, 2, layout>(depth, a, lda, b + n * kWidth, ldb, c + n * kWidth, ldc,
                                      accumulate);
      n += 2;
    }
  }
  if (n < vectors)
    multiply_tile<kRows, 1, layout>(depth, a, lda, b + n * kWidth, ldb, c + n * kWidth, ldc,
                                    accumulate);
}

// c[m, n] (+)= sum_k a(m, k) b[k, n] for rows <= kGroup and n < vectors * kWidth, each sum in
// ascending order of k.
template <Layout layout>
void multiply(int64_t rows, int64_t vectors, int64_t depth, const float* a, int64_t lda,
              const float* b, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  const auto run = [&](auto panels) { panels(vectors, depth, a, lda, b, ldb, c, ldc, accumulate); };
  switch (rows) {
    case 6:
      return run(multiply_panels<6, layout>);
    case 5:
      return run(multiply_panels<5, layout>);
    case 4:
      return run(multiply_panels<4, layout>);
    case 3:
      return run(multiply_panels<3, layout>);
    case 2:
      return run(multiply_panels<2, layout>);
    default:
      return run(multiply_panels<1, layout>);
  }
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
