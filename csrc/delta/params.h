// Where the changes of shards go: map_changes and scatter_changes follow tables of strided slices
// in time proportional to the changes.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "delta/change_row.h"

namespace hybridengine {

// The changes of one source: ascending indices (int32_t, or int64_t where `wide`) and values.
struct ChangeList {
  const void* indices;
  const uint16_t* values;
  int64_t count;
  bool wide;
};

// Row i looks at the changes first[i], ... of its source, those numbered [work[i], work[i + 1]) of
// all pairs of a row and a change.
struct MapChangesParams {
  const ChangeRow* rows;
  int64_t num_rows;
  const ChangeList* sources;
  int64_t* first;                 // [num_rows]
  int64_t* work;                  // [num_rows + 1]
  uint16_t* const* destinations;  // scatter only: first elements
  uint64_t* checksums;            // scatter on CPUs: what is added to bit_checksum of each
  int64_t* positions;             // map only: [work[num_rows]]; part p of P begins at its first
  uint16_t* values;               // pair, number work[num_rows] * p / P, as do the values
  int64_t* part_counts;           // [num_threads]
  int num_threads;
};

// Fills first and work.
HE_CPU_KERNEL(find_change_ranges_cpu, MapChangesParams)
HE_CPU_KERNEL(map_changes_cpu, MapChangesParams)
HE_CPU_KERNEL(scatter_changes_cpu, MapChangesParams)

// All return a cudaError_t. On CUDA work[i + 1] is the number of pairs of row i until the caller
// sums it, and map_changes writes every pair to the place of its number, with position -1 if the
// row does not have the element.
int find_change_ranges_cuda(const MapChangesParams& params, void* stream);
int map_changes_cuda(const MapChangesParams& params, int64_t num_pairs, void* stream);
int scatter_changes_cuda(const MapChangesParams& params, int64_t max_pairs, void* stream);

template <typename T>
HE_HOST_DEVICE void find_range_in(const MapChangesParams& p, int64_t i, const T* indices) {
  const ChangeRow& row = p.rows[i];
  const int64_t count = p.sources[row.src].count;
  const int64_t low = lower_bound(indices, count, row.src_offset);
  p.first[i] = low;
  p.work[i + 1] = lower_bound(indices + low, count - low, row.src_end);
}

// Writes the first change of row i, and how many it has.
HE_HOST_DEVICE void find_range(const MapChangesParams& p, int64_t i) {
  const ChangeList& list = p.sources[p.rows[i].src];
  if (list.wide)
    find_range_in(p, i, static_cast<const int64_t*>(list.indices));
  else
    find_range_in(p, i, static_cast<const int32_t*>(list.indices));
}

}  // namespace hybridengine
