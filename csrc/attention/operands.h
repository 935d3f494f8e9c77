// Rows of heads and weights as operands of products. Included only by *_cpu.cpp files.
#pragma once

#include <algorithm>

#include "attention/params.h"
#include "common/aligned_buffer.h"
#include "common/products.h"
#include "common/simd.h"
#include "common/transpose.h"

namespace hybridengine::HYBRIDENGINE_ISA {

using Floats = Buffer<float>;

// The size of a row of an operand: complete vectors of steps.
template <typename Step>
int64_t padded(int64_t dim) {
  constexpr int64_t unit = kWidth * kStep<Step>;
  return (dim + unit - 1) / unit * unit;
}

// Writes in[0:count] with zeros up to padded(count). A row with NaN or infinity becomes zero
// instead, and the result is false.
template <typename T>
bool load_row(const T* in, int64_t count, float* out) {
  VecF zero{};  // NaN where an element is not finite
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const VecF x = load(in + i);
    zero += x * 0.0f;
    store(out + i, x);
  }
  if (i < count) {
    const VecF x = load_part(in + i, count - i, 0.0f);
    zero += x * 0.0f;
    store(out + i, x);
  }
  const VecI is_nan = zero != zero;
  int32_t any = 0;
  for (int lane = 0; lane < kWidth; ++lane) any |= is_nan[lane];
  if (any) std::fill_n(out, padded<float>(count), 0.0f);
  return !any;
}

inline bool load_row(const bf16* in, int64_t count, Pair* out) {
  constexpr uint16_t exponent = 0x7F80;
  uint16_t any = 0;
  for (int64_t i = 0; i < count; ++i) any |= (in[i].bits & exponent) == exponent;
  const int64_t copied = any ? 0 : count * sizeof(bf16);
  char* bytes = reinterpret_cast<char*>(out);
  std::memcpy(bytes, in, copied);
  std::memset(bytes + copied, 0, padded<Pair>(count) * sizeof(bf16) - copied);
  return !any;
}

template <typename T>
void store_row(T* out, const float* in, int64_t count, float factor) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(out + i, load(in + i) * factor);
  if (i < count) store_part(out + i, load(in + i) * factor, count - i);
}

// Rows of `dim` numbers, n in a step: along_dim is [rows, dim / n], for sums over dim; along_rows
// is [rows / n, dim], for sums over rows, if these are wanted. For n = 1 both are the same.
template <typename Step>
class Operand {
 public:
  Operand(int64_t rows, int64_t numbers, bool sums_over_rows)
      : dim(padded<Step>(numbers)),
        sums_over_rows_(sums_over_rows && kStep<Step> > 1),
        along_dim_(rows * dim / kStep<Step>),
        along_rows_(sums_over_rows_ ? rows * dim / kStep<Step> : 0) {}

  Step* along_dim(int64_t row) const { return along_dim_ + row * dim / kStep<Step>; }

  const Step* along_rows(int64_t row) const {  // a multiple of n
    return (kStep<Step> > 1 ? along_rows_ : along_dim_) + row / kStep<Step> * dim;
  }

  void clear(int64_t row) const {
    std::memset(along_dim(row), 0, dim / kStep<Step> * sizeof(Step));
  }

  // Makes along_rows of the rows [first, last), multiples of n, which are written.
  void finish(int64_t first, int64_t last) const {
    if (!sums_over_rows_) return;  // pairs from here on
    for (int64_t r = first; r < last; r += 2) {
      for (int64_t d = 0; d < dim; d += kWidth) {
        VecH even, odd;
        std::memcpy(&even, along_dim(r) + d / 2, sizeof even);
        std::memcpy(&odd, along_dim(r + 1) + d / 2, sizeof odd);
        const VecU pairs = __builtin_convertvector(even, VecU) | __builtin_convertvector(odd, VecU)
                                                                     << 16;
        std::memcpy(along_rows_ + r / 2 * dim + d, &pairs, sizeof pairs);
      }
    }
  }

  int64_t dim;

 private:
  bool sums_over_rows_;
  Buffer<Step> along_dim_, along_rows_;
};

// out[k, r] = rows[r, k]: the steps along dim of kBlock rows, [dim / n, kBlock].
template <typename Step>
void transpose_rows(const Operand<Step>& rows, Step* out) {
  const int64_t steps = rows.dim / kStep<Step>;
  for (int64_t r = 0; r < kBlock; r += kWidth) {
    for (int64_t k = 0; k < steps; k += kWidth) {
      VecU block[kWidth];
      for (int i = 0; i < kWidth; ++i)
        std::memcpy(&block[i], rows.along_dim(r + i) + k, sizeof(VecU));
      swap_blocks<1>(block);
      for (int i = 0; i < kWidth; ++i)
        std::memcpy(out + (k + i) * kBlock + r, &block[i], sizeof(VecU));
    }
  }
}

// Stores weights of kWidth rows to [keys, kBlock / n], for sums over rows.
HE_SIMD void store_along_rows(float* out, int64_t key, int64_t row, VecF weight) {
  store(out + key * kBlock + row, weight);
}

// Stores weights of n keys and kWidth rows to [keys / n, kBlock], for sums over keys.
HE_SIMD void store_along_keys(float* out, int64_t key, int64_t row, const VecF (&weights)[1]) {
  store(out + key * kBlock + row, weights[0]);
}

#if defined(__AVX512BF16__)
HE_SIMD void store_rounded(Pair* out, VecF numbers) {
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)numbers);
  std::memcpy(out, &rounded, sizeof rounded);
}

HE_SIMD void store_along_rows(Pair* out, int64_t key, int64_t row, VecF weight) {
  store_rounded(out + (key * kBlock + row) / 2, weight);
}

HE_SIMD void store_along_keys(Pair* out, int64_t key, int64_t row, const VecF (&weights)[2]) {
  alignas(64) static constexpr uint16_t interleaved[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
  const __m512i pairs = _mm512_permutexvar_epi16(_mm512_load_si512(interleaved), (__m512i)both);
  _mm512_storeu_si512(out + key / 2 * kBlock + row, pairs);
}
#endif

// `count` weights as steps: `numbers` itself where a step is a number, else a buffer.
template <typename Step>
class Weights {
 public:
  explicit Weights(float* numbers, int64_t count = kBlock * kBlock)
      : numbers_(numbers), pairs_(kRounded ? count / 2 : 0) {}

  operator Step*() const {
    if constexpr (kRounded) {
      return pairs_;
    } else {
      return numbers_;
    }
  }

 private:
  static constexpr bool kRounded = kStep<Step> > 1;
  float* numbers_;
  Buffer<Step> pairs_;
};

}  // namespace hybridengine::HYBRIDENGINE_ISA
