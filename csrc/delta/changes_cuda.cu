// map_changes and scatter_changes on CUDA: a thread per (row, change) pair.
#include <cuda_runtime.h>

#include "delta/params.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kPairs = 8 * kThreads;  // of a block at a time
constexpr int64_t kMaxBlocks = 1024;      // of a launch that does not know the number of pairs

template <typename Body>
__device__ auto with_indices(const ChangeList& list, const Body& body) {
  if (list.wide) return body(static_cast<const int64_t*>(list.indices));
  return body(static_cast<const int32_t*>(list.indices));
}

__global__ void __launch_bounds__(kThreads)
    find_ranges_kernel(const __grid_constant__ MapChangesParams p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i == 0) p.work[0] = 0;
  if (i >= p.num_rows) return;
  find_range(p, i);
}

// Calls visit(pair, row, position or -1 if the row does not have the element, value).
template <typename Visit>
__device__ void visit_pairs(const MapChangesParams& p, const Visit& visit) {
  __shared__ int64_t rows[2];  // of the first and the last pair of the block
  const int64_t total = p.work[p.num_rows];
  for (int64_t begin = blockIdx.x * kPairs; begin < total; begin += gridDim.x * kPairs) {
    const int64_t end = begin + kPairs < total ? begin + kPairs : total;
    __syncthreads();
    if (threadIdx.x < 2)
      rows[threadIdx.x] = lower_bound(p.work, p.num_rows + 1, threadIdx.x ? end : begin + 1) - 1;
    __syncthreads();
    for (int64_t pair = begin + threadIdx.x; pair < end; pair += kThreads) {
      const int64_t i =
          rows[0] + lower_bound(p.work + rows[0], rows[1] - rows[0] + 1, pair + 1) - 1;
      const ChangeRow& row = p.rows[i];
      const ChangeList& list = p.sources[row.src];
      const int64_t at = p.first[i] + pair - p.work[i];
      const int64_t index =
          with_indices(list, [&](const auto* indices) { return int64_t{indices[at]}; });
      const ChangeRun run = find_run(row, index);
      const int64_t step = row.dst_stride[kChangeDims - 1];
      visit(pair, row, run.dst < 0 ? -1 : run.dst + (index - run.begin) * step, list.values[at]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) map_kernel(const __grid_constant__ MapChangesParams p) {
  visit_pairs(p, [&](int64_t pair, const ChangeRow&, int64_t position, uint16_t value) {
    p.positions[pair] = position;
    p.values[pair] = value;
  });
}

__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const __grid_constant__ MapChangesParams p) {
  visit_pairs(p, [&](int64_t, const ChangeRow& row, int64_t position, uint16_t value) {
    if (position >= 0) p.destinations[row.dst][position] = value;
  });
}

unsigned blocks_of(int64_t size, int64_t of_block, int64_t at_most) {
  const int64_t blocks = (size + of_block - 1) / of_block;
  return static_cast<unsigned>(blocks < at_most ? blocks : at_most);
}

}  // namespace

int find_change_ranges_cuda(const MapChangesParams& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const unsigned blocks = blocks_of(params.num_rows + 1, kThreads, INT32_MAX);
  find_ranges_kernel<<<blocks, kThreads, 0, s>>>(params);
  return cudaGetLastError();
}

int map_changes_cuda(const MapChangesParams& params, int64_t num_pairs, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const unsigned blocks = blocks_of(num_pairs, kPairs, INT32_MAX);
  if (blocks) map_kernel<<<blocks, kThreads, 0, s>>>(params);
  return cudaGetLastError();
}

int scatter_changes_cuda(const MapChangesParams& params, int64_t max_pairs, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const unsigned blocks = blocks_of(max_pairs, kPairs, kMaxBlocks);
  if (blocks) scatter_kernel<<<blocks, kThreads, 0, s>>>(params);
  return cudaGetLastError();
}

}  // namespace hybridengine
