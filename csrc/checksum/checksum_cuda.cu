// bit_checksum on CUDA: one pass, one atomic addition per 32 KiB. Sums of integers modulo 2^64 do
// not depend on their order.
#include <cuda_runtime.h>

#include "checksum/params.h"
#include "common/block_scan.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 8;  // of a thread, in flight together
constexpr int kWords = 4;  // of a load
constexpr int64_t kBlockLoads = int64_t{kThreads} * kLoads;

struct alignas(16) Load {
  uint32_t words[kWords];
};

// The words before the first aligned load, after the last one, and the bytes after the last word.
__device__ uint64_t sum_of_ends(const ChecksumParams& p, int64_t head, int64_t loads) {
  const auto* words = reinterpret_cast<const uint32_t*>(p.data);
  const int64_t num_words = p.num_bytes / 4, tail = head + loads * kWords, i = threadIdx.x;
  uint64_t total = 0;
  if (i < head) total += weighted(i, words[i]);
  if (tail + i < num_words) total += weighted(tail + i, words[tail + i]);
  if (i) return total;
  uint32_t last = 0;
  for (int64_t byte = num_words * 4; byte < p.num_bytes; ++byte)
    last |= static_cast<uint32_t>(static_cast<uint8_t>(p.data[byte])) << (8 * (byte % 4));
  total += weighted(num_words, last);
  return total + kFirstWord * (num_words ? words[0] : last);
}

// head: words before the first load, below kWords. loads: of all blocks.
__global__ void __launch_bounds__(kThreads)
    checksum_kernel(const __grid_constant__ ChecksumParams p, int64_t head, int64_t loads) {
  const auto* from = reinterpret_cast<const Load*>(p.data + 4 * head);
  const int64_t first = blockIdx.x * kBlockLoads + threadIdx.x;
  Load loaded[kLoads];
  HE_UNROLL
  for (int k = 0; k < kLoads; ++k) {
    const int64_t at = first + k * kThreads;
    loaded[k] = at < loads ? from[at] : Load{};
  }
  uint64_t total = blockIdx.x ? 0 : sum_of_ends(p, head, loads);
  HE_UNROLL
  for (int k = 0; k < kLoads; ++k) {
    uint64_t sum = 0, steps = 0;  // of x, and of the index within the load times x
    HE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      sum += loaded[k].words[i];
      steps += static_cast<uint64_t>(i) * loaded[k].words[i];
    }
    total += weighted(head + kWords * (first + k * kThreads), sum) + 2 * steps;
  }
  total = block_sum<kThreads>(total);
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.checksum), total);
}

}  // namespace

int bit_checksum_cuda(const ChecksumParams& params, void* stream) {
  if (!params.num_bytes) return cudaSuccess;
  const auto s = static_cast<cudaStream_t>(stream);
  const int64_t words = params.num_bytes / 4;
  const int64_t before = (kWords - reinterpret_cast<uintptr_t>(params.data) / 4 % kWords) % kWords;
  const int64_t head = before < words ? before : words, loads = (words - head) / kWords;
  const int64_t blocks = (loads + kBlockLoads - 1) / kBlockLoads;
  const auto grid = static_cast<unsigned>(blocks ? blocks : 1);
  checksum_kernel<<<grid, kThreads, 0, s>>>(params, head, loads);
  return cudaGetLastError();
}

}  // namespace hybridengine
