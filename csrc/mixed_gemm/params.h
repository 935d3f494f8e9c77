// out[m, n] (+)= sum_k a[m, k] * b[n, k] + bias[n], from 16-bit operands into float32.
//
// The products are the vendor's (oneDNN's batch-reduce kernel, through `multiply_tile`), which
// accumulates in float32 and never rounds to 16 bits; here are the packing into its layouts, the
// loop over tiles and the threads. A row of `out` is computed in the same order whatever the other
// rows are, and however many: its bits depend on nothing else.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace hybridengine {

constexpr int64_t kTileRows = 32;
constexpr int64_t kTileColumns = 64;
constexpr int64_t kTileDepth = 1024;

// 16-bit element (i, k) is data[i * stride + k * k_stride]; one of the two strides is 1.
struct Operand {
  const uint16_t* data;
  int64_t stride;
  int64_t k_stride;
};

// c [kTileRows, kTileColumns] (+)= a [kTileRows, depth], row stride lda, times b, which holds pairs
// of k side by side: [depth / 2, kTileColumns, 2].
using MultiplyTile = void (*)(int64_t depth, int64_t lda, bool accumulate, const uint16_t* a,
                              const uint16_t* b, float* c);

struct MixedProduct {
  Operand a, b;
  int64_t m, n, k;
  const float* bias;  // [n] or null
  float* out;         // [m, n]
  int64_t out_stride;
  bool accumulate;
  // The smaller operand is packed once, for all threads; the larger one tile by tile.
  bool share_a;
  uint16_t* shared;  // room for packed_elements(m or n, k)
  MultiplyTile multiply_tile;
  void (*release)();  // of what multiply_tile keeps per thread
  int num_threads;
};

inline int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
inline int64_t padded_depth(int64_t k) { return rounded_up(k, 32); }

HE_CPU_KERNEL(mixed_product_cpu, MixedProduct)

}  // namespace hybridengine
