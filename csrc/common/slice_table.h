// Tables of strided slices as they come from Python: see kernels/strided_copy.py.
#pragma once

#include "common/binding.h"

namespace hybridengine {

struct SliceRow {
  int64_t src, dst;  // tensors by number
  int64_t src_offset, dst_offset;
  int64_t size[4], src_stride[4], dst_stride[4];
};

inline const SliceRow* slice_rows(const Arguments& given, In table, int64_t* count) {
  constexpr int64_t columns = sizeof(SliceRow) / sizeof(int64_t);
  const auto* numbers = given.on_cpu().data<int64_t>("table", table, {count, columns});
  return reinterpret_cast<const SliceRow*>(numbers);
}

// No tensor has more: products of a size and a stride within it fit an int64_t.
constexpr int64_t kMaxElements = int64_t{1} << 60;

// reach += (size - 1) * stride; false where that overflows or is above kMaxElements.
inline bool extend(int64_t& reach, int64_t size, int64_t stride) {
  int64_t step;
  return !__builtin_mul_overflow(size - 1, stride, &step) &&
         !__builtin_add_overflow(reach, step, &reach) && reach <= kMaxElements;
}

}  // namespace hybridengine
