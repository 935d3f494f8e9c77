// count_changed and take_changed: from masks of changed elements to (index, value), ascending.
#pragma once

#include <cstdint>

#include "changes/change_mask.h"
#include "common/dtype.h"
#include "common/isa.h"

namespace hybridengine {

struct ChangedTensor {
  uint32_t* mask;
  const void* source;  // null to count
  int64_t numel;
  int64_t first_chunk;
};

struct ChangesParams {
  const ChangedTensor* tensors;
  int64_t num_tensors;
  int64_t num_chunks;
  int32_t* counts;      // [num_chunks], written by count_changed
  const int64_t* ends;  // [num_chunks], inclusive sums of the counts
  void* indices;        // positions in each tensor
  void* values;
  bool wide_indices;  // int64, else int32
  DType source_dtype;
  DType value_dtype;
  int num_threads;
};

HE_CPU_KERNEL(count_changed_cpu, ChangesParams)
// Also clears the masks.
HE_CPU_KERNEL(take_changed_cpu, ChangesParams)

// Both return a cudaError_t.
int count_changed_cuda(const ChangesParams& params, void* stream);
int take_changed_cuda(const ChangesParams& params, void* stream);

}  // namespace hybridengine
