// Per-row log-probability, entropy and their gradient from logits [rows, vocab].
//
// A logit x becomes y = softcap * tanh(logit_scale * x / softcap) (just x without a soft-cap), and
// z = y * factor with factor = 1 / temperature (logit_scale / temperature without a soft-cap).
// p = softmax(z). Everything is computed from z - max(z): rows with a large logit offset (-1e4) are
// as exact as rows around 0.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace hybridengine {

// Inputs of forward and backward.
struct LogitRows {
  const void* logits;  // [rows, vocab], inner stride 1
  int64_t row_stride;  // elements
  int64_t rows;
  int64_t vocab;
  DType dtype;
  // CPU only: row r has the tokens [cu_tokens[r], cu_tokens[r + 1]); null: one token, r.
  const int32_t* cu_tokens;
  int64_t tokens;
  const int64_t* token_ids;  // [tokens], ids of the full vocabulary
  int64_t ignore_index;      // tokens with this label: their outputs and gradients are 0
  // Vocabulary-parallel: [2], on the device of the logits: the first id of this slice and the size
  // of the full vocabulary; else null.
  const int64_t* vocab_range;
  const uint8_t* vocab_mask;  // [rows, vocab] or null: 0 removes an entry from the distribution
  int64_t mask_stride;
  const float* temperatures;  // [rows], or null for `temperature`
  float temperature;
  float logit_scale;
  float softcap;  // 0: none
  bool negate;    // log_probs are the negative ones, and so are their gradients
  int num_threads;
};

struct LogProbForward : LogitRows {
  float* log_probs;  // [tokens], as all results
  float* entropy;
  // [tokens, stats_width]: row_max, the max of y or a reference close to it (plain_row.h); log_sum,
  // log sum exp(z - row_max * factor); with a width of 3 the sum of p^2, else the width is 2.
  float* row_stats;
  int64_t stats_width;
  // Vocabulary-parallel: if not null, only this is written. [tokens, 5]: max y, sum e, sum e*d, y
  // of the token (-inf: not in this slice), sum e^2, with d = z - max z and e = exp(d). The sums
  // are over all entries except the token's.
  float* partial;
  // CUDA only:
  int32_t* bad_label;  // set to 1 if a label is out of range (its row becomes NaN)
  float* slice_sums;   // [rows, num_slices(vocab), 4], scratch
};

struct LogProbBackward : LogitRows {
  const float* log_probs;  // [tokens]
  const float* entropy;
  const float* row_stats;  // of the forward
  int64_t stats_width;
  const float* grad_log_probs;  // [tokens] or null
  const float* grad_entropy;    // [tokens] or null
  void* grad_logits;            // may be logits itself
  DType grad_dtype;             // that of logits, or a 16-bit one for float32 logits
  int64_t grad_stride;
  const int32_t* row_index;  // [rows] or null: the row of grad_logits to write to; -1: none
};

// Replaces logits [rows, vocab] by softcap * tanh(logits / softcap). A forward without soft-cap of
// the result has the bits of one with it.
struct SoftCap {
  float* logits;       // inner stride 1
  int64_t row_stride;  // elements
  int64_t rows, vocab;
  float softcap;
  int num_threads;
};

// The CUDA forward reduces this many columns of a row at a time (slices.h).
constexpr int64_t kSliceColumns = 4096;
HE_HOST_DEVICE int64_t num_slices(int64_t vocab) {
  return (vocab + kSliceColumns - 1) / kSliceColumns;
}

HE_CPU_KERNEL(log_prob_forward_cpu, LogProbForward)
HE_CPU_KERNEL(log_prob_backward_cpu, LogProbBackward)
HE_CPU_KERNEL(soft_cap_cpu, SoftCap)

int log_prob_forward_cuda(const LogProbForward& params, void* stream);
int log_prob_backward_cuda(const LogProbBackward& params, void* stream);

}  // namespace hybridengine
