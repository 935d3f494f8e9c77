// Group advantages in one launch: each warp compares its rows with all rows. For the tens of
// thousands of responses of an RL step that is tens of microseconds, needs no workspace, takes
// groups in any order, and adds in a fixed order, so results do not vary between runs.
#include <cuda_runtime.h>

#include "advantage/params.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerWarp = 2;
constexpr int kRowsPerBlock = kThreads / 32 * kRowsPerWarp;
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

// All lanes leave with the same totals: the exchange pattern is symmetric.
__device__ GroupStats warp_total(GroupStats group) {
  for (int offset = 16; offset; offset /= 2) {
    group.sum += __shfl_xor_sync(kFullWarp, group.sum, offset);
    group.sum_square += __shfl_xor_sync(kFullWarp, group.sum_square, offset);
    group.length += __shfl_xor_sync(kFullWarp, group.length, offset);
    group.length_sum += __shfl_xor_sync(kFullWarp, group.length_sum, offset);
    group.count += __shfl_xor_sync(kFullWarp, group.count, offset);
    const float best = __shfl_xor_sync(kFullWarp, group.best, offset);
    const float second = __shfl_xor_sync(kFullWarp, group.second, offset);
    const int64_t row = __shfl_xor_sync(kFullWarp, group.best_row, offset);
    if (best > group.best || (best == group.best && row < group.best_row)) {
      group.second = fmaxf(group.best, second);
      group.best = best;
      group.best_row = row;
    } else {
      group.second = fmaxf(group.second, best);
    }
  }
  return group;
}

__global__ void __launch_bounds__(kThreads) group_advantage_kernel(GroupAdvantageParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / 32 * kRowsPerWarp;
  GroupStats groups[kRowsPerWarp];
  int64_t ids[kRowsPerWarp];
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int64_t row = first + i < p.num_rows ? first + i : p.num_rows - 1;
    ids[i] = p.group_ids[row];
    groups[i] = empty_group(p.rewards[row]);
  }
  for (int64_t other = lane; other < p.num_rows; other += 32) {
    const int64_t id = __ldg(p.group_ids + other);
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i)
      if (id == ids[i])
        add_member(groups[i], p.rewards[other], p.lengths ? p.lengths[other] : 0, other);
  }
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int64_t row = first + i;
    if (row >= p.num_rows) return;
    const GroupStats group = warp_total(groups[i]);
    const float advantage = static_cast<float>(advantage_of(p.rewards[row], row, group, p.options));
    if (lane == 0) p.advantages[row] = advantage;
    if (!p.cu_seqlens) continue;
    for (int64_t t = p.cu_seqlens[row] + lane; t < p.cu_seqlens[row + 1]; t += 32)
      p.token_advantages[t] = !p.token_mask || p.token_mask[t] ? advantage : 0;
    if (row != p.num_rows - 1) continue;
    for (int64_t t = p.cu_seqlens[p.num_rows] + lane; t < p.num_tokens; t += 32)
      p.token_advantages[t] = 0;
  }
}

}  // namespace

int group_advantage_cuda(const GroupAdvantageParams& p, void* stream) {
  const auto blocks = static_cast<unsigned>((p.num_rows + kRowsPerBlock - 1) / kRowsPerBlock);
  group_advantage_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

}  // namespace hybridengine
