// Policy loss on the CPU: chunks of tokens, a vector at a time, every input read once. The sequence
// modes first read log-probs and advantages for the means of the sequences.
#include <cmath>
#include <cstring>

#include "common/parallel.h"
#include "common/simd.h"
#include "policy_loss/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kBlock = 1024;  // tokens summed in float32, then added in float64

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

void store_mask(bool* p, VecI mask) {
  for (int64_t i = 0; i < kWidth; ++i) p[i] = mask[i] != 0;
}

VecI load_mask(const bool* p) {
  VecB bytes;
  std::memcpy(&bytes, p, kWidth);
  return widened(bytes) != 0;
}

// The last tokens of a run, fewer than a vector, as a vector whose other lanes are masked: the
// kernels are compiled for whole vectors alone.
class Tail {
 public:
  // The parameters with tokens [t, t + count) as tokens [0, kWidth).
  [[gnu::noinline]] const PolicyLossParams& load(const PolicyLossParams& p, int64_t t,
                                                 int64_t count) {
    tail_ = p;
    tail_.num_tokens = kWidth;
    std::memset(floats_, 0, sizeof floats_);
    std::memset(bools_, 0, sizeof bools_);
    float* floats = floats_;
    for (const float** input : {&tail_.log_probs, &tail_.old_log_probs, &tail_.advantages,
                                &tail_.ref_log_probs, &tail_.entropy, &tail_.is_weights}) {
      if (*input) *input = copy(*input + t, count, floats);
      floats += kWidth;
    }
    if (p.gradient) tail_.gradient = floats;
    if (p.entropy_gradient) tail_.entropy_gradient = floats + kWidth;
    if (p.token_terms) tail_.token_terms = floats + 2 * kWidth;
    if (p.token_clips) tail_.token_clips = bools_ + 2 * kWidth;
    if (p.selected) tail_.selected = copy(p.selected + t, count, bools_ + kWidth);
    std::memset(bools_, 1, count);
    tail_.mask = p.mask ? copy(p.mask + t, count, bools_) : bools_;
    return tail_;
  }

  // Writes what was computed of the tokens [t, t + count).
  [[gnu::noinline]] void store(const PolicyLossParams& p, int64_t t, int64_t count) const {
    if (p.gradient) copy(tail_.gradient, count, p.gradient + t);
    if (p.entropy_gradient) copy(tail_.entropy_gradient, count, p.entropy_gradient + t);
    for (int64_t i = 0; p.token_terms && i < kNumTokenTerms; ++i)
      copy(tail_.token_terms + i * kWidth, count, p.token_terms + i * p.num_tokens + t);
    for (int64_t i = 0; p.token_clips && i < 2; ++i)
      copy(tail_.token_clips + i * kWidth, count, p.token_clips + i * p.num_tokens + t);
  }

 private:
  template <typename T>
  static T* copy(const T* from, int64_t count, T* to) {
    std::memcpy(to, from, count * sizeof(T));
    return to;
  }

  PolicyLossParams tail_;
  float floats_[(8 + kNumTokenTerms) * kWidth];
  bool bools_[4 * kWidth];
};

// Calls body(parameters, t) for the vectors of tokens [begin, end), from one place: it is inlined.
template <bool writes, typename Body>
HE_SIMD void for_vectors(const PolicyLossParams& p, int64_t begin, int64_t end, const Body& body) {
  Tail tail;
  for (int64_t t = begin; t < end; t += kWidth) {
    const bool whole = t + kWidth <= end;
    body(whole ? p : tail.load(p, t, end - t), whole ? t : 0);
    if (writes && !whole) tail.store(p, t, end - t);
  }
}

// Consecutive tokens of one sequence, or of any where no statistics are needed.
struct Run {
  int64_t begin, end;
  float weight;
  SequenceStats sequence;
};

struct Lanes {
  VecI minus_clipped, minus_clipped_lower;  // a mask is -1 where it holds
  VecF ppo_kl, ratio, pg, kl, entropy;
};

