// The rows of strided_copy's table, as the binding reads them.
#pragma once

#include "strided_copy/copy_row.h"

inline hybridengine::CopyRow read_row(const int64_t* table) {
  using namespace hybridengine;
  CopyRow row{};
  row.src_offset = table[2];
  row.dst_offset = table[3];
  for (int dim = 0; dim < kCopyDims; ++dim) {
    row.size[dim] = table[4 + dim];
    row.src_stride[dim] = table[4 + kCopyDims + dim];
    row.dst_stride[dim] = table[4 + 2 * kCopyDims + dim];
  }
  coalesce(row);
  return row;
}
