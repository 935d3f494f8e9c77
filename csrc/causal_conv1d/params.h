// A depthwise causal convolution over packed segments:
//
//   out[t] = activation(bias + sum_j weight[width - 1 - j] x[t - j]),  0 <= j < width
//
// x[t - j] is a row of the token's own path: before a segment come the rows of its parent, before
// those of a root `initial` ones. A block of rows and columns is read once, with the last rows in
// registers. Sums run in a fixed order: bits depend on the path alone.
#pragma once

#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "common/isa.h"

namespace hybridengine {

constexpr int64_t kMaxConvWidth = 4;

// Tokens [begin, end). `parent` is an earlier segment or -1.
struct ConvSegment {
  int64_t begin, end, parent;
  int64_t tail_slot;  // of the gradient of its last rows that comes from elsewhere, or -1
  // Rows before the segment, nearest first: a token, -1 for zeros, or -2 - row of `initial`.
  int64_t before[kMaxConvWidth - 1];
};

struct CausalConv1d {
  const void* x;  // [tokens, channels], inner stride 1
  int64_t x_stride;
  const float* weight;  // [width, channels]: transposed
  const float* bias;    // [channels] or null
  const void* initial;  // [segments, width - 1, channels], oldest row first, or null
  const std::vector<ConvSegment>* segments;
  DType dtype;  // of x, initial and out: f32, bf16 or f16
  int64_t tokens, channels, width;
  bool silu;
  int num_threads;
};

struct CausalConv1dForward : CausalConv1d {
  void* out;  // [tokens, channels]
};

// One token of each of `tokens` sequences, after the cached rows of its sequence, which it updates.
struct CausalConv1dUpdate {
  const void* x;  // [tokens, channels], inner stride 1
  int64_t x_stride;
  const void* weight;    // [channels, width]
  const int32_t* slots;  // [tokens], the place of a sequence in the cache
  void* cache;           // [width - 1, channels] of each sequence, contiguous, oldest row first
  int64_t cache_stride;  // between sequences
  DType dtype;           // of all tensors: f32, bf16 or f16
  int64_t tokens, channels, width;
  bool silu;
  void* out;  // [tokens, channels]
  int num_threads;
};

// Gradients that are null are not computed.
struct CausalConv1dBackward : CausalConv1d {
  const void* grad_out;  // [tokens, channels], inner stride 1
  int64_t grad_stride;
  float* tails;         // [slots, width - 1, channels], nearest first: gradients of last rows
  void* grad_x;         // [tokens, channels]
  float* grad_weight;   // [width, channels]
  float* grad_bias;     // [channels]
  float* grad_initial;  // as initial
};

HE_CPU_KERNEL(causal_conv1d_cpu, CausalConv1dForward)
HE_CPU_KERNEL(causal_conv1d_update_cpu, CausalConv1dUpdate)
HE_CPU_KERNEL(causal_conv1d_backward_cpu, CausalConv1dBackward)

}  // namespace hybridengine
