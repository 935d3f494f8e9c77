// One strided slice as a map of sorted source elements: shared by CPU and CUDA kernels and tests.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace hybridengine {

constexpr int kChangeDims = 4;

// Element `src_offset + sum of c[d] * src_stride[d]` of source `src` goes to `dst_offset + sum of
// c[d] * dst_stride[d]` of destination `dst`, for 0 <= c[d] < size[d]. Source strides are nested:
// each is larger than the distance that all later dimensions reach together.
struct ChangeRow {
  int64_t src_offset;
  int64_t dst_offset;
  int64_t size[kChangeDims];
  int64_t src_stride[kChangeDims];
  int64_t dst_stride[kChangeDims];
  int64_t src_end;  // after the last source element
  int32_t src;
  int32_t dst;
};

// Adjacent source elements [begin, end). `begin` goes to `dst`; -1: the row has none of them.
struct ChangeRun {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t dst = -1;

  HE_HOST_DEVICE bool has(int64_t index) const { return begin <= index && index < end; }
};

HE_HOST_DEVICE int64_t divide(int64_t value, int64_t divisor) {
  if (((value | divisor) >> 32) == 0)  // 64-bit division costs several times 32-bit
    return static_cast<uint32_t>(value) / static_cast<uint32_t>(divisor);
  return value / divisor;
}

// The run that has source element `index`.
HE_HOST_DEVICE ChangeRun find_run(const ChangeRow& row, int64_t index) {
  constexpr int kLast = kChangeDims - 1;
  const ChangeRun outside{index, index + 1};
  if (index < row.src_offset) return outside;
  int64_t rest = index - row.src_offset;
  int64_t dst = row.dst_offset;
  int64_t next = row.src_end;  // element that follows what the last dimension is repeated after
  HE_UNROLL
  for (int dim = 0; dim < kChangeDims; ++dim) {
    if (row.size[dim] == 1) continue;
    if (dim == kLast && row.src_stride[dim] == 1) break;
    const int64_t steps = divide(rest, row.src_stride[dim]);
    if (steps >= row.size[dim]) return outside;
    rest -= steps * row.src_stride[dim];
    dst += steps * row.dst_stride[dim];
    const int64_t after = index - rest + row.src_stride[dim];
    next = after < next ? after : next;  // the next step of an outer dimension may come first
  }
  if (row.size[kLast] == 1 || row.src_stride[kLast] != 1)
    return rest == 0 ? ChangeRun{index, index + 1, dst} : outside;
  const int64_t begin = index - rest, end = begin + row.size[kLast];
  return index < end ? ChangeRun{begin, end, dst} : ChangeRun{end, next};
}

// The first of `count` ascending values that is at least `bound`.
template <typename T>
HE_HOST_DEVICE int64_t lower_bound(const T* values, int64_t count, int64_t bound) {
  int64_t low = 0;
  while (count > 0) {
    const int64_t half = count / 2;
    if (static_cast<int64_t>(values[low + half]) < bound) {
      low += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return low;
}

}  // namespace hybridengine
