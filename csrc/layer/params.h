// Row operators of a decoder layer: RMSNorm and LayerNorm, the gated activation, the rotary
// embedding, and the gates of Gated DeltaNet.
//
// An element's bits depend on its row and its place in it alone, not on the other rows or on the
// number of threads: sums go over a row in an order that its width fixes. The gradient of the
// norm's weight is summed over blocks of rows, in a fixed order too.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/heads.h"
#include "common/isa.h"
#include "common/rows.h"

namespace hybridengine {

// out = x / sqrt(mean(x^2) + eps) * (weight + offset), in float32, rounded at the end. With
// round_first x / sqrt(...) is rounded to the dtype before it is multiplied. Where there is a
// residual, x is added to it first, and the norm is of their rounded sum. If `centered`, the row's
// mean is subtracted before all that, which is LayerNorm; then a bias is added, where there is one.
struct Norm {
  Rows x;  // of each token `heads` rows
  int64_t heads, token_stride;
  void* residual;      // [rows, width] contiguous, or null
  const void* weight;  // [width]
  const void* bias;    // [width], or null
  DType dtype;         // of all tensors but the next: f32 or bf16
  float* inverse_rms;  // [rows], or null
  void* out;           // [rows, width] contiguous
  int64_t rows, width;
  float eps, offset;
  bool round_first, centered;
  int num_threads;
};

struct NormBackward {
  Rows x, grad_out;
  const void* weight;
  DType dtype;
  const float* inverse_rms;
  void* grad_x;        // [rows, width] contiguous
  float* grad_weight;  // [width]
  float* grad_bias;    // [width]; only if `centered`
  int64_t rows, width;
  float offset;
  bool centered;
  int num_threads;
};

enum class Gate { silu, gelu, gelu_tanh, sigmoid, softplus };

// out = activation(gate) * up, in float32, rounded once.
struct GatedActivation {
  HeadRows gate, up;  // of each token `heads` rows
  int64_t heads;
  DType dtype;  // of all tensors: f32 or bf16
  Gate activation;
  void* out;  // [rows, width] contiguous
  int64_t rows, width;
  int num_threads;
};

struct GatedActivationBackward {
  Rows gate, up, grad_out;
  DType dtype;
  Gate activation;
  void *grad_gate, *grad_up;  // [rows, width] contiguous
  int64_t rows, width;
  int num_threads;
};

// g = -exp(log_rate) softplus(a + bias) and beta = sigmoid(b), in float32.
struct DeltaGates {
  Rows a, b;              // [rows, heads]
  const float* log_rate;  // [heads]; it is rounded to the dtype
  const void* bias;       // [heads]
  DType dtype;            // of a, b and bias: f32 or bf16
  float *g, *beta;        // [rows, heads] contiguous
  int64_t rows, heads;
  int num_threads;
};

// Pairs (x1, x2) of the first 2 * half elements of a head become (x1 cos - x2 sin, x2 cos + x1
// sin). They are its halves, or neighbours. Products are rounded to the dtype of the tables and
// sums to that of x, as torch rounds them.
struct Rotary {
  void* x;  // [rows, heads, dim], inner dimensions contiguous
  int64_t row_stride, dim;
  const void *cos, *sin;     // [positions, half] contiguous
  const int64_t* positions;  // [rows]
  DType dtype;               // of x: f32 or bf16
  DType table_dtype;         // that of x, or f32
  bool neighbours;
  int64_t rows, heads, half;
  int num_threads;
};

// out += update * scale, where the product is rounded to the dtype before it is added.
struct AddScaled {
  void* out;  // [rows, width], inner stride 1
  int64_t out_stride;
  Rows update;
  DType dtype;  // of both tensors: f32 or bf16
  int64_t rows, width;
  float scale;
  int num_threads;
};

HE_CPU_KERNEL(norm_cpu, Norm)
HE_CPU_KERNEL(norm_backward_cpu, NormBackward)
HE_CPU_KERNEL(gated_activation_cpu, GatedActivation)
HE_CPU_KERNEL(gated_activation_backward_cpu, GatedActivationBackward)
HE_CPU_KERNEL(delta_gates_cpu, DeltaGates)
HE_CPU_KERNEL(rotary_cpu, Rotary)
HE_CPU_KERNEL(add_scaled_cpu, AddScaled)

}  // namespace hybridengine
