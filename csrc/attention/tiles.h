// What forward and backward share: operands, products of a tile, tasks. Included only by *_cpu.cpp
// files.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "attention/forest.h"
#include "attention/operands.h"
#include "attention/params.h"
#include "attention/softmax.h"
#include "common/parallel.h"
#include "common/products.h"
#include "common/simd.h"

namespace hybridengine::HYBRIDENGINE_ISA {

// Keys and values of every head, [kv_heads, slots, dim]. A key or value that is not finite has NaN
// as its poison, else 0: added to its scores it spreads to the rows that see it, while its
// elements, zeroed, reach no other row.
template <typename T>
struct Keys {
  using Step = StepOf<T>;

  Keys(const Attention& p, const Forest& forest, bool sums_of_keys, bool sums_of_values)
      : count(forest.count),
        blocks(forest.key_blocks),
        keys(p.kv_heads * count, p.dim, sums_of_keys),
        values(p.kv_heads * count, p.value_dim, sums_of_values),
        poison(p.kv_heads * count),
        poisoned(p.kv_heads * blocks) {
    parallel_for(p.kv_heads * blocks, 1, p.num_threads, [&](int64_t b, int64_t e) {
      for (int64_t i = b; i < e; ++i) load_block(p, forest.slots, i / blocks, i % blocks);
    });
  }

  void load_block(const Attention& p, const Slots& slots, int64_t head, int64_t block) {
    const int64_t begin = block * kBlock, end = std::min(count, begin + kBlock);
    bool all_finite = true;
    for (int64_t j = begin; j < end; ++j) {
      const int64_t row = head * count + j, token = slots.keys[j];
      bool finite = true;
      if (token < 0) {
        keys.clear(row);
        values.clear(row);
      } else {
        finite = load_row(p.key.template row<T>(token, head), p.dim, keys.along_dim(row));
        finite &=
            load_row(p.value.template row<T>(token, head), p.value_dim, values.along_dim(row));
      }
      poison[row] = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
      all_finite &= finite;
    }
    keys.finish(head * count + begin, head * count + end);
    values.finish(head * count + begin, head * count + end);
    poisoned[head * blocks + block] = !all_finite;
  }

  bool is_poisoned(int64_t head, int64_t block) const { return poisoned[head * blocks + block]; }

  int64_t count, blocks;
  Operand<Step> keys, values;
  Floats poison;                  // [kv_heads, slots]
  std::vector<uint8_t> poisoned;  // [kv_heads, blocks]: any key of the block
};

// The rows of a block as [kBlock, dim]; zeros past the end and where a slot has no query. Returns
// whether all are finite; `poison` becomes NaN for those that are not, else unchanged.
template <typename T>
bool load_rows(const Attention& p, const HeadRows& source, const Slots& slots, const RowBlock& rows,
               int64_t kv_head, int64_t dim, const Operand<StepOf<T>>& out, float* poison) {
  const int64_t group = p.heads / p.kv_heads;
  bool all_finite = true;
  for (int64_t r = 0; r < kBlock; ++r) {
    const int64_t token = r < rows.count ? slots.queries[rows.slot[r]] : -1;
    if (token < 0) {
      out.clear(r);
      continue;
    }
    const int64_t head = kv_head * group + (rows.first + r) % group;
    if (load_row(source.template row<T>(token, head), dim, out.along_dim(r))) continue;
    all_finite = false;
    poison[r] = std::numeric_limits<float>::quiet_NaN();
  }
  out.finish(0, kBlock);
  return all_finite;
}

// sums[i] += chain[i], and the chain begins anew.
inline void end_chain(float* chain, float* sums, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] += chain[i], chain[i] = 0.0f;
}

// scores[key, row] = sum_d keys[key, d] rows[d, row] for the keys of group g, in the hull.
template <typename Step>
void score_group(const Tile& tile, int g, int64_t dim, const Operand<Step>& keys, int64_t first_key,
                 const Step* rows, float* scores) {
  const int64_t stride = keys.dim / kStep<Step>, steps = (dim + kStep<Step> - 1) / kStep<Step>;
  const int64_t vector = tile.first_vector[g], first = g * kGroup;
  multiply<Layout::rows>(std::min<int64_t>(kGroup, tile.keys - first), tile.end_vector[g] - vector,
                         steps, keys.along_dim(first_key + first), stride, rows + vector * kWidth,
                         kBlock, scores + vector * kWidth, kBlock, false);
}

// chain[row, d] += sum_key weights[key, row] keys[key, d]; a chain that is cut is added to `sums`.
// Cuts are at multiples of a step, and weights outside of the hull are zero.
template <typename Step>
void add_keys(const Forest& forest, const RowBlock& rows, const Tile& tile, const Step* weights,
              const Operand<Step>& keys, int64_t first_key, float* chain, float* sums) {
  const int64_t dim = keys.dim;
  const Step* columns = keys.along_rows(first_key);
  int64_t begin = 0;
  const auto add_until = [&](int64_t end) {
    for (int g = 0; g * kGroup < rows.count; ++g) {
      const int64_t row = g * kGroup;
      const int64_t step = std::max<int64_t>(begin, tile.begin_key[g]) / kStep<Step>;
      const int64_t last =
          (std::min<int64_t>(end, tile.end_key[g]) + kStep<Step> - 1) / kStep<Step>;
      if (step >= last) continue;
      multiply<Layout::columns>(std::min<int64_t>(kGroup, rows.count - row), dim / kWidth,
                                last - step, weights + step * kBlock + row, kBlock,
                                columns + step * dim, dim, chain + row * dim, dim, true);
    }
    begin = end;
  };
  for (int64_t j = 0; j < tile.keys; ++j) {
    if (!(tile.cuts >> j & 1)) continue;
    const auto [first, last] = forest.seen_by(rows, tile.first_key + j);
    if (first >= last) continue;
    add_until(j);
    end_chain(chain + first * dim, sums + first * dim, (last - first) * dim);
  }
  add_until(tile.keys);
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
