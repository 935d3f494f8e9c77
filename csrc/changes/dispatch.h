// From the dtypes of a ChangesParams to types.
#pragma once

#include "changes/params.h"

namespace hybridengine {

// Calls body(S, D, Index) with values of those types: float32 is converted to the engine's dtype,
// 16-bit values are copied.
template <typename Body>
void by_dtypes(const ChangesParams& p, const Body& body) {
  const auto by_index = [&](auto source, auto value) {
    p.wide_indices ? body(source, value, int64_t{}) : body(source, value, int32_t{});
  };
  if (p.source_dtype != DType::f32) return by_index(uint16_t{}, uint16_t{});
  if (p.value_dtype == DType::bf16) return by_index(float{}, bf16{});
  by_index(float{}, f16{});
}

}  // namespace hybridengine
