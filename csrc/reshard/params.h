// strided_copy: dst[row slice] = cast(src[row slice]) for every row of a table of strided slices.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"
#include "reshard/copy_row.h"

namespace hybridengine {

struct StridedCopyParams {
  const CopyRow* rows;  // host memory; coalesced, chunk numbers filled in (plan_rows)
  int64_t num_rows;
  int64_t num_chunks;
  DType src_dtype;
  DType dst_dtype;
  int num_threads;
};

HE_CPU_KERNEL(strided_copy_cpu, StridedCopyParams)

// `device_rows` is a copy of params.rows in device memory; returns a cudaError_t.
int strided_copy_cuda(const StridedCopyParams& params, const CopyRow* device_rows, void* stream);
// Puts params.rows into device memory on the stream; the host memory may be reused on return.
int upload_rows_cuda(const StridedCopyParams& params, CopyRow* device_rows, void* stream);

}  // namespace hybridengine
