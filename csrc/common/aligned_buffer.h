// Memory of a CPU kernel for the duration of a call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace hybridengine {

// Uninitialized numbers, aligned to a cache line.
template <typename Number>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<Number*>(std::aligned_alloc(64, (count * sizeof(Number) / 64 + 1) * 64)),
              std::free) {}
  operator Number*() const { return data_.get(); }

 private:
  std::unique_ptr<Number, decltype(&std::free)> data_;
};

}  // namespace hybridengine
