// Transposition of square blocks of 32-bit elements in registers. Included only by *_cpu.cpp files.
#pragma once

#include "common/simd.h"

namespace hybridengine::HYBRIDENGINE_ISA {

// One step of a transposition: swaps the off-diagonal blocks of `half` x `half` elements.
template <int half>
HE_SIMD void swap_blocks(VecU (&rows)[kWidth]) {
  VecU low{}, high{};
  for (int j = 0; j < kWidth; ++j) {
    low[j] = j & half ? kWidth + j - half : j;
    high[j] = j & half ? kWidth + j : j + half;
  }
  for (int i = 0; i < kWidth; ++i) {
    if (i & half) continue;
    const VecU a = rows[i], b = rows[i + half];
    rows[i] = __builtin_shuffle(a, b, low);
    rows[i + half] = __builtin_shuffle(a, b, high);
  }
  if constexpr (2 * half < kWidth) swap_blocks<2 * half>(rows);
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
