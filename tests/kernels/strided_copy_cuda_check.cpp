// The CUDA kernel of strided_copy on the CPU.
#include <vector>

#include "copy_row_check.h"
#include "strided_copy_cuda.cu"

using namespace hybridengine;

// table: [rows, 16] of strided_copy, for one source and one destination.
extern "C" int run_on_cpu(const int64_t* table, int64_t num_rows, const char* source,
                          char* destination, int src_dtype, int dst_dtype) {
  std::vector<CopyChunk> chunks;
  for (int64_t i = 0; i < num_rows; ++i, table += 4 + 3 * kCopyDims)
    cut_row(read_row(table), [&](const CopyChunk& chunk) { chunks.push_back(chunk); });
  StridedCopyParams params{};
  params.chunks = chunks.data();
  params.sources = &source;
  params.destinations = &destination;
  params.num_chunks = static_cast<int64_t>(chunks.size());
  params.src_dtype = static_cast<DType>(src_dtype);
  params.dst_dtype = static_cast<DType>(dst_dtype);
  return strided_copy_cuda(params, nullptr);
}
