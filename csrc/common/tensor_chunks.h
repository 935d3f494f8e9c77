// Chunks of many tensors, in order: the unit of work of kernels that run over lists of tensors.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace hybridengine {

// Elements of a chunk, which one CUDA block or one step of a CPU thread processes. A tensor begins
// a chunk; its last one is shorter.
constexpr int64_t kTensorChunk = 16384;

HE_HOST_DEVICE int64_t num_chunks_of(int64_t numel) {
  return (numel + kTensorChunk - 1) / kTensorChunk;
}

// The elements [begin, end) of one tensor of a list.
struct TensorChunk {
  int64_t tensor;
  int64_t begin;
  int64_t end;
};

// The last of `count` entries, whose fields `first_chunk` ascend, with first_chunk <= chunk.
template <typename Entry>
HE_HOST_DEVICE int64_t last_begun(const Entry* entries, int64_t count, int64_t chunk) {
  int64_t low = 0;
  int64_t high = count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (entries[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Chunk number `chunk` of a list of tensors with fields `first_chunk`, ascending, and `numel`: in
// the last tensor with first_chunk <= chunk. (A tensor without elements has the first chunk of its
// successor.)
template <typename Entry>
HE_HOST_DEVICE TensorChunk locate_chunk(const Entry* tensors, int64_t num_tensors, int64_t chunk) {
  const int64_t tensor = last_begun(tensors, num_tensors, chunk);
  const int64_t begin = (chunk - tensors[tensor].first_chunk) * kTensorChunk;
  const int64_t numel = tensors[tensor].numel;
  return {tensor, begin, begin + kTensorChunk < numel ? begin + kTensorChunk : numel};
}

}  // namespace hybridengine
