// See params.h. An entry is kept by its scaled logit z = logit / temperature, rounded to float32 as
// vLLM does, so that equal z are ties (z_unit in RowParams keeps them from overflowing);
// probabilities are computed from differences of logits.
#include "common/parallel.h"
#include "sampling/params.h"
#include "sampling/philox.h"
#include "sampling/summary.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

// A lower bound of the logits whose z is at least that of `logit`, for finite arguments.
float below_ties(double logit, float temperature) {
  return static_cast<float>(std::max(
      logit - std::abs(logit) * 0x1p-21 - double{temperature} * 0x1p-140, -double{FLT_MAX}));
}

// Sorts as z descending, then id ascending, when compared as greater. Candidates are in the order
// of their ids.
uint64_t sort_key(float z, uint32_t candidate) {
  const uint32_t bits = bits_of(z + 0.0f);  // -0 and 0 are equal
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << 32 | (0xFFFFFFFFu - candidate);
}

uint32_t candidate_of(uint64_t key) { return 0xFFFFFFFFu - static_cast<uint32_t>(key); }

// The entries of a row that may be kept, by ascending id. A thread reuses it.
class Candidates {
 public:
  std::vector<int32_t> ids;
  std::vector<float> logits, z, weights;
  double total;  // of the weights

  int64_t size() const { return std::ssize(ids); }

  template <typename T>
  void collect(const T* x, int64_t vocab, const RowSummary& row, float least) {
    ids.clear();
    logits.clear();
    for (int64_t block = 0; block < row.blocks; ++block) {
      if (!row.reaches(block, least)) continue;
      const int64_t begin = block * kBlock;
      for_vectors(x, begin, std::min(begin + kBlock, vocab), [&](VecF v, int64_t first) {
        for (uint32_t bits = lane_bits(v >= least); bits; bits &= bits - 1) {
          const int lane = __builtin_ctz(bits);
          ids.push_back(static_cast<int32_t>(first + lane));
          logits.push_back(v[lane]);
        }
      });
    }
  }

  void compute_z(float temperature) {
    z.resize(size());
    for (int64_t i = 0; i < size(); ++i) z[i] = logits[i] / temperature;
  }

  void compute_weights(float max, float factor2) {
    weights.resize(size() + kWidth);
    logits.resize(size() + kWidth, -FLT_MAX);
    for (int64_t i = 0; i < size(); i += kWidth) {
      store(&weights[i], weight(load(&logits[i]) - max, factor2));
    }
    logits.resize(size());
    total = 0.0;
    for (int64_t i = 0; i < size(); ++i) total += weights[i];
  }

  // Removes the entries for which keep(i) is false.
  template <typename Keep>
  void filter(const Keep& keep) {
    int64_t kept = 0;
    for (int64_t i = 0; i < size(); ++i) {
      if (!keep(i)) continue;
      ids[kept] = ids[i];
      logits[kept] = logits[i];
      z[kept++] = z[i];
    }
    ids.resize(kept);
    logits.resize(kept);
    z.resize(kept);
  }

  void keep_top_k(int64_t k, std::vector<float>& scratch) {
    if (k >= size()) return;
    scratch = z;
    std::nth_element(scratch.begin(), scratch.begin() + (k - 1), scratch.end(), std::greater<>());
    filter([&, least = scratch[k - 1]](int64_t i) { return z[i] >= least; });
  }

  // Keeps the entries above which, in descending order, lies less than `mass`; at least one.
  void keep_mass(double mass) {
    keys_.resize(size());
    for (int64_t i = 0; i < size(); ++i) keys_[i] = sort_key(z[i], static_cast<uint32_t>(i));
    int64_t low = 0, high = size();  // the last kept entry is in this range of the order
    double above = 0.0;
    while (high - low > 1) {
      const int64_t middle = low + std::max<int64_t>((high - low) / 4, 1);
      std::nth_element(keys_.begin() + low, keys_.begin() + middle, keys_.begin() + high,
                       std::greater<>());
      double upper = 0.0;
      for (int64_t i = low; i < middle; ++i) upper += weights[candidate_of(keys_[i])];
      if (above + upper >= mass) {
        high = middle;
      } else {
        above += upper;
        low = middle;
      }
    }
    const uint64_t last = keys_[low];
    filter([&](int64_t i) { return sort_key(z[i], static_cast<uint32_t>(i)) >= last; });
  }

