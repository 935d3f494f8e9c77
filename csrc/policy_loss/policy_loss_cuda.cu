// Policy loss on CUDA: one launch for the statistics of the sequences or the number of tokens where
// they are needed, one for the tokens, and one block that adds the partial sums in a fixed order.
#include <cuda_runtime.h>

#include <cmath>

#include "common/sequence_bounds.h"
#include "policy_loss/params.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

__device__ double block_sum(double value) {
  __shared__ double partial[kWarps];
  for (int offset = 16; offset; offset /= 2) value += __shfl_down_sync(kFullWarp, value, offset);
  __syncthreads();  // the reads of the previous call are done
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += partial[w];
  return sum;
}

// NaN wins, as it does in torch.max.
__device__ float larger(float a, float b) { return a >= b || a != a ? a : b; }

__device__ float block_max(float value) {
  __shared__ float partial[kWarps];
  for (int offset = 16; offset; offset /= 2)
    value = larger(value, __shfl_down_sync(kFullWarp, value, offset));
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float result = partial[0];
  for (int w = 1; w < kWarps; ++w) result = larger(result, partial[w]);
  return result;
}

template <LossMode mode>
__device__ Token<ScalarOps> load_token(const PolicyLossParams& p, int64_t t,
                                       const SequenceStats& sequence) {
  constexpr bool selects = mode == LossMode::clip_cov || mode == LossMode::kl_cov;
  return Token<ScalarOps>{p.log_probs[t],     p.old_log_probs[t], p.advantages[t],
                          sequence.log_ratio, sequence.advantage, selects && p.selected[t]};
}

template <LossMode mode>
__global__ void __launch_bounds__(kThreads) sequence_kernel(PolicyLossParams p) {
  const int64_t begin = bounded_entry(p.cu_seqlens[blockIdx.x], p.num_tokens);
  const int64_t end = bounded_entry(p.cu_seqlens[blockIdx.x + 1], p.num_tokens);
  double count = 0, log_ratio = 0, advantage = 0, log_weight = 0, kl = 0;
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) {
    if (p.mask && !p.mask[t]) continue;
    count += 1;
    if (!has_sequence_ratio(mode) && mode != LossMode::gmpo) continue;
    const Token<ScalarOps> token = load_token<mode>(p, t, SequenceStats{});
    log_ratio +=
        mode == LossMode::gmpo ? gmpo_log_ratio(token, p.options) : clamped_log_ratio(token);
    if (has_sequence_ratio(mode) && p.ref_log_probs && p.kl.times_ratio)
      kl += token_kl<ScalarOps>(p.kl, token.log_prob, p.ref_log_probs[t]).value;
    advantage += token.advantage;
    if (mode == LossMode::gmpo && p.is_weights) log_weight += logf(p.is_weights[t] + 1e-10f);
  }
  count = block_sum(count);
  const double n = count > 1 ? count : 1;
  const SequenceStats stats{static_cast<float>(count), static_cast<float>(block_sum(log_ratio) / n),
                            static_cast<float>(block_sum(advantage) / n),
                            static_cast<float>(exp(block_sum(log_weight) / n)),
                            static_cast<float>(block_sum(kl) / n)};
  if (threadIdx.x == 0) p.sequence_stats[blockIdx.x] = stats;
}

// One block per chunk of tokens.
__global__ void __launch_bounds__(kThreads) count_kernel(PolicyLossParams p) {
  const int64_t begin = blockIdx.x * kCudaChunk;
  const int64_t end = begin + kCudaChunk < p.num_tokens ? begin + kCudaChunk : p.num_tokens;
  int count = 0;
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) count += p.mask[t];
  const double total = block_sum(count);
  if (threadIdx.x == 0) p.token_counts[blockIdx.x] = static_cast<int32_t>(total);
}

