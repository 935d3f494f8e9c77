// The CUDA kernels of ChangeTable on the CPU, with the sums that bind.cpp makes.
#include <vector>

#include "changes_cuda.cu"

using namespace hybridengine;

static_assert(sizeof(ChangeRow) == 16 * 8 && sizeof(ChangeList) == 4 * 8);

// lists: (address of indices, address of values, count, wide) of each source. Scatters to
// `destination`, and returns the number of pairs, for each of which it writes a position, -1 where
// there is none, and a value, if there are `positions`.
extern "C" int64_t follow_on_cpu(const ChangeRow* rows, int64_t num_rows, const int64_t* lists,
                                 int64_t num_sources, uint16_t* destination, int64_t* positions,
                                 uint16_t* values) {
  std::vector<ChangeList> sources;
  for (int64_t i = 0; i < num_sources; ++i, lists += 4)
    sources.push_back({reinterpret_cast<const void*>(lists[0]),
                       reinterpret_cast<const uint16_t*>(lists[1]), lists[2], lists[3] != 0});
  std::vector<int64_t> first(num_rows), work(num_rows + 1);
  MapChangesParams params{};
  params.rows = rows;
  params.num_rows = num_rows;
  params.sources = sources.data();
  params.first = first.data();
  params.work = work.data();
  params.destinations = &destination;
  params.positions = positions;
  params.values = values;
  find_change_ranges_cuda(params, nullptr);
  for (int64_t i = 0; i < num_rows; ++i) work[i + 1] += work[i];
  if (positions) {
    map_changes_cuda(params, work[num_rows], nullptr);
  } else {
    scatter_changes_cuda(params, 3 * work[num_rows], nullptr);
  }
  return work[num_rows];
}
