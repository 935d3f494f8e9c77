// The backward pass of attention; see params.h.
//
// A task holds grad_query of its rows and adds to grad_key and grad_value of the keys that it
// sees. Rows are added in ascending order: tasks start in that order, and one waits at a block of
// keys until the task before it that sees this block has added its part. Tasks that run at the
// same time are then at different blocks, as in a pipeline.
#include <thread>

#include "attention/tiles.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

struct Scratch {
  explicit Scratch(const Attention& p)
      : query(padded(p.dim) * kBlock),
        query_t(padded(p.dim) * kBlock),
        grad_out(padded(p.value_dim) * kBlock),
        grad_out_t(padded(p.value_dim) * kBlock),
        out(padded(p.value_dim) * kBlock),
        weights(kBlock * kBlock),
        grad_scores(kBlock * kBlock),
        grad_query(padded(p.dim) * kBlock),
        grad_query_chain(padded(p.dim) * kBlock) {}
  Floats query, query_t;        // [rows, dim] times a factor, and its transpose
  Floats grad_out, grad_out_t;  // [rows, value_dim]
  Floats out;
  Floats weights, grad_scores;          // [keys, rows]
  Floats grad_query, grad_query_chain;  // [rows, dim]
  alignas(64) float lse[kBlock];        // in base 2
  alignas(64) float delta[kBlock];      // grad_out . out
  alignas(64) float poison[kBlock];
  bool poisoned;
};

// Sums of one row per key, and the chains that are added to them.
struct Sums {
  Sums(const Attention& p, int64_t padded_dim)
      : tokens(p.tokens),
        dim(padded_dim),
        sums(p.kv_heads * tokens * dim),
        chains(p.kv_heads * tokens * dim) {
    std::fill_n(+sums, p.kv_heads * tokens * dim, 0.0f);
    std::fill_n(+chains, p.kv_heads * tokens * dim, 0.0f);
  }

  float* chain(int64_t head, int64_t token) const { return chains + (head * tokens + token) * dim; }

  // The chains of tokens [first, last).
  const float* end_chains(int64_t head, int64_t first, int64_t last) const {
    float* sum = sums + (head * tokens + first) * dim;
    if (first < last) end_chain(chain(head, first), sum, (last - first) * dim);
    return sum;
  }

  int64_t tokens, dim;
  Floats sums, chains;
};

// grad_key and grad_value in float32, and how far their sums are.
struct KeyGradients {
  KeyGradients(const Attention& p, const Forest& forest)
      : keys(p, padded(p.dim)),
        values(p, padded(p.value_dim)),
        key_blocks(forest.key_blocks),
        done(p.kv_heads * key_blocks) {}

  // Waits for the block of rows before `rows` that sees the keys.
  void wait_for_turn(const Forest& forest, int64_t head, int64_t rows, int64_t block) {
    int64_t before = rows - 1;
    const int64_t first = block * forest.group;  // it has the rows of the block's first key
    while (before >= first && !forest.may_see(before, block)) --before;
    const int32_t expected = before >= first ? static_cast<int32_t>(before + 1) : 0;
    while (done[head * key_blocks + block].load(std::memory_order_acquire) != expected)
      std::this_thread::yield();
  }

  void end_turn(int64_t head, int64_t rows, int64_t block) {
    done[head * key_blocks + block].store(static_cast<int32_t>(rows + 1),
                                          std::memory_order_release);
  }

  Sums keys, values;
  int64_t key_blocks;
  std::vector<std::atomic<int32_t>> done;  // [kv_heads, key_blocks]: 1 + the last block of rows
};