 private:
  std::vector<uint64_t> keys_;
};

struct Draw {
  int64_t token;
  double distance;  // of its logit from the maximum, times 1 / temperature
  double total;     // of the weights of the distribution
};

struct Workspace {
  Candidates candidates;
  std::vector<float> scratch;
};

class RowSampler {
 public:
  RowSampler(const SampleTokens& p, int64_t row, Summaries& summaries)
      : p_(p), row_(row), params_(p, row), summary_(summaries, row, params_.factor2) {}

  void run(Workspace& space) {
    p_.num_kept[row_] = 0;
    p_.tokens[row_] = 0;
    p_.log_probs[row_] = __builtin_nanf("");
    if (!(summary_.total > 0.0)) return;
    const bool cuts = !params_.greedy && (cuts_k() || cuts_p() || p_.min_p[row_] > 0.0f);
    const Draw draw = params_.greedy ? greedy() : cuts ? draw_kept(space) : draw_any();
    p_.tokens[row_] = draw.token;
    p_.log_probs[row_] = static_cast<float>(draw.distance - std::log(draw.total));
  }

 private:
  bool cuts_k() const { return p_.top_k[row_] > 0 && p_.top_k[row_] < p_.vocab; }
  bool cuts_p() const { return p_.top_p[row_] < 1.0f; }

  // Calls use(x) with the row's logits. What else there is to do depends on no type.
  template <typename Use>
  auto with_logits(const Use& use) const {
    return with_float(p_.dtype, [&](auto type) {
      return use(static_cast<const decltype(type)*>(p_.logits) + row_ * p_.row_stride);
    });
  }

  double uniform() const {
    return philox_uniform(static_cast<uint64_t>(p_.seeds[row_]),
                          static_cast<uint64_t>(p_.positions[row_]));
  }

  Draw drawn(int64_t token, double total) const {
    const float logit = with_logits([&](const auto* x) { return to_float(x[token]); });
    return {token, (double{logit} - summary_.max) / params_.temperature, total};
  }

  Draw greedy() const {
    int64_t token = 0;
    while (!summary_.reaches(token / kBlock, summary_.max)) token += kBlock;
    with_logits([&](const auto* x) {
      while (to_float(x[token]) != summary_.max) ++token;
    });
    return drawn(token, summary_.total);
  }

  // From all entries: the block by the sums of the first pass, then the entry in it.
  Draw draw_any() const {
    double rest = uniform() * summary_.total;
    int64_t block = -1;
    for (int64_t b = 0; b < summary_.blocks; ++b) {
      if (!(summary_.sums[b] > 0.0)) continue;
      block = b;
      if (rest < summary_.sums[b]) break;
      rest -= summary_.sums[b];
    }
    const int64_t begin = block * kBlock, end = std::min(begin + kBlock, p_.vocab);
    float weights[kBlock];
    with_logits([&](const auto* x) {
      for_vectors(x, begin, end, [&](VecF v, int64_t first) {
        store(weights + (first - begin), weight(v - summary_.max, params_.factor2));
      });
    });
    return drawn(begin + pick(weights, end - begin, rest), summary_.total);
  }

