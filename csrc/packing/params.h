#pragma once

#include <cstdint>

#include "common/isa.h"

namespace hybridengine::packing {

// Where every token of a padded [batch, seqlen] mask goes in the packed order, and back.
struct LayoutParams {
  const void* mask;         // [batch, seqlen], non-zero keeps the token
  int mask_element_size;    // 1, 4 or 8 bytes (bool / int8, int32, int64)
  int64_t mask_row_stride;  // in elements; the inner stride is 1
  int64_t batch;
  int64_t seqlen;
  int64_t capacity;       // rows of indices and position_ids; tokens beyond it are dropped
  int64_t* counts;        // [batch], kept tokens of every row
  int32_t* cu_seqlens;    // [batch + 1], clamped to capacity
  int64_t* position_ids;  // [capacity], zero past the last token
  int64_t* indices;       // [capacity], row of the flattened padded batch, -1 past the last token
  int64_t* inverse;       // [batch * seqlen], packed row or -1
  int64_t* num_dropped;   // [1], tokens beyond capacity
  int num_threads;
};

// One of the tensors moved by a call; a "row" is what one token owns.
struct RowTensor {
  const char* source;
  char* destination;      // [rows, row_bytes], contiguous
  int64_t source_rows;
  int64_t source_inner;   // rows per outer step of the source: source row r lies at
  int64_t outer_stride;   //   (r / source_inner) * outer_stride + (r % source_inner) * inner_stride bytes
  int64_t inner_stride;
  int64_t row_bytes;
  uint64_t fill;          // bits of one element, for rows whose index is -1
  int element_size;       // 1, 2, 4, 8
  int shift;              // 1: row t takes what belongs to t + 1 of the same sequence (labels)
};

inline constexpr int kMaxTensors = 32;  // per launch; more are moved by further launches

struct MoveParams {
  RowTensor tensors[kMaxTensors];
  int num_tensors;
  int64_t rows;                 // rows of every destination
  const int64_t* index;         // [rows], source row or -1
  const int64_t* position_ids;  // [rows], needed where a tensor is shifted
  int num_threads;
};

HE_CPU_KERNEL(count_cpu, LayoutParams)
HE_CPU_KERNEL(layout_cpu, LayoutParams)
HE_CPU_KERNEL(move_cpu, MoveParams)

#ifdef HYBRIDENGINE_WITH_CUDA
void count_cuda(const LayoutParams& params, void* stream);
void layout_cuda(const LayoutParams& params, void* stream);
void move_cuda(const MoveParams& params, void* stream);
#endif

}  // namespace hybridengine::packing
