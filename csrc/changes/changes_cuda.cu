// count_changed and take_changed on CUDA: a block per chunk. The table of tensors is an argument of
// the launch, so nothing is uploaded.
#include <cuda_runtime.h>

#include "changes/params.h"
#include "common/block_scan.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;
constexpr int kWords = kWordsPerChunk / kThreads;  // of a thread, adjacent
constexpr int kMaxTensors = 100;                   // of a launch, whose arguments have 4 KiB

struct ChangesLaunch {
  ChangedTensor tensors[kMaxTensors];
  int32_t num_tensors;
  int32_t* counts;      // those of the first chunk of the launch, and the next ones
  const int64_t* ends;  // of all chunks
  int64_t first_chunk;  // of the launch
  void* indices;
  uint16_t* values;
};
static_assert(sizeof(ChangesLaunch) <= 4096);

// The mask words of one thread, and the elements of its first word; 0 past the end of the tensor.
struct Words {
  uint32_t bits[kWords];
  int64_t first;
  int count;
};

__device__ Words load_words(const ChangedTensor& tensor, const TensorChunk& in) {
  Words words;
  words.first = in.begin + int64_t{threadIdx.x} * kWords * kMaskBits;
  words.count = 0;
  HE_UNROLL
  for (int w = 0; w < kWords; ++w) {
    const int64_t i = words.first + w * kMaskBits;
    words.bits[w] = i < in.end ? bits_before_end(tensor.mask[i / kMaskBits], in.end - i) : 0;
    words.count += num_set_bits(words.bits[w]);
  }
  return words;
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ ChangesLaunch launch) {
  const TensorChunk in = locate_chunk(launch.tensors, launch.num_tensors, blockIdx.x);
  const int total = block_sum<kThreads>(load_words(launch.tensors[in.tensor], in).count);
  if (threadIdx.x == 0) launch.counts[blockIdx.x] = total;
}

template <typename Index>
__global__ void __launch_bounds__(kThreads)
    take_kernel(const __grid_constant__ ChangesLaunch launch) {
  const TensorChunk in = locate_chunk(launch.tensors, launch.num_tensors, blockIdx.x);
  const ChangedTensor& tensor = launch.tensors[in.tensor];
  const Words words = load_words(tensor, in);
  int total;
  const int64_t chunk = launch.first_chunk + blockIdx.x;
  int64_t at = (chunk ? launch.ends[chunk - 1] : 0) + block_offset<kThreads>(words.count, total);
  HE_UNROLL
  for (int w = 0; w < kWords; ++w) {
    if (!words.bits[w]) continue;
    const int64_t first = words.first + w * kMaskBits;
    take_word(words.bits[w], first, tensor.source, at, static_cast<Index*>(launch.indices),
              launch.values);
    at += num_set_bits(words.bits[w]);
    tensor.mask[first / kMaskBits] = 0;
  }
}

// Calls body(table, chunks) for every launch.
template <typename Body>
int for_each_launch(const ChangesParams& params, const Body& body) {
  for (int64_t first = 0; first < params.num_tensors; first += kMaxTensors) {
    ChangesLaunch table;
    const int64_t left = params.num_tensors - first;
    table.num_tensors = static_cast<int32_t>(left < kMaxTensors ? left : kMaxTensors);
    table.first_chunk = params.tensors[first].first_chunk;
    table.counts = params.counts + table.first_chunk;
    table.ends = params.ends;
    table.indices = params.indices;
    table.values = params.values;
    for (int32_t i = 0; i < table.num_tensors; ++i) {
      table.tensors[i] = params.tensors[first + i];
      table.tensors[i].first_chunk -= table.first_chunk;
    }
    const int64_t end =
        left > kMaxTensors ? params.tensors[first + kMaxTensors].first_chunk : params.num_chunks;
    if (end == table.first_chunk) continue;
    body(table, static_cast<unsigned>(end - table.first_chunk));
    if (const int error = cudaGetLastError()) return error;
  }
  return cudaSuccess;
}

}  // namespace

int count_changed_cuda(const ChangesParams& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return for_each_launch(params, [&](const ChangesLaunch& table, unsigned chunks) {
    count_kernel<<<chunks, kThreads, 0, s>>>(table);
  });
}

int take_changed_cuda(const ChangesParams& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return for_each_launch(params, [&](const ChangesLaunch& table, unsigned chunks) {
    if (params.wide_indices) {
      take_kernel<int64_t><<<chunks, kThreads, 0, s>>>(table);
    } else {
      take_kernel<int32_t><<<chunks, kThreads, 0, s>>>(table);
    }
  });
}

}  // namespace hybridengine