template <LossMode mode>
Token<VectorOps> load_token(const PolicyLossParams& p, int64_t t, VecI unmasked,
                            const SequenceStats& sequence) {
  const VecF zero = splat(0);
  Token<VectorOps> token;
  token.log_prob = select(unmasked, load(p.log_probs + t), zero);
  token.old_log_prob = select(unmasked, load(p.old_log_probs + t), zero);
  token.advantage = select(unmasked, load(p.advantages + t), zero);
  token.seq_log_ratio = splat(sequence.log_ratio);
  token.seq_advantage = splat(sequence.advantage);
  constexpr bool selects = mode == LossMode::clip_cov || mode == LossMode::kl_cov;
  token.selected = selects ? load_mask(p.selected + t) & unmasked : VecI{};
  return token;
}

VecI unmasked_lanes(const PolicyLossParams& p, int64_t t) {
  return p.mask ? load_mask(p.mask + t) : ~VecI{};
}

HE_SIMD KlTerms<VectorOps> load_kl(const PolicyLossParams& p, int64_t t, VecI unmasked,
                                   const Token<VectorOps>& token, const KlOptions& options) {
  const VecF ref = select(unmasked, load(p.ref_log_probs + t), splat(0));
  return token_kl<VectorOps>(options, token.log_prob, ref);
}

// What of a token is computed: run-time options in the loop over tokens take time. In `pg_and_kl`
// the clamps of the KL are the usual ones.
enum class Parts { pg, pg_and_kl, all };

constexpr float kInputClamp = 20, kOutputClamp = 10;

Parts wanted_parts(const PolicyLossParams& p) {
  if (p.token_terms) return Parts::all;
  if (!p.ref_log_probs) return Parts::pg;
  const bool usual = p.kl.input_clamp == kInputClamp && p.kl.output_clamp == kOutputClamp;
  return usual && !p.kl.times_ratio ? Parts::pg_and_kl : Parts::all;
}

template <Parts parts>
KlOptions kl_options(const PolicyLossParams& p) {
  KlOptions options = p.kl;
  if (parts == Parts::pg_and_kl) {  // constants to the compiler
    options.input_clamp = kInputClamp;
    options.output_clamp = kOutputClamp;
  }
  return options;
}

template <LossMode mode, Parts parts>
void visit(const PolicyLossParams& p, const TokenLossOptions& options, const Run& run, int64_t t,
           Lanes& lanes, VecF& ratio_max) {
  const VecF zero = splat(0), one = splat(1);
  const VecI unmasked = unmasked_lanes(p, t);
  const Token<VectorOps> token = load_token<mode>(p, t, unmasked, run.sequence);
  const TokenTerms<VectorOps> terms = token_loss<mode, VectorOps>(token, options);
  VecF is_weight = one;
  if (p.is_weights)
    is_weight = mode == LossMode::gmpo ? splat(run.sequence.is_weight)
                                       : select(unmasked, load(p.is_weights + t), zero);
  const VecF pg = select(unmasked, terms.loss * is_weight, zero);
  lanes.pg += pg;
  lanes.minus_clipped += unmasked & terms.clipped;
  lanes.minus_clipped_lower += unmasked & terms.clipped_lower;
  lanes.ppo_kl -= select(unmasked, terms.log_ratio, zero);
  const VecF ratio = select(unmasked, terms.ratio, zero);
  lanes.ratio += ratio;
  ratio_max = max(ratio, ratio_max);
  VecF gradient = terms.gradient * is_weight, kl_value = zero, entropy = zero;
  if (parts != Parts::pg && p.ref_log_probs) {
    KlTerms<VectorOps> kl = load_kl(p, t, unmasked, token, kl_options<parts>(p));
    if (parts == Parts::all && p.kl.times_ratio) {
      const VecF mean = has_sequence_ratio(mode) ? splat(run.sequence.kl) : kl.value;
      kl = times_ratio<VectorOps>(kl, mean, terms);
    }
    kl_value = select(unmasked, kl.value, zero);
    lanes.kl += kl_value;
    gradient += p.kl_coef * kl.gradient;
  }
  if (p.entropy) {
    entropy = select(unmasked, load(p.entropy + t), zero);
    lanes.entropy += entropy;
  }
  if (p.gradient) store(p.gradient + t, select(unmasked, gradient * run.weight, zero));
  if (p.entropy_gradient)
    store(p.entropy_gradient + t, select(unmasked, splat(-p.entropy_coeff * run.weight), zero));
  if (parts != Parts::all || !p.token_terms) return;
  const VecF loss = pg + p.kl_coef * kl_value - p.entropy_coeff * entropy;
  store(p.token_terms + kTokenLoss * p.num_tokens + t, loss);
  store(p.token_terms + kTokenKl * p.num_tokens + t, kl_value);
  store(p.token_terms + kTokenRatio * p.num_tokens + t, ratio);
  store_mask(p.token_clips + t, unmasked & terms.clipped);
  store_mask(p.token_clips + p.num_tokens + t, unmasked & terms.clipped_lower);
}