template <typename T>
void load_task(const AttentionBackward& p, const RowBlock& rows, int64_t kv_head, Scratch& s) {
  const float factor = p.softcap > 0 ? p.softmax_scale / p.softcap : p.softmax_scale * kLog2E;
  const int64_t group = p.heads / p.kv_heads, dim = padded(p.value_dim);
  std::fill_n(s.poison, kBlock, 0.0f);
  s.poisoned = !load_rows<T>(p, p.query, rows, kv_head, p.dim, factor, s.query, s.poison);
  s.poisoned |=
      !load_rows<T>(p, p.grad_out, rows, kv_head, p.value_dim, 1.0f, s.grad_out, s.poison);
  load_rows<T>(p, p.out, rows, kv_head, p.value_dim, 1.0f, s.out);
  transpose_rows(s.query, padded(p.dim), s.query_t);
  transpose_rows(s.grad_out, dim, s.grad_out_t);
  for (int64_t r = 0; r < kBlock; ++r) {
    VecF products{};
    for (int64_t d = 0; d < dim; d += kWidth)
      products += load(s.grad_out + r * dim + d) * load(s.out + r * dim + d);
    s.delta[r] = static_cast<float>(sum(products));
    const int64_t row = rows.first + r, head = kv_head * group + row % group;
    s.lse[r] = r < rows.count ? p.lse[head * p.tokens + row / group] * kLog2E : 0.0f;
  }
  std::fill_n(+s.grad_query, kBlock * padded(p.dim), 0.0f);
  std::fill_n(+s.grad_query_chain, kBlock * padded(p.dim), 0.0f);
}

// From scores and grad_out . value to weights and gradients of the scores, up to a factor.
template <bool kMasked, bool kCapped>
void differentiate(const Forest& forest, const RowBlock& rows, const Tile& tile,
                   const float* key_poison, float cap, Scratch& s) {
  for (int64_t j = 0; j < tile.keys; ++j) {
    float *weights = s.weights + j * kBlock, *grads = s.grad_scores + j * kBlock;
    const int first = tile.first_vector[j / kGroup], end = tile.end_vector[j / kGroup];
    for (int v = 0; v < kBlockVectors; ++v) {
      const int at = v * kWidth;
      if (v < first || v >= end) {
        store(grads + at, VecF{});
        continue;
      }
      VecF x = load(weights + at), slope = splat(1.0f);
      if constexpr (kCapped) {
        const VecF capped = tanh(x);
        x = cap * capped;
        slope = 1.0f - capped * capped;
      }
      if constexpr (kMasked) x += key_poison[j] + load(s.poison + at);
      VecF weight = exp2(at_least(-150.0f, x - load(s.lse + at)));
      VecF grad = weight * (load(grads + at) - load(s.delta + at));
      if constexpr (kCapped) grad *= slope;
      if constexpr (kMasked) {
        const VecI visible = forest.visible(rows, v, tile.first_key + j);
        weight = select(visible, weight, VecF{});
        grad = select(visible, grad, VecF{});
      }
      store(weights + at, weight);
      store(grads + at, grad);
    }
  }
}

// chains[key, d] += sum_row weights[key, row] rows[row, d] for the rows [begin, end) in the hull.
void add_rows(const Tile& tile, int64_t begin, int64_t end, const float* weights, const float* rows,
              const Sums& sums, int64_t kv_head) {
  for (int g = 0; g * kGroup < tile.keys; ++g) {
    const int64_t key = g * kGroup, dim = sums.dim;
    const int64_t row = std::max<int64_t>(begin, tile.first_vector[g] * kWidth);
    const int64_t last = std::min<int64_t>(end, tile.end_vector[g] * kWidth);
    if (row >= last) continue;
    multiply<Layout::rows>(std::min<int64_t>(kGroup, tile.keys - key), dim / kWidth, last - row,
                           weights + key * kBlock + row, kBlock, rows + row * dim, dim,
                           sums.chain(kv_head, tile.first_key + key), dim, true);
  }
}

