// Sums over the threads of a CUDA block, in their order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/host_device.h"

namespace hybridengine {

// The sum of `value` over lower threads of the block; `total` is set to that over all of them.
template <int threads, typename T>
__device__ T block_offset(T value, T& total) {
  constexpr unsigned kFullWarp = 0xFFFFFFFFu;
  __shared__ T warp_totals[threads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T inclusive = value;
  HE_UNROLL
  for (int offset = 1; offset < 32; offset *= 2) {
    const T lower = __shfl_sync(kFullWarp, inclusive, lane < offset ? lane : lane - offset);
    if (lane >= offset) inclusive += lower;
  }
  __syncthreads();  // the totals of the call before have been read
  if (lane == 31) warp_totals[warp] = inclusive;
  __syncthreads();
  T before = inclusive - value;
  total = 0;
  HE_UNROLL
  for (int w = 0; w < threads / 32; ++w) {
    if (w < warp) before += warp_totals[w];
    total += warp_totals[w];
  }
  return before;
}

// The sum of `value` over the block, in every thread.
template <int threads, typename T>
__device__ T block_sum(T value) {
  T total;
  block_offset<threads>(value, total);
  return total;
}

}  // namespace hybridengine
