// out[t, n] = sum_k x[t, k] * weight[n, k] + bias[n] for few rows t, from row-major operands as
// they are: nothing is packed.
//
// An element is summed by kWidth lanes (float32), each in ascending order of k, and the lanes are
// joined by a binary tree. The order depends on k and on the instruction set alone. So a row's bits
// depend neither on the other rows nor on the number of threads.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"
#include "common/rows.h"

namespace hybridengine {

struct DecodeLinear {
  Rows x;            // [rows, k]
  Rows weight;       // [n, k]
  const void* bias;  // [n] contiguous or null
  DType dtype;       // of x, weight and bias: f32 or bf16
  void* out;         // [rows, n] contiguous
  DType out_dtype;   // `dtype` or f32
  int64_t rows, n, k;
  int num_threads;
};

HE_CPU_KERNEL_BF16(decode_linear_cpu, DecodeLinear)

}  // namespace hybridengine
