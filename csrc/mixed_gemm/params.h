// out[m, n] (+)= sum_k a[m, k] * b[n, k] + bias[n], from 16-bit operands into float32.
//
// Tiles are multiplied by oneDNN's batch-reduce GEMM (through `multiply_tile`), which accumulates
// in float32 and never rounds to 16 bits. This code packs the operands into its layouts, loops over
// the tiles and distributes them over threads. A row of `out` is summed in a fixed order: its bits
// do not depend on the other rows or on their number.
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

// c [kTileRows, kTileColumns] (+)= a @ b: a is [kTileRows, depth] with row stride lda, b is
// [depth / 2, kTileColumns, 2], that is, two neighbours along k lie side by side.
using MultiplyTile = void (*)(int64_t depth, int64_t lda, bool accumulate, const uint16_t* a,
                              const uint16_t* b, float* c);

struct MixedGemm {
  Operand a, b;
  int64_t m, n, k;
  const float* bias;  // [n] or null
  float* out;         // [m, n]
  int64_t out_stride;
  bool accumulate;
  // The smaller operand is packed once, for all threads; the larger one tile by tile.
  bool share_a;
  uint16_t* shared;  // its packed elements
  MultiplyTile multiply_tile;
  void (*release)();  // frees what multiply_tile allocated for this thread
  int num_threads;
};

inline int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
inline int64_t padded_depth(int64_t k) { return rounded_up(k, 32); }

HE_CPU_KERNEL(mixed_gemm_cpu, MixedGemm)

}  // namespace hybridengine
