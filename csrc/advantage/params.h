// Advantages: group-relative ones from one reward per response, and GAE from token rewards.
#pragma once

#include <cstdint>

#include "advantage/group_slots.h"
#include "common/isa.h"

namespace hybridengine {

struct GroupAdvantageParams {
  const float* rewards;       // [num_rows]
  const int64_t* group_ids;   // [num_rows], any values in any order
  const float* lengths;       // [num_rows] response lengths; opo only, else null
  float* advantages;          // [num_rows]
  const int32_t* cu_seqlens;  // [num_rows + 1] or null
  const bool* token_mask;     // [num_tokens] or null: no token is masked
  float* token_advantages;    // [num_tokens], written where cu_seqlens is given; 0 if masked
  int64_t num_rows;
  int64_t num_tokens;
  EstimatorOptions options;
  int64_t* table;      // CPU scratch [table_size]: hash table of rows
  int64_t table_size;  // a power of two, at least 2 * num_rows
  int64_t* group_of;   // CPU scratch [num_rows]
  GroupStats* groups;  // CPU scratch [num_rows]
  int64_t* bad_row;    // CPU: the first row whose reward is not finite
  GroupRows rows;      // CUDA: rewards, ids and lengths, with the scratch of group_slots.h
  int num_threads;
};

struct GaeParams {
  const float* rewards;       // [num_tokens]
  const float* values;        // [num_tokens] or null: all zero
  const bool* token_mask;     // [num_tokens] or null; masked tokens are skipped
  const int32_t* cu_seqlens;  // [num_sequences + 1]
  float* advantages;          // [num_tokens], 0 where masked or past the last sequence
  float* returns;             // [num_tokens], advantages + values
  int64_t num_tokens;
  int64_t num_sequences;
  double gamma;
  double lam;
  int64_t* bad_token;  // CPU: the first unmasked token whose reward is not finite
  int num_threads;
};

HE_CPU_KERNEL(group_advantage_cpu, GroupAdvantageParams)
HE_CPU_KERNEL(gae_cpu, GaeParams)

// Each returns a cudaError_t.
int group_advantage_cuda(const GroupAdvantageParams& params, void* stream);
int gae_cuda(const GaeParams& params, void* stream);

}  // namespace hybridengine
