// What forward and backward share: operands in float32, and which part of a tile is visible.
// Included only by *_cpu.cpp files.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "attention/params.h"
#include "attention/products.h"
#include "common/parallel.h"
#include "common/simd.h"
#include "common/transpose.h"

namespace hybridengine::HYBRIDENGINE_ISA {

constexpr int kBlockVectors = kBlock / kWidth;
constexpr int kGroups = (kBlock + kGroup - 1) / kGroup;
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

inline int64_t padded(int64_t dim) { return (dim + kWidth - 1) / kWidth * kWidth; }
inline int64_t count_blocks(int64_t count) { return (count + kBlock - 1) / kBlock; }

// Uninitialized floats, aligned to a cache line.
class Floats {
 public:
  explicit Floats(int64_t count)
      : data_(static_cast<float*>(std::aligned_alloc(64, (count + 16) / 16 * 64)), std::free) {}
  operator float*() const { return data_.get(); }

 private:
  std::unique_ptr<float, decltype(&std::free)> data_;
};

template <typename T>
const T* row_of(const HeadRows& rows, int64_t token, int64_t head) {
  return static_cast<const T*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
}

// Writes factor * in[0:count] with zeros up to padded(count). A row with NaN or infinity becomes
// zero instead, and the result is false.
template <typename T>
bool load_row(const T* in, int64_t count, float factor, float* out) {
  VecF zero{};  // NaN where an element is not finite
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const VecF x = load(in + i);
    zero += x * 0.0f;
    store(out + i, x * factor);
  }
  if (i < count) {
    const VecF x = load_part(in + i, count - i, 0.0f);
    zero += x * 0.0f;
    store(out + i, x * factor);
  }
  const VecI is_nan = zero != zero;
  int32_t any = 0;
  for (int lane = 0; lane < kWidth; ++lane) any |= is_nan[lane];
  if (!any) return true;
  std::fill(out, out + padded(count), 0.0f);
  return false;
}

// out[d, r] = in[r, d]: [kBlock, dim] to [dim, kBlock], dim a multiple of kWidth.
inline void transpose_rows(const float* in, int64_t dim, float* out) {
  for (int64_t r = 0; r < kBlock; r += kWidth) {
    for (int64_t d = 0; d < dim; d += kWidth) {
      VecU block[kWidth];
      for (int i = 0; i < kWidth; ++i) std::memcpy(&block[i], in + (r + i) * dim + d, sizeof(VecU));
      swap_blocks<1>(block);
      for (int i = 0; i < kWidth; ++i)
        std::memcpy(out + (d + i) * kBlock + r, &block[i], sizeof(VecU));
    }
  }
}

template <typename T>
void store_row(T* out, const float* in, int64_t count, float factor) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(out + i, load(in + i) * factor);
  if (i < count) store_part(out + i, load(in + i) * factor, count - i);
}

// Calls body(task, scratch) for all tasks, in ascending order of their start.
template <typename Scratch, typename Body>
void for_each_task(const Attention& p, int64_t count, const Body& body) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(p.num_threads, count);
  parallel_for(threads, 1, static_cast<int>(threads), [&](int64_t, int64_t) {
    Scratch scratch(p);
    for (int64_t task; (task = next.fetch_add(1)) < count;) body(task, scratch);
  });
}

// Keys and values of every head as float32 [kv_heads, tokens, padded dim]. A token whose key or
// value is not finite has NaN as its poison, else 0: added to its scores it spreads to the rows
// that see it, while its elements, zeroed, reach no other row.
template <typename T>
struct Keys {
  explicit Keys(const Attention& p)
      : dim(padded(p.dim)),
        value_dim(padded(p.value_dim)),
        tokens(p.tokens),
        keys(p.kv_heads * tokens * dim),
        values(p.kv_heads * tokens * value_dim),
        poison(p.kv_heads * tokens),
        poisoned(p.kv_heads * count_blocks(tokens)) {
    parallel_for(p.kv_heads * count_blocks(tokens), 1, p.num_threads, [&](int64_t b, int64_t e) {
      for (int64_t i = b; i < e; ++i)
        convert(p, i / count_blocks(tokens), i % count_blocks(tokens));
    });
  }

