// The forward pass of attention; see params.h.
#include <cmath>

#include "attention/tiles.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

struct Scratch {
  explicit Scratch(const Attention& p)
      : row(padded(p.dim) * kBlock),
        query(padded(p.dim) * kBlock),
        weights(kBlock * kBlock),
        chain(padded(p.value_dim) * kBlock),
        sums(padded(p.value_dim) * kBlock) {}
  Floats row;                         // [rows, padded dim]
  Floats query;                       // its transpose, times a factor
  Floats weights;                     // scores, then weights: [keys, rows]
  Floats chain, sums;                 // [rows, padded value_dim]
  alignas(64) float maximum[kBlock];  // integral, of scores in base 2
  alignas(64) float total_chain[kBlock];
  alignas(64) float total[kBlock];  // of the weights 2^(score - maximum)
};

// p 2^e for integral e <= 0; 0 below the normal range.
HE_SIMD VecF scale_down(VecF p, VecF e) {
#if defined(__AVX512F__)
  return (VecF)_mm512_scalef_ps((__m512)p, (__m512)e);
#else
  const VecI exponent = (VecI)(e + 12582912.0f) - 0x4B400000;
  return select(e < -126.0f, VecF{}, p * (VecF)((exponent + 127) << 23));
#endif
}

// Replaces scores by weights and updates maximum and total of one vector of rows. Returns whether
// the maximum has grown. 2^(s - m) is formed as 2^(s - floor(s)) 2^(floor(s) - m), so that another
// m changes nothing but the exponent.
template <bool kMasked, bool kCapped>
bool weigh(const Forest& forest, const RowBlock& rows, const Tile& tile, const float* poison,
           float cap, int vector, Scratch& s, VecF& decay) {
  float* scores = s.weights + vector * kWidth;
  const VecF before = load(s.maximum + vector * kWidth);
  VecF largest = before;
  const auto for_keys = [&](const auto& body) {
    for (int g = 0; g * kGroup < tile.keys; ++g) {
      const int64_t end = std::min<int64_t>(tile.keys, (g + 1) * kGroup);
      const bool computed = tile.first_vector[g] <= vector && vector < tile.end_vector[g];
      for (int64_t j = g * kGroup; j < end; ++j) body(scores + j * kBlock, j, computed);
    }
  };
  for_keys([&](float* score, int64_t j, bool computed) {
    if (!computed) return;
    VecF x = load(score);
    if constexpr (kCapped) x = cap * tanh(x);
    if constexpr (kMasked)
      x = select(forest.visible(rows, vector, tile.first_key + j), x + poison[j], splat(-2e30f));
    if constexpr (kCapped || kMasked) store(score, x);
    largest = max(x, largest);
  });
  const VecF maximum = max(floor(largest), before);
  decay = scale_down(splat(1.0f), before - maximum);
  VecF chain = load(s.total_chain + vector * kWidth) * decay;
  VecF total = load(s.total + vector * kWidth) * decay;
  for_keys([&](float* score, int64_t j, bool computed) {
    if (!computed) return store(score, VecF{});
    if (tile.cuts >> j & 1) {
      const VecI seen = forest.in_subtree(rows, vector, tile.first_key + j);
      total += select(seen, chain, VecF{});
      chain = select(seen, VecF{}, chain);
    }
    const VecF x = load(score), integral = floor(x);
    const VecF weight = scale_down(exp2_fraction(x - integral), integral - maximum);
    store(score, weight);
    chain += weight;
  });
  store(s.total_chain + vector * kWidth, chain);
  store(s.total + vector * kWidth, total);
  store(s.maximum + vector * kWidth, maximum);
  const VecI grown = decay != 1.0f;
  int32_t any = 0;
  for (int lane = 0; lane < kWidth; ++lane) any |= grown[lane];
  return any;
}

// The scores are factor * q . k in base 2, or cap * tanh(factor * q . k).
template <typename T>
void load_queries(const AttentionForward& p, const RowBlock& rows, int64_t kv_head, Scratch& s) {
  const float factor = p.softcap > 0 ? p.softmax_scale / p.softcap : p.softmax_scale * kLog2E;
  load_rows<T>(p, p.query, rows, kv_head, p.dim, factor, s.row, s.total);
  transpose_rows(s.row, padded(p.dim), s.query);
}

template <typename T>
void store_results(const AttentionForward& p, const RowBlock& rows, int64_t kv_head,
                   const Scratch& s) {
  const int64_t group = p.heads / p.kv_heads, dim = padded(p.value_dim);
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t row = rows.first + r, token = row / group, head = kv_head * group + row % group;
    const float total = s.total[r] + s.total_chain[r];
    end_chain(s.chain + r * dim, s.sums + r * dim, dim);
    store_row(static_cast<T*>(p.out) + (token * p.heads + head) * p.value_dim, s.sums + r * dim,
              p.value_dim, 1.0f / total);
    p.lse[head * p.tokens + token] =
        static_cast<float>(double{s.maximum[r]} * 0.69314718055994531 + std::log(double{total}));
  }
}

template <typename T, bool kCapped>
void attend(const AttentionForward& p, const Forest& forest, const Keys<T>& keys, int64_t block,
            int64_t kv_head, Scratch& s) {
  const RowBlock rows = forest.rows(block);
  std::fill_n(s.maximum, kBlock, -1e30f);
  std::fill_n(s.total, kBlock, 0.0f);
  std::fill_n(s.total_chain, kBlock, 0.0f);
  load_queries<T>(p, rows, kv_head, s);
  std::fill_n(+s.chain, kBlock * keys.value_dim, 0.0f);
  std::fill_n(+s.sums, kBlock * keys.value_dim, 0.0f);
  const float cap = p.softcap * kLog2E;
  for (int64_t b = 0; b <= forest.last_key_block(block); ++b) {
    if (!forest.may_see(block, b)) continue;
    Tile tile = forest.tile(rows, block, b);
    tile.masked |= keys.is_poisoned(kv_head, b);
    const float* poison = keys.poison + kv_head * p.tokens + tile.first_key;
    score_tile(tile, p.dim, keys.key(kv_head, tile.first_key), keys.dim, s.query, s.weights);
    for (int v = 0; v < kBlockVectors; ++v) {
      VecF decay;
      const auto weigh_vector = tile.masked ? weigh<true, kCapped> : weigh<false, kCapped>;
      if (!weigh_vector(forest, rows, tile, poison, cap, v, s, decay)) continue;
      for (int lane = 0; lane < kWidth; ++lane) {
        const int64_t at = (v * kWidth + lane) * keys.value_dim;
        for (int64_t d = at; d < at + keys.value_dim; ++d)
          s.chain[d] *= decay[lane], s.sums[d] *= decay[lane];
      }
    }
    add_keys(forest, rows, tile, s.weights, keys.value(kv_head, tile.first_key), keys.value_dim,
             s.chain, s.sums);
  }
  store_results<T>(p, rows, kv_head, s);
}

template <typename T>
void forward(const AttentionForward& p) {
  const Forest forest(p);
  const Keys<T> keys(p);
  // The last blocks see most keys: they come first, for balance.
  for_each_task<Scratch>(p, forest.row_blocks * p.kv_heads, [&](int64_t task, Scratch& s) {
    const int64_t block = forest.row_blocks - 1 - task / p.kv_heads, head = task % p.kv_heads;
    (p.softcap > 0 ? attend<T, true> : attend<T, false>)(p, forest, keys, block, head, s);
  });
}

}  // namespace

void attention_forward_cpu(const AttentionForward& p) {
  with_type(p.dtype, [&](auto type) { forward<decltype(type)>(p); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
