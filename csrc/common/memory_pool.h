// A cached memory pool for large results on the CPU. The system clears new memory page by page,
// which costs several times the copy that fills it. So large blocks are allocated on huge pages and
// cached after their tensor is freed, for the next result of about that size. The system may
// reclaim a cached block (MADV_FREE).
#pragma once

#include <ATen/core/Tensor.h>

namespace hybridengine {

inline constexpr int64_t kPooledBytes = 4 << 20;  // smaller results come from at::empty

// at::empty, from the pool for CPU tensors of at least kPooledBytes.
at::Tensor empty_from_pool(at::IntArrayRef shape, const at::TensorOptions& options);

}  // namespace hybridengine
