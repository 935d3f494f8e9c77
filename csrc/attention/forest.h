// The order in which attention computes a forest, and which part of a tile is visible. Included
// only by *_cpu.cpp files.
#pragma once

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention/params.h"
#include "common/products.h"
#include "common/simd.h"

namespace hybridengine::HYBRIDENGINE_ISA {

constexpr int kBlockVectors = kBlock / kWidth;
constexpr int kGroups = (kBlock + kGroup - 1) / kGroup;

inline int64_t count_blocks(int64_t count) { return (count + kBlock - 1) / kBlock; }

// The order of the computation: a slot per token, as packed, and others for sums in steps of n
// keys. A step has the keys at depths [k n, k n + n) of a path, wherever its tree lies and whether
// or not it is shared, so that results do not depend on these. A tree therefore begins at a
// multiple of n; a branch that begins within a step, other than the first, has copies of the keys
// before it in the step (for n = 2 its parent), which itself is then seen by the first branch
// alone. A slot that has no query is computed with one of zeros.
struct Slots {
  Slots(const Attention& p, int64_t step) {
    std::vector<int32_t> path;  // slots that the next token sees
    const auto end_subtree = [&] {
      const int32_t slot = path.back();
      path.pop_back();
      if (!ends[slot]) ends[slot] = count();
      if (slot > 0 && is_copy(slot - 1)) ends[slot - 1] = count();
      if (path.empty()) trees.back().second = count();
    };
    for (int32_t i = 0; i < p.tokens; ++i) {
      while (!path.empty() && p.ends[keys[path.back()]] <= i) end_subtree();
      check_nested(p, path, i);
      const int32_t depth = static_cast<int32_t>(path.size());
      if (path.empty() || keys[path.back()] != i - 1) {
        const bool within_step = depth % step;
        if (within_step && !ends[path.back()]) ends[path.back()] = count();
        if (count() % step) add_padding();
        if (within_step) {
          copies.emplace_back(count(), path.back());
          add(keys[path.back()], -1, depth - 1, 0);
        }
      }
      if (path.empty()) trees.emplace_back(count(), 0);
      path.push_back(count());
      add(i, i, depth, 0);
    }
    while (!path.empty()) end_subtree();
    if (count() % step) add_padding();
    if (!p.positions) return;
    for (const int32_t key : keys)
      positions.push_back(key < 0 ? positions.back() : p.positions[key]);
  }

  int32_t count() const { return static_cast<int32_t>(keys.size()); }
  bool is_copy(int32_t slot) const { return keys[slot] >= 0 && queries[slot] < 0; }

  std::vector<int32_t> keys, queries;  // [slots], a token or -1
  std::vector<int32_t> depths, ends;   // [slots], the end of the slots that see the key
  std::vector<int32_t> positions;      // [slots], empty without a window
  std::vector<std::pair<int32_t, int32_t>> copies;  // slot of a copy, and of what it copies
  std::vector<std::pair<int64_t, int64_t>> trees;   // slots [first, end)

 private:
  void check_nested(const Attention& p, const std::vector<int32_t>& path, int32_t token) const {
    if (path.empty() || p.ends[token] <= p.ends[keys[path.back()]]) return;
    const std::string above = std::to_string(keys[path.back()]), i = std::to_string(token);
    throw std::invalid_argument(
        "tree_attention: subtree_ends[" + i + "] is " + std::to_string(p.ends[token]) +
        ", more than subtree_ends[" + above + "], " + std::to_string(p.ends[keys[path.back()]]) +
        "; expected nested subtrees, as token " + i + " is in that of token " + above);
  }
  void add(int32_t key, int32_t query, int32_t depth, int32_t end) {
    keys.push_back(key);
    queries.push_back(query);
    depths.push_back(depth);
    ends.push_back(end);
  }
  void add_padding() { add(-1, -1, 0, count() + 1); }
};

// A block of rows of one key-value head. Rows past the end have slot -1, which sees nothing.
struct RowBlock {
  int64_t first, count;  // rows
  int64_t first_slot, last_slot;
  alignas(64) int32_t slot[kBlock];
  alignas(64) int32_t position[kBlock];
};

// The part of a tile that is computed: hulls of what is visible.
struct Tile {
  int64_t first_key, keys;
  bool masked;  // some element of the hulls is not visible
  // By group of keys: vectors [begin, end) of rows. By group of rows: keys [begin, end).
  int8_t first_vector[kGroups], end_vector[kGroups];
  int8_t begin_key[kGroups], end_key[kGroups];
  uint64_t cuts;  // bit j: key j begins a new chain for the rows that see it
};

class Forest {
 public:
  Forest(const Attention& p, int64_t step)
      : slots(p, step),
        count(slots.count()),
        group(p.heads / p.kv_heads),
        window(p.positions ? p.window : std::numeric_limits<int32_t>::max()),
        row_blocks(count_blocks(count * group)),
        key_blocks(count_blocks(count)),
        cut_keys(key_blocks),
        row_cuts(row_blocks),
        min_end(key_blocks),
        max_end(key_blocks),
        key_positions(key_blocks),
        row_positions(row_blocks) {
    for (int64_t b = 0; b < key_blocks; ++b) {
      const int64_t first = b * kBlock, last = std::min(count, first + kBlock);
      const auto [low, high] =
          std::minmax_element(slots.ends.begin() + first, slots.ends.begin() + last);
      min_end[b] = *low, max_end[b] = *high;
      key_positions[b] = range(first, last);
    }
    for (int64_t b = 0; b < row_blocks; ++b)
      row_positions[b] = range(first_slot(b), last_slot(b) + 1);
    cut_chains();
  }

