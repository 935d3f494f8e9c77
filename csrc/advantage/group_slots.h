// Group statistics in passes over the rows that give the same bits in any order of the rows, also
// in parallel: a group is a slot of a hash table, extremes are maxima of ordered bits, and sums are
// sums of integers scaled by the largest magnitude in the group. Nothing is sorted.
//
// `Ops` supplies add(u64*, u64), max(u64*, u64) and swap(u64*, u64 expected, u64 desired) -> old:
// atomics on CUDA. A zeroed table has only free slots.
#pragma once

#include <cmath>
#include <cstring>

#include "advantage/estimator.h"

namespace hybridengine {

struct FixedSums {
  uint64_t sum, sum_square;
};

struct GroupSlot {
  uint64_t owner;                                // 1 + a row of the group; 0: free
  uint64_t first;                                // ~ the lowest row
  uint64_t best;                                 // ordered bits of the best reward, then ~ its row
  uint64_t second;                               // ordered bits of the best reward of another row
  uint64_t lowest, second_lowest;                // those of - reward; grpo_loo
  uint64_t count;                                // rows
  uint64_t bad;                                  // 1: a reward is not finite
  uint64_t max_d, max_length, max_length_sum;    // bits of the largest magnitude in a sum
  uint64_t sum, sum_square, length, length_sum;  // as in GroupStats, fixed point
  FixedSums others_of_best, others_of_lowest;    // grpo_loo
};

struct GroupRows {
  const float* rewards;
  const int64_t* group_ids;
  const float* lengths;  // or null
  GroupSlot* slots;      // [table_size], a power of two and at least 2 * num_rows
  int64_t* slot_of;      // [num_rows]
  int64_t table_size;
  bool leaves_one_out;  // see EstimatorOptions
};

// Larger floats have larger bits; never 0.
HE_HOST_DEVICE uint64_t ordered_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

HE_HOST_DEVICE float ordered_value(uint64_t ordered) {
  const auto low = static_cast<uint32_t>(ordered);
  const uint32_t bits = low & 0x80000000u ? low & 0x7FFFFFFFu : ~low;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

HE_HOST_DEVICE uint64_t magnitude_bits(double value) {
  const double magnitude = fabs(value);
  uint64_t bits;
  memcpy(&bits, &magnitude, 8);
  return bits;
}

// The power of two by which the sum of `count` values of at most `max_value` stays below 2^62.
HE_HOST_DEVICE double fixed_scale(double max_value, uint64_t count) {
  if (!(max_value > 0) || !(max_value < INFINITY)) return 0;
  int headroom = 1;
  while (headroom < 63 && uint64_t{1} << (headroom - 1) < count) ++headroom;
  return ldexp(1.0, 62 - headroom - ilogb(max_value));
}

struct GroupScales {
  double sum, sum_square, length, length_sum;
};

HE_HOST_DEVICE double double_of(uint64_t bits) {
  double value;
  memcpy(&value, &bits, 8);
  return value;
}

HE_HOST_DEVICE GroupScales scales_of(const GroupSlot& slot) {
  const double max_d = double_of(slot.max_d);
  return {fixed_scale(max_d, slot.count), fixed_scale(max_d * max_d, slot.count),
          fixed_scale(double_of(slot.max_length), slot.count),
          fixed_scale(double_of(slot.max_length_sum), slot.count)};
}

HE_HOST_DEVICE double from_fixed(uint64_t sum, double scale) {
  return scale > 0 ? static_cast<double>(static_cast<int64_t>(sum)) / scale : 0;
}

HE_HOST_DEVICE uint64_t to_fixed(double value, double scale) {
  return static_cast<uint64_t>(llrint(value * scale));
}

HE_HOST_DEVICE double from_first(const GroupRows& p, const GroupSlot& slot, int64_t row) {
  return static_cast<double>(p.rewards[row]) - p.rewards[~slot.first];
}

// The row of an extreme: ordered bits of a reward, then ~ its row.
HE_HOST_DEVICE int64_t row_of(uint64_t extreme) { return static_cast<uint32_t>(~extreme); }

// The others of the best or of the lowest row of a group of at least two, shifted and scaled.
struct Others {
  double shift;
  GroupScales scales;
};

HE_HOST_DEVICE Others others_of(const GroupSlot& slot, bool best) {
  const double highest = ordered_value(best ? slot.second : slot.best >> 32);
  const double lowest = -ordered_value(best ? slot.lowest >> 32 : slot.second_lowest);
  const double max_d = highest - lowest;
  return {highest, {fixed_scale(max_d, slot.count), fixed_scale(max_d * max_d, slot.count), 0, 0}};
}

template <class Ops>
HE_HOST_DEVICE void add_fixed(FixedSums& sums, const Others& others, double reward) {
  const double d = reward - others.shift;
  Ops::add(&sums.sum, to_fixed(d, others.scales.sum));
  Ops::add(&sums.sum_square, to_fixed(d * d, others.scales.sum_square));
}

HE_HOST_DEVICE ShiftedSums shifted_sums(const FixedSums& sums, const GroupScales& scales) {
  return {from_fixed(sums.sum, scales.sum), from_fixed(sums.sum_square, scales.sum_square)};
}

// Pass 1: the slot of the row, and statistics that need only the row.
template <class Ops>
HE_HOST_DEVICE void enter_group(const GroupRows& p, int64_t row) {
  const int64_t id = p.group_ids[row], mask = p.table_size - 1;
  uint64_t h = static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15u;  // Fibonacci hashing
  int64_t at = (h ^ (h >> 32)) & mask;
  for (;; at = (at + 1) & mask) {
    const uint64_t owner = Ops::swap(&p.slots[at].owner, 0, row + 1);
    if (owner == 0 || p.group_ids[owner - 1] == id) break;
  }
  p.slot_of[row] = at;
  GroupSlot& slot = p.slots[at];
  const float reward = p.rewards[row];
  Ops::add(&slot.count, 1);
  Ops::max(&slot.first, ~static_cast<uint64_t>(row));
  Ops::max(&slot.best, ordered_bits(reward) << 32 | static_cast<uint32_t>(~row));
  if (p.leaves_one_out)
    Ops::max(&slot.lowest, ordered_bits(-reward) << 32 | static_cast<uint32_t>(~row));
  if (!(fabsf(reward) < INFINITY)) Ops::max(&slot.bad, 1);
}

// Pass 2: statistics that need the first and the best row of the group.
template <class Ops>
HE_HOST_DEVICE void measure_row(const GroupRows& p, int64_t row) {
  GroupSlot& slot = p.slots[p.slot_of[row]];
  const double d = from_first(p, slot, row);
  Ops::max(&slot.max_d, magnitude_bits(d));
  if (row != row_of(slot.best)) Ops::max(&slot.second, ordered_bits(p.rewards[row]));
  if (p.leaves_one_out && row != row_of(slot.lowest))
    Ops::max(&slot.second_lowest, ordered_bits(-p.rewards[row]));
  if (!p.lengths) return;
  Ops::max(&slot.max_length, magnitude_bits(p.lengths[row]));
  Ops::max(&slot.max_length_sum, magnitude_bits(p.lengths[row] * d));
}

// Pass 3: the sums.
template <class Ops>
HE_HOST_DEVICE void add_row(const GroupRows& p, int64_t row) {
  GroupSlot& slot = p.slots[p.slot_of[row]];
  if (slot.bad) return;
  const GroupScales scales = scales_of(slot);
  const double d = from_first(p, slot, row);
  Ops::add(&slot.sum, to_fixed(d, scales.sum));
  Ops::add(&slot.sum_square, to_fixed(d * d, scales.sum_square));
  if (p.leaves_one_out && slot.count > 1) {
    const double r = p.rewards[row];
    if (row != row_of(slot.best)) add_fixed<Ops>(slot.others_of_best, others_of(slot, true), r);
    if (row != row_of(slot.lowest))
      add_fixed<Ops>(slot.others_of_lowest, others_of(slot, false), r);
  }
  if (!p.lengths) return;
  Ops::add(&slot.length, to_fixed(p.lengths[row], scales.length));
  Ops::add(&slot.length_sum, to_fixed(p.lengths[row] * d, scales.length_sum));
}

// Pass 4: the advantage of a row; NaN where a reward of its group is not finite.
HE_HOST_DEVICE float finished_row(const GroupRows& p, int64_t row,
                                  const EstimatorOptions& options) {
  const GroupSlot& slot = p.slots[p.slot_of[row]];
  if (slot.bad) return NAN;
  const GroupScales scales = scales_of(slot);
  GroupStats group{};
  group.shift = p.rewards[~slot.first];
  group.sum = from_fixed(slot.sum, scales.sum);
  group.sum_square = from_fixed(slot.sum_square, scales.sum_square);
  group.length = from_fixed(slot.length, scales.length);
  group.length_sum = from_fixed(slot.length_sum, scales.length_sum);
  group.best = ordered_value(slot.best >> 32);
  group.second = slot.second ? ordered_value(slot.second) : -INFINITY;
  group.best_row = row_of(slot.best);
  group.count = static_cast<int64_t>(slot.count);
  if (p.leaves_one_out && slot.count > 1) {
    group.lowest_row = row_of(slot.lowest);
    group.others_of_best = shifted_sums(slot.others_of_best, others_of(slot, true).scales);
    group.others_of_lowest = shifted_sums(slot.others_of_lowest, others_of(slot, false).scales);
  }
  return static_cast<float>(advantage_of(p.rewards[row], row, group, options));
}

}  // namespace hybridengine
