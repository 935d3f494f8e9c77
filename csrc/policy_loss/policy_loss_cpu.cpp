// Policy loss on the CPU: chunks of tokens, a vector at a time, every input read once (the
// sequence modes read log-probs and advantages once more, for the means of their sequences).
#include <cmath>
#include <cstring>

#include "common/parallel.h"
#include "common/simd.h"
#include "policy_loss/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kBlock = 1024;  // tokens summed in float32 before float64 takes over

struct VectorOps {
  using F = VecF;
  using M = VecI;
  static F set(float x) { return splat(x); }
  static F select(M mask, F yes, F no) { return mask ? yes : no; }
  static F clamp(F x, float low, float high) { return at_least(low, at_most(high, x)); }
  static F exp(F x) { return HYBRIDENGINE_ISA::exp(x); }
  static F log(F x) { return HYBRIDENGINE_ISA::log(x); }
};

typedef uint8_t VecB __attribute__((vector_size(kWidth)));

// GCC widens bytes one at a time.
VecI widened(VecB bytes) {
#if defined(__AVX512F__)
  return (VecI)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
  return (VecI)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&bytes)));
#else
  return __builtin_convertvector(bytes, VecI);
#endif
}

// `whole`: all kWidth lanes, known to the compiler; else the `count` tokens that end a run.
template <bool whole>
VecF load_some(const float* p, int64_t count) {
  return whole ? load(p) : load_part(p, count, 0);
}

template <bool whole>
void store_some(float* p, VecF v, int64_t count) {
  if (whole) return store(p, v);
  store_part(p, v, count);
}

template <bool whole>
VecI load_mask(const bool* p, int64_t count) {
  VecB bytes{};
  std::memcpy(&bytes, p, whole ? kWidth : count);
  return widened(bytes) != 0;
}

VecI first_lanes(int64_t count) {
  VecI lane;
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  return lane < static_cast<int32_t>(count);
}

// What a run of tokens of one sequence shares.
struct Run {
  int64_t begin, end;
  float weight;
  SegmentStats segment;
};

struct Lanes {
  VecI minus_clipped, minus_clipped_lower;  // a mask is -1 where it holds
  VecF ppo_kl, ratio, pg, kl, entropy;
};

template <LossMode mode, bool whole>
Token<VectorOps> load_token(const PolicyLossParams& p, int64_t t, int64_t count, VecI keep,
                            const SegmentStats& segment) {
  const VecF zero = splat(0);
  Token<VectorOps> token;
  token.log_prob = select(keep, load_some<whole>(p.log_probs + t, count), zero);
  token.old_log_prob = select(keep, load_some<whole>(p.old_log_probs + t, count), zero);
  token.advantage = select(keep, load_some<whole>(p.advantages + t, count), zero);
  token.segment_log_ratio = splat(segment.log_ratio);
  token.segment_advantage = splat(segment.advantage);
  constexpr bool selects = mode == LossMode::clip_cov || mode == LossMode::kl_cov;
  token.selected = selects ? load_mask<whole>(p.selected + t, count) & keep : VecI{};
  return token;
}

template <bool whole>
VecI kept_lanes(const PolicyLossParams& p, int64_t t, int64_t count) {
  const VecI keep = p.mask ? load_mask<whole>(p.mask + t, count) : ~VecI{};
  return whole ? keep : keep & first_lanes(count);
}

