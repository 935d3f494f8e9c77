// Memory of a CPU kernel for the duration of a call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace hybridengine {

// Uninitialized numbers, aligned to a cache line. Throws std::bad_alloc (MemoryError in Python).
template <typename Number>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<Number*>(std::aligned_alloc(64, (count * sizeof(Number) / 64 + 1) * 64)),
              std::free) {
    if (!data_) throw std::bad_alloc();
  }
  operator Number*() const { return data_.get(); }

 private:
  std::unique_ptr<Number, decltype(&std::free)> data_;
};

}  // namespace hybridengine
