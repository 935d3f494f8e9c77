// mark_changed compares with what was sent; count_changed and take_changed lead from masks of
// changed elements to (index, value), ascending.
#pragma once

#include <cstdint>

#include "changes/change_mask.h"
#include "common/dtype.h"
#include "common/isa.h"

namespace hybridengine {

struct CompareParams {
  const void* current;
  void* sent;      // 16-bit elements; becomes the cast of current
  uint32_t* mask;  // that is added to
  int64_t numel;
  DType current_dtype;
  DType sent_dtype;
  int num_threads;
};

HE_CPU_KERNEL(mark_changed_cpu, CompareParams)

struct ChangedTensor {
  uint32_t* mask;
  const uint16_t* source;  // null to count
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
  uint16_t* values;
  bool wide_indices;   // int64, else int32
  int32_t* disagrees;  // CPU: set to 1 where a chunk has not as many changes as `ends` says
  int num_threads;
};

HE_CPU_KERNEL(count_changed_cpu, ChangesParams)
// Also clears the masks.
HE_CPU_KERNEL(take_changed_cpu, ChangesParams)

// All return a cudaError_t.
int mark_changed_cuda(const CompareParams& params, void* stream);
int count_changed_cuda(const ChangesParams& params, void* stream);
int take_changed_cuda(const ChangesParams& params, void* stream);

}  // namespace hybridengine
