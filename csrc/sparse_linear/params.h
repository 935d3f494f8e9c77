// Logits of chosen vocabulary entries only, and their two gradient products.
//
// Row t of `hidden` has the entries ids[ends[t]] to ids[ends[t + 1] - 1] of the vocabulary. With e
// entries in all, each product reads e rows of the weight and costs 2 e H operations, where the
// dense one costs 2 T V H.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"
#include "common/rows.h"

namespace hybridengine {

struct SparseRows {
  Rows hidden;  // [rows, width]
  Rows weight;  // [vocab, width]
  DType dtype;  // of both
  int64_t rows, width, vocab;
  const int32_t* ids;   // [ends[rows]], counted over the whole vocabulary
  const int32_t* ends;  // [rows + 1]
  int64_t first_id;     // vocab-parallel: the first id of this slice; else 0
  int num_threads;
};

struct SparseLogits : SparseRows {
  float* logits;  // [entries]; 0 for an id of another slice
};

// A gradient of 0 is not multiplied: a masked row may hold NaN.
struct SparseHiddenGrad : SparseRows {
  const float* grad_logits;  // [entries]
  void* hidden_grad;         // [rows, width] contiguous, of `dtype`
};

struct SparseWeightGrad : SparseRows {
  const float* grad_logits;
  const int32_t* entry;  // [entries], sorted by id, equal ids in the order of the rows
  const int64_t* begin;  // [vocab + 1], where the entries of each id begin in `entry`
  void* weight_grad;     // [vocab, width] contiguous
  DType grad_dtype;      // `dtype`, or f32 with `accumulate`
  bool accumulate;       // add to what is there; else every row is written, also with zeros
};

HE_CPU_KERNEL_BF16(sparse_logits_cpu, SparseLogits)
HE_CPU_KERNEL(sparse_hidden_grad_cpu, SparseHiddenGrad)
HE_CPU_KERNEL(sparse_weight_grad_cpu, SparseWeightGrad)

}  // namespace hybridengine
