// Packing: where the tokens of a padded mask go (layout), and moving rows of many tensors there.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace hybridengine {

struct PackLayoutParams {
  const void* mask;         // [batch, seqlen], non-zero for tokens
  int mask_element_size;    // 1, 4 or 8 bytes (bool / int8, int32, int64)
  int64_t mask_row_stride;  // in elements; the inner stride is 1
  int64_t batch;
  int64_t seqlen;
  int64_t capacity;       // rows of indices and position_ids; tokens beyond it are dropped
  int64_t* counts;        // [batch], tokens of every row
  int64_t* starts;        // [batch + 1], scratch of the CPU kernel
  int32_t* cu_seqlens;    // [batch + 1], clamped to capacity
  int64_t* position_ids;  // [capacity], zero past the last token
  int64_t* indices;       // [capacity], row of the flattened padded batch, -1 past the last token
  int64_t* inverse;       // [batch * seqlen], packed row or -1
  int64_t* num_dropped;   // [1], tokens beyond capacity
  int num_threads;
};

// One of the tensors moved by a call; a row is the data of one token. Source row r is at
// (r / source_inner) * outer_stride + (r % source_inner) * inner_stride bytes.
struct RowTensor {
  const char* source;
  char* destination;  // [rows, row_bytes], contiguous
  int64_t outer_stride;
  int64_t inner_stride;
  int64_t row_bytes;
  uint64_t fill;     // bits of one element, for rows whose index is -1
  int element_size;  // 1, 2, 4, 8
  int shift;         // 1: row t gets the row of t + 1 of the same sequence (labels)
};

inline constexpr int kMaxRowTensors = 32;  // per launch

struct MoveRowsParams {
  RowTensor tensors[kMaxRowTensors];
  int num_tensors;
  int64_t rows;  // of every destination
  int64_t source_rows;
  int64_t source_inner;
  uint64_t inverse_inner;       // CUDA: 2^64 / source_inner, rounded up
  const int64_t* index;         // [rows], source row; -1 fills
  const int64_t* position_ids;  // [rows], needed where a tensor is shifted
  int64_t* bad_index;  // CPU: set to an index outside the source, if any; its row gets the fill
  int num_threads;
};

// Calls body(Element{}) for the integer type of the mask's elements.
template <typename Body>
void with_mask_type(const PackLayoutParams& p, const Body& body) {
  if (p.mask_element_size == 1)
    body(uint8_t{});
  else if (p.mask_element_size == 4)
    body(uint32_t{});
  else
    body(uint64_t{});
}

HE_CPU_KERNEL(pack_count_cpu, PackLayoutParams)
HE_CPU_KERNEL(pack_layout_cpu, PackLayoutParams)
HE_CPU_KERNEL(move_rows_cpu, MoveRowsParams)

// Each returns a cudaError_t.
int pack_count_cuda(const PackLayoutParams& params, void* stream);
int pack_layout_cuda(const PackLayoutParams& params, void* stream);
int move_rows_cuda(const MoveRowsParams& params, void* stream);

}  // namespace hybridengine
