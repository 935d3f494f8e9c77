// A cached memory pool for large results on the CPU. The system clears new memory page by page,
// which costs several times the copy that fills it. So large blocks are allocated on huge pages and
// cached after their tensor is freed, for the next result of about that size. The system may
// reclaim a cached block (MADV_FREE).
#pragma once

#include <cstddef>
#include <cstdint>

namespace hybridengine {

constexpr int64_t kPooledBytes = 4 << 20;  // smaller results are not worth huge pages

struct PooledBlock {
  char* begin = nullptr;
  size_t bytes = 0;
};

// A block of at least `bytes`; none (begin is null) on a system without huge pages.
PooledBlock take_from_pool(int64_t bytes);
void return_to_pool(const PooledBlock& block);

}  // namespace hybridengine
