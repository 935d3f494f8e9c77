// The CUDA kernel of strided_copy on the CPU.
#include <vector>

#include "copy_row_check.h"
#include "strided_copy_cuda.cu"

using namespace hybridengine;

// table: [rows, 16] of strided_copy, for one source and one destination.
extern "C" int run_on_cpu(const int64_t* table, int64_t num_rows, const char* source,
                          char* destination, int src_dtype, int dst_dtype) {
  std::vector<CopyRow> rows;
  std::vector<int32_t> row_of_chunk;
  for (int64_t i = 0; i < num_rows; ++i, table += 4 + 3 * kCopyDims) {
    CopyRow row = read_row(table);
    row.first_chunk = static_cast<int64_t>(row_of_chunk.size());
    const int64_t chunks = (num_elements(row) + kChunkElements - 1) / kChunkElements;
    row_of_chunk.insert(row_of_chunk.end(), chunks, static_cast<int32_t>(i));
    rows.push_back(row);
  }
  StridedCopyParams params{};
  params.rows = rows.data();
  params.sources = &source;
  params.destinations = &destination;
  params.row_of_chunk = row_of_chunk.data();
  params.num_rows = num_rows;
  params.num_chunks = static_cast<int64_t>(row_of_chunk.size());
  params.src_dtype = static_cast<DType>(src_dtype);
  params.dst_dtype = static_cast<DType>(dst_dtype);
  return strided_copy_cuda(params, nullptr);
}
