// One token at a time; see params.h.
#include "common/parallel.h"
#include "layer/row_vectors.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

// Calls body(part, first, second, store) with the elements of pairs of a head, which are the halves
// of it, or neighbours; store(first, second) replaces them.
template <bool neighbours, typename T, typename Body>
HE_SIMD void for_pairs(T* head, int64_t half, const Body& body) {
  for_parts(half, [&](Part part) {
    if constexpr (neighbours) {
      T* pairs = head + 2 * part.begin;
      VecF first{}, second{};
      for (int64_t i = 0; i < part.count; ++i) {
        first[i] = to_float(pairs[2 * i]), second[i] = to_float(pairs[2 * i + 1]);
      }
      body(part, first, second, [&](VecF x, VecF y) {
        for (int64_t i = 0; i < part.count; ++i) {
          pairs[2 * i] = FromFloat<T>::of(x[i]), pairs[2 * i + 1] = FromFloat<T>::of(y[i]);
        }
      });
    } else {
      body(part, part.load_from(head), part.load_from(head + half), [&](VecF x, VecF y) {
        part.store_to(head, x);
        part.store_to(head + half, y);
      });
    }
  });
}

template <typename T, typename Table, bool neighbours>
void rotate(const Rotary& p) {
  parallel_for(p.rows, kRowGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto* cosines = static_cast<const Table*>(p.cos) + p.positions[row] * p.half;
      const auto* sines = static_cast<const Table*>(p.sin) + p.positions[row] * p.half;
      T* head = static_cast<T*>(p.x) + row * p.row_stride;
      for (int64_t h = 0; h < p.heads; ++h, head += p.dim) {
        for_pairs<neighbours>(head, p.half, [&](Part part, VecF first, VecF second, auto replace) {
          const VecF cos = part.load_from(cosines), sin = part.load_from(sines);
          replace(product<Table>(first, cos) - product<Table>(second, sin),
                  product<Table>(second, cos) + product<Table>(first, sin));
        });
      }
    }
  });
}

template <typename T, typename Table>
void rotate(const Rotary& p) {
  (p.neighbours ? rotate<T, Table, true> : rotate<T, Table, false>)(p);
}

}  // namespace

void rotary_cpu(const Rotary& p) {
  if (p.dtype == DType::f32) return rotate<float, float>(p);
  (p.table_dtype == DType::f32 ? rotate<bf16, float> : rotate<bf16, bf16>)(p);
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
