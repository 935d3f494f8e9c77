#include "common/memory_pool.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#if defined(__linux__)
#include <sys/mman.h>

#include <deque>
#include <memory>
#include <mutex>

namespace hybridengine {

namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kMaxCachedBytes = size_t{1} << 30;

struct Block {
  char* begin;
  size_t bytes;
};

Block map_block(size_t bytes) {
  void* mapped =
      mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(mapped != MAP_FAILED, "cannot allocate ", bytes, " bytes for a result");
  char* const raw = static_cast<char*>(mapped);
  const size_t before = kHugePage - reinterpret_cast<uintptr_t>(raw) % kHugePage;
  munmap(raw, before);
  if (before < kHugePage) munmap(raw + before + bytes, kHugePage - before);
  madvise(raw + before, bytes, MADV_HUGEPAGE);  // ignored where huge pages are disabled
  return {raw + before, bytes};
}

class MemoryPool final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block(take((bytes + kHugePage - 1) / kHugePage * kHugePage));
    return {block->begin, block, &MemoryPool::release, c10::Device(c10::kCPU)};
  }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

  static MemoryPool& instance() {
    static auto& pool = *new MemoryPool;  // never destroyed: tensors may outlive static objects
    return pool;
  }

 private:
  // The smallest cached block of at least `bytes` and at most twice that, else a new one.
  Block take(size_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto best = cached_.end();
      for (auto it = cached_.begin(); it != cached_.end(); ++it)
        if (it->bytes >= bytes && it->bytes <= 2 * bytes &&
            (best == cached_.end() || it->bytes < best->bytes))
          best = it;
      if (best != cached_.end()) {
        const Block block = *best;
        cached_.erase(best);
        cached_bytes_ -= block.bytes;
        return block;
      }
    }
    return map_block(bytes);
  }

  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    MemoryPool& pool = instance();
    madvise(block->begin, block->bytes, MADV_FREE);
    const std::lock_guard<std::mutex> lock(pool.mutex_);
    pool.cached_.push_back(*block);
    pool.cached_bytes_ += block->bytes;
    while (pool.cached_bytes_ > kMaxCachedBytes) {
      const Block oldest = pool.cached_.front();
      pool.cached_.pop_front();
      pool.cached_bytes_ -= oldest.bytes;
      munmap(oldest.begin, oldest.bytes);
    }
  }

  std::mutex mutex_;
  std::deque<Block> cached_;  // the least recently used first
  size_t cached_bytes_ = 0;
};

}  // namespace

at::Tensor empty_from_pool(at::IntArrayRef shape, const at::TensorOptions& options) {
  int64_t bytes = static_cast<int64_t>(options.dtype().itemsize());
  bool pooled = options.device().is_cpu();
  for (const int64_t size : shape)
    pooled = pooled && size > 0 && !__builtin_mul_overflow(bytes, size, &bytes);
  if (!pooled || bytes < kPooledBytes) return at::empty(shape, options);
  return at::detail::empty_generic(shape, &MemoryPool::instance(),
                                   c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   c10::typeMetaToScalarType(options.dtype()), std::nullopt);
}

}  // namespace hybridengine

#else

namespace hybridengine {

at::Tensor empty_from_pool(at::IntArrayRef shape, const at::TensorOptions& options) {
  return at::empty(shape, options);
}

}  // namespace hybridengine

#endif

namespace hybridengine {

void register_memory_pool(pybind11::module_& m) {
  m.def(
      "empty_from_pool",
      [](const std::vector<int64_t>& shape, at::ScalarType dtype) {
        return empty_from_pool(shape, at::TensorOptions().dtype(dtype));
      },
      pybind11::arg("shape"), pybind11::arg("dtype"));
}

}  // namespace hybridengine
