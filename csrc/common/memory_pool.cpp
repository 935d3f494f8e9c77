#include "common/memory_pool.h"

// The address sanitizer watches what malloc returns, not this pool.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#include <sys/mman.h>

#include <deque>
#include <mutex>
#include <new>

namespace hybridengine {

namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kMaxCachedBytes = size_t{1} << 30;

struct MemoryPool {
  std::mutex mutex;
  std::deque<PooledBlock> cached;  // the least recently used first
  size_t cached_bytes = 0;
};

MemoryPool& pool() {
  static auto& instance = *new MemoryPool;  // never destroyed: tensors may outlive static objects
  return instance;
}

PooledBlock map_block(size_t bytes) {
  void* mapped =
      mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  char* const raw = static_cast<char*>(mapped);
  const size_t before = kHugePage - reinterpret_cast<uintptr_t>(raw) % kHugePage;
  munmap(raw, before);
  if (before < kHugePage) munmap(raw + before + bytes, kHugePage - before);
  madvise(raw + before, bytes, MADV_HUGEPAGE);  // ignored where huge pages are disabled
  return {raw + before, bytes};
}

}  // namespace

// The smallest cached block of at least `bytes` and at most twice that, else a new one.
PooledBlock take_from_pool(int64_t wanted) {
  const size_t bytes = (static_cast<size_t>(wanted) + kHugePage - 1) / kHugePage * kHugePage;
  MemoryPool& p = pool();
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    auto best = p.cached.end();
    for (auto it = p.cached.begin(); it != p.cached.end(); ++it)
      if (it->bytes >= bytes && it->bytes <= 2 * bytes &&
          (best == p.cached.end() || it->bytes < best->bytes))
        best = it;
    if (best != p.cached.end()) {
      const PooledBlock block = *best;
      p.cached.erase(best);
      p.cached_bytes -= block.bytes;
      return block;
    }
  }
  return map_block(bytes);
}

void return_to_pool(const PooledBlock& block) {
  MemoryPool& p = pool();
  madvise(block.begin, block.bytes, MADV_FREE);
  const std::lock_guard<std::mutex> lock(p.mutex);
  p.cached.push_back(block);
  p.cached_bytes += block.bytes;
  while (p.cached_bytes > kMaxCachedBytes) {
    const PooledBlock oldest = p.cached.front();
    p.cached.pop_front();
    p.cached_bytes -= oldest.bytes;
    munmap(oldest.begin, oldest.bytes);
  }
}

}  // namespace hybridengine

#else

namespace hybridengine {

PooledBlock take_from_pool(int64_t) { return {}; }
void return_to_pool(const PooledBlock&) {}

}  // namespace hybridengine

#endif
