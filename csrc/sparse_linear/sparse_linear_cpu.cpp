// CPU products over chosen vocabulary entries. Sums are float32 in a fixed order: a row's results
// depend neither on the other rows nor on the number of threads.
#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "common/simd.h"
#include "sparse_linear/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kGrain = 16;  // rows of the weight per thread, at least

template <typename T>
float dot(const T* a, const T* b, int64_t count) {
  VecF sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth) {
    for (int lane = 0; lane < 4; ++lane) {
      sums[lane] += load(a + i + lane * kWidth) * load(b + i + lane * kWidth);
    }
  }
  for (; i + kWidth <= count; i += kWidth) sums[0] += load(a + i) * load(b + i);
  if (i < count) sums[1] += load_part(a + i, count - i, 0.0f) * load_part(b + i, count - i, 0.0f);
  return static_cast<float>(sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
}

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

template <typename T>
void logits(const SparseLogits& p) {
  const Operands<T> rows(p);
  parallel_for(p.ends[p.rows], kGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    int64_t row = rows.row_of(begin);
    for (int64_t entry = begin; entry < end; ++entry) {
      while (entry >= p.ends[row + 1]) ++row;
      const T* weight = rows.weight(entry);
      p.logits[entry] = weight ? dot(rows.hidden(row), weight, p.width) : 0.0f;
    }
  });
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

void sparse_logits_cpu(const SparseLogits& p) {
  with_float(p.dtype, [&](auto type) { logits<decltype(type)>(p); });
}

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