template <LossMode mode, bool whole>
void visit(const PolicyLossParams& p, const TokenLossOptions& options, const Run& run, int64_t t,
           int64_t count, Lanes& lanes, VecF& ratio_max) {
  const VecF zero = splat(0), one = splat(1);
  const VecI keep = kept_lanes<whole>(p, t, count);
  const Token<VectorOps> token = load_token<mode, whole>(p, t, count, keep, run.segment);
  const TokenTerms<VectorOps> terms = token_loss<mode, VectorOps>(token, options);
  VecF is_weight = one;
  if (p.is_weights)
    is_weight = mode == LossMode::gmpo
                    ? splat(run.segment.is_weight)
                    : select(keep, load_some<whole>(p.is_weights + t, count), zero);
  lanes.pg += select(keep, terms.loss * is_weight, zero);
  lanes.minus_clipped += keep & terms.clipped;
  lanes.minus_clipped_lower += keep & terms.clipped_lower;
  lanes.ppo_kl -= select(keep, terms.log_ratio, zero);
  const VecF ratio = select(keep, terms.ratio, zero);
  lanes.ratio += ratio;
  ratio_max = max(ratio, ratio_max);
  VecF gradient = terms.gradient * is_weight;
  if (p.ref_log_probs) {
    const VecF ref = select(keep, load_some<whole>(p.ref_log_probs + t, count), zero);
    const KlTerms<VectorOps> kl =
        token_kl<VectorOps>(p.kl_type, p.kl_straight_through, token.log_prob, ref);
    lanes.kl += select(keep, kl.value, zero);
    gradient += p.kl_coef * kl.gradient;
  }
  if (p.entropy) lanes.entropy += select(keep, load_some<whole>(p.entropy + t, count), zero);
  if (p.gradient)
    store_some<whole>(p.gradient + t, select(keep, gradient * run.weight, zero), count);
  if (p.entropy_gradient)
    store_some<whole>(p.entropy_gradient + t,
                      select(keep, splat(-p.entropy_coeff * run.weight), zero), count);
}

template <LossMode mode>
void visit_run(const PolicyLossParams& p, const Run& run, double* totals) {
  const TokenLossOptions options = p.options;  // a copy that no store of a gradient can change
  VecF ratio_max{};
  for (int64_t block = run.begin; block < run.end; block += kBlock) {
    const int64_t end = block + kBlock < run.end ? block + kBlock : run.end;
    Lanes lanes{};
    int64_t t = block;
    for (; t + kWidth <= end; t += kWidth)
      visit<mode, true>(p, options, run, t, kWidth, lanes, ratio_max);
    if (t < end) visit<mode, false>(p, options, run, t, end - t, lanes, ratio_max);
    totals[kPgLoss] += run.weight * sum(lanes.pg);
    totals[kKlLoss] += run.weight * sum(lanes.kl);
    totals[kEntropy] += run.weight * sum(lanes.entropy);
    totals[kClipped] -= sum(__builtin_convertvector(lanes.minus_clipped, VecF));
    totals[kClippedLower] -= sum(__builtin_convertvector(lanes.minus_clipped_lower, VecF));
    totals[kPpoKl] += sum(lanes.ppo_kl);
    totals[kRatio] += sum(lanes.ratio);
  }
  // Ratios are positive, so a zero is a masked token's; a NaN is in the sum.
  const float most = largest(ratio_max);
  if (most > totals[kRatioMax] && most > 0) totals[kRatioMax] = most;
  if (std::isnan(totals[kRatio])) totals[kRatioMax] = NAN;
}

