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
  std::vector<CopyChunk> chunks;
  for (int64_t i = 0; i < num_rows; ++i, table += 4 + 3 * kCopyDims) {
    CopyRow row = read_row(table);
    row.block = static_cast<int32_t>(blocks[i]);
    cut_row(row, [&](const CopyChunk& chunk) { chunks.push_back(chunk); });
  }
  QuantizeParams params{};
  params.chunks = chunks.data();
  params.sources = &source;
  params.destinations = &destination;
  params.num_chunks = static_cast<int64_t>(chunks.size());
  params.absmax = absmax;
  params.scale = scale;
  params.src_dtype = static_cast<DType>(src_dtype);
  params.engine_dtype = static_cast<DType>(engine_dtype);
  return scale ? block_quantize_cuda(params, nullptr) : block_absmax_cuda(params, nullptr);
}

extern "C" int quantize_on_cpu(const char* weight, int64_t matrices, int64_t rows, int64_t columns,
                               uint8_t* quantized, float* scale, int dtype) {
  return quantize_matrices_cuda(
      {weight, quantized, scale, matrices, rows, columns, static_cast<DType>(dtype), 1}, nullptr);
}
