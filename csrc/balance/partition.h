// Lengths into bins of nearly equal sums: Karmarkar-Karp differencing (1982) on sparse states, then
// exchanges between the fullest bin and the others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <queue>
#include <set>
#include <vector>

namespace hybridengine {

using Bins = std::vector<std::vector<int64_t>>;

class Partition {
 public:
  Partition(const std::vector<int64_t>& lengths, int64_t num_bins, bool equal_count)
      : lengths_(lengths),
        num_items_(lengths.size()),
        num_bins_(num_bins),
        equal_count_(equal_count) {
    // With equal_count, padding items of length 0 let the counts differ by one. The last state
    // holds all of them, one per bin, and no exchange moves them.
    if (equal_count)
      while (static_cast<int64_t>(lengths_.size()) % num_bins != 0) lengths_.push_back(0);
    order_.resize(lengths_.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int64_t a, int64_t b) { return lengths_[a] > lengths_[b]; });
  }

  Bins solve() {
    Bins best = differencing();
    improve(best);
    const int64_t total = std::accumulate(lengths_.begin(), lengths_.end(), int64_t{0});
    const bool has_padding = static_cast<int64_t>(lengths_.size()) > num_items_;
    if (!has_padding && fullest(best) > (total + num_bins_ - 1) / num_bins_) {
      Bins other = largest_first();
      improve(other);
      if (fullest(other) < fullest(best)) best.swap(other);
    }
    return best;
  }

 private:
  static constexpr size_t kFewItems = 1024;

  struct Set {  // a chain of items through next_
    int64_t sum, head, tail;
  };
  using State = std::vector<Set>;  // by descending sums, without empty sets

  int64_t spread(const State& state) const {
    const bool full = static_cast<int64_t>(state.size()) == num_bins_;
    return state.front().sum - (full ? state.back().sum : 0);
  }

  Set joined(const Set& a, const Set& b) {
    next_[a.tail] = b.head;
    return Set{a.sum + b.sum, a.head, b.tail};
  }

  static bool larger(const Set& a, const Set& b) {
    return a.sum != b.sum ? a.sum > b.sum : a.head < b.head;
  }

  // Joins the fullest sets of one state with the emptiest of the other.
  State merged(State a, const State& b) {
    const int64_t size_a = a.size(), size_b = b.size();
    const int64_t overlap = std::max<int64_t>(0, size_a + size_b - num_bins_);
    const int64_t changed = size_a - overlap;  // the sets before it are still in order
    for (int64_t i = 0; i < overlap; ++i) {
      Set& set = a[size_a - 1 - i];
      set = joined(set, b[size_b - overlap + i]);
    }
    std::sort(a.begin() + changed, a.end(), larger);
    std::inplace_merge(a.begin(), a.begin() + changed, a.end(), larger);
    const int64_t middle = a.size();
    a.insert(a.end(), b.begin(), b.end() - overlap);
    std::inplace_merge(a.begin(), a.begin() + middle, a.end(), larger);
    return a;
  }

  std::vector<State> first_states() const {
    const int64_t per_state = equal_count_ ? num_bins_ : 1;
    std::vector<State> states;
    for (size_t i = 0; i < order_.size(); i += per_state) {
      State state;
      for (int64_t j = 0; j < per_state; ++j)
        state.push_back({lengths_[order_[i + j]], order_[i + j], order_[i + j]});
      states.push_back(std::move(state));
    }
    return states;
  }

  Bins differencing() {
    Bins bins(num_bins_);
    if (order_.empty()) return bins;
    next_.assign(lengths_.size(), -1);
    std::vector<State> states = first_states();
    using Entry = std::pair<int64_t, int64_t>;  // spread, -state: of equals the first
    std::priority_queue<Entry> queue;
    for (size_t i = 0; i < states.size(); ++i)
      queue.push({spread(states[i]), -static_cast<int64_t>(i)});
    while (queue.size() > 1) {
      const int64_t a = -queue.top().second;
      queue.pop();
      const int64_t b = -queue.top().second;
      queue.pop();
      const bool a_is_longer = states[a].size() >= states[b].size();
      State longer = std::move(states[a_is_longer ? a : b]);
      states[a] = merged(std::move(longer), states[a_is_longer ? b : a]);
      queue.push({spread(states[a]), -a});
    }
    const State& last = states[-queue.top().second];
    for (size_t i = 0; i < last.size(); ++i)
      for (int64_t item = last[i].head; item >= 0; item = next_[item]) bins[i].push_back(item);
    return bins;
  }

  Bins largest_first() const {
    Bins bins(num_bins_);
    using Entry = std::pair<int64_t, int64_t>;  // sum, bin
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> emptiest;
    const int64_t most = equal_count_ ? lengths_.size() / num_bins_ : lengths_.size();
    for (int64_t bin = 0; bin < num_bins_; ++bin) emptiest.push({0, bin});
    for (const int64_t item : order_) {
      const auto [sum, bin] = emptiest.top();
      emptiest.pop();
      bins[bin].push_back(item);
      if (static_cast<int64_t>(bins[bin].size()) < most) emptiest.push({sum + lengths_[item], bin});
    }
    return bins;
  }

  int64_t sum_of(const std::vector<int64_t>& bin) const {
    int64_t sum = 0;
    for (const int64_t item : bin) sum += lengths_[item];
    return sum;
  }

