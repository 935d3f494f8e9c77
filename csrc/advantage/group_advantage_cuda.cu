// Group advantages on CUDA: the passes of group_slots.h with a thread per row, in one block where
// there are few rows and else as one launch each; then a warp per row to copy the result to tokens.
// Linear in the rows, and bitwise deterministic.
#include <cuda_runtime.h>

#include "advantage/params.h"
#include "common/sequence_bounds.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;
constexpr int kBlockThreads = 1024;
constexpr int64_t kMaxBlockRows = 4 * kBlockThreads;

struct Atomics {
  using Word = unsigned long long;
  static __device__ void add(uint64_t* at, uint64_t value) {
    atomicAdd(reinterpret_cast<Word*>(at), static_cast<Word>(value));
  }
  static __device__ void max(uint64_t* at, uint64_t value) {
    atomicMax(reinterpret_cast<Word*>(at), static_cast<Word>(value));
  }
  static __device__ uint64_t swap(uint64_t* at, uint64_t expected, uint64_t desired) {
    return atomicCAS(reinterpret_cast<Word*>(at), static_cast<Word>(expected),
                     static_cast<Word>(desired));
  }
};

__device__ int64_t this_row() { return blockIdx.x * int64_t{kThreads} + threadIdx.x; }

__global__ void __launch_bounds__(kThreads) enter_kernel(GroupRows p, int64_t num_rows) {
  if (this_row() < num_rows) enter_group<Atomics>(p, this_row());
}

__global__ void __launch_bounds__(kThreads) measure_kernel(GroupRows p, int64_t num_rows) {
  if (this_row() < num_rows) measure_row<Atomics>(p, this_row());
}

__global__ void __launch_bounds__(kThreads) add_kernel(GroupRows p, int64_t num_rows) {
  if (this_row() < num_rows) add_row<Atomics>(p, this_row());
}

__global__ void __launch_bounds__(kThreads) finish_kernel(GroupAdvantageParams p) {
  if (this_row() < p.num_rows)
    p.advantages[this_row()] = finished_row(p.rows, this_row(), p.options);
}

// All passes in one block.
__global__ void __launch_bounds__(kBlockThreads) block_kernel(GroupAdvantageParams p) {
  for (int64_t row = threadIdx.x; row < p.num_rows; row += kBlockThreads)
    enter_group<Atomics>(p.rows, row);
  __syncthreads();
  for (int64_t row = threadIdx.x; row < p.num_rows; row += kBlockThreads)
    measure_row<Atomics>(p.rows, row);
  __syncthreads();
  for (int64_t row = threadIdx.x; row < p.num_rows; row += kBlockThreads)
    add_row<Atomics>(p.rows, row);
  __syncthreads();
  for (int64_t row = threadIdx.x; row < p.num_rows; row += kBlockThreads)
    p.advantages[row] = finished_row(p.rows, row, p.options);
}

__global__ void __launch_bounds__(kThreads) spread_kernel(GroupAdvantageParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t row = this_row() / 32;
  if (row >= p.num_rows) return;
  const float advantage = p.advantages[row];
  const int64_t begin = bounded_entry(p.cu_seqlens[row], p.num_tokens);
  const int64_t end = bounded_entry(p.cu_seqlens[row + 1], p.num_tokens);
  for (int64_t t = begin + lane; t < end; t += 32)
    p.token_advantages[t] = !p.token_mask || p.token_mask[t] ? advantage : 0;
  if (row != p.num_rows - 1) return;
  for (int64_t t = end + lane; t < p.num_tokens; t += 32) p.token_advantages[t] = 0;
}

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

}  // namespace

int group_advantage_cuda(const GroupAdvantageParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaMemsetAsync(p.rows.slots, 0, p.rows.table_size * sizeof(GroupSlot), s);
  if (p.num_rows <= kMaxBlockRows) {
    block_kernel<<<1, kBlockThreads, 0, s>>>(p);
  } else {
    const unsigned blocks = blocks_for(p.num_rows);
    enter_kernel<<<blocks, kThreads, 0, s>>>(p.rows, p.num_rows);
    measure_kernel<<<blocks, kThreads, 0, s>>>(p.rows, p.num_rows);
    add_kernel<<<blocks, kThreads, 0, s>>>(p.rows, p.num_rows);
    finish_kernel<<<blocks, kThreads, 0, s>>>(p);
  }
  if (p.cu_seqlens) spread_kernel<<<blocks_for(p.num_rows * 32), kThreads, 0, s>>>(p);
  return cudaGetLastError();
}

}  // namespace hybridengine
