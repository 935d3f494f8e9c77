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

}  // namespace

int strided_copy_cuda(const StridedCopyParams& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const auto chunks = static_cast<unsigned>(params.num_chunks);
  with_copy_types(params, [&](auto src, auto dst) {
    copy_chunks<decltype(src), decltype(dst)><<<chunks, kThreads, 0, s>>>(params);
  });
  return cudaGetLastError();
}

}  // namespace hybridengine