  void convert(const Attention& p, int64_t head, int64_t block) {
    bool all_finite = true;
    for (int64_t j = block * kBlock, end = std::min(tokens, j + kBlock); j < end; ++j) {
      bool finite = load_row(row_of<T>(p.key, j, head), p.dim, 1.0f, key(head, j));
      finite &= load_row(row_of<T>(p.value, j, head), p.value_dim, 1.0f, value(head, j));
      poison[head * tokens + j] = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
      all_finite &= finite;
    }
    poisoned[head * count_blocks(tokens) + block] = !all_finite;
  }

  bool is_poisoned(int64_t head, int64_t block) const {
    return poisoned[head * count_blocks(tokens) + block];
  }
  float* key(int64_t head, int64_t token) const { return keys + (head * tokens + token) * dim; }
  float* value(int64_t head, int64_t token) const {
    return values + (head * tokens + token) * value_dim;
  }

  int64_t dim, value_dim, tokens;
  Floats keys, values, poison;
  std::vector<uint8_t> poisoned;  // [kv_heads, blocks]: any token of the block
};

// A block of rows of one key-value head. Rows past the end have token -1, which sees nothing.
struct RowBlock {
  int64_t first, count;  // rows
  int64_t first_token, last_token;
  alignas(64) int32_t token[kBlock];
  alignas(64) int32_t position[kBlock];
};

// The rows of a block as float32 [kBlock, padded dim], times a factor; zeros past the end. Returns
// whether all are finite; `poison`, if given, becomes NaN for those that are not, else unchanged.
template <typename T>
bool load_rows(const Attention& p, const HeadRows& source, const RowBlock& rows, int64_t kv_head,
               int64_t dim, float factor, float* out, float* poison = nullptr) {
  const int64_t group = p.heads / p.kv_heads, stride = padded(dim);
  bool all_finite = true;
  int64_t token = rows.first_token, g = rows.first % group;
  for (int64_t r = 0; r < rows.count; ++r) {
    const T* row = row_of<T>(source, token, kv_head * group + g);
    if (!load_row(row, dim, factor, out + r * stride)) {
      all_finite = false;
      if (poison) poison[r] = std::numeric_limits<float>::quiet_NaN();
    }
    if (++g == group) g = 0, ++token;
  }
  std::fill(out + rows.count * stride, out + kBlock * stride, 0.0f);
  return all_finite;
}

// The part of a tile that is computed: hulls of what is visible.
struct Tile {
  int64_t first_key, keys;
  bool masked;  // some element of the hulls is not visible
  // By group of keys: vectors [begin, end) of rows. By group of rows: keys [begin, end).
  int8_t first_vector[kGroups], end_vector[kGroups];
  int8_t begin_key[kGroups], end_key[kGroups];
  uint64_t cuts;  // bit j: key j begins a new chain for the rows that see it
};

// sums[i] += chain[i], and the chain begins anew.
inline void end_chain(float* chain, float* sums, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] += chain[i], chain[i] = 0.0f;
}

class Forest {
 public:
  explicit Forest(const Attention& p)
      : ends(p.ends),
        positions(p.positions),
        tokens(p.tokens),
        group(p.heads / p.kv_heads),
        window(p.positions ? p.window : std::numeric_limits<int32_t>::max()),
        row_blocks(count_blocks(tokens * group)),
        key_blocks(count_blocks(tokens)),
        cut_keys(key_blocks),
        row_cuts(row_blocks),
        min_end(key_blocks),
        max_end(key_blocks),
        key_positions(key_blocks),
        row_positions(row_blocks) {
    for (int64_t b = 0; b < key_blocks; ++b) {
      const int64_t first = b * kBlock, last = std::min(tokens, first + kBlock);
      const auto [low, high] = std::minmax_element(ends + first, ends + last);
      min_end[b] = *low, max_end[b] = *high;
      key_positions[b] = range(first, last);
    }
    for (int64_t b = 0; b < row_blocks; ++b)
      row_positions[b] = range(first_token(b), last_token(b) + 1);
    cut_chains();
  }

