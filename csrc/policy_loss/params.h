// Policy loss: loss, gradient and metrics of packed tokens in one pass.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "policy_loss/terms.h"

namespace hybridengine {

// The weight of an unmasked token in the loss, in the order of LOSS_AGG_MODES in
// kernels/_aggregation.py.
enum class LossAggMode : int32_t {
  token_mean,
  token_sum,
  seq_mean_token_sum,
  seq_mean_token_mean,
  seq_mean_token_sum_norm
};

// Columns of the sums: the first three are weighted like the loss, the next four divided by the
// global number of tokens. In the order of _METRICS in kernels/policy_loss/op.py.
enum PolicyLossSum {
  kPgLoss,
  kKlLoss,
  kEntropy,
  kClipped,
  kClippedLower,
  kPpoKl,
  kRatio,
  kRatioMax,
  kNumSums
};

// Rows of token_terms; the loss is that with KL and entropy.
enum TokenTerm { kTokenLoss, kTokenKl, kTokenRatio, kNumTokenTerms };

// Statistics of a sequence that its tokens need.
struct SequenceStats {
  float length;     // unmasked tokens
  float log_ratio;  // mean token log-ratio (gspo, seq_sapo), mean clipped one (gmpo)
  float advantage;  // mean advantage (gmpo)
  float is_weight;  // geometric mean of the rollout weights (gmpo)
  float kl;         // mean KL (times a sequence's ratio)
};

struct PolicyLossParams {
  const float* log_probs;  // [num_tokens], as all that follow
  const float* old_log_probs;
  const float* advantages;
  const bool* mask;             // or null: no token is masked
  const bool* selected;         // clip_cov, kl_cov
  const float* ref_log_probs;   // or null: no KL
  const float* entropy;         // or null
  const float* is_weights;      // or null
  const int32_t* cu_seqlens;    // [num_sequences + 1] or null
  const float* seq_num_tokens;  // [num_sequences]: seq_mean_token_mean divides by it; null: counted
  int64_t num_tokens;
  int64_t num_sequences;
  LossMode mode;
  LossAggMode agg_mode;
  TokenLossOptions options;
  KlOptions kl;
  float kl_coef;
  float entropy_coeff;
  float loss_scale_factor;
  double global_num_tokens;       // NaN: counted here
  double global_num_seqs;         // seq-mean modes; NaN: counted here
  const double* global_counts;    // [2] or null: the two numbers in memory, in place of those above
  SequenceStats* sequence_stats;  // scratch [num_sequences], where needs_sequence_pass()
  int32_t* token_counts;          // CUDA scratch [num_chunks], where needs_count_pass()
  double* partials;               // scratch [num_chunks][kNumSums]
  float* loss;                    // [1]
  float* metrics;                 // [kNumSums]
  float* gradient;                // [num_tokens] or null
  float* entropy_gradient;        // [num_tokens] or null
  float* token_terms;             // [kNumTokenTerms][num_tokens] or null; 0 where masked
  bool* token_clips;              // [2][num_tokens] or null: clipped, clipped_lower
  int num_threads;
};

// What divides the sums.
struct Denominators {
  double num_tokens, num_seqs;
};

// Tokens per row of partials: fixed, so that sums do not depend on the number of threads.
inline constexpr int64_t kCpuChunk = 16384, kCudaChunk = 2048;

HE_HOST_DEVICE bool needs_sequence_stats(const PolicyLossParams& p) {
  return has_sequence_ratio(p.mode) || p.mode == LossMode::gmpo ||
         p.agg_mode == LossAggMode::seq_mean_token_mean;
}

HE_HOST_DEVICE bool by_sequences(const PolicyLossParams& p) {
  return p.agg_mode != LossAggMode::token_mean && p.agg_mode != LossAggMode::token_sum;
}

HE_HOST_DEVICE bool counts_tokens(const PolicyLossParams& p) {
  return p.global_num_tokens != p.global_num_tokens;
}

HE_HOST_DEVICE bool counts_seqs(const PolicyLossParams& p) {
  return by_sequences(p) && p.global_num_seqs != p.global_num_seqs;
}

// Whether statistics of the sequences are computed: for their tokens, or to count sequences.
HE_HOST_DEVICE bool needs_sequence_pass(const PolicyLossParams& p) {
  return needs_sequence_stats(p) || counts_seqs(p);
}

// Whether unmasked tokens are counted in a pass of their own.
HE_HOST_DEVICE bool needs_count_pass(const PolicyLossParams& p) {
  return counts_tokens(p) && p.mask && !needs_sequence_pass(p);
}

// The given numbers, or those counted; at least 1.
HE_HOST_DEVICE Denominators denominators(const PolicyLossParams& p, const Denominators& counted) {
  double tokens = p.global_counts ? p.global_counts[0] : p.global_num_tokens;
  double seqs = p.global_counts ? p.global_counts[1] : p.global_num_seqs;
  if (counts_tokens(p)) tokens = p.mask ? counted.num_tokens : static_cast<double>(p.num_tokens);
  if (counts_seqs(p)) seqs = counted.num_seqs;
  return Denominators{tokens > 1 ? tokens : 1, seqs > 1 ? seqs : 1};
}

// The first sequence that ends after token t; num_sequences if there is none.
HE_HOST_DEVICE int64_t find_sequence(const PolicyLossParams& p, int64_t t) {
  int64_t low = 0, high = p.num_sequences;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (p.cu_seqlens[middle + 1] > t)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// The number of tokens that divides the losses of sequence n, which has `length` unmasked here.
HE_HOST_DEVICE float divisor(const PolicyLossParams& p, int64_t n, float length) {
  return p.seq_num_tokens ? p.seq_num_tokens[n] : length;
}

// The weight of the unmasked tokens of a sequence with `length` of them.
HE_HOST_DEVICE float token_weight(const PolicyLossParams& p, const Denominators& counts,
                                  float length) {
  switch (p.agg_mode) {
    case LossAggMode::token_mean:
      return static_cast<float>(1 / counts.num_tokens);
    case LossAggMode::token_sum:
      return 1;
    case LossAggMode::seq_mean_token_sum:
      return static_cast<float>(1 / counts.num_seqs);
    case LossAggMode::seq_mean_token_mean:
      return static_cast<float>(1 / (counts.num_seqs * (length > 1 ? length : 1)));
    case LossAggMode::seq_mean_token_sum_norm:
      return static_cast<float>(1 / (counts.num_seqs * p.loss_scale_factor));
  }
  return 0;
}

// Writes the loss and the metrics from the totals, which are in PolicyLossSum order.
HE_HOST_DEVICE void finish_sums(const PolicyLossParams& p, const Denominators& counts,
                                const double* totals) {
  const double loss = totals[kPgLoss] + (p.ref_log_probs ? p.kl_coef * totals[kKlLoss] : 0) -
                      (p.entropy ? p.entropy_coeff * totals[kEntropy] : 0);
  *p.loss = static_cast<float>(loss);
  for (int i = 0; i < kNumSums; ++i) {
    const bool per_token = i >= kClipped && i <= kRatio;
    p.metrics[i] = static_cast<float>(per_token ? totals[i] / counts.num_tokens : totals[i]);
  }
}

HE_CPU_KERNEL(policy_loss_cpu, PolicyLossParams)

int policy_loss_cuda(const PolicyLossParams& params, void* stream);  // returns a cudaError_t

}  // namespace hybridengine
