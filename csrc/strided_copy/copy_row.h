// One strided slice and its index arithmetic.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace hybridengine {

constexpr int kCopyDims = 4;
// Elements per chunk, which one step of a CPU thread copies, or at most one of a CUDA block.
constexpr int64_t kChunkElements = 16384;

// Tensors are indices, not addresses, so that a table is uploaded once and used for many copies.
struct CopyRow {
  int64_t src_offset;  // of the first element, in elements of its tensor
  int64_t dst_offset;
  int64_t size[kCopyDims];  // slowest dimension first
  int64_t src_stride[kCopyDims];
  int64_t dst_stride[kCopyDims];
  // Number of its first chunk among those of all rows. The rows of a group or of a band share it.
  int64_t first_chunk;
  int32_t dims;  // the last `dims` dimensions are used; the others have size 1
  int32_t src;   // index of the tensor
  int32_t dst;
  int32_t block;  // block quantization only: the block that the row lies in
  // Rows of its group up to this one. They follow each other and read the same elements in the same
  // order, which are read and converted once.
  int32_t group;
  // Rows of its band up to this one. Its groups read slices side by side of the same `runs` runs:
  // these are read one after the other in full, as memory is read fastest.
  int32_t band;
  int64_t runs;  // of a band of several groups, else 0
};

// An element of a row: its index in every dimension, and its offset on both sides.
struct CopyPlace {
  int64_t index[kCopyDims];
  int64_t src;
  int64_t dst;
};

inline int64_t num_elements(const CopyRow& row) {
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
  }
  row.dims = used > 1 ? used : 1;
}

}  // namespace hybridengine
