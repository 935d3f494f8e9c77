// One token at a time; see params.h.
#include "common/parallel.h"
#include "layer/row_vectors.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

template <typename T>
void rotate(const Rotary& p) {
  parallel_for(p.rows, kRowGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* cosines = static_cast<const T*>(p.cos) + p.positions[row] * p.half;
      const T* sines = static_cast<const T*>(p.sin) + p.positions[row] * p.half;
      T* head = static_cast<T*>(p.x) + row * p.row_stride;
      for (int64_t h = 0; h < p.heads; ++h, head += p.dim) {
        for_parts(p.half, [&](Part part) {
          const VecF first = part.load_from(head), second = part.load_from(head + p.half);
          const VecF cos = part.load_from(cosines), sin = part.load_from(sines);
          part.store_to(head, product<T>(first, cos) - product<T>(second, sin));
          part.store_to(head + p.half, product<T>(second, cos) + product<T>(first, sin));
        });
      }
    }
  });
}

}  // namespace

void rotary_cpu(const Rotary& p) { (p.dtype == DType::f32 ? rotate<float> : rotate<bf16>)(p); }

}  // namespace hybridengine::HYBRIDENGINE_ISA
