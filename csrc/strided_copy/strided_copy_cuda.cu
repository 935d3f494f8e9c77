// strided_copy on CUDA: one launch for the table, of as many blocks as run at once. Each goes
// through the chunks in steps; while it copies one, it reads where the next ones are.
#include <cuda_runtime.h>

#include "strided_copy/params.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 2;  // of a multiprocessor, with 64 KiB of loads in flight
constexpr unsigned kFullWarp = 0xFFFFFFFFu;
constexpr int kWords = sizeof(CopyChunk) / 4;

// A chunk over the lanes of a warp, a word each: one load, and a register while it is not used.
HE_HOST_DEVICE uint32_t word_of(const StridedCopyParams& p, uint32_t number) {
  const auto* words = reinterpret_cast<const uint32_t*>(p.chunks + number);
  return number < p.num_chunks ? words[threadIdx.x % kWords] : 0;
}

template <typename T>
__device__ T field(uint32_t word, size_t offset) {
  uint32_t words[(sizeof(T) + 3) / 4];
  HE_UNROLL
  for (uint32_t& value : words) {
    value = __shfl_sync(kFullWarp, word, static_cast<int>(offset / 4 + (&value - words)));
  }
  T read;
  memcpy(&read, words, sizeof(T));
  return read;
}

template <typename S, typename D>
__global__ void __launch_bounds__(kThreads, kBlocks)
    copy_chunks(const __grid_constant__ StridedCopyParams p) {
  uint32_t number = blockIdx.x;
  uint32_t word = word_of(p, number);
  uint32_t next_word = word_of(p, number + gridDim.x);
  const char* source = p.sources[field<int32_t>(word, offsetof(CopyChunk, src))];
  char* destination = p.destinations[field<int32_t>(word, offsetof(CopyChunk, dst))];
  for (; number < p.num_chunks; number += gridDim.x) {
    const uint32_t word_after = word_of(p, number + 2 * gridDim.x);
    const char* next_source = p.sources[field<int32_t>(next_word, offsetof(CopyChunk, src))];
    char* next_destination = p.destinations[field<int32_t>(next_word, offsetof(CopyChunk, dst))];
    const auto chunk = field<CopyChunk>(word, 0);
    copy_chunk(chunk, reinterpret_cast<const S*>(source) + chunk.src_offset,
               reinterpret_cast<D*>(destination) + chunk.dst_offset, threadIdx.x, kThreads);
    word = next_word;
    next_word = word_after;
    source = next_source;
    destination = next_destination;
  }
}

}  // namespace

int strided_copy_cuda(const StridedCopyParams& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  int device = 0, multiprocessors = 0;
  if (const int error = cudaGetDevice(&device)) return error;
  if (const int error =
          cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device))
    return error;
  const int64_t most = int64_t{kBlocks} * multiprocessors;
  const auto blocks = static_cast<unsigned>(params.num_chunks < most ? params.num_chunks : most);
  with_copy_types(params, [&](auto src, auto dst) {
    copy_chunks<decltype(src), decltype(dst)><<<blocks, kThreads, 0, s>>>(params);
  });
  return cudaGetLastError();
}

}  // namespace hybridengine
