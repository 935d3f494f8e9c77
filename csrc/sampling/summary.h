// The first pass over a row: sums of exp by block, and maxima of groups of entries.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <vector>

#include "common/simd.h"
#include "sampling/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

constexpr int64_t kBlock = 256;         // entries of one sum; a group is a lane of a block
constexpr int64_t kSegmentBlocks = 64;  // the unit of work of a thread
constexpr float kInfinity = __builtin_inff();

inline int64_t num_blocks(int64_t vocab) { return (vocab + kBlock - 1) / kBlock; }

// What the first pass leaves of all rows.
struct Summaries {
  explicit Summaries(const SampleTokens& p)
      : blocks(num_blocks(p.vocab)),
        tops(p.rows * blocks * kWidth),
        references(p.rows * blocks),
        sums(p.rows * blocks) {}

  int64_t blocks;                 // of a row
  std::vector<float> tops;        // [rows, blocks, kWidth], the largest logit of each lane
  std::vector<float> references;  // [rows, blocks], not below the largest logit of the block
  std::vector<double> sums;       // [rows, blocks] of exp((logit - reference) / temperature)
};

struct RowParams {
  float temperature;
  bool greedy;
  float factor2;  // exp(d / temperature) = 2^(d * factor2)
  // z is logit / z_temperature = z_unit * logit / temperature, with a power of two that keeps a
  // finite logit from becoming infinite.
  float z_temperature;
  double z_unit;

  RowParams(const SampleTokens& p, int64_t row)
      : temperature(p.temperature[row]), greedy(!(temperature >= kGreedyTemperature)) {
    if (greedy) temperature = 1.0f;
    factor2 = static_cast<float>(1.4426950408889634 / temperature);
    z_unit = temperature < 1.0f ? 0x1p-17 : 1.0;  // 2^17 > 1 / kGreedyTemperature
    z_temperature = static_cast<float>(temperature / z_unit);
  }
};

// Calls use(vector, index of its first entry) for the vectors of x[begin, end); lanes past the end
// are -inf.
template <typename T, typename Use>
HE_SIMD void for_vectors(const T* x, int64_t begin, int64_t end, const Use& use) {
  int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) use(load(x + i), i);
  if (i < end) use(load_part(x + i, end - i, -kInfinity), i);
}

// exp of distances d <= 0 from a reference.
HE_SIMD VecF weight(VecF d, float factor2) { return exp2(at_least(-150.0f, d * factor2)); }

// The references within a segment rise from block to block. They start anew in each segment, so
// that the sums do not depend on the number of threads.
template <typename T>
void summarize_segment(const SampleTokens& p, int64_t row, int64_t segment, Summaries& out) {
  const T* x = static_cast<const T*>(p.logits) + row * p.row_stride;
  const float factor2 = RowParams(p, row).factor2;
  const int64_t last = std::min((segment + 1) * kSegmentBlocks, out.blocks);
  float reference = -FLT_MAX;
  for (int64_t block = segment * kSegmentBlocks; block < last; ++block) {
    const int64_t begin = block * kBlock, end = std::min(begin + kBlock, p.vocab);
    const int64_t at = row * out.blocks + block;
    VecF top = splat(-kInfinity);
    for_vectors(x, begin, end, [&](VecF v, int64_t) { top = max(v, top); });
    store(&out.tops[at * kWidth], top);
    reference = std::max(reference, largest(top));
    VecF lanes{};
    for_vectors(x, begin, end, [&](VecF v, int64_t) { lanes += weight(v - reference, factor2); });
    out.references[at] = reference;
    out.sums[at] = sum(lanes);
  }
}

// A row of Summaries, with its sums relative to the row's maximum.
struct RowSummary {
  const float* tops;
  double* sums;
  int64_t blocks;
  float max;     // of the logits
  double total;  // of the sums; not above 0, or NaN: nothing can be sampled

  RowSummary(Summaries& all, int64_t row, float factor2)
      : tops(&all.tops[row * all.blocks * kWidth]),
        sums(&all.sums[row * all.blocks]),
        blocks(all.blocks) {
    const float* references = &all.references[row * blocks];
    max = *std::max_element(references, references + blocks);
    float known = max;
    double scale = 1.0;
    total = 0.0;
    for (int64_t b = 0; b < blocks; ++b) {
      if (references[b] != known) {
        known = references[b];
        scale = std::exp2((double{known} - max) * factor2);
      }
      total += sums[b] *= scale;
    }
  }

  bool reaches(int64_t block, float least) const {
    return lane_bits(load(tops + block * kWidth) >= least) != 0;
  }

  // A lower bound of the k-th largest logit: the k-th largest of the maxima of blocks or groups.
  float bound_of_top_k(int64_t k, std::vector<float>& scratch) const {
    if (k > blocks * kWidth) return -kInfinity;
    if (2 * k <= blocks) {
      scratch.resize(blocks);
      for (int64_t b = 0; b < blocks; ++b) scratch[b] = largest(load(tops + b * kWidth));
    } else {
      scratch.assign(tops, tops + blocks * kWidth);
    }
    std::nth_element(scratch.begin(), scratch.begin() + (k - 1), scratch.end(), std::greater<>());
    return scratch[k - 1];
  }
};

}  // namespace hybridengine::HYBRIDENGINE_ISA
