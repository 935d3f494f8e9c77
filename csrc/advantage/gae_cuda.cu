// GAE on CUDA: one block per sequence scans tiles from the end; a tile is a parallel scan of maps.
#include <cuda_runtime.h>

#include "advantage/gae_scan.h"
#include "advantage/params.h"
#include "common/sequence_bounds.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;
constexpr int kTile = kThreads * kPerThread;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

__device__ GaeMap shuffle_up(const GaeMap& map, int offset) {
  GaeMap other;
  other.a = __shfl_up_sync(kFullWarp, map.a, offset);
  other.b = __shfl_up_sync(kFullWarp, map.b, offset);
  other.c = __shfl_up_sync(kFullWarp, map.c, offset);
  other.value = __shfl_up_sync(kFullWarp, map.value, offset);
  other.any = __shfl_up_sync(kFullWarp, map.any, offset);
  return other;
}

// Inclusive scan over a warp; thread 0 holds the rightmost tokens.
__device__ GaeMap warp_scan(GaeMap map) {
  for (int offset = 1; offset < 32; offset *= 2) {
    const GaeMap right = shuffle_up(map, offset);
    if (threadIdx.x % 32 >= offset) map = gae_compose(map, right);
  }
  return map;
}

struct State {
  double value, advantage;
};

__device__ State apply(const GaeMap& map, const State& state) {
  return State{map.any ? map.value : state.value,
               map.a + map.b * state.value + map.c * state.advantage};
}

__device__ GaeMap map_of_token(const GaeParams& p, int64_t t, int64_t begin) {
  if (t < begin || (p.token_mask && !p.token_mask[t])) return gae_identity();
  return gae_token(p.rewards[t], p.values ? p.values[t] : 0, p.gamma, p.lam);
}

__global__ void __launch_bounds__(kThreads) gae_kernel(GaeParams p) {
  __shared__ GaeMap warp_maps[kWarps];
  __shared__ State carried;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t begin = bounded_entry(p.cu_seqlens[blockIdx.x], p.num_tokens);
  const int64_t end = bounded_entry(p.cu_seqlens[blockIdx.x + 1], p.num_tokens);
  if (threadIdx.x == 0) carried = State{0, 0};
  for (int64_t tile_end = end; tile_end > begin; tile_end -= kTile) {
    const int64_t last = tile_end - 1 - threadIdx.x * kPerThread;  // rightmost token of this thread
    GaeMap mine = gae_identity();
    for (int i = 0; i < kPerThread; ++i) mine = gae_compose(map_of_token(p, last - i, begin), mine);
    const GaeMap inclusive = warp_scan(mine);
    GaeMap before = shuffle_up(inclusive, 1);
    if (lane == 0) before = gae_identity();
    if (lane == 31) warp_maps[warp] = inclusive;
    __syncthreads();
    State state = carried;
    for (int w = 0; w < warp; ++w) state = apply(warp_maps[w], state);
    const State after = apply(inclusive, state);  // of the last thread: after the full tile
    state = apply(before, state);
    __syncthreads();
    if (threadIdx.x == kThreads - 1) carried = after;
    for (int i = 0; i < kPerThread; ++i) {
      const int64_t t = last - i;
      if (t < begin) break;
      const GaeMap map = map_of_token(p, t, begin);
      state = apply(map, state);
      p.advantages[t] = map.any ? static_cast<float>(state.advantage) : 0;
      p.returns[t] = map.any ? static_cast<float>(state.advantage + state.value) : 0;
    }
    __syncthreads();
  }
  if (blockIdx.x != p.num_sequences - 1) return;
  for (int64_t t = end + threadIdx.x; t < p.num_tokens; t += kThreads)
    p.advantages[t] = p.returns[t] = 0;
}

}  // namespace

int gae_cuda(const GaeParams& p, void* stream) {
  gae_kernel<<<static_cast<unsigned>(p.num_sequences), kThreads, 0,
               static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

}  // namespace hybridengine
