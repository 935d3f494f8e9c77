// CPU memory for large results. Memory that the system hands out anew is cleared page by page,
// which costs several times the copy that then fills it; so large blocks lie on huge pages and
// outlive their tensors, for the next result of about that size. While nobody uses a block it is
// the kernel's to take back (MADV_FREE).
#pragma once

#include <ATen/core/Tensor.h>

namespace hybridengine {

inline constexpr int64_t kPooledBytes = 4 << 20;  // smaller results are at::empty's

// at::empty; on the CPU, from kPooledBytes on, out of the pool.
at::Tensor empty_pooled(at::IntArrayRef shape, const at::TensorOptions& options);

}  // namespace hybridengine
