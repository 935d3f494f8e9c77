// The element types of the kernels and their conversions, for CPU and CUDA.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace hybridengine {

enum class DType : int32_t { f32, f16, bf16, f64, raw1, raw2, raw4, raw8 };

HE_HOST_DEVICE int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::raw8:
      return 8;
    case DType::f32:
    case DType::raw4:
      return 4;
    case DType::raw1:
      return 1;
    default:
      return 2;
  }
}

HE_HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

HE_HOST_DEVICE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

HE_HOST_DEVICE float to_float(float value) { return value; }
HE_HOST_DEVICE float to_float(double value) { return static_cast<float>(value); }
HE_HOST_DEVICE float to_float(bf16 value) { return float_of(uint32_t{value.bits} << 16); }

HE_HOST_DEVICE float to_float(f16 value) {
#ifdef __CUDA_ARCH__
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#else
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7FFFu;
  // Multiplying by 2^112 rebiases the exponent and is exact for subnormals too.
  float result = float_of(magnitude << 13) * float_of(0x77800000u);
  const uint32_t quiet = magnitude > 0x7C00u ? 0x00400000u : 0u;  // as F16C
  if (magnitude >= 0x7C00u) result = float_of(0x7F800000u | (magnitude << 13) | quiet);
  return float_of(bits_of(result) | sign);
#endif
}

// Round to nearest even; every NaN becomes one quiet NaN, on each device that of torch's own cast.
HE_HOST_DEVICE bf16 to_bf16(float value) {
#ifdef __CUDA_ARCH__
  bf16 rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(value));
  return rounded;
#else
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return bf16{0x7FC0};
  return bf16{static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

// Round to nearest even, subnormals included; NaN becomes a quiet NaN, on the CPU with the sign and
// the upper bits of its payload, as F16C and torch's own cast keep them.
HE_HOST_DEVICE f16 to_f16(float value) {
#ifdef __CUDA_ARCH__
  f16 rounded;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(value));
  return rounded;
#else
  const uint32_t bits = bits_of(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) {
    return f16{static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x1FFu))};
  }
  if (magnitude >= 0x477FF000u) return f16{static_cast<uint16_t>(sign | 0x7C00u)};
  if (magnitude < 0x38800000u) {
    // Adding 0.5 lets the float adder do the subnormal rounding.
    const uint32_t rounded = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    return f16{static_cast<uint16_t>(sign | rounded)};
  }
  const uint32_t rebiased = magnitude - (112u << 23);
  return f16{static_cast<uint16_t>(sign | ((rebiased + 0xFFFu + ((rebiased >> 13) & 1u)) >> 13))};
#endif
}

template <typename T>
struct FromFloat;
template <>
struct FromFloat<float> {
  static HE_HOST_DEVICE float of(float value) { return value; }
};
template <>
struct FromFloat<double> {
  static HE_HOST_DEVICE double of(float value) { return value; }
};
template <>
struct FromFloat<bf16> {
  static HE_HOST_DEVICE bf16 of(float value) { return to_bf16(value); }
};
template <>
struct FromFloat<f16> {
  static HE_HOST_DEVICE f16 of(float value) { return to_f16(value); }
};

template <typename T>
constexpr DType kDType = DType::f32;
template <>
constexpr DType kDType<f16> = DType::f16;
template <>
constexpr DType kDType<bf16> = DType::bf16;

// Calls body(T{}) for the type T of `dtype`: float, f16 or bf16.
template <typename Body>
auto with_float(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::bf16:
      return body(bf16{});
    case DType::f16:
      return body(f16{});
    default:
      return body(float{});
  }
}

// As with_float, or double.
template <typename Body>
auto with_float64(DType dtype, const Body& body) {
  return dtype == DType::f64 ? body(double{}) : with_float(dtype, body);
}

// D(S): float64 goes through float32, as torch's own casts to 16-bit types do.
template <typename S, typename D>
HE_HOST_DEVICE D convert(S value) {
  if constexpr (__is_same(S, D)) {
    return value;
  } else {
    return FromFloat<D>::of(to_float(value));
  }
}

}  // namespace hybridengine
