// Register tiles of dot products along k; see params.h. Whatever multiplies by them has the bits of
// decode_linear.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/simd.h"

namespace hybridengine::HYBRIDENGINE_ISA {

// A register tile has kRows x kOutputs sums; as many tiles are joined at a time as fill vectors.
// kFew: x has no other rows. Tiles of fewer outputs then read the weight nearly as it lies in
// memory and spread the prefetches, of which those that come too fast are dropped.
template <int kRows, typename T, bool kFew = false>
struct Shape {
#if defined(__AVX512F__)
  static constexpr int kOutputs = kFew && kRows == 4 ? 2 : 16 / kRows;
  static constexpr int kTiles = 16 / (kRows * kOutputs);
#elif defined(__AVX2__)
  // 12 sums, 3 outputs and 1 row: 16 registers. A conversion from bfloat16 needs one for a mask.
  static constexpr bool kFull = kRows == 4 && std::is_same_v<T, float> && !kFew;
  static constexpr int kOutputs = kFull ? 3 : 8 / kRows, kTiles = kFull ? 2 : 1;
#else
  static constexpr int kOutputs = 8 / kRows, kTiles = 1;
#endif
  static constexpr int kSums = kRows * kOutputs;
  static_assert(kTiles * kSums % kWidth == 0);
};
constexpr int kMostOutputs = 16;
constexpr int64_t kStep = 2 * kWidth;  // elements of a load
constexpr int64_t kLine = 64;          // bytes of a cache line

// One load of an operand: 2 * kWidth elements. The order of the elements is that of load_pair.
// It is multiplied in kParts<T> parts: its two halves, or all of it as pairs.
#if defined(__AVX512BF16__)
template <typename T>
constexpr int kParts = std::is_same_v<T, bf16> ? 1 : 2;

// Rounds after each of the two products; subnormal numbers count as zero.
HE_SIMD VecF multiply_add(VecU a, VecU b, VecF sum) {
  return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
template <typename T>
constexpr int kParts = 2;
#endif

HE_SIMD VecF multiply_add(VecF a, VecF b, VecF sum) { return a * b + sum; }

template <int part, typename T>
HE_SIMD auto load_part_of_step(const T* p) {
  if constexpr (!std::is_same_v<T, bf16>) {
    return load(p + part * kWidth);
  } else {
    VecU bits;
    std::memcpy(&bits, p, sizeof bits);
    if constexpr (kParts<T> == 1) {
      return bits;
    } else {
      return (VecF)(part == 0 ? bits << 16 : bits & 0xFFFF0000u);
    }
  }
}

// Lane i of the result is the sum of the lanes of sums[i], joined pairwise: neighbours first.
template <int half = 1>
HE_SIMD VecF join_lanes(const VecF* sums) {
  VecI low{}, high{};
  for (int j = 0; j < kWidth; ++j) {
    low[j] = j & half ? kWidth + j - half : j;
    high[j] = j & half ? kWidth + j : j + half;
  }
  VecF joined[kWidth / 2];
  constexpr int count = kWidth / (2 * half);
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) {
    const VecF a = sums[2 * i], b = sums[2 * i + 1];
    joined[i] = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
  }
  if constexpr (count == 1) {
    return joined[0];
  } else {
    return join_lanes<2 * half>(joined);
  }
}

// A tile reads up to 4 rows of x and kOutputs rows of the weight, and prefetches the rows of the
// weight that are `ahead` elements further, from element ahead_begin to ahead_end.
template <typename T>
struct Tile {
  const T* x[4];
  const T* weight[kMostOutputs];
  int64_t k;
  int64_t ahead, ahead_begin, ahead_end;
};

// result[r * kOutputs + o] (+)= the lanes of x[r] . weight[o].
template <int kRows, int kOutputs, typename T>
HE_SIMD void multiply_tile(const Tile<T>& tile, VecF* result, bool accumulate) {
  VecF sums[kRows * kOutputs];
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kOutputs; ++i) sums[i] = accumulate ? result[i] : VecF{};
  const auto add_part = [&](auto part, const Tile<T>& from,
                            int64_t k) __attribute__((always_inline)) {
    decltype(load_part_of_step<0>(from.x[0])) w[kOutputs];
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) w[o] = load_part_of_step<part>(from.weight[o] + k);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const auto x = load_part_of_step<part>(from.x[r] + k);
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) {
        sums[r * kOutputs + o] = multiply_add(x, w[o], sums[r * kOutputs + o]);
      }
    }
  };
  const auto add_step = [&](const Tile<T>& from, int64_t k) __attribute__((always_inline)) {
    add_part(std::integral_constant<int, 0>{}, from, k);
    if constexpr (kParts<T> == 2) add_part(std::integral_constant<int, 1>{}, from, k);
  };
  int64_t k = 0;
  for (; k + kStep <= tile.k; k += kStep) {
    if (k >= tile.ahead_begin && k < tile.ahead_end) {
      for (int o = 0; o < kOutputs; ++o) {
        const char* ahead = reinterpret_cast<const char*>(tile.weight[o] + tile.ahead + k);
        for (int64_t i = 0; i < kStep * int64_t{sizeof(T)}; i += kLine) {
          __builtin_prefetch(ahead + i, 0, 2);
        }
      }
    }
    add_step(tile, k);
  }
  if (k < tile.k) {
    T padded[kRows + kOutputs][kStep] = {};
    Tile<T> last;
    const auto pad = [&](int i, const T* from) {
      std::memcpy(padded[i], from + k, (tile.k - k) * sizeof(T));
      return padded[i];
    };
    for (int r = 0; r < kRows; ++r) last.x[r] = pad(r, tile.x[r]);
    for (int o = 0; o < kOutputs; ++o) last.weight[o] = pad(kRows + o, tile.weight[o]);
    add_step(last, 0);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kOutputs; ++i) result[i] = sums[i];
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
