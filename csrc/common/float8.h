// float8_e4m3fn: 4 exponent bits, 3 mantissa bits, no infinity; the largest value is 448.
#pragma once

#include "common/dtype.h"

namespace hybridengine {

constexpr uint32_t kE4m3Overflow = 1087u << 20;  // 480
constexpr uint32_t kE4m3Normal = 121u << 23;     // 2^-6, the smallest normal value
constexpr uint32_t kE4m3Rounder = 141u << 23;    // 2^14, whose last bit is 2^-9, the smallest value
constexpr float kE4m3Max = 448.0f;

// Round to nearest even as torch's cast; beyond 464 NaN, where versions of torch differ.
HE_HOST_DEVICE uint8_t to_e4m3(float value) {
  const uint32_t sign = bits_of(value) & 0x80000000u;
  const uint32_t magnitude = bits_of(value) ^ sign;
  uint32_t rounded;
  if (magnitude >= kE4m3Overflow) {
    rounded = 0x7F;
  } else if (magnitude < kE4m3Normal) {  // the float adder rounds
    rounded = bits_of(float_of(magnitude) + float_of(kE4m3Rounder)) - kE4m3Rounder;
  } else {
    rounded = (magnitude - (120u << 23) + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20;
  }
  return static_cast<uint8_t>(rounded | sign >> 24);
}

// Two values, the first one in the low byte; on CUDA a NaN loses its sign.
HE_HOST_DEVICE uint16_t to_e4m3x2(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  // The instruction makes everything beyond 448 to 448, infinities too.
  const float nan = float_of(0x7FC00000u);
  first = fabsf(first) > 464.0f ? nan : first;
  second = fabsf(second) > 464.0f ? nan : second;
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return static_cast<uint16_t>(to_e4m3(first) | to_e4m3(second) << 8);
#endif
}

}  // namespace hybridengine
