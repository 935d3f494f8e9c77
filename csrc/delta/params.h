// What changed in a shard, and where it goes: changed_elements compares, map_changes and
// scatter_changes follow tables of strided slices in time proportional to the changes.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"
#include "delta/change_row.h"

namespace hybridengine {

// Changes that one thread found. The kernel allocates with realloc, the caller frees.
struct ChangedPart {
  void* indices;
  uint16_t* values;
  int64_t room;   // elements allocated
  int64_t count;  // of all changes, also those beyond the capacity
};

struct ChangedElementsParams {
  const void* current;
  void* sent;  // 16-bit elements; becomes the cast of current
  int64_t size;
  int64_t capacity;  // most changes that are kept
  DType current_dtype;
  DType sent_dtype;
  bool wide;           // indices are int64_t
  ChangedPart* parts;  // CPU: one per thread
  uint32_t* mask;      // CUDA: bit i % 32 of word i / 32 is element i
  int num_threads;
};

HE_CPU_KERNEL(changed_elements_cpu, ChangedElementsParams)

// Returns a cudaError_t.
int mark_changed_cuda(const ChangedElementsParams& params, void* stream);

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
  int64_t* positions;             // map only: [work[num_rows]]; part p of P begins at its first
  uint16_t* values;               // pair, number work[num_rows] * p / P, as do the values
  int64_t* part_counts;           // [num_threads]
  int num_threads;
};

// Fills first and work.
HE_CPU_KERNEL(find_change_ranges_cpu, MapChangesParams)
HE_CPU_KERNEL(map_changes_cpu, MapChangesParams)
HE_CPU_KERNEL(scatter_changes_cpu, MapChangesParams)

}  // namespace hybridengine
