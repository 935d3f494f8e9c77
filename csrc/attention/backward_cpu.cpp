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

template <typename Step>
struct Scratch {
  explicit Scratch(const Attention& p)
      : query(kBlock, p.dim, true),
        grad_out(kBlock, p.value_dim, true),
        query_t(query.dim / kStep<Step> * kBlock),
        grad_out_t(grad_out.dim / kStep<Step> * kBlock),
        scores(kBlock * kBlock),
        products(kBlock * kBlock),
        weights(scores),
        grads(products),
        grads_by_key(products),
        grad_query(query.dim * kBlock),
        grad_query_chain(query.dim * kBlock) {}
  Operand<Step> query, grad_out;        // [rows, dim]
  Buffer<Step> query_t, grad_out_t;     // their transposes
  Floats scores, products;              // q . k and grad_out . value, [keys, rows]
  Weights<Step> weights, grads;         // and gradients of the scores, along rows
  Weights<Step> grads_by_key;           // the same along keys
  Floats grad_query, grad_query_chain;  // [rows, dim]
  alignas(64) float lse[kBlock];        // in base 2
  alignas(64) float delta[kBlock];      // grad_out . out
  alignas(64) float poison[kBlock];
  bool poisoned;
};

// Sums of one row per key, and the chains that are added to them.
struct Sums {
  Sums(const Attention& p, int64_t slots, int64_t padded_dim)
      : count(slots),
        dim(padded_dim),
        sums(p.kv_heads * count * dim),
        chains(p.kv_heads * count * dim) {
    std::fill_n(+sums, p.kv_heads * count * dim, 0.0f);
    std::fill_n(+chains, p.kv_heads * count * dim, 0.0f);
  }

  float* chain(int64_t head, int64_t slot) const { return chains + (head * count + slot) * dim; }

  // Ends the chains of the slots [first, last) and returns the first one's sum.
  float* end_chains(int64_t head, int64_t first, int64_t last) const {
    float* sum = sums + (head * count + first) * dim;
    if (first < last) end_chain(chain(head, first), sum, (last - first) * dim);
    return sum;
  }

  // Adds the sum of a copy to that of its key.
  void add_copy(int64_t head, int64_t copy, int64_t key) const {
    const float* from = end_chains(head, copy, copy + 1);
    float* to = end_chains(head, key, key + 1);
    for (int64_t d = 0; d < dim; ++d) to[d] += from[d];
  }

  int64_t count, dim;
  Floats sums, chains;
};

// grad_key and grad_value in float32, and how far their sums are.
struct KeyGradients {
  template <typename T>
  KeyGradients(const Attention& p, const Forest& forest, const Keys<T>& like)
      : keys(p, forest.count, like.keys.dim),
        values(p, forest.count, like.values.dim),
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
float dot(const T* a, const T* b, int64_t count) {
  VecF products{};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) products += load(a + i) * load(b + i);
  if (i < count) products += load_part(a + i, count - i, 0.0f) * load_part(b + i, count - i, 0.0f);
  return static_cast<float>(sum(products));
}

template <typename T, typename Step>
void load_task(const AttentionBackward& p, const Forest& forest, const RowBlock& rows,
               int64_t kv_head, Scratch<Step>& s) {
  const Slots& slots = forest.slots;
  std::fill_n(s.poison, kBlock, 0.0f);
  s.poisoned = !load_rows<T>(p, p.query, slots, rows, kv_head, p.dim, s.query, s.poison);
  s.poisoned |=
      !load_rows<T>(p, p.grad_out, slots, rows, kv_head, p.value_dim, s.grad_out, s.poison);
  transpose_rows(s.query, +s.query_t);
  transpose_rows(s.grad_out, +s.grad_out_t);
  for (int64_t r = 0; r < kBlock; ++r) {
    s.delta[r] = s.lse[r] = 0.0f;
    const int64_t token = r < rows.count ? slots.queries[rows.slot[r]] : -1;
    if (token < 0) continue;
    const int64_t head = kv_head * forest.group + (rows.first + r) % forest.group;
    s.delta[r] = dot(p.grad_out.template row<T>(token, head), p.out.template row<T>(token, head),
                     p.value_dim);
    p.delta[head * p.tokens + token] = s.delta[r];
    s.lse[r] = p.lse[head * p.tokens + token] * kLog2E;
  }
  std::fill_n(+s.grad_query, kBlock * s.query.dim, 0.0f);
  std::fill_n(+s.grad_query_chain, kBlock * s.query.dim, 0.0f);
}