  // The first entry at which the cumulative weight exceeds `target`. Sums in another order may end
  // below it: then the last entry that has a weight.
  static int64_t pick(const float* weights, int64_t count, double target) {
    int64_t last = 0;
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      if (!(weights[i] > 0.0f)) continue;
      last = i;
      sum += weights[i];
      if (sum > target) break;
    }
    return last;
  }

  Draw draw_kept(Workspace& space) {
    Candidates& kept = space.candidates;
    const float min_p = std::min(p_.min_p[row_], 1.0f);
    const double least_z = min_p > 0.0f ? double{summary_.max / params_.z_temperature} +
                                              params_.z_unit * std::log(double{min_p})
                                        : -double{kInfinity};
    const float least = least_logit(least_z, space.scratch);
    with_logits([&](const auto* x) { kept.collect(x, p_.vocab, summary_, least); });
    kept.compute_z(params_.z_temperature);
    if (min_p > 0.0f) kept.filter([&](int64_t i) { return kept.z[i] >= least_z; });
    if (cuts_k()) kept.keep_top_k(p_.top_k[row_], space.scratch);
    kept.compute_weights(summary_.max, params_.factor2);
    if (cuts_p()) {
      const bool has_all = cuts_k() || min_p > 0.0f;  // what top-p is a part of
      kept.keep_mass(double{p_.top_p[row_]} * (has_all ? kept.total : summary_.total));
      kept.compute_weights(summary_.max, params_.factor2);
    }
    p_.num_kept[row_] = static_cast<int32_t>(kept.size());
    if (p_.kept_ids) p_.kept_ids[row_] = kept.ids;
    const int64_t i = pick(kept.weights.data(), kept.size(), uniform() * kept.total);
    return drawn(kept.ids[i], kept.total);
  }

  // A lower bound of the logits that can be kept.
  float least_logit(double least_z, std::vector<float>& scratch) const {
    double least = least_z * params_.z_temperature;
    if (cuts_k()) {
      least = std::max(least, double{summary_.bound_of_top_k(p_.top_k[row_], scratch)});
    } else if (cuts_p() && least_z == -double{kInfinity}) {
      least = bound_of_top_p(p_.top_p[row_]);
    }
    return std::isfinite(least) ? below_ties(least, params_.z_temperature) : -FLT_MAX;
  }

  // For top_p below 1. The entries below the bound have at most half of what it removes, even if
  // all are as large as the bound; or the groups whose maxima reach it have `top_p` in the maxima
  // alone. The larger bound holds.
  double bound_of_top_p(double top_p) const {
    const double removed = (1.0 - top_p) * summary_.total;
    const double range = -std::log(0.5 * removed / p_.vocab) * params_.temperature;
    if (!(range > 0.0)) return summary_.max;
    constexpr int kBuckets = 64;  // of the maxima, by their distance from the largest
    const double width = range / kBuckets;
    double mass[kBuckets + 1] = {};
    for (int64_t i = 0; i < summary_.blocks * kWidth; i += kWidth) {
      const VecF distance = load(summary_.tops + i) - summary_.max;
      const VecF weights = weight(distance, params_.factor2);
      for (int lane = 0; lane < kWidth; ++lane) {
        mass[static_cast<int>(std::min(-distance[lane] / width, double{kBuckets}))] +=
            weights[lane];
      }
    }
    double reached = 0.0;
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      reached += mass[bucket];
      if (reached >= top_p * summary_.total * 1.000001) {
        return summary_.max - (bucket + 1.001) * width;  // rounding may move an edge
      }
    }
    return summary_.max - range;
  }

  const SampleTokens& p_;
  int64_t row_;
  RowParams params_;
  RowSummary summary_;
};

}  // namespace

void sample_tokens_cpu(const SampleTokens& p) {
  Summaries summaries(p);
  const int64_t segments = (summaries.blocks + kSegmentBlocks - 1) / kSegmentBlocks;
  parallel_for(p.rows * segments, 1, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      with_float(p.dtype, [&](auto type) {
        summarize_segment<decltype(type)>(p, i / segments, i % segments, summaries);
      });
    }
  });
  parallel_for(p.rows, 1, p.num_threads, [&](int64_t begin, int64_t end) {
    Workspace space;
    for (int64_t row = begin; row < end; ++row) RowSampler(p, row, summaries).run(space);
  });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
