// GAE on the CPU: a serial scan from the end of every sequence, in parallel over sequences.
#include <cmath>

#include "advantage/params.h"
#include "common/parallel.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kTokenGrain = 16384;

// Masked tokens (tool output, padding) are skipped: t + 1 is the next unmasked token.
template <bool kHasValues, bool kHasMask>
void scan_sequence(const GaeParams& p, int64_t begin, int64_t end) {
  const double decay = p.gamma * p.lam;
  double next_value = 0, advantage = 0;
  int64_t bad = -1;
  for (int64_t t = end - 1; t >= begin; --t) {
    if (kHasMask && !p.token_mask[t]) {
      p.advantages[t] = p.returns[t] = 0;
      continue;
    }
    if (!std::isfinite(p.rewards[t])) bad = t;
    const double value = kHasValues ? p.values[t] : 0;
    const double delta = p.rewards[t] - value + p.gamma * next_value;
    advantage = delta + decay * advantage;
    next_value = value;
    p.advantages[t] = static_cast<float>(advantage);
    p.returns[t] = static_cast<float>(advantage + value);
  }
  if (bad < 0) return;
  int64_t known = __atomic_load_n(p.bad_token, __ATOMIC_RELAXED);  // the first of all threads
  while ((known < 0 || bad < known) &&
         !__atomic_compare_exchange_n(p.bad_token, &known, bad, true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
}

template <bool kHasValues, bool kHasMask>
void scan_all(const GaeParams& p) {
  const int64_t per_sequence = p.num_tokens / (p.num_sequences > 0 ? p.num_sequences : 1) + 1;
  const int64_t grain = kTokenGrain / per_sequence + 1;
  parallel_for(p.num_sequences, grain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      scan_sequence<kHasValues, kHasMask>(p, p.cu_seqlens[n], p.cu_seqlens[n + 1]);
  });
  const int64_t past_end = p.num_sequences > 0 ? p.cu_seqlens[p.num_sequences] : 0;
  for (int64_t t = past_end; t < p.num_tokens; ++t) p.advantages[t] = p.returns[t] = 0;
}

}  // namespace

void gae_cpu(const GaeParams& p) {
  if (p.values) return p.token_mask ? scan_all<true, true>(p) : scan_all<true, false>(p);
  return p.token_mask ? scan_all<false, true>(p) : scan_all<false, false>(p);
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
