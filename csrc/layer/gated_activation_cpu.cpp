// Element by element, row by row; see params.h.
#include <type_traits>

#include "common/parallel.h"
#include "layer/activations.h"
#include "layer/row_vectors.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

HE_SIMD Activated gelu_tanh(VecF x) {
  constexpr float kScale = 0.79788456f, kCubic = 0.044715f;  // sqrt(2 / pi)
  const VecF square = x * x;
  const VecF t = tanh(kScale * x * (1.0f + kCubic * square));
  const VecF inner = kScale * (1.0f + 3.0f * kCubic * square);
  return {0.5f * x * (1.0f + t), 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner};
}

// x Phi(x), where 2 Phi(-|x|) = erfc(z) = exp(-z^2) t p(t) with z = |x| / sqrt(2), t = 1 / (1 +
// 0.45 z) and a polynomial p, fitted to a relative error of 2e-8.
HE_SIMD Activated gelu(VecF x) {
  const VecF magnitude = (VecF)((VecI)x & 0x7FFFFFFF);
  const VecF t = 1.0f / (1.0f + 0.31819805f * magnitude), bell = exp(-0.5f * x * x);
  VecF p = splat(-0.03891822f);
  for (const float c : {0.17739663f, -0.27005097f, 0.10323072f, 0.008416286f, 0.10468497f,
                        0.18000217f, 0.22738381f, 0.25397301f, 0.2538816f}) {
    p = p * t + c;
  }
  const VecF tail = 0.5f * bell * t * p, part = select(x < 0.0f, tail, 1.0f - tail);
  return {x * part, part + 0.3989423f * x * bell};
}

template <Gate gate>
HE_SIMD Activated activated(VecF x) {
  if constexpr (gate == Gate::silu) {
    return silu(x);
  } else if constexpr (gate == Gate::gelu) {
    return gelu(x);
  } else if constexpr (gate == Gate::gelu_tanh) {
    return gelu_tanh(x);
  } else if constexpr (gate == Gate::sigmoid) {
    return sigmoid(x);
  } else {
    return softplus(x);
  }
}

template <typename T, Gate activation>
void forward(const GatedActivation& p) {
  parallel_for(p.rows, kRowGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t token = row / p.heads, head = row % p.heads;
      const T *gate = p.gate.row<T>(token, head), *up = p.up.row<T>(token, head);
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
      const T *gate = p.gate.row<T>(row), *up = p.up.row<T>(row);
      const T* grad = p.grad_out.row<T>(row);
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

// Calls body(value of T, constant of the activation).
template <typename Body>
void with_types(DType dtype, Gate activation, const Body& body) {
  const auto with_gate = [&](auto type) {
    switch (activation) {
      case Gate::silu:
        return body(type, std::integral_constant<Gate, Gate::silu>());
      case Gate::gelu:
        return body(type, std::integral_constant<Gate, Gate::gelu>());
      case Gate::gelu_tanh:
        return body(type, std::integral_constant<Gate, Gate::gelu_tanh>());
      case Gate::sigmoid:
        return body(type, std::integral_constant<Gate, Gate::sigmoid>());
      case Gate::softplus:
        return body(type, std::integral_constant<Gate, Gate::softplus>());
    }
  };
  dtype == DType::f32 ? with_gate(float()) : with_gate(bf16());
}

}  // namespace

void gated_activation_cpu(const GatedActivation& p) {
  with_types(p.dtype, p.activation,
             [&](auto type, auto gate) { forward<decltype(type), gate()>(p); });
}

void gated_activation_backward_cpu(const GatedActivationBackward& p) {
  with_types(p.dtype, p.activation,
             [&](auto type, auto gate) { backward<decltype(type), gate()>(p); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
