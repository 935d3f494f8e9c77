// Element by element, row by row; see params.h.
#include "common/parallel.h"
#include "layer/activations.h"
#include "layer/row_vectors.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

template <typename T>
void gates(const DeltaGates& p) {
  const T* bias = static_cast<const T*>(p.bias);
  parallel_for(p.rows, kRowGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *a = p.a.row<T>(row), *b = p.b.row<T>(row);
      for_parts(p.heads, [&](Part part) {
        const VecF rate = exp(rounded<T>(part.load_from(p.log_rate)));
        const VecF step = softplus(part.load_from(a) + part.load_from(bias)).value;
        part.store_to(p.g + row * p.heads, -rate * step);
        part.store_to(p.beta + row * p.heads, sigmoid(part.load_from(b)).value);
      });
    }
  });
}

}  // namespace

void delta_gates_cpu(const DeltaGates& p) {
  (p.dtype == DType::f32 ? gates<float> : gates<bf16>)(p);
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
