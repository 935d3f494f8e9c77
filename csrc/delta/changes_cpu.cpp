// map_changes and scatter_changes on the CPU. Threads take equal parts of all (row, change) pairs,
// in order, whatever the sizes of the rows.
#include "checksum/params.h"
#include "common/parallel.h"
#include "delta/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kGrain = 4096;  // pairs, or rows

template <typename Body>
void with_indices(const ChangeList& list, const Body& body) {
  if (list.wide) return body(static_cast<const int64_t*>(list.indices));
  body(static_cast<const int32_t*>(list.indices));
}

// Calls visit(row, destination element, value) for the changes numbered [begin, end) of all rows.
template <typename Visit>
void visit_range(const MapChangesParams& params, int64_t begin, int64_t end, const Visit& visit) {
  int64_t i = lower_bound(params.work, params.num_rows + 1, begin + 1) - 1;
  for (; begin < end; ++i) {
    const ChangeRow& row = params.rows[i];
    const ChangeList& list = params.sources[row.src];
    const int64_t low = params.first[i] + begin - params.work[i];
    const int64_t stop = end < params.work[i + 1] ? end : params.work[i + 1];
    const int64_t step = row.dst_stride[kChangeDims - 1];
    with_indices(list, [&](const auto* indices) {
      ChangeRun run;
      for (int64_t at = low; at < low + stop - begin; ++at) {
        const int64_t index = indices[at];
        if (!run.has(index)) run = find_run(row, index);
        if (run.dst >= 0) visit(row, run.dst + (index - run.begin) * step, list.values[at]);
      }
    });
    begin = stop;
  }
}

// What bit_checksum adds when a 16-bit element changes, half of a 32-bit word.
uint64_t checksum_change(int64_t position, uint16_t from, uint16_t to) {
  const uint64_t change = (uint64_t{to} - uint64_t{from}) << (position % 2 * 16);
  const int64_t word = position / 2;
  return weighted(word, change) + (word ? 0 : kFirstWord * change);
}

// Changes of one destination. Old elements are read in a loop of their own, where many reads wait
// for memory at the same time: among writes few do.
class Batch {
 public:
  explicit Batch(const MapChangesParams& params) : params_(params) {}
  ~Batch() { close(); }

  void add(int64_t dst, int64_t position, uint16_t value) {
    if (dst != dst_) {
      close();
      dst_ = dst;
    }
    positions_[count_] = position;
    values_[count_++] = value;
    if (count_ == kSize) write();
  }

 private:
  static constexpr int kSize = 256;

  void write() {
    uint16_t* elements = params_.destinations[dst_];
    uint16_t old[kSize];
    for (int i = 0; i < count_; ++i) old[i] = elements[positions_[i]];
    for (int i = 0; i < count_; ++i) {
      sum_ += checksum_change(positions_[i], old[i], values_[i]);
      elements[positions_[i]] = values_[i];
    }
    count_ = 0;
  }

  void close() {
    if (count_) write();
    if (sum_) __atomic_fetch_add(&params_.checksums[dst_], sum_, __ATOMIC_RELAXED);
    sum_ = 0;
  }

  const MapChangesParams& params_;
  int64_t positions_[kSize];
  uint16_t values_[kSize];
  int count_ = 0;
  int64_t dst_ = -1;
  uint64_t sum_ = 0;  // by how much the checksum of dst has grown
};

void scatter_range(const MapChangesParams& params, int64_t begin, int64_t end) {
  Batch batch(params);
  visit_range(params, begin, end, [&](const ChangeRow& row, int64_t position, uint16_t value) {
    batch.add(row.dst, position, value);
  });
}

}  // namespace

void find_change_ranges_cpu(const MapChangesParams& params) {
  parallel_for(params.num_rows, kGrain, params.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) find_range(params, i);
  });
  params.work[0] = 0;
  for (int64_t i = 0; i < params.num_rows; ++i) params.work[i + 1] += params.work[i];
}

void map_changes_cpu(const MapChangesParams& params) {
  const int64_t total = params.work[params.num_rows], parts = params.num_threads;
  parallel_for(parts, 1, params.num_threads, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t begin = total * part / parts, end = total * (part + 1) / parts;
      int64_t* positions = params.positions + begin;
      uint16_t* values = params.values + begin;
      int64_t found = 0;
      visit_range(params, begin, end, [&](const ChangeRow&, int64_t position, uint16_t value) {
        positions[found] = position;
        values[found++] = value;
      });
      params.part_counts[part] = found;
    }
  });
}

void scatter_changes_cpu(const MapChangesParams& params) {
  parallel_for(params.work[params.num_rows], kGrain, params.num_threads,
               [&](int64_t begin, int64_t end) { scatter_range(params, begin, end); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
