// The fewest bins of a limited capacity. The number is searched between a bound from below and what
// best-fit decreasing needs, so that a hard case costs a few partitions, not one per bin.
#pragma once

#include <set>
#include <utility>

#include "balance/partition.h"

namespace hybridengine {

// Item by item, the longest first, into the bin where least room is left (11/9 of the optimum).
inline Bins best_fit(const std::vector<int64_t>& lengths, int64_t capacity) {
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
  Bins bins;
  std::set<std::pair<int64_t, int64_t>> by_room;  // room, bin
  for (const int64_t item : order) {
    auto found = by_room.lower_bound({lengths[item], -1});
    if (found == by_room.end()) {
      found = by_room.insert({capacity, static_cast<int64_t>(bins.size())}).first;
      bins.emplace_back();
    }
    const auto [room, bin] = *found;
    by_room.erase(found);
    by_room.insert({room - lengths[item], bin});
    bins[bin].push_back(item);
  }
  return bins;
}

// No fewer bins hold the total, nor the items above capacity / (k + 1), of which k fit into one.
inline int64_t fewest_possible(std::vector<int64_t> lengths, int64_t capacity) {
  const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  int64_t fewest = (total + capacity - 1) / capacity;
  std::sort(lengths.begin(), lengths.end(), std::greater<int64_t>());
  for (size_t i = 0; i < lengths.size() && lengths[i] > 0; ++i) {
    const int64_t per_bin = capacity / lengths[i];  // of items that are at least as long
    fewest = std::max(fewest, (static_cast<int64_t>(i) + per_bin) / per_bin);
  }
  return fewest;
}

inline bool fits(const Bins& bins, const std::vector<int64_t>& lengths, int64_t capacity) {
  for (const auto& bin : bins) {
    int64_t sum = 0;
    for (const int64_t item : bin) sum += lengths[item];
    if (sum > capacity) return false;
  }
  return true;
}

// At least min_bins, a multiple of multiple_of. Every number of bins from the result's on works as
// min_bins and is then the number returned: ranks that give the largest of theirs agree.
inline Bins balance_by_budget(const std::vector<int64_t>& lengths, int64_t capacity,
                              int64_t min_bins, int64_t multiple_of) {
  Bins known = best_fit(lengths, capacity);
  int64_t low = std::max<int64_t>(1, fewest_possible(lengths, capacity));
  while (low < static_cast<int64_t>(known.size())) {
    const int64_t middle = low + (static_cast<int64_t>(known.size()) - low) / 2;
    Bins tried = balance(lengths, middle, false);
    if (fits(tried, lengths, capacity))
      known = std::move(tried);
    else
      low = middle + 1;
  }
  const int64_t needed = std::max<int64_t>({static_cast<int64_t>(known.size()), min_bins, 1});
  const int64_t num_bins = (needed + multiple_of - 1) / multiple_of * multiple_of;
  Bins balanced = balance(lengths, num_bins, false);
  if (fits(balanced, lengths, capacity)) return balanced;
  known.resize(num_bins);
  for (auto& bin : known)
    std::stable_sort(bin.begin(), bin.end(),
                     [&](int64_t a, int64_t b) { return lengths[a] < lengths[b]; });
  fill_empty_bins(known);
  return in_order(std::move(known));
}

}  // namespace hybridengine
