// adamw: one update of AdamW for a list of tensors, which also marks the elements whose value in
// the engine's dtype changes.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace hybridengine {

struct AdamwTensor {
  float* param;
  const void* grad;
  float* exp_avg;
  float* exp_avg_sq;
  const float* step;    // number of this update, from 1
  uint32_t* changed;    // mask (changes/change_mask.h) that is added to
  uint64_t* checksums;  // CPU: checksum/params.h before and after; 0 before the call
  int64_t numel;
  int64_t first_chunk;
};

struct AdamwOptions {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  const float* grad_factor;  // gradients are multiplied by it; null: by 1
};

struct AdamwParams {
  const AdamwTensor* tensors;
  int64_t num_tensors;
  int64_t num_chunks;
  AdamwOptions options;
  DType grad_dtype;
  bool marks_changes;
  DType engine_dtype;  // of the values that are compared
  int num_threads;
};

HE_CPU_KERNEL(adamw_cpu, AdamwParams)

int adamw_cuda(const AdamwParams& params, void* stream);  // returns a cudaError_t

}  // namespace hybridengine