void add_key_gradients(const Forest& forest, const RowBlock& rows, const Forest::RowCut& cut,
                       const Tile& tile, int64_t kv_head, const KeyGradients& sums,
                       const Scratch& s) {
  const int64_t first = std::max(tile.first_key, cut.first_key);
  const int64_t last = std::min(tile.first_key + tile.keys, cut.end_key);
  const int64_t middle = std::min(rows.count, cut.row);
  add_rows(tile, 0, middle, s.weights, s.grad_out, sums.values, kv_head);
  add_rows(tile, 0, middle, s.grad_scores, s.query, sums.keys, kv_head);
  sums.values.end_chains(kv_head, first, last);
  sums.keys.end_chains(kv_head, first, last);
  add_rows(tile, middle, rows.count, s.weights, s.grad_out, sums.values, kv_head);
  add_rows(tile, middle, rows.count, s.grad_scores, s.query, sums.keys, kv_head);
}

template <typename T, bool kCapped>
void differentiate_rows(const AttentionBackward& p, const Forest& forest, const Keys<T>& keys,
                        KeyGradients& sums, int64_t block, int64_t kv_head, Scratch& s) {
  const RowBlock rows = forest.rows(block);
  load_task<T>(p, rows, kv_head, s);
  const float cap = p.softcap * kLog2E;
  for (int64_t b = 0; b <= forest.last_key_block(block); ++b) {
    if (!forest.may_see(block, b)) continue;
    Tile tile = forest.tile(rows, block, b);
    tile.masked |= s.poisoned || keys.is_poisoned(kv_head, b);
    const float* key = keys.key(kv_head, tile.first_key);
    score_tile(tile, p.dim, key, keys.dim, s.query_t, s.weights);
    score_tile(tile, p.value_dim, keys.value(kv_head, tile.first_key), keys.value_dim, s.grad_out_t,
               s.grad_scores);
    (tile.masked ? differentiate<true, kCapped>
                 : differentiate<false, kCapped>)(forest, rows, tile,
                                                  keys.poison + kv_head * p.tokens + tile.first_key,
                                                  cap, s);
    add_keys(forest, rows, tile, s.grad_scores, key, keys.dim, s.grad_query_chain, s.grad_query);
    sums.wait_for_turn(forest, kv_head, block, b);
    add_key_gradients(forest, rows, forest.row_cuts[block], tile, kv_head, sums, s);
    sums.end_turn(kv_head, block, b);
  }
  end_chain(s.grad_query_chain, s.grad_query, kBlock * keys.dim);
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t row = rows.first + r, head = kv_head * forest.group + row % forest.group;
    store_row(static_cast<T*>(p.grad_query) + (row / forest.group * p.heads + head) * p.dim,
              s.grad_query + r * keys.dim, p.dim, p.softmax_scale);
  }
}

template <typename T>
void backward(const AttentionBackward& p) {
  const Forest forest(p);
  const Keys<T> keys(p);
  KeyGradients sums(p, forest);
  for_each_task<Scratch>(p, forest.row_blocks * p.kv_heads, [&](int64_t task, Scratch& s) {
    const int64_t block = task / p.kv_heads, head = task % p.kv_heads;
    (p.softcap > 0 ? differentiate_rows<T, true>
                   : differentiate_rows<T, false>)(p, forest, keys, sums, block, head, s);
  });
  // The rows of queries that were added are times the factor of load_task.
  const float factor = p.softcap > 0 ? p.softcap : kLn2;
  parallel_for(p.tokens, kBlock, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * p.kv_heads; i < end * p.kv_heads; ++i) {
      const int64_t token = i / p.kv_heads, head = i % p.kv_heads;
      store_row(static_cast<T*>(p.grad_key) + i * p.dim,
                sums.keys.end_chains(head, token, token + 1), p.dim, factor);
      store_row(static_cast<T*>(p.grad_value) + i * p.value_dim,
                sums.values.end_chains(head, token, token + 1), p.value_dim, 1.0f);
    }
  });
}

}  // namespace

void attention_backward_cpu(const AttentionBackward& p) {
  with_type(p.dtype, [&](auto type) { backward<decltype(type)>(p); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