  int64_t first_token(int64_t block) const { return block * kBlock / group; }
  int64_t last_token(int64_t block) const {
    return (std::min(tokens * group, (block + 1) * kBlock) - 1) / group;
  }
  int64_t last_key_block(int64_t rows) const { return last_token(rows) / kBlock; }

  // Whether any key of the block may be visible to any row of the block.
  bool may_see(int64_t rows, int64_t keys) const {
    return max_end[keys] > first_token(rows) && keys * kBlock <= last_token(rows) &&
           int64_t{row_positions[rows].first} - key_positions[keys].second < window;
  }

  bool sees_all(int64_t rows, int64_t keys) const {
    return min_end[keys] > last_token(rows) && (keys + 1) * kBlock <= first_token(rows) + 1 &&
           (rows + 1) * kBlock <= tokens * group &&
           int64_t{row_positions[rows].second} - key_positions[keys].first < window;
  }

  RowBlock rows(int64_t block) const {
    RowBlock rows;
    rows.first = block * kBlock;
    rows.count = std::min(kBlock, tokens * group - rows.first);
    rows.first_token = first_token(block), rows.last_token = last_token(block);
    int64_t token = rows.first_token, of_token = rows.first % group;
    for (int64_t r = 0; r < kBlock; ++r) {
      rows.token[r] = r < rows.count ? static_cast<int32_t>(token) : -1;
      rows.position[r] = r < rows.count ? position(token) : 0;
      if (++of_token == group) of_token = 0, ++token;
    }
    return rows;
  }

  int32_t position(int64_t token) const { return positions ? positions[token] : 0; }

  Tile tile(const RowBlock& rows, int64_t row_block, int64_t key_block) const;

  // Which rows of the vector are in the key's subtree.
  VecI in_subtree(const RowBlock& rows, int vector, int64_t key) const {
    VecI token;
    std::memcpy(&token, rows.token + vector * kWidth, sizeof token);
    return (token >= static_cast<int32_t>(key)) & (token < ends[key]);
  }

  // Which rows of the vector see the key.
  VecI visible(const RowBlock& rows, int vector, int64_t key) const {
    if (!positions) return in_subtree(rows, vector, key);
    VecI depth;
    std::memcpy(&depth, rows.position + vector * kWidth, sizeof depth);
    return in_subtree(rows, vector, key) & (depth - positions[key] < window);
  }

  // Rows [first, last) of the block that see the key, but for the window.
  std::pair<int64_t, int64_t> seen_by(const RowBlock& rows, int64_t key) const {
    return {row_at(rows, key), row_at(rows, ends[key])};
  }

  // A row of the block that begins a new chain for the keys [first_key, end_key) of its tree.
  struct RowCut {
    int64_t row = kBlock, first_key = 0, end_key = 0;
  };

  const int32_t *ends, *positions;
  int64_t tokens, group;
  int32_t window;
  int64_t row_blocks, key_blocks;
  std::vector<uint64_t> cut_keys;  // [key_blocks], see Tile
  std::vector<RowCut> row_cuts;    // [row_blocks]

 private:
  // The row of the block at which a token begins, clamped.
  int64_t row_at(const RowBlock& rows, int64_t token) const {
    return std::clamp<int64_t>(token * group - rows.first, 0, rows.count);
  }

  void cut_chains() {
    std::vector<int32_t> ending(tokens + 1);  // keys whose subtree ends at each token
    int64_t depth = -1, tree = 0, tree_end = 0;
    for (int64_t i = 0; i < tokens; ++i) {
      depth += 1 - ending[i];
      ++ending[ends[i]];
      if (depth > 0 && depth % kChain == 0) cut_keys[i / kBlock] |= uint64_t{1} << i % kBlock;
      if (i == tree_end) tree = i;
      tree_end = std::max<int64_t>(tree_end, ends[i]);
      if (i + 1 < tree_end) continue;
      for (int64_t row = tree * group + kChain; row < tree_end * group; row += kChain)
        row_cuts[row / kBlock] = {row % kBlock, tree, tree_end};
    }
  }

