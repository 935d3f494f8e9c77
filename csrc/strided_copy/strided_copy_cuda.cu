// strided_copy on CUDA: one launch for the table, one block per chunk.
#include <cuda_runtime.h>

#include "strided_copy/copy_chunk.h"
#include "strided_copy/params.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;

template <typename S, typename D>
__global__ void __launch_bounds__(kThreads, 4)
    copy_chunks(const __grid_constant__ StridedCopyParams p) {
  const CopyRow& row = p.rows[p.row_of_chunk[blockIdx.x]];
  copy_chunk<S, D>(row, p.sources[row.src], p.destinations[row.dst], blockIdx.x, threadIdx.x,
                   kThreads);
}

template <typename S, typename D>
int launch(const StridedCopyParams& params, void* stream) {
  copy_chunks<S, D><<<static_cast<unsigned>(params.num_chunks), kThreads, 0,
                      static_cast<cudaStream_t>(stream)>>>(params);
  return cudaGetLastError();
}

template <typename S>
int dispatch_dst(const StridedCopyParams& params, void* stream) {
  switch (params.dst_dtype) {
    case DType::f32:
      return launch<S, float>(params, stream);
    case DType::f16:
      return launch<S, f16>(params, stream);
    case DType::bf16:
      return launch<S, bf16>(params, stream);
    default:
      return launch<S, double>(params, stream);
  }
}

}  // namespace

int strided_copy_cuda(const StridedCopyParams& params, void* stream) {
  switch (params.src_dtype) {
    case DType::f32:
      return dispatch_dst<float>(params, stream);
    case DType::f16:
      return dispatch_dst<f16>(params, stream);
    case DType::bf16:
      return dispatch_dst<bf16>(params, stream);
    case DType::f64:
      return dispatch_dst<double>(params, stream);
    case DType::raw1:
      return launch<uint8_t, uint8_t>(params, stream);
    case DType::raw2:
      return launch<uint16_t, uint16_t>(params, stream);
    case DType::raw4:
      return launch<uint32_t, uint32_t>(params, stream);
    case DType::raw8:
      return launch<uint64_t, uint64_t>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace hybridengine