// Every block adds up the counts itself.
__device__ Denominators block_denominators(const PolicyLossParams& p) {
  double tokens = 0, seqs = 0;
  if (counts_tokens(p) || counts_seqs(p)) {
    if (needs_sequence_pass(p)) {
      for (int64_t n = threadIdx.x; n < p.num_sequences; n += kThreads) {
        const float length = p.sequence_stats[n].length;
        tokens += length;
        seqs += length > 0;
      }
    } else if (needs_count_pass(p)) {
      const int64_t chunks = (p.num_tokens + kCudaChunk - 1) / kCudaChunk;
      for (int64_t i = threadIdx.x; i < chunks; i += kThreads) tokens += p.token_counts[i];
    }
    tokens = block_sum(tokens);
    seqs = block_sum(seqs);
  }
  return denominators(p, Denominators{tokens, seqs});
}

struct Sums {
  float pg, kl, entropy, clipped, clipped_lower, ppo_kl, ratio, ratio_max;
};

template <LossMode mode>
__device__ void visit(const PolicyLossParams& p, int64_t t, float weight,
                      const SequenceStats& sequence, Sums& sums) {
  const Token<ScalarOps> token = load_token<mode>(p, t, sequence);
  const TokenTerms<ScalarOps> terms = token_loss<mode, ScalarOps>(token, p.options);
  float is_weight = 1;
  if (p.is_weights) is_weight = mode == LossMode::gmpo ? sequence.is_weight : p.is_weights[t];
  sums.pg += weight * (terms.loss * is_weight);
  sums.clipped += terms.clipped;
  sums.clipped_lower += terms.clipped_lower;
  sums.ppo_kl -= terms.log_ratio;
  sums.ratio += terms.ratio;
  sums.ratio_max = larger(terms.ratio, sums.ratio_max);
  float gradient = terms.gradient * is_weight, kl_value = 0;
  if (p.ref_log_probs) {
    KlTerms<ScalarOps> kl = token_kl<ScalarOps>(p.kl, token.log_prob, p.ref_log_probs[t]);
    if (p.kl.times_ratio)
      kl = times_ratio<ScalarOps>(kl, has_sequence_ratio(mode) ? sequence.kl : kl.value, terms);
    kl_value = kl.value;
    sums.kl += weight * kl.value;
    gradient += p.kl_coef * kl.gradient;
  }
  const float entropy = p.entropy ? p.entropy[t] : 0;
  sums.entropy += weight * entropy;
  if (p.gradient) p.gradient[t] = gradient * weight;
  if (p.entropy_gradient) p.entropy_gradient[t] = -p.entropy_coeff * weight;
  if (!p.token_terms) return;
  const float loss = terms.loss * is_weight + p.kl_coef * kl_value - p.entropy_coeff * entropy;
  p.token_terms[kTokenLoss * p.num_tokens + t] = loss;
  p.token_terms[kTokenKl * p.num_tokens + t] = kl_value;
  p.token_terms[kTokenRatio * p.num_tokens + t] = terms.ratio;
  p.token_clips[t] = terms.clipped;
  p.token_clips[p.num_tokens + t] = terms.clipped_lower;
}

// The results of a masked token.
__device__ void clear(const PolicyLossParams& p, int64_t t) {
  if (p.gradient) p.gradient[t] = 0;
  if (p.entropy_gradient) p.entropy_gradient[t] = 0;
  if (!p.token_terms) return;
  for (int i = 0; i < kNumTokenTerms; ++i) p.token_terms[i * p.num_tokens + t] = 0;
  p.token_clips[t] = p.token_clips[p.num_tokens + t] = false;
}

