#include "common/page_pool.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>

#if defined(__linux__)
#include <sys/mman.h>

#include <deque>
#include <memory>
#include <mutex>

namespace hybridengine {

namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kMostIdleBytes = size_t{1} << 30;

struct Block {
  char* begin;
  size_t bytes;
};

Block map_block(size_t bytes) {
  void* mapped =
      mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(mapped != MAP_FAILED, "no memory for a result of ", bytes, " bytes");
  char* const raw = static_cast<char*>(mapped);
  const size_t before = kHugePage - reinterpret_cast<uintptr_t>(raw) % kHugePage;
  munmap(raw, before);
  if (before < kHugePage) munmap(raw + before + bytes, kHugePage - before);
  madvise(raw + before, bytes, MADV_HUGEPAGE);  // refused where huge pages are switched off
  return {raw + before, bytes};
}

class PagePool final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block(take((bytes + kHugePage - 1) / kHugePage * kHugePage));
    return {block->begin, block, &PagePool::give_back, c10::Device(c10::kCPU)};
  }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

  static PagePool& instance() {
    static auto& pool = *new PagePool;  // never destroyed: tensors may outlive static objects
    return pool;
  }

 private:
  // The smallest idle block that fits without wasting as much as it holds, else a new one.
  Block take(size_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto best = idle_.end();
      for (auto it = idle_.begin(); it != idle_.end(); ++it)
        if (it->bytes >= bytes && it->bytes <= 2 * bytes &&
            (best == idle_.end() || it->bytes < best->bytes))
          best = it;
      if (best != idle_.end()) {
        const Block found = *best;
        idle_.erase(best);
        idle_bytes_ -= found.bytes;
        return found;
      }
    }
    return map_block(bytes);
  }

  static void give_back(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    PagePool& pool = instance();
    madvise(block->begin, block->bytes, MADV_FREE);
    const std::lock_guard<std::mutex> lock(pool.mutex_);
    pool.idle_.push_back(*block);
    pool.idle_bytes_ += block->bytes;
    while (pool.idle_bytes_ > kMostIdleBytes) {
      const Block oldest = pool.idle_.front();
      pool.idle_.pop_front();
      pool.idle_bytes_ -= oldest.bytes;
      munmap(oldest.begin, oldest.bytes);
    }
  }

  std::mutex mutex_;
  std::deque<Block> idle_;  // the longest idle first
  size_t idle_bytes_ = 0;
};

}  // namespace

at::Tensor empty_pooled(at::IntArrayRef shape, const at::TensorOptions& options) {
  const int64_t bytes = c10::multiply_integers(shape) * options.dtype().itemsize();
  if (!options.device().is_cpu() || bytes < kPooledBytes) return at::empty(shape, options);
  return at::detail::empty_generic(shape, &PagePool::instance(),
                                   c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   c10::typeMetaToScalarType(options.dtype()), std::nullopt);
}

}  // namespace hybridengine

#else

namespace hybridengine {

at::Tensor empty_pooled(at::IntArrayRef shape, const at::TensorOptions& options) {
  return at::empty(shape, options);
}

}  // namespace hybridengine

#endif
