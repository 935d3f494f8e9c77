// Sampling of one token per row of logits [rows, vocab]: temperature, min-p, top-k, top-p and the
// draw.
//
// One pass over a row gives the sums of exp of its blocks and the maxima of groups of entries. They
// bound the smallest logit that can be kept, so that a second pass reads only the groups that reach
// the bound, and the exact boundary is found among these candidates. The draw inverts the
// cumulative distribution in the order of the ids, with one uniform number of Philox4x32-10 under
// the row's seed and position. Therefore it depends on the row alone.
#pragma once

#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "common/isa.h"

namespace hybridengine {

struct SampleTokens {
  const void* logits;  // [rows, vocab], inner stride 1
  int64_t row_stride;  // elements
  int64_t rows, vocab;
  DType dtype;                     // f32, bf16 or f16
  const float* temperature;        // [rows]; below kGreedyTemperature: the largest logit
  const int32_t* top_k;            // [rows]; below 1: all
  const float* top_p;              // [rows]; from 1 on: all
  const float* min_p;              // [rows]; 0: all
  const int64_t* seeds;            // [rows], the key of Philox
  const int64_t* positions;        // [rows], its counter
  int64_t* tokens;                 // [rows]
  float* log_probs;                // [rows]
  int32_t* num_kept;               // [rows]; 0: nothing was cut
  std::vector<int32_t>* kept_ids;  // [rows] or null; ascending
  int num_threads;
};

constexpr float kGreedyTemperature = 1e-5f;

HE_CPU_KERNEL(sample_tokens_cpu, SampleTokens)

}  // namespace hybridengine