template <LossMode mode, Parts parts>
void visit_run(const PolicyLossParams& p, const Run& run, double* totals) {
  const TokenLossOptions options = p.options;  // a copy, which does not alias the gradients
  VecF ratio_max{};
  for (int64_t block = run.begin; block < run.end; block += kBlock) {
    const int64_t end = block + kBlock < run.end ? block + kBlock : run.end;
    Lanes lanes{};
    const auto visit_at = [&](const PolicyLossParams& of, int64_t t) {
      visit<mode, parts>(of, options, run, t, lanes, ratio_max);
    };
    for_vectors<true>(p, block, end, visit_at);
    totals[kPgLoss] += run.weight * sum(lanes.pg);
    totals[kKlLoss] += run.weight * sum(lanes.kl);
    totals[kEntropy] += run.weight * sum(lanes.entropy);
    totals[kClipped] -= sum(__builtin_convertvector(lanes.minus_clipped, VecF));
    totals[kClippedLower] -= sum(__builtin_convertvector(lanes.minus_clipped_lower, VecF));
    totals[kPpoKl] += sum(lanes.ppo_kl);
    totals[kRatio] += sum(lanes.ratio);
  }
  // Ratios are positive: 0 is a masked token. A NaN shows in the sum.
  const float max_ratio = largest(ratio_max);
  if (max_ratio > totals[kRatioMax] && max_ratio > 0) totals[kRatioMax] = max_ratio;
  if (std::isnan(totals[kRatio])) totals[kRatioMax] = NAN;
}

using VisitRun = void (*)(const PolicyLossParams& p, const Run& run, double* totals);

void visit_chunk(const PolicyLossParams& p, VisitRun visit_run, const Denominators& counts,
                 int64_t begin, int64_t end, double* totals) {
  for (int i = 0; i < kNumSums; ++i) totals[i] = 0;
  totals[kRatioMax] = -INFINITY;
  if (!needs_sequence_stats(p)) {
    visit_run(p, Run{begin, end, token_weight(p, counts, 1), SequenceStats{}}, totals);
    return;
  }
  for (int64_t n = find_sequence(p, begin); begin < end; ++n) {
    const bool past_end = n >= p.num_sequences;  // tokens that belong to no sequence
    const int64_t stop = past_end || p.cu_seqlens[n + 1] > end ? end : p.cu_seqlens[n + 1];
    const SequenceStats sequence = past_end ? SequenceStats{} : p.sequence_stats[n];
    const float weight = past_end ? 0 : token_weight(p, counts, divisor(p, n, sequence.length));
    visit_run(p, Run{begin, stop, weight, sequence}, totals);
    begin = stop;
  }
}

struct SequenceLanes {
  VecI minus_count;
  VecF log_ratio, advantage, log_weight, kl;
};