// Forms weights and gradients of the scores, up to a factor, of the keys of group g, whose products
// begin at s.scores + offset and s.products + offset.
template <bool kMasked, bool kCapped, typename Step>
void differentiate(const Forest& forest, const RowBlock& rows, const Tile& tile, int g,
                   int64_t offset, const float* key_poison, float factor, float cap,
                   Scratch<Step>& s) {
  constexpr int64_t n = kStep<Step>;
  const int64_t first_key = g * kGroup, end_key = std::min<int64_t>(tile.keys, first_key + kGroup);
  for (int64_t first = first_key; first < end_key; first += n) {
    for (int v = 0; v < kBlockVectors; ++v) {
      const int at = v * kWidth;
      VecF grads[n]{};
      const bool computed = tile.first_vector[g] <= v && v < tile.end_vector[g];
      for (int64_t i = 0; i < n && computed; ++i) {
        const int64_t j = first + i, from = offset + (j - first_key) * kBlock + at;
        VecF x = load(s.scores + from), slope = splat(1.0f);
        if constexpr (kCapped) {
          const VecF capped = tanh(factor * x);
          x = cap * capped - load(s.lse + at);
          slope = 1.0f - capped * capped;
        } else {
          x = factor * x - load(s.lse + at);
        }
        if constexpr (kMasked) x += key_poison[j] + load(s.poison + at);
        VecF weight = exp2(at_least(-150.0f, x));
        VecF grad = weight * (load(s.products + from) - load(s.delta + at));
        if constexpr (kCapped) grad *= slope;
        if constexpr (kMasked) {
          const VecI visible = forest.visible(rows, v, tile.first_key + j);
          weight = select(visible, weight, VecF{});
          grad = select(visible, grad, VecF{});
        }
        store_along_rows(s.weights, j, at, weight);
        store_along_rows(s.grads, j, at, grad);
        grads[i] = grad;
      }
      if (n > 1 || !computed) store_along_keys(s.grads_by_key, first, at, grads);
    }
  }
}

// chains[key, d] += sum_row weights[key, row] rows[row, d] for the rows [begin, end) in the hull;
// both are multiples of a step.
template <typename Step>
void add_rows(const Tile& tile, int64_t begin, int64_t end, const Step* weights,
              const Operand<Step>& rows, const Sums& sums, int64_t kv_head) {
  constexpr int64_t stride = kBlock / kStep<Step>;
  for (int g = 0; g * kGroup < tile.keys; ++g) {
    const int64_t key = g * kGroup, dim = sums.dim;
    const int64_t row = std::max<int64_t>(begin, tile.first_vector[g] * kWidth);
    const int64_t last = std::min<int64_t>(end, tile.end_vector[g] * kWidth);
    if (row >= last) continue;
    multiply<Layout::rows>(std::min<int64_t>(kGroup, tile.keys - key), dim / kWidth,
                           (last - row) / kStep<Step>, weights + key * stride + row / kStep<Step>,
                           stride, rows.along_rows(row), dim,
                           sums.chain(kv_head, tile.first_key + key), dim, true);
  }
}

template <typename Step>
void add_key_gradients(const Forest& forest, const RowBlock& rows, const Forest::RowCut& cut,
                       const Tile& tile, int64_t kv_head, const KeyGradients& sums,
                       const Scratch<Step>& s) {
  const Step *weights = s.weights, *grads = s.grads;
  const int64_t first = std::max(tile.first_key, cut.first_key);
  const int64_t last = std::min(tile.first_key + tile.keys, cut.end_key);
  const int64_t middle = std::min(rows.count, cut.row);
  add_rows(tile, 0, middle, weights, s.grad_out, sums.values, kv_head);
  add_rows(tile, 0, middle, grads, s.query, sums.keys, kv_head);
  sums.values.end_chains(kv_head, first, last);
  sums.keys.end_chains(kv_head, first, last);
  add_rows(tile, middle, rows.count, weights, s.grad_out, sums.values, kv_head);
  add_rows(tile, middle, rows.count, grads, s.query, sums.keys, kv_head);
}