template <LossMode mode>
__global__ void __launch_bounds__(kThreads)
    token_kernel(const __grid_constant__ PolicyLossParams p) {
  const bool by_sequence = needs_sequence_stats(p);
  const Denominators counts = block_denominators(p);
  const int64_t begin = blockIdx.x * kCudaChunk;
  const int64_t end = begin + kCudaChunk < p.num_tokens ? begin + kCudaChunk : p.num_tokens;
  Sums sums{0, 0, 0, 0, 0, 0, 0, -INFINITY};
  float weight = by_sequence ? 0 : token_weight(p, counts, 1);
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) {
    SequenceStats sequence{};
    bool unmasked = !p.mask || p.mask[t];
    if (by_sequence && unmasked) {
      const int64_t n = find_sequence(p, t);
      unmasked = n < p.num_sequences;  // else the token belongs to no sequence
      if (unmasked) {
        sequence = p.sequence_stats[n];
        weight = token_weight(p, counts, divisor(p, n, sequence.length));
      }
    }
    if (unmasked) {
      visit<mode>(p, t, weight, sequence, sums);
    } else {
      clear(p, t);
    }
  }
  double* partial = p.partials + blockIdx.x * kNumSums;
  const float values[] = {sums.pg,     sums.kl,   sums.entropy, sums.clipped, sums.clipped_lower,
                          sums.ppo_kl, sums.ratio};
#pragma unroll
  for (int i = 0; i < kRatioMax; ++i) {
    const double total = block_sum(values[i]);
    if (threadIdx.x == 0) partial[i] = total;
  }
  const float ratio_max = block_max(sums.ratio_max);
  if (threadIdx.x == 0) partial[kRatioMax] = ratio_max;
}

__global__ void __launch_bounds__(kThreads) finish_kernel(PolicyLossParams p, int64_t chunks) {
  const Denominators counts = block_denominators(p);
  double totals[kNumSums];
#pragma unroll
  for (int i = 0; i < kNumSums; ++i) {
    double sum = 0;
    float max_value = -INFINITY;
    for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += kThreads) {
      const double value = p.partials[chunk * kNumSums + i];
      sum += value;
      max_value = larger(static_cast<float>(value), max_value);
    }
    totals[i] = i == kRatioMax ? block_max(max_value) : block_sum(sum);
  }
  if (threadIdx.x == 0) finish_sums(p, counts, totals);
}

template <LossMode mode>
int launch(const PolicyLossParams& p, cudaStream_t stream) {
  const int64_t chunks = (p.num_tokens + kCudaChunk - 1) / kCudaChunk;
  if (needs_sequence_pass(p) && p.num_sequences > 0)
    sequence_kernel<mode><<<static_cast<unsigned>(p.num_sequences), kThreads, 0, stream>>>(p);
  if (needs_count_pass(p) && chunks > 0)
    count_kernel<<<static_cast<unsigned>(chunks), kThreads, 0, stream>>>(p);
  if (chunks > 0) token_kernel<mode><<<static_cast<unsigned>(chunks), kThreads, 0, stream>>>(p);
  finish_kernel<<<1, kThreads, 0, stream>>>(p, chunks);
  return cudaGetLastError();
}

}  // namespace

int policy_loss_cuda(const PolicyLossParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  switch (p.mode) {
    case LossMode::ppo_clip:
      return launch<LossMode::ppo_clip>(p, s);
    case LossMode::gspo:
      return launch<LossMode::gspo>(p, s);
    case LossMode::gmpo:
      return launch<LossMode::gmpo>(p, s);
    case LossMode::cispo:
      return launch<LossMode::cispo>(p, s);
    case LossMode::sapo:
      return launch<LossMode::sapo>(p, s);
    case LossMode::dppo_tv:
      return launch<LossMode::dppo_tv>(p, s);
    case LossMode::dppo_kl:
      return launch<LossMode::dppo_kl>(p, s);
    case LossMode::clip_cov:
      return launch<LossMode::clip_cov>(p, s);
    case LossMode::kl_cov:
      return launch<LossMode::kl_cov>(p, s);
    case LossMode::reinforce:
      return launch<LossMode::reinforce>(p, s);
    case LossMode::dro:
      return launch<LossMode::dro>(p, s);
    case LossMode::seq_sapo:
      return launch<LossMode::seq_sapo>(p, s);
    case LossMode::value:
      return launch<LossMode::value>(p, s);
  }
  return cudaErrorInvalidValue;
}

}  // namespace hybridengine