  std::pair<int32_t, int32_t> range(int64_t first, int64_t last) const {
    if (!positions) return {0, 0};
    const auto [low, high] = std::minmax_element(positions + first, positions + last);
    return {*low, *high};
  }

  std::vector<int32_t> min_end, max_end;                                  // [key_blocks]
  std::vector<std::pair<int32_t, int32_t>> key_positions, row_positions;  // least and largest
};

inline Tile Forest::tile(const RowBlock& rows, int64_t row_block, int64_t key_block) const {
  Tile tile;
  tile.first_key = key_block * kBlock;
  tile.keys = std::min(kBlock, tokens - tile.first_key);
  tile.masked = !sees_all(row_block, key_block);
  tile.cuts = cut_keys[key_block];
  std::fill_n(tile.first_vector, kGroups, int8_t{0});
  std::fill_n(tile.end_vector, kGroups, int8_t{kBlockVectors});
  std::fill_n(tile.begin_key, kGroups, int8_t{0});
  std::fill_n(tile.end_key, kGroups, int8_t{kBlock});
  if (!tile.masked) return tile;
  int64_t end_row[kBlock];
  for (int64_t j = 0; j < tile.keys; ++j) end_row[j] = row_at(rows, ends[tile.first_key + j]);
  for (int64_t g = 0; g < kGroups; ++g) {
    const int64_t first = g * kGroup, last = std::min(tile.keys, first + kGroup);
    const int64_t begin = row_at(rows, tile.first_key + first);
    int64_t end = 0;
    for (int64_t j = first; j < last; ++j) end = std::max(end, end_row[j]);
    tile.first_vector[g] = static_cast<int8_t>(begin / kWidth);
    tile.end_vector[g] =
        static_cast<int8_t>(end > begin ? (end + kWidth - 1) / kWidth : tile.first_vector[g]);
  }
  int64_t begin = 0;
  for (int64_t g = 0; g < kGroups; ++g) {
    const int64_t row = g * kGroup, last = std::min(rows.count, row + kGroup) - 1;
    const int64_t end =
        last < row ? 0 : std::min(tile.keys, int64_t{rows.token[last]} + 1 - tile.first_key);
    while (begin < end && end_row[begin] <= row) ++begin;
    tile.begin_key[g] = static_cast<int8_t>(begin);
    tile.end_key[g] = static_cast<int8_t>(std::max(begin, end));
  }
  return tile;
}

// scores[key, row] = sum_d keys[key, d] rows[d, row] in the hull of the tile.
inline void score_tile(const Tile& tile, int64_t dim, const float* keys, int64_t key_stride,
                       const float* rows, float* scores) {
  for (int g = 0; g * kGroup < tile.keys; ++g) {
    const int64_t vector = tile.first_vector[g], first = g * kGroup;
    multiply<Layout::rows>(std::min<int64_t>(kGroup, tile.keys - first),
                           tile.end_vector[g] - vector, dim, keys + first * key_stride, key_stride,
                           rows + vector * kWidth, kBlock,
                           scores + first * kBlock + vector * kWidth, kBlock, false);
  }
}

// chain[row, d] += sum_key weights[key, row] keys[key, d]; a chain that is cut is added to `sums`.
inline void add_keys(const Forest& forest, const RowBlock& rows, const Tile& tile,
                     const float* weights, const float* keys, int64_t dim, float* chain,
                     float* sums) {
  int64_t begin = 0;
  const auto add_until = [&](int64_t end) {
    for (int g = 0; g * kGroup < rows.count; ++g) {
      const int64_t row = g * kGroup, key = std::max<int64_t>(begin, tile.begin_key[g]);
      const int64_t last = std::min<int64_t>(end, tile.end_key[g]);
      if (key >= last) continue;
      multiply<Layout::columns>(std::min<int64_t>(kGroup, rows.count - row), dim / kWidth,
                                last - key, weights + key * kBlock + row, kBlock, keys + key * dim,
                                dim, chain + row * dim, dim, true);
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

template <typename Body>
void with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::bf16:
      return body(bf16{});
    case DType::f16:
      return body(f16{});
    default:
      return body(float{});
  }
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
