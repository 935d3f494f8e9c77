// The forward pass of attention; see params.h.
#include "attention/tiles.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

template <typename Step>
struct Scratch {
  explicit Scratch(const Attention& p)
      : query(kBlock, p.dim, false),
        query_t(query.dim / kStep<Step> * kBlock),
        scores(kBlock * kBlock),
        weights(scores),
        chain(padded<Step>(p.value_dim) * kBlock),
        sums(padded<Step>(p.value_dim) * kBlock) {}
  Operand<Step> query;                // [rows, dim]
  Buffer<Step> query_t;               // its transpose
  Floats scores;                      // [keys, rows]
  Weights<Step> weights;              // along keys
  Floats chain, sums;                 // [rows, value_dim]
  alignas(64) float maximum[kBlock];  // integral, of scores in base 2
  alignas(64) float total_chain[kBlock];
  alignas(64) float total[kBlock];  // of the weights 2^(score - maximum)
};

// Forms weights of products q . k and updates maximum and total of one vector of rows. Returns
// whether the maximum has grown.
template <bool kAnyMasked, bool kCapped, typename Step>
bool weigh(const Forest& forest, const RowBlock& rows, const Tile& tile, const float* poison,
           float factor, float cap, int vector, Scratch<Step>& s, VecF& decay) {
  float* scores = s.scores + vector * kWidth;
  const VecF before = load(s.maximum + vector * kWidth);
  VecF largest = before;
  const auto for_keys = [&](const auto& body) {
    for (int g = 0; g * kGroup < tile.keys; ++g) {
      const int64_t end = std::min<int64_t>(tile.keys, (g + 1) * kGroup);
      const bool computed = tile.first_vector[g] <= vector && vector < tile.end_vector[g];
      for (int64_t j = g * kGroup; j < end; j += kStep<Step>) body(j, computed);
    }
  };
  for_keys([&](int64_t first, bool computed) {
    if (!computed) return;
    for (int64_t j = first; j < first + kStep<Step>; ++j) {
      VecF x = score_of<kCapped>(load(scores + j * kBlock), factor, cap);
      if constexpr (kAnyMasked)
        x = select(forest.visible(rows, vector, tile.first_key + j), x + poison[j], splat(kMasked));
      store(scores + j * kBlock, x);
      largest = max(x, largest);
    }
  });
  const VecF maximum = max(floor(largest), before);
  decay = scale_down(splat(1.0f), before - maximum);
  VecF chain = load(s.total_chain + vector * kWidth) * decay;
  VecF total = load(s.total + vector * kWidth) * decay;
  for_keys([&](int64_t first, bool computed) {
    VecF weights[kStep<Step>]{};
    if (tile.cuts >> first & 1 && computed) {
      const VecI seen = forest.in_subtree(rows, vector, tile.first_key + first);
      total += select(seen, chain, VecF{});
      chain = select(seen, VecF{}, chain);
    }
    for (int64_t i = 0; i < kStep<Step> && computed; ++i) {
      weights[i] = weight_of(load(scores + (first + i) * kBlock), maximum);
      chain += weights[i];
    }
    store_along_keys(s.weights, first, vector * kWidth, weights);
  });
  store(s.total_chain + vector * kWidth, chain);
  store(s.total + vector * kWidth, total);
  store(s.maximum + vector * kWidth, maximum);
  const VecI grown = decay != 1.0f;
  int32_t any = 0;
  for (int lane = 0; lane < kWidth; ++lane) any |= grown[lane];
  return any;
}

template <typename T, typename Step>
void store_results(const AttentionForward& p, const Forest& forest, const RowBlock& rows,
                   int64_t kv_head, int64_t dim, const Scratch<Step>& s) {
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t token = forest.slots.queries[rows.slot[r]];
    if (token < 0) continue;
    const int64_t head = kv_head * forest.group + (rows.first + r) % forest.group;
    const RowEnd end(s.maximum[r], s.total[r] + s.total_chain[r], p.sinks, head);
    end_chain(s.chain + r * dim, s.sums + r * dim, dim);
    store_row(static_cast<T*>(p.out) + (token * p.heads + head) * p.value_dim, s.sums + r * dim,
              p.value_dim, end.factor);
    p.lse[head * p.tokens + token] = static_cast<float>(end.lse);
  }
}

template <typename T, bool kCapped, typename Step>
void attend(const AttentionForward& p, const Forest& forest, const Keys<T>& keys, int64_t block,
            int64_t kv_head, Scratch<Step>& s) {
  const RowBlock rows = forest.rows(block);
  const int64_t dim = keys.values.dim;
  std::fill_n(s.maximum, kBlock, kNoMaximum);
  std::fill_n(s.total, kBlock, 0.0f);
  std::fill_n(s.total_chain, kBlock, 0.0f);
  std::fill_n(+s.chain, kBlock * dim, 0.0f);
  std::fill_n(+s.sums, kBlock * dim, 0.0f);
  load_rows<T>(p, p.query, forest.slots, rows, kv_head, p.dim, s.query, s.total);
  transpose_rows(s.query, +s.query_t);
  const float factor = score_factor(p.softmax_scale, p.softcap), cap = p.softcap * kLog2E;
  for (int64_t b = 0; b <= forest.last_key_block(block); ++b) {
    if (!forest.may_see(block, b)) continue;
    Tile tile = forest.tile(rows, block, b);
    tile.masked |= keys.is_poisoned(kv_head, b);
    const int64_t first_key = kv_head * keys.count + tile.first_key;
    for (int g = 0; g * kGroup < tile.keys; ++g)
      score_group(tile, g, p.dim, keys.keys, first_key, +s.query_t, s.scores + g * kGroup * kBlock);
    for (int v = 0; v < kBlockVectors; ++v) {
      VecF decay;
      const auto weigh_vector =
          tile.masked ? weigh<true, kCapped, Step> : weigh<false, kCapped, Step>;
      const float* poison = keys.poison + first_key;
      if (!weigh_vector(forest, rows, tile, poison, factor, cap, v, s, decay)) continue;
      for (int lane = 0; lane < kWidth; ++lane) {
        const int64_t at = (v * kWidth + lane) * dim;
        for (int64_t d = at; d < at + dim; ++d) s.chain[d] *= decay[lane], s.sums[d] *= decay[lane];
      }
    }
    add_keys(forest, rows, tile, +s.weights, keys.values, first_key, s.chain, s.sums);
  }
  store_results<T>(p, forest, rows, kv_head, dim, s);
}

template <typename T>
void forward(const AttentionForward& p) {
  using Step = StepOf<T>;
  const Forest forest(p, kStep<Step>);
  const Keys<T> keys(p, forest, false, true);
  // The last blocks see most keys: they come first, for balance.
  for_each_task<Scratch<Step>>(p, forest.row_blocks * p.kv_heads, [&](int64_t task, auto& s) {
    const int64_t block = forest.row_blocks - 1 - task / p.kv_heads, head = task % p.kv_heads;
    (p.softcap > 0 ? attend<T, true, Step> : attend<T, false, Step>)(p, forest, keys, block, head,
                                                                     s);
  });
}

}  // namespace

void attention_forward_cpu(const AttentionForward& p) {
  with_factor<float, f16, bf16>(p.dtype, [&](auto type) { forward<decltype(type)>(p); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
