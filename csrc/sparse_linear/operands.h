// The rows of hidden states and weight that an entry multiplies.
#pragma once

#include <algorithm>

#include "sparse_linear/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

constexpr int64_t kGrain = 16;  // rows of the weight per thread, at least

template <typename T>
struct Operands {
  explicit Operands(const SparseRows& p) : p(p) {}
  const SparseRows& p;
  const T* hidden(int64_t row) const { return p.hidden.row<T>(row); }
  // The weight's row of an entry; null if it belongs to another slice of the vocabulary.
  const T* weight(int64_t entry) const {
    const int64_t id = p.ids[entry] - p.first_id;
    if (id < 0 || id >= p.vocab) return nullptr;
    return p.weight.row<T>(id);
  }
  int64_t row_of(int64_t entry) const {
    return std::upper_bound(p.ends, p.ends + p.rows + 1, entry) - p.ends - 1;
  }
};

}  // namespace hybridengine::HYBRIDENGINE_ISA
