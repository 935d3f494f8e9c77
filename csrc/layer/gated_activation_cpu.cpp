// Element by element, row by row; see params.h.
#include "common/parallel.h"
#include "layer/row_vectors.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

// An activation of x and, where it is wanted, its derivative.
struct Activated {
  VecF value, slope;
};

HE_SIMD Activated silu(VecF x) {
  const VecF magnitude = (VecF)((VecI)x & 0x7FFFFFFF);
  const VecF small = exp(-magnitude);
  const VecF sigmoid = select(x < 0.0f, small, splat(1.0f)) / (1.0f + small);
  return {x * sigmoid, sigmoid * (1.0f + x * (1.0f - sigmoid))};
}

HE_SIMD Activated gelu_tanh(VecF x) {
  constexpr float kScale = 0.79788456f, kCubic = 0.044715f;  // sqrt(2 / pi)
  const VecF square = x * x;
  const VecF t = tanh(kScale * x * (1.0f + kCubic * square));
  const VecF inner = kScale * (1.0f + 3.0f * kCubic * square);
  return {0.5f * x * (1.0f + t), 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner};
}

template <Gate gate>
HE_SIMD Activated activated(VecF x) {
  if constexpr (gate == Gate::silu) {
    return silu(x);
  } else {
    return gelu_tanh(x);
  }
}

template <typename T, Gate activation>
void forward(const GatedActivation& p) {
  parallel_for(p.rows, kRowGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *gate = row_of<T>(p.gate, row), *up = row_of<T>(p.up, row);
      T* out = static_cast<T*>(p.out) + row * p.width;
      for_parts(p.width, [&](Part part) {
        part.store_to(out, activated<activation>(part.load_from(gate)).value * part.load_from(up));
      });
    }
  });
}

template <typename T, Gate activation>
void backward(const GatedActivationBackward& p) {
  parallel_for(p.rows, kRowGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *gate = row_of<T>(p.gate, row), *up = row_of<T>(p.up, row);
      const T* grad = row_of<T>(p.grad_out, row);
      T* grad_gate = static_cast<T*>(p.grad_gate) + row * p.width;
      T* grad_up = static_cast<T*>(p.grad_up) + row * p.width;
      for_parts(p.width, [&](Part part) {
        const Activated a = activated<activation>(part.load_from(gate));
        const VecF g = part.load_from(grad);
        part.store_to(grad_gate, g * part.load_from(up) * a.slope);
        part.store_to(grad_up, g * a.value);
      });
    }
  });
}

}  // namespace

void gated_activation_cpu(const GatedActivation& p) {
  const bool f32 = p.dtype == DType::f32;
  if (p.activation == Gate::silu) {
    (f32 ? forward<float, Gate::silu> : forward<bf16, Gate::silu>)(p);
  } else {
    (f32 ? forward<float, Gate::gelu_tanh> : forward<bf16, Gate::gelu_tanh>)(p);
  }
}

void gated_activation_backward_cpu(const GatedActivationBackward& p) {
  const bool f32 = p.dtype == DType::f32;
  if (p.activation == Gate::silu) {
    (f32 ? backward<float, Gate::silu> : backward<bf16, Gate::silu>)(p);
  } else {
    (f32 ? backward<float, Gate::gelu_tanh> : backward<bf16, Gate::gelu_tanh>)(p);
  }
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
