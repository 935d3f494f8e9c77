// Element by element, row by row; see params.h.
#include "common/parallel.h"
#include "layer/row_vectors.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

template <typename T>
void add(const AddScaled& p) {
  parallel_for(p.rows, kRowGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* out = static_cast<T*>(p.out) + row * p.out_stride;
      const T* update = p.update.row<T>(row);
      for_parts(p.width, [&](Part part) {
        const VecF scaled = product<T>(part.load_from(update), splat(p.scale));
        part.store_to(out, part.load_from(out) + scaled);
      });
    }
  });
}

}  // namespace

void add_scaled_cpu(const AddScaled& p) { (p.dtype == DType::f32 ? add<float> : add<bf16>)(p); }

}  // namespace hybridengine::HYBRIDENGINE_ISA
