// The CUDA kernels of block_quantize on the CPU.
#include <vector>

#include "copy_row_check.h"
#include "quantize_cuda.cu"

using namespace hybridengine;

// table: [rows, 16] of strided_copy, for one source and one destination. Finds the largest
// magnitudes if there are no scales.
extern "C" int run_on_cpu(const int64_t* table, const int64_t* blocks, int64_t num_rows,
                          const char* source, char* destination, int32_t* absmax,
                          const float* scale, int src_dtype, int engine_dtype) {
  std::vector<CopyRow> rows;
  for (int64_t i = 0; i < num_rows; ++i, table += 4 + 3 * kCopyDims) {
    CopyRow row = read_row(table);
    row.block = static_cast<int32_t>(blocks[i]);
    rows.push_back(row);
  }
  QuantizeParams params{};
  params.rows = rows.data();
  params.sources = &source;
  params.destinations = &destination;
  params.num_rows = num_rows;
  params.absmax = absmax;
  params.scale = scale;
  params.src_dtype = static_cast<DType>(src_dtype);
  params.engine_dtype = static_cast<DType>(engine_dtype);
  return scale ? block_quantize_cuda(params, nullptr) : block_absmax_cuda(params, nullptr);
}
