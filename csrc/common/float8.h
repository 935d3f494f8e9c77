// float8_e4m3fn: 4 exponent bits, 3 mantissa bits, no infinity; the largest value is 448.
#pragma once

#include "common/dtype.h"

namespace hybridengine {

constexpr uint32_t kE4m3Overflow = 1087u << 20;  // 480
constexpr uint32_t kE4m3Normal = 121u << 23;     // 2^-6, the smallest normal value
constexpr uint32_t kE4m3Rounder = 141u << 23;    // 2^14, whose last bit is 2^-9, the smallest value

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

}  // namespace hybridengine
