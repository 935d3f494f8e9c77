// Causal attention over a packed forest: token i attends to key j if j <= i < ends[j].
//
// The rows of a key-value head are its query heads' tokens, row = token * G + g with G = H / H_kv.
// A task is a block of kBlock rows; it goes through the blocks of kBlock keys of which any is
// visible to it, as FlashAttention does. Scores are kept transposed, [keys, rows]: a vector holds
// one key's scores for consecutive rows, so that maxima, sums and masks need no horizontal step.
//
// A head may have a sink: one more score, of a key whose value is zero. It joins the softmax once
// the sums over the keys are complete, and lse includes it, so that the backward pass needs to know
// nothing of it; the gradient of a sink is -sum_token exp(sink - lse) delta.
//
// Every sum is a chain of fused multiply-adds in ascending order (over D, keys, or rows), cut every
// kChain keys of a path or rows of a tree, for accuracy; and the running maximum is an integral
// power of two, whose rescaling is exact. So results depend neither on where a sequence lies in
// the blocks nor on the number of threads, and `out` not on whether sequences share prefixes.
// Products of pairs of bfloat16 (products.h) keep to that by the order of the slots (forest.h).
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/heads.h"
#include "common/isa.h"

namespace hybridengine {

constexpr int64_t kBlock = 64;   // rows and keys of a tile
constexpr int64_t kChain = 256;  // a multiple of kBlock

struct Attention {
  HeadRows query, key, value;
  DType dtype;  // of all tensors but lse
  int64_t tokens, heads, kv_heads;
  int64_t dim, value_dim;
  const int32_t* ends;       // [tokens]
  const int32_t* positions;  // [tokens], null without a window
  int32_t window;
  float softmax_scale;
  float softcap;  // 0: none
  int num_threads;
};

struct AttentionForward : Attention {
  const float* sinks;  // [heads], null: none
  void* out;           // [tokens, heads, value_dim] contiguous
  float* lse;          // [heads, tokens]
};

struct AttentionBackward : Attention {
  HeadRows grad_out, out;
  const float* lse;
  void *grad_query, *grad_key, *grad_value;  // contiguous
  float* delta;                              // [heads, tokens], grad_out . out
};

HE_CPU_KERNEL_BF16(attention_forward_cpu, AttentionForward)
HE_CPU_KERNEL_BF16(attention_backward_cpu, AttentionBackward)

}  // namespace hybridengine