  int64_t fullest(const Bins& bins) const {
    int64_t most = 0;
    for (const auto& bin : bins) most = std::max(most, sum_of(bin));
    return most;
  }

  void sort_bin(std::vector<int64_t>& bin) const {
    std::sort(bin.begin(), bin.end(), [&](int64_t a, int64_t b) {
      return lengths_[a] != lengths_[b] ? lengths_[a] < lengths_[b] : a < b;
    });
  }

  struct Pick {  // none, one or two items of a bin
    int64_t sum = 0, first = -1, second = -1;
  };

  std::vector<Pick> picks(const std::vector<int64_t>& bin, int count) const {
    std::vector<Pick> result;
    if (count == 0) result.push_back({});
    for (size_t i = 0; count > 0 && i < bin.size(); ++i) {
      if (bin[i] >= num_items_) continue;
      if (count == 1) result.push_back({lengths_[bin[i]], bin[i], -1});
      for (size_t j = i + 1; count == 2 && j < bin.size(); ++j)
        if (bin[j] < num_items_)
          result.push_back({lengths_[bin[i]] + lengths_[bin[j]], bin[i], bin[j]});
    }
    std::stable_sort(result.begin(), result.end(),
                     [](const Pick& a, const Pick& b) { return a.sum < b.sum; });
    return result;
  }

  void transfer(const Pick& pick, std::vector<int64_t>& from, std::vector<int64_t>& to) const {
    for (const int64_t item : {pick.first, pick.second}) {
      if (item < 0) continue;
      from.erase(std::find(from.begin(), from.end(), item));
      to.push_back(item);
    }
  }

  // Makes the exchange that reduces `gap` = sum(from) - sum(to) most; false if none does.
  bool exchange(std::vector<int64_t>& from, std::vector<int64_t>& to, int64_t gap) const {
    const int most = lengths_.size() <= kFewItems ? 2 : 1;  // pairs are quadratic
    int64_t best = gap;
    Pick best_give, best_take;
    for (int given = 1; given <= most; ++given) {
      const std::vector<Pick> gives = picks(from, given);
      for (int taken = equal_count_ ? given : 0; taken <= (equal_count_ ? given : most); ++taken) {
        const std::vector<Pick> takes = picks(to, taken);
        for (size_t g = 0, t = 0; g < gives.size() && t < takes.size();) {
          const int64_t moved = gives[g].sum - takes[t].sum;
          const int64_t left = std::abs(gap - 2 * moved);
          if (left < best) best = left, best_give = gives[g], best_take = takes[t];
          if (2 * moved < gap)
            ++g;
          else
            ++t;
        }
      }
    }
    if (best == gap) return false;
    transfer(best_take, to, from);
    transfer(best_give, from, to);
    sort_bin(from);
    sort_bin(to);
    return true;
  }

  // Every exchange lowers the sum of squares, so this terminates; the bound on rounds limits its
  // time.
  void improve(Bins& bins) const {
    std::set<std::pair<int64_t, int64_t>> by_sum;  // sum, bin
    for (int64_t i = 0; i < num_bins_; ++i) {
      sort_bin(bins[i]);
      by_sum.insert({sum_of(bins[i]), i});
    }
    for (int64_t round = 0; round < 4 * num_bins_; ++round) {
      const auto fullest = std::prev(by_sum.end());
      const int64_t from = fullest->second;
      auto other = by_sum.begin();
      while (other != fullest) {
        const int64_t gap = fullest->first - other->first;
        if (gap <= 1) return;
        if (exchange(bins[from], bins[other->second], gap)) break;
        ++other;
      }
      if (other == fullest) return;
      const int64_t to = other->second;
      by_sum.erase(other);
      by_sum.erase(fullest);
      by_sum.insert({sum_of(bins[from]), from});
      by_sum.insert({sum_of(bins[to]), to});
    }
  }

  std::vector<int64_t> lengths_;
  int64_t num_items_;
  int64_t num_bins_;
  bool equal_count_;
  std::vector<int64_t> order_;  // items by descending length
  std::vector<int64_t> next_;
};

// With at least as many items as bins, no bin stays empty, even where all lengths are 0.
inline void fill_empty_bins(Bins& bins) {
  for (auto& bin : bins) {
    if (!bin.empty()) continue;
    const auto longest = std::max_element(
        bins.begin(), bins.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
    if (longest->size() < 2) return;
    bin.push_back(longest->front());  // bins are sorted by length: the shortest
    longest->erase(longest->begin());
  }
}

// Ascending positions in every bin, the bins by their first one, empty ones last.
inline Bins in_order(Bins bins) {
  for (auto& bin : bins) std::sort(bin.begin(), bin.end());
  std::sort(bins.begin(), bins.end(), [](const auto& a, const auto& b) {
    return a.empty() != b.empty() ? b.empty() : a < b;
  });
  return bins;
}

inline Bins balance(const std::vector<int64_t>& lengths, int64_t num_bins, bool equal_count) {
  Bins bins = Partition(lengths, num_bins, equal_count).solve();
  const auto count = static_cast<int64_t>(lengths.size());
  for (auto& bin : bins)
    bin.erase(std::remove_if(bin.begin(), bin.end(), [&](int64_t i) { return i >= count; }),
              bin.end());
  if (!equal_count) fill_empty_bins(bins);
  return in_order(std::move(bins));
}

}  // namespace hybridengine
