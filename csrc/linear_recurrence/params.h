// Gated linear recurrences over packed segments: Gated DeltaNet, KDA, Mamba2 (SSD), lightning
// attention. A head has a state S [k_dim, v_dim] in float32; a token does
//
//   S = diag(exp(g)) S
//   S = S + k (beta (v - S^T k))^T     with the delta rule, else S + k (beta v)^T
//   out = scale S^T q
//
// A column of S depends on no other column. The kernels therefore walk over the tokens with a block
// of columns in the first-level cache, one vector lane a column, and sum over k_dim in a fixed
// order: the bits of a token depend on its own past alone, not on chunks, threads or neighbours.
// Per token and head this is 7 k_dim v_dim operations where the form by chunks of 64 tokens, which
// has matrix products instead, needs 8.7.
#pragma once

#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "common/heads.h"
#include "common/isa.h"

namespace hybridengine {

constexpr int64_t kChunk = 64;  // tokens between two states that the forward keeps

// Tokens [begin, end). It starts from the state in which segment `parent` ends, or where that is -1
// from an initial state.
struct Segment {
  int64_t begin, end, parent;
  int64_t border_slot;  // of its first state between chunks, -1 if none is kept
  int64_t end_slot;     // of its last state, -1 if it has no children
};

// What follows from cu_seqlens and parents. A slot holds the state of all heads at one place: at
// the end of a segment that has children, and, for the backward, between the chunks of a segment.
struct Segments {
  std::vector<Segment> segments;
  std::vector<int64_t> order;  // of segments, those of a tree one after the other
  std::vector<int64_t> trees;  // begin of each tree in order, and the end of the last one
  int64_t slots = 0;
};

struct LinearRecurrence {
  HeadRows q, k;   // [tokens, k_heads, k_dim]
  HeadRows v;      // [tokens, v_heads, v_dim]; v_heads / k_heads of its heads share a head of q, k
  DType dtype;     // of q, k, v and out: f32, bf16 or f16
  const float* g;  // [tokens, v_heads], or with g_channels [tokens, v_heads, k_dim]
  const float* beta;     // [tokens, v_heads] or null: 1
  const float* initial;  // [segments, v_heads, k_dim, v_dim] or null: 0; roots read it
  const int32_t* slots;  // [segments], or null: states of sequences in `cache`, from which segments
  float* cache;          // start and in which they leave their last ones, in place of `initial`
  int64_t cache_stride;  // between states of sequences, each [v_heads, k_dim, v_dim]
  const Segments* plan;
  float* states;  // [slots, v_heads, k_dim, v_dim]
  int64_t tokens, k_heads, v_heads, k_dim, v_dim;
  float scale;
  bool g_channels, delta;
  bool l2_norm;  // q and k are divided by sqrt(sum of squares + 1e-6)
  int num_threads;
};

struct LinearRecurrenceForward : LinearRecurrence {
  void* out;            // [tokens, v_heads, v_dim]
  float* final_states;  // [segments, v_heads, k_dim, v_dim] or null
};

// The forward's states are recomputed from its slots, which include those between chunks. Gradients
// that are null are not computed.
struct LinearRecurrenceBackward : LinearRecurrence {
  HeadRows grad_out;          // as v
  const float* grad_final;    // as final_states, or null
  float *grad_q, *grad_k;     // [tokens, v_heads, k_dim]: summed over shared heads elsewhere
  void* grad_v;               // [tokens, v_heads, v_dim]
  float *grad_g, *grad_beta;  // as g and beta
  float* grad_initial;        // as initial
};

HE_CPU_KERNEL(linear_recurrence_cpu, LinearRecurrenceForward)
HE_CPU_KERNEL(linear_recurrence_backward_cpu, LinearRecurrenceBackward)

}  // namespace hybridengine
