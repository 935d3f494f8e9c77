// Rows of a matrix, as kernels see them.
#pragma once

#include <cstdint>

namespace hybridengine {

// [rows, width], inner stride 1.
struct Rows {
  const void* data;
  int64_t stride;

  template <typename T>
  const T* row(int64_t row) const {
    return static_cast<const T*>(data) + row * stride;
  }
};

}  // namespace hybridengine
