// The CUDA kernel of strided_copy on the CPU.
#include <vector>

#include "strided_copy_cuda.cu"

using namespace hybridengine;

// table: [rows, 16] of strided_copy, for one source and one destination.
extern "C" int run_on_cpu(const int64_t* table, int64_t num_rows, const char* source,
                          char* destination, int src_dtype, int dst_dtype) {
  std::vector<CopyRow> rows;
  std::vector<int32_t> row_of_chunk;
  for (int64_t i = 0; i < num_rows; ++i, table += 4 + 3 * kCopyDims) {
    CopyRow row{};
    row.src_offset = table[2];
    row.dst_offset = table[3];
    for (int dim = 0; dim < kCopyDims; ++dim) {
      row.size[dim] = table[4 + dim];
      row.src_stride[dim] = table[4 + kCopyDims + dim];
      row.dst_stride[dim] = table[4 + 2 * kCopyDims + dim];
    }
    coalesce(row);
    row.src_align = alignment(row, row.src_stride);
    row.dst_align = alignment(row, row.dst_stride);
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
