// The fewest bins of a limited capacity. Their number is searched between a lower bound and the
// bins of best-fit decreasing, so that a hard case costs a few partitions, not one per number.
#pragma once

#include <set>
#include <utility>

#include "balance/partition.h"

namespace hybridengine {

// Best-fit decreasing: the longest first, into the fullest bin with room (11/9 of the optimum).
inline Bins best_fit(const std::vector<int64_t>& lengths, int64_t capacity) {
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
  Bins bins;
  std::set<std::pair<int64_t, int64_t>> by_room;  // room, bin
  for (const int64_t item : order) {
    auto fullest = by_room.lower_bound({lengths[item], -1});
    if (fullest == by_room.end()) {
      fullest = by_room.insert({capacity, static_cast<int64_t>(bins.size())}).first;
      bins.emplace_back();
    }
    const auto [room, bin] = *fullest;
    by_room.erase(fullest);
    by_room.insert({room - lengths[item], bin});
    bins[bin].push_back(item);
  }
  return bins;
}

// A lower bound: of the total, and of the items above capacity / (k + 1), of which k fit into a
// bin.
inline int64_t lower_bound_of_bins(std::vector<int64_t> lengths, int64_t capacity) {
  const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  int64_t bound = (total + capacity - 1) / capacity;
  std::sort(lengths.begin(), lengths.end(), std::greater<int64_t>());
  for (size_t i = 0; i < lengths.size() && lengths[i] > 0; ++i) {
    const int64_t per_bin = capacity / lengths[i];  // of items of at least this length
    bound = std::max(bound, (static_cast<int64_t>(i) + per_bin) / per_bin);
  }
  return bound;
}

inline bool fits(const Bins& bins, const std::vector<int64_t>& lengths, int64_t capacity) {
  for (const auto& bin : bins) {
    int64_t sum = 0;
    for (const int64_t item : bin) sum += lengths[item];
    if (sum > capacity) return false;
  }
  return true;
}

// At least min_bins bins, a multiple of multiple_of. A larger min_bins than the result needs is the
// number returned, so ranks that pass the largest number of any of them agree.
inline Bins balance_by_budget(const std::vector<int64_t>& lengths, int64_t capacity,
                              int64_t min_bins, int64_t multiple_of) {
  Bins best = best_fit(lengths, capacity);
  int64_t low = std::max<int64_t>(1, lower_bound_of_bins(lengths, capacity));
  while (low < static_cast<int64_t>(best.size())) {
    const int64_t middle = low + (static_cast<int64_t>(best.size()) - low) / 2;
    Bins candidate = balance(lengths, middle, false);
    if (fits(candidate, lengths, capacity))
      best = std::move(candidate);
    else
      low = middle + 1;
  }
  const int64_t needed = std::max<int64_t>({static_cast<int64_t>(best.size()), min_bins, 1});
  const int64_t num_bins = (needed + multiple_of - 1) / multiple_of * multiple_of;
  Bins balanced = balance(lengths, num_bins, false);
  if (fits(balanced, lengths, capacity)) return balanced;
  best.resize(num_bins);
  for (auto& bin : best)
    std::stable_sort(bin.begin(), bin.end(),
                     [&](int64_t a, int64_t b) { return lengths[a] < lengths[b]; });
  fill_empty_bins(best);
  return in_order(std::move(best));
}

}  // namespace hybridengine