template <LossMode mode>
HE_SIMD void add_tokens(const PolicyLossParams& p, int64_t t, SequenceLanes& lanes) {
  const VecI unmasked = unmasked_lanes(p, t);
  lanes.minus_count += unmasked;
  if (!has_sequence_ratio(mode) && mode != LossMode::gmpo) return;
  const auto token = load_token<mode>(p, t, unmasked, SequenceStats{});
  const VecF x =
      mode == LossMode::gmpo ? gmpo_log_ratio(token, p.options) : clamped_log_ratio(token);
  lanes.log_ratio += select(unmasked, x, splat(0));
  if (has_sequence_ratio(mode) && p.ref_log_probs && p.kl.times_ratio)
    lanes.kl += select(unmasked, load_kl(p, t, unmasked, token, p.kl).value, splat(0));
  if (mode != LossMode::gmpo) return;
  lanes.advantage += token.advantage;
  if (!p.is_weights) return;
  const VecF weight = select(unmasked, load(p.is_weights + t), splat(1));
  lanes.log_weight += select(unmasked, VectorOps::log(weight + 1e-10f), splat(0));
}

template <LossMode mode>
SequenceStats compute_stats(const PolicyLossParams& p, int64_t begin, int64_t end) {
  double count = 0, log_ratio = 0, advantage = 0, log_weight = 0, kl = 0;
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t stop = block + kBlock < end ? block + kBlock : end;
    SequenceLanes lanes{};
    for_vectors<false>(p, block, stop, [&](const PolicyLossParams& of, int64_t t) {
      add_tokens<mode>(of, t, lanes);
    });
    count -= sum(__builtin_convertvector(lanes.minus_count, VecF));
    log_ratio += sum(lanes.log_ratio);
    advantage += sum(lanes.advantage);
    log_weight += sum(lanes.log_weight);
    kl += sum(lanes.kl);
  }
  const double n = count > 1 ? count : 1;
  return SequenceStats{static_cast<float>(count), static_cast<float>(log_ratio / n),
                       static_cast<float>(advantage / n),
                       static_cast<float>(std::exp(log_weight / n)), static_cast<float>(kl / n)};
}

Denominators counted(const PolicyLossParams& p) {
  Denominators counts{};
  if (needs_sequence_pass(p)) {
    for (int64_t n = 0; n < p.num_sequences; ++n) {
      counts.num_tokens += p.sequence_stats[n].length;
      counts.num_seqs += p.sequence_stats[n].length > 0;
    }
  } else if (needs_count_pass(p)) {
    int64_t tokens = 0;
    for (int64_t t = 0; t < p.num_tokens; ++t) tokens += p.mask[t];
    counts.num_tokens = static_cast<double>(tokens);
  }
  return counts;
}

using ComputeStats = SequenceStats (*)(const PolicyLossParams& p, int64_t begin, int64_t end);

ComputeStats stats_of(LossMode mode) {
  if (mode == LossMode::gmpo) return compute_stats<LossMode::gmpo>;
  if (has_sequence_ratio(mode)) return compute_stats<LossMode::gspo>;
  return compute_stats<LossMode::reinforce>;  // the number of tokens alone
}

void run(const PolicyLossParams& p, VisitRun visit_run) {
  if (needs_sequence_pass(p)) {
    const ComputeStats compute_stats = stats_of(p.mode);
    const int64_t grain = kCpuChunk * p.num_sequences / (p.num_tokens + 1) + 1;
    parallel_for(p.num_sequences, grain, p.num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        p.sequence_stats[n] = compute_stats(p, p.cu_seqlens[n], p.cu_seqlens[n + 1]);
    });
  }
  const Denominators counts = denominators(p, counted(p));
  const int64_t chunks = (p.num_tokens + kCpuChunk - 1) / kCpuChunk;
  parallel_for(chunks, 1, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * kCpuChunk, last = first + kCpuChunk;
      visit_chunk(p, visit_run, counts, first, last < p.num_tokens ? last : p.num_tokens,
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
  finish_sums(p, counts, totals);
}

template <LossMode mode>
void run(const PolicyLossParams& p) {
  switch (wanted_parts(p)) {
    case Parts::pg:
      return run(p, visit_run<mode, Parts::pg>);
    case Parts::pg_and_kl:
      return run(p, visit_run<mode, Parts::pg_and_kl>);
    case Parts::all:
      return run(p, visit_run<mode, Parts::all>);
  }
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
    case LossMode::dro:
      return run<LossMode::dro>(p);
    case LossMode::seq_sapo:
      return run<LossMode::seq_sapo>(p);
    case LossMode::value:
      return run<LossMode::value>(p);
  }
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
