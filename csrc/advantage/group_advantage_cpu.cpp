// Group advantages on the CPU: a serial pass collects the groups by hashing, a parallel one
// finishes the rows.
#include <cmath>

#include "advantage/params.h"
#include "common/parallel.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kRowGrain = 4096;
constexpr int64_t kTokenGrain = 65536;

uint64_t hash(int64_t id) {
  uint64_t h = static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15u;  // Fibonacci hashing
  return h ^ (h >> 32);
}

// The group of `row`; a new one for a new id.
int64_t find_group(const GroupAdvantageParams& p, int64_t row, int64_t& num_groups) {
  const int64_t id = p.group_ids[row];
  if (row > 0 && p.group_ids[row - 1] == id) return p.group_of[row - 1];
  const int64_t mask = p.table_size - 1;
  for (int64_t slot = hash(id) & mask;; slot = (slot + 1) & mask) {
    const int64_t first = p.table[slot];
    if (first >= 0 && p.group_ids[first] == id) return p.group_of[first];
    if (first < 0) {
      p.table[slot] = row;
      p.groups[num_groups] = empty_group(p.rewards[row]);
      return num_groups++;
    }
  }
}

void collect_groups(const GroupAdvantageParams& p) {
  for (int64_t slot = 0; slot < p.table_size; ++slot) p.table[slot] = -1;
  int64_t num_groups = 0;
  for (int64_t row = 0; row < p.num_rows; ++row) {
    if (!std::isfinite(p.rewards[row])) {
      *p.bad_row = row;
      return;
    }
    p.group_of[row] = find_group(p, row, num_groups);
    add_member(p.groups[p.group_of[row]], p.rewards[row], p.lengths ? p.lengths[row] : 0, row);
  }
  if (!p.options.leaves_one_out()) return;
  for (int64_t row = 0; row < p.num_rows; ++row)
    add_other(p.groups[p.group_of[row]], p.rewards[row], row);
}

void spread_row(const GroupAdvantageParams& p, int64_t row) {
  const float advantage = p.advantages[row];
  for (int64_t t = p.cu_seqlens[row]; t < p.cu_seqlens[row + 1]; ++t)
    p.token_advantages[t] = !p.token_mask || p.token_mask[t] ? advantage : 0;
}

}  // namespace

void group_advantage_cpu(const GroupAdvantageParams& p) {
  collect_groups(p);
  if (*p.bad_row >= 0) return;
  parallel_for(p.num_rows, kRowGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      p.advantages[row] = static_cast<float>(
          advantage_of(p.rewards[row], row, p.groups[p.group_of[row]], p.options));
  });
  if (!p.cu_seqlens) return;
  const int64_t per_row = p.num_tokens / (p.num_rows > 0 ? p.num_rows : 1) + 1;
  const int64_t grain = kTokenGrain / per_row + 1;
  parallel_for(p.num_rows, grain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) spread_row(p, row);
  });
  for (int64_t t = p.cu_seqlens[p.num_rows]; t < p.num_tokens; ++t) p.token_advantages[t] = 0;
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