template <typename T, bool kCapped, typename Step>
void differentiate_rows(const AttentionBackward& p, const Forest& forest, const Keys<T>& keys,
                        KeyGradients& sums, int64_t block, int64_t kv_head, Scratch<Step>& s) {
  const RowBlock rows = forest.rows(block);
  load_task<T>(p, forest, rows, kv_head, s);
  const float factor = score_factor(p.softmax_scale, p.softcap), cap = p.softcap * kLog2E;
  for (int64_t b = 0; b <= forest.last_key_block(block); ++b) {
    if (!forest.may_see(block, b)) continue;
    Tile tile = forest.tile(rows, block, b);
    tile.masked |= s.poisoned || keys.is_poisoned(kv_head, b);
    const int64_t first_key = kv_head * keys.count + tile.first_key;
    for (int g = 0; g * kGroup < tile.keys; ++g) {
      // Rounded weights have a place of their own: products of all groups then use that of the
      // first.
      const int64_t offset = kStep<Step> > 1 ? 0 : g * kGroup * kBlock;
      score_group(tile, g, p.dim, keys.keys, first_key, +s.query_t, s.scores + offset);
      score_group(tile, g, p.value_dim, keys.values, first_key, +s.grad_out_t, s.products + offset);
      (tile.masked ? differentiate<true, kCapped, Step>
                   : differentiate<false, kCapped, Step>)(forest, rows, tile, g, offset,
                                                          keys.poison + first_key, factor, cap, s);
    }
    add_keys(forest, rows, tile, +s.grads_by_key, keys.keys, first_key, s.grad_query_chain,
             s.grad_query);
    sums.wait_for_turn(forest, kv_head, block, b);
    add_key_gradients(forest, rows, forest.row_cuts[block], tile, kv_head, sums, s);
    sums.end_turn(kv_head, block, b);
  }
  end_chain(s.grad_query_chain, s.grad_query, kBlock * s.query.dim);
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t token = forest.slots.queries[rows.slot[r]];
    if (token < 0) continue;
    const int64_t head = kv_head * forest.group + (rows.first + r) % forest.group;
    store_row(static_cast<T*>(p.grad_query) + (token * p.heads + head) * p.dim,
              s.grad_query + r * s.query.dim, p.dim, p.softmax_scale);
  }
}

template <typename T>
void backward(const AttentionBackward& p) {
  using Step = StepOf<T>;
  const Forest forest(p, kStep<Step>);
  const Keys<T> keys(p, forest, true, false);
  KeyGradients sums(p, forest, keys);
  for_each_task<Scratch<Step>>(p, forest.row_blocks * p.kv_heads, [&](int64_t task, auto& s) {
    const int64_t block = task / p.kv_heads, head = task % p.kv_heads;
    (p.softcap > 0 ? differentiate_rows<T, true, Step>
                   : differentiate_rows<T, false, Step>)(p, forest, keys, sums, block, head, s);
  });
  for (int64_t head = 0; head < p.kv_heads; ++head) {
    for (const auto& [copy, key] : forest.slots.copies) {
      sums.keys.add_copy(head, copy, key);
      sums.values.add_copy(head, copy, key);
    }
  }
  parallel_for(forest.count, kBlock, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const int64_t token = forest.slots.queries[slot];
      if (token < 0) continue;
      for (int64_t head = 0; head < p.kv_heads; ++head) {
        const int64_t row = token * p.kv_heads + head;
        store_row(static_cast<T*>(p.grad_key) + row * p.dim,
                  sums.keys.end_chains(head, slot, slot + 1), p.dim, p.softmax_scale);
        store_row(static_cast<T*>(p.grad_value) + row * p.value_dim,
                  sums.values.end_chains(head, slot, slot + 1), p.value_dim, 1.0f);
      }
    }
  });
}

}  // namespace

void attention_backward_cpu(const AttentionBackward& p) {
  with_factor<float, f16, bf16>(p.dtype, [&](auto type) { backward<decltype(type)>(p); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
