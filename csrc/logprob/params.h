// Per-row log-probability, entropy and their gradient from logits [rows, vocab].
//
// A logit x becomes y = softcap * tanh(logit_scale * x / softcap) (just x without a soft-cap), and
// z = y * factor with factor = 1 / temperature (logit_scale / temperature without a soft-cap).
// p = softmax(z). Everything is computed from z - max(z), never from z itself: rows around -1e4
// are as exact as rows around 0.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace hybridengine {

// What both directions read.
struct LogitRows {
  const void* logits;  // [rows, vocab], inner stride 1
  int64_t row_stride;  // elements
  int64_t rows;
  int64_t vocab;
  DType dtype;
  const int64_t* token_ids;  // [rows], counted over the whole vocabulary
  int64_t ignore_index;      // such a row is not read; its outputs and gradients are 0
  // Where the vocabulary is split over ranks: [2], the first id of this slice and the size of the
  // whole vocabulary, beside the logits in memory; else null.
  const int64_t* vocab_range;
  const uint8_t* keep_mask;  // [rows, vocab] or null: 0 removes an entry from the distribution
  int64_t keep_stride;
  const float* temperatures;  // [rows], or null for `temperature`
  float temperature;
  float logit_scale;
  float softcap;  // 0: none
  int num_threads;
};

struct LogProbForward : LogitRows {
  float* log_probs;  // [rows]
  float* entropy;
  float* row_max;        // max of y; a reference near it in a row without options (plain_row.h)
  float* log_sum;        // log sum exp(z - that)
  float* sum_p_squared;  // or null
  // Vocabulary-parallel: where not null only this is written, [rows, 5]:
  // max y, sum e, sum e*d, y of the token (-inf: not in this slice), sum e^2, with
  // d = z - max z, e = exp(d), and the sums over all entries but the token.
  float* partial;
  int32_t* bad_label;  // device path: set to 1 when a label is out of range (its row becomes NaN)
};

struct LogProbBackward : LogitRows {
  const float* log_probs;
  const float* entropy;
  const float* row_max;
  const float* log_sum;
  const float* grad_log_probs;  // [rows] or null
  const float* grad_entropy;    // [rows] or null
  void* grad_logits;            // may be logits itself
  DType grad_dtype;             // that of logits, or 16-bit beside float32 logits
  int64_t grad_stride;
  const int32_t* places;  // [rows] of grad_logits, -1 for a row that is not written; or null
};

HE_CPU_KERNEL(log_prob_forward_cpu, LogProbForward)
HE_CPU_KERNEL(log_prob_backward_cpu, LogProbBackward)

int log_prob_forward_cuda(const LogProbForward& params, void* stream);
int log_prob_backward_cuda(const LogProbBackward& params, void* stream);

}  // namespace hybridengine
