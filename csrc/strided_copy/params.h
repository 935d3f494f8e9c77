// strided_copy: dst[row slice] = cast(src[row slice]) for every row of a table of strided slices.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"
#include "strided_copy/copy_row.h"

namespace hybridengine {

struct StridedCopyParams {
  const CopyRow* rows;         // coalesced, with chunk numbers; on the device that copies
  const char* const* sources;  // first element of each tensor; arrays on that device
  char* const* destinations;
  const int32_t* row_of_chunk;  // CUDA only: [num_chunks]
  int64_t num_rows;
  int64_t num_chunks;
  DType src_dtype;
  DType dst_dtype;
  int num_threads;
};

HE_CPU_KERNEL(strided_copy_cpu, StridedCopyParams)

// Both return a cudaError_t.
int strided_copy_cuda(const StridedCopyParams& params, void* stream);

}  // namespace hybridengine