// The first sequence that ends after token t.
int64_t find_sequence(const PolicyLossParams& p, int64_t t) {
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

template <LossMode mode>
void visit_chunk(const PolicyLossParams& p, int64_t begin, int64_t end, double* totals) {
  for (int i = 0; i < kNumSums; ++i) totals[i] = 0;
  totals[kRatioMax] = -INFINITY;
  if (!needs_segments(p)) {
    visit_run<mode>(p, Run{begin, end, token_weight(p, 1), SegmentStats{}}, totals);
    return;
  }
  for (int64_t n = find_sequence(p, begin); begin < end; ++n) {
    const bool past_end = n >= p.num_sequences;  // tokens that belong to no sequence
    const int64_t stop = past_end || p.cu_seqlens[n + 1] > end ? end : p.cu_seqlens[n + 1];
    const SegmentStats segment = past_end ? SegmentStats{} : p.segments[n];
    const float weight = past_end ? 0 : token_weight(p, segment.count);
    visit_run<mode>(p, Run{begin, stop, weight, segment}, totals);
    begin = stop;
  }
}

struct SegmentLanes {
  VecI minus_count;
  VecF log_ratio, advantage, log_weight;
};

template <LossMode mode, bool whole>
void add_tokens(const PolicyLossParams& p, int64_t t, int64_t left, SegmentLanes& lanes) {
  const VecI keep = kept_lanes<whole>(p, t, left);
  lanes.minus_count += keep;
  if (mode != LossMode::gspo && mode != LossMode::gmpo) return;
  const auto token = load_token<mode, whole>(p, t, left, keep, SegmentStats{});
  const VecF x =
      mode == LossMode::gmpo ? gmpo_log_ratio(token, p.options) : clamped_log_ratio(token);
  lanes.log_ratio += select(keep, x, splat(0));
  if (mode != LossMode::gmpo) return;
  lanes.advantage += token.advantage;
  if (!p.is_weights) return;
  const VecF weight = select(keep, load_some<whole>(p.is_weights + t, left), splat(1));
  lanes.log_weight += select(keep, VectorOps::log(weight + 1e-10f), splat(0));
}

template <LossMode mode>
SegmentStats segment_stats(const PolicyLossParams& p, int64_t begin, int64_t end) {
  double count = 0, log_ratio = 0, advantage = 0, log_weight = 0;
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t stop = block + kBlock < end ? block + kBlock : end;
    SegmentLanes lanes{};
    int64_t t = block;
    for (; t + kWidth <= stop; t += kWidth) add_tokens<mode, true>(p, t, kWidth, lanes);
    if (t < stop) add_tokens<mode, false>(p, t, stop - t, lanes);
    count -= sum(__builtin_convertvector(lanes.minus_count, VecF));
    log_ratio += sum(lanes.log_ratio);
    advantage += sum(lanes.advantage);
    log_weight += sum(lanes.log_weight);
  }
  const double n = count > 1 ? count : 1;
  return SegmentStats{static_cast<float>(count), static_cast<float>(log_ratio / n),
                      static_cast<float>(advantage / n),
                      static_cast<float>(std::exp(log_weight / n))};
}

template <LossMode mode>
void run(const PolicyLossParams& p) {
  if (needs_segments(p)) {
    const int64_t grain = kCpuChunk * p.num_sequences / (p.num_tokens + 1) + 1;
    parallel_for(p.num_sequences, grain, p.num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        p.segments[n] = segment_stats<mode>(p, p.cu_seqlens[n], p.cu_seqlens[n + 1]);
    });
  }
  const int64_t chunks = (p.num_tokens + kCpuChunk - 1) / kCpuChunk;
  parallel_for(chunks, 1, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * kCpuChunk, last = first + kCpuChunk;
      visit_chunk<mode>(p, first, last < p.num_tokens ? last : p.num_tokens,
                        p.partials + chunk * kNumSums);
    }
  });
  double totals[kNumSums] = {};
  totals[kRatioMax] = -INFINITY;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const double* part = p.partials + chunk * kNumSums;
    for (int i = 0; i < kRatioMax; ++i) totals[i] += part[i];
    if (!(part[kRatioMax] <= totals[kRatioMax])) totals[kRatioMax] = part[kRatioMax];
  }
  finish_sums(p, totals);
}

}  // namespace

void policy_loss_cpu(const PolicyLossParams& p) {
  switch (p.mode) {
    case LossMode::ppo_clip:
      return run<LossMode::ppo_clip>(p);
    case LossMode::gspo:
      return run<LossMode::gspo>(p);
    case LossMode::gmpo:
      return run<LossMode::gmpo>(p);
    case LossMode::cispo:
      return run<LossMode::cispo>(p);
    case LossMode::sapo:
      return run<LossMode::sapo>(p);
    case LossMode::dppo_tv:
      return run<LossMode::dppo_tv>(p);
    case LossMode::dppo_kl:
      return run<LossMode::dppo_kl>(p);
    case LossMode::clip_cov:
      return run<LossMode::clip_cov>(p);
    case LossMode::kl_cov:
      return run<LossMode::kl_cov>(p);
    case LossMode::reinforce:
      return run<LossMode::reinforce>(p);
  }
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
