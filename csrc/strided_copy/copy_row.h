// One strided slice and its index arithmetic: shared by the CPU kernel, the CUDA kernel and tests.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace hybridengine {

constexpr int kCopyDims = 4;
// Elements per chunk, which one CUDA block or one step of a CPU thread copies.
constexpr int64_t kChunkElements = 16384;
constexpr int32_t kMaxAlign = 16;  // elements in the widest group: 16 bytes of int8

// Tensors are indices, not addresses, so that a table is uploaded once and used for many copies.
struct CopyRow {
  int64_t src_offset;  // of the first element, in elements of its tensor
  int64_t dst_offset;
  int64_t size[kCopyDims];  // slowest dimension first
  int64_t src_stride[kCopyDims];
  int64_t dst_stride[kCopyDims];
  int64_t first_chunk;          // number of its first chunk among those of all rows
  int32_t dims;                 // the last `dims` dimensions are used; the others have size 1
  uint32_t inverse[kCopyDims];  // ceil(2^32 / size), for `advance`
  int32_t src;                  // index of the tensor
  int32_t dst;
  // The largest power of two, up to kMaxAlign, that divides all outer strides, in elements; 0 where
  // elements are not adjacent.
  int32_t src_align;
  int32_t dst_align;
  int32_t block;  // block quantization only: the block that the row lies in
};

// An element of a row: its index in every dimension, and its offset on both sides.
struct CopyPlace {
  int64_t index[kCopyDims];
  int64_t src;
  int64_t dst;
};

HE_HOST_DEVICE int64_t num_elements(const CopyRow& row) {
  return row.size[0] * row.size[1] * row.size[2] * row.size[3];
}

// Element `flat` (row-major over `size`).
HE_HOST_DEVICE CopyPlace locate(const CopyRow& row, int64_t flat) {
  CopyPlace place{};
  HE_UNROLL
  for (int dim = kCopyDims - 1; dim >= 0; --dim) {
    if (dim < kCopyDims - row.dims) break;
    int64_t outer = 0;
    if (dim == kCopyDims - row.dims) {                 // the outermost dimension
    } else if (((flat | row.size[dim]) >> 32) == 0) {  // 64-bit division costs several times 32-bit
      outer = static_cast<uint32_t>(flat) / static_cast<uint32_t>(row.size[dim]);
    } else {
      outer = flat / row.size[dim];
    }
    place.index[dim] = flat - outer * row.size[dim];
    place.src += place.index[dim] * row.src_stride[dim];
    place.dst += place.index[dim] * row.dst_stride[dim];
    flat = outer;
  }
  return place;
}

struct CopyOffsets {
  int64_t src;
  int64_t dst;
};

// The offsets of the element `steps` < kChunkElements after `place`. A quotient of fewer than
// kChunkElements steps is a multiplication: exact for sizes up to twice that, and 0 above.
HE_HOST_DEVICE CopyOffsets advance(const CopyRow& row, const CopyPlace& place, uint32_t steps) {
  CopyOffsets offsets{place.src, place.dst};
  HE_UNROLL
  for (int dim = kCopyDims - 1; dim >= 0 && steps > 0; --dim) {
    const int64_t left = row.size[dim] - place.index[dim];
    int64_t moved = steps;
    uint32_t carry = 0;
    if (moved >= left) {
      const uint32_t past = static_cast<uint32_t>(moved - left);
      const auto wraps = static_cast<uint32_t>((uint64_t{past} * row.inverse[dim]) >> 32);
      moved = int64_t{past - wraps * static_cast<uint32_t>(row.size[dim])} - place.index[dim];
      carry = wraps + 1;
    }
    offsets.src += moved * row.src_stride[dim];
    offsets.dst += moved * row.dst_stride[dim];
    steps = carry;
  }
  return offsets;
}

// Merges dimensions that are contiguous on both sides, innermost last; unused ones get size 1.
inline void coalesce(CopyRow& row) {
  int64_t size[kCopyDims], src[kCopyDims], dst[kCopyDims];
  int used = 0;  // collected innermost first
  for (int dim = kCopyDims - 1; dim >= 0; --dim) {
    if (row.size[dim] == 1) continue;
    if (used && row.src_stride[dim] == src[used - 1] * size[used - 1] &&
        row.dst_stride[dim] == dst[used - 1] * size[used - 1]) {
      size[used - 1] *= row.size[dim];
      continue;
    }
    size[used] = row.size[dim];
    src[used] = row.src_stride[dim];
    dst[used] = row.dst_stride[dim];
    ++used;
  }
  for (int i = 0; i < kCopyDims; ++i) {
    const int dim = kCopyDims - 1 - i;
    row.size[dim] = i < used ? size[i] : 1;
    row.src_stride[dim] = i < used ? src[i] : (i == 0);
    row.dst_stride[dim] = i < used ? dst[i] : (i == 0);
    const int64_t divisor = row.size[dim] < 2 * kChunkElements ? row.size[dim] : 2 * kChunkElements;
    row.inverse[dim] = static_cast<uint32_t>((0xFFFFFFFFu + divisor) / divisor);
  }
  row.dims = used > 1 ? used : 1;
}

// The largest power of two up to kMaxAlign that divides every stride but the innermost.
inline int32_t alignment(const CopyRow& row, const int64_t* stride) {
  if (stride[kCopyDims - 1] != 1) return 0;
  int64_t all = kMaxAlign;
  for (int dim = 0; dim < kCopyDims - 1; ++dim) {
    if (row.size[dim] > 1) all |= stride[dim];
  }
  return static_cast<int32_t>(all & -all);
}

// Whether one side of the row, `first` its first element, is made of groups of `width` elements
// that can each be accessed with 16 bytes (or all of its bytes, if it has fewer) at a time.
HE_HOST_DEVICE bool groups_fit(const char* first, int64_t align, int64_t width, int64_t bytes) {
  const int64_t group = width * bytes < 16 ? width * bytes : 16;
  return align != 0 && (align * bytes) % group == 0 &&
         reinterpret_cast<uintptr_t>(first) % group == 0;
}

HE_HOST_DEVICE bool vectors_fit(const CopyRow& row, const char* src, const char* dst, int64_t width,
                                int64_t src_bytes, int64_t dst_bytes) {
  return row.size[kCopyDims - 1] % width == 0 && groups_fit(src, row.src_align, width, src_bytes) &&
         groups_fit(dst, row.dst_align, width, dst_bytes);
}

}  // namespace hybridengine