  int64_t first_slot(int64_t block) const { return block * kBlock / group; }
  int64_t last_slot(int64_t block) const {
    return (std::min(count * group, (block + 1) * kBlock) - 1) / group;
  }
  int64_t last_key_block(int64_t rows) const { return last_slot(rows) / kBlock; }

  // Whether any key of the block may be visible to any row of the block.
  bool may_see(int64_t rows, int64_t keys) const {
    return max_end[keys] > first_slot(rows) && keys * kBlock <= last_slot(rows) &&
           int64_t{row_positions[rows].first} - key_positions[keys].second < window;
  }

  bool sees_all(int64_t rows, int64_t keys) const {
    return min_end[keys] > last_slot(rows) && (keys + 1) * kBlock <= first_slot(rows) + 1 &&
           (rows + 1) * kBlock <= count * group &&
           int64_t{row_positions[rows].second} - key_positions[keys].first < window;
  }

  RowBlock rows(int64_t block) const {
    RowBlock rows;
    rows.first = block * kBlock;
    rows.count = std::min(kBlock, count * group - rows.first);
    rows.first_slot = first_slot(block), rows.last_slot = last_slot(block);
    int64_t slot = rows.first_slot, of_slot = rows.first % group;
    for (int64_t r = 0; r < kBlock; ++r) {
      rows.slot[r] = r < rows.count ? static_cast<int32_t>(slot) : -1;
      rows.position[r] = r < rows.count && has_window() ? slots.positions[slot] : 0;
      if (++of_slot == group) of_slot = 0, ++slot;
    }
    return rows;
  }

  Tile tile(const RowBlock& rows, int64_t row_block, int64_t key_block) const;

  // Which rows of the vector are in the key's subtree.
  VecI in_subtree(const RowBlock& rows, int vector, int64_t key) const {
    VecI slot;
    std::memcpy(&slot, rows.slot + vector * kWidth, sizeof slot);
    return (slot >= static_cast<int32_t>(key)) & (slot < slots.ends[key]);
  }

  // Which rows of the vector see the key.
  VecI visible(const RowBlock& rows, int vector, int64_t key) const {
    if (!has_window()) return in_subtree(rows, vector, key);
    VecI depth;
    std::memcpy(&depth, rows.position + vector * kWidth, sizeof depth);
    return in_subtree(rows, vector, key) & (depth - slots.positions[key] < window);
  }

  // Rows [first, last) of the block that see the key, but for the window.
  std::pair<int64_t, int64_t> seen_by(const RowBlock& rows, int64_t key) const {
    return {row_at(rows, key), row_at(rows, slots.ends[key])};
  }

  // A row of the block that begins a new chain for the keys [first_key, end_key) of its tree.
  struct RowCut {
    int64_t row = kBlock, first_key = 0, end_key = 0;
  };

  const Slots slots;
  int64_t count, group;  // slots; rows of a slot
  int32_t window;
  int64_t row_blocks, key_blocks;
  std::vector<uint64_t> cut_keys;  // [key_blocks], see Tile
  std::vector<RowCut> row_cuts;    // [row_blocks]

 private:
  bool has_window() const { return !slots.positions.empty(); }

  // The row of the block at which a slot begins, clamped.
  int64_t row_at(const RowBlock& rows, int64_t slot) const {
    return std::clamp<int64_t>(slot * group - rows.first, 0, rows.count);
  }

  void cut_chains() {
    for (int64_t i = 0; i < count; ++i) {
      if (slots.depths[i] > 0 && slots.depths[i] % kChain == 0)
        cut_keys[i / kBlock] |= uint64_t{1} << i % kBlock;
    }
    for (const auto& [first, end] : slots.trees) {
      for (int64_t row = first * group + kChain; row < end * group; row += kChain)
        row_cuts[row / kBlock] = {row % kBlock, first, end};
    }
  }

  std::pair<int32_t, int32_t> range(int64_t first, int64_t last) const {
    if (!has_window()) return {0, 0};
    const auto begin = slots.positions.begin();
    const auto [low, high] = std::minmax_element(begin + first, begin + last);
    return {*low, *high};
  }

  std::vector<int32_t> min_end, max_end;                                  // [key_blocks]
  std::vector<std::pair<int32_t, int32_t>> key_positions, row_positions;  // least and largest
};

inline Tile Forest::tile(const RowBlock& rows, int64_t row_block, int64_t key_block) const {
  Tile tile;
  tile.first_key = key_block * kBlock;
  tile.keys = std::min(kBlock, count - tile.first_key);
  tile.masked = !sees_all(row_block, key_block);
  tile.cuts = cut_keys[key_block];
  std::fill_n(tile.first_vector, kGroups, int8_t{0});
  std::fill_n(tile.end_vector, kGroups, int8_t{kBlockVectors});
  std::fill_n(tile.begin_key, kGroups, int8_t{0});
  std::fill_n(tile.end_key, kGroups, int8_t{kBlock});
  if (!tile.masked) return tile;
  int64_t end_row[kBlock];
  for (int64_t j = 0; j < tile.keys; ++j) end_row[j] = row_at(rows, slots.ends[tile.first_key + j]);
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
        last < row ? 0 : std::min(tile.keys, int64_t{rows.slot[last]} + 1 - tile.first_key);
    while (begin < end && end_row[begin] <= row) ++begin;
    tile.begin_key[g] = static_cast<int8_t>(begin);
    tile.end_key[g] = static_cast<int8_t>(std::max(begin, end));
  }
  return tile;
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
