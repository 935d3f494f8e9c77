// 32-bit words of one float32 or of two 16-bit values, the first one in the low half: the registers
// of GPU kernels, which convert and compare two 16-bit values per instruction. Tests run the same
// code on the CPU.
#pragma once

#include "common/dtype.h"

namespace hybridengine {

// The larger one; NaN if one of them is NaN.
HE_HOST_DEVICE float max_nan(float a, float b) {
#ifdef __CUDA_ARCH__
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return a > b || a != a ? a : b;
#endif
}

// The `count` words from byte `offset` of `pair` on: even, below 4 * count.
template <int count>
HE_HOST_DEVICE void shift_words(uint32_t (&pair)[2 * count], int offset, uint32_t* words) {
  HE_UNROLL
  for (int step = count / 2; step; step /= 2) {
    HE_UNROLL
    for (int i = 0; i < count + step; ++i) pair[i] = offset & 4 * step ? pair[i + step] : pair[i];
  }
  HE_UNROLL
  for (int i = 0; i < count; ++i) {
#ifdef __CUDA_ARCH__
    words[i] = __funnelshift_r(pair[i], pair[i + 1], 8 * (offset & 2));
#else
    words[i] = static_cast<uint32_t>((uint64_t{pair[i + 1]} << 32 | pair[i]) >> 8 * (offset & 2));
#endif
  }
}

template <typename Half>
struct Word {
  static constexpr int kValues = 2;
  static constexpr bool kIsBf16 = __is_same(Half, bf16);

  static HE_HOST_DEVICE float value(uint32_t word, int i) {
    if constexpr (kIsBf16) return float_of(i ? word & 0xFFFF0000u : word << 16);
    return to_float(Half{static_cast<uint16_t>(word >> (16 * i))});
  }
  // `word` with value i replaced.
  static HE_HOST_DEVICE uint32_t with(uint32_t word, int i, float value) {
    const uint32_t bits = FromFloat<Half>::of(value).bits;
    return (word & (0xFFFF0000u >> (16 * i))) | (bits << (16 * i));
  }
  static HE_HOST_DEVICE uint32_t pack(const float* values) {
    uint32_t word;
#ifdef __CUDA_ARCH__
    if constexpr (kIsBf16) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    }
#else
    word = FromFloat<Half>::of(values[0]).bits |
           static_cast<uint32_t>(FromFloat<Half>::of(values[1]).bits) << 16;
#endif
    return word;
  }
  // The larger values; NaN where one of the two is NaN.
  static HE_HOST_DEVICE uint32_t max(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint32_t larger;
    if constexpr (kIsBf16) {
      asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    } else {
      asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    }
    return larger;
#else
    const float values[2] = {max_nan(value(a, 0), value(b, 0)), max_nan(value(a, 1), value(b, 1))};
    return pack(values);
#endif
  }
};

template <>
struct Word<float> {
  static constexpr int kValues = 1;

  static HE_HOST_DEVICE float value(uint32_t word, int) { return float_of(word); }
  static HE_HOST_DEVICE uint32_t with(uint32_t, int, float value) { return bits_of(value); }
  static HE_HOST_DEVICE uint32_t pack(const float* values) { return bits_of(values[0]); }
  static HE_HOST_DEVICE uint32_t max(uint32_t a, uint32_t b) {
    return bits_of(max_nan(float_of(a), float_of(b)));
  }
};

}  // namespace hybridengine
