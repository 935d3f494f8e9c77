// The gradients of logits of chosen vocabulary entries. Sums are float32 in a fixed order: a row's
// results depend neither on the other rows nor on the number of threads.
#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "common/simd.h"
#include "sparse_linear/operands.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

template <typename T>
void add_scaled(float* total, float scale, const T* row, int64_t count) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth)
    store(total + i, load(total + i) + scale * load(row + i));
  for (; i < count; ++i) total[i] += scale * to_float(row[i]);
}

template <typename T>
void write(T* out, const float* values, int64_t count) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(out + i, load(values + i));
  for (; i < count; ++i) out[i] = convert<float, T>(values[i]);
}

template <typename T>
void hidden_grad(const SparseHiddenGrad& p) {
  const Operands<T> rows(p);
  parallel_for(p.rows, 1, p.num_threads, [&](int64_t begin, int64_t end) {
    std::vector<float> total(p.width);
    for (int64_t row = begin; row < end; ++row) {
      std::fill(total.begin(), total.end(), 0.0f);
      for (int64_t entry = p.ends[row]; entry < p.ends[row + 1]; ++entry) {
        const T* weight = rows.weight(entry);
        const float grad = p.grad_logits[entry];
        if (weight && grad != 0) add_scaled(total.data(), grad, weight, p.width);
      }
      write(static_cast<T*>(p.hidden_grad) + row * p.width, total.data(), p.width);
    }
  });
}

template <typename T, typename G>
void weight_grad(const SparseWeightGrad& p) {
  const Operands<T> rows(p);
  // An id costs as much as writing its row, and as reading a row per entry: threads share that sum.
  const auto cost_before = [&](int64_t id) { return id + 2 * p.begin[id]; };
  const auto first_id_at = [&](int64_t cost) {
    int64_t low = 0, high = p.vocab;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      cost_before(middle) < cost ? low = middle + 1 : high = middle;
    }
    return low;
  };
  parallel_for(cost_before(p.vocab), kGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    std::vector<float> total(p.width);
    for (int64_t id = first_id_at(begin), last = first_id_at(end); id < last; ++id) {
      G* out = static_cast<G*>(p.weight_grad) + id * p.width;
      if (p.begin[id] == p.begin[id + 1]) {
        if (!p.accumulate) std::memset(out, 0, p.width * sizeof(G));
        continue;
      }
      for (int64_t i = 0; i < p.width; ++i) total[i] = p.accumulate ? to_float(out[i]) : 0.0f;
      for (int64_t i = p.begin[id]; i < p.begin[id + 1]; ++i) {
        const float grad = p.grad_logits[p.entry[i]];
        if (grad == 0) continue;
        add_scaled(total.data(), grad, rows.hidden(rows.row_of(p.entry[i])), p.width);
      }
      write(out, total.data(), p.width);
    }
  });
}

}  // namespace

void sparse_hidden_grad_cpu(const SparseHiddenGrad& p) {
  with_float(p.dtype, [&](auto type) { hidden_grad<decltype(type)>(p); });
}

void sparse_weight_grad_cpu(const SparseWeightGrad& p) {
  if (p.width == 0) return;
  with_float(p.dtype, [&](auto type) {
    using T = decltype(type);
    p.grad_dtype == DType::f32 ? weight_grad<T, float>(p) : weight_grad<T, T>(p);
  });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
