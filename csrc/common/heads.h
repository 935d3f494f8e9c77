// Rows of heads, as kernels see them.
#pragma once

#include <cstdint>

namespace hybridengine {

// [tokens, heads, dim], inner stride 1.
struct HeadRows {
  const void* data;
  int64_t token_stride, head_stride;

  template <typename T>
  const T* row(int64_t token, int64_t head) const {
    return static_cast<const T*>(data) + token * token_stride + head * head_stride;
  }
};

}  // namespace hybridengine
